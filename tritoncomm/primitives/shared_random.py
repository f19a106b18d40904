"""Random numbers that are equal on all ranks, without a generator state.

Each draw is a hash of (seed, step, unit, lane). A rank that skipped a step or resumed from a checkpoint still agrees
with the others. The finalizer is that of SplitMix64 (G. Steele, D. Lea, C. Flood, "Fast Splittable Pseudorandom Number
Generators", OOPSLA 2014).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

_GOLDEN = 0x9E3779B97F4A7C15
_FACTORS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_WORD = (1 << 64) - 1

Words = npt.NDArray[np.uint64]


def draw(seed: int, step: int, unit: int = 0, lane: int = 0) -> int:
    """Return 64 random bits.

    ``unit`` is the number of the vector. ``lane`` is the number of the draw for this vector in this ``step``.
    """
    bits: int = _mix((seed + _GOLDEN) & _WORD)
    for part in (step, unit, lane):
        bits = _mix((bits + part * _GOLDEN + _GOLDEN) & _WORD)
    return bits


def draws(seed: int, step: int, unit: int, lanes: int) -> Words:
    """Return :func:`draw` for lanes 0 to ``lanes - 1``, as uint64 ``[lanes]``."""
    bits = _mix((seed + _GOLDEN) & _WORD)
    for part in (step, unit):
        bits = _mix((bits + part * _GOLDEN + _GOLDEN) & _WORD)
    with np.errstate(over="ignore"):
        words: Words = _mix(np.uint64(bits) + np.arange(1, lanes + 1, dtype=np.uint64) * np.uint64(_GOLDEN))
    return words


def below(bits: int, bound: int) -> int:
    """Map 64 random bits to a number in ``[0, bound)``: the high 64 bits of the product.

    The modulo bias is negligible.
    """
    return (bits * bound) >> 64


def _mix(z: Any) -> Any:
    """Apply the finalizer of SplitMix64 to an int, or to uint64 numbers."""
    z = z ^ z >> 30
    z = z * _FACTORS[0] & _WORD
    z = z ^ z >> 27
    z = z * _FACTORS[1] & _WORD
    return z ^ z >> 31
