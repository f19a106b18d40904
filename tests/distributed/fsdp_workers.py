"""Worker processes of tests/distributed/test_fsdp.py: what FSDP2 leaves in ``.grad`` is exchanged by ``step()``."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial

import pytest
import torch
import torch.distributed as dist
import tritoncomm
from ddp_models import Stack, net
from fsdp_models import SETTINGS, Net, Shards, bits, dense_mean, loss_of, mesh, sharded, shards, train
from helpers import adamw, flat, same_everywhere, total
from helpers import loss_of as loss_of_net
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint
from tritoncomm.amp import GradScaler
from tritoncomm.step.tensors.shards import local

import laws


def shards_of_one_rank(rank: int, world_size: int, send) -> None:
    """With shards of one rank each, FSDP2 trains as the plain module, to the bit."""
    grid = mesh(world_size, 1)
    for algo, optimizer, fields in (
        ("oktopk", adamw, {"max_grad_norm": 0.5}),
        ("spardl", lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), {}),
    ):
        model, plain = net(), net()
        for layer in model[::2]:
            fully_shard(layer, mesh=grid["shard"])
        fully_shard(model, mesh=grid["shard"])
        settings = {"algo": algo, "density": 0.1, "dense_below": 0, "warmup_steps": 2} | fields
        group = grid["replicate"].get_group()
        optimizers = (
            tritoncomm.wrap(optimizer(model), model=model, process_group=group, **settings),
            tritoncomm.wrap(optimizer(plain), **settings),
        )
        for step in range(6):
            for each, stepped in zip((model, plain), optimizers, strict=True):
                stepped.zero_grad()
                for micro in range(2):
                    loss_of_net(each, rank, 2 * step + micro).backward()
                stepped.step()
            assert bits(model) == flat(plain)
            assert laws.same_bits(*(each._vector.feedback.residual for each in optimizers))
        assert same_everywhere(bits(model))


def clipped_after_synchronize(rank: int, world_size: int, send) -> None:
    """Shards get the weight decay of a step after averages were clipped, as plain parameters do, and unused ones none.

    Decay of 1 outweighs the gradients: it would make up most of the norm.
    """
    grid = mesh(world_size, 1)
    models = sharded(Net(), grid["shard"]), Net()
    groups = {"process_group": grid["replicate"].get_group()}, {}
    made = [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1.0) for model in models]
    optimizers = [
        tritoncomm.wrap(base, model=model, **SETTINGS, **group)
        for base, model, group in zip(made, models, groups, strict=True)
    ]
    spare = bits(models[1].spare)
    for step in range(4):
        norms = []
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            loss_of(model, rank, step, spare=False).backward()
            optimizer.synchronize()
            norms.append(float(local(nn.utils.clip_grad_norm_(model.parameters(), 0.05))))
            optimizer.step()
        assert norms[0] == norms[1] < 2
        assert bits(models[0]) == bits(models[1])
    assert bits(models[0].spare) == spare
    assert same_everywhere(bits(models[0]))


def shards_of_two_ranks(rank: int, world_size: int, send) -> None:
    """Each shard is exchanged with its replicas as plain parameters of this shape are, past a renewal of the scale."""
    grid = mesh()
    group = grid["replicate"].get_group()
    pair = Shards(sharded(Net(), grid["shard"]), group, settings=SETTINGS | {"warmup_steps": 2})
    for step in range(25):
        pair.optimizer.zero_grad()
        loss_of(pair.model, rank, step).backward()
        pair.take()
    assert same_everywhere(bits(pair.model), group)
    assert pair.optimizer.metrics()["density_delivered"] < 0.5
    state = pair.optimizer.state[next(iter(pair.model.parameters()))]
    assert isinstance(state["exp_avg"], DTensor)
    assert isinstance(state["last_delivered"], DTensor)
    assert bool((state["last_delivered"].to_local() < 25).any())  # not every coordinate in every step


def settings_of_fsdp(rank: int, world_size: int, send) -> None:
    """Mixed precision, offloaded parameters and every way to reshard: what is in ``.grad`` is exchanged."""
    grid = mesh()
    group = grid["replicate"].get_group()
    bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32
    for fields in (
        {"mp_policy": MixedPrecisionPolicy(param_dtype=bf16, reduce_dtype=bf16)},
        {"mp_policy": MixedPrecisionPolicy(param_dtype=bf16, reduce_dtype=fp32)},
        {"mp_policy": MixedPrecisionPolicy(reduce_dtype=fp16)},
        {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
        {"reshard_after_forward": False},
        {"reshard_after_forward": True},
    ):
        pair = Shards(sharded(Net(), grid["shard"], **fields), group)
        for step in range(3):
            pair.optimizer.zero_grad(set_to_none=step != 1)
            loss_of(pair.model, rank, step).backward()
            pair.take()
        assert {p.dtype for p in pair.model.parameters()} == {fp32}
        assert same_everywhere(bits(pair.model), group)
    pair = Shards(sharded(Net(), grid["shard"]), group)
    for step in range(4):
        pair.model.set_reshard_after_backward(step % 2 == 0)
        pair.optimizer.zero_grad()
        loss_of(pair.model, rank, step).backward()
        pair.take()


def accumulation(rank: int, world_size: int, send) -> None:
    """Micro-batches add up, whether FSDP reduces each of them or only the last one. One exchange takes all of them."""
    grid = mesh()
    pair = Shards(sharded(Net(), grid["shard"]), grid["replicate"].get_group())
    for step, switch in enumerate(
        ("set_requires_gradient_sync", "set_requires_all_reduce", "set_is_last_backward", "")
    ):
        pair.optimizer.zero_grad()
        for micro in range(3):
            if switch:
                getattr(pair.model, switch)(micro == 2)
            loss_of(pair.model, rank, 3 * step + micro).backward()
        pair.take()
    assert pair.optimizer.metrics()["steps"] == 4


def dense_training(rank: int, world_size: int, send) -> None:
    """The dense method and density 1 train like plain averaging over all four ranks, with unused layers, too."""
    for algo, density in (("dense", None), ("oktopk", 1.0)):
        grid, reference = mesh(), Net()
        model = sharded(Net(), grid["shard"])
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        group = grid["replicate"].get_group()
        optimizer = tritoncomm.wrap(optimizer, algo, model=model, process_group=group, density=density)
        plain = torch.optim.Adam(reference.parameters(), lr=0.01)
        for step in range(4):
            optimizer.zero_grad()
            plain.zero_grad()
            loss_of(model, rank, step, spare=step != 2).backward()
            for r in range(world_size):
                (loss_of(reference, r, step, spare=step != 2) / world_size).backward()
            optimizer.step()
            plain.step()
        for p, q in zip(model.parameters(), reference.parameters(), strict=True):
            assert torch.allclose(p.full_tensor(), q, atol=1e-5)


def conservation(rank: int, world_size: int, send) -> None:
    """For several methods, delivered gradients plus residuals equal the dense sum, and small tensors have none."""
    for algo in ("oktopk", "spardl", "exdyna", "topk_allgather"):
        grid = mesh()
        group = grid["replicate"].get_group()
        model = sharded(Net(), grid["shard"])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        optimizer = tritoncomm.wrap(optimizer, algo, model=model, process_group=group, density=0.1, dense_below=16)
        delivered, dense = 0.0, 0.0
        for step in range(4):
            optimizer.zero_grad()
            loss_of(model, rank, step).backward()
            optimizer.step()
            delivered = delivered + shards(model)
            dense = dense + _own(dense_mean(world_size, step), model)
        (vector,) = optimizer._exchange.vectors
        parts = vector.residuals_by_parameter()
        small = [p for p in model.parameters() if p.dim() <= 1 or p.to_local().numel() < 16]
        assert small
        assert not any(parts[p].any() for p in small)
        pending = torch.cat([parts[p] for p in model.parameters()])
        dist.all_reduce(pending, group=group)
        assert pending.any()
        assert torch.allclose(delivered + pending / 2, dense, atol=1e-5), algo
        assert 0.05 < optimizer.metrics()["density_delivered"] < 0.9


def _own(whole: torch.Tensor, model: nn.Module) -> torch.Tensor:
    """Return this rank's part of an unsharded gradient."""
    parts, start = [], 0
    for p in model.parameters():
        rows = whole[start : start + p.numel()].view(p.shape).chunk(2)
        position = p.device_mesh.get_local_rank()
        parts.append(rows[position].reshape(-1) if position < len(rows) else whole[:0])
        start += p.numel()
    return torch.cat(parts)


