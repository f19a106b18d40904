"""Run a function in local worker processes that share a gloo process group."""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from multiprocessing import set_forkserver_preload
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.multiprocessing import get_context
from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException, start_processes

Send = Callable[[Any], None]
POLL_SECONDS = 0.05
_GRACE_SECONDS = 1.0  # for other workers, once one has failed
# Workers are forked from a server process that has imported torch once and has run nothing else.
_START_METHOD = "forkserver"
# The modules that the server imports. Every optimizer of torch imports torch._dynamo, which takes over a second.
PRELOADED = ["tritoncomm", "torch._dynamo"]


class _Failure(NamedTuple):
    """An exception in a worker: its rank, its time in seconds since the epoch, and its traceback as text."""

    rank: int
    time: float
    text: str


class WorkerError(RuntimeError):
    """A worker failed, died, or did not finish in time. The message names its rank and holds its traceback, if any."""


def run_workers(
    function: Callable[..., Any],
    world_size: int,
    *args: Any,
    listen: Send | None = None,
    timeout: timedelta = timedelta(minutes=5),
    limit: timedelta | None = None,
    prepare: Callable[[int], None] | None = None,
) -> list[Any]:
    """Run ``function(rank, world_size, send, *args)`` in ``world_size`` processes. Return the results by rank.

    Each process has one thread. Its default process group is gloo over the loopback interface with the time-out
    ``timeout``. ``function`` must be importable by name. ``listen`` is called in this process with every object that a
    worker passes to ``send``. The object must be picklable. Each process calls ``prepare(rank)``, which must be
    picklable, before it makes its process group.

    Raises :class:`WorkerError` when a worker fails. The other workers are stopped after a second, and the message holds
    the traceback of the worker that failed first. Raises it also when workers still run after ``limit``.
    """
    set_forkserver_preload(PRELOADED)
    queue = get_context(_START_METHOD).SimpleQueue()
    results: dict[int, Any] = {}
    errors: list[_Failure] = []

    handlers: dict[str, Callable[[int, Any], None]] = {
        "result": results.__setitem__,
        "error": lambda rank, content: errors.append(_Failure(rank, *content)),
        "message": lambda _, content: listen(content) if listen else None,
    }

    def drain() -> None:
        while not queue.empty():
            rank, kind, content = pickle.loads(queue.get())  # noqa: S301 - written by our own workers
            handlers[kind](rank, content)

    with tempfile.TemporaryDirectory() as folder, _one_thread_per_worker():
        context = start_processes(  # type: ignore[no-untyped-call]
            _worker_main,
            args=(function, world_size, str(Path(folder) / "store"), queue, timeout, prepare, args),
            nprocs=world_size, join=False, start_method=_START_METHOD,
        )  # fmt: skip
        try:
            started = time.monotonic()
            while not context.join(timeout=POLL_SECONDS, grace_period=_GRACE_SECONDS):
                drain()
                if limit is not None and time.monotonic() - started > limit.total_seconds():
                    running = [rank for rank, process in enumerate(context.processes) if process.is_alive()]
                    raise WorkerError(f"workers {running} were still running after the time limit of {limit}")
        except (ProcessRaisedException, ProcessExitedException) as error:
            drain()
            raise WorkerError(_first_cause(errors, [process.exitcode for process in context.processes])) from error
        finally:
            for process in context.processes:
                if process.is_alive():
                    process.kill()
        drain()
    try:
        return [results[rank] for rank in range(world_size)]
    except KeyError as missing:
        raise WorkerError(f"worker {missing} ended without a result") from None


@contextmanager
def _one_thread_per_worker() -> Iterator[None]:
    """Set environment variables that worker processes inherit, and restore them at the end.

    One thread per worker, because more would compete for the cores. On Linux gloo uses the loopback interface.
    """
    settings = {"OMP_NUM_THREADS": "1"}
    if sys.platform == "linux":
        settings["GLOO_SOCKET_IFNAME"] = "lo"
    before = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _worker_main(  # runs in the worker process
    rank: int,
    function: Callable[..., Any],
    world_size: int,
    store: str,
    queue: Any,
    timeout: timedelta,
    prepare: Callable[[int], None] | None,
    args: tuple[Any, ...],
) -> None:
    def send(kind: str, content: Any) -> None:
        queue.put(pickle.dumps((rank, kind, content)))

    torch.set_num_threads(1)
    threading.Thread(target=_end_with_launcher, daemon=True).start()
    try:
        if prepare is not None:
            prepare(rank)
        dist.init_process_group(
            "gloo", init_method=f"file://{store}", rank=rank, world_size=world_size, timeout=timeout
        )
        result = function(rank, world_size, lambda content: send("message", content), *args)
        # Wait for all ranks. A rank that ends early looks like a lost peer to ranks that are still exchanging.
        dist.barrier()
        send("result", result)
    except BaseException:
        send("error", (time.time(), traceback.format_exc()))
        raise
    finally:
        with suppress(RuntimeError):
            dist.destroy_process_group()


def _end_with_launcher() -> None:
    """End this worker when the process that started it is gone. The operating system only tells the fork server."""
    launcher = multiprocessing.parent_process()
    assert launcher is not None
    multiprocessing.connection.wait([launcher.sentinel])
    os._exit(1)


def _first_cause(errors: list[_Failure], exit_codes: Sequence[int | None]) -> str:
    """Return a message about the worker that caused the failure.

    A worker that dies makes the exchanges of the others fail. The cause is the worker that died without a traceback, or
    else the one that failed first.
    """
    reported = {error.rank for error in errors}
    silent = [rank for rank, code in enumerate(exit_codes) if code not in (0, None) and rank not in reported]
    # The launcher stops the remaining workers with SIGTERM. So a worker with another exit code is the cause, and one
    # with SIGTERM only if no worker reported an error.
    silent.sort(key=lambda rank: exit_codes[rank] == -signal.SIGTERM)
    if silent and (not errors or exit_codes[silent[0]] != -signal.SIGTERM):
        return f"worker {silent[0]} died without a traceback, exit code {exit_codes[silent[0]]}"
    first = min(errors, key=lambda error: error.time)
    return f"worker {first.rank} failed:\n{first.text}"
