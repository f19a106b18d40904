"""Whole exchange methods give the same results on kernels and on references."""

from __future__ import annotations

import pytest
import torch
import tritoncomm
from kernel_cases import DEVICES, EXECUTED, bits, kernels_from, routes
from tritoncomm import SimulatedWorld

from depth import DEEP
from laws import FAMILIES, gradients

pytestmark = pytest.mark.skipif(EXECUTED and not DEEP, reason="tests/ptx/test_ptx_methods.py has one of each")
RECIPES = [
    tritoncomm.OkTopk(density=0.05, repartition_every=3),
    tritoncomm.OkTopk(density=0.05, strict_volume=True),
    tritoncomm.TopkAllgather(density=0.05),
]


STATIC = [
    (tritoncomm.SparDL(density=0.05, static=True), 3),
    (tritoncomm.SparDL(density=0.05, static=True, teams=4), 4),
    (tritoncomm.SparDL(density=0.05, static=True, teams=2, sag="bruck", residuals="partial"), 4),
    (tritoncomm.ExDyna(density=0.05, static=True), 3),
    (tritoncomm.OkTopk(density=0.05, static=True, repartition_every=3), 3),
    (tritoncomm.OkTopk(density=0.05, static=True, values="4bit", global_cap=2.0, reevaluate_every=64), 3),
    (tritoncomm.TopkAllgather(density=0.05, static=True, values="4bit"), 3),
    (tritoncomm.RandomBlock(density=0.2, static=True, values="4bit", reduced_lr=True, alignment=4), 3),
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("recipe", "world_size"),
    STATIC,
    ids=[
        "spardl",
        "spardl 4 teams",
        "spardl bruck",
        "exdyna",
        "oktopk",
        "oktopk 4bit",
        "topk_allgather 4bit",
        "random_block 4bit",
    ],
)
def test_same_static_form(recipe: tritoncomm.Recipe, world_size: int, device: str) -> None:
    """Means and residuals of the static form have the same bits with kernels and with references."""
    seen = []
    for choice, where in routes(device):
        generator = torch.Generator().manual_seed(0)
        world = SimulatedWorld(recipe, world_size, 150, device=where)
        record: list[object] = []
        with kernels_from(choice):
            # Ok-Topk re-evaluates thresholds in its first three steps.
            for family in ("random", "one-region", "random", "random")[: 4 if recipe.name == "oktopk" else 2]:
                means = world.step(gradients(family, world_size, 150, generator, exact=False).to(where))
                record += [[bits(mean.indices), bits(mean.values)] for mean in means]
                record.append(bits(world.residuals))
        seen.append(record)
    assert seen[0] == seen[1]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("recipe", RECIPES, ids=["oktopk", "oktopk strict", "topk_allgather"])
@pytest.mark.parametrize("world_size", [1, 3])
def test_same_training(recipe: tritoncomm.Recipe, world_size: int, device: str) -> None:
    """Means, residuals and traffic of five steps have the same bits with kernels and with references."""
    seen = []
    for choice, where in routes(device):
        generator = torch.Generator().manual_seed(0)
        world = SimulatedWorld(recipe, world_size, 700, device=where)
        record: list[object] = []
        with kernels_from(choice):
            for family in (*FAMILIES[:4], FAMILIES[0]):
                means = world.step(gradients(family, world_size, 700, generator, exact=False).to(where))
                record += [[bits(mean.indices), bits(mean.values)] for mean in means]
                record.append(bits(world.residuals))
                if device == "cpu":  # a GPU sends other messages than a CPU
                    record.append([str(t) for t in world.traffic])
        seen.append(record)
    assert seen[0] == seen[1]
