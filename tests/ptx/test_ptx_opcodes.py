"""Every form of an opcode that a compiled kernel has, against a definition in plain Python, on edge values."""

from __future__ import annotations

import itertools
import math
import operator
import struct
from collections.abc import Callable
from fractions import Fraction
from typing import NamedTuple

import pytest
import torch

from ptx.programs import REGISTERS, run

Number = int | float
# Significant bits, and the exponent of the least denormal.
PRECISION = {"f16": (11, -24), "bf16": (8, -133), "f32": (24, -149), "f64": (53, -1074)}
LARGEST = {
    "f16": 65504.0,
    "bf16": 2.0**128 - 2.0**120,
    "f32": 2.0**128 - 2.0**104,
    "f64": float.fromhex("0x1.fffffffffffffp1023"),
}
FORMATS = {"f16": ("<H", "<e"), "f32": ("<I", "<f"), "f64": ("<Q", "<d")}
NANS = {"f16": 0x7FFF, "bf16": 0x7FFF, "f32": 0x7FFFFFFF, "f64": 0x7FF8000000000000}
OTHER_NANS = {
    "f16": (0x7E01, 0xFE23), "bf16": (0x7FC1, 0xFFD3), "f32": (0x7FC00001, 0xFFD23456),
    "f64": (0x7FF8000000000001, 0xFFF9123456789ABC),
}  # fmt: skip


class Row(NamedTuple):
    """The types of the sources and the result, and the result for sources that are ints, floats or bools.

    ``nan`` gives the bits of a result that is NaN, from those of the sources. By default they are :data:`NANS`.
    """

    sources: str
    result: str
    function: Callable[..., Number]
    nan: Callable[..., int] | None = None


def width(kind: str) -> int:
    """Return the bits of a type."""
    return int(kind.lstrip("subf"))


def decoded(bits: int, kind: str) -> Number:
    """Return the number that bits stand for."""
    bits &= (1 << width(kind)) - 1
    if kind in FORMATS:
        whole, real = FORMATS[kind]
        return struct.unpack(real, struct.pack(whole, bits))[0]
    if kind == "bf16":
        return decoded(bits << 16, "f32")
    return bits - (1 << width(kind)) if kind[0] == "s" and bits >> (width(kind) - 1) else bits


def encoded(value: Number, kind: str) -> int:
    """Return the bits of a number that the type can hold. Integers wrap."""
    if kind in NANS and math.isnan(value):
        return NANS[kind]
    if kind in FORMATS:
        whole, real = FORMATS[kind]
        return struct.unpack(whole, struct.pack(real, value))[0]
    return encoded(value, "f32") >> 16 if kind == "bf16" else int(value) % (1 << width(kind))


def rounded(exact: Fraction, kind: str) -> float:
    """Round a number that is not 0 to nearest, ties to even. Python rounds fractions so."""
    digits, least = PRECISION[kind]
    size = abs(exact)
    top = size.numerator.bit_length() - size.denominator.bit_length()
    top -= size < Fraction(2) ** top
    step = Fraction(2) ** max(top - digits + 1, least)
    found = round(size / step) * step
    value = float(found) if found <= LARGEST[kind] else math.inf
    return value if exact > 0 else -value


def arithmetic(operation: Callable[[Number, Number], Number], kind: str) -> Callable[..., float]:
    """Return the operation on floats: exact, then rounded. Python's own floats know NaN, Inf and the signs of 0."""

    def function(a: float, b: float) -> float:
        if operation is operator.truediv and b == 0:
            return math.nan if a == 0 or math.isnan(a) else math.copysign(math.inf, a) * math.copysign(1, b)
        if not (math.isfinite(a) and math.isfinite(b)) or (operation is operator.truediv and a == 0):
            return operation(a, b)
        exact = operation(Fraction(a), Fraction(b))
        return rounded(exact, kind) if exact else operation(a, b)

    return function


def converted(to: str) -> Callable[[Number], float]:
    """Return the rounding to a type of floats."""
    return lambda a: a if a == 0 or not math.isfinite(a) else rounded(Fraction(a), to)


def truncated(to: str) -> Callable[[float], int]:
    """Return the rounding to an integer, toward 0, which saturates. A NaN becomes the least."""
    least, most = -(1 << (width(to) - 1)), (1 << (width(to) - 1)) - 1

    def function(a: float) -> int:
        if math.isfinite(a):
            return min(max(math.trunc(a), least), most)
        return most if a > 0 else least

    return function


def quotient(a: int, b: int) -> int:
    """Return the quotient rounded toward 0."""
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


