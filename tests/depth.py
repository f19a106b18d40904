"""Numbers of examples that follow the profile of hypothesis (see conftest.py)."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TypeVar

from hypothesis import settings

Setting = TypeVar("Setting")

# Read here: inside of a test the default settings are those of the test.
_CASES = settings.default.max_examples
DEEP = _CASES > 100
# The command torchrun. A deep run starts the real one, and so does a platform other than Linux.
_FORKS = not DEEP and sys.platform == "linux"
TORCHRUN = [
    sys.executable,
    *([str(Path(__file__).with_name("forking_torchrun.py"))] if _FORKS else ["-m", "torch.distributed.run"]),
]


def examples(number: int) -> settings:
    """Return settings for ``number`` examples on every commit, and in proportion in a deep run."""
    return settings(max_examples=max(1, number * _CASES // 100))


def trials(number: Setting, deep: Setting) -> Setting:
    """Return ``number``, or the like, on every commit, and ``deep`` in a deep run."""
    return deep if DEEP else number
