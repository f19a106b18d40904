"""Measure time and memory of a simulated step: Ok-Topk at density 1 %, on layered heavy-tailed gradients.

The time is wall-clock seconds. The first two steps are not counted, because they search thresholds and regions. The
memory is the increase of the peak memory of the process, in multiples of one fp32 vector per worker. It should be
linear in the number of workers times the vector length.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import platform
import resource
import statistics
import time
from pathlib import Path
from typing import Any

import torch
import tritoncomm
from tritoncomm.planning.synthetic_gradients import LayeredGradients

SIZES = [(64, 500_000), (64, 1_000_000), (256, 200_000), (1024, 200_000)]
LIMITS = {(64, 1_000_000): 5.0, (1024, 200_000): 60.0}  # seconds, on two cores
WARMUP = 2


def measure(workers: int, numel: int, steps: int) -> dict[str, Any]:
    """Simulate one size and return its row."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    world = tritoncomm.SimulatedWorld(tritoncomm.OkTopk(density=0.01), workers, numel)
    sources = [LayeredGradients(numel, rank) for rank in range(workers)]
    seconds = []
    for step in range(WARMUP + steps):
        gradients = torch.stack([source.at(step) for source in sources])
        started = time.perf_counter()
        world.step(gradients)
        seconds.append(time.perf_counter() - started)
    peak = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    return {
        "workers": workers,
        "numel": numel,
        "first": seconds[0],
        "median": statistics.median(seconds[WARMUP:]),
        "limit": LIMITS.get((workers, numel)),
        "gigabytes": peak / 1e9,
        "vectors": peak / (4 * workers * numel),
    }


def main() -> None:
    """Measure each size in a separate process, because the peak memory of a process never falls."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--steps", type=int, default=3, help="number of timed steps")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--smoke", action="store_true", help="small and quick: only checks that the script runs")
    options = parser.parse_args()
    sizes, options.steps = ([(4, 10_000)], 1) if options.smoke else (SIZES, options.steps)
    print(f"{'workers':>8}{'numel':>10}{'first s':>10}{'median s':>10}{'limit s':>9}{'GB':>8}{'vectors':>9}")
    rows = []
    for workers, numel in sizes:
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            row = pool.apply(measure, (workers, numel, options.steps))
        rows.append(row)
        limit = f"{row['limit']:9.0f}" if row["limit"] else " " * 9
        print(
            f"{workers:8}{numel:10}{row['first']:10.2f}{row['median']:10.2f}{limit}{row['gigabytes']:8.2f}{row['vectors']:9.1f}",
            flush=True,
        )
    if options.json:
        machine = f"{platform.machine()}, torch {torch.__version__}, Python {platform.python_version()}"
        content = {"machine": machine, "threads": torch.get_num_threads(), "rows": rows}
        options.json.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
