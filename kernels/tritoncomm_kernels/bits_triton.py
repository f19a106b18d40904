# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators, allow-incomplete-defs
"""Keys and bit masks for the selection kernels. They use plain arithmetic, which Triton's interpreter supports."""

import triton
import triton.language as tl


@triton.jit
def key_of(values):
    """Return magnitudes as integer keys: a total order, exact for denormals, with NaN above infinity."""
    return values.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def pack_words(chosen, TILE: tl.constexpr):
    """Pack ``[TILE]`` booleans into ``[TILE / 32]`` words. Element j of a row becomes bit j, so the sum is an or."""
    rows = tl.reshape(chosen.to(tl.int32), (TILE // 32, 32))
    return tl.sum(rows << tl.arange(0, 32)[None, :], axis=1)


@triton.jit
def bits_in(words):
    """Return the number of set bits of each word."""
    words = words - ((words >> 1) & 0x55555555)
    words = (words & 0x33333333) + ((words >> 2) & 0x33333333)
    words = (words + (words >> 4)) & 0x0F0F0F0F
    return (words * 0x01010101) >> 24


@triton.jit
def lowest_bit(words):
    """Return the position of the lowest set bit of each word (not 0), read from the exponent of a float."""
    return (((words & (0 - words)).to(tl.float32).to(tl.int32, bitcast=True) >> 23) & 0xFF) - 127


@triton.jit
def divided(values, divisor_ptr, at, inside):
    """Return ``values`` divided by powers of two, those of ``divisor`` at ``at``. The divisor may be None.

    A division takes 20 instructions. A product with the reciprocal, whose exponent is the negative one, is as exact.
    """
    if divisor_ptr is not None:
        other = None if inside is None else 1.0
        exponents = tl.load(divisor_ptr + at, mask=inside, other=other).to(tl.int32, bitcast=True)
        values = values * (0x7F000000 - exponents).to(tl.float32, bitcast=True)
    return values
