"""The laws that every exchange method obeys, one function each, and the cases they are tried on.

Gradients are small integers times a power of two times the number of workers: every sum and mean is
exact in any order, so the laws are equalities of bits. ``conservation`` has a tolerance for the
separate run on ordinary floats.
"""

from __future__ import annotations

import copy
import dataclasses
import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import pytest
import torch
from hypothesis import strategies as st
from tritoncomm import (
    ExchangeTimeoutError,
    NonFiniteError,
    ProtocolMismatchError,
    Recipe,
    SimulatedWorld,
    SparseVector,
)
from tritoncomm.algorithms import Preconditioned
from tritoncomm.scheduler.cost import Forecast
from tritoncomm.scheduler.faults import KINDS, Faults
from tritoncomm.scheduler.meter import Meter
from tritoncomm.scheduler.rounds import Op

FAMILIES = ("random", "sparse", "zero", "ties", "one-region", "cancelling", "identical", "one-entry", "disjoint")
MAX_WORLD_SIZE = 17


@dataclass(frozen=True)
class Case:
    """What a law is tried on: a world, and the gradients of some steps."""

    world_size: int
    numel: int
    families: tuple[str, ...]
    exponent: int = 0
    seed: int = 0
    exact: bool = True

    def gradients(self) -> Iterator[torch.Tensor]:
        """``[world_size, numel]`` for each step."""
        generator = torch.Generator().manual_seed(self.seed)
        for family in self.families:
            yield gradients(family, self.world_size, self.numel, generator, exact=self.exact) * 2.0**self.exponent


def gradients(
    family: str, world_size: int, numel: int, generator: torch.Generator, *, exact: bool = True
) -> torch.Tensor:
    """One step's gradients; multiples of ``world_size`` when ``exact``, heavy-tailed floats otherwise."""
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


def cases(
    *, exact: bool = True, min_world_size: int = 1, max_world_size: int = MAX_WORLD_SIZE
) -> st.SearchStrategy[Case]:
    """Cases for hypothesis to draw."""
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
    """``case`` with as many workers as ``recipe`` needs for equally large teams or nodes, and as many elements."""
    case = dataclasses.replace(case, numel=length(recipe, case.numel))
    while hasattr(recipe, "recipe") and not hasattr(recipe, "node_size"):
        recipe = recipe.recipe
    teams = getattr(recipe, "node_size", None) or getattr(recipe, "teams", 1)
    surplus = -case.world_size % teams if isinstance(teams, int) else 0
    return dataclasses.replace(case, world_size=case.world_size + surplus)


def length(recipe: Recipe, otherwise: int) -> int:
    """How many elements vectors for ``recipe`` have to have, if it says."""
    return sum(map(math.prod, recipe.shapes)) if isinstance(recipe, Preconditioned) else otherwise


