"""The static form of Ok-Topk: fixed lengths, what does not fit, and the same results as the other form if all fits."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import tritoncomm
from tritoncomm import OkTopk, ProtocolMismatchError, SimulatedWorld
from tritoncomm.primitives.region_cuts import widest
from tritoncomm.scheduler.cost import WORD
from tritoncomm.scheduler.rounds import AllGather, Op

import laws
from depth import trials
from ok_topk_variants import OkTopkVariant
from recipes import SHORT, always_packed

STATIC = OkTopk(density=0.05, static=True, **SHORT)
AMPLE = {"local_cap": 50.0, "global_cap": 50.0}  # no cap binds


def heavy_tailed(world_size: int, numel: int, seed: int) -> torch.Tensor:
    """Return gradients of one step whose sums are rounded."""
    generator = torch.Generator().manual_seed(seed)
    shape = (world_size, numel)
    return torch.randn(shape, generator=generator) * torch.randn(shape, generator=generator).exp()


def reevaluated(world: SimulatedWorld) -> bool:
    """Return whether the last step re-evaluated thresholds."""
    return bool(world.workers[0].algorithm.report["reevaluated"])


def reuse_steps(
    world: SimulatedWorld, gradients: Sequence[torch.Tensor]
) -> Iterator[tuple[torch.Tensor, list[tritoncomm.SparseVector]]]:
    """Run a step for each gradient, and yield the gradient and the means of those that neither re-evaluate nor cut."""
    for gradient in gradients:
        means = world.step(gradient)
        report = world.workers[0].algorithm.report
        if not report["reevaluated"] and not report["repartitioned"]:
            yield gradient, means


@pytest.mark.parametrize("form", [dataclasses.replace, always_packed])
@pytest.mark.parametrize("world_size", [1, 2, 3, 5, 8])
def test_ample_room_delivers_what_the_other_form_delivers(world_size: int, form: Callable[[OkTopk], OkTopk]) -> None:
    """Results, residuals, states and reports are equal to the bit over many steps, of which some re-evaluate."""
    numel, rooms = 400, {"static": True, "static_room": 64.0}
    for chosen in ({}, {"correct_thresholds": False}):
        recipe = form(OkTopk(density=0.05, **AMPLE, **SHORT, **chosen))
        exact = SimulatedWorld(recipe, world_size, numel)
        static = SimulatedWorld(dataclasses.replace(recipe, **rooms), world_size, numel)
        kinds = set()
        for step in range(trials(12, 20)):
            gradient = heavy_tailed(world_size, numel, step)
            assert laws.same_vector(exact.step(gradient)[0], static.step(gradient)[0].trimmed())
            assert laws.same_bits(exact.residuals, static.residuals)
            assert laws.states_of(exact) == laws.states_of(static)
            report = static.workers[0].algorithm.report
            assert report == exact.workers[0].algorithm.report
            kinds.add((report.get("reevaluated"), report.get("repartitioned")))
        assert len(kinds) == (1 if world_size == 1 else 4)


def test_forms_continue_each_other() -> None:
    """A checkpoint of one form is continued by the other."""
    exact = SimulatedWorld(OkTopk(density=0.05, **AMPLE, **SHORT), 3, 300)
    static = SimulatedWorld(OkTopk(density=0.05, static=True, static_room=64.0, **AMPLE, **SHORT), 3, 300)
    for step in range(5):
        exact.step(heavy_tailed(3, 300, step))
    static.load_state_dict(exact.state_dict())
    for step in range(5, 10):
        gradient = heavy_tailed(3, 300, step)
        assert laws.same_vector(exact.step(gradient)[0], static.step(gradient)[0].trimmed())
    assert laws.same_bits(exact.residuals, static.residuals)


@pytest.mark.parametrize("values", ["fp32", "4bit"])
def test_what_does_not_fit_stays_in_the_residual(values: str) -> None:
    """Of more entries than a message has room for, the largest are sent. The others stay in the residual, unchanged."""
    world_size, numel = 4, 400
    recipe = OkTopkVariant(density=0.1, static=True, values=values, drift_low=0.0, reevaluate_every=64)
    world = SimulatedWorld(recipe, world_size, numel)
    for step in range(3):
        world.step(heavy_tailed(world_size, numel, step))
    low, high = laws.states_of(world)[0].cuts[1:3]
    room = world.workers[0].algorithm.caps.pair_room(world_size)
    assert room < high - low
    gradient = -world.residuals
    gradient[0, low:high] += 1000.0 + torch.arange(high - low).flip(0)
    held = world.residuals + gradient
    mean = world.step(gradient)[0].trimmed()
    assert not reevaluated(world)
    assert mean.indices.tolist() == list(range(low, low + room))
    left = world.residuals[0]
    assert torch.equal(left[low + room : high], held[0, low + room : high])
    if values == "fp32":
        assert not left[low : low + room].any()


def test_more_sums_than_the_cap() -> None:
    """If the owners send more sums than the global cap, the largest of them are delivered, on all ranks."""
    world_size, numel = 4, 800
    world = SimulatedWorld(OkTopk(density=0.05, static=True, local_cap=2.0, **SHORT), world_size, numel)
    trimmed = 0
    gradients = [heavy_tailed(world_size, numel, step) for step in range(24)]
    for _, means in reuse_steps(world, gradients):
        report, k = world.workers[0].algorithm.report, world.workers[0].algorithm.k
        assert len(means[0]) <= k
        if report["candidates"] > k:
            trimmed += 1
            assert len(means[0]) == k
    assert trimmed > 3


@pytest.mark.parametrize("world_size", [2, 3, 8])
@pytest.mark.parametrize(
    "recipe",
    [
        STATIC,
        dataclasses.replace(STATIC, strict_volume=True),
        always_packed(STATIC),
        dataclasses.replace(STATIC, values="4bit"),
        dataclasses.replace(STATIC, values="1bit", global_cap=3.0),
    ],
    ids=str,
)
def test_traffic_of_reuse_steps_is_predicted_exactly(world_size: int, recipe: OkTopk) -> None:
    """In a step that reuses thresholds and cuts, every phase sends and receives what was predicted."""
    world = SimulatedWorld(recipe, world_size, 1000)
    compared = 0
    for step in range(16):
        predicted = world.predicted_traffic
        world.step(heavy_tailed(world_size, 1000, step))
        report = world.workers[0].algorithm.report
        if report["reevaluated"] or report["repartitioned"]:
            continue
        compared += 1
        for meter, forecast in zip(world.scheduler.meters, predicted, strict=True):
            assert meter.sent_by_phase == {phase: flow.sent for phase, flow in forecast.phases.items()}
            assert meter.received_by_phase == {phase: flow.received for phase, flow in forecast.phases.items()}
    assert compared > 2


def test_strict_volume_bounds_traffic() -> None:
    """With strict volume, a reuse step sends at most 6k(P-1)/P words, including its counts and figures."""
    world_size, numel = 8, 20_000
    recipe = OkTopk(density=0.05, static=True, strict_volume=True, static_room=8.0, reevaluate_every=64)
    world = SimulatedWorld(recipe, world_size, numel)
    k, reused = world.workers[0].algorithm.k, 0
    families = ("random", "one-region", "random", "disjoint", "identical", "ties", "one-region") * 2
    for _ in reuse_steps(world, list(laws.Case(world_size, numel, families, seed=1).gradients())):
        reused += 1
        for traffic in (*world.traffic, *world.received):
            assert traffic.bytes <= WORD * 6 * k * (world_size - 1) / world_size
    assert reused > 5


def test_ordinary_traffic() -> None:
    """The prediction of an ordinary step is twice that of exact lengths, and what steps with even regions send."""
    recipe, world_size, numel, k = OkTopk(density=0.05, static=True), 4, 20_000, 1000
    forecast = recipe.build(numel).predicted_traffic(world_size, ordinary=True)
    assert forecast.received.bytes / WORD == pytest.approx(8 * k * (world_size - 1) / world_size, rel=0.02)
    world = SimulatedWorld(recipe, world_size, numel)
    generator = torch.Generator().manual_seed(0)
    gradients = [torch.randn(world_size, numel, generator=generator) for _ in range(8)]
    for _ in reuse_steps(world, gradients):
        assert world.traffic[0].bytes == pytest.approx(forecast.sent.bytes, rel=0.02)


def test_loads_include_what_did_not_fit() -> None:
    """An owner that gets more than twice the mean causes a repartition, although the messages to it are full."""
    world_size, numel = 4, 800
    world = SimulatedWorld(OkTopkVariant(density=0.05, static=True, drift_low=0.0), world_size, numel)
    for step in range(3):
        world.step(heavy_tailed(world_size, numel, step))
    assert not any(state.force_repartition for state in laws.states_of(world))
    cuts, gradient = laws.states_of(world)[0].cuts, -world.residuals
    assert world.workers[0].algorithm.caps.pair_room(world_size) < 28
    for rank, counts in enumerate([(0, 14, 13, 13), (28, 4, 4, 4), (28, 4, 4, 4), (28, 4, 4, 4)]):
        for owner, count in enumerate(counts):
            gradient[rank, cuts[owner] : cuts[owner] + count] += 1e6
    world.step(gradient)
    assert not reevaluated(world)
    assert world.workers[0].algorithm.report["region_imbalance"] == 3 * 28 / 40
    assert all(state.force_repartition for state in laws.states_of(world))
    before = laws.states_of(world)[0].cuts
    world.step(heavy_tailed(world_size, numel, 10))
    assert world.workers[0].algorithm.report["repartitioned"]
    assert laws.states_of(world)[0].cuts != before


def test_sums_without_room_count_as_candidates() -> None:
    """All sums that reach the threshold count, although only some of them have room in the owner's message."""
    world_size, numel = 4, 800
    world = SimulatedWorld(OkTopkVariant(density=0.05, static=True, drift_low=0.0), world_size, numel)
    for step in range(3):
        world.step(heavy_tailed(world_size, numel, step))
    caps, cuts = world.workers[0].algorithm.caps, laws.states_of(world)[0].cuts
    low = max(cuts[:-1], key=lambda cut: cuts[cuts.index(cut) + 1] - cut)
    sent = caps.pair_room(world_size)
    assert world_size * sent <= widest(cuts)
    gradient = -world.residuals
    for rank in range(world_size):
        gradient[rank, low + rank * sent : low + (rank + 1) * sent] += 1e6
    mean = world.step(gradient)[0]
    assert not reevaluated(world)
    assert len(mean) == caps.owner_room(world_size) < world_size * sent
    assert world.workers[0].algorithm.report["candidates"] == world_size * sent


