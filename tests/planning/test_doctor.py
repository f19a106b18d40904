"""The ``doctor`` command, which measures whether compression pays."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from tritoncomm import OkTopk
from tritoncomm.__main__ import main
from tritoncomm.planning import doctor, planner
from tritoncomm.planning.doctor import break_even

from depth import DEEP, python, torchrun
from emulated_cuda import ranks
from prepared_launcher import PreparedLauncher


def test_doctor_in_one_process(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compression pays on a slow link and not on a fast one, as the exit code and the JSON file report."""
    monkeypatch.setattr("tritoncomm.planning.commands.DEFAULT_VALUES", "4bit")  # also where other tests round nothing
    file = tmp_path / "doctor.json"
    arguments = ["doctor", "--numel", "2e5", "--workers", "8", "--json", str(file), "--link"]
    assert main([*arguments, "10mbit,1us"]) == 0
    figures = json.loads(file.read_text())
    assert figures["pays"] is True
    assert figures["measured"] is False
    assert 0 < figures["work_seconds"] < 10
    assert figures["sparse_seconds"]["0.03"] > figures["work_seconds"]
    assert 0.05 < figures["break_even_density"] <= 0.2
    out = capsys.readouterr().out
    assert "Compression pays at density 3.00%" in out
    assert "The first 16 steps are dense, in 2 bits, and take " in out
    assert "work        " in out
    assert "For other links: python -m tritoncomm plan --numel 200000 --workers 8 --density 0.03 --values 4bit" in out
    assert "--link 10mbit,1us --step-ms 0 --work-ms " in out
    assert main([*arguments, "10mbit,1us", "--algo", "dgc"]) == 0
    assert "The first 16 steps are dense and take " in capsys.readouterr().out  # dgc's are in fp32
    assert main([*arguments, "10000gbit,1us"]) == 1
    out = capsys.readouterr().out
    assert "Stay dense" in out
    assert "steps are dense" not in out
    assert main([*arguments, "10mbit,1us", "--step-ms", "1e6"]) == 1  # computation hides the dense all-reduce


