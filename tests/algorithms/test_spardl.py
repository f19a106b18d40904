"""SparDL: golden vectors, an independent oracle, schedules, message counts and invariants."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from spardl_oracle import SparDLOracle, adapt
from tritoncomm import ConfigurationError, SimulatedWorld, SparDL
from tritoncomm.algorithms.spardl_teams import adapted
from tritoncomm.scheduler.cost import HEADER_WORDS, WORD

import laws
from depth import examples

# Worked steps: the recipe, the gradients, the delivered sum, the residuals, and the words and messages of each rank.
GOLDEN = {
    "three workers": (
        SparDL(density=0.5),
        [[9, -2, 2, -8, 3, 1], [4, 7, -6, 1, -5, 2], [-2, 3, 5, 6, 1, -7]],
        [9, 0, -6, 0, 0, -7],
        [[0, -2, 2, -8, 3, 1], [4, 7, 0, 1, -5, 2], [-2, 3, 5, 6, 1, 0]],
        8, 4,
    ),
    "eight teams": (
        SparDL(density=1 / 3, teams=8),
        [
            [16, 4, 32], [8, 8, -12], [36, -24, 24], [0, 12, -20],
            [-36, -8, -4], [20, -4, 8], [8, 28, 20], [20, 24, 32],
        ],
        [36, 0, 0],
        [
            [16, 4, 32], [8, 8, -12], [0, -24, 24], [0, 12, -20],
            [-4, -8, -4], [-4, -4, 8], [4, 28, 20], [16, 24, 32],
        ],
        6, 3,
    ),
    "three teams by Bruck": (
        SparDL(density=0.5, teams=3),
        [
            [1, 1, -8, -3, 5, 5, -2, -4],
            [-3, -5, 9, 4, -7, 3, -3, 6],
            [-9, 7, 8, -6, 1, -8, -6, 5],
            [-4, -2, 6, -9, 3, -6, 3, -3],
            [8, -5, -1, -6, 8, -5, 0, 1],
            [6, -4, 3, -3, 6, 5, 2, 7],
        ],
        [14, 0, 0, -15, 14, -6, 0, 0],
        [
            [1, 1, -8, -3, 0, 0, -2, -4],
            [-3, -5, 9, 4, -2, 0, -3, 6],
            [-9, 7, 8, 0, 1, 0, -6, 5],
            [-4, -2, 6, 0, 3, 0, 3, -3],
            [0, -5, -1, -6, 0, 0, 0, 1],
            [0, -4, 3, -3, 0, 0, 2, 7],
        ],
        12, 4,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_steps(name: str) -> None:
    """Sums, residuals, words and messages match a worked step."""
    recipe, gradients, total, after, words, messages = GOLDEN[name]
    before = torch.tensor(gradients, dtype=torch.float32)
    world = SimulatedWorld(recipe, *before.shape)
    for mean in world.step(before):
        assert (mean.to_dense() * len(before)).round().tolist() == total
    assert world.residuals.tolist() == after
    assert {*world.traffic, *world.received} == {(messages, WORD * (words + HEADER_WORDS * messages))}


@st.composite
def settings_and_cases(draw: st.DrawFn) -> tuple[SparDL, laws.Case]:
    """Draw a recipe, and a case whose world size the teams divide."""
    team_size, teams = draw(st.integers(1, 6)), draw(st.integers(1, 4))
    sag = draw(st.sampled_from(["auto", "bruck"]))
    kept = draw(st.sampled_from(["global", "global", "partial", "local"]))
    density = draw(st.sampled_from([0.01, 0.05, 0.1, 0.3, 0.6]))
    recipe = SparDL(density=density, teams=teams, sag=sag, residuals=kept)
    families = draw(st.lists(st.sampled_from(laws.FAMILIES), min_size=1, max_size=5).map(tuple))
    case = laws.Case(team_size * teams, draw(st.integers(1, 90)), families, seed=draw(st.integers(0, 2**20)))
    return recipe, case


@given(settings_and_cases())
@example((SparDL(density=0.3, teams=4), laws.Case(4, 60, ("random",) * 3)))  # two teams truncate what others deliver
@examples(50)
def test_oracle(drawn: tuple[SparDL, laws.Case]) -> None:
    """Indices, sums, residuals, controllers and traffic equal those of an independent implementation."""
    recipe, case = drawn
    k = max(1, int(case.numel * recipe.density))
    world = laws.world_of(recipe, case)
    if world.workers[0].algorithm._place(0, case.world_size) is None:
        return  # everything is delivered by a dense all-reduce
    recursive = recipe.sag == "auto" and recipe.teams & (recipe.teams - 1) == 0
    oracle = SparDLOracle(
        case.world_size,
        case.numel,
        k,
        recipe.teams if case.world_size > 1 else 1,
        "recursive" if recursive else "bruck",
        recipe.residuals,
    )
    for gradient in case.gradients():
        mean = world.step(gradient)[0]
        indices, sums = oracle.step(gradient.tolist())
        assert mean.indices.tolist() == indices
        assert [x * case.world_size for x in mean.values.tolist()] == sums
        assert world.residuals.tolist() == oracle.residuals
        for used, (messages, words) in zip(world.traffic, oracle.sent, strict=True):
            assert used == (messages, WORD * (words + HEADER_WORDS * messages))


def test_controller_trace() -> None:
    """The controller follows the published trace, which converges to about 800 for a union of 2.5 h."""
    expected = [500, 515, 545, 575, 635, 695, 815, 755, 785, 815, 800, 807, 804, 801, 795, 798, 801, 800, 801, 800, 801]
    h, step, inertia, trace = 500, 15, False, [500]
    for _ in expected[1:]:
        h, step, inertia = adapted(h, step, inertia, int(2.5 * h), 2000, 500)
        trace.append(h)
    assert trace == expected


@given(st.integers(1, 400), st.integers(2, 9), st.lists(st.floats(0.1, 9), min_size=1, max_size=60), st.booleans())
def test_controller_stays_in_range(budget: int, teams: int, plant: list[float], inertia: bool) -> None:
    """h stays in [K/d, K], the step is never 0, and the oracle's rule agrees."""
    least = -(-budget // teams)
    h, step = least, max(1, (budget - least) // 100)
    for gain in plant:
        union = min(int(gain * h), teams * h)
        expected = adapt(h, step, inertia, union, budget, least)
        h, step, inertia = adapted(h, step, inertia, union, budget, least)
        assert (h, step, inertia) == expected
        assert least <= h <= budget
        assert step != 0


def test_automatic_teams() -> None:
    """``teams='auto'`` chooses many teams if latency dominates, and few if bandwidth dominates."""
    assert SparDL(teams="auto", latency_words=0).teams_for(16, 1000) == 1
    assert SparDL(teams="auto", latency_words=1).teams_for(16, 100_000) == 2
    assert SparDL(teams="auto", latency_words=1e9).teams_for(16, 1000) == 16
    assert SparDL(teams="auto").teams_for(13, 10_000_000) == 1
    assert SparDL(teams="auto", sag="recursive", latency_words=1e9).teams_for(12, 10) == 4


@pytest.mark.parametrize(
    ("fields", "world_size", "named"),
    [
        ({"teams": 4}, 6, "teams=4 does not divide world_size=6"),
        ({"teams": 3, "sag": "recursive"}, 6, "power of two"),
    ],
)
def test_impossible_teams_are_rejected(fields: dict[str, object], world_size: int, named: str) -> None:
    """Teams that do not fit the world size are rejected with the fix. One worker accepts any number of teams."""
    with pytest.raises(ConfigurationError, match=named):
        SimulatedWorld(SparDL(**fields), world_size, 100)
    SimulatedWorld(SparDL(**fields), 1, 100).step(torch.ones(1, 100))
