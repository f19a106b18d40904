"""Replay recorded steps of one rank with damaged messages, without the other ranks.

A simulated world runs a few steps, and every reply that a rank gets is recorded. A replay runs the same step of one
rank again. One reply is damaged, and all others are the recorded ones. If the damage leads the rank to another
operation or another length, it gets random words of that length: hostile peers could send them.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from tritoncomm import NonFiniteError, ProtocolMismatchError, Recipe, SimulatedWorld, SparseVector
from tritoncomm.scheduler.rounds import (
    AllGather,
    AllReduce,
    AllToAll,
    InSubgroup,
    Op,
    Pattern,
    Post,
    Round,
    Ticket,
    Wait,
)
from tritoncomm.step.exchange.feedback import ErrorFeedback

import laws
from depth import trials

WORLD_SIZES = (2, 3)
FAMILIES = ("random", "random", "disjoint", "ties", "random")
CHECK_EVERY = 500  # replays
_INTEGERS = (torch.int32, torch.int64)
_WORDS = (0, 1, -1, 2**31 - 1, -(2**31), 0x7F800000, 0x7FC00000)  # among them Inf, and the header of NaN


@dataclass(frozen=True)
class Recording:
    """One step of one rank: the worker before it, its gradient, and its operations with the replies to them."""

    worker: ErrorFeedback
    gradient: torch.Tensor
    rank: int
    world_size: int
    replies: list[tuple[Op, Any]]
    mean: SparseVector

    @property
    def places(self) -> list[int]:
        """The replies that hold words of other ranks."""
        return [place for place, (op, reply) in enumerate(self.replies) if not isinstance(op, Post) and len(reply)]


def record(recipe: Recipe, numel: int, world_sizes: Sequence[int]) -> list[Recording]:
    """Return the recordings of the first steps of rank 0 and of the last rank, for each world size."""
    found, families = [], FAMILIES[: trials(max(3, laws.steps_of(recipe)), len(FAMILIES))]
    for world_size in world_sizes:
        case = laws.fitted(laws.Case(world_size, numel, families, seed=world_size, exact=False), recipe)
        world = SimulatedWorld(recipe, case.world_size, case.numel)
        for gradient in case.gradients():
            before = copy.deepcopy(world.workers)
            replies: list[list[tuple[Op, Any]]] = [[] for _ in before]
            patterns = [
                _listening(worker.begin(gradient[rank], rank, case.world_size), replies[rank])
                for rank, worker in enumerate(world.workers)
            ]
            means = world.scheduler.run(patterns)
            for worker in world.workers:
                worker.commit()
            for rank in (0, case.world_size - 1):
                part = Recording(before[rank], gradient[rank], rank, case.world_size, replies[rank], means[rank])
                found.append(part)
    return [recording for recording in found if recording.places]


def _listening(pattern: Pattern[SparseVector], replies: list[tuple[Op, Any]]) -> Pattern[SparseVector]:
    """Run ``pattern`` and record each operation with its reply, those in subgroups too."""
    try:
        op = next(pattern)
        while True:
            if isinstance(op, InSubgroup):
                reply = yield replace(op, pattern=_listening(op.pattern, replies))
            else:
                reply = yield op
                replies.append((op, _copied(reply)))
            op = pattern.send(reply)
    except StopIteration as stop:
        return stop.value


def _copied(reply: Any) -> Any:
    """Return a copy of a reply: a message by source, a tensor, or what holds none."""
    if isinstance(reply, dict):
        return {source: part.clone() for source, part in reply.items()}
    return reply.clone() if isinstance(reply, torch.Tensor) else reply


class Asked(NamedTuple):
    """An operation of a replay, and the rank and the number of ranks in the group that runs it."""

    op: Op
    rank: int
    world_size: int


def _flat(pattern: Pattern[Any], rank: int, world_size: int) -> Generator[Asked, Any, Any]:
    """Run ``pattern``, and what it runs in subgroups, as one sequence of operations."""
    reply, error = None, None
    try:
        while True:
            op = pattern.send(reply) if error is None else pattern.throw(error)
            reply, error = None, None
            if isinstance(op, InSubgroup):
                try:
                    reply = yield from _flat(op.pattern, op.ranks.index(rank), len(op.ranks))
                except (ProtocolMismatchError, NonFiniteError) as raised:
                    error = raised
            else:
                reply = yield Asked(op, rank, world_size)
    except StopIteration as stop:
        return stop.value
    finally:
        pattern.close()


def fuzz(recipe: Recipe, trials: int, world_sizes: Sequence[int] = WORLD_SIZES) -> Counter[str]:
    """Replay recorded steps ``trials`` times, each with one damaged reply. Return how often each outcome occurred.

    Every replay is rejected by name, or gives ascending indices inside the vector. It asks for a bounded number of
    words, in a bounded number of operations. Undamaged replays in between give the recorded mean. The count "accepted"
    includes those with NaN or Inf in the mean, which are "not finite".
    """
    generator = np.random.default_rng(0)
    recordings, outcomes = record(recipe, 80, world_sizes), Counter()
    for trial in range(trials):
        recording = recordings[trial % len(recordings)]
        if trial % CHECK_EVERY < len(recordings):
            assert laws.same_vector(_replay(recording, -1, generator), recording.mean)
        places = recording.places
        try:
            mean = _replay(recording, places[generator.integers(len(places))], generator).trimmed()
        except (ProtocolMismatchError, NonFiniteError) as error:
            outcomes[type(error).__name__] += 1
            continue
        outcomes["accepted"] += 1
        assert (mean.indices[1:] > mean.indices[:-1]).all(), trial
        assert ((mean.indices >= 0) & (mean.indices < mean.numel)).all(), trial
        outcomes["not finite"] += not mean.values.isfinite().all()
    return outcomes


def _replay(recording: Recording, place: int, generator: np.random.Generator) -> SparseVector:
    """Run the recorded step with a damaged reply at ``place``, or with none if ``place`` is negative."""
    worker = recording.worker
    begun = worker.begin(recording.gradient, recording.rank, recording.world_size)
    pattern = _flat(begun, recording.rank, recording.world_size)
    most = 10 * len(recording.replies) + 50
    posted: dict[int, Round] = {}
    reply: Any = None
    try:
        for number in range(most):
            op, *group = pattern.send(reply)
            if isinstance(op, Post):
                posted[number], reply = op.round, Ticket(op.phase, number)
                continue
            asked = Asked(posted[op.ticket.token] if isinstance(op, Wait) else op, *group)
            reply = _recorded(recording, number, op, asked)
            if reply is None:
                reply = _words(recording, asked, generator)
            if number == place:
                _damage(reply, asked, generator)
    except StopIteration as stop:
        return stop.value
    finally:
        pattern.close()
        worker.rollback()
    raise AssertionError(f"more than {most} operations")


def _recorded(recording: Recording, number: int, op: Op, asked: Asked) -> Any:
    """Return a copy of the recorded reply, or None if the operation is another one."""
    if number >= len(recording.replies):
        return None
    known, reply = recording.replies[number]
    if type(known) is not type(op) or known.phase != op.phase:
        return None
    if isinstance(asked.op, Round):
        if {source: part.numel() for source, part in reply.items()} != dict(asked.op.receives):
            return None
        return _copied(reply)
    if known.tensor.shape != asked.op.tensor.shape:
        return None
    return _with_own_part(reply.clone(), asked)


def _words(recording: Recording, asked: Asked, generator: np.random.Generator) -> Any:
    """Return random words of the length that the rank asks for."""
    op = asked.op
    if isinstance(op, Round):
        words = sum(op.receives.values())
        assert words <= 4 * recording.world_size * (recording.worker.algorithm.numel + 100), op.phase
        return {source: _random(torch.int32, (length,), generator) for source, length in op.receives.items()}
    assert isinstance(op, AllGather | AllToAll | AllReduce)
    shape = tuple(op.tensor.shape)
    if isinstance(op, AllGather):
        shape = (asked.world_size, *shape)
    return _with_own_part(_random(op.tensor.dtype, shape, generator), asked)


def _with_own_part(reply: torch.Tensor, asked: Asked) -> torch.Tensor:
    """Return ``reply``, in which the rank's own part is what it has sent now. A sum has no such part."""
    if isinstance(asked.op, AllGather):
        reply[asked.rank] = asked.op.tensor
    elif isinstance(asked.op, AllToAll):
        reply[asked.rank] = asked.op.tensor[asked.rank]
    return reply


