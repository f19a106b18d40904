"""The contract of staleness-update steps: which optimizers get one, and what is logged for the others."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
import tritoncomm
from torch import nn
from tritoncomm import ConfigurationError, Late, OkTopk, Quantized, Updates
from tritoncomm.step.rules.adam import StalenessAwareAdam
from tritoncomm.step.rules.aware import AwareStep
from tritoncomm.step.rules.choose import RULES, exchanges_updates, find_rule, updates_of

from baselines import DGC
from prepared_launcher import PreparedLauncher


class Renamed(torch.optim.AdamW):
    """A subclass that does not override ``step``."""


class WithDefaults(torch.optim.Adam):
    """A subclass that overrides something else."""

    def __init__(self, params) -> None:
        super().__init__(params, lr=0.1)


class Overriding(torch.optim.AdamW):
    """A subclass with its own step, which calls AdamW's."""

    def step(self, closure=None):
        """Take AdamW's step."""
        return super().step(closure)


class Below(Renamed):
    """A subclass of a subclass."""


def parameters() -> list[nn.Parameter]:
    """Return one small parameter with a gradient."""
    parameter = nn.Parameter(torch.ones(4))
    parameter.grad = torch.ones(4)
    return [parameter]


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW, Renamed, WithDefaults, Below])
def test_adam_and_plain_subclasses_have_a_rule(kind: type[torch.optim.Optimizer]) -> None:
    """Adam, AdamW and subclasses that do not override ``step`` take the staleness-update step."""
    optimizer = kind(parameters())
    assert find_rule(optimizer) is StalenessAwareAdam
    wrapped = tritoncomm.wrap(optimizer, density=0.5)
    wrapped.step()
    assert [each.tolist() for each in wrapped.state_dict()["tritoncomm"]["last"]] == [[1] * 4]


@pytest.mark.parametrize("kind", [Overriding, torch.optim.NAdam, torch.optim.SGD, torch.optim.RMSprop])
def test_other_steps_have_no_rule(kind: type[torch.optim.Optimizer]) -> None:
    """An overridden ``step`` and other optimizers are left alone."""
    assert find_rule(kind(parameters(), lr=0.1)) is None


def test_subclass_is_found_before_and_after_torch_wraps_its_step(launcher: PreparedLauncher, tmp_path: Path) -> None:
    """torch wraps the ``step`` of the class that is instantiated first. A scheduler wraps that of the instance."""
    script = tmp_path / "script.py"
    script.write_text("""
import os
import torch
from tritoncomm.step.rules.choose import find_rule
class Renamed(torch.optim.AdamW): pass
class Overriding(torch.optim.AdamW):
    def step(self, closure=None): return super().step(closure)
parameters = [torch.nn.Parameter(torch.ones(2))]
assert not hasattr(torch.optim.AdamW.step, "hooked")
for order in ([Renamed, torch.optim.AdamW, Overriding], [Overriding, torch.optim.AdamW, Renamed]):
    if os.fork():
        assert os.wait()[1] == 0
        continue
    first = order[0](parameters)
    for kind in order:
        optimizer = kind(parameters)
        torch.optim.lr_scheduler.StepLR(optimizer, 1)
        assert "step" in vars(optimizer)
        assert (find_rule(optimizer) is None) == (kind is Overriding), kind
    os._exit(0)
""")
    done = launcher.run(script, folder=tmp_path)
    assert done.returncode == 0, done.stderr


def test_profiled_and_scheduled_optimizers_take_the_aware_step() -> None:
    """A profile hook and a scheduler change neither the rule nor the result."""
    results = []
    for scheduled in (False, True):
        (parameter,) = parameters()
        optimizer = Renamed([parameter], lr=0.1)
        if scheduled:
            torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)
        wrapped = tritoncomm.wrap(optimizer, density=0.5)
        for _ in range(3):
            parameter.grad = torch.ones(4)
            wrapped.step()
        results.append(parameter.detach())
    assert torch.equal(*results)


def test_rules_keep_the_contract() -> None:
    """Every rule of the library does all that the contract leaves to it."""
    for rule in RULES:
        assert issubclass(rule, AwareStep)
        assert not rule.__abstractmethods__


class SignSGD(torch.optim.SGD):
    """A subclass with its own step, by the sign of the gradient."""

    @torch.no_grad()
    def step(self, closure=None) -> None:
        """Move each coordinate by the learning rate."""
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.sub_(parameter.grad.sign(), alpha=group["lr"])


