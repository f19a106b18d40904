"""Malformed messages of every method: they are rejected by name, or harmless, whatever their words."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace

import pytest
import torch
from tritoncomm import ProtocolMismatchError, SimulatedWorld, algorithms
from tritoncomm.algorithms.base import IndexRecipe
from tritoncomm.primitives import packing, quantized_mean
from tritoncomm.primitives.collectives import Regions, gather_regions, share_counts, share_rows
from tritoncomm.primitives.packing import Encoding, Sections
from tritoncomm.scheduler.rounds import AllGather, Op, Post, Round, Ticket

import laws
import replay
from baselines import GTopk, TopkDSA
from depth import DEEP, trials
from recipes import always_packed, under_test
from tritoncomm_kernels import Entries

NAMES = [
    name
    for name, recipe in under_test(0.1).items()
    if isinstance(recipe, IndexRecipe | GTopk | TopkDSA) and not name.startswith("spardl-auto")
]

# Wrappers, and methods whose indices do not travel. A deep run has all of them.
OTHERS = [
    "warmup-8bit", "warmup-8bit-hierarchical", "dense-tail-8bit", "dense-tail-8bit-static", "hierarchical-2-4bit",
    "preconditioned-warmup-8bit", "random-block-8bit", "random-block-4bit",
]  # fmt: skip
if DEEP:
    OTHERS = [name for name in under_test(0.1) if name not in NAMES and not name.startswith(("dense", "spardl-auto"))]
    OTHERS += [name for name in under_test(0.1) if name.startswith("dense-tail")]


# Methods whose short messages are packed, too. tests/kernels/test_section_rows.py reads damaged words of every format.
PACKED = {
    f"{name}-packed": always_packed(under_test(0.2)[name])
    for name in ("topk_allgather", "topk_allgather-4bit", "oktopk-4bit", "spardl", "spardl-8bit")
}


@pytest.mark.parametrize("name", [*PACKED, *NAMES, *OTHERS])
def test_replayed_messages(name: str) -> None:
    """Replays of single steps with a damaged reply are rejected by name, or harmless. Some are of each kind.

    Any words are values in 8 or 4 bits, except those that say that a block is not finite.
    """
    number, sizes = (100, replay.WORLD_SIZES) if name in algorithms() else (40, replay.WORLD_SIZES[-1:])
    outcomes = replay.fuzz((PACKED | under_test(0.2))[name], *trials((number, sizes), (100_000, replay.WORLD_SIZES)))
    assert outcomes["accepted"] > 0
    if name.startswith("random"):  # nothing but values travels
        assert outcomes["not finite"] == 0
    else:
        assert outcomes["ProtocolMismatchError"] > 0


@pytest.mark.parametrize("name", ["topk_allgather", "oktopk"])
def test_replays_find_a_missing_check(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replays fail for a receiver that does not check indices."""
    monkeypatch.setattr(packing, "check_indices", lambda *_: None)
    with pytest.raises((AssertionError, IndexError, RuntimeError, ValueError)):
        replay.fuzz(under_test(0.2)[name], 250)


def test_replays_find_a_mean_that_is_not_finite(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replays count the NaN of a receiver that does not look for them in a mean of few bits."""
    monkeypatch.setattr(quantized_mean, "_checked", lambda mean, verdict: mean)
    assert replay.fuzz(under_test(0.2)["random-block-8bit"], 300)["not finite"] > 0


def answer(pattern: object, reply: torch.Tensor) -> None:
    """Run a pattern of one operation with this reply."""
    next(pattern)
    with suppress(StopIteration):
        pattern.send(reply)


@pytest.mark.parametrize("wrong", [-2, 101, 2**40, -(2**63)])
def test_counts_out_of_range(wrong: int) -> None:
    """A count that no rank can hold is rejected before a buffer of that length is allocated."""
    with pytest.raises(ProtocolMismatchError, match=r"'counts': received counts \[.*\] from rank 1"):
        answer(share_counts([3, 4], True, torch.device("cpu"), limit=100), torch.tensor([5, wrong]))
    rows = share_rows([3, 0], True, 2, torch.device("cpu"), phase="sizes", limit=100)
    with pytest.raises(ProtocolMismatchError, match=r"must be in \[0, 100\]"):
        answer(rows, torch.tensor([[3, 0], [wrong, 0]]))


def test_own_count_comes_back() -> None:
    """A rank whose own count is not among the gathered ones rejects them."""
    rows = share_rows([3], True, 2, torch.device("cpu"), phase="sizes", limit=100)
    with pytest.raises(ProtocolMismatchError, match="sent 3"):
        answer(rows, torch.tensor([[7], [9]]))


def test_own_size_comes_back() -> None:
    """A rank that has another number of entries than it has announced rejects the sizes before it sends."""
    block = Entries(torch.arange(4, dtype=torch.int32), torch.ones(4))
    regions = Regions((0, 50, 100), [3, 4], Encoding("fp32", "always"))
    gathering = gather_regions(block, regions, 0, 2, trigger=math.inf, width=1, phase="all-gather")
    with pytest.raises(ProtocolMismatchError, match="rank 0 has 4 entries"):
        next(gathering)


def test_parts_of_one_region_overlap() -> None:
    """An index that two balanced blocks of one region have is rejected. Each block alone is well formed."""
    own = Entries(torch.tensor([1, 2, 3, 4], dtype=torch.int32), torch.ones(4))
    encoding = Encoding("fp32", "always")
    for other, fits in (([3, 4], True), ([2, 4], False)):
        gathering = gather_regions(
            own, Regions((0, 10, 20), [4, 0], encoding), 0, 2, trigger=1.0, width=1, phase="gather"
        )
        second = Sections(encoding, [(0, 10, 2)])
        message, _ = second.encode(torch.tensor(other, dtype=torch.int32), torch.ones(2))
        reply: object = None
        with (
            nullcontext() if fits else pytest.raises(ProtocolMismatchError, match="strictly increasing"),
            suppress(StopIteration),
        ):
            while True:
                op = gathering.send(reply)
                reply = {1: message} if isinstance(op, Round) else Ticket(op.phase, 0) if isinstance(op, Post) else {}


@pytest.mark.parametrize(
    ("static", "word"),
    [
        *((False, word) for word in (0x7FC00000, 0xBF800000 - 2**32, 0, 0xFF800000 - 2**32)),
        *((True, word) for word in (0, -1, 0x7F800000, 0x7FFFFFFF)),
    ],
)
def test_a_smallest_magnitude_that_is_none(static: bool, word: int) -> None:
    """Ok-Topk rejects a smallest magnitude that is not positive, and nothing changes. Thresholds stay equal.

    The static form also rejects one that is infinite.
    """
    world = SimulatedWorld(replace(under_test(0.1)["oktopk-4bit"], static=static), 3, 600)
    for step in range(3):
        world.step(laws.normal(3, 600, seed=step))
    before, residuals = laws.states_of(world), world.residuals

    def damage(_: int, ops: Sequence[Op]) -> None:
        if ops[0].phase != "all-gather" or not isinstance(ops[0], Round | AllGather):
            return
        if static:
            for op in ops if word > 0x7F000000 else ops[:1]:
                op.tensor[-1] = word
        else:
            next(iter(ops[0].sends.values()))[-1] = word

    with pytest.raises(ProtocolMismatchError, match="smallest magnitude"):
        world.step(laws.normal(3, 600, seed=3), before_round=damage)
    assert laws.states_of(world) == before
    assert laws.same_bits(world.residuals, residuals)
