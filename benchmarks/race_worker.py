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

from race_methods import Contender, new_optimizer, one, trained
from tasks import TASKS

PROGRESS_SECONDS = 10.0
PINGS = 32
ALONE_STEPS = 9


@dataclass(frozen=True)
class Cell:
    """One run. ``network`` is the text that describes it, ``contender`` that of :class:`race_methods.Contender`.

    ``steps`` is the length of the whole run, of which only the first ones are taken.
    """

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
        self.task, self.contender = TASKS[cell.task](cell.steps, 1), Contender.parse(cell.contender)
        self.warmup = self.contender.warmup(cell.steps)
        torch.manual_seed(cell.seed)
        plain = self.task.model()
        self.numel = sum(parameter.numel() for parameter in plain.parameters())
        self.latency = ping()
        self.alone = self._alone(copy.deepcopy(plain))
        self.model, self.optimizer = trained(plain, self.contender, self.warmup)
        self.seconds: list[float] = []
        self.bytes: list[float] = []

    def _alone(self, model: nn.Module) -> float:
        """Return the median seconds of a step that exchanges nothing.

        The workers wait for each other in it, as they do in an exchange, so it lasts as long as the slowest worker.
        """
        optimizer, seconds = one(new_optimizer(model, self.contender)), []
        dist.barrier()
        for step in range(ALONE_STEPS):
            started = time.perf_counter()
            optimizer.zero_grad()
            self.task.loss(model, self.cell.seed, step, self.rank).backward()
            dist.barrier()
            optimizer.step()
            seconds.append(time.perf_counter() - started)
        return statistics.median(seconds[1:])  # the first one makes the optimizer's state

    def train(self) -> None:
        """Take the steps."""
        reported, lr_warmup = time.monotonic(), demo_run.Settings(steps=self.cell.steps).lr_warmup
        groups = self.optimizer.param_groups
        rates = [group["lr"] for group in groups]
        interface = Interface(self.settings.shared_by)
        dist.barrier()
        counted = interface.read()
        for step in range(self.settings.take):
            for group, rate in zip(groups, rates, strict=True):
                group["lr"] = rate * min(1.0, (step + 1) / lr_warmup)
            began = time.perf_counter()
            self.optimizer.zero_grad()
            self.task.loss(self.model, self.cell.seed, step, self.rank).backward()
            self.optimizer.step()
            self.seconds.append(time.perf_counter() - began)
            if step + 1 == self.settings.take:
                dist.barrier()  # what others still had to receive of this step is on its way: count it
            before, counted = counted, interface.read()
            self.bytes.append(counted - before)
            if self.rank == 0 and (time.monotonic() - reported > PROGRESS_SECONDS or step + 1 == self.settings.take):
                reported = time.monotonic()
                self._send(f"{self.cell}: step {step + 1}/{self.settings.take}, {self.seconds[-1]:.3f} s")

    def result(self) -> dict[str, Any]:
        """Return the columns, with means over the workers where they differ."""
        table = torch.tensor([self.seconds, self.bytes], dtype=torch.float64)
        scalars = torch.tensor([self.latency, self.alone], dtype=torch.float64)
        dist.all_reduce(table)
        dist.all_reduce(scalars)
        seconds, sent = (table / dist.get_world_size()).tolist()
        latency, alone = (scalars / dist.get_world_size()).tolist()
        after = min(self.warmup, self.settings.take - 1)  # averages leave out the dense steps at the start
        return {
            "numel": self.numel,
            "warmup_steps": self.warmup,
            "latency": latency,
            "seconds_alone": alone,
            "seconds_per_step": statistics.fmean(seconds[after:]),
            "kilobytes": statistics.fmean(sent) / 1e3,
            "kilobytes_after_warmup": statistics.fmean(sent[after:]) / 1e3,
            "seconds": [round(value, 5) for value in seconds],
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
