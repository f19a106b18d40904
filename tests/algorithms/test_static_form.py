"""The static form of all methods that have it: what it delivers, what it sends, and what has no room."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

import pytest
import torch
from tritoncomm import (
    ConfigurationError,
    ExDyna,
    Hierarchical,
    MiCRO,
    NonFiniteError,
    OkTopk,
    ProtocolMismatchError,
    RandomBlock,
    Recipe,
    SimulatedWorld,
    SparDL,
    TopkAllgather,
    Warmup,
)
from tritoncomm.algorithms.base import StaticRecipe
from tritoncomm.algorithms.exdyna import ExDynaState
from tritoncomm.scheduler.cost import Flow
from tritoncomm.scheduler.rounds import AllGather, Op

import laws
from depth import DEEP, trials
from laws import heavy_tailed
from recipes import SHORT, always_packed, under_test

AMPLE = 1000.0  # capacity of ExDyna that no step reaches
ROOM = {"local_cap": 50.0, "global_cap": 50.0, "static_room": 1e308}  # the same for Ok-Topk: any finite room is legal
STATIC = [
    name for name, recipe in under_test(0.1).items() if isinstance(recipe, StaticRecipe) and recipe.static is True
]
# Recipes and world sizes. In most of them neither blocks nor budgets have the same size.
SAME = [
    (TopkAllgather(density=0.05), 5),
    (TopkAllgather(density=0.05, packed=True), 8),
    (TopkAllgather(density=0.05, values="4bit"), 3),
    *((SparDL(density=0.05), world_size) for world_size in (1, 2, 3, 5, 6, 8, 17)),
    (SparDL(density=0.05, packed=True), 7),
    (SparDL(density=0.05, values="4bit"), 7),
    (SparDL(density=0.05, teams=2), 6),
    (SparDL(density=0.05, teams=2, sag="bruck"), 6),
    (SparDL(density=0.05, teams=3, packed=True), 12),
    (SparDL(density=0.05, teams=3, values="4bit"), 6),
    (SparDL(density=0.05, teams=4), 12),
    (SparDL(density=0.05, teams=8), 8),
    (always_packed(SparDL(density=0.05, teams=8, values="2bit")), 16),
    (SparDL(density=0.05, residuals="partial"), 6),
    (SparDL(density=0.05, residuals="local", teams=2), 6),
    *((ExDyna(density=0.05, capacity=AMPLE), world_size) for world_size in (1, 2, 3, 8)),
    (ExDyna(density=0.05, capacity=AMPLE, packed=True), 5),
    (ExDyna(density=0.05, capacity=AMPLE, rebalance="paper", threshold_rule="ref"), 4),
    (MiCRO(density=0.05, capacity=AMPLE), 7),
    *((RandomBlock(density=0.05, mode=mode, values="8bit", reduced_lr=True), 7) for mode in ("perm", "wrap")),
    (RandomBlock(density=0.05, reduced_lr=True), 4),
    *((OkTopk(density=0.05, **ROOM, **SHORT), world_size) for world_size in trials((1, 2, 5), (1, 2, 3, 5, 8))),
    (OkTopk(density=0.05, correct_thresholds=False, **ROOM, **SHORT), 3),
    (always_packed(OkTopk(density=0.05, **ROOM, **SHORT)), 3),
]


@pytest.mark.parametrize(("recipe", "world_size"), SAME, ids=repr)
@pytest.mark.parametrize("numel", trials([1003], [1003, 4000]))
def test_same_as_the_exact_form(recipe: StaticRecipe, world_size: int, numel: int) -> None:
    """With room for all entries, both forms deliver the same bits, and keep the same residuals and states."""
    exact, static = (
        SimulatedWorld(dataclasses.replace(recipe, static=static), world_size, numel) for static in (False, True)
    )
    for step in range(trials(8, 12) if recipe.name == "oktopk" else trials(3, 6)):  # it has steps of four kinds
        gradients = heavy_tailed(world_size, numel, step)
        expected, means = exact.step(gradients), static.step(gradients)
        assert len(means[0]) > 0
        assert all(laws.same_vector(mean.trimmed(), expected[0]) for mean in means)
        assert laws.same_bits(static.residuals, exact.residuals)
        for one, other in zip(static.workers, exact.workers, strict=True):
            assert one.algorithm.state == other.algorithm.state
            assert one.accumulator.selected == other.accumulator.selected
            assert one.algorithm.report.items() <= other.algorithm.report.items()


@pytest.mark.parametrize("name", STATIC)
@pytest.mark.parametrize("world_size", trials([1, 2, 5], [1, 2, 5, 8, 12]))
def test_traffic_is_predicted_exactly(name: str, world_size: int) -> None:
    """Every phase of every rank has the predicted traffic in both directions, whatever the gradients are.

    Of Ok-Topk, these are the steps that reuse thresholds and cuts. Others depend on counts.
    """
    recipe = under_test(0.05)[name]
    families = ("random",) * 14 if "oktopk" in name else ("zero", "random", "one-region", "ties", "one-entry")
    case = laws.fitted(laws.Case(world_size, 1003, families), recipe)
    world, compared = laws.world_of(recipe, case), 0
    for gradients in case.gradients():
        forecasts = world.predicted_traffic
        world.step(gradients)
        report = world.workers[0].algorithm.report
        if report.get("reevaluated") or report.get("repartitioned"):
            continue
        compared += 1
        measured = [
            {phase: Flow(sent, meter.received_by_phase[phase]) for phase, sent in meter.sent_by_phase.items()}
            for meter in world.scheduler.meters
        ]
        for found, forecast in zip(measured, forecasts, strict=True):
            assert found == {phase: flow for phase, flow in forecast.phases.items() if flow.sent.messages}
    assert compared > 2


# Sizes of nodes and worlds, and lengths: the last part is shorter, or most are empty.
NODES = [*((*nodes, 1003) for nodes in ((1, 3), (2, 2), (2, 6), (3, 6), (4, 8))), (2, 6, 1)]
BETWEEN_NODES = [
    TopkAllgather(density=0.05, values="4bit"),
    SparDL(density=0.05),
    ExDyna(density=0.05, capacity=AMPLE),
    RandomBlock(density=0.05, values="8bit", reduced_lr=True),
    Warmup(recipe=SparDL(density=0.05), steps=2),
    OkTopk(density=0.5, global_cap=5.0, local_cap=5.0, static_room=AMPLE),
]


@pytest.mark.parametrize(
    ("recipe", "node_size", "world_size", "numel"),
    [  # each recipe with two of the sizes, and each size with two of the recipes; all in a deep run
        pytest.param(recipe, *nodes, id=f"{recipe.name}-{nodes}")
        for i, recipe in enumerate(BETWEEN_NODES)
        for j, nodes in enumerate(NODES)
        if DEEP or (i + j) % 3 == 0
    ],
)
def test_same_between_nodes(recipe: Recipe, node_size: int, world_size: int, numel: int) -> None:
    """A hierarchical exchange has both forms, too. They deliver the same bits."""
    exact, static = (
        SimulatedWorld(
            Hierarchical(recipe=recipe, node_size=node_size).with_method(
                lambda inner, static=static: dataclasses.replace(inner, static=static)
            ),
            world_size,
            numel,
        )
        for static in (False, True)
    )
    for step in range(4):
        gradients = heavy_tailed(world_size, numel, step)
        expected, means = exact.step(gradients), static.step(gradients)
        assert all(laws.same_vector(mean, expected[0]) for mean in means)
        assert laws.same_bits(static.residuals, exact.residuals)
    gradients[-1, 0] = torch.inf
    for world in (exact, static):
        with pytest.raises(NonFiniteError, match="contains NaN or Inf"):
            world.step(gradients)
    assert laws.same_bits(static.residuals, exact.residuals)


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("capacity", [1.0, 1.5])
def test_entries_without_room_stay(capacity: float, static: bool) -> None:
    """If more entries pass than a rank has room for, it delivers its largest ones. The rest stays in the residuals."""
    world_size, numel, density = 4, 800, 0.05
    recipe = ExDyna(density=density, capacity=capacity, lift=1.0, threshold_rule="off", static=static)
    world = SimulatedWorld(recipe, world_size, numel)
    blocks = (7, 7, 6, 5)
    for worker in world.workers:
        worker.algorithm.state = ExDynaState(world_size=4, threshold=0.01, settled=True, blocks=blocks)
    gradients = heavy_tailed(world_size, numel, 0)
    gradients[2:, :] = 0  # two partitions with too many entries, two without any
    mean = world.step(gradients)[0]
    algorithm = world.workers[0].algorithm
    # In the exact form, ranks share what others leave.
    room = int(capacity * numel * density) // (world_size if static else 2)
    assert len(mean) == 2 * room
    for rank, (start, stop) in enumerate(itertools.pairwise(algorithm.bounds(algorithm.layout(4), blocks))):
        order = gradients[rank, start:stop].abs().argsort(descending=True, stable=True)[:room].sort().values + start
        delivered = mean.indices[(mean.indices >= start) & (mean.indices < stop)]
        assert delivered.tolist() == (order.tolist() if rank < 2 else [])
    left = gradients.clone()
    left[:, mean.indices.long()] = 0
    assert torch.equal(world.residuals, left)
    # The counts of the threshold and of the borders include the entries without room.
    passed = sum(
        int((gradients[r, slice(*bounds)].abs() >= 0.01).sum()) for r, bounds in enumerate(((0, 224), (224, 448)))
    )
    assert algorithm.report["passed"] == passed > 4 * room


def changed(world: SimulatedWorld, gradients: torch.Tensor, source: int, place: int, word: int) -> None:
    """Run a step in which one word of one rank's message in the last all-gather of entries is another."""

    def change(_: int, ops: Sequence[Op]) -> None:
        if isinstance(ops[0], AllGather) and ops[0].phase in ("indices", "all-gather"):
            ops[source].tensor[place] = word

    world.step(gradients, before_round=change)


