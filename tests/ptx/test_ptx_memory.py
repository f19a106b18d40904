"""Loads, stores, atomic updates, and instructions of a warp, against definitions in plain Python."""

from __future__ import annotations

import functools
import operator
import re
import struct

import pytest
import torch

from ptx.launch import Bound
from ptx.machine import Order
from ptx.parse import parse
from ptx.programs import REGISTERS, run

BYTES = torch.randint(0, 256, (4096,), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
HINT = "L1::evict_first.L2::cache_hint."
LOADS = [f"ld.global.{form}" for form in ("b16", "b32", "b64", "v2.b32", "v4.b32")]
LOADS += [f"ld.global.{HINT}{form}" for form in ("b16", "b32", "v4.b32")]
LOADS += [f"ld.shared.{form}" for form in ("b8", "b16", "b32", "b64", "s32", "v2.b32", "v2.b64", "v4.b32")]
STORES = [f"st.global.{form}" for form in ("b16", "b32", "b64", "v4.b32")]
STORES += [f"st.shared.{form}" for form in ("b8", "b16", "b32", "b64", "v2.b8", "v2.b32", "v2.b64", "v4.b32")]
STORES += [f"st.shared::cta.{form}" for form in ("b32", "b64")]
UPDATES = {
    "red.global.gpu.relaxed.add.u32": sum,
    "red.global.gpu.relaxed.add.u64": sum,
    "red.global.gpu.relaxed.max.s64": max,
    "red.global.gpu.relaxed.or.b32": lambda values: functools.reduce(operator.or_, values),
    "atom.relaxed.sys.shared.add.u32": sum,
}
REDUCTIONS = {"redux.sync.add.s32": sum, "redux.sync.min.s32": min, "redux.sync.max.s32": max}
# The operand that limits lanes, and the lane that is read.
SHUFFLES = {
    "shfl.sync.up.b32": (0, lambda lane, by: lane - by if lane >= by else lane),
    "shfl.sync.bfly.b32": (31, lambda lane, by: lane ^ by),
    "shfl.sync.idx.b32": (31, lambda lane, by: by),
}
PARAMETERS = ("ld.param.b32", "ld.param.b64", "ld.param.s32")


def shape_of(form: str) -> tuple[int, int, list[str]]:
    """Return the bytes of an element, how many there are, and their registers."""
    width = int(re.search(r"\d+$", form)[0])
    count = int((re.search(r"\.v(\d)\.", form) or "01")[1])
    return width // 8, count, [f"{REGISTERS[str(width)]}{20 + i}" for i in range(count)]


def braced(registers: list[str]) -> str:
    """Return the operand of one or more registers."""
    return registers[0] if len(registers) == 1 else "{" + ", ".join(registers) + "}"


@pytest.mark.parametrize("form", LOADS)
def test_load(form: str) -> None:
    """Each lane gets its elements, the first in the first register, with zeros above."""
    size, count, registers = shape_of(form)
    out = torch.zeros(32 * count, dtype=torch.int64)
    body = f"mul.wide.u32 %rd10, %r1, {size * count}; add.s64 %rd11, %rd1, %rd10; cvt.u32.u64 %r10, %rd10;"
    place = "%rd11"
    if "shared" in form:  # the lane writes what it then reads
        place = "%r10"
        for i in range(size * count):
            body += f"ld.global.b8 %rs10, [%rd11+{i}]; st.shared.b8 [%r10+{i}], %rs10;"
    policy = ", %rd12" if "cache_hint" in form else ""
    body += f"{form} {braced(registers)}, [{place}]{policy};"
    for i, register in enumerate(registers):
        wide = {
            2: f"cvt.u64.u16 %rd30, {register};",
            4: f"cvt.u64.u32 %rd30, {register};",
            8: f"mov.b64 %rd30, {register};",
        }
        body += (
            wide[max(2, size)] + f"mad.wide.u32 %rd31, %r1, {8 * count}, %rd2; st.global.b64 [%rd31+{8 * i}], %rd30;"
        )
    run(body, BYTES, out, shared=32 * size * count)
    content = bytes(BYTES.tolist())
    expected = [int.from_bytes(content[i * size : (i + 1) * size], "little") for i in range(32 * count)]
    assert [value % (1 << 64) for value in out.tolist()] == expected


@pytest.mark.parametrize("form", STORES)
def test_store(form: str) -> None:
    """Each lane writes the low bytes of its registers, next to each other, and nothing else."""
    size, count, registers = shape_of(form)
    out = torch.full((40 * size * count,), 7, dtype=torch.uint8)
    body = f"mul.wide.u32 %rd10, %r1, {size * count}; add.s64 %rd11, %rd1, %rd10; cvt.u32.u64 %r10, %rd10;"
    for i, register in enumerate(registers):
        convert = {
            2: f"cvt.u16.u32 {register}, %r11;",
            4: f"mov.b32 {register}, %r11;",
            8: f"cvt.u64.u32 {register}, %r11;",
        }
        body += f"mad.lo.s32 %r11, %r1, {count}, {i}; mul.lo.s32 %r11, %r11, 40503001;" + convert[max(2, size)]
    body += f"{form} [{'%rd11' if 'global' in form else '%r10'}], {braced(registers)};"
    if "shared" in form:
        for i in range(size * count):
            body += f"ld.shared.b8 %rs30, [%r10+{i}]; st.global.b8 [%rd11+{i}], %rs30;"
    run(body, out, shared=32 * size * count)
    numbers = [i * 40503001 % (1 << 32) % (1 << 8 * size) for i in range(32 * count)]
    expected = b"".join(number.to_bytes(size, "little") for number in numbers)
    assert bytes(out.tolist()) == expected + bytes([7] * 8 * size * count)


@pytest.mark.parametrize("form", UPDATES)
def test_update(form: str) -> None:
    """The values of all lanes are combined with what is there."""
    kind = form.rsplit(".", maxsplit=1)[-1]
    dtype = torch.int64 if kind.endswith("64") else torch.int32
    values = torch.randint(-(2**30), 2**30, (32,), generator=torch.Generator().manual_seed(1), dtype=dtype)
    found = torch.tensor([5], dtype=dtype)
    size, register = (8, "%rd10") if dtype == torch.int64 else (4, "%r10")
    load = f"mad.wide.u32 %rd11, %r1, {size}, %rd1; ld.global.b{8 * size} {register}, [%rd11];"
    if "shared" in form:
        prepare = "mov.b32 %r11, global_smem; setp.eq.u32 %p1, %r2, 0; @%p1 st.shared.b32 [%r11], 5; bar.sync 0;"
        after = "bar.sync 0; ld.shared.b32 %r12, [%r11]; @%p1 st.global.b32 [%rd2], %r12;"
        run(load + prepare + f"{form} %r13, [%r11], {register};" + after, values, found, shared=4)
    else:
        run(load + f"{form} [ %rd2 + 0 ], {register};", values, found)
    expected = UPDATES[form]([5, *values.tolist()])
    assert (
        found.item()
        == struct.unpack("<q" if size == 8 else "<i", (expected % (1 << 8 * size)).to_bytes(size, "little"))[0]
    )


@pytest.mark.parametrize("form", REDUCTIONS)
def test_reduction(form: str) -> None:
    """Each lane gets the result of its warp."""
    values = torch.randint(-(2**31), 2**31, (64,), generator=torch.Generator().manual_seed(2)).int()
    out = torch.zeros(64, dtype=torch.int32)
    run(
        "mad.wide.u32 %rd10, %r1, 4, %rd1; ld.global.b32 %r10, [%rd10];"
        f"{form} %r11, %r10, -1; mad.wide.u32 %rd11, %r1, 4, %rd2; st.global.b32 [%rd11], %r11;",
        values, out, threads=64,
    )  # fmt: skip
    results = [REDUCTIONS[form](values[at : at + 32].tolist()) for at in (0, 32)]
    assert out.tolist() == [(x + 2**31) % 2**32 - 2**31 for x in results for _ in range(32)]


@pytest.mark.parametrize("form", SHUFFLES)
def test_shuffle(form: str) -> None:
    """Each lane gets the value of another one of its warp, or its own where there is none."""
    limit, source = SHUFFLES[form]
    for by in (0, 1, 3, 8, 16, 31):
        out = torch.zeros(64, dtype=torch.int32)
        body = f"{form} %r10, %r1, {by}, {limit}, -1; mad.wide.u32 %rd10, %r1, 4, %rd1; st.global.b32 [%rd10], %r10;"
        run(body, out, threads=64)
        assert out.tolist() == [thread - thread % 32 + source(thread % 32, by) for thread in range(64)]


def test_load_matrices() -> None:
    """Lane t gets the four bytes t mod 4 of row t / 4 of each matrix, whose rows other lanes point to."""
    out = torch.zeros(128, dtype=torch.int32)
    body = "mul.lo.s32 %r10, %r1, 16;"  # lane i writes row i, and points to row 31 - i
    body += "".join(f"mad.lo.s32 %r11, %r1, 4, {i}; st.shared.b32 [%r10+{4 * i}], %r11;" for i in range(4))
    body += "sub.s32 %r12, 496, %r10; bar.sync 0; mad.wide.u32 %rd10, %r1, 16, %rd1;"
    body += "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r13, %r14, %r15, %r16}, [%r12];"
    body += "st.global.v4.b32 [%rd10], {%r13, %r14, %r15, %r16};"
    run(body, out, shared=512)
    assert out.view(32, 4).tolist() == [[4 * (31 - 8 * i - t // 4) + t % 4 for i in range(4)] for t in range(32)]


def test_moves_of_vectors() -> None:
    """A register is taken apart and put together, low bits first."""
    out = torch.zeros(4, dtype=torch.int64)
    run(
        "mov.b64 %rd10, 0x0123456789ABCDEF; mov.b64 {%r10, %r11}, %rd10; mov.b32 {%rs10, %rs11}, %r10;"
        "mov.b32 %r12, {%rs11, %rs10}; mov.b64 %rd11, {%r12, %r11}; setp.eq.u32 %p1, %r1, 0;"
        "@%p1 st.global.b64 [%rd1], %rd11; cvt.u64.u16 %rd12, %rs10; @%p1 st.global.b64 [%rd1+8], %rd12;"
        "mov.b64 %rd13, {%rs10, %rs11, %rs11, %rs10}; @%p1 st.global.b64 [%rd1+16], %rd13;",
        out,
    )
    assert out.tolist() == [0x01234567CDEF89AB, 0xCDEF, 0xCDEF89AB89ABCDEF - (1 << 64), 0]


def test_places() -> None:
    """The place in the grid is known in three directions."""
    out = torch.zeros(64, dtype=torch.int32)
    run("mov.u32 %r10, %ctaid.y; mov.u32 %r11, %nctaid.x; mad.lo.s32 %r12, %r11, 100, %r10; "
        "mad.wide.u32 %rd10, %r1, 4, %rd1; st.global.b32 [%rd10], %r12;", out, programs=2)  # fmt: skip
    assert out.tolist() == [200] * 64


def test_parameters() -> None:
    """A signed parameter fills a wider register with its sign."""
    out = torch.zeros(3, dtype=torch.int64)
    text = """
        .visible .entry kernel(.param .u64 .ptr .global .align 1 p1, .param .u32 p2, .param .u64 p3)
        .reqntid 32
        {
        .reg .b32 %r<3>;
        .reg .b64 %rd<5>;
        ld.param.b64 %rd1, [p1];
        ld.param.b32 %r1, [p2]; cvt.u64.u32 %rd2, %r1; st.global.b64 [%rd1], %rd2;
        ld.param.s32 %rd3, [p2]; st.global.b64 [%rd1+8], %rd3;
        ld.param.b64 %rd4, [p3]; st.global.b64 [%rd1+16], %rd4;
        ret;
        }
    """
    Bound(parse(text), 0, (1, 1, 1), [(out, "*i64"), (-3, "i32"), (-4, "i64")]).run(Order())
    assert out.tolist() == [(1 << 32) - 3, -3, -4]
