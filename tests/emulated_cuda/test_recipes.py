"""Every recipe on emulated GPUs and the emulated NCCL, bit for bit as in the simulation."""

from __future__ import annotations

import pytest

import laws
import recipes
from depth import DEEP, trials
from emulated_cuda import exchanges
from emulated_cuda.exchanges import Outcome
from recipes import shared_out

NUMEL = 90
# Every method with 2 and 3 ranks. Each other setting of it with one of them, and in a deep run with both.
SHARES = shared_out({size: recipes.under_test(0.1) for size in (2, 3)})
# Further world sizes on every commit, one for each kind of pattern. A deep run has all recipes at all of them.
FEW = ("oktopk-short-periods", "spardl-3-teams-4bit", "exdyna", "topk_allgather-4bit", "hierarchical-2", "gtopk")
FEW += ("oktopk-static-4bit", "spardl-static", "topk_dsa")
LENGTHS = (NUMEL, 1, 257)  # of vectors together: one value, and no multiple of anything
TOGETHER = [name for name in recipes.NAMES if laws.length(recipes.under_test(0.1)[name], 1) == 1] if DEEP else FEW


def _cases() -> list[tuple[str, int]]:
    every = [(name, world_size) for world_size, shared in SHARES.items() for name in shared]
    return every + [(name, size) for name in (recipes.NAMES if DEEP else FEW) for size in trials((1, 5), (1, 4, 5, 8))]


def _equal(found: list[Outcome], expected: list[Outcome]) -> list[bool]:
    return [own.equals(other) for own, other in zip(found, expected, strict=True)]


@pytest.mark.parametrize(("name", "world_size"), _cases())
def test_recipe_equals_the_simulation(name: str, world_size: int) -> None:
    """Means, residuals and bytes are those of the simulation on every rank and in every step, with random delays."""
    recipe = recipes.under_test(0.1)[name]
    case = laws.fitted(laws.Case(world_size, NUMEL, ("random",)), recipe)
    steps = trials(min(laws.steps_of(recipe), 3), 4)
    given = exchanges.gradients(case.world_size, case.numel, steps, seed=world_size)
    found, expected = exchanges.emulated(recipe, given, seed=world_size), exchanges.simulated(recipe, given)
    for rank in range(case.world_size):
        assert _equal(found[rank], expected[rank]) == [True] * steps, f"rank {rank}"


@pytest.mark.parametrize("name", TOGETHER)
def test_vectors_together_equal_each_alone(name: str) -> None:
    """Means, residuals and bytes are those of a simulation of each vector alone, also after a rejected step."""
    recipe, steps = recipes.under_test(0.1)[name], trials(4, 8)
    world_size = laws.fitted(laws.Case(3, NUMEL, ("random",)), recipe).world_size
    given = [exchanges.gradients(world_size, numel, steps, seed=numel) for numel in LENGTHS]
    found = exchanges.emulated_together(recipe, given, seed=world_size, bad_step=2)
    for number, alone in enumerate(exchanges.simulated(recipe, each) for each in given):
        for rank in range(world_size):
            assert _equal(found[rank][number], alone[rank]) == [True] * steps, f"vector {number}, rank {rank}"
