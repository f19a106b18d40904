"""A warm-up around a method."""

from __future__ import annotations

import pytest
import torch
import tritoncomm
from tritoncomm import ConfigurationError, OkTopk, SimulatedWorld, Warmup


def test_dense_warmup() -> None:
    """The first steps are dense. The inner method counts its steps from the end of the warm-up."""
    recipe = Warmup(recipe=OkTopk(density=0.25), steps=2)
    assert recipe.density == 0.25
    world = SimulatedWorld(recipe, 2, 8)
    full = [world.step(torch.randn(2, 8))[0].is_full for _ in range(4)]
    assert full == [True, True, False, False]
    assert world.workers[0].algorithm.state_dict()["inner"]["step"] == 2
    with pytest.raises(ConfigurationError, match="steps=-1"):
        Warmup(recipe=OkTopk(), steps=-1)
    with pytest.raises(ConfigurationError, match="not a state of a warm-up"):
        world.workers[0].algorithm.load_state_dict({"step": 1})


def test_exponential_warmup() -> None:
    """Five stages of equal length lower the density to 0.1 %, and momentum continues across stages."""
    recipe = Warmup(recipe=tritoncomm.DGC(density=0.001), steps=10, schedule="exponential")
    assert recipe.densities() == pytest.approx([0.2512, 0.0631, 0.01585, 0.00398, 0.001], rel=0.01)
    assert [recipe.stage(step) for step in range(12)] == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 4, 4]
    world = SimulatedWorld(recipe, 1, 1000)
    generator = torch.Generator().manual_seed(0)
    delivered = [len(world.step(torch.randn(1, 1000, generator=generator))[0]) for _ in range(11)]
    assert delivered == [251, 251, 63, 63, 15, 15, 3, 3, 1, 1, 1]
    velocity = world.workers[0].algorithm.inner.state.velocity
    assert float(velocity.abs().mean()) > 1.2  # momentum of many steps; a single step has 0.8
    assert Warmup(recipe=OkTopk(), steps=0, schedule="exponential").stage(0) == 4
