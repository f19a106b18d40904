"""The recipes that stand under the laws: every method by name, and settings that reach its corners."""

from __future__ import annotations

import math

from tritoncomm import ExDyna, OkTopk, Recipe, SparDL, Warmup, algorithms, recipe

SHORT = {"repartition_every": 3, "reevaluate_every": 4}


def under_test(density: float) -> dict[str, Recipe]:
    """Recipes by a name for the test report."""
    named = {name: recipe(name, density=density) for name in algorithms()}
    return named | {
        "oktopk-short-periods": OkTopk(density=density, **SHORT),
        "oktopk-strict-volume": OkTopk(density=density, strict_volume=True, **SHORT),
        "oktopk-always-balance": OkTopk(density=density, balance_trigger=1.0, bucket_width=1),
        "oktopk-never-balance": OkTopk(
            density=density, balance_trigger=math.inf, bucket_width=64, correct_thresholds=False
        ),
        "oktopk-sparse-path": OkTopk(density=density, force_sparse=True, **SHORT),
        "spardl-2-teams": SparDL(density=density, teams=2),
        "spardl-2-teams-bruck": SparDL(density=density, teams=2, sag="bruck"),
        "spardl-3-teams": SparDL(density=density, teams=3),
        "spardl-4-teams": SparDL(density=density, teams=4),
        "spardl-auto": SparDL(density=density, teams="auto", sag="bruck"),
        "exdyna-paper": ExDyna(density=density, mode="paper"),
        "exdyna-pair-ratio": ExDyna(density=density, rebalance="pair_ratio", threshold_rule="ref_fixed", blocks=24),
        "warmup": Warmup(recipe=OkTopk(density=density), steps=2),
    }


NAMES = sorted(under_test(0.1))
