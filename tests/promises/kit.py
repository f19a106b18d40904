"""What the promises share. It knows the library by its public names alone."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
import tritoncomm
from torch import nn


def sparse(optimizer: Any, *, density: float = 0.25, **fields: Any) -> tritoncomm.SparseOptimizer:
    """Wrap ``optimizer``. Values are not rounded, and the first step is sparse."""
    recipe = tritoncomm.TopkAllgather(density=density)
    return tritoncomm.wrap(optimizer, **{"algo": recipe, "warmup_steps": 0, "dense_below": 0} | fields)


def sgd(parameters: Iterable[torch.Tensor], **fields: Any) -> torch.optim.SGD:
    """Return SGD whose step is the gradient."""
    return torch.optim.SGD(parameters, **{"lr": 1.0} | fields)


def weight(numel: int = 16, value: float = 0.0, **fields: Any) -> nn.Parameter:
    """Return a parameter."""
    return nn.Parameter(torch.full((numel,), value, **fields))


def gradient(numel: int, rank: int, step: int, world_size: int = 1) -> torch.Tensor:
    """Return integers of different sizes times ``world_size``, so that sums and means are exact in any order."""
    generator = torch.Generator().manual_seed(7 * step + rank)
    return torch.randint(-64, 65, (numel,), generator=generator).float() * world_size


def flat(parameters: Iterable[torch.Tensor]) -> torch.Tensor:
    """Return all values as one vector."""
    return torch.cat([each.detach().reshape(-1).float() for each in parameters])


def everywhere(value: object, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Return ``value`` of every rank."""
    found: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, value, group=group)
    return found


def equal_on_all_ranks(parameters: Iterable[torch.Tensor], group: dist.ProcessGroup | None = None) -> bool:
    """Whether all ranks have the same bits."""
    first, *others = everywhere(flat(parameters), group)
    return all(torch.equal(first, other) for other in others)


def mean(value: torch.Tensor) -> torch.Tensor:
    """Return the mean over ranks."""
    whole = value.detach().clone()
    dist.all_reduce(whole)
    return whole / dist.get_world_size()


def take(optimizer: Any, parameters: Sequence[torch.Tensor], rank: int, steps: Iterable[int], world_size: int) -> None:
    """Take steps by the :func:`gradient` of each rank and step."""
    for step in steps:
        for number, parameter in enumerate(parameters):
            own = gradient(parameter.numel(), rank, 100 * number + step, world_size)
            parameter.grad = own.view(parameter.shape).to(parameter.dtype)
        optimizer.step()


@contextmanager
def log_lines() -> Iterator[list[str]]:
    """Collect the warnings of the library."""
    lines: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("tritoncomm")
    logger.addHandler(handler)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)


OPTIMIZERS = {
    "momentum": lambda p: torch.optim.SGD(p, lr=2.0**-6, momentum=0.5),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
}


def made(kind: str = "momentum", dtype: torch.dtype = torch.float32, **fields):
    """Return a parameter and its wrapped optimizer."""
    p = weight(64, 1.0, dtype=dtype)
    return p, sparse(OPTIMIZERS[kind]([p]), **fields)


def write(p: torch.Tensor, values: torch.Tensor) -> None:
    """Load a weight."""
    with torch.no_grad():
        p.copy_(values)


def total(numel: int, steps: range, world_size: int) -> torch.Tensor:
    """Return the sum over steps of the mean gradient."""
    parts = [gradient(numel, rank, step, world_size) for step in steps for rank in range(world_size)]
    return torch.stack(parts).sum(0) / world_size
