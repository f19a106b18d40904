"""The scripts of the how-to pages run as printed, on two processes."""

from __future__ import annotations

import copy
import importlib.util
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
import tritoncomm
from trainers import FRAMEWORKS

import depth
from pages import ROOT, blocks, code_of, in_place_of_ddp, section
from prepared_launcher import PreparedLauncher

TRAINERS = "docs/how-to/trainers.md"
COUNT_STEPS = """import atexit
from torch.optim.optimizer import register_optimizer_step_post_hook
steps = []
register_optimizer_step_post_hook(lambda *_: steps.append(1))
atexit.register(lambda: print(f"{len(steps)} steps here"))
"""


@pytest.fixture(scope="module")
def launcher() -> PreparedLauncher:
    """What runs scripts, in processes that have imported this package and the trainers."""
    return depth.launcher("transformers.trainer", *FRAMEWORKS)


PREEMPT = """import os, signal
from torch.optim.optimizer import register_optimizer_step_post_hook
def preempt(*_):
    if os.environ["RANK"] == "1" and len(steps) == 7:
        os.kill(os.getpid(), signal.SIGTERM)
register_optimizer_step_post_hook(preempt)
"""


@pytest.mark.parametrize("page", ["torchrun", "ddp", "fsdp"])
def test_page_runs_as_printed(page: str, launcher: PreparedLauncher, tmp_path: Path) -> None:
    """Both ranks finish and report an exchange that sent data. The page on torchrun runs under torchrun itself."""
    started_by = PreparedLauncher((), depth.torchrun()) if page == "torchrun" else launcher
    reported, _ = _reported(started_by.run(_script(page, tmp_path), folder=tmp_path, world_size=2))
    for text in reported.values():
        assert not re.search(r"\b0\.000 delivered", text), text


def test_sharded_sites_page(launcher: PreparedLauncher, tmp_path: Path) -> None:
    """With two replicas of two shards and local steps, as the page on sites says, all four ranks finish."""
    code = in_place_of_ddp("docs/how-to/fsdp.md", 0)
    (settings,) = re.findall(r"`wrap\(\.\.\., (.*?)\)`", (ROOT / "docs/how-to/across-sites.md").read_text())
    call = f"optimizer = tritoncomm.wrap(optimizer, model=model, {settings})\n"
    code, count = re.subn(r"(?ms)^optimizer = tritoncomm\.wrap\(.*?^\)\n", lambda _: call, code)
    assert count == 1
    code = code.replace("(dist.get_world_size(), 1)", "(2, 2)").replace("range(40)", "range(10)")
    (tmp_path / "train.py").write_text(code)
    done = launcher.run(tmp_path / "train.py", folder=tmp_path, world_size=4)
    assert done.returncode == 0, done.stderr
    assert sorted(re.findall(r"rank (\d): loss [\d.]+, [1-9]\d* bytes", done.stdout)) == ["0", "1", "2", "3"]


