"""Worker processes of tests/distributed/test_reshard_kinds.py: one kind of module saves, and another one loads."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import tritoncomm
from helpers import adamw, residual, same_everywhere, tiny_model, train
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from tritoncomm import ConfigMismatchError, ConfigurationError, checkpoint
from tritoncomm.checkpoint import ResidualState
from tritoncomm.step import state as exchange_state
from tritoncomm.step.shards import local

import laws

STEPS = 3
ENTRIES = ("step", "exp_avg", "exp_avg_sq", "last_delivered", "last_aware")
OF_ADAM = ENTRIES[:3]


class Run:
    """A module of some kind with AdamW: plain, in DDP, or sharded with ``shards`` ranks in each replica."""

    def __init__(self, kind: str, shards: int = 1, seed: int = 0, *, make=adamw, **fields) -> None:
        self.model: nn.Module = tiny_model(seed)
        del self.model.unused  # torch cannot load the state of a parameter that has none
        self.group, given = None, {}
        if kind == "ddp":
            self.model = DistributedDataParallel(self.model)
        if kind == "fsdp":
            shape = (dist.get_world_size() // shards, shards)
            grid = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
            self.group = grid["replicate"].get_group()
            fully_shard(self.model, mesh=grid["shard"])
        if kind != "plain":
            given = {"model": self.model, "process_group": self.group}
        self.replicas = dist.get_world_size(self.group)
        optimizer = make(self.model)
        settings = {"density": 0.1, "dense_below": 0, "warmup_steps": 2} | fields
        self.optimizer = tritoncomm.wrap(optimizer, **settings, **given)

    @property
    def parameters(self) -> dict[str, torch.Tensor]:
        """The parameters that are trained, by the name that every kind gives them."""
        found = {name.removeprefix("module."): p for name, p in self.model.named_parameters()}
        return {name: parameter for name, parameter in found.items() if parameter.requires_grad}

    def owe(self, rank: int) -> None:
        """Replace the residual by small integers times a power of two, of which every sum is exact."""
        generator = torch.Generator().manual_seed(rank)
        own = self.optimizer._vector.feedback.residual
        own.copy_(torch.randint(-64, 65, own.shape, generator=generator) * 2.0**-5)

    def content(self, **fields) -> dict:
        """Return what is saved and loaded."""
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer, "residuals": ResidualState(self.optimizer, **fields)}

    def load(self, path: str, **fields) -> None:
        """Resume as docs/how-to/fsdp.md shows."""
        content = self.content(**fields)
        dcp.load(content, checkpoint_id=path)
        parts = {"model_state_dict": content["model"], "optim_state_dict": content["optimizer"]}
        set_state_dict(self.model, self.optimizer, **parts)

    def pending(self) -> dict[str, list]:
        """Return the pending update of each whole parameter: the mean of the residuals over the replicas."""
        parts, found = self.optimizer._vector.residuals_by_parameter(), {}
        for name, parameter in self.parameters.items():
            update = parts[parameter].clone()
            if isinstance(parameter, DTensor):
                update = update.view(parameter.to_local().shape)
                like = {"shape": parameter.shape, "stride": parameter.stride()}
                update = DTensor.from_local(update, parameter.device_mesh, parameter.placements, **like).full_tensor()
            update = update.flatten()
            dist.all_reduce(update, group=self.group)
            found[name] = (update / self.replicas).tolist()
        return found

    def values(self, entries: tuple[str, ...]) -> dict[str, list]:
        """Return the whole parameters and entries of the optimizer's state."""
        found = {}
        for name, parameter in self.parameters.items():
            found[name] = _whole(parameter.detach())
            state = self.optimizer.state[parameter]
            found |= {f"{name} {entry}": _whole(state[entry]) for entry in entries}
        return found


def _whole(value: torch.Tensor) -> list:
    return (value.full_tensor() if isinstance(value, DTensor) else value).flatten().tolist()


def save(rank: int, world_size: int, send, folder: str, kinds: list[tuple[str, int]]) -> None:
    """Train a module of each kind, save it, and send the pending update and the state."""
    for kind, shards in kinds:
        run = Run(kind, shards)
        train(run.model, run.optimizer, rank, range(STEPS))
        run.owe(rank)
        dcp.save(run.content(), checkpoint_id=f"{folder}/{kind}")
        found = run.pending(), run.values(ENTRIES)
        if rank == 0:
            send((kind, *found))


