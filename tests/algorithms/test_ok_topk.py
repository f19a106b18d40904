"""Ok-Topk: the worked example, an independent oracle, and the invariants."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from ok_topk_oracle import Oracle
from tritoncomm import OkTopk, SimulatedWorld, Warmup, recipe
from tritoncomm.algorithms.ok_topk_rules import WARM_START
from tritoncomm.primitives.region_cuts import offsets
from tritoncomm.scheduler.cost import HEADER_WORDS, WORD

import laws
from depth import examples
from ok_topk_variants import OkTopkVariant

HEADER = WORD * HEADER_WORDS
WORKED = torch.tensor(
    [
        [9, -1, 0, 7, 2, -6, 1, 0, 5, -2, 3, 0],
        [0, 8, -3, 6, -7, 1, 0, 10, -1, 2, 0, 4],
        [-5, 0, 1, 11, 0, -9, 2, 6, 0, 0, -3, 1],
    ],
    dtype=torch.float32,
)


def normal(world_size: int, numel: int, seed: int = 0) -> torch.Tensor:
    """Return normally distributed gradients."""
    return torch.randn(world_size, numel, generator=torch.Generator().manual_seed(seed))


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


@given(oracle_recipes, laws.cases(max_world_size=9), st.integers(1, 9))
@example(OkTopkVariant(density=0.1), laws.Case(7, 120, ("random",) * 30), 1)
@examples(50)
def test_oracle(chosen: OkTopkVariant, case: laws.Case, repeats: int) -> None:
    """Indices, sums, residuals and decisions equal those of the plain Python oracle in every step."""
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


@pytest.mark.parametrize("world_size", [2, 3, 5, 8])
def test_reevaluation_keeps_exactly_the_largest(world_size: int) -> None:
    """A re-evaluation step delivers min(k, candidates) entries, and none is smaller than a dropped one."""
    world = SimulatedWorld(OkTopk(density=0.05), world_size, 400)
    acc = normal(world_size, 400)
    (mean, *_) = world.step(acc)
    assert len(mean) == 20
    reduced = torch.zeros(400)
    for row in acc:
        top = row.abs().topk(20).indices
        reduced[top] += row[top]
    reduced[mean.indices.long()] = 0
    assert (mean.values * world_size).abs().min() >= reduced.abs().max()


@pytest.mark.parametrize("width", [1, 2, 3, 7, 64])
@pytest.mark.parametrize("trigger", [1.0, math.inf])
def test_bucket_width_and_balancing_keep_the_result(width: int, trigger: float) -> None:
    """Bucket width and data balancing change neither the result nor the residuals."""
    control = SimulatedWorld(OkTopkVariant(density=0.1, balance_trigger=math.inf), 7, 300)
    world = SimulatedWorld(OkTopkVariant(density=0.1, balance_trigger=trigger, bucket_width=width), 7, 300)
    for step in range(12):
        gradient = normal(7, 300, step) * torch.linspace(3, 1, 300)
        assert laws.same_vector(world.step(gradient)[0], control.step(gradient)[0])
        assert laws.same_bits(world.residuals, control.residuals)


def test_reduction_overlaps_the_next_bucket() -> None:
    """Every bucket is posted before the previous one is reduced."""
    world = SimulatedWorld(OkTopk(density=0.2, bucket_width=2), 7, 200)
    kinds: list[str] = []

    def watch(_: int, round_: list[object]) -> None:
        if round_[0].phase == "split-and-reduce":
            kinds.append(type(round_[0]).__name__)

    gradient = normal(7, 200)
    world.step(gradient, before_round=watch)
    assert kinds == ["Round", *["Post", "Wait"] * (math.ceil(7 / 2) - 1)]


def test_scaling_by_a_power_of_two() -> None:
    """Scaled gradients give scaled results, residuals and thresholds, bit for bit."""
    small, large = (SimulatedWorld(OkTopk(density=0.1), 4, 200) for _ in range(2))
    for step in range(10):
        gradient = normal(4, 200, step)
        a, b = small.step(gradient)[0], large.step(gradient * 1024)[0]
        assert torch.equal(a.indices, b.indices)
        assert torch.equal(a.values * 1024, b.values)
        assert torch.equal(small.residuals * 1024, large.residuals)
    thresholds = [laws.states_of(world)[0].global_threshold for world in (small, large)]
    assert thresholds[1] == pytest.approx(1024 * thresholds[0], rel=1e-12)


def test_permuting_the_ranks() -> None:
    """The result does not depend on which rank holds which gradient."""
    case = laws.Case(6, 150, ("random",) * 8, seed=5)
    order = torch.tensor([3, 5, 0, 2, 4, 1])
    plain, permuted = (SimulatedWorld(OkTopk(density=0.1), 6, 150) for _ in range(2))
    for gradient in case.gradients():
        assert laws.same_vector(plain.step(gradient)[0], permuted.step(gradient[order])[0])
        assert torch.equal(plain.residuals[order], permuted.residuals)


def test_identical_workers() -> None:
    """With identical gradients, the result is their exact top-k, and all residuals are identical."""
    row = normal(1, 300)
    world = SimulatedWorld(OkTopk(density=0.1), 5, 300)
    mean = world.step(row.repeat(5, 1))[0]
    assert mean.indices.tolist() == sorted(row[0].abs().topk(30).indices.tolist())
    assert torch.allclose(mean.values, row[0][mean.indices.long()])
    assert all(torch.equal(residual, world.residuals[0]) for residual in world.residuals)


def test_few_disjoint_entries_are_delivered() -> None:
    """Disjoint supports of at most k entries in total are delivered completely."""
    gradient = torch.zeros(4, 100)
    for rank in range(4):
        gradient[rank, 7 * rank : 7 * rank + 5] = torch.arange(1.0, 6.0)
    world = SimulatedWorld(OkTopk(density=0.2), 4, 100)
    assert torch.equal(world.step(gradient)[0].to_dense(), gradient.mean(0))
    assert not world.residuals.any()


def test_density_one_on_the_sparse_path() -> None:
    """At density 1 with the sparse path forced, the mean plus the mean of the residuals is the dense mean."""
    case = laws.Case(5, 60, ("random", "cancelling", "random", "ties"))
    world = SimulatedWorld(OkTopkVariant(density=1.0, force_sparse=True), 5, 60)
    for gradient in case.gradients():
        held = gradient + world.residuals
        mean = world.step(gradient)[0]
        assert torch.equal(mean.to_dense() + world.residuals.sum(0) / 5, held.mean(0))


@pytest.mark.parametrize(("tau", "warmup"), [(1, 1), (3, 5), (8, 0), (20, 1), (32, 0), (32, 5)])
def test_reevaluation_schedule(tau: int, warmup: int) -> None:
    """Re-evaluation runs in sparse steps 0, 1, 2, 4, ... up to tau', then every tau'. Warm-up steps do not count."""
    inner = OkTopkVariant(density=0.1, reevaluate_every=tau, drift_low=0.0, drift_high=1e9)
    world = SimulatedWorld(Warmup(recipe=inner, steps=warmup), 3, 60)
    taken = []
    for step in range(warmup + 70):
        mean = world.step(normal(3, 60, step))[0]
        assert mean.is_full == (step < warmup)
        if step >= warmup and world.workers[0].algorithm.report["reevaluated"]:
            taken.append(step - warmup)
    powers = [2**i for i in range(7) if 2**i < tau]
    assert taken == sorted({0, *powers, *range(0, 70, tau)})


@pytest.mark.parametrize("warmup", [1, 3, 5])
def test_first_sparse_step_reevaluates(warmup: int) -> None:
    """The first sparse step re-evaluates and repartitions after a warm-up of any length."""
    world = SimulatedWorld(Warmup(recipe=OkTopk(density=0.1), steps=warmup), 4, 100)
    for step in range(warmup + 1):
        world.step(normal(4, 100, step))
    report = world.workers[0].algorithm.report
    assert (report["reevaluated"], report["repartitioned"]) == (1, 1)


def test_drift_triggers_reevaluation() -> None:
    """A global count outside [k/2, 2k] makes every rank re-evaluate in the next step."""
    world = SimulatedWorld(OkTopk(density=0.05, correct_thresholds=False), 4, 400)
    gradient = normal(4, 400)
    for _ in range(3):
        world.step(gradient)
    world.step(100 * gradient)
    assert all(state.force_reevaluate for state in laws.states_of(world))
    world.step(gradient)
    assert world.workers[2].algorithm.report["reevaluated"] == 1


def test_correction_keeps_counts_near_k() -> None:
    """As residuals grow, about k entries reach corrected thresholds, and more and more reach constant ones."""
    counts = {}
    for corrected in (True, False):
        chosen = OkTopkVariant(density=0.01, correct_thresholds=corrected, drift_high=1e9, drift_low=0.0)
        world = SimulatedWorld(chosen, 8, 20_000)
        candidates = []
        for step in range(32):
            gradient = normal(8, 20_000, step) * torch.linspace(2, 0.1, 20_000)
            world.step(gradient)
            candidates.append(world.workers[0].algorithm.report["candidates"])
        counts[corrected] = sum(candidates[17:]) / 15 / 200
    assert 1 <= counts[True] < 2.5
    assert counts[False] > 1.5 * counts[True]


@pytest.mark.parametrize("scale", [0.3, 0.05])
def test_delivery_recovers_after_gradients_shrink(scale: float) -> None:
    """After gradients shrink, as they do early in training, k entries are delivered again within a few steps."""
    world = SimulatedWorld(OkTopk(density=0.01), 4, 20_000)
    delivered, reevaluated = [], 0.0
    for step in range(120):
        gradient = normal(4, 20_000, step) * (1.0 if step < 40 else scale)
        delivered.append(len(world.step(gradient)[0]))
        reevaluated += world.workers[0].algorithm.report["reevaluated"]
    assert sum(delivered[60:]) / 60 > 0.95 * 200
    assert reevaluated < 60


def test_phase_volumes_are_exact() -> None:
    """Phase 1 sends 2(|L| - own) words and the all-gather receives 2(T - own) words, plus headers."""
    world_size, numel = 5, 2000
    world = SimulatedWorld(
        OkTopkVariant(density=0.05, balance_trigger=math.inf, reevaluate_every=99), world_size, numel
    )
    for step in range(6):
        world.step(normal(world_size, numel, step))
    assert not world.workers[0].algorithm.report["reevaluated"]
    acc = world.residuals + normal(world_size, numel, 9)
    before = [worker.algorithm.state for worker in world.workers]
    mean = world.step(normal(world_size, numel, 9))[0]
    if world.workers[0].algorithm.report["reevaluated"]:
        pytest.fail("the example has to be a reuse step")
    cuts = laws.states_of(world)[0].cuts
    at = offsets(mean.indices, cuts)
    for rank, meter in enumerate(world.scheduler.meters):
        reaching = [j for j in range(numel) if abs(float(acc[rank, j])) >= before[rank].local_threshold * WARM_START]
        chosen = sorted(reaching, key=lambda j: (-abs(float(acc[rank, j])), j))[:100]
        foreign = sum(not cuts[rank] <= j < cuts[rank + 1] for j in chosen)
        gathered = len(mean) - (at[rank + 1] - at[rank])
        assert meter.sent_by_phase["split-and-reduce"].bytes == 8 * foreign + HEADER * (world_size - 1)
        assert meter.received_by_phase["all-gather"].bytes == 8 * gathered + HEADER * 3


def test_regions_are_summed_in_rotation_order() -> None:
    """The owner r of a region adds the ranks in the order r, r-1, r-2, ..., bit for bit on floats."""
    world_size, numel = 5, 300
    world = SimulatedWorld(OkTopkVariant(density=1.0, force_sparse=True, bucket_width=2), world_size, numel)
    gradient = normal(world_size, numel) * normal(world_size, numel, 1).exp()
    mean = world.step(gradient)[0]
    cuts = laws.states_of(world)[0].cuts
    expected = torch.zeros(numel)
    for owner in range(world_size):
        region = slice(cuts[owner], cuts[owner + 1])
        for shift in range(world_size):
            expected[region] += gradient[(owner - shift) % world_size, region]
    assert laws.same_bits(mean.values, (expected / world_size)[mean.indices.long()])
    assert len(mean) == numel


@pytest.mark.parametrize("static", [False, True])
def test_reevaluation_does_not_grow_with_the_world_size(static: bool) -> None:
    """A re-evaluation sends histograms whose length is fixed, and then k entries: less than it takes to gather all."""
    used = {}
    for world_size in (8, 16):
        world = SimulatedWorld(OkTopk(density=0.02, reevaluate_every=1, static=static), world_size, 50_000)
        for step in range(3):
            world.step(normal(world_size, 50_000, step))
        meter = world.scheduler.meters[0]
        used[world_size] = sum(meter.received_by_phase[phase].bytes for phase in ("histogram", "all-gather"))
        assert meter.received_by_phase["histogram"].bytes < 9 * 4096
    assert used[16] < (2 if static else 1.1) * used[8]


def test_long_run_converges() -> None:
    """On a quadratic, error feedback comes near the dense solution and the residuals stay bounded."""
    targets = normal(4, 200)
    optimum = targets.mean(0)
    world = SimulatedWorld(OkTopk(density=0.05), 4, 200)
    x = torch.zeros(200)
    norms = []
    for step in range(1200):
        x -= 0.02 / (1 + step / 200) * world.step(x - targets)[0].to_dense()
        norms.append(float(world.residuals.norm()))
    assert float((x - optimum).norm()) < 0.15 * float(optimum.norm())
    assert max(norms[-200:]) < 2 * max(norms[200:400])


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"density": 0.0}, "density=0.0"),
        ({"density": 1.5}, "density=1.5"),
        ({"repartition_every": 0}, "repartition_every=0"),
        ({"bucket_width": 0}, "bucket_width=0"),
        ({"local_cap": 0.5}, "local_cap=0.5"),
        ({"global_cap": math.inf}, "global_cap=inf"),
        ({"local_cap": math.nan}, "local_cap=nan"),
        ({"static_room": 0.5}, "static_room=0.5"),
        ({"static_room": math.inf}, "static_room=inf"),
    ],
)
def test_bad_fields_are_named(fields: dict[str, float], named: str) -> None:
    """The error names the invalid field and its value."""
    with pytest.raises(ValueError, match=named):
        OkTopk(**fields)
