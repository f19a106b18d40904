"""Small tensors are sent dense: biases, norms and other tensors with few elements."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import tritoncomm
from torch import nn
from tritoncomm import (
    ConfigurationError,
    OkTopk,
    Quantized,
    RandomBlock,
    Recipe,
    SimulatedWorld,
    TopkAllgather,
    Updates,
    Warmup,
)
from tritoncomm.algorithms import Dense
from tritoncomm.scheduler.cost import HEADER_WORDS, WORD, Flow
from tritoncomm.step.exchange.layout import split_by_size
from tritoncomm.step.exchange.stages import Staged

import laws
from small_model import backward, sgd


def test_small_tensors_are_sent_dense() -> None:
    """Small tensors equal the bare optimizer's bit for bit and have no residual. The others are sent sparsely."""

    def net() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 300), nn.Tanh(), nn.Linear(300, 1))

    plain, wrapped = net(), net()
    bare, optimizer = sgd(plain), tritoncomm.wrap(sgd(wrapped), density=0.05)
    for opt, trained in ((bare, plain), (optimizer, wrapped)):
        backward(trained)
        opt.step()
    residuals_by_parameter = optimizer._tritoncomm.setup.vector.residuals_by_parameter()
    for (name, a), b in zip(plain.named_parameters(), wrapped.parameters(), strict=True):
        if name == "0.weight":
            assert not torch.equal(a, b)
            assert residuals_by_parameter[b].any()
        else:
            assert torch.equal(a, b)
            assert not residuals_by_parameter[b].any()
    small = sum(p.numel() for p in wrapped.parameters()) - 1200
    assert optimizer.metrics()["density_delivered"] == pytest.approx((60 + small) / (1200 + small))


def gradients(step: int) -> torch.Tensor:
    """Return the gradients of five workers."""
    return torch.randn(5, 400, generator=torch.Generator().manual_seed(step))


@pytest.mark.parametrize(("before", "after"), [("8bit", "fp32"), ("fp32", "8bit")])
def test_format_may_change_when_a_run_is_resumed(before: str, after: str) -> None:
    """A run that resumes in another format loses nothing. In fp32, the first step delivers the residual."""
    recipe = OkTopk(density=0.1)
    first = SimulatedWorld(Staged(recipe=recipe, tail=50, small=before), 5, 400)
    first.step(gradients(0))
    second = SimulatedWorld(Staged(recipe=recipe, tail=50, small=after), 5, 400)
    second.load_state_dict(first.state_dict())
    assert laws.same_bits(second.residuals, first.residuals)
    assert first.residuals[:, -50:].any() == (before == "8bit")
    held = (first.residuals + gradients(1)).double().sum(0)
    mean = second.step(gradients(1))[0].to_dense().double()
    assert torch.allclose(5 * mean + second.residuals.double().sum(0), held, atol=1e-5)
    assert second.residuals[:, -50:].any() == (after == "8bit")


def test_forecast_of_8_bits_is_exact() -> None:
    """The forecast names the two phases of small tensors, and they take a quarter of the bytes of fp32."""
    recipe = Staged(recipe=RandomBlock(density=0.1, reduced_lr=True), tail=300, small="8bit")
    world = SimulatedWorld(recipe, 5, 400)
    (allowed,) = {str(forecast) for forecast in world.predicted_traffic}
    forecast = world.predicted_traffic[0]
    assert "small-scatter" in allowed
    world.step(gradients(0))
    for meter in world.scheduler.meters:
        for phase in ("small-scatter", "small-gather"):
            assert meter.sent_by_phase[phase] == forecast.phases[phase].sent
            assert meter.received_by_phase[phase] == forecast.phases[phase].received
    payload = sum(
        flow.sent.bytes - WORD * HEADER_WORDS * flow.sent.messages
        for phase, flow in forecast.phases.items()
        if phase.startswith("small")
    )
    assert payload == 2 * 4 * (64 + 4)  # parts are whole blocks
    assert "small tensors" not in recipe.build(400).predicted_traffic(5, ordinary=True).phases


