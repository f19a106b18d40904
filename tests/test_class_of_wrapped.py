"""wrap() returns the optimizer that it was given, with another class: what holds it goes on."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
import tritoncomm
from torch import nn
from torch.optim.lr_scheduler import StepLR
from tritoncomm.errors import ConfigurationError

from small_model import backward, model, train


def adamw(net: nn.Module) -> torch.optim.AdamW:
    """Return an optimizer of ``net``."""
    return torch.optim.AdamW(net.parameters(), lr=0.01)


def wrap(optimizer: Any, **settings: Any) -> tritoncomm.SparseOptimizer:
    """Wrap ``optimizer`` so that a small model is exchanged sparsely."""
    return tritoncomm.wrap(optimizer, **{"density": 0.2, "dense_below": 0} | settings)


def test_it_is_the_same_object_of_both_classes() -> None:
    """A script need not assign the result. Two optimizers of a kind have the same class."""
    net = model()
    optimizer = adamw(net)
    groups, state = optimizer.param_groups, optimizer.state
    assert wrap(optimizer) is optimizer
    assert isinstance(optimizer, torch.optim.AdamW)
    assert isinstance(optimizer, tritoncomm.SparseOptimizer)
    assert optimizer.param_groups is groups
    assert optimizer.state is state
    assert "OkTopk" in repr(optimizer)
    assert "lr: 0.01" in repr(optimizer)
    assert type(optimizer) is type(wrap(adamw(model())))
    assert type(optimizer).__name__ == "SparseAdamW"
    train(net, optimizer, range(3))
    assert optimizer.metrics()["steps"] == 3


def test_release_gives_the_class_back() -> None:
    """A released optimizer steps as before, can be wrapped again, and a schedule goes on without a warning."""
    net, control = model(), model()
    optimizer, bare = adamw(net), adamw(control)
    schedules = [StepLR(each, 1, 0.5) for each in (optimizer, bare)]
    for _ in range(2):
        wrap(optimizer)
        optimizer.release()
        assert type(optimizer) is torch.optim.AdamW
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            train(net, optimizer, range(2))
            schedules[0].step()
        train(control, bare, range(2))
        schedules[1].step()
        assert all(map(torch.equal, net.parameters(), control.parameters()))
    assert not hasattr(optimizer, "metrics")
    copy.deepcopy(optimizer)


@pytest.mark.parametrize("way", ["of the module", "to zero", "of the optimizer"])
def test_the_step_after_a_hook_that_raised_is_a_new_one(way: str) -> None:
    """However gradients were reset, training goes on as if the hook had not raised."""
    ends = []
    for raises in (False, True):
        net = model()
        optimizer = wrap(adamw(net))
        if raises:
            optimizer.register_step_post_hook(lambda o, *_: 1 / (o.metrics()["steps"] != 2))
        for step in range(5):
            reset = optimizer.zero_grad if way == "of the optimizer" else net.zero_grad
            reset(set_to_none=way != "to zero")
            backward(net, step)
            try:
                optimizer.step()
            except ZeroDivisionError:
                assert step == 1
        assert optimizer.metrics()["steps"] == 5
        ends.append([p.detach().clone() for p in net.parameters()])
    assert all(map(torch.equal, *ends))


class Sharpness(torch.optim.SGD):
    """Stands for an optimizer whose script calls two methods."""

    @torch.no_grad()
    def first_step(self) -> None:
        """Change the parameters by this rank's gradients."""
        for parameter in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            parameter.add_(parameter.grad, alpha=0.1)

    def note(self) -> str:
        """Change nothing."""
        return "noted"

    @property
    def rho(self) -> float:
        """A number."""
        return 0.05

    scaled = staticmethod(lambda value: 2 * value)

    def step(self, closure: Any = None) -> Any:
        """Take a step that uses the other method."""
        self.first_step()
        return super().step(closure)


def test_inherited_methods_that_change_parameters() -> None:
    """They would use this rank's gradients: they raise by name. The optimizer's own step may call them."""
    net = model()
    optimizer = wrap(Sharpness(net.parameters(), lr=0.1))
    backward(net)
    assert (optimizer.note(), optimizer.rho, optimizer.scaled(2)) == ("noted", 0.05, 4)
    optimizer.step()
    optimizer.zero_grad()
    optimizer.first_step()  # without gradients, nothing changes
    backward(net)
    with pytest.raises(RuntimeError, match=r"first_step\(\) of Sharpness has changed parameters"):
        optimizer.first_step()


def test_an_optimizer_that_refuses_attributes() -> None:
    """Its own ``__setattr__`` is not asked for ours."""

    class Strict(torch.optim.SGD):
        def __setattr__(self, name: str, value: Any) -> None:
            if getattr(self, "frozen", False) and not hasattr(self, name):
                raise AttributeError(name)
            super().__setattr__(name, value)

    net = model()
    base = Strict(net.parameters(), lr=0.1)
    base.frozen = True
    train(net, wrap(base), range(2))
    assert base.metrics()["steps"] == 2


@pytest.mark.parametrize("fused", [False, True])
def test_a_scaler_leaves_nothing_behind(fused: bool) -> None:
    """The optimizer's own step sees neither the scale nor the flag, and they are removed, also after an error."""
    net, control = model(), model()
    optimizer = wrap(torch.optim.AdamW(net.parameters(), lr=0.01, fused=fused), density=1.0)
    reference = torch.optim.AdamW(control.parameters(), lr=0.01, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for step in range(3):
        optimizer.zero_grad()
        x = torch.randn(16, 4, generator=torch.Generator().manual_seed(step))
        scaler.scale((net(x) - x.sum(1, keepdim=True)).square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()
        assert not {"grad_scale", "found_inf"} & set(vars(optimizer))
        reference.zero_grad()
        backward(control, step)
        reference.step()
    assert all(map(torch.allclose, net.parameters(), control.parameters()))
    handle = optimizer.register_step_pre_hook(lambda *_: 1 / 0)
    optimizer.zero_grad()
    scaler.scale(net(x).square().mean()).backward()
    with pytest.raises(ZeroDivisionError):
        scaler.step(optimizer)
    handle.remove()
    assert not {"grad_scale", "found_inf"} & set(vars(optimizer))


def test_attributes_that_would_be_hidden() -> None:
    """An optimizer with a public method or attribute that a wrapped one has is refused by its name."""

    class Metered(torch.optim.SGD):
        def metrics(self) -> None:
            """Return nothing."""

    base = torch.optim.SGD(model().parameters())
    base.merge = True
    for given, name in ((Metered(model().parameters()), "metrics"), (base, "merge")):
        kind = type(given)
        with pytest.raises(ConfigurationError, match=f"has an attribute '{name}'"):
            wrap(given)
        assert type(given) is kind
