"""Timelines, and the doctor."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import tritoncomm
from tritoncomm import SimulatedWorld
from tritoncomm.__main__ import main
from tritoncomm.planning.doctor import break_even
from tritoncomm.scheduler.cost import Link

import gloo_training
from workers import run_workers


def test_trace_of_a_simulation(tmp_path: Path) -> None:
    """Virtual time: every rank's phases follow each other, and the messages are all there."""
    file = tmp_path / "trace.json"
    world = SimulatedWorld(tritoncomm.OkTopk(density=0.1), 3, 100, link=Link.parse("1gbit,1ms"))
    gradients = torch.randn(3, 100)
    world.step(gradients)  # outside
    with tritoncomm.trace(file):
        world.step(gradients)
    content = json.loads(file.read_text())
    events = content["traceEvents"]
    assert {e["args"]["name"] for e in events if e["ph"] == "M"} == {"rank 0", "rank 1", "rank 2"}
    for rank in range(3):
        spans = [e for e in events if e["ph"] == "X" and e["pid"] == rank]
        assert len({e["name"] for e in spans}) > 2
        assert all(a["ts"] + a["dur"] <= b["ts"] + 1e-3 for a, b in pairwise(spans))
        collectives = ("AllReduce", "AllGather", "AllToAll")
        messages = [e for e in events if e["ph"] == "i" and e["pid"] == rank]
        point_to_point = [
            t for p, t in world.scheduler.meters[rank].sent_by_phase.items() if _is_round(spans, p, collectives)
        ]
        assert sum(e["args"]["bytes"] for e in messages) == sum(t.bytes for t in point_to_point)
    assert 1e-6 * max(e["ts"] + e["dur"] for e in events if e["ph"] == "X") == pytest.approx(max(world.clock.now))


def _is_round(spans: list[dict], phase: str, collectives: tuple[str, ...]) -> bool:
    return any(e["name"] == phase and e["args"]["kind"] not in collectives for e in spans)


def test_trace_of_processes(tmp_path: Path) -> None:
    """Each process writes its own file, with method, step and round of each phase."""
    run_workers(gloo_training.traced, 2, str(tmp_path / "run.json"))
    assert sorted(file.name for file in tmp_path.iterdir()) == ["run-rank-0.json", "run-rank-1.json"]
    for rank in range(2):
        events = json.loads((tmp_path / f"run-rank-{rank}.json").read_text())["traceEvents"]
        spans = [e for e in events if e["ph"] == "X"]
        assert {e["pid"] for e in spans} == {rank}
        assert {e["args"]["step"] for e in spans} == {2, 3}
        assert {e["args"]["method"] for e in spans} == {"oktopk"}
        assert {e["name"] for e in events if e["ph"] == "i"} == {f"to {1 - rank}", f"from {1 - rank}"}


def test_doctor_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A slow link pays, a fast one does not; the exit code says so, and the file has the figures."""
    file = tmp_path / "doctor.json"
    arguments = ["doctor", "--numel", "2e5", "--workers", "8", "--json", str(file), "--link"]
    assert main([*arguments, "10mbit,1us"]) == 0
    figures = json.loads(file.read_text())
    assert figures["pays"] is True
    assert figures["measured"] is False
    assert 0 < figures["selection_seconds"] < 10
    assert 0.05 < figures["break_even_density"] <= 0.2
    assert "Compression pays at 5.00%" in capsys.readouterr().out
    assert main([*arguments, "10000gbit,1us"]) == 1
    assert "Stay dense" in capsys.readouterr().out
    assert main([*arguments, "10mbit,1us", "--step-ms", "1e6"]) == 1  # dense hides behind the computation


def test_doctor_under_torchrun(tmp_path: Path) -> None:
    """Two ranks measure each other."""
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
    """Between densities, along a line in their logarithms."""
    assert break_even({0.001: 2.0, 0.1: 3.0}, 1.0) == 0
    assert break_even({0.001: 0.5, 0.1: 0.9}, 1.0) == 0.1
    assert break_even({0.001: 0.5, 0.1: 1.5}, 1.0) == pytest.approx(0.01)
