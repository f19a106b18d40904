"""Worker processes of tests/distributed/test_door_edges.py: two replicas of two shards in unusual situations."""

from __future__ import annotations

import copy
import gc
from contextlib import nullcontext

import pytest
import torch
import tritoncomm
from door_edge_workers import groups_of_torch
from fsdp_models import Net, loss_of, mesh, sharded
from helpers import FailingSGD, adamw
from sharded_door_workers import SETTINGS, whole
from torch import nn
from torch.amp import GradScaler
from torch.distributed.fsdp import fully_shard
from tritoncomm import ConfigurationError, ProtocolMismatchError


def groups_are_used_again(rank: int, world_size: int, send) -> None:
    """Wrapping an optimizer of shards again, or another model, creates no further process group."""
    gc.freeze()  # so that a collection does not look through all that is imported
    grid = mesh()
    replicas = grid["replicate"].get_group()
    model = sharded(Net(), grid["shard"])
    counts = []
    for step in range(6):
        optimizer = tritoncomm.wrap(adamw(model), process_group=replicas, density=0.1, dense_below=0)
        loss_of(model, rank, step).backward()
        optimizer.step()
        optimizer.zero_grad()
        counts.append(groups_of_torch())
    assert counts[1:] == counts[1:2] * 5, counts
    del optimizer
    for _ in range(5):
        model = sharded(Net(), grid["shard"])
        optimizer = tritoncomm.wrap(adamw(model), model=model, process_group=replicas, density=0.1)
        loss_of(model, rank, 0).backward()
        optimizer.step()
        counts.append(groups_of_torch())
        del model, optimizer
        gc.collect()
    assert counts[-1] == counts[1], counts


def accumulate(model: nn.Module, rank: int, step: int, micro: int, scaler: GradScaler | None = None) -> None:
    """Run one of two micro-batches. The second is exchanged."""
    model.set_requires_all_reduce(micro == 1)
    loss = loss_of(model, rank, 10 * step + micro)
    (loss if scaler is None else scaler.scale(loss)).backward()


def discarded_micro_batches(rank: int, world_size: int, send) -> None:
    """``zero_grad`` discards micro-batches that were not exchanged, in every form."""
    grid = mesh()
    replicas = grid["replicate"].get_group()
    finals = []
    for way in ("none", "wrapped", "wrapped to zero", "model", "original", "halves"):
        model = sharded(Net(), grid["shard"])
        optimizer = tritoncomm.wrap(adamw(model), model=model, process_group=replicas, **SETTINGS)
        for step in range(4):
            optimizer.zero_grad()
            if step == 2 and way != "none":
                accumulate(model, rank, 90, 0)
                if way == "halves":
                    parameters = list(model.parameters())
                    for part in (parameters[::2], parameters[1::2]):
                        optimizer._hook.discard({id(parameter) for parameter in part})
                elif way.startswith("wrapped"):
                    optimizer.zero_grad(set_to_none=way == "wrapped")
                else:
                    (model if way == "model" else optimizer.optimizer).zero_grad()
            for micro in range(2):
                accumulate(model, rank, step, micro)
            optimizer.step()
        finals.append(whole(model))
    assert all(final == finals[0] for final in finals)


def saved_micro_batches(rank: int, world_size: int, send) -> None:
    """A state that is saved during an accumulation is that of the last step. Loading it discards micro-batches."""
    grid = mesh()
    replicas = grid["replicate"].get_group()
    model = sharded(Net(), grid["shard"])
    optimizer = tritoncomm.wrap(adamw(model), model=model, process_group=replicas, **SETTINGS)

    def train(first: int, last: int) -> None:
        for step in range(first, last):
            optimizer.zero_grad()
            for micro in range(2):
                accumulate(model, rank, step, micro)
            optimizer.step()

    train(0, 2)
    weights = copy.deepcopy(model.state_dict())
    optimizer.zero_grad()
    accumulate(model, rank, 2, 0)
    state = copy.deepcopy(optimizer.state_dict())
    accumulate(model, rank, 2, 1)
    optimizer.step()
    train(3, 5)
    expected = whole(model)
    optimizer.zero_grad()
    accumulate(model, rank, 99, 0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(weights[name])
    optimizer.load_state_dict(state)
    train(2, 5)
    assert whole(model) == expected


def scaled_micro_batches(rank: int, world_size: int, send) -> None:
    """Micro-batches with different loss scales give the sum of the unscaled gradients."""
    grid = mesh()
    replicas = grid["replicate"].get_group()
    finals = []
    for scales in ((1.0, 1.0), (256.0, 256.0), (256.0, 64.0)):
        model = sharded(Net(), grid["shard"])
        scaler = GradScaler("cpu", growth_interval=1000)
        scaler.scale(torch.zeros(()))  # creates the scale
        optimizer = tritoncomm.wrap(adamw(model), model=model, process_group=replicas, scaler=scaler, **SETTINGS)
        for step in range(3):
            optimizer.zero_grad()
            for micro in range(2):
                scaler.update(scales[micro])
                accumulate(model, rank, step, micro, scaler)
            scaler.step(optimizer)
            scaler.update()
        finals.append(whole(model))
    assert finals[0] == finals[1] == finals[2]


def stopped_update(rank: int, world_size: int, send) -> None:
    """An update that stops on one rank is an error on the ranks of all shards in the next step, also with a hook."""
    grid = mesh()
    replicas = grid["replicate"].get_group()
    for hooked in (False, True):
        model = sharded(Net(), grid["shard"])
        base = FailingSGD(model.parameters(), lr=0.01)
        given = {"model": model} if hooked else {}
        optimizer = tritoncomm.wrap(base, process_group=replicas, **given, **SETTINGS)

        def step(number: int, model: nn.Module = model, optimizer: torch.optim.Optimizer = optimizer) -> None:
            optimizer.zero_grad()
            loss_of(model, rank, number).backward()
            optimizer.step()

        for number in range(3):
            step(number)
        base.fails = rank == 1
        with pytest.raises(MemoryError) if rank == 1 else nullcontext():
            step(3)
        before = whole(model)
        for _ in range(2):
            with pytest.raises(ProtocolMismatchError, match=r"rank 1 has '3, and one that stopped'.*load a checkpoint"):
                step(4)
        assert whole(model) == before


def parameters_without_shards(rank: int, world_size: int, send) -> None:
    """Parameters that FSDP does not shard are not averaged by its hook: ``wrap`` refuses to step them."""
    grid = mesh()
    replicas = grid["replicate"].get_group()
    for ignored in (False, True):
        model = Net()
        for layer in [*model.layers, model.spare]:
            fully_shard(layer, mesh=grid["shard"])
        if ignored:
            fully_shard(model, mesh=grid["shard"], ignored_params={model.head.weight, model.head.bias})
        with pytest.raises(ConfigurationError, match=r"does not average 2 parameters .*\(3, 9\).* not sharded by"):
            tritoncomm.wrap(adamw(model), model=model, process_group=replicas)
