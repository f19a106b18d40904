"""Worker processes of tests/distributed/test_fsdp.py: what a backward pass may do, in which order."""

from __future__ import annotations

import pytest
import torch
from fsdp_models import Net, divide_by, loss_of, mesh, sharded, shards
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint
from tritoncomm import ConfigMismatchError, ConfigurationError
from tritoncomm import fsdp as front
from tritoncomm.amp import GradScaler

import laws


def gradients_used_early(rank: int, world_size: int, send) -> None:
    """A hook of the user that waits for a gradient gets its mean, the same bits as at the end of the backward pass."""
    grid = mesh()
    group = grid["replicate"].get_group()
    bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32
    policies = [{}, {"mp_policy": MixedPrecisionPolicy(param_dtype=bf16, reduce_dtype=bf16)}]
    policies += [
        {"mp_policy": MixedPrecisionPolicy(reduce_dtype=fp32)},
        divided := {"mp_policy": MixedPrecisionPolicy(reduce_dtype=fp16)},
        {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
    ]
    for narrow, fields in [(False, fields) for fields in policies] + [(True, policies[2])]:
        seen = []
        for early in (False, True):
            whole, found = Net().to(bf16 if narrow else fp32), []
            model = sharded(whole, grid["shard"], **fields)
            if fields == divided:
                divide_by(12.0, model)
            scaler = GradScaler("cpu", init_scale=1024.0)
            front.register(model, group, "topk_allgather", density=0.1, dense_below=16, scaler=scaler)
            for p in model.parameters() if early else ():
                p.register_post_accumulate_grad_hook(lambda p, found=found: found.append(p.grad.to_local().clone()))
            for step in range(4):  # each pass adds to the gradients
                model.set_is_last_backward(step != 1)
                x, y = torch.randn(2, 8, 5, generator=torch.Generator().manual_seed(10 * step + rank)), 0.5
                loss = (model(x[0].to(bf16) if narrow else x[0]) - y).square().mean()
                scaler.scale(loss).backward()
                if early:
                    assert len(found) == len(list(model.parameters()))
                    held = [p.grad.to_local() for p in model.parameters()]
                    assert all(any(torch.equal(a, b) for b in held) for a in found)
                    found.clear()
            seen.append(shards(model))
        assert seen[0].any()
        assert torch.equal(*seen), fields


def gradient_hooks_differ(rank: int, world_size: int, send) -> None:
    """Gradient hooks on some replicas only are an error on all ranks, and so is one after the first pass."""
    for late in (False, True):
        grid = mesh()
        model = sharded(Net(), grid["shard"])
        front.register(model, grid["replicate"].get_group(), "dense")
        if late:
            loss_of(model, rank, 0).backward()
        if late or rank == 0:
            model.head.weight.register_post_accumulate_grad_hook(lambda p: None)
        match = (
            "after the first backward pass, in the group of head" if late else r"rank 2 has .* groups \[\], and rank 0"
        )
        with pytest.raises(ConfigurationError if late else ConfigMismatchError, match=match):
            loss_of(model, rank, 1).backward()


class Twice(nn.Module):
    """Uses a layer twice, with or without recomputation in backward."""

    def __init__(self, *, recompute: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.head, self.recompute = nn.Linear(6, 6), nn.Linear(6, 2), recompute

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the same layer twice."""
        for _ in range(2):
            x = torch.tanh(checkpoint(self.layer, x, use_reentrant=False) if self.recompute else self.layer(x))
        return self.head(x)


def used_twice(rank: int, world_size: int, send) -> None:
    """A group that is reduced twice in a pass is rejected. The suggested fix works, also with recomputation."""
    grid = mesh()
    group = grid["replicate"].get_group()
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(rank))
    parts = Twice(recompute=False)
    fully_shard(parts.layer, mesh=grid["shard"])
    state = front.register(fully_shard(parts, mesh=grid["shard"]), group, density=0.3, dense_below=0)
    before = state.state_dict()["residuals"]
    with pytest.raises(ConfigurationError, match=r"layer\.weight is used twice in a forward pass"):
        parts(x).sum().backward()
    assert all(map(laws.same_bits, state.state_dict()["residuals"].values(), before.values()))
    for recompute in (False, True):
        whole = fully_shard(Twice(recompute=recompute), mesh=grid["shard"])
        state = front.register(whole, group, "dense", dense_below=0)
        reference = Twice(recompute=False)
        whole(x).sum().backward()
        for r in range(world_size):
            other = torch.randn(4, 6, generator=torch.Generator().manual_seed(r))
            (reference(other).sum() / world_size).backward()
        for p, q in zip(whole.parameters(), reference.parameters(), strict=True):
            assert torch.allclose(p.grad.full_tensor(), q.grad, atol=1e-5)
        assert state.steps == 1


class Stack(nn.Module):
    """Layers with reentrant checkpointing, whose backward passes are within another one, and a head."""

    def __init__(self, *, recompute: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.recompute = recompute
        self.layers = nn.ModuleList([nn.Linear(5, 5), nn.Linear(5, 5)])
        self.head = nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Run the layers, and the head."""
        x = x.requires_grad_()
        for layer in self.layers:
            x = torch.tanh(checkpoint(layer, x, use_reentrant=True) if self.recompute else layer(x))
        return self.head(x)


def nested_passes(rank: int, world_size: int, send) -> None:
    """Backward passes within another one belong to it."""
    grid = mesh()
    model = Stack(recompute=True)
    for part in (*model.layers, model.head):
        fully_shard(part, mesh=grid["shard"])
    state = front.register(fully_shard(model, mesh=grid["shard"]), grid["replicate"].get_group(), "dense")
    reference = Stack(recompute=False)
    for step in range(2):
        loss_of(model, rank, step).backward()
        for r in range(world_size):
            (loss_of(reference, r, step) / world_size).backward()
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.allclose(p.grad.full_tensor(), q.grad, atol=1e-5)
    assert state.steps == 2


def several_roots(rank: int, world_size: int, send) -> None:
    """Parts of a model that are sharded without a common root take one step, or none."""
    grid = mesh()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))
    for part in (model[0], model[2]):
        fully_shard(part, mesh=grid["shard"])
    group = grid["replicate"].get_group()
    state = front.register(model, group, "topk_allgather", density=0.2, dense_below=0)
    loss_of(model, rank, 0).backward()
    assert state.steps == 1
    residuals = [vector.feedback.residual.clone() for vector in state.exchange.vectors]
    model[0].register_forward_hook(lambda _, __, out: out.register_hook(lambda g: g * float("nan")) and None)
    loss_of(model, rank, 1).backward()
    assert (state.steps, state.skipped_steps) == (1, 1)
    assert all(laws.same_bits(v.feedback.residual, r) for v, r in zip(state.exchange.vectors, residuals, strict=True))


