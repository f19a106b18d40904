"""Worker processes of tests/distributed/test_fsdp.py: registering, exchanging, resuming, and losing a rank."""

from __future__ import annotations

import copy
import os
import signal
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import tritoncomm
from fsdp_models import Net, grads, local, loss_of, mesh, plain_grads, residual_sum, sharded, shards
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, MixedPrecisionPolicy
from tritoncomm import ConfigMismatchError, ConfigurationError, ExchangeError, PeerLostError
from tritoncomm import fsdp as front

import laws


def dense_training(rank: int, world_size: int, send) -> None:
    """The dense method and density 1 train like plain averaging over all four ranks."""
    for algo, density in (("dense", 1.0), ("oktopk", 1.0)):
        grid, reference = mesh(), Net()
        model = sharded(Net(), grid["shard"])
        front.register(model, grid["replicate"].get_group(), algo, density=density)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        plain = torch.optim.Adam(reference.parameters(), lr=0.01)
        for step in range(4):
            optimizer.zero_grad()
            plain.zero_grad()
            loss_of(model, rank, step).backward()
            for r in range(world_size):
                (loss_of(reference, r, step) / world_size).backward()
            optimizer.step()
            plain.step()
        for p, q in zip(model.parameters(), reference.parameters(), strict=True):
            assert torch.allclose(p.full_tensor(), q, atol=1e-5)


def conservation(rank: int, world_size: int, send) -> None:
    """Delivered gradients plus residuals equal the dense sum, replicas agree, and small tensors have no residual."""
    for algo in ("oktopk", "spardl", "exdyna", "topk_allgather"):
        grid = mesh()
        model = sharded(Net(), grid["shard"])
        state = front.register(model, grid["replicate"].get_group(), algo, density=0.1, dense_below=16)
        delivered, dense = 0, 0
        for step in range(4):
            model.zero_grad()
            loss_of(model, rank, step).backward()
            delivered = delivered + shards(model)
            dense = dense + local(plain_grads(rank, world_size, step), model)
        metrics = state.metrics()
        assert metrics["steps"] == 4
        assert 0.05 < metrics["density_delivered"] < 0.9
        assert min(metrics[name] for name in ("bytes_sent", "bytes_received", "messages_sent", "seconds_exchange")) > 0
        parts = state.state_dict()["residuals"]
        small = [name for name, p in model.named_parameters() if p.dim() <= 1 or p.to_local().numel() < 16]
        assert small
        assert not any(parts[name].any() for name in small)
        pending = residual_sum(state, model)
        assert torch.allclose(delivered + pending / 2, dense, atol=1e-5), algo
        bits = shards(model)
        other = [torch.empty_like(bits) for _ in range(2)]
        dist.all_gather(other, bits, group=grid["replicate"].get_group())
        assert laws.same_bits(other[0], other[1])


def accumulation(rank: int, world_size: int, send) -> None:
    """Micro-batches give the dense sum, with either switch of FSDP and without any."""
    for switch in ("set_requires_gradient_sync", "set_requires_all_reduce", None):
        grid = mesh()
        model = sharded(Net(), grid["shard"])
        state = front.register(model, grid["replicate"].get_group(), "dense")
        for micro in range(3):
            if switch:
                getattr(model, switch)(micro == 2)
            loss_of(model, rank, micro).backward()
        assert torch.allclose(grads(model), plain_grads(rank, world_size, 0, micro=3), atol=1e-5), switch
        assert state.metrics()["steps"] == (1 if switch else 3)


