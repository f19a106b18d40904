"""Runs scripts in processes forked from one that has imported what they need, also on several ranks like torchrun.

An import of PyTorch takes longer than many of the scripts, and one of a trainer longer still. Local workers of a script
are forked from it for the same reason. A deep run starts each script with an interpreter of its own, and ranks with
torchrun. So does a platform other than Linux.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import json
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "CUDA_VISIBLE_DEVICES": "", "MPLBACKEND": "agg"}


class PreparedLauncher:
    """A process that has imported this package and those of ``modules`` that are installed, and forks scripts.

    If ``real``, each script has an interpreter of its own, and the command ``torchrun`` starts ranks.
    """

    def __init__(self, *modules: str, real: bool = False, torchrun: Sequence[str] = TORCHRUN) -> None:
        self.process, self.torchrun = None, torchrun
        if not real and sys.platform == "linux":
            self.process = subprocess.Popen(
                [sys.executable, __file__, *modules],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=os.environ | ENVIRONMENT,
            )  # fmt: skip

    def run(
        self, script: Path, *arguments: str, folder: Path, world_size: int = 0, limit: float = 240.0
    ) -> subprocess.CompletedProcess[str]:
        """Run ``script`` in ``folder``, as ``world_size`` ranks with torchrun's variables, or as one plain process.

        What the script starts is waited for too, until its output ends. All is killed after ``limit`` seconds.
        """
        if self.process is None:
            ranks = [*self.torchrun, f"--nproc-per-node={world_size}", "--standalone"]
            command = [*(ranks if world_size else [sys.executable]), str(script), *arguments]
            return subprocess.run(
                command, cwd=folder, env=os.environ | ENVIRONMENT, capture_output=True, text=True, timeout=limit,
                check=False,
            )  # fmt: skip
        with socket.socket() as probe:
            probe.bind(("localhost", 0))
            port = probe.getsockname()[1]
        pipes = [folder / f"{name}-{time.monotonic_ns()}" for name in ("stdout", "stderr")]
        written = ["", ""]

        def read(number: int) -> None:
            written[number] = pipes[number].read_text()

        for pipe in pipes:
            os.mkfifo(pipe)
        readers = [threading.Thread(target=read, args=[number], daemon=True) for number in range(2)]
        for reader in readers:
            reader.start()
        leader = self._ask([str(script), arguments, str(folder), world_size, port, [str(pipe) for pipe in pipes]])
        deadline = time.monotonic() + limit
        for reader in readers:
            reader.join(max(0.0, deadline - time.monotonic()))
        late = any(reader.is_alive() for reader in readers)
        if late:
            with contextlib.suppress(ProcessLookupError):  # it ended before it opened the pipes
                os.killpg(leader, signal.SIGKILL)
        code = self._answer()
        assert not late, f"{script} still ran after {limit:g} s: {written}"
        return subprocess.CompletedProcess([str(script), *arguments], code, *written)

    def _ask(self, job: list[Any]) -> int:
        assert self.process is not None
        assert self.process.stdin is not None
        print(json.dumps(job), file=self.process.stdin, flush=True)
        return self._answer()

    def _answer(self) -> int:
        assert self.process is not None
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, "the launcher ended, see its output"
        return int(line)

    def close(self) -> None:
        """End the process, and what it still runs."""
        if self.process is not None:
            self.process.communicate(timeout=60)


def serve(modules: Sequence[str]) -> None:
    """Run the scripts that are asked for on standard input. Answer with a process group, and then its exit code."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what an import prints is no answer
    for name in ("tritoncomm", "torch._dynamo", *modules):  # an optimizer imports the second in its first step
        with contextlib.suppress(ModuleNotFoundError):
            importlib.import_module(name)
    fork_local_workers()
    while line := sys.stdin.readline():
        leader = os.fork()
        if not leader:
            os.setpgid(0, 0)
            lead(*json.loads(line))
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.setpgid(leader, leader)  # whoever is first
        print(leader, file=answers, flush=True)
        code = None
        while code is None:
            ended, status = os.waitpid(leader, os.WNOHANG)
            if ended:
                code = os.waitstatus_to_exitcode(status)
            elif select.select([sys.stdin], [], [], 0.05)[0]:  # nobody asks before the answer, so this is the end
                os.killpg(leader, signal.SIGKILL)
                return
        print(code, file=answers, flush=True)


def fork_local_workers() -> None:
    """Let scripts fork their local workers. What they run must be picklable all the same, as elsewhere."""
    local_workers = importlib.import_module("tritoncomm.demo.local_workers")
    start = local_workers.start_processes

    def checked(main: object, args: tuple[Any, ...], **settings: object) -> object:
        function, *_, prepare, given = args
        pickle.dumps((function, prepare, given))
        return start(main, args, **settings)

    local_workers._START_METHOD = "fork"
    local_workers.start_processes = checked


def lead(script: str, arguments: list[str], folder: str, world_size: int, port: int, pipes: list[str]) -> NoReturn:
    """Run a job in this forked process, and end it. If a rank fails, the others are stopped, as torchrun does."""
    os.chdir(folder)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for number, pipe in enumerate(pipes, start=1):
        os.dup2(os.open(pipe, os.O_WRONLY), number)
    ranks = []
    for rank in range(world_size):
        child = os.fork()
        if not child:
            local = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
            os.environ |= {name: str(value) for name, value in local.items()}
            # Lightning looks for the last one, to find out whether torchrun has started it.
            os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port), "TORCHELASTIC_RUN_ID": "none"}
            become(script, arguments)
        ranks.append(child)
    if not ranks:
        become(script, arguments)
    while ranks:
        ended, status = os.wait()
        ranks.remove(ended)
        if status:
            for other in ranks:
                os.kill(other, signal.SIGTERM)
            os._exit(1)
    os._exit(0)


def become(script: str, arguments: list[str]) -> NoReturn:
    """Run ``script`` in this forked process, and end it."""
    sys.argv, sys.path[0] = [script, *arguments], str(Path(script).parent)
    main = types.ModuleType("__main__")
    main.__file__ = script
    sys.modules |= {"__main__": main, "__mp_main__": main}  # its workers know it by the second name
    code: object = 1
    try:
        exec(compile(Path(script).read_bytes(), script, "exec"), vars(main))
        code = 0
    except SystemExit as ended:
        code = ended.code or 0
    except BaseException:
        sys.excepthook(*sys.exc_info())
    if not isinstance(code, int):  # a message
        print(code, file=sys.stderr)
        code = 1
    end(code)


def end(code: int) -> NoReturn:
    """End this process like a script: its threads end, exit functions run, and output is flushed.

    The interpreter is not taken apart. With PyTorch imported, that takes longer than many of the scripts.
    """
    threading._shutdown()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)


if __name__ == "__main__":
    serve(sys.argv[1:])
    end(0)
