"""Worker processes of tests/distributed/test_failures.py: failures between ranks, and the errors of the survivors."""

from __future__ import annotations

import dataclasses
import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from functools import partial

import pytest
import torch
import torch.distributed as dist
import tritoncomm
from helpers import flat, loss_of, residual, tiny_model
from tritoncomm import ExchangeError, PeerLostError, ProtocolMismatchError
from tritoncomm.scheduler import failure_report
from tritoncomm.scheduler.process_group import ProcessGroupScheduler
from tritoncomm.scheduler.rounds import AllReduce, InSubgroup, Post, Round, Wait
from tritoncomm.step.exchange.vector import VectorExchange

import laws

sparse_wrap = partial(tritoncomm.wrap, dense_below=0, density=0.2, timeout=timedelta(seconds=3))
VICTIM = 1
# Reports of these ranks arrive within milliseconds. The library waits longer, for ranks that may be computing.
failure_report._CLOSED_SECONDS, failure_report._SILENT_SECONDS = 1.0, 2.5
# Longer than a time-out of one second and the wait for reports after it.
LONG = 5.0


def words(count: int) -> torch.Tensor:
    """Return a message of ``count`` words."""
    return torch.arange(count, dtype=torch.int32)


def report_error(send, rank: int, action: Callable[[], object]) -> None:
    """Send the error that ``action`` must raise, and how long it took."""
    started = time.monotonic()
    try:
        action()
    except (ExchangeError, ProtocolMismatchError) as error:
        send((rank, type(error).__name__, getattr(error, "peers", ()), time.monotonic() - started, str(error)))
    else:
        raise AssertionError(f"rank {rank} raised no error")


def leave() -> None:
    """End the process at once. The default group is broken, and waiting for peers in it would only raise again."""
    os._exit(0)


def die_at(optimizer: tritoncomm.SparseOptimizer, number: int) -> None:
    """Kill this process when it is about to perform its ``number``-th operation from now."""
    scheduler = optimizer._vector.scheduler
    perform, left = scheduler._perform, [number]

    def fatal(op):
        left[0] -= 1
        if left[0] < 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return perform(op)

    scheduler._perform = fatal


def killed(rank: int, world_size: int, send, algo: str, number: int) -> None:
    """A rank dies in a round of the third step. The survivors keep their state, regroup and train to the end."""
    model = tiny_model()
    fields = {"algo": algo} if algo != "hierarchical" else {"node_group": dist.new_subgroups(2)[0]}
    optimizer = sparse_wrap(torch.optim.AdamW(model.parameters(), lr=0.01), **fields)
    for step in range(2):
        optimizer.zero_grad()
        loss_of(model, rank, step).backward()
        optimizer.step()
    optimizer.zero_grad()
    loss_of(model, rank, 2).backward()
    if rank == VICTIM:
        die_at(optimizer, number)
    before, residual_before = flat(model), residual(optimizer)
    gradients = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    with suppress(PeerLostError):
        optimizer.step()
    ahead = optimizer.metrics()["steps"] == 3
    if ahead:  # the rank died between confirmations: this one has stepped, and the next step raises
        optimizer.zero_grad()
        before, residual_before = flat(model), residual(optimizer)
    named = rf"step [34], round \d+, phase '.*' of {algo}.*lost rank 1 \("
    with pytest.raises(ExchangeError, match=named) as caught:  # the failed group raises the same error again
        optimizer.step()
    assert caught.value.peers == (VICTIM,)
    assert isinstance(caught.value, PeerLostError)
    assert flat(model) == before
    assert laws.same_bits(residual(optimizer), residual_before)
    if not ahead:
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            assert (parameter.grad is None) == (gradient is None)
            assert gradient is None or torch.equal(parameter.grad, gradient)
    survivors = [r for r in range(world_size) if r != VICTIM]
    group = dist.new_group(survivors, timeout=timedelta(seconds=10), use_local_synchronization=True)
    steps = optimizer.metrics()["steps"]
    optimizer.reset_process_group(group)
    if optimizer.metrics()["steps"] == steps:  # no rank was ahead
        expected = residual_before * (len(survivors) / world_size)
        assert torch.allclose(residual(optimizer), expected, atol=1e-7)
    for step in range(4, 8):
        optimizer.zero_grad()
        loss_of(model, rank, step).backward()
        optimizer.step()
    everybody = [None] * len(survivors)
    dist.all_gather_object(everybody, flat(model), group=group)
    assert all(other == everybody[0] for other in everybody)
    assert flat(model) != before
    send((rank, "trained to the end"))
    leave()


