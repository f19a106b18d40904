"""Which optimizers get a rule for late gradients, whether gradients or updates travel, and what is logged."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
import tritoncomm
from torch import nn
from tritoncomm import ConfigurationError, Late, OkTopk, Quantized, Updates
from tritoncomm.step.rules.adam import StalenessAwareAdam
from tritoncomm.step.rules.choose import exchanges_updates, find_rule, updates_of

from baselines import DGC
from prepared_launcher import PreparedLauncher


class Renamed(torch.optim.AdamW):
    """A subclass that does not override ``step``."""


class Below(Renamed):
    """A subclass of a subclass."""


class Overriding(torch.optim.AdamW):
    """A subclass with its own step, which calls AdamW's."""

    def step(self, closure=None):
        """Take AdamW's step."""
        return super().step(closure)


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


def made(kind: type[torch.optim.Optimizer] | str, **options: object) -> torch.optim.Optimizer:
    """Return an optimizer of this class, or of one with this name that has no rule."""
    if isinstance(kind, str):
        kind = type(kind, (torch.optim.RMSprop,), {})
    parameter = nn.Parameter(torch.ones(4))
    parameter.grad = torch.ones(4)
    return kind([parameter], **{"lr": 0.1} | options)


@pytest.mark.parametrize(
    ("kind", "rule", "updates"),
    [
        *((kind, StalenessAwareAdam, False) for kind in (torch.optim.Adam, torch.optim.AdamW, Renamed, Below)),
        *((kind, None, False) for kind in (torch.optim.SGD, RenamedSGD)),
        *((kind, None, True) for kind in (Overriding, SignSGD, BelowSign, torch.optim.NAdam, torch.optim.RMSprop)),
    ],
)
def test_subclasses_with_another_step_have_no_rule(kind, rule: type | None, updates: bool) -> None:
    """Adam and AdamW have a rule, and SGD is linear: they exchange gradients, and what takes other steps updates."""
    optimizer = made(kind)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)  # wraps the step of the object
    assert find_rule(optimizer) is rule
    assert exchanges_updates(optimizer) == updates


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


def test_what_travels() -> None:
    """Linear optimizers and those with a rule exchange gradients, all others updates. Local steps are updates."""
    adamw, others = made(torch.optim.AdamW), [made("Muon"), made(Overriding), made(SignSGD)]
    assert [updates_of(each, None, 1, OkTopk()) for each in (adamw, *others)] == [None, *[Updates()] * 3]
    assert [updates_of(each, None, 2, OkTopk()) for each in (adamw, made(torch.optim.SGD))] == [Updates()] * 2
    assert not any(updates_of(each, None, 1, Quantized()) for each in others)
    assert not any(updates_of(each, False, 1, OkTopk()) for each in others)
    for given in (True, Updates(), Updates(outer_lr=0.5)):
        expected = Updates() if given is True else given
        assert all(updates_of(each, given, 1, Quantized()) == expected for each in (adamw, *others))


def test_schedule_free_optimizers_exchange_every_gradient(caplog: pytest.LogCaptureFixture) -> None:
    """Their second copy of the parameters would drift apart. Unless the user says more, no gradient is late."""
    for algo in ({}, {"algo": "quantized"}, {"algo": "dense"}):
        assert tritoncomm.wrap(made("AdamWScheduleFree"), **algo).recipe.delivers_all()
    listed = tritoncomm.wrap([made("Muon"), made("AdamWScheduleFree")])
    assert [vector.options.recipe.name for vector in listed._tritoncomm.setup.scope.vectors] == ["quantized"] * 2
    assert listed._tritoncomm.setup.local is None
    for option in ({"local_steps": 4}, {"updates": True}):
        ((name, value),) = option.items()
        with pytest.raises(ConfigurationError, match=f"{name}={value}: AdamWScheduleFree keeps a copy"):
            tritoncomm.wrap(made("AdamWScheduleFree"), **option)
    with caplog.at_level(logging.INFO, logger="tritoncomm"):
        tritoncomm.wrap(made("AdamWScheduleFree"))
        assert "no rule for late ones" not in caplog.text
        assert tritoncomm.wrap(made("AdamWScheduleFree"), density=0.5).recipe.layers[-1].name == "oktopk"
        assert "AdamWScheduleFree exchanges gradients, and has no rule for late ones" in caplog.text


WITHOUT_EFFECT = "without effect: "
NO_RULE = "exchanges gradients, and has no rule for late ones"


