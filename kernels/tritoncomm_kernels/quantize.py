"""Quantize the values of one section to a sign and a level of a table, times one scale.

A section is the part of a message whose entries lie in one range of coordinates. Its scale is a float with few
significant bits, and the levels of the tables have at most 8. The decoded value ``q`` of ``v`` has the sign of ``v``,
is never 0, and satisfies ``|q| <= 2 |v|``. Therefore ``v - q`` is exact in fp32, and a residual can hold it.
"""

from __future__ import annotations

import functools
import math
import struct
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tritoncomm_kernels.formats import Format

_UNIT = 64
_COARSE = 2  # up to so many levels per sign, values above the top level may be clipped further
LEAST_SCALE = 2.0**-100
SAMPLE = 4096  # squared errors are summed over about this many entries
# A table is allowed up to this multiple of its top level. Above it, v - q could need more than 24 bits.
REACH = 32.0
NAN_HEADER = 0x7FC00000
_TABLE_MASK, _SCALE_MASK = 0xFFFF, 0xFFFF0000
_INFINITY = 0x7F800000  # the bits of fp32 infinity. Negative numbers have larger ones.
_LAST_FINITE_CELL = 0x7F7F
_SCALE_BITS = 8
# Single numbers change between fp32 and its bits by these, because views of numpy's scalars take five times as long.
_FLOAT, _WORD = struct.Struct("<f"), struct.Struct("<I")


class Quantized(NamedTuple):
    """``codes`` (uint8 ``[m]``: level, and the sign in the highest of ``bits`` bits), and the ``header`` word.

    ``rounded`` (fp32 ``[m]``) are the values that :func:`dequantize` makes of them.
    """

    codes: NDArray[np.uint8]
    header: int
    rounded: NDArray[np.float32]


class Lookup(NamedTuple):
    """Tables of one format. The upper 16 bits of an fp32 number are the position in the lookups.

    ``codes`` (uint8) and ``rounded`` (fp32) are ``[tables, 65536]``: the code of the number with its sign, and the
    value of this code. ``values`` (fp32) is ``[tables, 2**bits]``, the value of every code with its sign. ``tops`` are
    the largest values. ``reach`` (fp32) is the largest ratio that each table may have to round. ``cover`` is the
    largest ratio of two magnitudes in a section. ``half_least`` is half of the largest lowest level.
    """

    codes: NDArray[np.uint8]
    rounded: NDArray[np.float32]
    values: NDArray[np.float32]
    tops: tuple[float, ...]
    reach: NDArray[np.float32]
    cover: float
    half_least: float


@functools.cache
def lookup(fmt: Format) -> Lookup:
    """Return the tables of a format."""
    menu = np.array(fmt.tables, dtype=np.float64) / _UNIT
    codes = np.stack([codes_of_cells(table) for table in menu])
    values = np.concatenate([menu, -menu], axis=1).astype(np.float32)  # exact
    rounded = np.take_along_axis(values, codes.astype(np.intp), axis=1)
    tops = menu[:, -1]
    reach = REACH * tops.astype(np.float32)
    cover = float(tops.max() * (16 if menu.shape[1] <= _COARSE else 1))
    half_least = float(menu[:, 0].max() / 2)
    return Lookup(codes, rounded, values, tuple(tops.tolist()), reach, cover, half_least)


def codes_of_cells(levels: NDArray[np.float64]) -> NDArray[np.uint8]:
    """Return the code of every number by its upper 16 bits (uint8 ``[65536]``): the nearest level, and above it a sign.

    A number is rounded from the centre of its bf16 cell, so that one lookup decides. The code of NaN is 0.
    """
    cells = np.minimum(np.arange(1 << 15, dtype=np.uint32), _LAST_FINITE_CELL)
    centres = ((cells << 16) | 0x8000).view(np.float32).astype(np.float64)
    found = np.searchsorted((levels[:-1] + levels[1:]) / 2, centres).astype(np.uint8)
    codes = np.concatenate([found, found | np.uint8(len(levels))])
    codes.reshape(2, -1)[:, _LAST_FINITE_CELL + 2 :] = 0
    return codes


@functools.cache
def _scale_mask(divisor: int) -> int:
    """Return the bits of a scale that are kept."""
    return 0xFFFFFFFF << (24 - scale_bits(divisor)) & 0xFFFFFFFF


@functools.cache
def scale_bits(divisor: int) -> int:
    """Return the significant bits of a scale whose values are multiplied by ``divisor`` after decoding."""
    return max(1, min(_SCALE_BITS, 11 - (divisor - 1).bit_length()))


@functools.cache
def limit(divisor: int) -> float:
    """Return the largest decoded magnitude. Its product with ``divisor`` is finite."""
    return 2.0 ** (127 - (divisor - 1).bit_length())


class Range(NamedTuple):
    """The smallest and the largest magnitude of values, see :func:`extent`, and the ``scale`` of their section.

    ``scale_word`` holds its bits. The scale is None if a magnitude is NaN or Inf. All numbers are exact in fp32.
    """

    smallest: float
    largest: float
    scale: float | None
    scale_word: int


def range_of(values: NDArray[np.float32], fmt: Format, divisor: int = 1) -> Range:
    """Return the range of ``values`` (fp32 ``[m]``, ``m > 0``), for :func:`sendable` and :func:`quantize`."""
    smallest, largest = extent(values, divisor)
    if not math.isfinite(largest):
        return Range(smallest, largest, None, NAN_HEADER)
    # The scale is about the smallest magnitude, rounded towards zero.
    covered = max(smallest, largest / lookup(fmt).cover, LEAST_SCALE)
    word = _WORD.unpack(_FLOAT.pack(covered))[0] & _scale_mask(divisor)
    return Range(smallest, largest, _FLOAT.unpack(_WORD.pack(word))[0], word)


