"""Train one model in every way that there is, and compare: the loss at the end, the bits, and the seconds per step.

Four gloo processes train the model of ``python -m tritoncomm demo`` with AdamW, all on the same batches:

* ``dense``: ``DistributedDataParallel``, without this library.
* ``plain``: ``wrap(optimizer)`` and a plain module.
* ``ddp``: ``wrap(optimizer, model=ddp)``.
* ``fsdp``: ``wrap(optimizer, model=fsdp)`` with two replicas of two shards.
* ``transformers``: the ``Trainer`` of Transformers with ``SparseGradients``. Skipped if Transformers is not installed.

Sparse runs begin with dense steps (2 %), which the times leave out. Compare times only if nothing else ran. Columns:

* ``loss``: validation loss at the end, in nats per byte. The gap is that to ``plain`` with the same density and seed.
* ``bits``: digest of the final parameters. Where the flat vector is the same, it is that of ``plain``.
* ``s/step``: median over steps of the seconds from the forward pass to the end of ``step()``, mean over the workers.
* ``kB/step``: kilobytes that a worker sends, mean over workers and steps. For ``fsdp``, between replicas only.

A run can be cut into pieces: rows are added to those in the file of ``--json``, and are not measured again.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import platform
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import tritoncomm
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from tritoncomm.demo import train as demo
from tritoncomm.scheduler import cost
from tritoncomm.scheduler.local_workers import Send, run_workers

import tasks

WORKERS = 4
WAYS = ("dense", "plain", "ddp", "fsdp", "transformers")
REPORTS = 10  # progress lines per run


@dataclass(frozen=True)
class Cell:
    """One run. The density of a dense run is 1."""

    way: str
    density: float
    seed: int
    steps: int

    def __str__(self) -> str:
        return f"{self.way:13}{self.density:>8.2%}  seed {self.seed}"


@dataclass(frozen=True)
class Row:
    """A run and its results. The columns are described at the top of this file."""

    cell: Cell
    loss: float
    bits: str
    seconds_per_step: float
    kilobytes: float
    machine: str


Rows = dict[Cell, Row]


class Run:
    """One run on one worker."""

    def __init__(self, cell: Cell, rank: int, send: Send, batches: int) -> None:
        self.cell, self.rank, self._send = cell, rank, send
        self.task = tasks.demo(cell.steps, batches)
        self.seconds: list[float] = []
        self._settings = demo.Settings(steps=cell.steps)

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments of ``wrap`` that choose the exchange."""
        return {"density": self.cell.density, "warmup_steps": self._settings.warmup}

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Return the optimizer of the task for ``model``."""
        return self.task.optimizer(list(model.parameters()), self.task.lr)

    def rate(self, step: int) -> float:
        """Return the learning rate in ``step``, as a fraction of the largest."""
        return min(1.0, (step + 1) / self._settings.lr_warmup)

    def loss(self, model: nn.Module, step: int) -> Tensor:
        """Return the loss of this worker's batch in ``step``."""
        return self.task.loss(model, self.cell.seed, step, self.rank)

    def add(self, loss: float, started: float) -> None:
        """Record a step that has ended. Rank 0 reports progress."""
        self.seconds.append(time.perf_counter() - started)
        done, steps = len(self.seconds), self.cell.steps
        if self.rank == 0 and done % max(1, steps // REPORTS) == 0:
            self._send(f"{self.cell}  step {done}/{steps}  loss {loss:.3f}  {self.seconds[-1]:.2f} s")

    def train(self, model: nn.Module) -> float:
        """Train ``model``, and return the bytes that this worker has sent."""
        arguments = self.arguments
        if self.cell.way == "dense":
            optimizer, model = self.optimizer(model), DistributedDataParallel(model)
        else:
            model, arguments = demo.opened(self.cell.way, model, WORKERS, arguments)
            optimizer = tritoncomm.wrap(self.optimizer(model), **arguments)
        for step in range(self.cell.steps):
            started = time.perf_counter()
            for group in optimizer.param_groups:
                group["lr"] = self.task.lr * self.rate(step)
            optimizer.zero_grad()
            loss = self.loss(model, step)
            loss.backward()
            optimizer.step()
            self.add(loss.item(), started)
        if isinstance(optimizer, tritoncomm.SparseOptimizer):
            return optimizer.metrics()["bytes_sent_total"]
        numel = sum(parameter.numel() for parameter in model.parameters())
        return float(self.cell.steps * cost.all_reduce(numel, cost.WORD, WORKERS).bytes)

    def result(self, model: nn.Module, sent: float) -> dict[str, Any]:
        """Return the measured columns of a :class:`Row`, the same on all ranks."""
        digest = hashlib.blake2b(digest_size=4)
        for parameter in map(torch.Tensor.detach, model.parameters()):
            whole = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
            digest.update(whole.numpy().tobytes())
        with torch.no_grad():
            loss = self.task.score(model)
        seconds = statistics.median(self.seconds[self._settings.warmup :])
        means = torch.tensor([loss, seconds, sent / self.cell.steps / 1e3], dtype=torch.float64) / WORKERS
        dist.all_reduce(means)
        loss, seconds, kilobytes = means.tolist()
        return {"loss": loss, "bits": digest.hexdigest(), "seconds_per_step": seconds, "kilobytes": kilobytes}


def run_cell(rank: int, _: int, send: Send, cell: Cell, batches: int) -> dict[str, Any]:
    """Train as worker ``rank``, and return the measured columns of a :class:`Row`."""
    run = Run(cell, rank, send, batches)
    torch.manual_seed(cell.seed)
    model = run.task.model()
    if cell.way == "transformers":
        from doors_trainer import train_with_trainer

        return run.result(model, train_with_trainer(run, model))
    return run.result(model, run.train(model))


def measure(cell: Cell, batches: int) -> Row:
    """Train ``cell`` in new processes, and evaluate it on so many ``batches``."""
    columns: list[dict[str, Any]] = run_workers(
        run_cell, WORKERS, cell, batches, listen=lambda line: print(line, file=sys.stderr, flush=True)
    )
    assert all(each == columns[0] for each in columns), f"{cell}: ranks hold different parameters"
    machine = f"{platform.machine()}, torch {torch.__version__}, Python {platform.python_version()}, gloo"
    return Row(cell, **columns[0], machine=machine)


def cells(options: argparse.Namespace) -> Iterator[Cell]:
    """Yield the runs that ``options`` describe."""
    steps = options.steps or demo.Settings().steps
    for seed in options.seeds:
        for density in options.density:
            for way in options.ways:
                yield Cell(way, 1.0 if way == "dense" else density, seed, steps)


def read(path: Path | None) -> Rows:
    """Return the rows of an earlier run."""
    if path is None or not path.exists():
        return {}
    found = [Row(**row | {"cell": Cell(**row["cell"])}) for row in json.loads(path.read_text())["rows"]]
    return {row.cell: row for row in found}


def table(rows: Rows) -> str:
    """Return the means over the seeds of each way and density, in Markdown."""
    lines = [
        "| density | way | loss, by seed | to `plain`, mean | seeds with the bits of `plain` | s/step | kB/step |",
        "|---|---|---|---|---|---|---|",
    ]
    for density, way in dict.fromkeys((cell.density, cell.way) for cell in rows):
        own = [row for cell, row in rows.items() if (cell.density, cell.way) == (density, way)]
        plain = [rows.get(Cell("plain", density, row.cell.seed, row.cell.steps)) for row in own]
        pairs = [(row, other) for row, other in zip(own, plain, strict=True) if other is not None]
        gap = f"{statistics.fmean(100 * (row.loss / other.loss - 1) for row, other in pairs):+.1f} %" if pairs else ""
        same = f"{sum(row.bits == other.bits for row, other in pairs)} of {len(pairs)}" if pairs else ""
        seconds, kilobytes = (statistics.fmean(values) for values in zip(
            *((row.seconds_per_step, row.kilobytes) for row in own), strict=True))  # fmt: skip
        losses = ", ".join(f"{row.loss:.3f}" for row in own)
        lines.append(f"| {density:.0%} | {way} | {losses} | {gap} | {same} | {seconds:.3f} | {kilobytes:.0f} |")
    return "\n".join(lines)


def main() -> None:
    """Train, print each row when it is done, and write the requested file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=WAYS)
    parser.add_argument("--density", type=float, nargs="+", default=[0.03, 0.01])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, help="steps, instead of those of the demo")
    parser.add_argument("--json", type=Path, help="add the rows to this file")
    parser.add_argument("--smoke", action="store_true", help="two steps of each way: only checks that the script runs")
    options = parser.parse_args()
    if options.smoke:
        options.steps, options.seeds, options.density = 2, [0], [0.01]
    if "transformers" in options.ways and importlib.util.find_spec("transformers") is None:
        print("The way 'transformers' is skipped, because Transformers is not installed.")
        options.ways.remove("transformers")
    rows = read(options.json)
    for cell in cells(options):
        if cell in rows:
            continue
        row = rows[cell] = measure(cell, 1 if options.smoke else tasks.BATCHES)
        print(
            f"{cell}  loss {row.loss:.4f}  {row.bits}  {row.seconds_per_step:.3f} s/step  {row.kilobytes:.1f} kB/step"
        )
        if options.json:
            content = {"workers": WORKERS, "rows": [asdict(each) for each in rows.values()]}
            options.json.write_text(json.dumps(content, indent=1) + "\n")
    print(table(rows))


if __name__ == "__main__":
    main()
