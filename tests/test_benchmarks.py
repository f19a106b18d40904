"""Every benchmark runs, with ``--smoke``: seconds instead of hours."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pages import ROOT

pytest.importorskip("sklearn", reason="needs the extra 'benchmarks'")

PARTS = {"torture_situations.py", "selection_routes.py", "power_sgd.py"}  # of other scripts
SCRIPTS = sorted(file.name for file in (ROOT / "benchmarks").glob("*.py") if file.name not in PARTS)


@pytest.mark.parametrize("script", SCRIPTS)
def test_smoke(script: str, tmp_path: Path) -> None:
    """It ends well and writes what it was asked for: figures, and a picture where there is one."""
    command = [sys.executable, str(ROOT / "benchmarks" / script), "--smoke", "--json", str(tmp_path / "figures.json")]
    plots = "--plot" in (ROOT / "benchmarks" / script).read_text()
    if plots:
        command += ["--plot", str(tmp_path / "figure.png")]
    environment = os.environ | {"MPLBACKEND": "agg", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "figures.json").read_text())
    assert not plots or (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")
