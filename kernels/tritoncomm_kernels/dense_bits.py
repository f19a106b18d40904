"""A mean over ranks whose values travel in few bits: every value becomes a level of its format, times a scale.

A block of ``BLOCK`` values has one scale, a bf16 number. With one level per sign, it is the mean magnitude of the
block, to nearest. With more, it is so large that the largest magnitude is no more than half a step above the top level,
rounded up. A value takes the nearest level of the ``levels`` of its :class:`~tritoncomm_kernels.formats.Format`.

A vector is cut into parts of equal length, a multiple of ``BLOCK``, for one rank each. The last ones may be shorter or
empty. The message of a part has ``words(length, fmt)`` int32 words, little-endian. First come the codes: ``bits`` words
for each group of 32 values, of which word j holds bit j of the codes. A code is the number of a level, and bit
``bits - 1`` is the sign. Then come the scales, the one with the even number in the lower half of a word. NaN marks a
block that is not finite. Unused bits are 0.

``round_parts``, ``round_mean`` and ``read_parts`` are the three steps of a mean over ranks. On a GPU each is one
kernel, and none waits for the host.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from tritoncomm_kernels.checks import check_vector
from tritoncomm_kernels.dispatch import kernel, triton_runs
from tritoncomm_kernels.formats import DENSE_FORMATS, Format
from tritoncomm_kernels.quantize import codes_of_cells, scale_bits

BLOCK = 64
LIMIT = 2.0**104  # a scale of this size marks its block as not finite, so that no sum over ranks overflows
_GROUP = 32
# Values that are worked on at a time on a CPU. Intermediate results stay in a cache, and calls are few: for 25 million
# values and 1 bit, 2**16 took 1.6 times as long on an AMD EPYC, and 2**19 as long.
_CHUNK = 1 << 18
NAN_BITS = 0x7FC00000
_NAMES = DENSE_FORMATS[1:]  # without fp32
_BITS_OF_CODE = np.left_shift(1, np.arange(8)).astype(np.uint8)[:, None]
_OCTETS = 256 * np.arange(8)[:, None]  # where the rows of a plane begin in a table of octets
_ROW_BITS = 16  # of the number of a row in a table of levels: 2 MB at most, which stay in a cache


def part_length(numel: int, parts: int) -> int:
    """Return the number of values per part: the least multiple of ``BLOCK`` with which all values have a place."""
    return -(-numel // (parts * BLOCK)) * BLOCK


def words(length: int, fmt: Format) -> int:
    """Return the number of int32 words of the message of a part of ``length`` values."""
    return code_words(length, fmt) - (-length // (2 * BLOCK))


def code_words(length: int, fmt: Format) -> int:
    """Return the number of those words that hold codes."""
    return length // _GROUP * fmt.bits


def round_parts(values: torch.Tensor, parts: int, part: int, fmt: Format) -> torch.Tensor:
    """Return the messages of all parts of ``values`` but number ``part``, and subtract from ``values`` what they hold.

    ``values`` is fp32 ``[m]``, with m at least 1. The messages are int32 ``[parts, words]``, and row ``part`` is zero.
    A difference is rounded to fp32 only if the value is far below the scale of its block. It is NaN where a block is
    not finite. Raises ``ValueError`` for another dtype or shape, no values, and formats without
    levels.
    """
    length = _checked_length(values, parts, fmt)
    if triton_runs(values):
        messages = values.new_empty((parts, words(length, fmt)), dtype=torch.int32)
        kernel("dense_bits_triton").round_parts(values, messages, part, length, fmt)
        return messages
    message, numel = _Fields.empty(parts * length, fmt), values.shape[0]
    for start, stop in _chunks((0, min(numel, part * length)), ((part + 1) * length, numel)):
        chunk = values[start:stop]
        blocks = _in_blocks(chunk)
        codes, scales = _encoded(blocks, stop - start, fmt, 1)
        message.write(start, codes, scales)
        blocks.addcmul_(_levels(codes, fmt, torch.float32), scales[:, None], value=-1)
        if stop % BLOCK:
            chunk.copy_(blocks.view(-1)[: stop - start])
    return message.rows(parts)


def round_mean(messages: torch.Tensor, values: torch.Tensor, part: int, fmt: Format) -> torch.Tensor:
    """Return the message with the mean over ranks of one part (int32 ``[words]``), and write the rest to ``values``.

    ``messages`` (int32 ``[parts, words]``) are those of this part from all ranks. In place of the one of number
    ``part``, the same part of this rank's ``values`` (fp32 ``[m]``) is added, which is not quantized. They are added in
    order, from 0 on, in fp64. The part of ``values`` becomes the sum minus the decoded mean times ``parts``, rounded
    once. The scales of the mean have so few significant bits that this product is exact in fp32, see
    :func:`tritoncomm_kernels.quantize.scale_bits`.
    """
    parts = messages.shape[0]
    length = _checked_length(values, parts, fmt)
    if triton_runs(values):
        block = messages.new_empty(messages.shape[1])
        kernel("dense_bits_triton").round_mean(messages.contiguous(), values, block, part, length, fmt)
        return block
    own, message = values[part * length : (part + 1) * length], _Fields.empty(length, fmt)
    received = _Fields.of(messages, length, fmt)
    for start, stop in _chunks((0, own.shape[0]), size=_CHUNK // 2):  # fp64
        chunk = own[start:stop]
        blocks = _in_blocks(chunk)
        total = torch.zeros(blocks.shape, dtype=torch.float64, device="cpu")
        for row in range(parts):
            if row == part:
                total += blocks
            else:
                total.addcmul_(*received.decoded(row * length + start, blocks.shape[0], torch.float64))
        total.view(-1)[stop - start :] = 0.0  # a code for a place behind the last value is no zero
        codes, scales = _encoded(total.float() / parts, stop - start, fmt, parts)
        message.write(start, codes, scales)
        total.addcmul_(_levels(codes, fmt, torch.float64), scales[:, None].double(), value=-parts)
        chunk.copy_(total.view(-1)[: stop - start])
    return message.rows(1)[0]


def read_parts(messages: torch.Tensor, numel: int, fmt: Format) -> torch.Tensor:
    """Return the values (fp32 ``[numel]``) of ``messages`` (int32 ``[parts, words]``).

    A block that is marked as not finite becomes NaN. So does one with a scale that no encoder writes. Any other words
    are valid, so a corrupt message cannot do harm.
    """
    length = part_length(numel, messages.shape[0])
    _check(numel, fmt)
    if triton_runs(messages):
        values = messages.new_empty(numel, dtype=torch.float32)
        kernel("dense_bits_triton").read_parts(messages.contiguous(), values, length, fmt)
        return values
    fields, count = _Fields.of(messages, length, fmt), -(-numel // BLOCK)
    blocks = torch.from_numpy(np.empty((count, BLOCK), np.float32))  # asks for large pages: 100 MB take 5 ms, not 39
    for start, stop in _chunks((0, count * BLOCK)):
        own = slice(start // BLOCK, stop // BLOCK)
        torch.mul(*fields.decoded(start, own.stop - own.start, torch.float32), out=blocks[own])
    return blocks.view(-1)[:numel]


def scales_of(messages: torch.Tensor, numel: int, fmt: Format) -> torch.Tensor:
    """Return the scales in ``messages`` (int32 ``[parts, words]``) as fp32 ``[parts, blocks]``.

    NaN stands for a block that is not finite, and for a scale that no encoder writes. If no scale is NaN, all values of
    the messages are finite.
    """
    return _scales(messages, part_length(numel, messages.shape[0]), fmt)


class _Lookup(NamedTuple):
    """Tables of one format.

    ``codes`` (uint8 ``[65536]``) are the codes of ratios by their upper 16 bits. A ratio of ``cover`` is half a step
    above the top level.

    Codes are read several at a time: their bits together are the number of a row of ``levels`` (``[rows, codes]``, by
    dtype). Of an octet of a plane, ``spread`` (uint16 ``[256 * planes, numbers]``) is what it adds to these numbers.
    ``level`` (``[codes]``, by dtype) is that of a single code.
    """

    codes: NDArray[np.uint8]
    cover: float
    spread: NDArray[np.uint16]
    levels: dict[torch.dtype, NDArray[Any]]
    level: dict[torch.dtype, NDArray[Any]]


@cache
def lookup(fmt: Format) -> _Lookup:
    """Return the tables of a format."""
    levels = np.array(fmt.levels, np.float64)
    cover = 1.0 if len(levels) == 1 else float(levels[-1] + (levels[-1] - levels[-2]) / 2)
    at_once = next(count for count in (8, 4, 2, 1) if count * fmt.bits <= _ROW_BITS)
    shifts = fmt.bits * np.arange(at_once)
    octets = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
    first = (octets.reshape(256, -1, at_once).astype(np.int64) << shifts).sum(2)
    spread = np.concatenate([first << plane for plane in range(fmt.bits)]).astype(np.uint16)
    codes = np.arange(1 << (fmt.bits * at_once))[:, None] >> shifts & ((1 << fmt.bits) - 1)
    every = np.concatenate([levels, -levels])
    rows, level = ({torch.float32: each.astype(np.float32), torch.float64: each} for each in (every[codes], every))
    return _Lookup(codes_of_cells(levels), cover, spread, rows, level)


@dataclass(frozen=True)
class _Fields:
    """The ``codes`` (int32 ``[groups, bits]``) and ``scales`` (fp32 ``[blocks]``) of a range of values, on a CPU."""

    codes: torch.Tensor
    scales: torch.Tensor
    fmt: Format

    @classmethod
    def empty(cls, numel: int, fmt: Format) -> _Fields:
        """Return fields with zeros for ``numel`` values, a multiple of ``BLOCK``."""
        codes = torch.zeros(numel // _GROUP, fmt.bits, dtype=torch.int32, device="cpu")
        return cls(codes, torch.zeros(numel // BLOCK, dtype=torch.float32, device="cpu"), fmt)

    @classmethod
    def of(cls, messages: torch.Tensor, length: int, fmt: Format) -> _Fields:
        """Return the fields of ``messages`` (int32 ``[parts, words]``), which have ``length`` values each, in order."""
        codes = messages[:, : code_words(length, fmt)].reshape(-1, fmt.bits)
        return cls(codes, _scales(messages, length, fmt).view(-1), fmt)

    def write(self, start: int, codes: NDArray[np.uint8], scales: torch.Tensor) -> None:
        """Overwrite the fields from value ``start`` on. ``codes`` are those of the values, in order."""
        group, block = start // _GROUP, start // BLOCK
        planes = np.packbits(codes & _BITS_OF_CODE[: self.fmt.bits], axis=1, bitorder="little").view(np.int32)
        self.codes[group : group + planes.shape[1]] = torch.from_numpy(planes.T)
        self.scales[block : block + scales.shape[0]] = scales

    def decoded(self, start: int, blocks: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the levels in units of their scales (``[blocks, BLOCK]``), and the scales (``[blocks, 1]``).

        The first block begins at value ``start``.
        """
        tables, group, block = lookup(self.fmt), start // _GROUP, start // BLOCK
        codes = self.codes[group : group + blocks * BLOCK // _GROUP]
        octets = codes.t().contiguous().view(torch.uint8).numpy()  # of each plane
        added = tables.spread.take(octets + _OCTETS[: self.fmt.bits], axis=0, mode="wrap")
        numbers = np.bitwise_or.reduce(added).reshape(-1)
        levels = torch.from_numpy(tables.levels[dtype].take(numbers, axis=0, mode="wrap")).view(-1, BLOCK)
        return levels, self.scales[block : block + blocks, None].to(dtype)

    def rows(self, parts: int) -> torch.Tensor:
        """Return the messages (int32 ``[parts, words]``) of equal parts."""
        halves = self.scales.view(torch.int16)[1::2].view(parts, -1)  # the upper ones: a scale is a bf16 number
        if halves.shape[1] % 2:
            halves = torch.nn.functional.pad(halves, (0, 1))
        return torch.cat([self.codes.view(parts, -1), halves.contiguous().view(torch.int32)], dim=1)


def _scales(messages: torch.Tensor, length: int, fmt: Format) -> torch.Tensor:
    halves = messages[:, code_words(length, fmt) :].contiguous().view(torch.int16)[:, : length // BLOCK]
    scales = halves.view(torch.bfloat16).float()
    return torch.where((scales >= 0) & (scales <= 2 * LIMIT), scales, torch.nan)  # rounding up may reach twice it


def _encoded(blocks: torch.Tensor, count: int, fmt: Format, divisor: int) -> tuple[NDArray[np.uint8], torch.Tensor]:
    """Return codes (uint8 ``[values]``) and scales (fp32 ``[blocks]``) of ``blocks`` (``[blocks, BLOCK]``).

    The first ``count`` numbers are values, the others are zeros. Products of levels and ``divisor`` are exact in fp32.
    """
    ratios = blocks.abs()
    scales = _chosen_scales(ratios, count, fmt, divisor)
    if fmt.bits == 1:
        return np.signbit(blocks.numpy()).reshape(-1).view(np.uint8), scales
    torch.div(blocks, torch.where(scales == 0, 1.0, scales)[:, None], out=ratios)
    codes = lookup(fmt).codes.take(ratios.view(-1).numpy().view(np.uint16)[1::2], mode="wrap")
    codes[count:] = 0
    return codes, scales


def _levels(codes: NDArray[np.uint8], fmt: Format, dtype: torch.dtype) -> torch.Tensor:
    """Return the levels of ``codes`` in units of their scales (``[blocks, BLOCK]``)."""
    return torch.from_numpy(lookup(fmt).level[dtype].take(codes, mode="wrap")).view(-1, BLOCK)


def _chosen_scales(magnitudes: torch.Tensor, count: int, fmt: Format, divisor: int) -> torch.Tensor:
    """Return the scale (fp32) of each block of ``magnitudes`` (fp32 ``[blocks, BLOCK]``), of which ``count`` count.

    The order of a sum of magnitudes does not matter: it only decides at the sender, and the scale travels.
    """
    dropped = 24 - scale_bits(divisor)
    if fmt.bits == 1:
        found = magnitudes.sum(1)
        found[:-1] /= BLOCK
        found[-1] /= BLOCK - magnitudes.numel() + count  # the values in the last block
        rounding = 1 << (dropped - 1)
    else:
        found = magnitudes.amax(1) / lookup(fmt).cover
        rounding = (1 << dropped) - 1
    rounded = found.view(torch.int32) + rounding & (-1 << dropped)
    return torch.where(found < LIMIT, rounded, NAN_BITS).view(torch.float32)


def _in_blocks(values: torch.Tensor) -> torch.Tensor:
    """Return ``values`` (``[m]``) as ``[blocks, BLOCK]``, with zeros behind the last one."""
    missing = -values.shape[0] % BLOCK
    return (torch.cat([values, values.new_zeros(missing)]) if missing else values).view(-1, BLOCK)


def _chunks(*ranges: tuple[int, int], size: int | None = None) -> Iterator[tuple[int, int]]:
    """Yield bounds of consecutive chunks of ``ranges``, whose starts are multiples of ``BLOCK``."""
    size = size or _CHUNK
    for first, last in ranges:
        for start in range(first, last, size):
            yield start, min(last, start + size)


def _checked_length(values: torch.Tensor, parts: int, fmt: Format) -> int:
    check_vector("values", values)
    _check(values.shape[0], fmt)
    return part_length(values.shape[0], parts)


def _check(numel: int, fmt: Format) -> None:
    if not numel:
        raise ValueError("there are no values: pass at least one")
    if not fmt.levels:
        raise ValueError(f"format {fmt.name} has no levels for dense values: pass one of {', '.join(_NAMES)}")