def extreme(least: bool) -> Callable[..., float]:
    """Return the least or the largest number. -0 is less than 0, and a NaN is no number."""

    def function(*given: float) -> float:
        numbers = [x for x in given if not math.isnan(x)]
        order = sorted(numbers, key=lambda x: (x, math.copysign(1, x)))
        return (order[0] if least else order[-1]) if numbers else math.nan

    return function


def field(kind: str) -> Callable[[int, int, int], int]:
    """Return the field of bits, bit by bit, as the manual defines it."""

    def function(a: int, at: int, count: int) -> int:
        at, count, bits = at & 255, count & 255, a & 0xFFFFFFFF
        sign = bits >> min(at + count - 1, 31) & 1 if kind == "s32" and count else 0
        chosen = [bits >> (at + i) & 1 if i < count and at + i <= 31 else sign for i in range(32)]
        return sum(bit << i for i, bit in enumerate(chosen))

    return function


def permuted(a: int, b: int, choice: int) -> int:
    """Return four bytes of eight."""
    source = struct.pack("<II", a, b)
    digits = [choice >> (4 * i) & 15 for i in range(4)]
    chosen = [source[digit & 7] if digit < 8 else (255 if source[digit & 7] & 128 else 0) for digit in digits]
    return int.from_bytes(bytes(chosen), "little")


def halves(function: Callable[[float, float], float]) -> Callable[[int, int], int]:
    """Return an operation on two fp32 numbers in 64 bits."""

    def both(a: int, b: int) -> int:
        results = [function(decoded(a >> at, "f32"), decoded(b >> at, "f32")) for at in (0, 32)]
        return encoded(results[0], "f32") | encoded(results[1], "f32") << 32

    return both


def last_nan(*sources: int) -> int:
    """Return the last of the fp64 sources that is a NaN, or what arithmetic makes of numbers."""
    return next((bits for bits in reversed(sources) if math.isnan(decoded(bits, "f64"))), 0xFFF8000000000000)


def widened_nan(bits: int) -> int:
    """Return a NaN of fp32 in fp64."""
    return bits >> 31 << 63 | 0x7FF << 52 | (bits & 0x7FFFFF) << 29


def narrowed_nan(bits: int) -> int:
    """Return a NaN of fp64 in fp32, with the bits that fit."""
    return bits >> 63 << 31 | 0xFF << 23 | bits >> 29 & 0x7FFFFF


def alike(
    name: str, kinds: str, function: Callable[..., Number], sources: str = "{0} {0}", result: str = "{0}"
) -> dict[str, Row]:
    """Return the rows of an opcode for several types, of which sources and result are made."""
    return {
        f"{name}.{kind}": Row(sources.format(kind, f"{kind[0]}64"), result.format(kind, f"{kind[0]}64"), function)
        for kind in kinds.split()
    }


def integers() -> dict[str, Row]:
    """Return the operations on integers and bits."""
    whole = "s32 s64 u32"
    return {
        **alike("add", "s32 s64", operator.add),
        **alike("sub", "s32 s64", operator.sub),
        **alike("mul.lo", "s32 s64", operator.mul),
        **alike("mad.lo", "s32 s64", lambda a, b, c: a * b + c, "{0} {0} {0}"),
        **alike("neg", "s32 s64", operator.neg, "{0}"),
        **alike("mul.wide", "s32 u32", operator.mul, result="{1}"),
        **alike("mad.wide", "s32 u32", lambda a, b, c: a * b + c, "{0} {0} {1}", "{1}"),
        **alike("min", whole, min),
        **alike("max", whole, max),
        **alike("div", whole, quotient, "{0} {0}!"),
        **alike("rem", "s64 u32", lambda a, b: a - b * quotient(a, b), "{0} {0}!"),
        **alike("and", "b16 b32 b64 pred", operator.and_),
        **alike("or", "b16 b32 b64 pred", operator.or_),
        **alike("xor", "b32", operator.xor),
        **alike("not", "b32", operator.invert, "{0}"),
        **alike("not", "pred", operator.not_, "{0}"),
        **alike("shl", "b16 b32 b64", operator.lshift, "{0} count"),
        **alike("shr", "s32 s64 u32 u64", operator.rshift, "{0} count"),
        "bfe.u32": Row("u32 place place", "u32", field("u32")),
        "bfe.s32": Row("s32 place place", "s32", field("s32")),
        "popc.b32": Row("b32", "b32", lambda a: a.bit_count()),
        "prmt.b32": Row("b32 b32 b32", "b32", permuted),
    }


