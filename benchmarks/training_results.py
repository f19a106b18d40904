"""Results of ``training.py``: reading and writing them, the table, and the picture of loss against bytes."""

from __future__ import annotations

import itertools
import json
import platform
import statistics
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

DEFAULT_STEP = "aware"
MARKERS = "o", "s", "^", "D", "v", "<", ">", "P", "X", "*", "h", "p", "d", "8", "H", "$a$", "$b$", "$c$", "$d$", "$e$"
COLORS = {"fp32": "0.35", "bf16": "C4", "8bit": "C0", "4bit": "C2", "3bit": "C1", "2bit": "C3", "1bit": "C5"}


@dataclass(frozen=True)
class Run:
    """One run. ``values`` and ``small`` are the formats on the wire, ``step`` is one of ``training.STEPS`` or empty."""

    task: str
    steps: int
    lr: float
    method: str
    density: float
    values: str
    packed: bool
    small: str
    step: str
    catch_up: float
    max_relative_update: float
    see_all: bool
    seed: int

    @property
    def dense(self) -> Run:
        """The dense run to compare with."""
        plain = {"values": "fp32", "packed": False, "small": "fp32", "step": ""}
        return replace(self, method="dense", density=1.0, **plain)

    @property
    def label(self) -> str:
        """Method, density and formats, for tables."""
        formats = [self.values] * (self.values != "fp32") + ["packed"] * (self.packed and self.values == "fp32")
        formats += [f"small {self.small}"] * (self.small != "fp32")
        density = [] if self.density == 1 else [f"{self.density:.4g}"]
        return ", ".join(
            [self.method, *density, *formats, *([self.step] if self.step not in ("", DEFAULT_STEP) else [])]
        )


@dataclass
class Outcome:
    """The result of one run.

    ``score`` and ``late`` are the scores at the end and after nine tenths of the steps. ``kilobytes`` is what the
    busiest worker sent per step, and ``sparse_kilobytes`` the same after the dense steps at the start.
    ``bits_per_entry`` is the mean over all packed sections after these steps, index and value together. It is 0 where
    nothing is packed. ``seconds`` is the time of the run, on a machine with other work.
    """

    score: float
    late: float
    kilobytes: float
    sparse_kilobytes: float
    bits_per_entry: float = 0.0
    seconds: float = 0.0


Results = dict[Run, Outcome]


def read(path: Path | None) -> Results:
    """Return the results in ``path``, or none."""
    if path is None or not path.exists():
        return {}
    found: Results = {}
    for row in json.loads(path.read_text())["rows"]:
        key = Run(**{field.name: row[field.name] for field in fields(Run)})
        found[key] = Outcome(**{field.name: row[field.name] for field in fields(Outcome)})
    return found


def write(results: Results, path: Path, workers: int) -> None:
    """Write all ``results`` to ``path``."""
    machine = f"{platform.machine()}, torch {torch.__version__}, Python {platform.python_version()}"
    rows = [asdict(run) | asdict(outcome) for run, outcome in results.items()]
    path.write_text(json.dumps({"machine": machine, "workers": workers, "rows": rows}, indent=1) + "\n")


def gaps(scores: Iterable[float], dense: Iterable[float], *, relative: bool) -> list[float]:
    """Return how far ``scores`` are above ``dense`` for each seed: in percent if ``relative``, else as difference."""
    pairs = zip(scores, dense, strict=True)
    return [100 * (score / base - 1) if relative else score - base for score, base in pairs]


def gap(run: Run, results: Results) -> float | None:
    """Return the gap of ``run`` to the dense run of its seed: in percent for the GPT, in points for the digits."""
    if run.dense not in results:
        return None
    return gaps([results[run].score], [results[run.dense].score], relative=run.task != "digits")[0]


def line(run: Run, results: Results) -> str:
    """Return one line of text on ``run``."""
    outcome, behind = results[run], gap(run, results)
    unit = "%" if run.task != "digits" else " points"
    compared = f" ({behind:+.2f}{unit})" if behind is not None else ""
    rate = f"{run.steps} steps, lr {run.lr:g}"
    sent = f"{outcome.sparse_kilobytes:.1f} kB ({outcome.kilobytes:.1f} with the start)"
    score = f"{outcome.score:.4f}{compared}"
    return f"{run.task}, {rate}, {run.label}, seed {run.seed}: {score}, {sent}, {outcome.seconds:.0f} s"


def groups(results: Results) -> dict[Run, list[Run]]:
    """Return the runs that differ in nothing but their seeds, by the run as it would be with seed 0."""
    found: dict[Run, list[Run]] = {}
    for run in sorted(results, key=lambda run: run.seed):
        found.setdefault(replace(run, seed=0), []).append(run)
    return {key: found[key] for key in dict.fromkeys(replace(run, seed=0) for run in results)}


def table(results: Results) -> str:
    """Return a Markdown table with a line per setting."""
    columns = ["task", "steps, lr", "method, density, values", "seeds", "score", "gap to dense"]
    columns += ["kB per step after the start", "with it", "bits per entry"]
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for key, runs in groups(results).items():
        outcomes = [results[run] for run in runs]
        digits = 3 if key.task != "digits" else 2
        unit = " %" if key.task != "digits" else " points"
        behind = [value for run in runs if (value := gap(run, results)) is not None]
        compared = ", ".join(f"{value:+.1f}" for value in behind) + unit if behind and key.method != "dense" else ""
        bits = statistics.fmean(outcome.bits_per_entry for outcome in outcomes)
        lines.append(
            f"| {key.task} | {key.steps}, {key.lr:g} | {key.label} | {', '.join(str(run.seed) for run in runs)} "
            f"| {', '.join(f'{outcome.score:.{digits}f}' for outcome in outcomes)} | {compared} "
            f"| {statistics.fmean(outcome.sparse_kilobytes for outcome in outcomes):.1f} "
            f"| {statistics.fmean(outcome.kilobytes for outcome in outcomes):.1f} | {f'{bits:.2f}' if bits else ''} |"
        )
    return "\n".join(lines)


