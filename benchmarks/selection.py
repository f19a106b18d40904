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
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np
import torch

from selection_routes import DISTRIBUTIONS, DTYPES, Problem, Route, problem, routes

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

    def time(self, call: Callable[[], Any], *, warm: bool = False) -> float:
        """Return the milliseconds of ``call``.

        On a GPU, launches are queued first. Python's time between launches is then not measured, unless the route
        itself waits for the host. With ``warm``, the cache is not flushed.
        """
        if self._cache is None:
            started = time.perf_counter()
            call()
            return 1e3 * (time.perf_counter() - started)
        if not warm:
            self._cache.zero_()
        torch.cuda._sleep(QUEUE_CYCLES)  # noqa: SLF001  # keeps the GPU busy while the launches below are queued
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end))


def measure(p: Problem, compared: list[Route], reps: int, device: str, advance: Callable[[], None]) -> list[Row]:
    """Run all routes ``reps`` times, one after the other in each turn.

    The residual is restored before each call, outside of the measured time. ``advance`` reports progress.
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
                times[route.name].append(clock.time(lambda route=route: route.run(residual), warm=route.warm))
            advance()
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


def plot(rows: list[Row], path: Path, title: str) -> None:
    """Write a plot of bandwidth relative to the copy, with one panel per size, density and dtype."""
    import matplotlib as mpl  # optional

    mpl.use("agg")
    from matplotlib import pyplot as plt

    panels = sorted({(row.n, row.density, row.dtype) for row in rows})
    shown = [row for row in rows if row.correct and not row.name.startswith("rebalance")]
    height = 1.2 + 0.3 * max(sum((r.n, r.density, r.dtype) == panel for r in shown) for panel in panels)
    figure, axes = plt.subplots(1, len(panels), figsize=(1.5 + 4.5 * len(panels), height), squeeze=False, sharey=True)
    for axis, panel in zip(axes[0], panels, strict=True):
        bars = [row for row in shown if (row.n, row.density, row.dtype) == panel][::-1]
        names = [row.name for row in bars]
        colors = ["#888888" if name == "copy" else "#1f77b4" if _ours(name) else "#d9a066" for name in names]
        drawn = axis.barh(names, [row.of_copy for row in bars], color=colors)
        # Panels share the axis of names, but a panel may lack some names.
        for bar, row in zip(drawn, bars, strict=True):
            place = bar.get_y() + bar.get_height() / 2
            box = {"facecolor": "white", "edgecolor": "none", "pad": 0.5}
            axis.text(row.of_copy * 1.1, place, f"{row.median:.3g} ms", va="center", fontsize=8, bbox=box)
        axis.axvline(1, color="#888888", linewidth=1, linestyle="--")
        axis.set_xscale("log")
        axis.set_xlim(right=4)
        axis.xaxis.set_major_formatter("{x:.0%}")
        axis.set_title(f"{panel[0] / 1e6:g}M {panel[2]}, density {panel[1]:.2%}", fontsize=10)
        axis.set_xlabel("bandwidth on the bytes that must move,\nrelative to a plain copy")
    figure.suptitle(f"{title} (blue: this library, ochre: alternatives)", fontsize=10)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def _ours(name: str) -> bool:
    return name.split(",", maxsplit=1)[0] not in ("abs().topk", "nonzero")


def machine(device: str) -> dict[str, str]:
    """Return machine, versions, commit and date of this run."""
    found = {"python": platform.python_version(), "torch": torch.__version__, "numpy": np.__version__}
    if device == "cpu":
        load = f"{os.getloadavg()[0]:.1f}"
        found |= {"processor": _processor(), "threads": str(torch.get_num_threads()), "load": load}
    else:
        import triton  # not required on a CPU

        found |= {"gpu": torch.cuda.get_device_name(), "triton": triton.__version__, "cuda": str(torch.version.cuda)}
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12"]
    commit = subprocess.run(command, capture_output=True, text=True, check=False, cwd=Path(__file__).parent)
    return found | {"commit": commit.stdout.strip() or "unknown", "date": f"{datetime.now(timezone.utc):%Y-%m-%d}"}


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return f"{names[0]}, {len(names)} cores" if names else platform.processor() or platform.machine()


@contextmanager
def progress(total: int) -> Iterator[Callable[[], None]]:
    """Yield a function that advances a progress bar on standard error. Without rich, it does nothing."""
    try:
        from rich.console import Console
        from rich.progress import Progress
    except ImportError:
        yield lambda: None
        return
    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("timing", total=total)
        yield lambda: bar.advance(task)


def arguments() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--n", type=float, nargs="+", default=[25e6], help="numbers of elements")
    parser.add_argument("--density", type=float, nargs="+", default=[0.03, 0.01, 0.001])
    parser.add_argument("--dtype", nargs="+", choices=DTYPES, default=["fp32"], help="dtypes of the gradient")
    parser.add_argument("--distribution", choices=DISTRIBUTIONS, default="normal")
    parser.add_argument("--reps", type=int, default=15)
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    parser.add_argument("--plot", type=Path, help="write a PNG to this file")
    parser.add_argument("--smoke", action="store_true", help="small and quick: only checks that the script runs")
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


def write(path: Path, about: dict[str, str], options: argparse.Namespace, rows: list[Row]) -> None:
    """Write machine, settings and rows as JSON. A wrong result has no times."""
    settings = {"distribution": options.distribution, "reps": options.reps, "device": options.device}
    kept = [asdict(row) if row.correct else {"name": row.name, "n": row.n, "correct": False} for row in rows]
    path.write_text(json.dumps({"machine": about, "settings": settings, "rows": kept}, indent=1) + "\n")


def main() -> None:
    """Measure as the options say. The exit code is 1 when a result was wrong."""
    options, rows = parsed(), []
    about = machine(options.device)
    print(", ".join(f"{key} {value}" for key, value in about.items()))
    for n in map(int, options.n):
        for dtype in options.dtype:
            for density in options.density:
                p = problem(n, density, dtype, options.distribution, options.device)
                compared = routes(p)
                with progress((WARM_UPS + options.reps) * len(compared)) as advance:
                    measured = measure(p, compared, options.reps, options.device, advance)
                print(f"\n{n:,} elements, {dtype} gradient, density {density:.3%}, {options.distribution}")
                show(measured)
                rows += measured
                if options.json:  # after every problem, so that an interrupted run keeps its results
                    write(options.json, about, options, rows)
    if options.plot:
        plot(rows, options.plot, about.get("gpu") or about["processor"])
    sys.exit(any(not row.correct for row in rows))


if __name__ == "__main__":
    main()