def floats() -> dict[str, Row]:
    """Return the operations on floats."""
    found: dict[str, Row] = {}
    for name, operation in {"add": operator.add, "sub": operator.sub, "mul": operator.mul}.items():
        found |= alike(f"{name}.rn", "f32", arithmetic(operation, "f32"))
        found[f"{name}.rn.f64"] = Row("f64 f64", "f64", arithmetic(operation, "f64"), last_nan)
        found[f"{name}.rn.f32x2"] = Row("b64 b64", "b64", halves(arithmetic(operation, "f32")))
    for half in ("f16", "bf16"):
        found[f"sub.rn.f32.{half}"] = Row(f"{half} f32", "f32", arithmetic(operator.sub, "f32"))
    for name in ("min", "max"):
        found |= alike(name, "f32", extreme(name == "min"))
        found[f"{name}.f32 of 3"] = Row("f32 f32 f32", "f32", extreme(name == "min"))
    found |= alike("div.rn", "f32", arithmetic(operator.truediv, "f32"))
    found |= alike("abs", "f32", abs, "{0}") | alike("neg", "f32", operator.neg, "{0}")
    # The root in fp64 has more than twice the digits, and no root of an fp32 number is half way between two.
    return found | alike("sqrt.rn", "f32", lambda a: converted("f32")(math.sqrt(a)) if a >= 0 else math.nan, "{0}")


def conversions() -> dict[str, Row]:
    """Return the conversions."""
    pairs = (("s64", "s32"), ("u16", "u32"), ("u32", "u16"), ("u32", "u64"), ("u64", "u32"))
    found = {f"cvt.{to}.{source}": Row(source, to, int) for to, source in pairs}
    for source in ("s32", "s64", "u32", "u64"):
        found[f"cvt.rn.f32.{source}"] = Row(source, "f32", converted("f32"))
    for to, source, nan in (("f32", "f64", narrowed_nan), ("f16", "f32", None), ("bf16", "f32", None)):
        found[f"cvt.rn.{to}.{source}"] = Row(source, to, converted(to), nan)
    for to, source, nan in (("f64", "f32", widened_nan), ("f32", "f16", None), ("f32", "bf16", lambda a: a << 16)):
        found[f"cvt.{to}.{source}"] = Row(source, to, float, nan)
    for to, source in (("s32", "f64"), ("s64", "f32")):
        found[f"cvt.rzi.{to}.{source}"] = Row(source, to, truncated(to))
    return found


def choices() -> dict[str, Row]:
    """Return comparisons, selections and copies."""
    found: dict[str, Row] = {}
    kinds = {
        "eq": "b16 b32 b64 f32", "ne": "b16 b32 b64", "lt": "s32 s64 u32 f32 f64 f16 bf16", "le": "s32 s64 f32",
        "gt": "s32 s64 u32 f32 f16 bf16", "ge": "s32 s64 u32 f32",
    }  # fmt: skip
    for name, several in kinds.items():  # Python's comparisons with a NaN are false
        found |= alike(f"setp.{name}", several, getattr(operator, name), result="pred")
    found |= alike("setp.nan", "f32", lambda a, b: math.isnan(a) or math.isnan(b), result="pred")
    found |= alike("setp.num", "f32", lambda a, b: not (math.isnan(a) or math.isnan(b)), result="pred")
    for kind in ("b16", "b32", "b64", "f32", "f64"):
        bits = f"b{width(kind)}"
        found[f"selp.{kind}"] = Row(f"{bits} {bits} pred", bits, lambda a, b, chosen: a if chosen else b)
    return found | alike("mov", "b16 b32 b64 u16 u32 u64", int, "{0}")


TABLE = integers() | floats() | conversions() | choices()


