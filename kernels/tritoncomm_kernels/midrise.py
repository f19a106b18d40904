"""Mid-rise quantization: every value becomes one of ``2**bits`` levels, which are odd multiples of a scale.

A block of ``BLOCK`` values has one scale, a bf16 number. With 1 bit, the levels are plus and minus the scale, and the
scale is the mean magnitude of the block. With more bits, the scale is the largest magnitude over ``2**bits``, rounded
up, so that no value is more than half a step from its level. There is no level for zero: a value of exactly 0 has a
sign too.

A vector is cut into parts of equal length, a multiple of ``BLOCK``, for one rank each. The last ones may be shorter or
empty. The message of a part has ``words(length, bits)`` int32 words, little-endian. First come the codes: ``bits``
words for each group of 32 values, of which word j holds bit j of the codes. Bit ``bits - 1`` is the sign. A code with
bits ``c[j]`` stands for the level ``sum(2**j * (1 - 2 * c[j]))``. Then come the scales, the one with the even number in
the lower half of a word. NaN marks a block that is not finite. Unused bits are 0.

``round_parts``, ``round_mean`` and ``read_parts`` are the three steps of a mean over ranks. On a GPU each is one
kernel, and none waits for the host.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

import numpy as np
import torch

from tritoncomm_kernels.checks import check_vector
from tritoncomm_kernels.dispatch import kernel, triton_runs
from tritoncomm_kernels.quantize import scale_bits
from tritoncomm_kernels.workspace import Workspace

BLOCK = 64
WIDTHS = range(1, 9)
LIMIT = 2.0**104  # a scale of this size marks its block as not finite, so that no sum over ranks overflows
_GROUP = 32
# Values that are worked on at a time on a CPU. Intermediate results stay in a cache, and calls are few: for 25 million
# values and 1 bit, 2**16 took 1.6 times as long on an AMD EPYC, and 2**19 as long.
_CHUNK = 1 << 18
NAN_BITS = 0x7FC00000


def part_length(numel: int, parts: int) -> int:
    """Return the number of values per part: the least multiple of ``BLOCK`` with which all values have a place."""
    return -(-numel // (parts * BLOCK)) * BLOCK


def words(length: int, bits: int) -> int:
    """Return the number of int32 words of the message of a part of ``length`` values."""
    return code_words(length, bits) - (-length // (2 * BLOCK))


def code_words(length: int, bits: int) -> int:
    """Return the number of those words that hold codes."""
    return length // _GROUP * bits


def round_parts(values: torch.Tensor, parts: int, part: int, bits: int) -> torch.Tensor:
    """Return the messages of all parts of ``values`` but number ``part``, and subtract from ``values`` what they hold.

    ``values`` is fp32 ``[m]``, with m at least 1. The messages are int32 ``[parts, words]``, and row ``part`` is zero.
    A difference is rounded to fp32 only if the value is far below the scale of its block. It is NaN where a block is
    not finite. Raises ``ValueError`` for another dtype or shape, no values, and widths other than 1 to 8.
    """
    length = _checked_length(values, parts, bits)
    if triton_runs(values):
        messages = values.new_empty((parts, words(length, bits)), dtype=torch.int32)
        kernel("midrise_triton").round_parts(values, messages, part, length, bits)
        return messages
    message, scratch = _Fields.empty(parts * length, bits, values.device), Workspace()
    numel = values.numel()
    for start, stop in _chunks((0, min(numel, part * length)), ((part + 1) * length, numel)):
        chunk = values[start:stop]
        blocks = _in_blocks(chunk)
        sent = message.write(start, *_encoded(blocks, stop - start, bits, 1, scratch))
        blocks.addcmul_(*sent.decoded(torch.float32, scratch), value=-1)
        if stop % BLOCK:
            chunk.copy_(blocks.view(-1)[: stop - start])
    return message.rows(parts)


def round_mean(messages: torch.Tensor, values: torch.Tensor, part: int, bits: int) -> torch.Tensor:
    """Return the message with the mean over ranks of one part (int32 ``[words]``), and write the rest to ``values``.

    ``messages`` (int32 ``[parts, words]``) are those of this part from all ranks. In place of the one of number
    ``part``, the same part of this rank's ``values`` (fp32 ``[m]``) is added, which is not quantized. They are added in
    order, from 0 on, in fp64. The part of ``values`` becomes the sum minus the decoded mean times ``parts``, rounded
    once. The scales of the mean have so few significant bits that this product is exact in fp32, see
    :func:`tritoncomm_kernels.quantize.scale_bits`.
    """
    parts = len(messages)
    length = _checked_length(values, parts, bits)
    if triton_runs(values):
        block = messages.new_empty(messages.shape[1])
        kernel("midrise_triton").round_mean(messages.contiguous(), values, block, part, length, bits)
        return block
    own, message = values[part * length : (part + 1) * length], _Fields.empty(length, bits, values.device)
    scratch = Workspace()
    received = [_Fields.of(row, length, bits) for row in messages]
    for start, stop in _chunks((0, own.numel()), size=_CHUNK // 2):  # fp64
        chunk = own[start:stop]
        blocks = _in_blocks(chunk)
        total = scratch.buffer("total", blocks.numel(), torch.float64, blocks.device).view_as(blocks).zero_()
        for row, each in enumerate(received):
            if row == part:
                total += blocks
            else:
                total.addcmul_(*each.part(start, len(blocks)).decoded(torch.float64, scratch))
        total.view(-1)[stop - start :] = 0.0  # a code for a place behind the last value is no zero
        mean = scratch.buffer("mean", blocks.numel(), torch.float32, blocks.device).view_as(blocks)
        torch.div(mean.copy_(total), parts, out=mean)
        sent = message.write(start, *_encoded(mean, stop - start, bits, parts, scratch))
        total.addcmul_(*sent.decoded(torch.float64, scratch), value=-parts)
        chunk.copy_(total.view(-1)[: stop - start])
    return message.rows(1)[0]


def read_parts(messages: torch.Tensor, numel: int, bits: int) -> torch.Tensor:
    """Return the values (fp32 ``[numel]``) of ``messages`` (int32 ``[parts, words]``).

    A block that is marked as not finite becomes NaN. So does one with a scale that no encoder writes. Any other words
    are valid, so a corrupt message cannot do harm.
    """
    length = part_length(numel, len(messages))
    _check(numel, bits)
    if messages.device.type == "cpu":
        values = torch.from_numpy(np.empty(numel, np.float32))  # asks for large pages: 100 MB take 5 ms, not 39
    else:
        values = torch.empty(numel, dtype=torch.float32, device=messages.device)
    if triton_runs(messages):
        kernel("midrise_triton").read_parts(messages.contiguous(), values, length, bits)
        return values
    scratch = Workspace()
    for row, message in enumerate(messages):
        fields, own = _Fields.of(message, length, bits), values[row * length : (row + 1) * length]
        for start, stop in _chunks((0, own.numel())):
            part = fields.part(start, -(-(stop - start) // BLOCK))
            whole = not stop % BLOCK
            levels, scales = part.decoded(torch.float32, scratch, own[start:stop] if whole else None)
            levels *= scales
            if not whole:
                own[start:stop] = levels.view(-1)[: stop - start]
    return values


def scales_of(messages: torch.Tensor, numel: int, bits: int) -> torch.Tensor:
    """Return the scales in ``messages`` (int32 ``[parts, words]``) as fp32 ``[parts, blocks]``.

    NaN stands for a block that is not finite, and for a scale that no encoder writes. If no scale is NaN, all values of
    the messages are finite.
    """
    return _scales(messages, part_length(numel, len(messages)), bits)


class _Fields(NamedTuple):
    """The ``codes`` (int32 ``[groups, bits]``) and the ``scales`` (fp32 ``[blocks]``) of a range of values."""

    codes: torch.Tensor
    scales: torch.Tensor

    @classmethod
    def empty(cls, numel: int, bits: int, device: torch.device) -> _Fields:
        """Return fields with zeros for ``numel`` values, a multiple of ``BLOCK``."""
        codes = torch.zeros(numel // _GROUP, bits, dtype=torch.int32, device=device)
        return cls(codes, torch.zeros(numel // BLOCK, dtype=torch.float32, device=device))

    @classmethod
    def of(cls, message: torch.Tensor, length: int, bits: int) -> _Fields:
        """Return the fields of one ``message`` (int32 ``[words]``) of ``length`` values."""
        codes = message[: code_words(length, bits)].view(-1, bits)
        return cls(codes, _scales(message[None], length, bits)[0])

    def part(self, start: int, blocks: int) -> _Fields:
        """Return the fields of ``blocks`` blocks, of which the first begins at value ``start``."""
        group, block = start // _GROUP, start // BLOCK
        return _Fields(self.codes[group : group + blocks * BLOCK // _GROUP], self.scales[block : block + blocks])

    def write(self, start: int, codes: list[torch.Tensor], scales: torch.Tensor) -> _Fields:
        """Overwrite the fields from value ``start`` on, and return them. ``codes`` has one plane per bit."""
        part = self.part(start, len(scales))
        for bit, plane in enumerate(codes):
            part.codes[:, bit] = plane
        part.scales.copy_(scales)
        return part

    def decoded(
        self, dtype: torch.dtype, scratch: Workspace, out: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the levels in units of their scales (``[blocks, BLOCK]``), and the scales (``[blocks, 1]``).

        The levels are written to ``out`` (``[values]``), or to scratch memory.
        """
        planes = self.codes.unbind(1)
        size, device = _GROUP * len(planes[0]), planes[0].device
        levels = _signs_of(planes[0], scratch.buffer("levels", size, dtype, device) if out is None else out)
        for bit, plane in enumerate(planes[1:], 1):
            levels.add_(_signs_of(plane, scratch.buffer("signs", size, dtype, device)), alpha=1 << bit)
        return levels.view(-1, BLOCK), self.scales[:, None].to(dtype)

    def rows(self, parts: int) -> torch.Tensor:
        """Return the messages (int32 ``[parts, words]``) of equal parts."""
        halves = (self.scales.view(torch.int32) >> 16).to(torch.int16).view(parts, -1)
        if halves.shape[1] % 2:
            halves = torch.nn.functional.pad(halves, (0, 1))
        return torch.cat([self.codes.view(parts, -1), halves.contiguous().view(torch.int32)], dim=1)


