"""What a worker does in the tests of the static form."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
import tritoncomm
from helpers import flat, loss_of, residual, tiny_model
from torch import nn
from tritoncomm import ConfigurationError, NonFiniteError, OkTopk, Recipe, SparDL, TopkAllgather
from tritoncomm.algorithms import Hierarchical, Warmup
from tritoncomm.step.recipes import with_form

STEPS = 8


def trained(rank: int, recipe: Recipe, make: object, **options: object) -> tuple[list, dict]:
    """Train some steps, with a checkpoint in the middle, and return the bits of parameters, residual and state."""
    model = tiny_model()
    inner = make([p for p in model.parameters() if p.requires_grad])
    optimizer = tritoncomm.wrap(inner, algo=recipe, dense_below=30, **options)
    for step in range(STEPS):
        if step == STEPS // 2:
            saved = copy.deepcopy(optimizer.state_dict())
            optimizer.load_state_dict(saved)
        optimizer.zero_grad()
        loss_of(model, rank, step).backward()
        if step == 2:
            optimizer.synchronize()
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
    kept = residual(optimizer).view(torch.int32).tolist()
    states = [value.flatten().tolist() for p in inner.state.values() for value in p.values()]
    return [flat(model), kept, states], optimizer.metrics()


def equals_exact_form(rank: int, world_size: int, send) -> None:
    """Both forms of a recipe train alike to the bit, with both steps of Adam, with clipping, and through a state."""
    makes = [
        lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.1),
        lambda p: torch.optim.Adam([{"params": p[:2]}, {"params": p[2:], "lr": 1e-3}], lr=1e-2, amsgrad=True),
        lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, dampening=0.1),  # which has no rule
    ]
    for values, all_options in (("fp32", ({}, {"max_grad_norm": 0.2})), ("4bit", ({},))):
        recipe = partial(TopkAllgather, density=0.1, values=values)
        for make in makes:
            for options in all_options:
                static, metrics = trained(rank, recipe(static=True), make, select_by="gradient", **options)
                exact, others = trained(rank, recipe(static=False), make, select_by="gradient", **options)
                assert static == exact, (recipe, make, options)
                assert metrics["density_delivered"] == others["density_delivered"]


def selection_by_update(rank: int, world_size: int, send) -> None:
    """A static form trains with selection by update, small tensors in 8 bits and a warm-up. Replicas stay equal."""
    for recipe in (TopkAllgather(density=0.1, static=True, values="4bit"),):
        bits, _ = trained(
            rank, recipe, lambda p: torch.optim.AdamW(p, lr=1e-2), select_by="update", small="8bit", warmup_steps=2
        )
        everybody = [None] * world_size
        torch.distributed.all_gather_object(everybody, (bits[0], bits[2]))
        assert all(other == everybody[0] for other in everybody)


def rejected(rank: int, world_size: int, send) -> None:
    """A NaN on one rank is named on all, nothing changes, and training goes on. A flush leaves no residual."""
    model = tiny_model()
    recipe = TopkAllgather(density=0.1, static=True)
    inner = torch.optim.AdamW(model.parameters(), lr=1e-2)
    optimizer = tritoncomm.wrap(inner, algo=recipe, dense_below=30, on_nonfinite="raise")
    for step in range(4):
        optimizer.zero_grad()
        loss_of(model, rank, step).backward()
        before = flat(model), residual(optimizer)
        if step == 2:
            if rank == 1:
                model[0].weight.grad[3, 2] = float("nan")
            with pytest.raises(NonFiniteError, match="rank 1") as caught:
                optimizer.step()
            assert list(caught.value.ranks) == [1]
            assert flat(model) == before[0]
            assert torch.equal(residual(optimizer), before[1])
        else:
            optimizer.step()
            assert flat(model) != before[0]
    optimizer.flush()
    assert not residual(optimizer).any()


def resolved_for_gpus(rank: int, world_size: int, send) -> None:
    """For a GPU, methods that have a static form use it unless the user asks for something else."""
    for recipe in (TopkAllgather(), OkTopk(), SparDL()):
        assert with_form(recipe, "cuda").static is True
        assert with_form(recipe, "cpu").static == "auto"
    assert with_form(Warmup(recipe=TopkAllgather(), steps=2), "cuda").recipe.static is True
    assert with_form(TopkAllgather(static=False), "cuda").static is False
    nodes = Hierarchical(recipe=TopkAllgather(), node_size=2)
    assert with_form(nodes, "cuda").recipe.static == "auto"
    with pytest.raises(ConfigurationError, match="static=True"):
        Hierarchical(recipe=TopkAllgather(static=True), node_size=2)
