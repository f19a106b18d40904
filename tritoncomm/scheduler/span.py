"""Measure the time of work on a device without waiting for it."""

from __future__ import annotations

import time

import torch


class Span:
    """The time from the construction of this object until :meth:`end`, on one device.

    On the CPU, this is the time of the host. On a GPU, where the host only enqueues work, it is the time of the current
    stream of ``device`` between two events. It is known when the GPU has reached the second one. Nothing here waits for
    that: read it one step later.

    Args:
        device: The device.
    """

    def __init__(self, device: torch.device) -> None:
        self._events: tuple[torch.cuda.Event, torch.cuda.Event] | None = None
        self._known: float | None = None
        self._device = device
        self._started = time.perf_counter()
        if device.type == "cuda":
            self._events = _event(), _event()
            self._events[0].record(torch.cuda.current_stream(device))  # the device may not be the current one

    def end(self) -> Span:
        """End the span, and return it."""
        if self._events is None:
            self._known = time.perf_counter() - self._started
        else:
            self._events[1].record(torch.cuda.current_stream(self._device))
        return self

    @property
    def is_known(self) -> bool:
        """True if :attr:`seconds` is final."""
        if self._known is None and self._events is not None and has_ended(self._events[1], self._device):
            self._known = _seconds(*self._events)
        return self._known is not None

    @property
    def seconds(self) -> float:
        """Seconds. 0 if they are not known yet."""
        return (self._known or 0.0) if self.is_known else 0.0

    def since(self, earlier: Span) -> float:
        """Return the seconds from the start of ``earlier`` on the same device to that of this one. Both are known."""
        if self._events is None or earlier._events is None:
            return self._started - earlier._started
        return _seconds(earlier._events[0], self._events[0])


def has_ended(event: torch.cuda.Event, device: torch.device) -> bool:
    """Return True if the GPU ``device`` has reached ``event``.

    With another current device, such as that of a new thread, a query would create a context there, which takes half a
    gigabyte.
    """
    with torch.cuda.device(device):
        return bool(event.query())  # type: ignore[no-untyped-call]


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def _seconds(start: torch.cuda.Event, end: torch.cuda.Event) -> float:
    milliseconds: float = start.elapsed_time(end)
    return milliseconds / 1e3
