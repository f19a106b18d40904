"""What a new user ran into: each test is a script that once went wrong in silence, or with a riddle."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import tritoncomm
from models import loss_of, tiny, train
from torch import nn
from torch.optim.lr_scheduler import CyclicLR, LRScheduler, OneCycleLR
from tritoncomm import ConfigurationError


@pytest.mark.parametrize("named_by", ["model", "optimizer", "nothing"])
@pytest.mark.parametrize("updates", [False, True])
def test_parameters_are_refused_by_name(named_by: str, updates: bool) -> None:
    """Errors name a parameter as the model or the optimizer does, or else by its position and shape."""

    def given(model: nn.Module) -> tuple[torch.optim.Optimizer, dict[str, Any]]:
        named = named_by == "optimizer"
        optimizer = torch.optim.SGD([*model.named_parameters()] if named else model.parameters(), lr=0.1)
        return optimizer, {"updates": updates, **({"model": model} if named_by == "model" else {})}

    unused = r"parameter 0 of shape \(5,\)" if named_by == "nothing" else "unused"
    model = tiny()
    model.unused = nn.Parameter(torch.ones(5, dtype=torch.complex64))
    optimizer, fields = given(model)
    with pytest.raises(ConfigurationError, match=rf"^{unused} is torch\.complex64: .*view_as_real"):
        tritoncomm.wrap(optimizer, **fields)
    model = tiny()
    optimizer, fields = given(model)
    wrapped = tritoncomm.wrap(optimizer, **fields)
    new = nn.Parameter(torch.ones(7))
    optimizer.param_groups[0]["params"].append(new)
    if named_by == "optimizer":
        optimizer.param_groups[0]["param_names"].append("new")
    loss_of(model, 0, 0).backward()
    name = "new" if named_by == "optimizer" else r"parameter 6 of shape \(7,\)"
    with pytest.raises(ConfigurationError, match=f"1 parameters that it did not have at wrap.*the first is {name}:"):
        wrapped.step()
    model = tiny()
    optimizer, fields = given(model)
    other = torch.optim.AdamW([model.unused])
    with pytest.raises(ConfigurationError, match=f"optimizer is a list, and {unused} is in its entries 0 .SGD. and 1"):
        tritoncomm.wrap([optimizer, other], **fields)


@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize("schedule", [OneCycleLR, CyclicLR])
def test_schedules_that_cycle_momentum_on_a_list(wrapped: bool, schedule: type[LRScheduler]) -> None:
    """They cycle it if all optimizers have the same option for it, and otherwise say how to go on."""
    fields = {"max_lr": 0.1, "max_momentum": 0.93} | (
        {"total_steps": 9} if schedule is OneCycleLR else {"base_lr": 0.01}
    )

    def listed(kind: type[torch.optim.Optimizer]) -> torch.optim.Optimizer:
        model = tiny()
        parts = [kind([model[0].weight]), torch.optim.AdamW([model[0].bias])]
        return tritoncomm.wrap(parts, model=model) if wrapped else tritoncomm.OptimizerList(parts)

    alike = listed(torch.optim.Adam)
    before = [group["betas"] for group in alike.param_groups]
    schedule(alike, **fields)
    assert [group["betas"] for group in alike.param_groups] != before
    mixed = listed(torch.optim.Muon)
    match = rf"{schedule.__name__}: Muon has momentum, AdamW has betas.*cycle_momentum=False, or .* for each optimizer"
    with pytest.raises(ConfigurationError, match=match):
        schedule(mixed, **fields)
    schedule(mixed, cycle_momentum=False, **fields)
    for part in mixed.optimizers:
        schedule(part, **fields)
    with pytest.raises(ValueError, match="optimizer must support momentum"):
        schedule(torch.optim.Adagrad(tiny().parameters()), **fields)


@pytest.mark.parametrize(("before", "after"), [((0.1, 2), (0.2, 2)), ((0.1, 0), (0.1, 2)), ((0.1, 2), (0.1, 0))])
def test_a_resumed_run_does_not_repeat_its_warm_up(before: tuple[float, int], after: tuple[float, int]) -> None:
    """Another density or warm-up on resume keeps the residual, and the dense steps that were taken."""

    def wrapped(settings: tuple[float, int]) -> tuple[nn.Module, tritoncomm.SparseOptimizer]:
        model = tiny()
        inner = torch.optim.AdamW(model.parameters())
        return model, tritoncomm.wrap(inner, density=settings[0], warmup_steps=settings[1], dense_below=0)

    model, optimizer = wrapped(before)
    train(model, optimizer, 0, range(4))
    again, resumed = wrapped(after)
    resumed.load_state_dict(optimizer.state_dict())
    residuals = (
        each._tritoncomm.setup.scope.vectors[0].residuals_by_parameter().values() for each in (resumed, optimizer)
    )
    assert all(map(torch.equal, *residuals))
    train(again, resumed, 0, [4])
    assert resumed.metrics()["density_delivered"] < 0.5


def test_a_state_without_residuals_is_noticed(caplog: pytest.LogCaptureFixture) -> None:
    """A script that loads the state of the bare optimizer has residuals that no longer fit, and is told so."""
    caplog.set_level("INFO", "tritoncomm")
    model = tiny()
    optimizer = tritoncomm.wrap(torch.optim.AdamW(model.parameters()), density=0.1, dense_below=0)
    train(model, optimizer, 0, range(2))
    state = optimizer.state_dict()
    caplog.clear()
    optimizer.load_state_dict(state)
    assert not caplog.text
    optimizer.load_state_dict({key: each for key, each in state.items() if key != "tritoncomm"})
    assert "without its residuals" in caplog.text