def _torchrun(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run ``doctor`` on two ranks."""
    given = ["--nproc-per-node=2", "--standalone", "-m", "tritoncomm", "doctor", "--numel", "1e5", *arguments]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    return subprocess.run(  # noqa: S603
        [*torchrun(), *given], env=environment, capture_output=True, text=True, timeout=120, check=False
    )


def test_doctor_under_torchrun(tmp_path: Path) -> None:
    """Two ranks measure their exchanges. "Does not pay" is a result, and torchrun reports no failure."""
    file = tmp_path / "doctor.json"
    # So much computation hides any dense all-reduce.
    done = _torchrun("--json", str(file), "--step-ms", "1e6")
    figures = json.loads(file.read_text())
    assert figures["workers"] == 2
    assert figures["measured"] is True
    assert figures["dense_seconds"] > 0
    assert figures["pays"] is False
    assert "2 workers, 100,000 values, exchanges measured" in done.stdout
    assert "Stay dense: compression does not pay" in done.stdout
    assert done.returncode == 0, done.stderr
    assert "FAILED" not in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("arguments", [["--exit-code", "--step-ms", "1e6"], *([["--density", "2"]] if DEEP else [])])
def test_doctor_fails_under_torchrun(arguments: list[str], launcher: PreparedLauncher, tmp_path: Path) -> None:
    """A bad argument is a failure under torchrun, and so is the result if ``--exit-code`` asks for it."""
    script = tmp_path / "script.py"
    script.write_text("import sys\nfrom tritoncomm.__main__ import main\nsys.exit(main(sys.argv[1:]))")
    done = launcher.run(script, "doctor", "--numel", "1e5", *arguments, folder=tmp_path, world_size=2)
    assert done.returncode != 0


def test_doctor_waits_for_a_gpu() -> None:
    """On a GPU, a time is that of the work, not that of enqueuing it, whatever the current device."""
    with ranks.alone() as gpu:
        assert doctor._best(lambda: gpu.keep_busy(0.02), "cuda:1") >= 0.02
        assert gpu.devices[1] == doctor._REPEATS


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--numel", "1e15"], "the measurement failed: "),
        ([], "the measurement failed: "),
        (["--numel", "1e3", "--workers", "1"], "workers=1: one worker exchanges nothing"),
    ],
)
def test_doctor_that_cannot_measure(
    arguments: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A failed measurement exits with 2, because 1 says that compression does not pay, and prints one line."""
    if not arguments:
        monkeypatch.setenv("WORLD_SIZE", "2")  # without the other variables of torchrun
        monkeypatch.delenv("RANK", raising=False)
    assert main(["doctor", *arguments]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert len(error.splitlines()) == 1


def test_interrupted_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Ctrl-C ends a command without a traceback, with the exit code of a shell."""

    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("tritoncomm.planning.planner.advice", interrupt)
    assert main(["plan", "--numel", "1e6", "--workers", "2"]) == 130
    assert capsys.readouterr().err == "interrupted\n"


def test_reader_of_output_has_gone() -> None:
    """A command whose output nobody reads any more ends without a traceback, as other commands do."""
    command = [*python(), "-m", "tritoncomm", "plan", "--numel", "1e6", "--workers", "4", "--link", "1gbit,50us"]
    reader, writer = os.pipe()
    os.close(reader)
    ended = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, check=False)  # noqa: S603 - ours
    os.close(writer)
    assert (ended.returncode, ended.stderr) == (128 + signal.SIGPIPE, "")


def test_exit_code_follows_the_launcher(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A process that torchrun started exits with 0, whatever the result, unless ``--exit-code`` is given."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")  # as torchrun sets it, also for a single process
    arguments = ["doctor", "--numel", "2e5", "--link", "10000gbit,1us"]
    with pytest.raises(SystemExit) as caught:
        main([*arguments, "--density", "2"])
    assert caught.value.code != 0
    assert main(arguments) == 0
    assert "Stay dense" in capsys.readouterr().out
    assert main([*arguments, "--exit-code"]) == 1
    assert main(["doctor", "--numel", "2e5", "--link", "10mbit,1us", "--exit-code"]) == 0


def test_plan_of_the_doctor(capsys: pytest.CaptureFixture[str]) -> None:
    """The command that ``doctor`` prints is one of ``plan``, and gives the same answer."""
    for link, answer in (("10mbit,1us", "Sparse pays: "), ("10000gbit,1us", "Dense is faster here: ")):
        main(["doctor", "--numel", "2e5", "--link", link])
        *_, last = capsys.readouterr().out.splitlines()
        command = last.removeprefix("For other links: python -m tritoncomm ").split()
        assert main(command) == 0
        out = capsys.readouterr().out
        assert out.startswith(answer)
        assert "Not counted" not in out


def test_doctor_on_a_gpu() -> None:
    """On a GPU, the work is that of the static form."""

    def methods(density: float) -> OkTopk:
        return OkTopk(density=density)

    with ranks.alone():
        found = doctor.diagnose(4_000, methods, 0.05, workers=8, device="cuda:0")
    assert 0 < found.work < 10
    assert found.sparse[0.05] > found.work
    assert not found.measured


def test_break_even() -> None:
    """The break-even density is interpolated linearly in the logarithm of the density."""
    assert break_even({0.001: 2.0, 0.1: 3.0}, 1.0) == 0
    assert break_even({0.001: 0.5, 0.1: 0.9}, 1.0) == 0.1
    assert break_even({0.001: 0.5, 0.1: 1.5}, 1.0) == pytest.approx(0.01)


def test_no_dense_start_without_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The report speaks of dense steps at the start only for methods that ``wrap`` gives some."""
    monkeypatch.setattr(doctor, "_work_seconds", lambda *_: 1e-4)
    for name, values, starts in (("oktopk", "4bit", True), ("quantized", "1bit", False)):
        found = doctor.diagnose(1_000_000, lambda density, name=name: planner.at(name, density, "4bit"), 0.03)
        assert found.pays
        assert found.values == values
        report = found.report()
        assert ("steps are dense" in report) == starts
        # What delivers every entry has no density, and `plan` does not recommend it.
        assert [text in report for text in ("break-even", "pays at density", "For other links")] == [starts] * 3
        assert ("above density 20.00%" in replace(found, break_even=max(found.sparse)).report()) == starts