def edges(kind: str, result: str) -> list[int]:
    """Return the bits of the edge values of a type."""
    if kind == "pred":
        return [0, 1]
    if kind == "count":
        return [0, 1, 7, width(result) - 1, width(result)]
    if kind == "place":
        return [0, 1, 5, 8, 30, 31, 32, 33, 63, 64, 255, 256, 258]
    nonzero, kind = kind.endswith("!"), kind.rstrip("!")
    if kind in PRECISION:
        digits, least = PRECISION[kind]
        one = 2.0 ** (1 - digits)
        values = [
            0.0, 2.0**least, 3 * 2.0**least, 2.0 ** (least + digits - 1), 2.0 ** (least + digits - 1) - 2.0**least,
            1.0, 1.0 + one, 1.0 - one / 2, 1.5 + one, 2.5, 3.0, 1 / 3 if kind == "f64" else 0.328125,
            LARGEST[kind], LARGEST[kind] / 2, math.inf, math.nan,
        ]  # fmt: skip
        if kind in {"f32", "f64"}:  # halves between two numbers of a narrower type, and the ends of integers
            values += [1 + 2.0**-8, 1 + 3 * 2.0**-8, 1 + 2.0**-11, 65520.0, 2.0**31, 2.0**31 - 128, 2.0**63, 2.0**32]
            values += [2.0**-24, 2.0**-25, 3 * 2.0**-25, 1e-40, 2.0**-133, 3.4e38, 0.1 if kind == "f64" else 0.5]
        if kind == "f64":
            values += [1 + 2.0**-24, 1 + 3 * 2.0**-24, 2.0**-150, 3 * 2.0**-150, 2.0**128 - 2.0**103, 2.0**31 - 0.5]
        return [encoded(sign * value, kind) for value in values for sign in (1, -1)] + [*OTHER_NANS[kind]]
    bits = width(kind)
    whole = {0, 1, 2, 3, 31, 32, 33, 100, 0x7F, 0x80, 0xFF, 0x5A5A5A5A, 0xDEADBEEFCAFE, 0x8000000080000001}
    whole |= {1 << (bits - 1), (1 << (bits - 1)) - 1, (1 << bits) - 1, (1 << bits) - 2, (1 << 24) + 1, (1 << 53) + 1}
    if kind in {"b32", "b64"}:  # floats in a part
        halves_of = [0x7FC0, 0x3F80, 0x8000, 0x7C00] if kind == "b32" else edges("f32", "f32")[::5]
        whole |= {low | high << bits // 2 for low in halves_of for high in halves_of}
    return [value for value in sorted({value % (1 << bits) for value in whole}) if value or not nonzero]


def table_row(form: str) -> tuple[list[tuple[int, ...]], list[int], list[int]]:
    """Return the bits of the sources in each lane, those that the executor computes, and those of the definition."""
    sources, result, function, nan = TABLE[form]
    kinds = sources.split()
    most = (1000, 100, 24)[len(kinds) - 1]  # so that there are some 10,000 lanes at most
    lists = [values[:: 1 + len(values) // most] for values in (edges(kind, result) for kind in kinds)]
    lanes = [*itertools.product(*lists)]
    names = ["u32" if kind in {"count", "place"} else kind.rstrip("!") for kind in kinds]
    numbers = [
        [bits if name == "pred" else decoded(bits, name) for bits, name in zip(lane, names, strict=True)]
        for lane in lanes
    ]
    expected = []
    for lane, each in zip(lanes, numbers, strict=True):
        found = function(*each)
        if nan is not None and math.isnan(found):
            expected.append(nan(*lane))
        else:
            expected.append(int(found) if result == "pred" else encoded(found, result))
    return lanes, executed(form, names, result, lanes), expected


def executed(form: str, names: list[str], result: str, lanes: list[tuple[int, ...]]) -> list[int]:
    """Return what the executor computes in each lane."""
    count = -(-len(lanes) // 32) * 32
    padded = lanes + [lanes[-1]] * (count - len(lanes))
    columns = [
        torch.tensor([encoded(x, "s64") - (x >> 63 << 64) for x in column]) for column in zip(*padded, strict=True)
    ]
    out = torch.zeros(count, dtype=torch.int64)
    lines, sources = [], []
    for i, name in enumerate(names):
        register, size = held_in(name, 10 + i)
        lines.append(f"mad.wide.u32 %rd{20 + i}, %r1, 8, %rd{1 + i}; ld.global.b{size} {register}, [%rd{20 + i}];")
        sources.append(f"%p{10 + i}" if name == "pred" else register)
        if name == "pred":
            lines.append(f"setp.ne.b32 %p{10 + i}, {register}, 0;")
    register, size = held_in(result, 15)
    to = "%p15" if result == "pred" else register
    lines.append(f"{form.split(maxsplit=1)[0]} {to}, {', '.join(sources)};")
    if result == "pred":
        lines.append(f"selp.b32 {register}, 1, 0, %p15;")
    lines.append(f"mad.wide.u32 %rd30, %r1, 8, %rd{1 + len(names)}; st.global.b{size} [%rd30], {register};")
    run("\n".join(lines), *columns, out, programs=count // 32)
    mask = (1 << (1 if result == "pred" else size)) - 1
    return [value & mask for value in out.tolist()[: len(lanes)]]


def held_in(kind: str, number: int) -> tuple[str, int]:
    """Return the register of that number which holds a type, and its bits. That of a predicate holds 0 or 1."""
    size = 32 if kind == "pred" else max(16, width(kind))
    return f"{REGISTERS[str(size)]}{number}", size


@pytest.mark.parametrize("form", TABLE)
def test_definition(form: str) -> None:
    """The bits of every lane are those of the definition."""
    lanes, found, expected = table_row(form)
    wrong = [(*map(hex, lane), hex(a), hex(b)) for lane, a, b in zip(lanes, found, expected, strict=True) if a != b]
    assert not wrong, f"{form}: sources, what was computed, and the definition"