def world_of(recipe: Recipe, case: Case) -> SimulatedWorld:
    """A fresh world for a case."""
    return SimulatedWorld(recipe, case.world_size, case.numel)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal bit for bit, -0.0 and NaN included."""
    return a.shape == b.shape and torch.equal(a.view(torch.int32), b.view(torch.int32))


def same_vector(a: SparseVector, b: SparseVector) -> bool:
    """The same support and the same bits."""
    return torch.equal(a.indices, b.indices) and same_bits(a.values, b.values)


@dataclass(frozen=True)
class Step:
    """One step of a recorded run: what went in and what came out, by rank."""

    gradient: torch.Tensor
    before: torch.Tensor
    means: list[SparseVector]
    after: torch.Tensor
    states: list[object]
    allowed: list[Forecast]
    meters: list[Meter]


@dataclass(frozen=True)
class Run:
    """All steps of one case, and the world before each of them, as its state dict."""

    recipe: Recipe
    case: Case
    steps: list[Step]
    saved: list[dict[str, object]]


def recorded(recipe: Recipe, case: Case, *, with_states: bool = True) -> Run:
    """Run a case once, for all laws that only look at what happened; some of them look at the states too."""
    world, steps, saved = world_of(recipe, case), [], []
    for gradient in case.gradients():
        if with_states:
            saved.append(copy.deepcopy(world.state_dict()))
        before, allowed = world.residuals, world.predicted_traffic
        means = world.step(gradient)
        states = copy.deepcopy(_states(world)) if with_states else []
        steps.append(Step(gradient, before, means, world.residuals, states, allowed, world.scheduler.meters))
    return Run(recipe, case, steps, saved)


class LawOfRuns:
    """A law that is checked on a recorded run. Called like any other law, it records one itself."""

    def __init__(self, check: Callable[..., None], *, of_states: bool = False) -> None:
        self.check = check
        self.of_states = of_states
        self.__name__, self.__doc__ = check.__name__, check.__doc__

    def __call__(self, recipe: Recipe, case: Case, **options: object) -> None:
        """Record ``case`` and check it."""
        self.check(recorded(recipe, case, with_states=self.of_states), **options)


@LawOfRuns
def conservation(run: Run, *, tolerance: float = 0.0) -> None:
    """Per coordinate: what all workers held before = world_size x mean + their residuals after."""
    for step in run.steps:
        before, gradient = step.before.double(), step.gradient.double()
        held = (before + gradient).sum(0)
        scale = before.abs().sum(0) + gradient.abs().sum(0)
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
    """Indices strictly increase inside numel; empty is legal."""
    for step in run.steps:
        for mean in step.means:
            assert mean.numel == run.case.numel
            assert mean.indices.dtype == torch.int32
            assert mean.values.dtype == torch.float32
            assert (mean.indices[1:] > mean.indices[:-1]).all()
            assert ((mean.indices >= 0) & (mean.indices < run.case.numel)).all()


@LawOfRuns
def equivalence(run: Run, *, everything: bool = False) -> None:
    """What was delivered over all steps plus the mean of the residuals is the dense sum.

    With ``everything`` (density 1) each mean is the dense all-reduce mean and residuals are zero.
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
    assert torch.equal(delivered + left, dense)


@LawOfRuns
def budget(run: Run) -> None:
    """In every phase, either way and on every rank: no more messages and bytes than the method predicts."""
    for step in run.steps:
        for meter, forecast in zip(step.meters, step.allowed, strict=True):
            for phase in meter.sent_by_phase:
                sent, received = meter.sent_by_phase[phase], meter.received_by_phase[phase]
                assert forecast.allows(phase, sent, received), (phase, sent, received, forecast.phases.get(phase))
        assert sum(m.sent.bytes for m in step.meters) == sum(m.received.bytes for m in step.meters)


@partial(LawOfRuns, of_states=True)
def resume(run: Run) -> None:
    """Save, load, continue = never stopped, bit for bit."""
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


# What is seen in one recorded run.
OF_RUNS = (conservation, agreement, form, equivalence, budget, resume, determinism)


def identity(recipe: Recipe, case: Case) -> None:
    """One worker sends no message, and mean + residual = input."""
    world = SimulatedWorld(recipe, 1, case.numel)
    for gradient in case.gradients():
        held = world.residuals[0] + gradient[0]
        (mean,) = world.step(gradient[:1])
        assert torch.equal(mean.to_dense() + world.residuals[0], held)
        assert world.traffic == [(0, 0)]
        assert world.received == [(0, 0)]


class InjectedFailure(Exception):  # noqa: N818 - not an error of ours
    """Stands in for a network that breaks."""


def atomicity(recipe: Recipe, case: Case, *, every_round: bool = False) -> None:
    """A failure at any round leaves residuals and states as they were, and the step can be repeated.

    One round of each phase fails, drawn by the seed of the case; with ``every_round`` each of them does.
    """
    world, control = world_of(recipe, case), world_of(recipe, case)
    generator = random.Random(case.seed)  # noqa: S311 - not for secrets
    for gradient in case.gradients():
        for fatal in fatal_rounds(world, gradient, None if every_round else generator):
            before, states = world.residuals, _states(world)

            def fail(number: int, _: object, fatal: int = fatal) -> None:
                if number == fatal:
                    raise InjectedFailure

            kept = gradient.clone()
            with pytest.raises(InjectedFailure):
                world.step(gradient, before_round=fail)
            assert same_bits(world.residuals, before)
            assert same_bits(gradient, kept)
            assert _states(world) == states
        again, expected = world.step(gradient), control.step(gradient)
        assert all(same_vector(a, b) for a, b in zip(again, expected, strict=True))
        assert same_bits(world.residuals, control.residuals)


