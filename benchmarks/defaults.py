"""Which warm-up and which density train well by default: short and long runs, two tasks, with and without clipping.

Trains as ``benchmarks/training.py`` does (four simulated workers, Ok-Topk, the defaults of ``wrap``) and varies the
number of dense steps at the start, the density, the number of steps, and how the averaged gradient is clipped to a norm
of 1. ``plain`` clips the norm of what was delivered, as ``torch.nn.utils.clip_grad_norm_`` does. ``dense`` clips an
estimate of the norm that a dense exchange would have had: a sum that was delivered after tau steps counts with its
square divided by tau. The gap is relative to the dense run of the same seed, number of steps and clipping.

``--accumulate 2 --clip plain --steps 300`` trains as nanoGPT's loop does, which averages the gradients of micro-batches
before it clips them. The learning rate follows half a cosine in every run.

Every finished run is added to the file of ``--json``, and is not repeated.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
from collections.abc import Iterator
from dataclasses import asdict, astuple, dataclass, replace
from pathlib import Path

import torch
import tritoncomm
from tritoncomm.primitives.quantized_mean import DENSE_FORMATS
from tritoncomm.step.adam import StalenessAwareAdam

import tasks
import training
import training_results
from tritoncomm_kernels.section_layout import VALUE_BITS

MAX_NORM = 1.0


@dataclass(frozen=True)
class Cell:
    """One run. ``warmup`` counts dense steps, and is -1 for a dense run. ``clip`` is none, plain or dense.

    ``values`` is the format of values on the wire. With a rounded one, small tensors have 8 bits, as with ``wrap``.
    ``warmup_values`` is the format of the dense steps. ``max_relative_update`` is that of the staleness-aware step.
    """

    task: str
    steps: int
    density: float
    warmup: int
    clip: str
    seed: int
    accumulate: int = 1
    values: str = "fp32"
    warmup_values: str = "fp32"
    max_relative_update: float = StalenessAwareAdam.max_relative_update

    @property
    def dense(self) -> Cell:
        """The dense run to compare with."""
        clip = "none" if self.clip == "none" else "plain"
        return replace(
            self, density=1.0, warmup=-1, clip=clip, values="fp32", warmup_values="fp32",
            max_relative_update=tasks.NO_LIMIT,
        )  # fmt: skip


@dataclass
class Result:
    """The score of one run, the kilobytes that the busiest worker sent per step, the seconds it took, and its day."""

    cell: Cell
    score: float
    kilobytes: float
    seconds: float
    measured: str = ""


def clipped(layout: training.BucketLayout, *_: object) -> None:
    """Clip the norm of the delivered gradient."""
    torch.nn.utils.clip_grad_norm_(layout.parameters, MAX_NORM)


def clipped_in_dense_units(
    layout: training.BucketLayout, mean: tritoncomm.SparseVector, optimizer: torch.optim.Optimizer
) -> None:
    """Clip the estimated norm of a dense gradient. The ages are those of the staleness-aware step."""
    squares = mean.values.square()
    first = next(iter(layout.parameters))
    if "last_delivered" in optimizer.state.get(first, {}) and not mean.is_full:
        last = torch.cat([optimizer.state[parameter]["last_delivered"].reshape(-1) for parameter in layout.parameters])
        now = int(optimizer.state[first]["step"]) + 1
        squares = squares / (now - last[mean.indices.long()]).clamp(min=1)
    norm = float(squares.sum().sqrt())
    if norm > MAX_NORM:
        for parameter in layout.parameters:
            parameter.grad.mul_(MAX_NORM / norm)


CLIPS = {"none": None, "plain": clipped, "dense": clipped_in_dense_units}


def run(cell: Cell, batches: int = tasks.BATCHES) -> Result:
    """Train once, and evaluate on ``batches``."""
    task = tasks.TASKS[cell.task](cell.steps, batches)
    started = time.perf_counter()
    if cell.warmup < 0:
        recipe: tritoncomm.Recipe = tritoncomm.Dense()
        rule = ""
    else:
        recipe = tritoncomm.OkTopk(density=cell.density, values=cell.values)
        rule = training.DEFAULT if cell.task != "digits" else ""
    outcome = training.train(
        task,
        recipe,
        cell.seed,
        rule,
        max_relative_update=cell.max_relative_update,
        warmup=max(cell.warmup, 0),
        clip=CLIPS[cell.clip] if cell.clip != "none" else None,
        small="fp32" if cell.values == "fp32" else "8bit",
        accumulate=cell.accumulate,
        warmup_values=cell.warmup_values,
    )
    day = time.strftime("%Y-%m-%d")
    return Result(cell, outcome.score, outcome.kilobytes, time.perf_counter() - started, day)


def cells(options: argparse.Namespace) -> Iterator[Cell]:
    """Yield every run in order, each dense run first."""
    for task in options.task:
        for steps in options.steps:
            for clip in options.clip:
                for seed in options.seeds:
                    for density in options.density:
                        for warmup in options.warmup:
                            for formats in itertools.product(
                                options.values, options.warmup_values, options.max_relative_update
                            ):
                                cell = Cell(
                                    task, steps, density, min(warmup, steps), clip, seed, options.accumulate, *formats
                                )
                                yield cell.dense
                                yield cell


def table(results: dict[Cell, Result]) -> str:
    """Return a Markdown table with a line per setting: the gap to dense, mean and range over the seeds."""
    lines = [
        "| task | steps | batches | clip | density | values | dense | format | limit | gap to dense | kB per step |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    grouped: dict[Cell, list[Cell]] = {}
    for cell in results:
        if cell.warmup >= 0 and cell.dense in results:
            grouped.setdefault(replace(cell, seed=0), []).append(cell)
    for key in sorted(grouped, key=astuple):
        found = grouped[key]
        relative = key.task != "digits"
        gaps = training_results.gaps(
            [results[cell].score for cell in found], [results[cell.dense].score for cell in found], relative=relative
        )
        unit = " %" if relative else " points"
        kilobytes = statistics.fmean(results[cell].kilobytes for cell in found)
        spread = f" ({min(gaps):+.1f} to {max(gaps):+.1f}, {len(gaps)} seeds)" if len(gaps) > 1 else ""
        lines.append(
            f"| {key.task} | {key.steps} | {key.accumulate} | {key.clip} | {key.density:.0%} | {key.values} "
            f"| {key.warmup} | {key.warmup_values} | {key.max_relative_update} "
            f"| {statistics.fmean(gaps):+.1f}{unit}{spread} | {kilobytes:.1f} |"
        )
    return "\n".join(lines)


def read(path: Path | None) -> dict[Cell, Result]:
    """Return the results in ``path``, or none."""
    if path is None or not path.exists():
        return {}
    rows = json.loads(path.read_text())["runs"]
    found = {}
    for row in rows:
        cell = Cell(**{"max_relative_update": tasks.FORMER_LIMIT} | row.pop("cell"))  # without: the limit of the day
        cell = cell.dense if cell.warmup < 0 else cell
        found[cell] = Result(cell, **row)
    return found


def main() -> None:
    """Train what is missing, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--task", nargs="+", default=["gpt", "digits"], choices=list(tasks.TASKS))
    parser.add_argument("--steps", type=int, nargs="+", default=[100, 300, 1000])
    parser.add_argument("--density", type=float, nargs="+", default=[0.01, 0.05])
    parser.add_argument("--warmup", type=int, nargs="+", default=[0, 6, 20, 50], help="dense steps at the start")
    parser.add_argument("--clip", nargs="+", default=["none", "plain"], choices=list(CLIPS))
    parser.add_argument("--accumulate", type=int, default=1, help="micro-batches of a worker in a step")
    parser.add_argument("--values", nargs="+", default=["fp32"], choices=list(VALUE_BITS), help="format of values")
    formats = [*DENSE_FORMATS, "4bit", "2bit", "1bit"]
    parser.add_argument("--warmup-values", nargs="+", default=["fp32"], choices=formats, help="of dense steps")
    parser.add_argument(
        "--max-relative-update", type=float, nargs="+", default=[StalenessAwareAdam.max_relative_update],
        help="max_relative_update of the staleness-aware step",
    )  # fmt: skip
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--json", type=Path, help="read finished runs from this file, and add new ones")
    parser.add_argument("--smoke", action="store_true", help="a few steps: only checks that the script runs")
    options = parser.parse_args()
    if options.smoke:
        options.steps, options.seeds, options.warmup, options.density = [4], [0], [0, 1], [0.05]
        options.clip = list(CLIPS)
    torch.set_num_threads(1)
    results = read(options.json)
    for cell in cells(options):
        if cell in results:
            continue
        results[cell] = run(cell, 1 if options.smoke else tasks.BATCHES)
        print(f"{cell}: {results[cell].score:.4f}, {results[cell].seconds:.0f} s", flush=True)
        if options.json:
            content = {"torch": torch.__version__, "runs": [asdict(result) for result in results.values()]}
            options.json.write_text(json.dumps(content, indent=1) + "\n")
    print(table(results))


if __name__ == "__main__":
    main()
