"""The recipes that the laws are tested on: every method with its defaults, and settings that reach more branches."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import fields, replace
from functools import cache
from types import MappingProxyType
from typing import TypeVar

from tritoncomm import (
    ConfigurationError,
    ExDyna,
    MiCRO,
    OkTopk,
    Quantized,
    RandomBlock,
    Recipe,
    SparDL,
    TopkAllgather,
    Warmup,
    algorithms,
    recipe,
)
from tritoncomm.algorithms import Hierarchical, at_density
from tritoncomm.algorithms.base import IndexRecipe
from tritoncomm.algorithms.staged import Staged
from tritoncomm.primitives.packing import Encoding

from baselines import DGC, TopkDSA
from depth import DEEP
from ok_topk_variants import OkTopkVariant

Place = TypeVar("Place")

# The laws compare gradients with results, so DGC runs without momentum. ``reduced_lr`` silences a warning.
FIELDS = {"dgc": {"momentum": 0.0}, "random_block": {"reduced_lr": True, "alignment": 4}}
SHORT = {"repartition_every": 3, "reevaluate_every": 4}


@cache
def _always_packed(kind: type[IndexRecipe]) -> type[IndexRecipe]:
    def encoding(self: IndexRecipe) -> Encoding:
        return replace(kind.encoding.fget(self), packed="always")

    def reduced(self: IndexRecipe) -> tuple[object, ...]:  # pickle does not find the class by its name
        return always_packed, (_as(kind, self),)

    return type(
        kind.__name__, (kind,), {"encoding": property(encoding), "__reduce__": reduced, "__doc__": kind.__doc__}
    )


def _as(kind: type[IndexRecipe], recipe: IndexRecipe) -> IndexRecipe:
    return kind(**{field.name: getattr(recipe, field.name) for field in fields(recipe)})


def always_packed(recipe: IndexRecipe) -> IndexRecipe:
    """Return ``recipe`` with packed messages, also where plain ones are shorter, as they are in small tests."""
    return _as(_always_packed(type(recipe)), recipe)


# Methods whose values are rounded on the wire, the format and further fields.
ROUNDED = [
    ("topk_allgather", "4bit", {}),
    ("oktopk", "4bit", SHORT),
    ("oktopk", "1bit", SHORT),
    ("spardl", "8bit", {}),
    ("dgc", "4bit", {}),
    ("gaussiank", "2bit", {}),
]


def _settings_of_methods(density: float) -> dict[str, Recipe]:
    """Return methods with settings that reach more branches."""
    return {
        "oktopk-short-periods": OkTopk(density=density, **SHORT),
        "oktopk-strict-volume": OkTopk(density=density, strict_volume=True, **SHORT),
        "oktopk-always-balance": OkTopkVariant(density=density, balance_trigger=1.0, bucket_width=1),
        "oktopk-never-balance": OkTopkVariant(
            density=density, balance_trigger=math.inf, bucket_width=64, correct_thresholds=False
        ),
        "oktopk-often-balance": OkTopkVariant(density=density, balance_trigger=1.5, **SHORT),
        "oktopk-sparse-path": OkTopkVariant(density=density, force_sparse=True, **SHORT),
        "spardl-2-teams": SparDL(density=density, teams=2),
        "spardl-2-teams-bruck": SparDL(density=density, teams=2, sag="bruck"),
        "spardl-3-teams": SparDL(density=density, teams=3),
        "spardl-4-teams": SparDL(density=density, teams=4),
        "spardl-auto": SparDL(density=density, teams="auto", sag="bruck"),
        "exdyna-paper": ExDyna(density=density, mode="paper"),
        "exdyna-paper-layout": ExDyna(density=density, mode="paper", blocks=16),
        "exdyna-few-blocks": ExDyna(density=density, threshold_rule="ref", blocks=24),
        "random-block-wrap": RandomBlock(density=density, mode="wrap", reduced_lr=True),
        "random-block-grid": RandomBlock(density=density, mode="grid", reduced_lr=True, alignment=1),
        "topk-dsa-always-dense": TopkDSA(density=density, dense_switch=0.0),
    }


def _around_others(density: float) -> dict[str, Recipe]:
    """Return recipes around other recipes."""
    return {
        "warmup": Warmup(recipe=OkTopk(density=density), steps=2),
        "warmup-8bit": Warmup(recipe=OkTopk(density=density, **SHORT), steps=2, values="8bit"),
        "warmup-1bit": Warmup(recipe=OkTopk(density=density, **SHORT), steps=2, values="1bit"),
        "warmup-2bit-static": Warmup(recipe=TopkAllgather(density=density, static=True), steps=2, values="2bit"),
        "warmup-8bit-static": Warmup(recipe=TopkAllgather(density=density, static=True), steps=2, values="8bit"),
        "warmup-8bit-hierarchical": Hierarchical(
            recipe=Warmup(recipe=ExDyna(density=density), steps=1, values="8bit"), node_size=2
        ),
        "warmup-8bit-dense-tail": Staged(
            recipe=Warmup(recipe=SparDL(density=density, values="4bit"), steps=2, values="8bit"), tail=5, small="8bit"
        ),
        "preconditioned-warmup-8bit": Staged(
            recipe=Warmup(recipe=OkTopk(density=density, **SHORT), steps=2, values="8bit"),
            shapes=((7, 11),),
            renew_every=1,
        ),
        "warmup-dgc": Warmup(recipe=DGC(density=density, momentum=0.0), steps=2),
        "hierarchical-2": Hierarchical(recipe=OkTopk(density=density, **SHORT), node_size=2),
        "hierarchical-3": Hierarchical(recipe=SparDL(density=density), node_size=3),
        "hierarchical-2-static": Hierarchical(recipe=OkTopk(density=density, static=True, **SHORT), node_size=2),
        "hierarchical-3-fixed": Hierarchical(
            recipe=Warmup(recipe=RandomBlock(density=density, static=True, reduced_lr=True), steps=1), node_size=3
        ),
        "hierarchical-1": Hierarchical(recipe=TopkDSA(density=density), node_size=1),
        "dense-tail-hierarchical": Staged(
            recipe=Hierarchical(recipe=Warmup(recipe=ExDyna(density=density), steps=1), node_size=4), tail=3
        ),
        "preconditioned": Staged(
            recipe=OkTopk(density=density, **SHORT), shapes=((9, 5), (3, 2, 4), (11,)), renew_every=2
        ),
        "preconditioned-warmup": Staged(
            recipe=Warmup(recipe=SparDL(density=density), steps=2), shapes=((7, 11),), renew_every=1, decay=0.5
        ),
        "preconditioned-hierarchical": Staged(
            recipe=Hierarchical(recipe=OkTopk(density=density), node_size=2), shapes=((40,), (6, 6)), renew_every=1
        ),
    }


def _packed_or_rounded(density: float) -> dict[str, Recipe]:
    """Return recipes whose entries are packed or whose values are rounded, and dense tails beside them."""
    rounded = {
        f"{name}-{values}": recipe(name, density=density, values=values, **FIELDS.get(name, {}), **more)
        for name, values, more in ROUNDED
    }
    rounded["oktopk-1bit"] = always_packed(OkTopkVariant(density=density, values="1bit", balance_trigger=1.0, **SHORT))
    return {
        **rounded,
        "oktopk-packed": always_packed(OkTopk(density=density, **SHORT)),
        "exdyna-packed": always_packed(ExDyna(density=density)),
        "spardl-3-teams-4bit": SparDL(density=density, teams=3, values="4bit"),
        "spardl-4-teams-2bit": always_packed(SparDL(density=density, teams=4, values="2bit")),
        "hierarchical-2-4bit": Hierarchical(recipe=OkTopk(density=density, values="4bit"), node_size=2),
        "preconditioned-8bit": Staged(
            recipe=OkTopk(density=density, values="8bit", **SHORT), shapes=((9, 5), (11,)), renew_every=2
        ),
        "dense-tail-warmup-4bit": Staged(
            recipe=Warmup(recipe=TopkAllgather(density=density, values="4bit"), steps=1), tail=3
        ),
        "dense-tail": Staged(recipe=SparDL(density=density), tail=5),
        "dense-tail-8bit": Staged(recipe=SparDL(density=density), tail=37, small="8bit"),
        "dense-tail-8bit-short": Staged(recipe=OkTopk(density=density, **SHORT), tail=2, small="8bit"),
        "dense-tail-8bit-warmup": Staged(recipe=Warmup(recipe=OkTopk(density=density), steps=1), tail=11, small="8bit"),
        "dense-tail-8bit-hierarchical": Staged(
            recipe=Hierarchical(recipe=Warmup(recipe=ExDyna(density=density), steps=1), node_size=2),
            tail=20,
            small="8bit",
        ),
        **{f"quantized-{bits}bit": Quantized(values=f"{bits}bit") for bits in (2, 3, 8)},
        "quantized-warmup": Warmup(recipe=Quantized(), steps=2),
        "quantized-warmup-8bit": Warmup(recipe=Quantized(values="4bit"), steps=2, values="8bit"),
        "quantized-hierarchical": Hierarchical(recipe=Quantized(), node_size=2),
        "dense-tail-8bit-quantized": Staged(recipe=Quantized(values="2bit"), tail=20, small="8bit"),
        "random-block-8bit": RandomBlock(density=density, values="8bit", reduced_lr=True, alignment=4),
        "random-block-4bit": RandomBlock(density=density, values="4bit", mode="wrap", reduced_lr=True),
    }


def _static_forms(density: float) -> dict[str, Recipe]:
    """Return recipes in their static form, also inside others."""
    return {
        "topk-allgather-static": TopkAllgather(density=density, static=True),
        "topk-allgather-static-packed": always_packed(TopkAllgather(density=density, static=True)),
        "topk-allgather-static-4bit": TopkAllgather(density=density, static=True, values="4bit"),
        "random-block-static-4bit": RandomBlock(density=density, static=True, values="4bit", reduced_lr=True),
        "quantized-static": Quantized(static=True),
        "quantized-static-5bit": Quantized(values="5bit", static=True),
        "spardl-static": SparDL(density=density, static=True),
        "spardl-static-packed": always_packed(SparDL(density=density, static=True)),
        "spardl-static-4bit": SparDL(density=density, static=True, values="4bit"),
        "spardl-static-2-teams-bruck": SparDL(density=density, static=True, teams=2, sag="bruck"),
        "spardl-static-3-teams-4bit": SparDL(density=density, static=True, teams=3, values="4bit"),
        "spardl-static-4-teams": SparDL(density=density, static=True, teams=4),
        "spardl-static-4-teams-2bit": always_packed(SparDL(density=density, static=True, teams=4, values="2bit")),
        "exdyna-static": ExDyna(density=density, static=True),
        "exdyna-static-packed": always_packed(ExDyna(density=density, static=True, capacity=1.0)),
        "micro-static": MiCRO(density=density, static=True),
        "dense-tail-spardl-static": Staged(recipe=SparDL(density=density, static=True), tail=3),
        "dense-tail-static": Staged(recipe=TopkAllgather(density=density, static=True), tail=3),
        "dense-tail-8bit-static": Staged(
            recipe=Warmup(recipe=TopkAllgather(density=density, static=True), steps=1), tail=20, small="8bit"
        ),
        "preconditioned-static": Staged(
            recipe=TopkAllgather(density=density, static=True), shapes=((9, 5), (11,)), renew_every=2
        ),
        "oktopk-static": OkTopk(density=density, static=True, **SHORT),
        "oktopk-static-strict-volume": OkTopk(density=density, static=True, strict_volume=True, **SHORT),
        "oktopk-static-wide": OkTopk(density=density, static=True, local_cap=1.5, global_cap=3.0, **SHORT),
        "oktopk-static-uncorrected": OkTopk(density=density, static=True, correct_thresholds=False, **SHORT),
        "oktopk-static-packed": always_packed(OkTopk(density=density, static=True, **SHORT)),
        "oktopk-static-4bit": OkTopk(density=density, static=True, values="4bit", **SHORT),
        "oktopk-static-1bit": OkTopk(density=density, static=True, values="1bit", global_cap=2.0, **SHORT),
        "dense-tail-oktopk-static": Staged(
            recipe=Warmup(recipe=OkTopk(density=density, static=True, **SHORT), steps=1), tail=3
        ),
    }


@cache
def under_test(density: float) -> Mapping[str, Recipe]:
    """Return the recipes by the name that the test report shows. test_pinned.py depends on their order."""
    named = {name: at_density(name, density, **FIELDS.get(name, {})) for name in algorithms()}
    for further in (_settings_of_methods, _around_others, _packed_or_rounded, _static_forms):
        named |= further(density)
    named["dense-tail-warmup"] = Staged(recipe=Warmup(recipe=OkTopk(density=density), steps=1), tail=3)
    return MappingProxyType(named)


NAMES = sorted(under_test(0.1))


def possible(density: float, world_size: int) -> dict[str, Recipe]:
    """Return the recipes under test that accept the world size."""
    found = {}
    for name, each in under_test(density).items():
        with suppress(ConfigurationError):
            each.check_world_size(world_size)
            found[name] = each
    return found


def shared_out(accepted: dict[Place, dict[str, Recipe]]) -> dict[Place, dict[str, Recipe]]:
    """Give every method to each place that accepts it, and every other recipe to one of these places, in turn.

    A deep run gives all recipes to all places. Call it in the test's process: workers do not know how deep a run is.
    """
    if DEEP:
        return accepted
    names = list(dict.fromkeys(name for recipes in accepted.values() for name in recipes))
    others = [name for name in names if name not in algorithms()]
    chosen: dict[Place, set[str]] = {place: set(algorithms()) for place in accepted}
    for number, name in enumerate(others):
        places = [place for place, recipes in accepted.items() if name in recipes]
        chosen[places[number % len(places)]].add(name)
    return {
        place: {name: recipe for name, recipe in recipes.items() if name in chosen[place]}
        for place, recipes in accepted.items()
    }
