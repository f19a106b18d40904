"""The simulated scheduler: operations, traffic, and errors if ranks disagree."""

from __future__ import annotations

import pytest
import torch
from tritoncomm import ProtocolMismatchError
from tritoncomm.scheduler.cost import Traffic
from tritoncomm.scheduler.rounds import AllGather, AllReduce, AllToAll, Post, Read, Round, Wait
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


def test_round_delivers_copies() -> None:
    """Messages arrive at their peer as copies."""
    message = words(1, 2, 3)
    a, b = run([Round("p", {1: message}, {})], [Round("p", {}, {0: 3})])
    assert a == [{}]
    assert b[0][0].tolist() == [1, 2, 3]
    assert b[0][0] is not message


def test_post_and_wait() -> None:
    """Waiting for its ticket finishes a posted round."""

    def overlapping(rank: int):
        ticket = yield Post(Round("p", {1 - rank: words(rank)}, {1 - rank: 1}))
        return (yield Wait(ticket))

    a, b = SimulatedScheduler(2).run([overlapping(0), overlapping(1)])
    assert (a[1].tolist(), b[0].tolist()) == ([1], [0])


def test_reads() -> None:
    """Each rank receives the content of its own tensor."""
    assert run([Read("r", words(1, 2))], [Read("r", torch.tensor(0.5))]) == [[[1, 2]], [0.5]]


def test_collectives() -> None:
    """All-reduce sums, all-to-all transposes and all-gather stacks. Each rank gets its own result."""
    sums = run([AllReduce("r", words(1, 2))], [AllReduce("r", words(3, 4))])
    assert [s[0].tolist() for s in sums] == [[4, 6], [4, 6]]
    sums[0][0].zero_()
    assert sums[1][0].tolist() == [4, 6]
    crossed = run([AllToAll("t", words(1, 2))], [AllToAll("t", words(3, 4))])
    assert [c[0].tolist() for c in crossed] == [[1, 3], [2, 4]]
    gathered = run([AllGather("g", words(1, 2))], [AllGather("g", words(3, 4))])
    assert [g[0].tolist() for g in gathered] == [[[1, 2], [3, 4]]] * 2


def test_traffic_is_counted_by_rank() -> None:
    """Payload and header count for the sender and the receiver. Empty messages cost nothing."""
    scheduler = SimulatedScheduler(3)
    scheduler.run(
        [
            pattern(Round("p", {1: words(1, 2), 2: words()}, {})),
            pattern(Round("p", {}, {0: 2})),
            pattern(Round("p", {}, {0: 0})),
        ]
    )
    assert [meter.sent for meter in scheduler.meters] == [Traffic(1, 40), Traffic(), Traffic()]
    assert [meter.received for meter in scheduler.meters] == [Traffic(), Traffic(1, 40), Traffic()]


@pytest.mark.parametrize(
    ("first", "second", "named"),
    [
        ([AllReduce("x", words(1))], [AllGather("x", words(1))], "rank 0 yields AllReduce.*rank 1 yields AllGather"),
        ([Round("x", {}, {})], [Round("y", {}, {})], "round 0: rank 0 .*'x', but rank 1 .*'y'"),
        ([], [Round("x", {}, {})], "rank 0 has finished, but rank 1 yields Round"),
        ([Read("x", words(1))], [AllReduce("x", words(1))], "rank 0 yields Read.*rank 1 yields AllReduce"),
        ([], [Read("x", words(1))], "rank 0 has finished, but rank 1 yields Read"),
        ([Round("x", {1: words(7)}, {})], [Round("x", {}, {})], "rank 0 sends 1 words .* rank 1, .*expects nothing"),
        ([Round("x", {}, {1: 2})], [Round("x", {}, {})], "rank 0 expects 2 words from rank 1, which sends nothing"),
        ([Round("x", {1: words(7)}, {})], [Round("x", {}, {0: 2})], "sends 1 words .*expects 2"),
        ([Round("x", {1: torch.ones(2)}, {})], [Round("x", {}, {0: 2})], "torch.float32"),
        ([Round("x", {5: words(7)}, {})], [Round("x", {}, {})], "to rank 5"),
        ([AllReduce("x", words(1))], [AllReduce("x", words(1, 2))], "rank 0 passes .*rank 1 passes"),
        ([AllReduce("x", words(1))], [AllReduce("x", torch.ones(1))], "rank 1 passes .*float32"),
    ],
)
def test_disagreement_is_named(first, second, named: str) -> None:
    """The error names the round, the ranks and both sides."""
    with pytest.raises(ProtocolMismatchError, match=named):
        run(first, second)


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
