"""Worker processes of tests/distributed/test_local_changes.py: local gradients are changed before ``step()``."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial

import torch
import torch.distributed as dist
import tritoncomm
from ddp_models import ddp, net
from helpers import adamw, log_lines, loss_of
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

SETTINGS = {"density": 0.2, "dense_below": 0}
SEEN = "gradients were changed in place between backward() and step()"
Kind = Callable[[], tuple[nn.Module, tritoncomm.SparseOptimizer]]


def plain() -> tuple[nn.Module, tritoncomm.SparseOptimizer]:
    """Return a plain module and its optimizer."""
    model = net()
    return model, tritoncomm.wrap(adamw(model), **SETTINGS)


def in_ddp(**fields) -> tuple[nn.Module, tritoncomm.SparseOptimizer]:
    """Return a DDP module and its optimizer."""
    model = ddp(net(), **fields)
    return model, tritoncomm.wrap(adamw(model), model=model, **SETTINGS)


def in_fsdp() -> tuple[nn.Module, tritoncomm.SparseOptimizer]:
    """Return a module sharded by FSDP2 and its optimizer."""
    grid = init_device_mesh("cpu", (dist.get_world_size(), 1), mesh_dim_names=("replicate", "shard"))
    model = net()
    for layer in (model[2], model):
        fully_shard(layer, mesh=grid["shard"])
    group = grid["replicate"].get_group()
    return model, tritoncomm.wrap(adamw(model), model=model, process_group=group, **SETTINGS)


KINDS: tuple[Kind, ...] = (
    plain, in_ddp, partial(in_ddp, gradient_as_bucket_view=True), partial(in_ddp, static_graph=True),
    partial(in_ddp, find_unused_parameters=True), partial(in_ddp, bucket_cap_mb=0.0001), in_fsdp,
)  # fmt: skip


def heard(rank: int, kind: Kind, act: Callable[[nn.Module, tritoncomm.SparseOptimizer], None], **loop) -> list[str]:
    """Return what is said about local gradients in a loop that calls ``act`` before ``step()``."""
    model, optimizer = kind()
    with log_lines() as lines:
        for step in range(5):
            optimizer.zero_grad(set_to_none=step % 2 == 0)
            for micro in range(loop.get("micro", 1)):
                quiet = model.no_sync() if loop.get("no_sync") and micro == 0 else nullcontext()
                with quiet:
                    loss_of(model, rank, 2 * step + micro).backward()
            act(model, optimizer)
            optimizer.step()
    return [line for line in lines if SEEN in line]


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

    def halved(model: nn.Module, _: tritoncomm.SparseOptimizer) -> None:
        for parameter in model.parameters():
            parameter.grad.div_(2.0)

    for kind in KINDS:
        for act in (lambda *_: None, averaged, discarded, not_reached, halved):
            assert heard(rank, kind, act) == [], (kind, act)
            assert heard(rank, kind, act, micro=2) == [], (kind, act)
    for kind in (in_ddp, partial(in_ddp, gradient_as_bucket_view=True)):
        assert heard(rank, kind, lambda *_: None, micro=2, no_sync=True) == []


def scaled_loops(rank: int, world_size: int, send) -> None:
    """A scaler changes gradients, and nothing is said. If they are clipped as well, the limit is named."""
    for kind in KINDS[:-1]:
        for make in (torch.amp.GradScaler, tritoncomm.amp.GradScaler):
            for unscales, clips in ((False, False), (True, False), (True, 1e3), (True, 0.1)):
                (model, optimizer), scaler = kind(), make("cpu", init_scale=64.0)
                with log_lines() as lines:
                    for step in range(4):
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
    """Local clipping is noticed once, on the first rank, and its limit is named. Operations on DTensors are not."""
    for kind in KINDS[:-1]:
        for limit in (0.25, 1e-3):

            def clip(model: nn.Module, _: tritoncomm.SparseOptimizer, limit: float = limit) -> None:
                nn.utils.clip_grad_norm_(model.parameters(), limit)

            for micro in (1, 2):
                said = heard(rank, kind, clip, micro=micro)
                assert len(said) == (rank == 0), (kind, said)
                assert all(f"clip_grad_norm_ with {limit:g}: pass max_grad_norm={limit:g} " in x for x in said), said

    def divide(model: nn.Module, _: tritoncomm.SparseOptimizer) -> None:
        for parameter in model.parameters():
            parameter.grad.div_(3.0)

    said = heard(rank, plain, divide)
    assert len(said) == (rank == 0)
    assert all("A factor that is equal on all ranks needs no change" in line for line in said)

    def cut(model: nn.Module, _: tritoncomm.SparseOptimizer) -> None:
        nn.utils.clip_grad_value_(model.parameters(), 1e-3)

    assert len(heard(rank, plain, cut)) == (rank == 0)

    def clip_late(model: nn.Module, optimizer: tritoncomm.SparseOptimizer) -> None:
        nn.utils.clip_grad_norm_(model.parameters(), 1e3 if optimizer.metrics()["steps"] < 3 else 0.25)

    said = heard(rank, plain, clip_late)
    assert len(said) == (rank == 0)
    assert all("max_grad_norm=0.25 " in line for line in said)


def lists(rank: int, world_size: int, send) -> None:
    """What is said of a list, some optimizers of which exchange updates, names no function that is refused for it."""

    def mixed() -> tuple[nn.Module, tritoncomm.SparseOptimizer]:
        model = net()
        halves = torch.optim.RMSprop(model[0].parameters(), lr=1e-3), adamw(model[2])
        return model, tritoncomm.wrap(list(halves), model=model, **SETTINGS)

    for limit, parts in (("max_grad_norm=0.25 ", 1), ("max_grad_norm= ", 3)):

        def clip(model: nn.Module, _: tritoncomm.SparseOptimizer, parts: int = parts) -> None:
            for parameter in model.parameters():
                parameter.grad.div_(parts)
            if parts == 1:
                nn.utils.clip_grad_norm_(model[2].parameters(), 0.25)

        said = heard(rank, mixed, clip)
        assert len(said) == (rank == 0)
        assert all(limit in line and "synchronize" not in line for line in said), said


def hooks_are_removed(rank: int, world_size: int, send) -> None:
    """Neither hooks nor parameters keep an optimizer alive, and its hooks go with it."""
    model, optimizer = in_ddp()
    loss_of(model, rank, 0).backward()
    optimizer.step()
    reference = weakref.ref(optimizer)
    assert all(parameter._post_accumulate_grad_hooks for parameter in model.parameters())
    del optimizer
    gc.collect()
    assert reference() is None
    assert not any(parameter._post_accumulate_grad_hooks for parameter in model.parameters())