@pytest.mark.parametrize(
    ("kind", "options", "told"),
    [
        # Nothing is told of the defaults, and of what has an effect or says what happens in any case.
        ("Muon", {}, ""),
        ("SGD", {}, ""),
        ("RMSprop", {"late": False}, ""),
        ("AdamW", {"algo": "quantized", "late": True}, ""),
        ("AdamW", {"late": Late(max_catch_up=3)}, ""),
        ("RMSprop", {"updates": False, "late": Late(select_by="update")}, f"RMSprop {NO_RULE}"),
        ("Muon", {"updates": False}, f"Muon {NO_RULE}"),
        # What is for gradients alone, where updates are exchanged.
        ("Muon", {"algo": "oktopk", "density": 0.03}, f"{WITHOUT_EFFECT}algo='oktopk', density=0.03. "),
        ("Muon", {"algo": DGC(density=0.1)}, f"{WITHOUT_EFFECT}algo=DGC(density=0.1"),
        ("AdamW", {"local_steps": 2, "late": True}, f"{WITHOUT_EFFECT}late=True. "),
        *(
            ("RMSprop", {name: value}, f"{WITHOUT_EFFECT}{name}={value!r}. ")
            for name, value in {"late": Late(max_catch_up=5), "small": "fp32", "density": 0.01}.items()
        ),
        ("RMSprop", {"late": Late()}, f"{WITHOUT_EFFECT}late={Late()!r}. "),
        # What is for late gradients, where none is late, or nothing catches up.
        ("AdamW", {"algo": "quantized", "late": Late(max_catch_up=3)}, "none is late with 'quantized'"),
        ("AdamW", {"algo": "dense", "late": Late(select_by="update")}, "none is late with 'dense'"),
        ("RMSprop", {"updates": False, "late": Late(max_catch_up=3)}, "the optimizer has no rule for them"),
    ],
)
def test_arguments_without_effect_are_told(kind: str, options: dict, told: str, caplog) -> None:
    """An argument that is given and has no effect is never ignored in silence, and nothing else is a warning."""
    caplog.set_level(logging.INFO, "tritoncomm")
    optimizer = made(kind) if kind == "Muon" else made(getattr(torch.optim, kind))
    tritoncomm.wrap(optimizer, **options).release()
    assert told in caplog.text
    warned = any(record.levelno >= logging.WARNING for record in caplog.records)
    assert warned == (WITHOUT_EFFECT in caplog.text) == (bool(told) and NO_RULE not in told)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"local_steps": 2, "updates": False}, "local_steps=2 needs the exchange of updates: leave out updates=False"),
        ({"algo": "nope", "small": "fp32"}, "unknown algorithm 'nope'"),
    ],
)
def test_a_bad_argument_is_told_alone(options: dict, said: str, caplog: pytest.LogCaptureFixture) -> None:
    """What has no effect is told when all arguments are valid, and do not contradict each other."""
    with pytest.raises(ConfigurationError, match=said):
        tritoncomm.wrap(made("RMSprop"), **options)
    assert not caplog.text


def test_settings_of_gradients_have_no_effect_on_updates(caplog: pytest.LogCaptureFixture) -> None:
    """All tensors travel alike where updates are exchanged, unless a group says ``dense=True``. That is told."""
    net = nn.Linear(40, 40)
    groups = [{"params": [net.weight]}, {"params": [net.bias], "dense": True}]
    for parameters, small, dense in ((net.parameters(), {}, 0), (groups, {"small": "fp32"}, 40)):
        caplog.clear()
        optimizer = tritoncomm.wrap(torch.optim.RMSprop(parameters), dense_below=7, **small)
        assert "without effect: dense_below=7. " in caplog.text  # small is for those of the group
        assert [vector.dense_numel for vector in optimizer._tritoncomm.setup.scope.vectors] == [dense]
        optimizer.release()


def test_local_steps_count_for_a_schedule() -> None:
    """Every local step counts, also one without an exchange. Of exchanges of gradients, a skipped one does not."""
    local = tritoncomm.wrap(made(torch.optim.AdamW), local_steps=3)
    for _ in range(2):
        local.step()
    assert local.steps_taken == 2
    optimizer = tritoncomm.wrap(made(torch.optim.AdamW))
    for value in (1.0, float("nan")):
        optimizer.param_groups[0]["params"][0].grad = torch.full((4,), value)
        optimizer.step()
    assert optimizer.steps_taken == 1
