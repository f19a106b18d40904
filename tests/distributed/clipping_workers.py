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
from torch.distributed.tensor import distribute_module
from tritoncomm import ConfigurationError, NonFiniteError

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


def limits_gradients(rank: int, world_size: int, send) -> None:
    """The mean of the gradients is clipped before it is added to the residual, by its norm up to a few per cent."""
    model, clips = net(), 0
    optimizer = wrapped(model, max_grad_norm=0.5, clip_by="gradient")
    for step in range(8):
        mean, before = total(backward(model, rank, step)) / world_size, total(residual(optimizer))
        optimizer.synchronize()
        delivered = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
        optimizer.step()
        norm = optimizer.metrics()["grad_norm"]
        assert norm == pytest.approx(float(mean.norm()), rel=0.2)
        factor = min(1.0, 0.5 / norm)
        clips += factor < 0.8
        after = total(residual(optimizer))
        assert torch.allclose(before + factor * mean * world_size, world_size * delivered + after, rtol=1e-4, atol=1e-5)
    assert clips >= 2
    assert same_everywhere(flat(model))


def limit_above_all_norms(rank: int, world_size: int, send) -> None:
    """A limit that no gradient reaches changes no bit."""
    models = net(), net()
    optimizers = wrapped(models[0]), wrapped(models[1], max_grad_norm=1e9, clip_by="gradient")
    for step in range(4):
        for model, optimizer in zip(models, optimizers, strict=True):
            backward(model, rank, step)
            optimizer.step()
    assert flat(models[0]) == flat(models[1])


def bad_gradient_is_named(rank: int, world_size: int, send) -> None:
    """A NaN on one rank skips the step, and the error names this rank alone."""
    model = net()
    optimizer = wrapped(model, max_grad_norm=0.5, clip_by="gradient", on_nonfinite="raise")
    backward(model, rank, 0)
    if rank == 1:
        model[0].weight.grad[0, 0] = math.nan
    with pytest.raises(NonFiniteError, match="gradients of rank 1: ") as caught:
        optimizer.step()
    assert "rank 0" not in str(caught.value)
    assert not residual(optimizer).any()


def refused_with_a_hook(rank: int, world_size: int, send) -> None:
    """Where the norm is not known before the exchange, the option is refused on all ranks. So are other values."""
    model = nn.parallel.DistributedDataParallel(net())
    with pytest.raises(ConfigurationError, match="clip_by='gradient' needs the whole gradient"):
        wrapped(model, model=model, max_grad_norm=0.5, clip_by="gradient")
    with pytest.raises(ConfigurationError, match="clip_by='gradient' needs max_grad_norm"):
        wrapped(net(), clip_by="gradient")
    with pytest.raises(ConfigurationError, match="clip_by='norm': choose one of 'delivered', 'gradient'"):
        wrapped(net(), max_grad_norm=0.5, clip_by="norm")
    grid = init_device_mesh("cpu", (world_size, 1), mesh_dim_names=("replicate", "shard"))
    shards = distribute_module(nn.Linear(8, 8), grid["shard"])
    with pytest.raises(ConfigurationError, match="clip_by='gradient' needs the whole gradient"):
        wrapped(shards, process_group=grid["replicate"].get_group(), max_grad_norm=0.5, clip_by="gradient")
    dist.barrier()


def one_worker(rank: int, world_size: int, send) -> None:
    """A single worker clips as torch does, to the bit."""
    models = net(), net()
    optimizer = wrapped(models[0], max_grad_norm=0.05, clip_by="gradient")
    plain = torch.optim.AdamW(models[1].parameters(), lr=0.01)
    for step in range(4):
        for model in models:
            backward(model, rank, step)
        optimizer.step()
        norm = torch.nn.utils.clip_grad_norm_(models[1].parameters(), 0.05)
        plain.step()
        assert optimizer.metrics()["grad_norm"] == float(norm)
    assert flat(models[0]) == flat(models[1])
