"""Each check of the executor fails on a small program with the error, and passes on the same program without it."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch

from ptx import machine
from ptx.launch import Bound, Executor
from ptx.machine import Order
from ptx.memory import POISON, ViolationError
from ptx.parse import UnknownTextError
from ptx.programs import POINTERS, kernel_of, run

ADDRESS = "mad.wide.u32 %rd10, %r1, 4, %rd1;\n"  # of the element of a thread
STORE = ADDRESS + "st.global.b32 [%rd10], %r1;"
LOAD = ADDRESS + "ld.global.b32 %r3, [%rd10];"
SHARED = "mov.b32 %r10, global_smem; shl.b32 %r11, %r2, 2; add.s32 %r12, %r10, %r11;\n"  # its word of shared memory
# Each thread writes its word, and reads that of the thread 32 places behind.
EXCHANGE = (
    SHARED
    + "st.shared.b32 [%r12], %r2; {0} xor.b32 %r13, %r11, 128; add.s32 %r14, %r10, %r13; ld.shared.b32 %r15, [%r14];"
    + ADDRESS
    + "st.global.b32 [%rd10], %r15;"
)
WIDE = "ld.global.v2.b32 {{%r3, %r4}}, [%rd1+{}];"
PAIR = SHARED + "st.shared.b32 [%r10], 1; {} ld.shared.v2.b32 {{%r3, {}}}, [%r10];"
ADD = "red.global.gpu.relaxed.add.u32 [%rd1], %r1;"
PROGRAM = "mov.u32 %r3, %ctaid.x; mov.u32 %r4, %nctaid.x; "
PART = "setp.lt.u32 %p1, %r2, {}; @%p1 bra $L__BB0_1; {} bar.sync 0; {}\n$L__BB0_1:\n"
GUARDED = "setp.lt.u32 %p1, %r2, {};\n@%p1 "
SHUFFLE, SUM = "shfl.sync.bfly.b32 %r3, %r1, 16, 31, {};", "redux.sync.add.s32 %r3, %r1, {};"
ROWS = "shl.b32 %r9, %r2, 4;"
MATRICES = "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r3, %r4, %r5, %r6}, [%r9];"
QUOTIENT = "add.s32 %r21, %r1, {}; setp.ne.b32 %p1, %r1, 0; {} {}.s32 %r22, %r1, %r21;"
ENDLESS = "$L__BB0_1:\n add.s32 %r3, %r1, 1; bra.uni $L__BB0_1;\n"

# The check that fails, or none; a program; the lengths of its tensors, or which part of a longer one; and the launch.
Case = tuple[str, str, tuple[int | slice, ...], dict[str, int]]
CASES: list[Case] = [
    ("", STORE, (32,), {}),
    ("bounds", STORE, (31,), {}),
    ("bounds", STORE, (slice(31),), {}),  # there is memory, but it is not of this tensor
    ("bounds", "add.s64 %rd10, %rd1, -4; ld.global.b32 %r3, [%rd10];", (slice(32, 64),), {}),
    ("bounds", "ld.global.b32 %r3, [%rd1+4096];", (4, 4), {}),
    ("bounds", SHARED + "st.shared.b32 [%r12+4], %r2;", (), {"shared": 128}),
    ("", WIDE.format(8), (4,), {}),
    ("alignment", WIDE.format(4), (4,), {}),
    ("alignment", SHARED + "st.shared.b32 [%r10+2], %r2;", (), {"shared": 128}),
    ("unwritten", SHARED + "ld.shared.b32 %r3, [%r12];", (), {"shared": 128}),
    ("unwritten", "mov.b32 %r10, global_smem; atom.shared.add.u32 %r3, [%r10], 1;", (), {"shared": 128}),
    # A vector load may cover words that nobody wrote, if the text says that they are not used.
    ("unwritten", PAIR.format("", "%r4"), (), {"shared": 8}),
    ("unwritten", PAIR.format('.pragma "used_bytes_mask 0xff";', "%r4"), (), {"shared": 8}),
    ("", PAIR.format('.pragma "used_bytes_mask 0xf";', "%r4"), (), {"shared": 8}),
    ("", PAIR.format("", "_"), (), {"shared": 8}),
    ("", EXCHANGE.format("bar.sync 0;"), (64,), {"threads": 64, "shared": 256}),
    ("", "st.global.b32 [%rd1], 7;", (1,), {}),
    ("race", "st.global.b32 [%rd1], %r1;", (1,), {}),
    ("race", "st.global.b32 [%rd1], 5; st.global.b32 [%rd1], 3;", (1,), {"threads": 64}),
    ("race", PROGRAM + "st.global.b32 [%rd1], %r3;", (1,), {"programs": 2}),  # no barrier is between programs
    ("", PROGRAM + "st.global.b32 [%rd1], %r4;", (1,), {"programs": 200}),
    ("", ADD, (1,), {"programs": 3}),
    ("race", ADD + "st.global.b32 [%rd1], 0;", (1,), {"programs": 3}),
    ("race", "st.global.b32 [%rd1], 0;" + ADD, (1,), {}),
    ("race", "ld.global.b32 %r3, [%rd1]; add.s32 %r3, %r3, %r1; st.global.b32 [%rd1], %r3;", (1,), {}),
    ("barrier", PART.format(32, "", ""), (), {"threads": 64}),
    ("barrier", PART.format(16, "", ""), (), {"threads": 64}),
    ("barrier", PART.format(32, "", "bra.uni $L__BB0_2;") + "bar.sync 0;\n$L__BB0_2:\n", (), {"threads": 64}),
    ("", PART.format(0, "", ""), (), {"threads": 64}),
    ("", PART.format(64, "", ""), (), {"threads": 64}),
    # An instruction of a warp needs all its lanes, also if none but some are named.
    *(("warp", GUARDED.format(40) + each.format(-1), (), {"threads": 64}) for each in (SHUFFLE, SUM)),
    *(("", GUARDED.format(32) + each.format(-1), (), {"threads": 64}) for each in (SHUFFLE, SUM)),
    *(("warp", each.format(15), (), {}) for each in (SHUFFLE, SUM)),
    ("warp", ROWS + GUARDED.format(20) + MATRICES, (), {"shared": 4096}),
    *(("division by 0", QUOTIENT.format(0, "", name), (), {}) for name in ("div", "rem")),
    ("", QUOTIENT.format(1, "", "div"), (), {}),
    ("", QUOTIENT.format(0, "@%p1", "div"), (), {}),
    ("", "shl.b32 %r3, %r1, %r2;", (), {}),
    ("shift", "shl.b32 %r3, %r1, %r2;", (), {"threads": 64}),
]


def words(count: int) -> torch.Tensor:
    """Return int32 zeros."""
    return torch.zeros(count, dtype=torch.int32)


@pytest.mark.parametrize("turns", [1, 2])
@pytest.mark.parametrize("case", CASES, ids=range(len(CASES)))
def test_check(case: Case, turns: int) -> None:
    """The check fails in lock step, and if warps take turns."""
    check, body, lengths, options = case
    tensors = [words(64)[each] if isinstance(each, slice) else words(each) for each in lengths]
    with pytest.raises(ViolationError) if check else nullcontext() as caught:
        run(body, *tensors, **options, order=Order(1, turns))
    assert not check or caught.value.check == check, caught.value


def launched(body: str, tensor: torch.Tensor, *, programs: int = 1, threads: int = 32, shared: int = 0) -> None:
    """Run a body as a launch: in every order, with the check of what racing lanes read."""
    kernel = kernel_of(body, 1, threads=threads)
    Executor().launch_bound(Bound(kernel, shared, (programs, 1, 1), [(tensor, POINTERS[tensor.dtype])]))


def test_new_memory() -> None:
    """What new memory holds is not read before it is written."""
    new = torch.full((128,), POISON, dtype=torch.uint8).view(torch.int32)
    with pytest.raises(ViolationError, match="unwritten"):
        run(LOAD, new)
    run(STORE + LOAD, new)


def test_missing_barrier() -> None:
    """Without the barrier between store and load there is a race. If the other warp has not written, that is seen."""
    with pytest.raises(ViolationError, match=r"race|unwritten"):
        launched(EXCHANGE.format(""), words(64), threads=64, shared=256)


def test_racing_read_that_is_not_used() -> None:
    """A lane may read what another writes, if the value leads to nothing."""
    body = "ld.global.b32 %r3, [%rd1]; setp.eq.b32 %p1, %r1, 5; add.s32 %r3, %r3, 1; @%p1 st.global.b32 [%rd1], %r3;"
    launched(body, found := words(1))
    assert found.tolist() == [1]
    summed = body.replace("setp", "redux.sync.add.s32 %r3, %r3, -1; setp")
    with pytest.raises(ViolationError, match=r"race"):
        launched(summed, words(1))
    launched(summed.replace("@%p1 st", "bar.sync 0; @%p1 st"), words(1))


# Flipped bits change nothing where only large numbers matter. The largest number does.
COMPARED = "ld.global.b32 %r3, [%rd1]; setp.eq.b32 %p1, %r1, 5; @%p1 st.global.b32 [%rd1], 1;"
COMPARED += "setp.ge.s32 %p2, %r3, 1000; selp.b32 %r4, 1, 0, %p2;" + ADDRESS + "st.global.b32 [%rd10+4], %r4;"
PASSED = "mov.u32 %r3, %ctaid.x; mad.wide.u32 %rd10, %r3, 4, %rd1; ld.global.b32 %r5, [%rd1]; add.s32 %r5, %r5, 1;"
PASSED += "st.global.b32 [%rd10], %r5;"


@pytest.mark.parametrize(("body", "programs"), [(COMPARED, 1), (PASSED, 2)], ids=["lanes", "programs"])
def test_racing_read_that_is_used(body: str, programs: int) -> None:
    """A launch with other bits there gives another result."""
    with pytest.raises(ViolationError, match=r"race: .*changes the result"):
        launched(body, words(33), programs=programs)


def test_registers_that_nobody_wrote() -> None:
    """They hold other bits in each order, which must give the same. A text may name one whose value it does not use."""
    packed = "mov.b64 %rd9, {{%r1, %r9}}; mov.b64 {{%r3, %r4}}, %rd9;" + ADDRESS + "st.global.b32 [%rd10], {};"
    launched(packed.format("%r3"), found := words(32))
    assert found.tolist() == [*range(32)]
    with pytest.raises(ViolationError, match=r"order: .* gives other bits"):
        launched(packed.format("%r4"), words(32))


@pytest.mark.parametrize("limit", ["STEPS", "SECONDS"])
def test_time(limit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What does not end is stopped."""
    monkeypatch.setattr(machine, limit, 0.01 if limit == "SECONDS" else 1000)
    with pytest.raises(ViolationError, match="time"):
        run(ENDLESS)