def load(rank: int, world_size: int, send, folder: str, saved_by: list[str], kinds: list[tuple[str, int]]) -> None:
    """Load every checkpoint into a module of each kind, send the same, and train on."""
    for saver in saved_by:
        path = f"{folder}/{saver}"
        for kind, shards in kinds:
            run = Run(kind, shards, seed=1)
            run.load(path, checkpoint_id=path)
            alone = run.replicas == 1
            found = run.pending(), run.values(OF_ADAM if alone else ENTRIES)
            assert run.optimizer.metrics()["steps"] == STEPS
            train(run.model, run.optimizer, rank, range(STEPS, STEPS + 2))
            assert same_everywhere([local(p.detach()).tolist() for p in run.model.parameters()], run.group)
            delivered = run.optimizer.metrics()["density_delivered"]
            assert delivered == 1 if alone else delivered < 0.6  # the dense steps are not repeated
            if rank == 0:
                send((f"{saver} to {kind} of {run.replicas}", *found))


def momentum(rank: int, world_size: int, send, folder: str) -> None:
    """A method with a momentum of its own, saved in its dense steps, starts a new one with other shards."""

    def made(kind: str, shards: int) -> Run:
        return Run(
            kind, shards, algo="dgc", dense_below=1, make=lambda model: torch.optim.SGD(model.parameters(), lr=0.01)
        )

    run = made("plain", 1)
    train(run.model, run.optimizer, rank, range(1))
    dcp.save(run.content(), checkpoint_id=folder)
    for kind, shards in (("fsdp", 2), ("fsdp", 1), ("plain", 1)):
        other = made(kind, shards)
        other.load(folder, checkpoint_id=folder)
        train(other.model, other.optimizer, rank, range(1, 4))
        assert same_everywhere([local(p.detach()).tolist() for p in other.model.parameters()], other.group)


def files(rank: int, world_size: int, send, folder: str, kind: str) -> None:
    """Save with ``checkpoint.save``, and send the pending update."""
    run = Run(kind)
    train(run.model, run.optimizer, rank, range(STEPS))
    run.owe(rank)
    checkpoint.save(run.optimizer, Path(folder) / kind)
    found = run.pending()
    if rank == 0:
        send(found)


def load_files(rank: int, world_size: int, send, folder: str, saver: str, kind: str) -> None:
    """Load with another number of ranks, and send the pending update."""
    run = Run(kind)
    checkpoint.load(run.optimizer, Path(folder) / saver)
    found = run.pending()
    if rank == 0:
        send(found)


def refused(rank: int, world_size: int, send, folder: str) -> None:
    """Another kind without ``checkpoint_id``, and the states of an older version: nothing changes on any rank."""
    path = f"{folder}/refused"
    run, other = Run("plain"), Run("fsdp", shards=2)
    before = other.values(()), other.pending()
    dcp.save({"residuals": ResidualState(run.optimizer)}, checkpoint_id=path)
    with pytest.raises(CheckpointException, match=r"ResidualState\(optimizer, checkpoint_id="):
        dcp.load({"residuals": ResidualState(other.optimizer)}, checkpoint_id=path)
    single = Run("fsdp", shards=1)
    with pytest.raises(ConfigurationError, match=r"another sharding: .*ResidualState\(optimizer, checkpoint_id="):
        dcp.load({"residuals": ResidualState(single.optimizer)}, checkpoint_id=path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exchange_state, "SCHEMA", 4)
        dcp.save({"residuals": ResidualState(run.optimizer)}, checkpoint_id=path)
    with pytest.raises((ConfigurationError, ConfigMismatchError), match=r"has schema=4, .* reads schema=\d"):
        dcp.load({"residuals": ResidualState(other.optimizer, checkpoint_id=path)}, checkpoint_id=path)
    content = ResidualState(run.optimizer).state_dict()
    if rank == 1:
        content = {key: value[:50] if isinstance(value, bytes) else value for key, value in content.items()}
    with pytest.raises(RuntimeError if rank == 1 else ConfigMismatchError, match="PytorchStreamReader"):
        ResidualState(run.optimizer).load_state_dict(content)
    assert (other.values(()), other.pending()) == before


def stages(rank: int, world_size: int, send, folder: str) -> None:
    """Two stages of a pipeline in one checkpoint load on the same ranks to the bit. They cannot be resharded."""
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]

    def made(seed: int) -> tuple[nn.Module, tritoncomm.SparseOptimizer]:
        model = tiny_model(seed)
        optimizer = tritoncomm.wrap(adamw(model), process_group=groups[rank % 2], density=0.1, dense_below=0)
        return model, optimizer

    model, optimizer = made(rank % 2)
    train(model, optimizer, rank, range(STEPS))
    dcp.save({"residuals": ResidualState(optimizer)}, checkpoint_id=folder)
    _, resumed = made(rank % 2)
    dcp.load({"residuals": ResidualState(resumed)}, checkpoint_id=folder)
    assert laws.same_bits(residual(resumed), residual(optimizer))
    with pytest.raises(ConfigurationError, match="stages of a pipeline"):
        ResidualState(resumed, checkpoint_id=folder)
