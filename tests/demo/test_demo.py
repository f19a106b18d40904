"""The demo, started from the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tritoncomm.__main__ import main
from tritoncomm.demo import train
from tritoncomm.demo.local_workers import WorkerError
from tritoncomm.demo.model import ByteGPT, Shape
from tritoncomm.demo.text import batch, standard_library, validation_batches

from prepared_launcher import PreparedLauncher

KEYS = {
    "algo", "density", "workers", "steps", "numel", "loss", "dense_loss", "val_loss", "dense_val_loss",
    "bytes_per_step", "dense_bytes_per_step", "achieved_density",
}  # fmt: skip


COMMAND = """import sys

from tritoncomm.__main__ import main
from tritoncomm.demo import train

train.VALIDATION_BATCHES, train.VALIDATION_ROWS = 2, 4
if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
"""


def test_demo(launcher: PreparedLauncher, tmp_path: Path) -> None:
    """A short run writes a table, a JSON file with all keys, and a picture."""
    figures_file, plot = tmp_path / "figures.json", tmp_path / "curves.png"
    arguments = ["--steps", "4", "--workers", "2", "--density", "0.05", "--seed", "3"]
    script = tmp_path / "command.py"
    script.write_text(COMMAND)
    done = launcher.run(script, "demo", *arguments, "--json", str(figures_file), "--plot", str(plot), folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "step     4/4" in done.stdout
    assert "validation loss, final" in done.stdout
    figures = json.loads(figures_file.read_text())
    assert set(figures) >= KEYS
    assert (figures["algo"], figures["workers"], figures["steps"]) == ("oktopk", 2, 4)
    assert 200_000 <= figures["numel"] <= 2_000_000
    assert 0 < figures["bytes_per_step"] < 0.3 * figures["dense_bytes_per_step"]
    assert figures["dense_bytes_per_step"] == pytest.approx(4 * figures["numel"], rel=1e-3)
    assert 0.02 < figures["achieved_density"] < 0.08
    assert 0 < figures["val_loss"] < 5.6
    assert plot.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "described", "fields"),
    [
        (["--algo", "spardl", "--values", "1bit"], "spardl: spardl at density", {"algo": "spardl", "values": "1bit"}),
        (
            ["--values", "4bit", "--density", "0.02"],
            "oktopk: oktopk at density 2.000%",
            {"values": "4bit", "density": 0.02},
        ),
        # ExDyna rounds no values.
        (["--algo", "exdyna", "--small", "fp32"], "exdyna: exdyna at", {"algo": "exdyna", "small": "fp32"}),
        (["--algo", "quantized"], "quantized: quantized with 1bit values", {"algo": "quantized", "values": "1bit"}),
        (["--algo", "random_block", "--values", "1bit"], "random_block: ", {"algo": "random_block", "values": "1bit"}),
        (["--optimizer", "muon"], "updates: muon and adamw, updates", {"local_steps": 1}),
    ],
)
def test_options_reach_wrap(
    arguments: list[str], described: str, fields: dict[str, object], monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    """The options of the command are the arguments of ``wrap`` in the second run of a worker, which is described."""
    given: list[dict[str, object]] = []

    def in_this_process(function, workers, settings, listen) -> None:
        assert f"{settings.label}: {settings.described}".startswith(described)
        function(0, workers, listen, settings)
        raise WorkerError("nothing was trained")

    monkeypatch.setattr("tritoncomm.demo.command.run_workers", in_this_process)
    monkeypatch.setattr(train, "standard_library", lambda: None)
    monkeypatch.setattr(train, "_train", lambda *arguments: given.append(arguments[6]))
    assert main(["demo", *arguments]) == 1
    assert "nothing was trained" in capsys.readouterr().err
    dense, ours = given
    assert dense == {"algo": "dense", "updates": False}
    assert ours.items() >= fields.items()
    assert ("values" in ours) == ("values" in fields)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["demo", "--density", "0"], "--density: must be in (0, 1], got 0.0"),
        (["demo", "--density", "x"], "must be a number, got 'x'"),
        (["demo", "--workers", "0"], "--workers: must be a whole number of at least 1, got '0'"),
        (["demo", "--steps", "-3"], "--steps: must be a whole number of at least 1, got '-3'"),
        (["demo", "--steps", "1.5"], "must be a whole number of at least 1, got '1.5'"),
        (["demo", "--algo", "nope"], "invalid choice: 'nope'"),
        (["demo", "--seed", str(2**63)], "--seed: must be a whole number from 0 to 9,223,372,036,854,775,807"),
        (["demo", "--json", "/no/such/folder/x.json"], "--json: cannot write to"),
        (["nothing"], "invalid choice: 'nothing'"),
        ([], "required: command"),
    ],
)
def test_bad_arguments(arguments: list[str], named: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A bad argument prints an error and exits with code 2, before any worker starts."""
    with pytest.raises(SystemExit) as left:
        main(arguments)
    assert left.value.code == 2
    assert named in capsys.readouterr().err


@pytest.mark.parametrize(
    "given", [["--algo", "spardl"], ["--values", "8bit"], ["--density", "0.5"], ["--small", "fp32"]]
)
def test_options_for_gradients_are_refused_with_updates(given: list[str], capsys) -> None:
    """What has no effect is named, before any worker starts."""
    for updates in (["--optimizer", "muon"], ["--local-steps", "2"]):
        assert main(["demo", *updates, *given]) == 2
        assert f"{given[0]} is for gradients" in capsys.readouterr().err


def test_density_of_a_method_without_one(capsys) -> None:
    """A density that would have no effect is refused."""
    assert main(["demo", "--algo", "quantized", "--density", "0.01"]) == 2
    assert "quantized delivers every entry" in capsys.readouterr().err


def test_model_and_text() -> None:
    """The text is real and split by file, batches depend on seed, step and rank, and the model starts at chance."""
    text = standard_library()
    assert b"def " in bytes(text.train[:100_000].tolist())
    assert text.train.numel() > 1_000_000
    assert text.validation.numel() > 100_000
    first = batch(text.train, 2, 64, seed=0, step=1, rank=2)
    assert first.shape == (2, 65)
    assert torch.equal(first, batch(text.train, 2, 64, seed=0, step=1, rank=2))
    assert not torch.equal(first, batch(text.train, 2, 64, seed=0, step=1, rank=3))
    assert len(validation_batches(text.validation, 4, 64, 3)) == 3
    torch.manual_seed(0)
    assert ByteGPT(Shape())(first).item() == pytest.approx(5.55, abs=0.15)


def test_muon(launcher: PreparedLauncher, tmp_path: Path) -> None:
    """Both runs train with Muon and AdamW. The second one exchanges updates, after several local steps."""
    script, file = tmp_path / "command.py", tmp_path / "figures.json"
    script.write_text(COMMAND)
    options = ["--optimizer", "muon", "--steps", "4", "--workers", "2", "--json", str(file), "--local-steps", "3"]
    done = launcher.run(script, "demo", *options, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    figures = json.loads(file.read_text())
    assert 0 < figures["val_loss"] < 5.6
    assert figures["bytes_per_step"] < 0.25 * figures["dense_bytes_per_step"]
    assert "updates of 3 local steps" in done.stdout
    assert "without effect" not in done.stderr
    # Of the two exchanges, whose every value travels, and not of the steps between.
    assert figures["achieved_density"] == pytest.approx(1)
