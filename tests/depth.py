"""Numbers of examples that follow the profile of hypothesis (see conftest.py)."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TypeVar

from hypothesis import settings

from prepared_launcher import PreparedLauncher, forked_python, prepared

Setting = TypeVar("Setting")

# Read here: inside of a test the default settings are those of the test.
_CASES = settings.default.max_examples
DEEP = _CASES > 100
# Processes are forked from one that has imported what they need. A deep run starts real interpreters, and so does a
# platform other than Linux.
_FORKS = not DEEP and sys.platform == "linux"
_TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]


def launcher(*modules: str) -> PreparedLauncher:
    """Return what runs scripts, in processes that have imported ``modules``, if these are installed."""
    return prepared(*modules) if _FORKS else PreparedLauncher([sys.executable], _TORCHRUN)


def python() -> list[str]:
    """Return the command ``python``."""
    return forked_python() if _FORKS else [sys.executable]


def interpreter(folder: Path) -> str:
    """Write the command ``python`` as one file into ``folder``, as ``sys.executable`` is one, and return its name."""
    file = folder / "python"
    file.write_text(f'#!/bin/sh\nexec {shlex.join(python())} "$@"\n')
    file.chmod(0o755)
    return str(file)


def torchrun() -> list[str]:
    """Return the command ``torchrun``."""
    return [*python(), str(Path(__file__).with_name("forking_torchrun.py"))] if _FORKS else _TORCHRUN


def examples(number: int) -> settings:
    """Return settings for ``number`` examples on every commit, and in proportion in a deep run."""
    return settings(max_examples=max(1, number * _CASES // 100))


def trials(number: Setting, deep: Setting) -> Setting:
    """Return ``number``, or the like, on every commit, and ``deep`` in a deep run."""
    return deep if DEEP else number
