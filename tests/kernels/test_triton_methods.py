"""Whole exchange methods give the same results on kernels and on references."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from kernel_cases import EXECUTED, bits, kernels_from, kernels_only, routes
from tritoncomm import ExDyna, OkTopk, Quantized, RandomBlock, Recipe, SimulatedWorld, SparDL, TopkAllgather

from depth import DEEP
from laws import gradients
from ptx.launch import EXECUTOR
from ptx.machine import Order


class Method(NamedTuple):
    """A recipe, workers and steps, and for the executor kernels that must be launched, or its work is left to torch."""

    recipe: Recipe
    workers: int
    steps: int
    kernels: frozenset[str] = frozenset()


# Ok-Topk re-evaluates thresholds in its first three steps.
METHODS = {
    "oktopk": Method(OkTopk(density=0.05, repartition_every=3), 3, 5),
    "oktopk alone": Method(OkTopk(density=0.05), 1, 5),
    "oktopk strict": Method(OkTopk(density=0.05, strict_volume=True), 3, 5),
    "topk_allgather": Method(TopkAllgather(density=0.05), 3, 2),
    "spardl static": Method(SparDL(density=0.05, static=True), 3, 2),
    "spardl 2 teams": Method(
        SparDL(density=0.05, static=True, teams=2), 4, 2, frozenset({"emit_kernel", "add_rows_kernel"})
    ),
    "spardl 4 teams": Method(SparDL(density=0.05, static=True, teams=4), 4, 2),
    "spardl bruck": Method(SparDL(density=0.05, static=True, teams=2, sag="bruck", residuals="partial"), 4, 2),
    "exdyna static": Method(
        ExDyna(density=0.05, static=True), 4, 2, frozenset({"mark_kernel", "expand_kernel", "rebalance_kernel"})
    ),
    "oktopk static": Method(OkTopk(density=0.05, static=True, repartition_every=3), 3, 4),
    "oktopk 4bit": Method(OkTopk(density=0.05, static=True, values="4bit", global_cap=2.0, reevaluate_every=64), 3, 4),
    "oktopk 4bit, new regions": Method(
        OkTopk(density=0.05, static=True, repartition_every=1, values="4bit"), 3, 2,
        frozenset({"mark_kernel", "emit_kernel", "planes_rows_kernel", "join_sections_kernel", "add_rows_kernel"}),
    ),
    "topk_allgather 4bit": Method(TopkAllgather(density=0.05, static=True, values="4bit"), 3, 2),
    "random_block 4bit": Method(
        RandomBlock(density=0.2, static=True, values="4bit", reduced_lr=True, alignment=4), 3, 2
    ),
    "quantized 4bit": Method(
        Quantized(static=True, values="4bit"), 4, 2,
        frozenset({"round_parts_kernel", "round_mean_kernel", "read_parts_kernel"}),
    ),
}  # fmt: skip


@kernels_only
@pytest.mark.parametrize("name", [name for name, it in METHODS.items() if DEEP or it.kernels or not EXECUTED])
def test_same(name: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Means, residuals and traffic have the same bits with kernels and with references.

    In the executor, the order of warps and programs is another one in each step.
    """
    recipe, workers, steps, kernels = METHODS[name]
    numel, seen = 150 if getattr(recipe, "static", False) is True else 700, []
    EXECUTOR.launched.clear()
    for choice, where in routes(device):
        generator, world = torch.Generator().manual_seed(0), SimulatedWorld(recipe, workers, numel, device=where)
        record: list[object] = []
        with kernels_from(choice):
            for step, family in enumerate(("random", "one-region", "random", "random", "ties")[:steps]):
                monkeypatch.setattr(EXECUTOR, "orders", (Order(step, 1 + step),))
                means = world.step(gradients(family, workers, numel, generator, exact=False).to(where))
                record += [[bits(mean.indices), bits(mean.values)] for mean in means]
                record.append(bits(world.residuals))
                if device == "cpu":  # a GPU sends other messages than a CPU
                    record.append([str(t) for t in world.traffic])
        seen.append(record)
    assert seen[0] == seen[1]
    assert not EXECUTED or kernels <= EXECUTOR.launched.keys()
