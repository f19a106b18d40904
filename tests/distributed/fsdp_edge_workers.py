"""Worker processes of tests/distributed/test_fsdp.py: sharded models that are refused by name, and failing steps."""

from __future__ import annotations

import gc
import os
import signal
from contextlib import nullcontext
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import tritoncomm
from ddp_edge_workers import groups_of_torch
from ddp_models import net
from fsdp_models import SETTINGS, Net, bits, loss_of, mesh, sharded, train
from helpers import FailingSGD, adamw, same_everywhere
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from tritoncomm import ConfigMismatchError, ConfigurationError, PeerLostError, ProtocolMismatchError

import laws

REFUSED = (ConfigurationError, ConfigMismatchError)  # a rank hears of the error of another one, or has its own


def refused(model: nn.Module, group: dist.ProcessGroup | None, match: str, *, alone: bool = False, **fields) -> None:
    """Wrap an optimizer of ``model``, with ``model=`` unless ``alone``, and expect an error."""
    given = fields if alone else fields | {"model": model}
    with pytest.raises(REFUSED, match=match):
        tritoncomm.wrap(adamw(model), process_group=group, **given)


def refused_groups(rank: int, world_size: int, send) -> None:
    """Without ``process_group``, or with another one than that of the replicas, the error says which one to pass."""
    grid = mesh()
    replicas, shards = (grid[name].get_group() for name in ("replicate", "shard"))
    model = sharded(Net(), grid["shard"])
    for group in (None, dist.group.WORLD, shards):
        refused(model, group, r"process_group")
        refused(model, group, r"process_group", alone=True)
    half = sharded(Net(), grid)  # replicas that FSDP averages itself
    refused(half, replicas, r'mesh\["(shard|replicate)"\]')
    refused(half, replicas, r"process_group", alone=True)
    train(model, tritoncomm.wrap(adamw(model), model=model, process_group=replicas, **SETTINGS), rank, range(2))


def refused_models(rank: int, world_size: int, send) -> None:
    """Parameters that ``fully_shard`` missed, several meshes, and other replicas are named."""
    grid = mesh()
    group = grid["replicate"].get_group()
    for ignored in (False, True):
        model = Net()
        for layer in [*model.layers, model.spare]:
            fully_shard(layer, mesh=grid["shard"])
        if ignored:
            fully_shard(model, mesh=grid["shard"], ignored_params={model.head.weight, model.head.bias})
        refused(model, group, r"head\.weight.*fully_shard|fully_shard.*head\.weight")
    two = net()
    fully_shard(two[0], mesh=grid["shard"])
    fully_shard(two[2], mesh=DeviceMesh("cpu", torch.arange(world_size)))
    fully_shard(two[4], mesh=grid["shard"])
    refused(two, group, r"mesh|process_group")
    other = Net()
    if rank >= 2:
        nn.init.ones_(other.head.weight)
    refused(sharded(other, grid["shard"]), group, r"values of head\.weight: rank \d has")
    one = sharded(Net(), grid["shard"])
    if rank == world_size - 1:  # the replicas of the other shard are equal
        one.head.weight.to_local().detach().fill_(1.0)
    refused(one, group, r"values of head\.weight: rank \d has")
    tritoncomm.wrap(adamw(one), model=one, process_group=group, broadcast_parameters=True)
    assert same_everywhere(bits(one), group)
    refused(sharded(Net(), grid["shard"]), group, r"recipe|density", density=0.1 if rank < 2 else 0.2)
    with pytest.raises(REFUSED, match="model"):
        tritoncomm.wrap(adamw(model), model="model", process_group=group)
    first = FullyShardedDataParallel(Net(), device_id=torch.device("cpu"), use_orig_params=True)
    for given in ({}, {"model": first}):
        with pytest.raises(REFUSED, match=r"FullyShardedDataParallel.* use fully_shard"):
            tritoncomm.wrap(adamw(first), broadcast_parameters=True, **given)