def unused_layers_and_bf16(rank: int, world_size: int, send) -> None:
    """A pass may leave out layers, and gradients may be reduced in bf16."""
    grid = mesh()
    model = sharded(Net(), grid["shard"])
    front.register(model, grid["replicate"].get_group(), density=0.5)
    for step in range(4):
        model.zero_grad()
        loss_of(model, rank, step, spare=step != 2).backward()
    narrow = sharded(Net(), grid["shard"], mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    front.register(narrow, grid["replicate"].get_group(), "dense")
    loss_of(narrow, rank, 0).backward()
    assert torch.allclose(grads(narrow), plain_grads(rank, world_size, 0), rtol=0.1, atol=0.05)


def sparse_accumulation(rank: int, world_size: int, send) -> None:
    """Micro-batches that ``set_requires_all_reduce`` holds back are exchanged with the last one."""
    grid = mesh()
    model = sharded(Net(), grid["shard"])
    state = front.register(model, grid["replicate"].get_group(), "topk_allgather", density=0.1, dense_below=0)
    delivered, dense = 0.0, 0.0
    for step in range(3):
        model.zero_grad()
        for micro in range(2):
            model.set_requires_all_reduce(micro == 1)
            loss_of(model, rank, 2 * step + micro).backward()
        delivered = delivered + shards(model)
        dense = dense + local(plain_grads(rank, world_size, step, micro=2), model)
    assert torch.allclose(delivered + residual_sum(state, model) / 2, dense, atol=1e-5)
    assert state.metrics()["steps"] == 3


def replaced_parameters(rank: int, world_size: int, send) -> None:
    """A state may replace the parameters before ``wrap``. Afterwards this is an error."""
    grid = mesh()
    group = grid["replicate"].get_group()

    def replace(model: nn.Module) -> None:
        model.load_state_dict({name: each.clone() for name, each in model.state_dict().items()}, assign=True)

    model = sharded(Net(), grid["shard"])
    front.register(model, group, "dense", dense_below=0)
    replace(model)
    with pytest.raises(ConfigurationError, match="was replaced after register"):
        loss_of(model, rank, 0).backward()
    model = sharded(Net(), grid["shard"])
    replace(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = tritoncomm.wrap(optimizer, model=model, process_group=group, algo="dense")
    before = shards(model, of=lambda p: p.detach())
    loss_of(model, rank, 0).backward()
    assert torch.allclose(grads(model), plain_grads(rank, world_size, 0), atol=1e-5)
    optimizer.step()
    assert torch.allclose(shards(model, of=lambda p: p.detach()), before - 0.1 * shards(model), atol=1e-6)


def failed_write(rank: int, world_size: int, send) -> None:
    """An error after the exchange is raised on all ranks. No gradient looks like one, and no residual changes."""
    grid = mesh()
    model = sharded(Net(), grid["shard"])
    state = front.register(model, grid["replicate"].get_group(), "topk_allgather", density=0.2, dense_below=0)
    loss_of(model, rank, 0).backward()
    residuals = [vector.feedback.residual.clone() for vector in state.exchange.vectors]
    if rank == 1:

        def fail(arrived: object) -> None:
            raise torch.OutOfMemoryError("no memory")

        state.hooks[1].add_mean = fail
    with pytest.raises(torch.OutOfMemoryError if rank == 1 else ExchangeError, match="no memory"):
        loss_of(model, rank, 1).backward()
    assert all(laws.same_bits(v.feedback.residual, r) for v, r in zip(state.exchange.vectors, residuals, strict=True))
    if rank == 1:
        assert all(p.grad.to_local().isnan().all() for p in model.parameters())


def killed(rank: int, world_size: int, send) -> None:
    """If a rank dies in its last exchange of a pass, backward() raises on every survivor and names it."""
    grid = mesh()
    model = sharded(Net(), grid["shard"])
    group = grid["replicate"].get_group()
    state = front.register(model, group, density=0.2, dense_below=0, timeout=timedelta(seconds=5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        optimizer.zero_grad()
        loss_of(model, rank, step).backward()
        optimizer.step()
    optimizer.zero_grad()
    before = torch.cat([p.to_local().detach().reshape(-1) for p in model.parameters()]).clone()
    residuals = [vector.feedback.residual.clone() for vector in state.exchange.vectors]
    loss = loss_of(model, rank, 2)
    if rank == 1:
        scheduler = last_scheduler(state)
        perform = scheduler._perform

        def fatal(op):
            if op.phase != "counts":
                os.kill(os.getpid(), signal.SIGKILL)
            return perform(op)

        scheduler._perform = fatal
    with pytest.raises(PeerLostError, match="rank 1") as caught:
        loss.backward()  # so no rank reaches its step
    assert caught.value.peers == (1,)
    assert torch.equal(before, torch.cat([p.to_local().detach().reshape(-1) for p in model.parameters()]))
    assert all(laws.same_bits(v.feedback.residual, r) for v, r in zip(state.exchange.vectors, residuals, strict=True))
    send((rank, "named"))
    os._exit(0)


def last_scheduler(state: front.FSDPState):
    """Return the scheduler of the first layer, whose gradients come last in backward."""
    (vector,) = [vector for vector in state.exchange.vectors if vector.names[0].startswith("layers.0")]
    return vector.scheduler


def resume(rank: int, world_size: int, send) -> None:
    """A saved and resumed run equals an uninterrupted one bit for bit. All ranks reject foreign states."""
    grid = mesh()
    make = lambda: sharded(Net(), grid["shard"])  # noqa: E731
    model = make()
    state = front.register(model, grid["replicate"].get_group(), density=0.2, dense_below=0)
    for step in range(3):
        model.zero_grad()
        loss_of(model, rank, step).backward()
    saved = copy.deepcopy(state.state_dict())
    again = make()
    resumed = front.register(again, grid["replicate"].get_group(), density=0.2, dense_below=0)
    with pytest.raises(ConfigMismatchError if rank else ConfigurationError, match="rank=9"):
        resumed.load_state_dict(saved if rank else saved | {"rank": 9})
    resumed.load_state_dict(saved)
    for net in (model, again):
        net.zero_grad()
        loss_of(net, rank, 3).backward()
    assert laws.same_bits(shards(model), shards(again))
    left, right = state.state_dict()["residuals"], resumed.state_dict()["residuals"]
    assert all(laws.same_bits(left[name], right[name]) for name in left)


def rejected_models(rank: int, world_size: int, send) -> None:
    """register() rejects native HSDP, models without FSDP, a wrong group, a second hook, and unequal replicas."""
    grid = mesh()
    group = grid["replicate"].get_group()
    with pytest.raises(ConfigurationError, match=r"averages over the replicas densely before any hook"):
        front.register(sharded(Net(), grid), group)
    with pytest.raises(ConfigurationError, match="fully_shard"):
        front.register(Net(), group)
    model = sharded(Net(), grid["shard"])
    with pytest.raises(ConfigurationError, match=r"must have this rank, \d, and no other in common"):
        front.register(model, dist.group.WORLD)
    front.register(model, group)
    with pytest.raises(ConfigurationError, match="register\\(\\) once"):
        front.register(model, group)
    with pytest.raises(ConfigMismatchError, match="recipe"):
        front.register(sharded(Net(), grid["shard"]), group, density=0.1 if rank < 2 else 0.2)
    other = Net()
    if rank >= 2:
        nn.init.ones_(other.head.weight)
    with pytest.raises(ConfigMismatchError, match="shard values"):
        front.register(sharded(other, grid["shard"]), group)
    assert isinstance(model, FSDPModule)


def first_fsdp(rank: int, world_size: int, send) -> None:
    """wrap() rejects parameters that ``FullyShardedDataParallel`` has sharded: ranks hold different parts of them."""
    for whole in (True, False):
        model = FullyShardedDataParallel(Net(), device_id=torch.device("cpu"), use_orig_params=whole)
        for given in ({}, {"model": model}):
            with pytest.raises(ConfigurationError, match=r"FullyShardedDataParallel.* use fully_shard"):
                tritoncomm.wrap(torch.optim.AdamW(model.parameters()), broadcast_parameters=True, **given)


def nodes(rank: int, world_size: int, send) -> None:
    """With node_group and the dense method, four replicas in two nodes average like plain averaging."""
    grid = init_device_mesh("cpu", (4, 1), mesh_dim_names=("replicate", "shard"))
    group, node = grid["replicate"].get_group(), dist.new_subgroups(2)[0]
    model = sharded(Net(), grid["shard"])
    front.register(model, group, "dense", node_group=node)
    sparse = sharded(Net(), grid["shard"])
    front.register(sparse, group, density=0.2, node_group=node, dense_below=0)
    for step in range(3):
        for net in (model, sparse):
            net.zero_grad()
            loss_of(net, rank, step).backward()
        assert torch.allclose(grads(model), plain_grads(rank, world_size, step), atol=1e-5)
        bits = shards(sparse)
        everybody = [torch.empty_like(bits) for _ in range(world_size)]
        dist.all_gather(everybody, bits)
        assert all(laws.same_bits(other, bits) for other in everybody)
