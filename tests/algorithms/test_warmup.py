"""A warm-up around a method."""

from __future__ import annotations

import pytest
import torch
import tritoncomm
from tritoncomm import ConfigurationError, OkTopk, SimulatedWorld, Warmup

from baselines import DGC


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


@pytest.mark.parametrize("values", ["8bit", "4bit", "2bit", "1bit"])
@pytest.mark.parametrize("static", [False, True])
def test_residual_of_the_warmup_goes_on(values: str, static: bool) -> None:
    """What dense steps have cut off is part of the first sparse step, to the bit. They cost what is predicted."""
    numel, generator = 30_000, torch.Generator().manual_seed(1)
    inner = OkTopk(density=0.05, static=static)
    world, bare = (
        SimulatedWorld(Warmup(recipe=inner, steps=2, values=values), 3, numel),
        SimulatedWorld(inner, 3, numel),
    )
    gradients = [torch.randn(3, numel, generator=generator) for _ in range(4)]
    given, delivered = torch.zeros(numel, dtype=torch.float64), torch.zeros(numel, dtype=torch.float64)
    for gradient in gradients[:2]:
        forecast = world.workers[0].algorithm.predicted_traffic(3)
        (mean, *_) = world.step(gradient)
        assert mean.is_full
        assert all(each.bytes == forecast.sent.bytes for each in world.traffic)
        given, delivered = given + gradient.double().sum(0), delivered + 3 * mean.values.double()
        assert torch.allclose(given, delivered + world.residuals.double().sum(0), rtol=0, atol=1e-5)
    words = forecast.sent.bytes / (2 * 2 / 3 * numel / 8)
    assert words == pytest.approx(int(values[0]) + (8 / 256 if values == "8bit" else 16 / 64), rel=0.07)
    kept = world.residuals
    assert kept.any(1).all()
    for first, gradient in zip((kept, torch.zeros_like(kept)), gradients[2:], strict=True):
        expected, found = bare.step(gradient + first), world.step(gradient)
        assert all(map(torch.equal, (each.to_dense() for each in found), (each.to_dense() for each in expected)))
        assert torch.equal(world.residuals, bare.residuals)


def test_who_can_quantize_dense_steps() -> None:
    """The dense steps of ``dgc`` apply momentum, and stay in fp32.

    So do those of a method that does not say what it does at density 1.
    """

    class Unknown(tritoncomm.TopkAllgather):
        averages_when_dense = False

    for recipe in (DGC(), Unknown()):
        with pytest.raises(ConfigurationError, match=r"values='8bit'\): must be 'fp32'"):
            Warmup(recipe=recipe, steps=2, values="8bit")
    with pytest.raises(ConfigurationError, match=r"values='9bit'\): must be one of fp32, 8bit, 7bit"):
        Warmup(recipe=OkTopk(), steps=2, values="9bit")


def test_density_1_is_not_quantized() -> None:
    """A method that delivers every entry anyway has no warm-up."""
    world = SimulatedWorld(Warmup(recipe=OkTopk(density=1.0), steps=2, values="8bit"), 3, 60)
    for _ in range(3):
        gradients = torch.randint(-8, 8, (3, 60)).float() * 3
        assert torch.equal(world.step(gradients)[0].to_dense(), gradients.mean(0))
    assert not world.residuals.any()


def test_state_of_the_warmup_is_restored() -> None:
    """A state of the warm-up starts the method from scratch, also if it has already begun."""
    world = SimulatedWorld(Warmup(recipe=OkTopk(density=0.25), steps=2), 2, 8)
    algorithm = world.workers[0].algorithm
    before = algorithm.state
    for _ in range(4):
        world.step(torch.randn(2, 8))
    assert algorithm.inner.state.step == 2
    algorithm.state = before
    assert algorithm.is_dense
    algorithm.state = (2, OkTopk(density=0.25).build(8).state)
    assert algorithm.inner.state.step == 0
