"""Numbers of examples that follow the profile of hypothesis (see conftest.py)."""

from __future__ import annotations

from hypothesis import settings


def deep() -> bool:
    """Whether this run leaves nothing out."""
    return settings.default.max_examples > 100


def examples(number: int) -> settings:
    """``number`` examples on every commit, and in proportion in a deep run."""
    return settings(max_examples=max(1, number * settings.default.max_examples // 100))