class Twice(nn.Module):
    """Uses a layer twice, with or without recomputation in backward."""

    def __init__(self, *, recompute: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.head, self.recompute = nn.Linear(5, 5), nn.Linear(5, 3), recompute

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the same layer twice."""
        for _ in range(2):
            x = torch.tanh(checkpoint(self.layer, x, use_reentrant=False) if self.recompute else self.layer(x))
        return self.head(x)


def passes(rank: int, world_size: int, send) -> None:
    """A layer that is used twice or recomputed, nested passes, no common root, and a layer that a replica left out."""
    grid = mesh()

    def parts(make, *names: str, root: bool = True) -> nn.Module:
        model = make()
        for name in names:
            fully_shard(model.get_submodule(name), mesh=grid["shard"])
        return fully_shard(model, mesh=grid["shard"]) if root else model

    def several_roots() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))

    for model in (
        parts(partial(Twice, recompute=False), "layer"),
        parts(partial(Twice, recompute=True), "layer"),
        parts(partial(Twice, recompute=True)),
        parts(partial(Stack, 5), "layers.0", "layers.1", "head"),
        parts(several_roots, "0", "2", root=False),
    ):
        pair = Shards(model, grid["replicate"].get_group())
        for step in range(3):
            pair.optimizer.zero_grad()
            loss_of(model, rank, step).backward()
            pair.take()
    model = sharded(Net(), grid["shard"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = tritoncomm.wrap(optimizer, "dense", model=model, process_group=grid["replicate"].get_group())
    loss_of(model, rank, 1, spare=rank < 2).backward()  # two ranks, which are the two shards of one replica
    optimizer.step()
    reference = Net()
    for r in range(world_size):
        (loss_of(reference, r, 1, spare=r < 2) / world_size).backward()
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.allclose(p.grad.full_tensor(), q.grad, atol=1e-5)


def gradients_of_others(rank: int, world_size: int, send) -> None:
    """FSDP may reduce outside of autograd, as pipelining does. A hook of a gradient sees this replica's own."""
    grid = mesh()
    pair = Shards(sharded(Net(), grid["shard"]), grid["replicate"].get_group())
    seen: list[torch.Tensor] = []
    for parameter in pair.model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.to_local().clone()))
    for step in range(3):
        seen.clear()
        pair.optimizer.zero_grad()
        loss_of(pair.model, rank, step).backward()
        assert len(seen) == len(pair.plain)
        held = [p.grad.to_local() for p in pair.model.parameters()]
        assert all(any(torch.equal(one, other) for other in held) for one in seen)
        pair.take()
    pair = Shards(sharded(Net(), grid["shard"]), grid["replicate"].get_group())
    for step in range(3):
        pair.optimizer.zero_grad()
        pair.model.set_requires_gradient_sync(requires_gradient_sync=False)
        for micro in range(2):
            loss_of(pair.model, rank, 2 * step + micro).backward()
        assert all(p.grad is None for p in pair.model.parameters())
        pair.model.set_requires_gradient_sync(requires_gradient_sync=True)
        for module in pair.model.modules():
            if isinstance(module, FSDPModule):  # as torch.distributed.pipelining.stage does
                fully_shard.state(module)._fsdp_param_group.post_backward()
        fully_shard.state(pair.model)._root_post_backward_final_callback()
        assert all(p.grad is not None for p in pair.model.parameters())
        pair.take()


