"""Timelines of exchanges."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import training_workers
import tritoncomm
from helpers import run_workers
from tritoncomm import SimulatedWorld
from tritoncomm.__main__ import main
from tritoncomm.scheduler.cost import Link


def test_file_that_cannot_be_written(tmp_path: Path) -> None:
    """A trace refuses its file before anything is traced."""
    for file in (tmp_path / "missing" / "trace.json", tmp_path):
        with pytest.raises(tritoncomm.ConfigurationError, match="a folder that exists"), tritoncomm.trace(file):
            raise AssertionError("the block must not run")


def test_trace_without_a_process_group(tmp_path: Path) -> None:
    """A process without a group writes the file of rank 0."""
    with tritoncomm.trace(tmp_path / "trace.json"):
        pass
    assert [file.name for file in tmp_path.iterdir()] == ["trace-rank-0.json"]


def test_trace_of_a_simulation(tmp_path: Path) -> None:
    """The trace of a simulation has all messages, and the phases of each rank in virtual time."""
    file = tmp_path / "trace.json"
    world = SimulatedWorld(tritoncomm.OkTopk(density=0.1), 3, 100, link=Link.parse("1gbit,1ms"))
    gradients = torch.randn(3, 100)
    world.step(gradients)  # before the trace starts
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


def test_trace_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """``simulate --trace`` writes the timeline of one method, in the virtual time that the table shows."""
    file, figures = tmp_path / "trace.json", tmp_path / "rows.json"
    arguments = ["simulate", "--numel", "5e3", "--steps", "2", "--trace", str(file)]
    assert main([*arguments, "--algo", "oktopk", "--workers", "3", "--json", str(figures)]) == 0
    events = json.loads(file.read_text())["traceEvents"]
    assert {event["pid"] for event in events} == {0, 1, 2}
    (row,) = json.loads(figures.read_text())
    spans = [event for event in events if event["ph"] == "X"]
    (start,) = {min(e["ts"] for e in spans if e["pid"] == rank) for rank in range(3)}
    assert start == 0
    assert max(e["ts"] + e["dur"] for e in spans) >= 1e3 * row["milliseconds"] > 0
    for wrong in (["--algo", "oktopk", "spardl", "--workers", "3"], ["--algo", "oktopk", "--workers", "2,3"]):
        assert main([*arguments, *wrong]) == 2
        assert "--trace writes the timeline of one method and one number of workers" in capsys.readouterr().err


def _is_round(spans: list[dict], phase: str, collectives: tuple[str, ...]) -> bool:
    return any(e["name"] == phase and e["args"]["kind"] not in collectives for e in spans)


def test_trace_of_processes(tmp_path: Path) -> None:
    """Each process writes its own file, with method, step and round of each phase."""
    run_workers(training_workers.traced, 2, str(tmp_path / "run.json"))
    assert sorted(file.name for file in tmp_path.iterdir()) == ["run-rank-0.json", "run-rank-1.json"]
    for rank in range(2):
        events = json.loads((tmp_path / f"run-rank-{rank}.json").read_text())["traceEvents"]
        spans = [e for e in events if e["ph"] == "X"]
        assert {e["pid"] for e in spans} == {rank}
        assert {e["args"]["step"] for e in spans} == {2, 3}
        assert {e["args"]["method"] for e in spans} == {"oktopk"}
        assert {e["name"] for e in events if e["ph"] == "i"} == {f"to {1 - rank}", f"from {1 - rank}"}
