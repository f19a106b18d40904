"""The laws of every exchange method, one function each, and the cases that test them.

Gradients are small integers times a power of two times the number of workers. Every sum and mean is therefore
exact in any order, and the laws compare bits. ``conservation`` takes a tolerance for the separate run on
ordinary floats.
"""

from __future__ import annotations

import copy
import dataclasses
import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from tritoncomm import (
    ExchangeTimeoutError,
    ExDyna,
    NonFiniteError,
    OkTopk,
    ProtocolMismatchError,
    Quantized,
    Recipe,
    SimulatedWorld,
    SparseVector,
    Warmup,
)
from tritoncomm.algorithms.staged import Staged
from tritoncomm.scheduler.cost import Forecast
from tritoncomm.scheduler.faults import KINDS, Faults
from tritoncomm.scheduler.meter import Meter
from tritoncomm.scheduler.rounds import Op

FAMILIES = ("random", "sparse", "zero", "ties", "one-region", "cancelling", "identical", "one-entry", "disjoint")
MAX_WORLD_SIZE = 17


@dataclass(frozen=True)
class Case:
    """The input of a law: a world size, a vector length and the gradients of some steps."""

    world_size: int
    numel: int
    families: tuple[str, ...]
    exponent: int = 0
    seed: int = 0
    exact: bool = True

    def gradients(self) -> Iterator[torch.Tensor]:
        """Yield the gradients of each step, ``[world_size, numel]``."""
        generator = torch.Generator().manual_seed(self.seed)
        for family in self.families:
            yield gradients(family, self.world_size, self.numel, generator, exact=self.exact) * 2.0**self.exponent


# Hypothesis begins with the simplest case and draws few, so some laws check this one as well. Its fourth step is the
# first that reuses the thresholds of Ok-Topk.
FOUR_STEPS = Case(3, 90, ("random", "one-region", "ties", "random"))


