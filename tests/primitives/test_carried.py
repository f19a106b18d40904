"""The messages of a small pattern travel in those of a large one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest
import torch
from tritoncomm import ExDyna, OkTopk, Quantized, Recipe, SimulatedWorld, SparDL, TopkAllgather
from tritoncomm.algorithms.staged import Staged
from tritoncomm.errors import NonFiniteError
from tritoncomm.primitives.carried import carried, with_carried
from tritoncomm.primitives.collectives import bruck_all_gather, rotate
from tritoncomm.scheduler.cost import Forecast, both, messages
from tritoncomm.scheduler.rounds import AllReduce, Op, Pattern, Round, Wait
from tritoncomm.scheduler.simulated import SimulatedScheduler

import laws

CARRIERS = {"small-scatter": "scatter", "small-gather": "gather"}


def words(rank: int, peer: int, count: int) -> torch.Tensor:
    """Return what ``rank`` sends to ``peer``: words that tell where they come from."""
    return torch.arange(count, dtype=torch.int32) + 1000 * rank + 100 * peer


def exchange(rank: int, size: int, count: int, width: int, prefix: str = "", after: int = 0) -> Pattern[list[Any]]:
    """Scatter and gather ``count`` words, and sum one number in ``after`` operations. Return all that arrives."""
    peers = [peer for peer in range(size) if peer != rank]
    arrived: list[Any] = []
    sends = {peer: words(rank, peer, count) for peer in peers}
    receives = dict.fromkeys(peers, count)

    def keep(inbox: Mapping[int, torch.Tensor]) -> None:
        arrived.extend((source, part.tolist()) for source, part in inbox.items())

    yield from rotate(sends, receives, keep, rank, size, width=width, phase=f"{prefix}scatter")
    blocks = yield from bruck_all_gather(words(rank, 0, count), [count] * size, rank, size, phase=f"{prefix}gather")
    arrived += [block.tolist() for block in blocks]
    for _ in range(after):
        arrived.append((yield AllReduce(f"{prefix}after", torch.ones(1))).tolist())
    return arrived


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7, 12])
@pytest.mark.parametrize("counts", [(5, 3), (0, 3), (5, 0)])
@pytest.mark.parametrize("after", [(0, 0), (2, 0), (0, 1)])
@pytest.mark.parametrize("width", [1, 4])
def test_both_get_what_they_get_alone(size: int, counts: tuple[int, int], after: tuple[int, int], width: int) -> None:
    """Results are those of both patterns alone, whatever their messages and their numbers of operations are."""
    alone = [
        SimulatedScheduler(size).run([exchange(rank, size, count, w, "", more) for rank in range(size)])
        for count, more, w in zip(counts, after, (width, 8), strict=True)
    ]
    together = SimulatedScheduler(size).run(
        [
            carried(
                exchange(rank, size, counts[0], width, "", after[0]),
                exchange(rank, size, counts[1], 8, "small-", after[1]),
                CARRIERS,
            )
            for rank in range(size)
        ]
    )
    assert together == list(zip(*alone, strict=True))


def test_an_error_closes_the_other_pattern() -> None:
    """If one pattern raises, the other one is closed."""
    closed = []

    def open_ended() -> Iterator[Op]:
        try:
            yield Round("scatter", {}, {})
        finally:
            closed.append(True)

    def wrong() -> Iterator[Op]:
        yield Round("small-scatter", {}, {})
        raise NonFiniteError("wrong")

    pattern = carried(open_ended(), wrong(), CARRIERS)
    next(pattern)
    with pytest.raises(NonFiniteError):
        pattern.send({})
    assert closed == [True]


def test_forecast() -> None:
    """Shared messages have one header. What has no carrier keeps its phase."""
    large = Forecast({"scatter": both(messages(3, 30)), "other": both(messages(1, 1))})
    small = {"small-scatter": both(messages(3, 12)), "small-gather": both(messages(2, 8))}
    found = with_carried(large, small, CARRIERS, framed=True).phases
    expected = {"scatter": messages(3, 42), "other": messages(1, 1), "small-gather": messages(2, 8)}
    assert found == {phase: both(traffic) for phase, traffic in expected.items()}


# Delays of an ordinary step with four workers and small tensors in 8 bits, without its confirmation.
DELAYS = [
    (OkTopk(density=0.05), 5),
    (OkTopk(density=0.05, static=True), 2),
    (TopkAllgather(density=0.05), 3),
    (TopkAllgather(density=0.05, static=True), 2),
    (SparDL(density=0.05), 5),
    (SparDL(density=0.05, static=True), 4),
    (ExDyna(density=0.05), 5),
    (ExDyna(density=0.05, static=True), 3),
    (Quantized(), 3),
    (Quantized(static=True), 2),
]


@pytest.mark.parametrize(("recipe", "delays"), DELAYS, ids=[repr(recipe) for recipe, _ in DELAYS])
def test_delays(recipe: Recipe, delays: int) -> None:
    """A step waits as often as this for messages: small tensors travel in those of the large ones."""
    world = SimulatedWorld(Staged(recipe=recipe, tail=37, small="8bit"), 4, 1037)
    ordinary: list[int] = []
    for step in range(8):
        waits: list[Op] = []

        def count(_: int, ops: Sequence[Op], waits: list[Op] = waits) -> None:
            waits.extend(ops[:1] if not isinstance(ops[0], Wait) else ())

        world.step(laws.heavy_tailed(4, 1037, step), before_round=count)
        report = world.workers[0].algorithm.report
        if step and not report.get("reevaluated") and not report.get("repartitioned"):
            ordinary.append(len(waits))
    assert min(ordinary) == delays
