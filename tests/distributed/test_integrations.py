"""Each trainer's integration, on two processes, beside the same training by hand."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from multiprocessing import forkserver
from pathlib import Path

import integration_edge_workers
import integration_workers
import pytest
import torch
import trainer_updates_workers
import tritoncomm
from helpers import run_workers
from tritoncomm import checkpoint
from tritoncomm.demo import local_workers


@pytest.fixture(scope="module", autouse=True)
def _trainers_are_imported_once() -> Iterator[None]:
    """Fork workers from a server that has imported the trainers, because that takes longer than what they do.

    A server that runs already has not imported them, so another one is started, and again one without them afterwards.
    """
    with pytest.MonkeyPatch.context() as patch:
        trainers = ["accelerate", "transformers.trainer", "lightning"]
        patch.setattr(local_workers, "PRELOADED", [*local_workers.PRELOADED, *trainers])
        forkserver._forkserver._stop()
        yield
    forkserver._forkserver._stop()


@pytest.mark.parametrize("framework", ["accelerate", "transformers", "lightning"])
def test_trains_like_by_hand_and_resumes(framework: str, tmp_path: Path) -> None:
    """AdamW, schedule, accumulation, clipping, saving and resuming equal the loop by hand, to the bit."""
    if importlib.util.find_spec(framework) is None:
        pytest.skip(f"{framework} is not installed: tox -e trainers has it")
    run_workers(getattr(integration_workers, f"{framework}_worker"), 2, str(tmp_path / "checkpoints"))


@pytest.mark.parametrize(
    "case",
    [
        "accelerate_gan",
        "accelerate_gradient",
        "accelerate_fp16",
        "lightning_gan",
        "lightning_fp16",
        "lightning_fine_tuning",
        "fabric",
        "refusals",
        "alone",
    ],
)
def test_special_cases(case: str, tmp_path: Path) -> None:
    """Several optimizers, a scaler, and parameters that train later are as by hand, or refused with a fix."""
    if importlib.util.find_spec("accelerate") is None or importlib.util.find_spec("lightning") is None:
        pytest.skip("accelerate or lightning is not installed: tox -e trainers has both")
    run_workers(getattr(integration_edge_workers, case), 1 if case == "alone" else 2, str(tmp_path / "checkpoints"))


@pytest.mark.parametrize("framework", ["accelerate", "transformers", "lightning"])
def test_updates(framework: str, tmp_path: Path) -> None:
    """Local steps, and a list of Muon and AdamW, train, evaluate and resume as by hand, to the bit."""
    if importlib.util.find_spec(framework) is None:
        pytest.skip(f"{framework} is not installed: tox -e trainers has it")
    run_workers(getattr(trainer_updates_workers, framework), 2, str(tmp_path / "checkpoints"))


def test_trainer_with_one_worker(tmp_path: Path) -> None:
    """The Trainer of Transformers trains and clips as without the callback, to the bit."""
    if importlib.util.find_spec("transformers") is None:
        pytest.skip("transformers is not installed: tox -e trainers has it")
    run_workers(integration_workers.transformers_alone, 1, str(tmp_path / "checkpoints"))


def test_import_needs_no_framework() -> None:
    """Importing tritoncomm imports no framework."""
    frameworks = "{'accelerate', 'lightning', 'transformers'}"
    code = f"import sys, tritoncomm.integrations; print(sorted({frameworks} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)  # noqa: S603
    assert done.stdout.strip() == "[]"


def test_checkpoint_refuses_an_optimizer_that_is_not_wrapped(tmp_path: Path) -> None:
    """The error names the type, whether saving, loading, or as a part of a larger checkpoint."""
    optimizer = torch.optim.AdamW([torch.zeros(3, requires_grad=True)])
    for call in (
        lambda: checkpoint.save(optimizer, tmp_path),
        lambda: checkpoint.load(optimizer, tmp_path),
        lambda: checkpoint.ResidualState(optimizer),
    ):
        with pytest.raises(tritoncomm.ConfigurationError, match="optimizer is a AdamW, which tritoncomm"):
            call()
