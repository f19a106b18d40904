"""Small tensors are sent dense: biases, norms and other tensors with few elements."""

from __future__ import annotations

import pytest
import torch
import tritoncomm
from torch import nn
from tritoncomm import OkTopk, Quantized, Recipe, SimulatedWorld, TopkAllgather
from tritoncomm.algorithms.staged import Staged
from tritoncomm.scheduler.cost import HEADER_WORDS, WORD, Flow
from tritoncomm.step.exchange.layout import small_ids

import laws


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


@pytest.mark.parametrize(
    ("shapes", "dense_below", "small"),
    [
        ([(40, 40), (40,), (2, 2)], 1024, [False, True, True]),
        ([(40, 40), (40,), (2, 2)], 0, [False, False, False]),
        ([(40, 40), (4000,), (30, 40)], 10, [False, True, False]),
        ([(4000,), (5,)], 1024, [False, True]),
    ],
)
def test_small_ids(shapes: list[tuple[int, ...]], dense_below: int, small: list[bool]) -> None:
    """Tensors with few elements are small, and so are vectors beside matrices. With ``dense_below=0`` none is small."""
    parameters = [torch.zeros(shape) for shape in shapes]
    found = small_ids(parameters, dense_below)
    assert [id(parameter) in found for parameter in parameters] == small


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
    before, after = (each._tritoncomm.setup.scope.vectors[0].residuals_by_parameter() for each in (first, second))
    for one, other in zip(saved, loaded, strict=True):
        assert torch.equal(before[one], after[other])
        assert before[one].any()
    assert second._tritoncomm.setup.scope.vectors[0].feedback.algorithm.state_dict()["inner"]["step"] == 0
