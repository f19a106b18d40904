"""Keys and bit masks: what the selection kernels share. Plain arithmetic, so that the interpreter runs it."""

import triton
import triton.language as tl


@triton.jit
def key_of(values):
    """Magnitude as an integer: a total order, exact for denormals, NaN above infinity."""
    return values.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def threshold_key(threshold_ptr, IS_KEY: tl.constexpr):
    """The key to reach, from a key (int32) or a threshold (fp32) in memory: zeros never, NaN only by NaN."""
    if IS_KEY:
        key = tl.maximum(tl.load(threshold_ptr), 1)
    else:
        threshold = tl.load(threshold_ptr)
        key = tl.where(threshold > 0, threshold.to(tl.int32, bitcast=True), 1)
        key = tl.where(threshold != threshold, 0x7FFFFFFF, key)
    return key


@triton.jit
def pack_words(chosen, TILE: tl.constexpr):
    """``[TILE]`` booleans into ``[TILE / 32]`` words: element j of a row becomes bit j; the sum is an or."""
    rows = tl.reshape(chosen.to(tl.int32), (TILE // 32, 32))
    return tl.sum(rows << tl.arange(0, 32)[None, :], axis=1)


@triton.jit
def bits_in(words):
    """How many bits of each word are set."""
    words = words - ((words >> 1) & 0x55555555)
    words = (words & 0x33333333) + ((words >> 2) & 0x33333333)
    words = (words + (words >> 4)) & 0x0F0F0F0F
    return (words * 0x01010101) >> 24


@triton.jit
def lowest_bit(words):
    """Position of the lowest set bit of each word (not 0): isolated, then read off a float's exponent."""
    return (((words & (0 - words)).to(tl.float32).to(tl.int32, bitcast=True) >> 23) & 0xFF) - 127