class BelowSign(SignSGD):
    """A subclass of this subclass."""


class RenamedSGD(torch.optim.SGD):
    """A subclass that does not override ``step``."""


def named(name: str) -> torch.optim.Optimizer:
    """Return an optimizer whose class has ``name``."""
    return type(name, (torch.optim.RMSprop,), {})(parameters())


def test_what_travels() -> None:
    """Linear optimizers and those with a rule exchange gradients, all others updates. Local steps are updates."""
    adamw, sgd = torch.optim.AdamW(parameters()), torch.optim.SGD(parameters(), lr=0.1, momentum=0.9)
    others = [named("Muon"), Overriding(parameters(), lr=0.1)]
    assert [exchanges_updates(each) for each in (adamw, sgd, *others)] == [False, False, True, True]
    assert [updates_of(each, None, 1, OkTopk()) for each in (adamw, *others)] == [None, Updates(), Updates()]
    assert [updates_of(each, None, 2, OkTopk()) for each in (adamw, sgd)] == [Updates()] * 2
    assert not any(updates_of(each, None, 1, Quantized()) for each in others)
    assert not any(updates_of(each, False, 1, OkTopk()) for each in others)
    for given in (True, Updates(), Updates(outer_lr=0.5)):
        expected = Updates() if given is True else given
        assert all(updates_of(each, given, 1, Quantized()) == expected for each in (adamw, *others))


def test_schedule_free_optimizers_exchange_every_gradient(caplog: pytest.LogCaptureFixture) -> None:
    """Their second copy of the parameters would drift apart. Unless the user says more, no gradient is late."""
    for algo in ({}, {"algo": "quantized"}, {"algo": "dense"}):
        assert tritoncomm.wrap(named("AdamWScheduleFree"), **algo).recipe.delivers_all()
    listed = tritoncomm.wrap([named("Muon"), named("AdamWScheduleFree")])
    assert [vector.recipe.name for vector in listed._tritoncomm.setup.exchange.vectors] == ["quantized"] * 2
    assert listed._tritoncomm.setup.local is None
    for options, named_option in (
        ({"local_steps": 4}, "local_steps=4: AdamWScheduleFree keeps a copy"),
        ({"updates": True}, "updates=True: AdamWScheduleFree keeps a copy"),
    ):
        with pytest.raises(ConfigurationError, match=named_option):
            tritoncomm.wrap(named("AdamWScheduleFree"), **options)
    with caplog.at_level(logging.INFO, logger="tritoncomm"):
        tritoncomm.wrap(named("AdamWScheduleFree"))
        assert "no rule for late ones" not in caplog.text
        assert tritoncomm.wrap(named("AdamWScheduleFree"), density=0.5).recipe.layers[-1].name == "oktopk"
        assert "AdamWScheduleFree exchanges gradients, and has no rule for late ones" in caplog.text


def test_only_the_step_of_sgd_is_linear() -> None:
    """A subclass of SGD with another step exchanges updates."""
    kinds = (RenamedSGD, torch.optim.SGD, SignSGD, BelowSign)
    for order in (kinds, kinds[::-1]):
        for kind in order:
            optimizer = kind(parameters(), lr=0.1)
            torch.optim.lr_scheduler.StepLR(optimizer, 1)  # wraps the step of the object
            assert exchanges_updates(optimizer) == (kind in (SignSGD, BelowSign))
    assert updates_of(SignSGD(parameters(), lr=0.1), False, 1, OkTopk()) is None


def test_nothing_is_promised_to_end_above_dense(caplog: pytest.LogCaptureFixture) -> None:
    """No optimizer gets a warning at its defaults. Who asks for gradients without a rule is told of updates."""
    for optimizer in (named("Muon"), torch.optim.SGD(parameters(), lr=0.1, momentum=0.9)):
        tritoncomm.wrap(optimizer)
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    with caplog.at_level(logging.INFO, logger="tritoncomm"):
        tritoncomm.wrap(named("Muon"), updates=False)
    assert "Muon exchanges gradients, and has no rule for late ones" in caplog.text


def test_arguments_without_effect(caplog: pytest.LogCaptureFixture) -> None:
    """An argument that contradicts another is an error. One that is for gradients alone is told, with what to write."""
    with pytest.raises(
        ConfigurationError, match="local_steps=2 needs the exchange of updates: leave out updates=False"
    ):
        tritoncomm.wrap(torch.optim.AdamW(parameters()), local_steps=2, updates=False)
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    tritoncomm.wrap(named("Muon"), algo="oktopk", density=0.03)  # the line of the README, for AdamW
    assert "without effect: algo='oktopk', density=0.03." in caplog.text
    tritoncomm.wrap(named("Muon"), algo=DGC(density=0.1))
    assert "without effect: algo=DGC(density=0.1" in caplog.text
    tritoncomm.wrap(torch.optim.AdamW(parameters()), local_steps=2, late=True)
    assert "without effect: late=True." in caplog.text


