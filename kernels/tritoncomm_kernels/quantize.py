"""Quantize the values of one section to a sign and a level of a table, times one scale.

A section is the part of a message whose entries lie in one range of coordinates. Its scale is a float with few
significant bits, and the levels of the tables have at most 8. The decoded value ``q`` of ``v`` has the sign of ``v``,
is never 0, and satisfies ``|q| <= 2 |v|``. Therefore ``v - q`` is exact in fp32, and a residual can hold it.
"""

from __future__ import annotations

import functools
import itertools
import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

# Levels per sign, in units of 1/64 of the scale. Encoders take the table with the least squared error. Tables 0 to 2
# suit magnitudes whose tails grow wider. Tables 3 and 4 are for anything else.
_MENU: dict[int, tuple[tuple[int, ...], ...]] = {
    1: ((70,), (80,), (96,), (126,), (64,)),
    2: ((69, 90), (77, 160), (83, 384), (80, 4096), (80, 1024)),
    3: (
        (67, 77, 88, 106),
        (70, 96, 134, 205),
        (77, 141, 288, 640),
        (64, 1024, 16384, 262144),
        (64, 256, 1024, 4096),
    ),
    4: (
        (65, 69, 74, 80, 88, 98, 112, 136),
        (67, 77, 91, 109, 134, 168, 216, 288),
        (68, 88, 120, 168, 248, 384, 600, 1000),
        tuple(64 * 4**level for level in range(8)),
        tuple(64 * 2**level for level in range(8)),
    ),
    8: (
        tuple(range(64, 192)),
        tuple((16 + m) * 4 << e for e in range(8) for m in range(16)),
        tuple((8 + m) * 8 << e for e in range(16) for m in range(8)),
        tuple((4 + m) * 16 << e for e in range(32) for m in range(4)),
        tuple((32 + m) * 2 << e for e in range(4) for m in range(32)),
    ),
}
_UNIT = 64
TABLES = 5
_COARSE = (1, 2)  # at these widths, values above the top level may be clipped further
_WIDEST = 3  # the number of the table with the largest top level
LEAST_SCALE = 2.0**-100
_LEAST_SCALE = np.float32(LEAST_SCALE)
SAMPLE = 4096  # squared errors are summed over about this many entries
# A table is allowed up to this multiple of its top level. Above it, v - q could need more than 24 bits.
REACH = 32.0
NAN_HEADER = 0x7FC00000
_TABLE_MASK, _SCALE_MASK = 0xFFFF, 0xFFFF0000
_INFINITY = 0x7F800000  # the bits of fp32 infinity. Negative numbers have larger ones.
_LAST_FINITE_CELL = 0x7F7F
_SCALE_BITS = 8
_CHUNK = 1 << 16  # values that stay in the second-level cache, with the int64 positions that numpy makes of codes


class Quantized(NamedTuple):
    """``codes`` (uint8 ``[m]``: level, and the sign in the highest of ``bits`` bits), and the ``header`` word."""

    codes: NDArray[np.uint8]
    header: int


class Lookup(NamedTuple):
    """Tables of one width. The upper 16 bits of an fp32 number are the position in the lookups.

    ``codes`` (uint8) is ``[tables, 65536]``, the code of the number with its sign. ``rounded`` (fp32) is
    ``[tables, 32768]``, the value of the level of a positive number. ``values`` (fp32) is ``[tables, 2**bits]``, the
    value of every code with its sign. ``reach`` (fp32) is the largest ratio that each table may have to round, and
    ``least_reach`` the least of them. ``cover`` is the largest ratio of two magnitudes in a section. ``half_least`` is
    half of the largest lowest level.
    """

    codes: NDArray[np.uint8]
    rounded: NDArray[np.float32]
    values: NDArray[np.float32]
    reach: NDArray[np.float32]
    least_reach: np.float32
    cover: np.float32
    half_least: np.float32


