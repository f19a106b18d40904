"""Block floating point: signed integers of 8 or 4 bits, and one power of two as the scale of each block.

A row of ``n`` values is a message of ``words(n, bits)`` int32 words, little-endian. First come the integers, in bytes
or half bytes, the first one in the lowest bits. Then comes one byte for each block of ``BLOCK`` values: the exponent of
its scale plus 149, or 255 for a block that is not finite. Unused bits are 0. Integers are symmetric: 8 bits hold
integers from -127 to 127, and 4 bits from -7 to 7.

``value - decoded`` is exact in fp32. The scale is chosen so that the largest magnitude of a block is at least half of
the range of integers. Rounding is to nearest, ties to even.
"""

from __future__ import annotations

import torch

BLOCK = 256
_BIAS = 149  # the least scale is the least fp32 number, 2**-149
_NOT_FINITE = 255
_MANTISSA, _EXPONENT, _FP64_BIAS = 52, 0x7FF, 1023  # of an fp64 number


def words(length: int, bits: int) -> int:
    """Return the number of int32 words for ``length`` values of ``bits`` (8 or 4) bits."""
    return _value_words(length, bits) - (-_blocks(length) // 4)


def encode(values: torch.Tensor, bits: int) -> torch.Tensor:
    """Return the messages (int32 ``[rows, words]``) of ``values`` (fp32 or fp64 ``[rows, n]``, n at least 1).

    A block with NaN or Inf is marked as not finite. So is one whose scale would exceed the last code: a magnitude of
    2**112 or more, or 2**108 with 4 bits. Sums over ranks of what remains cannot overflow.
    """
    rows, length = values.shape
    blocks = _padded(values.double(), _blocks(length) * _width(length)).view(rows, -1, _width(length))
    exponent = _exponent(blocks.abs().amax(2)) - (bits - 2)
    codes = (exponent + _BIAS).clamp(0, _NOT_FINITE)
    top = (1 << (bits - 1)) - 1
    scaled = blocks * _power(_BIAS - codes)[:, :, None]
    integers = scaled.round().nan_to_num_(0.0).clamp_(-top, top).to(torch.int8).view(rows, -1)[:, :length]
    packed = _padded(_packed(integers, bits), 4 * _value_words(length, bits))
    scales = _padded(codes.to(torch.uint8).view(torch.int8), -4 * (-_blocks(length) // 4))
    return torch.cat([packed, scales], dim=1).view(torch.int32)


def decode(messages: torch.Tensor, length: int, bits: int) -> torch.Tensor:
    """Return the values (fp64 ``[rows, length]``) of ``messages`` (int32 ``[rows, words]``). They are exact in fp32.

    A block that is marked as not finite becomes NaN. Any other words are valid, so a corrupt message cannot do harm.
    """
    data = messages.contiguous().view(torch.int8)
    held = 4 * _value_words(length, bits)
    integers = _unpacked(data[:, :held], bits)[:, :length]
    codes = data[:, held : held + _blocks(length)].to(torch.int64) & _NOT_FINITE
    scales = torch.where(codes == _NOT_FINITE, torch.nan, _power(codes - _BIAS))
    return integers * scales.repeat_interleave(_width(length), dim=1)[:, :length]


def _blocks(length: int) -> int:
    return -(-length // BLOCK)


def _width(length: int) -> int:
    """Return the number of values per block. A single block need not be padded."""
    return min(length, BLOCK)


def _value_words(length: int, bits: int) -> int:
    return -(-length * bits // 32)


def _exponent(magnitudes: torch.Tensor) -> torch.Tensor:
    """Return floor(log2) of ``magnitudes`` (fp64, no denormals), far below any other for 0, far above for NaN."""
    return (magnitudes.view(torch.int64) >> _MANTISSA & _EXPONENT) - _FP64_BIAS


def _power(exponents: torch.Tensor) -> torch.Tensor:
    """Return 2 to the power of ``exponents`` (int64) as fp64. It is exact."""
    return (exponents + _FP64_BIAS << _MANTISSA).view(torch.float64)


def _packed(integers: torch.Tensor, bits: int) -> torch.Tensor:
    """Return the bytes (int8) of ``integers`` (int8)."""
    if bits == 8:  # noqa: PLR2004 - a byte
        return integers
    pairs = _padded(integers, integers.shape[1] + integers.shape[1] % 2)
    return pairs[:, ::2] & 15 | pairs[:, 1::2] << 4


def _unpacked(data: torch.Tensor, bits: int) -> torch.Tensor:
    """Return the integers (int8) of ``data`` (int8)."""
    if bits == 8:  # noqa: PLR2004 - a byte
        return data
    return torch.stack([(data & 15 ^ 8) - 8, data >> 4], dim=2).flatten(1)


def _padded(values: torch.Tensor, width: int) -> torch.Tensor:
    """Return ``values`` (``[rows, n]``) with zeros up to ``width`` columns."""
    missing = width - values.shape[1]
    return torch.nn.functional.pad(values, (0, missing)) if missing else values