def gradients(
    family: str, world_size: int, numel: int, generator: torch.Generator, *, exact: bool = True
) -> torch.Tensor:
    """Return the gradients of one step: multiples of ``world_size`` if ``exact``, otherwise heavy-tailed floats."""
    shape = (world_size, numel)
    if exact:
        values = torch.randint(-50, 51, shape, generator=generator).float() * world_size
    else:
        values = torch.randn(shape, generator=generator) * torch.randn(shape, generator=generator).exp()
    columns = torch.arange(numel)
    if family == "sparse":
        values *= torch.rand(shape, generator=generator) < 0.1
    elif family == "zero":
        values *= 0.0
    elif family == "ties":
        values = values.sign() * world_size
    elif family == "one-region":
        values *= columns >= numel - max(1, numel // 8)
    elif family == "cancelling":
        values = values[:1] * torch.tensor([1.0, -1.0]).repeat(world_size)[:world_size, None]
    elif family == "identical":
        values = values[:1].repeat(world_size, 1)
    elif family == "one-entry":
        values *= columns == numel // 2
    elif family == "disjoint":
        values *= columns[None, :] % world_size == torch.arange(world_size)[:, None]
    return values


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    """Return normally distributed values."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def heavy_tailed(world_size: int, numel: int, seed: int = 0) -> torch.Tensor:
    """Return gradients of one step with heavy tails, whose sums are rounded."""
    return gradients("random", world_size, numel, torch.Generator().manual_seed(seed), exact=False)


def cases(
    *, exact: bool = True, min_world_size: int = 1, max_world_size: int = MAX_WORLD_SIZE
) -> st.SearchStrategy[Case]:
    """Return a hypothesis strategy for cases."""
    return st.builds(
        Case,
        world_size=st.integers(min_world_size, max_world_size),
        numel=st.integers(1, 130),
        families=st.lists(st.sampled_from(FAMILIES), min_size=1, max_size=6).map(tuple),
        exponent=st.integers(-20, 20),
        seed=st.integers(0, 2**20),
        exact=st.just(exact),
    )


def fitted(case: Case, recipe: Recipe) -> Case:
    """Return ``case`` with a vector length and a world size that ``recipe`` accepts."""
    case = dataclasses.replace(case, numel=length(recipe, case.numel))
    while hasattr(recipe, "recipe") and not hasattr(recipe, "node_size"):
        recipe = recipe.recipe
    teams = getattr(recipe, "node_size", None) or getattr(recipe, "teams", 1)
    surplus = -case.world_size % teams if isinstance(teams, int) else 0
    return dataclasses.replace(case, world_size=case.world_size + surplus)


def length(recipe: Recipe, otherwise: int) -> int:
    """Return the vector length that ``recipe`` requires, or ``otherwise`` if it accepts any."""
    return (
        sum(map(math.prod, recipe.shapes)) + recipe.tail if isinstance(recipe, Staged) and recipe.shapes else otherwise
    )


def steps_of(recipe: Recipe) -> int:
    """Return after how many steps a recipe repeats itself: it has taken each of its branches then.

    Ok-Topk reuses thresholds in the fourth step at the latest. ExDyna moves blocks and its threshold from the second
    on. Preconditioning is renewed in the third, which is also the first that begins with what rounding of a quantized
    mean has left. Others have a first step, and one that begins with a residual.
    """
    dense = sum(layer.steps for layer in recipe.layers if isinstance(layer, Warmup))
    if any(isinstance(layer, OkTopk | ExDyna) for layer in recipe.layers):
        return dense + 4
    needs_three = any(isinstance(layer, Quantized) or getattr(layer, "shapes", ()) for layer in recipe.layers)
    return dense + (3 if needs_three else 2)


def world_of(recipe: Recipe, case: Case) -> SimulatedWorld:
    """Return a new world for a case. A method that treats tensors apart sees two of them."""
    return SimulatedWorld(recipe, case.world_size, case.numel, bounds=(0, case.numel // 3, case.numel))


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors are equal bit for bit, -0.0 and NaN included."""
    return a.shape == b.shape and torch.equal(a.view(torch.int32), b.view(torch.int32))


def same_vector(a: SparseVector, b: SparseVector) -> bool:
    """Whether two sparse vectors have the same indices and the same bits."""
    return torch.equal(a.indices, b.indices) and same_bits(a.values, b.values)


@dataclass(frozen=True)
class Step:
    """One step of a recorded run: its inputs and its results, by rank."""

    gradient: torch.Tensor
    before: torch.Tensor
    means: list[SparseVector]
    after: torch.Tensor
    states: list[object]
    allowed: list[Forecast]
    meters: list[Meter]
    phases: list[str]
    seen: Any


@dataclass(frozen=True)
class Run:
    """All steps of one case, and the state dict of the world before each of them."""

    recipe: Recipe
    case: Case
    steps: list[Step]
    saved: list[dict[str, object]]


def recorded(
    recipe: Recipe, case: Case, *, with_states: bool = True, look: Callable[[SimulatedWorld], Any] = lambda world: None
) -> Run:
    """Run a case once, for all laws that check recorded runs. Some of them also need the states of each step.

    What ``look`` returns before a step is kept, too.
    """
    world, steps, saved = world_of(recipe, case), [], []
    for gradient in case.gradients():
        if with_states:
            saved.append(copy.deepcopy(world.state_dict()))
        before, allowed, seen, phases = world.residuals, world.predicted_traffic, look(world), list[str]()
        given = gradient.clone()
        means = world.step(given, before_round=lambda _, ops, phases=phases: phases.append(ops[0].phase))
        assert same_bits(given, gradient)
        states = copy.deepcopy(states_of(world)) if with_states else []
        meters = world.scheduler.meters
        steps.append(Step(gradient, before, means, world.residuals, states, allowed, meters, phases, seen))
    return Run(recipe, case, steps, saved)


class LawOfRuns:
    """A law that checks a recorded run. Calling it with a recipe and a case records the run first."""

    def __init__(self, check: Callable[..., None], *, of_states: bool = False) -> None:
        self.check = check
        self.of_states = of_states
        self.__name__, self.__doc__ = check.__name__, check.__doc__

    def __call__(self, recipe: Recipe, case: Case, **options: object) -> None:
        """Record a run of ``case`` and check it."""
        self.check(recorded(recipe, case, with_states=self.of_states), **options)


def slack(recipe: Recipe) -> float:
    """Return the relative error that exact laws allow: 0 unless values are rounded on the wire.

    What rounding cuts off has more bits than the exact gradients. Adding the next gradient to it may round. It may also
    be larger than the gradient, if a value far below its scale is sent as the scale. Errors are then relative to it.
    """
    formats = [getattr(layer, field, "fp32") for layer in recipe.layers for field in ("values", "small")]
    return 2.0**-20 if any(name != "fp32" for name in formats) else 0.0


@LawOfRuns
def conservation(run: Run, *, tolerance: float | None = None) -> None:
    """Per coordinate, the sum of residuals and gradients equals world_size x mean + the sum of residuals afterwards."""
    tolerance = slack(run.recipe) if tolerance is None else tolerance
    for step in run.steps:
        before, gradient = step.before.double(), step.gradient.double()
        held = (before + gradient).sum(0)
        scale = before.abs().sum(0) + gradient.abs().sum(0)
        if slack(run.recipe):
            scale += step.after.double().abs().sum(0)
        after = step.means[0].to_dense().double() * run.case.world_size + step.after.double().sum(0)
        assert ((held - after).abs() <= tolerance * scale).all()


@LawOfRuns
def agreement(run: Run) -> None:
    """Every worker returns the same vector, bit for bit."""
    for step in run.steps:
        assert len(step.means) == run.case.world_size
        assert all(same_vector(mean, step.means[0]) for mean in step.means)


@LawOfRuns
def form(run: Run) -> None:
    """Indices strictly increase inside ``[0, numel)``. An empty result is legal."""
    for step in run.steps:
        for mean in step.means:
            assert mean.numel == run.case.numel
            assert mean.indices.dtype == torch.int32
            assert mean.values.dtype == torch.float32
            assert (mean.indices[1:] > mean.indices[:-1]).all()
            assert ((mean.indices >= 0) & (mean.indices < run.case.numel)).all()


@LawOfRuns
def equivalence(run: Run, *, everything: bool = False) -> None:
    """The sum of all means plus the mean of the residuals equals the sum of the dense means.

    With ``everything`` (density 1), each mean is the dense all-reduce mean and all residuals are zero.
    """
    delivered = torch.zeros(run.case.numel, dtype=torch.float64)
    dense = torch.zeros(run.case.numel, dtype=torch.float64)
    for step in run.steps:
        mean = step.means[0].to_dense()
        delivered += mean.double()
        dense += step.gradient.double().mean(0)
        if everything:
            assert torch.equal(mean, step.gradient.mean(0))
            assert not step.after.any()
    left = run.steps[-1].after.double().sum(0) / run.case.world_size
    scale = sum((step.gradient.double().abs() + step.after.double().abs()).mean(0) for step in run.steps)
    assert ((delivered + left - dense).abs() <= slack(run.recipe) * scale).all()


@LawOfRuns
def budget(run: Run) -> None:
    """In every phase, in both directions and on every rank, the traffic stays within the method's prediction."""
    for step in run.steps:
        for meter, forecast in zip(step.meters, step.allowed, strict=True):
            for phase in meter.sent_by_phase:
                sent, received = meter.sent_by_phase[phase], meter.received_by_phase[phase]
                assert forecast.allows(phase, sent, received), (phase, sent, received, forecast.phases.get(phase))
        assert sum(m.sent.bytes for m in step.meters) == sum(m.received.bytes for m in step.meters)


@partial(LawOfRuns, of_states=True)
def resume(run: Run) -> None:
    """A run that is saved, loaded and continued gives the same bits as an uninterrupted run."""
    for step, saved in zip(run.steps, run.saved, strict=True):
        world = world_of(run.recipe, run.case)
        world.load_state_dict(saved)
        _same_as(step, world)


@partial(LawOfRuns, of_states=True)
def determinism(run: Run) -> None:
    """The same inputs and state give the same bits."""
    world = world_of(run.recipe, run.case)
    for step in run.steps:
        _same_as(step, world)


# The laws that check one recorded run. Resuming every step from its saved state implies determinism.
OF_RUNS = (equivalence, conservation, agreement, form, budget, resume)


def identity(recipe: Recipe, case: Case) -> None:
    """A single worker sends no message, and mean + residual = input."""
    world = SimulatedWorld(recipe, 1, case.numel)
    for gradient in case.gradients():
        held = world.residuals[0] + gradient[0]
        (mean,) = world.step(gradient[:1])
        assert torch.equal(mean.to_dense() + world.residuals[0], held)
        assert world.traffic == [(0, 0)]
        assert world.received == [(0, 0)]


class InjectedFailure(Exception):  # noqa: N818 - not an error of ours
    """Stands for a network failure."""


def atomicity(recipe: Recipe, case: Case, *, every_round: bool = False) -> None:
    """A failure in any round leaves residuals and states unchanged, and the step can be repeated.

    In each phase one round fails, drawn with the seed of the case. With ``every_round``, each round fails once.
    """
    world, control = world_of(recipe, case), world_of(recipe, case)
    generator = random.Random(case.seed)  # noqa: S311 - not for secrets
    for gradient in case.gradients():
        expected, rounds = fatal_rounds(control, gradient, None if every_round else generator)
        for fatal in rounds:
            before, states = world.residuals, states_of(world)

            def fail(number: int, _: object, fatal: int = fatal) -> None:
                if number == fatal:
                    raise InjectedFailure

            kept = gradient.clone()
            with pytest.raises(InjectedFailure):
                world.step(gradient, before_round=fail)
            assert same_bits(world.residuals, before)
            assert same_bits(gradient, kept)
            assert states_of(world) == states
        _same_result(world, world.step(gradient), expected, control)


def faults(recipe: Recipe, case: Case, *, rounds: float = 2) -> int:
    """A message that is dropped, duplicated, reordered or corrupted causes a named error or no difference.

    After the error nothing has changed, and the step can be repeated. Return the number of injected faults. Each kind
    of fault meets at most ``rounds`` rounds of each step, drawn with the seed of the case. The world that has met the
    last one takes the next step.
    """
    world, control, injected = world_of(recipe, case), world_of(recipe, case), 0
    generator = random.Random(case.seed)  # noqa: S311 - not for secrets
    for gradient in case.gradients():
        quiet = Faults(KINDS[0], -1, 0)
        expected = control.step(gradient, faults=quiet)
        met = int(min(rounds, len(quiet.seen)))
        before, states = world.residuals, states_of(world)
        # A world that has reported a fault is as it was, and meets the next one.
        trial, is_done = copy.deepcopy(world), False
        for kind in KINDS:
            for number in generator.sample(sorted(quiet.seen), met):
                network = Faults(kind, number, case.seed, quiet.seen[number])
                if is_done:
                    trial, is_done = copy.deepcopy(world), False
                reported = ""
                try:
                    means = trial.step(gradient, faults=network)
                except (ExchangeTimeoutError, ProtocolMismatchError) as error:
                    reported = str(error)
                if reported:
                    assert repr(network) in reported  # with the seed that reproduces it
                    assert same_bits(trial.residuals, before), network
                    assert states_of(trial) == states, network
                else:
                    assert kind not in ("drop", "corrupt"), network
                    _same_result(trial, means, expected, control)
                    is_done = True
                assert network.done, network
                injected += 1
        if not is_done:
            _same_result(trial, trial.step(gradient), expected, control)
        world = trial
    return injected


def fatal_rounds(
    control: SimulatedWorld, gradient: torch.Tensor, generator: random.Random | None
) -> tuple[list[SparseVector], list[int]]:
    """Take a step, and return its means and one round of each phase, or all rounds if ``generator`` is None."""
    phases: dict[str, list[int]] = {}

    def collect(number: int, operations: Sequence[Op]) -> None:
        phases.setdefault(operations[0].phase, []).append(number)

    means = control.step(gradient, before_round=collect)
    rounds = sorted(n for found in phases.values() for n in ([generator.choice(found)] if generator else found))
    return means, rounds


def refusal(recipe: Recipe, case: Case, bad: float = float("nan")) -> None:
    """Every worker detects a NaN or Inf on any worker in the same step, and nothing changes."""
    world = world_of(recipe, case)
    generator = torch.Generator().manual_seed(case.seed)
    for gradient in case.gradients():
        rank = int(torch.randint(case.world_size, (1,), generator=generator))
        where = int(torch.randint(case.numel, (1,), generator=generator))
        poisoned = gradient.clone()
        poisoned[rank, where] = bad
        before, states = world.residuals, states_of(world)
        with pytest.raises(NonFiniteError) as caught:
            world.step(poisoned)
        assert caught.value.ranks in ((rank,), ())
        assert sorted(world.scheduler.raised) == list(range(case.world_size))
        assert all(isinstance(error, NonFiniteError) for error in world.scheduler.raised.values())
        assert same_bits(world.residuals, before)
        assert states_of(world) == states
        world.step(gradient)


def overflow(recipe: Recipe, case: Case) -> None:
    """Finite gradients whose sum is not finite are rejected like a NaN, or they stay in the residuals.

    A method that sums in other units may be able to represent the sum. The mean then holds all of it.
    """
    world = world_of(recipe, case)
    where = case.numel // 2
    for gradient in case.gradients():
        huge = gradient.clone()
        huge[:, where] = 3e38
        before, states = world.residuals, states_of(world)
        try:
            means = world.step(huge)
        except NonFiniteError:
            assert sorted(world.scheduler.raised) == list(range(case.world_size))
            assert same_bits(world.residuals, before)
            assert states_of(world) == states
            world.step(gradient)
        else:
            held, residual = (before + huge)[:, where], world.residuals[:, where]
            if where in means[0].indices:
                mean = means[0].to_dense()[where].double()
                assert torch.isclose(mean * case.world_size + residual.double().sum(), held.double().sum(), rtol=1e-6)
            else:
                assert torch.equal(residual, held)
            return


def _same_as(step: Step, world: SimulatedWorld) -> None:
    """Assert that ``world`` repeats a recorded step with the same bits."""
    assert all(same_vector(a, b) for a, b in zip(step.means, world.step(step.gradient), strict=True))
    assert same_bits(step.after, world.residuals)
    assert step.states == states_of(world)


def _same_result(
    world: SimulatedWorld, means: Sequence[SparseVector], expected: Sequence[SparseVector], control: SimulatedWorld
) -> None:
    """Assert that a step of ``world`` has given the ``expected`` means, and that it has ended as ``control`` has."""
    assert all(same_vector(a, b) for a, b in zip(means, expected, strict=True))
    assert same_bits(world.residuals, control.residuals)
    assert states_of(world) == states_of(control)


def states_of(world: SimulatedWorld) -> list[object]:
    """Return the algorithm's state on each rank."""
    return [worker.algorithm.state for worker in world.workers]
