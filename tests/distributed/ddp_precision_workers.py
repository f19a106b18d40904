"""Worker processes of tests/distributed/test_ddp.py: gradients that are scaled, narrow or not finite."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from ddp_models import ddp, net, residuals
from helpers import flat, loss_of, same_everywhere, total
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_wrapper, fp16_compress_wrapper
from torch.nn.parallel import DistributedDataParallel
from tritoncomm import ConfigurationError, NonFiniteError
from tritoncomm.ddp import CommState, comm_hook, register

import laws


def loss_scaling(rank: int, world_size: int, send) -> None:
    """Residuals are in unscaled units. After an overflow on one rank, all ranks skip the step and scales stay equal."""
    model, plain = ddp(net()), ddp(net())
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=3)
    state = register(model, density=0.1, scaler=scaler, dense_below=0)
    unscaled = register(plain, density=0.1, dense_below=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    reference = torch.optim.SGD(plain.parameters(), lr=0.1)
    for step in range(7):
        overflow = step == 3
        optimizer.zero_grad()
        before, pending = flat(model), None if step == 0 else residuals(state)
        loss = loss_of(model, rank, step)
        scaler.scale(loss * (float("inf") if overflow and rank == 1 else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
        if overflow:
            assert flat(model) == before
            assert all(laws.same_bits(pending[name], now) for name, now in residuals(state).items())
            assert state.metrics()["skipped_steps"] == 1
        else:
            reference.zero_grad()
            loss_of(plain, rank, step).backward()
            reference.step()
        assert same_everywhere((flat(model), scaler.get_scale()))
    assert flat(model) == flat(plain)
    assert all(laws.same_bits(residuals(unscaled)[name], now) for name, now in residuals(state).items())


def half_precision_wrappers(rank: int, world_size: int, send) -> None:
    """PyTorch's half-precision wrappers can wrap the hook."""
    for wrapper, dtype in ((fp16_compress_wrapper, torch.float16), (bf16_compress_wrapper, torch.bfloat16)):
        model, plain = ddp(net()), ddp(net())
        state = CommState(algo="topk_allgather", density=1.0)
        hook = wrapper(comm_hook)
        if dtype is torch.bfloat16:  # DDP mistakes this name for its own hook, which gloo does not support
            hook.__name__ = "narrow"
        model.register_comm_hook(state, hook)
        for step in range(2):
            model.zero_grad()
            plain.zero_grad()
            loss_of(model, rank, step).backward()
            loss_of(plain, rank, step).backward()
            for p, q in zip(model.parameters(), plain.parameters(), strict=True):
                assert p.grad.dtype == torch.float32
                assert torch.allclose(p.grad, q.grad, rtol=0.02, atol=0.01)


def half_precision_buckets(rank: int, world_size: int, send) -> None:
    """All ranks reject a mean that overflows in fp16, and nothing is lost. Other values are conserved in fp16."""
    big = 30000.0

    def constant(model: nn.Module, scaler: torch.amp.GradScaler | None = None) -> torch.Tensor:
        loss = model(torch.ones(1, 20)).sum()
        return scaler.scale(loss) if scaler else loss * big

    model = DistributedDataParallel(nn.Linear(20, 20, bias=False))
    state = CommState(algo="topk_allgather", density=0.05, dense_below=0)
    model.register_comm_hook(state, fp16_compress_wrapper(comm_hook))
    pending, rejected = {}, []
    for _ in range(6):
        model.zero_grad()
        try:
            constant(model).backward()
        except NonFiniteError as error:
            rejected.append(str(error))
            unchanged = all(laws.same_bits(pending[name], now) for name, now in residuals(state).items())
        else:
            unchanged = bool(model.module.weight.grad.isfinite().all())
        assert unchanged
        pending = residuals(state)
    assert rejected
    assert all("overflows in torch.float16" in text for text in rejected)
    assert len(rejected) == state.metrics()["skipped_steps"]
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14, growth_interval=1000)
    model = DistributedDataParallel(nn.Linear(20, 20, bias=False))
    state = CommState(algo="topk_allgather", density=0.05, dense_below=0, scaler=scaler)
    model.register_comm_hook(state, fp16_compress_wrapper(comm_hook))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    start, given = model.module.weight.detach().clone(), 0.0
    for _ in range(12):
        optimizer.zero_grad()
        skipped = state.skipped_steps
        constant(model, scaler).backward()
        scaler.step(optimizer)
        scaler.update()
        given += state.skipped_steps == skipped  # all gradients are 1; a rejected pass adds nothing
    assert 0 < given < 12
    delivered = (start - model.module.weight.detach()) / 0.5
    (left,) = residuals(state).values()
    total_residual = total(left).reshape(delivered.shape) / world_size
    assert torch.allclose(delivered + total_residual, torch.full_like(delivered, given), rtol=2e-3)
    assert same_everywhere(scaler.get_scale())


def non_finite(rank: int, world_size: int, send) -> None:
    """A NaN raises on all ranks or is zeroed. A rejected pass changes no residual in any bucket."""
    for policy in ("raise", "zero"):
        model = ddp(net())
        state = register(model, density=0.1, on_nonfinite=policy)
        loss_of(model, rank, 0).backward()
        model.zero_grad()
        loss_of(model, rank, 1).backward()
        pending = residuals(state)
        model.zero_grad()
        loss = loss_of(model, rank, 2)
        if rank == 1:
            model.module[0].weight.register_hook(lambda g: g.fill_(float("nan")))
        if policy == "raise":
            with pytest.raises(NonFiniteError, match=r"rank 1: 0\.weight \(240 values\)") as caught:
                loss.backward()
            assert caught.value.ranks == (1,)
            assert all(laws.same_bits(pending[name], now) for name, now in residuals(state).items())
        else:
            loss.backward()
            assert all(p.grad.isfinite().all() for p in model.parameters())
            assert state.metrics()["zeroed_values"] == (240 if rank == 1 else 0)
    with pytest.raises(ConfigurationError, match=r"on_nonfinite='skip': a hook cannot"):
        register(ddp(net()), on_nonfinite="skip")
    with pytest.raises(ConfigurationError, match=r"on_nonfinite='pray': choose one of 'raise'"):
        CommState(on_nonfinite="pray")


def zeroed_alone(rank: int, world_size: int, send) -> None:
    """A NaN that is replaced by zero does not reach the gradients of a single worker either."""
    alone = [dist.new_group([r]) for r in range(world_size)][rank]
    model = DistributedDataParallel(net(), process_group=alone)
    state = register(model, density=0.1, on_nonfinite="zero")
    (loss_of(model, rank, 0) * float("nan")).backward()
    assert not any(p.grad.any() for p in model.parameters())
    assert state.metrics()["zeroed_values"] == sum(p.numel() for p in model.parameters())
