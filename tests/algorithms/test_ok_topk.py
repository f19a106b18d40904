"""Ok-Topk: the worked example, an independent oracle, its volume, and what its static form has no room for."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from itertools import pairwise

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from ok_topk_oracle import Oracle
from tritoncomm import OkTopk, ProtocolMismatchError, SimulatedWorld, recipe
from tritoncomm.primitives.accumulator import Accumulator
from tritoncomm.primitives.region_cuts import consensus_cuts, offsets, propose_cuts, widest
from tritoncomm.scheduler.cost import HEADER_WORDS, WORD
from tritoncomm.scheduler.rounds import Op
from tritoncomm.scheduler.simulated import SimulatedScheduler
from tritoncomm.step.exchange.feedback import ErrorFeedback

import laws
from depth import examples, trials
from laws import heavy_tailed, normal
from ok_topk_variants import OkTopkVariant
from recipes import SHORT
from tritoncomm_kernels import Entries

WORKED = torch.tensor(
    [
        [9, -1, 0, 7, 2, -6, 1, 0, 5, -2, 3, 0],
        [0, 8, -3, 6, -7, 1, 0, 10, -1, 2, 0, 4],
        [-5, 0, 1, 11, 0, -9, 2, 6, 0, 0, -3, 1],
    ],
    dtype=torch.float32,
)
AMPLE = {"local_cap": 50.0, "global_cap": 50.0}  # no cap binds


def report(world: SimulatedWorld) -> dict[str, float]:
    """Return what the method reports of the last step."""
    return world.workers[0].algorithm.report


def after(recipe: OkTopk, world_size: int, numel: int) -> SimulatedWorld:
    """Return a world that has taken three steps. The fourth step is the first that reuses thresholds."""
    world = SimulatedWorld(recipe, world_size, numel)
    for step in range(3):
        world.step(heavy_tailed(world_size, numel, step))
    return world


def test_worked_example() -> None:
    """Every figure matches the worked example of appendix C with three workers and twelve coordinates."""
    world = SimulatedWorld(recipe("oktopk", density=4 / 12), 3, 12)
    means = world.step(WORKED)
    for mean in means:
        assert mean.indices.tolist() == [1, 3, 5, 7]
        assert torch.equal(mean.values, torch.tensor([8.0, 24.0, -15.0, 16.0]) / 3)
    assert [state.local_threshold for state in laws.states_of(world)] == [5, 6, 5]
    assert all(state.cuts == (0, 3, 4, 12) for state in laws.states_of(world))
    assert all(state.global_threshold == 8 for state in laws.states_of(world))
    assert world.residuals.tolist() == [
        [9, -1, 0, 0, 2, 0, 1, 0, 5, -2, 3, 0],
        [0, 0, -3, 0, -7, 1, 0, 0, -1, 2, 0, 4],
        [-5, 0, 1, 0, 0, 0, 2, 0, 0, 0, -3, 1],
    ]
    selections = [[0, 3, 5, 8], [1, 3, 4, 7], [0, 3, 5, 7]]
    for chosen in selections:
        at = offsets(torch.tensor(chosen, dtype=torch.int32), (0, 3, 4, 12))
        assert [b - a for a, b in pairwise(at)] == [1, 1, 2]


oracle_recipes = st.builds(
    OkTopkVariant,
    density=st.sampled_from([0.01, 0.05, 0.1, 0.3]),
    repartition_every=st.integers(1, 6),
    reevaluate_every=st.integers(1, 9),
    bucket_width=st.integers(1, 5),
    local_cap=st.sampled_from([1.0, 1.5, 2.0, 50.0]),
    global_cap=st.sampled_from([1.0, 1.3, 2.0, 50.0]),
    balance_trigger=st.sampled_from([1.0, 1.5, 4.0, math.inf]),
    skew_trigger=st.sampled_from([1.0, 2.0, 100.0]),
    drift_low=st.sampled_from([0.0, 0.5]),
    drift_high=st.sampled_from([1.5, 2.0, 1e9]),
    correct_thresholds=st.booleans(),
    strict_volume=st.booleans(),
    force_sparse=st.just(value=True),
)


def situation(
    families: Sequence[str], world_size: int = 4, numel: int = 100, **fields: object
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return an example of the oracle test: one row of the specification's table "situation by situation"."""
    return example(OkTopkVariant(**{"density": 0.1} | fields), laws.Case(world_size, numel, tuple(families)), 1)