def slow(rank: int, world_size: int, send) -> None:
    """One rank is busy for longer than the time-out. All ranks name it, and a new group continues."""
    model = tiny_model()
    optimizer = sparse_wrap(torch.optim.SGD(model.parameters(), lr=0.1), timeout=timedelta(seconds=1))
    loss_of(model, rank, 0).backward()
    before, residual_before = flat(model), residual(optimizer)
    if rank == VICTIM:
        time.sleep(LONG)
    report_error(send, rank, optimizer.step)
    assert flat(model) == before
    assert laws.same_bits(residual(optimizer), residual_before)
    group = dist.new_group(timeout=timedelta(seconds=20))  # with all ranks
    optimizer.reset_process_group(group)
    optimizer.step()
    assert flat(model) != before
    send((rank + 10, "goes on"))
    leave()


def skipped(rank: int, world_size: int, send) -> None:
    """One rank takes no part in an exchange and does something else."""
    model = tiny_model()
    optimizer = sparse_wrap(torch.optim.SGD(model.parameters(), lr=0.1), timeout=timedelta(seconds=1))
    for step in range(2):
        optimizer.zero_grad()
        loss_of(model, rank, step).backward()
        if step == 0:
            optimizer.step()
        elif rank != VICTIM:
            report_error(send, rank, optimizer.step)
        else:
            time.sleep(LONG)
    leave()


def mismatched_steps(rank: int, world_size: int, send) -> None:
    """One rank is one step ahead, which its first message shows."""
    model = tiny_model()
    optimizer = sparse_wrap(torch.optim.SGD(model.parameters(), lr=0.1), "topk_allgather")
    loss_of(model, rank, 0).backward()
    optimizer._vector.scheduler.step += rank == VICTIM
    report_error(send, rank, optimizer.step)
    leave()


def mismatched_lengths(rank: int, world_size: int, send, actual: int, expected: int) -> None:
    """A rank sends fewer or more words than its peer expects, while a third rank waits for both."""
    scheduler = ProcessGroupScheduler(timeout=timedelta(seconds=5), stamp="test")

    def pattern():
        if rank == 0:
            yield Round("ragged", {1: words(actual)}, {})
        elif rank == 1:
            yield Round("ragged", {}, {0: expected})
        else:
            yield Round("ragged", {}, {})
        return (yield AllReduce("after", torch.ones(2)))

    report_error(send, rank, lambda: scheduler.run(pattern()))
    leave()


def overlapping(rank: int, world_size: int, send) -> None:
    """Long and short messages that are in transit at the same time arrive complete and in order."""
    scheduler = ProcessGroupScheduler(timeout=timedelta(seconds=20), stamp="test")

    def pattern():
        tickets = []
        sizes = [1, 5000, 4096, 4097, 3, 100_000]
        for turn, size in enumerate(sizes):
            sends = {peer: words(size) + turn for peer in range(world_size) if peer != rank}
            tickets.append((yield Post(Round(f"turn {turn}", sends, dict.fromkeys(sends, size)))))
        for turn, (size, ticket) in enumerate(zip(sizes, tickets, strict=True)):
            inbox = yield Wait(ticket)
            assert sorted(inbox) == [peer for peer in range(world_size) if peer != rank]
            assert all(torch.equal(message, words(size) + turn) for message in inbox.values())

    for _ in range(3):
        scheduler.run(pattern())
    send((rank, "whole"))


def mismatched_dtypes(rank: int, world_size: int, send) -> None:
    """A rank sends a message that is not int32."""
    scheduler = ProcessGroupScheduler(timeout=timedelta(seconds=5), stamp="test")
    message = torch.ones(4) if rank == VICTIM else words(4)

    def pattern():
        right, left = (rank + 1) % world_size, (rank - 1) % world_size
        yield Round("ring", {right: message}, {left: 4})
        yield AllReduce("after", torch.ones(2))

    report_error(send, rank, lambda: scheduler.run(pattern()))
    leave()


