"""Models that FSDP2 shards over two replicas of two shards each, and what was delivered to them."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from tritoncomm import fsdp as front


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


def mesh():
    """Return a mesh of two replicas with two shards each."""
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))


def sharded(model: nn.Module, over, **fields) -> nn.Module:
    """Shard every layer as a group of its own, and the rest as another group."""
    for layer in [*model.layers, model.spare]:
        fully_shard(layer, mesh=over, **fields)
    return fully_shard(model, mesh=over, **fields)


def divide_by(factor: float, model: nn.Module, *, sums: bool = False) -> None:
    """Let FSDP divide gradients by ``factor``, in fp16 and with ``sums`` in part after the hook."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(factor)
            module.set_force_sum_reduction_for_comms(sums)


def loss_of(model: nn.Module, rank: int, step: int, **fields) -> torch.Tensor:
    """Return the loss of a batch that depends on rank and step."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    x, y = torch.randn(8, 5, generator=generator), torch.randn(8, 3, generator=generator)
    return (model(x, **fields) - y).square().mean()


def grads(model: nn.Module) -> torch.Tensor:
    """Return all gradients, unsharded, as a flat vector."""
    return torch.cat([p.grad.full_tensor().reshape(-1) for p in model.parameters()])


def plain_grads(rank: int, world_size: int, step: int, micro: int = 1) -> torch.Tensor:
    """Return the gradients averaged over all ranks by hand."""
    model = Net()
    for r in range(world_size):
        for m in range(micro):
            (loss_of(model, r, step * micro + m) / world_size).backward()
    return torch.cat([p.grad.reshape(-1) for p in model.parameters()])


def shards(model: nn.Module, of: Callable[[nn.Parameter], torch.Tensor] = lambda p: p.grad) -> torch.Tensor:
    """Return this rank's shards of what ``of`` returns for each parameter, by default gradients, as a flat vector."""
    return torch.cat([of(p).to_local().reshape(-1) for p in model.parameters()]).clone()


def local(whole: torch.Tensor, model: nn.Module) -> torch.Tensor:
    """Return this rank's part of an unsharded gradient."""
    parts, start = [], 0
    for p in model.parameters():
        rows = whole[start : start + p.numel()].view(p.shape).chunk(2)
        position = p.device_mesh.get_local_rank()
        parts.append(rows[position].reshape(-1) if position < len(rows) else whole[:0])
        start += p.numel()
    return torch.cat(parts)


def residual_sum(state: front.FSDPState, model: nn.Module) -> torch.Tensor:
    """Return the residuals of this rank's shards, summed over both replicas, in the order of :func:`shards`."""
    parts = state.state_dict()["residuals"]
    pending = torch.cat([parts[name] for name, _ in model.named_parameters()])
    dist.all_reduce(pending, group=state.group)
    return pending
