"""Ok-Topk in unusual situations, and the defects of earlier implementations that must not return.

One test per row of the specification's tables "situation by situation" and "defects".
"""

from __future__ import annotations

import math

import pytest
import torch
import tritoncomm
from tritoncomm import NonFiniteError, OkTopk, ProtocolMismatchError, SimulatedWorld, Warmup
from tritoncomm.primitives.region_cuts import consensus_cuts, propose_cuts
from tritoncomm.scheduler.cost import HEADER_WORDS, WORD
from tritoncomm.scheduler.rounds import round_of
from tritoncomm.scheduler.simulated import SimulatedScheduler
from tritoncomm.step.exchange.feedback import ErrorFeedback

import laws
from ok_topk_variants import OkTopkVariant
from tritoncomm_kernels import Entries

ALL_LAWS = (laws.conservation, laws.agreement, laws.form, laws.equivalence, laws.budget)
SHORT = {"repartition_every": 3, "reevaluate_every": 4}


def obeys(recipe: OkTopk, case: laws.Case) -> None:
    """Check all exact laws on one run of a case."""
    run = laws.recorded(recipe, case, with_states=False)
    for law in ALL_LAWS:
        law.check(run)


def random(world_size: int, numel: int, seed: int = 0) -> torch.Tensor:
    """Return random gradients whose sums are exact."""
    (gradient,) = laws.Case(world_size, numel, ("random",), seed=seed).gradients()
    return gradient


@pytest.mark.parametrize("world_size", [1, 2, 3, 5, 6, 7, 9, 12, 13])
def test_any_world_size(world_size: int) -> None:
    """The laws hold at world sizes that are no powers of two, and at the smallest ones."""
    obeys(OkTopk(density=0.1, **SHORT), laws.Case(world_size, 97, ("random",) * 7))


def test_one_worker() -> None:
    """A single worker sends no message, delivers its exact top-k and keeps the rest in its residual."""
    gradient = random(1, 100)
    world = SimulatedWorld(OkTopk(density=0.1), 1, 100)
    (mean,) = world.step(gradient)
    order = sorted(range(100), key=lambda j: (-abs(float(gradient[0, j])), j))[:10]
    assert mean.indices.tolist() == sorted(order)
    assert torch.equal(mean.to_dense() + world.residuals[0], gradient[0])
    assert world.traffic == [(0, 0)]


def test_fewer_entries_than_workers() -> None:
    """If k < P, no rank proposes cuts, so the regions are equal."""
    world = SimulatedWorld(OkTopk(density=0.03), 8, 100)
    world.step(random(8, 100))
    assert laws.states_of(world)[0].cuts == (0, 12, 25, 37, 50, 62, 75, 87, 100)
    obeys(OkTopk(density=0.03, **SHORT), laws.Case(8, 100, ("random", "ties", "one-region") * 2))


def test_density_below_one_entry() -> None:
    """One entry is sent if n x density < 1."""
    world = SimulatedWorld(OkTopk(density=1e-9), 3, 50)
    assert len(world.step(random(3, 50))[0]) == 1


def test_density_one_is_dense() -> None:
    """At density 1 the exchange is a dense all-reduce. The sparse path would give the same mean."""
    gradient = random(3, 50)
    dense = SimulatedWorld(OkTopk(density=1.0), 3, 50)
    assert dense.step(gradient)[0].is_full
    assert list(dense.scheduler.meters[0].sent_by_phase) == ["all-reduce"]
    forced = SimulatedWorld(OkTopkVariant(density=1.0, force_sparse=True), 3, 50)
    assert torch.equal(forced.step(gradient)[0].to_dense(), gradient.mean(0))
    assert "split-and-reduce" in forced.scheduler.meters[0].sent_by_phase


@pytest.mark.parametrize("numel", [1, 2, 3, 5])
def test_fewer_coordinates_than_workers(numel: int) -> None:
    """The laws hold if n < P, when regions are tiny or empty."""
    obeys(OkTopk(density=0.4, **SHORT), laws.Case(7, numel, ("random", "ties", "zero", "random")))


def test_empty_messages_are_never_posted() -> None:
    """With one entry in total, three of four owners get no message, and the fourth gets one from each peer."""
    gradient = torch.zeros(4, 100)
    gradient[:, 60] = 3.0
    world = SimulatedWorld(OkTopk(density=0.04), 4, 100)
    world.step(gradient)
    assert laws.states_of(world)[0].cuts == (0, 25, 50, 75, 100)
    received = [meter.received_by_phase["split-and-reduce"] for meter in world.scheduler.meters]
    assert [traffic.messages for traffic in received] == [0, 0, 3, 0]


