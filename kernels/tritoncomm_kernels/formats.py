"""The formats in which values travel. To add one, add an entry to :data:`FORMATS`: nothing else knows them by name.

A format of ``bits`` bits is a sign, and the number of a level of a table, times a scale that several values share.
Entries that were selected are all large: they have a scale about the smallest magnitude of their section, and the best
of several ``tables``, see :mod:`tritoncomm_kernels.quantize`. Where every value travels, 64 of them have a scale about
their largest magnitude, and the ``levels`` begin near zero, see :mod:`tritoncomm_kernels.dense_bits`. A format has
tables, levels, or both. ``"fp32"`` sends all bits, and has neither.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, eq=False)  # compared by identity: the tables are long, and messages look formats up
class Format:
    """A format of values.

    Attributes:
        name: Its name, which is what options such as ``values="4bit"`` say.
        bits: The bits of a value. 32 stands for fp32 numbers, and 0 for messages without values.
        tables: What the entries of a section may be rounded to: tables of ``2**(bits - 1)`` ascending levels per sign,
            in 64ths of the scale, which is about the smallest magnitude. Encoders take the table with the least squared
            error. A level has at most 8 significant bits, a lowest level is below 2, and a level is less than 128 times
            the one below: then what rounding cuts off is exact in fp32. No level is 0.
        levels: What dense values may be rounded to: ``2**(bits - 1)`` ascending levels per sign, integers of at most 8
            significant bits, in units of the scale.
    """

    name: str
    bits: int
    tables: tuple[tuple[int, ...], ...] = ()
    levels: tuple[int, ...] = ()

    def __repr__(self) -> str:
        return f"Format({self.name!r})"


def _odd(bits: int) -> tuple[int, ...]:
    """Return levels of equal distance, without one for zero."""
    return tuple(range(1, 1 << bits, 2))


# Where a format has five tables, 0 to 2 suit magnitudes whose tails grow wider, and 3 and 4 are for anything else.
_FORMATS = (
    Format("fp32", 32),
    Format(
        "8bit",
        8,
        (
            tuple(range(64, 192)),
            tuple((16 + m) * 4 << e for e in range(8) for m in range(16)),
            tuple((8 + m) * 8 << e for e in range(16) for m in range(8)),
            tuple((4 + m) * 16 << e for e in range(32) for m in range(4)),
            tuple((32 + m) * 2 << e for e in range(4) for m in range(32)),
        ),
        tuple(range(0, 256, 2)),  # what is 0 stays 0, such as the gradient of a bias that is not used
    ),
    *(Format(f"{bits}bit", bits, levels=_odd(bits)) for bits in (7, 6, 5)),
    Format(
        "4bit",
        4,
        (
            (65, 69, 74, 80, 88, 98, 112, 136),
            (67, 77, 91, 109, 134, 168, 216, 288),
            (68, 88, 120, 168, 248, 384, 600, 1000),
            tuple(64 * 4**level for level in range(8)),
            tuple(64 * 2**level for level in range(8)),
        ),
        _odd(4),
    ),
    Format(
        "3bit",
        3,
        (
            (67, 77, 88, 106),
            (70, 96, 134, 205),
            (77, 141, 288, 640),
            (64, 1024, 16384, 262144),
            (64, 256, 1024, 4096),
        ),
        _odd(3),
    ),
    Format("2bit", 2, ((69, 90), (77, 160), (83, 384), (80, 4096), (80, 1024)), _odd(2)),
    Format("1bit", 1, ((70,), (80,), (96,), (126,), (64,)), _odd(1)),
)
FORMATS = {each.name: each for each in _FORMATS}
"""The formats by name."""
INDICES = Format("none", 0)  # of messages that hold indices alone
ENTRY_FORMATS = tuple(name for name, each in FORMATS.items() if each.tables or name == "fp32")
DENSE_FORMATS = tuple(name for name, each in FORMATS.items() if each.levels or name == "fp32")
SMALL_FORMATS = tuple(name for name in DENSE_FORMATS if name == "fp32" or FORMATS[name].levels[0] == 0)
