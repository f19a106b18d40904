"""The cost of exchanges: the papers' tables, links, and the virtual clock against closed forms."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from spardl_oracle import SPARDL_TABLE
from tritoncomm import ConfigurationError, Dense, OkTopk, Recipe, SimulatedWorld, SparDL, TopkAllgather
from tritoncomm.primitives.distributed_topk import largest_shares
from tritoncomm.scheduler.clock import VirtualClock
from tritoncomm.scheduler.cost import HEADER_WORDS, WORD, Forecast, Link, Traffic
from tritoncomm.scheduler.rounds import AllReduce, Pattern, Post, Round, Wait
from tritoncomm.scheduler.simulated import SimulatedScheduler

from baselines import GTopk, TopkDSA
from depth import examples
from tritoncomm_kernels import Entries, largest

MEGA = 1e6

# Received MB per rank and step: dense, TopkA, TopkDSA from and to, gTopk, Ok-Topk from and to.
OK_TOPK_TABLE = [
    (14_728_266, 0.02, 16, [110.5, 35.3, 4.42, 57.4, 18.9, 2.21, 6.63]),
    (14_728_266, 0.02, 32, [114.1, 73.1, 4.57, 59.4, 23.6, 2.28, 6.85]),
    (27_569_568, 0.02, 32, [213.7, 136.7, 8.55, 111.1, 44.1, 4.27, 12.8]),
    (27_569_568, 0.02, 64, [217.1, 277.9, 8.68, 112.9, 52.9, 4.34, 13.0]),
    (133_547_324, 0.01, 32, [1035, 331, 20.7, 528, 107, 10.4, 31.1]),
    (133_547_324, 0.01, 64, [1052, 673, 21.0, 536, 128, 10.5, 31.6]),
    (133_547_324, 0.01, 256, [1064, 2724, 21.3, 543, 171, 10.6, 31.9]),
]


def predicted(method: Recipe, numel: int, world_size: int) -> Forecast:
    """Return the prediction of an ordinary step."""
    return method.build(numel).predicted_traffic(world_size, ordinary=True)


@pytest.mark.parametrize(("numel", "density", "world_size", "expected"), OK_TOPK_TABLE)
def test_volumes_match_ok_topk_table(numel: int, density: float, world_size: int, expected: list[float]) -> None:
    """The predictions give the figures of Ok-Topk's comparison.

    That of TopkDSA is in its range, of which the upper end has dense sums. That of Ok-Topk is the middle of its range,
    because each rank sends k entries and receives k sums. That of gTopk adds both directions of its root.
    """

    def volume(method: Recipe) -> float:
        return predicted(method, numel, world_size).received.bytes / MEGA

    tree = predicted(GTopk(density=density), numel, world_size)
    found = [
        volume(Dense()), volume(TopkAllgather(density=density)), (tree.sent.bytes + tree.received.bytes) / MEGA,
        volume(OkTopk(density=density)),
    ]  # fmt: skip
    dense, gathered, overlapping, full, root, low, high = expected
    assert found == pytest.approx([dense, gathered, root, (low + high) / 2], rel=0.006)
    assert overlapping <= volume(TopkDSA(density=density)) <= 1.006 * full


@pytest.mark.parametrize(("world_size", "teams"), SPARDL_TABLE)
def test_volumes_match_spardl_table(world_size: int, teams: int) -> None:
    """The predictions give SparDL's table of latencies and words for every number of teams, with the largest h."""
    latencies, _, high, recursive = SPARDL_TABLE[world_size, teams]
    numel, k = 1_000_000, 10_000
    for sag, words in (("bruck", high), ("recursive", recursive)):
        if words is None:
            continue
        found = predicted(SparDL(teams=teams, sag=sag), numel, world_size).received
        assert found.messages == latencies
        entries = (found.bytes / WORD - HEADER_WORDS * found.messages) / k
        # Budgets are whole entries, and a block of B-SAG has a count.
        assert words - 0.006 <= entries <= words + 0.006 + 5 * latencies * world_size / k


# Milliseconds: dense, TopkA, gTopk, Ok-Topk from and to, SparDL with one and two teams; teams and B-SAG from and to.
TIMES = [
    (8, "10gbit,30us", [82.7, 6.69, 5.84, 1.49, 3.14, 1.83, 1.80], (4, 1.42, 2.48)),
    (14, "1gbit,50us", [876, 123, 75.8, 10.6, 28.1, 17.9, 17.9], (7, 13.7, 38.0)),
    (14, "10gbit,30us", [87.8, 12.4, 7.78, 1.96, 3.71, 1.99, 1.96], (7, 1.50, 3.92)),
    (14, "100gbit,5us", [8.79, 1.25, 0.79, 0.27, 0.44, 0.215, 0.210], (7, 0.16, 0.40)),
    (64, "10gbit,30us", [93.2, 59.6, 11.7, 5.13, 6.98, 2.22, 2.19], (8, 2.02, 2.75)),
]


@pytest.mark.parametrize(("world_size", "link", "expected", "teams"), TIMES)
def test_published_times(world_size: int, link: str, expected: list[float], teams: tuple[int, float, float]) -> None:
    """The predicted times for 14.73 million values at 1 % match the published milliseconds."""
    numel, network = 14_730_000, Link.parse(link)

    def milliseconds(method: Recipe) -> float:
        return 1e3 * predicted(method, numel, world_size).seconds(network)

    dense, gathered, root, low, high, one, two = expected
    found = [milliseconds(method) for method in (TopkAllgather(), GTopk(), SparDL(), SparDL(teams=2))]
    # The published latencies use log2 of the number of workers without rounding up to whole rounds.
    assert found == pytest.approx([gathered, root, one, two], rel=0.03)
    # Collectives are counted as rings, which have more latencies than those that were published.
    hops = 1e3 * 2 * world_size * network.latency
    assert dense <= 1.01 * milliseconds(Dense()) <= 1.02 * dense + hops
    assert low <= milliseconds(OkTopk()) <= high + hops
    number, _, most = teams
    assert milliseconds(SparDL(teams=number, sag="bruck")) == pytest.approx(most, rel=0.03, abs=0.006)


