"""Tests whose body runs on every rank of a process group, in processes that stay for the whole session of pytest.

::

    @ranks(1, 2, 3)
    def test_mean(rank, world_size):
        ...

Each test gets a fresh gloo group. A worker of pytest-xdist has processes of its own.
"""

from __future__ import annotations

import atexit
import faulthandler
import functools
import gc
import importlib
import importlib.util
import inspect
import multiprocessing
import os
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import cache
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

import pytest

# Imported once, in the process that all others are forked from.
PRELOADED = [
    *("torch._dynamo", "hypothesis", "pytest", "torch.distributed.fsdp"),
    *("torch.distributed.checkpoint", "torch.distributed.checkpoint._fsspec_filesystem"),  # whose first save imports it
]
TRAINERS = ["transformers.trainer", "lightning", "accelerate"]
START_METHOD = "forkserver"  # or "fork", in a process that has imported these and started no threads
_GRACE = 3.0  # seconds that other ranks have to report when one has failed, and that a process has to end after a limit


def forking(method: str = "forkserver") -> Any:
    """Return a context of multiprocessing, whose processes are forked from one that has imported much.

    That one finds modules where this process finds them, and the package not in the current folder. Threads of several
    ranks share few cores: one that waits must not take the core of one that has work. OpenMP learns that at its import.
    """
    context: Any = multiprocessing.get_context(method)
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    if method == "forkserver":
        context.set_forkserver_preload(["tritoncomm", *PRELOADED, "frozen"])
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
            patch.setenv("PYTHONSAFEPATH", "1")
            forkserver.ensure_running()
    return context


class _Worker(NamedTuple):
    """A process, the pipe to it, and the file into which it writes where it hangs."""

    process: Any
    pipe: Connection
    log: Path


class _Failure(NamedTuple):
    """What a rank has failed with, and when. One that others fail because of comes first, at 0."""

    time: float
    text: str


def ranks(*world_sizes: int, limit: float = 60.0, lost: Collection[int] = ()) -> Callable[..., Any]:
    """Run a test on all ranks of a group, once for each of ``world_sizes``.

    The test is ``def test(rank, world_size, ...)``. Other arguments are fixtures or parameters that can be pickled. The
    test fails if the body fails on any rank, and shows the traceback of the first one. It fails if a rank is killed, or
    has not ended after ``limit`` seconds. Collectives of the group wait for a third of that. All processes are replaced
    after a failure, otherwise those alone that are ``lost``.

    Args:
        world_sizes: The numbers of ranks.
        limit: See above.
        lost: The ranks whose process the body ends, for example by ``os._exit``.
    """

    def decorate(body: Callable[..., None]) -> Callable[..., None]:
        @pytest.mark.parametrize("world_size", world_sizes)
        @functools.wraps(body)
        def test(world_size: int, **arguments: Any) -> None:
            POOL.run(body, world_size, arguments, limit, lost)

        parameters = inspect.signature(body).parameters.values()
        test.__signature__ = inspect.Signature([each for each in parameters if each.name != "rank"])  # type: ignore[attr-defined]
        return test

    return decorate


class Pool:
    """Processes that run the bodies of tests. They are started when they are needed first."""

    def __init__(self) -> None:
        self._workers: list[_Worker] = []
        self._folder: Any = None

    def run(
        self, body: Callable[..., None], world_size: int, arguments: dict[str, Any], limit: float, lost: Collection[int]
    ) -> None:
        """Run ``body`` on the first processes, and fail as it does. See :func:`ranks`."""
        while len(self._workers) < world_size:
            self._workers.append(self._start())
        workers, where = self._workers[:world_size], (inspect.getfile(body), body.__name__)
        with tempfile.TemporaryDirectory() as folder:
            for rank, worker in enumerate(workers):
                worker.pipe.send((*where, rank, world_size, arguments, str(Path(folder, "store")), limit))
            for worker in workers:
                worker.pipe.recv()  # it has imported the module, which takes long in a new process
            for worker in workers:
                worker.pipe.send("connect")
            for worker in workers:
                with suppress(EOFError):  # its failure is reported below
                    worker.pipe.recv()  # a rank that ends at once must not end before the others have connected
            for worker in workers:
                with suppress(OSError):
                    worker.pipe.send("begin")
            failures = self._reports(workers, limit, lost)
            for rank in [] if failures else set(range(world_size)) - set(lost):
                workers[rank].pipe.send("close the group")
        self._end(self._workers if failures else [workers[rank] for rank in lost])
        if failures:
            rank, first = min(failures.items(), key=lambda item: item[1].time)
            others = sorted(set(failures) - {rank})
            also = f"\n(other ranks that failed: {others})" if others else ""
            pytest.fail(f"rank {rank} of {world_size} failed:\n{first.text}{also}", pytrace=False)

    def _reports(self, workers: list[_Worker], limit: float, lost: Collection[int]) -> dict[int, _Failure]:
        """Return the failures by rank, when all ranks have reported, or ended, or it is too late."""
        waiting = {worker.pipe: rank for rank, worker in enumerate(workers)}
        failures: dict[int, _Failure] = {}
        deadline = time.monotonic() + limit + _GRACE
        while waiting:
            ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for pipe in ready:
                rank = waiting.pop(pipe)  # type: ignore[arg-type]
                try:
                    failure = pipe.recv()  # type: ignore[union-attr]
                except (EOFError, OSError):
                    failure = None if rank in lost else _Failure(0.0, _end_of(workers[rank]))  # the others lost it
                else:
                    if rank in lost:
                        failure = _Failure(time.time(), "the process of this rank should have ended")
                if failure is not None:
                    failures[rank] = failure
                    deadline = min(deadline, time.monotonic() + _GRACE)
                    with suppress(OSError):
                        pipe.send("close the group")  # type: ignore[union-attr]  # so that no rank waits for it
        for rank in waiting.values():
            failures[rank] = _Failure(time.time(), "it has not ended")
        return failures

    def _start(self) -> _Worker:
        if self._folder is None:
            self._folder = tempfile.TemporaryDirectory()
            atexit.register(self.close)
        context = forking(START_METHOD)
        here, there = context.Pipe()
        log = Path(tempfile.mkstemp(dir=self._folder.name)[1])
        process = context.Process(target=_main, args=(there, str(log)), daemon=True)
        process.start()
        there.close()
        return _Worker(process, here, log)

    def close(self) -> None:
        """End all processes."""
        self._end(self._workers)

    def _end(self, workers: Sequence[_Worker]) -> None:
        for worker in workers:
            worker.process.kill()
            worker.process.join()
            worker.pipe.close()
        self._workers = [worker for worker in self._workers if worker not in workers]


