"""Worker processes of tests/distributed/test_fsdp.py: gradients that are scaled, narrow or not finite."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
import tritoncomm
from fsdp_models import Net, divide_by, grads, local, loss_of, mesh, plain_grads, residual_sum, sharded, shards
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from tritoncomm import fsdp as front
from tritoncomm.amp import GradScaler

import laws


def loss_scaling(rank: int, world_size: int, send) -> None:
    """Residuals are in unscaled units: for any scale, delivered gradients plus residuals equal the dense sum."""
    grid = mesh()
    model, group = sharded(Net(), grid["shard"]), grid["replicate"].get_group()
    scaler = GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    state = front.register(model, group, "topk_allgather", density=0.1, dense_below=0, scaler=scaler)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    delivered, given, scales = 0.0, 0.0, set()
    for step in range(7):
        optimizer.zero_grad()
        overflow, pending = step == 4, residual_sum(state, model)
        factor = float("inf") if overflow and rank == 1 else 1.0
        scaler.scale(loss_of(model, rank, step) * factor).backward()
        scaler.unscale_(optimizer)
        if overflow:
            assert laws.same_bits(residual_sum(state, model), pending)
        else:
            delivered = delivered + shards(model)
            given = given + local(plain_grads(rank, world_size, step), model)
        scaler.step(optimizer)
        scaler.update()
        everywhere = [0.0] * world_size
        dist.all_gather_object(everywhere, scaler.get_scale())
        assert len(set(everywhere)) == 1
        scales.add(everywhere[0])
    assert len(scales) > 2
    assert state.metrics()["skipped_steps"] == 1
    assert torch.allclose(delivered + residual_sum(state, model) / 2, given, atol=1e-5)


def fp16_reduction(rank: int, world_size: int, send) -> None:
    """An overflow in an fp16 reduction becomes NaN on all replicas, and residuals do not change."""
    grid = mesh()
    model = fully_shard(
        nn.Linear(10, 10, bias=False),
        mesh=grid["shard"],
        mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float16),
    )
    state = front.register(model, grid["replicate"].get_group(), "topk_allgather", density=0.05, dense_below=0)
    for _ in range(5):
        model.zero_grad()
        pending, skipped = residual_sum(state, model), state.skipped_steps
        (model(torch.ones(1, 10)).sum() * 20000.0).backward()
        gradient = shards(model)
        assert not gradient.isinf().any()
        if state.skipped_steps > skipped:
            assert laws.same_bits(residual_sum(state, model), pending)
        else:
            assert gradient.isfinite().all()
    assert state.skipped_steps > 0


def divided_after_the_hook(rank: int, world_size: int, send) -> None:
    """Where FSDP divides after the hook, the mean is divided as well: a dense method delivers what FSDP would."""
    grid = mesh()
    for dtype, sums in ((torch.float16, False), (torch.float32, True)):
        policy = {"mp_policy": MixedPrecisionPolicy(reduce_dtype=dtype)}
        expected, found = 0.0, None
        for replica in (None, 0, 1):  # through the hook, and then the gradients of each replica
            model = sharded(Net(), grid["shard"], **policy)
            divide_by(12.0, model, sums=sums)
            if replica is None:
                front.register(model, grid["replicate"].get_group(), "dense", dense_below=0)
            number = rank if replica is None else 2 * replica + rank % 2
            loss_of(model, number, 0).backward()
            if replica is None:
                found = shards(model)
            else:
                expected = expected + shards(model) / 2
        assert found.any()
        assert torch.allclose(found, expected, rtol=2e-3, atol=1e-6), dtype


def non_finite(rank: int, world_size: int, send) -> None:
    """A NaN on one rank becomes NaN in its shards on both replicas, and no residual changes."""
    grid = mesh()
    model = sharded(Net(), grid["shard"])
    state = front.register(model, grid["replicate"].get_group(), density=0.2, dense_below=0)
    loss_of(model, rank, 0).backward()
    before = state.state_dict()["residuals"]
    model.zero_grad()
    (loss_of(model, rank, 1) * (float("nan") if rank == 1 else 1)).backward()
    assert grads(model).isnan().any()
    after = state.state_dict()
    assert all(laws.same_bits(a, b) for a, b in zip(before.values(), after["residuals"].values(), strict=True))
    assert state.metrics()["skipped_steps"] == 1
    model.zero_grad()
    loss_of(model, rank, 2).backward()
    assert grads(model).isfinite().all()


def non_finite_shard(rank: int, world_size: int, send) -> None:
    """A NaN in one shard becomes NaN in all shards, so that nothing can use a part of a rejected pass."""
    grid = mesh()
    torch.manual_seed(0)
    model = fully_shard(nn.Linear(3, 4, bias=False), mesh=grid["shard"])
    front.register(model, grid["replicate"].get_group(), density=0.5, dense_below=0)
    bad = torch.tensor([math.nan if rank == 0 else 1.0, 1.0, 1.0, 1.0])  # the gradient of the first row
    (model(torch.ones(2, 3)) * bad).sum().backward()
    assert model.weight.grad.to_local().isnan().all()


def zeroed_alone(rank: int, world_size: int, send) -> None:
    """With one replica, a NaN that is replaced by zero does not reach the parameters either."""
    grid = init_device_mesh("cpu", (1, 4), mesh_dim_names=("replicate", "shard"))
    model = sharded(Net(), grid["shard"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    group = grid["replicate"].get_group()
    optimizer = tritoncomm.wrap(optimizer, model=model, process_group=group, on_nonfinite="zero")
    (loss_of(model, rank, 0) * (float("nan") if rank == 1 else 1.0)).backward()
    optimizer.step()
    assert all(p.to_local().isfinite().all() for p in model.parameters())
    assert optimizer.metrics()["zeroed_values"] > 0
