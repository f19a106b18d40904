"""A race on a real, slow network: seconds and bytes of a step of dense DDP, its hooks, DiLoCo and our methods.

Real processes train on real sockets. ``--network`` says where, and may be repeated:

* ``namespaces:workers=4,rate=20mbit,delay=0s``: hosts of this machine, each in a network namespace with an interface of
  this rate. Needs root, iproute2 and util-linux. ``delay`` is that of every packet, such as 20ms.
* ``loopback:workers=4``: processes of this machine, without a limit.
* ``torchrun:rate=1gbit``: the processes of a running ``torchrun`` launch on real hosts. Start this script with torchrun
  on all of them. ``rate`` is only a label, and the rate for which ``plan`` predicts.

``--rivals`` are ``dense``, ``fp16``, ``powersgd:rank=4`` and ``diloco:steps=30``. ``--ours`` are methods of this
library: ``oktopk:density=0.03,values=4bit``. Their settings are arguments of ``wrap``, with its defaults.
``optimizer=muon`` lets any of them train with Muon, and AdamW beside it. Our methods then exchange updates, as they do
with local steps: ``quantized:optimizer=muon,local_steps=4``.

All train the same model on the same batches, the first steps of a whole run. Methods with dense steps at the start take
2 % of the whole run. Columns:

* ``ms per step``: mean, without the dense steps at the start.
* ``predicted``: what ``plan`` says, given the rate, the measured latency, the seconds of a step without exchange, and
  as ``--work-ms`` what a step of the default method took beside computation and the link on the fastest network.
* ``kB per step``: what the network interface of a host sends by the kernel's counters, mean over all steps of a whole
  run and all hosts.

Every finished run is added to the file of ``--json``, and is not repeated. ``best.py`` takes the seconds of steps from
there, and losses from ``train.py``: they do not depend on the network.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from datetime import datetime, timedelta, timezone
from functools import partial
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
import tritoncomm
from tritoncomm.demo.local_workers import WorkerError, run_workers
from tritoncomm.errors import TritoncommError
from tritoncomm.scheduler.cost import Link
from tritoncomm.slow import namespaces

import race_results
import race_worker
import script
from race_methods import Contender
from race_results import Row, Rows
from race_worker import Cell, Settings
from tasks import TASKS

RIVALS = ("dense", "fp16", "powersgd:rank=4", "powersgd:rank=8", "diloco:steps=30")
OURS = ("oktopk", "spardl")
SMOKE = (
    ["dense", "fp16", "powersgd:rank=1", "diloco:steps=2", "dense:optimizer=muon"],
    ["oktopk:values=8bit", "quantized:optimizer=muon,local_steps=4"],
)
TIMEOUT = timedelta(minutes=10)  # of a wait for another worker: a dense exchange on a slow link takes long
_FIELDS = {"namespaces": ("workers", "rate", "delay"), "loopback": ("workers",), "torchrun": ("rate",)}


@dataclass(frozen=True)
class Place:
    """Where workers run, as ``--network`` describes it. ``rate`` is a text such as "20mbit", or empty."""

    kind: str
    workers: int = 4
    rate: str = ""
    delay: str = "0s"

    @classmethod
    def parse(cls, text: str) -> Place:
        """Return what ``text`` describes. Raises :class:`argparse.ArgumentTypeError` for anything else."""
        kind, _, rest = text.partition(":")
        given = dict(part.partition("=")[::2] for part in rest.split(",") if part)
        unknown = [key for key in given if key not in _FIELDS.get(kind, ())]
        if kind not in _FIELDS or unknown:
            known = "; ".join(f"{kind}:{','.join(f'{key}=...' for key in keys)}" for kind, keys in _FIELDS.items())
            raise argparse.ArgumentTypeError(f"{text!r} is not a network: choose from {known}")
        try:
            place = cls(kind, int(given.get("workers", 4)), given.get("rate", ""), given.get("delay", "0s"))
            _ = place.link
        except (ValueError, TritoncommError) as error:
            raise argparse.ArgumentTypeError(f"{text!r} is not a network: {error}") from error
        return place

    @property
    def link(self) -> Link:
        """Rate and delay of an interface. Without a rate, it is that of a fast one."""
        return Link.parse(f"{self.rate or '1gbit'},{self.delay}")

    @property
    def bits(self) -> float:
        """Bits per second of an interface, or 0."""
        return 8 * self.link.bandwidth if self.rate else 0.0

    def __str__(self) -> str:
        delay = f" and {self.delay}" if self.link.latency else ""
        return f"{self.rate or self.kind}{delay}"


# A function that runs a cell on a network, with the settings of its workers, and returns the columns of its row.
Runner = Callable[[Cell, Settings], dict[str, Any]]


@contextlib.contextmanager
def opened(place: Place, limit: timedelta) -> Iterator[Runner]:
    """Context manager: make the network of ``place`` and give the function that runs cells on it."""
    with ExitStack() as stack:
        prepare = None
        if place.kind == "namespaces":
            network = stack.enter_context(namespaces.Network(place.workers, place.rate or None, place.delay))
            prepare = partial(_enter, network.hosts)
        shared_by = 1 if place.kind == "namespaces" else place.workers

        def run(cell: Cell, settings: Settings) -> dict[str, Any]:
            columns: dict[str, Any] = run_workers(
                race_worker.run_cell, place.workers, cell, replace(settings, shared_by=shared_by),
                listen=progress, timeout=TIMEOUT, limit=limit, prepare=prepare,
            )[0]  # fmt: skip
            return columns

        yield run


def _enter(hosts: list[namespaces.Host], rank: int) -> None:
    hosts[rank].enter()
    os.environ["GLOO_SOCKET_IFNAME"] = namespaces.INTERFACE


def progress(text: str) -> None:
    """Show a line of progress."""
    print(text, file=sys.stderr, flush=True)


def run_here(cell: Cell, settings: Settings) -> dict[str, Any]:
    """Run ``cell`` in the processes of a running launch, of which this is one."""
    shared_by = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    settings = replace(settings, shared_by=shared_by)
    return race_worker.run_cell(dist.get_rank(), dist.get_world_size(), progress, cell, settings)


def cells(options: argparse.Namespace, place: Place, workers: int) -> Iterator[Cell]:
    """Yield the runs that ``options`` describe."""
    for task in options.task:
        for seed in options.seeds:
            for contender in [*options.rivals, *options.ours]:
                steps = options.steps if options.smoke else TASKS[task](None, 1).steps
                yield Cell(task, str(place), workers, contender, seed, steps)


def steps_to_take(cell: Cell, least: int) -> int:
    """Return the number of steps of ``cell`` to take: at least ``least``, one after the start, and whole exchanges."""
    contender = Contender.parse(cell.contender)
    taken = max(least, contender.warmup(cell.steps) + 1)
    return min(cell.steps, -(-taken // contender.local_steps) * contender.local_steps)


def race(options: argparse.Namespace, place: Place, run: Runner, workers: int, rows: Rows) -> list[str]:
    """Run what is missing on one network. Add the rows to ``rows`` and to the file. Return what failed."""
    failed = []
    writes = place.kind != "torchrun" or dist.get_rank() == 0
    for cell in cells(options, place, workers):
        if cell in rows:
            continue
        try:
            columns = run(cell, Settings(steps_to_take(cell, options.steps), 1))
        except WorkerError as error:  # the other runs may still work
            failed.append(f"{cell}: {error}")
            progress(failed[-1])
            continue
        row = Row(cell, place.bits, machine(), cores(place, workers), **columns)
        rows[cell] = row
        if writes:
            print(race_results.line(row), flush=True)
            if options.json:
                race_results.write(rows, options.json, about())
    return failed


def cores(place: Place, workers: int) -> float:
    """Return the CPU cores for each worker. Workers in namespaces share one machine."""
    own = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return own / (int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if place.kind == "torchrun" else workers)


def machine() -> str:
    """Return the machine and the versions of the software."""
    versions = f"torch {torch.__version__}, tritoncomm {tritoncomm.__version__}, Python {platform.python_version()}"
    return f"{platform.machine()}, {os.cpu_count()} cores, Linux {platform.release()}, {versions}, gloo"


def about() -> dict[str, Any]:
    """Return what the file says about all rows."""
    return {"date": datetime.now(timezone.utc).isoformat(timespec="seconds"), "command": " ".join(sys.argv)}


def arguments() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = script.parser(__doc__)
    places = [Place("namespaces", 4, "20mbit")]
    parser.add_argument("--network", type=Place.parse, nargs="+", default=places, help="see above")
    parser.add_argument("--task", nargs="+", default=["demo"], choices=list(TASKS))
    parser.add_argument("--rivals", nargs="*", default=list(RIVALS), help="see above")
    parser.add_argument("--ours", nargs="*", default=list(OURS), help="see above")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--steps", type=int, default=60, help="number of steps to take")
    parser.add_argument("--limit", type=float, default=240, help="minutes after which a run is stopped")
    return parser


def parsed() -> argparse.Namespace:
    """Return the options of the command line, or exit with what is wrong with them."""
    parser = arguments()
    options = parser.parse_args()
    for text in [*options.rivals, *options.ours]:
        try:
            Contender.parse(text)
        except ValueError as error:
            parser.error(str(error))
    if options.smoke:
        options.task, options.steps, (options.rivals, options.ours) = ["gpt"], 6, SMOKE
        reason = namespaces.missing()
        options.network = [Place("loopback", 2) if reason else Place("namespaces", 2, "100mbit")]
        if reason:
            print(f"Without namespaces, on --network loopback: {reason}")
    if len(options.network) > 1 and any(place.kind == "torchrun" for place in options.network):
        parser.error("--network torchrun cannot be combined with other networks")
    return options


def main() -> None:
    """Run what is missing, print each row when it is done, and write the requested files."""
    options = parsed()
    signal.signal(signal.SIGTERM, _stop)
    place = options.network[0]
    if place.kind == "torchrun":
        dist.init_process_group("gloo", timeout=TIMEOUT)
        found = [race_results.read(options.json)]
        dist.broadcast_object_list(found, 0)  # all ranks must agree on what is missing
        failed = race(options, place, run_here, dist.get_world_size(), found[0])
        rows, shows = found[0], dist.get_rank() == 0
        dist.barrier()
        dist.destroy_process_group()
    else:
        rows, failed, shows = race_results.read(options.json), [], True
        for place in options.network:
            try:
                with opened(place, timedelta(minutes=options.limit)) as run:
                    failed += race(options, place, run, place.workers, rows)
            except namespaces.NetworkError as error:
                sys.exit(str(error))
    if shows:
        print(race_results.table(rows))
    if failed:
        sys.exit(f"{len(failed)} runs failed: " + json.dumps([text.splitlines()[0] for text in failed]))


def _stop(_number: int, _frame: FrameType | None) -> None:
    """End as if by Ctrl-C, so that workers are stopped."""
    raise KeyboardInterrupt


if __name__ == "__main__":
    main()