@pytest.mark.parametrize("wrong", [-1, 1004])
def test_counts_out_of_range_are_rejected(wrong: int) -> None:
    """ExDyna rejects a number of passed entries that no rank can have. The next borders would depend on it."""
    world = SimulatedWorld(ExDyna(density=0.05, static=True), 3, 1003)

    with pytest.raises(ProtocolMismatchError, match=rf"received counts \[{wrong}\] from rank 1"):
        changed(world, heavy_tailed(3, 1003, 0), 1, -2, wrong)
    assert world.workers[0].algorithm.state == ExDynaState()


def test_an_index_of_the_next_block_is_rejected() -> None:
    """SparDL rejects the first index of the next block, although it is in the span of a wider block."""
    numel, world_size = 1003, 5  # blocks of 200, 201, 200, 201 and 201
    world = SimulatedWorld(SparDL(density=0.05, static=True), world_size, numel)
    with pytest.raises(ProtocolMismatchError, match="malformed"):
        changed(world, heavy_tailed(world_size, numel, 0), 0, 9, 200)
    changed(world, heavy_tailed(world_size, numel, 0), 0, 9, 199)


@pytest.mark.parametrize("teams", [1, 3])
@pytest.mark.parametrize("many", [1, 200])
@pytest.mark.parametrize("static", [False, True])
def test_errors_of_spardl_do_not_claim_that_gradients_are_finite(static: bool, many: int, teams: int) -> None:
    """NaN of a rank that SparDL cannot name are not reported as an overflow by any rank, also if many are truncated."""
    world = SimulatedWorld(SparDL(density=0.05, teams=teams, static=static), 6, 600)
    gradients = heavy_tailed(6, 600, 0)
    gradients[2, 17 : 17 + many] = torch.nan
    with pytest.raises(NonFiniteError, match="a gradient or a sum of gradients contains NaN or Inf"):
        world.step(gradients)
    assert [str(error) for error in world.scheduler.raised.values()] == [str(world.scheduler.raised[0])] * 6


def test_truncated_entries_that_overflow_are_rejected() -> None:
    """A step is rejected if what a rank keeps of truncated entries exceeds fp32, although all sums are in its range."""
    # Ranks 0 and 1 truncate coordinate 1, of which rank 0 has kept its own part. Rank 2 delivers coordinate 1.
    gradients = torch.tensor([[3.3e38, 3e38, 0, 0], [0, 3.2e38, 0, 0], [0, 3.4e38, 0, 0], [0, 0, 1.0, 0]])
    for static in (False, True):
        world = SimulatedWorld(SparDL(density=0.25, teams=4, static=static), 4, 4)
        with pytest.raises(NonFiniteError):
            world.step(gradients)
        assert world.step(gradients / 2)[0].indices.tolist() == [1]


def test_paper_mode_is_not_static() -> None:
    """ExDyna has the form in robust mode only."""
    with pytest.raises(ConfigurationError, match="static"):
        ExDyna(mode="paper", static=True)
    assert not ExDyna(mode="paper").can_be_static()
    assert ExDyna().can_be_static()
