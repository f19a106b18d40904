"""A rank that dies, is slow or stops: the others say so soon, by its global number, and can go on without it."""

from __future__ import annotations

import os
import signal
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import tritoncomm
from kit import equal_on_all_ranks, flat, gradient, sgd, sparse, take, total, weight
from tritoncomm import ExchangeError, ExchangeTimeoutError, PeerLostError, ProtocolMismatchError

from ranks import ranks


@ranks(3, lost=(1,))
def test_rank_that_dies_is_named_and_the_others_go_on(rank, world_size):
    """Nothing of the failed step is applied. In a new group, the remaining ranks train on, and are equal."""
    p = weight(64)
    optimizer = sparse(sgd([p]))
    take(optimizer, [p], rank, range(2), world_size)
    if rank == 1:
        os._exit(1)
    before, began = flat([p]), time.monotonic()
    with pytest.raises(PeerLostError, match="rank 1") as caught:
        take(optimizer, [p], rank, [2], world_size)
    assert caught.value.peers == (1,)
    assert time.monotonic() - began < 10
    assert torch.equal(flat([p]), before)
    with pytest.raises(ExchangeError, match="rank 1"):  # also in the next step
        optimizer.step()
    group = dist.new_group([0, 2], use_local_synchronization=True)
    optimizer.zero_grad()
    optimizer.reset_process_group(group)
    take(optimizer, [p], rank, range(3, 6), 2)
    assert equal_on_all_ranks([p], group)
    assert not torch.equal(flat([p]), before)


@ranks(3)
def test_rank_that_is_slow_is_named_within_the_timeout(rank, world_size):
    """The others wait for ``timeout``, not for that of the process group."""
    p = weight(64)
    optimizer = sparse(sgd([p]), timeout=timedelta(seconds=1))
    take(optimizer, [p], rank, range(2), world_size)
    before = flat([p])
    if rank == 2:
        time.sleep(6)
    began = time.monotonic()
    with pytest.raises(ExchangeError, match=r"rank 2|this rank") as caught:
        take(optimizer, [p], rank, [2], world_size)
    if rank != 2:
        assert isinstance(caught.value, ExchangeTimeoutError)
        assert caught.value.peers == (2,)
        assert time.monotonic() - began < 5.5
    assert torch.equal(flat([p]), before)


class PreemptedError(Exception):
    """What a signal handler raises."""


@ranks(2)
def test_what_a_signal_handler_raises_leaves_as_it_is(rank, world_size):
    """The rank that was interrupted while it waited sees its own exception, and the other one its type and text."""
    p = weight(64)
    optimizer = sparse(sgd([p]))
    take(optimizer, [p], rank, range(2), world_size)
    before = flat([p])

    def handler(*_):
        raise PreemptedError("the job ends")

    if rank == 0:
        signal.signal(signal.SIGALRM, handler)
        signal.setitimer(signal.ITIMER_REAL, 0.5)
        with pytest.raises(PreemptedError):
            take(optimizer, [p], rank, [2], world_size)
    else:
        time.sleep(1.5)
        with pytest.raises(ExchangeError, match=r"rank 0.*Preempted.*the job ends") as caught:
            take(optimizer, [p], rank, [2], world_size)
        assert caught.value.peers == (0,)
    assert torch.equal(flat([p]), before)


@ranks(3, lost=(2,))
def test_ranks_of_a_group_are_named_by_their_global_numbers(rank, world_size):
    """In a group of ranks 1 and 2, the lost one is rank 2."""
    group = dist.new_group([1, 2])
    if rank == 0:
        return
    p = weight(64)
    optimizer = sparse(sgd([p]), process_group=group)
    take(optimizer, [p], rank, [0], 2)
    if rank == 2:
        os._exit(1)
    with pytest.raises(PeerLostError, match="rank 2") as caught:
        take(optimizer, [p], rank, [1], 2)
    assert caught.value.peers == (2,)


@ranks(2, lost=(1,))
def test_rank_that_is_lost_at_wrap_is_named(rank, world_size):
    """The comparison of settings does not wait for the time-out, either."""
    if rank == 1:
        os._exit(1)
    began = time.monotonic()
    with pytest.raises(PeerLostError) as caught:
        sparse(sgd([weight(64)]))
    assert caught.value.peers == (1,)
    assert time.monotonic() - began < 10


@ranks(2)
@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_interrupt_between_exchange_and_update_is_told(rank, world_size, error):
    """The other rank has stepped. This one cannot save, and the next step is refused on both."""
    p = weight(64)
    interrupts = [rank == 1]

    def hook(*_):
        if interrupts and interrupts.pop():
            raise error

    bare = sgd([p])
    bare.register_step_pre_hook(hook)
    optimizer = sparse(bare)
    if rank == 1:
        with pytest.raises(error):
            take(optimizer, [p], rank, [0], world_size)
        with pytest.raises(RuntimeError, match="checkpoint"):
            optimizer.state_dict()
    else:
        take(optimizer, [p], rank, [0], world_size)
    with pytest.raises(ProtocolMismatchError, match="checkpoint"):
        take(optimizer, [p], rank, [1], world_size)


@ranks(3, lost=(2,))
def test_exchange_of_updates_is_repeated_after_a_loss(rank, world_size):
    """No local step is lost: merge() exchanges them in the new group. Until then, no further one is taken."""
    p = weight(64)
    optimizer = tritoncomm.wrap(sgd([p]), local_steps=2, timeout=timedelta(seconds=10))
    p.grad = gradient(64, rank, 0)
    optimizer.step()
    if rank == 2:
        os._exit(1)
    with pytest.raises(PeerLostError):
        optimizer.step()
    own = flat([p])
    assert torch.equal(own, -2 * gradient(64, rank, 0))
    with pytest.raises(RuntimeError, match=r"merge\(\)"):
        optimizer.step()
    assert torch.equal(flat([p]), own)
    group = dist.new_group([0, 1], use_local_synchronization=True)
    optimizer.reset_process_group(group)
    optimizer.merge()
    assert equal_on_all_ranks([p], group)
    assert not torch.equal(flat([p]), own)
    optimizer.flush()
    whole = 2 * (gradient(64, 0, 0) + gradient(64, 1, 0)) / 2
    assert torch.allclose(flat([p]), -whole, atol=1e-3)


@ranks(2)
def test_step_that_a_rank_holds_back_is_taken_by_a_reset(rank, world_size):
    """All have synchronized, and one was interrupted before it stepped: it has the mean, and applies it now."""
    p = weight(64)
    optimizer = sparse(sgd([p]))
    take(optimizer, [p], rank, range(2), world_size)
    p.grad = gradient(64, rank, 2, world_size)
    optimizer.synchronize()
    if rank == 0:
        optimizer.step()
    assert optimizer.reset_process_group(dist.new_group()) == (rank == 1)
    assert equal_on_all_ranks([p])
    optimizer.flush()
    assert torch.equal(flat([p]), -total(64, range(3), world_size))
