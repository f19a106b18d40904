"""The values that the staleness-aware step reads: those that were delivered, or those in ``.grad``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import tritoncomm
from torch import nn
from tritoncomm.step.exchange.layout import Delivered
from tritoncomm.step.rules.adam import StalenessAwareAdam

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
SHAPES = [(40, 50), (7,), (30, 20), ()]
STEPS = 4

Optimizer = tritoncomm.optimizer.SparseOptimizer


def step_at_once(optimizer: Optimizer) -> None:
    """Exchange and step in one call."""
    optimizer.step()


def look_before(optimizer: Optimizer) -> None:
    """Exchange first, so that ``.grad`` may be changed before the step."""
    optimizer.synchronize()
    optimizer.step()


def halve_before(optimizer: Optimizer) -> None:
    """Halve the averaged gradients before the step."""
    optimizer.synchronize()
    for parameter in optimizer.param_groups[0]["params"]:
        parameter.grad.data.mul_(0.5)
    optimizer.step()


def halve(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Halve the averaged gradients in a hook of the wrapped optimizer."""
    for parameter in optimizer.param_groups[0]["params"]:
        parameter.grad.data.mul_(0.5)


def trained(
    monkeypatch: pytest.MonkeyPatch,
    step: Callable[[Optimizer], None],
    *,
    dtype: torch.dtype = torch.float32,
    hook: Callable[..., None] | None = None,
    warmup_steps: int = 1,
    **options: Any,
) -> tuple[list[torch.Tensor], list[bool]]:
    """Return parameters, states and gradients of all steps, and whether each step read the delivered values."""
    generator, kept, given = torch.Generator().manual_seed(0), [], []
    read: list[Delivered] = []
    taken, read_again = StalenessAwareAdam.step, Delivered.read_again

    def spied(aware: StalenessAwareAdam, delivered: Delivered) -> None:
        given.append(all(delivered is not each for each in read))
        taken(aware, delivered)

    def reading(delivered: Delivered) -> Delivered:
        found = read_again(delivered)
        read.append(found)
        return found

    parameters = [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in SHAPES]
    bare = torch.optim.AdamW(parameters, lr=0.01)
    if hook is not None:
        bare.register_step_pre_hook(hook)
    optimizer = tritoncomm.wrap(bare, density=0.05, dense_below=100, warmup_steps=warmup_steps, **options)
    for _ in range(STEPS):
        for parameter in parameters:
            parameter.grad = torch.randn(parameter.shape, generator=generator).to(dtype)
        with monkeypatch.context() as patch:
            patch.setattr(StalenessAwareAdam, "step", spied)
            patch.setattr(Delivered, "read_again", reading)
            step(optimizer)
        kept += [tensor.detach().clone() for parameter in parameters for tensor in (parameter, parameter.grad)]
        states = [optimizer.state[parameter] for parameter in parameters]
        kept += optimizer.state_dict()["tritoncomm"]["last"]
        kept += [state[name].clone() for state in states for name in ("exp_avg", "exp_avg_sq")]
    return kept, given


def same(results: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    """Return True if all bits are equal. torch.equal() says that 0.0 is -0.0."""
    return all(
        torch.equal(a, b) and torch.equal(a.signbit(), b.signbit()) for a, b in zip(results, others, strict=True)
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_delivered_values_equal_gradients(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """step() alone reads delivered values. Parameters, states and ``.grad`` have the bits of a step from ``.grad``."""
    direct, given = trained(monkeypatch, step_at_once, dtype=dtype)
    seen, not_given = trained(monkeypatch, look_before, dtype=dtype)
    assert (given, not_given) == ([True] * STEPS, [False] * STEPS)
    assert same(direct, seen)


def test_gradient_after_step_is_the_mean(monkeypatch: pytest.MonkeyPatch) -> None:
    """After step(), ``.grad`` holds the delivered entries and zeros, also where the step did not read it."""
    kept, _ = trained(monkeypatch, step_at_once)
    each = len(kept) // STEPS
    for step in range(STEPS):
        gradient, delivered = kept[step * each + 1], kept[step * each + 2 * len(SHAPES)] == step + 1
        assert torch.equal(gradient != 0, delivered)
        assert bool(delivered.all()) == (step == 0)  # the warm-up is dense


@pytest.mark.parametrize("warmup_steps", [0, STEPS])
def test_hooks_of_the_wrapped_optimizer_see_gradients(warmup_steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pre-hook may change the averaged gradients, dense or sparse, as one may between synchronize() and step()."""
    hooked, given = trained(monkeypatch, step_at_once, hook=halve, warmup_steps=warmup_steps)
    halved, _ = trained(monkeypatch, halve_before, warmup_steps=warmup_steps)
    assert not any(given)
    assert same(hooked, halved)
    assert not same(hooked, trained(monkeypatch, step_at_once, warmup_steps=warmup_steps)[0])
