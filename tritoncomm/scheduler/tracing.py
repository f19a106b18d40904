"""Write timelines of exchanges for Perfetto (https://ui.perfetto.dev) or chrome://tracing."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from tritoncomm.errors import ConfigurationError
from tritoncomm.scheduler.ranks import own_rank
from tritoncomm.scheduler.span import Span
from tritoncomm_kernels import devices

# Global to the process instead of a context variable, because exchanges may run on another thread. The last one is
# active.
_tracers: list[Tracer] = []


class Tracer:
    """Collects events in Chrome's trace format. Phases are spans, and messages are instant events inside them.

    ``ranks`` are the ranks with events. ``simulated`` is True if the events come from a simulation.
    """

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self.ranks: set[int] = set()
        self.simulated = False
        self._threads: dict[int, int] = {}
        self._device: torch.device | None = None  # the GPU of the spans
        self._anchor: tuple[Span, float] | None = None  # a known span on it, and the time of its start
        self._unread: list[tuple[int, int, str, Span, Mapping[str, Any], Sequence[tuple[int, int, bool]]]] = []

    def begin(self, device: torch.device) -> None:
        """Relate the clock of ``device`` to the one of this tracer, before the first span on it."""
        if devices.is_asynchronous(device) and self._anchor is None:
            devices.synchronize(device)
            at, anchor = now(), Span(device).end()
            devices.synchronize(device)
            self._device, self._anchor = device, (anchor, at)

    def operation(
        self, rank: int, name: str, span: Span, details: Mapping[str, Any], messages: Sequence[tuple[int, int, bool]]
    ) -> None:
        """Do the same as :meth:`add` for the time of ``span``, which has ended.

        On a GPU, this time is read when the trace is written.
        """
        if self._anchor is not None:
            self._unread.append((self._track(), rank, name, span, details, messages))
        else:
            self.add(rank, name, now() - span.seconds, span.seconds, details, messages)

    def settle(self) -> None:
        """Wait for the GPU, and read the times of all spans on it."""
        if self._anchor is None or self._device is None or not self._unread:
            return
        devices.synchronize(self._device)
        anchor, at = self._anchor
        unread, self._unread = self._unread, []
        for track, rank, name, span, details, messages in unread:
            self.add(rank, name, at + span.since(anchor), span.seconds, details, messages, track=track)

    def add(
        self,
        rank: int,
        name: str,
        started: float,
        seconds: float,
        details: Mapping[str, Any],
        messages: Sequence[tuple[int, int, bool]],
        *,
        track: int | None = None,
    ) -> None:
        """Add a span: ``rank`` was in phase ``name`` for ``seconds``, from time ``started`` (seconds).

        ``messages`` are tuples of the peer, the size in bytes, and whether the message is sent.
        """
        place = {"pid": rank, "tid": self._track() if track is None else track}
        self.ranks.add(rank)
        self.events.append(
            {"name": name, "cat": "exchange", "ph": "X", "ts": 1e6 * started, "dur": 1e6 * seconds}
            | {**place, "args": dict(details)}
        )
        for peer, size, sent in messages:
            self.events.append(
                {"name": f"{'to' if sent else 'from'} {peer}", "cat": "message", "ph": "i", "s": "t"}
                | {"ts": 1e6 * started, **place, "args": {"phase": name, "bytes": size}}
            )

    def _track(self) -> int:
        """Return a small number for the current thread. Two exchanges may run at the same time."""
        return self._threads.setdefault(threading.get_ident(), len(self._threads))

    def write(self, file: Path) -> None:
        """Write all events so far to ``file`` as a JSON object in Chrome's trace format."""
        self.settle()
        names = [
            {"name": "process_name", "ph": "M", "pid": rank, "args": {"name": f"rank {rank}"}}
            for rank in sorted(self.ranks)
        ]
        file.write_text(json.dumps({"traceEvents": names + self.events, "displayTimeUnit": "ms"}) + "\n")


@contextmanager
def trace(file: str | Path) -> Iterator[Tracer]:
    """Context manager that writes a timeline of all exchanges in the block to ``file``: phases and messages by rank.

    Times are real on a process group, and virtual in a simulation with a link. On a process group, every process
    writes its own file, with its rank before the suffix: ``trace.json`` becomes ``trace-rank-3.json``.

    Raises :class:`~tritoncomm.ConfigurationError` if the folder of ``file`` does not exist or cannot be written to.
    """
    folder = Path(file).parent
    if not (folder.is_dir() and os.access(folder, os.W_OK)) or Path(file).is_dir():
        raise ConfigurationError(f"file={str(file)!r}: must be a file in a folder that exists and can be written to")
    tracer = Tracer()
    _tracers.append(tracer)
    try:
        yield tracer
    finally:
        _tracers.remove(tracer)
        path = Path(file)
        if not tracer.simulated:
            path = path.with_name(f"{path.stem}-rank-{own_rank()}{path.suffix}")
        tracer.write(path)


def current() -> Tracer | None:
    """Return the active tracer, or None."""
    return _tracers[-1] if _tracers else None


def now() -> float:
    """Return the time in seconds on a clock that all processes of a machine share."""
    return time.time()
