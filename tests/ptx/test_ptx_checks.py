"""Each check of the executor fails on a small program with the error, and passes on the same program without it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from ptx import machine
from ptx.launch import Bound, Executor
from ptx.machine import Order
from ptx.memory import POISON, ViolationError
from ptx.parse import UnknownTextError
from ptx.programs import POINTERS, kernel_of, run

ADDRESS = "mad.wide.u32 %rd10, %r1, 4, %rd1;\n"  # of the element of a thread
SHARED = "mov.b32 %r10, global_smem; shl.b32 %r11, %r2, 2; add.s32 %r12, %r10, %r11;\n"  # its word of shared memory
# Each thread writes its word, and reads that of the thread 32 places behind.
EXCHANGE = (
    SHARED
    + "st.shared.b32 [%r12], %r2; {0} xor.b32 %r13, %r11, 128; add.s32 %r14, %r10, %r13; ld.shared.b32 %r15, [%r14];"
    + ADDRESS
    + "st.global.b32 [%rd10], %r15;"
)


def words(count: int) -> torch.Tensor:
    """Return int32 zeros."""
    return torch.zeros(count, dtype=torch.int32)


def broken(check: str, body: str, *tensors: torch.Tensor, **options: int) -> None:
    """Check that running a body violates a check."""
    with pytest.raises(ViolationError) as caught:
        run(body, *tensors, **options)
    assert caught.value.check == check, caught.value


def launched(body: str, tensor: torch.Tensor, *, programs: int = 1, threads: int = 32, shared: int = 0) -> Executor:
    """Run a body as a launch: in every order, with the check of what racing lanes read."""
    executor, kernel = Executor(), kernel_of(body, 1, threads=threads)
    executor.launch_bound(Bound(kernel, shared, (programs, 1, 1), [(tensor, POINTERS[tensor.dtype])]))
    return executor


def test_bounds() -> None:
    """The last element is inside, and the byte behind it belongs to no tensor."""
    store = ADDRESS + "st.global.b32 [%rd10], %r1;"
    run(store, out := words(32))
    assert out.tolist() == [*range(32)]
    broken("bounds", store, words(31))
    broken("bounds", store, words(64)[:31])  # there is memory, but it is not of this tensor
    broken("bounds", "add.s64 %rd10, %rd1, -4; ld.global.b32 %r3, [%rd10];", words(64)[32:])
    broken("bounds", "ld.global.b32 %r3, [%rd1+4096];", words(4), words(4))
    broken("bounds", SHARED + "st.shared.b32 [%r12+4], %r2;", shared=128)


def test_alignment() -> None:
    """An access begins at a multiple of its bytes, all of a vector together."""
    wide = "ld.global.v2.b32 {{%r3, %r4}}, [%rd1+{}];"
    run(wide.format(8), words(4))
    broken("alignment", wide.format(4), words(4))
    broken("alignment", SHARED + "st.shared.b32 [%r10+2], %r2;", shared=128)


def test_unwritten_memory() -> None:
    """What new memory holds, and shared memory that no lane wrote, are not read."""
    load = ADDRESS + "ld.global.b32 %r3, [%rd10];"
    new = torch.full((128,), POISON, dtype=torch.uint8).view(torch.int32)
    broken("unwritten", load, new)
    run(ADDRESS + "st.global.b32 [%rd10], %r1;" + load, new)
    broken("unwritten", SHARED + "ld.shared.b32 %r3, [%r12];", shared=128)
    broken("unwritten", "mov.b32 %r10, global_smem; red.relaxed.gpu.shared.add.u32 [%r10], 1;", shared=128)


def test_bytes_that_are_not_used() -> None:
    """A vector load may cover words that nobody wrote, if the text says that they are not used."""
    body = SHARED + "st.shared.b32 [%r10], 1; {} ld.shared.v2.b32 {{%r3, %r4}}, [%r10];"
    run(body.format('.pragma "used_bytes_mask 0xf";'), shared=8)
    broken("unwritten", body.format('.pragma "used_bytes_mask 0xff";'), shared=8)
    broken("unwritten", body.format(""), shared=8)
    run(body.format("").replace("%r4", "_"), shared=8)


@pytest.mark.parametrize("order", [Order(), Order(1, 2), Order(3, 8)])
def test_missing_barrier(order: Order) -> None:
    """Without the barrier between store and load there is a race, in whatever order warps run."""
    out = words(64)
    run(EXCHANGE.format("bar.sync 0;"), out, threads=64, shared=256, order=order)
    assert out.tolist() == [*range(32, 64), *range(32)]
    # If the other warp has not written yet, that is seen first.
    with pytest.raises(ViolationError) as caught:
        launched(EXCHANGE.format(""), words(64), threads=64, shared=256)
    assert caught.value.check in {"race", "unwritten"}


def test_stores_to_one_place() -> None:
    """Lanes may store the same value to one place, and are counted. Different values are a race."""
    memory = run("st.global.b32 [%rd1], 7;", words(1))
    assert memory.counts["equal values"] == 31
    broken("race", "st.global.b32 [%rd1], %r1;", words(1))
    broken("race", "st.global.b32 [%rd1], %r2; st.global.b32 [%rd1], 3;".replace("%r2", "5"), words(1), threads=64)


def test_programs_race() -> None:
    """There is no barrier between programs: one must not write what another writes or reads."""
    first = "mov.u32 %r3, %ctaid.x; mov.u32 %r4, %nctaid.x; "
    broken("race", first + "st.global.b32 [%rd1], %r3;", words(1), programs=2, threads=32)
    assert run(first + "st.global.b32 [%rd1], %r4;", words(1), programs=200).counts["equal values"] > 0
    passed = (
        "mad.wide.u32 %rd10, %r3, 4, %rd1; ld.global.b32 %r5, [%rd1]; add.s32 %r5, %r5, 1; st.global.b32 [%rd10], %r5;"
    )
    with pytest.raises(ViolationError, match=r"race: .*changes the result"):
        launched(first + passed, words(2), programs=2)


def test_racing_read_that_is_not_used() -> None:
    """A lane may read what another writes, if the value leads to nothing."""
    body = "ld.global.b32 %r3, [%rd1]; setp.eq.b32 %p1, %r1, {}; add.s32 %r3, %r3, 1; @%p1 st.global.b32 [%rd1], %r3;"
    executor = launched(body.format(5), found := words(1))
    assert found.tolist() == [1]
    assert executor.harmless["kernel"]["unused reads"] == len(executor.orders)
    summed = body.replace("setp", "redux.sync.add.s32 %r3, %r3, -1; setp")
    with pytest.raises(ViolationError, match=r"race"):
        launched(summed.format(5), words(1))
    fenced = summed.replace("@%p1 st", "bar.sync 0; @%p1 st")
    assert not launched(fenced.format(5), words(1)).harmless["kernel"]["unused reads"]


def test_racing_read_in_a_comparison() -> None:
    """Flipped bits change nothing where only large numbers matter. The largest number does."""
    body = (
        "ld.global.b32 %r3, [%rd1]; setp.eq.b32 %p1, %r1, 5; @%p1 st.global.b32 [%rd1], 1;"
        "setp.ge.s32 %p2, %r3, 1000; selp.b32 %r4, 1, 0, %p2;" + ADDRESS + "st.global.b32 [%rd10+4], %r4;"
    )
    with pytest.raises(ViolationError, match=r"race: .*changes the result"):
        launched(body, words(33))


def test_atomic_updates() -> None:
    """They are added in any order. A plain store among them is a race."""
    add = "red.global.gpu.relaxed.add.u32 [%rd1], %r1;"
    launched(add, found := words(1), programs=3, threads=64)
    assert found.item() == sum(range(192))
    broken("race", add + "st.global.b32 [%rd1], 0;", words(1), programs=3)
    broken("race", "ld.global.b32 %r3, [%rd1]; add.s32 %r3, %r3, %r1; st.global.b32 [%rd1], %r3;", words(1))


def test_orders_give_the_same_bits() -> None:
    """A ticket from a counter depends on the order of lanes, and so does a result that is made of it."""
    ticket = "atom.relaxed.gpu.global.add.u32 %r3, [%rd1], 1;"
    launched(ticket, words(1), threads=64)
    numbered = (
        "ld.global.b32 %r4, [%rd1+4]; " + ticket + "mad.wide.u32 %rd10, %r1, 4, %rd1; st.global.b32 [%rd10+4], %r3;"
    )
    with pytest.raises(ViolationError, match=r"order: .* gives other bits"):
        launched(numbered, words(65), threads=64)


def test_registers_that_nobody_wrote() -> None:
    """They hold other bits in each order. A text may name one whose value it does not use."""
    packed = "mov.b64 %rd9, {{%r1, %r9}}; mov.b64 {{%r3, %r4}}, %rd9;" + ADDRESS + "st.global.b32 [%rd10], {};"
    launched(packed.format("%r3"), found := words(32))
    assert found.tolist() == [*range(32)]
    with pytest.raises(ViolationError, match=r"order: .* gives other bits"):
        launched(packed.format("%r4"), words(32))


def test_barriers_are_reached_by_all() -> None:
    """All lanes of a program reach the same barrier."""
    part = "setp.lt.u32 %p1, %r2, {}; @%p1 bra $L__BB0_1; {} bar.sync 0; {}\n$L__BB0_1:\n"
    for turns in (1, 2):
        order = Order(1, turns)
        with pytest.raises(ViolationError, match=r"barrier"):
            run(part.format(32, "", ""), threads=64, order=order)
        with pytest.raises(ViolationError, match=r"barrier"):
            run(part.format(16, "", ""), threads=64, order=order)
        run(part.format(0, "", ""), threads=64, order=order)
        run(part.format(64, "", ""), threads=64, order=order)
        # The other warp waits at another barrier.
        both = part.format(32, "", "bra $L__BB0_2;") + "bar.sync 0;\n$L__BB0_2:\n"
        with pytest.raises(ViolationError, match=r"barrier"):
            run(both, threads=64, order=order)


@pytest.mark.parametrize(
    "instruction",
    [
        "shfl.sync.bfly.b32 %r3, %r1, 16, 31, -1;",
        "redux.sync.add.s32 %r3, %r1, -1;",
        "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r3, %r4, %r5, %r6}, [%r1];",
    ],
)
def test_warps_are_whole(instruction: str) -> None:
    """An instruction of a warp needs all its lanes, also if none but some are named."""
    guarded = "setp.lt.u32 %p1, %r2, COUNT;\n@%p1 " + instruction
    broken("warp", guarded.replace("COUNT", "40"), threads=64, shared=4096)
    if "ldmatrix" not in instruction:
        run(guarded.replace("COUNT", "32"), threads=64)
        broken("warp", instruction.replace("-1;", "15;"))


def test_division_and_shifts() -> None:
    """No lane divides by 0, or shifts by more than the width."""
    for name in ("div.s32", "rem.u32", "div.s64"):
        size, prefix = name[-2:], "%r" if name.endswith("32") else "%rd"
        convert = "" if size == "32" else "cvt.u64.u32 %rd20, %r1; add.s64 %rd21, %rd20, {};"
        plain = "mov.b32 %r20, %r1; add.s32 %r21, %r20, {};"
        body = (convert or plain) + f"{name} {prefix}22, {prefix}20, {prefix}21;"
        run(body.format(1))
        broken("division by 0", body.format(0))
        run("setp.ne.b32 %p1, %r1, 0;" + body.format(0).replace(name, f"@%p1 {name}"))
    run("shl.b32 %r3, %r1, %r2;", threads=32)
    broken("shift", "shl.b32 %r3, %r1, %r2;", threads=64)


@pytest.mark.parametrize("limit", ["STEPS", "SECONDS"])
def test_time(limit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What does not end is stopped."""
    monkeypatch.setattr(machine, limit, 0.01 if limit == "SECONDS" else 1000)
    broken("time", "$L__BB0_1:\n add.s32 %r3, %r1, 1; bra.uni $L__BB0_1;\n")


