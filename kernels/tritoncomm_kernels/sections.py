"""Write and read sections: the packed form of ascending indices in a range, and of their values.

Indices are coded by Elias-Fano. The low bits are stored in planes of 32 entries, together with the codes of the values.
The length of a section depends on its layout alone, so both ends of a message know it.

This is the reference, in numpy. On a GPU, :mod:`tritoncomm_kernels.section_rows` does the same.
"""

from __future__ import annotations

import functools
import math

import numpy as np
import torch
from numpy.typing import NDArray

from tritoncomm_kernels import quantize
from tritoncomm_kernels.compact import Selection
from tritoncomm_kernels.section_layout import VALUE_BITS, Layout, Places, places_of
from tritoncomm_kernels.short_sections import read_high, read_planes, write_short

_FP32, _BF16 = VALUE_BITS["fp32"], VALUE_BITS["bf16"]
_INFINITY, _MAGNITUDE, _UPPER_HALF = 0x7F800000, 0x7FFFFFFF, 0xFFFF0000
_BF16_ZERO = 0x8000  # the largest bits of a magnitude that becomes 0 in bf16
BF16_NAN = 0x7FC0  # as torch and numpy make it
_ZERO_IN_BF16 = 2.0**-134  # this magnitude
_GROUPS_AT_ONCE = 1 << 12  # 131072 entries. Larger chunks leave the second-level cache, smaller ones take more calls.
_WORDS_AT_ONCE = 1 << 13  # of the high part: 262144 bits
_VALUES_AT_ONCE = 1 << 16
_DESCENDING = "its indices do not ascend inside the range"


def sendable_together(values: torch.Tensor, bits: int, divisor: int = 1) -> torch.Tensor | None:
    """Return which of ``values`` (fp32 ``[m]``) one section can hold (bool ``[m]``), or None if it can hold all.

    Quantized values must not be too small beside the largest one, and bf16 values must not round to 0. Returns None if
    a value is NaN or Inf.
    """
    array = values.cpu().numpy()
    keep = _sendable_bf16(array, divisor) if bits == _BF16 else quantize.sendable(array, bits, divisor)
    return None if keep is None else torch.from_numpy(keep).to(values.device)


def write_sendable(
    layout: Layout, low: int, indices: torch.Tensor, values: torch.Tensor, *, divisor: int = 1
) -> tuple[torch.Tensor, Selection]:
    """Return the section of the entries that it can hold together (int32 ``[layout.words]``), and these entries.

    ``indices`` (int32 ``[m]``) ascend from ``low`` on, and there are at most as many as the section has room. Those of
    :func:`sendable_together` are written. Rounded ``values`` (fp32 ``[m]``) are written divided by ``divisor``, and
    those of 0 bits not at all. The returned values are those that :func:`read_section` decodes, times ``divisor``
    without rounding, or ``values`` as they are if they are not rounded or not written. Tensors are on a CPU.
    """
    assert indices.numel() <= layout.room
    words = np.zeros(layout.words, np.int32)
    if not layout.room:
        return torch.from_numpy(words), Selection.of(indices, values)
    at, numbers = indices.numpy(), values.numpy()
    found, chosen = None, None
    if layout.bits == _BF16:
        chosen = _sendable_bf16(numbers, divisor)
    elif layout.bits not in (0, _FP32) and len(numbers):
        found = quantize.range_of(numbers, layout.bits, divisor)
        chosen = quantize.sendable(numbers, layout.bits, divisor, found)
    if chosen is not None and not chosen.all():
        found, at, numbers = None, at[chosen], numbers[chosen]
        indices, values = torch.from_numpy(at), torch.from_numpy(numbers)
    sent = _write_host(layout, low, at, numbers, words, divisor, found)
    delivered = values if sent is None else torch.from_numpy(sent)
    return torch.from_numpy(words), Selection(indices, delivered, len(at))


