"""Measure the time of work on a device without waiting for it."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch.profiler import record_function

from tritoncomm_kernels import devices


def profiled(name: str) -> record_function | None:
    """Return a context that is an event with this ``name`` for a profiler, or None if there is no profiler."""
    # record_function() takes its time also if nothing records.
    is_recorded = torch.autograd._profiler_enabled()  # type: ignore[attr-defined]  # noqa: SLF001
    return record_function(name) if is_recorded else None


class Span:
    """The time from the construction of this object until :meth:`end`, on one device.

    On the CPU, this is the time of the host. On a GPU, where the host only enqueues work, it is the time of the current
    stream of ``device`` between two events. It is known when the GPU has reached the second one. Nothing here waits for
    that: read it one step later.

    Args:
        device: The device.
        name: The span is also an event with this name for a profiler, if there is any. An empty name means none.
    """

    def __init__(self, device: torch.device, name: str = "") -> None:
        self._event = profiled(name) if name else None
        if self._event is not None:
            self._event.__enter__()  # type: ignore[no-untyped-call]
        self._known: float | None = None
        self._device = device
        self._started = time.perf_counter()
        self._end: Any = None
        self._start = devices.timed_event(device) if device.type != "cpu" and devices.is_asynchronous(device) else None

    def end(self) -> Span:
        """End the span, and return it."""
        if self._start is None:
            self._known = time.perf_counter() - self._started
        else:
            self._end = devices.timed_event(self._device)
        if self._event is not None:
            self._event.__exit__(None, None, None)
        return self

    @property
    def is_known(self) -> bool:
        """True if :attr:`seconds` is final."""
        if self._known is None and self._end is not None and devices.has_ended(self._end, self._device):
            self._known = _seconds(self._start, self._end)
        return self._known is not None

    @property
    def seconds(self) -> float:
        """Seconds. 0 if they are not known yet."""
        return 0.0 if self._known is None and not self.is_known else self._known or 0.0


def _seconds(start: Any, end: Any) -> float:
    milliseconds: float = start.elapsed_time(end)
    return milliseconds / 1e3
