"""Train with every kind of module on real processes and compare with dense DDP: loss, bytes and seconds.

Four gloo processes train with AdamW: the task of ``python -m tritoncomm demo``, or the GPT of ``training.py``. Ways:

* ``dense``: ``DistributedDataParallel`` without this library.
* ``wrap``: ``wrap(optimizer)`` and a plain module.
* ``ddp``: ``wrap(optimizer, model=ddp)``. Losses equal those of ``wrap`` to the bit.
* ``fsdp``: ``wrap(optimizer, model=fsdp)`` with two replicas of two shards.
* ``transformers``: the ``Trainer`` of Transformers. Skipped if Transformers is not installed.

All see the same batches and learning rates. All sparse ones begin with the same number of dense steps (2 %, as in the
demo, or ``--warmup``). ``--max-norm`` clips averaged gradients, dense too. Times leave the dense steps out. Compare
times only if nothing else ran on the machine.

Columns:

* ``loss``: validation loss at the end, in nats per byte. The gap is relative to the dense row of the same seed.
* ``kB``: kilobytes that a worker sends per step, mean over workers and steps. For ``fsdp``, between replicas only. A
  dense exchange is counted as a ring all-reduce.
* ``s/step``: median over steps of the seconds from the forward pass to the end of the optimizer's step.
* ``exchange``: mean seconds per step in which a worker exchanges gradients. Waiting for other workers counts.
* ``hidden``: share of these seconds in which backward did not wait, 0 except for ``dense``: DDP's own timers measure
  the time from the first bucket to the end of the last one, and the part of it before the last gradient is computed.

A run can be cut into pieces. Rows are added to those in the file of ``--json``, and a row that is there already is not
measured again without ``--again``.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import tritoncomm
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from tritoncomm.demo import train as demo_run
from tritoncomm.scheduler import cost
from tritoncomm.scheduler.local_workers import Send, run_workers
from tritoncomm.step.adam import StalenessAwareAdam

import tasks
import training
from tasks import Task

WORKERS = 4
DOORS = ("dense", "wrap", "ddp", "fsdp", "transformers")
BATCHES = demo_run.VALIDATION_BATCHES  # in an evaluation
LAST = 10  # the reported training loss is the mean of this many last steps
REPORTS = 10  # progress lines per run


def demo_rate(step: int, steps: int) -> float:
    """Return the learning rate of the demo in ``step``, as a fraction of the largest."""
    return min(1.0, (step + 1) / demo_run.Settings(steps=steps).lr_warmup)


def gpt_rate(step: int, steps: int) -> float:
    """Return the learning rate of ``training.py`` in ``step``, as a fraction of the largest."""
    warm = min(1.0, (step + 1) / (steps * training.LR_WARMUP_SHARE))
    return warm * 0.5 * (1 + math.cos(math.pi * step / steps))


TASKS: dict[str, tuple[Callable[[int | None, int], Task], Callable[[int, int], float]]] = {
    "demo": (tasks.demo, demo_rate),
    "gpt": (tasks.gpt, gpt_rate),
}


@dataclass(frozen=True)
class Cell:
    """One run. The density of a dense run is 1. ``max_norm`` is the limit of the averaged gradient's norm, or 0.

    ``max_relative_update`` is that of ``wrap`` on the day of the run, and 0 for a dense run.
    """

    task: str
    door: str
    density: float
    seed: int
    steps: int
    warmup_steps: int
    max_norm: float = 0.0
    max_relative_update: float = StalenessAwareAdam.max_relative_update

    def __str__(self) -> str:
        density = "" if self.door == "dense" else f"{self.density:.2%}"
        return f"{self.task:6}{self.door:14}{density:>8}  seed {self.seed}"


@dataclass(frozen=True)
class Row:
    """A run and its results, means over the workers. The columns are described at the top of this file.

    ``dense_kilobytes`` is what a dense exchange between the same ranks sends. ``training_loss`` is the mean of the
    last steps.
    """

    task: str
    door: str
    density: float
    seed: int
    steps: int
    warmup_steps: int
    loss: float
    training_loss: float
    kilobytes: float
    dense_kilobytes: float
    seconds_per_step: float
    seconds_exchange: float
    hidden: float
    machine: str
    max_norm: float = 0.0
    max_relative_update: float = StalenessAwareAdam.max_relative_update

    @property
    def cell(self) -> Cell:
        """The run."""
        return Cell(
            self.task, self.door, self.density, self.seed, self.steps, self.warmup_steps, self.max_norm,
            self.max_relative_update,
        )  # fmt: skip


def seconds_of(optimizer: tritoncomm.SparseOptimizer) -> float:
    """Return the seconds of the exchange in the last step."""
    metrics = optimizer.metrics()
    return sum(metrics[f"seconds_{part}"] for part in ("select", "exchange", "apply"))


class Run:
    """One run on one worker: what it trains, and the losses and times of its steps.

    ``settings`` are the arguments of ``wrap`` that choose the exchange. ``exchanges`` holds the seconds of each.
    """

    def __init__(self, cell: Cell, rank: int, send: Send, batches: int) -> None:
        self.cell, self.rank, self._send = cell, rank, send
        make, self._rate = TASKS[cell.task]
        self.task = make(cell.steps, batches)
        self.settings: dict[str, Any] = {"density": cell.density, "warmup_steps": cell.warmup_steps}
        self.losses: list[float] = []
        self.seconds: list[float] = []
        self.exchanges: list[float] = []

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Return the optimizer of the task for ``model``."""
        return self.task.optimizer(list(model.parameters()), self.task.lr)

    def rate(self, step: int) -> float:
        """Return the learning rate in ``step``, as a fraction of the largest."""
        return self._rate(step, self.task.steps)

    def loss(self, model: nn.Module, step: int) -> Tensor:
        """Return the loss of this worker's batch in ``step``."""
        return self.task.loss(model, self.cell.seed, step, self.rank)

    def add(self, loss: float, seconds: float, optimizer: torch.optim.Optimizer) -> None:
        """Record a step. Rank 0 reports progress."""
        self.losses.append(loss)
        self.seconds.append(seconds)
        if isinstance(optimizer, tritoncomm.SparseOptimizer):
            self.exchanges.append(seconds_of(optimizer))
        done, steps = len(self.losses), self.task.steps
        if self.rank == 0 and (done % max(1, steps // REPORTS) == 0 or done == steps):
            self._send(f"{self.cell}  step {done}/{steps}  loss {loss:.3f}  {seconds:.2f} s")


def run_cell(rank: int, world_size: int, send: Send, cell: Cell, batches: int) -> dict[str, Any]:
    """Train as one of ``world_size`` workers, and return the measured columns of a :class:`Row`."""
    run = Run(cell, rank, send, batches)
    torch.manual_seed(cell.seed)
    plain = run.task.model()
    numel, ranks = sum(parameter.numel() for parameter in plain.parameters()), world_size
    if cell.door == "fsdp":
        numel, ranks = numel * demo_run.REPLICAS // world_size, demo_run.REPLICAS
    dense = cost.all_reduce(numel, cost.WORD, ranks).bytes
    sent, exchange = float(dense * run.task.steps), None
    if cell.door == "dense":
        exchange = train_dense(run, plain)
    elif cell.door == "transformers":
        from doors_trainer import train_with_trainer

        sent = train_with_trainer(run, plain)
    else:
        sent = train_wrapped(run, plain)
    if run.exchanges:
        exchange = statistics.fmean(run.exchanges[cell.warmup_steps :]), 0.0
    with torch.no_grad():
        loss = run.task.score(plain)
    measured = {
        "loss": loss,
        "training_loss": statistics.fmean(run.losses[-LAST:]),
        "kilobytes": sent / run.task.steps / 1e3,
        "seconds_per_step": statistics.median(run.seconds[cell.warmup_steps :]),
        "seconds_exchange": exchange[0],
        "hidden": exchange[1],
    }
    totals = torch.tensor(list(measured.values()), dtype=torch.float64)
    dist.all_reduce(totals)
    means = dict(zip(measured, (totals / world_size).tolist(), strict=True))
    return means | {"dense_kilobytes": dense / 1e3}


def train_steps(run: Run, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Train ``model`` in a plain loop."""
    for step in range(run.task.steps):
        started = time.perf_counter()
        for group in optimizer.param_groups:
            group["lr"] = run.task.lr * run.rate(step)
        optimizer.zero_grad()
        loss = run.loss(model, step)
        loss.backward()
        if run.cell.door == "dense" and run.cell.max_norm:
            nn.utils.clip_grad_norm_(model.parameters(), run.cell.max_norm)
        optimizer.step()
        run.add(loss.item(), time.perf_counter() - started, optimizer)


def train_dense(run: Run, plain: nn.Module) -> tuple[float, float]:
    """Train with DDP alone, and return the seconds of its exchange and the share that is hidden, by its own timers."""
    model = DistributedDataParallel(plain)
    model._set_ddp_runtime_logging_sample_rate(1)  # noqa: SLF001 - DDP has no public timers
    train_steps(run, model, run.optimizer(model))
    timers = model._get_ddp_logging_data()  # noqa: SLF001
    busy, overlap = timers["avg_backward_comm_time"], timers["avg_backward_compute_comm_overlap_time"]
    return busy / 1e9, overlap / busy


def train_wrapped(run: Run, plain: nn.Module) -> float:
    """Train with a wrapped optimizer, and return the bytes that this worker has sent."""
    model, arguments = demo_run.opened(run.cell.door, plain, WORKERS, run.settings)
    optimizer = tritoncomm.wrap(run.optimizer(model), **arguments, max_grad_norm=run.cell.max_norm or None)
    train_steps(run, model, optimizer)
    return optimizer.metrics()["bytes_sent_total"]


def measure(cell: Cell, batches: int = BATCHES) -> Row:
    """Train ``cell`` in new processes, and evaluate it on so many ``batches``."""
    columns: dict[str, Any] = run_workers(
        run_cell, WORKERS, cell, batches, listen=lambda line: print(line, file=sys.stderr, flush=True)
    )[0]
    return Row(**asdict(cell), **columns, machine=machine())


def machine() -> str:
    """Return the machine and the versions of the software."""
    return f"{platform.machine()}, torch {torch.__version__}, Python {platform.python_version()}, gloo"


def cells(options: argparse.Namespace) -> Iterator[Cell]:
    """Yield the runs that ``options`` describe, the dense run of each seed first."""
    for task in options.task:
        steps = options.steps or TASKS[task][0](None, 1).steps
        warmup = int(steps * demo_run.WARMUP_SHARE) if options.warmup is None else options.warmup
        for seed in options.seeds:
            for door in options.doors:
                for density in [1.0] if door == "dense" else options.density:
                    cell = Cell(task, door, density, seed, steps, warmup, options.max_norm)
                    yield as_dense(cell) if door == "dense" else cell


def as_dense(cell: Cell) -> Cell:
    """Return the dense run to compare with ``cell``."""
    return replace(cell, door="dense", density=1.0, max_relative_update=tasks.NO_LIMIT)


def load(path: Path | None) -> dict[Cell, Row]:
    """Return the rows of an earlier run, by cell. Those that do not name their limit had :data:`tasks.FORMER_LIMIT`."""
    if path is None or not path.exists():
        return {}
    names = {field.name for field in fields(Row)}
    found = [
        Row(**{"max_relative_update": tasks.FORMER_LIMIT} | {k: v for k, v in row.items() if k in names})
        for row in json.loads(path.read_text())["rows"]
    ]
    return {as_dense(row.cell) if row.door == "dense" else row.cell: row for row in found}


def write(rows: dict[Cell, Row], path: Path) -> None:
    """Write all rows, each with its gap to dense."""
    content = {"workers": WORKERS, "rows": [asdict(row) | {"gap": gap(row, rows)} for row in rows.values()]}
    path.write_text(json.dumps(content, indent=1) + "\n")


def gap(row: Row, rows: dict[Cell, Row]) -> float | None:
    """Return how far the loss of ``row`` is above the dense run of the same seed, in percent. None without one."""
    dense = rows.get(as_dense(row.cell))
    return None if dense is None else 100 * (row.loss / dense.loss - 1)


def show(row: Row, rows: dict[Cell, Row]) -> None:
    """Print one line of the table."""
    behind = gap(row, rows)
    print(
        f"{row.cell}  loss {row.loss:.4f} {'' if behind is None else f'({behind:+.1f}%)':9}"
        f"{row.kilobytes:9.1f} kB  {row.seconds_per_step:7.3f} s/step  "
        f"exchange {row.seconds_exchange:.3f} s, {row.hidden:.0%} hidden",
        flush=True,
    )


def picture(rows: dict[Cell, Row], path: Path) -> None:
    """Write a PNG of the gap to dense and of the seconds per step, by door and density. A dot is one seed."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    tasks = list(dict.fromkeys(row.task for row in rows.values()))
    with mpl.rc_context({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False}):
        widest = max(len({(row.door, row.density) for row in rows.values() if row.task == task}) for task in tasks)
        figure = Figure(figsize=(max(6.5, 0.95 * widest) * len(tasks), 5.5), layout="constrained")
        grid = figure.subplots(2, len(tasks), squeeze=False, sharex="col")
        for (losses, times), task in zip(grid.T, tasks, strict=True):
            own = [row for row in rows.values() if row.task == task]
            columns = sorted({(DOORS.index(row.door), -row.density) for row in own})
            labels = [DOORS[door] + ("" if door == 0 else f"\n{-density:.0%}") for door, density in columns]
            for place, (door, density) in enumerate(columns):
                chosen = [row for row in own if (row.door, row.density) == (DOORS[door], -density)]
                gaps = [gap(row, rows) for row in chosen]
                losses.plot([place] * len(gaps), [math.nan if g is None else g for g in gaps], "o", color="tab:blue")
                step = statistics.fmean(row.seconds_per_step for row in chosen)
                waited = statistics.fmean(row.seconds_exchange * (1 - row.hidden) for row in chosen)
                times.bar(place, step - waited, color="0.75", label="everything else" if place == 0 else None)
                times.bar(
                    place,
                    waited,
                    bottom=step - waited,
                    color="tab:red",
                    label="waiting for the exchange" if place == 0 else None,
                )
            losses.axhline(0, color="0.4", linewidth=0.8)
            losses.set(title=task, ylabel="validation loss, % above dense")
            times.set(ylabel="seconds per step")
            times.legend(frameon=False)
            times.set_xticks(range(len(labels)), labels)
        figure.savefig(path, dpi=120, format="png")


def main() -> None:
    """Train, print each row when it is done, and write the requested files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", nargs="+", default=list(TASKS), choices=list(TASKS))
    parser.add_argument("--doors", nargs="+", default=list(DOORS), choices=DOORS)
    parser.add_argument("--density", type=float, nargs="+", default=[0.01, 0.05])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, help="steps, instead of the default of the task")
    parser.add_argument("--warmup", type=int, help="dense steps at the start, instead of 2 %% of the steps")
    parser.add_argument("--max-norm", type=float, default=0.0, help="norm to which averaged gradients are clipped")
    parser.add_argument("--again", action="store_true", help="measure rows again that are in the file of --json")
    parser.add_argument("--json", type=Path, help="add the rows to this file")
    parser.add_argument("--plot", type=Path, help="write a PNG of all rows to this file")
    parser.add_argument("--smoke", action="store_true", help="two steps of each way: only checks that the script runs")
    options = parser.parse_args()
    if options.smoke:
        options.task, options.steps, options.seeds, options.density = ["gpt"], 2, [0], [0.01]
    if "transformers" in options.doors and importlib.util.find_spec("transformers") is None:
        print("The door 'transformers' is skipped, because Transformers is not installed.")
        options.doors.remove("transformers")
    rows = load(options.json)
    for cell in cells(options):
        if options.again or cell not in rows:
            rows[cell] = measure(cell, 1 if options.smoke else BATCHES)
            show(rows[cell], rows)
            if options.json:
                write(rows, options.json)
    if options.plot:
        picture(rows, options.plot)


if __name__ == "__main__":
    main()
