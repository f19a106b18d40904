"""A module as an optimizer may train it: plain, in DDP, or sharded by FSDP2 in shards of one rank each."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
import tritoncomm
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from tritoncomm.step.tensors.shards import local

KINDS = ("plain", "ddp", "fsdp")
SETTINGS = {"density": 0.1, "dense_below": 0, "warmup_steps": 2}


def opened(kind: str, model: nn.Module) -> tuple[nn.Module, dict[str, object]]:
    """Return ``model`` as a module of the kind, and the arguments of ``wrap`` that belong to it."""
    if kind == "ddp":
        outer = DistributedDataParallel(model, bucket_cap_mb=0.003)
        return outer, {"model": outer}
    if kind == "fsdp":
        mesh = init_device_mesh("cpu", (dist.get_world_size(), 1), mesh_dim_names=("replicate", "shard"))
        for part in model.children():
            if list(part.parameters()):
                fully_shard(part, mesh=mesh["shard"])
        return fully_shard(model, mesh=mesh["shard"]), {
            "model": model,
            "process_group": mesh["replicate"].get_group(),
        }
    return model, {}


def wrapped(
    kind: str,
    model: nn.Module,
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer],
    **settings: object,
) -> tuple[nn.Module, tritoncomm.SparseOptimizer]:
    """Return ``model`` as a module of the kind, and its wrapped optimizer."""
    outer, given = opened(kind, model)
    return outer, tritoncomm.wrap(optimizer(outer.parameters()), **SETTINGS | settings | given)


def adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.AdamW:
    """Return AdamW with settings at which sparse steps matter."""
    return torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1)


def sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.SGD:
    """Return SGD with momentum."""
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def bits(*models: nn.Module) -> list[int]:
    """Return the bits of all parameters, or of this rank's shards of them."""
    parts = [local(p.detach()).reshape(-1) for model in models for p in model.parameters()]
    return torch.cat(parts).view(torch.int32).tolist()
