"""Numbers of hypothesis examples, which depend on the active profile (see conftest.py)."""

from __future__ import annotations

from hypothesis import settings


def deep() -> bool:
    """Whether the profile ``deep`` is active."""
    return settings.default.max_examples > 100


def examples(number: int) -> settings:
    """Return settings with ``number`` examples in the default profile, and more in the profile ``deep``."""
    return settings(max_examples=max(1, number * settings.default.max_examples // 100))
