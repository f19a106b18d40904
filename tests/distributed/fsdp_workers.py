"""Worker processes of tests/distributed/test_fsdp.py: two replicas of two shards each."""

from __future__ import annotations

import copy
import math
import os
import signal
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import tritoncomm
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.utils.checkpoint import checkpoint
from tritoncomm import ConfigMismatchError, ConfigurationError, ExchangeError, PeerLostError
from tritoncomm import fsdp as front
from tritoncomm.amp import GradScaler

import laws


class Net(nn.Module):
    """A model with uneven shapes, nested groups, and a layer that may stay unused."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(5, 7), nn.Linear(7, 9)])
        self.spare = nn.Linear(9, 9)
        self.head = nn.Linear(9, 3)

    def forward(self, x: torch.Tensor, spare: bool = True) -> torch.Tensor:
        """Run with or without the spare layer."""
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.head(self.spare(x) if spare else x)


def mesh():
    """Return a mesh of two replicas with two shards each."""
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))


def sharded(model: nn.Module, over, **fields) -> nn.Module:
    """Shard every layer as a group of its own, and the rest as another group."""
    for layer in [*model.layers, model.spare]:
        fully_shard(layer, mesh=over, **fields)
    return fully_shard(model, mesh=over, **fields)


def divide_by(factor: float, model: nn.Module, *, sums: bool = False) -> None:
    """Let FSDP divide gradients by ``factor``, in fp16 and with ``sums`` in part after the hook."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(factor)
            module.set_force_sum_reduction_for_comms(sums)


def loss_of(model: nn.Module, rank: int, step: int, **fields) -> torch.Tensor:
    """Return the loss of a batch that depends on rank and step."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    x, y = torch.randn(8, 5, generator=generator), torch.randn(8, 3, generator=generator)
    return (model(x, **fields) - y).square().mean()


def grads(model: nn.Module) -> torch.Tensor:
    """Return all gradients, unsharded, as a flat vector."""
    return torch.cat([p.grad.full_tensor().reshape(-1) for p in model.parameters()])


def plain_grads(rank: int, world_size: int, step: int, micro: int = 1) -> torch.Tensor:
    """Return the gradients averaged over all ranks by hand."""
    model = Net()
    for r in range(world_size):
        for m in range(micro):
            (loss_of(model, r, step * micro + m) / world_size).backward()
    return torch.cat([p.grad.reshape(-1) for p in model.parameters()])


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


def shards(model: nn.Module, of: Callable[[nn.Parameter], torch.Tensor] = lambda p: p.grad) -> torch.Tensor:
    """Return this rank's shards of what ``of`` returns for each parameter, by default gradients, as a flat vector."""
    return torch.cat([of(p).to_local().reshape(-1) for p in model.parameters()]).clone()


def local(whole: torch.Tensor, model: nn.Module) -> torch.Tensor:
    """Return this rank's part of an unsharded gradient."""
    parts, start = [], 0
    for p in model.parameters():
        rows = whole[start : start + p.numel()].view(p.shape).chunk(2)
        position = p.device_mesh.get_local_rank()
        parts.append(rows[position].reshape(-1) if position < len(rows) else whole[:0])
        start += p.numel()
    return torch.cat(parts)


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


def residual_sum(state: front.FSDPState, model: nn.Module) -> torch.Tensor:
    """Return the residuals of this rank's shards, summed over both replicas, in the order of :func:`shards`."""
    parts = state.state_dict()["residuals"]
    pending = torch.cat([parts[name] for name, _ in model.named_parameters()])
    dist.all_reduce(pending, group=state.group)
    return pending


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
