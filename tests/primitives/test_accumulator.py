"""Selection from parts of the sum, and inside a range."""

from __future__ import annotations

import math

import pytest
import torch
from tritoncomm.primitives.accumulator import Accumulator

from laws import normal
from tritoncomm_kernels import Entries


def random_accumulator() -> tuple[Accumulator, torch.Tensor]:
    """An accumulator of random values, and its sum."""
    residual, gradient = normal(2, 1000)
    return Accumulator(residual, gradient, torch.full_like(residual, math.nan)), residual + gradient


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("added", [False, True])
def test_blocks_select_with_terms(scaled: bool, added: bool) -> None:
    """Blocks select from their sum plus the terms, and together they compute the sum. Undone, it has no terms."""
    acc, expected = random_accumulator()
    whole, scale = acc, 2.0 ** torch.randint(-3, 4, (1000,), generator=torch.Generator().manual_seed(1))
    if scaled:
        acc, expected = acc.scaled(scale), expected / scale
    if added:
        acc.dense()
    terms = Entries(torch.tensor([3, 303, 999], dtype=torch.int32), torch.tensor([0.0, 100.0, -100.0]))
    first = acc.top_k_blocks([0, 100, 300], [2, 0])
    second = acc.top_k_blocks([300, 1000], [3], [terms])
    assert first.indices.tolist() == expected[:100].abs().topk(2).indices.sort().values.tolist()
    assert {303, 999} < set(second.indices.tolist())
    assert second.values[0] == expected[303] + 100.0
    assert acc.selected == 5
    assert torch.equal(acc.values_at(terms.indices), expected[[3, 303, 999]] + terms.values)
    acc.undo()
    assert torch.equal(acc.dense(), expected)
    if scaled:
        whole.unscale_from(acc, scale)
        assert torch.equal(whole.dense(), expected * scale)


def test_undo() -> None:
    """What an edit has overwritten is restored, the latest edit first, and only once."""
    acc, expected = random_accumulator()
    one, other = (torch.tensor(at, dtype=torch.int32) for at in ([3, 5], [5, 7]))
    acc.remember(one, acc.values_at(one))
    acc.clear(one)
    acc.remember(other)
    acc.add(other, torch.tensor([2.0, 4.0]))
    assert torch.equal(acc.values_at(torch.tensor([3, 5])), torch.tensor([0.0, 2.0]))
    acc.undo()
    assert torch.equal(acc.dense(), expected)
    acc.clear(one)
    acc.undo()
    assert torch.equal(acc.values_at(one), torch.zeros(2))


@pytest.mark.parametrize("where", [10, 500, 990])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_at_least_inside_finds_every_non_finite_value(where: int, value: float) -> None:
    """A NaN or Inf before, inside or after the range is found, and the rest of the sum is computed all the same."""
    acc, expected = random_accumulator()
    acc.residual[where] = value
    expected[where] = value
    assert not acc.at_least_inside(1.5, 300, 700)[1]
    assert torch.equal(acc.dense().nan_to_num(), expected.nan_to_num())