def test_preempted_page_saves(launcher: PreparedLauncher, tmp_path: Path) -> None:
    """If one rank gets the signal, both save after the same step, and end. The next run finishes."""
    script = _script("torchrun", tmp_path)
    script.write_text(script.read_text().replace("STEPS, SAVE_EVERY = 40, 10", "STEPS, SAVE_EVERY = 14, 10"))
    as_printed = script.read_text()
    script.write_text(COUNT_STEPS + PREEMPT + script.read_text().removeprefix(COUNT_STEPS))
    _, steps = _reported(launcher.run(script, folder=tmp_path, world_size=2))
    assert steps == [7, 7]
    (folder,) = (tmp_path / "checkpoints").iterdir()
    assert folder.name == "step-000006"
    assert {file.name.split("-")[0] for file in folder.iterdir()} == {"model.pt", "checkpoint.json", "data"}
    script.write_text(as_printed)
    _, steps = _reported(launcher.run(script, folder=tmp_path, world_size=2))
    assert steps == [8, 8]  # flush() takes one, too


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_trainer_page_trains_and_resumes(framework: str, launcher: PreparedLauncher, tmp_path: Path) -> None:
    """A second run resumes from the checkpoint half way, and reports what the first run did, to the bit.

    The page says what to delete before. A script that it does not start with torchrun starts its second process itself.
    """
    text = section(TRAINERS, framework.capitalize())
    world_size = 2 if "`torchrun`" in text or not depth.DEEP else 0
    if importlib.util.find_spec(framework) is None:
        pytest.skip(f"{framework} is not installed: tox -e trainers has it")
    script = _script(framework, tmp_path)
    reported, steps = _reported(launcher.run(script, folder=tmp_path, world_size=world_size))
    for last in re.findall(r"Before the second run, delete `(.+?)`", text):
        shutil.rmtree(tmp_path / last)
    resumed, steps_after = _reported(launcher.run(script, folder=tmp_path, world_size=world_size))
    assert resumed == reported
    assert steps_after == [count // 2 for count in steps]
    assert min(steps_after) > 0


def _script(page: str, folder: Path) -> Path:
    """Write the script of a page, or of a trainer, into ``folder``, with a report of the steps that it takes."""
    if page == "fsdp":
        code = in_place_of_ddp("docs/how-to/fsdp.md", 0)
    elif page in FRAMEWORKS:
        (code,) = code_of(section(TRAINERS, page.capitalize()))
    else:
        code = blocks(f"docs/how-to/{page}.md")[0]
    script = folder / "train.py"
    script.write_text(COUNT_STEPS + code)
    return script


def _reported(done: subprocess.CompletedProcess[str]) -> tuple[dict[str, str], list[int]]:
    """Return what each of two ranks reports, and how many steps each took."""
    assert done.returncode == 0, done.stderr
    # Two processes may write into one line.
    reported = dict(re.findall(r"rank (\d): (.*?(?:per step|delivered))", done.stdout))
    assert sorted(reported) == ["0", "1"], done.stdout
    for text in reported.values():
        assert not re.search(r"\b0 bytes|loss nan", text), text
    steps = [int(count) for count in re.findall(r"(\d+) steps here", done.stdout)]
    assert len(steps) == 2, done.stdout
    return reported, steps


def test_ray_page_trains_and_resumes(launcher: PreparedLauncher, tmp_path: Path) -> None:
    """With stand-ins for Ray, the script trains, reports checkpoints of both ranks, and resumes from the last one."""
    (code,) = blocks("docs/how-to/ray-train.md")
    code = "import ray_stand_in\n\nray_stand_in.install()\n" + code.replace('"steps": 45', '"steps": 15')
    (tmp_path / "train.py").write_text(code)
    shutil.copy(Path(__file__).with_name("ray_stand_in.py"), tmp_path)
    for first in (0, 10):
        done = launcher.run(tmp_path / "train.py", folder=tmp_path, world_size=2)
        assert done.returncode == 0, done.stderr
        reported = dict(
            re.findall(rf"rank (\d) from step {first}: loss ([\d.]+), rate 0.00010, [1-9]\d* bytes", done.stdout)
        )  # the schedule has reached its end
        assert sorted(reported) == ["0", "1"], done.stdout
    saved = [file.name.split("-")[0] for file in (tmp_path / "storage/checkpoint-000000").iterdir()]
    assert sorted(saved) == ["checkpoint.json", "data", "model.pt"]


def test_accelerate_prepares_a_wrapped_optimizer() -> None:
    """Accelerate prepares and steps a wrapped optimizer, and saves and restores its state."""
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(cpu=True)
    torch.manual_seed(0)
    model = torch.nn.Linear(6, 1)
    optimizer = tritoncomm.wrap(torch.optim.AdamW(model.parameters(), lr=0.1), density=0.3, dense_below=0)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    model, prepared, schedule = accelerator.prepare(model, optimizer, schedule)

    def step() -> float:
        prepared.zero_grad()
        loss = (model(torch.ones(4, 6)) - 3).square().mean()
        accelerator.backward(loss)
        prepared.step()
        schedule.step()
        return float(loss.detach())

    losses = [step() for _ in range(6)]
    assert losses[-1] < losses[0]
    assert optimizer.metrics()["steps"] == 6
    assert prepared.param_groups[0]["lr"] < 0.1
    saved = copy.deepcopy(prepared.state_dict())
    parameters = copy.deepcopy(model.state_dict())
    first = step()
    prepared.load_state_dict(saved)
    model.load_state_dict(parameters)
    assert step() == first
    assert optimizer.metrics()["steps"] == 7


def test_accelerate_keeps_two_optimizers_apart(tmp_path: Path) -> None:
    """Each of two optimizers gets its own state back from a checkpoint."""
    accelerate = pytest.importorskip("accelerate")
    integration = importlib.import_module("tritoncomm.integrations.accelerate")
    accelerator = accelerate.Accelerator(cpu=True)
    models = [torch.nn.Linear(6, 1), torch.nn.Linear(6, 1)]
    inner = [torch.optim.AdamW(model.parameters(), lr=0.1) for model in models]
    prepared = accelerator.prepare(*models, *inner)
    pairs = list(zip(prepared[:2], prepared[2:], strict=True))
    for model, optimizer in reversed(pairs):
        integration.wrap(accelerator, model, optimizer, density=0.3, dense_below=0)

    def moments() -> list[list[float]]:
        states = [optimizer.state[next(iter(model.parameters()))] for model, optimizer in pairs]
        return [state["exp_avg"].flatten().tolist() for state in states]

    def train(scale: float) -> None:
        for number, (model, optimizer) in enumerate(pairs):
            optimizer.zero_grad()
            accelerator.backward((model(torch.ones(4, 6)) * scale * (1 + number)).mean())
            optimizer.step()

    train(1.0)
    saved = moments()
    accelerator.save_state(str(tmp_path / "state"))
    train(-3.0)
    accelerator.load_state(str(tmp_path / "state"))
    assert moments() == saved
    assert saved[0] != saved[1]