@pytest.mark.parametrize(
    "text",
    [
        "foo.b32 %r3, %r1;", "add.sat.s32 %r3, %r1, %r1;", "fma.rn.f32 %r3, %r1, %r1, %r1;", "add.f32 %r3, %r1, %r1;",
        "add.rn.ftz.f32 %r3, %r1, %r1;", "shfl.sync.down.b32 %r3, %r1, 1, 31, -1;", "bar.sync 1;",
        "ld.local.b32 %r3, [%rd1];", "cvt.s32.f32 %r3, %r1;", '.pragma "nounroll";', "mov.u32 %r3, %clock;",
        "atom.acquire.gpu.global.add.u32 %r3, [%rd1], 1;", "ld.acquire.foo.b32 %r3, [%rd1];", "@%p1 bar.sync 0;",
    ],
)  # fmt: skip
def test_unknown_text(text: str) -> None:
    """What the executor does not know is an error that quotes it."""
    with pytest.raises(UnknownTextError) as caught:
        run(text, words(1))
    assert text.rstrip(";") in str(caught.value)


IF = "mov.b32 %r3, 1; setp.lt.s32 %p1, %r1, 9; @!%p1 bra $L__BB0_2; mov.b32 %r3, 2;\n$L__BB0_2:"
IF_AND_ELSE = """
    setp.lt.s32 %p1, %r1, 9; @%p1 bra $L__BB0_2; mov.b32 %r3, 1; bra.uni $L__BB0_3;
    $L__BB0_2:
    mov.b32 %r3, 2;
    $L__BB0_3:"""
