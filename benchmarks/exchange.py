"""Bytes and milliseconds of one exchange of every method, between local processes.

Every method runs in the same processes on the same gradients, with plain messages, with packed ones, and with values of
4 bits. The table has, per step:

* ``MB``: what the busiest rank sent or received, whichever is more. ``held`` says whether no step exceeded its bound,
  the forecast.
* ``words/k``: the same in words of 4 bytes over the number of entries to deliver.
* ``total ms``: time from the gradient to the dense form of the mean, the median over the steps of the mean over ranks.
* ``cpu ms``: CPU time of the thread that runs the exchange, without waiting, and without the threads of gloo, in the
  last third of the steps. ``copies`` is the same as a multiple of a plain copy of the vector by the same thread, just
  before.
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
import tritoncomm
from tritoncomm.algorithms import field_names
from tritoncomm.algorithms.staged import Staged
from tritoncomm.demo.local_workers import Send, run_workers
from tritoncomm.planning import planner
from tritoncomm.planning.synthetic_gradients import LayeredGradients
from tritoncomm.scheduler.process_group import ProcessGroupScheduler
from tritoncomm.step.exchange.feedback import ErrorFeedback

import baselines  # noqa: F401 - registers them
import script

COLUMNS = 1000
SCALED = 22  # steps at least with selection by update: it scales from step 20 on
# Label and fields of each format. A method has those whose fields it has.
FORMATS: dict[str, dict[str, Any]] = {
    "plain": {"packed": False},
    "packed": {"packed": True},
    "4bit": {"values": "4bit"},
}


@dataclass(frozen=True)
class Row:
    """One method at one density. Lists have one entry per step.

    ``bytes`` and ``predicted`` are those of the busiest rank, and their upper bound. Milliseconds are ``total`` of the
    step, and of CPU time ``cpu`` of the exchange and ``copy`` of a plain copy of the vector.
    """

    name: str
    density: float
    k: int
    bytes: list[int]
    predicted: list[int]
    messages: list[int]
    reevaluated: list[bool]
    total: list[float]
    cpu: list[float]
    copy: list[float]


def methods(names: list[str], density: float, numel: int, formats: list[str]) -> list[tuple[str, tritoncomm.Recipe]]:
    """Return label and recipe of each method to compare. For selection by update, the vector is treated as a matrix."""
    found: list[tuple[str, tritoncomm.Recipe]] = []
    for name in names:
        if name != "dense":
            found += in_formats(name, planner.at(name, density), formats)
    shapes = ((numel // COLUMNS, COLUMNS), (numel % COLUMNS,))
    if "oktopk" in names:
        found.append(("oktopk strict_volume", tritoncomm.OkTopk(density=density, strict_volume=True)))
    for name in names:
        if name in ("oktopk", "topk_allgather"):
            inner = planner.at(name, density)
            found.append((f"{name} preconditioned", Staged(recipe=inner, shapes=shapes)))
    return found


def in_formats(name: str, recipe: tritoncomm.Recipe, formats: list[str]) -> list[tuple[str, tritoncomm.Recipe]]:
    """Return label and recipe of a method in each of ``formats``. Methods without indices are plain or have 4 bits."""
    known = set(field_names(name))
    found = [] if "packed" in known else [(name, recipe)]
    chosen = [label for label in formats if set(FORMATS[label]) <= known]
    found += [(name if label == "plain" else f"{name} {label}", replace(recipe, **FORMATS[label])) for label in chosen]
    return found


def work(
    rank: int, world_size: int, send: Send, numel: int, names: list[str], densities: list[float], formats: list[str],
    steps: int,
) -> None:  # fmt: skip
    """Run every method in turn in one worker. Rank 0 sends the rows."""
    gradients = LayeredGradients(numel, rank)
    table = [("dense", 1.0, tritoncomm.Dense())]
    table += [
        (name, density, recipe) for density in densities for name, recipe in methods(names, density, numel, formats)
    ]
    for name, density, recipe in table:
        taken = max(steps, SCALED) if isinstance(recipe, Staged) else steps
        row = measure(name, density, recipe, gradients, rank, world_size, taken)
        if rank == 0:
            send(row)


def measure(
    name: str, density: float, recipe: tritoncomm.Recipe, gradients: LayeredGradients,
    rank: int, world_size: int, steps: int,
) -> Row:  # fmt: skip
    """Run ``steps`` exchanges of one method and return its row, the same on all ranks."""
    numel = gradients.noise.numel()
    scheduler, feedback = ProcessGroupScheduler(), ErrorFeedback(recipe.build(numel))
    algorithm = feedback.algorithm
    flat, gradient = torch.empty(numel), torch.empty(numel)
    measured = []
    for step in range(steps):
        forecast = algorithm.predicted_traffic(world_size)
        predicted = max(forecast.sent.bytes, forecast.received.bytes)
        # In the same memory each time, as gradients are. Memory that was new would be freed in the exchange.
        gradient.copy_(gradients.at(step))
        dist.barrier()  # all ranks copy at the same time, as they exchange, and share the memory's bandwidth
        copy = copy_seconds(gradient, flat)
        dist.barrier()
        started, begun = time.perf_counter(), time.thread_time()
        mean = scheduler.run(feedback.begin(gradient, rank, world_size))
        feedback.commit()
        worked = time.thread_time()
        mean.write_to(flat)
        seconds = time.perf_counter() - started
        used = max(scheduler.meter.sent.bytes, scheduler.meter.received.bytes)
        counts = used, predicted, scheduler.meter.sent.messages, algorithm.report.get("reevaluated", 0.0)
        measured.append([*counts, seconds, worked - begun, copy])
    everybody = torch.empty(world_size, steps, len(measured[0]), dtype=torch.float64)
    dist.all_gather(list(everybody), torch.tensor(measured, dtype=torch.float64))
    busiest, milliseconds = everybody.amax(0), 1e3 * everybody.mean(0)
    return Row(
        name, density, max(1, int(numel * density)),
        *(busiest[:, column].long().tolist() for column in range(3)),
        (busiest[:, 3] > 0).tolist(),
        *(milliseconds[:, column].tolist() for column in (4, 5, 6)),
    )  # fmt: skip


def copy_seconds(source: torch.Tensor, target: torch.Tensor) -> float:
    """Return the seconds of CPU time that a plain copy takes."""
    started = time.thread_time()
    target.copy_(source)
    return time.thread_time() - started


def figures(row: Row, dense_ms: float) -> dict[str, Any]:
    """Return the means and medians of one method. ``dense_ms`` are the milliseconds of a dense exchange."""
    late = range(2 * len(row.bytes) // 3, len(row.bytes))
    late = [step for step in late if not row.reevaluated[step]] or list(late)
    cpu, copy = (statistics.median(part[step] for step in late) for part in (row.cpu, row.copy))
    total = statistics.median(row.total)
    return {
        "method": row.name, "density": row.density, "k": row.k, "steps": len(row.bytes),
        "bytes_mean": statistics.fmean(row.bytes), "words_per_k_mean": statistics.fmean(row.bytes) / 4 / row.k,
        "within_prediction": all(u <= p for u, p in zip(row.bytes, row.predicted, strict=True)),
        "messages_mean": statistics.fmean(row.messages),
        "total_ms": total, "ratio_to_dense": total / dense_ms, "cpu_ms": cpu, "copy_ms": copy, "copies": cpu / copy,
    }  # fmt: skip


def cells(row: dict[str, Any]) -> dict[str, str]:
    """Return the texts of one line of the table, by the head of their column."""
    return {
        "method": row["method"], "density": f"{row['density']:.2%}", "MB": f"{row['bytes_mean'] / 1e6:.3f}",
        "held": "yes" if row["within_prediction"] else "NO", "words/k": f"{row['words_per_k_mean']:.2f}",
        "msgs": f"{row['messages_mean']:.0f}", "total ms": f"{row['total_ms']:.1f}",
        "x dense": f"{row['ratio_to_dense']:.2f}", "cpu ms": f"{row['cpu_ms']:.1f}", "copies": f"{row['copies']:.2f}",
    }  # fmt: skip


def table(rows: list[dict[str, Any]]) -> str:
    """Return the figures of all methods as text."""
    lines = [cells(row) for row in rows]
    widths = {head: max(len(head), *(len(line[head]) for line in lines)) for head in lines[0]}
    every = [dict(zip(widths, widths, strict=True)), *lines]
    return "\n".join("  ".join(line[head].rjust(width) for head, width in widths.items()) for line in every)


def arguments() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = script.parser(__doc__)
    parser.add_argument("--numel", type=float, default=25e6)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--density", type=float, nargs="+", default=[0.01, 0.001])
    parser.add_argument("--algo", nargs="+", default=tritoncomm.algorithms(), choices=tritoncomm.algorithms())
    parser.add_argument("--formats", nargs="+", default=list(FORMATS), choices=list(FORMATS))
    parser.add_argument("--steps", type=int, default=40)
    return parser


def main() -> None:
    """Measure, print the table, and write the requested file."""
    options = arguments().parse_args()
    if options.smoke:
        options.numel, options.workers, options.density, options.steps = 1e5, 2, [0.01], 4
    numel, workers = int(options.numel), options.workers
    print(f"{numel} fp32 values, {workers} gloo workers, {options.steps} steps")
    rows: list[Row] = []
    settings = (numel, options.algo, options.density, options.formats, options.steps)
    run_workers(work, workers, *settings, listen=rows.append)
    found = [figures(row, statistics.median(rows[0].total)) for row in rows]  # the first is dense
    print(table(found))
    used = {"numel": numel, "workers": workers, "steps": options.steps}
    script.write(options.json, {"machine": script.machine(), "settings": used, "exchange": found})


if __name__ == "__main__":
    main()
