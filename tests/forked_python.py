"""A command like ``python`` whose processes are forked from one that has imported PyTorch: ``prepared_launcher.py``.

It hands over its open files and passes on signals, and then ends as the forked process does. That one reads the
arguments, the folder, the environment and the network of this one.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
from contextlib import suppress
from pathlib import Path


def main(path: str) -> None:
    """Let the process that listens at ``path`` fork one, and wait for it."""
    files = [number for number in (int(file.name) for file in Path("/proc/self/fd").iterdir()) if is_open(number)]
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(path)
        socket.send_fds(server, [" ".join(map(str, files)).encode()], files)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda number, _: server.send(bytes([number])))
        code = int(server.recv(16) or -signal.SIGKILL)  # which ends the whole group
    if code < 0:
        with suppress(OSError):  # SIGKILL cannot be reset, and need not
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    sys.exit(code)


def is_open(number: int) -> bool:
    """Whether this is an open file. The one that listed them is not any more."""
    with suppress(OSError):
        os.fstat(number)
        return True
    return False


if __name__ == "__main__":
    main(sys.argv[1])
