"""Worker processes of tests/distributed/test_reshard.py: a sharded model is saved on one mesh and loaded on another."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import tritoncomm
from checkpoint_workers import wrap as wrap_plain
from fsdp_models import Net, bits, sharded, train
from helpers import adamw, same_everywhere, tiny_model
from helpers import train as train_plain
from saved_run import OF_ADAM, SavedRun, lists
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict, set_model_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from tritoncomm import ConfigurationError, checkpoint
from tritoncomm.checkpoint import ResidualState

STEPS = 5
ENTRIES = (*OF_ADAM, "last_delivered", "param_rms")


class Run(SavedRun):
    """A sharded model with a wrapped optimizer."""

    def __init__(self, shape: tuple[int, int], names: tuple[str, str] = ("replicate", "shard")) -> None:
        self.grid = init_device_mesh("cpu", shape, mesh_dim_names=names)
        self.group = self.grid["replicate"].get_group()
        model = sharded(Net(), self.grid["shard"])
        self.wrap(model, adamw(model))

    def wrap(self, model: nn.Module, optimizer: torch.optim.AdamW) -> None:
        """Train ``model`` from now on, with four dense steps. A resumed run must not take another one."""
        self.model = model
        self.optimizer = tritoncomm.wrap(
            optimizer, model=model, process_group=self.group, density=0.2, dense_below=0, warmup_steps=4
        )


def save(rank: int, world_size: int, send, folder: str, shape: tuple[int, int]) -> None:
    """Train, save, and send the pending update and the optimizer's state."""
    run = Run(shape)
    train(run.model, run.optimizer, rank, range(STEPS))
    dcp.save(run.content(), checkpoint_id=folder)
    found = lists(run.pending()), lists(run.state(ENTRIES))
    if rank == 0:
        send(found)


def load(rank: int, world_size: int, send, folder: str, shapes: list) -> None:
    """Load on each mesh, send the same, and train on."""
    for shape in shapes:
        run = Run(shape)
        run.load(folder, checkpoint_id=folder)
        found = lists(run.pending()), lists(run.state(ENTRIES))
        assert run.optimizer.metrics()["steps"] == STEPS
        train(run.model, run.optimizer, rank, range(STEPS, STEPS + 3))
        assert same_everywhere(bits(run.model), run.group)
        delivered = run.optimizer.metrics()["density_delivered"]
        assert delivered < 0.6 if shape[0] > 1 else delivered == 1
        assert any(update.any() for update in run.pending().values()) is (shape[0] > 1)  # delivered, if alone
        if rank == 0:
            send(found)


def same_mesh(rank: int, world_size: int, send, folder: str) -> None:
    """On the same ranks with the same shards, a run continues to the bit, whatever ``ResidualState`` is told."""
    run = Run((2, 2))
    keys = [None] * world_size
    dist.all_gather_object(keys, list(ResidualState(run.optimizer).state_dict()))
    assert len({key for key, *_ in keys}) == world_size
    train(run.model, run.optimizer, rank, range(STEPS))
    dcp.save(run.content(), checkpoint_id=folder)
    checkpoint.save(run.optimizer, f"{folder}/own")
    train(run.model, run.optimizer, rank, range(STEPS, STEPS + 4))
    for fields in ({}, {"checkpoint_id": folder}, {"storage_reader": dcp.FileSystemReader(folder)}):
        again = Run((2, 2))
        again.load(folder, **fields)
        train(again.model, again.optimizer, rank, range(STEPS, STEPS + 4))
        assert bits(again.model) == bits(run.model), fields
    again = Run((2, 2))
    weights, _ = get_state_dict(again.model, again.optimizer)
    dcp.load({"model": weights}, checkpoint_id=folder)
    set_model_state_dict(again.model, weights)
    checkpoint.load(again.optimizer, f"{folder}/own")
    train(again.model, again.optimizer, rank, range(STEPS, STEPS + 4))
    assert bits(again.model) == bits(run.model)
    with pytest.raises(ConfigurationError, match=r"checkpoint_id=.*nowhere: no checkpoint can be read"):
        ResidualState(run.optimizer, checkpoint_id=f"{folder}/nowhere")


def from_one_replica(rank: int, world_size: int, send, folder: str) -> None:
    """The state of a single replica is refused with the way out, and loads on this way."""
    run = Run((world_size, 1))
    with pytest.raises(ConfigurationError, match=r"single .*before wrap\(\), without ResidualState"):
        run.content(checkpoint_id=folder)
    run.optimizer.release()
    model = sharded(Net(), run.grid["shard"])
    optimizer = adamw(model)
    parts, states = get_state_dict(model, optimizer)
    content = {"model": parts, "optimizer": states}
    dcp.load(content, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=parts, optim_state_dict=states)
    run.wrap(model, optimizer)
    found = lists(run.pending()), lists(run.state(ENTRIES))
    train(run.model, run.optimizer, rank, range(STEPS, STEPS + 6))
    assert same_everywhere(bits(run.model), run.group)
    assert run.optimizer.metrics()["density_delivered"] < 0.6
    if rank == 0:
        send(found)


def refused(rank: int, world_size: int, send, folder: str) -> None:
    """Without ``checkpoint_id``, all ranks raise an error that names the fix, and nothing changes."""
    run = Run((world_size, 1))
    before = bits(run.model)
    with pytest.raises(CheckpointException, match=r"ResidualState\(optimizer, checkpoint_id="):
        run.load(folder)
    assert bits(run.model) == before
    assert not any(update.any() for update in run.pending().values())


def order_of_dimensions(rank: int, world_size: int, send, folder: str) -> None:
    """On a mesh whose dimensions have the other order, ranks swap shards. Each gets the residual of its own."""
    run = Run((2, 2), names=("shard", "replicate"))
    run.load(folder, checkpoint_id=folder)
    found = lists(run.pending()), lists(run.state(ENTRIES))
    if rank == 0:
        send(found)


def save_plain(rank: int, world_size: int, send, folder: str) -> None:
    """Save the residuals of a model that is not sharded, and send the pending update."""
    model = tiny_model()
    optimizer = wrap_plain(model, density=0.1)
    train_plain(model, optimizer, rank, range(4))
    dcp.save({"residuals": ResidualState(optimizer)}, checkpoint_id=folder)
    send(_plain_pending(optimizer))


def load_plain(rank: int, world_size: int, send, folder: str) -> None:
    """Load them with another number of ranks, and send the pending update."""
    optimizer = wrap_plain(tiny_model(), density=0.1)
    with pytest.raises(CheckpointException, match=r"ResidualState\(optimizer, checkpoint_id="):
        dcp.load({"residuals": ResidualState(optimizer)}, checkpoint_id=folder)
    dcp.load({"residuals": ResidualState(optimizer, checkpoint_id=folder)}, checkpoint_id=folder)
    send(_plain_pending(optimizer))


def _plain_pending(optimizer: tritoncomm.SparseOptimizer) -> list[float]:
    update = optimizer._tritoncomm.setup.vector.feedback.residual.clone()
    dist.all_reduce(update)
    return (update / dist.get_world_size()).tolist()
