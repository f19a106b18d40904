"""The sums of a region: the merged form has the bits of the dense one."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tritoncomm.primitives import region_sums
from tritoncomm.primitives.region_sums import RegionSums

from tritoncomm_kernels import Entries

LOW, HIGH = 50, 250
VALUES = torch.tensor([1e8, -1e8, 1.0, -1.0, 0.1, 3e38, -3e38, 1e-40, -0.0, float("inf"), float("nan")])
lists = st.lists(st.sets(st.integers(LOW, HIGH - 1), max_size=12), min_size=1, max_size=5)


def summed(messages: list[list[Entries]], entries: int) -> RegionSums:
    """The sums of messages, each with several lists."""
    sums = RegionSums(LOW, HIGH, entries, torch.device("cpu"))
    for message in messages:
        sums.add(message)
    return sums


@given(lists, lists, st.integers(0, 1000), st.sampled_from([0.0, 1e-41, 0.15, 1.0, 1e8]))
def test_both_forms_have_the_same_bits(
    first: list[set[int]], second: list[set[int]], seed: int, threshold: float
) -> None:
    """Indices, order, sums, zeros left out, NaN and Inf: nothing depends on the form."""
    generator = torch.Generator().manual_seed(seed)

    def drawn(support: set[int]) -> Entries:
        picked = torch.randint(len(VALUES), (len(support),), generator=generator)
        return Entries(torch.tensor(sorted(support), dtype=torch.int32), VALUES[picked])

    messages = [[drawn(support) for support in part] for part in (first, second)]
    merged, dense = (summed(messages, entries) for entries in (0, HIGH))
    for least in (threshold, 0.0):  # a re-evaluation asks twice
        few, many = merged.at_least(least), dense.at_least(least)
        assert few.indices.dtype == torch.int32
        assert few.indices.tolist() == many.indices.tolist()
        finite = ~many.values.isnan()
        assert torch.equal(few.values.isnan(), ~finite)
        assert torch.equal(few.values[finite].view(torch.int32), many.values[finite].view(torch.int32))


def test_few_entries_need_no_dense_region(monkeypatch: pytest.MonkeyPatch) -> None:
    """A region of many coordinates with few entries allocates nothing as long as itself."""
    monkeypatch.setattr(region_sums.torch, "zeros", lambda *_, **__: pytest.fail("a dense region is allocated"))
    entries = Entries(torch.tensor([60, 70], dtype=torch.int32), torch.tensor([1.0, 2.0]))
    sums = RegionSums(LOW, HIGH, 2, torch.device("cpu"))
    sums.add([entries])
    assert sums.at_least(1.5).indices.tolist() == [70]