def _write_host(
    layout: Layout,
    low: int,
    indices: NDArray[np.int32],
    values: NDArray[np.float32],
    words: NDArray[np.int32],
    divisor: int,
    found: quantize.Range | None = None,
) -> NDArray[np.float32] | None:
    """Write a section to ``words`` (zeros), and return the values that are read, times ``divisor``.

    Returns None if they are equal to ``values``.
    """
    count, places = len(indices), places_of(layout)
    words[0] = count
    codes, rounded = None, None
    if places.quantized:
        codes, header, rounded = quantize.quantize(values, layout.bits, divisor, found)
        words[1] = header  # its highest bit is never set
    elif layout.bits == _FP32:
        words[places.values : places.values + count] = values.view(np.int32)
    elif layout.bits:
        half, rounded = _round_bf16(values, divisor)
        words[places.values :].view(np.uint16)[:count] = half
    write = write_short if places.short else _write_indices
    write(layout, low, indices, codes, words)
    if rounded is not None and divisor > 1:
        rounded *= np.float32(divisor)
    return rounded


def read_section(layout: Layout, low: int, section: torch.Tensor, *, divisor: int = 1) -> Selection:
    """Return the entries of ``section`` (int32 ``[layout.words]``): indices from ``low`` on, and values as written.

    Raises ``ValueError`` if no :func:`write_sendable` with this ``layout`` writes such a section: the count exceeds the
    room or is not the number of bits in the high part, an index is outside the range, indices do not ascend, or the
    header is invalid.
    """
    if not layout.room:
        return Selection.of(section[:0], section[:0].view(torch.float32))
    words = (section if section.is_cpu else section.cpu()).numpy()
    count, places = int(words[0]), places_of(layout)
    offsets, codes = (_read_short if places.short else _read_indices)(layout, places, words, count)
    if places.quantized:
        values = quantize.dequantize(codes, int(words[1]) & 0xFFFFFFFF, layout.bits, divisor)
    elif layout.bits == _FP32:
        values = words[places.values : places.values + count].view(np.float32).copy()
    else:  # no values follow if they have 0 bits
        values = _from_bf16(words[places.values :].view(np.uint16)[:count])
    if low:
        offsets += np.int32(low)
    indices, numbers = torch.from_numpy(offsets), torch.from_numpy(values)
    if not section.is_cpu:
        indices, numbers = indices.to(section.device), numbers.to(section.device)
    return Selection(indices, numbers, len(offsets))


def _miscounted(layout: Layout, count: int, ones: int) -> str:
    return f"it reports {count} entries and holds {ones}, with room for {layout.room}"


def _sendable_bf16(values: NDArray[np.float32], divisor: int) -> NDArray[np.bool_] | None:
    """Return which values do not become 0, or None if that is all, or if a value is NaN or Inf."""
    if not len(values):
        return None
    smallest, largest = quantize.extent(values, divisor)
    if smallest > _ZERO_IN_BF16 or not math.isfinite(largest):
        return None
    keep: NDArray[np.bool_] = (np.abs(values) / np.float32(divisor)).view(np.int32) > _BF16_ZERO
    return keep


