"""After a failure: who is still there, who is not, and what everybody was doing. All survivors come to one verdict.

A rank that notices something cuts its connections, so that whoever waits for it notices at once instead of at the
time-out, and leaves a report in the store that the process group was made from. Who leaves none is lost, or slow.
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

# How long to wait for reports: of ranks whose connection is closed, and of others, which may be computing.
_CLOSED_SECONDS, _SILENT_SECONDS = 2.0, 5.0
_PROBE_SECONDS = 0.05
_PROBE_TAG = (1 << 31) - 1
_TIMED_OUT = re.compile(r"timed out|timeout", re.IGNORECASE)
_OWN = re.compile("application timeout", re.IGNORECASE)  # this process closed it
_CUT = re.compile(r"pair closure|closed by|reset by|read error|write error|broken pipe|refused", re.IGNORECASE)


@dataclass(frozen=True)
class RankReport:
    """What one rank saw: ``kind`` is timeout, lost, protocol or error, ``peers`` whom it was dealing with."""

    kind: str
    where: str
    text: str
    peers: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class FailureReport:
    """``missing``: ranks that left no report in time, as the first to have counted found. ``reports`` by rank.

    ``gone``: their connections were closed, so that they have not only been slow.
    """

    missing: list[int]
    gone: bool
    reports: dict[int, RankReport]

    @property
    def timed_out(self) -> bool:
        """True when somebody waited too long for a rank that may still be there."""
        return not self.gone and any(report.kind == "timeout" for report in self.reports.values())

    def described(self, own: int) -> str:
        """What the other ranks were doing, once for each that was doing something else than this one."""
        mine = self.reports.get(own)
        others = [
            f"rank {rank} was in {report.where}"
            for rank, report in sorted(self.reports.items())
            if rank != own and (mine is None or report.where != mine.where)
        ]
        return "; ".join(others)


def kind_of(error: BaseException) -> str:
    """What a backend's error is, of which only the text tells."""
    text = str(error)
    if _CUT.search(text):
        return "lost"
    return "timeout" if _TIMED_OUT.search(text) else "error"


def collect(group: dist.ProcessGroup | None, rank: int, ranks: list[int], key: str, own: RankReport) -> FailureReport:
    """Report ``own`` and collect the reports of ``ranks`` (global numbers, in the order of the group) under ``key``."""
    store = _store()
    prefix = f"tritoncomm/{key}/"
    if store is not None:
        with suppress(RuntimeError):  # the store was in the process that died
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
    if store is None:  # without reports all that is known is who cannot be reached
        silent &= closed | set(own.peers)
    found: list[Any] = [sorted(silent & closed) or sorted(silent), bool(silent & closed)]
    if store is not None:  # who comes later is told the same
        with suppress(RuntimeError):
            found = json.loads(store.compare_set(f"{prefix}missing", "", json.dumps(found)))
    return FailureReport(found[0], gone=found[1], reports=reports)


def cut_connections(group: dist.ProcessGroup | None, rank: int, ranks: list[int]) -> set[int]:
    """Make everybody notice who waits for this rank; returns those whose connection was closed already.

    gloo refuses to post a receive from such a rank, and closes all connections of a process in which a wait has
    timed out.
    """
    if "cpu:gloo" not in dist.get_backend_config(group):
        return set()
    time.sleep(_PROBE_SECONDS)  # a death takes some milliseconds to be known
    probes: list[Any] = []
    closed: set[int] = set()
    for other, number in enumerate(ranks):
        if other != rank:
            try:
                probes.append(dist.irecv(torch.empty(1, dtype=torch.int32), number, group=group, tag=_PROBE_TAG))
            except RuntimeError as error:
                if not _OWN.search(str(error)):
                    closed.add(other)
    for probe in probes[:1]:
        with suppress(RuntimeError):
            probe.wait(timedelta(milliseconds=1))
    return closed


def _store() -> Any:
    with suppress(RuntimeError, ValueError, AttributeError):
        return dist.distributed_c10d._get_default_store()  # noqa: SLF001 - there is no public way
    return None