LOOP = """
    mov.b32 %r3, 0; mov.b32 %r4, %r1;
    $L__BB0_1:
    add.s32 %r3, %r3, 3; add.s32 %r4, %r4, -1; setp.gt.s32 %p1, %r4, 0; @%p1 bra $L__BB0_1;"""
GUARD = "mov.b32 %r3, 5; setp.eq.b32 %p1, %r1, 4; @%p1 mov.b32 %r3, 6;"
BRANCHES: dict[str, tuple[str, Callable[[int], int]]] = {
    "if": (IF, lambda i: 1 + (i < 9)),
    "if and else": (IF_AND_ELSE, lambda i: 1 + (i < 9)),
    "loop": (LOOP, lambda i: 3 * max(1, i)),
    "guard": (GUARD, lambda i: 5 + (i == 4)),
}


@pytest.mark.parametrize("name", BRANCHES)
def test_branches(name: str) -> None:
    """Lanes that part at a branch meet again, and lanes that leave a loop wait for the others."""
    body, expected = BRANCHES[name]
    for order in (Order(), Order(1, 2)):
        out = words(256)
        run(body + "\n" + ADDRESS + "st.global.b32 [%rd10], %r3;", out, programs=4, threads=64, order=order)
        assert out.tolist() == [expected(i) for i in range(256)]


def test_return() -> None:
    """Lanes that return do nothing more."""
    out = words(64)
    run("setp.lt.s32 %p1, %r1, 9; @%p1 ret;" + ADDRESS + "st.global.b32 [%rd10], 1;", out, threads=64)
    assert out.tolist() == [int(i >= 9) for i in range(64)]
