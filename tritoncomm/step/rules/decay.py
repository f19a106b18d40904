"""Weight decay that is a part of the gradient, where gradients are delivered late.

Parameters are equal on all ranks, and a coordinate that is not delivered has not moved. So its decay is known without a
message: when it is delivered, each of the steps since its last delivery has had the same.

A coordinate that nothing is delivered of decays, too, without a message: it is delivered as zero. So is every one whose
decay of one step is as large as most delivered entries, which are sums of several gradients, and from time to time
every one that has waited for long. Its residual, which ranks do not know of each other, then comes later, and counts
for fewer steps than it should: with 100 steps for long, Adam ends 0.8 % higher (``benchmarks/results/decay.json``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from tritoncomm.primitives.sparse_vector import SparseVector
from tritoncomm.step.exchange.layout import Delivered, values_at, with_values
from tritoncomm.step.optimizer_list import parts_of
from tritoncomm.step.tensors.shards import local
from tritoncomm.step.torch_internals import steps_as

# Steps after which a coordinate has waited for long. In one of so many steps, these are looked for. With padding, only
# the device knows what is delivered, and the host waits for it then.
_OLD, _EVERY = 400, 20
# Optimizers that add weight decay to the gradient, unless it is decoupled. Others shrink parameters apart from it, and
# so may a step of a subclass.
_COUPLED = (torch.optim.Adam, torch.optim.SGD)


def coupled_decay(optimizer: torch.optim.Optimizer) -> dict[int, float]:
    """Return the share of each parameter (by id) that ``optimizer`` adds to its gradient as weight decay, if not zero.

    It is negative if the optimizer maximizes, because the sign of the gradient changes then.
    """
    found: dict[int, float] = {}
    for group in _coupled_groups(optimizer):
        share = float(group["weight_decay"]) * (-1.0 if group.get("maximize") else 1.0)
        found |= {id(parameter): share for parameter in group["params"] if share}
    return found


def _coupled_groups(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    return [
        group
        for part in parts_of(optimizer)
        if steps_as(part, _COUPLED)
        for group in part.param_groups
        if not group.get("decoupled_weight_decay", False)
    ]


@torch.no_grad()
def with_decay(delivered: Delivered, shares: Mapping[int, float]) -> Delivered:
    """Return ``delivered`` with the decay of its coordinates, and with those that only decay.

    Args:
        delivered: The mean of one vector, whose step has begun.
        shares: The share of each parameter, by its id, that is its decay.
    """
    ages, layout, mean = delivered.ages, delivered.layout, delivered.mean
    own = [
        (number, local(parameter.detach()), shares[id(parameter)])
        for number, parameter in enumerate(layout.parameters)
        if id(parameter) in shares and parameter.grad is not None
    ]
    if not own:
        return delivered
    decay = torch.zeros(mean.numel, dtype=torch.float32, device=mean.values.device)
    late = torch.zeros_like(decay)
    decays, lates = layout.parts(decay), layout.parts(late)
    for number, parameter, share in own:
        decays[number].view(parameter.shape).add_(parameter, alpha=share)
        lates[number].view(parameter.shape).copy_(ages.steps - ages.last[number])
    is_due = ages.steps % _EVERY == 0
    if mean.is_padded and is_due:
        mean = mean.trimmed()
    if not (mean.is_full or mean.is_padded):
        selected = mean.values[mean.indices < mean.numel - delivered.small].abs()
        chosen = decay.abs() >= selected.median() if selected.numel() else torch.zeros_like(decay, dtype=torch.bool)
        mean = _joined(mean, chosen.logical_or_(late > _OLD) if is_due else chosen)
    decay.mul_(late.clamp_(min=1))
    return replace(delivered, mean=with_values(mean, mean.values + values_at(decay, mean)))


def _joined(mean: SparseVector, chosen: torch.Tensor) -> SparseVector:
    """Return ``mean`` with zeros at the coordinates that are ``chosen`` (bool ``[numel]``), and not in it."""
    places = mean.indices.long()
    indices = chosen.index_fill_(0, places, True).nonzero().view(-1)
    values = torch.zeros_like(chosen, dtype=torch.float32).index_copy_(0, places, mean.values)[indices]
    return SparseVector(indices.to(torch.int32), values, mean.numel)
