"""What an instruction computes in its lane: one function per family of opcodes, on arrays with an element per lane.

Each function takes the parts of an opcode and returns the types of its sources and the operation. A modifier that is
not known raises ``ValueError``. Integers wrap. Floats are IEEE numbers with denormals. A NaN has the bits that an H200
gives it: the same for each type, but fp64 arithmetic and some conversions keep those of a source.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from typing import Any, NamedTuple

import numpy as np

UNSIGNED = {8: np.uint8, 16: np.uint16, 32: np.uint32, 64: np.uint64}
SIGNED = {8: np.int8, 16: np.int16, 32: np.int32, 64: np.int64}
FLOATS = {16: np.float16, 32: np.float32, 64: np.float64}
NAN = {16: 0x7FFF, 32: 0x7FFFFFFF, 64: 0x7FF8000000000000}
INVALID = 0xFFF8000000000000  # what fp64 arithmetic makes of numbers
QUIET = 1 << 51
COMPARISONS = {
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal,
}  # fmt: skip


class Operation(NamedTuple):
    """The types of the sources, the operation, and what must not be true of any lane: a name, and a test.

    With ``third``, there may be one source more, of the same type.
    """

    kinds: tuple[str, ...]
    function: Callable[..., Any]
    check: tuple[str, Callable[..., Any]] | None = None
    third: bool = False


def width_of(kind: str) -> int:
    """Return the width of a type in bits."""
    return int(kind.lstrip("subf"))


def dtype_of(kind: str) -> Any:
    """Return numpy's type. The bits of bf16 are held as integers."""
    if kind.startswith("bf"):
        return UNSIGNED[width_of(kind)]
    return {"s": SIGNED, "u": UNSIGNED, "b": UNSIGNED, "f": FLOATS}[kind[0]][width_of(kind)]


def canonical(values: np.ndarray) -> np.ndarray:
    """Return the bits of floats that arithmetic made."""
    width = 8 * values.dtype.itemsize
    bits, bad = values.view(UNSIGNED[width]), np.isnan(values)
    return np.where(bad, UNSIGNED[width](NAN[width]), bits) if bad.any() else bits


def _propagated(result: np.ndarray, *sources: np.ndarray) -> np.ndarray:
    """Return the bits of fp64 numbers. A NaN has those of the last of ``sources`` that is one."""
    bits = np.asarray(result).view(np.uint64)
    if not (bad := np.isnan(result)).any():
        return bits
    found = np.full(np.shape(result), INVALID, np.uint64)
    for each in sources:
        found = np.where(np.isnan(each), np.asarray(each).view(np.uint64) | np.uint64(QUIET), found)
    return np.where(bad, found, bits)


def plain(parts: list[str], count: int = 1) -> None:
    """Raise ``ValueError`` if an opcode has modifiers beside its ``count`` types."""
    if len(parts) != 1 + count:
        raise ValueError(f"modifier of {'.'.join(parts)}")


def is_float(parts: list[str]) -> bool:
    """Return True if the last type is a float."""
    return parts[-1].lstrip("b")[0] == "f"


