"""Compiled kernels with a planted error: the executor catches each, and the check that does is named here."""

from __future__ import annotations

import re
from collections import Counter
from typing import NamedTuple

import pytest
import torch
from compile_cases import adam, launched_cases, rebalance, static_form
from kernel_cases import EXECUTED, Guarded, agree, bits, drawn, gradient, kernels_from, padded_rows

import tritoncomm_kernels as kernels
from depth import trials
from ptx.launch import EXECUTOR

pytestmark = pytest.mark.skipif(not EXECUTED, reason="needs TRITONCOMM_PTX=1: tox -e ptx")
BARRIER = r"bar\.sync\s+0;"


def select(guarded: Guarded) -> list[list[int]]:
    """Return what reaches a threshold, of a 16-bit gradient. All warps have a part of the last tile."""
    out, added = guarded.poison(7000), guarded.of(gradient("normal", 7000, 2, torch.bfloat16))
    found = kernels.accumulate_and_select(guarded.of(drawn("normal", 7000, 1)), added, out, 1.5)
    return [bits(found.indices), bits(found.values), bits(out)]


def top(guarded: Guarded) -> list[list[int]]:
    """Return the largest elements."""
    found = kernels.top_k(guarded.of(drawn("heavy", 3000, 3)), 100)
    return [bits(found.indices), bits(found.values)]


def merge(guarded: Guarded) -> list[list[int]]:
    """Return the union and the sums of rows."""
    rows = padded_rows(12_000, [(0.6, 1), (0.7, 2), (0.5, 3)], "heavy")
    found = kernels.merge_rows(kernels.Entries(*map(guarded.of, rows)), 12_000)
    return [bits(found.indices), bits(found.values)]


def segments(guarded: Guarded) -> list[list[int]]:
    """Return the largest entries of segments."""
    x, cuts = guarded.of(drawn("heavy", 9000, 1)), guarded.of(torch.tensor([0, 4500, 9000], dtype=torch.int32))
    budgets = guarded.of(torch.tensor([300, 40], dtype=torch.int32))
    return [*map(bits, kernels.top_k_rows(x, cuts, budgets, 350))]


CALLS = {call.__name__: call for call in (select, top, merge, segments)}


class Mutant(NamedTuple):
    """A call, a kernel of it, a pattern in its text, what replaces its matches, and the check that fails.

    The first match is replaced, or as many as ``times``, 0 for all.
    """

    call: str
    kernel: str
    pattern: str
    replacement: str
    check: str
    times: int = 1


def barrier(number: int) -> str:
    """Return a pattern of the barrier of that number, and of all text before it."""
    return rf"\A((?:.*?{BARRIER}){{{number}}}.*?){BARRIER}"


STORE = r"st\.global\.b32 \[ (%rd\d+) \+ 12 \], \{ (%r\d+) \}"
MUTANTS = {
    "a difference in place of a sum": Mutant("select", "mark_kernel", r"add\.rn\.f32", "sub.rn.f32", "result"),
    "a store of two elements": Mutant(
        "select", "mark_kernel", STORE, r"st.global.v2.b32 [ \1 + 12 ], { \2, \2 }", "alignment"
    ),
    "a store of the element of another lane": Mutant(
        "select", "mark_kernel", STORE, r"st.global.b32 [ \1 + 8 ], { \2 }", "unwritten"
    ),
    "one element too many": Mutant("select", "mark_kernel", r"setp\.lt\.s32", "setp.le.s32", "bounds", times=0),
    "a misaligned load": Mutant(
        "select", "mark_kernel", r"(ld\.shared\.v4\.b32\s+\{.*?\}, \[%r\d+)(?=\])", r"\1+4", "alignment"
    ),
    "shared memory that is not written": Mutant(
        "select", "expand_kernel", r"@%p\d+ st\.shared::cta\.b32 .*?;", "", "unwritten"
    ),
    "a shuffle of the wrong lane": Mutant(
        "select",
        "expand_kernel",
        r"(shfl\.sync\.up\.b32\s+%r\d+, %r\d+, )1,",
        r"\g<1>2,",
        "race",  # of stores to one place
    ),
    "a barrier that half of the warps skip": Mutant(
        "select",
        "expand_kernel",
        barrier(3),
        r"\1mov.u32 %r0, %tid.x; setp.lt.u32 %p0, %r0, 32; @%p0 bra $L__x; bar.sync 0;" + "\n$L__x:\n",
        "barrier",
    ),
    "no barrier before lanes read what others stored": Mutant("select", "expand_kernel", barrier(3), r"\1", "race"),
    "no barrier before lanes store where others read": Mutant("select", "expand_kernel", barrier(5), r"\1", "race"),
    "an atomic sum in shared memory made of plain accesses": Mutant(
        "top",
        "histogram_kernel",
        r"atom\.relaxed\.sys\.shared\.add\.u32\s+(%r\d+), \[(%r\d+)\], 1;",
        r"ld.shared.b32 \1, [\2]; add.s32 \1, \1, 1; st.shared.b32 [\2], \1;",
        "race",
    ),
    "an atomic sum between programs made of plain accesses": Mutant(
        "segments",
        "histogram_kernel",
        r"(@%p\d+) red\.global\.gpu\.relaxed\.add\.u32 (\[.*?\]), (%r\d+);",
        r"\1 ld.global.b32 %r0, \2; \1 add.s32 %r0, %r0, \3; \1 st.global.b32 \2, %r0;",
        "race",
    ),
    "the sum of half a warp": Mutant(
        "top", "emit_kernel", r"(redux\.sync\.add\.s32\s+%r\d+, %r\d+, )%r\d+", r"\g<1>65535", "warp"
    ),
    "no barrier between the sums of two rows": Mutant("merge", "add_rows_kernel", barrier(1), r"\1", "race"),
}


def caught_by(call: str) -> str:
    """Return the check that fails, or nothing. A result that differs from the reference is a check, too."""
    try:
        agree(CALLS[call], "cpu")
    except AssertionError as error:
        return getattr(error, "check", "result")
    return ""


def test_every_kernel_is_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    """All kernels of the package run, and without an error in the text no check fails. A deep run has all orders."""
    monkeypatch.setattr(EXECUTOR, "launched", Counter())
    for call in CALLS.values():
        agree(call, "cpu")
    with kernels_from("triton"):
        static_form(2)
        rebalance(trials((2, 64), (2, 64, 256, 1024)))
        adam()
    assert {case.kernel.__name__ for case in launched_cases()} == {*EXECUTOR.launched}


@pytest.mark.parametrize("name", MUTANTS)
def test_mutant_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The check fails that should."""
    call, of, pattern, replacement, check, times = MUTANTS[name]

    def change(kernel_name: str, text: str) -> str:
        if kernel_name != of:
            return text
        changed, count = re.subn(pattern, replacement, text, count=times, flags=re.DOTALL)
        assert count, "the mutant no longer applies: adapt it to the text"
        return changed

    monkeypatch.setattr(EXECUTOR, "change", change)
    assert caught_by(call) == check
