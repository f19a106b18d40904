"""Worker processes of tests/distributed/test_interrupted.py: a step that stops on the way, on one rank or on all."""

from __future__ import annotations

from contextlib import nullcontext, suppress
from copy import deepcopy
from itertools import product
from pathlib import Path

import pytest
import torch
from ddp_models import ddp, net
from helpers import FailingSGD, adamw, flat, loss_of, residual, same_everywhere, sparse_wrap, train
from tritoncomm import ConfigMismatchError, ProtocolMismatchError, checkpoint
from tritoncomm.amp import GradScaler


def failing_hook(rank: int, world_size: int, send) -> None:
    """If a hook of the user raises before the step, on one rank or all, the step can be repeated. Nothing is lost."""
    for door, scaled, clipped, fails in product(("wrap", "ddp"), (False, True), (False, True), ((), (0,), (0, 1))):
        model = net() if door == "wrap" else ddp(net())
        base = adamw(model)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0, enabled=scaled)  # ours has a collective in each call
        given = {} if door == "wrap" else {"model": model}
        optimizer = sparse_wrap(base, max_grad_norm=0.05 if clipped else None, **given)
        norms = []
        for number in range(4):
            optimizer.zero_grad()
            scaler.scale(loss_of(model, rank, number)).backward()
            if number == 2 and rank in fails:
                hook = base.register_step_pre_hook(broken)
                with pytest.raises(OSError, match="disk"):
                    scaler.step(optimizer)
                hook.remove()
            scaler.step(optimizer)
            scaler.update()
            norms.append(optimizer.metrics().get("grad_norm"))
        if not fails:
            expected = flat(model), norms
        assert (flat(model), norms) == expected, (door, scaled, clipped, fails)


def given_up_step(rank: int, world_size: int, send) -> None:
    """A loop that goes on after a hook has failed does not apply gradients of one rank, or scaled ones."""
    for scaled in (False, True):
        scaler = GradScaler("cpu", init_scale=1024.0, enabled=scaled)
        model = ddp(net())
        base = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = sparse_wrap(base, model=model)
        changes = []
        for number in range(4):
            before = torch.cat([p.detach().reshape(-1).clone() for p in model.parameters()])
            hook = base.register_step_pre_hook(broken) if number == 2 else None
            model.zero_grad(set_to_none=number < 3)
            scaler.scale(loss_of(model, rank, number)).backward()
            with pytest.raises(OSError, match="disk") if hook is not None else nullcontext():
                scaler.step(optimizer)
            if hook is not None:
                hook.remove()
            scaler.update()
            after = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
            changes.append(float((after - before).norm()))
        assert changes[2] == 0 < changes[3] < 10 * changes[1]
        assert same_everywhere(flat(model))
    model = net()
    base = adamw(model)
    optimizer = sparse_wrap(base)
    loss_of(model, rank, 0).backward()
    hook = base.register_step_pre_hook(broken)
    with pytest.raises(OSError, match="disk"):
        optimizer.step()
    hook.remove()
    model.zero_grad(set_to_none=False)
    loss_of(model, rank, 1).backward()
    with pytest.raises(RuntimeError, match="gradients have changed since a hook"):
        optimizer.step()
    optimizer.zero_grad()
    train(model, optimizer, rank, range(2, 4))
    assert same_everywhere(flat(model))


def failing_after_the_step(rank: int, world_size: int, send) -> None:
    """If a hook after the step raises, a repeated call does not take the step again. A flush can be repeated."""
    for door in ("wrap", "ddp"):
        model = net() if door == "wrap" else ddp(net())
        base = adamw(model)
        optimizer = sparse_wrap(base, **({} if door == "wrap" else {"model": model}))
        train(model, optimizer, rank, range(1))
        optimizer.zero_grad()
        loss_of(model, rank, 1).backward()
        hook = base.register_step_post_hook(broken) if rank == 0 else None
        with pytest.raises(OSError, match="disk") if rank == 0 else nullcontext():
            optimizer.step()
        if hook is not None:
            hook.remove()
            before = flat(model)
            with suppress(RuntimeError):  # with a hook of DDP: no new gradients
                optimizer.step()
            assert flat(model) == before
        train(model, optimizer, rank, range(2, 3))
        assert same_everywhere(flat(model))
    weights = []
    for fails in (False, True):
        model = net()
        base = adamw(model)
        optimizer = sparse_wrap(base, max_grad_norm=0.01)
        train(model, optimizer, rank, range(3))
        if fails:
            hook = base.register_step_pre_hook(broken)
            with pytest.raises(OSError, match="disk"):
                optimizer.flush()
            hook.remove()
            optimizer.step()
        else:
            optimizer.flush()
        assert not residual(optimizer).any()
        weights.append(flat(model))
    assert weights[0] == weights[1]


def failing_update(rank: int, world_size: int, send) -> None:
    """An update that stops in the middle is noticed on all ranks, and in checkpoints, until a state is loaded."""
    for door, fails in product(("wrap", "ddp"), ((1,), (0, 1))):
        model = net() if door == "wrap" else ddp(net())
        base = FailingSGD(model.parameters(), lr=0.1)
        optimizer = sparse_wrap(base, **({} if door == "wrap" else {"model": model}))
        train(model, optimizer, rank, range(3))
        saved = {"model": deepcopy(model.state_dict()), "optimizer": deepcopy(optimizer.state_dict())}
        base.fails = rank in fails
        with pytest.raises(MemoryError) if rank in fails else nullcontext():
            train(model, optimizer, rank, range(3, 4))
        if rank in fails:
            with pytest.raises(RuntimeError, match=r"stopped update.*load"):
                optimizer.state_dict()
        before, held = flat(model), residual(optimizer) if door == "wrap" else None
        for _ in range(2):
            loss_of(model, rank, 4).backward() if door == "wrap" else None  # a loop that resets gradients after step()
            with pytest.raises(ProtocolMismatchError, match=r"stopped.*load"):
                optimizer.step() if door == "wrap" else train(model, optimizer, rank, range(4, 5))
        assert flat(model) == before
        assert door == "ddp" or torch.equal(residual(optimizer), held)
        with pytest.raises((RuntimeError, ConfigMismatchError), match="stopped"):
            checkpoint.save(optimizer, "never-written")
        assert not Path("never-written").exists()
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        train(model, optimizer, rank, range(3, 6))
        assert same_everywhere(flat(model))


def failing_on_the_way(rank: int, world_size: int, send) -> None:
    """A rank that was interrupted between the commit of a mean and its update is noticed on all ranks."""
    model = net()
    optimizer = sparse_wrap(adamw(model))
    train(model, optimizer, rank, range(2))
    if rank == 1:
        optimizer._optimizer_step.step = interrupted
    with pytest.raises(KeyboardInterrupt) if rank == 1 else nullcontext():
        train(model, optimizer, rank, range(2, 3))
    vars(optimizer._optimizer_step).pop("step", None)
    before = flat(model)
    with pytest.raises(ProtocolMismatchError, match="rank 0 has 3, rank 1 has '2, and one that stopped'"):
        train(model, optimizer, rank, range(3, 4))
    assert flat(model) == before
    with pytest.raises((ConfigMismatchError, RuntimeError), match="stopped"):
        checkpoint.save(optimizer, "never-written")


def broken(*_: object) -> None:
    """Fail as a hook that writes a file may."""
    raise OSError("disk full")


def interrupted(*_: object, **__: object) -> None:
    """Raise what Ctrl-C raises."""
    raise KeyboardInterrupt
