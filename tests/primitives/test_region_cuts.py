"""Cuts, rotation and moves: the invariants of Ok-Topk's integer arithmetic."""

from __future__ import annotations

from itertools import accumulate

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tritoncomm.primitives.collectives import bruck_all_gather, rotation
from tritoncomm.primitives.region_cuts import (
    balanced_sizes,
    consensus_cuts,
    moves,
    offsets,
    propose_cuts,
    trimmed_sizes,
)
from tritoncomm.scheduler.cost import HEADER_WORDS, WORD
from tritoncomm.scheduler.simulated import SimulatedScheduler

from tritoncomm_kernels import Entries

supports = st.sets(st.integers(0, 99), max_size=40).map(lambda s: torch.tensor(sorted(s), dtype=torch.int32))


def proposed(indices: torch.Tensor, world_size: int, free: int = 0) -> torch.Tensor:
    """Return the proposal for these indices, in a list with ``free`` places for padding."""
    ones = torch.ones(len(indices))
    return propose_cuts(Entries(indices, ones).padded(len(indices) + free), world_size)


@given(st.lists(supports, min_size=1, max_size=9))
def test_cuts_partition_the_entries(selected: list[torch.Tensor]) -> None:
    """Cuts ascend from 0 to n, and every entry lies in the region of its slice."""
    world_size = len(selected)
    total = sum(proposed(indices, world_size) for indices in selected)
    cuts = consensus_cuts(total.tolist(), 100)
    assert len(cuts) == world_size + 1
    assert (cuts[0], cuts[-1]) == (0, 100)
    assert list(cuts) == sorted(cuts)
    for indices in selected:
        at = offsets(indices, cuts)
        assert (at[0], at[-1]) == (0, len(indices))
        for owner in range(world_size):
            part = indices[at[owner] : at[owner + 1]].tolist()
            assert all(cuts[owner] <= j < cuts[owner + 1] for j in part)


@given(supports, st.integers(2, 9), st.integers(0, 5))
def test_proposals_with_padding(indices: torch.Tensor, world_size: int, free: int) -> None:
    """A list with padding gives the same proposal as one without."""
    assert torch.equal(proposed(indices, world_size, free + 1), proposed(indices, world_size))


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 7, 8, 17])
@pytest.mark.parametrize("width", [1, 2, 4, 100])
def test_rotation(world_size: int, width: int) -> None:
    """Each step is a permutation, every ordered pair occurs once, and there are ceil(P/W) buckets."""
    schedules = [[pair for bucket in rotation(r, world_size, width) for pair in bucket] for r in range(world_size)]
    assert all(len(list(rotation(r, world_size, width))) == -(-world_size // width) for r in range(world_size))
    for step in zip(*schedules, strict=True):
        assert sorted(to for to, _ in step) == list(range(world_size))
        assert all(step[to][1] == rank for rank, (to, _) in enumerate(step))
    pairs = {(rank, to) for rank, schedule in enumerate(schedules) for to, _ in schedule}
    assert len(pairs) == world_size * (world_size - 1)


@given(st.lists(st.integers(0, 30), min_size=1, max_size=9))
def test_moves_balance_blocks(sizes: list[int]) -> None:
    """Moves leave balanced blocks in the same order, and every receiver expects what its peer sends."""
    world_size, total = len(sizes), sum(sizes)
    starts = [0, *accumulate(sizes)]
    blocks = [list(range(starts[r], starts[r + 1])) for r in range(world_size)]
    plans = [moves(sizes, rank) for rank in range(world_size)]
    result = []
    for rank in range(world_size):
        arriving = plans[rank][1]
        block = []
        for source in sorted(arriving):
            start, stop = plans[source][0][rank]
            assert stop - start == arriving[source]
            block += blocks[source][start:stop]
        result.append(block)
        assert all(rank in plans[to][1] for to in plans[rank][0])
    assert [len(block) for block in result] == balanced_sizes(total, world_size)
    assert [entry for block in result for entry in block] == list(range(total))
    sent = [sum(b - a for to, (a, b) in plans[r][0].items() if to != r) for r in range(world_size)]
    assert all(words <= total - total // world_size for words in sent)


@given(st.lists(st.integers(0, 40), min_size=1, max_size=12), st.integers(0, 100))
def test_trimmed_sizes(sizes: list[int], limit: int) -> None:
    """Trimmed sizes use the limit exactly, exceed no size, and are within one of proportional shares."""
    trimmed = trimmed_sizes(sizes, limit)
    total = sum(sizes)
    assert sum(trimmed) == min(total, limit)
    assert all(0 <= small <= size for small, size in zip(trimmed, sizes, strict=True))
    if total > limit:
        assert all(abs(small - size * limit / total) < 1 for small, size in zip(trimmed, sizes, strict=True))


@given(st.lists(st.integers(0, 6), min_size=1, max_size=17))
def test_bruck_all_gather(sizes: list[int]) -> None:
    """Every rank gets every block once, by rank, in ceil(log2 P) rounds."""
    world_size = len(sizes)
    blocks = [torch.full((size,), rank, dtype=torch.int32) for rank, size in enumerate(sizes)]
    scheduler = SimulatedScheduler(world_size)
    rounds = []
    patterns = [bruck_all_gather(blocks[r], sizes, r, world_size, phase="gather") for r in range(world_size)]
    results = scheduler.run(patterns, lambda number, _: rounds.append(number))
    assert len(rounds) == (world_size - 1).bit_length()
    for rank, result in enumerate(results):
        assert all(torch.equal(a, b) for a, b in zip(result, blocks, strict=True))
        received = scheduler.meters[rank].received
        assert received.bytes == 4 * (sum(sizes) - sizes[rank]) + WORD * HEADER_WORDS * received.messages
