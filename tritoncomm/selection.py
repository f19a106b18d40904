"""How large is "large": how many entries to keep, and thresholds that follow a drifting distribution."""

from __future__ import annotations

import math

# A reused threshold never moves by more than this factor in one step, however wrong it was.
MAX_CORRECTION = 2.0


def entries_to_keep(numel: int, density: float) -> int:
    """K = floor(numel x density), at least 1 (0 only for an empty vector) and at most ``numel``."""
    return min(numel, max(1, int(numel * density)))


def corrected_threshold(threshold: float, count: int, wanted: int, numel: int) -> float:
    """The threshold for the next step after ``threshold`` let ``count`` of ``numel`` entries pass.

    Magnitudes of gradients have roughly exponential tails, count = numel x exp(-t / scale), so the
    threshold for ``wanted`` entries is t x log(numel / wanted) / log(numel / count). The correction
    is limited to a factor :data:`MAX_CORRECTION` either way.
    """
    have = math.log(numel / max(0.5, min(count, numel)))
    want = math.log(numel / wanted)
    if have * MAX_CORRECTION <= want:
        return threshold * MAX_CORRECTION
    return threshold * min(MAX_CORRECTION, max(1 / MAX_CORRECTION, want / have))
