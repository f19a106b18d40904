"""Release a rank that waits on a GPU for a rank that failed.

NCCL has no time-out for a wait: ``work.wait()`` orders streams, and the host waits later, where it reads a result. If a
peer is lost, it waits there without end and without an error. A thread therefore watches the exchanges that are under
way. If one makes no progress, the thread looks in the store for a report of another rank. If there is one, or after the
time-out, it aborts the communicators of this rank, which ends the wait. What is read then has no meaning.

The time begins when the GPU has reached the exchange, because work of this rank that was enqueued before may take long.
That work may itself be a collective with a lost rank. Two limits hold for it: an exchange that is still under way on
the GPU counts from its own start, and the time-out of the process group counts from the call of the host.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from contextlib import suppress
from datetime import timedelta
from functools import cache
from types import TracebackType
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from tritoncomm.errors import ExchangeError, ExchangeTimeoutError, PeerLostError
from tritoncomm.scheduler.failure_report import IsInterruption, ends_program
from tritoncomm.scheduler.ranks import name_of, speaks
from tritoncomm_kernels import devices

logger = logging.getLogger("tritoncomm")

# Seconds without progress before the thread looks for reports, and between two looks.
POLL_SECONDS = 0.1
# Seconds that a rank needs to report a failure of another rank: it has to look for it, and to abort.
RELEASE_SECONDS = 3.0
_TIMEOUT = b"timeout"
_DEFAULT_TIMEOUT = timedelta(minutes=10)  # of a process group, with NCCL
_HANDLING = ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "NCCL_ASYNC_ERROR_HANDLING")  # the second is the older name
_ADVICE = (
    f"set {_HANDLING[0]}=0 before init_process_group, or NCCL's watchdog may end this process before it can report the "
    "rank that was lost (collectives of your own then wait for a lost rank without end)"
)

_under_way: set[Watcher] = set()
# Start and end of the last exchange on each GPU, also of another watcher.
_last: dict[torch.device, tuple[torch.Event, torch.Event]] = {}
# Keys are weak: a store that is still referenced after destroy_process_group keeps its server, and with it old keys.
_connections: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()
# What was in the store when a group was watched for the first time.
_stale: WeakKeyDictionary[dist.ProcessGroup, bytes] = WeakKeyDictionary()
_starting = threading.Lock()
_thread: threading.Thread | None = None


class Watcher:
    """Watches the exchanges of one scheduler, or of several that run at once.

    Enter it as a context for each exchange, also for one in a subgroup. Leaving the context raises the reason if
    communicators were aborted, whatever the exchange returned or raised.

    Args:
        group: Process group of the exchanges.
        device: The GPU of this rank.
        timeout: Maximum time without progress, from when the GPU has reached the exchange. None means the time-out of
            the process group.
        is_interruption: Tells which exceptions leave the context as they are.

    Attributes:
        groups: Process groups whose communicators are aborted: ``group``, and those of its subgroups.
    """

    def __init__(
        self, group: dist.ProcessGroup, device: torch.device, timeout: timedelta | None, is_interruption: IsInterruption
    ) -> None:
        self.groups = [group]
        self._is_interruption = is_interruption
        self._device = device
        self._key = f"tritoncomm/{name_of(group)}/failed"
        longest = timeout_of(group, device)
        self._seconds = (timeout or longest).total_seconds()
        self._longest = max(self._seconds, longest.total_seconds())
        self._store = _own_connection(dist.distributed_c10d._get_default_store())  # noqa: SLF001 - not public
        self._told = self._stale = b""
        self._ask()
        self._stale = _stale.setdefault(group, self._told)  # of an earlier default group with the same store
        self._asking: threading.Thread | None = None
        self._aborting: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._depth = 0
        self._since = 0.0  # progress of the host
        self._start: torch.Event | None = None
        self._reached = 0.0  # the last time that the GPU had not reached the start
        self._reason: ExchangeError | None = None
        self._reported = False
        if speaks(group):
            _log_advice(logging.INFO if timeout is None else logging.WARNING)

    def __enter__(self) -> Watcher:  # noqa: PYI034 - Self is not in Python 3.10
        with self._lock:
            if self._depth == 0:
                self._start = _begin(self._device)
            self._depth += 1
        self.progress()
        _under_way.add(self)
        _start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with self._lock:
            self._depth -= 1
            ended = self._depth == 0
        if ended:
            _under_way.discard(self)
            with suppress(RuntimeError):  # the GPU may have failed
                _end(self._device, self._start)
            end = time.monotonic() + RELEASE_SECONDS
            for thread in self._aborting:  # an abort may hang itself
                thread.join(max(0.0, end - time.monotonic()))
        # Also if others are under way: one of several exchanges has raised something, and its caller ends them.
        if not (error is not None and self._is_interruption(error)) and error is not self._reason:
            self.check(error)

    def check(self, consequence: BaseException | None = None) -> None:
        """Raise the reason if communicators were aborted. What has been read since then has no meaning."""
        if self._reason is not None and not self._reported:
            raise self._reason from consequence

    def progress(self) -> None:
        """Note that the exchange goes on."""
        self._since = time.monotonic()

    def fail(self, error: BaseException) -> BaseException:
        """Abort the communicators, and release the other ranks. Return the reason for which this rank has failed.

        It is ``error``, unless communicators were aborted before, of which ``error`` is a consequence.
        """
        with self._lock:
            reason, self._reported = self._reason, True
        if reason is None:
            self._abort(error)
        return reason or error

    def poll(self) -> None:
        """Abort the communicators if the exchange makes no progress because a rank has failed."""
        now = time.monotonic()
        waited = now - self._since
        if waited < POLL_SECONDS:
            return
        if not _is_complete(self._start, self._device):
            self._reached = now
        # On a thread of its own, because operations of a store never end if its host cannot be reached.
        if self._asking is None or not self._asking.is_alive():
            self._asking = threading.Thread(target=self._ask, daemon=True, name="tritoncomm watcher asks")
            self._asking.start()
        self._asking.join(POLL_SECONDS)
        if self._told == self._stale:
            if now - max(self._since, self._reached) <= self._seconds and waited <= self._longest:
                return
            reason: ExchangeError = ExchangeTimeoutError(f"the wait timed out after {waited:.1f} s")
        elif self._told.startswith(_TIMEOUT):
            reason = ExchangeTimeoutError("the wait of another rank timed out")
        else:
            reason = PeerLostError("another rank reported a failure")
        with self._lock:
            if self._depth == 0 or self._reason is not None or self._reported:
                return
            self._reason = reason
        self._abort(reason)

    def _ask(self) -> None:
        """Read what a rank that failed has left in the store, if anything."""
        with suppress(RuntimeError):  # the process that hosted the store may have died
            if self._store.check([self._key]):
                self._told = bytes(self._store.get(self._key))

    def _tell(self, reason: BaseException) -> None:
        kind = _TIMEOUT if isinstance(reason, ExchangeTimeoutError) else b"error"
        with suppress(RuntimeError):
            self._store.set(self._key, kind + f" {time.time()}".encode())

    def _abort(self, reason: BaseException) -> None:
        """Tell the other ranks, and end the operations of this rank, in the background.

        Each group has a thread: an abort can wait for operations of another group.
        """
        threading.Thread(target=self._tell, args=(reason,), daemon=True, name="tritoncomm watcher tells").start()
        threads = [
            threading.Thread(target=_abort, args=(group, self._device), daemon=True, name="tritoncomm abort")
            for group in self.groups
        ]
        for thread in threads:
            thread.start()
        self._aborting = threads  # only now, because another thread joins them


def of(
    group: dist.ProcessGroup | None,
    device: torch.device | None,
    timeout: timedelta | None = None,
    is_interruption: IsInterruption = ends_program,
) -> Watcher | None:
    """Return a watcher for exchanges in ``group`` on ``device``, or None if their waits end without one."""
    group = group or dist.group.WORLD
    if group is None or device is None or not devices.is_asynchronous(device) or dist.get_world_size(group) == 1:
        return None
    return Watcher(group, device, timeout, is_interruption)


def _begin(device: torch.device) -> Any:
    """Return the start of an exchange on ``device``: that of the one before, as long as that one has not ended."""
    stream = devices.current_stream(device)
    start, end = _last.get(stream.device, (None, None))
    return stream.record_event() if start is None or _is_complete(end, device) else start


def _end(device: torch.device, start: torch.Event | None) -> None:
    if start is not None:
        stream = devices.current_stream(device)
        _last[stream.device] = start, stream.record_event()


def _is_complete(event: torch.Event | None, device: torch.device) -> bool:
    """Return True if the GPU has reached ``event``, or has failed."""
    try:
        return event is None or devices.has_ended(event, device)
    except RuntimeError:
        return True


def _own_connection(store: Any) -> Any:
    """Return ``store`` with a connection of its own, one for all watchers. Another thread may wait in ``store``."""
    if store not in _connections:
        _connections[store] = store.clone()
    return _connections[store]


def advice() -> str:
    """Return what to set so that NCCL does not end a process before its error is raised. Empty if it is set."""
    return "" if any(os.environ.get(name) == "0" for name in _HANDLING) else _ADVICE


@cache
def _log_advice(level: int) -> None:
    if advice():
        logger.log(level, "failures of ranks are reported only as far as NCCL lets them: %s", advice())


def timeout_of(group: dist.ProcessGroup | None, device: torch.device) -> timedelta:
    """Return the time-out of ``group`` for tensors on ``device``, or a default. None is the default group."""
    whole = group or dist.group.WORLD
    assert whole is not None
    found: timedelta | None = None
    with suppress(RuntimeError):  # it has no backend for this device
        backend = whole._get_backend(device)  # noqa: SLF001 - no public function returns it
        found = getattr(getattr(backend, "options", None), "_timeout", None)
    return found or _DEFAULT_TIMEOUT


def _abort(group: dist.ProcessGroup, device: torch.device) -> None:
    with suppress(RuntimeError):  # it has been aborted or destroyed
        group._get_backend(device).abort()  # noqa: SLF001 - abort() of the group would abort gloo, too


def _start() -> None:
    global _thread  # noqa: PLW0603 - there is one for the process
    if _thread is not None and _thread.is_alive():  # it does not live on in a fork
        return
    with _starting:
        if _thread is None or not _thread.is_alive():
            _thread = threading.Thread(target=_watch, daemon=True, name="tritoncomm watcher")
            _thread.start()


def _watch() -> None:
    while True:
        time.sleep(POLL_SECONDS)
        for watcher in tuple(_under_way):
            try:
                watcher.poll()
            except Exception:  # the other exchanges still need this thread
                logger.exception("an exchange is not watched")
