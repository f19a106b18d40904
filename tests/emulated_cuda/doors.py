"""What the tests of ``wrap`` train, on emulated GPUs and on CPU tensors."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from emulated_cuda import ranks
from emulated_cuda.device import to_gpu, values_of

torch.manual_seed(0)
# Made once, as the generator of torch belongs to all threads.
_MODEL = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 9), nn.ReLU(), nn.Linear(9, 3))


def model_on(device: str) -> nn.Module:
    """Return the model, whose parameters are equal everywhere, on ``device``."""
    model = copy.deepcopy(_MODEL)
    return moved(model) if device == "cuda" else model


def moved(model: nn.Module) -> nn.Module:
    """Move ``model`` to the emulated GPU, as ``model.to("cuda")`` does to a real one."""
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                on_gpu = nn.Parameter(to_gpu(parameter.detach()), requires_grad=parameter.requires_grad)
                module._parameters[name] = on_gpu
    return model


def loss_of(model: nn.Module, rank: int, step: int, device: str) -> torch.Tensor:
    """Return the loss of a batch that depends on rank and step."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    x, y = torch.randn(8, 6, generator=generator), torch.randn(8, 3, generator=generator)
    if device == "cuda":
        x, y = to_gpu(x), to_gpu(y)
    return (model(x) - y).square().mean()


def bits(tensors: Sequence[torch.Tensor]) -> list[Any]:
    """Return the bits of fp32 tensors, wherever they are."""
    return [values_of(tensor).view(torch.int32).tolist() for tensor in tensors]


def on_both(train: Callable[[int, str], Any], world_size: int, *, seed: int = 0) -> Iterator[list[Any]]:
    """Return the results of ``train(rank, device)`` by rank: on emulated GPUs, and on CPU tensors with gloo."""
    yield ranks.run(lambda rank: train(rank, "cuda"), world_size, seed=seed)
    yield ranks.run(lambda rank: train(rank, "cpu"), world_size, backend="gloo")


def grouped(device: str) -> tuple[nn.Module, dict[str, Any]]:
    """Return a model with a parameter group of FSDP2 for each layer, and the arguments of ``wrap`` for it."""
    world_size = dist.get_world_size()
    shards = 2 if world_size % 2 == 0 and world_size > 2 else 1
    mesh = init_device_mesh(device, (world_size // shards, shards), mesh_dim_names=("replicate", "shard"))
    model = model_on(device)
    for layer in model:
        if list(layer.parameters()):
            fully_shard(layer, mesh=mesh["shard"])
    fully_shard(model, mesh=mesh["shard"])
    return model, {"model": model, "process_group": mesh["replicate"].get_group()}


def fill_buckets(model: nn.Module, number: int) -> None:
    """Let gradients be views of buckets, as in DDP with ``gradient_as_bucket_view=True`` and a hook without average.

    The reducer of DDP is C++, and would allocate its buckets on a real GPU.
    """
    parameters = list(reversed(list(model.parameters())))
    size = -(-len(parameters) // number)
    for at in range(0, len(parameters), size):
        members = parameters[at : at + size]
        buffer = torch.cat([parameter.grad.reshape(-1) for parameter in members])
        parts = torch.split(buffer, [parameter.numel() for parameter in members])
        for parameter, part in zip(members, parts, strict=True):
            parameter.grad = part.view_as(parameter)
