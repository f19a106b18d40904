"""Scripts that are forked from a prepared process end, fail and write as scripts of their own interpreter do."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from prepared_launcher import PreparedLauncher, prepared

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere each script has its own interpreter")


@pytest.fixture(scope="module")
def launcher() -> PreparedLauncher:
    """A prepared process, also in a deep run, in which the scripts of other tests have their own interpreter."""
    return prepared("matplotlib.pyplot")


@pytest.mark.parametrize(
    ("code", "exit_code", "out", "err"),
    [
        ("import sys; print(__name__, sys.argv[1:])", 0, "__main__ ['a', 'b']\n", ""),
        ("import atexit; atexit.register(print, 'late')", 0, "late\n", ""),
        ("import sys; sys.exit('wrong')", 1, "", "wrong\n"),
        ("1 / 0", 1, "", "ZeroDivisionError"),
        ("import atexit, os; atexit.register(os.abort)", -6, "", ""),
        ("import threading, time; threading.Thread(target=lambda: [time.sleep(0.3), print('done')]).start()", 0,
         "done\n", ""),
        ("import subprocess; subprocess.Popen(['/bin/sh', '-c', 'sleep 0.3; echo 1'])", 0, "1\n", ""),
    ],
)  # fmt: skip
def test_one_process(launcher: PreparedLauncher, tmp_path: Path, code: str, exit_code: int, out: str, err: str) -> None:
    """Output, exit code, and what happens at the end are those of an ordinary script."""
    script = tmp_path / "script.py"
    script.write_text(code)
    done = launcher.run(script, "a", "b", folder=tmp_path)
    assert (done.returncode, done.stdout) == (exit_code, out)
    assert err in done.stderr


def test_local_workers(launcher: PreparedLauncher, tmp_path: Path) -> None:
    """A script starts local workers, and not with a function that only a fork could pass to them."""
    script = tmp_path / "script.py"
    start = "from tritoncomm.demo.local_workers import run_workers\n"
    script.write_text(start + "def work(rank, *_): return rank\nif __name__ == '__main__': print(run_workers(work, 2))")
    done = launcher.run(script, folder=tmp_path)
    assert (done.returncode, done.stdout) == (0, "[0, 1]\n"), done.stderr
    script.write_text(start + "run_workers(lambda rank, *_: rank, 2)")
    done = launcher.run(script, folder=tmp_path)
    assert done.returncode == 1
    assert "pickle" in done.stderr


def test_failing_rank_stops_the_others(launcher: PreparedLauncher, tmp_path: Path) -> None:
    """The failure is reported at once, with its traceback."""
    script = tmp_path / "script.py"
    script.write_text("import os, time\nif os.environ['RANK'] == '0':\n    raise ValueError('here')\ntime.sleep(60)")
    started = time.monotonic()
    done = launcher.run(script, folder=tmp_path, world_size=2)
    assert done.returncode == 1
    assert "ValueError: here" in done.stderr
    assert time.monotonic() - started < 30


def test_time_limit(launcher: PreparedLauncher, tmp_path: Path) -> None:
    """What still runs after the limit is killed, the error says what it has written, and the next script runs."""
    script = tmp_path / "script.py"
    script.write_text("import time; print('started', flush=True); time.sleep(60)")
    with pytest.raises(AssertionError, match="still ran after"):
        launcher.run(script, folder=tmp_path, world_size=2, limit=1)
    script.write_text("print('next')")
    assert launcher.run(script, folder=tmp_path).stdout == "next\n"
