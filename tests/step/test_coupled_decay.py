"""A weight decay that is a part of the gradient reaches every coordinate, whatever is delivered."""

from __future__ import annotations

import sys

import pytest
import torch
import tritoncomm
from torch.nn import Parameter
from tritoncomm.step.rules.step import coupled_decay

KINDS = {
    "Adam": (torch.optim.Adam, {"lr": 0.01}),
    "Adam, maximize": (torch.optim.Adam, {"lr": 0.01, "maximize": True}),
    "SGD": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.5}),
    "SGD, maximize": (torch.optim.SGD, {"lr": 0.05, "maximize": True}),
    "RMSprop": (torch.optim.RMSprop, {"lr": 1e-3}),
    "Adagrad": (torch.optim.Adagrad, {"lr": 0.05}),
    "Adamax": (torch.optim.Adamax, {"lr": 0.01}),
    "NAdam": (torch.optim.NAdam, {"lr": 0.01}),
    "RAdam": (torch.optim.RAdam, {"lr": 0.01}),
    "ASGD": (torch.optim.ASGD, {"lr": 0.05}),
    "Adadelta": (torch.optim.Adadelta, {"lr": 1.0}),
}


def decayed(kind: str, steps: int = 200, **fields) -> torch.Tensor:
    """Train a parameter of which one half has gradients of noise, and the other one none. Return that other half."""
    make, options = KINDS[kind]
    parameter = Parameter(torch.ones(64, 64))
    optimizer = make([parameter], weight_decay=0.1, **options)
    if fields:
        optimizer = tritoncomm.wrap(optimizer, warmup_steps=0, updates=False, **fields)
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        optimizer.zero_grad()
        (parameter[:32] * torch.randn(32, 64, generator=generator)).mean().backward()
        optimizer.step()
    return parameter[32:].detach()


@pytest.mark.parametrize(
    ("fields", "far"),
    [({}, 1e-3), ({"algo": "spardl"}, 1e-3), ({"density": 0.01}, 0.02), ({"algo": "exdyna"}, 0.05)],
    ids=str,
)
def test_half_without_gradients_decays(fields: dict[str, object], far: float) -> None:
    """Every entry of the half without gradients decays as in a dense run.

    All stayed at 1 when only what was delivered decayed. In the residual, decay would wait for some 33 steps at a time.
    It does so when it is small beside what is delivered, which is larger at 1 %: sums of 100 steps. In its first steps,
    ``exdyna`` delivers nothing that would tell.
    """
    assert decayed("Adam").abs().max() == pytest.approx(0.0156, abs=1e-4)
    assert decayed("Adam", **fields).abs().max() == pytest.approx(0.0156, abs=far)


def test_decay_is_not_sent() -> None:
    """Where it outweighs the gradient, entries of gradients are all that is selected."""
    parameter = Parameter(torch.ones(64, 64))
    optimizer = tritoncomm.wrap(torch.optim.Adam([parameter], weight_decay=0.1), density=0.1, warmup_steps=0)
    for step in range(3):
        parameter.grad = torch.zeros(64, 64)
        parameter.grad[:8] = 1e-3 * torch.randn(8, 64, generator=torch.Generator().manual_seed(step))
        optimizer.step()
        assert torch.allclose(parameter.grad[8:], 0.1 * torch.ones(56, 64), rtol=1e-2)
        assert (
            not optimizer._tritoncomm.setup.scope.vectors[0].residuals_by_parameter()[parameter].view(64, 64)[8:].any()
        )
        assert optimizer.metrics()["density_delivered"] < 0.2


@pytest.mark.parametrize("kind", KINDS)
def test_every_optimizer_with_coupled_decay(kind: str) -> None:
    """Every entry of the half moves at least half as far as in a dense run, although one in two steps delivers it."""
    dense, sparse = decayed(kind, 80), decayed(kind, 80, density=0.5, values="fp32", late=False)
    assert (1 - dense).min() > 0.005
    assert (1 - sparse).min() > 0.5 * (1 - dense).max()
    if kind.startswith("SGD"):  # linear: a late sum moves as far as its parts
        assert torch.allclose(sparse, dense, atol=0.02)


def test_decoupled_decay_stays_with_the_optimizer() -> None:
    """The gradients of AdamW, and of the others with decoupled decay, do not contain it."""
    parameter = Parameter(torch.ones(3))
    coupled = torch.optim.Adam([{"params": [parameter], "weight_decay": 0.1}])
    assert coupled_decay(coupled) == {id(parameter): 0.1}
    for decoupled in (
        torch.optim.AdamW([parameter], weight_decay=0.1),
        torch.optim.NAdam([parameter], weight_decay=0.1, decoupled_weight_decay=True),
        torch.optim.Adam([parameter], weight_decay=0.1, decoupled_weight_decay=True),
        torch.optim.Adafactor([parameter], weight_decay=0.1),
        torch.optim.SGD([parameter], lr=0.1),
    ):
        assert coupled_decay(decoupled) == {}