def faults(recipe: Recipe, case: Case) -> int:
    """A message that is dropped, delayed, doubled, overtaken or damaged, in any round: a named error, or no difference.

    After the error nothing has changed, and the step can be repeated. Returns how many messages were struck.
    """
    world, control, struck = world_of(recipe, case), world_of(recipe, case), 0
    for gradient in case.gradients():
        quiet = Faults(KINDS[0], -1, 0)
        expected = copy.deepcopy(world).step(gradient, faults=quiet)
        for number, messages in quiet.seen.items():
            for kind in KINDS:
                trial, network = copy.deepcopy(world), Faults(kind, number, case.seed, messages)
                before, states = trial.residuals, _states(trial)
                said = ""
                try:
                    means = trial.step(gradient, faults=network)
                except (ExchangeTimeoutError, ProtocolMismatchError) as error:
                    said = str(error)
                assert network.done, network
                struck += 1
                if said:
                    assert repr(network) in said  # with the seed that shows it again
                    assert kind != "delay", network
                    assert same_bits(trial.residuals, before), network
                    assert _states(trial) == states, network
                    means = trial.step(gradient)
                else:
                    assert kind not in ("drop", "corrupt"), network
                assert all(same_vector(a, b) for a, b in zip(means, expected, strict=True)), network
        _same_step(world, control, gradient)
    return struck


def fatal_rounds(world: SimulatedWorld, gradient: torch.Tensor, generator: random.Random | None) -> list[int]:
    """Of each phase of the next step the number of one round, or of all rounds without a ``generator``."""
    phases: dict[str, list[int]] = {}

    def look(number: int, operations: Sequence[Op]) -> None:
        phases.setdefault(operations[0].phase, []).append(number)

    copy.deepcopy(world).step(gradient, before_round=look)
    return sorted(number for found in phases.values() for number in ([generator.choice(found)] if generator else found))


def refusal(recipe: Recipe, case: Case, bad: float = float("nan")) -> None:
    """A NaN or Inf anywhere: every worker learns it in this step and nothing changes."""
    world = world_of(recipe, case)
    generator = torch.Generator().manual_seed(case.seed)
    for gradient in case.gradients():
        rank = int(torch.randint(case.world_size, (1,), generator=generator))
        where = int(torch.randint(case.numel, (1,), generator=generator))
        poisoned = gradient.clone()
        poisoned[rank, where] = bad
        before, states = world.residuals, _states(world)
        with pytest.raises(NonFiniteError) as caught:
            world.step(poisoned)
        assert caught.value.ranks in ((rank,), ())
        assert sorted(world.scheduler.raised) == list(range(case.world_size))
        assert all(isinstance(error, NonFiniteError) for error in world.scheduler.raised.values())
        assert same_bits(world.residuals, before)
        assert _states(world) == states
        world.step(gradient)


def overflow(recipe: Recipe, case: Case) -> None:
    """Finite gradients whose sum is not finite are refused like a NaN, or not summed: then they are still owed.

    A method that sums in other units may have room for them; then all of it is in the mean.
    """
    world = world_of(recipe, case)
    where = case.numel // 2
    for gradient in case.gradients():
        huge = gradient.clone()
        huge[:, where] = 3e38
        before, states = world.residuals, _states(world)
        try:
            means = world.step(huge)
        except NonFiniteError:
            assert sorted(world.scheduler.raised) == list(range(case.world_size))
            assert same_bits(world.residuals, before)
            assert _states(world) == states
            world.step(gradient)
        else:
            held, owed = (before + huge)[:, where], world.residuals[:, where]
            if where in means[0].indices:
                mean = means[0].to_dense()[where].double()
                assert torch.isclose(mean * case.world_size + owed.double().sum(), held.double().sum(), rtol=1e-6)
            else:
                assert torch.equal(owed, held)
            return


def _same_as(step: Step, world: SimulatedWorld) -> None:
    """``world`` takes a recorded step and gets the same bits."""
    assert all(same_vector(a, b) for a, b in zip(step.means, world.step(step.gradient), strict=True))
    assert same_bits(step.after, world.residuals)
    assert step.states == _states(world)


def _same_step(first: SimulatedWorld, second: SimulatedWorld, gradient: torch.Tensor) -> None:
    means = first.step(gradient)
    assert all(same_vector(a, b) for a, b in zip(means, second.step(gradient), strict=True))
    assert same_bits(first.residuals, second.residuals)
    assert _states(first) == _states(second)


def _states(world: SimulatedWorld) -> list[object]:
    return [worker.algorithm.state for worker in world.workers]
