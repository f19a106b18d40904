"""Every benchmark runs with ``--smoke``, in seconds instead of hours."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pages import ROOT

pytest.importorskip("sklearn", reason="needs the extra 'benchmarks'")

PARTS = {  # of other scripts
    "demo_compressor.py",
    "doors_trainer.py",
    "half_precision.py",
    "power_sgd.py",
    "selection_routes.py",
    "torture_situations.py",
    "training_results.py",
}
SCRIPTS = sorted(file.name for file in (ROOT / "benchmarks").glob("*.py") if file.name not in PARTS)


@pytest.mark.parametrize("script", SCRIPTS)
def test_smoke(script: str, tmp_path: Path) -> None:
    """The script exits with code 0 and writes its figures, and its plot if it has one."""
    command = [sys.executable, str(ROOT / "benchmarks" / script), "--smoke", "--json", str(tmp_path / "figures.json")]
    plots = "--plot" in (ROOT / "benchmarks" / script).read_text()
    if plots:
        command += ["--plot", str(tmp_path / "figure.png")]
    environment = os.environ | {"MPLBACKEND": "agg", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "figures.json").read_text())
    pictures = list(tmp_path.glob("figure*.png"))  # volume.py writes several
    assert bool(pictures) == plots
    assert all(picture.read_bytes().startswith(b"\x89PNG") for picture in pictures)
