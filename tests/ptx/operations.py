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


def _floats(parts: list[str], function: Callable[..., Any]) -> Operation:
    """Return arithmetic of two floats, rounded to nearest."""
    _, rounding, *kinds = parts
    if rounding != "rn":
        raise ValueError(f"rounding of {'.'.join(parts)}")
    if kinds == ["f32x2"]:
        return Operation(("b64", "b64"), lambda a, b: _each_half(function, a, b))
    if len(kinds) == 2 and kinds[1] != "f32" and kinds[0] == "f32":  # the first source is narrower
        widen = _widened(kinds[1])
        return Operation((kinds[1], "f32"), lambda a, b: canonical(function(widen(a), b)))
    if kinds == ["f32"]:
        return Operation(("f32", "f32"), lambda a, b: canonical(function(a, b)))
    if kinds != ["f64"] or function is np.divide:
        raise ValueError(f"types of {'.'.join(parts)}")
    return Operation(("f64", "f64"), lambda a, b: _propagated(function(a, b), a, b))


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
    """Sums and differences."""
    function = {"add": np.add, "sub": np.subtract}[parts[0]]
    if is_float(parts):
        return _floats(parts, function)
    plain(parts)
    return Operation((parts[1],) * 2, function)


def mul(parts: list[str]) -> Operation:
    """Products."""
    if is_float(parts):
        return _floats(parts, np.multiply)
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
    """Quotients, and remainders with the sign of the dividend. Quotients of integers are rounded toward 0."""
    if is_float(parts):
        return _floats(parts, np.divide)
    plain(parts)
    function = {"div": lambda a, b: (a - np.fmod(a, b)) // b, "rem": np.fmod}[parts[0]]
    return Operation((parts[1],) * 2, function, ("division by 0", lambda a, b: np.equal(b, 0)))


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
    if kind != "f32":
        raise ValueError(kind)

    def either(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        x, y = np.asarray(a).view(np.uint32), np.asarray(b).view(np.uint32)
        found = canonical(np.asarray(np.fmin(a, b) if least else np.fmax(a, b)))
        return np.where(a == b, (x | y) if least else (x & y), found).view(np.float32)

    return Operation((kind,) * 2, lambda *values: reduce(either, values), third=True)


def of_sign(parts: list[str]) -> Operation:
    """Negative numbers and magnitudes. That of a NaN in fp32 is the canonical one."""
    plain(parts)
    function = {"neg": np.negative, "abs": np.abs}[parts[0]]
    if parts[1] == "f32":
        return Operation(("f32",), lambda a: canonical(function(a)))
    if parts[0] == "abs" or parts[1] not in {"s32", "s64"}:
        raise ValueError(parts)
    return Operation((parts[1],), function)


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
        shift = np.left_shift if parts[0] == "shl" else np.right_shift
        if np.ndim(by) == 0 and by < width:
            return shift(a, np.asarray(a).dtype.type(by))
        over = by >= width
        count = np.where(over, width - 1 if signed else 0, by).astype(np.asarray(a).dtype)
        found = shift(a, count)
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
    """Comparisons. With a NaN only ``nan`` is true."""
    _, name, kind = parts
    widen = _widened(kind) if kind in {"bf16", "f16"} else np.asarray
    if not is_float([kind]):
        return Operation((kind, kind), COMPARISONS[name])

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
    if not mode and (to, source) == ("f32", "bf16"):
        return Operation((source,), lambda a: _widened(source)(a).view(np.uint32))
    if is_float([to]):
        widens = source[0] == "f" and width_of(source) < width_of(to)
        if mode != ([] if widens else ["rn"]) or "b" in to + source:
            raise ValueError(f"rounding of {'.'.join(parts)}")
        if {to, source} == {"f32", "f64"}:
            return Operation((source,), lambda a: np.asarray(a).astype(dtype_of(to)))  # a NaN keeps its upper bits
        return Operation((source,), lambda a: canonical(np.asarray(a).astype(dtype_of(to))))
    if mode != ["rzi"] or (to, source) not in {("s32", "f64"), ("s64", "f32")}:
        raise ValueError(f"rounding of {'.'.join(parts)}")
    return Operation((source,), lambda a: _to_integer(np.asarray(a), to))


def _to_bf16(values: np.ndarray) -> np.ndarray:
    bits = np.asarray(values).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(values), np.uint32(0x7FFF), rounded).astype(np.uint16)


def _to_integer(values: np.ndarray, to: str) -> np.ndarray:
    """Round toward 0, and saturate. A NaN becomes the least integer."""
    ends, whole = np.iinfo(dtype_of(to)), np.trunc(values.astype(np.float64))
    inside = (whole >= float(ends.min)) & (whole <= float(ends.max)) & (whole < -float(ends.min))
    found = np.where(inside, whole, 0).astype(ends.dtype)
    return np.where(inside, found, np.where(whole > 0, ends.dtype.type(ends.max), ends.dtype.type(ends.min)))


FAMILIES: dict[str, Callable[[list[str]], Operation]] = {
    "add": add, "sub": add, "mul": mul, "mad": mad, "div": div, "rem": div, "sqrt": sqrt,
    "min": extreme, "max": extreme, "neg": of_sign, "abs": of_sign,
    "and": logic, "or": logic, "xor": logic, "not": logic,
    "shl": shift, "shr": shift, "bfe": bfe, "popc": popc, "prmt": prmt,
    "selp": selp, "setp": setp, "cvt": cvt,
}  # fmt: skip