def other_orders(rank: int, world_size: int, send) -> None:
    """A replica may leave out a layer, whose gradients then come last."""
    grid = mesh()
    model = sharded(Net(), grid["shard"])
    front.register(model, grid["replicate"].get_group(), "dense", dense_below=0)
    loss_of(model, rank, 0).backward()
    model.zero_grad()
    loss_of(model, rank, 1, spare=rank < 2).backward()
    reference = Net()
    for r in range(world_size):
        (loss_of(reference, r, 1, spare=r < 2) / world_size).backward()
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.allclose(p.grad.full_tensor(), q.grad, atol=1e-5)


def outside_of_backward(rank: int, world_size: int, send) -> None:
    """FSDP may reduce gradients without autograd, as pipelining does. The error says what to do."""
    grid = mesh()
    model = sharded(Net(), grid["shard"])
    front.register(model, grid["replicate"].get_group(), "dense")
    model.set_requires_gradient_sync(False)
    loss_of(model, rank, 0).backward()
    model.set_requires_gradient_sync(True)
    with pytest.raises(ConfigurationError, match=r"outside of backward\(\), as torch's pipelining does"):
        fully_shard.state(model.head if isinstance(model.head, FSDPModule) else model)._fsdp_param_groups[
            0
        ].post_backward()
