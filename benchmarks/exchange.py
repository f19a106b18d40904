"""Bytes and milliseconds of one exchange of every method, between local processes.

Every method runs in the same processes on the same gradients, with plain messages, with packed ones, and with values of
4 bits. Bytes are those of the busiest rank, in the direction
with more bytes. Times are means over the ranks, and of these the median over the steps.

A message is a short one, sent or received: the CPU time of the scheduler, and of ``isend`` or ``irecv`` alone.

CPU time is that of the thread that runs the exchange: waiting for the network does not count, nor do the threads of
gloo. It is also given as a multiple of a plain copy of the vector by the same thread, just before.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import time
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import tritoncomm
from tritoncomm.algorithms import field_names
from tritoncomm.demo.local_workers import Send, run_workers
from tritoncomm.planning import planner
from tritoncomm.planning.synthetic_gradients import LayeredGradients
from tritoncomm.scheduler.process_group import ProcessGroupScheduler
from tritoncomm.scheduler.rounds import Pattern, Round
from tritoncomm.step.feedback import ErrorFeedback
from tritoncomm.step.stages import Staged

import baselines  # noqa: F401 - registers them

COLUMNS = 1000
MESSAGE_WORDS = 100
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

    ``ordinary`` is the forecast of an ordinary step, ``predicted`` the upper bound for this step.
    ``select``, ``exchange`` and ``apply`` are milliseconds: of the selection, of waiting for the network, and of the
    rest. ``cpu`` is milliseconds of CPU time without the dense form of the mean, ``copy`` those of a plain copy of the
    vector, and ``dense_form`` those of writing the dense form.
    """

    name: str
    density: float
    k: int
    bytes: list[int]
    ordinary: list[int]
    predicted: list[int]
    messages: list[int]
    reevaluated: list[bool]
    select: list[float]
    exchange: list[float]
    apply: list[float]
    delivered: list[int]
    cpu: list[float]
    copy: list[float]
    dense_form: list[float]


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
        forecast = algorithm.predicted_traffic(world_size, ordinary=True)
        ordinary = max(forecast.sent.bytes, forecast.received.bytes)
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
        written = time.thread_time()
        seconds = time.perf_counter() - started
        assert feedback.accumulator is not None
        select, waited = feedback.accumulator.seconds, scheduler.meter.waited
        used = max(scheduler.meter.sent.bytes, scheduler.meter.received.bytes)
        row = [used, ordinary, predicted, scheduler.meter.sent.messages, algorithm.report.get("reevaluated", 0.0)]
        cpu = [worked - begun, copy, written - worked]
        measured.append([*row, select, waited, seconds - select - waited, len(mean), *cpu])
    everybody = torch.empty(world_size, steps, len(measured[0]), dtype=torch.float64)
    dist.all_gather(list(everybody), torch.tensor(measured, dtype=torch.float64))
    busiest, mean_time = everybody.amax(0), everybody.mean(0)
    return Row(
        name, density, max(1, int(numel * density)),
        *(busiest[:, column].long().tolist() for column in range(4)),
        (busiest[:, 4] > 0).tolist(),
        *(mean_time[:, column].mul(1e3).tolist() for column in (5, 6, 7)),
        busiest[:, 8].long().tolist(),
        *(mean_time[:, column].mul(1e3).tolist() for column in (9, 10, 11)),
    )  # fmt: skip


def messages(rank: int, world_size: int, send: Send, count: int) -> None:
    """Send and receive ``count`` short messages around a ring. Rank 0 sends the CPU seconds that one of them takes.

    They are those of the scheduler, and those of ``isend`` and ``irecv`` alone. Of each, the least of five runs counts.
    """
    scheduler, content = ProcessGroupScheduler(), torch.ones(MESSAGE_WORDS, dtype=torch.int32)
    buffer, after, before = torch.empty_like(content), (rank + 1) % world_size, (rank - 1) % world_size

    def ring() -> Pattern[None]:
        for _ in range(count):
            yield Round("ring", {after: content}, {before: MESSAGE_WORDS})

    def bare() -> None:
        for _ in range(count):
            works = [dist.irecv(buffer, before), dist.isend(content, after)]
            for work in works:
                assert work is not None
                work.wait()

    seconds = []
    for run in (lambda: scheduler.run(ring()), bare):
        taken = []
        for _ in range(5):
            dist.barrier()
            started = time.thread_time()
            run()
            taken.append((time.thread_time() - started) / (2 * count))  # one is sent, and one received
        seconds.append(min(taken))
    if rank == 0:
        send(tuple(seconds))


def copy_seconds(source: torch.Tensor, target: torch.Tensor) -> float:
    """Return the seconds of CPU time that a plain copy takes."""
    started = time.thread_time()
    target.copy_(source)
    return time.thread_time() - started