@given(oracle_recipes, laws.cases(max_world_size=9), st.integers(1, 9))
@situation(("random",) * 30, 7, 120)
@situation(("random", "one-region") * 4, reevaluate_every=64, drift_low=0.0)  # one region gets all: skew
@situation(("random", "ties", "one-region") * 2, 8, density=0.03)  # k < P: equal regions
@situation(("zero", "random", "zero", "zero", "random"), 3, reevaluate_every=1)  # nothing to re-evaluate
@situation(("sparse", "one-entry", "zero", "random"), 3, density=0.3)  # fewer non-zeros than k
@situation(("ties", "identical", "ties", "cancelling"), correct_thresholds=False)  # equal magnitudes and sums of 0
@situation(("random",) * 40, 3, 60, reevaluate_every=32, drift_low=0.0, drift_high=1e9)  # the whole schedule
@examples(12)
def test_oracle(chosen: OkTopkVariant, case: laws.Case, repeats: int) -> None:
    """Indices, sums, residuals, cuts and decisions equal those of the plain Python oracle in every step."""
    case = laws.Case(case.world_size, case.numel, case.families * repeats, case.exponent, case.seed)
    world = SimulatedWorld(chosen, case.world_size, case.numel)
    oracle = Oracle(chosen, case.world_size, case.numel)
    for gradient in case.gradients():
        mean = world.step(gradient)[0]
        expected = oracle.step(gradient.tolist())
        assert mean.indices.tolist() == sorted(expected.sums)
        sums = torch.tensor([expected.sums[j] for j in sorted(expected.sums)])
        assert torch.equal(mean.values, sums / case.world_size)
        assert torch.equal(world.residuals, torch.tensor(expected.residuals))
        algorithm = world.workers[0].algorithm
        assert all(len(chosen) <= max(algorithm.local_cap, algorithm.k) for chosen in expected.selected)
        if case.world_size > 1:
            assert len(mean) <= algorithm.global_cap
            assert algorithm.report["reevaluated"] == expected.reevaluated
            assert algorithm.state.cuts == tuple(oracle.cuts)


@pytest.mark.parametrize(
    ("values", "static"), [("4bit", False), ("1bit", True), *trials([], [("4bit", True), ("1bit", False)])]
)
def test_about_k_entries_are_delivered(values: str, static: bool) -> None:
    """Nearly k entries are delivered per step although residuals grow, also after gradients have shrunk."""
    world = SimulatedWorld(OkTopk(density=0.01, static=static, values=values), 4, 20_000)
    delivered, candidates, again = [], 0.0, 0.0
    for step in range(60):
        gradient = heavy_tailed(4, 20_000, step) * torch.linspace(2, 0.1, 20_000) * (0.1 if step >= 20 else 1.0)
        delivered.append(len(world.step(gradient)[0]))
        again += report(world)["reevaluated"]
        candidates += report(world)["candidates"] if step >= 30 else 0.0
    assert sum(delivered[30:]) / 30 > 0.9 * 200
    assert candidates / 30 < 2.5 * 200
    assert again < 30


