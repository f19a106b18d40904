"""Scatter and rebalance: reference and kernels against plain Python, and their invariants."""

from __future__ import annotations

import itertools

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
    """Draw partitions with counts, some of them extreme."""
    partitions = draw(st.one_of(st.integers(1, 20), st.sampled_from([33, 64, 100])))
    generator = torch.Generator().manual_seed(draw(seeds))
    blocks = torch.randint(0, 40, (partitions,), generator=generator) + draw(st.integers(0, 2))
    counts = (torch.rand(partitions, generator=generator) ** draw(st.sampled_from([0.1, 1, 5, 30]))) * 10_000
    block = draw(st.sampled_from([1, 32, 1000]))
    total = max(1, int(blocks.sum()))
    return {
        "blocks": blocks.to(torch.int32),
        "counts": (counts * draw(st.sampled_from([0, 1e-3, 1]))).to(torch.int32),
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
@cases(200)
def test_rebalance(device: str, drawn_case: dict[str, object], rule: str) -> None:
    """Topology and bounds equal the reference, and the number of blocks stays the same, and the minimum holds.

    The last partition ends with the vector.
    """
    given_blocks = drawn_case["blocks"]
    partitions = given_blocks.numel()

    def call(guarded: Guarded) -> tuple[list[int], ...]:
        blocks, counts = guarded.of(given_blocks), guarded.of(drawn_case["counts"])
        bounds = guarded.poison(partitions + 1, torch.int32)
        numbers = {name: drawn_case[name] for name in ("iteration", "block", "numel", "min_blocks", "max_step")}
        kernels.rebalance(blocks, bounds, counts, rule=rule, **numbers)
        return bits(blocks), bits(bounds), bits(counts)

    blocks, bounds, _ = agree(call, device)
    assert sum(blocks) == int(given_blocks.sum())
    starts = itertools.accumulate(blocks[:-1], initial=0)
    assert bounds[:-1] == [min(start * drawn_case["block"], drawn_case["numel"]) for start in starts]
    assert bounds[-1] == drawn_case["numel"]
    for before, after in zip(given_blocks.tolist(), blocks, strict=True):
        assert after >= min(before, drawn_case["min_blocks"])


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
