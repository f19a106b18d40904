"""Decompress and merge against plain Python sums."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import tritoncomm_kernels as kernels
from depth import examples

supports = st.lists(st.sets(st.integers(0, 199), max_size=60), min_size=1, max_size=7)


@given(supports, st.integers(0, 1000))
@examples(200)
def test_merge(sets: list[set[int]], seed: int) -> None:
    """The union is ascending, and terms are added in list order with the same bits as numpy's fp32."""
    generator = torch.Generator().manual_seed(seed)
    lists = []
    sums: dict[int, np.float32] = {}
    for support in sets:
        indices = torch.tensor(sorted(support), dtype=torch.int32)
        values = torch.randn(len(support), generator=generator) * 1e3
        lists.append((indices, values))
        for i, v in zip(indices.tolist(), values.numpy(), strict=True):
            sums[i] = np.float32(sums.get(i, np.float32(0))) + v
    union, values = kernels.merge(lists, 200)
    assert union.dtype == torch.int32
    assert union.tolist() == sorted(sums)
    assert np.array_equal(values.numpy(), np.array([sums[i] for i in sorted(sums)], dtype=np.float32))


def test_merge_order_matters() -> None:
    """The list order decides the rounding of large + tiny - large, so it must be fixed."""
    at = torch.tensor([4], dtype=torch.int32)
    parts = [torch.tensor([v]) for v in (1e8, 1.0, -1e8)]
    forward = kernels.merge([(at, v) for v in parts], 5)[1]
    backward = kernels.merge([(at, parts[i]) for i in (0, 2, 1)], 5)[1]
    assert (forward.item(), backward.item()) == (0.0, 1.0)


@given(st.sets(st.integers(0, 99)), st.sets(st.integers(0, 99)), st.booleans())
def test_common_positions(sought: set[int], among: set[int], same: bool) -> None:
    """common_positions() returns the ascending positions of the intersection. An equal list is one of the cases."""
    among = sought if same else among
    a = torch.tensor(sorted(sought), dtype=torch.int32)
    b = torch.tensor(sorted(among), dtype=torch.int32)
    found = kernels.common_positions(a, b)
    assert found.dtype == torch.int64
    assert a[found].tolist() == sorted(sought & among)


def test_decompress_overwrites() -> None:
    """NaN in the output is overwritten."""
    out = torch.full((6,), float("nan"))
    kernels.decompress(out, torch.tensor([1, 4], dtype=torch.int32), torch.tensor([2.0, -3.0]))
    assert out.tolist() == [0, 2, 0, 0, -3, 0]


def test_scatter_add() -> None:
    """Values are added at the given positions only."""
    out = torch.ones(4)
    kernels.scatter_add(out, torch.tensor([0, 3], dtype=torch.int32), torch.tensor([1.0, 2.0]))
    assert out.tolist() == [2, 1, 1, 3]


@pytest.mark.parametrize("word", [0x7F800001, 0x7FC00000, 0x7F800000])
def test_merge_of_non_finite_values(word: int) -> None:
    """Inf and every NaN, also a signalling one, are merged without a warning: the caller checks the sums."""
    at = torch.tensor([1], dtype=torch.int32)
    value = torch.tensor([word], dtype=torch.int32).view(torch.float32)
    for lists in ([(at, value)], [(at, value), (at, -value)]):
        _, sums = kernels.merge(lists, 3)
        assert not sums.isfinite().any()


def test_merge_of_empty_lists() -> None:
    """Empty lists have an empty union."""
    empty = (torch.empty(0, dtype=torch.int32), torch.empty(0))
    union, values = kernels.merge([empty, empty], 3)
    assert union.numel() == values.numel() == 0


@given(supports, st.integers(0, 1000))
@examples(100)
def test_scatter_add_lists(sets: list[set[int]], seed: int) -> None:
    """Lists are added one after the other, with the same bits as one call per list."""
    generator = torch.Generator().manual_seed(seed)
    lists = [torch.tensor(sorted(support), dtype=torch.int32) for support in sets]
    values = [torch.randn(len(indices), generator=generator) * 1e3 for indices in lists]
    together, apart = torch.ones(200), torch.ones(200)
    kernels.scatter_add_lists(together, torch.cat(lists), torch.cat(values), [len(indices) for indices in lists])
    for indices, amounts in zip(lists, values, strict=True):
        kernels.scatter_add(apart, indices, amounts)
    assert torch.equal(together, apart)
