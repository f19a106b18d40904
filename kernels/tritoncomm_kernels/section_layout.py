"""The layout of a section: how long its parts are, and where they stand. See :mod:`tritoncomm_kernels.sections`."""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tritoncomm_kernels.formats import Format


class Layout(NamedTuple):
    """Layout of a section: at most ``room`` entries in a range of ``span`` coordinates, whose values are in ``fmt``.

    ``low_bits`` bits of each index are in planes. The others are in a string of ``high_bits`` bits. ``plain`` means
    that the string is a bitmap of the range, and no index has low bits.
    """

    room: int
    span: int
    fmt: Format
    plain: bool
    low_bits: int
    high_bits: int

    @classmethod
    def of(cls, room: int, span: int, fmt: Format) -> Layout:
        """Return the layout with the shortest indices."""
        room = min(room, span)
        if room == 0:
            return cls(0, span, fmt, True, 0, 0)
        if span <= 4 * room:
            return cls(room, span, fmt, True, 0, span)
        low_bits = (span // room).bit_length() - 1
        return cls(room, span, fmt, False, low_bits, room + -(-span // (1 << low_bits)))

    @property
    def quantized(self) -> bool:
        """True if values are codes with a header. False for fp32, and without values."""
        return bool(self.fmt.tables)

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
        return self.low_bits + (self.fmt.bits if self.quantized else 0)

    @property
    def groups(self) -> int:
        """Groups of 32 entries."""
        return -(-self.room // 32)

    @property
    def value_words(self) -> int:
        """Words of the values after the planes."""
        return 0 if self.quantized else self.room * self.fmt.bits // 32

    @property
    def words(self) -> int:
        """Length of the section in words."""
        if not self.room:
            return 0
        return self.heads + self.high_words + self.groups * self.planes + self.value_words


class Places(NamedTuple):
    """What the layout of a section says, computed once.

    Positions of its parts are in words: planes start at ``planes``, and values at ``values``. ``high_words``,
    ``groups`` and ``depth`` are the words of the high part, the groups of 32 entries, and their planes. ``shift`` is
    ``low_bits`` as an array, which numpy need not convert.
    """

    heads: int
    planes: int
    values: int
    words: int
    high_words: int
    groups: int
    depth: int
    quantized: bool
    shift: NDArray[np.int32]


@functools.lru_cache(maxsize=1024)
def places_of(layout: Layout) -> Places:
    """Return the places of the parts."""
    planes, values = layout.heads + layout.high_words, layout.words - layout.value_words
    sizes = layout.high_words, layout.groups, layout.planes
    return Places(
        layout.heads, planes, values, layout.words, *sizes, layout.quantized, np.array(layout.low_bits, np.int32)
    )