def mismatched_phases(rank: int, world_size: int, send) -> None:
    """A rank is in another phase, with a message of the same length."""
    scheduler = ProcessGroupScheduler(timeout=timedelta(seconds=5), stamp="test")

    def pattern():
        right, left = (rank + 1) % world_size, (rank - 1) % world_size
        yield Round("gather" if rank != VICTIM else "balance", {right: words(4)}, {left: 4})
        yield AllReduce("after", torch.ones(2))

    report_error(send, rank, lambda: scheduler.run(pattern()))
    leave()


def mismatched_settings(rank: int, world_size: int, send) -> None:
    """A rank changes its method after all ranks have compared their methods."""
    model = tiny_model()
    optimizer = sparse_wrap(torch.optim.SGD(model.parameters(), lr=0.1), "topk_allgather")
    loss_of(model, rank, 0).backward()
    if rank == VICTIM:
        vector = optimizer._vector
        options = dataclasses.replace(vector.options, recipe=tritoncomm.TopkAllgather(density=0.2000001))
        optimizer._exchange.vectors = [VectorExchange(vector.parameters, vector.names, options)]
        optimizer._vector.scheduler.set_exchange_id(1)  # as if all ranks had agreed on it
    report_error(send, rank, optimizer.step)
    leave()


def mismatched_operations(rank: int, world_size: int, send, size: int) -> None:
    """A rank is in a collective, with ``size`` values, while the others exchange messages."""
    scheduler = ProcessGroupScheduler(timeout=timedelta(seconds=2), stamp="test")

    def pattern():
        if rank == VICTIM:
            yield AllReduce("sums", torch.ones(size))
        else:
            others = [peer for peer in range(world_size) if peer != rank]
            yield Round("lists", {peer: words(4) for peer in others}, dict.fromkeys(others, 4))

    report_error(send, rank, lambda: scheduler.run(pattern()))
    leave()


def mismatched_versions(rank: int, world_size: int, send) -> None:
    """A rank runs another release."""
    if rank == VICTIM:
        tritoncomm.step.agree.setup.__version__ = "0.0.1"
    try:
        sparse_wrap(torch.optim.SGD(tiny_model().parameters(), lr=0.1))
    except tritoncomm.ConfigMismatchError as error:
        send((rank, "ConfigMismatchError", (), 0.0, str(error)))


def different_orders(rank: int, world_size: int, send, width: int) -> None:
    """Two optimizers of equal shapes are stepped in another order on one rank."""
    first, second = torch.nn.Linear(width, 4), torch.nn.Linear(width, 4)
    optimizers = [sparse_wrap(torch.optim.SGD(model.parameters(), lr=0.1), "dense") for model in (first, second)]
    for model in (first, second):
        model(torch.ones(1, width)).sum().backward()
    report_error(send, rank, optimizers[rank == VICTIM].step)
    leave()


def computing_rank(rank: int, world_size: int, send) -> None:
    """Two ranks send mismatching messages while a third one is still computing."""
    scheduler = ProcessGroupScheduler(timeout=timedelta(seconds=20), stamp="test")
    if rank == 2:
        time.sleep(LONG)

    def pattern():
        if rank < 2:
            yield Round("gather" if rank else "balance", {1 - rank: words(4)}, {1 - rank: 4})
        else:
            yield Round("gather", {}, {})
        yield AllReduce("after", torch.ones(2))

    report_error(send, rank, lambda: scheduler.run(pattern()))
    leave()


def broken_method(rank: int, world_size: int, send) -> None:
    """The method fails on one rank, between two operations."""
    scheduler = ProcessGroupScheduler(timeout=timedelta(seconds=20), stamp="test")

    def pattern():
        yield AllReduce("before", torch.ones(2))
        if rank == VICTIM:
            raise MemoryError("no room for the lists")
        yield AllReduce("after", torch.ones(2))

    report_error(send, rank, lambda: scheduler.run(pattern()))
    leave()