@pytest.mark.parametrize(
    ("text", "link"),
    [
        ("10gbit,30us", Link(30e-6, 1.25e9)),
        ("1Gbit,50us", Link(50e-6, 1.25e8)),
        ("250mbit,1.5ms", Link(1.5e-3, 31.25e6)),
        ("8bit,1s", Link(1.0, 1.0)),
        *((wrong, None) for wrong in ("", "10gbit", "10gb,30us", "30us,10gbit", "0gbit,1us", "1..0gbit,1us")),
    ],
)
def test_parse_link(text: str, link: Link | None) -> None:
    """A link is parsed with the units of bandwidth and latency, or raises an error."""
    if link is not None:
        assert Link.parse(text) == pytest.approx(link)
        return
    with pytest.raises(ConfigurationError, match="link"):
        Link.parse(text)


def send(*ranks: int) -> Round:
    """Send two words to each of ``ranks``."""
    return Round("p", {rank: torch.zeros(2, dtype=torch.int32) for rank in ranks}, {})


def receive(*ranks: int) -> Round:
    """Receive two words from each of ``ranks``."""
    return Round("p", {}, dict.fromkeys(ranks, 2))


BOTH = [Round("p", send(other).sends, receive(other).receives) for other in (1, 0)]


@pytest.mark.parametrize(
    ("operations", "computed", "seconds"),
    [
        # A message has left when its bytes are sent, and arrives one latency later. A receiver waits for a late sender.
        ([send(1), receive(0)], [], [5, 6]),
        ([send(1), receive(0)], [10, 0], [15, 16]),
        ([send(1), receive(0)], [0, 30], [5, 30]),
        # Messages of one rank are one after the other, in each direction, and directions are independent.
        ([send(2), send(2), receive(0, 1)], [], [5, 5, 11]),
        ([send(1, 2), receive(0), receive(0)], [], [10, 6, 11]),
        (BOTH, [], [6, 6]),
        # An all-reduce is 2(P-1) hops of a latency and a chunk, and starts when the last rank arrives.
        ([AllReduce("p", torch.zeros(8))] * 4, [0, 2, 0, 0], [2 + 6 * (1 + 1)] * 4),
    ],
)
def test_virtual_time(operations: list[Any], computed: list[float], seconds: list[float]) -> None:
    """A rank sends and receives at the same time, at two words a second with a latency of one, headers included."""
    clock = VirtualClock(len(operations), Link(latency=1.0, bandwidth=8.0))
    for rank, each in enumerate(computed):
        clock.charge(rank, each)

    def run(operation: Any) -> Pattern[None]:
        yield operation

    SimulatedScheduler(len(operations), clock).run([run(operation) for operation in operations])
    assert clock.now == seconds


def test_posted_rounds_overlap_computation() -> None:
    """A posted round is transferred while the rank computes."""
    clock = VirtualClock(2, Link(latency=1.0, bandwidth=8.0))

    def pattern(rank: int) -> Pattern[None]:
        ticket = yield Post(BOTH[rank])
        clock.charge(rank, 4.0)
        yield Wait(ticket)

    SimulatedScheduler(2, clock).run([pattern(0), pattern(1)])
    assert clock.now == [6, 6]


@pytest.mark.parametrize("world_size", [2, 8, 13])
def test_spardl_in_virtual_time(world_size: int) -> None:
    """A step of SparDL takes the time of its rounds and words, headers included."""
    numel = world_size * 2000
    link = Link(30e-6, 1.25e9)
    world = SimulatedWorld(SparDL(density=0.01), world_size, numel, link=link)
    world.step(torch.randn(world_size, numel, generator=torch.Generator().manual_seed(0)))
    used = world.traffic[0]
    assert world.seconds == pytest.approx(link.seconds(Traffic(used.messages, used.bytes)))
    assert world.scheduler.meters[0].waited == pytest.approx(world.seconds)
    world.clock.charge(world_size - 1, 0.5)
    world.step(torch.randn(world_size, numel, generator=torch.Generator().manual_seed(0)))
    assert world.seconds == pytest.approx(link.seconds(used))


@given(
    st.lists(st.lists(st.integers(-6, 6).filter(bool), max_size=12), min_size=1, max_size=6),
    st.data(),
)
@examples(100)
def test_largest_shares(values: list[list[int]], data: st.DataObject) -> None:
    """Each rank's share is its part of the k largest entries of all ranks, ties to the lower index."""
    total = sum(map(len, values))
    if total < 2:
        return
    k = data.draw(st.integers(1, total - 1))
    starts = [0, *itertools.accumulate(map(len, values))]
    whole = Entries(torch.arange(total, dtype=torch.int32), torch.tensor([v * 1.25 for row in values for v in row]))
    expected = largest(whole, k).indices
    owns = [whole.slice(a, b) for a, b in itertools.pairwise(starts)]
    for shares in SimulatedScheduler(len(values)).run([largest_shares(own, k) for own in owns]):
        kept = torch.cat([largest(own, share).indices for own, share in zip(owns, shares, strict=True)])
        assert torch.equal(kept, expected)
