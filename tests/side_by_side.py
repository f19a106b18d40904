"""Run a command, and beside it others that only compute, one after the other, with a low priority.

``python tests/side_by_side.py FIRST ... ::: SECOND ... ::: THIRD ...``. Tests with processes wait for much of their
time, and leave it to the others. What these print follows at the end. The status is 1 if a command fails.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from itertools import groupby

SEPARATOR = ":::"


def run(command: Sequence[str], output: int | None = None) -> str:
    """Run ``command``, and return what it was, how it ended, and after how long. ``output`` is a file's number."""
    began = time.monotonic()
    errors = None if output is None else subprocess.STDOUT
    status = subprocess.run(command, check=False, stdout=output, stderr=errors).returncode  # noqa: S603 - given by tox.ini
    return f"{'failed' if status else 'passed'} after {time.monotonic() - began:.0f} s: {' '.join(command)}"


def main(arguments: Sequence[str]) -> int:
    """Run the commands."""
    first, *others = (list(each) for is_end, each in groupby(arguments, SEPARATOR.__eq__) if not is_end)
    ends: list[str] = []
    with tempfile.TemporaryFile() as output:

        def work() -> None:
            for command in others:
                os.write(output.fileno(), f"\n$ {' '.join(command)}\n".encode())
                ends.append(run(["nice", "-n", "10", *command], output.fileno()))

        beside = threading.Thread(target=work)
        beside.start()
        end = run(first)
        beside.join()
        output.seek(0)
        sys.stdout.flush()
        sys.stdout.buffer.write(output.read())
    sys.stdout.write("\n".join(["", end, *ends, ""]))
    return int(any(each.startswith("failed") for each in (end, *ends)))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