def loss_scaling(rank: int, world_size: int, send) -> None:
    """A ``GradScaler`` is passed nowhere. An overflow in one shard skips the step of all, and scales stay equal."""
    grid = mesh()
    models = [sharded(Net(), grid["shard"]) for _ in range(2)]
    group = grid["replicate"].get_group()
    optimizers = [tritoncomm.wrap(adamw(model), model=model, process_group=group, **SETTINGS) for model in models]
    scaler = GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    for step in range(7):
        overflow, before = step == 4, bits(models[0])
        for model, optimizer in zip(models, optimizers, strict=True):
            if overflow and model is models[1]:
                continue
            optimizer.zero_grad()
            loss = loss_of(model, rank, step)
            if model is models[1]:
                loss.backward()
                optimizer.step()
                continue
            scaler.scale(loss * (float("inf") if overflow and rank == 1 else 1.0)).backward()
            if step % 2:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
        assert not overflow or bits(models[0]) == before
        assert bits(models[0]) == bits(models[1]), step
        assert same_everywhere(scaler.get_scale())
    assert optimizers[0].metrics()["skipped_steps"] == 1


def rejected_steps(rank: int, world_size: int, send) -> None:
    """A NaN on one rank, or in one shard, skips the step of all shards and replicas, or raises on all."""
    grid = mesh()
    group = grid["replicate"].get_group()
    for policy in ("skip", "raise"):
        for place in ("loss", "shard"):
            model = sharded(Net(), grid["shard"])
            optimizer = tritoncomm.wrap(adamw(model), model=model, process_group=group, on_nonfinite=policy, **SETTINGS)
            train(model, optimizer, rank, range(2))
            before, pending = bits(model), optimizer._vector.feedback.residual.clone()
            optimizer.zero_grad()
            loss_of(model, rank, 2).backward()
            if rank == 1:
                gradients = [p.grad.to_local() for p in model.parameters()]
                for gradient in gradients if place == "loss" else gradients[:1]:
                    gradient.view(-1)[0] = float("nan")
            error = pytest.raises(tritoncomm.NonFiniteError, match=r"rank 1: layers\.0\.weight \(1 values\)")
            with error if policy == "raise" else nullcontext():
                optimizer.step()
            assert bits(model) == before
            assert laws.same_bits(optimizer._vector.feedback.residual, pending)
            assert optimizer.metrics()["skipped_steps"] == 1
            train(model, optimizer, rank, range(3, 4))
            assert bits(model) != before
            assert all(p.to_local().isfinite().all() for p in model.parameters())
            assert same_everywhere(bits(model), group)


