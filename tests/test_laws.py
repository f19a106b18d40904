"""Every law holds for every method: random cases, the methods with up to 17 workers, and fixed cases with up to 64.

Settings of a method share most of its code, and the laws of failures take most time. Each setting obeys every other one
of these laws, its neighbour in the list the rest, and in a deep run each obeys all.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from functools import partial

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from tritoncomm import Quantized, Recipe, SimulatedWorld, Warmup, algorithms
from tritoncomm.algorithms.base import Carriers
from tritoncomm.algorithms.staged import Staged

import laws
from depth import DEEP, examples, trials
from recipes import NAMES, under_test

DENSITIES = st.sampled_from([1e-6, 0.02, 0.1, 0.35, 0.9])
# Messages grow with the square of the number of workers, so a short run has fewer steps with many of them.
STEPS = ("random", "one-region", "random", "ties", "disjoint", "random")
BIG = [*trials([], [laws.Case(32, 700, STEPS)]), laws.Case(64, 700, STEPS[: trials(2, 6)])]
MANY = laws.Case(*trials((8, 300), (20, 700)), STEPS)
METHODS = [name for name in NAMES if name in algorithms()]
# Messages in a step grow with the square of the number of workers. Laws that repeat steps have fewer workers, and most
# recipes other than the methods have fewer still. A deep run has up to 17 everywhere.
SOME, FEW = (trials(number, laws.MAX_WORLD_SIZE) for number in (9, 5))
# Every method runs at every world size. SparDL's shape depends on the size most: that of its static form and of rounded
# values is the same. Other recipes have few workers in random cases, and 8 in a fixed one. A deep run has everything.
SHAPED = {*METHODS, *(n for n in NAMES if n.startswith("spardl") and "static" not in n and "bit" not in n)}
SIZES = [
    pytest.param(name, size, id=f"{name}-{size}")
    for name in NAMES
    for size in dict.fromkeys(laws.fitted(laws.Case(n, 1, ()), under_test(0.1)[name]).world_size for n in range(1, 18))
    if DEEP or name in SHAPED
]
# Every method runs with 64 workers, and other recipes with 8. A deep run has all recipes with 20, 32 and 64.
CROWDS = [
    pytest.param(name, case, id=f"{case.world_size}-{name}")
    for case in (*BIG, MANY)
    for name in NAMES
    if DEEP or (name in METHODS) == (case in BIG)
]


def in_turn(turn: int) -> pytest.MarkDecorator:
    """Give a test every method, and the other recipes that have this turn: 0 or 1. In a deep run, it has all."""
    chosen = [name for i, name in enumerate(NAMES) if DEEP or name in METHODS or i % 2 == turn]
    return pytest.mark.parametrize("name", chosen)


# The methods, the format that wrap() takes by default, and what has several teams or nodes of workers.
WIDE = {*METHODS, "oktopk-4bit", *(name for name in NAMES if "teams" in name or "hierarchical" in name)}


def smaller(name: str, case: laws.Case, drawn: int = 4) -> laws.Case:
    """Return ``case`` with few workers, unless the recipe needs many, and no steps that repeat others.

    Cases that are drawn have at most so many steps if the recipe is no method. A deep run has all steps and workers.
    """
    steps = laws.steps_of(under_test(0.1)[name])
    if name in METHODS:
        steps = 4
    elif case != laws.FOUR_STEPS:
        steps = min(steps, drawn)
    size = case.world_size if name in WIDE else 1 + (case.world_size - 1) % FEW
    return dataclasses.replace(case, world_size=size, families=case.families[: trials(steps, 6)])


def obeys(law: Callable[[Recipe, laws.Case], None], name: str, case: laws.Case, density: float) -> None:
    """Check ``law`` on the recipe called ``name``, with a world size that the recipe accepts."""
    recipe = under_test(density)[name]
    law(recipe, laws.fitted(case, recipe))


@pytest.mark.parametrize("name", NAMES)
@given(case=laws.cases(max_world_size=SOME), density=DENSITIES)
@example(case=laws.FOUR_STEPS, density=0.1)
@examples(trials(2, 4))
def test_equivalence_and_other_laws(name: str, case: laws.Case, density: float) -> None:
    """Every law of recorded runs holds bit for bit, at any density.

    The first of them: the delivered sums plus the residuals are the dense sum.
    """
    recipe = under_test(density)[name]
    run = laws.recorded(recipe, laws.fitted(smaller(name, case), recipe))
    for law in laws.OF_RUNS:
        law.check(run)


@pytest.mark.parametrize(("name", "world_size"), SIZES)
def test_equivalence_at_every_world_size(name: str, world_size: int) -> None:
    """The equivalence law holds at each world size, on vectors long enough for the layout of ExDyna's paper."""
    families = ("random", "one-region", "disjoint", "random")[: trials(2, 4)]
    obeys(laws.equivalence, name, laws.Case(world_size, 640, families), 0.05)


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("world_size", trials([1, 4], [1, 3, 8]))
def test_equivalence_around_every_method(name: str, world_size: int) -> None:
    """A warm-up and a dense all-reduce of small tensors can be combined with every method."""
    inner = under_test(0.1)[name]
    case = laws.Case(world_size, 130, ("random", "disjoint", "ties", "random"))
    laws.equivalence(Warmup(recipe=inner, steps=2), case)
    run = laws.recorded(Staged(recipe=Warmup(recipe=inner, steps=1), tail=9), case, with_states=False)
    for law in (laws.equivalence, laws.conservation):
        law.check(run)
    for step in run.steps:
        assert step.phases.count("small tensors") == (world_size > 1)
        assert not step.after[:, -9:].any()
        assert torch.equal(step.means[0].to_dense()[-9:], step.gradient[:, -9:].mean(0))


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("world_size", trials([1, 4], [1, 3, 8]))
def test_small_tensors_in_8_bits_around_every_method(name: str, world_size: int) -> None:
    """Small tensors in 8 bits can be combined with every method. Steps of a dense warm-up send them in fp32."""
    tailed = Staged(recipe=Warmup(recipe=under_test(0.1)[name], steps=1), tail=9, small="8bit")
    case = laws.Case(world_size, 130, ("random", "disjoint", "ties", "random"))
    run = laws.recorded(tailed, case, with_states=False, look=carriers_of)
    for law in (laws.equivalence, laws.conservation, laws.budget):
        law.check(run)
    quantized = []
    for number, step in enumerate(run.steps):
        assert ("small tensors" in step.phases) == (world_size > 1 and (number == 0 or name == "dense"))
        alone = {f"small-{leg}" for leg in ("scatter", "gather") if leg not in step.seen.phases}
        quantized.append(world_size > 1 and alone <= {*step.phases} and "small tensors" not in step.phases)
        assert number or not step.after[:, -9:].any()
    assert quantized == [world_size > 1 and name != "dense" and number > 0 for number in range(4)]


