"""A timeline of exchanges, for Perfetto (https://ui.perfetto.dev) or chrome://tracing."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist

# Of the process and not of a context: exchanges may run on a thread of their own. The last one entered counts.
_tracers: list[Tracer] = []


class Tracer:
    """Collects events: phases as spans, messages as arrows' ends inside them."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self.ranks: set[int] = set()
        self.simulated = False
        self._threads: dict[int, int] = {}

    def phase(self, rank: int, name: str, started: float, seconds: float, details: Mapping[str, Any]) -> None:
        """``rank`` spent ``seconds`` from ``started`` (seconds) in ``name``."""
        self.ranks.add(rank)
        self.events.append(
            {"name": name, "cat": "exchange", "ph": "X", "ts": 1e6 * started, "dur": 1e6 * seconds}
            | {"pid": rank, "tid": self._track(), "args": dict(details)}
        )

    def message(self, rank: int, peer: int, name: str, at: float, size: int, *, sent: bool) -> None:
        """``size`` bytes to or from ``peer``, begun at ``at`` (seconds)."""
        direction = "to" if sent else "from"
        self.events.append(
            {"name": f"{direction} {peer}", "cat": "message", "ph": "i", "s": "t", "ts": 1e6 * at}
            | {"pid": rank, "tid": self._track(), "args": {"phase": name, "bytes": size}}
        )

    def _track(self) -> int:
        """A small number for the thread: two exchanges may run beside each other."""
        return self._threads.setdefault(threading.get_ident(), len(self._threads))

    def write(self, file: Path) -> None:
        """Everything so far, as the JSON object that Chrome's trace format asks for."""
        names = [
            {"name": "process_name", "ph": "M", "pid": rank, "args": {"name": f"rank {rank}"}}
            for rank in sorted(self.ranks)
        ]
        file.write_text(json.dumps({"traceEvents": names + self.events, "displayTimeUnit": "ms"}) + "\n")


@contextmanager
def trace(file: str | Path) -> Iterator[Tracer]:
    """Write a timeline of all exchanges in the block to ``file``: phases and messages per rank.

    Real time on a process group, virtual time in a simulation with a link. Every process of a process group writes its
    own file, with its rank before the suffix: ``trace.json`` becomes ``trace-rank-3.json``.
    """
    tracer = Tracer()
    _tracers.append(tracer)
    try:
        yield tracer
    finally:
        _tracers.remove(tracer)
        path = Path(file)
        if not tracer.simulated:
            path = path.with_name(f"{path.stem}-rank-{_rank()}{path.suffix}")
        tracer.write(path)


def current() -> Tracer | None:
    """Who collects events now, if anybody."""
    return _tracers[-1] if _tracers else None


def _rank() -> int:
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def now() -> float:
    """Seconds on a clock that all processes of a machine have in common."""
    return time.time()