def _sum_to_odd(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return a + b of fp32 values in fp64, rounded to odd, so that rounding it again rounds the exact sum."""
    a, b = a.astype(np.float64), b.astype(np.float64)
    total = a + b
    part = total - a
    error = (a - (total - part)) + (b - part)
    bits = total.view(np.int64)
    inexact = np.isfinite(total) & (error != 0) & (bits & 1 == 0)
    return np.where(inexact, bits + np.where((error > 0) == (total > 0), 1, -1), bits).view(np.float64)


def _toward_zero(values: np.ndarray) -> np.ndarray:
    rounded = values.astype(np.float32)
    away = np.isfinite(values) & (np.abs(rounded.astype(np.float64)) > np.abs(values))
    return np.where(away, np.nextafter(rounded, np.float32(0)), rounded)


def _floats(parts: list[str], nearest: Callable[..., Any], exact: Callable[..., Any] | None = None) -> Operation:
    """Return arithmetic of two floats with the rounding that the instruction names."""
    _, rounding, *kinds = parts
    if kinds == ["f32x2"] and rounding == "rn":
        return Operation(("b64", "b64"), lambda a, b: _each_half(nearest, a, b))
    if len(kinds) == 2 and kinds[0] == "f32" and rounding == "rn":  # the first source is narrower
        widen = _widened(kinds[1])
        return Operation((kinds[1], "f32"), lambda a, b: canonical(nearest(widen(a), b)))
    if kinds not in (["f32"], ["f64"]):
        raise ValueError(f"types of {'.'.join(parts)}")
    if rounding == "rz" and kinds == ["f32"] and exact is not None:
        return Operation(("f32", "f32"), lambda a, b: canonical(_toward_zero(exact(a, b))))
    if rounding != "rn":
        raise ValueError(f"rounding of {'.'.join(parts)}")
    if kinds == ["f64"]:
        if nearest is np.divide:  # made of other operations, in which the first source comes last
            return Operation(("f64", "f64"), lambda a, b: _propagated(nearest(a, b), b, a))
        return Operation(("f64", "f64"), lambda a, b: _propagated(nearest(a, b), a, b))
    return Operation(("f32", "f32"), lambda a, b: canonical(nearest(a, b)))


def _each_half(function: Callable[..., Any], *sources: np.ndarray) -> np.ndarray:
    low, high = (
        canonical(function(*((np.asarray(s) >> np.uint64(at)).astype(np.uint32).view(np.float32) for s in sources)))
        for at in (0, 32)
    )
    return low.astype(np.uint64) | high.astype(np.uint64) << np.uint64(32)


def _widened(kind: str) -> Callable[[np.ndarray], np.ndarray]:
    if kind == "bf16":
        return lambda a: (np.asarray(a).astype(np.uint32) << np.uint32(16)).view(np.float32)
    if kind == "f16":
        return lambda a: np.asarray(a).astype(np.float32)
    raise ValueError(kind)


def add(parts: list[str]) -> Operation:
    """Sums."""
    if is_float(parts):
        return _floats(parts, np.add, _sum_to_odd)
    plain(parts)
    return Operation((parts[1],) * 2, np.add)


def sub(parts: list[str]) -> Operation:
    """Differences."""
    if is_float(parts):
        return _floats(parts, np.subtract, lambda a, b: _sum_to_odd(a, -b))
    plain(parts)
    return Operation((parts[1],) * 2, np.subtract)


def mul(parts: list[str]) -> Operation:
    """Products. The product of two fp32 numbers is exact in fp64."""
    if is_float(parts):
        return _floats(parts, np.multiply, lambda a, b: a.astype(np.float64) * b.astype(np.float64))
    plain(parts, 2)
    return Operation((parts[2],) * 2, _product(parts[1], parts[2]))


def mad(parts: list[str]) -> Operation:
    """Products of integers, and a sum."""
    plain(parts, 2)
    _, mode, kind = parts
    product = _product(mode, kind)
    third = kind[0] + str(2 * width_of(kind)) if mode == "wide" else kind
    return Operation((kind, kind, third), lambda a, b, c: product(a, b) + c)


def _product(mode: str, kind: str) -> Callable[..., Any]:
    if mode == "lo":
        return np.multiply
    if mode == "wide":
        wide = dtype_of(kind[0] + str(2 * width_of(kind)))
        return lambda a, b: np.asarray(a).astype(wide) * np.asarray(b).astype(wide)
    raise ValueError(mode)


def div(parts: list[str]) -> Operation:
    """Quotients. Those of integers are rounded toward 0."""
    if is_float(parts):
        return _floats(parts, np.divide)
    plain(parts)

    def quotient(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        return (a - np.fmod(a, b)) // b

    return Operation((parts[1],) * 2, quotient, ("division by 0", lambda a, b: np.equal(b, 0)))


def rem(parts: list[str]) -> Operation:
    """Remainders of integers, with the sign of the dividend."""
    plain(parts)
    return Operation((parts[1],) * 2, np.fmod, ("division by 0", lambda a, b: np.equal(b, 0)))


def sqrt(parts: list[str]) -> Operation:
    """Square roots."""
    if parts[1:] != ["rn", "f32"]:
        raise ValueError(parts)
    return Operation(("f32",), lambda a: canonical(np.sqrt(a)))


def extreme(parts: list[str]) -> Operation:
    """The smallest or largest number, of two, or in fp32 of three. A NaN is no number, and -0 is less than 0."""
    plain(parts)
    kind, least = parts[1], parts[0] == "min"
    if not is_float(parts):
        return Operation((kind,) * 2, np.minimum if least else np.maximum)
    dtype = dtype_of(kind)

    def either(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        bits = UNSIGNED[width_of(kind)]
        x, y = np.asarray(a).view(bits), np.asarray(b).view(bits)
        number = np.asarray(np.fmin(a, b) if least else np.fmax(a, b))
        found = _propagated(number, a, b) if kind == "f64" else canonical(number)
        return np.where(a == b, (x | y) if least else (x & y), found).view(dtype)

    def of_all(*values: np.ndarray) -> np.ndarray:
        return reduce(either, values)

    return Operation((kind,) * 2, of_all, third=kind == "f32")


def neg(parts: list[str]) -> Operation:
    """Negative numbers. That of a NaN in fp32 is the canonical one."""
    plain(parts)
    return Operation((parts[1],), (lambda a: canonical(np.negative(a))) if parts[1] == "f32" else np.negative)


def absolute(parts: list[str]) -> Operation:
    """Magnitudes. That of a NaN in fp32 is the canonical one, and that of the least integer is itself."""
    plain(parts)
    if parts[1] in {"s32", "s64"}:
        return Operation((parts[1],), np.abs)
    if parts[1] in {"f16x2", "bf16x2"}:
        infinity = {"f16x2": 0x7C00, "bf16x2": 0x7F80}[parts[1]]
        return Operation(("b32",), lambda a: _magnitudes(a, infinity))
    if parts[1] != "f32":
        raise ValueError(parts)
    return Operation(("f32",), lambda a: canonical(np.abs(a)))


def _magnitudes(words: np.ndarray, infinity: int) -> np.ndarray:
    """Return the magnitudes of two 16-bit floats in each word."""
    parts = [words >> np.uint32(at) & np.uint32(0x7FFF) for at in (0, 16)]
    low, high = (np.where(part > infinity, np.uint32(NAN[16]), part) for part in parts)
    return low | high << np.uint32(16)


def logic(parts: list[str]) -> Operation:
    """Operations on bits and predicates."""
    plain(parts)
    function = {
        "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor, "not": np.invert,
    }[parts[0]]  # fmt: skip
    return Operation((parts[1],) * (1 if parts[0] == "not" else 2), function)


def shift(parts: list[str]) -> Operation:
    """Shifts. By the width, all bits are lost, or are the sign. By more, the compiler has made a mistake."""
    plain(parts)
    kind, width = parts[1], width_of(parts[1])
    signed = kind[0] == "s" and parts[0] == "shr"

    def shifted(a: np.ndarray, by: np.ndarray) -> np.ndarray:
        over = by >= width
        count = np.where(over, width - 1 if signed else 0, by).astype(np.asarray(a).dtype)
        found = np.left_shift(a, count) if parts[0] == "shl" else np.right_shift(a, count)
        return found if signed else np.where(over, found.dtype.type(0), found)

    return Operation((kind, "u32"), shifted, ("shift", lambda a, by: by > width))


def bfe(parts: list[str]) -> Operation:
    """A field of bits: from a position, a count. Beyond the top bit, a signed field repeats it."""
    plain(parts)
    kind = parts[1]
    if kind not in {"u32", "s32"}:
        raise ValueError(kind)

    def field(a: np.ndarray, at: np.ndarray, count: np.ndarray) -> np.ndarray:
        at, count = (np.asarray(x).astype(np.int64) & 255 for x in (at, count))
        wide = np.asarray(a).astype(np.int64) >> np.minimum(at, 63)  # the sign is above the top bit
        if kind == "u32":
            return (wide & ((np.int64(1) << np.minimum(count, 32)) - 1)).astype(np.uint32)
        above = 64 - np.clip(count, 1, 32)
        return np.where(count == 0, 0, wide << above >> above).astype(np.int32)

    return Operation((kind, "u32", "u32"), field)


def popc(parts: list[str]) -> Operation:
    """The number of set bits."""
    plain(parts)
    return Operation((parts[1],), lambda a: np.bitwise_count(a).astype(np.uint32))


def prmt(parts: list[str]) -> Operation:
    """Bytes chosen from two words. The top bit of a choice repeats the sign of the byte."""
    plain(parts)

    def permuted(a: np.ndarray, b: np.ndarray, choice: np.ndarray) -> np.ndarray:
        both = np.asarray(a).astype(np.uint64) | np.asarray(b).astype(np.uint64) << np.uint64(32)
        found = np.zeros(np.broadcast_shapes(both.shape, np.shape(choice)), np.uint32)
        for i in range(4):
            digit = np.asarray(choice) >> np.uint32(4 * i)
            byte = (both >> (8 * (digit & 7)).astype(np.uint64)).astype(np.uint32) & 255
            byte = np.where(digit & 8, (byte >> 7) * 255, byte)
            found = found | byte.astype(np.uint32) << np.uint32(8 * i)
        return found

    return Operation(("b32", "b32", "b32"), permuted)


def selp(parts: list[str]) -> Operation:
    """The first source where a predicate is true, and the second elsewhere."""
    plain(parts)
    bits = f"b{width_of(parts[1])}"
    return Operation((bits, bits, "pred"), lambda a, b, chosen: np.where(chosen, a, b))


def setp(parts: list[str]) -> Operation:
    """Comparisons. With a NaN only ``nan`` is true. Two floats in 32 bits give two predicates, low bits first."""
    _, name, kind = parts
    if kind in {"f16x2", "bf16x2"}:
        (one, _), compare, *_ = setp([*parts[:2], kind.removesuffix("x2")])

        def both(*words: np.ndarray) -> list[np.ndarray]:
            return [
                compare(*((word >> np.uint32(at)).astype(np.uint16).view(dtype_of(one)) for word in words))
                for at in (0, 16)
            ]

        return Operation(("b32", "b32"), both)
    if not is_float([kind]) and kind not in {"bf16", "f16"}:
        return Operation((kind, kind), COMPARISONS[name])
    widen = _widened(kind) if kind in {"bf16", "f16"} else np.asarray

    def unordered(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        return np.isnan(widen(a)) | np.isnan(widen(b))

    if name == "nan":
        return Operation((kind, kind), unordered)
    if name == "num":
        return Operation((kind, kind), lambda a, b: ~unordered(a, b))
    compare = COMPARISONS[name]
    return Operation((kind, kind), lambda a, b: compare(widen(a), widen(b)) & ~unordered(a, b))


def cvt(parts: list[str]) -> Operation:
    """Conversions."""
    *mode, to, source = parts[1:]
    if not is_float([to]) and not is_float([source]):
        plain(parts, 2)
        return Operation((source,), lambda a: np.asarray(a).astype(dtype_of(to)))
    if mode == ["rn"] and (to, source) == ("bf16", "f32"):
        return Operation(("f32",), _to_bf16)
    if mode == ["rn"] and to in {"f16x2", "bf16x2"} and source == "f32":  # the first source becomes the upper half
        half = cvt(["cvt", "rn", to.removesuffix("x2"), "f32"]).function
        return Operation(("f32", "f32"), lambda a, b: half(a).astype(np.uint32) << np.uint32(16) | half(b))
    if not mode and (to, source) == ("f32", "bf16"):
        return Operation((source,), lambda a: _widened(source)(a).view(np.uint32))
    if is_float([to]):
        widens = source[0] == "f" and width_of(source) < width_of(to)
        if mode != ([] if widens else ["rn"]) or "b" in to + source:
            raise ValueError(f"rounding of {'.'.join(parts)}")
        if {to, source} == {"f32", "f64"}:
            return Operation((source,), lambda a: _with_payload(np.asarray(a), to))
        return Operation((source,), lambda a: canonical(np.asarray(a).astype(dtype_of(to))))
    if mode != ["rzi"] or source not in {"f32", "f64"} or width_of(to) < 32:
        raise ValueError(f"rounding of {'.'.join(parts)}")
    return Operation((source,), lambda a: _to_integer(np.asarray(a), to, source))


def _with_payload(values: np.ndarray, to: str) -> np.ndarray:
    """Return the bits of fp32 numbers as fp64 ones, or the other way round. A NaN keeps its upper bits."""
    wide = dtype_of(f"u{8 * values.dtype.itemsize}")
    bits, number = values.view(wide).astype(np.uint64), values.astype(dtype_of(to)).view(dtype_of(f"u{width_of(to)}"))
    if to == "f32":
        nan = (
            bits >> np.uint64(32) & np.uint64(1 << 31)
            | bits >> np.uint64(29) & np.uint64(0x3FFFFF)
            | np.uint64(0x7FC00000)
        )
    else:
        nan = (bits & np.uint64(1 << 31)) << np.uint64(32) | (bits & np.uint64(0x3FFFFF)) << np.uint64(29)
        nan |= np.uint64(NAN[64])
    return np.where(np.isnan(values), nan.astype(number.dtype), number)


def _to_bf16(values: np.ndarray) -> np.ndarray:
    bits = np.asarray(values).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(values), np.uint32(0x7FFF), rounded).astype(np.uint16)


def _to_integer(values: np.ndarray, to: str, source: str) -> np.ndarray:
    """Round toward 0, and saturate. A NaN becomes 0, or 1 in the top bit if a type is of 64 bits."""
    dtype, width = dtype_of(to), width_of(to)
    whole, least, most = np.trunc(values.astype(np.float64)), np.iinfo(dtype).min, np.iinfo(dtype).max
    inside = (whole >= float(least)) & (whole <= float(most)) & (whole < 2.0 ** (width - (to[0] == "s")))
    found = np.where(inside, whole, 0).astype(dtype)
    found = np.where(inside, found, np.where(whole > 0, dtype(most), dtype(least)))
    nan = 0 if source == "f32" and width == 32 else 1 << (width - 1)
    return np.where(np.isnan(values), np.array(nan, UNSIGNED[width]).view(dtype), found)


FAMILIES: dict[str, Callable[[list[str]], Operation]] = {
    "add": add, "sub": sub, "mul": mul, "mad": mad, "div": div, "rem": rem, "sqrt": sqrt,
    "min": extreme, "max": extreme, "neg": neg, "abs": absolute,
    "and": logic, "or": logic, "xor": logic, "not": logic,
    "shl": shift, "shr": shift, "bfe": bfe, "popc": popc, "prmt": prmt,
    "selp": selp, "setp": setp, "cvt": cvt,
}  # fmt: skip