POOL = Pool()


def end() -> None:
    """End the processes now, for what ends this one without a clean-up."""
    POOL.close()


def _end_of(worker: _Worker) -> str:
    """Return how a process has ended without a report."""
    worker.process.join(_GRACE)
    where = worker.log.read_text()
    return f"it did not end in time, and was here:\n{where}" if where else f"exit code {worker.process.exitcode}"


def _main(pipe: Connection, log: str) -> None:  # runs in the process of a rank
    import torch  # noqa: PLC0415 - imported already, where this process was forked from

    importlib.import_module("baselines")  # as in conftest.py: all processes know the same methods from the beginning
    if START_METHOD == "fork":
        warnings.resetwarnings()  # the filters of pytest turn those of a trainer into errors
    torch.set_num_threads(1)
    os.environ |= {"OMP_NUM_THREADS": "1"} | ({"GLOO_SOCKET_IFNAME": "lo"} if sys.platform == "linux" else {})
    gc.collect()
    gc.freeze()  # a test that collects garbage does not look at all of torch
    gc.set_threshold(20_000, 20, 50)  # as in conftest.py
    with suppress(EOFError), Path(log).open("w") as file:  # the session has ended
        while True:
            file_of_test, name, rank, world_size, arguments, store, limit = pipe.recv()
            with suppress(Exception):  # which _outcome() meets again, and reports
                _module(file_of_test)
            pipe.send("ready")
            pipe.recv()  # no rank waits for the imports of another one
            faulthandler.dump_traceback_later(limit, exit=True, file=file)
            failure = _failure_of(_connect, rank, world_size, store, limit)
            pipe.send("connected")
            pipe.recv()
            pipe.send(failure or _failure_of(_run, file_of_test, name, rank, world_size, arguments))
            faulthandler.cancel_dump_traceback_later()
            pipe.recv()  # until all ranks have ended: one that closes its group earlier looks lost
            with suppress(RuntimeError, AssertionError):
                torch.distributed.destroy_process_group()
            _forget_meshes()


def _forget_meshes() -> None:
    """Clear what torch keeps of meshes of the last test. Those of the next one look equal, and have other groups."""
    redistribute = sys.modules.get("torch.distributed.tensor._redistribute")
    if redistribute is not None:
        debug = importlib.import_module("torch.distributed.tensor.debug")
        debug._clear_sharding_prop_cache()
        redistribute._gen_transform_infos.cache_clear()
        getattr(redistribute, "_planner_cache", {}).clear()  # of newer versions


def _failure_of(action: Callable[..., None], *arguments: Any) -> _Failure | None:
    try:
        action(*arguments)
    except BaseException:
        return _Failure(time.time(), traceback.format_exc())
    return None


def _connect(rank: int, world_size: int, store: str, limit: float) -> None:
    import torch  # noqa: PLC0415 - see above

    torch.manual_seed(0)
    torch.distributed.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=limit / 3),
    )


def _run(file: str, name: str, rank: int, world_size: int, arguments: dict[str, Any]) -> None:
    inspect.unwrap(getattr(_module(file), name))(rank=rank, world_size=world_size, **arguments)


@cache
def _module(file: str) -> Any:
    specification = importlib.util.spec_from_file_location(Path(file).stem, file)
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    sys.modules[module.__name__] = module
    specification.loader.exec_module(module)
    return module
