"""SimulatedWorld: all workers in one process."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import tritoncomm
from tritoncomm import ConfigurationError, OkTopk, SimulatedWorld
from tritoncomm.algorithms import at_density


@pytest.mark.parametrize(
    ("arguments", "named"),
    [((0, 5), "world_size=0"), ((2, -1), "numel=-1"), ((2, 5.0), "numel=5.0"), (("2", 5), "world_size='2'")],
)
def test_impossible_sizes_are_rejected(arguments: tuple[Any, Any], named: str) -> None:
    """An impossible world size or vector length is rejected by name."""
    with pytest.raises(ConfigurationError, match=named):
        SimulatedWorld(OkTopk(), *arguments)


def test_gradients_are_one_tensor() -> None:
    """A list of gradients is rejected with what to do. Sizes may be integers of NumPy."""
    world = SimulatedWorld(OkTopk(), np.int64(2), np.int64(8))
    with pytest.raises(ConfigurationError, match=r"one tensor, got a list: use torch.stack\(\)"):
        world.step([torch.ones(8), torch.ones(8)])  # type: ignore[arg-type]
    assert len(world.step(torch.ones(2, 8))) == 2


def test_empty_vector() -> None:
    """Every method accepts an empty vector."""
    for name in tritoncomm.algorithms():
        world = SimulatedWorld(at_density(name, 0.1), 3, 0)
        assert world.step(torch.empty(3, 0))[0].to_dense().numel() == 0


@pytest.mark.parametrize("name", tritoncomm.algorithms())
@pytest.mark.parametrize("dtype", [torch.float64, torch.int64, torch.complex64])
def test_other_dtypes_are_rejected(name: str, dtype: torch.dtype) -> None:
    """Gradients of another dtype than kernels take are rejected alike by every method."""
    with pytest.raises(ConfigurationError, match=f"gradients has dtype {dtype}"):
        SimulatedWorld(at_density(name, 0.1), 2, 8).step(torch.ones(2, 8, dtype=dtype))


def test_foreign_state_is_rejected() -> None:
    """States and residuals that do not fit are rejected by name and change nothing."""
    world = SimulatedWorld(OkTopk(density=0.1), 2, 20)
    world.step(torch.randn(2, 20))
    before = world.residuals
    with pytest.raises(ConfigurationError, match="saved by 3 workers"):
        world.load_state_dict(SimulatedWorld(OkTopk(), 3, 20).state_dict())
    with pytest.raises(ConfigurationError, match=r"residual has shape \(21,\)"):
        world.load_state_dict(SimulatedWorld(OkTopk(), 2, 21).state_dict())
    with pytest.raises(ConfigurationError, match="not a state of OkTopkAlgorithm"):
        world.load_state_dict(SimulatedWorld(tritoncomm.Dense(), 2, 20).state_dict())
    for other in (None, {}, {"workers": [{}, {}]}):
        with pytest.raises(ConfigurationError, match="not a state of a SimulatedWorld"):
            world.load_state_dict(other)  # type: ignore[arg-type]
    half_good = world.state_dict()
    half_good["workers"][0]["residual"] += 1
    half_good["workers"][1]["algorithm"] = {}
    with pytest.raises(ConfigurationError, match="not a state"):
        world.load_state_dict(half_good)
    assert torch.equal(world.residuals, before)
