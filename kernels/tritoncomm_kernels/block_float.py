"""Block floating point: signed integers of 8 or 4 bits, and one power of two as the scale of each block.

A row of ``n`` values is a message of ``words(n, bits)`` int32 words, little-endian. First come the integers, in bytes
or half bytes, the first one in the lowest bits. Then comes one byte for each block of ``BLOCK`` values: the exponent of
its scale plus 149, or 255 for a block that is not finite. Unused bits are 0. Integers are symmetric: 8 bits hold
integers from -127 to 127, and 4 bits from -7 to 7.

``value - decoded`` is exact in fp32. The scale is chosen so that the largest magnitude of a block is at least half of
the range of integers. Rounding is to nearest, ties to even.

``quantize_parts``, ``quantize_mean`` and ``dequantize_parts`` are the three steps of a mean over ranks. On a GPU each
is one kernel, and none waits for the host.
"""

from __future__ import annotations

import torch

from tritoncomm_kernels.checks import check_vector
from tritoncomm_kernels.dispatch import kernel, triton_runs

BLOCK = 256
BIAS = 149  # the least scale is the least fp32 number, 2**-149
NOT_FINITE = 255
WIDTHS = (8, 4)
_MANTISSA, _EXPONENT, _FP64_BIAS = 52, 0x7FF, 1023  # of an fp64 number
_FP32_POWER = 2.0**126  # the largest power of two with a reciprocal that is normal in fp32
_CHUNK = 1 << 16  # values that are worked on at a time on a CPU