def broken_in_smaller_group(rank: int, world_size: int, send, is_subgroup: bool, hangs: bool) -> None:
    """Rank 1 fails in a group with rank 2, which waits for its message. Rank 3 waits for both in a larger group.

    Ranks have different numbers in each group. Rank 0 is in none of them, and hosts the store.
    """
    members, pair = [1, 2, 3], (0, 1)  # ranks 1 and 2, as numbered among the members
    limit = timedelta(seconds=2 if hangs else 20)
    group, group_of_pair = dist.new_group(members), dist.new_group([1, 2])
    store = dist.distributed_c10d._get_default_store()
    if rank not in members:
        store.wait([f"done {member}" for member in members])
        leave()
    whole = ProcessGroupScheduler(group, limit, stamp="test", subgroups=[pair] if is_subgroup else [])

    def of_pair(victim: int):
        yield AllReduce("connect", torch.ones(2))
        if rank != VICTIM:
            yield Round("inner", {}, {victim: 3})
        elif hangs:
            time.sleep(LONG)
        else:
            raise MemoryError("no room for the lists")

    def of_all():
        if is_subgroup and rank in (1, 2):
            yield InSubgroup("team", pair, of_pair(pair.index(0)))
        yield AllReduce("outer", torch.ones(2))

    def action() -> None:
        whole.agree_on_exchange_id()
        if not is_subgroup and rank in (1, 2):
            try:
                ProcessGroupScheduler(group_of_pair, limit, stamp="test").run(of_pair(0))
            except Exception as error:
                raise whole.fail(error) from error
        whole.run(of_all())

    report_error(send, rank, action)
    store.set(f"done {rank}", "")
    leave()


def unknown_subgroup(rank: int, world_size: int, send) -> None:
    """The pattern of one rank names a subgroup that its scheduler does not have."""
    scheduler = ProcessGroupScheduler(timeout=timedelta(seconds=20), stamp="test", subgroups=[(0, 1)])

    def inner():
        yield AllReduce("inner", torch.ones(2))

    def pattern():
        yield InSubgroup("team", (0, 1) if rank != VICTIM else (1, 2), inner())

    report_error(send, rank, lambda: scheduler.run(pattern()))
    leave()


def unconfirmed(rank: int, world_size: int, send) -> None:
    """A rank cannot confirm a step that the others took. It takes the step when the ranks regroup."""
    model = tiny_model()
    optimizer = sparse_wrap(torch.optim.SGD(model.parameters(), lr=0.1), "topk_allgather")
    loss_of(model, rank, 0).backward()
    optimizer.step()
    optimizer.zero_grad()
    loss_of(model, rank, 1).backward()
    scheduler = optimizer._vector.scheduler
    perform = scheduler._perform

    def lossy(op):
        reply = perform(op)
        if op.phase == "confirm" and rank == VICTIM:
            raise scheduler._failed(op, RuntimeError("Connection closed by peer"))
        return reply

    scheduler._perform = lossy
    with suppress(ExchangeError):
        optimizer.step()
    if rank == VICTIM:
        report_error(send, rank, optimizer.step)
    else:
        optimizer.zero_grad()
        report_error(send, rank, optimizer.step)
    group = dist.new_group(timeout=timedelta(seconds=20), use_local_synchronization=True)
    optimizer.reset_process_group(group)
    assert optimizer.metrics()["steps"] == 2
    everybody = [None] * world_size
    dist.all_gather_object(everybody, flat(model), group=group)
    assert all(other == everybody[0] for other in everybody)
    send((rank + 10, "together again"))
    leave()


def frozen(rank: int, world_size: int, send) -> None:
    """A parameter is frozen during training on one rank only."""
    model = tiny_model()
    optimizer = sparse_wrap(torch.optim.SGD(model.parameters(), lr=0.1))
    if rank == VICTIM:
        model[0].weight.requires_grad_(False)
    loss_of(model, rank, 0).backward()
    before = flat(model)
    report_error(send, rank, optimizer.step)
    assert flat(model) == before
    leave()


def asleep(rank: int, world_size: int, send) -> None:
    """Send the number of this process, and do nothing for a minute."""
    send(os.getpid())
    time.sleep(60)
