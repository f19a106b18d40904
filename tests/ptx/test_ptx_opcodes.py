"""What PTX says of values where numpy says something else, or nothing, literally.

Definitions in plain Python of all opcodes gave these bits, and were compared with an H100. That other arithmetic,
loads, stores and shuffles are right is seen by the kernels, whose results tests/kernels compares with references.
"""

from __future__ import annotations

import pytest
import torch

from ptx.launch import Bound
from ptx.machine import Order
from ptx.parse import parse
from ptx.programs import REGISTERS, run

# By opcode: the bits of its sources and its result, and values in hex. NaN, signed zeros, denormals, ties, the ends of
# integers, shifts by the width, fields beyond the top bit. A min or max has two or three sources.
EDGES = """
add.rn.f32 | 32 32 -> 32 | 7fc00001 3f800000 = 7fffffff, 1 1 = 2, 7f800000 ff800000 = 7fffffff
add.rn.f32 | 32 32 -> 32 | 7f7fc99e 7f7fc99e = 7f800000
div.rn.f32 | 32 32 -> 32 | 3f800000 0 = 7f800000, 0 0 = 7fffffff, 3f800000 40400000 = 3eaaaaab
div.rn.f32 | 32 32 -> 32 | 3f800000 80000000 = ff800000
sqrt.rn.f32 | 32 -> 32 | 40000000 = 3fb504f3, bf800000 = 7fffffff, 80000000 = 80000000, 1 = 1a3504f3
abs.f32 | 32 -> 32 | c0200000 = 40200000, ffd23456 = 7fffffff
neg.f32 | 32 -> 32 | 0 = 80000000, ffd23456 = 7fffffff
add.rn.f64 | 64 64 -> 64 | 7ff8000000000001 3ff0000000000000 = 7ff8000000000001
add.rn.f64 | 64 64 -> 64 | 3ff0000000000000 fff9123456789abc = fff9123456789abc
add.rn.f64 | 64 64 -> 64 | 7ff8000000000001 fff9123456789abc = fff9123456789abc
add.rn.f64 | 64 64 -> 64 | 7ff0000000000000 fff0000000000000 = fff8000000000000
mul.rn.f64 | 64 64 -> 64 | 0 7ff0000000000000 = fff8000000000000
add.rn.f32x2 | 64 64 -> 64 | 3f80000040000000 4040000040a00000 = 4080000040e00000
add.rn.f32x2 | 64 64 -> 64 | 7fc0000100000000 3f800000 = 7fffffff3f800000
sub.rn.f32.f16 | 16 32 -> 32 | 3c00 3e800000 = 3f400000, fe23 3f800000 = 7fffffff
sub.rn.f32.bf16 | 16 32 -> 32 | 3f80 3e800000 = 3f400000
min.f32 | 32 32 -> 32 | 0 80000000 = 80000000, 80000000 0 = 80000000, 7fc00001 3f800000 = 3f800000
min.f32 | 32 32 -> 32 | 3f800000 7fc00001 = 3f800000, 7fc00001 ffd23456 = 7fffffff
max.f32 | 32 32 -> 32 | 0 80000000 = 0, 80000000 0 = 0, 7fc00001 3f800000 = 3f800000, 3f800000 7fc00001 = 3f800000
max.f32 | 32 32 -> 32 | 7fc00001 ffd23456 = 7fffffff
min.f32 of 3 | 32 32 32 -> 32 | 3f800000 7fc00001 c0000000 = c0000000, 7fc00001 7fc00001 7fc00001 = 7fffffff
max.f32 of 3 | 32 32 32 -> 32 | 3f800000 7fc00001 c0000000 = 3f800000, 80000000 80000000 0 = 0
min.s32 | 32 32 -> 32 | ffffffff 1 = ffffffff
min.u32 | 32 32 -> 32 | ffffffff 1 = 1
max.s32 | 32 32 -> 32 | ffffffff 1 = 1
max.u32 | 32 32 -> 32 | ffffffff 1 = ffffffff
mul.wide.s32 | 32 32 -> 64 | ffffffff 2 = fffffffffffffffe
mul.wide.u32 | 32 32 -> 64 | ffffffff 2 = 1fffffffe
mad.wide.s32 | 32 32 64 -> 64 | ffffffff 2 5 = 3
mad.wide.u32 | 32 32 64 -> 64 | ffffffff 2 5 = 200000003
div.s32 | 32 32 -> 32 | fffffff9 2 = fffffffd, 7 fffffffe = fffffffd, fffffff9 fffffffe = 3
div.u32 | 32 32 -> 32 | fffffff9 2 = 7ffffffc
div.s64 | 64 64 -> 64 | fffffffffffffff9 2 = fffffffffffffffd
rem.s64 | 64 64 -> 64 | fffffffffffffff9 2 = ffffffffffffffff, 7 fffffffffffffffe = 1
rem.u32 | 32 32 -> 32 | fffffff9 10 = 9
not.b32 | 32 -> 32 | f0f0f0f0 = f0f0f0f
not.pred | 1 -> 1 | 0 = 1, 1 = 0
shl.b16 | 16 32 -> 16 | 1 f = 8000, 1 10 = 0
shl.b32 | 32 32 -> 32 | 1 1f = 80000000, 1 20 = 0
shl.b64 | 64 32 -> 64 | 1 3f = 8000000000000000, 1 40 = 0
shr.s32 | 32 32 -> 32 | 80000000 4 = f8000000, 80000000 20 = ffffffff
shr.s64 | 64 32 -> 64 | 8000000000000000 40 = ffffffffffffffff
shr.u32 | 32 32 -> 32 | 80000000 4 = 8000000, 80000000 20 = 0
shr.u64 | 64 32 -> 64 | 8000000000000000 40 = 0
bfe.u32 | 32 32 32 -> 32 | f0 4 4 = f, c0000000 1e 8 = 3, 80000000 20 5 = 0, ffffffff 3 0 = 0, abcd 100 8 = cd
bfe.u32 | 32 32 32 -> 32 | ffffffff 0 20 = ffffffff
bfe.s32 | 32 32 32 -> 32 | f0 4 4 = ffffffff, c0000000 1e 8 = ffffffff, 80000000 20 5 = ffffffff, ffffffff 3 0 = 0
bfe.s32 | 32 32 32 -> 32 | abcd 100 8 = ffffffcd, 70 4 4 = 7
popc.b32 | 32 -> 32 | f0f0f0f1 = 11
prmt.b32 | 32 32 32 -> 32 | 33221100 77665544 7531 = 77553311, 80ff 7f00 d981 = ffff80
setp.lt.s32 | 32 32 -> 1 | ffffffff 1 = 1
setp.lt.u32 | 32 32 -> 1 | ffffffff 1 = 0
setp.eq.f32 | 32 32 -> 1 | 0 80000000 = 1, 7fc00001 7fc00001 = 0
setp.lt.f32 | 32 32 -> 1 | 3f800000 7fc00001 = 0, bf800000 3f800000 = 1
setp.ge.f32 | 32 32 -> 1 | 7fc00001 3f800000 = 0
setp.ne.f32 | 32 32 -> 1 | 7fc00001 3f800000 = 0
setp.nan.f32 | 32 32 -> 1 | 3f800000 7fc00001 = 1, 3f800000 3f800000 = 0
setp.num.f32 | 32 32 -> 1 | 7fc00001 3f800000 = 0, 3f800000 3f800000 = 1
setp.lt.f64 | 64 64 -> 1 | 3ff0000000000000 7ff8000000000001 = 0
setp.lt.f16 | 16 16 -> 1 | bc00 3c00 = 1, 3c00 7e01 = 0
setp.gt.bf16 | 16 16 -> 1 | bf80 3f80 = 0, 3f80 7fc1 = 0
selp.b32 | 32 32 1 -> 32 | 3 5 1 = 3, 3 5 0 = 5
cvt.s64.s32 | 32 -> 64 | ffffffff = ffffffffffffffff
cvt.u64.u32 | 32 -> 64 | ffffffff = ffffffff
cvt.u32.u16 | 16 -> 32 | ffff = ffff
cvt.u16.u32 | 32 -> 16 | 12345 = 2345
cvt.rn.f32.s32 | 32 -> 32 | ffffffff = bf800000, 1000001 = 4b800000, 1000003 = 4b800002
cvt.rn.f32.u32 | 32 -> 32 | ffffffff = 4f800000
cvt.rn.f32.u64 | 64 -> 32 | ffffffffffffffff = 5f800000
cvt.rn.f32.s64 | 64 -> 32 | ffffffffffffffff = bf800000
cvt.rn.f32.f64 | 64 -> 32 | 3ff0000010000000 = 3f800000, 3ff0000030000000 = 3f800002, 47f0000000000000 = 7f800000
cvt.rn.f32.f64 | 64 -> 32 | 3698000000000000 = 1, 7ff8000000000001 = 7fc00000, fff9123456789abc = ffc891a2
cvt.f64.f32 | 32 -> 64 | 1 = 36a0000000000000, 7fc00001 = 7ff8000020000000, ffd23456 = fffa468ac0000000
cvt.rn.f16.f32 | 32 -> 16 | 477ff000 = 7c00, 3f801000 = 3c00, 3f803000 = 3c02, 33c00000 = 2, ffd23456 = 7fff
cvt.f32.f16 | 16 -> 32 | 1 = 33800000, fe23 = 7fffffff
cvt.rn.bf16.f32 | 32 -> 16 | 3f808000 = 3f80, 3f818000 = 3f82, 7f7fffff = 7f80, 8001 = 1, ffd23456 = 7fff
cvt.f32.bf16 | 16 -> 32 | 1 = 10000, ffd3 = ffd30000
cvt.rzi.s32.f64 | 64 -> 32 | 4007333333333333 = 2, c007333333333333 = fffffffe, 41e0000000000000 = 7fffffff
cvt.rzi.s32.f64 | 64 -> 32 | c270000000000000 = 80000000, 7ff8000000000001 = 80000000
cvt.rzi.s64.f32 | 32 -> 64 | c0200000 = fffffffffffffffe, 5f000000 = 7fffffffffffffff, ff800000 = 8000000000000000
cvt.rzi.s64.f32 | 32 -> 64 | 7fc00001 = 8000000000000000
"""


