"""Static forms on a GPU deliver the bits that they deliver on the CPU, in simulations of several workers."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import tritoncomm
from tritoncomm import RandomBlock, SimulatedWorld, SparDL, TopkAllgather
from tritoncomm.algorithms.base import StaticRecipe
from tritoncomm.planning import planner

import baselines  # noqa: F401 - registers them

MOST_WAITS = 2  # of the host for the GPU, in an ordinary step with messages of a fixed length
# In simulation.
WORKERS, SIMULATED_NUMEL, DENSITY = 4, 2000, 0.05
FITTED = ("gaussiank", "sidco")  # their thresholds follow from sums of floats, whose order differs on a GPU
STEPS = 4
Figures = dict[str, Any]


def bits(tensors: Any) -> list[bytes]:
    """Return the bits of tensors, of any dtype of NumPy."""
    return [tensor.detach().cpu().contiguous().numpy().tobytes() for tensor in tensors]


@contextmanager
def counted_synchronizations(device: torch.device) -> Iterator[list[warnings.WarningMessage]]:
    """Collect the warnings of torch about host synchronizations. It does not see those inside of torch.distributed."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if device.type == "cuda":
            torch.cuda.set_sync_debug_mode("warn")
        try:
            yield caught
        finally:
            if device.type == "cuda":
                torch.cuda.set_sync_debug_mode("default")


def static_recipes() -> dict[str, tritoncomm.Recipe]:
    """Return the static forms that deliver the same bits on all devices."""
    methods = {name: planner.at(name, DENSITY) for name in tritoncomm.algorithms() if name not in FITTED}
    return {
        name: replace(recipe, static=True)
        for name, recipe in methods.items()
        if isinstance(recipe, StaticRecipe) and recipe.can_be_static()
    } | {
        "topk_allgather 4bit": TopkAllgather(density=DENSITY, static=True, values="4bit"),
        "random_block 4bit": RandomBlock(density=DENSITY, static=True, values="4bit", reduced_lr=True),
        "spardl 2 teams": SparDL(density=DENSITY, static=True, teams=2),
    }


def integers(step: int) -> torch.Tensor:
    """Return integers ``[WORKERS, SIMULATED_NUMEL]`` in fp32, of different magnitude within a row."""
    generator = torch.Generator().manual_seed(step)
    rows = [torch.randperm(SIMULATED_NUMEL, generator=generator) + 1 for _ in range(WORKERS)]
    signs = 2 * torch.randint(2, (WORKERS, SIMULATED_NUMEL), generator=generator) - 1
    return (torch.stack(rows) * signs).float()


def compare(recipe: tritoncomm.Recipe, device: torch.device) -> Figures:
    """Raise if means or residuals differ between ``device`` and the CPU, or if the host waits too often for a GPU.

    Return the entries of the last mean, and how often the host waits for each worker.
    """
    devices = device, torch.device("cpu")
    own, expected = (SimulatedWorld(recipe, WORKERS, SIMULATED_NUMEL, device=each) for each in devices)
    entries, waits = 0, []
    for step in range(STEPS):
        assert own.workers[0].algorithm.is_static, f"step {step} does not use the static form"
        given = integers(step)
        on_device = given.to(device)
        with counted_synchronizations(device) as caught:
            delivered = own.step(on_device)
        waits.append(len(caught) / WORKERS)
        means = zip(delivered, expected.step(given), strict=True)
        for rank, (found, wanted) in enumerate((a.trimmed(), b.trimmed()) for a, b in means):
            where = f"step {step}, rank {rank}"
            assert found.indices.tolist() == wanted.indices.tolist(), f"{where}: other indices than on the CPU"
            assert bits([found.values]) == bits([wanted.values]), f"{where}: other values"
            entries = wanted.indices.numel()
        residuals = (bits(worker.residual for worker in world.workers) for world in (own, expected))
        assert next(residuals) == next(residuals), f"step {step}: other residuals than on the CPU"
    fewest = min(waits)  # steps that determine thresholds or partitions again have more
    assert fewest <= MOST_WAITS, f"{fewest} host synchronizations of each worker in every step"
    return {"entries": entries, "synchronizations": fewest}