def _write_indices(
    layout: Layout,
    low: int,
    indices: NDArray[np.int32],
    codes: NDArray[np.uint8] | None,
    words: NDArray[np.int32],
) -> None:
    """Write the high part and the planes of the section ``words``, which holds zeros there. Chunks stay in cache."""
    string = np.zeros(32 * layout.high_words, np.bool_)
    places = places_of(layout)
    rows = words[places.planes : places.values].reshape(places.groups, places.depth)
    for start in range(0, len(indices), 32 * _GROUPS_AT_ONCE):
        stop = start + 32 * _GROUPS_AT_ONCE
        part = indices[start:stop] - np.int32(low)
        # Indexing with int64 is faster than with int32.
        string[part if layout.plain else (part >> layout.low_bits) + np.arange(start, start + len(part))] = True
        into = rows[start // 32 : stop // 32]
        for shift in range(0, layout.low_bits, 8):
            _write_planes((part >> shift).astype(np.uint8), into[:, shift : min(shift + 8, layout.low_bits)])
        if codes is not None:
            _write_planes(codes[start:stop], into[:, layout.low_bits :])
    words[layout.heads : layout.heads + layout.high_words] = np.packbits(string, bitorder="little").view(np.int32)


def _write_planes(octets: NDArray[np.uint8], planes: NDArray[np.int32]) -> None:
    """Write bit j of ``octets`` (``[m]``) to column j of ``planes`` (``[groups, bits]``, zero), 32 entries per word."""
    groups = -(-len(octets) // 32)
    if len(octets) % 32:
        octets = np.concatenate([octets, np.zeros(-len(octets) % 32, np.uint8)])
    for bit in range(planes.shape[1]):
        planes[:groups, bit] = np.packbits(octets & np.uint8(1 << bit), bitorder="little").view(np.int32)


def _read_short(
    layout: Layout, places: Places, words: NDArray[np.int32], count: int
) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Do the same as :func:`_read_indices` with few calls of numpy."""
    offsets = read_high(places, words, plain=layout.plain)
    if len(offsets) != count or count > layout.room:
        raise ValueError(_miscounted(layout, count, len(offsets)))
    if count and offsets[-1] > (layout.span - 1) >> layout.low_bits:  # would overflow when shifted
        raise ValueError(_DESCENDING)
    if not places.depth:
        return offsets, offsets[:0]
    numbers = read_planes(places, words, layout.low_bits, count)
    if layout.low_bits:
        offsets <<= places.shift
        offsets |= numbers[0]
        _check_offsets(layout, offsets)
    return offsets, numbers[-1]


def _read_indices(
    layout: Layout, places: Places, words: NDArray[np.int32], count: int
) -> tuple[NDArray[np.int32], NDArray[np.uint8]]:
    """Return the offsets of the entries (int32 ``[count]``), and their codes if there are such (uint8).

    Raises ``ValueError`` unless the offsets ascend inside the range.
    """
    offsets = _read_high(layout, words[places.heads : places.planes], count)
    codes = _read_planes(layout, words, offsets)
    if layout.low_bits:
        _check_offsets(layout, offsets)
    return offsets, codes


def _check_offsets(layout: Layout, offsets: NDArray[np.int32]) -> None:
    """Raise ``ValueError`` unless ``offsets``, none of which is negative, ascend inside the range."""
    count = len(offsets)
    if count and not (offsets[-1] < layout.span and np.count_nonzero(offsets[1:] > offsets[:-1]) == count - 1):
        raise ValueError(_DESCENDING)


def _read_high(layout: Layout, words: NDArray[np.int32], count: int) -> NDArray[np.int32]:
    """Return the offsets without their low bits (int32 ``[count]``). They do not descend, and fit in the range."""
    offsets = np.empty(count if 0 <= count <= layout.room else 0, np.int32)
    found = 0
    for start in range(0, len(words), _WORDS_AT_ONCE):
        octets = words[start : start + _WORDS_AT_ONCE].view(np.uint8)
        places = np.flatnonzero(np.unpackbits(octets, bitorder="little").view(np.bool_))
        stop, before = found + len(places), 32 * start - found
        if stop <= len(offsets):
            places += 32 * start if layout.plain else np.arange(before, before - len(places), -1)
            offsets[found:stop] = places
        found = stop
    if len(offsets) != count or found != count:
        raise ValueError(_miscounted(layout, count, found))
    if count and offsets[-1] > (layout.span - 1) >> layout.low_bits:  # would overflow when shifted
        raise ValueError(_DESCENDING)
    return offsets


def _read_planes(layout: Layout, words: NDArray[np.int32], offsets: NDArray[np.int32]) -> NDArray[np.uint8]:
    """Append the low bits to ``offsets`` (int32 ``[count]``, in place), and return the codes (uint8 ``[count]``)."""
    places = places_of(layout)
    codes = np.zeros(len(offsets) if layout.quantized else 0, np.uint8)
    rows = words[places.planes : places.values].reshape(places.groups, places.depth)
    for start in range(0, len(offsets), 32 * _GROUPS_AT_ONCE):
        stop = min(start + 32 * _GROUPS_AT_ONCE, len(offsets))
        part, planes = offsets[start:stop], rows[start // 32 : -(-stop // 32)]
        part <<= layout.low_bits
        for shift in range(0, layout.low_bits, 8):
            octets = _octets(planes[:, shift : min(shift + 8, layout.low_bits)])[: len(part)]
            part |= octets if not shift else octets.astype(np.int32) << shift
        if layout.quantized:
            codes[start:stop] = _octets(planes[:, layout.low_bits :])[: len(part)]
    return codes


def _octets(planes: NDArray[np.int32]) -> NDArray[np.uint8]:
    """Return the entries (uint8 ``[32 * groups]``) whose bit j is in column j of ``planes`` (``[groups, bits]``)."""
    found = np.zeros(32 * len(planes), np.uint8)
    for bit in reversed(range(planes.shape[1])):
        found += found  # shifts of bytes are slower
        found |= np.unpackbits(np.ascontiguousarray(planes[:, bit]).view(np.uint8), bitorder="little")
    return found


def _round_bf16(values: NDArray[np.float32], divisor: int) -> tuple[NDArray[np.uint16], NDArray[np.float32]]:
    """Return the bits of the nearest bf16 numbers of ``values / divisor``, ties to even, and the numbers in fp32.

    The product of a number with ``divisor`` is finite if the value was. Near the end of fp32, numbers are rounded
    towards zero for this. All NaN become one, because the bits of a NaN depend on the device that computed it.
    """
    if len(values) > _VALUES_AT_ONCE:
        starts = range(0, len(values), _VALUES_AT_ONCE)
        parts = [_round_bf16(values[start : start + _VALUES_AT_ONCE], divisor) for start in starts]
        return np.concatenate([half for half, _ in parts]), np.concatenate([rounded for _, rounded in parts])
    bits = (values if divisor == 1 else values / np.float32(divisor)).view(np.uint32)
    rounded = bits >> 16
    rounded &= 1
    rounded += 0x7FFF
    rounded += bits
    rounded &= _UPPER_HALF
    largest = largest_bf16(divisor)
    magnitudes = bits & _MAGNITUDE
    if len(bits) and magnitudes[magnitudes.argmax()] >= largest << 16:
        finite = magnitudes < _INFINITY
        rounded[finite & (rounded & _MAGNITUDE > largest << 16)] -= 1 << 16
        rounded[~finite] = np.where(magnitudes[~finite] > _INFINITY, BF16_NAN << 16, bits[~finite])
    return rounded.view(np.uint16)[1::2], rounded.view(np.float32)


def least_sendable(bits: int) -> int:
    """Return the least key of a magnitude that can be sent beside any other, or 0 if it depends on the others."""
    return _BF16_ZERO + 1 if bits == _BF16 else 0


def delivered_limit(layout: Layout, divisor: int) -> float:
    """Return the largest magnitude that a receiver decodes."""
    if layout.bits == _BF16:
        return float(np.uint32(largest_bf16(divisor) << 16).view(np.float32))
    return quantize.limit(divisor)


@functools.cache
def largest_bf16(divisor: int) -> int:
    """Return the bits of the largest bf16 number whose product with ``divisor`` is finite in fp32."""
    return int((np.finfo(np.float32).max / np.float32(divisor)).view(np.uint32)) >> 16


def _from_bf16(half: NDArray[np.uint16]) -> NDArray[np.float32]:
    bits = np.zeros(len(half), np.uint32)
    bits.view(np.uint16)[1::2] = half
    return bits.view(np.float32)