def test_all_zero_gradient() -> None:
    """A zero gradient delivers nothing and leaves no invalid threshold, and the next step recovers."""
    world = SimulatedWorld(OkTopk(density=0.1), 3, 80)
    zero, gradient = torch.zeros(3, 80), random(3, 80)
    assert len(world.step(zero)[0]) == 0
    assert laws.states_of(world)[0].force_reevaluate
    assert len(world.step(gradient)[0]) == 8
    threshold = laws.states_of(world)[0].global_threshold
    assert threshold > 0
    fresh = SimulatedWorld(OkTopk(density=0.1), 3, 80)
    fresh.step(gradient)
    for _ in range(4):
        fresh.step(torch.zeros(3, 80))
    assert laws.states_of(fresh)[0].global_threshold > 0


def test_zero_on_a_reevaluation_step_keeps_the_threshold() -> None:
    """A re-evaluation step without values keeps the global threshold, and the next step re-evaluates again."""
    world = SimulatedWorld(OkTopk(density=0.1, reevaluate_every=1), 3, 80)
    world.step(torch.full((3, 80), 3.0) * (torch.arange(80) < 8))
    before = laws.states_of(world)[0].global_threshold
    assert before == 9
    assert not world.residuals.any()
    world.step(torch.zeros(3, 80))
    assert laws.states_of(world)[0].global_threshold == before
    assert laws.states_of(world)[0].force_reevaluate


def test_fewer_nonzeros_than_k() -> None:
    """With fewer than k non-zeros, exactly those are delivered, and the local threshold is marked as invalid (0)."""
    gradient = torch.zeros(3, 100)
    gradient[:, :4] = torch.tensor([3.0, 6.0, 9.0, 12.0])
    world = SimulatedWorld(OkTopk(density=0.1), 3, 100)
    assert world.step(gradient)[0].indices.tolist() == [0, 1, 2, 3]
    assert laws.states_of(world)[0].local_threshold == 0
    assert len(world.step(random(3, 100))[0]) == 10


def test_nothing_reaches_the_global_threshold() -> None:
    """If no sum reaches the global threshold, the result is empty and the residuals keep everything."""
    world = SimulatedWorld(OkTopk(density=0.1, **SHORT), 3, 60)
    for step in range(3):
        world.step(random(3, 60, step) * 1000)
    for worker in world.workers:
        worker.residual.zero_()
    gradient = random(3, 60)
    assert laws.states_of(world)[0].step == 3
    assert len(world.step(gradient / 1e6)[0]) == 0
    assert torch.equal(world.residuals, gradient / 1e6)


def test_ties_go_to_the_lower_index() -> None:
    """With equal magnitudes, all ranks select exactly the k lowest indices."""
    world = SimulatedWorld(OkTopk(density=0.1), 4, 100)
    means = world.step(torch.ones(4, 100))
    assert all(mean.indices.tolist() == list(range(10)) for mean in means)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("step", [0, 1, 3])
def test_non_finite(bad: float, step: int) -> None:
    """All ranks reject a NaN or Inf on one rank and name that rank, in every kind of step."""
    world = SimulatedWorld(OkTopk(density=0.1), 4, 100)
    for number in range(step):
        world.step(random(4, 100, number))
    poisoned, before = random(4, 100), world.residuals
    poisoned[2, 57] = bad
    with pytest.raises(NonFiniteError, match=r"ranks \[2\]"):
        world.step(poisoned)
    assert laws.same_bits(world.residuals, before)


def test_opposite_infinities() -> None:
    """+Inf and -Inf at one coordinate are detected on both ranks, although their sum is NaN."""
    poisoned = random(3, 50)
    poisoned[0, 7], poisoned[2, 7] = math.inf, -math.inf
    with pytest.raises(NonFiniteError) as caught:
        SimulatedWorld(OkTopk(density=0.1), 3, 50).step(poisoned)
    assert caught.value.ranks == (0, 2)