def show(rows: list[Row], world_size: int) -> list[dict[str, Any]]:
    """Print the table and return its figures. ``rows[0]`` is dense."""
    dense = statistics.median(map(sum, zip(rows[0].select, rows[0].exchange, rows[0].apply, strict=True)))
    print(
        "per step on the busiest rank; words/k: mean; largest: largest step that reuses thresholds; "
        "re-eval: mean of the other steps; ordinary: forecast; held: no step exceeds the predicted bound; cpu ms: of "
        "the last third of the steps without re-evaluations; copies: the same in copies of the vector; + dense: to "
        "write the mean as a dense vector"
    )
    print(
        f"{'method':22}{'density':>8}{'MB':>8}{'ordinary':>9}{'predicted':>10}{'words/k':>9}{'largest':>9}{'re-eval':>9}{'6(P-1)/P':>9}"
        f"{'held':>6}{'msgs':>6}{'select':>8}{'exch.':>8}{'apply':>8}{'total ms':>9}{'vs dense':>9}"
        f"{'cpu ms':>8}{'copies':>8}{'+ dense':>8}"
    )
    results = []
    for row in rows:
        words = [used / 4 / row.k for used in row.bytes]
        reuse = [w for w, again in zip(words, row.reevaluated, strict=True) if not again]
        again = [w for w, again in zip(words, row.reevaluated, strict=True) if again]
        parts = [statistics.median(part) for part in (row.select, row.exchange, row.apply)]
        total = statistics.median(map(sum, zip(row.select, row.exchange, row.apply, strict=True)))
        late = range(2 * len(row.bytes) // 3, len(row.bytes))
        late = [step for step in late if not row.reevaluated[step]] or list(late)
        cpu, copy, dense_form = (
            statistics.median(part[step] for step in late) for part in (row.cpu, row.copy, row.dense_form)
        )
        figures = {
            "method": row.name, "density": row.density, "k": row.k, "steps": len(row.bytes),
            "bytes_mean": statistics.fmean(row.bytes), "words_per_k_mean": statistics.fmean(words),
            "words_per_k_reuse_mean": statistics.fmean(reuse) if reuse else None,
            "words_per_k_reuse_max": max(reuse, default=None),
            "words_per_k_reevaluation_mean": statistics.fmean(again) if again else None,
            "bytes_ordinary_mean": statistics.fmean(row.ordinary),
            "bytes_predicted_mean": statistics.fmean(row.predicted),
            "within_prediction": all(u <= p for u, p in zip(row.bytes, row.predicted, strict=True)),
            "messages_mean": statistics.fmean(row.messages),
            "density_delivered": statistics.fmean(row.delivered) / (row.k / row.density),
            "select_ms": parts[0], "exchange_ms": parts[1], "apply_ms": parts[2], "total_ms": total,
            "ratio_to_dense": total / dense,
            "cpu_ms": cpu, "copy_ms": copy, "copies": cpu / copy, "dense_form_copies": dense_form / copy,
        }  # fmt: skip
        results.append(figures)
        bound = 6 * (world_size - 1) / world_size
        print(
            f"{row.name:22}{row.density:8.2%}{figures['bytes_mean'] / 1e6:8.3f}"
            f"{figures['bytes_ordinary_mean'] / 1e6:9.3f}{figures['bytes_predicted_mean'] / 1e6:10.3f}"
            f"{figures['words_per_k_mean']:9.2f}{max(reuse, default=0):9.2f}"
            f"{(statistics.fmean(again) if again else 0):9.2f}{bound:9.2f}"
            f"{'yes' if figures['within_prediction'] else 'NO':>6}{figures['messages_mean']:6.0f}"
            f"{parts[0]:8.1f}{parts[1]:8.1f}{parts[2]:8.1f}{total:9.1f}{total / dense:8.2f}x"
            f"{cpu:8.1f}{cpu / copy:8.2f}{dense_form / copy:8.2f}"
        )
    return results


def machine() -> dict[str, Any]:
    """Return date, commit, machine and versions of this measurement."""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)  # noqa: S607
    return {
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
        "commit": commit.stdout.strip(),
        "processor": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "load": os.getloadavg()[0],
        "python": platform.python_version(),
        "torch": torch.__version__,
        "tritoncomm": tritoncomm.__version__,
    }


def main() -> None:
    """Measure, print the table, and write the file that ``--json`` names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--numel", type=float, default=25e6)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--density", type=float, nargs="+", default=[0.01, 0.001])
    parser.add_argument("--algo", nargs="+", default=tritoncomm.algorithms(), choices=tritoncomm.algorithms())
    parser.add_argument("--formats", nargs="+", default=list(FORMATS), choices=list(FORMATS))
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--smoke", action="store_true", help="small and quick: only checks that the script runs")
    options = parser.parse_args()
    if options.smoke:
        options.numel, options.workers, options.density = 1e5, 2, [0.01]
        options.steps = 4
    numel, world_size = int(options.numel), options.workers
    print(f"{numel} fp32 values, {world_size} gloo workers, {options.steps} steps")
    rows: list[Row] = []
    settings = (numel, options.algo, options.density, options.formats, options.steps)
    run_workers(work, world_size, *settings, listen=rows.append)
    exchanged = show(rows, world_size)
    found: list[tuple[float, float]] = []
    run_workers(messages, world_size, 20 if options.smoke else 500, listen=found.append)
    message, bare = (1e6 * seconds for seconds in found[0])
    print(f"a message of {MESSAGE_WORDS} words: {message:.0f} us of CPU, isend or irecv alone {bare:.0f} us")
    if options.json:
        used = {"numel": numel, "workers": world_size, "steps": options.steps}
        content = {"machine": machine(), "settings": used, "exchange": exchanged}
        content["message_us"] = {"scheduler": message, "isend_or_irecv": bare}
        options.json.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