def _random(dtype: torch.dtype, shape: Sequence[int], generator: np.random.Generator) -> torch.Tensor:
    """Return random bits. Integers are small ones half of the time, so that they may pass as counts."""
    size = int(np.prod(shape)) * dtype.itemsize // 4
    found = torch.from_numpy(generator.integers(-(2**31), 2**31, size, dtype=np.int64).astype(np.int32))
    found = found.view(dtype).reshape(tuple(shape))
    return found % 50 if dtype in _INTEGERS and generator.integers(2) else found


def _damage(reply: Any, asked: Asked, generator: np.random.Generator) -> None:
    """Damage words of another rank in ``reply``, in place."""
    if isinstance(asked.op, Round):
        target = reply[sorted(reply)[generator.integers(len(reply))]]
    elif isinstance(asked.op, AllReduce):
        target = reply
    else:
        others = [rank for rank in range(asked.world_size) if rank != asked.rank]
        at = others[generator.integers(len(others))]
        target = reply[at : at + 1]
    if not target.numel():
        return
    kind = generator.integers(4)
    if kind == 0:
        target.copy_(_random(target.dtype, tuple(target.shape), generator))
        return
    words = target.reshape(-1).view(torch.int32).numpy()
    if kind == 1:
        words[generator.integers(len(words))] = generator.choice(_WORDS)
        return
    for place in generator.integers(0, 32 * len(words), generator.integers(1, 6)):
        words[place // 32] ^= np.array(1 << place % 32, np.uint32).view(np.int32)
