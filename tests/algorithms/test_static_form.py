"""The static form of all methods that have it: what it delivers, what it sends, and what has no room."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

import pytest
import torch
from tritoncomm import (
    DGC,
    ConfigurationError,
    ExDyna,
    GaussianK,
    GTopk,
    HardThreshold,
    Hierarchical,
    MiCRO,
    NonFiniteError,
    OkTopk,
    ProtocolMismatchError,
    RandomBlock,
    RandomK,
    Recipe,
    SIDCo,
    SimulatedWorld,
    SparDL,
    TopkAllgather,
    TopkDSA,
    Warmup,
)
from tritoncomm.algorithms.base import StaticRecipe
from tritoncomm.algorithms.exdyna import ExDynaState
from tritoncomm.algorithms.spardl_teams import Place
from tritoncomm.scheduler.cost import Flow
from tritoncomm.scheduler.rounds import AllGather, Op
from tritoncomm.scheduler.wire import PLAIN

import laws
from depth import trials
from recipes import always_packed, under_test

AMPLE = 1000.0  # capacity of ExDyna that no step reaches
STATIC = [
    name for name, recipe in under_test(0.1).items() if isinstance(recipe, StaticRecipe) and recipe.static is True
]
# Recipes and world sizes. In most of them neither blocks nor budgets have the same size.
SAME = [
    (TopkAllgather(density=0.05), 5),
    (TopkAllgather(density=0.05, packed=True), 8),
    (TopkAllgather(density=0.05, values="4bit"), 3),
    *((GTopk(density=0.05), world_size) for world_size in (1, 2, 5, 8)),
    (GTopk(density=0.05, packed=True), 7),
    (GTopk(density=0.05, values="4bit"), 6),
    *((DGC(density=0.05), world_size) for world_size in (1, 5)),
    (DGC(density=0.05, nesterov=True, masking=False, packed=True), 4),
    (DGC(density=0.05, clip_norm=5.0, clip_scale="inv_sqrtP", values="4bit"), 3),
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
    (ExDyna(density=0.05, capacity=AMPLE, rebalance="pair_ratio", threshold_rule="ref"), 4),
    (MiCRO(density=0.05, capacity=AMPLE), 7),
    *((HardThreshold(density=0.05, static_room=20.0), world_size) for world_size in (1, 2, 5)),
    (HardThreshold(density=0.05, threshold=2.0, static_room=20.0, packed=True), 4),
    (HardThreshold(density=0.05, static_room=20.0, values="4bit"), 3),
    *((GaussianK(density=density), 5) for density in (0.001, 0.05, 0.3)),
    (GaussianK(density=0.05), 1),
    (GaussianK(density=0.05, max_ratio=1.26, packed=True), 4),
    (GaussianK(density=0.05, max_ratio=9.0, values="4bit"), 3),
    *((SIDCo(density=density), 5) for density in (0.002, 0.05, 0.3)),
    (SIDCo(density=0.05, max_ratio=1.0, packed=True), 4),
    (SIDCo(density=0.05, values="4bit"), 3),
    *((RandomK(density=0.05, values=values), 5) for values in ("fp32", "8bit", "4bit")),
    (RandomK(density=0.05, values="4bit"), 1),
    *((RandomBlock(density=0.05, mode=mode, values="8bit", reduced_lr=True), 7) for mode in ("perm", "wrap")),
    (RandomBlock(density=0.05, reduced_lr=True), 4),
    *((TopkDSA(density=0.05, static_room=20.0), world_size) for world_size in (1, 2, 3, 5, 8)),
    *((TopkDSA(density=0.05, static_room=20.0, dense_switch=switch), 7) for switch in (0.0, 1.0)),
    (TopkDSA(density=0.02, static_room=4.0, packed=True), 4),
    (always_packed(TopkDSA(density=0.02, static_room=3.0, values="4bit")), 3),
    (always_packed(TopkDSA(density=0.05, static_room=20.0, dense_switch=0.0, values="2bit")), 6),
]


def named(entry: tuple[Recipe, int]) -> str:
    """Return a name for the test report."""
    recipe, world_size = entry
    fields = {f.name: getattr(recipe, f.name) for f in dataclasses.fields(recipe)}
    changed = [f"{f.name}={fields[f.name]}" for f in dataclasses.fields(recipe) if fields[f.name] != f.default]
    return f"{recipe.name}-{world_size}-{','.join(changed[1:])}"


def heavy(world_size: int, numel: int, seed: int) -> torch.Tensor:
    """Return gradients with heavy tails, whose sums are not zero."""
    return next(laws.Case(world_size, numel, ("random",), seed=seed, exact=False).gradients())


@pytest.mark.parametrize("entry", SAME, ids=named)
@pytest.mark.parametrize("numel", trials([1003], [1003, 4000]))
def test_same_as_the_exact_form(entry: tuple[StaticRecipe, int], numel: int) -> None:
    """With room for all entries, both forms deliver the same bits, and keep the same residuals and states."""
    recipe, world_size = entry
    exact, static = (
        SimulatedWorld(dataclasses.replace(recipe, static=static), world_size, numel) for static in (False, True)
    )
    for step in range(6):
        gradients = heavy(world_size, numel, step)
        expected, means = exact.step(gradients), static.step(gradients)
        assert len(means[0]) > 0
        assert all(laws.same_vector(mean, expected[0]) for mean in means)
        assert laws.same_bits(static.residuals, exact.residuals)
        for one, other in zip(static.workers, exact.workers, strict=True):
            assert one.algorithm.state == other.algorithm.state
            assert one.accumulator.selected == other.accumulator.selected
            assert one.algorithm.report.items() <= other.algorithm.report.items()


def _most(measured: list[dict[str, Flow]]) -> dict[str, Flow]:
    """Return the most that any rank has sent and received in each phase."""
    phases = {phase: [flows.get(phase, Flow()) for flows in measured] for flows in measured for phase in flows}
    return {phase: Flow(max(f.sent for f in flows), max(f.received for f in flows)) for phase, flows in phases.items()}


@pytest.mark.parametrize("name", [name for name in STATIC if "oktopk" not in name])
@pytest.mark.parametrize("world_size", trials([1, 2, 5, 8], [1, 2, 5, 8, 12]))
def test_traffic_is_predicted_exactly(name: str, world_size: int) -> None:
    """Every phase of every rank has the predicted traffic in both directions, whatever the gradients are.

    Ok-Topk has the same test for its steps that reuse thresholds. Others depend on counts. The predicted traffic of
    gTop-k is the most that any rank of its tree has.
    """
    recipe = under_test(0.05)[name]
    case = laws.fitted(laws.Case(world_size, 1003, ("zero", "random", "one-region", "ties", "one-entry")), recipe)
    world = laws.world_of(recipe, case)
    for gradients in case.gradients():
        forecasts = world.predicted_traffic
        world.step(gradients)
        measured = [
            {phase: Flow(sent, meter.received_by_phase[phase]) for phase, sent in meter.sent_by_phase.items()}
            for meter in world.scheduler.meters
        ]
        if "gtopk" in name:
            measured = [_most(measured)] * case.world_size
        for found, forecast in zip(measured, forecasts, strict=True):
            assert found == {phase: flow for phase, flow in forecast.phases.items() if flow.sent.messages}


def test_every_method_with_a_static_form_is_tested() -> None:
    """No method that claims to have the form is missing here."""
    tested = {under_test(0.1)[name].name for name in STATIC}
    assert tested == {
        recipe.name
        for recipe in under_test(0.1).values()
        if isinstance(recipe, StaticRecipe) and recipe.can_be_static()
    }


@pytest.mark.parametrize("recipe", [DGC(static=True), Warmup(recipe=DGC(static=True), steps=3)])
def test_no_static_form_between_nodes(recipe: Recipe) -> None:
    """A hierarchical exchange refuses a method with messages of a fixed length, also inside of a warm-up."""
    with pytest.raises(ConfigurationError, match="a hierarchical exchange has no static form: leave it out"):
        Hierarchical(recipe=recipe, node_size=2)


@pytest.mark.parametrize("shift", [0.0, 0.3, 5.0])
@pytest.mark.parametrize("recipe", [GaussianK(density=0.02), SIDCo(density=0.02)], ids=lambda recipe: recipe.name)
def test_fit_without_a_tail(recipe: StaticRecipe, shift: float) -> None:
    """If there is no tail to fit, both forms deliver the k largest values, ties by index."""
    signs = torch.ones(3, 200)
    signs[:, ::2] = -1.0
    worlds = [SimulatedWorld(dataclasses.replace(recipe, static=static), 3, 200) for static in (False, True)]
    (expected, *_), (mean, *_) = (world.step(signs + shift) for world in worlds)
    assert len(expected) > 0
    assert laws.same_vector(mean, expected)
    assert laws.same_bits(*(world.residuals for world in worlds))
    if not shift:
        assert mean.indices.tolist()[: len(expected)] == [0, 1, 2, 3]
    reports = [world.workers[2].algorithm.report["passed"] for world in worlds]
    assert reports[0] == reports[1]


def test_a_fit_that_sees_too_few_entries_has_no_static_form() -> None:
    """The fit counts up to 1.25 times k entries."""
    assert not GaussianK(max_ratio=1.25).can_be_static()
    with pytest.raises(ConfigurationError, match=r"GaussianK\(static=True\): gaussiank has no static form"):
        GaussianK(max_ratio=1.25, static=True)


def test_more_entries_than_a_hard_threshold_has_room_for() -> None:
    """Each rank sends its largest entries. The others stay, and the report has the number of all."""
    recipe = HardThreshold(density=0.05, threshold=0.5, static=True, static_room=2.0)
    world, gradients = SimulatedWorld(recipe, 2, 100), heavy(2, 100, 0)
    assert int((gradients.abs() >= 0.5).sum(1).min()) > 10
    mean = world.step(gradients)[0]
    for residual, gradient in zip(world.residuals, gradients, strict=True):
        sent = residual != gradient
        assert int(sent.sum()) == 10
        assert not residual[sent].any()
        assert gradient[sent].abs().min() >= gradient[~sent].abs().max()
    assert len(mean) <= 20
    found = [worker.algorithm.report["passed"] for worker in world.workers]
    assert found == (gradients.abs() >= 0.5).sum(1).tolist()


@pytest.mark.parametrize("values", ["fp32", "8bit"])
@pytest.mark.parametrize("dense_switch", [0.0, 1.0])
def test_a_busy_region_delivers_the_largest_entries_of_every_rank(values: str, dense_switch: float) -> None:
    """If all entries lie in one region, each rank sends its largest ones there. The others stay in its residual."""
    recipe = TopkDSA(density=0.05, static=True, static_room=2.0, dense_switch=dense_switch, values=values)
    world, gradients = SimulatedWorld(recipe, 5, 1000), heavy(5, 1000, 0)
    gradients[:, :600] = gradients[:, 800:] = 0  # all entries in the region of rank 3
    mean = world.step(gradients)[0]
    room, expected = 20, torch.zeros(5, 1000)
    for rank, gradient in enumerate(gradients):
        largest = gradient.abs().argsort(descending=True, stable=True)[:room]
        expected[rank, largest] = gradient[largest]
        if values == "fp32":
            assert torch.equal(world.residuals[rank], gradient - expected[rank])
    assert world.workers[0].algorithm.is_static
    assert mean.indices.tolist() == expected.any(0).nonzero().flatten().tolist()
    if values == "fp32":
        assert torch.equal(mean.to_dense(), expected.sum(0) / 5)
    error = (world.residuals.double().sum(0) + 5 * mean.to_dense().double() - gradients.double().sum(0)).abs().max()
    assert error < 1e-5
    for _ in range(20):
        world.step(torch.zeros(5, 1000))
    assert float(world.residuals.abs().max()) < 0.01 * float(gradients.abs().max())


@pytest.mark.parametrize("phase", ["split-and-reduce", "all-gather"])
@pytest.mark.parametrize("beyond", [False, True])
def test_an_index_of_the_next_region_is_rejected(phase: str, *, beyond: bool) -> None:
    """Regions differ in width by one. An index that only fits the widest one is rejected, and the last one is not."""
    recipe = TopkDSA(density=0.01, static=True, packed=False, dense_switch=1.0)  # 10 entries, regions of 250 and 251
    world, gradients = SimulatedWorld(recipe, 4, 1001), torch.zeros(4, 1001)
    gradients[:, [3, 260, 510, 760]] = torch.ones(4, 4)

    def damage(_: int, ops: Sequence[Op]) -> None:
        for op in ops:
            if getattr(op, "phase", "") == phase:
                op.tensor[op.tensor == 260] = 500 if beyond else 499  # the region ends at 500

    if beyond:
        with pytest.raises(ProtocolMismatchError):
            world.step(gradients, before_round=damage)
    else:
        assert all(index in world.step(gradients, before_round=damage)[0].indices.tolist() for index in (3, 499))


@pytest.mark.parametrize("values", ["fp32", "8bit", "4bit"])
def test_sums_whose_remainder_could_overflow_are_refused(values: str) -> None:
    """What rounding cuts off from a sum of more than 2^126 may not be finite, so both forms refuse it."""
    gradients = torch.zeros(3, 60)
    gradients[:, 7] = 1.1e38
    for static in (False, True):
        world = SimulatedWorld(always_packed(TopkDSA(density=0.1, values=values, static=static)), 3, 60)
        if values == "fp32":
            assert float(world.step(gradients)[0].to_dense()[7]) == pytest.approx(1.1e38)
            continue
        with pytest.raises(NonFiniteError):
            world.step(gradients)
        assert not world.residuals.any()


def test_lengths_of_topk_dsa() -> None:
    """Plain messages have two words for each entry that a rank has room for, and for each sum of an owner."""
    recipe = TopkDSA(density=0.05, static=True, static_room=1.5, packed=False, dense_switch=1.0)
    phases = recipe.build(1000).predicted_traffic(5).phases  # k = 50, room = 15, at most 75 sums
    assert phases["split-and-reduce"].sent.bytes == 4 * (4 * 2 * 15)
    assert phases["all-gather"].sent.bytes == 4 * (4 * 2 * 75)
    # A rank cannot send more than k entries, and a region has no more sums than coordinates.
    phases = dataclasses.replace(recipe, static_room=9.0).build(1000).predicted_traffic(5).phases
    assert phases["split-and-reduce"].sent.bytes == 4 * (4 * 2 * 50)
    assert phases["all-gather"].sent.bytes == 4 * (4 * 200)  # dense, as 5 * 2 * 200 words are not fewer than 1000
    phases = dataclasses.replace(recipe, static_room=2.0).build(1000).predicted_traffic(5).phases
    assert phases["all-gather"].sent.bytes == 4 * (4 * 200)  # dense, as 5 * 2 * 100 words are as many as 1000
    assert recipe.build(1000).predicted_traffic(5) == recipe.build(1000).predicted_traffic(5, ordinary=True)


@pytest.mark.parametrize("method", [TopkDSA, HardThreshold, OkTopk])
def test_a_room_of_any_size(method: type[Recipe]) -> None:
    """Any finite room is legal: it ends at the number of entries. What no float holds is rejected by name."""
    world = SimulatedWorld(method(density=0.1, static=True, static_room=1e308), 3, 100)
    gradients = heavy(3, 100, 0)
    mean = world.step(gradients)[0].to_dense()
    assert torch.allclose(3 * mean + world.residuals.sum(0), gradients.sum(0), rtol=1e-4, atol=1e-4)
    for room in (float("inf"), float("nan"), 10**400):
        with pytest.raises(ConfigurationError, match="static_room"):
            method(density=0.1, static_room=room)


def test_the_first_threshold_names_every_rank() -> None:
    """A NaN on one rank hides no Inf on another in the step that sets the threshold."""
    gradients = torch.zeros(3, 10)
    gradients[0, 3], gradients[1, 4] = float("inf"), float("nan")
    for static in (False, True):
        world = SimulatedWorld(HardThreshold(density=0.1, static=static), 3, 10)
        with pytest.raises(NonFiniteError) as caught:
            world.step(gradients)
        assert caught.value.ranks == (0, 1)
        assert not world.residuals.any()


@pytest.mark.parametrize("capacity", [1.0, 1.5])
def test_entries_without_room_stay(capacity: float) -> None:
    """If more entries pass than a rank has room for, it delivers its largest ones. The rest stays in the residuals."""
    world_size, numel, density = 4, 800, 0.05
    recipe = ExDyna(density=density, capacity=capacity, lift=1.0, threshold_rule="off", static=True)
    world = SimulatedWorld(recipe, world_size, numel)
    blocks = (7, 7, 6, 5)
    for worker in world.workers:
        worker.algorithm.state = ExDynaState(world_size=4, threshold=0.01, settled=True, blocks=blocks)
    gradients = heavy(world_size, numel, 0)
    gradients[2:, :] = 0  # two partitions with too many entries, two without any
    mean = world.step(gradients)[0]
    algorithm = world.workers[0].algorithm
    room = -(-int(capacity * numel * density) // world_size)
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


def test_concentrated_gradients_are_delivered() -> None:
    """If all gradients lie in 1/32 of the vector, borders move until the fixed room of all ranks is used."""
    numel, world_size = 16_384, 8
    world = SimulatedWorld(ExDyna(density=0.01, static=True), world_size, numel)
    generator = torch.Generator().manual_seed(0)
    delivered = []
    for _ in range(130):
        gradients = torch.zeros(world_size, numel)
        gradients[:, : numel // 32] = torch.randn(world_size, numel // 32, generator=generator)
        delivered.append(len(world.step(gradients)[0]) / (numel * 0.01))
    assert sum(delivered[80:]) / 50 > 0.6


def test_segments() -> None:
    """A bag that wraps around is selected at once. Its gap has no budget."""
    place = Place(5, 1, 7, [0, 10, 20, 30, 40, 50, 60, 71], [1, 2, 3, 4, 5, 6, 7], PLAIN)
    assert place.segments([2, 3]) == ([20, 30, 40], [3, 4], None)
    assert place.segments([0, 1, 5, 6]) == ([0, 10, 20, 50, 60, 71], [1, 2, 0, 6, 7], 2)
    assert place.segments(list(range(7))) == (place.cuts, place.budgets, None)


def changed(world: SimulatedWorld, gradients: torch.Tensor, source: int, place: int, word: int) -> None:
    """Run a step in which one word of one rank's message in the last all-gather of entries is another."""

    def change(_: int, ops: Sequence[Op]) -> None:
        if isinstance(ops[0], AllGather) and ops[0].phase in ("indices", "all-gather"):
            ops[source].tensor[place] = word

    world.step(gradients, before_round=change)


