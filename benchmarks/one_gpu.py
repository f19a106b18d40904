"""Check on one GPU that static forms deliver what they deliver on the CPU, and that exchanges and ``wrap`` run on NCCL.

A simulation of several workers is compared bit for bit with the same on the CPU. Gradients are integers, so that sums
do not depend on their order. In an ordinary step, the host waits at most twice for each worker.

The process group has one worker, to which methods send no messages: over NCCL go the comparison of settings, the set-up
and the confirmation. The rest needs two GPUs and multi_gpu.py.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import tritoncomm
from torch import nn
from tritoncomm import RandomBlock, SimulatedWorld, SparDL, TopkAllgather
from tritoncomm.algorithms.base import StaticRecipe
from tritoncomm.planning import planner
from tritoncomm.step import options

import baselines  # noqa: F401 - registers them
import multi_gpu
from selection import machine

WORKERS, NUMEL, STEPS, DENSITY = 4, 2000, 4, 0.05
# Their thresholds follow from sums of floats, whose order differs between a GPU and the CPU.
FITTED = ("gaussiank", "sidco")
METHODS = {name: planner.at(name, DENSITY) for name in tritoncomm.algorithms() if name not in FITTED}
RECIPES = {
    name: replace(recipe, static=True)
    for name, recipe in METHODS.items()
    if isinstance(recipe, StaticRecipe) and recipe.can_be_static()
}
RECIPES |= {
    "topk_allgather 4bit": TopkAllgather(density=DENSITY, static=True, values="4bit"),
    "random_block 4bit": RandomBlock(density=DENSITY, static=True, values="4bit", reduced_lr=True),
    "spardl 2 teams": SparDL(density=DENSITY, static=True, teams=2),
}


def gradients(step: int) -> torch.Tensor:
    """Return integers ``[WORKERS, NUMEL]`` of different magnitude within a row."""
    generator = torch.Generator().manual_seed(step)
    rows = [torch.randperm(NUMEL, generator=generator) + 1 for _ in range(WORKERS)]
    signs = 2 * torch.randint(2, (WORKERS, NUMEL), generator=generator) - 1
    return (torch.stack(rows) * signs).float()


def compare(recipe: tritoncomm.Recipe, device: torch.device) -> dict[str, float]:
    """Raise if means or residuals differ between ``device`` and the CPU, or if the host waits too often for a GPU.

    Return the entries of the last mean, and how often the host waits for each worker.
    """
    own, expected = (SimulatedWorld(recipe, WORKERS, NUMEL, device=each) for each in (device, torch.device("cpu")))
    entries, waits = 0, []
    for step in range(STEPS):
        assert own.workers[0].algorithm.is_static, f"step {step} does not use the static form"
        given = gradients(step)
        on_device = given.to(device)
        with multi_gpu.counted_synchronizations(device) as caught:
            delivered = own.step(on_device)
        waits.append(len(caught) / WORKERS)
        means = zip(delivered, expected.step(given), strict=True)
        for rank, (found, wanted) in enumerate((a.trimmed(), b.trimmed()) for a, b in means):
            where = f"step {step}, rank {rank}"
            assert found.indices.tolist() == wanted.indices.tolist(), f"{where}: other indices than on the CPU"
            assert multi_gpu.bits([found.values]) == multi_gpu.bits([wanted.values]), f"{where}: other values"
            entries = wanted.indices.numel()
        residuals = (multi_gpu.bits(worker.residual for worker in world.workers) for world in (own, expected))
        assert next(residuals) == next(residuals), f"step {step}: other residuals than on the CPU"
    fewest = min(waits)  # steps that determine thresholds or partitions again have more
    assert fewest <= multi_gpu.MOST_WAITS, f"{fewest} host synchronizations of each worker in every step"
    return {"entries": entries, "synchronizations": fewest}


def wrapped(device: torch.device) -> dict[str, Any]:
    """A wrapped optimizer trains in a process group of one worker. It selects and delivers as several would do."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 1)).to(device)
    options.SINGLE_WORKER_SELECTS = True  # one worker exchanges nothing otherwise
    optimizer = tritoncomm.wrap(torch.optim.AdamW(model.parameters()), density=DENSITY, warmup_steps=2, dense_below=0)
    before = multi_gpu.bits(model.parameters())
    multi_gpu.train(model, optimizer, device, steps=6)
    assert multi_gpu.bits(model.parameters()) != before, "no parameter has changed"
    assert all(bool(parameter.isfinite().all()) for parameter in model.parameters()), "a parameter is not finite"
    return {name: value for name, value in optimizer.metrics().items() if name.startswith("seconds")}


def on_process_group(device: torch.device) -> dict[str, Any]:
    """Exchange and train in a process group of one worker, over NCCL on a GPU."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{probe.getsockname()[1]}"
    os.environ.setdefault(multi_gpu.HANDLING, "0")
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=address, rank=0, world_size=1)
    try:
        return {"backend": backend, "exchanges": multi_gpu.exchanges(device), "wrapped": wrapped(device)}
    finally:
        dist.destroy_process_group()


def main() -> int:
    """Parse the arguments, run, and return 1 if a check has failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="file to write the results to")
    parser.add_argument("--smoke", action="store_true", help="on the CPU, over gloo")
    arguments = parser.parse_args()
    device = torch.device("cpu") if arguments.smoke else torch.device("cuda", 0)
    found: dict[str, Any] = {}
    problems: dict[str, str] = {}
    checks = {name: (compare, recipe, device) for name, recipe in RECIPES.items()}
    for name, (check, *given) in (checks | {"process group": (on_process_group, device)}).items():
        try:
            found[name] = check(*given)
        except Exception as error:
            problems[name] = f"{type(error).__name__}: {error}"
        print(f"{name}: {problems.get(name, 'passed')}", flush=True)
    if arguments.json:
        content = {"machine": machine(device.type), "problems": problems, "checks": found}
        arguments.json.write_text(json.dumps(content, indent=1) + "\n")
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())
