"""A step, or a comparison of ranks, that stops on the way, on one rank or on all."""

from __future__ import annotations

import os
import signal
import threading
import time
from contextlib import ExitStack, nullcontext
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from models import adamw, equal, exact, flat, loss_of, net, opened, residual, train
from torch import nn
from tritoncomm import ConfigMismatchError, ExchangeError, ProtocolMismatchError, checkpoint
from tritoncomm.step import agree, setup

from ranks import ranks


class FailingSGD(torch.optim.SGD):
    """SGD whose update fails once, after it has changed a parameter, if ``fails`` is set."""

    fails = False

    def _init_group(self, *args):
        """Go on with a step, or fail. The step itself is that of SGD."""
        if self.fails:
            self.fails = False
            self.param_groups[0]["params"][0].add_(1.0)
            raise MemoryError
        return super()._init_group(*args)


@ranks(4)
def test_failing_update(rank, world_size, tmp_path):
    """An update that stops in the middle is named on all ranks, also of other shards, and nothing is saved."""
    model, given = opened("fsdp", net(), shards=2)
    optimizer = exact(FailingSGD(model.parameters(), lr=0.1), **given)
    train(model, optimizer, rank, range(3))
    optimizer.fails = rank == 1
    with pytest.raises(MemoryError) if rank == 1 else nullcontext():
        train(model, optimizer, rank, range(3, 4))
    before, pending = flat(model), residual(optimizer)
    for _ in range(2):
        loss_of(model, rank, 4).backward()  # a loop that resets gradients after step()
        with pytest.raises(ProtocolMismatchError, match=r"rank 1 has '3, and one that stopped'.*load a checkpoint"):
            optimizer.step()
    assert torch.equal(flat(model), before)
    assert torch.equal(residual(optimizer), pending)
    with pytest.raises((RuntimeError, ConfigMismatchError), match="stopped"):
        checkpoint.save(optimizer, tmp_path / "never-written")
    assert not (tmp_path / "never-written").exists()


@ranks(2)
def test_stopped_rank_in_a_new_group(rank, world_size):
    """A rank whose update has stopped cannot go on in another group. The others learn why, and do not wait for it."""
    model = net()
    optimizer = exact(FailingSGD(model.parameters(), lr=0.1))
    optimizer.fails = rank == 1
    with pytest.raises(MemoryError) if rank == 1 else nullcontext():
        train(model, optimizer, rank, range(1))
    group, start = dist.new_group(), time.monotonic()
    kind = RuntimeError if rank == 1 else ConfigMismatchError
    with pytest.raises(kind, match="stopped update 1 in the middle"):
        optimizer.reset_process_group(group)
    assert time.monotonic() - start < 10


class PreemptedError(Exception):
    """What a handler of a user raises."""


def signal_soon(raised: BaseException) -> None:
    """Let a signal arrive in this process, whose handler raises ``raised``."""

    def handle(*_: object) -> None:
        raise raised

    signal.signal(signal.SIGUSR1, handle)
    threading.Timer(0.4, os.kill, (os.getpid(), signal.SIGUSR1)).start()


RAISED = {
    "KeyboardInterrupt": KeyboardInterrupt(),
    "SystemExit: 3": SystemExit(3),
    "PreemptedError: SIGTERM": PreemptedError("SIGTERM"),
    "RuntimeError: the node timed out": RuntimeError("the node timed out"),  # as a backend's own error looks
}
ACTS = {
    "step": lambda optimizer: optimizer.step(),
    "save": lambda optimizer: checkpoint.save(optimizer, "never-written"),
    "load": lambda optimizer: optimizer.load_state_dict(optimizer.state_dict()),
    "add": lambda optimizer: optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))]}),
    "wrap": lambda _: exact(adamw(net())),
    "broadcast": lambda _: exact(adamw(net()), broadcast_parameters=True),
}
# A step with what is an Exception and what is none, and every comparison of ranks outside of a step.
STOPS = [("step", text) for text in RAISED] + [(act, "PreemptedError: SIGTERM") for act in ACTS if act != "step"]


