"""Whole methods in static form, with every kernel in the executor, give the bits of the references."""

from __future__ import annotations

import pytest
import torch
import tritoncomm
from kernel_cases import EXECUTED, bits, kernels_from
from tritoncomm import SimulatedWorld

from laws import gradients
from ptx.launch import EXECUTOR
from ptx.machine import Order

pytestmark = pytest.mark.skipif(not EXECUTED, reason="needs TRITONCOMM_PTX=1: tox -e ptx")
WORKERS, NUMEL = 4, 150
# A recipe, its steps, and kernels that it must launch, so that its own work is not left to torch.
METHODS = {
    "oktopk": (
        tritoncomm.OkTopk(density=0.05, static=True, repartition_every=2, values="4bit"),
        3,
        {"mark_kernel", "emit_kernel", "planes_rows_kernel", "join_sections_kernel", "add_rows_kernel"},
    ),
    "spardl": (
        tritoncomm.SparDL(density=0.05, static=True, teams=2),
        2,
        {"emit_kernel", "add_rows_kernel"},
    ),
    "exdyna": (tritoncomm.ExDyna(density=0.05, static=True), 2, {"mark_kernel", "expand_kernel", "rebalance_kernel"}),
    "quantized": (
        tritoncomm.Quantized(static=True, values="4bit"),
        2,
        {"round_parts_kernel", "round_mean_kernel", "read_parts_kernel"},
    ),
}


@pytest.mark.parametrize("name", METHODS)
def test_same_bits(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Means and residuals of all workers are equal, in an order of warps and programs that is another in each step."""
    recipe, steps, needed = METHODS[name]
    EXECUTOR.launched.clear()
    seen = []
    for choice in ("auto", "triton"):
        generator = torch.Generator().manual_seed(0)
        world = SimulatedWorld(recipe, WORKERS, NUMEL)
        record: list[object] = []
        with kernels_from(choice):
            for step in range(steps):
                monkeypatch.setattr(EXECUTOR, "orders", (Order(step, 1 + step),))
                means = world.step(gradients("random", WORKERS, NUMEL, generator, exact=False))
                record += [[bits(mean.indices), bits(mean.values)] for mean in means]
                record.append(bits(world.residuals))
        seen.append(record)
    assert seen[0] == seen[1]
    assert needed <= EXECUTOR.launched.keys()
