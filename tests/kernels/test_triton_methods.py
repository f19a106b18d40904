"""Whole exchange methods give the same results on kernels and on references."""

from __future__ import annotations

import pytest
import torch
from kernel_cases import DEVICES, EXECUTED, bits, kernels_from, routes
from tritoncomm import ExDyna, OkTopk, RandomBlock, Recipe, SimulatedWorld, SparDL, TopkAllgather

from depth import DEEP
from laws import gradients

pytestmark = pytest.mark.skipif(EXECUTED and not DEEP, reason="tests/ptx/test_ptx_methods.py has one of each")
# Recipe, workers and steps. Ok-Topk re-evaluates thresholds in its first three steps.
METHODS = {
    "oktopk": (OkTopk(density=0.05, repartition_every=3), 3, 5),
    "oktopk alone": (OkTopk(density=0.05), 1, 5),
    "oktopk strict": (OkTopk(density=0.05, strict_volume=True), 3, 5),
    "topk_allgather": (TopkAllgather(density=0.05), 3, 2),
    "spardl static": (SparDL(density=0.05, static=True), 3, 2),
    "spardl 4 teams": (SparDL(density=0.05, static=True, teams=4), 4, 2),
    "spardl bruck": (SparDL(density=0.05, static=True, teams=2, sag="bruck", residuals="partial"), 4, 2),
    "exdyna static": (ExDyna(density=0.05, static=True), 3, 2),
    "oktopk static": (OkTopk(density=0.05, static=True, repartition_every=3), 3, 4),
    "oktopk 4bit": (OkTopk(density=0.05, static=True, values="4bit", global_cap=2.0, reevaluate_every=64), 3, 4),
    "topk_allgather 4bit": (TopkAllgather(density=0.05, static=True, values="4bit"), 3, 2),
    "random_block 4bit": (RandomBlock(density=0.2, static=True, values="4bit", reduced_lr=True, alignment=4), 3, 2),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("recipe", "world_size", "steps"), METHODS.values(), ids=METHODS)
def test_same(recipe: Recipe, world_size: int, steps: int, device: str) -> None:
    """Means, residuals and traffic have the same bits with kernels and with references."""
    numel, seen = 150 if getattr(recipe, "static", False) is True else 700, []
    for choice, where in routes(device):
        generator, world = torch.Generator().manual_seed(0), SimulatedWorld(recipe, world_size, numel, device=where)
        record: list[object] = []
        with kernels_from(choice):
            for family in ("random", "one-region", "random", "random", "ties")[:steps]:
                means = world.step(gradients(family, world_size, numel, generator, exact=False).to(where))
                record += [[bits(mean.indices), bits(mean.values)] for mean in means]
                record.append(bits(world.residuals))
                if device == "cpu":  # a GPU sends other messages than a CPU
                    record.append([str(t) for t in world.traffic])
        seen.append(record)
    assert seen[0] == seen[1]