@functools.cache
def lookup(bits: int) -> Lookup:
    """Return the tables for values of ``bits`` bits."""
    menu = np.array(_MENU[bits], dtype=np.float64) / _UNIT
    # A number is rounded from the centre of its bf16 cell, so that one lookup decides.
    cells = np.minimum(np.arange(1 << 15, dtype=np.uint32), _LAST_FINITE_CELL)
    centres = ((cells << 16) | 0x8000).view(np.float32).astype(np.float64)
    levels = np.stack([np.searchsorted((t[:-1] + t[1:]) / 2, centres) for t in menu]).astype(np.uint8)
    rounded = np.take_along_axis(menu, levels.astype(np.intp), axis=1).astype(np.float32)
    codes = np.concatenate([levels, levels | np.uint8(1 << (bits - 1))], axis=1)
    values = np.concatenate([menu, -menu], axis=1).astype(np.float32)  # exact
    reach = REACH * menu[:, -1].astype(np.float32)
    cover = np.float32(menu[_WIDEST, -1] * (16 if bits in _COARSE else 1))
    return Lookup(codes, rounded, values, reach, reach.min(), cover, np.float32(menu[:, 0].max() / 2))


@functools.cache
def _scale_mask(divisor: int) -> np.uint32:
    """Return the bits of a scale that are kept."""
    found: np.uint32 = np.uint32(0xFFFFFFFF << (24 - scale_bits(divisor)) & 0xFFFFFFFF)
    return found


def scale_bits(divisor: int) -> int:
    """Return the significant bits of a scale whose values are multiplied by ``divisor`` after decoding."""
    return max(1, min(_SCALE_BITS, 11 - (divisor - 1).bit_length()))


def limit(divisor: int) -> float:
    """Return the largest decoded magnitude. Its product with ``divisor`` is finite."""
    return 2.0 ** (127 - (divisor - 1).bit_length())


class Range(NamedTuple):
    """The smallest and the largest magnitude of values, see :func:`extent`, and the ``scale`` of their section.

    The scale is None if a magnitude is NaN or Inf.
    """

    smallest: np.float32
    largest: np.float32
    scale: np.float32 | None


def range_of(values: NDArray[np.float32], bits: int, divisor: int = 1) -> Range:
    """Return the range of ``values`` (fp32 ``[m]``, ``m > 0``), for :func:`sendable` and :func:`quantize`."""
    smallest, largest = extent(values, divisor)
    return Range(smallest, largest, _scale(smallest, largest, bits, divisor) if math.isfinite(largest) else None)


def sendable(
    values: NDArray[np.float32], bits: int, divisor: int = 1, found: Range | None = None
) -> NDArray[np.bool_] | None:
    """Return which of ``values`` (fp32 ``[m]``) a section can hold together, or None if it can hold all.

    The others are too small beside the largest one. The rule is idempotent: the remaining values can be held together.
    Returns None if a value is NaN or Inf. ``found`` is their range, if it is known.
    """
    if not len(values):
        return None
    smallest, _, scale = found or range_of(values, bits, divisor)
    if scale is None:
        return None
    least = scale * lookup(bits).half_least  # never overflows
    if smallest >= least:
        return None
    keep: NDArray[np.bool_] = np.abs(values) / np.float32(divisor) >= least
    return keep


