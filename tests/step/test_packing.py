"""``packed="auto"``: the decision by device and link, its cost, and what the log says about it."""

from __future__ import annotations

import logging
import re
from dataclasses import replace

import pytest
from tritoncomm import ConfigurationError, Dense, ExDyna, OkTopk, RandomK, Recipe, SparDL, TopkAllgather, Warmup
from tritoncomm.algorithms import Hierarchical, algorithms
from tritoncomm.algorithms.base import StaticRecipe
from tritoncomm.planning import planner
from tritoncomm.scheduler.cost import Link
from tritoncomm.step import cpu_cost, gpu_cost
from tritoncomm.step.options import log_choice
from tritoncomm.step.packing import describe, resolve

SLOW, FAST = Link.parse("100mbit,30us"), Link.parse("400gbit,1us")
NUMEL = 4_000_000


def packed(recipe: Recipe) -> object:
    """Return the field of the innermost recipe."""
    return packed(recipe.recipe) if hasattr(recipe, "recipe") else recipe.packed


@pytest.mark.parametrize(
    "recipe",
    [
        OkTopk(density=0.01),
        SparDL(density=0.01),
        TopkAllgather(density=0.01),
        ExDyna(density=0.01),
        Warmup(recipe=OkTopk(density=0.01), steps=2),
        Hierarchical(recipe=OkTopk(density=0.01), node_size=2),
    ],
    ids=lambda recipe: recipe.name,
)
def test_device_and_link_decide(recipe: Recipe) -> None:
    """Without a link, a GPU packs and a CPU does not. On a slow link both pack, and on a fast one a CPU does not."""
    assert packed(resolve(recipe, NUMEL, 4, "cpu").recipe) is False
    assert packed(resolve(recipe, NUMEL, 4, "cuda").recipe) is True
    assert packed(resolve(recipe, NUMEL, 4, "cpu", SLOW).recipe) is True
    assert packed(resolve(recipe, NUMEL, 4, "cuda", SLOW).recipe) is True
    assert packed(resolve(recipe, NUMEL, 4, "cpu", FAST).recipe) is False


def test_static_form_on_a_gpu() -> None:
    """On a GPU, a method with a static form uses it, unless the user asks for something else."""
    methods = [method for name in algorithms() if isinstance(method := planner.at(name, 0.01), StaticRecipe)]
    other = [(TopkAllgather(static=False), False), (ExDyna(mode="paper"), False)]
    for method, static in [*other, *((each, True) for each in methods)]:
        assert resolve(method, NUMEL, 4, "cuda").recipe.static is static
        assert resolve(method, NUMEL, 1, "cuda").recipe.static is static
        assert resolve(method, NUMEL, 4, "cpu").recipe.static == method.static


def test_launches_do_not_pay_for_short_messages_on_a_fast_link() -> None:
    """On a GPU with a fast link, short messages are plain and long ones are packed, if packing takes more launches."""
    method = OkTopk(density=0.01, static=False)
    assert packed(resolve(method, 100_000, 4, "cuda", FAST).recipe) is False
    assert packed(resolve(method, 1_000_000_000, 4, "cuda", Link.parse("100gbit,1us")).recipe) is True


def test_packing_on_a_gpu_takes_its_launches() -> None:
    """On a GPU, packing takes the synchronizations and launches by which the counts of the two formats differ."""
    exact = OkTopk(density=0.01, static=False)
    plain, packed_ = (gpu_cost.counts(replace(exact, packed=each), 8) for each in (False, True))
    found = resolve(exact, NUMEL, 8, "cuda")
    assert found.seconds == pytest.approx(packed_.seconds - plain.seconds)
    assert found.seconds > 0
    # In the static form, packed messages take fewer launches than plain ones. They are packed on any link.
    static = resolve(OkTopk(density=0.01), 100_000, 8, "cuda", FAST)
    assert (static.packed, static.seconds) == (True, 0)
    assert "messages are packed: packing saves " in describe([static])
    assert describe([resolve(OkTopk(density=0.01), NUMEL, 8, "cuda")]) == "messages are packed"


def test_packing_of_a_method_without_counts() -> None:
    """A method that has no counts is packed on a GPU as others are, and packing is taken to need no time."""

    class Another(TopkAllgather):
        name = "another"

    found = resolve(Another(), NUMEL, 4, "cuda")
    assert (found.packed, found.seconds) == (True, 0)


def test_decision_is_where_time_saved_is_time_spent() -> None:
    """The decision changes at the bandwidth at which the link takes as long for the saved bytes as packing."""
    method = SparDL(density=0.01)
    found = resolve(method, NUMEL, 8, "cpu")
    assert found.saved > 0
    assert not found.packed
    assert found.seconds == 0
    limit = found.saved / found.coding
    for factor, expected in ((0.99, True), (1.01, False)):
        decided = resolve(method, NUMEL, 8, "cpu", Link(1e-5, factor * limit))
        assert decided.packed is expected
        assert decided.seconds == (found.coding if expected else 0)
    assert 1e9 < 8 * limit < 10e9  # some Gbit/s


