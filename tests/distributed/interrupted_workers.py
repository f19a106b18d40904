"""Worker processes of tests/distributed/test_interrupted.py: a step that stops on the way, on one rank or on all."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from copy import deepcopy
from datetime import timedelta
from itertools import product
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import tritoncomm
from ddp_models import ddp, net
from helpers import FailingSGD, adamw, flat, loss_of, residual, same_everywhere, sparse_wrap, train
from torch import nn
from tritoncomm import ConfigMismatchError, ExchangeError, ProtocolMismatchError, checkpoint
from tritoncomm.amp import GradScaler
from tritoncomm.step.exchange.machine import State

KINDS = ("plain", "ddp")


def opened(
    kind: str, make: Callable[[nn.Module], torch.optim.Optimizer], **fields
) -> tuple[nn.Module, tritoncomm.SparseOptimizer]:
    """Return a module of the kind, and its wrapped optimizer."""
    model = net() if kind == "plain" else ddp(net())
    return model, sparse_wrap(make(model), **fields, **({} if kind == "plain" else {"model": model}))


def failing_hook(rank: int, world_size: int, send) -> None:
    """If a hook of the user raises before the step, on one rank or all, the step can be repeated. Nothing is lost."""
    for kind, scaled, clipped, fails in product(KINDS, (False, True), (False, True), ((), (0,), (0, 1))):
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0, enabled=scaled)  # ours has a collective in each call
        model, optimizer = opened(kind, adamw, **({"max_grad_norm": 0.05} if clipped else {}))
        base = optimizer.optimizer
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
        assert (flat(model), norms) == expected, (kind, scaled, clipped, fails)


def given_up_step(rank: int, world_size: int, send) -> None:
    """A loop that goes on after a hook has failed does not apply gradients of one rank, or scaled ones."""
    for kind, scaled in product(KINDS, (False, True)):
        scaler = GradScaler("cpu", init_scale=1024.0, enabled=scaled)
        model, optimizer = opened(kind, adamw)
        train(model, optimizer, rank, range(2))
        optimizer.zero_grad()
        scaler.scale(loss_of(model, rank, 2)).backward()
        hook = optimizer.optimizer.register_step_pre_hook(broken)
        before = flat(model)
        with pytest.raises(OSError, match="disk"):
            scaler.step(optimizer)
        hook.remove()
        scaler.update()
        model.zero_grad(set_to_none=False)
        scaler.scale(loss_of(model, rank, 3)).backward()
        with pytest.raises(RuntimeError, match="gradients have changed since"):
            scaler.step(optimizer)
        assert flat(model) == before
        optimizer.zero_grad()
        train(model, optimizer, rank, range(4, 6))
        assert same_everywhere(flat(model))
        assert optimizer.metrics()["steps"] == 4


def failing_after_the_step(rank: int, world_size: int, send) -> None:
    """If a hook after the step raises, a repeated call does not take the step again. A flush can be repeated."""
    for kind in KINDS:
        model, optimizer = opened(kind, adamw)
        base = optimizer.optimizer
        train(model, optimizer, rank, range(1))
        optimizer.zero_grad()
        loss_of(model, rank, 1).backward()
        hook = base.register_step_post_hook(broken) if rank == 0 else None
        with pytest.raises(OSError, match="disk") if rank == 0 else nullcontext():
            optimizer.step()
        if hook is not None:
            hook.remove()
            before = flat(model)
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
    for kind, fails in product(KINDS, ((1,), (0, 1))):
        model, optimizer = opened(kind, lambda model: FailingSGD(model.parameters(), lr=0.1))
        base = optimizer.optimizer
        train(model, optimizer, rank, range(3))
        saved = {"model": deepcopy(model.state_dict()), "optimizer": deepcopy(optimizer.state_dict())}
        base.fails = rank in fails
        with pytest.raises(MemoryError) if rank in fails else nullcontext():
            train(model, optimizer, rank, range(3, 4))
        if rank in fails:
            with pytest.raises(RuntimeError, match=r"stopped update.*load"):
                optimizer.state_dict()
        before, held = flat(model), residual(optimizer)
        for _ in range(2):
            loss_of(model, rank, 4).backward()  # a loop that resets gradients after step()
            with pytest.raises(ProtocolMismatchError, match=r"stopped.*load"):
                optimizer.step()
        assert flat(model) == before
        assert torch.equal(residual(optimizer), held)
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


class PreemptedError(Exception):
    """What a handler of a user raises."""


def raised_in_a_wait(rank: int, world_size: int, send) -> None:
    """What a signal handler raises while a rank waits leaves as it is. The others get its type and text at once."""
    for raised, said in (
        (PreemptedError("SIGTERM"), "rank 1 stopped: PreemptedError: SIGTERM"),
        (PreemptedError(), "rank 1 stopped: PreemptedError"),
        (KeyboardInterrupt(), "rank 1 stopped: KeyboardInterrupt"),
        (SystemExit(3), "rank 1 stopped: SystemExit: 3"),
        (RuntimeError("the node timed out"), "rank 1 stopped: RuntimeError: the node timed out"),
    ):
        group, model = dist.new_group(timeout=timedelta(seconds=30)), net()
        optimizer = sparse_wrap(adamw(model), process_group=group)
        train(model, optimizer, rank, range(2))
        before, held = flat(model), residual(optimizer)
        loss_of(model, rank, 2).backward()
        if rank == 1:
            signal_soon(raised)
        else:
            time.sleep(1.0)
        start = time.monotonic()
        for _ in range(1 + (rank != 1)):  # also in the next step
            with pytest.raises(type(raised) if rank == 1 else ExchangeError) as caught:
                optimizer.step()
            assert caught.value is raised if rank == 1 else str(caught.value).endswith(said)
        assert time.monotonic() - start < 15
        assert rank == 1 or caught.value.peers == (1,)
        assert optimizer._exchange.state is State.IDLE
        assert flat(model) == before
        assert torch.equal(residual(optimizer), held)
        with pytest.raises(ExchangeError, match=said):
            optimizer.step()
        dist.barrier()


def raised_in_the_confirmation(rank: int, world_size: int, send) -> None:
    """A rank that stops as all confirm a step may be the only one that has not applied it, and can do so later."""
    group, model = dist.new_group(timeout=timedelta(seconds=30)), net()
    optimizer = sparse_wrap(adamw(model), process_group=group)
    train(model, optimizer, rank, range(2))
    exchange = optimizer._exchange
    confirm = exchange._confirm

    def interrupted_confirm() -> None:
        if rank == 1:
            signal_soon(PreemptedError("SIGTERM"))
        else:
            time.sleep(1.0)
        confirm()

    exchange._confirm = interrupted_confirm
    with pytest.raises(PreemptedError) if rank == 1 else nullcontext():
        train(model, optimizer, rank, range(2, 3))
    del exchange._confirm
    assert exchange.state is (State.SUSPENDED if rank == 1 else State.IDLE)
    assert optimizer.reset_process_group(dist.new_group()) == (rank == 1)
    train(model, optimizer, rank, range(3, 5))
    assert same_everywhere(flat(model))


def raised_in_a_check(rank: int, world_size: int, send) -> None:
    """It leaves a comparison of ranks outside of a step as it is, too. The others do not wait for the time-out."""
    scaler = GradScaler("cpu", init_scale=8.0)

    def unscale(model: nn.Module, optimizer: tritoncomm.SparseOptimizer) -> None:
        scaler.scale(loss_of(model, rank, 2)).backward()
        scaler.step(optimizer)  # rank 0 may have got its sum, and learns of it when it exchanges gradients

    def broadcast(model: nn.Module, optimizer: tritoncomm.SparseOptimizer) -> None:
        sparse_wrap(adamw(net()), process_group=optimizer.process_group, broadcast_parameters=True)

    acts: dict[str, Callable[[nn.Module, tritoncomm.SparseOptimizer], object]] = {
        "save": lambda _, optimizer: checkpoint.save(optimizer, "never-written"),
        "load": lambda _, optimizer: optimizer.load_state_dict(optimizer.state_dict()),
        "add": lambda _, optimizer: optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))]}),
        "wrap": lambda _, optimizer: sparse_wrap(adamw(net()), process_group=optimizer.process_group),
        "broadcast": broadcast,
        "unscale": unscale,
    }
    for act in acts.values():
        raised = PreemptedError("SIGTERM")
        group, model = dist.new_group(timeout=timedelta(seconds=30)), net()
        optimizer = sparse_wrap(adamw(model), process_group=group)
        train(model, optimizer, rank, range(2))
        before = flat(model)
        if rank == 1:
            signal_soon(raised)
        else:
            time.sleep(1.0)
        start = time.monotonic()
        with pytest.raises(PreemptedError if rank == 1 else ExchangeError, match="SIGTERM") as caught:
            act(model, optimizer)
        assert time.monotonic() - start < 15
        if rank == 1:
            assert caught.value is raised
        else:
            assert str(caught.value).endswith("rank 1 stopped: PreemptedError: SIGTERM")
            assert caught.value.peers == (1,)
        assert flat(model) == before
        optimizer.zero_grad()
        with pytest.raises(ExchangeError):  # the group has failed
            train(model, optimizer, rank, range(2, 3))
        assert flat(model) == before
        dist.barrier()


def raised_before_a_check(rank: int, world_size: int, send) -> None:
    """A rank that is interrupted by itself, while the others wait for its answer, reports it, too."""
    group, model = dist.new_group(timeout=timedelta(seconds=30)), net()
    optimizer = sparse_wrap(adamw(model), process_group=group)
    if rank == 1:
        optimizer.optimizer.add_param_group = interrupted
    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt if rank == 1 else ExchangeError) as caught:
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))]})
    assert rank == 1 or str(caught.value).endswith("rank 1 stopped: KeyboardInterrupt")
    assert time.monotonic() - start < 15
    dist.barrier()


def signal_soon(raised: BaseException) -> None:
    """Let a signal arrive in this process, whose handler raises ``raised``."""

    def handle(*_: object) -> None:
        raise raised

    signal.signal(signal.SIGUSR1, handle)
    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGUSR1)).start()


def broken(*_: object) -> None:
    """Fail as a hook that writes a file may."""
    raise OSError("disk full")


def interrupted(*_: object, **__: object) -> None:
    """Raise what Ctrl-C raises."""
    raise KeyboardInterrupt
