"""The command ``slow``: a script of the user on a slow network, and the figures that it prints."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
from bad_network_workers import enter
from tritoncomm.__main__ import main
from tritoncomm.demo.local_workers import run_workers
from tritoncomm.scheduler.cost import Link
from tritoncomm.slow import launcher, namespaces
from tritoncomm.slow.figures import Interval, intervals, steps_of, table
from tritoncomm.slow.launcher import Step

from depth import interpreter, python
from pages import ROOT, blocks
from processes import children, end_soon, is_running, parent, taken_by_rounds

needs_namespaces = pytest.mark.skipif(namespaces.missing() is not None, reason=str(namespaces.missing()))
SCRIPT = Path(__file__).with_name("nano_gpt.py")
PAGE = "docs/how-to/slow-network.md"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--workers", "0"], "--workers 0: give 1 to 254"),
        (["--workers", "255"], "--workers 255: give 1 to 254"),
        (["--steps", "0"], "--steps 0: give at least 1, or leave it out"),
        (["--link", "fast"], "--link 'fast': give a rate, or a rate and a delay, for example '100mbit'"),
        (["--link", "0mbit"], "--link '0mbit': give a rate"),
        (["--link", "1mbit,2"], "--link '1mbit,2': give a rate"),
        (["missing.py"], "script 'missing.py' is not a file: give the path of a Python script"),
    ],
)
def test_bad_arguments(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A bad argument gives exit code 2, and one sentence with its name, its value and the fix."""
    last = [] if arguments[0].endswith(".py") else [str(SCRIPT)]
    assert main(["slow", "--link", "1mbit", *arguments, *last]) == 2
    assert capsys.readouterr().err.startswith(f"error: {said}")


def test_refusal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Where namespaces are not allowed, one sentence says so, and what to do."""
    monkeypatch.setattr(namespaces.os, "geteuid", lambda: 1000)
    monkeypatch.setattr(namespaces.shutil, "which", lambda name: name)
    assert main(["slow", "--link", "1mbit", str(SCRIPT)]) == 2
    said = "error: Network namespaces need root: put 'sudo' or 'unshare --map-root-user' before the command.\n"
    assert capsys.readouterr() == ("", said)


def steps(number: int, seconds: list[float], sent: list[int], received: list[int]) -> list[Step]:
    """Return the steps of an optimizer."""
    return [Step(number, f"optimizer {number}", *each) for each in zip(seconds, sent, received, strict=True)]


def test_figures() -> None:
    """Each half of the steps has the mean bytes over workers, the busiest one's seconds on the link, and seconds."""
    one = steps(0, [0.0, 1.0, 3.0, 6.0, 10.0], [10, 1000010, 1000010, 3000010, 3000010], [0] * 5)
    two = steps(0, [0.0, 1.0, 3.0, 6.0, 12.0], [0] * 5, [0, 0, 0, 8000000, 8000000])
    assert intervals([one, two]) == [
        Interval(1.0, 500000, 1000000), Interval(2.0, 0, 0), Interval(3.0, 1000000, 8000000), Interval(5.0, 0, 0)
    ]  # fmt: skip
    first, _, *rows = table([one, two], Link.parse("8mbit,0s")).splitlines()
    assert first == "5 steps of optimizer 0, per step and worker:"
    assert [re.split(r"\s{2,}", row.strip()) for row in rows] == [
        ["2 to 3", "0.2500", "0.5000", "1.5000", "1.5000"], ["4 to 5", "0.5000", "4.0000", "4.0000", "4.0000"]
    ]  # fmt: skip
    assert len(table([one[:2]], Link()).splitlines()) == 3  # one row
    for few in ([], one[:1]):
        said = f"{len(few)} steps of an optimizer were counted: figures need at least 2."
        assert table([few, two], Link()) == said


def test_steps_are_those_of_one_optimizer() -> None:
    """The optimizer with most steps counts, of several with equally many the first. Workers have equally many."""
    generator, critic, other = (steps(number, [0.0] * n, [0] * n, [0] * n) for number, n in enumerate((2, 4, 4)))
    assert steps_of([[*generator, *critic, *other], [*critic[:3], *generator]]) == [critic[:3], critic[:3]]


