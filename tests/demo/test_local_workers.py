"""Workers in local processes: the traceback of one that fails is shown, and none is left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tritoncomm.demo.local_workers import WorkerError, run_workers

from processes import end_soon, ends, fails, is_running, vanishes


def test_crash_shows_the_failing_rank() -> None:
    """The traceback is that of the failing rank, not that of a rank that lost its peer."""
    with pytest.raises(WorkerError, match=r"worker 1 failed:(.|\n)*ZeroDivisionError: the bug of rank 1"):
        run_workers(fails, 3)


def test_killed_worker_ends_the_run() -> None:
    """A worker that dies without a traceback raises an error instead of a hang."""
    with pytest.raises(WorkerError, match="worker 0 died without a traceback"):
        run_workers(vanishes, 2)


def test_threads_are_limited_in_workers_only() -> None:
    """Workers limit their threads. The number of threads of this process stays the same."""
    threads = torch.get_num_threads()
    assert run_workers(ends, 2) == [1, 1]
    assert torch.get_num_threads() == threads


LAUNCHER = """
import os, time
from tritoncomm.demo.local_workers import run_workers

def asleep(rank, world_size, send):
    send(os.getpid())
    time.sleep(60)

if __name__ == "__main__":
    run_workers(asleep, 2, listen=lambda number: print(number, flush=True))
"""


def test_workers_end_with_their_launcher(tmp_path: Path) -> None:
    """If the process that started workers is killed, they end, too."""
    script = tmp_path / "launcher.py"
    script.write_text(LAUNCHER)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, str(script)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as launcher:  # noqa: S603 - ours
        workers = [int(launcher.stdout.readline()) for _ in range(2)]
        assert all(map(is_running, workers))
        launcher.send_signal(signal.SIGKILL)
    assert end_soon(workers)
