"""Stand-ins for the parts of Ray Train that its how-to page uses, with the signatures of Ray's documentation.

``install`` makes them importable. The processes of torchrun act as Ray's workers.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, make_dataclass
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

STORAGE = Path("storage")
ScalingConfig = make_dataclass("ScalingConfig", ["num_workers", ("use_gpu", bool, False)])
FailureConfig = make_dataclass("FailureConfig", ["max_failures"])
RunConfig = make_dataclass("RunConfig", ["name", "storage_path", "failure_config"])  # storage is the current folder
TorchConfig = make_dataclass("TorchConfig", ["backend", ("timeout_s", int, 1800)])


@dataclass
class Checkpoint:
    """A folder."""

    path: str

    @classmethod
    def from_directory(cls, path: str) -> Checkpoint:
        return cls(path)

    @contextmanager
    def as_directory(self) -> Iterator[str]:
        yield self.path


class TorchTrainer:
    """Runs the training function in this process."""

    def __init__(
        self, train_loop_per_worker: Callable[[dict], None], *, train_loop_config: dict, torch_config: Any,
        scaling_config: Any, run_config: Any,
    ) -> None:  # fmt: skip
        assert scaling_config.num_workers == int(os.environ["WORLD_SIZE"])
        assert run_config.failure_config.max_failures == 3
        self.train, self.config, self.torch_config = train_loop_per_worker, train_loop_config, torch_config

    def fit(self) -> None:
        timeout = timedelta(seconds=self.torch_config.timeout_s)
        dist.init_process_group(self.torch_config.backend, timeout=timeout)
        self.train(self.config)
        dist.destroy_process_group()


def prepare_model(model: torch.nn.Module, parallel_strategy: str | None = "ddp") -> torch.nn.Module:
    """Return the model, in DDP unless ``parallel_strategy`` is None."""
    return model if parallel_strategy is None else torch.nn.parallel.DistributedDataParallel(model)


def report(metrics: dict[str, Any], checkpoint: Checkpoint | None = None) -> None:
    """Merge the folders of all workers into one."""
    assert all(isinstance(value, float) for value in metrics.values())
    numbers = [len(list(STORAGE.glob("checkpoint-*")))]
    dist.broadcast_object_list(numbers, src=0)
    shutil.copytree(checkpoint.path, STORAGE / f"checkpoint-{numbers[0]:06}", dirs_exist_ok=True)
    dist.barrier()


def get_checkpoint() -> Checkpoint | None:
    """Return the last reported checkpoint."""
    found = sorted(STORAGE.glob("checkpoint-*"))
    return Checkpoint(str(found[-1])) if found else None


def install() -> None:
    """Make ``ray.train`` and ``ray.train.torch`` importable."""
    ray, train, train_torch = (ModuleType(name) for name in ("ray", "ray.train", "ray.train.torch"))
    for thing in (Checkpoint, ScalingConfig, FailureConfig, RunConfig, report, get_checkpoint):
        setattr(train, thing.__name__, thing)
    for thing in (TorchConfig, TorchTrainer, prepare_model):
        setattr(train_torch, thing.__name__, thing)
    ray.train, train.torch = train, train_torch
    sys.modules |= {module.__name__: module for module in (ray, train, train_torch)}