def test_local_steps_count_for_a_schedule() -> None:
    """Every local step counts, also one without an exchange. Of exchanges of gradients, a skipped one does not."""
    parameter = nn.Parameter(torch.ones(4))
    local = tritoncomm.wrap(torch.optim.AdamW([parameter]), local_steps=3)
    for _ in range(2):
        parameter.grad = torch.ones(4)
        local.step()
    assert local.steps_taken == 2
    assert local.metrics()["exchanges"] == 0
    local.release()
    optimizer = tritoncomm.wrap(torch.optim.AdamW([parameter]))
    for value in (1.0, float("nan")):
        parameter.grad = torch.full((4,), value)
        optimizer.step()
    assert optimizer.steps_taken == 1


@pytest.mark.parametrize(
    "option",
    [{"late": Late(max_catch_up=5)}, {"late": Late()}, {"late": True}, {"small": "fp32"}, {"density": 0.01}],
    ids=str,
)
def test_every_setting_of_gradients_is_told(option: dict[str, object], caplog: pytest.LogCaptureFixture) -> None:
    """A setting that is given, and is for gradients alone, is never ignored in silence."""
    tritoncomm.wrap(torch.optim.RMSprop(nn.Linear(4, 4).parameters()), **option).release()
    ((name, value),) = option.items()
    assert f"without effect: {name}={value!r}. " in caplog.text


@pytest.mark.parametrize(
    ("name", "algo", "late", "told"),
    [
        ("AdamW", "quantized", Late(max_catch_up=3), "none is late with 'quantized'"),
        ("AdamW", "dense", Late(select_by="update"), "none is late with 'dense'"),
        ("RMSprop", "oktopk", Late(max_catch_up=3), "the optimizer has no rule for them"),
        ("RMSprop", "oktopk", Late(select_by="update"), ""),
        ("AdamW", "oktopk", Late(max_catch_up=3), ""),
        ("AdamW", "quantized", True, ""),
    ],
)
def test_late_without_effect_is_told(name, algo, late, told, caplog) -> None:
    """Where gradients are exchanged, ``Late`` says nothing if none is late, or nothing catches up."""
    kind = getattr(torch.optim, name)
    tritoncomm.wrap(kind(nn.Linear(4, 4).parameters()), algo, late=late, updates=False).release()
    assert ("without effect: late=Late(" in caplog.text) == bool(told)
    assert told in caplog.text


def test_settings_of_gradients_that_have_an_effect_are_not_told(caplog: pytest.LogCaptureFixture) -> None:
    """Nor is one that says what happens in any case."""
    net = nn.Linear(4, 4)
    groups = [{"params": [net.weight]}, {"params": [net.bias], "dense": True}]
    for parameters, option in ((groups, {"small": "fp32"}), (net.parameters(), {"late": False})):
        tritoncomm.wrap(torch.optim.RMSprop(parameters), **option).release()
        assert "without effect" not in caplog.text


def test_a_bad_argument_is_told_alone(caplog: pytest.LogCaptureFixture) -> None:
    """What has no effect is told when all arguments are valid."""
    with pytest.raises(tritoncomm.ConfigurationError, match="unknown algorithm 'nope'"):
        tritoncomm.wrap(torch.optim.RMSprop(nn.Linear(4, 4).parameters()), "nope")
    assert not caplog.text


def test_settings_of_gradients_have_no_effect_on_updates(caplog: pytest.LogCaptureFixture) -> None:
    """All tensors travel alike where updates are exchanged, unless a group says ``dense=True``. That is told."""
    net = nn.Linear(40, 40)
    groups = [{"params": [net.weight]}, {"params": [net.bias], "dense": True}]
    for parameters, dense in ((net.parameters(), 0), (groups, 40)):
        caplog.clear()
        optimizer = tritoncomm.wrap(torch.optim.RMSprop(parameters), dense_below=7)
        assert "without effect: dense_below=7" in caplog.text
        assert [vector.dense_numel for vector in optimizer._tritoncomm.setup.exchange.vectors] == [dense]
        optimizer.release()