def quantize(values: NDArray[np.float32], bits: int, divisor: int = 1, found: Range | None = None) -> Quantized:
    """Quantize ``values`` (fp32 ``[m]``), which a section can hold together (:func:`sendable`), to ``bits`` bits.

    The values are divided by ``divisor`` first. The receiver's value is multiplied by it when the sender computes its
    residual, so the scale has fewer significant bits for larger divisors. A NaN or Inf gives :data:`NAN_HEADER`, and
    decodes to NaN. ``found`` is the range of the values, if it is known.
    """
    if not len(values):
        return Quantized(np.zeros(0, np.uint8), 0)
    _, largest, scale = found or range_of(values, bits, divisor)
    if scale is None:
        return Quantized(np.zeros(len(values), np.uint8), NAN_HEADER)
    tables = lookup(bits)
    if len(values) <= SAMPLE:  # the ratios of all values serve for the sample too
        ratios = _ratios(values, scale, divisor)
        table = _best_table(tables, np.abs(ratios), largest / scale)
        header = int(scale.view(np.uint32)) | table
        return Quantized(tables.codes[table].take(ratios.view(np.uint32) >> 16, mode="wrap"), header)
    sample = _ratios(np.abs(values[:: -(-len(values) // SAMPLE)]), scale, divisor)
    table = _best_table(tables, sample, largest / scale)
    codes = np.empty(len(values), np.uint8)
    for start in range(0, len(values), _CHUNK):
        part = slice(start, start + _CHUNK)
        # One lookup gives level and sign, because the ratio of a negative number only differs in its sign.
        cells = _ratios(values[part], scale, divisor).view(np.uint32) >> 16
        tables.codes[table].take(cells, out=codes[part], mode="wrap")
    return Quantized(codes, int(scale.view(np.uint32)) | table)


def _best_table(tables: Lookup, sample: NDArray[np.float32], top: np.float32) -> int:
    """Return the number of the table with the least squared error for ratios (fp32 ``[m]``) of at most ``top``."""
    differences = sample - tables.rounded.take(sample.view(np.uint32) >> 16, axis=1)
    errors = np.add.reduce(np.multiply(differences, differences, out=differences), axis=1, dtype=np.float64)
    if top > tables.least_reach:
        errors[top > tables.reach] = math.inf
    return int(errors.argmin())


def dequantize(codes: NDArray[np.integer], header: int, bits: int, divisor: int = 1) -> NDArray[np.float32]:
    """Return the values (fp32 ``[m]``) of ``codes``. Raises ``ValueError`` if no encoder writes ``header``."""
    if header == NAN_HEADER:
        return np.full(len(codes), np.nan, np.float32)
    if not len(codes):
        return np.zeros(0, np.float32)
    check_header(header)
    # The values of all codes are few, and one gather applies table, sign and scale. A level has at most 8 bits and the
    # scale 8, so a product is rounded only if it is denormal, and then once.
    scale, levels = np.uint32(header & _SCALE_MASK).view(np.float32), lookup(bits).values[header & _TABLE_MASK]
    largest = limit(divisor)
    if float(scale) * float(-levels[-1]) > largest:
        table = np.clip(levels.astype(np.float64) * scale, -largest, largest).astype(np.float32)
    else:
        table = levels * scale
    if len(codes) <= _CHUNK:
        few: NDArray[np.float32] = table.take(codes, mode="wrap")
        return few
    decoded = np.empty(len(codes), np.float32)
    for start in range(0, len(codes), _CHUNK):
        table.take(codes[start : start + _CHUNK], out=decoded[start : start + _CHUNK], mode="wrap")
    return decoded


def check_header(header: int) -> None:
    """Raise ``ValueError`` if no encoder writes ``header`` (32 bits, unsigned) for a section with entries."""
    if header != NAN_HEADER and (header & _TABLE_MASK >= TABLES or not 0 < header & _SCALE_MASK < _INFINITY):
        raise ValueError(f"header {header:#010x} has no positive finite scale or no table of the menu")


def extent(values: NDArray[np.float32], divisor: int = 1) -> tuple[np.float32, np.float32]:
    """Return the smallest and the largest magnitude of ``values`` (fp32 ``[m]``, ``m > 0``) divided by ``divisor``.

    Both are NaN if a value is NaN.
    """
    if len(values) <= _CHUNK:
        magnitudes = np.abs(values)
        smallest, largest = np.minimum.reduce(magnitudes), np.maximum.reduce(magnitudes)
        return (smallest, largest) if divisor == 1 else (smallest / np.float32(divisor), largest / np.float32(divisor))
    parts = []
    for start in range(0, len(values), _CHUNK):
        magnitudes = np.abs(values[start : start + _CHUNK])
        parts.append((magnitudes.min(), magnitudes.max()))
    ends = np.array(parts)
    smallest, largest = ends[:, 0].min(), ends[:, 1].max()
    return smallest / np.float32(divisor), largest / np.float32(divisor)


def _ratios(values: NDArray[np.float32], scale: np.float32, divisor: int) -> NDArray[np.float32]:
    """Return ``values`` divided by ``divisor`` and by ``scale``, each with one rounding."""
    found: NDArray[np.float32] = np.divide(values if divisor == 1 else np.divide(values, np.float32(divisor)), scale)
    return found


def _scale(smallest: np.float32, largest: np.float32, bits: int, divisor: int) -> np.float32:
    """Return the scale of a section: about its smallest magnitude, rounded towards zero."""
    covered = max(smallest, largest / lookup(bits).cover, _LEAST_SCALE)
    found: np.float32 = (covered.view(np.uint32) & _scale_mask(divisor)).view(np.float32)
    return found


def menu(bits: int) -> tuple[tuple[float, ...], ...]:
    """Return the levels of all tables for ``bits`` bits, in units of the scale."""
    return tuple(tuple(level / _UNIT for level in table) for table in _MENU[bits])


def midpoints(bits: int) -> tuple[tuple[float, ...], ...]:
    """Return the numbers that separate the levels of all tables for ``bits`` bits."""
    return tuple(tuple((a + b) / 2 for a, b in itertools.pairwise(table)) for table in menu(bits))
