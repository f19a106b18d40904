"""Every law on every method: by hypothesis for 1 to 17 workers, by example for 32 and 64."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import laws
from recipes import NAMES, under_test

EXACT_LAWS = (
    laws.conservation,
    laws.agreement,
    laws.form,
    laws.identity,
    laws.budget,
    laws.atomicity,
    laws.resume,
    laws.determinism,
)
DENSITIES = st.sampled_from([1e-6, 0.02, 0.1, 0.35, 0.9])
BIG = [
    laws.Case(world_size, 700, ("random", "one-region", "random", "ties", "disjoint", "random"))
    for world_size in (32, 64)
]
thorough = settings(max_examples=25, deadline=None)
brief = settings(max_examples=8, deadline=None)


@pytest.mark.parametrize("name", NAMES)
@given(case=laws.cases(), density=DENSITIES)
@example(case=BIG[0], density=0.02)
@example(case=BIG[1], density=0.1)
@thorough
def test_equivalence(name: str, case: laws.Case, density: float) -> None:
    """Delivered plus owed is the dense sum, at any density."""
    laws.equivalence(under_test(density)[name], case)


@pytest.mark.parametrize("name", [name for name in NAMES if name != "oktopk-sparse-path"])
@given(case=laws.cases())
@example(case=BIG[0])
@example(case=BIG[1])
@thorough
def test_equivalence_at_density_one(name: str, case: laws.Case) -> None:
    """Density 1 is the dense all-reduce, and nothing is owed."""
    laws.equivalence(under_test(1.0)[name], case, everything=True)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("law", EXACT_LAWS, ids=lambda law: law.__name__)
@given(case=laws.cases(), density=DENSITIES)
@brief
def test_exact(law, name: str, case: laws.Case, density: float) -> None:
    """The law holds to the bit."""
    law(under_test(density)[name], case)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("law", [laws.conservation, laws.agreement, laws.budget], ids=lambda law: law.__name__)
@pytest.mark.parametrize("case", BIG, ids=["32", "64"])
def test_many_workers(law, name: str, case: laws.Case) -> None:
    """The law holds at 32 and 64 workers."""
    law(under_test(0.05)[name], case)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@given(case=laws.cases(), density=DENSITIES)
@brief
def test_refusal(bad: float, name: str, case: laws.Case, density: float) -> None:
    """A NaN or Inf on one rank is everybody's, and changes nothing."""
    laws.refusal(under_test(density)[name], case, bad)


@pytest.mark.parametrize("name", NAMES)
@given(case=laws.cases(min_world_size=2), density=DENSITIES)
@brief
def test_overflow(name: str, case: laws.Case, density: float) -> None:
    """Sums that overflow are everybody's refusal."""
    laws.overflow(under_test(density)[name], case)


@pytest.mark.parametrize("name", NAMES)
@given(case=laws.cases(exact=False), density=DENSITIES)
@brief
def test_ordinary_floats(name: str, case: laws.Case, density: float) -> None:
    """Rounding aside nothing is lost, and the ranks still agree to the bit."""
    recipe = under_test(density)[name]
    laws.conservation(recipe, case, tolerance=1e-5)
    laws.agreement(recipe, case)
    laws.determinism(recipe, case)
