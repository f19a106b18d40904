"""The static form of a method trains as the exact one, to the bit."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from models import equal, exact, flat, loss_of, residual, tiny
from torch import nn
from tritoncomm import Late, TopkAllgather

from ranks import ranks

OPTIMIZERS = {
    "AdamW": partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.1),
    "Adam": partial(torch.optim.Adam, lr=1e-2, amsgrad=True),
    "no rule": partial(torch.optim.SGD, lr=1e-2, momentum=0.9, dampening=0.1),
}


def trained(rank: int, recipe, kind: str, **options) -> tuple[torch.Tensor, dict]:
    """Train with a checkpoint in the middle, and return parameters, residual and state."""
    model = tiny()
    first, *others = [p for p in model.parameters() if p.requires_grad]
    inner = OPTIMIZERS[kind]([{"params": [first]}, {"params": others, "lr": 1e-3}])
    optimizer = exact(inner, recipe, **{"dense_below": 30} | options)
    for step in range(7):
        if step == 4:
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        optimizer.zero_grad()
        loss_of(model, rank, step).backward()
        if step == 2:
            optimizer.synchronize()
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
    states = [value.flatten().float() for p in inner.state.values() for value in p.values()]
    assert equal([*model.parameters(), *states])
    return torch.cat([flat(model), residual(optimizer), *states]), optimizer.metrics()


@ranks(3)
@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize(("values", "options"), [("fp32", {}), ("fp32", {"max_grad_norm": 0.2}), ("4bit", {})])
def test_equals_exact_form(rank, world_size, kind, values, options):
    """With both steps of Adam, with clipping, and through a state."""
    recipe = partial(TopkAllgather, density=0.1, values=values)
    ends = [
        trained(rank, recipe(static=each), kind, late=Late(select_by="gradient"), **options) for each in (True, False)
    ]
    assert torch.equal(ends[0][0], ends[1][0])
    assert ends[0][1]["density_delivered"] == ends[1][1]["density_delivered"]


@ranks(3)
def test_selection_by_update(rank, world_size):
    """It trains with selection by update, small tensors in 8 bits and a warm-up. Replicas stay equal."""
    recipe = TopkAllgather(density=0.1, static=True, values="4bit")
    trained(rank, recipe, "AdamW", late=Late(select_by="update"), small="8bit", warmup_steps=2)
