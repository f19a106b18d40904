"""Scripts that are forked from a prepared process end, fail and write as scripts of their own interpreter do."""

from __future__ import annotations

import sys
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
