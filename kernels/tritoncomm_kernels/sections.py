"""Write and read sections: the packed form of ascending indices in a range, and of their values.

Indices are coded by Elias-Fano. The low bits are stored in planes of 32 entries, together with the codes of the values.
The length of a section depends on its layout alone, so both ends of a message know it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from tritoncomm_kernels import quantize
from tritoncomm_kernels.compact import Selection

# Bits of a value by the name of its format. A section of indices alone has values of 0 bits.
VALUE_BITS = {"fp32": 32, "bf16": 16, "8bit": 8, "4bit": 4, "3bit": 3, "2bit": 2, "1bit": 1}
_FP32, _BF16 = VALUE_BITS["fp32"], VALUE_BITS["bf16"]
_BF16_LARGEST, _INFINITY = 0x7F7F, 0x7F800000
_GROUPS_AT_ONCE = 512  # 16384 entries. Larger chunks leave the second-level cache.


class Layout(NamedTuple):
    """Layout of a section with at most ``room`` entries in a range of ``span`` coordinates, and values of ``bits``.

    ``low_bits`` bits of each index are in planes. The others are in a string of ``high_bits`` bits. ``plain`` means
    that the string is a bitmap of the range, and no index has low bits.
    """

    room: int
    span: int
    bits: int
    plain: bool
    low_bits: int
    high_bits: int

    @classmethod
    def of(cls, room: int, span: int, bits: int) -> Layout:
        """Return the layout with the shortest indices."""
        room = min(room, span)
        if room == 0:
            return cls(0, span, bits, True, 0, 0)
        if span <= 4 * room:
            return cls(room, span, bits, True, 0, span)
        low_bits = (span // room).bit_length() - 1
        return cls(room, span, bits, False, low_bits, room + -(-span // (1 << low_bits)))

    @property
    def quantized(self) -> bool:
        """True if values are codes with a header. False for fp32 and bf16."""
        return 0 < self.bits < _BF16

    @property
    def heads(self) -> int:
        """Words before the high part: the count, and the header of quantized values."""
        return 2 if self.quantized else 1

    @property
    def high_words(self) -> int:
        """Words of the high part."""
        return -(-self.high_bits // 32)

    @property
    def planes(self) -> int:
        """Bits of an entry that are stored in planes."""
        return self.low_bits + (self.bits if self.quantized else 0)

    @property
    def groups(self) -> int:
        """Groups of 32 entries."""
        return -(-self.room // 32)

    @property
    def value_words(self) -> int:
        """Words of the values after the planes."""
        if self.bits < _BF16:
            return 0
        return self.room if self.bits == _FP32 else -(-self.room // 2)

    @property
    def words(self) -> int:
        """Length of the section in words."""
        if not self.room:
            return 0
        return self.heads + self.high_words + self.groups * self.planes + self.value_words


def sendable_together(values: torch.Tensor, bits: int, divisor: int = 1) -> torch.Tensor | None:
    """Return which of ``values`` (fp32 ``[m]``) one section can hold (bool ``[m]``), or None if it can hold all.

    Quantized values must not be too small beside the largest one, and bf16 values must not round to 0. Returns None if
    a value is NaN or Inf.
    """
    magnitudes = np.abs(values.cpu().numpy())
    if not len(magnitudes) or not np.isfinite(magnitudes.max()):
        return None
    if divisor > 1:
        magnitudes /= np.float32(divisor)
    keep = to_bf16(magnitudes) != 0 if bits == _BF16 else quantize.sendable(magnitudes, bits, divisor)
    return None if keep is None or keep.all() else torch.from_numpy(keep).to(values.device)


def write_section(
    layout: Layout, low: int, indices: torch.Tensor, values: torch.Tensor, out: torch.Tensor, *, divisor: int = 1
) -> torch.Tensor:
    """Write the section of ``indices`` (int32 ``[m]``, ascending) and ``values`` (fp32 ``[m]``) to ``out``.

    ``out`` (int32 ``[layout.words]``) is overwritten. ``low`` is the first coordinate of the range. Rounded values are
    written divided by ``divisor``. They must be sendable together (:func:`sendable_together`). Returns the values that
    :func:`read_section` decodes, times ``divisor`` (fp32 ``[m]``, exact).
    """
    count = indices.numel()
    assert count <= layout.room
    if not layout.room:
        return values
    words = np.zeros(layout.words, np.int32)
    offsets, array = indices.cpu().numpy() - np.int32(low), values.cpu().numpy()
    factor = np.float32(divisor)
    if layout.bits < _FP32 and divisor > 1:
        array = array / factor
    words[0] = count
    codes, rounded = None, None
    if layout.quantized:
        codes, header = quantize.quantize(array, layout.bits, divisor)
        words[1] = np.array(header, np.uint32).view(np.int32)
        rounded = quantize.dequantize(codes, header, layout.bits, divisor)
    _write_high(layout, offsets, words[layout.heads : layout.heads + layout.high_words])
    _write_planes(layout, offsets, codes, words[layout.heads + layout.high_words : layout.words - layout.value_words])
    if layout.bits == _FP32:
        words[layout.words - layout.value_words :][:count] = array.view(np.int32)
    elif layout.bits == _BF16:
        half = to_bf16(array)
        words[layout.words - layout.value_words :].view(np.uint16)[:count] = half
        rounded = _from_bf16(half)
    out.copy_(torch.from_numpy(words))
    return values if rounded is None else torch.from_numpy(rounded * factor).to(values.device)


def read_section(layout: Layout, low: int, section: torch.Tensor, *, divisor: int = 1) -> Selection:
    """Return the entries of ``section`` (int32 ``[layout.words]``): indices from ``low`` on, and values as written.

    Raises ``ValueError`` if no :func:`write_section` with this ``layout`` writes such a section: the count exceeds the
    room or is not the number of bits in the high part, an index is outside the range, indices do not ascend, or the
    header is invalid.
    """
    if not layout.room:
        return Selection.of(section[:0], section[:0].view(torch.float32))
    words = section.cpu().numpy()
    count = int(words[0])
    offsets = _read_high(layout, words[layout.heads : layout.heads + layout.high_words], count)
    planes = words[layout.heads + layout.high_words : layout.words - layout.value_words]
    symbols = _read_planes(layout, planes, count)
    if layout.low_bits:
        offsets = (offsets << layout.low_bits) | (symbols & ((1 << layout.low_bits) - 1))
        if count and not ((offsets[1:] > offsets[:-1]).all() and offsets[-1] < layout.span):
            raise ValueError("its indices do not ascend inside the range")
    if layout.quantized:
        codes = symbols >> layout.low_bits
        header = int(words[1]) & 0xFFFFFFFF
        values = quantize.dequantize(codes, header, layout.bits, divisor)
    elif layout.bits == _FP32:
        values = words[layout.words - layout.value_words :][:count].view(np.float32).copy()
    else:  # no values follow if they have 0 bits
        values = _from_bf16(words[layout.words - layout.value_words :].view(np.uint16)[:count])
    indices = torch.from_numpy(offsets.astype(np.int32) + np.int32(low))
    return Selection.of(indices.to(section.device), torch.from_numpy(values).to(section.device))


def _write_high(layout: Layout, offsets: NDArray[np.int32], out: NDArray[np.int32]) -> None:
    places = offsets if layout.plain else (offsets >> layout.low_bits) + np.arange(len(offsets), dtype=np.int32)
    string = np.zeros(32 * layout.high_words, np.bool_)
    string[places] = True
    out[:] = np.packbits(string, bitorder="little").view(np.int32)


def _read_high(layout: Layout, words: NDArray[np.int32], count: int) -> NDArray[np.int64]:
    """Return the offsets without their low bits (int64 ``[count]``)."""
    places = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little").view(np.bool_))
    if not 0 <= count <= layout.room or len(places) != count or (count and places[-1] >= layout.high_bits):
        raise ValueError(f"it reports {count} entries and holds {len(places)}, with room for {layout.room}")
    return places if layout.plain else places - np.arange(count)


def _write_planes(
    layout: Layout, offsets: NDArray[np.int32], codes: NDArray[np.uint8] | None, out: NDArray[np.int32]
) -> None:
    planes = layout.planes
    if not planes:
        return
    symbols = np.zeros((layout.groups, 1, 32), _symbol_type(planes))
    flat = symbols.reshape(-1)[: len(offsets)]
    np.bitwise_and(offsets, (1 << layout.low_bits) - 1, out=flat, casting="unsafe")
    if codes is not None:
        flat |= codes.astype(symbols.dtype) << layout.low_bits
    ones = (1 << np.arange(planes, dtype=symbols.dtype))[None, :, None]
    rows = out.reshape(layout.groups, planes)
    for start in range(0, layout.groups, _GROUPS_AT_ONCE):
        part = slice(start, start + _GROUPS_AT_ONCE)
        rows[part] = np.packbits(symbols[part] & ones != 0, axis=-1, bitorder="little").view(np.int32)[..., 0]


def _read_planes(layout: Layout, words: NDArray[np.int32], count: int) -> NDArray[np.int64]:
    """Return the symbols of the first ``count`` entries."""
    planes = layout.planes
    symbols = np.zeros((layout.groups, 32), _symbol_type(planes))
    if not planes:
        return symbols.reshape(-1)[:count]
    rows = words.reshape(layout.groups, planes).view(np.uint8)
    for start in range(0, layout.groups, _GROUPS_AT_ONCE):
        part = slice(start, start + _GROUPS_AT_ONCE)
        bits = np.unpackbits(rows[part], axis=1, bitorder="little").reshape(-1, planes, 32)
        found = symbols[part]
        for plane in range(planes):
            found |= bits[:, plane].astype(symbols.dtype) << plane
    return symbols.reshape(-1)[:count]


def _symbol_type(planes: int) -> type[np.integer[Any]]:
    """Return the smallest type with at least ``planes`` bits."""
    return next(kind for kind in (np.uint8, np.uint16, np.uint32, np.int64) if planes <= 8 * np.dtype(kind).itemsize)


def to_bf16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Return the bits of the nearest bf16 numbers, ties to even. A finite number never becomes Inf."""
    bits = values.view(np.uint32)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    magnitude = rounded & 0x7FFF
    finite = (bits & 0x7FFFFFFF) < _INFINITY
    rounded[finite & (magnitude > _BF16_LARGEST)] -= 1
    rounded[~finite] = ((bits >> 16) | ((bits & 0xFFFF) != 0)).astype(np.uint16)[~finite]  # keeps NaN a NaN
    return rounded


def _from_bf16(half: NDArray[np.uint16]) -> NDArray[np.float32]:
    return (half.astype(np.uint32) << 16).view(np.float32)