def interrupted(rank: int, raised: BaseException, act) -> ExchangeError | None:
    """Interrupt rank 1 while it waits for rank 0 in ``act``. Return the error of rank 0, which hears of it at once."""
    if rank == 1:
        signal_soon(raised)
    else:
        time.sleep(0.8)
    start = time.monotonic()
    with pytest.raises(type(raised) if rank == 1 else ExchangeError) as caught:
        act()
    assert time.monotonic() - start < 10
    assert caught.value is raised if rank == 1 else caught.value.peers == (1,)
    return None if rank == 1 else caught.value


@ranks(2)
@pytest.mark.parametrize(("act", "text"), STOPS)
def test_raised_in_a_wait(rank, world_size, act, text):
    """What a signal handler raises leaves as it is. The others get its type and text, and do not wait for a time-out.

    The group has failed, and nothing has changed.
    """
    model = net()
    optimizer = exact(adamw(model))
    train(model, optimizer, rank, range(2))
    before, pending = flat(model), residual(optimizer)
    loss_of(model, rank, 2).backward()
    error = interrupted(rank, RAISED[text], lambda: ACTS[act](optimizer))
    assert error is None or f"rank 1 stopped: {text}. To continue, call optimizer.reset_process_group()" in str(error)
    with pytest.raises(ExchangeError, match=f"rank 1 stopped: {text}" if act == "step" else ""):
        optimizer.step()
    assert torch.equal(flat(model), before)
    assert torch.equal(residual(optimizer), pending)


@ranks(2)
@pytest.mark.parametrize("place", ["_begin_presence", "_confirm"])
def test_raised_between_messages(rank, world_size, place):
    """A rank that stops as its exchange or its confirmation begins tells the other one, and both can go on."""
    model = net()
    optimizer = exact(adamw(model))
    train(model, optimizer, rank, range(2))
    exchange, start = optimizer._tritoncomm.setup.exchange, time.monotonic()

    def interrupted_here(**_: object) -> None:
        raise KeyboardInterrupt

    if rank == 1:
        setattr(exchange, place, interrupted_here)
    expected = pytest.raises(KeyboardInterrupt) if rank == 1 else pytest.raises(ExchangeError, match="rank 1 stopped")
    with expected:
        train(model, optimizer, rank, range(2, 3))
    assert time.monotonic() - start < 10
    vars(exchange).pop(place, None)
    optimizer.reset_process_group(dist.new_group())
    train(model, optimizer, rank, range(2, 4))
    assert optimizer.metrics()["steps"] == 4
    assert equal(model, optimizer.process_group)


@ranks(2)
def test_raised_in_the_confirmation(rank, world_size):
    """A rank that stops as all confirm a step may be the only one that has not applied it, and can do so later."""
    model = net()
    optimizer = exact(adamw(model))
    train(model, optimizer, rank, range(2))
    exchange, confirm = optimizer._tritoncomm.setup.exchange, optimizer._tritoncomm.setup.exchange._confirm

    def interrupted_confirm() -> None:
        if rank == 1:
            signal_soon(PreemptedError("SIGTERM"))
        else:
            time.sleep(0.8)
        confirm()

    exchange._confirm = interrupted_confirm
    with pytest.raises(PreemptedError) if rank == 1 else nullcontext():
        train(model, optimizer, rank, range(2, 3))
    del exchange._confirm
    assert optimizer.reset_process_group(dist.new_group()) == (rank == 1)
    train(model, optimizer, rank, range(3, 5))
    assert equal(model, optimizer.process_group)


@ranks(2)
@pytest.mark.parametrize("act", ["save", "add"])
def test_raised_before_a_check(rank, world_size, act):
    """So it is while a rank still reads its values, which takes long if there are many, and the others wait."""
    optimizer, start = exact(adamw(net())), time.monotonic()
    with ExitStack() as stack:
        for module in (agree.replica, setup) if rank == 1 else ():
            stack.enter_context(patch.object(module, "numbers", side_effect=KeyboardInterrupt))
        expected = pytest.raises(KeyboardInterrupt) if rank == 1 else pytest.raises(ExchangeError, match="Keyboard")
        with expected:
            ACTS[act](optimizer)
    assert time.monotonic() - start < 10
