"""Failures between real processes: every survivor raises a named error in time, loses nothing, and goes on."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import tritoncomm
from models import KINDS, adamw, equal, exact, flat, loss_of, net, opened, residual, tiny, train, unconfirmed
from tritoncomm import (
    ConfigMismatchError,
    ExchangeError,
    ExchangeTimeoutError,
    NonFiniteError,
    PeerLostError,
    ProtocolMismatchError,
    Updates,
)
from tritoncomm.scheduler import failure_report
from tritoncomm.scheduler.process_group import ProcessGroupScheduler
from tritoncomm.scheduler.rounds import AllReduce, InSubgroup, Post, Round, Wait

from depth import DEEP
from ranks import ranks

FAST = timedelta(seconds=5)
LONG = 4.0  # than a time-out of one second and the wait for reports after it


def words(count: int) -> torch.Tensor:
    """Return a message of ``count`` words."""
    return torch.arange(count, dtype=torch.int32)


def error_of(action: Callable[[], object], kind: type[Exception], *, within: float) -> Exception:
    """Return the error that ``action`` must raise in time."""
    began = time.monotonic()
    with pytest.raises((ExchangeError, ProtocolMismatchError)) as caught:
        action()
    assert type(caught.value) is kind, caught.value
    assert time.monotonic() - began < within
    return caught.value


def die_at(optimizer: tritoncomm.SparseOptimizer, number: int) -> None:
    """Kill this process when it is about to perform its ``number``-th operation from now."""
    scheduler = optimizer._tritoncomm.setup.scope.vectors[0].scheduler
    perform, left = scheduler._perform, [number]

    def fatal(op):
        left[0] -= 1
        if left[0] < 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return perform(op)

    scheduler._perform = fatal


# A method, the operation of its step in which rank 1 dies, and the kind of module.
DEATHS = [
    *(("oktopk", number, "plain") for number in (0, 1, 3)),
    *(("oktopk", 1, kind) for kind in KINDS[1:]),
    *(("exdyna", 3, "plain"), ("dense", 0, "plain"), ("hierarchical", 3, "plain")),
    *([("spardl", 1, "plain"), ("topk_allgather", 1, "ddp")] if DEEP else []),
]


@ranks(4, lost=(1,))
@pytest.mark.parametrize(("algo", "number", "kind"), DEATHS)
def test_killed_rank(rank, world_size, algo, number, kind):
    """If a rank dies in any round, the survivors name it, lose nothing, regroup and train to the end."""
    fields = {"algo": algo} if algo != "hierarchical" else {"node_group": dist.new_subgroups(2)[0]}
    model, given = opened(kind, net(), shards=2)
    optimizer = exact(adamw(model), timeout=FAST, **fields, **given)
    train(model, optimizer, rank, range(2))
    optimizer.zero_grad()
    loss_of(model, rank, 2).backward()
    if rank == 1:
        die_at(optimizer, number)
    before, pending = flat(model), residual(optimizer)
    with suppress(PeerLostError):
        optimizer.step()
    ahead = optimizer.metrics()["steps"] == 3
    if ahead:  # the rank died between confirmations: this one has stepped, and the next step raises
        optimizer.zero_grad()
        before, pending = flat(model), residual(optimizer)
    named = rf"step [34], round \d+, phase '.*' of {algo}.*lost rank 1 \(" if kind != "fsdp" else "lost rank 1"
    with pytest.raises(PeerLostError, match=named) as caught:  # the failed group raises the same error again
        optimizer.step()
    assert caught.value.peers == (1,)
    assert torch.equal(flat(model), before)
    assert torch.equal(residual(optimizer), pending)
    if kind == "fsdp":
        return  # a shard is lost
    group = dist.new_group([0, 2, 3], timeout=timedelta(seconds=10), use_local_synchronization=True)
    if kind == "ddp":
        model = torch.nn.parallel.DistributedDataParallel(model.module, process_group=group, init_sync=False)
    steps = optimizer.metrics()["steps"]
    optimizer.reset_process_group(group, **({"model": model} if kind == "ddp" else {}))
    if optimizer.metrics()["steps"] == steps:  # no rank was ahead
        assert torch.allclose(residual(optimizer), pending * 3 / 4, atol=1e-7)
    train(model, optimizer, rank, range(4, 7))
    assert equal(model, group)
    assert not torch.equal(flat(model), before)


class Scheduled:
    """A run with a schedule.

    Args:
        rank: The rank.
        kind: How it clips, and whether its fourth step is a flush, or a local one.
    """

    def __init__(self, rank: int, kind: str) -> None:
        self.rank, self.kind, self.model = rank, kind, tiny()
        if "local steps" in kind:
            local = {"local_steps": 2, "updates": Updates(algo=tritoncomm.OkTopk(density=0.1), outer_momentum=0.5)}
            self.optimizer = tritoncomm.wrap(adamw(self.model), timeout=FAST, **local)
        else:
            limit = 1e-3 if kind.startswith("clipped") else None
            self.optimizer = exact(adamw(self.model), timeout=FAST, max_grad_norm=limit)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 1 / (1 + step))

    def step(self, number: int) -> None:
        """Take a step, or flush."""
        if number == 3 and "flush" in self.kind:
            self.optimizer.flush()
            return
        self.optimizer.zero_grad()
        loss_of(self.model, self.rank, number).backward()
        if self.kind == "own clipping":
            self.optimizer.synchronize()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1e-3)
        self.optimizer.step()
        self.schedule.step()


def lost_in_confirmation(rank: int, kind: str) -> Scheduled:
    """Take steps, the last of which rank 1 cannot confirm. Rank 2 ends."""
    run = Scheduled(rank, kind)
    for step in range(3):
        run.step(step)
    with unconfirmed(run.optimizer, cuts=True) if rank == 1 else nullcontext():
        run.step(3)
    if rank == 2:
        os._exit(0)
    return run


@ranks(3, lost=(2,))
@pytest.mark.parametrize(
    "kind",
    ["schedule", "clipped", "own clipping", "flush", "clipped flush", "local steps", "flush of local steps"],
)
def test_lost_in_confirmation(rank, world_size, kind):
    """A step that some ranks have taken, and others could not confirm, is repeated on these. Otherwise all refuse."""
    run = lost_in_confirmation(rank, kind)
    if rank == 0 and "local steps" not in kind:
        with pytest.raises(PeerLostError):
            run.step(4)
    group = dist.new_group([0, 1], timeout=FAST, use_local_synchronization=True)
    if kind == "own clipping":
        with pytest.raises(ConfigMismatchError, match="its result differs: load a checkpoint"):
            run.optimizer.reset_process_group(group)
        return
    assert run.optimizer.reset_process_group(group) == (rank == 1)
    assert equal(run.model, group)
    if rank == 1 and "flush" not in kind:
        run.schedule.step()
    for step in range(5, 9):
        run.step(step)
    assert equal(run.model, group)


@ranks(3, lost=(2,))
def test_second_failure_after_catching_up(rank, world_size):
    """A step that was applied in a group that could not be joined is told when the next one is."""
    run = lost_in_confirmation(rank, "schedule")
    group = dist.new_group([0, 1], timeout=FAST, use_local_synchronization=True)
    with pytest.raises(ConfigMismatchError, match="node size"):
        run.optimizer.reset_process_group(group, node_group=group if rank == 0 else None)
    assert run.optimizer.reset_process_group(group) == (rank == 1)
    if rank == 1:
        run.schedule.step()
    assert not run.optimizer.reset_process_group(group)
    run.step(4)
    assert equal(run.model, group)


@ranks(3, lost=(2,))
def test_lost_with_scaler(rank, world_size):
    """The scaler whose ranks agree names a lost rank, and then agrees among the others."""
    model = tiny()
    optimizer = exact(adamw(model), timeout=FAST)
    scaler = tritoncomm.amp.GradScaler("cpu", init_scale=1024.0)

    def update(step):
        optimizer.zero_grad()
        scaler.scale(loss_of(model, rank, step)).backward()
        scaler.step(optimizer)
        scaler.update()

    for step in range(3):
        update(step)
    if rank == 2:
        os._exit(0)
    time.sleep(0.5)
    with pytest.raises(PeerLostError) as caught:
        update(3)
    assert caught.value.peers == (2,)
    group = dist.new_group([0, 1], timeout=FAST, use_local_synchronization=True)
    assert not optimizer.reset_process_group(group)
    scaler.update()  # what the step that failed has begun
    for step in range(4, 7):
        update(step)
    assert optimizer.metrics()["steps"] == 6
    assert equal(model, group)


class Plan(NamedTuple):
    """What a rank is to do in a pattern between three ranks, of which rank 1 is at fault, with its numbers."""

    rank: int
    numbers: tuple[int, ...] = ()

    @property
    def odd(self) -> bool:
        """Whether this rank is at fault."""
        return self.rank == 1


def ragged(plan: Plan):
    """Send another number of words than is expected. The third rank waits for both."""
    actual, expected = plan.numbers
    yield Round("ragged", ({1: words(actual)}, {}, {})[plan.rank], ({}, {0: expected}, {})[plan.rank])
    yield AllReduce("after", torch.ones(2))


def ring(plan: Plan, phase: str = "ring", message: torch.Tensor | None = None):
    """Send around a ring, one rank in another phase or something else."""
    right, left = (plan.rank + 1) % 3, (plan.rank - 1) % 3
    message = words(4) if message is None or not plan.odd else message
    yield Round(phase if plan.odd else "ring", {right: message}, {left: 4})
    yield AllReduce("after", torch.ones(2))


def collective(plan: Plan):
    """Enter a collective while the others exchange messages."""
    if plan.odd:
        yield AllReduce("sums", torch.ones(*plan.numbers))
    else:
        others = [peer for peer in range(3) if peer != plan.rank]
        yield Round("lists", {peer: words(4) for peer in others}, dict.fromkeys(others, 4))


def computing(plan: Plan):
    """Let two ranks disagree while the third one computes."""
    if plan.rank == 2:
        time.sleep(LONG)
    peers = {1 - plan.rank: words(4)} if plan.rank < 2 else {}
    yield Round("balance" if plan.rank == 0 else "gather", peers, dict.fromkeys(peers, 4))
    yield AllReduce("after", torch.ones(2))


def broken(plan: Plan):
    """Fail."""
    yield AllReduce("before", torch.ones(2))
    if plan.odd:
        raise MemoryError("no room for the lists")
    yield AllReduce("after", torch.ones(2))


def unknown_subgroup(plan: Plan):
    """Name a subgroup that this rank does not have."""

    def inner():
        yield AllReduce("inner", torch.ones(2))

    if plan.rank < 2:
        yield InSubgroup("team", (0, 1) if plan.rank == 0 else (1, 2), inner())
    yield AllReduce("after", torch.ones(2))


def lengths(actual: int, expected: int) -> tuple[Any, ...]:
    """Return an entry of ``FAULTS``."""
    said = (
        rf"rank 1 from rank 0.*expected step 1, round 1, phase 'ragged', {expected} words; received step 1, round 1, "
        rf"phase 'ragged' \(first 8 bytes\), {actual} words"
    )
    return partial(ragged), (actual, expected), ProtocolMismatchError, said


# A pattern and its numbers; the error, and what it says on all ranks, or to those that do not know.
FAULTS = {
    **{f"{sent} of {wanted} words": lengths(sent, wanted) for sent, wanted in (
        (10, 20), (20, 10), (10, 100_000), (100_000, 10), (100_000, 100_001), (100_001, 100_000)
    )},
    "dtype": (
        partial(ring, message=torch.ones(4)), (), ProtocolMismatchError,
        r"phase 'ring' sends .*shape \(4,\) and dtype torch\.float32: .*one-dimensional",
    ),
    "phase": (
        partial(ring, phase="balance"), (), ProtocolMismatchError, "phase 'ring', 4 words; received .* phase 'balance'"
    ),
    "step": (ring, (), ProtocolMismatchError, "expected step 0, .* received step 1"),
    "settings": (ring, (), ProtocolMismatchError, "a different method or settings"),
    # A short collective consists of messages, too, and is noticed at once. A long one is noticed after the time-out.
    "a short collective": (collective, (3,), ProtocolMismatchError, "rank 1 was in step 1, round 1, phase 'sums' of"),
    "a long collective": (collective, (1000,), ExchangeTimeoutError, "rank 1 was in step 1, round 1, phase 'sums' of"),
    "while one computes": (computing, (), ProtocolMismatchError, "phase 'balance'"),
    "a failure": (broken, (), ExchangeError, "rank 1 failed, see its traceback: no room for the lists. To continue"),
    "a subgroup": (unknown_subgroup, (), ExchangeError, "rank 1 failed"),
}  # fmt: skip


@ranks(3)
@pytest.mark.parametrize("fault", FAULTS)
def test_faults(rank, world_size, fault):
    """If one rank does something else, all report it in time, with the values of both sides."""
    pattern, numbers, kind, said = FAULTS[fault]
    stamp = "other" if fault == "settings" and rank == 1 else "test"
    seconds = timedelta(seconds=2 if kind is ExchangeTimeoutError else 20)
    scheduler = ProcessGroupScheduler(timeout=seconds, stamp=stamp, subgroups=[(0, 1)] if fault == "a subgroup" else [])
    scheduler.step += fault == "step" and rank == 1
    error = error_of(lambda: scheduler.run(pattern(Plan(rank, numbers))), kind, within=10)
    assert kind is not ExchangeError or error.peers == (1,)
    is_known = rank == 1 and pattern in (collective, broken, unknown_subgroup)
    assert is_known or re.search(said, str(error)), error


@ranks(3)
def test_overlapping_messages(rank, world_size):
    """Long and short messages that are in transit at the same time arrive complete and in order."""

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

    scheduler = ProcessGroupScheduler(timeout=timedelta(seconds=20), stamp="test")
    for _ in range(3):
        scheduler.run(pattern())


@ranks(3, lost=(1,))
def test_connection_that_closes_while_this_rank_closes_its_own(rank, world_size):
    """A rank that fails closes all its connections, also if another rank closes one of them at that moment."""
    store = dist.distributed_c10d._get_default_store()

    def probed(*arguments, **keywords):
        work = irecv(*arguments, **keywords)
        if not store.check(["probed"]):  # the first probe
            store.set("probed", "")
            time.sleep(0.5)
        return work

    def pattern():
        yield AllReduce("before", torch.ones(2))
        if rank == 0:
            raise MemoryError("no room for the lists")
        if rank == 1:
            store.wait(["probed"])
            os._exit(1)
        yield Round("gather", {}, {0: 4})

    irecv = dist.irecv
    with pytest.MonkeyPatch.context() as patch:
        if rank == 0:
            patch.setattr(failure_report.dist, "irecv", probed)
        began = time.monotonic()
        with pytest.raises(ExchangeError):
            ProcessGroupScheduler(timeout=timedelta(seconds=20), stamp="test").run(pattern())
    assert time.monotonic() - began < 15


def fail_or_hang(hangs: bool) -> None:
    """Fail at once, or take longer than any time-out."""
    if not hangs:
        raise MemoryError("no room for the lists")
    time.sleep(LONG)


@ranks(4)
@pytest.mark.parametrize(("is_subgroup", "hangs"), [(False, False), (True, False), (True, True)])
def test_failure_in_a_smaller_group(rank, world_size, is_subgroup, hangs):
    """The ranks of a larger group name the rank at fault alone, and not a rank that only waited for it.

    Rank 1 fails in a group with rank 2, which waits for its message. Rank 3 waits for both in a larger group. Ranks
    have different numbers in each group. Rank 0 is in none of them.
    """
    members, pair = [1, 2, 3], (0, 1)  # ranks 1 and 2, as numbered among the members
    limit = timedelta(seconds=2 if hangs else 20)
    group, group_of_pair = dist.new_group(members), dist.new_group([1, 2])
    if rank not in members:
        return
    whole = ProcessGroupScheduler(group, limit, stamp="test", subgroups=[pair] if is_subgroup else [])

    def of_pair(victim):
        yield AllReduce("connect", torch.ones(2))
        if rank == 1:
            fail_or_hang(hangs)
        else:
            yield Round("inner", {}, {victim: 3})

    def of_all():
        if is_subgroup and rank in (1, 2):
            yield InSubgroup("team", pair, of_pair(pair.index(0)))
        yield AllReduce("outer", torch.ones(2))

    def action():
        whole.agree_on_exchange_id()
        if not is_subgroup and rank in (1, 2):
            try:
                ProcessGroupScheduler(group_of_pair, limit, stamp="test").run(of_pair(0))
            except Exception as error:
                raise whole.fail(error) from error
        whole.run(of_all())

    error = error_of(action, ExchangeTimeoutError if hangs else ExchangeError, within=10)
    assert error.peers == (1,)
    said = "no answer from rank 1 within" if hangs else "rank 1 failed, see its traceback: no room for the lists"
    assert rank == 1 or said in str(error)
    assert str(error).count("To continue, call optimizer.reset_process_group()") == 1
    if is_subgroup and rank == 2:
        assert "phase 'team' of test, in round 2, phase 'inner' among ranks [1, 2]" in str(error)


@ranks(3)
@pytest.mark.parametrize(("when", "halves"), [(0, 1), (3, 1), (3, 2)])  # after the first step, replicas are compared
def test_overflow_that_one_rank_finds(rank, world_size, when, halves):
    """A method may find it at the end, in what only one rank keeps. All ranks reject the step, and lose nothing.

    With several optimizers, it is that of the first, and the others are still exchanged.
    """
    model = net()
    parameters = list(model.parameters())
    parts = [adamw(model)] if halves == 1 else [torch.optim.SGD(part, 0.1) for part in (parameters[:2], parameters[2:])]
    optimizer = exact(parts[0] if halves == 1 else parts, model=model, on_nonfinite="raise")
    vectors = optimizer._tritoncomm.setup.scope.vectors
    assert len(vectors) == halves
    algorithm = vectors[0].feedback.algorithm
    reduce = algorithm.reduce

    def rejecting(acc, rank, world_size):
        mean = yield from reduce(acc, rank, world_size)
        if rank == 1:
            raise NonFiniteError("the sum of a residual overflows")
        return mean

    train(model, optimizer, rank, range(when))
    before, owed = flat(model), [vector.feedback.residual.clone() for vector in vectors]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(algorithm, "reduce", rejecting)
        loss_of(model, rank, when).backward()
        said = "overflows" if rank == 1 else "rank 1 has rejected the step: the sum of a residual overflows"
        with pytest.raises(NonFiniteError, match=said):
            optimizer.step()
    assert torch.equal(flat(model), before)
    assert all(torch.equal(vector.feedback.residual, old) for vector, old in zip(vectors, owed, strict=True))
    train(model, optimizer, rank, range(when, when + 3))
    assert equal(model)
    assert optimizer.metrics()["steps"] == when + 3