@pytest.mark.parametrize(
    "text",
    [
        "foo.b32 %r3, %r1;", "add.sat.s32 %r3, %r1, %r1;", "fma.rn.f32 %r3, %r1, %r1, %r1;", "add.f32 %r3, %r1, %r1;",
        "add.rn.ftz.f32 %r3, %r1, %r1;", "add.rz.f32 %r3, %r1, %r1;", "shfl.sync.down.b32 %r3, %r1, 1, 31, -1;",
        "shfl.sync.up.b32 %r3, %r1, 1, 8, -1;", "bar.sync 1;", "ld.local.b32 %r3, [%rd1];", "cvt.s32.f32 %r3, %r1;",
        '.pragma "nounroll";', "mov.u32 %r3, %clock;", "atom.acquire.gpu.global.add.u32 %r3, [%rd1], 1;",
        "ld.acquire.foo.b32 %r3, [%rd1];", "@%p1 bar.sync 0;", "@%p1 ret;",
    ],
)  # fmt: skip
def test_unknown_text(text: str) -> None:
    """What the executor does not know is an error that quotes it."""
    with pytest.raises(UnknownTextError) as caught:
        run(text, words(1))
    assert text.rstrip(";") in str(caught.value)


def test_value_before_an_update() -> None:
    """The executor does not compute it: using it is an error."""
    with pytest.raises(UnknownTextError, match="atom"):
        run("atom.relaxed.gpu.global.add.u32 %r3, [%rd1], 1; add.s32 %r4, %r3, 1;", words(1))


def test_return() -> None:
    """Lanes that return do no more. How the others part and meet is seen by the kernels."""
    body = "setp.gt.s32 %p1, %r1, 8; @%p1 bra $L__BB0_4; ret;\n$L__BB0_4:\nmov.b32 %r3, 1;\n"
    for order in (Order(), Order(1, 2)):
        out = words(64)
        run(body + ADDRESS + "st.global.b32 [%rd10], %r3;", out, threads=64, order=order)
        assert out.tolist() == [int(i > 8) for i in range(64)]
