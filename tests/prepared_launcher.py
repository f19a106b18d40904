"""Runs scripts in processes forked from one that has imported what they need, also on several ranks like torchrun.

An import of PyTorch takes longer than many of the scripts, and one of a trainer longer still.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import json
import os
import socket
import subprocess
import sys
import traceback
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any


class PreparedLauncher:
    """A process that has imported this package and those of ``modules`` that are installed, and forks scripts."""

    def __init__(self, *modules: str) -> None:
        environment = os.environ | {
            "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "CUDA_VISIBLE_DEVICES": "", "MPLBACKEND": "agg",
        }  # fmt: skip
        self.process = subprocess.Popen(
            [sys.executable, __file__, *modules],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment,
        )  # fmt: skip

    def run(self, script: Path, *arguments: str, folder: Path, world_size: int = 0) -> subprocess.CompletedProcess[str]:
        """Run ``script`` in ``folder``, as ``world_size`` ranks with torchrun's variables, or as one plain process."""
        with socket.socket() as probe:
            probe.bind(("localhost", 0))
            port = probe.getsockname()[1]
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        job = [str(script), arguments, str(folder), world_size, port]
        print(json.dumps(job), file=self.process.stdin, flush=True)
        code = json.loads(self.process.stdout.readline())
        out, err = ((folder / name).read_text() for name in ("stdout.txt", "stderr.txt"))
        return subprocess.CompletedProcess([str(script), *arguments], code, out, err)

    def close(self) -> None:
        """End the process."""
        self.process.communicate()


def serve(modules: Sequence[str]) -> None:
    """Run the scripts that are asked for on standard input, and answer with the largest exit code."""
    for name in ("tritoncomm", *modules):
        with contextlib.suppress(ModuleNotFoundError):
            importlib.import_module(name)
    for line in sys.stdin:
        script, arguments, folder, world_size, port = json.loads(line)
        for name in ("stdout.txt", "stderr.txt"):
            (Path(folder) / name).write_text("")
        ranks: list[dict[str, Any]] = [
            {
                "RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size,
                "MASTER_ADDR": "localhost", "MASTER_PORT": port,
            }
            for rank in range(world_size)
        ] or [{}]  # fmt: skip
        started = [os.fork() or work(script, arguments, folder, variables) for variables in ranks]
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in started]
        print(max(map(abs, codes)), flush=True)


def work(script: str, arguments: list[str], folder: str, variables: dict[str, Any]) -> int:
    """Run ``script`` in this forked process as an interpreter would, and end the process."""
    code: Any = 1
    try:
        os.chdir(folder)
        os.environ |= {name: str(value) for name, value in variables.items()}
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        for number, name in ((1, "stdout.txt"), (2, "stderr.txt")):
            os.dup2(os.open(name, os.O_WRONLY | os.O_APPEND), number)
        sys.argv, sys.path[0] = [script, *arguments], str(Path(script).parent)
        main = types.ModuleType("__main__")
        sys.modules |= {"__main__": main, "__mp_main__": main}  # its workers know it by the second name
        main.__file__ = script
        exec(compile(Path(script).read_bytes(), script, "exec"), vars(main))
        code = 0
    except SystemExit as end:
        code = end.code or 0
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code if isinstance(code, int) else 1)


if __name__ == "__main__":
    serve(sys.argv[1:])