def words(length: int, bits: int) -> int:
    """Return the number of int32 words for ``length`` values of ``bits`` (8 or 4) bits."""
    return value_words(length, bits) - (-_blocks(length) // 4)


def value_words(length: int, bits: int) -> int:
    """Return the number of those words that hold integers."""
    return -(-length * bits // 32)


def quantize_parts(values: torch.Tensor, parts: int, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the messages of equal parts of ``values`` (fp32 ``[m]``, m at least 1), and what they leave out.

    The messages (int32 ``[parts, words]``) have ``ceil(m / parts)`` values each, zeros behind the last one. The
    remainder (fp32 ``[m]``) is exact. It is NaN where a block is not finite. Raises ``ValueError`` for another dtype or
    shape, no values, and widths other than 8 and 4.
    """
    check_vector("values", values)
    _check(values.numel(), bits)
    length = -(-values.numel() // parts)
    if triton_runs(values):
        messages = values.new_empty((parts, words(length, bits)), dtype=torch.int32)
        left = torch.empty_like(values)
        kernel("block_float_triton").quantize_parts(values, messages, left, length, bits)
        return messages, left
    rows = _rows(values, parts)
    messages, sent = encode(rows, bits)
    return messages, torch.sub(rows, sent, out=sent).view(-1)[: values.numel()]


def quantize_mean(
    messages: torch.Tensor, values: torch.Tensor, left: torch.Tensor, part: int, bits: int
) -> torch.Tensor:
    """Return the message with the mean of one part (int32 ``[words]``), and write what it leaves out to ``left``.

    ``messages`` (int32 ``[parts, words]``) are those of this part from all ranks. In place of the one of number
    ``part``, the same part of this rank's ``values`` (fp32 ``[m]``) is added, which is not quantized. Messages are
    added in order, from 0 on, in fp64. ``left`` (fp32 ``[m]``) receives the sum minus the decoded mean times ``parts``,
    rounded once.
    """
    parts = len(messages)
    check_vector("values", values)
    check_vector("left", left, numel=values.numel(), like=values)
    _check(values.numel(), bits)
    length = -(-values.numel() // parts)
    if triton_runs(values):
        block = messages.new_empty(messages.shape[1])
        kernel("block_float_triton").quantize_mean(messages.contiguous(), values, left, block, part, length, bits)
        return block
    own, rest = (each[part * length : (part + 1) * length] for each in (values, left))
    block = _empty_messages(1, length, bits, values.device)
    for columns in _chunks(length, parts):
        received = decode(messages, length, bits, columns)
        received[part] = 0.0
        received[part, : own[columns].numel()] = own[columns]
        total = received.new_zeros(received.shape[1], dtype=torch.float64)
        for row in received:
            total += row
        sent = _write((total / parts)[None], block, columns, length, bits)
        rest[columns].copy_((total - parts * sent[0])[: rest[columns].numel()])
    return block.view(torch.int32)[0]


def dequantize_parts(messages: torch.Tensor, numel: int, bits: int) -> torch.Tensor:
    """Return the values (fp32 ``[numel]``) of ``messages`` (int32 ``[parts, words]``).

    A block that is marked as not finite becomes NaN. Any other words are valid, so a corrupt message cannot do harm.
    """
    _check(numel, bits)
    length = -(-numel // len(messages))
    if triton_runs(messages):
        values = messages.new_empty(numel, dtype=torch.float32)
        kernel("block_float_triton").dequantize_parts(messages.contiguous(), values, length, bits)
        return values
    values = messages.new_empty((len(messages), length), dtype=torch.float32)
    for columns in _chunks(length, len(messages)):
        values[:, columns] = decode(messages, length, bits, columns)
    return values.view(-1)[:numel]


def encode(values: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the messages (int32 ``[rows, words]``) of ``values``, and the values that :func:`decode` returns for them.

    ``values`` is fp32 or fp64 ``[rows, n]``, with n at least 1. What is returned has the same dtype and shape.
    A block with NaN or Inf is marked as not finite. So is one whose scale would exceed the last code: a magnitude of
    2**112 or more, or 2**108 with 4 bits. Sums over ranks of what remains cannot overflow.
    """
    rows, length = values.shape
    data, sent = _empty_messages(rows, length, bits, values.device), torch.empty_like(values)
    for columns in _chunks(length, rows):
        sent[:, columns] = _write(values[:, columns], data, columns, length, bits)
    return data.view(torch.int32), sent


def _empty_messages(rows: int, length: int, bits: int, device: torch.device) -> torch.Tensor:
    """Return the bytes of messages with zeros, int8 ``[rows, bytes]``."""
    return torch.zeros((rows, 4 * words(length, bits)), dtype=torch.int8, device=device)


def _write(values: torch.Tensor, data: torch.Tensor, columns: slice, length: int, bits: int) -> torch.Tensor:
    """Write ``values``, those ``columns`` of ``length``, into the messages ``data``. Return what will be decoded."""
    integers, codes = _quantized(values, bits)
    sent = integers.to(values.dtype) * _scales(codes).to(values.dtype)[:, :, None]
    packed = _packed(integers.flatten(1)[:, : values.shape[1]], bits)
    first, block = columns.start * bits // 8, 4 * value_words(length, bits) + columns.start // BLOCK
    data[:, first : first + packed.shape[1]] = packed
    data[:, block : block + codes.shape[1]] = codes.to(torch.uint8).view(torch.int8)
    return sent.flatten(1)[:, : values.shape[1]]


def _quantized(values: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the integers (int8 ``[rows, blocks, width]``) of ``values``, and the codes of scales (``[rows, blocks]``).

    Scaling by a power of two is as exact in fp32 as in fp64 if the scale and its reciprocal are normal numbers of fp32.
    """
    rows, length = values.shape
    blocks = _padded(values, _blocks(length) * _width(length)).reshape(rows, -1, _width(length))
    largest = blocks.abs().amax(2)
    codes = (_exponent(largest.double()) - (bits - 2) + BIAS).clamp_(0, NOT_FINITE)
    powers = torch.where(largest == 0, 1.0, _power(BIAS - codes))
    if values.dtype != torch.float32 or bool((powers > _FP32_POWER).any()):
        blocks = blocks.double()
    top = (1 << (bits - 1)) - 1
    scaled = (blocks * powers.to(blocks.dtype)[:, :, None]).round_()
    if bool((codes == NOT_FINITE).any()):
        scaled.nan_to_num_(0.0)
    return scaled.clamp_(-top, top).to(torch.int8), codes


def decode(messages: torch.Tensor, length: int, bits: int, columns: slice | None = None) -> torch.Tensor:
    """Return the values (fp32 ``[rows, length]``) of ``messages`` (int32 ``[rows, words]``).

    With ``columns``, whose bounds are multiples of ``BLOCK`` or the end, return these columns only. A block that is
    marked as not finite becomes NaN. Any other words are valid, so a corrupt message cannot do harm.
    """
    start, stop = (0, length) if columns is None else (columns.start, columns.stop)
    data, held = messages.contiguous().view(torch.int8), 4 * value_words(length, bits)
    integers = _unpacked(data[:, start * bits // 8 : -(-stop * bits // 8)], bits)
    codes = data[:, held + start // BLOCK : held - (-stop // BLOCK)].to(torch.int64) & NOT_FINITE
    width = _width(length)
    blocks = _padded(integers[:, : stop - start].float(), codes.shape[1] * width).view(len(data), -1, width)
    return (blocks * _scales(codes).float()[:, :, None]).flatten(1)[:, : stop - start]


def _chunks(length: int, rows: int) -> list[slice]:
    """Return consecutive parts of ``length`` columns, of whole blocks. Those of all ``rows`` fit into a cache."""
    width = max(1, _CHUNK // (rows * BLOCK)) * BLOCK
    return [slice(start, min(length, start + width)) for start in range(0, length, width)]


def _blocks(length: int) -> int:
    return -(-length // BLOCK)


def _width(length: int) -> int:
    """Return the number of values per block. A single block need not be padded."""
    return min(length, BLOCK)


def _exponent(magnitudes: torch.Tensor) -> torch.Tensor:
    """Return floor(log2) of ``magnitudes`` (fp64, no denormals), far below any other for 0, far above for NaN."""
    return (magnitudes.view(torch.int64) >> _MANTISSA & _EXPONENT) - _FP64_BIAS


def _power(exponents: torch.Tensor) -> torch.Tensor:
    """Return 2 to the power of ``exponents`` (int64) as fp64. It is exact."""
    return (exponents + _FP64_BIAS << _MANTISSA).view(torch.float64)


def _scales(codes: torch.Tensor) -> torch.Tensor:
    """Return the scales (fp64) of blocks with these ``codes`` (int64)."""
    return torch.where(codes == NOT_FINITE, torch.nan, _power(codes - BIAS))


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


def _rows(values: torch.Tensor, parts: int) -> torch.Tensor:
    """Return equal parts of ``values`` (``[parts, length]``), with zeros at the end."""
    length = -(-values.numel() // parts)
    return _padded(values[None], parts * length).view(parts, length)


def _check(numel: int, bits: int) -> None:
    if not numel:
        raise ValueError("there are no values: pass at least one")
    if bits not in WIDTHS:
        raise ValueError(f"bits={bits} is not one of {', '.join(map(str, WIDTHS))}")
