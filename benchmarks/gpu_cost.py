"""Count host synchronizations and kernel launches of one exchange, and print the table of ``step/gpu_cost.py``.

No GPU is used, and nothing is timed (``tests/emulated_cuda``). The counts of every method in each form and format are
written as a + b P + c ceil(log2 P), where P is the number of workers. Those of the static form have no part b.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import tritoncomm
from tritoncomm import Recipe
from tritoncomm.algorithms.base import IndexRecipe, StaticRecipe
from tritoncomm.planning import planner

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from emulated_cuda.exchanges import DENSITIES, DENSITY, counted  # noqa: E402

WORKERS = (2, 4, 8)
Growth = tuple[float, float, float]


def variants(method: str, density: float) -> dict[tuple[str, str], Recipe]:
    """Return the recipes of a method by form (exact or static) and format (plain, packed or rounded)."""
    plain = planner.at(method, density)
    formats = {"plain": plain}
    if isinstance(plain, IndexRecipe):
        formats = {"plain": replace(plain, packed=False), "packed": replace(plain, packed=True)}
    if hasattr(plain, "values"):
        formats["rounded"] = replace(plain, values="4bit")
    if not isinstance(plain, StaticRecipe):
        return {("exact", how): recipe for how, recipe in formats.items()}
    forms = {"exact": False, **({"static": True} if plain.can_be_static() else {})}
    return {
        (form, how): replace(recipe, static=static)
        for form, static in forms.items()
        for how, recipe in formats.items()
        if isinstance(recipe, StaticRecipe)
    }


def fitted(two: float, four: float, eight: float, *, static: bool) -> Growth:
    """Return a, b and c of counts at 2, 4 and 8 workers. None of b and c is negative."""
    if static:
        return two - (eight - two) / 2, 0, (eight - two) / 2
    per_worker = (eight - 2 * four + two) / 2
    per_round = four - two - 2 * per_worker
    if per_round < 0:  # a search of thresholds took another number of passes
        per_worker, per_round = (eight - two) / 6, 0
    return two - 2 * per_worker - per_round, per_worker, per_round


def main() -> None:
    """Count, and print the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--algo", nargs="+", default=tritoncomm.algorithms(), choices=tritoncomm.algorithms())
    parser.add_argument("--json", type=Path)
    parser.add_argument("--smoke", action="store_true", help="small and quick: only checks that the script runs")
    options = parser.parse_args()
    if options.smoke:
        options.algo = ["dense", "topk_allgather"]
    torch.set_num_threads(1)
    print("# method, form, format: synchronizations (a, b, c), launches (a, b, c), counted on emulated GPUs")
    found: list[dict[str, Any]] = []
    for method in options.algo:
        for (form, how), recipe in variants(method, DENSITIES.get(method, DENSITY)).items():
            counts = [counted(recipe, workers) for workers in WORKERS]
            syncs, launches = (fitted(*each, static=form == "static") for each in zip(*counts, strict=True))
            figures = ", ".join(f"({', '.join(f'{each:g}' for each in growth)})" for growth in (syncs, launches))
            print(f'    ("{method}", "{form}", "{how}"): ({figures}),', flush=True)
            found.append({"method": method, "form": form, "format": how, "workers": WORKERS, "counts": counts})
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
