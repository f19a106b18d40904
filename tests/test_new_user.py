"""What a new user ran into: each test is a script that once went wrong in silence, or with a riddle."""

from __future__ import annotations

import gc
import logging
from typing import Any

import pytest
import torch
import tritoncomm
from torch import nn
from torch.optim.lr_scheduler import CyclicLR, LRScheduler, OneCycleLR
from tritoncomm import ConfigurationError
from tritoncomm.step import settings as options


def net(dtype: torch.dtype = torch.float32) -> nn.Module:
    """Return a small model with a parameter that no loss uses."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 40), nn.Tanh(), nn.Linear(40, 3)).to(dtype)
    model.unused = nn.Parameter(torch.ones(5, dtype=dtype))
    return model


def loss_of(model: nn.Module, step: int) -> torch.Tensor:
    """Return the loss of a batch."""
    generator = torch.Generator().manual_seed(step)
    dtype = next(model.parameters()).dtype
    x, y = (torch.randn(8, n, generator=generator).to(dtype) for n in (6, 3))
    return (model[2](model[1](model[0](x))) - y).square().mean()


def train(model: nn.Module, optimizer: torch.optim.Optimizer, first: int, last: int) -> None:
    """Take some steps."""
    for step in range(first, last):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        (torch.optim.AdamW, {"lr": 1e-2, "weight_decay": 0.1}),
        (torch.optim.Adam, {"lr": 1e-2, "amsgrad": True, "fused": True}),
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    ],
)
def test_one_worker_is_the_bare_optimizer(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, kind: type[torch.optim.Optimizer], fields: dict[str, Any]
) -> None:
    """With one worker, parameters and state equal those of the bare optimizer to the bit, whatever the density."""
    monkeypatch.setattr(options, "is_alone", lambda _: True)
    plain, wrapped = net(dtype), net(dtype)
    bare = kind(plain.parameters(), **fields)
    optimizer = tritoncomm.wrap(kind(wrapped.parameters(), **fields), density=0.001, dense_below=0)
    train(plain, bare, 0, 5)
    train(wrapped, optimizer, 0, 5)
    for p, q in zip(plain.parameters(), wrapped.parameters(), strict=True):
        assert torch.equal(p, q)
        assert (p.grad is None) == (q.grad is None)
        assert bare.state[p].keys() == optimizer.state[q].keys()
        for name, value in bare.state[p].items():
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(optimizer.state[q][name])), name
    assert optimizer.metrics()["density_delivered"] == 1
    assert optimizer.metrics()["residual_norm"] == 0


@pytest.mark.parametrize("unscale", [True, False])
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_one_worker_with_a_loss_scaler(
    monkeypatch: pytest.MonkeyPatch, kind: type[torch.optim.Optimizer], unscale: bool
) -> None:
    """One worker unscales gradients and skips overflows, like the bare optimizer."""
    monkeypatch.setattr(options, "is_alone", lambda _: True)
    finals = []
    for wrapped in (False, True):
        model, scaler = net(), torch.amp.GradScaler("cpu", init_scale=256.0)
        optimizer = kind(model.parameters(), lr=0.01)
        optimizer = tritoncomm.wrap(optimizer, density=0.01) if wrapped else optimizer
        for step in range(6):
            optimizer.zero_grad()
            scaler.scale(loss_of(model, step) * (float("inf") if step == 3 else 1.0)).backward()
            if unscale:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
        finals.append([parameter.detach() for parameter in model.parameters()])
    assert all(map(torch.equal, *finals))


def test_one_worker_applies_a_loaded_residual_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """A residual that was saved by several workers is not lost when one worker continues."""
    model = net()
    optimizer = tritoncomm.wrap(torch.optim.SGD(model.parameters(), lr=1.0), density=0.1, dense_below=0)
    train(model, optimizer, 0, 2)
    saved = optimizer.state_dict()
    residual = saved["tritoncomm"]["residuals"][1]  # after that of the unused parameter
    assert residual.any()
    monkeypatch.setattr(options, "is_alone", lambda _: True)
    again = net()
    resumed = tritoncomm.wrap(torch.optim.SGD(again.parameters(), lr=1.0), density=0.1, dense_below=0)
    resumed.load_state_dict(saved)
    before = again[0].weight.detach().clone()
    for parameter in again.parameters():
        parameter.grad = torch.zeros_like(parameter)
    resumed.step()
    assert torch.equal(again[0].weight, before - residual.view_as(before))


def test_a_state_loaded_before_wrap_is_noticed(caplog: pytest.LogCaptureFixture) -> None:
    """A script that loads the optimizer's state before wrapping loses the residual, and is told so."""
    model = net()
    optimizer = tritoncomm.wrap(torch.optim.AdamW(model.parameters()), density=0.1, dense_below=0)
    train(model, optimizer, 0, 2)
    bare = torch.optim.AdamW(model.parameters())
    bare.load_state_dict(optimizer.state_dict())
    with caplog.at_level(logging.INFO, "tritoncomm"):
        wrapped = tritoncomm.wrap(bare, density=0.1, dense_below=0)
        assert "without its residuals, which are lost: call load_state_dict() of the wrapped optimizer" in caplog.text
        caplog.clear()
        wrapped.load_state_dict(optimizer.state_dict())
        assert not caplog.text
        wrapped.load_state_dict({key: each for key, each in optimizer.state_dict().items() if key != "tritoncomm"})
        assert "without its residuals" in caplog.text


