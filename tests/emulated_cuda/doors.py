"""What the tests of the front doors train, on emulated GPUs and on CPU tensors."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from tritoncomm import fsdp

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


def sharded(
    device: str, *, offload: bool = False, **fields: Any
) -> tuple[nn.Module, dist.ProcessGroup, fsdp.FSDPState]:
    """Return a registered model (see :func:`grouped`), the replicas of this rank, and the state of the hook."""
    model, replicas = grouped(device, offload=offload)
    return model, replicas, fsdp.register(model, replicas, density=0.1, warmup_steps=1, dense_below=5, **fields)


def grouped(device: str, *, offload: bool = False) -> tuple[nn.Module, dist.ProcessGroup]:
    """Return a model with a parameter group of FSDP2 for each layer, and the replicas of this rank.

    With ``offload``, parameters and gradients of a GPU are on the CPU.
    """
    world_size = dist.get_world_size()
    shards = 2 if world_size % 2 == 0 and world_size > 2 else 1
    mesh = init_device_mesh(device, (world_size // shards, shards), mesh_dim_names=("replicate", "shard"))
    model, policy = model_on(device), {"offload_policy": CPUOffloadPolicy()} if offload and device == "cuda" else {}
    for layer in model:
        if list(layer.parameters()):
            fully_shard(layer, mesh=mesh["shard"], **policy)
    return fully_shard(model, mesh=mesh["shard"], **policy), mesh["replicate"].get_group()


class Bucket:
    """Stands for ``torch.distributed.GradBucket``."""

    def __init__(self, number: int, parameters: list[nn.Parameter], *, last: bool) -> None:
        self._number, self._parameters, self._last = number, parameters, last
        self._buffer = torch.cat([parameter.grad.reshape(-1) for parameter in parameters])

    def index(self) -> int:
        return self._number

    def is_last(self) -> bool:
        return self._last

    def buffer(self) -> torch.Tensor:
        return self._buffer

    def parameters(self) -> list[nn.Parameter]:
        return self._parameters


class PythonReducer:
    """Stands for the reducer of DDP, which is C++ and would allocate its buckets on a real GPU.

    It calls the communication hook in the backward pass, as soon as all gradients of a bucket are there, and copies the
    results to the gradients at the end of the pass. Not covered: rebuilt buckets, unused parameters, ``join()``,
    gradients that are views of the buckets, and the compression wrappers of torch.
    """

    def __init__(self, model: nn.Module, state: Any, hook: Callable[..., Any], buckets: int = 2) -> None:
        parameters = list(reversed(list(model.parameters())))
        size = -(-len(parameters) // buckets)
        self._buckets = [parameters[at : at + size] for at in range(0, len(parameters), size)]
        self._state, self._hook = state, hook
        self._ready: set[int] = set()
        self._futures: list[tuple[Bucket, Any]] = []
        for parameter in parameters:
            parameter.register_post_accumulate_grad_hook(self._arrived)

    def _arrived(self, parameter: nn.Parameter) -> None:
        self._ready.add(id(parameter))
        # In the order of the buckets, as DDP.
        while len(self._futures) < len(self._buckets):
            number = len(self._futures)
            members = self._buckets[number]
            if not all(id(each) in self._ready for each in members):
                return
            bucket = Bucket(number, members, last=number == len(self._buckets) - 1)
            self._futures.append((bucket, self._hook(self._state, bucket)))
        torch.autograd.Variable._execution_engine.queue_callback(self._finish)

    def _finish(self) -> None:
        futures, self._futures, self._ready = self._futures, [], set()
        for bucket, future in futures:
            result = future.wait()
            parts = torch.split(result, [parameter.numel() for parameter in bucket.parameters()])
            for parameter, part in zip(bucket.parameters(), parts, strict=True):
                parameter.grad.copy_(part.view_as(parameter))