def _scales(messages: torch.Tensor, length: int, bits: int) -> torch.Tensor:
    halves = messages[:, code_words(length, bits) :].contiguous().view(torch.int16)[:, : length // BLOCK]
    scales = (halves.to(torch.int32) << 16).view(torch.float32)
    return torch.where((scales >= 0) & (scales <= 2 * LIMIT), scales, torch.nan)  # rounding up may reach twice it


def _encoded(
    blocks: torch.Tensor, count: int, bits: int, divisor: int, scratch: Workspace
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Return the planes (int32 ``[groups]``) and the scales (fp32 ``[blocks]``) of ``blocks`` (``[blocks, BLOCK]``).

    The first ``count`` numbers are values, the others are zeros. Products of levels and ``divisor`` are exact in fp32.
    """
    magnitudes = scratch.buffer("magnitudes", blocks.numel(), torch.float32, blocks.device).view_as(blocks)
    scales = _chosen_scales(torch.abs(blocks, out=magnitudes), count, bits, divisor)
    if bits == 1:
        return [_packed_signs(blocks)], scales
    top = (1 << (bits - 1)) - 1
    steps = torch.where(scales == 0, 1.0, 2 * scales)[:, None]
    levels = magnitudes.div_(steps).clamp_(max=top).nan_to_num_(0.0)
    codes = levels.to(torch.uint8).neg_().add_(top)
    codes ^= torch.signbit(blocks).to(torch.uint8) * (2 * top + 1)
    codes.view(-1)[count:] = 0
    return [_packed(codes & (1 << bit)) for bit in range(bits)], scales


def _chosen_scales(magnitudes: torch.Tensor, count: int, bits: int, divisor: int) -> torch.Tensor:
    """Return the scale (fp32) of each block of ``magnitudes`` (fp32 ``[blocks, BLOCK]``), of which ``count`` count.

    The order of a sum of magnitudes does not matter: it only decides at the sender, and the scale travels.
    """
    dropped = 24 - scale_bits(divisor)
    if bits == 1:
        found = magnitudes.sum(1)
        found[:-1] /= BLOCK
        found[-1] /= BLOCK - magnitudes.numel() + count  # the values in the last block
        rounding = 1 << (dropped - 1)
    else:
        found = magnitudes.amax(1) * 2.0**-bits
        rounding = (1 << dropped) - 1
    rounded = found.view(torch.int32) + rounding & (-1 << dropped)
    return torch.where(found < LIMIT, rounded, NAN_BITS).view(torch.float32)


def _packed_signs(blocks: torch.Tensor) -> torch.Tensor:
    """Return the sign bits of ``blocks`` (fp32 ``[blocks, BLOCK]``), int32 ``[groups]``."""
    if blocks.device.type == "cpu":  # numpy takes a sixth of the time
        return _packed(torch.from_numpy(np.signbit(blocks.numpy())))
    return _packed(torch.signbit(blocks))


def _packed(chosen: torch.Tensor) -> torch.Tensor:
    """Return a bit for each element of ``chosen`` (bool or uint8) that is not 0, as int32 ``[groups]``."""
    if chosen.device.type == "cpu":
        packed = np.packbits(chosen.view(-1).numpy(), bitorder="little")
        return torch.from_numpy(packed.view(np.int32))
    lanes = torch.arange(_GROUP, dtype=torch.int32, device=chosen.device)
    return ((chosen != 0).view(-1, _GROUP).to(torch.int32) << lanes).sum(1, dtype=torch.int32)


@cache
def _signs(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return 1 for each bit of a byte that is 0, and -1 for each that is 1: ``[256, 8]``."""
    bits = torch.arange(256)[:, None] >> torch.arange(8) & 1
    return (1 - 2 * bits).to(device, dtype)


def _signs_of(plane: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Write 1 to ``out`` for each bit of ``plane`` (int32 ``[groups]``) that is 0, and -1 for each that is 1."""
    octets, signs = plane.contiguous().view(torch.uint8), _signs(out.dtype, plane.device)
    if plane.device.type == "cpu":  # numpy takes a third of the time
        np.take(signs.numpy(), octets.numpy(), axis=0, out=out.view(-1, 8).numpy(), mode="wrap")
        return out
    return out.copy_(signs[octets.long()].view(-1))


def _in_blocks(values: torch.Tensor) -> torch.Tensor:
    """Return ``values`` (``[m]``) as ``[blocks, BLOCK]``, with zeros behind the last one."""
    missing = -values.numel() % BLOCK
    return (torch.nn.functional.pad(values, (0, missing)) if missing else values).view(-1, BLOCK)


def _chunks(*ranges: tuple[int, int], size: int | None = None) -> Iterator[tuple[int, int]]:
    """Yield bounds of consecutive chunks of ``ranges``, whose starts are multiples of ``BLOCK``."""
    size = size or _CHUNK
    for first, last in ranges:
        for start in range(first, last, size):
            yield start, min(last, start + size)


def _checked_length(values: torch.Tensor, parts: int, bits: int) -> int:
    check_vector("values", values)
    _check(values.numel(), bits)
    return part_length(values.numel(), parts)


def _check(numel: int, bits: int) -> None:
    if not numel:
        raise ValueError("there are no values: pass at least one")
    if bits not in WIDTHS:
        raise ValueError(f"bits={bits} is not one of {WIDTHS.start} to {WIDTHS.stop - 1}")
