"""Worker processes of tests/distributed/test_checkpoint_kinds.py: a checkpoint is the same whatever it was saved by."""

from __future__ import annotations

from copy import deepcopy
from itertools import product
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import tritoncomm
from ddp_models import net
from fsdp_models import Net, mesh, sharded
from fsdp_models import train as train_shards
from helpers import same_everywhere, train
from model_kinds import adamw, bits, wrapped
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.tensor import DTensor
from tritoncomm import checkpoint
from tritoncomm.checkpoint import ResidualState

KINDS = ("plain", "ddp")
CLIPPED = {"max_grad_norm": 0.3, "clip_by": "gradient"}


def saved_by_rank(rank: int, world_size: int, send, folder: str) -> None:
    """``tritoncomm.checkpoint`` and ``state_dict()``: what any kind has saved continues to the bit with any other."""
    for fields, saved_at in (({}, 4), (CLIPPED, 1)):
        straight = {}
        for kind in KINDS:
            model, optimizer = wrapped(kind, net(), adamw, **fields)
            train(model, optimizer, rank, range(saved_at))
            checkpoint.save(optimizer, Path(folder) / f"{kind}-{saved_at}-{len(fields)}")
            state = deepcopy(optimizer.state_dict())
            weights = deepcopy(getattr(model, "module", model).state_dict())
            train(model, optimizer, rank, range(saved_at, 8))
            straight[kind] = bits(model), optimizer.state_dict()["tritoncomm"]["checksum"]
            for other, way in product(KINDS, ("folder", "state")):
                inner = net(seed=1)
                inner.load_state_dict(weights)
                again, resumed = wrapped(other, inner, adamw, **fields)
                if way == "folder":
                    checkpoint.load(resumed, Path(folder) / f"{kind}-{saved_at}-{len(fields)}")
                else:
                    resumed.load_state_dict(deepcopy(state))
                train(again, resumed, rank, range(saved_at, 8))
                found = bits(again), resumed.state_dict()["tritoncomm"]["checksum"]
                assert found == straight[kind], (kind, other, way, saved_at)
        assert straight["plain"] == straight["ddp"]


def saved_together(rank: int, world_size: int, send, folder: str) -> None:
    """The same with ``torch.distributed.checkpoint`` and ``ResidualState``."""
    for kind in KINDS:
        model, optimizer = wrapped(kind, net(), adamw)
        train(model, optimizer, rank, range(4))
        path = f"{folder}/{kind}-together"
        dcp.save(_content(model, optimizer), checkpoint_id=path)
        train(model, optimizer, rank, range(4, 8))
        for other in KINDS:
            again, resumed = wrapped(other, net(seed=0), adamw)
            _load(again, resumed, path)
            train(again, resumed, rank, range(4, 8))
            assert bits(again) == bits(model), (kind, other)
            checksums = [each.state_dict()["tritoncomm"]["checksum"] for each in (optimizer, resumed)]
            assert checksums[0] == checksums[1]


def _content(model: nn.Module, optimizer: tritoncomm.SparseOptimizer, **fields) -> dict:
    parts, states = get_state_dict(model, optimizer)
    return {"model": parts, "optimizer": states, "residuals": ResidualState(optimizer, **fields)}


def _load(model: nn.Module, optimizer: tritoncomm.SparseOptimizer, path: str, **fields) -> None:
    content = _content(model, optimizer, **fields)
    dcp.load(content, checkpoint_id=path)
    set_state_dict(model, optimizer, model_state_dict=content["model"], optim_state_dict=content["optimizer"])


class Run:
    """A plain module, or one that is sharded in replicas of two ranks, with SGD."""

    def __init__(self, *, shards: bool) -> None:
        grid = mesh(2, 2)
        self.model = sharded(Net(), grid["shard"]) if shards else Net()
        self.group = grid["replicate"].get_group() if shards else None
        optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        given = {"model": self.model, "process_group": self.group} if shards else {}
        self.optimizer = tritoncomm.wrap(optimizer, density=0.2, dense_below=0, **given)

    def pending(self) -> dict[str, list[float]]:
        """Return the mean over replicas of the residuals of each whole parameter."""
        names = {parameter: name for name, parameter in self.model.named_parameters()}
        found = {}
        for vector in self.optimizer._exchange.vectors:
            for parameter, residual in vector.residuals_by_parameter().items():
                own = residual.clone()
                if isinstance(parameter, DTensor):
                    fields = {"shape": parameter.shape, "stride": parameter.stride()}
                    own = own.view(parameter.to_local().shape)
                    own = DTensor.from_local(own, parameter.device_mesh, parameter.placements, **fields).full_tensor()
                dist.all_reduce(own, group=self.group)
                found[names[parameter]] = (own.flatten() / dist.get_world_size(self.group)).tolist()
        return found


def to_and_from_shards(rank: int, world_size: int, send, folder: str, *, shards: bool) -> None:
    """Of four plain replicas and two sharded ones, each loads what the other has saved. The pending update is kept."""
    run, other = Run(shards=shards), Run(shards=not shards)
    train_shards(run.model, run.optimizer, rank, range(4))
    before, weights = run.pending(), _whole(run.model)
    assert any(any(update) for update in before.values())
    dcp.save(_content(run.model, run.optimizer), checkpoint_id=folder)
    _load(other.model, other.optimizer, folder, checkpoint_id=folder)
    assert _whole(other.model) == weights
    assert other.pending() == before  # exact, because all numbers of replicas are powers of two
    assert other.optimizer.metrics()["steps"] == 4
    train_shards(other.model, other.optimizer, rank, range(4, 7))
    assert same_everywhere(bits(other.model), other.group)
    assert other.optimizer.metrics()["density_delivered"] < 0.6


def _whole(model: nn.Module) -> list[list[float]]:
    return [(p.full_tensor() if isinstance(p, DTensor) else p.detach()).tolist() for p in model.parameters()]
