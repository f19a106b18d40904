"""Worker processes of tests/distributed/test_clipping.py."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
import tritoncomm
from helpers import flat, loss_of, residual, same_everywhere, total
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from tritoncomm import NonFiniteError
from tritoncomm.step.tensors.shards import local

SETTINGS = {"density": 0.1, "dense_below": 0, "warmup_steps": 0}


def net() -> nn.Module:
    """Return a model with some thousand parameters."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 3))


def wrapped(trained: nn.Module, **fields) -> tritoncomm.SparseOptimizer:
    """Return a wrapped AdamW."""
    return tritoncomm.wrap(torch.optim.AdamW(trained.parameters(), lr=0.01), **(SETTINGS | fields))


def backward(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    """Compute gradients and return them, flat."""
    model.zero_grad()
    loss_of(model, rank, step).backward()
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


def residuals(optimizer: tritoncomm.SparseOptimizer, model: nn.Module) -> torch.Tensor:
    """Return the residuals of this rank's shards in the order of the parameters of ``model``, flat."""
    found = {}
    for vector in optimizer._exchange.vectors:
        found |= vector.residuals_by_parameter()
    return torch.cat([found.get(each, torch.zeros_like(local(each)).flatten()) for each in model.parameters()])


def gradients(model: nn.Module) -> torch.Tensor:
    """Return this rank's shards of all gradients, flat."""
    return torch.cat([local(parameter.grad).flatten() for parameter in model.parameters()])


def clips(
    optimizer: tritoncomm.SparseOptimizer, model: nn.Module, reference: nn.Module, rank: int, world_size: int,
    shards: tuple[dist.ProcessGroup, dist.ProcessGroup] | None = None, scaler: torch.amp.GradScaler | None = None,
) -> None:  # fmt: skip
    """Train ``model``. In each step, exactly the gradient times one factor is added to residuals and deliveries.

    The factor is that of the norm of the whole mean, up to the error of its estimate. ``reference`` is the plain module
    without shards. ``shards`` are the groups of the replicas and of the shards, if there are several.
    """
    replicas, whole = shards if shards is not None else (None, None)
    size, clipped = dist.get_world_size(replicas), 0

    def summed(x: torch.Tensor) -> torch.Tensor:
        y = x.clone()
        dist.all_reduce(y, group=replicas)
        return y

    for step in range(8):
        with torch.no_grad():
            for mine, theirs in zip(reference.parameters(), model.parameters(), strict=True):
                mine.copy_(theirs.full_tensor() if hasattr(theirs, "full_tensor") else theirs)
        norm_of_dense = float((total(backward(reference, rank, step)) / world_size).norm())
        before = summed(residuals(optimizer, model))
        optimizer.zero_grad()
        loss = loss_of(model, rank, step)
        (loss if scaler is None else scaler.scale(loss)).backward()
        if scaler is not None:
            scaler.unscale_(optimizer)
        own = gradients(model).clone()
        optimizer.synchronize()
        delivered = gradients(model).clone()
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
        norm = optimizer.metrics()["grad_norm"]
        assert norm == pytest.approx(norm_of_dense, rel=0.2)
        factor = min(1.0, 0.5 / norm)
        clipped += factor < 0.8
        added = size * delivered + summed(residuals(optimizer, model)) - before
        squares = added.square().sum()
        if whole is not None:
            dist.all_reduce(squares, group=whole)
        # What was added is the mean of the gradients times the factor.
        assert float(squares.sqrt()) / size == pytest.approx(factor * norm_of_dense, rel=1e-3)
        assert torch.allclose(added, factor * summed(own), rtol=1e-4, atol=1e-5)
    assert clipped >= 2


CLIPPED = {"max_grad_norm": 0.5}


def limits_gradients(rank: int, world_size: int, send) -> None:
    """The mean of the gradients is clipped before it is added to the residual, by its norm up to a few per cent."""
    model = net()
    clips(wrapped(model, **CLIPPED), model, net(), rank, world_size)
    assert same_everywhere(flat(model))


def limits_unscaled_gradients(rank: int, world_size: int, send) -> None:
    """The limit is in unscaled units, whatever the scale of the loss, also in DDP."""
    ddp = nn.parallel.DistributedDataParallel(net(), bucket_cap_mb=0.004)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    clips(wrapped(ddp, model=ddp, **CLIPPED), ddp, net(), rank, world_size, scaler=scaler)
    assert same_everywhere(flat(ddp))


def limits_gradients_of_shards(rank: int, world_size: int, send) -> None:
    """With FSDP2, the norm is that of all shards, as FSDP leaves them in ``.grad``."""
    grid = init_device_mesh("cpu", (2, world_size // 2), mesh_dim_names=("replicate", "shard"))
    replicas, shards = (grid[name].get_group() for name in ("replicate", "shard"))
    model = net()
    for layer in (model[2], model):
        fully_shard(layer, mesh=grid["shard"])
    optimizer = wrapped(model, model=model, process_group=replicas, **CLIPPED)
    clips(optimizer, model, net(), rank, world_size, (replicas, shards))


def limit_above_all_norms(rank: int, world_size: int, send) -> None:
    """A limit that no gradient reaches changes no bit."""
    models = net(), net()
    optimizers = wrapped(models[0]), wrapped(models[1], max_grad_norm=1e9)
    for step in range(4):
        for model, optimizer in zip(models, optimizers, strict=True):
            backward(model, rank, step)
            optimizer.step()
    assert flat(models[0]) == flat(models[1])


def bad_gradient_is_named(rank: int, world_size: int, send) -> None:
    """A NaN on one rank skips the step, and the error names this rank alone."""
    model = net()
    optimizer = wrapped(model, max_grad_norm=0.5, on_nonfinite="raise")
    backward(model, rank, 0)
    if rank == 1:
        model[0].weight.grad[0, 0] = math.nan
    with pytest.raises(NonFiniteError, match="gradients of rank 1: ") as caught:
        optimizer.step()
    assert "rank 0" not in str(caught.value)
    assert not residual(optimizer).any()


def changes_between_wraps(rank: int, world_size: int, send) -> None:
    """Another wrap of the optimizer sets the limit anew."""
    ddp = nn.parallel.DistributedDataParallel(net(), bucket_cap_mb=0.004)
    inner = torch.optim.AdamW(ddp.parameters(), lr=0.01)
    first = tritoncomm.wrap(inner, model=ddp, **SETTINGS, **CLIPPED)
    for step in range(3):
        backward(ddp, rank, step)
        first.step()
    assert first.metrics()["grad_norm"] > 0
    first.release()
    second = tritoncomm.wrap(inner, model=ddp, **SETTINGS)
    backward(ddp, rank, 5)
    second.step()
    assert "grad_norm" not in second.metrics()


def copies_count_once(rank: int, world_size: int, send) -> None:
    """Parameters of which tensor parallelism keeps copies count once in the norm, whichever has most of it."""
    grid = init_device_mesh("cpu", (2, world_size // 2), mesh_dim_names=("replicate", "shard"))
    replicas = grid["replicate"].get_group()
    for large in (1, 5):  # a bias that is split, and one of which all ranks have a copy
        model, whole = net(), net()
        for each in (model, whole):
            with torch.no_grad():
                each[2].bias.mul_(large)
        split = parallelize_module(model, grid["shard"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        optimizer = wrapped(split, process_group=replicas, **CLIPPED)
        own = dist.get_rank(replicas)
        (loss_of(split, own, 0) * large).backward()
        size = dist.get_world_size(replicas)
        dense = torch.zeros(())
        whole.zero_grad()
        for replica in range(size):
            (loss_of(whole, replica, 0) * large / size).backward()
        dense = torch.nn.utils.get_total_norm([parameter.grad for parameter in whole.parameters()])
        optimizer.step()
        assert optimizer.metrics()["grad_norm"] == pytest.approx(float(dense), rel=0.15)
        assert same_everywhere([optimizer.metrics()["grad_norm"]])


def one_worker(rank: int, world_size: int, send) -> None:
    """A single worker clips as torch does, to the bit."""
    models = net(), net()
    optimizer = wrapped(models[0], max_grad_norm=0.05)
    plain = torch.optim.AdamW(models[1].parameters(), lr=0.01)
    for step in range(4):
        for model in models:
            backward(model, rank, step)
        optimizer.step()
        norm = torch.nn.utils.clip_grad_norm_(models[1].parameters(), 0.05)
        plain.step()
        assert optimizer.metrics()["grad_norm"] == float(norm)
    assert flat(models[0]) == flat(models[1])