@pytest.mark.parametrize(
    ("inner", "carriers"),
    [
        (OkTopk(density=0.1, bucket_width=2), {"scatter": "split-and-reduce", "gather": "all-gather"}),
        (TopkAllgather(density=0.1), {"gather": "all-gather"}),
        (TopkAllgather(density=0.1, static=True), {"gather": "all-gather"}),
        (Quantized(), {"scatter": "quantized-scatter", "gather": "quantized-gather"}),
    ],
)
def test_messages_that_carry_small_tensors(inner: Recipe, carriers: dict[str, str]) -> None:
    """Small tensors add bytes and no messages to those of the method. The forecast says so."""
    alone = inner.build(100).predicted_traffic(5)
    recipe = Staged(recipe=inner, tail=300, small="8bit")
    world = SimulatedWorld(recipe, 5, 400)
    forecast = world.predicted_traffic[0]
    payload, headers = 4 * (64 + 4), 0 if inner.static is True else 4 * WORD * HEADER_WORDS
    for leg in ("scatter", "gather"):
        flow = forecast.phases[carriers.get(leg, f"small-{leg}")]
        without = alone.phases.get(carriers.get(leg, ""), Flow())
        assert flow.sent.messages == (without.sent.messages or 4)
        assert flow.sent.bytes - without.sent.bytes == payload + (0 if leg in carriers else headers)
    world.step(gradients(0))
    for meter in world.scheduler.meters:
        sent, received = meter.sent_by_phase, meter.received_by_phase
        assert all(forecast.allows(phase, sent[phase], received[phase]) for phase in sent)
        if not isinstance(inner, OkTopk):
            assert sent == {phase: flow.sent for phase, flow in forecast.phases.items()}


def test_dense_steps_are_not_quantized() -> None:
    """A method that delivers every entry sends small tensors in fp32, and predicts it."""
    for inner in (OkTopk(density=1.0), Dense(density=0.01), Warmup(recipe=OkTopk(density=1.0), steps=1)):
        recipe = Staged(recipe=inner, tail=50, small="8bit")
        world = SimulatedWorld(recipe, 5, 400)
        assert "small tensors" in recipe.build(400).predicted_traffic(5, ordinary=True).phases
        assert "small tensors" in world.predicted_traffic[0].phases
        world.step(gradients(0))
        assert not world.residuals.any()


def test_unknown_formats_are_named() -> None:
    """A format that small tensors do not have is named."""
    with pytest.raises(ConfigurationError, match=r"Staged\(small='4bit'\): must be one of fp32, 8bit"):
        Staged(recipe=OkTopk(), tail=1, small="4bit")


@pytest.mark.parametrize(
    ("shapes", "dense_below", "small"),
    [
        ([(40, 40), (40,), (2, 2)], 1024, [False, True, True]),
        ([(40, 40), (40,), (2, 2)], 0, [False, False, False]),
        ([(40, 40), (4000,), (30, 40)], 10, [False, True, False]),
        ([(4000,), (5,)], 1024, [False, True]),
    ],
)
def test_split_by_size(shapes: list[tuple[int, ...]], dense_below: int, small: list[bool]) -> None:
    """Tensors with few elements are small, and so are vectors beside matrices. With ``dense_below=0`` none is small."""
    parameters = [torch.zeros(shape) for shape in shapes]
    large, dense = split_by_size(parameters, dense_below)
    assert [any(p is d for d in dense) for p in parameters] == small
    assert len(large) + len(dense) == len(parameters)


def test_residuals_stay_with_their_parameters() -> None:
    """Residuals stay with their parameters when a checkpoint without a dense tail is loaded with one."""

    def parameters() -> list[nn.Parameter]:
        return [nn.Parameter(torch.zeros(4096)), nn.Parameter(torch.zeros(64, 64))]

    saved, loaded = parameters(), parameters()
    first = tritoncomm.wrap(torch.optim.SGD(saved, lr=0.1), density=0.01, dense_below=0)
    for number, parameter in enumerate(saved):
        parameter.grad = torch.full_like(parameter, 1.0 + number)
    first.step()
    second = tritoncomm.wrap(torch.optim.SGD(loaded, lr=0.1), density=0.01)
    second.load_state_dict(first.state_dict())
    before, after = (each._tritoncomm.setup.vector.residuals_by_parameter() for each in (first, second))
    for one, other in zip(saved, loaded, strict=True):
        assert torch.equal(before[one], after[other])
        assert before[one].any()
    assert second._tritoncomm.setup.vector.feedback.algorithm.state_dict()["inner"]["step"] == 0


@pytest.mark.parametrize("fields", [{"algo": "oktopk"}, {"updates": Updates(algo=OkTopk(density=0.03))}])
def test_groups_that_are_dense(fields: dict[str, Any]) -> None:
    """A parameter whose group says ``dense=True`` travels whole in each step, whatever its size."""
    torch.manual_seed(0)
    table, matrix = nn.Parameter(torch.zeros(64, 64)), nn.Parameter(torch.zeros(64, 64))
    inner = torch.optim.SGD([{"params": [table], "dense": True}, {"params": [matrix]}], lr=1.0)
    optimizer = tritoncomm.wrap(inner, warmup_steps=0, small="fp32", **fields)
    for parameter in (table, matrix):
        parameter.grad = torch.randn(64, 64)
    gradient = table.grad.clone()
    optimizer.step()
    assert torch.equal(table, -gradient)
    assert 0 < int((matrix != 0).sum()) < 200
    inner.param_groups[0]["dense"] = "yes"
    with pytest.raises(ConfigurationError, match="a parameter group has dense='yes'"):
        tritoncomm.wrap(torch.optim.SGD(inner.param_groups))