@pytest.mark.parametrize("step", [0, 3])
def test_sums_that_overflow(step: int) -> None:
    """Finite gradients whose sum is Inf are rejected as well."""
    world = SimulatedWorld(OkTopk(density=0.1), 3, 50)
    for number in range(step):
        world.step(random(3, 50, number))
    huge, before = random(3, 50), world.residuals
    huge[:, 31] = 3e38
    with pytest.raises(NonFiniteError, match="overflow"):
        world.step(huge)
    assert laws.same_bits(world.residuals, before)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_gradients(dtype: torch.dtype) -> None:
    """Residuals are fp32 for gradients of any dtype, and a rejected step does not change them."""
    gradient = random(3, 90).to(dtype)
    world = SimulatedWorld(OkTopk(density=0.1), 3, 90)
    mean = world.step(gradient)[0]
    assert world.residuals.dtype == torch.float32
    assert torch.equal(mean.to_dense() * 3 + world.residuals.sum(0), gradient.float().sum(0))
    before = world.residuals
    with pytest.raises(NonFiniteError):
        world.step(gradient * math.inf)
    assert laws.same_bits(world.residuals, before)


def test_skew_forces_a_repartition() -> None:
    """If all large entries move into one region, the cuts follow one step later."""
    world = SimulatedWorld(OkTopk(density=0.1), 4, 400)
    left = random(4, 400) * (torch.arange(400) < 100)
    right = random(4, 400, 1) * (torch.arange(400) >= 300) * 1000
    for _ in range(3):
        world.step(left)
    before = laws.states_of(world)[0].cuts
    world.step(right)
    assert all(state.force_repartition for state in laws.states_of(world))
    world.step(right)
    assert world.workers[1].algorithm.report["repartitioned"] == 1
    after = laws.states_of(world)[0].cuts
    assert after[1] > before[1]
    assert after[3] > 300


def test_workers_with_different_distributions() -> None:
    """The laws hold if workers have different distributions, so that averaged cuts may suit none of them."""
    obeys(OkTopk(density=0.1, **SHORT), laws.Case(5, 100, ("disjoint", "random", "one-region") * 3))


@pytest.mark.parametrize("corrected", [True, False])
def test_overshoot_is_capped(corrected: bool) -> None:
    """No more entries than the cap are delivered, however far the thresholds lag behind."""
    chosen = OkTopk(density=0.05, correct_thresholds=corrected, reevaluate_every=1000)
    world = SimulatedWorld(chosen, 4, 400)
    for step in range(12):
        mean = world.step(random(4, 400, step) * 3.0**step)[0]
        assert len(mean) <= 20


def test_world_size_change_forces_reevaluation() -> None:
    """After a change of the world size, all ranks re-evaluate thresholds and cuts."""
    workers = [ErrorFeedback(OkTopk(density=0.1).build(60)) for _ in range(5)]

    def step(world_size: int, seed: int) -> None:
        gradient = random(world_size, 60, seed)
        members = workers[:world_size]
        patterns = [w.begin(gradient[r], r, world_size) for r, w in enumerate(members)]
        SimulatedScheduler(world_size).run(patterns)
        for worker in members:
            worker.commit()

    for seed in range(4):
        step(5, seed)
    step(3, 9)
    for worker in workers[:3]:
        assert worker.algorithm.report["reevaluated"] == worker.algorithm.report["repartitioned"] == 1
        assert len(worker.algorithm.state.cuts) == 4


def test_state_dict_is_plain_and_resumes() -> None:
    """The state dict holds plain values, and a resumed run gives the same bits."""
    laws.resume(OkTopk(density=0.1, **SHORT), laws.Case(4, 90, ("random",) * 9))
    world = SimulatedWorld(OkTopk(density=0.1), 2, 30)
    world.step(random(2, 30))
    saved = world.state_dict()["workers"][1]["algorithm"]
    assert set(saved) == {
        "step", "world_size", "local_threshold", "global_threshold",
        "cuts", "force_reevaluate", "force_repartition",
    }  # fmt: skip
    assert all(isinstance(value, (int, float, bool, tuple)) for value in saved.values())


def test_too_long_for_int32() -> None:
    """A vector of 2^31 elements is rejected with the fix, before anything is allocated."""
    with pytest.raises(ValueError, match=r"numel=2147483648.*split"):
        OkTopk().build(2**31)


def test_instances_share_nothing() -> None:
    """Two worlds in one process have separate residuals and thresholds."""
    first, second = (SimulatedWorld(OkTopk(density=0.1), 2, 40) for _ in range(2))
    first.step(random(2, 40))
    assert not second.residuals.any()
    assert laws.states_of(second)[0].step == 0


