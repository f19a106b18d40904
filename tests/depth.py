"""Numbers of examples that follow the profile of hypothesis (see conftest.py)."""

from __future__ import annotations

from hypothesis import settings

# Read here: inside of a test the default settings are those of the test.
_CASES = settings.default.max_examples
DEEP = _CASES > 100


def examples(number: int) -> settings:
    """Return settings for ``number`` examples on every commit, and in proportion in a deep run."""
    return settings(max_examples=max(1, number * _CASES // 100))


def trials(number: int, deep: int) -> int:
    """Return ``number`` on every commit, and ``deep`` in a deep run."""
    return deep if DEEP else number
