"""Predictions of ordinary steps, beside the traffic of simulated steps."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from statistics import fmean

import pytest
import torch
from tritoncomm import OkTopk, Recipe, SimulatedWorld, SparDL, TopkAllgather, algorithms, recipe
from tritoncomm.algorithms.base import EntryRecipe, IndexRecipe, StaticRecipe
from tritoncomm.planning.synthetic_gradients import LayeredGradients
from tritoncomm.scheduler.cost import WORD, Traffic

import laws
from baselines import GTopk, TopkDSA
from depth import trials
from recipes import under_test

STEPS = 6
CLOSE = 1.5  # the factor by which forecasts may differ from a step
SIZES = [(20_000, 4, 0.01), (20_000, 3, 0.05), *trials([], [(20_000, 16, 0.02)])]  # values, workers, density
# Their number of entries is not k: it follows from a fit, from a constant threshold, or from one that adapts.
FLOATING = ("gaussiank", "sidco", "hard_threshold", "exdyna", "micro")


def recipes() -> Iterator[Recipe]:
    """Yield every method that sends indices, in each format of messages."""
    for name in algorithms():
        method = recipe(name) if name != "random_block" else None
        if isinstance(method, IndexRecipe):
            yield from (method, replace(method, packed=True))
        if isinstance(method, IndexRecipe) and isinstance(method, StaticRecipe):
            yield replace(method, static=True)
        if isinstance(method, EntryRecipe):
            yield from (replace(method, values=values) for values in ("4bit", "8bit"))
    yield from (GTopk(), TopkDSA(), OkTopk(strict_volume=True, values="4bit"))
    yield SparDL(teams=2, values="4bit")


@cache
def gradients(world_size: int, numel: int) -> list[torch.Tensor]:
    """Return the gradients of each step, which all recipes share, ``[world_size, numel]``."""
    sources = [LayeredGradients(numel, rank) for rank in range(world_size)]
    return [torch.stack([source.at(step) for source in sources]) for step in range(STEPS)]


def busiest(recipe: Recipe, world_size: int, numel: int) -> tuple[Traffic, Traffic, float]:
    """Return what the busiest rank sends and receives in ordinary steps, and the entries of a step."""
    world = SimulatedWorld(recipe, world_size, numel)
    sent, received, entries = [], [], []
    for step in range(STEPS):
        means = world.step(gradients(world_size, numel)[step])
        report = world.workers[0].algorithm.report
        if step > 2 and not (report.get("reevaluated") or report.get("repartitioned")):
            sent.append(max(world.traffic, key=lambda traffic: traffic.bytes))
            received.append(max(world.received, key=lambda traffic: traffic.bytes))
            selected = fmean(worker.accumulator.selected for worker in world.workers)
            entries.append(len(means[0]) if recipe.name in ("exdyna", "micro") else selected)
    assert len(sent) > 1
    return *(
        Traffic(*(round(fmean(column)) for column in zip(*rows, strict=True))) for rows in (sent, received)
    ), fmean(entries)


@pytest.mark.parametrize("chosen", list(recipes()), ids=repr)
def test_forecasts_of_ordinary_steps(chosen: Recipe) -> None:
    """The prediction of an ordinary step is within a factor of 1.5 of what the busiest rank moves."""
    for numel, world_size, density in SIZES:
        method = replace(chosen, density=density)
        if world_size == 3 and isinstance(method, SparDL) and method.teams == 2:
            continue
        sent, received, entries = busiest(method, world_size, numel)
        if method.name in FLOATING and getattr(method, "static", False) is not True:
            method = replace(method, density=entries / numel)
        forecast = method.build(numel).predicted_traffic(world_size, ordinary=True)
        for measured, expected in ((sent, forecast.sent), (received, forecast.received)):
            assert measured.bytes / CLOSE <= expected.bytes <= measured.bytes * CLOSE, (numel, world_size)
            assert measured.messages / CLOSE <= expected.messages <= measured.messages * CLOSE


@pytest.mark.parametrize("encoding", [{}, {"packed": True}, {"values": "8bit"}, {"values": "4bit"}, {"values": "1bit"}])
@pytest.mark.parametrize(
    "method", [TopkAllgather(density=0.05), SparDL(density=0.05), SparDL(density=0.05, teams=2)], ids=repr
)
def test_forecasts_of_known_lengths_are_exact(method: Recipe, encoding: dict[str, object]) -> None:
    """Each rank sends and receives what is forecast, to the byte and phase by phase, where all blocks are alike.

    Blocks of SparDL differ unless the size of a team divides the number of values and that of entries. The forecast
    then counts the longest block for all. It has one entry more than the shortest.
    """
    for world_size, numel in itertools.product((2, 4, 6), (2_400, 2_500)):
        members = world_size // getattr(method, "teams", world_size)
        alike = numel % members == 0 and numel // 20 % members == 0
        world = SimulatedWorld(replace(method, **encoding), world_size, numel)
        expected = world.predicted_traffic
        world.step(laws.normal(world_size, numel))
        for meter, forecast in zip(world.scheduler.meters, expected, strict=True):
            for phase, flow in forecast.phases.items():
                for by_phase, most in ((meter.sent_by_phase, flow.sent), (meter.received_by_phase, flow.received)):
                    moved = by_phase.get(phase, Traffic())
                    assert moved.messages == most.messages
                    assert moved.bytes == most.bytes or (not alike and 0.95 * most.bytes < moved.bytes < most.bytes)


def test_forecast_of_oktopk_is_not_its_bound() -> None:
    """In an ordinary step, Ok-Topk sends at most the paper's 6k(P-1)/P words. Its bound covers the worst split."""
    numel, world_size = 1_000_000, 8
    algorithm = OkTopk(density=0.01).build(numel)
    ordinary, bound = (algorithm.predicted_traffic(world_size, ordinary=each) for each in (True, False))
    k = numel // 100
    assert 4 * k * 7 / 8 <= ordinary.received.bytes / WORD <= 6 * k * 7 / 8
    assert bound.received.bytes > 3 * ordinary.received.bytes
    world = SimulatedWorld(OkTopk(density=0.2, values="4bit"), 8, 2000)
    first = world.predicted_traffic[0].phases["split-and-reduce"].received
    for step in range(4):
        world.step(laws.normal(8, 2000, seed=step))
    later = world.predicted_traffic[0].phases["split-and-reduce"].received
    assert later.bytes < 0.8 * first.bytes  # the regions are known, and have no room for all entries
    for phase, flow in ordinary.phases.items():
        assert bound.allows(phase, flow.sent, flow.received), phase


# Not a tail in 8 bits beside a static form that begins with dense steps in fp32: it is sent as in the next step.
@pytest.mark.parametrize("name", sorted(set(under_test(0.1)) - {"dense-tail-8bit-static"}))
def test_an_ordinary_step_needs_no_state(name: str) -> None:
    """The prediction of an ordinary step is the same before the first step and after some, dense ones too."""
    recipe = under_test(0.1)[name]
    case = laws.fitted(laws.Case(3, 90, ("random",) * 2), recipe)
    world = SimulatedWorld(recipe, case.world_size, case.numel)
    algorithm = world.workers[0].algorithm
    before = algorithm.predicted_traffic(case.world_size, ordinary=True)
    for gradient in case.gradients():
        world.step(gradient)
    assert algorithm.predicted_traffic(case.world_size, ordinary=True) == before
