"""Worker processes of tests/distributed/test_reshard_kinds.py: one kind of module saves, and another one loads."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import tritoncomm
from helpers import adamw, residual, same_everywhere, tiny_model, train
from saved_run import OF_ADAM, SavedRun, lists, whole
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from tritoncomm import ConfigMismatchError, ConfigurationError, checkpoint
from tritoncomm.checkpoint import ResidualState
from tritoncomm.step.saved import state as exchange_state
from tritoncomm.step.tensors.shards import local

import laws

STEPS = 3
ENTRIES = (*OF_ADAM, "last_delivered", "last_aware")


class Run(SavedRun):
    """A module of some kind with AdamW: plain, in DDP, or sharded with ``shards`` ranks in each replica."""

    def __init__(self, kind: str, shards: int = 1, seed: int = 0, *, make=adamw, **fields) -> None:
        self.model: nn.Module = tiny_model(seed)
        del self.model.unused  # torch cannot load the state of a parameter that has none
        given = {}
        if kind == "ddp":
            self.model = DistributedDataParallel(self.model)
        if kind == "fsdp":
            shape = (dist.get_world_size() // shards, shards)
            grid = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
            self.group = grid["replicate"].get_group()
            fully_shard(self.model, mesh=grid["shard"])
        if kind != "plain":
            given = {"model": self.model, "process_group": self.group}
        optimizer = make(self.model)
        settings = {"density": 0.1, "dense_below": 0, "warmup_steps": 2} | fields
        self.optimizer = tritoncomm.wrap(optimizer, **settings, **given)

    def owe(self, rank: int) -> None:
        """Replace the residual by small integers times a power of two, of which every sum is exact."""
        generator = torch.Generator().manual_seed(rank)
        own = self.optimizer._tritoncomm.setup.vector.feedback.residual
        own.copy_(torch.randint(-64, 65, own.shape, generator=generator) * 2.0**-5)

    def state_bits(self) -> dict[str, list]:
        """Return Adam's state, and the steps of the last deliveries unless there is a single replica."""
        return lists(self.state(OF_ADAM if self.replicas == 1 else ENTRIES))

    def values(self, entries: tuple[str, ...]) -> dict[str, list]:
        """Return the whole parameters and entries of the optimizer's state."""
        parameters, state = self.parameters, self.state(entries)
        assert len(state) == len(entries) * len(parameters)
        return lists({name: whole(parameter.detach()) for name, parameter in parameters.items()} | state)


def save(rank: int, world_size: int, send, folder: str, kinds: list[tuple[str, int]]) -> None:
    """Train a module of each kind, save it, and send the pending update and the state."""
    for kind, shards in kinds:
        run = Run(kind, shards)
        train(run.model, run.optimizer, rank, range(STEPS))
        run.owe(rank)
        dcp.save(run.content(), checkpoint_id=f"{folder}/{kind}")
        checkpoint.save(run.optimizer, f"{folder}/{kind}/own")
        found = lists(run.pending()), run.values(ENTRIES)
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
            own = Run(kind, shards, seed=2)
            checkpoint.load(own.optimizer, f"{path}/own")
            assert (lists(own.pending()), own.state_bits()) == (lists(run.pending()), run.state_bits())
            found = lists(run.pending()), run.values(OF_ADAM if alone else ENTRIES)
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


def refused(rank: int, world_size: int, send, folder: str) -> None:
    """Another kind without ``checkpoint_id``, and the states of an older version: nothing changes on any rank."""
    path = f"{folder}/refused"
    run, other = Run("plain"), Run("fsdp", shards=2)
    before = other.values(()), lists(other.pending())
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
    assert (other.values(()), lists(other.pending())) == before


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