ENVIRONMENT = """
import importlib, json, os, sys
if __name__ == "__main__":
    names = "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT"
    found = {name: os.environ[name] for name in (*names, "GLOO_SOCKET_IFNAME", "TORCHELASTIC_RUN_ID")}
    has_torch, hooks = "torch" in sys.modules, 0
    if found["RANK"] == "0":
        hooks = len(importlib.import_module("torch.optim.optimizer")._global_optimizer_post_hooks)
    print("rank", found["RANK"], json.dumps([found, sys.argv, sys.path[0], has_torch, hooks]))
"""


@needs_namespaces
def test_environment(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The script finds torchrun's variables, its arguments and its folder, and no torch. Only rank 0 is shown.

    When it imports torch, the steps of its optimizers are counted.
    """
    script = tmp_path / "script.py"
    script.write_text(ENVIRONMENT)
    assert main(["slow", "--workers", "2", "--link", "10mbit", str(script), "--steps", "x", "--link=y"]) == 0
    (shown,) = re.findall(r"^rank 0 (.*)$", capfd.readouterr().out, re.MULTILINE)
    variables, arguments, folder, has_torch, hooks = json.loads(shown)
    assert variables == {
        "RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "GROUP_RANK": "0",
        "MASTER_ADDR": "10.77.0.1", "MASTER_PORT": "29500", "GLOO_SOCKET_IFNAME": "eth0", "TORCHELASTIC_RUN_ID": "none",
    }  # fmt: skip
    assert arguments == [str(script), "--steps", "x", "--link=y"]
    assert folder == str(tmp_path)
    assert not has_torch
    assert hooks == 1
    assert "GLOO_SOCKET_IFNAME" not in os.environ


OPTIMIZER = """
hooks = []
register_optimizer_step_post_hook = hooks.append
class SGD:
    def step(self):
        for hook in hooks:
            hook(self, (), {})
"""
STEPS = """
import os, time
from torch.optim.optimizer import SGD
critic, generator, late = SGD(), SGD(), os.environ["RANK"] == "1"
try:
    for step in range(9):
        if late and step == 3:
            time.sleep(1.0)
        last = time.monotonic()
        critic.step()
        generator.step()
finally:
    with open("rank " + os.environ["RANK"], "w") as file:
        print(step, last, time.monotonic(), file=file)
"""


@needs_namespaces
def test_steps_end_together(tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The script ends after N steps of one of its optimizers, by an exception, and no rank ends before all are there.

    Its torch is a stand-in for which only the hook exists.
    """
    monkeypatch.chdir(tmp_path)
    (tmp_path / "torch" / "optim").mkdir(parents=True)
    for name, text in {"__init__.py": "", "optim/__init__.py": "", "optim/optimizer.py": OPTIMIZER}.items():
        (tmp_path / "torch" / name).write_text(text)
    (tmp_path / "script.py").write_text(STEPS)
    assert main(["slow", "--workers", "2", "--link", "10mbit", "--steps", "4", "script.py"]) == 0
    assert "2 workers, 10mbit: 4 steps of SGD" in capfd.readouterr().out
    (step, _, ended), (late_step, last, _) = (
        [float(word) for word in (tmp_path / f"rank {rank}").read_text().split()] for rank in range(2)
    )
    assert step == late_step == 3
    assert ended > last


FAILING = """
import os, signal, sys, time
print("says", "nothing")
if os.environ["RANK"] == "0":
    time.sleep(60)
{}
"""


@needs_namespaces
@pytest.mark.parametrize(
    ("failing", "code", "said"),
    [
        ("raise ValueError('no data')", 1, "ValueError: no data\nerror: rank 1 ended with code 1"),
        ("sys.exit(3)", 3, "rank 1: says nothing\nerror: rank 1 ended with code 3"),
        ("os.kill(os.getpid(), signal.SIGKILL)", 137, "error: rank 1 was killed by SIGKILL"),
    ],
)
def test_failure(tmp_path: Path, capfd, monkeypatch, failing: str, code: int, said: str) -> None:
    """A rank that fails stops the others. Its last lines are shown without those of the launcher, its code returned."""
    monkeypatch.setattr(launcher, "GRACE_SECONDS", 0.2)  # the other rank sleeps for longer
    script = tmp_path / "script.py"
    script.write_text(FAILING.format(failing))
    assert main(["slow", "--workers", "2", "--link", "10mbit", str(script)]) == code
    shown = capfd.readouterr().err
    assert all(line in shown for line in said.split("\n"))  # lines of the two outputs of a rank may change places
    assert "worker.py" not in shown
    assert "runpy" not in shown


FOREVER = """
import os, subprocess, time
started = subprocess.Popen(["sleep", "60"])
print(os.getpid(), started.pid, flush=True)
time.sleep(60)
"""


@needs_namespaces
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_nothing_is_left(tmp_path: Path, number: signal.Signals) -> None:
    """If the command is interrupted or killed, the network, workers and what they started end. Ctrl-C shows figures."""
    (tmp_path / "script.py").write_text(FOREVER)
    command = [*python(), "-m", "tritoncomm", "slow", "--workers", "1", "--link", "10mbit,1ms", "script.py"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job ignores it, and so do its children
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=tmp_path, env=environment) as process:
        left = [int(word) for word in process.stdout.readline().split()]
        assert len(left) == 2
        assert all(map(is_running, left))
        helpers = children(parent(left[0]))
        assert len(helpers) >= 3, "the host, the switch, and the cables"
        process.send_signal(number)
        shown = process.stdout.read()
    assert process.returncode == (130 if number == signal.SIGINT else -number)
    assert ("0 steps of an optimizer were counted" in shown) == (number == signal.SIGINT)
    assert end_soon([*left, *helpers])


@needs_namespaces
def test_page_and_real_script(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A script in the manner of nanoGPT runs unchanged by the command of the page, and with the lines of the page.

    Dense bytes are those of a ring. After the dense steps at the start, tritoncomm sends a tenth of them at most.
    """
    monkeypatch.setattr(sys, "executable", interpreter(tmp_path))
    (command,) = re.findall(r"```sh\npython -m tritoncomm (slow .*) train.py", (ROOT / PAGE).read_text())
    (lines,) = blocks(PAGE)
    arguments = command.replace("--workers 4", "--workers 2").replace("--steps 60", "--steps 42").split()
    plain, wrapped = (tmp_path / name for name in ("plain.py", "wrapped.py"))
    plain.write_text(SCRIPT.read_text())
    optimizer, own = lines.splitlines()[-2:]
    assert optimizer in SCRIPT.read_text()
    wrapped.write_text(SCRIPT.read_text().replace(optimizer, lines))
    assert own.startswith("optimizer = tritoncomm.wrap(")
    sent = []
    for script, name in ((plain, "AdamW"), (wrapped, "SparseAdamW")):
        assert main([*arguments, str(script), "--batch_size=2"]) == 0
        shown = capfd.readouterr().out
        assert "iter 40: loss" in shown
        assert f"2 workers, 100mbit: 42 steps of {name}, per step and worker:" in shown
        sent += [float(found) for found in re.findall(r"^ +\d+ to \d+ +([\d.]+)", shown, re.MULTILINE)]
    numel = 2 * 256 * 64 + 32 * 64 + 2 * (12 * 64 * 64 + 13 * 64)
    assert all(4 * numel < 1e6 * found < 1.1 * 4 * numel for found in sent[:2])
    assert 10 * sent[3] < sent[1]
    assert sent[3] < sent[2] < sent[0]


@needs_namespaces
def test_a_message_takes_one_delay() -> None:
    """A round of messages and a small collective last for the delay of a packet, not for that of an answer."""
    with namespaces.Network(3, "100mbit", "100ms") as network:
        of_ranks = run_workers(taken_by_rounds, 3, prepare=partial(enter, network.hosts))
    seconds = [sum(each) / 3 for each in zip(*of_ranks, strict=True)]  # what one waits less, another one waits more
    assert len(seconds) == 4
    assert all(0.4 < each / network.delay < 1.7 for each in seconds), of_ranks


@needs_namespaces
def test_lost_cables(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """If the process that carries the packets is killed, the command ends and says so."""
    (tmp_path / "script.py").write_text(FOREVER)
    check = namespaces.Network.check

    def cut(network: namespaces.Network) -> None:
        network._cables.kill()
        network._cables.wait()
        check(network)

    monkeypatch.setattr(namespaces.Network, "check", cut)
    assert main(["slow", "--workers", "1", "--link", "10mbit,1ms", str(tmp_path / "script.py")]) == 2
    said = "error: the process that carries the packets of cables with a delay was killed.\n"
    assert capsys.readouterr().err == said