@pytest.mark.parametrize("word", [-7, 2, 1003])
def test_disordered_indices_are_rejected(word: int) -> None:
    """ExDyna rejects indices outside of the vector, and indices that do not ascend in partition order."""
    world = SimulatedWorld(ExDyna(density=0.05, static=True), 3, 1003)
    before = world.residuals
    with pytest.raises(ProtocolMismatchError, match=r"ranks \[0, 1, 2\] received malformed messages"):
        changed(world, heavy(3, 1003, 0), 2, 0, word)
    assert laws.same_bits(world.residuals, before)
    assert [str(error) for error in world.scheduler.raised.values()] == [str(world.scheduler.raised[0])] * 3


@pytest.mark.parametrize("wrong", [-1, 1004])
def test_counts_out_of_range_are_rejected(wrong: int) -> None:
    """ExDyna rejects a number of passed entries that no rank can have. The next borders would depend on it."""
    world = SimulatedWorld(ExDyna(density=0.05, static=True), 3, 1003)

    def change(_: int, ops: Sequence[Op]) -> None:
        if ops[0].phase == "verdict":
            ops[1].tensor[3] = wrong

    with pytest.raises(ProtocolMismatchError, match=rf"received counts \[{wrong}\] from ranks \[1\]"):
        world.step(heavy(3, 1003, 0), before_round=change)
    assert world.workers[0].algorithm.state == ExDynaState()


def test_an_index_of_the_next_block_is_rejected() -> None:
    """SparDL rejects the first index of the next block, although it is in the span of a wider block."""
    numel, world_size = 1003, 5  # blocks of 200, 201, 200, 201 and 201
    world = SimulatedWorld(SparDL(density=0.05, static=True), world_size, numel)
    with pytest.raises(ProtocolMismatchError, match="malformed"):
        changed(world, heavy(world_size, numel, 0), 0, 9, 200)
    changed(world, heavy(world_size, numel, 0), 0, 9, 199)


def test_errors_of_spardl_do_not_claim_that_gradients_are_finite() -> None:
    """A NaN of a rank that SparDL cannot name is not reported as an overflow."""
    world = SimulatedWorld(SparDL(density=0.05, static=True), 4, 400)
    gradients = heavy(4, 400, 0)
    gradients[2, 17] = torch.nan
    with pytest.raises(NonFiniteError, match="a gradient or a sum of gradients contains NaN or Inf"):
        world.step(gradients)


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
