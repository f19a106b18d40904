"""Write and read sections: the packed form of ascending indices in a range, and of their values.

Indices are coded by Elias-Fano. The low bits are stored in planes of 32 entries, together with the codes of the values.
The length of a section depends on its layout alone, so both ends of a message know it.

Many sections with one layout are rows of messages, whose numbers of entries may be on the device. On a GPU, only
:func:`write_one` and :func:`read_one` wait for the host, and the number of launches does not depend on the number of
rows. The reference, in numpy, writes and reads one section after the other.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tritoncomm_kernels import quantize
from tritoncomm_kernels.dispatch import kernel, triton_runs
from tritoncomm_kernels.lists import PADDING, Entries
from tritoncomm_kernels.section_layout import Layout

# Chunks stay in the second-level cache. Most sections of an exchange are short, and are one chunk.
_GROUPS_AT_ONCE = 1 << 9  # 16384 entries, whose bits are numbers in fp32
_WORDS_AT_ONCE = 1 << 13  # of the high part: 262144 bits
_OCTET = 8
_BITS_OF_OCTET = np.left_shift(1, np.arange(_OCTET)).astype(np.uint8)[:, None]
# The bits of each octet as eight numbers in fp32, taken together as one element.
_OCTETS = np.unpackbits(np.arange(256, dtype=np.uint8), bitorder="little").astype(np.float32).view("V32")
_EXACT_BITS = 24  # of an integer in fp32
_DESCENDING = "its indices do not ascend inside the range"


def write_one(layout: Layout, low: int, indices: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, Entries]:
    """Return the section of the entries that it can hold together (int32 ``[layout.words]``), and these entries.

    ``indices`` (int32 ``[m]``) ascend from ``low`` on, and there are at most as many as the section has room. Those of
    :func:`~tritoncomm_kernels.quantize.sendable` are written. ``values`` (fp32 ``[m]``) of 0 bits are not. The returned
    values are those that :func:`read_one` decodes, times the divisor without rounding, or ``values`` as they are if
    they are not rounded or not written. On a GPU, the host waits once for the number of entries, if values are rounded.
    """
    if not indices.is_cpu or triton_runs(indices):
        held = values if layout.fmt.bits else torch.zeros(indices.shape, device=indices.device)
        entries, lows = Entries(indices[None], held[None]), indices.new_full((1,), low)
        messages, sent = write_rows(layout, lows, entries)
        return messages[0], sent.row(0).trimmed() if layout.quantized else Entries(indices, values)
    assert indices.shape[0] <= layout.room
    words = np.zeros(layout.words, np.int32)
    if not layout.room:
        return torch.from_numpy(words), Entries(indices, values)
    at, numbers, codes, divisor = indices.numpy(), values.numpy(), None, layout.divisor
    if layout.quantized:
        found = quantize.range_of(numbers, layout.fmt, divisor) if numbers.size else None
        chosen = quantize.sendable(numbers, layout.fmt, divisor, found)
        if chosen is not None and not chosen.all():
            found, at, numbers = None, at[chosen], numbers[chosen]
            indices = torch.from_numpy(at)
        codes, header, rounded = quantize.quantize(numbers, layout.fmt, divisor, found)
        words[1] = header  # its highest bit is never set
        if divisor > 1:
            rounded *= np.float32(divisor)
        values = torch.from_numpy(rounded)
    elif layout.fmt.bits:
        first = layout.words - layout.value_words
        words[first : first + at.size] = numbers.view(np.int32)
    words[0] = at.size
    _write_indices(layout, low, at, codes, words)
    return torch.from_numpy(words), Entries(indices, values)


def read_one(layout: Layout, low: int, section: torch.Tensor) -> Entries:
    """Return the entries of ``section`` (int32 ``[layout.words]``): indices from ``low`` on, and values as written.

    Raises ``ValueError`` if no :func:`write_one` with this ``layout`` writes such a section: the count exceeds the
    room or is not the number of bits in the high part, an index is outside the range, indices do not ascend, or the
    header is invalid. On a GPU, the host waits once, for the checks and the number of entries.
    """
    if not section.is_cpu or triton_runs(section):
        lows = section.new_full((1,), low)
        found, malformed = read_rows(layout, lows, section[None])
        count, wrong = torch.stack([(found.indices[0] != PADDING).sum(), malformed[0]]).tolist()
        if wrong:
            raise ValueError("its counts differ, its indices do not ascend inside the range, or its header is invalid")
        return Entries(found.indices[0, :count], found.values[0, : count if layout.fmt.bits else 0])
    if not layout.room:
        return Entries(section[:0], section[:0].view(torch.float32))
    words = section.numpy()
    count = int(words[0])
    offsets, codes = _read_indices(layout, words, count)
    if layout.quantized:
        values = quantize.dequantize(codes, int(words[1]) & 0xFFFFFFFF, layout.fmt, layout.divisor)
    else:  # no values follow if they have 0 bits
        first = layout.words - layout.value_words
        values = words[first : first + count].view(np.float32).copy()
    if low:
        offsets += np.int32(low)
    return Entries(torch.from_numpy(offsets), torch.from_numpy(values))


def write_rows(layout: Layout, lows: torch.Tensor, entries: Entries) -> tuple[torch.Tensor, Entries]:
    """Return one section per row of ``entries`` (int32 ``[rows, layout.words]``), and the entries as they are read.

    Indices of row r start at ``lows[r]`` (int32 ``[rows]``, on the device). Entries that are too small beside the
    largest one of their row are left out (:func:`~tritoncomm_kernels.quantize.sendable`). The values of the
    returned entries are those that :func:`read_rows` returns, times the divisor. Values of 0 bits are returned as they
    are.
    """
    messages = entries.indices.new_empty((len(lows), layout.words))
    if not layout.room or not entries.values.numel():
        return messages.zero_(), entries
    if triton_runs(entries.values):
        sent_rows: Entries = kernel("sections_triton").write_rows(layout, lows, entries, messages)
        return messages, sent_rows
    sent = []
    for row, low in enumerate(lows.tolist()):
        part = entries.row(row).trimmed()
        messages[row], found = write_one(layout, low, part.indices, part.values)
        sent.append(found.padded(entries.room))
    return messages, Entries.stacked(sent)


def read_rows(layout: Layout, lows: torch.Tensor, messages: torch.Tensor) -> tuple[Entries, torch.Tensor]:
    """Return the entries of ``messages`` (int32 ``[rows, layout.words]``), and how many are malformed (int32 ``[1]``).

    A malformed row (see :func:`read_one`) has no entries. Indices are therefore always ascending and inside their
    range.
    """
    shape = len(lows), layout.room
    if not layout.room or not len(lows):
        return Entries.empty(shape, messages), messages.new_zeros(1)
    if triton_runs(messages):
        found_rows: tuple[Entries, torch.Tensor] = kernel("sections_triton").read_rows(layout, lows, messages)
        return found_rows
    rows, malformed = [], 0
    for row, low in enumerate(lows.tolist()):
        try:
            found = read_one(layout, low, messages[row])
        except ValueError:
            found, malformed = Entries.empty((0,), messages), malformed + 1
        rows.append(found.padded(layout.room))
    return Entries.stacked(rows), messages.new_full((1,), malformed)


def check_rows(rows: Entries, lows: torch.Tensor, span: int) -> tuple[Entries, torch.Tensor]:
    """Return ``rows`` (plain, as received) without malformed ones, and how many are malformed (int32 ``[1]``).

    A row is malformed unless its indices ascend inside ``[lows[r], lows[r] + span)`` and its padding stands at the end.
    """
    indices, used = rows.indices, rows.indices != PADDING
    low = lows[:, None]
    bad = used & ((indices < low) | (indices - low >= span))  # low + span may overflow
    bad[:, 1:] |= used[:, 1:] & ((indices[:, 1:] <= indices[:, :-1]) | ~used[:, :-1])
    wrong = bad.any(1)
    return rows.only(used & ~wrong[:, None]), wrong.sum(dtype=torch.int32).reshape(1)


def _write_indices(
    layout: Layout,
    low: int,
    indices: NDArray[np.int32],
    codes: NDArray[np.uint8] | None,
    words: NDArray[np.int32],
) -> None:
    """Write the high part and the planes of the section ``words``, which holds zeros there."""
    depth, low_bits = layout.planes, layout.low_bits
    string = np.zeros(32 * layout.high_words, np.uint8)
    offsets = indices - np.int32(low) if low else indices
    rows = _planes(layout, words)
    for start in range(0, offsets.size, 32 * _GROUPS_AT_ONCE):
        part = offsets[start : start + 32 * _GROUPS_AT_ONCE]
        # Indexing with int64 is faster than with int32.
        string[part if layout.plain else (part >> low_bits) + np.arange(start, start + part.size)] = 1
        if not depth:
            continue
        groups = -(-part.size // 32)
        bits = np.zeros((depth, 32 * groups), np.uint8)  # of which all but 0 count as 1
        for shift in range(0, low_bits, _OCTET):
            stop = min(shift + _OCTET, low_bits)
            octets = (part >> shift if shift else part).astype(np.uint8)
            np.bitwise_and(octets, _BITS_OF_OCTET[: stop - shift], bits[shift:stop, : part.size])
        if codes is not None:
            own = codes[start : start + part.size]
            np.bitwise_and(own, _BITS_OF_OCTET[: layout.fmt.bits], bits[low_bits:, : part.size])
        packed = np.packbits(bits, None, "little").view(np.int32).reshape(depth, groups)
        rows[start // 32 : start // 32 + groups] = packed.T
    words[layout.heads : layout.heads + layout.high_words] = np.packbits(string, None, "little").view(np.int32)


def _read_indices(layout: Layout, words: NDArray[np.int32], count: int) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Return the offsets of the entries (int32 ``[count]``), and their codes if there are such.

    Raises ``ValueError`` unless the offsets ascend inside the range.
    """
    offsets = _read_high(layout, words[layout.heads : layout.heads + layout.high_words], count)
    if not layout.planes:
        return offsets, offsets[:0]
    weights = _weights(layout.low_bits, layout.planes - layout.low_bits)
    codes = np.empty(count if layout.quantized else 0, np.int32)
    rows = _planes(layout, words)
    for start in range(0, count, 32 * _GROUPS_AT_ONCE):
        part = slice(start, min(start + 32 * _GROUPS_AT_ONCE, count))
        planes = rows[start // 32 : -(-part.stop // 32)].T.copy()
        bits = _OCTETS.take(planes.view(np.uint8), mode="wrap").view(np.float32)
        # A product is the fastest way to put the bits of an entry together. Numbers of so few bits are exact in fp32.
        numbers = np.dot(weights, bits)[:, : part.stop - start].astype(np.int32)
        if layout.low_bits:
            offsets[part] <<= layout.low_bits
            offsets[part] |= numbers[0]
        if layout.quantized:
            codes[part] = numbers[-1]
    if count and not (offsets[-1] < layout.span and np.logical_and.reduce(offsets[1:] > offsets[:-1])):
        raise ValueError(_DESCENDING)
    return offsets, codes


def _read_high(layout: Layout, words: NDArray[np.int32], count: int) -> NDArray[np.int32]:
    """Return the offsets without their low bits (int32 ``[count]``). They do not descend, and fit in the range."""
    offsets = np.empty(count if 0 <= count <= layout.room else 0, np.int32)
    found = 0
    for start in range(0, words.size, _WORDS_AT_ONCE):
        bits = np.unpackbits(words[start : start + _WORDS_AT_ONCE].view(np.uint8), None, None, "little")
        at = bits.view(np.bool_).nonzero()[0]
        stop, before = found + at.size, 32 * start - found
        if stop <= offsets.size:
            at += 32 * start if layout.plain else np.arange(before, before - at.size, -1)
            offsets[found:stop] = at
        found = stop
    if offsets.size != count or found != count:
        raise ValueError(f"it reports {count} entries and holds {found}, with room for {layout.room}")
    if count and offsets[-1] > (layout.span - 1) >> layout.low_bits:  # would overflow when shifted
        raise ValueError(_DESCENDING)
    return offsets


def _planes(layout: Layout, words: NDArray[np.int32]) -> NDArray[np.int32]:
    """Return the planes of the section ``words`` as a view (int32 ``[groups, planes]``)."""
    first = layout.heads + layout.high_words
    return words[first : first + layout.groups * layout.planes].reshape(layout.groups, layout.planes)


@functools.cache
def _weights(*lengths: int) -> NDArray[Any]:
    """Return what each plane adds to each number: the numbers have ``lengths`` planes, one after the other, or none.

    The numbers are exact in the type of the result, fp32 or fp64.
    """
    weights = np.zeros((len(lengths), sum(lengths)), np.float32 if max(lengths) <= _EXACT_BITS else np.float64)
    start = 0
    for row, length in zip(weights, lengths, strict=True):
        row[start : start + length] = 2.0 ** np.arange(length)
        start += length
    return weights[[length > 0 for length in lengths]]