def life_of_a_step(rank: int, world_size: int, send) -> None:
    """Clipping by the norm of all shards, a flush, and parameter groups."""
    grid = mesh()
    group = grid["replicate"].get_group()
    model = sharded(Net(), grid["shard"])
    optimizer = torch.optim.AdamW(
        [{"params": list(model.layers.parameters())}, {"params": [*model.spare.parameters(), *model.head.parameters()]}]
    )
    optimizer = tritoncomm.wrap(optimizer, model=model, process_group=group, max_grad_norm=0.5, **SETTINGS)
    train(model, optimizer, rank, range(5))
    assert same_everywhere(optimizer.metrics()["grad_norm"])
    before = bits(model)
    optimizer.flush()
    assert bits(model) != before
    assert optimizer.metrics()["residual_norm"] == 0
    optimizer.zero_grad()
    loss_of(model, rank, 5).backward()
    optimizer.synchronize()
    held = shards(model)
    nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    assert float(total(shards(model).square().sum())) == pytest.approx(2 * 1e-6, rel=1e-2)
    assert held.any()
    optimizer.step()
    assert same_everywhere(bits(model), group)


def nodes(rank: int, world_size: int, send) -> None:
    """With ``node_group`` and the dense method, four replicas in two nodes average like plain averaging."""
    grid = mesh(4, 1)
    group, node = grid["replicate"].get_group(), dist.new_subgroups(2)[0]
    for algo, density in (("dense", None), ("oktopk", 0.2)):
        model = sharded(Net(), grid["shard"])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        optimizer = tritoncomm.wrap(
            optimizer, algo, model=model, process_group=group, node_group=node, density=density, dense_below=0
        )
        for step in range(3):
            optimizer.zero_grad()
            loss_of(model, rank, step).backward()
            optimizer.step()
            assert algo != "dense" or torch.allclose(shards(model), dense_mean(world_size, step), atol=1e-5)
        assert same_everywhere(shards(model).tolist())