def test_input_layout() -> None:
    """Strided gradients are accepted, and gradients of another shape are rejected by name."""
    gradient = random(3, 40)
    strided = torch.empty(40, 3).t()
    strided.copy_(gradient)
    worlds = [SimulatedWorld(OkTopk(density=0.1), 3, 40) for _ in range(2)]
    assert laws.same_vector(worlds[0].step(gradient)[0], worlds[1].step(strided)[0])
    with pytest.raises(ValueError, match=r"gradients has shape \(3, 4, 10\)"):
        worlds[0].step(gradient.view(3, 4, 10))


def test_one_packed_message_per_peer() -> None:
    """Indices and values share one message, so each rank sends P - 1 messages in phase 1."""
    world = SimulatedWorld(OkTopk(density=0.5, bucket_width=3), 6, 200)
    sent = [0] * 6

    def watch(_: int, ops: list[object]) -> None:
        if ops[0].phase == "split-and-reduce":
            for rank, op in enumerate(ops):
                sent[rank] += len(round_of(op).sends)
        assert len({type(op) for op in ops}) == 1

    world.step(random(6, 200), before_round=watch)
    assert sent == [5] * 6


@pytest.mark.parametrize("field", ["repartition_every", "reevaluate_every"])
def test_ranks_with_different_periods(field: str) -> None:
    """Ranks with different periods raise an error that names both ranks."""
    workers = [ErrorFeedback(OkTopk(density=0.2, **{field: 1 if r == 2 else 3}).build(60)) for r in range(3)]

    def step(seed: int) -> None:
        gradient = random(3, 60, seed)
        SimulatedScheduler(3).run([w.begin(gradient[r], r, 3) for r, w in enumerate(workers)])
        for worker in workers:
            worker.commit()

    def train() -> None:
        for seed in range(9):
            step(seed)

    with pytest.raises(ProtocolMismatchError, match=r"rank 0 .* but rank 2"):
        train()


def test_defect_cleared_coordinates_on_reevaluation_steps() -> None:
    """Defect 1: only delivered coordinates of the local selection are cleared, also in re-evaluation steps."""
    for step in range(6):
        world = SimulatedWorld(OkTopk(density=0.1, reevaluate_every=1 if step % 2 else 32), 4, 300)
        for number in range(step):
            world.step(random(4, 300, number))
        held = world.residuals + random(4, 300, 50)
        mean = world.step(random(4, 300, 50))[0]
        kept = set(mean.indices.tolist())
        after = world.residuals
        for rank in range(4):
            cleared = set(((held[rank] != 0) & (after[rank] == 0)).nonzero().squeeze(1).tolist())
            assert cleared <= kept
            assert torch.equal(after[rank][after[rank] != 0], held[rank][after[rank] != 0])
        delivered = held.sum(0) - after.sum(0)
        assert torch.equal(delivered, mean.to_dense() * 4)


def test_defect_empty_result() -> None:
    """Defects 2 and 8: empty selections and empty results are legal, with one worker or several."""
    for world_size in (1, 4):
        world = SimulatedWorld(OkTopk(density=0.1), world_size, 30)
        for _ in range(3):
            assert len(world.step(torch.zeros(world_size, 30))[0]) == 0


def test_defect_indices_beyond_2_to_24() -> None:
    """Defect 3: indices that fp32 cannot represent are delivered exactly."""
    numel = 2**24 + 64
    gradient = torch.zeros(2, numel)
    places = [2**24 + 1, 2**24 + 3, numel - 1]
    gradient[0, places] = torch.tensor([2.0, 4.0, 6.0])
    world = SimulatedWorld(OkTopk(density=3.5 / numel), 2, numel)
    mean = world.step(gradient)[0]
    assert mean.indices.tolist() == places
    assert mean.values.tolist() == [1.0, 2.0, 3.0]


def test_defect_sum_of_cuts_beyond_int32() -> None:
    """Defect 4: cuts near 2^31 are summed over ranks without overflow."""
    near = 2**31 - 5
    proposal = propose_cuts(Entries(torch.tensor([near - 2, near - 1, near], dtype=torch.int32), torch.ones(3)), 3)
    assert proposal.dtype == torch.int64
    assert consensus_cuts((proposal * 3).tolist(), 2**31 - 1) == (0, near - 1, near, 2**31 - 1)