def sendable(
    values: NDArray[np.float32], fmt: Format, divisor: int = 1, found: Range | None = None
) -> NDArray[np.bool_] | None:
    """Return which of ``values`` (fp32 ``[m]``) a section can hold together, or None if it can hold all.

    The others are too small beside the largest one. The rule is idempotent: the remaining values can be held together.
    Returns None if a value is NaN or Inf. ``found`` is their range, if it is known.
    """
    if not values.size:
        return None
    smallest, _, scale, _ = found or range_of(values, fmt, divisor)
    if scale is None:
        return None
    least = scale * lookup(fmt).half_least  # never overflows
    if smallest >= least:
        return None
    keep: NDArray[np.bool_] = np.abs(values) / np.float32(divisor) >= least
    return keep


def quantize(values: NDArray[np.float32], fmt: Format, divisor: int = 1, found: Range | None = None) -> Quantized:
    """Quantize ``values`` (fp32 ``[m]``), which a section can hold together (:func:`sendable`), to a format.

    The values are divided by ``divisor`` first. The receiver's value is multiplied by it when the sender computes its
    residual, so the scale has fewer significant bits for larger divisors. A NaN or Inf gives :data:`NAN_HEADER`, and
    decodes to NaN. ``found`` is the range of the values, if it is known.
    """
    if not values.size:
        return Quantized(np.zeros(0, np.uint8), 0, np.zeros(0, np.float32))
    _, largest, scale, word = found or range_of(values, fmt, divisor)
    if scale is None:
        return Quantized(np.zeros(len(values), np.uint8), NAN_HEADER, np.full(len(values), np.nan, np.float32))
    tables = lookup(fmt)
    ratios = _ratios(values, scale, divisor)
    cells = ratios.view(np.uint16)[1::2].astype(np.intp)  # once for all lookups, which would do it each
    sample = slice(None, None, -(-len(values) // SAMPLE))
    levels = tables.rounded.take(cells[sample], axis=1, mode="wrap")
    table = _best_table(tables, ratios[sample], levels, largest / scale)
    codes = tables.codes[table].take(cells, mode="wrap")
    if scale * tables.tops[table] > limit(divisor):
        return Quantized(codes, word | table, dequantize(codes, word | table, fmt, divisor))
    rounded = levels[table] if values.size <= SAMPLE else tables.rounded[table].take(cells, mode="wrap")
    return Quantized(codes, word | table, rounded * scale)


def _best_table(tables: Lookup, ratios: NDArray[np.float32], levels: NDArray[np.float32], top: float) -> int:
    """Return the number of the table with the least squared error for ``ratios`` (``[m]``) of at most ``top``.

    ``levels`` (``[tables, m]``) are what the tables make of them. Squares are summed in fp64.
    """
    squares = levels - ratios
    squares *= squares
    errors = np.add.reduce(squares, axis=1, dtype=np.float64)
    errors[top > tables.reach] = math.inf
    return int(errors.argmin())


def dequantize(codes: NDArray[np.integer], header: int, fmt: Format, divisor: int = 1) -> NDArray[np.float32]:
    """Return the values (fp32 ``[m]``) of ``codes``. Raises ``ValueError`` if no encoder writes ``header``."""
    if header == NAN_HEADER:
        return np.full(len(codes), np.nan, np.float32)
    if not len(codes):
        return np.zeros(0, np.float32)
    check_header(header, fmt)
    # The values of all codes are few, and one gather applies table, sign and scale. A level has at most 8 bits and the
    # scale 8, so a product is rounded only if it is denormal, and then once.
    tables, table = lookup(fmt), header & _TABLE_MASK
    scale = _FLOAT.unpack(_WORD.pack(header & _SCALE_MASK))[0]
    if scale * tables.tops[table] > limit(divisor):
        largest = limit(divisor)
        values = np.clip(tables.values[table].astype(np.float64) * scale, -largest, largest).astype(np.float32)
    else:
        values = tables.values[table] * scale
    decoded: NDArray[np.float32] = values.take(codes, mode="wrap")
    return decoded


def check_header(header: int, fmt: Format) -> None:
    """Raise ``ValueError`` if no encoder writes ``header`` (32 bits, unsigned) for a section with entries."""
    if header != NAN_HEADER and (header & _TABLE_MASK >= len(fmt.tables) or not 0 < header & _SCALE_MASK < _INFINITY):
        raise ValueError(f"header {header:#010x} has no positive finite scale or no table of the format")


def extent(values: NDArray[np.float32], divisor: int = 1) -> tuple[float, float]:
    """Return the smallest and the largest magnitude of ``values`` (fp32 ``[m]``, ``m > 0``) divided by ``divisor``.

    The quotients are rounded to fp32. Both are NaN if a value is NaN.
    """
    magnitudes = np.abs(values)
    # The positions take numpy a third of the time of the numbers. A NaN comes first in both.
    ends = magnitudes[magnitudes.argmin()], magnitudes[magnitudes.argmax()]
    if divisor > 1:
        ends = ends[0] / np.float32(divisor), ends[1] / np.float32(divisor)
    return float(ends[0]), float(ends[1])


def _ratios(values: NDArray[np.float32], scale: float, divisor: int) -> NDArray[np.float32]:
    """Return ``values`` divided by ``divisor`` and by ``scale``, each with one rounding."""
    found: NDArray[np.float32] = (values if divisor == 1 else values / np.float32(divisor)) / scale
    return found


def menu(fmt: Format) -> tuple[tuple[float, ...], ...]:
    """Return the levels of all tables of a format, in units of the scale."""
    return tuple(tuple(level / _UNIT for level in table) for table in fmt.tables)