@pytest.mark.parametrize("static", [False, True])
def test_reevaluation_does_not_grow_with_the_world_size(static: bool) -> None:
    """A re-evaluation sends histograms whose length is fixed, and then k entries: less than it takes to gather all."""
    used = {}
    for world_size in (8, 16):
        world = SimulatedWorld(OkTopk(density=0.02, reevaluate_every=1, static=static), world_size, 50_000)
        for step in range(3):
            world.step(normal(world_size, 50_000, seed=step))
        meter = world.scheduler.meters[0]
        used[world_size] = sum(meter.received_by_phase[phase].bytes for phase in ("histogram", "all-gather"))
        assert meter.received_by_phase["histogram"].bytes < 9 * 4096
    assert used[16] < (2 if static else 1.1) * used[8]


@pytest.mark.parametrize(
    ("recipe", "world_size", "numel"),
    [
        *((OkTopkVariant(balance_trigger=trigger), 5, 1000) for trigger in (1.0, 4.0, math.inf)),
        (OkTopkVariant(balance_trigger=math.inf, skew_trigger=1e9, drift_low=0.0), 8, 4000),
        (OkTopk(static=True, static_room=8.0), 8, 20_000),
    ],
    ids=["balance", "balance late", "never balance", "no repartition", "static"],
)
def test_strict_volume_bounds_traffic(recipe: OkTopk, world_size: int, numel: int) -> None:
    """With strict volume, every reuse step needs at most 6k(P-1)/P words, plus counts, sizes and headers.

    The static form needs nothing else. A result in a single region is balanced for any trigger.
    """
    recipe = dataclasses.replace(recipe, density=0.05, strict_volume=True, reevaluate_every=64)
    world, balanced, reused = SimulatedWorld(recipe, world_size, numel), False, 0
    families = ("random", "one-region", "random", "disjoint", "identical", "ties", "one-region") * 3
    most = WORD * 6 * world.workers[0].algorithm.k * (world_size - 1) / world_size
    for gradient in laws.Case(world_size, numel, families, seed=1).gradients():
        world.step(gradient)
        if report(world)["reevaluated"] or (recipe.static is True and report(world)["repartitioned"]):
            continue
        reused += 1
        balanced |= "balance" in world.scheduler.meters[0].sent_by_phase
        for traffic in (*world.traffic, *world.received):
            extra = WORD * (HEADER_WORDS * traffic.messages + (2 * 8 + 2 * 3) * world_size)
            assert traffic.bytes <= most + (0 if recipe.static is True else extra)
    assert reused > 5
    assert balanced or recipe.static is True


def test_empty_messages_are_never_posted() -> None:
    """With one entry in total, three of four owners get no message, and the fourth gets one from each peer."""
    gradient = torch.zeros(4, 100)
    gradient[:, 60] = 3.0
    world = SimulatedWorld(OkTopk(density=0.04), 4, 100)
    world.step(gradient)
    assert laws.states_of(world)[0].cuts == (0, 25, 50, 75, 100)
    received = [meter.received_by_phase["split-and-reduce"] for meter in world.scheduler.meters]
    assert [traffic.messages for traffic in received] == [0, 0, 3, 0]


def test_regions_are_summed_in_rotation_order() -> None:
    """The owner r of a region adds the ranks in the order r, r-1, r-2, ..., bit for bit on floats."""
    world_size, numel = 5, 300
    world = SimulatedWorld(OkTopkVariant(density=1.0, force_sparse=True, bucket_width=2), world_size, numel)
    gradient = normal(world_size, numel) * normal(world_size, numel, seed=1).exp()
    mean = world.step(gradient)[0]
    cuts = laws.states_of(world)[0].cuts
    expected = torch.zeros(numel)
    for owner in range(world_size):
        region = slice(cuts[owner], cuts[owner + 1])
        for shift in range(world_size):
            expected[region] += gradient[(owner - shift) % world_size, region]
    assert laws.same_bits(mean.values, (expected / world_size)[mean.indices.long()])
    assert len(mean) == numel


