"""Does clipping harm the sparse run? A loop as nanoGPT's, on real gloo processes, for each way to clip.

AdamW with betas of 0.9 and 0.95 and a weight decay of 0.1 on matrices trains the demo's model. A step averages the
gradients of two micro-batches, and clips them to a norm of 1. The learning rate rises to 1e-3 in 30 steps and follows a
cosine to 1e-4. ``dense`` is ``DistributedDataParallel`` with ``torch.nn.utils.clip_grad_norm_``. The others are
``wrap`` with its defaults. ``delivered`` and ``gradient`` are values of ``clip_by``, behind DDP in ``ddp-delivered``
and ``ddp-gradient``. ``none`` does not clip, and ``dense-none`` is its dense run.

The loss is the validation loss at the end, in nats per byte.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import tritoncomm
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from tritoncomm.demo.model import ByteGPT, Shape
from tritoncomm.demo.text import batch, standard_library, validation_batches
from tritoncomm.scheduler.local_workers import Send, run_workers

WORKERS, MICRO_BATCHES, ROWS, CONTEXT, LIMIT = 4, 2, 8, 64, 1.0
RATE, LAST_RATE, RISE = 1e-3, 1e-4, 30
WAYS = ("dense", "delivered", "gradient", "ddp-delivered", "ddp-gradient", "dense-none", "none")


@dataclass(frozen=True)
class Outcome:
    """One run. ``norms`` are deciles 1, 5 and 9 of the norms before clipping, from a fifteenth to a half of the run."""

    way: str
    seed: int
    steps: int
    loss: float
    norms: list[float]
    seconds: float


def rate_at(step: int, steps: int) -> float:
    """Return the learning rate."""
    if step < RISE:
        return RATE * (step + 1) / RISE
    return LAST_RATE + 0.5 * (1 + math.cos(math.pi * (step - RISE) / (steps - RISE))) * (RATE - LAST_RATE)


def built(way: str, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return the model and its optimizer."""
    torch.manual_seed(seed)
    model = ByteGPT(Shape(context=CONTEXT))
    matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    others = [parameter for parameter in model.parameters() if parameter.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=RATE, betas=(0.9, 0.95))
    if way.startswith("dense"):
        return DistributedDataParallel(model), optimizer
    ddp = DistributedDataParallel(model) if way.startswith("ddp") else None
    limits = {"max_grad_norm": LIMIT, "clip_by": way.removeprefix("ddp-")} if way != "none" else {}
    return ddp or model, tritoncomm.wrap(optimizer, model=ddp, **limits)


def train(rank: int, world_size: int, send: Send, way: str, seed: int, steps: int) -> None:
    """Train once, as one of the workers."""
    started, text = time.time(), standard_library()
    model, optimizer = built(way, seed)
    norms = []
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = rate_at(step, steps)
        for micro in range(MICRO_BATCHES):
            if isinstance(model, DistributedDataParallel):
                model.require_backward_grad_sync = micro == MICRO_BATCHES - 1
            rows = batch(text.train, ROWS, CONTEXT, seed, step * MICRO_BATCHES + micro, rank)
            (model(rows) / MICRO_BATCHES).backward()
        if way.startswith("dense"):
            limit = math.inf if way == "dense-none" else LIMIT
            norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), limit)))
        optimizer.step()
        if isinstance(optimizer, tritoncomm.SparseOptimizer) and way != "none":
            norms.append(optimizer.metrics()["grad_norm"])
        optimizer.zero_grad(set_to_none=True)
    with torch.no_grad():
        losses = [model(rows).item() for rows in validation_batches(text.validation, 32, CONTEXT, 32)[rank::world_size]]
    total = torch.tensor([sum(losses), len(losses)], dtype=torch.float64)
    dist.all_reduce(total)
    if rank == 0:
        early = torch.tensor(norms[steps // 15 : steps // 2 + 1])
        deciles = [round(float(early.quantile(share)), 3) for share in (0.1, 0.5, 0.9)] if norms else []
        send(Outcome(way, seed, steps, float(total[0] / total[1]), deciles, round(time.time() - started, 1)))


def table(outcomes: list[Outcome]) -> str:
    """Return the losses, and how far each is from the dense run with the same clipping."""
    dense = {(each.way, each.seed): each.loss for each in outcomes if each.way.startswith("dense")}
    lines = ["| seed | clipping | loss | against dense | norms |", "|---|---|---|---|---|"]
    for each in sorted(outcomes, key=lambda each: (each.seed, WAYS.index(each.way))):
        base = dense.get(("dense-none" if each.way.endswith("none") else "dense", each.seed))
        gap = "" if base is None or each.way.startswith("dense") else f"{100 * (each.loss / base - 1):+.1f} %"
        lines.append(f"| {each.seed} | {each.way} | {each.loss:.3f} | {gap} | {', '.join(map(str, each.norms))} |")
    return "\n".join(lines)


def main() -> None:
    """Train what is missing, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clip", nargs="+", default=list(WAYS), choices=WAYS)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--json", type=Path, help="read finished runs from this file, and add new ones")
    parser.add_argument("--smoke", action="store_true", help="a few steps: only checks that the script runs")
    options = parser.parse_args()
    if options.smoke:
        options.seeds, options.steps = [0], 2
    found: list[dict[str, Any]] = []
    if options.json and options.json.exists():
        found = json.loads(options.json.read_text())["runs"]
    outcomes = [Outcome(**row) for row in found]
    done = {(each.way, each.seed, each.steps) for each in outcomes}
    for seed in options.seeds:
        for way in options.clip:
            if (way, seed, options.steps) in done:
                continue
            run_workers(train, WORKERS, way, seed, options.steps, listen=outcomes.append)
            print(outcomes[-1], flush=True)
            if options.json:
                content = {"torch": torch.__version__, "runs": [asdict(each) for each in outcomes]}
                options.json.write_text(json.dumps(content, indent=1) + "\n")
    print(table(outcomes))


if __name__ == "__main__":
    main()
