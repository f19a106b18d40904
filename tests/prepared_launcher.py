"""Runs scripts in processes forked from one that has imported what they need, also on several ranks like torchrun.

An import of PyTorch takes longer than many of the scripts, and one of a trainer longer still. Local workers of a script
are forked from it for the same reason. A deep run starts each script with an interpreter of its own, and ranks with
torchrun. So does a platform other than Linux.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import functools
import gc
import importlib
import multiprocessing
import os
import pickle
import runpy
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import ranks

TESTS = Path(__file__).resolve().parent
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "CUDA_VISIBLE_DEVICES": "", "MPLBACKEND": "agg"}


class PreparedLauncher:
    """Runs scripts. ``python`` is the command for one, ``torchrun`` that for several ranks."""

    def __init__(self, python: Sequence[str], torchrun: Sequence[str]) -> None:
        self.python, self.torchrun = python, torchrun

    def run(self, script: Path, *arguments: str, folder: Path, world_size: int = 0) -> subprocess.CompletedProcess[str]:
        """Run ``script`` in ``folder``, as ``world_size`` ranks with torchrun's variables, or as one plain process.

        What the script starts is waited for too, until its output ends. All is killed after four minutes.
        """
        ranks = [*self.torchrun, f"--nproc-per-node={world_size}", "--standalone"]
        command = [*(ranks if world_size else self.python), str(script), *arguments]
        try:
            return subprocess.run(
                command, cwd=folder, env=os.environ | ENVIRONMENT, capture_output=True, text=True, timeout=240,
                check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired as late:
            raise AssertionError(f"{script} still ran after four minutes: {late.stdout} {late.stderr}") from None


def prepared(*modules: str) -> PreparedLauncher:
    """Return a launcher whose processes have imported those of ``modules`` that are installed."""
    python = forked_python(*modules)
    return PreparedLauncher(python, [*python, "--ranks"])


@functools.cache
def forked_python(*modules: str) -> list[str]:
    """Return a command like ``python``, whose processes are forked from one that has imported ``modules``, too."""
    folder = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, folder)
    path = str(Path(folder, "socket"))
    context = ranks.forking()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        context.Process(target=serve, args=(listener, modules), daemon=True).start()
    return [sys.executable, "-I", "-S", str(TESTS / "forked_python.py"), path]


def serve(listener: socket.socket, modules: Sequence[str]) -> NoReturn:
    """Fork a process for each one that connects, which is a ``forked_python.py``."""
    os.environ |= ENVIRONMENT  # some of it is read at an import
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]  # what it forks may fork
    own = [str(TESTS), str(TESTS.parent / "benchmarks")]
    sys.path[:] = [each for each in sys.path if not each.startswith(tuple(own))]
    for name in ("torch.distributed.run", *modules):
        with contextlib.suppress(ModuleNotFoundError):
            importlib.import_module(name)
    fork_local_workers()
    gc.freeze()
    signal.signal(signal.SIGCHLD, reap)
    session: Any = multiprocessing.parent_process()
    while listener in select.select([listener, session.sentinel], [], [])[0]:  # until the session ends, or was killed
        connection, _ = listener.accept()
        if not os.fork():
            guard(connection)
        connection.close()
    os._exit(0)


def reap(*_: object) -> None:
    """Forget the processes that have ended."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


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


def guard(connection: socket.socket) -> NoReturn:
    """Fork the process that a client asks for. It gets the client's signals, and does not outlive it.

    Both are a session, so that all that the process starts ends with the client.
    """
    os.setsid()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    numbers, files, *_ = socket.recv_fds(connection, 1 << 12, 253)
    (client, *_) = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    child = os.fork()
    if not child:
        connection.close()
        become(client, dict(zip(map(int, numbers.split()), files, strict=True)))
    for file in files:
        os.close(file)
    ended = os.pidfd_open(child)
    while ended not in select.select([connection, ended], [], [])[0]:
        number = connection.recv(1)
        os.killpg(0, number[0] if number else signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    with contextlib.suppress(OSError):  # the client was killed
        connection.sendall(str(code).encode())
    os._exit(0)


def become(client: int, files: dict[int, int]) -> NoReturn:
    """Let this forked process be what ``client`` stands for, and end it. ``files`` are the client's, by their numbers.

    The argument ``--ranks`` stands for torchrun on this node, without its agent.
    """
    moved = {number: fcntl.fcntl(file, fcntl.F_DUPFD, 1 + max(files)) for number, file in files.items()}
    for number, file in moved.items():
        os.dup2(file, number)
    for file in {*files.values(), *moved.values()} - set(files):
        os.close(file)
    process = Path("/proc", str(client))
    os.chdir((process / "cwd").readlink())
    os.environ.clear()
    os.environ.update(each.split("=", 1) for each in (process / "environ").read_text().split("\0") if each)
    if (process / "ns" / "net").readlink() != Path("/proc/self/ns/net").readlink():
        importlib.import_module("tritoncomm.slow.cables").enter(client)
    importlib.import_module("torch").set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    first, *arguments = (process / "cmdline").read_text().split("\0")[5:-1]
    if first == "--ranks":
        count, _, *arguments = arguments
        lead(int(count.partition("=")[2]), arguments)
    run_in_this_process(first, arguments)


def lead(world_size: int, command: Sequence[str]) -> NoReturn:
    """Run ranks, and end this process. If a rank fails, the others are stopped, as torchrun does."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    running = []
    for rank in range(world_size):
        child = os.fork()
        if not child:
            local = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
            os.environ |= {name: str(value) for name, value in local.items()}
            # Lightning looks for the last one, to find out whether torchrun has started it.
            os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port), "TORCHELASTIC_RUN_ID": "none"}
            run_in_this_process(*command[:1], command[1:])
        running.append(child)
    while running:
        ended, status = os.wait()
        running.remove(ended)
        if status:
            for other in running:
                os.kill(other, signal.SIGTERM)
            os._exit(1)
    os._exit(0)


def run_in_this_process(first: str, arguments: Sequence[str]) -> NoReturn:
    """Run what the command line ``python first *arguments`` says, and end this process."""
    run: Callable[[], object]
    if first == "-m":
        module, *arguments = arguments
        sys.path.insert(0, str(Path.cwd()))
        sys.argv = [module, *arguments]
        run = functools.partial(runpy.run_module, module, run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, str(Path(first).resolve().parent))
        sys.argv = [first, *arguments]
        main = types.ModuleType("__main__")
        main.__file__ = first
        sys.modules |= {"__main__": main, "__mp_main__": main}  # its workers know it by the second name
        run = functools.partial(exec, compile(Path(first).read_bytes(), first, "exec"), vars(main))
    code: object = 1
    try:
        run()
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
