"""Worker processes of tests/distributed/test_local_changes.py: local gradients are changed before ``step()``."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial

import pytest
import torch
import torch.distributed as dist
import tritoncomm
from ddp_models import ddp, net
from helpers import adamw, log_lines, loss_of
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from tritoncomm.step.tensors.shards import local

SETTINGS = {"density": 0.2, "dense_below": 0}
SEEN = "this looks like clip_grad_norm_ between backward() and step()"
Kind = Callable[[], tuple[nn.Module, tritoncomm.SparseOptimizer]]


def plain() -> tuple[nn.Module, tritoncomm.SparseOptimizer]:
    """Return a plain module and its optimizer."""
    model = net()
    return model, tritoncomm.wrap(adamw(model), **SETTINGS)


def in_ddp(**fields) -> tuple[nn.Module, tritoncomm.SparseOptimizer]:
    """Return a DDP module and its optimizer."""
    model = ddp(net(), **fields)
    return model, tritoncomm.wrap(adamw(model), model=model, **SETTINGS)


def in_fsdp(**fields) -> tuple[nn.Module, tritoncomm.SparseOptimizer]:
    """Return a module sharded by FSDP2 over two replicas, and its optimizer."""
    grid = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("replicate", "shard"))
    model = net()
    for layer in (model[2], model):
        fully_shard(layer, mesh=grid["shard"])
    group = grid["replicate"].get_group()
    return model, tritoncomm.wrap(adamw(model), model=model, process_group=group, **SETTINGS | fields)


KINDS: tuple[Kind, ...] = (
    plain, in_ddp, partial(in_ddp, gradient_as_bucket_view=True), partial(in_ddp, static_graph=True),
    partial(in_ddp, find_unused_parameters=True), partial(in_ddp, bucket_cap_mb=0.0001), in_fsdp,
)  # fmt: skip


IN_WHOLE = KINDS[:-1]


def heard(rank: int, kind: Kind, act: Callable[[nn.Module, tritoncomm.SparseOptimizer], None], **loop) -> list[str]:
    """Return what is said about local gradients in a loop that calls ``act`` before ``step()``."""
    model, optimizer = kind()
    with log_lines() as lines:
        for step in range(10):
            optimizer.zero_grad(set_to_none=step % 2 == 0)
            for micro in range(loop.get("micro", 1)):
                quiet = model.no_sync() if loop.get("no_sync") and micro == 0 else nullcontext()
                with quiet:
                    loss_of(model, rank, 2 * step + micro).backward()
            act(model, optimizer)
            optimizer.step()
    return [line for line in lines if SEEN in line]


def scale(model: nn.Module, _: tritoncomm.SparseOptimizer, factor: float = 1 / 3) -> None:
    """Multiply all gradients by ``factor``."""
    for parameter in model.parameters():
        parameter.grad.mul_(factor)


def clip(model: nn.Module, _: tritoncomm.SparseOptimizer, limit: float = 0.25) -> None:
    """Clip the gradients of this rank to ``limit``."""
    nn.utils.clip_grad_norm_(model.parameters(), limit)


def ordinary_loops(rank: int, world_size: int, send) -> None:
    """Nothing is said in loops that change no gradient, or only averaged ones."""

    def averaged(model: nn.Module, optimizer: tritoncomm.SparseOptimizer) -> None:
        optimizer.synchronize()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)

    def discarded(model: nn.Module, _: tritoncomm.SparseOptimizer) -> None:
        model.zero_grad(set_to_none=False)

    def not_reached(model: nn.Module, _: tritoncomm.SparseOptimizer) -> None:
        nn.utils.clip_grad_norm_(model.parameters(), 1e3)  # multiplies by 1
        nn.utils.clip_grad_value_(model.parameters(), 1e3)

    for kind in KINDS:
        for act in (lambda *_: None, averaged, discarded, not_reached, scale):
            assert heard(rank, kind, act) == [], (kind, act)
            assert heard(rank, kind, act, micro=2) == [], (kind, act)
    for kind in (in_ddp, partial(in_ddp, gradient_as_bucket_view=True)):
        assert heard(rank, kind, lambda *_: None, micro=2, no_sync=True) == []


def scaled_loops(rank: int, world_size: int, send) -> None:
    """A scaler changes gradients, and nothing is said. If they are clipped as well, the limit is named."""
    for kind in IN_WHOLE:
        for make in (torch.amp.GradScaler, tritoncomm.amp.GradScaler):
            for unscales, clips in ((False, False), (True, False), (True, 1e3), (True, 0.1)):
                (model, optimizer), scaler = kind(), make("cpu", init_scale=64.0)
                with log_lines() as lines:
                    for step in range(10):
                        optimizer.zero_grad(set_to_none=step % 2 == 0)
                        scaler.scale(loss_of(model, rank, step)).backward()
                        if unscales:
                            scaler.unscale_(optimizer)
                        if clips:
                            nn.utils.clip_grad_norm_(model.parameters(), clips)
                        scaler.step(optimizer)
                        scaler.update()
                said = [line for line in lines if SEEN in line]
                assert len(said) == (clips == 0.1 and rank == 0), (kind, make, unscales, clips, said)
                assert all("max_grad_norm=0.1 " in line for line in said)


def clipped_loops(rank: int, world_size: int, send) -> None:
    """Local clipping is noticed once, on the first rank, and its limit is named."""
    for kind in IN_WHOLE:
        for limit in (0.25, 1e-3):
            for micro in (1, 2):
                said = heard(rank, kind, partial(clip, limit=limit), micro=micro)
                assert len(said) == (rank == 0), (kind, said)
                assert all(f"the norm {limit:g} in 10 of the first 10 steps" in line for line in said), said
                assert all(f"Pass max_grad_norm={limit:g} to wrap()" in line for line in said), said

    def clip_often(model: nn.Module, optimizer: tritoncomm.SparseOptimizer) -> None:
        clip(model, optimizer, limit=1e3 if optimizer.metrics()["steps"] in (1, 3) else 0.25)

    assert len(heard(rank, plain, clip_often)) == (rank == 0)
    model, optimizer = plain()
    with log_lines() as lines:
        for step in range(20):  # what begins to clip later is not looked for
            optimizer.zero_grad()
            loss_of(model, rank, step).backward()
            if step >= 8:
                clip(model, optimizer)
            optimizer.step()
    assert not [line for line in lines if SEEN in line]


def assigned_loops(rank: int, world_size: int, send) -> None:
    """Gradients that a script assigns and clips are noticed by the same rule."""

    def assigned(kind: Kind, act: Callable[..., None], steps: int = 10) -> list[str]:
        model, optimizer = kind()
        with log_lines() as lines:
            for step in range(steps):
                found = torch.autograd.grad(loss_of(model, rank, step), list(model.parameters()))
                for parameter, gradient in zip(model.parameters(), found, strict=True):
                    parameter.grad = gradient
                act(model, optimizer)
                optimizer.step()
        return [line for line in lines if SEEN in line]

    def averaged(model: nn.Module, optimizer: tritoncomm.SparseOptimizer) -> None:
        optimizer.synchronize()
        clip(model, optimizer)

    def unit(model: nn.Module, _: tritoncomm.SparseOptimizer) -> None:
        total = nn.utils.get_total_norm([parameter.grad for parameter in model.parameters()])
        for parameter in model.parameters():
            parameter.grad = parameter.grad / total  # a new tensor, which was not changed in place

    for act in (lambda *_: None, averaged, scale, partial(clip, limit=1e3)):
        assert assigned(plain, act) == [], act
    assert assigned(plain, clip, steps=9) == []
    for act, limit in ((clip, "0.25"), (unit, "1")):
        said = assigned(plain, act)
        assert len(said) == (rank == 0)
        assert all(f"max_grad_norm={limit} " in line for line in said), said


def hooks_are_removed(rank: int, world_size: int, send) -> None:
    """Parameters have hooks from ``synchronize()`` to ``step()`` alone."""
    model, optimizer = in_ddp()
    for _ in range(2):
        loss_of(model, rank, 0).backward()
        assert not any(parameter._post_accumulate_grad_hooks for parameter in model.parameters())
        optimizer.synchronize()
        assert all(parameter._post_accumulate_grad_hooks for parameter in model.parameters())
        optimizer.step()
        optimizer.zero_grad()


def backward_after_synchronize(rank: int, world_size: int, send) -> None:
    """A backward pass after ``synchronize()`` is refused on every rank, and scaling the mean is not."""
    for kind in KINDS:
        model, optimizer = kind()
        for step in range(3):
            optimizer.zero_grad()
            loss_of(model, rank, step).backward()
            optimizer.synchronize()
            scale(model, optimizer)
            optimizer.step()
        before = [local(parameter.detach()).clone() for parameter in model.parameters()]
        optimizer.zero_grad()
        loss_of(model, rank, 3).backward()
        optimizer.synchronize()
        loss_of(model, rank, 4).backward()
        for _ in range(2):
            with pytest.raises(RuntimeError, match=r"backward pass .* since synchronize\(\).*zero_grad"):
                optimizer.step()
        assert all(map(torch.equal, before, [local(parameter.detach()) for parameter in model.parameters()]))
        optimizer.zero_grad()
        loss_of(model, rank, 5).backward()
        optimizer.step()
    # Another pass may look at gradients of its own, if the mean is put back.
    model, optimizer = plain()
    loss_of(model, rank, 0).backward()
    optimizer.synchronize()
    means = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    loss_of(model, rank, 1).backward()
    for parameter, mean in zip(model.parameters(), means, strict=True):
        parameter.grad = mean
    optimizer.step()


def without_gradients(rank: int, world_size: int, send) -> None:
    """A step in which no rank has a gradient changes nothing, and says so once, with FSDP2's usual reason."""
    for kind, fields in ((plain, {}), (in_ddp, {}), (in_fsdp, {}), (in_fsdp, {"exchange": "updates"})):
        model, optimizer = kind(**fields)
        with log_lines() as lines:
            for step in range(4):
                optimizer.zero_grad()
                if kind is in_fsdp:
                    model.set_requires_gradient_sync(step == 3)
                if kind is in_fsdp or step == 3:
                    loss_of(model, rank, step).backward()
                optimizer.step()
        found = [line for line in lines if "no rank has a gradient of any parameter in step 1" in line]
        assert len(found) == (rank == 0), lines
        assert all("set_requires_gradient_sync(True)" in line for line in found)
        assert optimizer.metrics()["steps"] == 4
