"""Emulated CUDA streams, events, and the order in which work on them may touch memory.

Work runs at once, in the thread that enqueues it. What is emulated is the order that a GPU would guarantee: each stream
has a clock, and knows up to which time of every other stream it has waited. Work that touches memory which another
stream writes, without having waited for it, raises :class:`RaceError`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from emulated_cuda.device import Gpu


class RaceError(BaseException):
    """Work was enqueued on a stream that has not waited for other work on the same memory.

    Not an ``Exception``, because a real GPU raises nothing: nobody must handle it.
    """


def current_gpu() -> Gpu:
    """Return the GPU of the rank that this thread belongs to."""
    gpu: Gpu | None = getattr(threading.current_thread(), "emulated_gpu", None)
    if gpu is None:
        raise RuntimeError("this thread belongs to no rank: use emulated_cuda.ranks.run or emulated_cuda.ranks.alone")
    return gpu


class Stream:
    """Stands for ``torch.cuda.Stream``. ``seen[s]`` is the time of stream s for which this stream has waited."""

    def __init__(self, device: Any = None, priority: int = 0, *, gpu: Gpu | None = None, name: str = "") -> None:
        self.gpu = gpu or current_gpu()
        self._device = torch.device("cuda", current_device() if device is None else torch.device(device).index or 0)
        self.name = name or f"stream {self.gpu.next_number()}"
        self.clock = 0
        self.seen: dict[Stream, int] = {}
        self._host = -1
        self._freed: list[dict[Stream, int]] = []  # memory that other streams use, and until when
        self.gpu.streams.add(self)

    @property
    def device(self) -> torch.device:
        """The device of the stream."""
        return self._device

    def enqueue(self) -> int:
        """Return the time of new work. It runs after everything for which the host has waited."""
        self.clock += 1
        if self._host != self.gpu.host_version:
            self._host = self.gpu.host_version
            self.wait_for(self.gpu.host_seen)
        return self.clock

    def free(self, used: dict[Stream, int]) -> None:
        """Take back memory that this stream has allocated, and that other streams use until these times."""
        if used:
            self._freed.append(used)

    def allocate(self) -> None:
        """Allocate memory, or raise :class:`RaceError` if it may be memory that another stream uses.

        The caching allocator gives memory that was freed to the stream that had allocated it, at once. Here, any size
        fits any other.
        """
        if not self._freed:
            return
        self.enqueue()
        freed, self._freed = self._freed, []
        for other, at in (item for used in freed for item in used.items()):
            if self.seen.get(other, 0) < at:
                raise RaceError(
                    f"memory that was freed while {other} uses it is allocated again on {self}: keep it until {self} "
                    "waits for that work, or call record_stream"
                )

    def wait_for(self, seen: dict[Stream, int]) -> None:
        """Let work that is enqueued from now on run after these times of other streams."""
        for stream, at in seen.items():
            if stream is not self and self.seen.get(stream, 0) < at:
                self.seen[stream] = at

    def wait_event(self, event: Event) -> None:
        """Let work that is enqueued from now on run after ``event``."""
        if event.stream is not None:
            self.wait_for(event.seen)

    def wait_stream(self, stream: Stream) -> None:
        """Let work that is enqueued from now on run after all work on ``stream``."""
        self.wait_event(stream.record_event())

    def record_event(self, event: Event | None = None) -> Event:
        """Record ``event``, or a new one."""
        event = event or Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        """Let the host wait for all work on this stream. Counts as a synchronization."""
        self.gpu.synchronized("stream synchronize", self)

    def __repr__(self) -> str:
        return f"<{self.name} of {self.gpu}>"


class Event:
    """Stands for ``torch.cuda.Event``."""

    def __init__(self, enable_timing: bool = False, blocking: bool = False, **_: Any) -> None:
        self.enable_timing = enable_timing
        self.stream: Stream | None = None
        self.seen: dict[Stream, int] = {}
        self.recorded_at = self.ends_at = 0.0

    def record(self, stream: Stream | None = None) -> None:
        """Record the work that is on ``stream`` now, of the current stream by default."""
        self.stream = stream or current_stream()
        self.seen = {**self.stream.seen, self.stream: self.stream.enqueue()}
        self.recorded_at = time.perf_counter()
        self.ends_at = self.stream.gpu.busy_until

    def synchronize(self) -> None:
        """Let the host wait for the event. Counts as a synchronization."""
        if self.stream is not None:
            self.stream.gpu.synchronized("event synchronize", self.stream, self.seen)

    def query(self) -> bool:
        """Return True if the event is complete: one without timing as soon as the work of ``Gpu.keep_busy`` has ended.

        One with timing is complete when the host is known to have waited for it. A real one may be complete earlier.
        A real query makes a context on the current device of the thread, whatever the device of the event.
        """
        if self.stream is not None:
            self.stream.gpu.devices[current_device()] += 1
        if not self.enable_timing and time.perf_counter() >= self.ends_at:
            return True
        return self.stream is None or self.stream.gpu.host_seen.get(self.stream, 0) >= self.seen[self.stream]

    def elapsed_time(self, end: Event) -> float:
        """Return milliseconds. Both events must be complete: without a wait of the host, this is an error here."""
        for event in (self, end):
            if not event.enable_timing or event.stream is None:
                raise RuntimeError("Both events must be recorded and created with enable_timing=True")
            if not event.query():
                raise RuntimeError("CUDA error: device not ready")
        return 1e3 * (end.recorded_at - self.recorded_at)


_EVERYTHING = (0, 1 << 62)  # the bytes of an access, as long as only one stream uses the memory


class Memory:
    """The memory of a tensor and its views: which stream wrote and read it, and when.

    The current stream allocates it. Those in ``recorded`` may use it when it is freed.
    """

    __slots__ = ("_home", "reads", "recorded", "writes")

    def __init__(self) -> None:
        self._home = current_stream()
        self.recorded: set[Stream] = set()
        # By stream: time, first byte and end of what it touched. Several accesses are joined into one range.
        self.writes: dict[Stream, tuple[int, int, int]] = {}
        self.reads: dict[Stream, tuple[int, int, int]] = {}
        self._home.allocate()

    def __del__(self) -> None:
        others = [*self.writes.items(), *self.reads.items()]
        self._home.free({s: at for s, (at, *_) in others if s is not self._home and s not in self.recorded})

    def touch(self, stream: Stream, at: int, extent: Callable[[], tuple[int, int]], what: str, *, write: bool) -> None:
        """Note an access of ``stream`` at time ``at``, or raise :class:`RaceError`.

        A read must come after all writes of other streams to the same bytes, and a write also after all reads.
        """
        held = self.writes if write else self.reads
        low, high = _EVERYTHING
        if len(self.writes) > (stream in self.writes) or len(self.reads) > (stream in self.reads):  # other streams
            bounds = extent()
            self._check(stream, bounds, self.writes, "writes", what)
            if write:
                self._check(stream, bounds, self.reads, "reads", what)
            before = held.get(stream, (at, *bounds))
            low, high = min(bounds[0], before[1]), max(bounds[1], before[2])
        held[stream] = (at, low, high)

    @staticmethod
    def _check(
        stream: Stream, bounds: tuple[int, int], held: dict[Stream, tuple[int, int, int]], verb: str, what: str
    ) -> None:
        for other, (at, low, high) in list(held.items()):
            if other is stream:
                continue
            if stream.seen.get(other, 0) >= at:
                del held[other]  # everybody who waits for this access waits for that one, too
            elif low < bounds[1] and bounds[0] < high:
                raise RaceError(
                    f"{what} on {stream} uses memory that {other} {verb}: wait for its work or event on this stream"
                )


_local = threading.local()


def current_stream(device: Any = None) -> Stream:
    """Stand for ``torch.cuda.current_stream``. Each thread has its own, the default stream of its GPU at first."""
    gpu = current_gpu()
    gpu.devices[index_of(device)] += 1
    chosen: Stream | None = getattr(_local, "stream", None)
    return chosen if chosen is not None and chosen.gpu is gpu else gpu.default_stream


def set_stream(stream: Stream | None) -> None:
    """Stand for ``torch.cuda.set_stream``."""
    if stream is not None:
        _local.stream = stream


class StreamContext:
    """Stands for ``torch.cuda.StreamContext`` and ``torch.cuda.stream``. Entering returns None, as the originals do."""

    def __init__(self, stream: Stream | None) -> None:
        self.stream = stream

    def __enter__(self) -> None:
        self._before = current_stream()
        set_stream(self.stream)

    def __exit__(self, *_: object) -> None:
        set_stream(self._before)


def current_device() -> int:
    """Stand for ``torch.cuda.current_device``. A new thread begins with device 0, whatever its parent has set."""
    return int(getattr(_local, "device", 0))


def set_device(device: Any) -> None:
    """Stand for ``torch.cuda.set_device``."""
    _local.device = index_of(device)


def index_of(device: Any) -> int:
    """Return the index of ``device``, which is that of the current one if it has none."""
    index = device if device is None or isinstance(device, int) else torch.device(device).index
    return current_device() if index is None else index


def synchronize(device: Any = None) -> None:
    """Stand for ``torch.cuda.synchronize``."""
    current_gpu().devices[index_of(device)] += 1
    current_gpu().synchronized("device synchronize", seen={each: each.enqueue() for each in current_gpu().streams})


class OnDevice:
    """Stands for ``torch.cuda.device``."""

    def __init__(self, device: Any) -> None:
        self._device = device

    def __enter__(self) -> None:
        self._before = current_device()
        set_device(self._device)

    def __exit__(self, *_: object) -> None:
        set_device(self._before)
