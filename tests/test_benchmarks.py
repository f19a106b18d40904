"""Every benchmark runs with ``--smoke``, in seconds instead of hours."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import tritoncomm
from tritoncomm.step.exchange.feedback import ErrorFeedback

import demo_compressor
import gpu
import gpu_forms
from depth import DEEP, interpreter
from emulated_cuda import ranks
from pages import ROOT
from prepared_launcher import PreparedLauncher

# Two scripts have tests of their own, which also read their figures. All other files are parts of these.
OWN = {"calls.py", "exchange.py"}
SCRIPTS = sorted({file.name for file in (ROOT / "benchmarks").glob("*.py") if "def main()" in file.read_text()} - OWN)


@pytest.mark.parametrize("script", SCRIPTS)
def test_smoke(script: str, launcher: PreparedLauncher, tmp_path: Path) -> None:
    """The script exits with code 0 and writes its figures, and its plot if it has one."""
    arguments = ["--smoke", "--json", str(tmp_path / "figures.json")]
    plots = "--plot" in (ROOT / "benchmarks" / script).read_text()
    if plots:
        arguments += ["--plot", str(tmp_path / "figure.png")]
    done = launcher.run(ROOT / "benchmarks" / script, *arguments, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "figures.json").read_text())
    assert not plots or (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")


def test_calls_in_a_step(launcher: PreparedLauncher, tmp_path: Path) -> None:
    """An ordinary step of a small model makes at most 2,500 calls in Python."""
    file = tmp_path / "calls.json"
    done = launcher.run(ROOT / "benchmarks" / "calls.py", "--json", str(file), folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads(file.read_text())["calls"]["tritoncomm"] <= 2500


def test_exchange_compares_formats(launcher: PreparedLauncher, tmp_path: Path) -> None:
    """Every method has rows, in each format that it has. Packed messages are shorter, and no step exceeds its bound."""
    file = tmp_path / "figures.json"
    script = ROOT / "benchmarks" / "exchange.py"
    done = launcher.run(script, "--smoke", "--json", str(file), folder=tmp_path)
    assert done.returncode == 0, done.stderr
    rows = {row["method"]: row for row in json.loads(file.read_text())["exchange"]}
    assert {name.partition(" ")[0] for name in rows} == {*tritoncomm.algorithms()}
    own = {"oktopk strict_volume", "oktopk preconditioned"}
    formats = {"oktopk": ["", " packed", " 4bit"], "exdyna": ["", " packed"], "random_block": ["", " 4bit"]}
    found = {name for name in rows if name.partition(" ")[0] in formats}
    assert found == {*own, *(name + label for name, labels in formats.items() for label in labels)}
    for name, labels in formats.items():
        sizes = [rows[name + label]["bytes_mean"] for label in labels]
        assert sizes == sorted(set(sizes), reverse=True)
    assert all(row["within_prediction"] for row in rows.values())


SHAPES = [torch.Size(shape) for shape in ([96, 128], [65], [8, 3, 3, 3], [1])]


def test_demo_transform_is_orthonormal() -> None:
    """DeMo's transform keeps the norm, its inverse is its transpose, and a chunk stays a chunk."""
    for shape in SHAPES:
        chunks = demo_compressor._Chunks(shape, 64)
        values = torch.randn(2, shape.numel(), generator=torch.Generator().manual_seed(0))
        coefficients = chunks.transform(values)
        torch.testing.assert_close(coefficients.flatten(1).norm(dim=1), values.norm(dim=1))
        torch.testing.assert_close(chunks.inverse(coefficients), values)
    block = torch.zeros(96, 128)
    block[:48, 64:] = torch.randn(48, 64, generator=torch.Generator().manual_seed(1))
    touched = demo_compressor._Chunks(SHAPES[0], 64).transform(block.view(1, -1))[0].abs().amax(1) > 0
    assert touched.tolist() == [False, True, False, False]


