"""Every value in few bits: exactness, traffic, what the recipe refuses, and what ``wrap`` makes of it."""

from __future__ import annotations

import math
import warnings

import pytest
import torch
import tritoncomm
from tritoncomm import ConfigurationError, Quantized, SimulatedWorld
from tritoncomm.scheduler import cost

import laws
from depth import trials

FORMATS = [f"{bits}bit" for bits in range(1, 9)]


@pytest.mark.parametrize("values", FORMATS)
@pytest.mark.parametrize("world_size", trials([1, 2, 7], [1, 2, 3, 7, 17]))
def test_the_first_step_is_exact(values: str, world_size: int) -> None:
    """Where sums are exact, nothing is lost to the bit: in a step from integers, before residuals have many bits."""
    for family, numel in (("random", 1), ("random", 700), ("ties", 700), ("sparse", 700), ("one-entry", 700)):
        case = laws.Case(world_size, numel, (family,), seed=world_size)
        laws.conservation.check(laws.recorded(Quantized(values=values), case, with_states=False), tolerance=0.0)


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("values", FORMATS)
@pytest.mark.parametrize("world_size", [2, 5])
def test_traffic_is_known_in_advance(values: str, world_size: int, static: bool) -> None:
    """A rank sends 2n(P-1)/P values of bits + 16/64 bits, as predicted to the byte, and receives as much."""
    numel = 200_000
    world = SimulatedWorld(Quantized(values=values, static=static), world_size, numel)
    (forecast, *_) = world.predicted_traffic
    bits = int(values[0]) + 16 / 64
    expected = 2 * numel * (world_size - 1) / world_size * bits / 8
    assert forecast.sent.bytes == pytest.approx(expected, rel=0.01)
    world.step(torch.randn(world_size, numel))
    assert all(each.bytes == forecast.sent.bytes for each in world.traffic)
    assert all(each.bytes == forecast.received.bytes for each in world.received)


def test_large_values_leave_no_inf_behind() -> None:
    """Values just below the limit of 255 * 2**104 have a finite mean and finite residuals, and nothing is lost."""
    values, world = torch.full((6, 9), 254.5 * 2.0**104), SimulatedWorld(Quantized(values="8bit"), 6, 9)
    mean = world.step(values)[0].values
    assert mean.isfinite().all()
    assert world.residuals.isfinite().all()
    assert torch.equal(6 * mean.double() + world.residuals.double().sum(0), values.double().sum(0))


def test_fp32_is_dense() -> None:
    """Without rounding, it is a dense all-reduce."""
    case = laws.Case(5, 90, ("random", "sparse"))
    laws.equivalence(Quantized(values="fp32"), case, everything=True)
    assert Quantized(values="fp32").build(90).predicted_traffic(5) == cost.dense(90, 5)


def test_fields() -> None:
    """The format must be known. A density is refused with the reason and what to do, by every way to give one."""
    assert Quantized() == tritoncomm.recipe("quantized") == Quantized(density=1.0, values="1bit")
    assert repr(Quantized(values="2bit")) == "Quantized(static='auto', values='2bit')"
    for wrong in ("9bit", "bf16", 4):
        with pytest.raises(ConfigurationError, match=r"values=.*: must be one of fp32, 8bit, .*, 1bit"):
            Quantized(values=wrong)
    optimizer = torch.optim.SGD([torch.ones(3, requires_grad=True)], lr=0.1)
    said = r"Quantized\(density=0.05\): must be 1.*leave out density, and choose the bits by values"
    with pytest.raises(ConfigurationError, match=said):
        Quantized(density=0.05)
    with pytest.raises(ConfigurationError, match=said):
        tritoncomm.wrap(optimizer, "quantized", density=0.05)
    wrapped = tritoncomm.wrap(optimizer, "quantized", values="2bit")
    assert wrapped.recipe == Quantized(values="2bit")  # no dense steps at the start, no density


@pytest.mark.parametrize("algo", ["quantized", "dense"])
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adadelta])
def test_nothing_is_late(algo: str, kind: type[torch.optim.Optimizer], caplog: pytest.LogCaptureFixture) -> None:
    """An optimizer takes its own step with it, without a warning about late gradients, as with ``dense``."""
    parameter = torch.nn.Parameter(torch.ones(4, 4))
    wrapped = tritoncomm.wrap(kind([parameter], lr=0.1), algo)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        parameter.grad = torch.ones(4, 4)
        wrapped.step()
    assert not caplog.records
    assert wrapped.state_dict()["tritoncomm"]["last"] == [None]


@pytest.mark.parametrize("bad", [math.nan, math.inf, 3e38])
def test_what_cannot_be_rounded_is_refused(bad: float) -> None:
    """NaN, Inf and magnitudes that few bits cannot hold are refused on all ranks, and the error says what to do."""
    gradients = torch.ones(3, 90)
    gradients[1, 7] = bad
    for static in (False, True):
        world = SimulatedWorld(Quantized(static=static), 3, 90)
        with pytest.raises(tritoncomm.NonFiniteError) as caught:
            world.step(gradients)
        assert static or "values='fp32'" in str(caught.value)
        assert not world.residuals.any()