def pictures(results: Results, path: Path) -> None:
    """Write one PNG per task, its name ``path`` with the task added: the gap to dense against bytes after the start.

    A point is the mean over seeds, a bar their range. A method has one marker. The color shows the format of values.
    The line joins the settings that no other one beats in both gap and bytes. They are numbered, and the legend names
    them. Steps, learning rate and step are those of most runs.
    """
    for task in dict.fromkeys(run.task for run in results):
        settings = [(run.steps, run.lr, run.see_all) for run in results if run.task == task]
        common = max(set(settings), key=settings.count)
        chosen = {
            key: runs
            for key, runs in groups(results).items()
            if key.task == task and (key.steps, key.lr, key.see_all) == common
            if key.step in ("", DEFAULT_STEP)
        }
        picture(task, chosen, results, path.with_name(f"{path.stem}-{task}.png"))


class Point(NamedTuple):
    """A group of runs in the picture: the mean of their bytes, and the mean and the range of their gaps."""

    kilobytes: float
    gap: float
    low: float
    high: float
    run: Run


def point(key: Run, runs: list[Run], results: Results) -> Point | None:
    """Return the point of ``runs``, or None without a dense run to compare with."""
    behind = [value for run in runs if (value := gap(run, results)) is not None]
    if not behind:
        return None
    kilobytes = statistics.fmean(results[run].sparse_kilobytes for run in runs)
    return Point(kilobytes, statistics.fmean(behind), min(behind), max(behind), key)


def front(points: Iterable[Point], *, lower_is_better: bool) -> list[Point]:
    """Return the points that no other one beats in both gap and bytes, by bytes."""
    found: list[Point] = []
    for one in sorted(points, key=lambda point: point.kilobytes):
        if not found or (one.gap < found[-1].gap if lower_is_better else one.gap > found[-1].gap):
            found.append(one)
    return found


def picture(task: str, chosen: dict[Run, list[Run]], results: Results, path: Path) -> None:
    """Write the PNG of one task."""
    import matplotlib as mpl
    from matplotlib.figure import Figure
    from matplotlib.ticker import FixedLocator, LogLocator, NullFormatter, ScalarFormatter

    points = [found for key, runs in chosen.items() if (found := point(key, runs, results)) is not None]
    lower_is_better = task != "digits"
    shapes = dict(zip(dict.fromkeys(one.run.method for one in points), itertools.cycle(MARKERS)))
    best = front(points, lower_is_better=lower_is_better)
    with mpl.rc_context({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False}):
        figure = Figure(figsize=(11, 8), layout="constrained")
        axes = figure.subplots()
        for one in points:
            axes.errorbar(
                [one.kilobytes], [one.gap], yerr=[[one.gap - one.low], [one.high - one.gap]], linestyle="",
                marker=shapes[one.run.method], color=COLORS[one.run.values], markersize=5, capsize=1.5, elinewidth=0.6,
            )  # fmt: skip
        axes.plot([one.kilobytes for one in best], [one.gap for one in best], color="0.6", linewidth=0.8, zorder=0)
        for number, one in enumerate(best, 1):
            axes.annotate(
                f"{number}", (one.kilobytes, one.gap), (-4, -4), textcoords="offset points", ha="right", va="top"
            )
        axes.axhline(0, color="0.4", linewidth=0.8)
        steps, lr = next((key.steps, key.lr) for key in chosen)
        axes.set(xscale="log", xlabel="kB per step and worker after the dense start")
        axes.set(ylabel="validation loss, % above dense" if lower_is_better else "test accuracy, points above dense")
        axes.set(title=f"{task}, {steps} steps, learning rate {lr:g}")
        axes.set_yscale("symlog", linthresh=5)  # linear near dense, logarithmic far away
        axes.yaxis.set_major_locator(FixedLocator([-80, -40, -20, -10, *range(-5, 6), 10, 20, 40, 80]))
        axes.yaxis.set_major_formatter(ScalarFormatter())
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.xaxis.set_major_formatter(ScalarFormatter())
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.grid(alpha=0.25)
        names, numbers = legends(points, best, shapes)
        axes.add_artist(axes.legend(handles=names, fontsize=7, loc="upper right", ncols=2))
        axes.legend(
            handles=numbers, frameon=False, fontsize=8, handlelength=0, loc="center left", bbox_to_anchor=(1.0, 0.5)
        )
        figure.savefig(path, dpi=120, format="png")


def legends(points: list[Point], best: list[Point], shapes: dict[str, str]) -> tuple[list[Any], list[Any]]:
    """Return the lines of two legends: a marker per method and a color per format, and the numbers of the ``best``."""
    from matplotlib.lines import Line2D

    names = [("0.35", marker, method) for method, marker in shapes.items()]
    names += [(color, "s", values) for values, color in COLORS.items() if any(p.run.values == values for p in points)]
    numbers = [
        ("none", "", f"{number}: {one.run.label}: {one.kilobytes:.1f} kB, {one.gap:+.1f}")
        for number, one in enumerate(best, 1)
    ]
    lines = [
        [Line2D([], [], linestyle="", color=color, marker=marker, label=text) for color, marker, text in legend]
        for legend in (names, numbers)
    ]
    return lines[0], lines[1]
