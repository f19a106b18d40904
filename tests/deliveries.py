"""Steps of a rule for late gradients, from the entries of each parameter, and the ages that an exchange would keep."""

from __future__ import annotations

from collections.abc import Sequence
from weakref import WeakKeyDictionary

import torch
from tritoncomm.primitives.sparse_vector import SparseVector
from tritoncomm.step.exchange.feedback import Ages
from tritoncomm.step.exchange.layout import BucketLayout, Delivered
from tritoncomm.step.rules.late import AwareStep
from tritoncomm.step.tensors.shards import local

# The parameters of each optimizer, and how late their entries are.
_Held = tuple[list[torch.Tensor], Ages]
_HELD: WeakKeyDictionary[torch.optim.Optimizer, _Held] = WeakKeyDictionary()


def begin_step(rule: AwareStep, layout: BucketLayout) -> Ages:
    """Begin a step of ``rule`` for one vector of parameters, which are the same in all steps of an optimizer."""
    if rule.optimizer not in _HELD:
        _HELD[rule.optimizer] = layout.parameters, Ages(layout.parameters, layout.bounds)
    _, ages = _HELD[rule.optimizer]
    ages.steps += 1
    ages.begin()
    rule.begin()
    return ages


def ages_of(optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the step of the last delivery of each coordinate of ``parameter``, and its root mean square."""
    parameters, ages = _HELD[optimizer]
    (place,) = [number for number, each in enumerate(parameters) if each is parameter]
    return ages.last[place], ages.rms[place]


def forget_ages(optimizer: torch.optim.Optimizer) -> None:
    """Let the next step begin with a new vector, as another ``wrap()`` does."""
    del _HELD[optimizer]


def take_step(
    rule: AwareStep,
    parameters: Sequence[torch.Tensor],
    delivered: Sequence[torch.Tensor | None],
    values: Sequence[torch.Tensor] | None = None,
) -> None:
    """Take a step of ``rule`` for one vector of all ``parameters``.

    ``delivered`` are ascending int64 indices in each flattened parameter, in its local shard if it is a DTensor. None
    means all. The rule reads ``.grad`` there, or ``values`` (fp32 ``[k]`` beside ``[k]`` indices).
    """
    layout = BucketLayout(parameters)
    sizes = [local(parameter).numel() for parameter in parameters]
    everywhere = [torch.arange(n) if at is None else at for n, at in zip(sizes, delivered, strict=True)]
    indices = torch.cat([at + start for at, start in zip(everywhere, layout.bounds, strict=False)]).int()
    given = torch.zeros(len(indices)) if values is None else torch.cat(list(values))
    mean = SparseVector.full(given) if len(indices) == layout.numel else SparseVector(indices, given, layout.numel)
    step = Delivered(mean, layout, begin_step(rule, layout))
    rule.step(step.read_again() if values is None else step)
