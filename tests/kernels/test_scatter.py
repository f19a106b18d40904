"""Scatter and rebalance: reference and kernels against plain Python, and their invariants."""

from __future__ import annotations

import itertools

import exdyna_oracle as oracle
import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from kernel_cases import Guarded, agree, bits, both, cases, seeds, sparse

import tritoncomm_kernels as kernels
from depth import examples

supports = st.lists(st.tuples(st.floats(0, 1), seeds), min_size=1, max_size=6)


@st.composite
def topologies(draw: st.DrawFn) -> dict[str, object]:
    """Draw partitions with counts, some of them extreme. Of few blocks, a move decides about the next one."""
    partitions = draw(st.one_of(st.integers(1, 20), st.sampled_from([33, 64, 100])))
    generator = torch.Generator().manual_seed(draw(seeds))
    blocks = torch.randint(0, draw(st.sampled_from([4, 40])), (partitions,), generator=generator)
    blocks += draw(st.integers(0, 2))
    low, width = draw(st.sampled_from([(0, 0), (0, 4), (0, 10), (0, 10_000), (70, 60), (70, 60)]))
    counts = low + (torch.rand(partitions, generator=generator) ** draw(st.sampled_from([0.1, 1, 5, 30]))) * width
    block = draw(st.sampled_from([1, 32, 1000]))
    total = max(1, int(blocks.sum()))
    return {
        "blocks": blocks.to(torch.int32),
        "counts": counts.to(torch.int32),
        "iteration": draw(st.integers(-100, 10**6)),
        "block": block,
        "numel": max(1, total * block - draw(st.integers(0, block - 1))),
        "min_blocks": draw(st.integers(0, 10)),
        "max_step": draw(st.sampled_from([1, 16])),
    }


# A busy partition that already has its minimum of blocks.
AT_FLOOR = {
    "blocks": torch.tensor([2, 10, 10], dtype=torch.int32),
    "counts": torch.tensor([9000, 10, 10], dtype=torch.int32),
    "iteration": 0,
    "block": 32,
    "numel": 22 * 32,
    "min_blocks": 2,
    "max_step": 1,
}

# Just so much above the mean, and below it, that a block moves.
EDGE = AT_FLOOR | {"blocks": torch.tensor([10, 6, 6], dtype=torch.int32)}
EDGE |= {"counts": torch.tensor([106, 95, 99], dtype=torch.int32)}

# The second partition is above the mean only with what the first one gives to it.
CHAIN = AT_FLOOR | {
    "blocks": torch.tensor([2, 1, 1], dtype=torch.int32),
    "counts": torch.tensor([160, 94, 46], dtype=torch.int32),
    "block": 64,
    "numel": 256,
    "min_blocks": 1,
}


@both
@given(topologies(), st.sampled_from(["paper", "prefix"]))
@example(CHAIN, "paper")
@example(AT_FLOOR, "paper")
@example(AT_FLOOR, "prefix")
@example(EDGE, "paper")
@cases(200)
def test_rebalance(device: str, drawn_case: dict[str, object], rule: str) -> None:
    """Each rule moves the blocks that the oracle of ExDyna moves. The last partition ends with the vector."""
    given_blocks = drawn_case["blocks"]
    numbers = {name: drawn_case[name] for name in ("iteration", "block", "numel", "min_blocks", "max_step")}

    def call(guarded: Guarded) -> tuple[list[int], ...]:
        blocks, counts = guarded.of(given_blocks), guarded.of(drawn_case["counts"])
        bounds = guarded.poison(given_blocks.numel() + 1, torch.int32)
        kernels.rebalance(blocks, bounds, counts, rule=rule, **numbers)
        return bits(blocks), bits(bounds), bits(counts)

    blocks, bounds, counts = agree(call, device)
    before = given_blocks.tolist()
    starts = [*itertools.accumulate(before[:-1], initial=0)]
    layout = oracle.Layout(numbers["block"], before, starts, numbers["numel"], least=numbers["min_blocks"])
    kappa = oracle.by_partition(counts, numbers["iteration"])
    if rule == "paper":
        assert blocks == oracle.rebalance_paper(layout, kappa).counts
    else:
        assert blocks == oracle.rebalance_prefix(layout, kappa, max_step=numbers["max_step"]).counts
    starts = itertools.accumulate(blocks[:-1], initial=0)
    assert bounds == [*(min(start * numbers["block"], numbers["numel"]) for start in starts), numbers["numel"]]


@given(st.sets(st.integers(0, 99)), st.sets(st.integers(0, 99)), st.booleans())
def test_common_positions(sought: set[int], among: set[int], same: bool) -> None:
    """common_positions() returns the ascending positions of the intersection. An equal list is one of the cases."""
    among = sought if same else among
    a = torch.tensor(sorted(sought), dtype=torch.int32)
    b = torch.tensor(sorted(among), dtype=torch.int32)
    found = kernels.common_positions(a, b)
    assert found.dtype == torch.int64
    assert a[found].tolist() == sorted(sought & among)


@pytest.mark.parametrize("word", [0x7F800001, 0x7FC00000, 0x7F800000])
def test_merge_of_non_finite_values(word: int) -> None:
    """Inf and every NaN, also a signalling one, are merged without a warning: the caller checks the sums."""
    at = torch.tensor([1], dtype=torch.int32)
    value = torch.tensor([word], dtype=torch.int32).view(torch.float32)
    for lists in ([(at, value)], [(at, value), (at, -value)]):
        _, sums = kernels.merge(lists, 3)
        assert not sums.isfinite().any()


@given(supports)
@examples(100)
def test_scatter(drawn_lists: list[tuple[float, int]]) -> None:
    """Lists are added one after the other."""
    lists = [sparse(200, *each, "heavy") for each in drawn_lists]
    apart, expected = torch.ones(200), np.ones(200, np.float32)
    for indices, values in lists:
        kernels.scatter_add(apart, indices, values)
        expected[indices.numpy()] += values.numpy()
    assert bits(apart) == bits(torch.from_numpy(expected))