class ScheduleFree(torch.optim.SGD):
    """An optimizer with methods of its own, as schedule-free optimizers have."""

    mode = "train"

    def eval(self) -> None:
        """Switch to the averaged parameters."""
        self.mode = "eval"


def test_methods_of_the_original_optimizer_are_reachable() -> None:
    """The optimizer keeps its attributes. Others are missing, with the usual error."""
    optimizer = tritoncomm.wrap(ScheduleFree(net().parameters(), lr=0.1), density=0.1)
    optimizer.eval()
    assert optimizer.mode == "eval"
    with pytest.raises(AttributeError, match="has no attribute 'evaluate'"):
        optimizer.evaluate()
    assert not hasattr(optimizer, "grad_scale")


@pytest.mark.parametrize("named_by", ["model", "optimizer", "nothing"])
@pytest.mark.parametrize("updates", [False, True])
def test_parameters_are_refused_by_name(named_by: str, updates: bool) -> None:
    """Errors name a parameter as the model or the optimizer does, or else by its position and shape."""

    def given(model: nn.Module) -> tuple[torch.optim.Optimizer, dict[str, Any]]:
        named = named_by == "optimizer"
        optimizer = torch.optim.SGD([*model.named_parameters()] if named else model.parameters(), lr=0.1)
        return optimizer, {"updates": updates, **({"model": model} if named_by == "model" else {})}

    unused = r"parameter 0 of shape \(5,\)" if named_by == "nothing" else "unused"
    model = net()
    model.unused = nn.Parameter(torch.ones(5, dtype=torch.complex64))
    optimizer, fields = given(model)
    with pytest.raises(ConfigurationError, match=rf"^{unused} is torch\.complex64: .*view_as_real"):
        tritoncomm.wrap(optimizer, **fields)
    model = net()
    model.unused.requires_grad_(False)
    optimizer, fields = given(model)
    wrapped = tritoncomm.wrap(optimizer, **fields)
    loss_of(model, 0).backward()
    model.unused.grad = torch.ones(5)
    with pytest.raises(ConfigurationError, match=f"^{unused} was frozen at wrap"):
        wrapped.step()
    model = net()
    optimizer, fields = given(model)
    wrapped = tritoncomm.wrap(optimizer, **fields)
    new = nn.Parameter(torch.ones(7))
    optimizer.param_groups[0]["params"].append(new)
    if named_by == "optimizer":
        optimizer.param_groups[0]["param_names"].append("new")
    loss_of(model, 0).backward()
    name = "new" if named_by == "optimizer" else r"parameter 5 of shape \(7,\)"
    with pytest.raises(ConfigurationError, match=f"1 parameters that it did not have at wrap.*the first is {name}:"):
        wrapped.step()
    model = net()
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
        model = net()
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
        schedule(torch.optim.Adagrad(net().parameters()), **fields)


def test_nobody_scans_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither ``wrap`` nor the first step asks the garbage collector for DDP modules."""

    def scan(*_: object) -> None:
        raise AssertionError("scanned all objects")

    monkeypatch.setattr(gc, "get_referrers", scan)
    model = net()
    train(model, tritoncomm.wrap(torch.optim.AdamW(model.parameters()), density=0.1), 0, 2)


@pytest.mark.parametrize(("before", "after"), [((0.1, 2), (0.2, 2)), ((0.1, 0), (0.1, 2)), ((0.1, 2), (0.1, 0))])
def test_a_resumed_run_does_not_repeat_its_warm_up(before: tuple[float, int], after: tuple[float, int]) -> None:
    """Another density or warm-up on resume keeps the residual, and the dense steps that were taken."""

    def wrapped(settings: tuple[float, int]) -> tuple[nn.Module, tritoncomm.SparseOptimizer]:
        model = net()
        inner = torch.optim.AdamW(model.parameters())
        return model, tritoncomm.wrap(inner, density=settings[0], warmup_steps=settings[1], dense_below=0)

    model, optimizer = wrapped(before)
    train(model, optimizer, 0, 4)
    again, resumed = wrapped(after)
    resumed.load_state_dict(optimizer.state_dict())
    residuals = (each._tritoncomm.setup.vector.residuals_by_parameter().values() for each in (resumed, optimizer))
    assert all(map(torch.equal, *residuals))
    train(again, resumed, 4, 5)
    assert resumed.metrics()["density_delivered"] < 0.5