def test_options_are_as_before_after_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step reads no decay from the group, and leaves it as it was, also if it fails."""
    parameter, seen, module = Parameter(torch.ones(8, 8)), [], sys.modules[torch.optim.SGD.__module__]
    function = module.sgd

    def watching(*args: object, **kwargs: object) -> None:
        seen.append(kwargs["weight_decay"])
        if len(seen) > 1:
            raise MemoryError
        function(*args, **kwargs)

    monkeypatch.setattr(module, "sgd", watching)
    base = torch.optim.SGD([parameter], lr=0.1, weight_decay=0.2)
    optimizer = tritoncomm.wrap(base, density=0.5, warmup_steps=0)
    for fails in (False, True):
        parameter.grad = torch.ones(8, 8)
        if fails:
            with pytest.raises(MemoryError):
                optimizer.step()
        else:
            optimizer.step()
    assert seen == [0, 0]
    assert optimizer.param_groups[0]["weight_decay"] == 0.2


def test_clipping_by_gradient_leaves_decay_alone() -> None:
    """As in a dense run, the norm of the gradient is limited, and the decay is added to what is left."""
    parameter = Parameter(torch.full((32, 32), 2.0))
    optimizer = tritoncomm.wrap(
        torch.optim.SGD([parameter], lr=1.0, weight_decay=0.1),
        density=1.0 / 2,
        warmup_steps=1,
        small="fp32",
        max_grad_norm=1e-6,
    )
    parameter.grad = torch.ones(32, 32)
    optimizer.step()
    assert torch.allclose(parameter, torch.full((32, 32), 1.8), atol=1e-5)


def test_decay_passes_the_momentum_of_a_method() -> None:
    """``dgc`` has a momentum of its own, which makes steady decay ten times as strong. Without it, 0.74 is left."""
    parameter = Parameter(torch.ones(64, 64))
    optimizer = tritoncomm.wrap(
        torch.optim.SGD([parameter], lr=0.1, weight_decay=0.05), "dgc", density=0.1, warmup_steps=0
    )
    generator = torch.Generator().manual_seed(0)
    for _ in range(60):
        optimizer.zero_grad()
        (parameter[:32] * torch.randn(32, 64, generator=generator)).mean().backward()
        optimizer.step()
    assert 0.0 < float(parameter[32:].detach().mean()) < 0.3


@pytest.mark.parametrize("kind", ["SGD, maximize", "Adam"])
@pytest.mark.parametrize("fields", [{"density": 0.25}, {"density": 1.0}, {"algo": "spardl", "density": 0.25}], ids=str)
def test_clipping_after_synchronize_leaves_decay_alone(kind: str, fields: dict[str, object]) -> None:
    """``synchronize()`` shows the mean of the gradients, as in a dense run, whose optimizer adds the decay later."""
    make, options = KINDS[kind]
    found = []
    for wraps in (False, True):
        parameter = Parameter(torch.ones(64, 64))
        optimizer = make([parameter], weight_decay=0.5, **options)
        if wraps:
            optimizer = tritoncomm.wrap(optimizer, warmup_steps=0, values="fp32", updates=False, **fields)
        generator = torch.Generator().manual_seed(0)
        for _ in range(20):
            optimizer.zero_grad()
            (parameter[:4] * torch.randn(4, 64, generator=generator)).mul(0.1).sum().backward()
            if wraps:
                optimizer.synchronize()
            norm = torch.nn.utils.clip_grad_norm_([parameter], 0.01)
            assert 1 < norm < 2  # 32 with the decay
            optimizer.step()
        found.append(parameter.detach())
    assert (found[0][4:] - 1).abs().min() > 0.005
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)


RULES = {
    "SGD": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9, weight_decay=0.1),
    "AdamW": lambda ps: torch.optim.AdamW(ps, lr=0.01),
}


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        ("SGD", torch.float32),  # decay is added to .grad, which rounds it in other dtypes
        *(("AdamW", dtype) for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64)),
    ],
)
@pytest.mark.parametrize("static", [False, True])
def test_synchronize_changes_no_bit_of_a_step(kind: str, dtype: torch.dtype, static: bool) -> None:
    """Rules read what was delivered, or ``.grad`` where somebody may have changed it: the bits are the same.

    So they are if a hook fails before the step, and ``.grad`` is the mean either way.
    """
    results = []
    for synchronizes in (False, True):
        generator, kept = torch.Generator().manual_seed(0), []
        shapes = (40, 50), (7,), (30, 20), ()
        parameters = [Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in shapes]
        base = RULES[kind](parameters)
        recipe = tritoncomm.OkTopk(density=0.1, static=static)
        optimizer = tritoncomm.wrap(base, recipe, dense_below=100, warmup_steps=1)
        for step in range(5):
            for parameter in parameters:
                parameter.grad = (torch.randn(parameter.shape, generator=generator) / 8).to(dtype)
            if synchronizes:
                optimizer.synchronize()
                if step == 3:
                    handle = base.register_step_pre_hook(lambda *_: 1 / 0)
                    with pytest.raises(ZeroDivisionError):
                        optimizer.step()
                    handle.remove()
            optimizer.step()
            kept += [parameter.grad.clone() for parameter in parameters]
        states = [value for parameter in parameters for _, value in sorted(base.state[parameter].items())]
        results.append([*kept, *parameters, *states, *optimizer.state_dict()["tritoncomm"]["residuals"]])
    assert any((gradient == 0).any() for gradient in kept[4:])
    for one, two in zip(*results, strict=True):
        assert torch.equal(one, two)
        assert torch.equal(one.signbit(), two.signbit())  # torch.equal() says that 0.0 is -0.0
