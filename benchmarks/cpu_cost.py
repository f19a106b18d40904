"""Measure what one exchange costs on a CPU beside the link, and print the constants of ``step/cpu_cost.py``.

``exchange.py`` times one exchange of every method between local processes: vectors of 25 million values and of one
million, two densities, two and four workers, plain messages and values of 4 bits. ``--measured`` reads files that it
has written. The seconds are those of the wall clock, with the waits for other ranks, times the cores per worker. The
time of packing (``step/packing.py``) and of the bytes at gloo's bandwidth are subtracted, which ``plan`` counts
separately. The bandwidth is that of the largest dense all-reduce. The constants are those with the least squared
relative errors. None of them is negative.

``--race`` reads files of ``race.py`` instead, and prints the constants of the hook of DDP: by how much the steps of
``door=ddp`` take longer than they are predicted without the hook, where the link is fast.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tritoncomm
from scipy.optimize import nnls
from tritoncomm.planning import planner
from tritoncomm.scheduler.local_workers import run_workers
from tritoncomm.step import cpu_cost
from tritoncomm.step.packing import resolve

import exchange
import race_results
from race_methods import Contender

FAST_LINK = 1e9  # bit/s; on a slower one, time on the link hides errors of the work
FORMATS = ["plain", "4bit"]
# Values, workers, densities and steps.
RUNS: list[tuple[int, int, list[float], int]] = [
    (25_000_000, 2, [0.03, 0.01], 12),
    (1_000_000, 2, [0.03, 0.01], 24),
    (1_000_000, 4, [0.03], 24),
]
SMOKE: list[tuple[int, int, list[float], int]] = [(20_000, 2, [0.03, 0.01], 2)]


@dataclass(frozen=True)
class Point:
    """One measured exchange, with one core for each worker. ``other`` is what is not fitted: packing and bytes."""

    method: str
    label: str
    numel: int
    seconds: float
    other: float
    messages: float
    entries: float

    @property
    def weight(self) -> float:
        """One over all seconds: errors are relative to them."""
        return 1 / self.seconds


def measured(numel: int, workers: int, densities: list[float], steps: int, names: list[str]) -> dict[str, Any]:
    """Run ``exchange.py``, and return the content of its file."""
    rows: list[exchange.Row] = []
    run_workers(exchange.work, workers, numel, names, densities, FORMATS, steps, listen=rows.append)
    settings = {"numel": numel, "workers": workers, "steps": steps}
    return {"machine": exchange.machine(), "settings": settings, "exchange": exchange.show(rows, workers)}


def bandwidth(files: list[dict[str, Any]]) -> float:
    """Return the bytes per second of the largest dense all-reduce in ``files``."""
    file = max(files, key=lambda file: file["settings"]["numel"])
    dense = next(row for row in file["exchange"] if row["method"] == "dense")
    return float(dense["bytes_mean"] / (dense["exchange_ms"] * 1e-3 * _cores(file)))


def _cores(file: dict[str, Any]) -> float:
    return min(1.0, file["machine"]["cores"] / file["settings"]["workers"])


def points(file: dict[str, Any], gloo: float) -> list[Point]:
    """Return the exchanges in a file of ``exchange.py``, without those of options of methods."""
    numel, workers = file["settings"]["numel"], file["settings"]["workers"]
    found = []
    for row in file["exchange"]:
        name, _, form = row["method"].partition(" ")
        if form not in {"", "4bit"}:
            continue
        parts = [row[part] for part in ("select_ms", "exchange_ms", "apply_ms")]
        seconds, sent = sum(parts) * 1e-3 * _cores(file), row["bytes_mean"] / gloo
        if name == "dense":
            found.append(Point(name, f"{numel / 1e6:g} million, {workers} workers", numel, seconds, sent, 1, 0))
            continue
        recipe = planner.at(name, row["density"], "4bit" if form else "fp32")
        if form and not hasattr(recipe, "values"):  # measured when the method had formats
            continue
        packing = resolve(recipe, numel, workers, "cpu").seconds
        formula = planner.at(name, row["density"]).formula(numel, workers)
        label = f"{numel / 1e6:g} million, {workers} workers, {row['density']:.0%}{', ' + form if form else ''}"
        found.append(Point(name, label, numel, seconds, packing + sent, formula.latencies, formula.high / 2))
    return found


def fitted(found: list[Point]) -> tuple[float, float, dict[str, tuple[float, float]], dict[Point, float]]:
    """Return the seconds of an exchange, of a message, those of each method by value and entry, and relative errors."""
    names = sorted({point.method for point in found})
    matrix = np.zeros((len(found), 2 + 2 * len(names)))
    for line, point in enumerate(found):
        at = 2 + 2 * names.index(point.method)
        matrix[line, :2] = 1, point.messages
        matrix[line, at : at + 2] = point.numel, point.entries
        matrix[line] *= point.weight
    scale = matrix.max(0, keepdims=True)
    scale[scale == 0] = 1
    target = np.array([1 - point.other * point.weight for point in found])
    solution, _ = nnls(matrix / scale, np.maximum(target, 0))
    solution /= scale[0]
    errors = dict(zip(found, (matrix @ solution - target).tolist(), strict=True))
    rates = {name: (float(solution[2 + 2 * i]), float(solution[3 + 2 * i])) for i, name in enumerate(names)}
    return float(solution[0]), float(solution[1]), rates, errors


def fitted_hook(paths: list[Path]) -> tuple[float, float]:
    """Return the seconds of core that the hook of DDP adds to a step, and to the exchange of each of its buckets."""
    found = []
    for row in itertools.chain.from_iterable(race_results.read(path).values() for path in paths):
        contender = Contender.parse(row.cell.contender)
        foreseen = race_results.predicted(row)
        if row.rate == FAST_LINK and contender.get("door", "wrap") == "ddp" and foreseen is not None:
            buckets = contender.buckets(4 * row.numel)
            without = foreseen - cpu_cost.hook(buckets) / row.cores
            found.append((buckets, (row.seconds_per_step - without) * row.cores))
    buckets, seconds = np.array(found).T
    solution, *_ = np.linalg.lstsq(np.stack([np.ones_like(buckets), buckets], 1), seconds, rcond=None)
    return float(solution[0]), float(solution[1])


def main() -> None:
    """Measure or read, fit, and print the constants and the errors."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measured", type=Path, nargs="+", help="files of exchange.py, instead of measuring")
    parser.add_argument("--race", type=Path, nargs="+", help="files of race.py, for the constants of the hook alone")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--smoke", action="store_true", help="small and quick: only checks that the script runs")
    options = parser.parse_args()
    if options.race:
        hook, bucket = fitted_hook(options.race)
        print(f"HOOK, BUCKET = {hook:.2g}, {bucket:.2g}")
        return
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if options.measured:
        files = [json.loads(path.read_text()) for path in options.measured]
    else:
        names = ["topk_allgather", "random_k"] if options.smoke else tritoncomm.algorithms()
        files = [measured(*run, names) for run in (SMOKE if options.smoke else RUNS)]
    gloo = bandwidth(files)
    found = [point for file in files for point in points(file, gloo)]
    fixed, message, rates, errors = fitted(found)
    print(f"GLOO_BANDWIDTH = {gloo:.2g}\nEXCHANGE, MESSAGE = {fixed:.2g}, {message:.2g}")
    for name, (value, entry) in rates.items():
        print(f'    "{name}": Work({1e9 * value:.1f}e-9, {1e9 * entry:.0f}e-9),')
    print("| exchange | measured ms | error |\n|---|---|---|")
    for point, error in errors.items():
        print(f"| {point.method}, {point.label} | {1e3 / point.weight:.1f} | {error:+.0%} |")
    if options.json:
        constants = {"gloo": gloo, "exchange": fixed, "message": message, "methods": rates}
        options.json.write_text(json.dumps({"constants": constants, "files": files}, indent=1) + "\n")


if __name__ == "__main__":
    main()