def test_defect_strict_comparison() -> None:
    """Defect 5: the k-th magnitude is selected as well, so a re-evaluation step delivers k entries, not k - 1."""
    world = SimulatedWorld(OkTopk(density=0.1), 2, 50)
    gradient = torch.arange(1.0, 51.0).repeat(2, 1)
    assert world.step(gradient)[0].indices.tolist() == [45, 46, 47, 48, 49]


def test_defect_missing_balance() -> None:
    """Defect 6: a block that exceeds the trigger is balanced over the ranks."""
    world = SimulatedWorld(OkTopkVariant(density=0.1, skew_trigger=100, balance_trigger=2.0), 5, 500)
    world.step(random(5, 500))
    phases = set()
    for step in range(1, 12):
        world.step(random(5, 500, step) * (torch.arange(500) < 60) * 100)
        phases |= set(world.scheduler.meters[0].sent_by_phase)
    assert "balance" in phases


@pytest.mark.parametrize("warmup", [1, 2, 3, 7])
def test_defect_warmup_length(warmup: int) -> None:
    """Defect 9: the first sparse step finds thresholds and cuts after a warm-up of any length."""
    recipe = Warmup(recipe=OkTopk(density=0.1, **SHORT), steps=warmup)
    world = SimulatedWorld(recipe, 4, 120)
    for step in range(warmup + 1):
        mean = world.step(random(4, 120, step))[0]
    assert len(mean) == 12
    assert len(world.workers[0].algorithm.inner.state.cuts) == 5


def test_defect_selection_per_region(monkeypatch: pytest.MonkeyPatch) -> None:
    """Defect 10: each rank makes one selection pass over the accumulator per step, not one per region."""
    passes = []
    accumulator = tritoncomm.primitives.accumulator.Accumulator
    for name in ("at_least", "top_k"):
        original = getattr(accumulator, name)
        monkeypatch.setattr(accumulator, name, lambda self, x, original=original: passes.append(1) or original(self, x))
    world = SimulatedWorld(OkTopk(density=0.1), 6, 100)
    for step in range(5):
        passes.clear()
        world.step(random(6, 100, step))
        assert len(passes) == 6


def test_strict_volume_with_results_in_one_region() -> None:
    """With strict volume, a result in a single region is balanced for any trigger, within the bound."""
    world_size, numel = 8, 4000
    world = SimulatedWorld(
        OkTopkVariant(density=0.05, strict_volume=True, balance_trigger=math.inf, skew_trigger=1e9, drift_low=0.0),
        world_size, numel,
    )  # fmt: skip
    world.step(random(world_size, numel))
    k, balanced = world.workers[0].algorithm.k, 0
    for step in range(1, 12):
        world.step(random(world_size, numel, step) * (1 + 99.0 * (torch.arange(numel) < numel // world_size)))
        if world.workers[0].algorithm.report["reevaluated"]:
            continue
        balanced += "balance" in world.scheduler.meters[0].sent_by_phase
        for traffic in world.traffic + world.received:
            extra = WORD * HEADER_WORDS * traffic.messages + 8 * 4 * world_size + 4 * 2 * 3 * world_size
            assert traffic.bytes <= 4 * 6 * k * (world_size - 1) / world_size + extra
    assert balanced


def test_strict_volume_bounds_traffic() -> None:
    """With strict volume, every reuse step needs at most 6k(P-1)/P words, plus counts, sizes and headers."""
    world_size, numel = 5, 1000
    for trigger in (1.0, 4.0, math.inf):
        recipe = OkTopkVariant(density=0.05, strict_volume=True, balance_trigger=trigger, reevaluate_every=64)
        world = SimulatedWorld(recipe, world_size, numel)
        k = world.workers[0].algorithm.k
        families = ("random", "one-region", "random", "disjoint", "identical", "ties", "one-region") * 6
        reused = 0
        for gradient in laws.Case(world_size, numel, families, seed=1).gradients():
            world.step(gradient)
            if world.workers[0].algorithm.report["reevaluated"]:
                continue
            reused += 1
            for rank, meter in enumerate(world.scheduler.meters):
                for traffic in (world.traffic[rank], world.received[rank]):
                    headers = WORD * HEADER_WORDS * traffic.messages + 8 * 2 * world_size * 4
                    rounding = 4 * 2 * 3 * world_size
                    assert traffic.bytes <= 4 * 6 * k * (world_size - 1) / world_size + headers + rounding
                assert meter.sent.messages <= 4 * world_size + 20
        assert reused > 20
