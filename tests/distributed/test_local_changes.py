"""Local gradients that are changed before ``step()``: clipping is noticed, and all else is left alone."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial

import pytest
import torch
import tritoncomm
from kit import log_lines
from models import KINDS, adamw, exact, flat, loss_of, net, opened
from torch import nn

from ranks import ranks

SEEN = "this looks like clip_grad_norm_ between backward() and step()"
# Kinds of modules, and options of DDP.
MODULES = {
    "plain": {}, "ddp": {}, "a view": {"gradient_as_bucket_view": True}, "a static graph": {"static_graph": True},
    "small buckets": {"bucket_cap_mb": 0.0001}, "fsdp": {},
}  # fmt: skip


def made(kind: str, **fields) -> tuple[nn.Module, tritoncomm.SparseOptimizer]:
    """Return a module of a kind and its optimizer."""
    model, given = opened(kind if kind in KINDS else "ddp", net(), **MODULES[kind])
    return model, exact(adamw(model), **given, **fields)


def nothing(model, optimizer) -> None:
    """Change nothing."""


def scale(model, optimizer) -> None:
    """Multiply all gradients by a factor."""
    for parameter in model.parameters():
        parameter.grad.mul_(1 / 3)


def clip(model, optimizer, limit: float = 0.25) -> None:
    """Clip the gradients of this rank to ``limit``."""
    nn.utils.clip_grad_norm_(model.parameters(), limit)


def clip_averages(model, optimizer) -> None:
    """Clip what was averaged."""
    optimizer.synchronize()
    clip(model, optimizer)


def zero(model, optimizer) -> None:
    """Throw all gradients away."""
    model.zero_grad(set_to_none=False)


ACTS = {
    "nothing": nothing, "scale": scale, "clip averages": clip_averages, "zero": zero,
    "not reached": partial(clip, limit=1e3), "clip": clip, "clip far": partial(clip, limit=1e-3),
}  # fmt: skip
HEARD = {"clip": "0.25", "clip far": "0.001"}


def heard(rank: int, kind: str, act, micro=1, steps=10, scaler=None, assigns=False) -> list[str]:
    """Return what is said about local gradients in a loop that calls ``act`` before ``step()``."""
    model, optimizer = made(kind, algo="dense")  # it looks at gradients before any exchange
    parameters, scaler = list(model.parameters()), scaler or torch.amp.GradScaler("cpu", enabled=False)
    with log_lines() as lines:
        for step in range(steps):
            optimizer.zero_grad(set_to_none=step % 2 == 0)
            for number in range(micro):
                quiet = number == 0 and micro > 1 and hasattr(model, "no_sync")
                with model.no_sync() if quiet else nullcontext():
                    loss = scaler.scale(loss_of(model, rank, 2 * step + number))
                    if assigns:
                        for parameter, gradient in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
                            parameter.grad = gradient
                    else:
                        loss.backward()
            if act is not nothing:
                scaler.unscale_(optimizer)
            act(model, optimizer)
            scaler.step(optimizer)
            scaler.update()
    return [line for line in lines if SEEN in line]


# A plain module with every act, and other kinds with some, in turn with one and two micro-batches. A static graph
# allows one alone. Clipping of shards is not looked for.
LOOPS = [
    (kind, act, 1 if kind in ("a static graph", "fsdp") else 1 + (i + j) % 2)
    for i, kind in enumerate(MODULES)
    for j, act in enumerate(ACTS)
    if kind == "plain" or act in ("nothing", "scale", "clip")
    if kind != "fsdp" or act not in HEARD
]


@ranks(2)
@pytest.mark.parametrize(("kind", "act", "micro"), LOOPS)
def test_loops(rank, world_size, kind, act, micro):
    """Local clipping is noticed once, on the first rank, and its limit is named. Nothing is said of anything else."""
    said = heard(rank, kind, ACTS[act], micro)
    assert len(said) == (rank == 0 and act in HEARD)
    for line in said:
        assert f"the norm {HEARD[act]} in 10 of the first 10 steps" in line
        assert f"Pass max_grad_norm={HEARD[act]} to wrap()" in line


@ranks(2)
def test_clipping_now_and_then(rank, world_size):
    """It is noticed if most of the first steps are clipped. What begins later is not looked for."""

    def often(model, optimizer):
        clip(model, optimizer, limit=1e3 if optimizer.metrics()["steps"] in (1, 3) else 0.25)

    def late(model, optimizer):
        clip(model, optimizer, limit=1e3 if optimizer.metrics()["steps"] < 8 else 0.25)

    assert len(heard(rank, "plain", often)) == (rank == 0)
    assert heard(rank, "plain", late, steps=20) == []
    assert heard(rank, "plain", clip, steps=9) == []


@ranks(2)
@pytest.mark.parametrize(("kind", "make"), [("plain", torch.amp.GradScaler), ("ddp", tritoncomm.amp.GradScaler)])
@pytest.mark.parametrize("limit", [None, 1e3, 0.1])
def test_scaled_loops(rank, world_size, kind, make, limit):
    """A scaler changes gradients, and nothing is said. If they are clipped as well, the limit is named."""
    act = nothing if limit is None else partial(clip, limit=limit)
    said = heard(rank, kind, act, scaler=make("cpu", init_scale=64.0))
    assert len(said) == (limit == 0.1 and rank == 0)
    assert all("max_grad_norm=0.1 " in line for line in said)


@ranks(2)
@pytest.mark.parametrize(("act", "limit"), [("nothing", None), ("scale", None), ("clip", "0.25"), ("unit", "1")])
def test_assigned_gradients(rank, world_size, act, limit):
    """Gradients that a script assigns and clips are noticed by the same rule."""

    def unit(model, optimizer):
        total = nn.utils.get_total_norm([parameter.grad for parameter in model.parameters()])
        for parameter in model.parameters():
            parameter.grad = parameter.grad / total  # a new tensor, which was not changed in place

    said = heard(rank, "plain", (ACTS | {"unit": unit})[act], assigns=True)
    assert len(said) == (limit is not None and rank == 0)
    assert all(f"max_grad_norm={limit} " in line for line in said)


@ranks(2)
@pytest.mark.parametrize("kind", MODULES)
def test_backward_after_synchronize(rank, world_size, kind):
    """It is refused on every rank, and scaling the mean is not. Hooks are there in between alone."""
    model, optimizer = made(kind)
    for step in range(2):
        optimizer.zero_grad()
        loss_of(model, rank, step).backward()
        assert not any(parameter._post_accumulate_grad_hooks for parameter in model.parameters())
        optimizer.synchronize()
        scale(model, optimizer)
        optimizer.step()
    before = flat(model)
    optimizer.zero_grad()
    loss_of(model, rank, 3).backward()
    optimizer.synchronize()
    loss_of(model, rank, 4).backward()
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"backward pass .* since synchronize\(\).*zero_grad"):
            optimizer.step()
    assert torch.equal(flat(model), before)
    optimizer.zero_grad()
    loss_of(model, rank, 5).backward()
    optimizer.step()


@ranks(2)
def test_mean_that_is_put_back(rank, world_size):
    """Another pass may look at gradients of its own between ``synchronize()`` and ``step()``."""
    model, optimizer = made("plain")
    loss_of(model, rank, 0).backward()
    optimizer.synchronize()
    means = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    loss_of(model, rank, 1).backward()
    for parameter, mean in zip(model.parameters(), means, strict=True):
        parameter.grad = mean
    optimizer.step()
    assert optimizer.metrics()["steps"] == 1


@ranks(2)
@pytest.mark.parametrize(("kind", "fields"), [("plain", {}), ("ddp", {}), ("fsdp", {}), ("fsdp", {"updates": True})])
def test_step_without_gradients(rank, world_size, kind, fields):
    """It changes nothing, and says so once. What FSDP2 has kept back is the reason there."""
    if "updates" in fields:
        model, given = opened(kind, net())
        optimizer = tritoncomm.wrap(adamw(model), **given, **fields)
    else:
        model, optimizer = made(kind)
    with log_lines() as lines:
        for step in range(4):
            optimizer.zero_grad()
            if kind == "fsdp":
                model.set_requires_gradient_sync(step == 3)
            if kind == "fsdp" or step == 3:
                loss_of(model, rank, step).backward()
            optimizer.step()
    found = [line for line in lines if "no rank has a gradient of any parameter in step 1" in line]
    assert len(found) == (rank == 0), lines
    assert all("set_requires_gradient_sync(True)" in line for line in found)
    kept = [line for line in lines if "FSDP has not reduced all backward passes before this step" in line]
    assert len(kept) == (rank == 0 and kind == "fsdp"), lines
    assert optimizer.metrics()["steps"] == 4
