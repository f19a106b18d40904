"""Selection from parts of the sum, and inside a range."""

from __future__ import annotations

import math

import pytest
import torch
from tritoncomm.primitives.accumulator import Accumulator


def random_accumulator(numel: int = 1000) -> tuple[Accumulator, torch.Tensor]:
    """An accumulator of random values, and its sum."""
    residual, gradient = torch.randn(2, numel, generator=torch.Generator().manual_seed(0))
    return Accumulator(residual, gradient, torch.full_like(residual, math.nan)), residual + gradient


@pytest.mark.parametrize("scaled", [False, True])
def test_parts_select_with_terms(scaled: bool) -> None:
    """Each part selects from its sum plus the terms, and together the parts compute the sum, which has no terms."""
    acc, expected = random_accumulator()
    whole, scale = acc, 2.0 ** torch.randint(-3, 4, (1000,), generator=torch.Generator().manual_seed(1))
    if scaled:
        acc, expected = acc.scaled(scale), expected / scale
    terms = torch.tensor([3, 699], dtype=torch.int32), torch.tensor([100.0, -100.0])
    parts = [acc.part(0, 300), acc.part(300, 1000)]
    first = parts[0].top_k_segments([0, 100, 300], [2, 0], [])
    second = parts[1].top_k_segments([0, 700], [3], [terms])
    acc.absorb(*parts)
    assert first.indices.tolist() == expected[:100].abs().topk(2).indices.sort().values.tolist()
    assert {3, 699} < set(second.indices.tolist())
    assert second.values[0] == expected[303] + 100.0
    assert torch.equal(acc.dense(), expected)
    assert torch.equal(parts[1].values_at(terms[0]), expected[[303, 999]])
    if scaled:
        whole.unscale_from(acc, scale)
        assert torch.equal(whole.dense(), expected * scale)


@pytest.mark.parametrize(("start", "stop"), [(0, 1000), (0, 300), (300, 700), (700, 1000), (400, 400), (0, 0)])
@pytest.mark.parametrize("added", [False, True])
def test_at_least_inside(start: int, stop: int, added: bool) -> None:
    """The entries of a range are those of the whole selection, and the whole sum is computed."""
    acc, expected = random_accumulator()
    if added:
        acc.dense()
    own, finite = acc.at_least_inside(1.5, start, stop)
    at = torch.arange(1000)
    wanted = at[(expected.abs() >= 1.5) & (at >= start) & (at < stop)]
    assert finite
    assert own.indices.dtype == torch.int32
    assert own.indices.tolist() == wanted.tolist()
    assert torch.equal(own.values, expected[wanted])
    assert torch.equal(acc.dense(), expected)


@pytest.mark.parametrize("where", [10, 500, 990])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_at_least_inside_finds_every_non_finite_value(where: int, value: float) -> None:
    """A NaN or Inf before, inside or after the range is found, and the rest of the sum is computed all the same."""
    acc, expected = random_accumulator()
    acc.residual[where] = value
    expected[where] = value
    assert not acc.at_least_inside(1.5, 300, 700)[1]
    assert torch.equal(acc.dense().nan_to_num(), expected.nan_to_num())


@pytest.mark.parametrize("needs_all", [False, True])
def test_scaled_sum_has_its_units_back(needs_all: bool) -> None:
    """Selected, added and cleared in scaled units: the sum has the same bits, whether or not it was divided itself."""
    acc, expected = random_accumulator()
    scale = 2.0 ** (torch.arange(1000) % 7)
    scaled = acc.scaled(scale)
    chosen = scaled.top_k(40)
    if needs_all:
        assert torch.equal(scaled.dense(), expected / scale)
    assert torch.equal(chosen.values, (expected / scale)[chosen.indices.long()])
    assert scaled.at_least(0.5).values.tolist() == [x for x in (expected / scale).tolist() if abs(x) >= 0.5]
    scaled.clear(chosen.indices)
    scaled.add(chosen.indices[:9], chosen.values[:9])
    acc.unscale_from(scaled, scale)
    expected[chosen.indices[9:].long()] = 0.0
    assert torch.equal(acc.dense(), expected)
