"""One worker of ``slow``: it runs the script of the user, and reports each step of its optimizers.

``launcher.py`` starts this file as a script. It imports nothing but the standard library, so that what the user's
script does before it imports torch still counts.

A report is a line of JSON: the number of the optimizer, in the order of their first steps, the name of its class, the
seconds on the clock of this machine, and the bytes that the interface has sent and received. An exception that ends the
script is reported as the seconds alone.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import runpy
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any
from weakref import WeakKeyDictionary


class Reporter:
    """Reports steps to the launcher. With ``limit`` above 0, ends the script when an optimizer has taken that many.

    All workers wait there for each other, so that none closes a connection on which another one still receives.
    """

    def __init__(self, channel: socket.socket, limit: int) -> None:
        self._channel, self._limit = channel, limit
        self._released = threading.Event()
        self._seen = 0  # optimizers, of which some may be garbage
        self._taken: WeakKeyDictionary[Any, list[int]] = WeakKeyDictionary()  # number and steps of each optimizer
        threading.Thread(target=self._listen, daemon=True).start()

    def step(self, optimizer: Any, *_: Any) -> None:
        """Report a step. A hook that runs after the step of every optimizer."""
        now = time.monotonic()
        if optimizer not in self._taken:
            self._taken[optimizer] = [self._seen, 0]
            self._seen += 1
        taken = self._taken[optimizer]
        taken[1] += 1
        self._send([taken[0], type(getattr(optimizer, "optimizer", optimizer)).__name__, now, *_counters()])
        if taken[1] == self._limit:
            self._released.wait()
            raise SystemExit

    def failed(self) -> None:
        """Report that an exception ends the script."""
        self._send([time.monotonic()])

    def _send(self, report: list[Any]) -> None:
        self._channel.sendall(f"{json.dumps(report)}\n".encode())

    def _listen(self) -> None:
        """Wait for the launcher. If it is gone, end this process and all that it has started."""
        if self._channel.recv(1):
            self._released.set()
            self._channel.recv(1)
        os.killpg(0, signal.SIGKILL)


def _counters() -> tuple[int, int]:
    """Return the bytes that the interface of this host has sent and received, by the counters of the kernel."""
    sent = received = 0
    for line in Path("/proc/self/net/dev").read_text().splitlines()[2:]:
        name, _, counters = line.partition(":")
        if name.strip() != "lo":
            received, sent = int(counters.split()[0]), int(counters.split()[8])
    return sent, received


class _AfterImport(importlib.abc.MetaPathFinder):
    """Calls ``function`` with the module ``name`` as soon as it is imported."""

    def __init__(self, name: str, function: Callable[[ModuleType], None]) -> None:
        self._name, self._function = name, function

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return None, or what the other finders return for ``name``, with a loader that calls the function."""
        if fullname != self._name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                self._function(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def main(channel: str, limit: str, script: str, *arguments: str) -> None:
    """Run ``script``. ``channel`` is the file descriptor of a socket to the launcher."""
    reporter = Reporter(socket.socket(fileno=int(channel)), int(limit))

    def watch(found: Any) -> None:
        found.register_optimizer_step_post_hook(reporter.step)

    if "torch.optim.optimizer" in sys.modules:  # for example by a ``sitecustomize`` of the user
        watch(sys.modules["torch.optim.optimizer"])
    else:
        sys.meta_path.insert(0, _AfterImport("torch.optim.optimizer", watch))
    sys.argv, sys.path[0] = [script, *arguments], str(Path(script).resolve().parent)
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as ended:
        if ended.code not in (None, 0):
            reporter.failed()
        raise
    except BaseException as error:
        reporter.failed()
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename in (__file__, "<frozen runpy>"):
            trace = trace.tb_next
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        sys.exit(1)


if __name__ == "__main__":
    main(*sys.argv[1:])