def groups_are_used_again(rank: int, world_size: int, send) -> None:
    """Wrapping an optimizer of shards again, or that of another model, creates no further process group."""
    gc.freeze()  # so that a collection does not look through all that is imported
    grid = mesh()
    replicas = grid["replicate"].get_group()
    counts = []
    for number in range(6):
        if number % 3 == 0:
            model = sharded(Net(), grid["shard"])
        optimizer = tritoncomm.wrap(adamw(model), model=model, process_group=replicas, **SETTINGS)
        train(model, optimizer, rank, range(1))
        counts.append(groups_of_torch())
        del optimizer
        gc.collect()
    assert counts[1:] == counts[1:2] * 5, counts


def stopped_update(rank: int, world_size: int, send) -> None:
    """An update that stops on one rank is an error on the ranks of all shards in the next step."""
    grid = mesh()
    model = sharded(Net(), grid["shard"])
    base = FailingSGD(model.parameters(), lr=0.01)
    optimizer = tritoncomm.wrap(base, model=model, process_group=grid["replicate"].get_group(), **SETTINGS)
    train(model, optimizer, rank, range(3))
    base.fails = rank == 1
    with pytest.raises(MemoryError) if rank == 1 else nullcontext():
        train(model, optimizer, rank, range(3, 4))
    before = bits(model)
    for _ in range(2):
        with pytest.raises(ProtocolMismatchError, match=r"rank 1 has '3, and one that stopped'.*load a checkpoint"):
            train(model, optimizer, rank, range(4, 5))
    assert bits(model) == before


def options_that_differ(rank: int, world_size: int, send) -> None:
    """A rate, or what is frozen, that differs between ranks with the same shard is named on the ranks of all shards."""
    grid = mesh()
    model = sharded(Net(), grid["shard"])
    optimizer = tritoncomm.wrap(adamw(model), model=model, process_group=grid["replicate"].get_group(), **SETTINGS)
    train(model, optimizer, rank, range(2))
    before, options = bits(model), optimizer.param_groups[0]
    for odd, said in (((3,), "rank 1 has 0.01, rank 3 has 0.02"), ((0, 3), "rank 0 has 0.02, rank 2 has 0.01")):
        options["lr"] = 0.02 if rank in odd else 0.01
        with pytest.raises(ProtocolMismatchError, match=f"nothing has changed.*lr of parameter group 0: {said}"):
            train(model, optimizer, rank, range(2, 3))
        options["lr"] = 0.01
        assert bits(model) == before
    model.head.weight.requires_grad_(rank < 2)  # in one replica
    with pytest.raises(ProtocolMismatchError, match=r"frozen state of head\.weight: rank 0 has False, rank 2 has True"):
        train(model, optimizer, rank, range(2, 3))
    model.head.weight.requires_grad_()
    assert bits(model) == before
    train(model, optimizer, rank, range(2, 4))
    assert same_everywhere(bits(model), grid["replicate"].get_group())
    assert bits(model) != before


def killed(rank: int, world_size: int, send) -> None:
    """If a rank dies in an exchange, ``step()`` of every survivor names it, on the ranks of all shards."""
    grid = mesh()
    model = sharded(Net(), grid["shard"])
    optimizer = tritoncomm.wrap(
        adamw(model),
        model=model,
        process_group=grid["replicate"].get_group(),
        timeout=timedelta(seconds=5),
        **SETTINGS,
    )
    train(model, optimizer, rank, range(2))
    optimizer.zero_grad()
    loss_of(model, rank, 2).backward()
    before, pending = bits(model), optimizer._vector.feedback.residual.clone()
    if rank == 1:
        scheduler = optimizer._vector.scheduler
        perform = scheduler._perform

        def fatal(op):
            if op.phase != "counts":
                os.kill(os.getpid(), signal.SIGKILL)
            return perform(op)

        scheduler._perform = fatal
    with pytest.raises(PeerLostError, match="rank 1") as caught:
        optimizer.step()
    assert caught.value.peers == (1,)
    assert bits(model) == before
    assert laws.same_bits(optimizer._vector.feedback.residual, pending)
    send((rank, "named"))
    os._exit(0)
