"""One worker of ``race.py``: it trains a model in a running process group and measures every step."""

from __future__ import annotations

import copy
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from tritoncomm.demo import train as demo_run
from tritoncomm.demo.model import ByteGPT, Shape
from tritoncomm.demo.text import Text, batch, standard_library, validation_batches

import race_methods
from race_methods import Contender, one

VALIDATIONS = 20  # evaluations of the validation loss per run
PROGRESS_SECONDS = 10.0
PINGS = 32
ALONE_STEPS = 9
PARTS = ("compute", "select", "exchange", "apply")


@dataclass(frozen=True)
class Task:
    """A byte-level GPT on the sources of Python's standard library, trained as in ``python -m tritoncomm demo``."""

    shape: Shape
    steps: int
    rows: int = demo_run.ROWS
    validation_batches: int = demo_run.VALIDATION_BATCHES // 2
    validation_rows: int = demo_run.VALIDATION_ROWS


TASKS = {
    "demo": Task(Shape(), demo_run.Settings().steps),
    "gpt": Task(Shape(context=32, width=64, layers=2, heads=2), 1600, rows=16),
    "gpt10m": Task(Shape(width=384, layers=6, heads=6), 300, validation_batches=16, validation_rows=8),
    "tiny": Task(Shape(context=16, width=32, layers=1, heads=1), 6, rows=2, validation_batches=4),  # for --smoke
}


@dataclass(frozen=True)
class Cell:
    """One run. ``network`` is the text that describes it, ``contender`` that of :class:`race_methods.Contender`."""

    task: str
    network: str
    workers: int
    contender: str
    seed: int
    steps: int

    def __str__(self) -> str:
        return f"{self.task}, {self.network}, {self.workers} workers, {self.contender}, seed {self.seed}"


class Interface:
    """Counts the bytes that this host's network interface sends, by the counter of the kernel.

    ``shared_by`` workers use the interface. Each of them counts its share.
    """

    def __init__(self, shared_by: int) -> None:
        self._name, self._shared_by = interface(), shared_by

    def read(self) -> float:
        """Return the bytes so far."""
        for line in Path("/proc/net/dev").read_text().splitlines():  # of the namespace of this process
            name, found, counters = line.partition(":")
            if found and name.strip() == self._name:
                return int(counters.split()[8]) / self._shared_by
        raise RuntimeError(f"/proc/net/dev has no interface {self._name}: set GLOO_SOCKET_IFNAME")


def interface() -> str:
    """Return the interface that gloo uses: the one that ``GLOO_SOCKET_IFNAME`` names, else the default route's."""
    chosen = os.environ.get("GLOO_SOCKET_IFNAME")
    if chosen:
        return chosen.split(",")[0]
    routes = [line.split() for line in Path("/proc/net/route").read_text().splitlines()[1:]]
    return next((route[0] for route in routes if route[1] == "00000000"), "lo")


@dataclass
class Settings:
    """How to run a cell: the number of its steps to take, and the workers per interface."""

    take: int
    shared_by: int


def run_cell(rank: int, _: int, send: Callable[[Any], None], cell: Cell, settings: Settings) -> dict[str, Any]:
    """Train as worker ``rank``. Return the measured columns of a row, equal on all ranks."""
    run = Run(cell, settings, rank, send)
    run.train()
    return run.result()


