"""Every recipe on emulated GPUs and the emulated NCCL, bit for bit as in the simulation."""

from __future__ import annotations

import pytest
from tritoncomm import Recipe, Warmup, algorithms

import laws
import recipes
from depth import DEEP, trials
from emulated_cuda import exchanges
from recipes import shared_out

NUMEL = 90
# Every method with 2 and 3 ranks. Each other setting of it with one of them, and in a deep run with both.
SHARES = shared_out({size: recipes.under_test(0.1) for size in (2, 3)})
# Further world sizes on every commit, one for each kind of pattern. A deep run has all recipes at all of them.
FEW = ("oktopk-short-periods", "spardl-3-teams-4bit", "exdyna", "topk_allgather-4bit", "hierarchical-2", "gtopk")
FEW += ("oktopk-static-4bit", "spardl-static", "topk_dsa")


def _cases() -> list[tuple[str, int]]:
    every = [(name, world_size) for world_size, shared in SHARES.items() for name in shared]
    return every + [(name, size) for name in (recipes.NAMES if DEEP else FEW) for size in trials((1, 5), (1, 4, 5, 8))]


@pytest.mark.parametrize("name", [*algorithms(), "oktopk-sparse-path"])
def test_warm_up_equals_the_simulation(name: str) -> None:
    """A dense warm-up into every method, also into one that never goes dense, is that of the simulation."""
    recipe = Warmup(recipe=recipes.under_test(0.1)[name], steps=2)
    given = exchanges.gradients(2, NUMEL, 3, seed=1)
    found, expected = exchanges.emulated(recipe, given, seed=1), exchanges.simulated(recipe, given)
    for rank in range(2):
        assert [own.equals(other) for own, other in zip(found[rank], expected[rank], strict=True)] == [True] * 3


def test_no_recipe_is_left_out() -> None:
    """Every recipe runs with 2 or 3 ranks."""
    assert {name for name, _ in _cases()} == set(recipes.NAMES)


def _fitted(recipe: Recipe, world_size: int) -> laws.Case:
    return laws.fitted(laws.Case(world_size, NUMEL, ("random",)), recipe)


@pytest.mark.parametrize(("name", "world_size"), _cases())
def test_recipe_equals_the_simulation(name: str, world_size: int) -> None:
    """Means, residuals and bytes are those of the simulation on every rank and in every step, with random delays."""
    recipe = recipes.under_test(0.1)[name]
    case, steps = _fitted(recipe, world_size), trials(min(laws.steps_of(recipe), 3), 4)
    given = exchanges.gradients(case.world_size, case.numel, steps, seed=world_size)
    found = exchanges.emulated(recipe, given, seed=world_size)
    expected = exchanges.simulated(recipe, given)
    for rank in range(case.world_size):
        equal = [own.equals(other) for own, other in zip(found[rank], expected[rank], strict=True)]
        assert equal == [True] * steps, f"rank {rank}"
