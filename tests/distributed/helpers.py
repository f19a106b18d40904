"""Worker processes for tests, with short time-outs."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
import tritoncomm
from torch import nn
from tritoncomm.demo import local_workers
from tritoncomm.step import settings as options

# Workers test sparse exchanges from the first step on, without rounding, unless they ask for something else.
options.DEFAULT_WARMUP, options.DEFAULT_VALUES, options.DEFAULT_SMALL = 0, "fp32", "fp32"
# Imported once, in the process that workers are forked from.
local_workers.PRELOADED += ["hypothesis", "pytest", "torch.distributed.checkpoint", "torch.distributed.fsdp"]
sparse_wrap = partial(tritoncomm.wrap, dense_below=0, density=0.2)
run_workers = partial(local_workers.run_workers, timeout=timedelta(seconds=60), limit=timedelta(seconds=240))


class FailingSGD(torch.optim.SGD):
    """SGD whose update fails once, after it has changed a parameter, if ``fails`` is set."""

    fails = False

    def _init_group(self, *args):
        """Go on with a step, or fail. The step itself is that of SGD."""
        if self.fails:
            self.fails = False
            self.param_groups[0]["params"][0].add_(1.0)
            raise MemoryError
        return super()._init_group(*args)


def adamw(model: nn.Module, **fields) -> torch.optim.AdamW:
    """Return AdamW with settings at which sparse steps matter."""
    return torch.optim.AdamW(model.parameters(), **{"lr": 0.01, "weight_decay": 0.1, **fields})


def sparse_sgd(model: nn.Module, **fields) -> tritoncomm.SparseOptimizer:
    """Return a wrapped SGD with momentum."""
    return sparse_wrap(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), **fields)


def total(x: torch.Tensor) -> torch.Tensor:
    """Return the sum over ranks."""
    y = x.clone()
    dist.all_reduce(y)
    return y


def tiny_model(seed: int = 0) -> nn.Module:
    """Return a model with an unused parameter and a frozen one."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 20), nn.Tanh(), nn.Linear(20, 3))
    model.unused = nn.Parameter(torch.ones(5))
    model.frozen = nn.Parameter(torch.ones(4), requires_grad=False)
    return model


def loss_of(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    """Return the loss of a batch that depends on rank and step."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    x, y = torch.randn(8, 6, generator=generator), torch.randn(8, 3, generator=generator)
    return (model(x) - y).square().mean()


def train(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, steps: range) -> None:
    """Take ``steps``."""
    for step in steps:
        optimizer.zero_grad()
        loss_of(model, rank, step).backward()
        optimizer.step()


def reports(function, world_size: int, *args) -> dict[int, tuple]:
    """Run the workers and return the report of each rank."""
    heard: list[tuple] = []
    with suppress(local_workers.WorkerError):  # a worker may fail to end normally
        run_workers(function, world_size, *args, listen=heard.append, grace=timedelta(seconds=30))
    return {report[0]: report[1:] for report in heard}


def run_situations(situations: list[Callable[..., None]], world_size: int) -> None:
    """Run situations one after the other in the same worker processes, because starting them is slow. All must end."""
    ended: list[str] = []
    run_workers(_several, world_size, situations, listen=ended.append)
    assert ended == [_name(situation) for situation in situations], ended


def _several(rank: int, world_size: int, send, situations: list[Callable[..., None]]) -> None:
    for situation in situations:
        situation(rank, world_size, send)
        if rank == 0:
            send(_name(situation))


def _name(situation: Callable[..., None]) -> str:
    return getattr(situation, "__name__", "")


def residual(optimizer: tritoncomm.SparseOptimizer) -> torch.Tensor:
    """Return a copy of this rank's residual."""
    return optimizer._tritoncomm.setup.vector.feedback.residual.clone()


def same_everywhere(value: object, group: dist.ProcessGroup | None = None) -> bool:
    """Whether all ranks of ``group``, by default all there are, have the same value."""
    everybody = [None] * dist.get_world_size(group)
    dist.all_gather_object(everybody, value, group=group)
    return all(other == everybody[0] for other in everybody)


def flat(model: nn.Module) -> list[int]:
    """Return the bits of all parameters."""
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()]).view(torch.int32).tolist()


@contextmanager
def log_lines(level: int = logging.INFO):
    """Collect the log lines of the library."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logger = logging.getLogger("tritoncomm")
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(level)
    yield lines
    logger.removeHandler(handler)
    logger.setLevel(before)
