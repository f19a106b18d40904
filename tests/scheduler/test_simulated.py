"""The simulated scheduler: operations, traffic, and errors if ranks disagree."""

from __future__ import annotations

import pytest
import torch
from tritoncomm import ExchangeTimeoutError, NonFiniteError, ProtocolMismatchError
from tritoncomm.primitives.collectives import share_counts
from tritoncomm.scheduler.faults import Faults
from tritoncomm.scheduler.rounds import AllGather, AllReduce, AllToAll, InSubgroup, Post, Read, Round, Wait
from tritoncomm.scheduler.simulated import SimulatedScheduler


def words(*values: int) -> torch.Tensor:
    """Return a message with these words."""
    return torch.tensor(values, dtype=torch.int32)


def pattern(*steps):
    """Yield the given operations and return the replies."""
    replies = []
    for step in steps:
        reply = yield step
        replies.append(reply)
    return replies


def run(*steps_by_rank):
    """Run one pattern per rank."""
    return SimulatedScheduler(len(steps_by_rank)).run([pattern(*steps) for steps in steps_by_rank])


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (Round("p", {1: words(1, 2)}, {1: 2}), Round("p", {0: words(1, 2)}, {0: 2})),
        (AllReduce("p", words(1, 2)), AllReduce("p", words(3, 4))),
        (AllGather("p", words(1, 2)), AllGather("p", words(3, 4))),
    ],
)
def test_every_rank_has_its_own_reply(first, second) -> None:
    """What a rank does with a reply is seen by no other rank, not even by the one that sent it."""
    (one,), (other,) = run([first], [second])
    one, other = (each[1 - rank] if isinstance(each, dict) else each for rank, each in enumerate((one, other)))
    sent, kept = getattr(second, "sends", {}).get(0), other.clone()
    one.zero_()
    assert torch.equal(other, kept)
    assert sent is None or sent.tolist() == [1, 2]


@pytest.mark.parametrize(
    ("first", "second", "named"),
    [
        ([AllReduce("x", words(1))], [AllGather("x", words(1))], "rank 0 yields AllReduce.*rank 1 yields AllGather"),
        ([Round("x", {}, {})], [Round("y", {}, {})], "round 0: rank 0 .*'x', but rank 1 .*'y'"),
        ([], [Round("x", {}, {})], "rank 0 has finished, but rank 1 yields Round"),
        ([Read("x", words(1))], [AllReduce("x", words(1))], "rank 0 yields Read.*rank 1 yields AllReduce"),
        ([], [Read("x", words(1))], "rank 0 has finished, but rank 1 yields Read"),
        ([Round("x", {1: words(7)}, {})], [Round("x", {}, {})], r"rank 0 sends .*\(1,\).* rank 1, .*expects nothing"),
        ([Round("x", {}, {1: 2})], [Round("x", {}, {})], "rank 0 expects 2 words from rank 1, which sends nothing"),
        ([Round("x", {1: words(7)}, {})], [Round("x", {}, {0: 2})], r"shape \(1,\).*expects 2"),
        ([Round("x", {1: words(7, 8).view(2, 1)}, {})], [Round("x", {}, {0: 2})], "must be one-dimensional"),
        ([AllToAll("x", words(1))], [AllToAll("x", words(1))], "must have a row for each of 2 ranks"),
        ([Post(Round("x", {}, {}))], [Post(Round("x", {}, {}))], r"'x': a round was posted, .*Wait\(ticket\)"),
        ([Round("x", {1: torch.ones(2)}, {})], [Round("x", {}, {0: 2})], "torch.float32"),
        ([Round("x", {5: words(7)}, {})], [Round("x", {}, {})], "to rank 5"),
        ([AllReduce("x", words(1))], [AllReduce("x", words(1, 2))], "rank 0 passes .*rank 1 passes"),
        ([AllReduce("x", words(1))], [AllReduce("x", torch.ones(1))], "rank 1 passes .*float32"),
        (
            [InSubgroup("x", (0, 1), pattern())],
            [InSubgroup("x", (1,), pattern())],
            r"subgroup of ranks \[0, 1\] is yielded by rank 0,",
        ),
    ],
)
def test_disagreement_is_named(first, second, named: str) -> None:
    """The error names the round, the ranks and both sides."""
    with pytest.raises(ProtocolMismatchError, match=named):
        run(first, second)


def in_teams(inner):
    """Return the patterns of four ranks, in teams of two. ``inner`` makes what a rank does, by its number."""
    teams = [(0, 1), (2, 3)]
    return [pattern(InSubgroup("team", teams[rank // 2], inner(rank))) for rank in range(4)]


@pytest.mark.parametrize(
    ("inner", "error", "named"),
    [
        (
            lambda rank: share_counts([0, 0], rank < 3, torch.device("cpu"), limit=1),
            NonFiniteError,
            "a gradient is NaN or Inf on rank 3",
        ),
        (
            lambda rank: pattern(AllReduce("x", words(*range(1 + rank // 3)))),
            ProtocolMismatchError,
            "rank 2 passes .*, but rank 3 passes",
        ),
        (
            lambda rank: pattern(*[AllReduce("x", words(1))] * (rank < 3)),
            ProtocolMismatchError,
            "rank 2 yields .*, but rank 3 has finished",
        ),
        (
            lambda rank: pattern(Round("x", {0: words(1)} if rank == 3 else {}, {})),
            ProtocolMismatchError,
            "rank 3 sends .* to rank 2",
        ),
        (
            lambda rank: pattern(Round("x", {}, {0: 1} if rank == 3 else {})),
            ProtocolMismatchError,
            "rank 3 expects .* from rank 2",
        ),
    ],
)
def test_ranks_of_a_subgroup_have_their_own_numbers(inner, error, named: str) -> None:
    """Errors in a subgroup name ranks by their numbers among all."""
    with pytest.raises(error, match=named):
        SimulatedScheduler(4).run(in_teams(inner))


def test_fault_in_a_subgroup_names_its_ranks() -> None:
    """A message that is lost in the second team is from one of its ranks."""

    def inner(rank: int):
        return pattern(Round("x", {1: words(1)} if rank == 2 else {}, {0: 1} if rank == 3 else {}))

    with pytest.raises(ExchangeTimeoutError, match="message to rank 3 from rank 2") as caught:
        SimulatedScheduler(4).run(in_teams(inner), faults=Faults("drop", 0, seed=0))
    assert caught.value.peers == (2,)


def test_every_pattern_is_closed_after_an_error() -> None:
    """After an error, suspended patterns run their cleanup."""
    closed = []

    def careful(rank: int):
        try:
            yield AllReduce("x", words(*range(rank + 1)))
        finally:
            closed.append(rank)

    with pytest.raises(ProtocolMismatchError):
        SimulatedScheduler(3).run([careful(r) for r in range(3)])
    assert sorted(closed) == [0, 1, 2]


def waits_twice():
    """Wait again for a round that has ended."""
    ticket = yield Post(Round("x", {}, {}))
    yield Wait(ticket)
    yield Wait(ticket)


def test_a_ticket_is_used_once():
    """A network would wait for a message that never comes."""
    with pytest.raises(ProtocolMismatchError, match="'x': a ticket is waited for once"):
        SimulatedScheduler(2).run([waits_twice(), waits_twice()])


@pytest.mark.parametrize("op", [None, words(1), AllReduce])
def test_what_is_no_operation_is_refused(op):
    """The error says what a pattern may yield."""
    with pytest.raises(TypeError, match="which is no operation: yield one of Round, Post"):
        SimulatedScheduler(1).run([pattern(op)])
