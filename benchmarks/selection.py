"""Measure the speed of the selection kernels, relative to a plain copy in the same run.

A complete route adds the gradient to the residual, finds the large entries, gathers them and clears them in the
residual. Other routes do one part of that. No time is printed for a route whose result differs from the reference.

Each line of the table has the median of the milliseconds of a call, their quantiles of 20 and 80 %, the bytes that any
implementation must move, and

* ``of copy``: the bandwidth on these bytes, divided by that of the copy;
* ``x copy``: the time, divided by that of a copy of as many fp32 values;
* ``vs topk``: how many times faster than ``abs().topk`` a complete route is.

On a GPU, the level-2 cache is flushed before each call.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

import script
from selection_routes import DTYPES, Problem, Route, problem, routes

FLUSH_BYTES = 256 << 20  # five times the level-2 cache of an H200
QUEUE_CYCLES = 4_000_000  # two milliseconds; Python needs one millisecond to launch the longest route
WARM_UPS = 2
NOISY = 1.5  # warn if the 80 % quantile of the copy exceeds its 20 % quantile by this factor


@dataclass(frozen=True)
class Row:
    """One line of the table. Times are milliseconds."""

    name: str
    n: int
    density: float
    dtype: str
    correct: bool
    median: float
    p20: float
    p80: float
    must_bytes: int
    of_copy: float  # bandwidth on the bytes that must move, divided by that of the copy
    copies: float  # time divided by that of a copy of n fp32 values
    over_topk: float | None  # time of abs().topk divided by this time; None for partial routes


class Clock:
    """Time single calls. On a GPU, the level-2 cache is flushed before each."""

    def __init__(self, device: str) -> None:
        self._cache = torch.empty(FLUSH_BYTES, dtype=torch.int8, device=device) if device != "cpu" else None

    def time(self, call: Callable[[], Any]) -> float:
        """Return the milliseconds of ``call``.

        On a GPU, launches are queued first. Python's time between launches is then not measured, unless the route
        itself waits for the host.
        """
        if self._cache is None:
            started = time.perf_counter()
            call()
            return 1e3 * (time.perf_counter() - started)
        self._cache.zero_()
        torch.cuda._sleep(QUEUE_CYCLES)  # noqa: SLF001  # keeps the GPU busy while the launches below are queued
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end))


def measure(p: Problem, compared: list[Route], reps: int, device: str) -> list[Row]:
    """Run all routes ``reps`` times, one after the other in each turn.

    The residual is restored before each call, outside of the measured time.
    """
    clock, residual = Clock(device), p.residual.clone()
    times: dict[str, list[float]] = {route.name: [] for route in compared}
    correct = dict.fromkeys(times, True)
    for turn in range(WARM_UPS + reps):
        for route in compared:
            residual.copy_(p.residual)
            if turn == 0 or turn == WARM_UPS + reps - 1:  # check the first call and the last one, which is warm
                correct[route.name] &= bool(route.check(route.run(residual), residual))
                residual.copy_(p.residual)
            if turn >= WARM_UPS:
                times[route.name].append(clock.time(lambda route=route: route.run(residual)))
    median = {name: statistics.median(values) for name, values in times.items()}
    rows = []
    for route in compared:
        p20, p80 = np.quantile(times[route.name], [0.2, 0.8]).tolist()
        # Ratios are taken within a turn. A slow period of the machine then affects both sides.
        copies = statistics.median(t / c for t, c in zip(times[route.name], times["copy"], strict=True))
        rows.append(
            Row(
                name=route.name,
                n=p.n,
                density=p.density,
                dtype=p.dtype,
                correct=correct[route.name],
                median=median[route.name],
                p20=p20,
                p80=p80,
                must_bytes=route.bytes,
                of_copy=route.bytes / (8 * p.n) / copies,
                copies=copies,
                over_topk=median["abs().topk"] / median[route.name] if route.selects else None,
            )
        )
    return rows


def show(rows: list[Row]) -> None:
    """Print the table. A wrong result is reported without a time."""
    print(f"{'':24}{'median':>10}{'p20':>9}{'p80':>9}  {'must move':>10}  {'of copy':>8}{'x copy':>8}{'vs topk':>9}")
    for row in rows:
        if not row.correct:
            print(f"{row.name:24} WRONG RESULT, not timed")
            continue
        print(
            f"{row.name:24}{row.median:7.3f} ms{row.p20:9.3f}{row.p80:9.3f}  {row.must_bytes / 1e6:7.1f} MB  "
            f"{row.of_copy:8.1%}{row.copies:7.2f}x" + (f"{row.over_topk:8.1f}x" if row.over_topk else "")
        )
    spread = rows[0].p80 / rows[0].p20
    if spread > NOISY:
        print(f"Warning: other load on this machine. The time of the copy varied by a factor of {spread:.1f}.")


def arguments() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = script.parser(__doc__)
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--n", type=float, nargs="+", default=[25e6], help="numbers of elements")
    parser.add_argument("--density", type=float, nargs="+", default=[0.03, 0.01, 0.001])
    parser.add_argument("--dtype", nargs="+", choices=DTYPES, default=["fp32"], help="dtypes of the gradient")
    parser.add_argument("--reps", type=int, default=15)
    return parser


def parsed() -> argparse.Namespace:
    """Return the options of the command line, or exit with what is wrong with them."""
    parser = arguments()
    options = parser.parse_args()
    if options.smoke:
        options.n, options.density, options.reps = [200e3], [0.01], 3
    for name, values, low, high in (("n", options.n, 1, 2**31 - 2**16), ("density", options.density, 0, 1)):
        for value in values:
            if not low <= value <= high or value <= 0:
                parser.error(f"--{name} {value:g}: must be above 0 and between {low} and {high}")
    if options.reps < 1:
        parser.error(f"--reps must be at least 1, got {options.reps}")
    if options.device != "cpu" and not torch.cuda.is_available():
        parser.error(f"--device {options.device}: torch finds no GPU, use --device cpu")
    if options.device != "cpu":
        torch.cuda.set_device(options.device if ":" in options.device else "cuda:0")
    return options


def content(about: dict[str, str], options: argparse.Namespace, rows: list[Row]) -> dict[str, Any]:
    """Return machine, settings and rows as JSON has them. A wrong result has no times."""
    kept = [asdict(row) if row.correct else {"name": row.name, "n": row.n, "correct": False} for row in rows]
    return {"machine": about, "settings": {"reps": options.reps, "device": options.device}, "rows": kept}


def main() -> None:
    """Measure as the options say. The exit code is 1 when a result was wrong."""
    options, rows = parsed(), []
    about = script.machine(options.device)
    print(", ".join(f"{key} {value}" for key, value in about.items()))
    for n, dtype, density in itertools.product(map(int, options.n), options.dtype, options.density):
        p = problem(n, density, dtype, options.device)
        measured = measure(p, routes(p), options.reps, options.device)
        print(f"\n{n:,} elements, {dtype} gradient, density {density:.3%}")
        show(measured)
        rows += measured
        script.write(options.json, content(about, options, rows))  # so that an interrupted run keeps its results
    sys.exit(any(not row.correct for row in rows))


if __name__ == "__main__":
    main()
