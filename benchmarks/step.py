"""Milliseconds of one optimizer step: the staleness-aware step, and a local step of ``wrap``, beside bare AdamW.

Every contender has a model of its own, and they take turns, step by step. Each therefore finds the caches filled with
other data, as after a backward pass. Ratios are to the faster bare AdamW, of minima, which depend least on other jobs.
A local step exchanges nothing: beside bare AdamW it shows what a step between two exchanges of updates costs.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import tritoncomm
from torch import nn
from tritoncomm.demo.model import ByteGPT, Shape
from tritoncomm.primitives.sparse_vector import SparseVector
from tritoncomm.step.exchange.feedback import Ages
from tritoncomm.step.exchange.layout import BucketLayout, Delivered
from tritoncomm.step.rules.adam import StalenessAwareAdam
from tritoncomm.step.settings import DENSE_BELOW

import script

WARM_UP = 20  # steps that are not counted: root mean squares are computed in each of them
DELIVERIES = 8  # different sets of delivered coordinates, used in turn


def demo_model() -> list[nn.Parameter]:
    """Return the parameters of the demo's model, with gradients."""
    return with_gradients(list(ByteGPT(Shape()).parameters()))


def equal_tensors(number: int, numel: int) -> list[nn.Parameter]:
    """Return ``number`` matrices of ``numel`` values each, with gradients."""
    return with_gradients([nn.Parameter(0.02 * torch.randn(numel // 1000, 1000)) for _ in range(number)])


def with_gradients(parameters: list[nn.Parameter]) -> list[nn.Parameter]:
    """Give every parameter a gradient and return the parameters."""
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    return parameters


def delivery(layout: BucketLayout, density: float) -> SparseVector:
    """Return the gradients of random coordinates of the large tensors, and of all that ``wrap`` sends dense."""
    found = []
    for parameter, start in zip(layout.parameters, layout.bounds, strict=False):
        numel = parameter.numel()
        is_small = parameter.dim() <= 1 or numel < DENSE_BELOW
        count = numel if is_small else max(1, int(density * numel))
        found.append(torch.randperm(numel)[:count].sort().values + start)
    indices = torch.cat(found)
    flat = torch.cat([parameter.grad.reshape(-1) for parameter in layout.parameters])
    return SparseVector(indices.int(), flat[indices], layout.numel)


def local_step(parameters: list[nn.Parameter], *, fused: bool) -> Callable[[], object]:
    """Return the step of ``wrap`` between two exchanges of updates."""
    return tritoncomm.wrap(torch.optim.AdamW(parameters, fused=fused), local_steps=1 << 30).step


def contenders(model: Callable[[], list[nn.Parameter]], density: float) -> dict[str, Callable[[], float]]:
    """Return functions that take one step each and return its seconds."""

    def timed(step: Callable[[], object]) -> Callable[[], float]:
        def run() -> float:
            start = time.perf_counter()
            step()
            return time.perf_counter() - start

        return run

    deliveries = [delivery(BucketLayout(model()), density) for _ in range(DELIVERIES)]
    taken = (number % DELIVERIES for number in itertools.count())

    def aware_step() -> Callable[[], None]:
        parameters = model()
        aware, layout = StalenessAwareAdam(torch.optim.AdamW(parameters), tritoncomm.Late()), BucketLayout(parameters)
        ages = Ages(layout.parameters, layout.bounds)

        def step() -> None:
            ages.steps += 1
            ages.begin()
            aware.step(Delivered(deliveries[next(taken)], layout, ages))

        return step

    return {
        "AdamW": timed(torch.optim.AdamW(model()).step),
        "AdamW, fused": timed(torch.optim.AdamW(model(), fused=True).step),
        "staleness-aware": timed(aware_step()),
        "wrap, local step": timed(local_step(model(), fused=False)),
        "wrap, local step, fused": timed(local_step(model(), fused=True)),
    }


def measure(case: str, runs: dict[str, Callable[[], float]], warm_up: int, repetitions: int) -> list[dict[str, Any]]:
    """Return a row per contender."""
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for repetition in range(warm_up + repetitions):
        for name, run in runs.items():
            taken = run()
            if repetition >= warm_up:
                seconds[name].append(taken)
    faster = min(min(seconds[name]) for name in runs if name.startswith("AdamW"))
    return [
        {
            "case": case,
            "step": name,
            "median_ms": statistics.median(taken) * 1e3,
            "min_ms": min(taken) * 1e3,
            "mean_ms": statistics.fmean(taken) * 1e3,
            "ratio": min(taken) / faster,
        }
        for name, taken in seconds.items()
    ]


def arguments() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = script.parser(__doc__)
    parser.add_argument("--numel", type=float, default=25e6, help="values of the larger model, in 100 tensors")
    parser.add_argument("--density", type=float, default=0.01)
    parser.add_argument("--repetitions", type=int, default=100, help="of the demo's model; a third of the larger one")
    return parser


def main() -> None:
    """Measure, print the table, and write the requested file."""
    options = arguments().parse_args()
    if options.smoke:
        options.numel, options.repetitions = 4e5, 1
    torch.set_num_threads(1)
    torch.manual_seed(0)
    each = int(options.numel) // 100
    cases = {
        "demo, 53 tensors": (demo_model, options.repetitions),
        f"{options.numel / 1e6:g} million, 100 tensors": (
            lambda: equal_tensors(100, each),
            max(1, options.repetitions // 3),
        ),
    }
    print(f"one thread, density {options.density:.2%}")
    print(f"{'case':28}{'step':22}{'median ms':>10}{'min':>9}{'mean':>9}{'ratio':>7}")
    rows: list[dict[str, Any]] = []
    for case, (model, repetitions) in cases.items():
        rows += measure(case, contenders(model, options.density), 1 if options.smoke else WARM_UP, repetitions)
    for row in rows:
        numbers = f"{row['median_ms']:10.3f}{row['min_ms']:9.3f}{row['mean_ms']:9.3f}{row['ratio']:7.2f}"
        print(f"{row['case']:28}{row['step']:22}{numbers}")
    settings = {"numel": int(options.numel), "density": options.density, "threads": 1}
    script.write(options.json, {"machine": script.machine(), "settings": settings, "step": rows})


if __name__ == "__main__":
    main()
