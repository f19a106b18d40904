"""Models in DDP with several small buckets, each beside the same plain module."""

from __future__ import annotations

from collections.abc import Callable

import torch
import tritoncomm
from helpers import adamw, flat, residual
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import laws

SETTINGS = {"density": 0.1, "dense_below": 0, "warmup_steps": 2}


def net(seed: int = 0) -> nn.Module:
    """Return a model that fills several small buckets."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 40), nn.Tanh(), nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 3))


class Branches(nn.Module):
    """A model whose second branch is used on request."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.head = nn.Linear(6, 40), nn.Linear(6, 40), nn.Linear(40, 3)

    def forward(self, x: torch.Tensor, *, both: bool = True) -> torch.Tensor:
        """Run with or without the second branch."""
        return self.head(self.first(x) + self.second(x) if both else self.first(x))


class Stack(nn.Module):
    """Two layers with reentrant checkpointing, whose backward passes are within another one, and a head."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(width, width), nn.Linear(width, width)])
        self.head = nn.Linear(width, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the output."""
        x = x.requires_grad_()
        for layer in self.layers:
            x = torch.tanh(checkpoint(layer, x, use_reentrant=True))
        return self.head(x)


def ddp(model: nn.Module, **fields) -> DistributedDataParallel:
    """Wrap a model in DDP with small buckets."""
    return DistributedDataParallel(model, **{"bucket_cap_mb": 0.003} | fields)


class Pair:
    """A plain module and the same module in DDP, each with a wrapped optimizer, which must train alike to the bit.

    Args:
        make: Returns the module.
        optimizer: Returns the optimizer of a module.
        settings: Arguments of ``wrap``.
        **fields: Arguments of ``DistributedDataParallel``.
    """

    def __init__(
        self,
        make: Callable[[], nn.Module] = net,
        optimizer: Callable[[nn.Module], torch.optim.Optimizer] = adamw,
        settings: dict[str, object] = SETTINGS,
        **fields,
    ) -> None:
        self.plain, self.ddp = make(), ddp(make(), **fields)
        self.of_plain = tritoncomm.wrap(optimizer(self.plain), **settings)
        self.of_ddp = tritoncomm.wrap(optimizer(self.ddp), model=self.ddp, **settings)

    @property
    def both(self) -> tuple[tuple[nn.Module, tritoncomm.SparseOptimizer], ...]:
        """Each module with its optimizer."""
        return (self.plain, self.of_plain), (self.ddp, self.of_ddp)

    def step(self, backward: Callable[[nn.Module], None], *, set_to_none: bool = True) -> None:
        """Take a step of both with the gradients that ``backward`` computes, and compare."""
        for model, optimizer in self.both:
            optimizer.zero_grad(set_to_none=set_to_none)
            backward(model)
            optimizer.step()
        self.check()

    def check(self) -> None:
        """Raise if parameters, residuals or the number of steps differ."""
        assert flat(self.plain) == flat(self.ddp)
        assert laws.same_bits(residual(self.of_plain), residual(self.of_ddp))
        counts = [[each.metrics()[name] for name in ("steps", "skipped_steps")] for _, each in self.both]
        assert counts[0] == counts[1]