def test_demo_keeps_what_it_does_not_send() -> None:
    """What DeMo sends, and the momentum that is left, add up to the momentum. Equal workers have one update."""
    world = demo_compressor.DeMoWorld(3, SHAPES[:1], count=2, decay=0.5)
    gradient = torch.randn(1, 96 * 128, generator=torch.Generator().manual_seed(2)).expand(3, -1)
    left = torch.zeros(96 * 128)
    for _ in range(3):
        before = 0.5 * left + gradient[0]
        update = world.step(gradient)[0].values
        sent = before - world.momenta[0]
        assert torch.equal(world.momenta[0], world.momenta[2])
        assert bool((update == sent.sign())[sent.abs() > 1e-5].all())
        coefficients = world._chunks[0].transform(sent.view(1, -1))
        assert (coefficients.abs() > 1e-4).sum(-1).tolist() == [[2, 2, 2, 2]]
        left = world.momenta[0].clone()
    assert world.traffic[0].bytes == 2 * 4 * 2 * 12  # to 2 workers, 4 chunks of 2 coefficients of 12 bytes


def test_training_continues_a_file_of_results(launcher: PreparedLauncher, tmp_path: Path) -> None:
    """A second run with the same file trains only what is missing."""
    file = tmp_path / "runs.json"
    arguments = ["--task", "mlp", "--steps", "1", "--optimizer", "adamw", "--exchange", "dense", "gradients"]
    arguments += ["--json", str(file), "--seeds"]
    rows = []
    for seeds in (["0"], ["0", "1"]):
        done = launcher.run(ROOT / "benchmarks" / "train.py", *arguments, *seeds, folder=tmp_path)
        assert done.returncode == 0, done.stderr
        rows.append(json.loads(file.read_text())["rows"])
        assert done.stdout.count("'score'") == 2  # dense and Ok-Topk, of the new seed
    assert rows[1][:2] == rows[0]
    assert [(row["method"], row["seed"]) for row in rows[1]] == [
        ("dense", 0), ("oktopk", 0), ("dense", 1), ("oktopk", 1)
    ]  # fmt: skip


def test_limits_of_the_gpu_run() -> None:
    """What one GPU runs ends within eight minutes, by its limits. It has every test that is skipped without a GPU."""
    text = (ROOT / "benchmarks" / "gpu_run.sh").read_text()
    limits = {name: int(limit) for name, limit in re.findall(r"^ *stage ([\w-]+) (\d+) ", text, re.MULTILINE)}
    assert sum(limit for name, limit in limits.items() if name != "multi-gpu") <= 8 * 60
    assert limits["multi-gpu"] <= 5 * 60
    for file in (ROOT / "tests" / "kernels").glob("test_*.py"):
        lines = file.read_text().splitlines()
        skipped = [i for i, line in enumerate(lines) if line.startswith("@pytest.mark.skipif(not torch.cuda")]
        assert all(lines[i - 1] == "@pytest.mark.gpu" for i in skipped), file


def test_gpu_counts_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """It passes on an emulated GPU, where a further wait of the host in each exchange fails it."""
    commit = ErrorFeedback.commit

    @contextmanager
    def counted(_: torch.device) -> Iterator[list[object]]:
        device.reset()
        caught: list[object] = []
        yield caught
        caught += device.syncs.elements()

    monkeypatch.setattr(gpu_forms, "counted_synchronizations", counted)
    recipe, first = gpu_forms.static_recipes()["oktopk"], torch.device("cuda", 0)
    with ranks.alone() as device:
        assert gpu_forms.compare(recipe, first)["synchronizations"] == 2
        monkeypatch.setattr(ErrorFeedback, "commit", lambda feedback: (feedback.residual[0].item(), commit(feedback)))
        with pytest.raises(AssertionError, match=r"3.0 host synchronizations of each worker in every step"):
            gpu_forms.compare(recipe, first)


# The script starts processes of its own.
START = """
import os, runpy, sys
sys.executable, script = {!r}, {!r}
sys.path.insert(0, os.path.dirname(script))
runpy.run_path(script, run_name="__main__")
"""


def test_several_gpus(launcher: PreparedLauncher, tmp_path: Path) -> None:
    """The checks on several GPUs pass on two CPU processes. In a deep run, so do all checks in which a rank fails."""
    faults = gpu.FAULTS if DEEP else {}
    arguments, command = ["--smoke", "--json", str(tmp_path / "figures.json")], tmp_path / "command.py"
    command.write_text(START.format(interpreter(tmp_path), str(ROOT / "benchmarks" / "gpu.py")))
    for given in ([], ["--only", *faults]) if faults else ([],):
        done = launcher.run(command, *arguments, *given, folder=tmp_path, world_size=2)
        assert done.returncode == 0, done.stdout + done.stderr
        found = json.loads((tmp_path / "figures.json").read_text())
        assert (found["failed"], len(found["checks"])) == ([], len(faults) if given else 7)
