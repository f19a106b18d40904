"""The laws that every exchange method obeys, one function each, and the cases they are tried on.

Gradients are small integers times a power of two times the number of workers: every sum and mean is
exact in any order, so the laws are equalities of bits. ``conservation`` has a tolerance for the
separate run on ordinary floats.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass

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
from tritoncomm.scheduler.faults import KINDS, Faults

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


def conservation(recipe: Recipe, case: Case, *, tolerance: float = 0.0) -> None:
    """Per coordinate: what all workers held before = world_size x mean + what they still owe."""
    world = world_of(recipe, case)
    for gradient in case.gradients():
        before = world.residuals.double()
        held = (before + gradient.double()).sum(0)
        scale = before.abs().sum(0) + gradient.double().abs().sum(0)
        mean = world.step(gradient)[0].to_dense().double()
        after = mean * case.world_size + world.residuals.double().sum(0)
        assert ((held - after).abs() <= tolerance * scale).all()


def agreement(recipe: Recipe, case: Case) -> None:
    """Every worker returns the same vector, bit for bit."""
    world = world_of(recipe, case)
    for gradient in case.gradients():
        means = world.step(gradient)
        assert len(means) == case.world_size
        assert all(same_vector(mean, means[0]) for mean in means)


def form(recipe: Recipe, case: Case) -> None:
    """Indices strictly increase inside numel; empty is legal."""
    world = world_of(recipe, case)
    for gradient in case.gradients():
        for mean in world.step(gradient):
            assert mean.numel == case.numel
            assert mean.indices.dtype == torch.int32
            assert mean.values.dtype == torch.float32
            assert (mean.indices[1:] > mean.indices[:-1]).all()
            assert ((mean.indices >= 0) & (mean.indices < case.numel)).all()


def equivalence(recipe: Recipe, case: Case, *, everything: bool = False) -> None:
    """What was delivered over all steps plus what is still owed is the dense sum.

    With ``everything`` (density 1) each mean is the dense all-reduce mean and nothing is owed.
    """
    world = world_of(recipe, case)
    delivered = torch.zeros(case.numel, dtype=torch.float64)
    dense = torch.zeros(case.numel, dtype=torch.float64)
    for gradient in case.gradients():
        mean = world.step(gradient)[0].to_dense()
        delivered += mean.double()
        dense += gradient.double().mean(0)
        if everything:
            assert torch.equal(mean, gradient.mean(0))
            assert not world.residuals.any()
    assert torch.equal(delivered + world.residuals.double().sum(0) / case.world_size, dense)


def identity(recipe: Recipe, case: Case) -> None:
    """One worker sends no message, and mean + residual = input."""
    world = SimulatedWorld(recipe, 1, case.numel)
    for gradient in case.gradients():
        held = world.residuals[0] + gradient[0]
        (mean,) = world.step(gradient[:1])
        assert torch.equal(mean.to_dense() + world.residuals[0], held)
        assert world.traffic == [(0, 0)]
        assert world.received == [(0, 0)]


def budget(recipe: Recipe, case: Case) -> None:
    """In every phase, either way and on every rank: no more messages and bytes than the method predicts."""
    world = world_of(recipe, case)
    for gradient in case.gradients():
        allowed = world.predicted_traffic
        world.step(gradient)
        for meter, forecast in zip(world.scheduler.meters, allowed, strict=True):
            for phase in meter.sent_by_phase:
                sent, received = meter.sent_by_phase[phase], meter.received_by_phase[phase]
                assert forecast.allows(phase, sent, received), (phase, sent, received, forecast.phases.get(phase))
        assert sum(t.bytes for t in world.traffic) == sum(t.bytes for t in world.received)


class InjectedFailure(Exception):  # noqa: N818 - not an error of ours
    """Stands in for a network that breaks."""


def atomicity(recipe: Recipe, case: Case) -> None:
    """A failure at any round leaves residuals and states as they were, and the step can be repeated."""
    world, control = world_of(recipe, case), world_of(recipe, case)
    for gradient in case.gradients():
        for fatal in range(rounds_of(world, gradient)):
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


def rounds_of(world: SimulatedWorld, gradient: torch.Tensor) -> int:
    """How many rounds the next step takes, counted on a copy."""
    count = 0

    def tick(*_: object) -> None:
        nonlocal count
        count += 1

    copy.deepcopy(world).step(gradient, before_round=tick)
    return count


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


def resume(recipe: Recipe, case: Case) -> None:
    """Save, load, continue = never stopped, bit for bit."""
    world = world_of(recipe, case)
    for gradient in case.gradients():
        saved = copy.deepcopy(world.state_dict())
        loaded = world_of(recipe, case)
        loaded.load_state_dict(saved)
        _same_step(world, loaded, gradient)


def determinism(recipe: Recipe, case: Case) -> None:
    """The same inputs and state give the same bits."""
    first, second = world_of(recipe, case), world_of(recipe, case)
    for gradient in case.gradients():
        _same_step(first, second, gradient)


def _same_step(first: SimulatedWorld, second: SimulatedWorld, gradient: torch.Tensor) -> None:
    means = first.step(gradient)
    assert all(same_vector(a, b) for a, b in zip(means, second.step(gradient), strict=True))
    assert same_bits(first.residuals, second.residuals)
    assert _states(first) == _states(second)


def _states(world: SimulatedWorld) -> list[object]:
    return [worker.algorithm.state for worker in world.workers]
