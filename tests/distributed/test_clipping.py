"""Clipping by the norm of the averaged gradient, in ``wrap(max_grad_norm=...)``."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from models import KINDS, adamw, equal, exact, gradients, loss_of, mesh, net, opened, same, total
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from tritoncomm.step.tensors.shards import local

from ranks import ranks


def pending(optimizer, model) -> torch.Tensor:
    """Return the residuals of this rank's shards in the order of the parameters of ``model``, flat."""
    found = {}
    for vector in optimizer._tritoncomm.setup.exchange.vectors:
        found |= vector.residuals_by_parameter()
    return torch.cat([found.get(each, torch.zeros_like(local(each)).flatten()) for each in model.parameters()])


@ranks(4)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("is_scaled", [False, True])
def test_gradient_times_one_factor_is_added(rank, world_size, kind, is_scaled):
    """The factor is that of the norm of the whole mean, in unscaled units, up to the error of its estimate."""
    model, given = opened(kind, net(), shards=2)
    reference, optimizer, clipped = net(), exact(adamw(model), max_grad_norm=0.5, density=0.1, **given), 0
    replicas = given.get("process_group")
    size = dist.get_world_size(replicas)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=is_scaled)
    for step in range(6):
        with torch.no_grad():
            for mine, theirs in zip(reference.parameters(), model.parameters(), strict=True):
                mine.copy_(theirs.full_tensor() if kind == "fsdp" else theirs)
        reference.zero_grad()
        loss_of(reference, rank, step).backward()
        dense = float((total(gradients(reference)) / world_size).norm())
        before = total(pending(optimizer, model), replicas)
        optimizer.zero_grad()
        scaler.scale(loss_of(model, rank, step)).backward()
        scaler.unscale_(optimizer)
        own = total(gradients(model), replicas)
        optimizer.synchronize()
        delivered = gradients(model)
        scaler.step(optimizer)
        scaler.update()
        norm = optimizer.metrics()["grad_norm"]
        assert norm == pytest.approx(dense, rel=0.2)
        assert same(norm)
        factor = min(1.0, 0.5 / norm)
        clipped += factor < 0.8
        added = size * delivered + total(pending(optimizer, model), replicas) - before
        assert torch.allclose(added, factor * own, rtol=1e-4, atol=1e-5)
    assert clipped >= 2
    assert equal(model, replicas)


@ranks(4)
@pytest.mark.parametrize("large", [1, 5])  # a bias that is split, and one of which all ranks have a copy
def test_copies_count_once(rank, world_size, large):
    """Parameters of which tensor parallelism keeps copies count once in the norm, whichever has most of it."""
    over = mesh()
    replicas = over["replicate"].get_group()
    model, whole = net(), net()
    with torch.no_grad():
        for each in (model, whole):
            each[2].bias.mul_(large)
    split = parallelize_module(model, over["shard"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    optimizer = exact(adamw(split), process_group=replicas, max_grad_norm=0.5)
    (loss_of(split, dist.get_rank(replicas), 0) * large).backward()
    for replica in range(2):
        (loss_of(whole, replica, 0) * large / 2).backward()
    optimizer.step()
    assert optimizer.metrics()["grad_norm"] == pytest.approx(float(gradients(whole).norm()), rel=0.15)
    assert same(optimizer.metrics()["grad_norm"])