def carriers_of(world: SimulatedWorld) -> Carriers:
    """Return which rounds of the next step carry small tensors."""
    return world.workers[0].algorithm.inner.carriers(world.world_size)


@pytest.mark.parametrize("name", [name for name in METHODS if name != "quantized"])  # it has no density, and rounds
@given(case=laws.cases())
@example(case=BIG[-1])
@examples(trials(5, 8))
def test_equivalence_at_density_one(name: str, case: laws.Case) -> None:
    """At density 1 every mean is the dense mean and all residuals are zero."""
    obeys(partial(laws.equivalence, everything=True), name, case, 1.0)


@in_turn(0)
@given(case=laws.cases(max_world_size=SOME), density=DENSITIES)
@example(case=laws.FOUR_STEPS, density=0.1)
@examples(trials(2, 3))
def test_atomicity(name: str, case: laws.Case, density: float) -> None:
    """A failure in any phase changes nothing. A deep run fails every round of every step."""
    obeys(partial(laws.atomicity, every_round=DEEP), name, smaller(name, case, 2), density)


@in_turn(1)
def test_atomicity_in_every_round(name: str) -> None:
    """On one case of two steps, every round fails once."""
    obeys(partial(laws.atomicity, every_round=True), name, laws.Case(trials(3, 5), 120, ("random", "disjoint")), 0.1)


