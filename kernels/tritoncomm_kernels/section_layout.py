"""The layout of a section: how long its parts are, and where they stand. See :mod:`tritoncomm_kernels.sections`."""

from __future__ import annotations

from dataclasses import dataclass, field

from tritoncomm_kernels.formats import Format


@dataclass(frozen=True)
class Layout:
    """Layout of a section: at most ``room`` entries in a range of ``span`` coordinates, whose values are in ``fmt``.

    Rounded values are written divided by ``divisor``. ``low_bits`` bits of each index are in planes. The others are in
    a string of ``high_bits`` bits. ``plain`` means that the string is a bitmap of the range, and no index has low bits.
    The rest follows from these:

    * ``quantized``: True if values are codes with a header. False for fp32, and without values.
    * ``heads``: Words before the high part: the count, and the header of quantized values.
    * ``high_words``: Words of the high part.
    * ``groups``: Groups of 32 entries.
    * ``planes``: Bits of an entry that are stored in planes.
    * ``value_words``: Words of the values after the planes.
    * ``words``: Length of the section in words.
    """

    room: int
    span: int
    fmt: Format
    divisor: int
    plain: bool
    low_bits: int
    high_bits: int
    quantized: bool = field(init=False)
    heads: int = field(init=False)
    high_words: int = field(init=False)
    groups: int = field(init=False)
    planes: int = field(init=False)
    value_words: int = field(init=False)
    words: int = field(init=False)

    def __post_init__(self) -> None:
        room, bits, quantized = self.room, self.fmt.bits, bool(self.fmt.tables)
        heads, high_words, groups = 2 if quantized else 1, -(-self.high_bits // 32), -(-room // 32)
        planes, value_words = (self.low_bits + bits, 0) if quantized else (self.low_bits, room * bits // 32)
        self.__dict__.update(
            quantized=quantized, heads=heads, high_words=high_words, groups=groups, planes=planes,
            value_words=value_words, words=heads + high_words + groups * planes + value_words if room else 0,
        )  # fmt: skip

    @classmethod
    def of(cls, room: int, span: int, fmt: Format, divisor: int = 1) -> Layout:
        """Return the layout with the shortest indices."""
        room = min(room, span)
        if room == 0:
            return cls(0, span, fmt, divisor, True, 0, 0)
        if span <= 4 * room:
            return cls(room, span, fmt, divisor, True, 0, span)
        low_bits = (span // room).bit_length() - 1
        return cls(room, span, fmt, divisor, False, low_bits, room + -(-span // (1 << low_bits)))
