"""Failure report: after a failed exchange, find the missing ranks and collect what each rank saw.

A rank that detects a failure writes a report to the store of the default process group. It also closes its
connections. Ranks that wait for it then fail at once instead of at the time-out. A rank without a report is lost or
slow. All surviving ranks return the same list of missing ranks, as long as they reach the store.
"""

from __future__ import annotations

import json
import re
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

# Seconds to wait for reports of ranks whose connection is closed, and of all others, which may still be computing.
_CLOSED_SECONDS, _SILENT_SECONDS = 2.0, 5.0
_PROBE_SECONDS = 0.05
_PROBE_TAG = (1 << 31) - 1
_TIMED_OUT = re.compile(r"timed out|timeout", re.IGNORECASE)
# gloo's text for a connection that this process closed itself.
_CLOSED_HERE = re.compile("application timeout", re.IGNORECASE)
_LOST = re.compile(
    r"pair closure|closed by|reset by|read error|write error|broken pipe|refused"  # gloo
    r"|communicator was aborted|remote process exit",  # NCCL
    re.IGNORECASE,
)


@dataclass(frozen=True)
class RankReport:
    """The report of one rank about a failed exchange.

    ``kind`` is "timeout", "lost", "protocol" or "error". ``where`` names step, round, phase and method, ``text`` is the
    error message. ``peers`` are the ranks that it exchanged messages with, numbered as in the group.
    """

    kind: str
    where: str
    text: str
    peers: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class FailureReport:
    """The reports of all ranks of a group about a failed exchange. Ranks are numbered as in the group.

    ``missing`` are the ranks without a report in time. All ranks use the list of the first rank that finished
    waiting. ``gone`` is True if the connections of the missing ranks were closed: they are lost and not only slow.
    ``reports`` holds the reports by rank.
    """

    missing: list[int]
    gone: bool
    reports: dict[int, RankReport]

    @property
    def timed_out(self) -> bool:
        """True if a rank timed out while it waited for a rank that may still be running."""
        return not self.gone and any(report.kind == "timeout" for report in self.reports.values())

    def described(self, own: int) -> str:
        """Return where the other ranks were. Ranks that were at the same place as rank ``own`` are left out."""
        mine = self.reports.get(own)
        others = [
            f"rank {rank} was in {report.where}"
            for rank, report in sorted(self.reports.items())
            if rank != own and (mine is None or report.where != mine.where)
        ]
        return "; ".join(others)


def kind_of(error: BaseException) -> str:
    """Return the kind of a backend's error. Only its text distinguishes a lost connection from a time-out."""
    text = str(error)
    if _LOST.search(text):
        return "lost"
    return "timeout" if _TIMED_OUT.search(text) else "error"


def collect(group: dist.ProcessGroup | None, rank: int, ranks: list[int], key: str, own: RankReport) -> FailureReport:
    """Write the report ``own`` to the store, and collect the reports of all ranks of the group.

    ``rank`` is this rank's number in the group. ``ranks`` are the global ranks of the group, in its order. ``key``
    names the group in the store. Returns when all ranks have reported or the waiting time is over.
    """
    store = _store()
    prefix = f"tritoncomm/{key}/"
    if store is not None:
        with suppress(RuntimeError):  # the process that hosted the store may have died
            store.set(f"{prefix}{rank}", json.dumps(asdict(own)))
    closed = cut_connections(group, rank, ranks)
    reports = {rank: own}
    started = time.monotonic()
    while store is not None and len(reports) < len(ranks):
        try:
            for other in set(range(len(ranks))) - set(reports):
                if store.check([f"{prefix}{other}"]):
                    reports[other] = RankReport(**json.loads(store.get(f"{prefix}{other}")))
        except RuntimeError:
            store = None
        waited, missing = time.monotonic() - started, set(range(len(ranks))) - set(reports)
        if waited > (_CLOSED_SECONDS if missing <= closed else _SILENT_SECONDS):
            break
        time.sleep(0.005)
    silent = set(range(len(ranks))) - set(reports)
    if store is None:  # without the store, only ranks that cannot be reached are known to be missing
        silent &= closed | set(own.peers)
    found: list[Any] = [sorted(silent & closed) or sorted(silent), bool(silent & closed)]
    if store is not None:  # a rank that finishes waiting later returns the same result
        with suppress(RuntimeError):
            found = json.loads(store.compare_set(f"{prefix}missing", "", json.dumps(found)))
    return FailureReport(found[0], gone=found[1], reports=reports)


def cut_connections(group: dist.ProcessGroup | None, rank: int, ranks: list[int]) -> set[int]:
    """Close this rank's connections, and return the ranks of ``group`` whose connections were already closed.

    Ranks that wait for this one then fail at once. gloo rejects a receive from a rank whose connection is closed. This
    finds the closed connections. gloo closes all connections of a process when a wait times out. One short wait
    therefore closes them. On other backends this does nothing and returns an empty set.
    """
    if "cpu:gloo" not in dist.get_backend_config(group):
        return set()
    time.sleep(_PROBE_SECONDS)  # a closed connection becomes visible only after some milliseconds
    probes: list[Any] = []
    closed: set[int] = set()
    for other, number in enumerate(ranks):
        if other != rank:
            try:
                probes.append(dist.irecv(torch.empty(1, dtype=torch.int32), number, group=group, tag=_PROBE_TAG))
            except RuntimeError as error:
                if not _CLOSED_HERE.search(str(error)):
                    closed.add(other)
    for probe in probes[:1]:
        with suppress(RuntimeError):
            probe.wait(timedelta(milliseconds=1))
    return closed


def _store() -> Any:
    with suppress(RuntimeError, ValueError, AttributeError):
        return dist.distributed_c10d._get_default_store()  # noqa: SLF001 - no public function returns it
    return None
