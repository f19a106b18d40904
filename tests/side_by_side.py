"""Run commands at the same time, with ``--`` between them: those that use one core leave no other one idle.

What each has printed follows when it has ended, with the seconds that it took.
"""

from __future__ import annotations

import itertools
import shlex
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor, as_completed


def run(command: list[str]) -> tuple[str, int]:
    """Return what ``command`` printed, and its exit status."""
    start = time.monotonic()
    with tempfile.TemporaryFile("w+", encoding="utf-8") as output:
        status = subprocess.run(command, stdout=output, stderr=subprocess.STDOUT, check=False).returncode
        output.seek(0)
        return f"$ {shlex.join(command)}\n{output.read()}{status} after {time.monotonic() - start:.1f} s\n", status


def main(arguments: list[str]) -> int:
    """Run all commands to their ends. The status is 0 if that of each is."""
    commands = [[*words] for is_between, words in itertools.groupby(arguments, "--".__eq__) if not is_between]
    failed = 0
    with ThreadPoolExecutor(len(commands)) as threads:
        for ended in as_completed([threads.submit(run, command) for command in commands]):
            text, status = ended.result()
            print(text, flush=True)
            failed |= status
    return int(failed != 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