@in_turn(0)
@given(case=laws.cases(), density=DENSITIES)
@examples(trials(3, 6))
def test_identity(name: str, case: laws.Case, density: float) -> None:
    """A single worker sends nothing and loses nothing."""
    obeys(laws.identity, name, case, density)


@pytest.mark.parametrize(("name", "case"), CROWDS)
def test_equivalence_and_more_with_many_workers(name: str, case: laws.Case) -> None:
    """The laws hold with many workers."""
    recipe = under_test(0.05)[name]
    few = dataclasses.replace(case, families=case.families[: trials(laws.steps_of(recipe), 6)])
    run = laws.recorded(recipe, laws.fitted(few, recipe), with_states=False)
    for law in (laws.conservation, laws.agreement, laws.form, laws.equivalence, laws.budget):
        law.check(run)


@in_turn(1)
@given(case=laws.cases(max_world_size=SOME), density=DENSITIES, bad=st.sampled_from([math.nan, math.inf, -math.inf]))
@example(case=laws.FOUR_STEPS, density=0.1, bad=math.inf)
@example(case=laws.Case(3, 30, ("random",)), density=0.1, bad=-math.inf)
@examples(trials(2, 3))
def test_refusal(name: str, case: laws.Case, density: float, bad: float) -> None:
    """All ranks reject a step in which one rank has a NaN or Inf, and nothing changes."""
    obeys(partial(laws.refusal, bad=bad), name, smaller(name, case, 2), density)


@pytest.mark.parametrize("small", ["fp32", "8bit"])
@pytest.mark.parametrize("static", [False, True])
def test_refusal_without_a_head(static: bool, small: str) -> None:
    """So they do where all tensors are small, and the method has nothing to send."""
    laws.refusal(Staged(recipe=Quantized(static=static), tail=9, small=small), laws.Case(2, 9, ("random",) * 2))


@in_turn(0)
@given(case=laws.cases(min_world_size=2, max_world_size=SOME), density=DENSITIES)
@example(case=laws.FOUR_STEPS, density=0.1)
@examples(trials(2, 3))
def test_overflow(name: str, case: laws.Case, density: float) -> None:
    """All ranks reject a step whose sum overflows, unless the method leaves the values in the residuals."""
    obeys(laws.overflow, name, smaller(name, case, 2), density)


@in_turn(0)
def test_faults_are_injected_into_messages(name: str) -> None:
    """Faults are injected into every recipe that sends messages, in the third step if the first two are dense."""
    recipe, injected = under_test(0.1)[name], 0
    for families in (("random",), ("random", "one-region", "random")):
        case = laws.fitted(laws.Case(4, 40, families), recipe)
        injected = injected or laws.faults(recipe, case, rounds=trials(1, 2))
    gathers = "static" in name and "spardl" not in name
    collective = {"dense", "random_block", "random_k", "random-block-grid", "random-block-wrap"}
    is_known = type(recipe).__module__.startswith(("tritoncomm", "baselines"))  # another may use collectives alone
    assert (injected == 0) == (gathers or name in collective) or not is_known


@in_turn(1)
@given(case=laws.cases(min_world_size=2, max_world_size=6), density=DENSITIES)
@example(case=laws.Case(5, 14, ("ties",), exponent=0, seed=62), density=1e-6)  # subgroups have equal ranks
@examples(2)
def test_faults(name: str, case: laws.Case, density: float) -> None:
    """A faulty network causes a named error or no difference. A deep run has each fault in every round."""
    case = dataclasses.replace(case, families=case.families[:2])
    rounds = math.inf if DEEP else 1
    obeys(partial(laws.faults, rounds=rounds), name, case, density)


@in_turn(1)
@given(case=laws.cases(exact=False, max_world_size=SOME), density=DENSITIES)
@examples(trials(2, 3))
def test_laws_on_ordinary_floats(name: str, case: laws.Case, density: float) -> None:
    """On ordinary floats conservation holds up to rounding, and the ranks still agree bit for bit."""
    recipe = under_test(density)[name]
    run = laws.recorded(recipe, laws.fitted(smaller(name, case), recipe))
    laws.conservation.check(run, tolerance=1e-5)
    laws.agreement.check(run)
    laws.determinism.check(run)