class Run:
    """A run of one worker: what it trains, and what it has measured."""

    def __init__(self, cell: Cell, settings: Settings, rank: int, send: Callable[[Any], None]) -> None:
        self.cell, self.settings, self.rank, self._send = cell, settings, rank, send
        self.task = TASKS[cell.task]
        self.contender = Contender.parse(cell.contender)
        self.warmup = self.contender.warmup(cell.steps)
        self.text: Text = standard_library()
        context = self.task.shape.context
        held_out = self.task.validation_rows, context, self.task.validation_batches
        self._held_out = validation_batches(self.text.validation, *held_out)
        torch.manual_seed(cell.seed)
        plain = ByteGPT(self.task.shape)
        self.numel = sum(parameter.numel() for parameter in plain.parameters())
        self.latency = ping()
        self.alone = self._alone(copy.deepcopy(plain))
        self.trained = race_methods.trained(plain, self.optimizer, self.contender, self.warmup)
        self.seconds: list[float] = []
        self.parts: list[dict[str, float]] = []
        self.validations: list[tuple[int, float]] = []
        self.bytes: list[float] = []
        self._interface, self._counted = Interface(settings.shared_by), 0.0

    def optimizer(self, model: nn.Module) -> race_methods.Optimizers:
        """Return the optimizer of the contender for ``model``, or several. Its ``rate`` is the first learning rate."""
        found = demo_run.optimizers(self.contender.optimizer, model)
        groups = one(found).param_groups
        scale = self.contender.get("rate", groups[0]["lr"]) / groups[0]["lr"]
        for group in groups:
            group["lr"] *= scale
        return found

    def loss(self, model: nn.Module, step: int) -> torch.Tensor:
        """Return the loss of this worker's batch in ``step``."""
        rows = batch(self.text.train, self.task.rows, self.task.shape.context, self.cell.seed, step, self.rank)
        found: torch.Tensor = model(rows)
        return found

    def _alone(self, model: nn.Module) -> float:
        """Return the median seconds of a step that exchanges nothing.

        The workers wait for each other in it, as they do in an exchange, so it lasts as long as the slowest worker.
        """
        optimizer, seconds = one(self.optimizer(model)), []
        dist.barrier()
        for step in range(ALONE_STEPS):
            started = time.perf_counter()
            optimizer.zero_grad()
            self.loss(model, step).backward()
            dist.barrier()
            optimizer.step()
            seconds.append(time.perf_counter() - started)
        return statistics.median(seconds[1:])  # the first one makes the optimizer's state

    def train(self) -> None:
        """Take the steps, and evaluate between them. Evaluation is not counted, neither its time nor its bytes."""
        steps = self.cell.steps
        every, reported = max(1, steps // VALIDATIONS), time.monotonic()
        lr_warmup = demo_run.Settings(steps=steps).lr_warmup
        complete = self.settings.take == steps
        groups = self.trained.optimizer.param_groups
        rates = [group["lr"] for group in groups]
        self._evaluate(0)
        for step in range(self.settings.take):
            for group, rate in zip(groups, rates, strict=True):
                group["lr"] = rate * min(1.0, (step + 1) / lr_warmup)
            self._step(step)
            self._count()
            if complete and ((step + 1) % every == 0 or step + 1 == steps):
                self._evaluate(step + 1)
            if self.rank == 0 and (time.monotonic() - reported > PROGRESS_SECONDS or step + 1 == self.settings.take):
                reported = time.monotonic()
                self._report(step)

    def _step(self, step: int) -> None:
        began = time.perf_counter()
        self.trained.optimizer.zero_grad()
        self.loss(self.trained.model, step).backward()
        returned = time.perf_counter()
        self.trained.optimizer.step()
        if step + 1 == self.cell.steps:
            self.trained.finish()
        ended = time.perf_counter()
        self.seconds.append(ended - began)
        self.parts.append(self.trained.parts(began, returned, ended))

    def _report(self, step: int) -> None:
        loss = f", loss {self.validations[-1][1]:.3f}" if len(self.validations) > 1 else ""
        self._send(f"{self.cell}: step {step + 1}/{self.settings.take}, {self.seconds[-1]:.3f} s{loss}")

    def _count(self) -> None:
        """Add the bytes sent since the last call, or since the last evaluation."""
        now = self._interface.read()
        self.bytes.append(now - self._counted)
        self._counted = now

    def _evaluate(self, step: int) -> None:
        """Add the validation loss after ``step`` steps. Each rank evaluates a part of the batches."""
        dist.barrier()  # what others still had to receive of the last step is on its way: count it
        if self.bytes:
            sent = self.bytes.pop()
            self._count()
            self.bytes[-1] += sent
        with self.trained.evaluated() as model, torch.no_grad():
            inside = getattr(model, "module", model)  # without the broadcasts and buffers of DDP
            sharded = self.contender.get("door", "wrap") == "fsdp"  # all shards take part in every batch
            own = self._held_out if sharded else self._held_out[self.rank :: dist.get_world_size()]
            losses = [inside(rows).item() for rows in own]
        total = torch.tensor([sum(losses), len(losses)], dtype=torch.float64)
        dist.all_reduce(total)
        self.validations.append((step, float(total[0] / total[1])))
        dist.barrier()
        self._counted = self._interface.read()

    def result(self) -> dict[str, Any]:
        """Return the columns, with means over the workers where they differ."""
        parts_of_steps = ([part[name] for part in self.parts] for name in PARTS)
        table = torch.tensor([self.seconds, self.bytes, *parts_of_steps], dtype=torch.float64)
        hidden = self.trained.hidden
        scalars = torch.tensor([self.latency, self.alone, -1.0 if hidden is None else hidden], dtype=torch.float64)
        dist.all_reduce(table)
        dist.all_reduce(scalars)
        size = dist.get_world_size()
        seconds, sent, *parts = (table / size).tolist()
        latency, alone, share = (scalars / size).tolist()
        after = min(self.warmup, self.settings.take - 1)  # averages leave out the dense steps at the start
        return {
            "numel": self.numel,
            "warmup_steps": self.warmup,
            "latency": latency,
            "seconds_alone": alone,
            "hidden": None if hidden is None else share,
            "seconds_per_step": statistics.fmean(seconds[after:]),
            "parts": {name: statistics.fmean(part[after:]) for name, part in zip(PARTS, parts, strict=True)},
            "kilobytes": statistics.fmean(sent) / 1e3,
            "kilobytes_after_warmup": statistics.fmean(sent[after:]) / 1e3,
            "seconds": [round(value, 5) for value in seconds],
            "validations": self.validations if self.settings.take == self.cell.steps else [],
        }


def ping() -> float:
    """Return the median seconds that a small message takes from rank 0 to rank 1, the same on all ranks."""
    found, word = torch.zeros(1, dtype=torch.float64), torch.zeros(1)
    seconds = []
    dist.barrier()
    if dist.get_rank() < 2:  # noqa: PLR2004
        for _ in range(PINGS):
            started = time.perf_counter()
            for sender in (0, 1):
                if dist.get_rank() == sender:
                    dist.send(word, 1 - sender)
                else:
                    dist.recv(word, sender)
            seconds.append((time.perf_counter() - started) / 2)
        found[0] = statistics.median(seconds) if dist.get_rank() == 0 else 0.0
    dist.broadcast(found, 0)
    return found.item()
