"""Every recipe on emulated GPUs and the emulated NCCL, bit for bit as in the simulation."""

from __future__ import annotations

import pytest
from tritoncomm import Recipe

import laws
import recipes
from depth import DEEP
from emulated_cuda import exchanges

STEPS, NUMEL = 4, 90
# Further world sizes on every commit, one for each kind of pattern. A deep run has all recipes at all of them.
FEW = ("oktopk-short-periods", "spardl-3-teams-4bit", "exdyna", "topk_allgather-4bit", "hierarchical-2", "gtopk-bf16")


def _cases() -> list[tuple[str, int]]:
    every = [(name, world_size) for name in recipes.NAMES for world_size in (2, 3)]
    return every + [(name, size) for name in (recipes.NAMES if DEEP else FEW) for size in (1, 4, 8)]


def _fitted(recipe: Recipe, world_size: int) -> laws.Case:
    return laws.fitted(laws.Case(world_size, NUMEL, ("random",)), recipe)


@pytest.mark.parametrize(("name", "world_size"), _cases())
def test_recipe_equals_the_simulation(name: str, world_size: int) -> None:
    """Means, residuals and bytes are those of the simulation on every rank and in every step, with random delays."""
    recipe = recipes.under_test(0.1)[name]
    case = _fitted(recipe, world_size)
    given = exchanges.gradients(case.world_size, case.numel, STEPS, seed=world_size)
    found = exchanges.emulated(recipe, given, seed=world_size)
    expected = exchanges.simulated(recipe, given)
    for rank in range(case.world_size):
        equal = [own.equals(other) for own, other in zip(found[rank], expected[rank], strict=True)]
        assert equal == [True] * STEPS, f"rank {rank}"
