"""Measure how far variants of the staleness-aware Adam step reduce the loss gap between sparse and dense training.

Trains the demo's byte-level GPT with four simulated workers: dense, with unmodified AdamW on sparse deliveries, and
with variants of the staleness-aware step. The table has one row per variant, with the validation loss of each seed and
the gap to the dense run of the same seed.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import tritoncomm
from tritoncomm.algorithms import at_density
from tritoncomm.demo.model import ByteGPT, Shape
from tritoncomm.demo.text import Text, batch, standard_library, validation_batches
from tritoncomm.step.adam import StalenessAwareAdam
from tritoncomm.step.flat import BucketLayout

WORKERS = 4
BETAS, WEIGHT_DECAY = (0.9, 0.95), 0.1


@dataclass(frozen=True)
class GrowingCatchUp(StalenessAwareAdam):
    """The staleness-aware step with a ``max_catch_up`` that grows as the square root of the step number."""

    def catch_up(self, steps: int) -> float:
        """Return the square root of ``steps``, at least 1."""
        return max(1.0, steps**0.5)


@dataclass(frozen=True)
class CorrectedAtFirst(StalenessAwareAdam):
    """The staleness-aware step with bias correction in the dense steps only."""

    dense_steps: int = 0

    def corrects(self, steps: int) -> bool:
        """Return True during the dense steps."""
        return steps <= self.dense_steps


Rule = Callable[[torch.optim.Optimizer, int], StalenessAwareAdam]  # (optimizer, number of dense steps) -> step
NO_LIMITS = {"max_sqrt_staleness": math.inf, "max_relative_update": math.inf}  # max_catch_up still limits
UNLIMITED = partial(StalenessAwareAdam, **NO_LIMITS)
BATCHES = 16  # of 64 held-out rows
VARIANTS: dict[str, Rule | None] = {
    "AdamW as is": None,
    "aware": lambda o, _: StalenessAwareAdam(o),  # the default
    "aware, 20, walk 3": lambda o, _: StalenessAwareAdam(o, max_relative_update=math.inf),
    "aware, 20, no bias correction": lambda o, _: UNLIMITED(o, 20, bias_correction=False),
    "aware, 20, corrected at first": lambda o, dense: CorrectedAtFirst(o, 20, **NO_LIMITS, dense_steps=dense),
    "aware, 20": lambda o, _: UNLIMITED(o, 20),
    "aware, 10": lambda o, _: UNLIMITED(o, 10),
    "aware, 50": lambda o, _: UNLIMITED(o, 50),
    "aware, 50, no bias correction": lambda o, _: UNLIMITED(o, 50, bias_correction=False),
    "aware, sqrt(step)": lambda o, _: GrowingCatchUp(o, **NO_LIMITS),
}


def train(
    recipe: tritoncomm.Recipe,
    rule: Rule | None,
    text: Text,
    *,
    steps: int,
    warmup: int,
    seed: int,
    rows: int,
    lr: float,
    lr_warmup: int,
    held_out: int,
) -> float:
    """Train once and return the loss of ``held_out`` batches, in nats per byte. ``rule`` None is unmodified AdamW."""
    torch.manual_seed(seed)
    model = ByteGPT(Shape())
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=BETAS, weight_decay=WEIGHT_DECAY)
    aware = rule(optimizer, warmup) if rule else None
    layout = BucketLayout(list(model.parameters()))
    world = tritoncomm.SimulatedWorld(recipe, WORKERS, layout.numel)
    gradients = torch.empty(WORKERS, layout.numel)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = lr * min(1.0, (step + 1) / max(1, lr_warmup))
        for rank in range(WORKERS):
            optimizer.zero_grad()
            model(batch(text.train, rows, model.shape.context, seed, step, rank)).backward()
            layout.read_gradients(gradients[rank])
        mean = world.step(gradients)[0]
        delivered = layout.split(mean)
        layout.scatter(delivered)
        if aware is None:
            optimizer.step()
        else:
            aware.step(layout.parameters, [entries.indices for entries in delivered])
    with torch.no_grad():
        batches = validation_batches(text.validation, 64, model.shape.context, held_out)
        return statistics.fmean(float(model(each)) for each in batches)


def write(options: argparse.Namespace, rows: list[dict[str, object]]) -> None:
    """Write the results as JSON, with settings and machine."""
    settings = {name: value for name, value in vars(options).items() if name not in ("json", "smoke")}
    machine = f"{platform.machine()}, torch {torch.__version__}, Python {platform.python_version()}"
    content = {"settings": settings | {"workers": WORKERS}, "machine": machine, "rows": rows}
    options.json.write_text(json.dumps(content, indent=1) + "\n")


def main() -> None:
    """Train all variants and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--warmup", type=int, default=6, help="dense steps at the start")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--lr-warmup", type=int, default=30, help="steps of linear learning-rate warm-up, in all runs")
    parser.add_argument("--rows", type=int, default=8, help="sequences per worker and step")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--density", type=float, nargs="+", default=[0.01])
    parser.add_argument("--algo", nargs="+", default=["oktopk"], choices=tritoncomm.algorithms())
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS), choices=list(VARIANTS))
    parser.add_argument("--json", type=Path, help="write the results to this file")
    parser.add_argument("--smoke", action="store_true", help="a few steps: only checks that the script runs")
    options = parser.parse_args()
    if options.smoke:
        options.steps, options.warmup, options.seeds, options.variants = 4, 1, [0], ["AdamW as is", "aware"]
        options.rows = 1
    warmup = options.warmup
    text = standard_library()
    rows: list[dict[str, object]] = []

    def measure(name: str, recipe: tritoncomm.Recipe, rule: Rule | None) -> list[float]:
        started = time.perf_counter()
        losses = [
            train(
                recipe,
                rule,
                text,
                steps=options.steps,
                warmup=warmup,
                seed=s,
                rows=options.rows,
                lr=options.lr,
                lr_warmup=options.lr_warmup,
                held_out=1 if options.smoke else BATCHES,
            )
            for s in options.seeds
        ]
        gaps = [loss / reference - 1 for loss, reference in zip(losses, dense or losses, strict=True)]
        print(
            f"{name:52}",
            "  ".join(f"{x:.3f} ({gap:+.1%})" for x, gap in zip(losses, gaps, strict=True)),
            f"  mean {statistics.fmean(gaps):+.1%}  [{time.perf_counter() - started:.0f} s]",
            flush=True,
        )
        rows.append({"name": name, "losses": losses, "gaps": gaps})
        return losses

    dense: list[float] = []
    print(f"{options.steps} steps, {warmup} of them dense, seeds {options.seeds}")
    dense = measure("dense", tritoncomm.Dense(), None)
    for algo in options.algo:
        for density in options.density:
            inner = at_density(algo, density)
            for name in options.variants:
                label = f"{algo} {density:.3%}: {name}"
                measure(label, tritoncomm.Warmup(recipe=inner, steps=warmup), VARIANTS[name])
    if options.json:
        write(options, rows)


if __name__ == "__main__":
    main()
