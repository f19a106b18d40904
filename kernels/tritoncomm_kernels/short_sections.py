"""Write and read the indices and codes of short sections, with few calls of numpy.

See :mod:`tritoncomm_kernels.sections`. A call takes longer than its work on some hundred entries. Therefore the planes
are written and read all at once, one after the other, and transposed as words.
"""

from __future__ import annotations

import functools

import numpy as np
from numpy.typing import NDArray

from tritoncomm_kernels.section_layout import FEW_GROUPS, Layout, Places, places_of

_COUNTING = np.arange(32 * FEW_GROUPS)
_OCTET = 8
_BITS_OF_OCTET = np.left_shift(1, np.arange(_OCTET)).astype(np.uint8)[:, None]
# The bits of each octet as eight numbers in fp32, taken together as one element.
_OCTETS = np.unpackbits(np.arange(256, dtype=np.uint8), bitorder="little").astype(np.float32).view("V32")


def write_short(
    layout: Layout,
    low: int,
    indices: NDArray[np.int32],
    codes: NDArray[np.uint8] | None,
    words: NDArray[np.int32],
) -> None:
    """Write the high part and the planes of the section ``words``."""
    places, count, low_bits = places_of(layout), len(indices), layout.low_bits
    high = 32 * places.high_words
    bits = np.zeros(high + 32 * places.groups * places.depth, np.uint8)  # of which all but 0 count as 1
    offsets = indices - low if low else indices
    # Indexing with int64 is faster than with int32.
    bits[offsets if layout.plain else (offsets >> places.shift) + _COUNTING[:count]] = 1
    if places.depth:
        planes = bits[high:].reshape(places.depth, 32 * places.groups)
        for shift in range(0, low_bits, _OCTET):
            stop = min(shift + _OCTET, low_bits)
            octets = (offsets >> shift if shift else offsets).astype(np.uint8)
            np.bitwise_and(octets, _BITS_OF_OCTET[: stop - shift], planes[shift:stop, :count])
        if codes is not None:
            np.bitwise_and(codes, _BITS_OF_OCTET[: layout.bits], planes[low_bits:, :count])
    packed = np.packbits(bits, None, "little").view(np.int32)
    words[places.heads : places.planes] = packed[: places.high_words]
    if places.depth:
        rows = words[places.planes : places.values].reshape(places.groups, places.depth)
        rows[:] = packed[places.high_words :].reshape(places.depth, places.groups).T


def read_high(places: Places, words: NDArray[np.int32], *, plain: bool) -> NDArray[np.int32]:
    """Return the offsets without their low bits, one for each bit of the high part. They do not descend."""
    bits = np.unpackbits(words[places.heads : places.planes].view(np.uint8), None, None, "little")
    found = bits.view(np.bool_).nonzero()[0]
    if not plain and len(found) <= len(_COUNTING):
        found -= _COUNTING[: len(found)]
    return found.astype(np.int32)


def read_planes(places: Places, words: NDArray[np.int32], low_bits: int, count: int) -> NDArray[np.int32]:
    """Return the low bits of the first ``count`` entries, if any, and their codes, if any (``[1 or 2, count]``)."""
    planes = words[places.planes : places.values].reshape(places.groups, places.depth).T.copy()
    bits = _OCTETS.take(planes.view(np.uint8), mode="wrap").view(np.float32)
    # A product is the fastest way to put the bits of an entry together. Numbers of so few bits are exact in fp32.
    found: NDArray[np.int32] = np.dot(_weights(low_bits, places.depth - low_bits), bits)[:, :count].astype(np.int32)
    return found


@functools.cache
def _weights(*lengths: int) -> NDArray[np.float32]:
    """Return what each plane adds to each number: the numbers have ``lengths`` planes, one after the other, or none."""
    weights = np.zeros((len(lengths), sum(lengths)), np.float32)
    start = 0
    for row, length in zip(weights, lengths, strict=True):
        row[start : start + length] = np.ldexp(np.float32(1), np.arange(length))
        start += length
    return weights[[length > 0 for length in lengths]]