def test_each_rank_selects_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step makes one pass over the accumulator of each rank, not one per region."""
    passes = []
    for name in ("at_least", "top_k"):
        original = getattr(Accumulator, name)
        monkeypatch.setattr(Accumulator, name, lambda self, x, original=original: passes.append(1) or original(self, x))
    world = SimulatedWorld(OkTopk(density=0.1), 6, 100)
    for step in range(5):
        passes.clear()
        world.step(normal(6, 100, seed=step))
        assert len(passes) == 6


@pytest.mark.parametrize("width", [1, 2, 4, 100])
def test_reduction_overlaps_the_next_bucket(width: int) -> None:
    """Every bucket is posted before the previous one is reduced. There are ceil(P/W) of them."""
    kinds: list[str] = []

    def watch(_: int, ops: Sequence[Op]) -> None:
        kinds.extend([type(ops[0]).__name__] if ops[0].phase == "split-and-reduce" else [])

    SimulatedWorld(OkTopk(density=0.2, bucket_width=width), 7, 200).step(normal(7, 200), before_round=watch)
    assert kinds == ["Round", *["Post", "Wait"] * (math.ceil(7 / width) - 1)]


def test_world_size_change_forces_reevaluation() -> None:
    """After a change of the world size, all ranks re-evaluate thresholds and cuts."""
    workers = [ErrorFeedback(OkTopk(density=0.1).build(60)) for _ in range(5)]
    for seed, world_size in enumerate((5, 5, 5, 5, 3)):
        members = workers[:world_size]
        gradient = normal(world_size, 60, seed=seed)
        SimulatedScheduler(world_size).run([w.begin(gradient[r], r, world_size) for r, w in enumerate(members)])
        for worker in members:
            worker.commit()
    for worker in workers[:3]:
        assert worker.algorithm.report["reevaluated"] == worker.algorithm.report["repartitioned"] == 1
        assert len(worker.algorithm.state.cuts) == 4


def test_indices_beyond_the_integers_of_fp32() -> None:
    """Indices above 2^24 are delivered exactly. Cuts near 2^31 are summed over ranks without overflow."""
    numel = 2**24 + 64
    gradient = torch.zeros(2, numel)
    places = [2**24 + 1, 2**24 + 3, numel - 1]
    gradient[0, places] = torch.tensor([2.0, 4.0, 6.0])
    mean = SimulatedWorld(OkTopk(density=3.5 / numel), 2, numel).step(gradient)[0]
    assert mean.indices.tolist() == places
    assert mean.values.tolist() == [1.0, 2.0, 3.0]
    near = 2**31 - 5
    proposal = propose_cuts(Entries(torch.tensor([near - 2, near - 1, near], dtype=torch.int32), torch.ones(3)), 3)
    assert consensus_cuts((proposal * 3).tolist(), 2**31 - 1) == (0, near - 1, near, 2**31 - 1)
    with pytest.raises(ValueError, match=r"numel=2147483648: .*fully_shard"):
        OkTopk().build(2**31)


@pytest.mark.parametrize("values", ["fp32", "4bit"])
def test_what_does_not_fit_stays_in_the_residual(values: str) -> None:
    """Of more entries than a message has room for, the largest are sent. The others stay in the residual, unchanged."""
    world = after(OkTopkVariant(density=0.1, static=True, values=values, drift_low=0.0, reevaluate_every=64), 4, 400)
    low, high = laws.states_of(world)[0].cuts[1:3]
    room = world.workers[0].algorithm.caps.pair_room(4)
    assert room < high - low
    gradient = -world.residuals
    gradient[0, low:high] += 1000.0 + torch.arange(high - low).flip(0)
    held = world.residuals + gradient
    mean = world.step(gradient)[0].trimmed()
    assert not report(world)["reevaluated"]
    assert mean.indices.tolist() == list(range(low, low + room))
    left = world.residuals[0]
    assert torch.equal(left[low + room : high], held[0, low + room : high])
    if values == "fp32":
        assert not left[low : low + room].any()


def test_more_sums_than_the_cap() -> None:
    """If the owners send more sums than the global cap, the largest of them are delivered, on all ranks."""
    world = SimulatedWorld(OkTopk(density=0.05, static=True, local_cap=2.0, **SHORT), 4, 800)
    counts = []
    for step in range(24):
        mean = world.step(heavy_tailed(4, 800, step))[0]
        if not report(world)["reevaluated"] and not report(world)["repartitioned"]:
            counts.append((report(world)["candidates"], len(mean)))
    assert all(delivered <= 40 for _, delivered in counts)
    trimmed = [delivered for candidates, delivered in counts if candidates > 40]
    assert len(trimmed) > 3
    assert {*trimmed} == {40}


def test_loads_include_what_did_not_fit() -> None:
    """An owner that gets more than twice the mean causes a repartition, although the messages to it are full."""
    world = after(OkTopkVariant(density=0.05, static=True, drift_low=0.0), 4, 800)
    assert not any(state.force_repartition for state in laws.states_of(world))
    cuts, gradient = laws.states_of(world)[0].cuts, -world.residuals
    assert world.workers[0].algorithm.caps.pair_room(4) < 28
    for rank, counts in enumerate([(0, 14, 13, 13), (28, 4, 4, 4), (28, 4, 4, 4), (28, 4, 4, 4)]):
        for owner, count in enumerate(counts):
            gradient[rank, cuts[owner] : cuts[owner] + count] += 1e6
    world.step(gradient)
    assert not report(world)["reevaluated"]
    assert report(world)["region_imbalance"] == 3 * 28 / 40
    assert all(state.force_repartition for state in laws.states_of(world))
    world.step(heavy_tailed(4, 800, 10))
    assert report(world)["repartitioned"]
    assert laws.states_of(world)[0].cuts != cuts


def test_sums_without_room_count_as_candidates() -> None:
    """All sums that reach the threshold count, although only some of them have room in the owner's message."""
    world = after(OkTopkVariant(density=0.05, static=True, drift_low=0.0), 4, 800)
    caps, cuts = world.workers[0].algorithm.caps, laws.states_of(world)[0].cuts
    low = max(cuts[:-1], key=lambda cut: cuts[cuts.index(cut) + 1] - cut)
    sent, gradient = caps.pair_room(4), -world.residuals
    assert 4 * sent <= widest(cuts)
    for rank in range(4):
        gradient[rank, low + rank * sent : low + (rank + 1) * sent] += 1e6
    mean = world.step(gradient)[0]
    assert not report(world)["reevaluated"]
    assert len(mean) == caps.owner_room(4) < 4 * sent
    assert report(world)["candidates"] == 4 * sent


@pytest.mark.parametrize("phase", ["split-and-reduce", "all-gather"])
def test_an_index_behind_its_region(phase: str) -> None:
    """An index behind the region of its owner is rejected, also if the widest region would hold it."""
    world = after(OkTopk(density=0.1, static=True), 3, 600)
    cuts, residuals = laws.states_of(world)[0].cuts, world.residuals
    owner = min(range(3), key=lambda rank: cuts[rank + 1] - cuts[rank])
    assert cuts[owner + 1] - cuts[owner] < widest(cuts)

    def damage(_: int, ops: Sequence[Op]) -> None:
        if ops[0].phase == phase:
            into_region = phase == "split-and-reduce"
            message = ops[(owner + 1) % 3].tensor[owner, :-1] if into_region else ops[owner].tensor[: -3 - 3]
            indices = message[: message.numel() // 2]
            indices[1:], indices[0] = -1, cuts[owner + 1]

    with pytest.raises(ProtocolMismatchError, match="malformed"):
        world.step(heavy_tailed(3, 600, 9), before_round=damage)
    assert len(world.scheduler.raised) == 3
    assert laws.same_bits(world.residuals, residuals)
