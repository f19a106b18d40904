"""Runs a script on the hosts of a slow network, one worker on each, with the environment variables of torchrun."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import NamedTuple

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from tritoncomm.slow.namespaces import INTERFACE, Host, Network

PORT = 29500  # of the store, in a namespace where nothing else listens
POLL_SECONDS = 0.05
GRACE_SECONDS = 2.0  # for other workers, once one has failed, and for all of them, once they are told to end
LAST_LINES, LAST_BYTES = 20, 1 << 14  # of the output of a worker that has failed


class Step(NamedTuple):
    """A step of an optimizer in one worker: when it ended, and what the host has sent and received until then.

    ``number`` counts the optimizers of the script. ``seconds`` are those of a clock that all workers share.
    """

    number: int
    name: str
    seconds: float
    sent: int
    received: int


class Failure(NamedTuple):
    """The worker that failed first, its exit code, or minus the signal that ended it, and the end of its output.

    There are no lines of rank 0, whose output is shown as it comes.
    """

    rank: int
    code: int
    last_lines: list[str]


class Worker:
    """A running worker: its process, the steps that it has reported, and where its output goes."""

    def __init__(self, rank: int, host: Host, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self.rank, self.steps, self.failed_at = rank, list[Step](), 0.0
        self.channel, theirs = socket.socketpair()
        self.channel.setblocking(False)
        self._unread, self._counts = b"", Counter[int]()
        self._output = None if rank == 0 else tempfile.TemporaryFile()  # noqa: SIM115 - see close()
        with theirs:
            script = [str(Path(__file__).with_name("worker.py")), str(theirs.fileno())]
            self.process = subprocess.Popen(  # noqa: S603 - what the user asks for
                [*host.inside, sys.executable, *script, *command],
                env=environment, pass_fds=[theirs.fileno()], start_new_session=True, stdin=subprocess.DEVNULL,
                stdout=self._output, stderr=None if self._output is None else subprocess.STDOUT,
            )  # fmt: skip

    def receive(self) -> None:
        """Take what the worker has reported."""
        with suppress(BlockingIOError, ConnectionResetError):
            while found := self.channel.recv(1 << 16):
                *lines, self._unread = (self._unread + found).split(b"\n")
                for report in map(json.loads, lines):
                    if len(report) == 1:
                        self.failed_at = report[0]
                    else:
                        self.steps.append(Step(*report))
                        self._counts[self.steps[-1].number] += 1

    @property
    def taken(self) -> int:
        """The steps of the optimizer that has taken most."""
        return max(self._counts.values(), default=0)

    def failure(self) -> Failure:
        """Describe how the worker has ended."""
        lines: list[str] = []
        if self._output is not None:
            size = self._output.seek(0, os.SEEK_END)
            self._output.seek(max(0, size - LAST_BYTES))
            lines = self._output.read().decode(errors="replace").splitlines()[-LAST_LINES:]
        return Failure(self.rank, self.process.returncode, lines)

    def signal(self, number: int) -> None:
        """Send a signal to the worker, if it still runs, and to all that it has started."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, number)

    def close(self) -> None:
        """End the worker, if it still runs."""
        self.signal(signal.SIGKILL)
        self.process.wait()
        self.receive()
        self.channel.close()
        if self._output is not None:
            self._output.close()


class Launch:
    """Context manager: a run of ``command``, a script and its arguments, on every host of ``network``, which it makes.

    With ``steps``, the script ends after that many of an optimizer. At the end of the block all workers have ended, and
    the network is gone. Raises :class:`~tritoncomm.slow.namespaces.NetworkError` if it cannot be made.
    """

    def __init__(self, network: Network, command: Sequence[str], steps: int | None) -> None:
        self._network, self._command, self._limit = network, command, steps or 0
        self.workers: list[Worker] = []
        self._open = ExitStack()

    def __enter__(self) -> Launch:  # noqa: PYI034 - Self is of Python 3.11
        with ExitStack() as undo:
            hosts = undo.enter_context(self._network).hosts
            self._store = _store(hosts[0])
            for rank, host in enumerate(hosts):
                environment = os.environ | variables(rank, len(hosts), hosts[0].address)
                worker = Worker(rank, host, [str(self._limit), *self._command], environment)
                undo.callback(worker.close)
                self.workers.append(worker)
            self._open = undo.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._stop()
        finally:
            self._open.close()
            del self._store

    def wait(self) -> Failure | None:
        """Wait until all workers have ended, or one has failed and the others had a while to do so, too.

        Raises :class:`~tritoncomm.slow.namespaces.NetworkError` if the network is gone.
        """
        deadline, released = float("inf"), False
        while time.monotonic() < deadline:
            self._network.check()
            running = [worker for worker in self.workers if worker.process.poll() is None]
            for worker in self.workers:
                worker.receive()
            if not running:
                break
            if not released and self._limit and all(worker.taken >= self._limit for worker in running):
                released = True
                self._release(running)
            if deadline == float("inf") and any(worker.process.returncode for worker in self.workers):
                deadline = time.monotonic() + GRACE_SECONDS  # in which the others may say why they fail, too
            time.sleep(POLL_SECONDS)
        failed = [worker for worker in self.workers if worker.process.returncode]
        # A worker that died in silence makes the others fail.
        first = min(failed, key=lambda worker: worker.failed_at, default=None)
        return None if first is None else first.failure()

    @staticmethod
    def _release(workers: Sequence[Worker]) -> None:
        for worker in workers:
            with suppress(OSError):  # it has just ended
                worker.channel.send(b"x")

    def _stop(self) -> None:
        """Ask the workers to end, and wait for them for a while."""
        for worker in self.workers:
            worker.signal(signal.SIGTERM)
        deadline = time.monotonic() + GRACE_SECONDS
        for worker in self.workers:
            with suppress(subprocess.TimeoutExpired):
                worker.process.wait(max(0.0, deadline - time.monotonic()))


def variables(rank: int, world_size: int, address: str) -> dict[str, str]:
    """Return the variables that torchrun sets on host ``rank`` with one process per host. ``address`` is of the first.

    A value of the user's environment for OMP_NUM_THREADS stays. Without one, the workers share the cores.
    """
    local = {"LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1, "GROUP_RANK": rank, "GROUP_WORLD_SIZE": world_size}
    role = {"ROLE_RANK": rank, "ROLE_WORLD_SIZE": world_size, "ROLE_NAME": "default"}
    elastic = {"RESTART_COUNT": 0, "MAX_RESTARTS": 0, "RUN_ID": "none", "USE_AGENT_STORE": True}
    found = {"RANK": rank, "WORLD_SIZE": world_size, "MASTER_ADDR": address, "MASTER_PORT": PORT, **local, **role}
    found |= {f"TORCHELASTIC_{name}": value for name, value in elastic.items()}
    found |= {"GLOO_SOCKET_IFNAME": INTERFACE}
    threads = os.environ.get("OMP_NUM_THREADS", max(1, cores() // world_size))
    return {name: str(value) for name, value in found.items()} | {"OMP_NUM_THREADS": str(threads)}


def cores() -> int:
    """Return the CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _store(host: Host) -> TCPStore:
    """Return a store that listens on ``host``, as that of torchrun does. So it outlives rank 0."""

    def listen() -> TCPStore:
        host.enter()  # this thread alone, and the one that the store starts from it
        return TCPStore(host.address, PORT, is_master=True, wait_for_workers=False)

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(listen).result()