@pytest.mark.parametrize("chosen", [True, False])
def test_explicit_choice_stays(chosen: bool) -> None:
    """``packed=True`` and ``packed=False`` are not changed by any link."""
    method = OkTopk(density=0.01, packed=chosen)
    for link in (None, SLOW, FAST):
        assert resolve(method, NUMEL, 4, "cpu", link).recipe == method


def test_link_in_the_recipe() -> None:
    """A link as ``packed`` decides, also where another link is measured. Other texts are rejected with the fix."""
    assert packed(resolve(OkTopk(packed="100mbit,30us"), NUMEL, 4, "cpu", FAST).recipe) is True
    assert packed(resolve(OkTopk(packed="400gbit,1us"), NUMEL, 4, "cpu", SLOW).recipe) is False
    assert not OkTopk(packed="100mbit,30us").encoding.packed  # until it is resolved
    for wrong in ("yes", "fast", None, 3):
        with pytest.raises(ConfigurationError, match="or a link such as '10gbit,30us'"):
            OkTopk(packed=wrong)


def test_rounded_values_are_packed_anyway() -> None:
    """Rounded values are packed on any link, and the time that it takes is known."""
    for method in (OkTopk(values="4bit"), OkTopk(values="4bit", packed="400gbit,1us")):
        found = resolve(method, NUMEL, 4, "cpu", FAST)
        assert found.recipe == method
        assert found.packed
        assert found.seconds > resolve(OkTopk(packed=True), NUMEL, 4, "cpu").seconds > 0


@pytest.mark.parametrize("recipe", [Dense(), RandomK(), OkTopk(density=1)])
def test_nothing_to_pack(recipe: Recipe) -> None:
    """Methods without indices, dense steps, one worker and empty vectors have nothing to pack, and nothing is said."""
    assert not resolve(recipe, NUMEL, 4, "cuda").packed
    assert not describe([resolve(recipe, NUMEL, 4, "cuda")])
    for numel, world_size in ((NUMEL, 1), (0, 4)):
        assert not describe([resolve(OkTopk(), numel, world_size, "cuda")])


def test_plan_counts_packed_messages() -> None:
    """A plan for fp32 values counts packed messages: on a CPU their time and other work, on a GPU all launches."""

    def high(**arguments: object) -> float:
        found = planner.estimates(NUMEL, 4, SLOW, densities=(0.01,), **arguments)
        return next(estimate.high for estimate in found if estimate.recipe.name == "spardl")

    plain = SparDL(density=0.01).formula(NUMEL, 4).seconds(SLOW)[1]
    shorter = SparDL(density=0.01, packed=True).formula(NUMEL, 4).seconds(SLOW)[1]
    for device in ("cpu", "cuda"):
        spent = resolve(SparDL(density=0.01), NUMEL, 4, device, SLOW).seconds
        if device == "cuda":
            spent = gpu_cost.counts(SparDL(density=0.01, packed=True, static=True), 4).seconds
        other = cpu_cost.work(SparDL(density=0.01), NUMEL, 4)[1] if device == "cpu" else 0.0
        assert high(device=device) == pytest.approx(shorter + spent + other)
        assert shorter < shorter + spent < plain
    chosen = planner.recommend(25_000_000, 8, SLOW, 0.01)
    assert chosen.packed is True
    assert "packed=True)" in planner.advice(25_000_000, 8, SLOW, 0.0, density=0.01)


@pytest.mark.parametrize(
    ("recipe", "link", "said"),
    [
        (OkTopk(density=0.01), None, r"messages are plain: packing pays on links below \d.\d Gbit/s, and the link"),
        (OkTopk(density=0.01), SLOW, r"messages are packed: packing saves \S+ ms on this link and takes \S+ ms"),
        (OkTopk(density=0.01), FAST, r"messages are plain: packing would save \S+ ms on this link and would take"),
        (OkTopk(density=0.01, values="4bit"), None, r"messages are packed, which takes \S+ ms"),
    ],
)
def test_log_line(recipe: Recipe, link: Link | None, said: str, caplog: pytest.LogCaptureFixture) -> None:
    """The one line about the chosen settings says how messages travel, and why, for all vectors together."""
    caplog.set_level(logging.INFO, "tritoncomm")
    packing = resolve(recipe, NUMEL, 4, "cpu", link)
    parts = [(packing.recipe.build(NUMEL), 0)] * 2
    log_choice(recipe, 0, 4, parts, [packing] * 2)
    (record,) = caplog.records
    assert re.search(said, record.getMessage())
    mixed = describe([resolve(recipe, NUMEL, 4, "cpu", SLOW), resolve(OkTopk(density=0.01), NUMEL, 4, "cpu")])
    assert "packed for 1 of 2 vectors" in mixed
