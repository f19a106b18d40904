"""The laws of every method, on DDP and FSDP2 between real processes."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch
import tritoncomm
from helpers import run_workers
from model_law_workers import Seen, Setup, record
from tritoncomm import algorithms
from tritoncomm.algorithms import takes_density
from tritoncomm.scheduler.cost import Forecast, all_gather, all_reduce, both
from tritoncomm.step.exchange.stages import Staged

import laws
from depth import DEEP
from recipes import possible

# Kinds of modules and numbers of ranks. With four ranks, FSDP has two replicas of two shards.
PLACES = (("ddp", 3), ("fsdp", 1), ("fsdp", 4))
# Four steps reach the first step of Ok-Topk that reuses thresholds.
FAMILIES = ("random", "disjoint", "ties", "one-region", "cancelling", "zero")
LONG = ("random",) * 33  # a scale is computed after 20 steps
# Uneven rows, a shard without elements, and small and one-dimensional tensors, which are sent dense.
SHAPES = ((9, 7), (1, 20), (30,), (12, 11), (2, 3), (14, 5))


def exchanging(model: str, world_size: int) -> int:
    """Return the number of ranks that exchange with each other."""
    return world_size // Setup(model, tritoncomm.Dense(), (), ()).shards(world_size)


def setups(model: str, world_size: int) -> dict[tuple[str, str], Setup]:
    """Return all runs by kind and recipe."""
    found: dict[tuple[str, str], Setup] = {}
    ranks = exchanging(model, world_size)
    for name, recipe in possible(0.07, ranks).items():
        # Other recipes than the methods equal the simulation between processes, see test_process_group.py.
        if (DEEP or name in algorithms()) and not isinstance(recipe, Staged):  # wrap() adds stages
            found["one tensor", name] = Setup(model, recipe, ((1, 210),), FAMILIES)
    for name, recipe in possible(1.0, ranks).items():
        if name in algorithms() and takes_density(name):  # the other one rounds what it delivers
            found["density 1", name] = Setup(model, recipe, ((1, 60),), FAMILIES[:3])
    for name, recipe in possible(0.1, ranks).items():
        if name in algorithms():
            found["several tensors", name] = Setup(model, recipe, SHAPES, FAMILIES, dense_below=16)
        if name in ("oktopk", "oktopk-4bit"):  # the second has the formats that are the default of wrap()
            found["small in 8 bits", name] = Setup(model, recipe, SHAPES, FAMILIES, dense_below=16, small="8bit")
        if name in ("oktopk", "topk_allgather"):
            found["by update", name] = Setup(model, recipe, ((10, 15),), LONG, optimizer="AdamW")
    return found


@cache
def runs(model: str, world_size: int, kind: str) -> list[laws.Run]:
    """Return the recorded runs of a kind: for each recipe, one per set of ranks that exchange with each other."""
    wanted = [setup for (each, _), setup in setups(model, world_size).items() if each == kind]
    found = run_workers(record, world_size, wanted)
    return [
        joined(setup, [found[rank][number] for rank in range(first, world_size, setup.shards(world_size))])
        for number, setup in enumerate(wanted)
        for first in range(setup.shards(world_size))
    ]


def joined(setup: Setup, seen: list[list[Seen]]) -> laws.Run:
    """Return the run of a set of ranks from what each of them has recorded."""
    by_step = list(zip(*seen, strict=True))
    steps = [
        laws.Step(
            torch.stack([one.gradient for one in ranks]),
            torch.stack([one.before for one in ranks]),
            [one.mean for one in ranks],
            torch.stack([one.after for one in ranks]),
            [one.state for one in ranks],
            [one.allowed for one in ranks],
            [one.meter for one in ranks],
        )
        for ranks in by_step
    ]
    case = laws.Case(len(seen), steps[0].gradient.shape[1], setup.families)
    return laws.Run(setup.whole, case, steps, [{"workers": [one.saved for one in ranks]} for ranks in by_step])


def with_confirmation(law: laws.LawOfRuns, run: laws.Run) -> None:
    """Check ``law``. The predictions of the methods do not contain what ``step()`` adds to them.

    An all-reduce confirms a step. In the first one, ranks also compare what they have if values are rounded.
    """
    size, steps = run.case.world_size, []
    for number, step in enumerate(run.steps):
        confirm = {"confirm": both(all_reduce(1, 8, size))} if size > 1 else {}
        compare = {"compare": both(all_gather(1, 8, size))} if size > 1 and number == 0 else {}
        allowed = [Forecast({**forecast.phases, **confirm, **compare}) for forecast in step.allowed]
        steps.append(replace(step, allowed=allowed))
    law.check(replace(run, steps=steps))


OF_RUNS = (*laws.OF_RUNS, laws.determinism)  # a simulation is neither interrupted nor resumed
OF_VALUES = (laws.conservation, laws.agreement, laws.form, laws.equivalence)


@pytest.mark.parametrize(("model", "world_size"), PLACES)
@pytest.mark.parametrize("law", OF_RUNS, ids=lambda law: law.__name__)
def test_one_tensor(law: laws.LawOfRuns, model: str, world_size: int) -> None:
    """Every law of runs holds for every recipe, although a step was rejected and the run was resumed on the way.

    Determinism compares with a simulation, in which neither has happened.
    """
    for run in runs(model, world_size, "one tensor"):
        with_confirmation(law, run)


@pytest.mark.parametrize(("model", "world_size"), PLACES)
@pytest.mark.parametrize("law", OF_RUNS, ids=lambda law: law.__name__)
def test_selection_by_update(law: laws.LawOfRuns, model: str, world_size: int) -> None:
    """The laws hold with AdamW, which scales the vector by its second moment."""
    for run in runs(model, world_size, "by update"):
        with_confirmation(law, run)


@pytest.mark.parametrize(("model", "world_size"), PLACES)
@pytest.mark.parametrize("law", OF_VALUES, ids=lambda law: law.__name__)
def test_several_tensors(law: laws.LawOfRuns, model: str, world_size: int) -> None:
    """The laws hold for the whole model in DDP, and with FSDP's padded and empty shards."""
    for run in runs(model, world_size, "several tensors"):
        law.check(run)


@pytest.mark.parametrize(("model", "world_size"), PLACES)
@pytest.mark.parametrize("law", OF_VALUES, ids=lambda law: law.__name__)
def test_small_tensors_in_8_bits(law: laws.LawOfRuns, model: str, world_size: int) -> None:
    """The laws hold for the whole model if small tensors travel in 8 bits, and have a residual."""
    for run in runs(model, world_size, "small in 8 bits"):
        law.check(run)


@pytest.mark.parametrize(("model", "world_size"), PLACES)
def test_equivalence_at_density_one(model: str, world_size: int) -> None:
    """At density 1 every mean is the dense mean and all residuals are zero."""
    for run in runs(model, world_size, "density 1"):
        laws.equivalence.check(run, everything=True)


def test_identity() -> None:
    """A single worker sends no message, and mean + residual = input."""
    for run in runs("fsdp", 1, "one tensor"):
        for step in run.steps:
            assert torch.equal(step.means[0].to_dense() + step.after[0], step.before[0] + step.gradient[0])
            assert (step.meters[0].sent, step.meters[0].received) == ((0, 0), (0, 0))
