"""Models that FSDP2 shards over two replicas of two shards each, beside plain parameters of the same shards."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
import tritoncomm
from helpers import adamw
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from tritoncomm.step.tensors.shards import local

import laws

SETTINGS = {"density": 0.2, "dense_below": 0}


class Net(nn.Module):
    """A model with uneven shapes, nested groups, and a layer that may stay unused."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(5, 7), nn.Linear(7, 9)])
        self.spare = nn.Linear(9, 9)
        self.head = nn.Linear(9, 3)

    def forward(self, x: torch.Tensor, spare: bool = True) -> torch.Tensor:
        """Run with or without the spare layer."""
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.head(self.spare(x) if spare else x)


def mesh(replicas: int = 2, shards: int = 2) -> DeviceMesh:
    """Return a mesh of replicas and shards."""
    return init_device_mesh("cpu", (replicas, shards), mesh_dim_names=("replicate", "shard"))


def sharded(model: nn.Module, over: DeviceMesh, **fields) -> nn.Module:
    """Shard every layer as a group of its own, and the rest as another group."""
    for layer in [*model.layers, model.spare]:
        fully_shard(layer, mesh=over, **fields)
    return fully_shard(model, mesh=over, **fields)


def loss_of(model: nn.Module, rank: int, step: int, **fields) -> torch.Tensor:
    """Return the loss of a batch that depends on rank and step."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    x, y = torch.randn(8, 5, generator=generator), torch.randn(8, 3, generator=generator)
    return (model(x, **fields) - y).square().mean()


def train(model: nn.Module, optimizer: tritoncomm.SparseOptimizer, rank: int, steps: range) -> None:
    """Take ``steps``."""
    for step in steps:
        optimizer.zero_grad()
        loss_of(model, rank, step).backward()
        optimizer.step()


def shards(model: nn.Module, of: Callable[[nn.Parameter], torch.Tensor] = lambda p: p.grad) -> torch.Tensor:
    """Return this rank's shards of what ``of`` returns for each parameter, by default gradients, as a flat vector."""
    return torch.cat([local(of(p)).reshape(-1) for p in model.parameters()]).clone()


def bits(model: nn.Module) -> list[int]:
    """Return the bits of this rank's shards of all parameters."""
    return _bits(model.parameters())


def _bits(parameters: Iterable[torch.Tensor]) -> list[int]:
    return torch.cat([local(p.detach()).reshape(-1) for p in parameters]).view(torch.int32).tolist()


def dense_mean(world_size: int, step: int, make: Callable[[], nn.Module] = Net, **fields) -> torch.Tensor:
    """Return the gradients of a new model, averaged over all ranks by hand, as a flat vector."""
    model = make()
    for rank in range(world_size):
        (loss_of(model, rank, step, **fields) / world_size).backward()
    return torch.cat([p.grad.reshape(-1) for p in model.parameters()])


class Shards:
    """A sharded model and plain parameters of the same shards, which must train alike to the bit.

    Args:
        model: A model that is sharded.
        group: The replicas of this rank.
        optimizer: Returns the optimizer of a module.
        settings: Arguments of ``wrap``.
    """

    def __init__(
        self,
        model: nn.Module,
        group: dist.ProcessGroup,
        optimizer: Callable[[nn.Module], torch.optim.Optimizer] = adamw,
        settings: dict[str, object] = SETTINGS,
    ) -> None:
        self.model, self.parameters = model, list(model.parameters())  # the model may hold others after a pass
        self.plain = nn.ParameterList([nn.Parameter(local(p.detach()).clone()) for p in self.parameters])
        self.optimizer = tritoncomm.wrap(optimizer(model), model=model, process_group=group, **settings)
        self.of_plain = tritoncomm.wrap(optimizer(self.plain), process_group=group, **settings)

    def take(self) -> None:
        """Take a step of both with the present gradients of the model, which are this replica's own, and compare."""
        for plain, parameter in zip(self.plain, self.parameters, strict=True):
            plain.grad = None if parameter.grad is None else local(parameter.grad).clone()
        self.optimizer.step()
        self.of_plain.step()
        self.check()

    def check(self) -> None:
        """Raise if parameters or residuals differ."""
        assert _bits(self.parameters) == _bits(self.plain)
        (ours,), (theirs,) = (each._tritoncomm.setup.exchange.vectors for each in (self.optimizer, self.of_plain))
        assert laws.same_bits(ours.feedback.residual, theirs.feedback.residual)
        assert self.optimizer.metrics()["steps"] == self.of_plain.metrics()["steps"]
