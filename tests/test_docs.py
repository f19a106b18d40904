"""What the documentation shows, runs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import laws

ROOT = Path(__file__).resolve().parent.parent


def blocks(page: str) -> list[str]:
    """The Python code of a page."""
    return re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), flags=re.DOTALL)


def test_write_a_method() -> None:
    """The page's method runs as printed, and obeys the laws."""
    (code,) = blocks("docs/how-to/add-an-algorithm.md")
    names: dict[str, object] = {"__name__": "page"}
    exec(compile(code, "add-an-algorithm.md", "exec", dont_inherit=True), names)  # noqa: S102 - our own page
    recipe = names["FirstEntries"](density=0.4)
    case = laws.Case(5, 60, ("random", "ties", "zero", "random"))
    for law in (laws.conservation, laws.agreement, laws.form, laws.equivalence, laws.identity):
        law(recipe, case)
    for law in (laws.atomicity, laws.refusal, laws.resume, laws.determinism):
        law(recipe, case)


def test_simulate() -> None:
    """The page's loop runs, on a smaller vector."""
    (code,) = blocks("docs/how-to/simulate.md")
    names: dict[str, object] = {}
    exec(code.replace("1_000_000", "1_000").replace("64", "7"), names)  # noqa: S102 - our own page
    assert len(names["means"]) == 7


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "benchmarks/README.md", "kernels/README.md"])
def test_links(page: str) -> None:
    """Every relative link leads to a file."""
    text = (ROOT / page).read_text()
    for target in re.findall(r"\]\((?!http)([^)#]+)", text):
        assert (ROOT / page).parent.joinpath(target).exists(), target
