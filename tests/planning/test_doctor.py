"""The ``doctor`` command, which measures whether compression pays."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tritoncomm.__main__ import main
from tritoncomm.planning.doctor import break_even


def test_doctor_in_one_process(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Compression pays on a slow link and not on a fast one, as the exit code and the JSON file report."""
    file = tmp_path / "doctor.json"
    arguments = ["doctor", "--numel", "2e5", "--workers", "8", "--json", str(file), "--link"]
    assert main([*arguments, "10mbit,1us"]) == 0
    figures = json.loads(file.read_text())
    assert figures["pays"] is True
    assert figures["measured"] is False
    assert 0 < figures["selection_seconds"] < 10
    assert 0.05 < figures["break_even_density"] <= 0.2
    assert "Compression pays at density 5.00%" in capsys.readouterr().out
    assert main([*arguments, "10000gbit,1us"]) == 1
    assert "Stay dense" in capsys.readouterr().out
    assert main([*arguments, "10mbit,1us", "--step-ms", "1e6"]) == 1  # computation hides the dense all-reduce


def test_doctor_under_torchrun(tmp_path: Path) -> None:
    """Two ranks measure their exchanges."""
    file = tmp_path / "doctor.json"
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone", "-m", "tritoncomm",
        "doctor", "--numel", "1e5", "--json", str(file),
    ]  # fmt: skip
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)  # noqa: S603
    figures = json.loads(file.read_text())
    assert figures["workers"] == 2
    assert figures["measured"] is True
    assert figures["dense_seconds"] > 0
    assert (done.returncode == 0) == figures["pays"], done.stderr
    assert "2 workers, 100,000 values, exchanges measured" in done.stdout


def test_break_even() -> None:
    """The break-even density is interpolated linearly in the logarithm of the density."""
    assert break_even({0.001: 2.0, 0.1: 3.0}, 1.0) == 0
    assert break_even({0.001: 0.5, 0.1: 0.9}, 1.0) == 0.1
    assert break_even({0.001: 0.5, 0.1: 1.5}, 1.0) == pytest.approx(0.01)