@pytest.mark.parametrize("values", ["fp32", "4bit", "1bit"])
def test_about_k_entries_are_delivered(values: str) -> None:
    """With the default room, nearly k entries are delivered per step, also after gradients have shrunk."""
    world = SimulatedWorld(OkTopk(density=0.01, static=True, values=values), 4, 20_000)
    delivered, again = [], 0
    for step in range(60):
        gradient = heavy_tailed(4, 20_000, step) * torch.linspace(2, 0.1, 20_000) * (0.1 if step >= 20 else 1.0)
        delivered.append(len(world.step(gradient)[0]))
        again += reevaluated(world)
    assert sum(delivered[30:]) / 30 > 0.9 * 200
    assert again < 30


@contextmanager
def readbacks(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Record the places in the library, kernels apart, at which Python reads values from a tensor."""
    found: list[str] = []
    library = f"{Path(tritoncomm.__file__).parent}/"  # not tritoncomm_kernels beside it
    with monkeypatch.context() as patch:
        for name in ("tolist", "item", "numpy", "cpu", "__bool__", "__int__", "__float__", "__index__", "nonzero"):
            original = getattr(torch.Tensor, name)

            def reading(self: torch.Tensor, *args: object, original: object = original, **named: object) -> object:
                caller = sys._getframe(1)
                if caller.f_code.co_filename.startswith(library):
                    found.append(f"{caller.f_code.co_filename}:{caller.f_lineno}")
                return original(self, *args, **named)

            patch.setattr(torch.Tensor, name, reading)
        yield found


@pytest.mark.parametrize("values", ["fp32", "4bit"])
@pytest.mark.parametrize("world_size", [1, 2, 8])
def test_readbacks(world_size: int, values: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank reads once in a reuse step, and at most six times in another one, whatever the world size."""
    world = SimulatedWorld(OkTopk(density=0.05, static=True, values=values, **SHORT), world_size, 600)
    given = [heavy_tailed(world_size, 600, step) for step in range(12)]
    reused = 0
    for gradient in given:
        algorithm = world.workers[0].algorithm
        reevaluate, repartition = algorithm._due(algorithm._state_for(world_size))
        with readbacks(monkeypatch) as found:
            world.step(gradient)
        others = ("/scheduler/simulated.py", "/scheduler/meter.py", "/simulation.py")
        places = [place for place in found if not any(other in place for other in others)]
        if world_size == 1 or not (reevaluate or repartition):
            reused += 1
            assert len(places) == world_size, places
            assert all("/scheduler/rounds.py" in place for place in places)  # the verdict
        assert len(places) <= 6 * world_size, places
    assert reused > 2


@pytest.mark.parametrize("key", [0, -1, 0x7F800000, 0x7FFFFFFF])
def test_a_smallest_magnitude_that_is_none(key: int) -> None:
    """A smallest magnitude that is not positive and finite is rejected by all ranks, and nothing changes."""
    world = SimulatedWorld(OkTopk(density=0.1, static=True, values="4bit"), 3, 600)
    for step in range(3):
        world.step(heavy_tailed(3, 600, step))
    before, residuals = laws.states_of(world), world.residuals

    def damage(_: int, ops: Sequence[Op]) -> None:
        if isinstance(ops[0], AllGather) and ops[0].phase == "all-gather":
            for op in ops if key > 0x7F000000 else ops[:1]:
                op.tensor[-1] = key

    with pytest.raises(ProtocolMismatchError, match="smallest magnitudes"):
        world.step(heavy_tailed(3, 600, 9), before_round=damage)
    assert len(world.scheduler.raised) == 3
    assert laws.states_of(world) == before
    assert laws.same_bits(world.residuals, residuals)


def test_only_collectives() -> None:
    """All steps consist of collectives, because NCCL cannot run messages between two ranks beside them."""
    world = SimulatedWorld(OkTopk(density=0.05, static=True), 3, 600)
    kinds = set()
    for step in range(4):
        world.step(heavy_tailed(3, 600, step), before_round=lambda _, ops: kinds.add(type(ops[0]).__name__))
    assert kinds == {"AllReduce", "AllGather", "AllToAll"}


@pytest.mark.parametrize("phase", ["split-and-reduce", "all-gather"])
def test_an_index_behind_its_region(phase: str) -> None:
    """An index behind the region of its owner is rejected, also if the widest region would hold it."""
    world = SimulatedWorld(OkTopk(density=0.1, static=True), 3, 600)
    for step in range(3):
        world.step(heavy_tailed(3, 600, step))
    cuts = laws.states_of(world)[0].cuts
    owner = min(range(3), key=lambda rank: cuts[rank + 1] - cuts[rank])
    assert cuts[owner + 1] - cuts[owner] < widest(cuts)

    def damage(_: int, ops: Sequence[Op]) -> None:
        if ops[0].phase == phase:
            into_region = phase == "split-and-reduce"
            message = ops[(owner + 1) % 3].tensor[owner, :-1] if into_region else ops[owner].tensor[: -3 - 3]
            indices = message[: message.numel() // 2]
            indices[1:], indices[0] = -1, cuts[owner + 1]

    residuals = world.residuals
    with pytest.raises(ProtocolMismatchError, match="malformed"):
        world.step(heavy_tailed(3, 600, 9), before_round=damage)
    assert len(world.scheduler.raised) == 3
    assert laws.same_bits(world.residuals, residuals)