def register_of(width: int, number: int) -> tuple[str, int]:
    """Return a register of some bits, and its size. That of a predicate holds 0 or 1."""
    size = 32 if width == 1 else width
    return f"{REGISTERS[str(size)]}{number}", size


@pytest.mark.parametrize("row", EDGES.strip().splitlines(), ids=lambda row: row.split(" | ")[0])
def test_edges(row: str) -> None:
    """The bits of every lane are those of the table."""
    form, widths, cases = row.split(" | ")
    *given, result = (int(width) for width in widths.replace("->", "").split())
    lanes = [[int(word, 16) for word in case.replace("=", "").split()] for case in cases.split(", ")]
    columns = [*zip(*lanes, *[lanes[-1]] * (32 - len(lanes)), strict=True)]
    out, lines, sources = torch.zeros(32, dtype=torch.int64), [], []
    for i, width in enumerate(given, 1):
        register, size = register_of(width, 10 + i)
        lines.append(f"mad.wide.u32 %rd{20 + i}, %r1, 8, %rd{i}; ld.global.b{size} {register}, [%rd{20 + i}];")
        lines += [f"setp.ne.b32 %p{i}, {register}, 0;"] if width == 1 else []
        sources.append(f"%p{i}" if width == 1 else register)
    register, size = register_of(result, 19)
    lines.append(f"{form.split()[0]} {'%p9' if result == 1 else register}, {', '.join(sources)};")
    lines += [f"selp.b32 {register}, 1, 0, %p9;"] if result == 1 else []
    lines.append(f"mad.wide.u32 %rd30, %r1, 8, %rd{1 + len(given)}; st.global.b{size} [%rd30], {register};")
    tensors = [torch.tensor([word - (word >> 63 << 64) for word in column]) for column in columns[:-1]]
    run("\n".join(lines), *tensors, out)
    assert [found % (1 << size) for found in out.tolist()] == [*columns[-1]]


def test_shuffle_from_below() -> None:
    """A lane without a lane so far below it keeps its own value."""
    for by in (0, 1, 3, 31):
        out = torch.zeros(64, dtype=torch.int32)
        body = (
            f"shfl.sync.up.b32 %r10, %r1, {by}, 0, -1; mad.wide.u32 %rd10, %r1, 4, %rd1; st.global.b32 [%rd10], %r10;"
        )
        run(body, out, threads=64)
        assert out.tolist() == [thread - by if thread % 32 >= by else thread for thread in range(64)]


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
