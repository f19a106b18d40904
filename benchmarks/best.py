"""Every method at its own best learning rate: loss, bytes, and seconds to the loss of dense training.

Reads the runs of ``train.py``. For each method, the learning rate and the outer step with the lowest mean score on the
seeds of ``--sweep`` are chosen. The tables show the other seeds with these settings, which may have trained for more
steps. ``train.py --best`` trains them. Dense training in fp16 is dense training with half the bytes.

The target is 1.02 times the final loss of dense AdamW with the same seed, or of another ``--target``. The loss between
two points of a curve is interpolated. A curve is on a few batches, so it is multiplied by one number that lets it end
at the final score.

The seconds of a step are those that ``race.py`` has measured, or estimated, see ``step_seconds.py``. Estimates are
marked by ``~``. The table of errors shows how far estimates are from what is measured. With ``--delay 50ms``, they are
those that ``race.py`` has measured on links with that delay, and nothing is estimated.
"""

from __future__ import annotations

import argparse
import itertools
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import race_results
import runs
import script
from runs import Outcome, Results, Run
from step_seconds import Method, Paces
from tasks import TASKS, WORKERS
from train import train

FOLDER = Path(__file__).parent / "results"
RATES = {"10 Mbit/s": 1e7, "20 Mbit/s": 2e7, "100 Mbit/s": 1e8, "1 Gbit/s": 1e9}
TARGET = 1.02  # times the final loss of dense training
PICTURED = "100 Mbit/s"
FAR, SHOWN = 1.15, 1.6  # times the final loss of dense training: where a method is left out, and where curves begin
NEAR = 0.01  # of the loss: texts of lines this near would overlap
TICKS = 1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000  # kilobytes
CHANCE = math.log(256)  # loss of a byte before the first step


@dataclass(frozen=True)
class Entry:
    """A method at its best setting, ``run``, with one outcome per seed.

    ``at_end`` is True if its rate is the lowest or the highest that was tried.
    """

    run: Run
    name: str
    method: Method
    outcomes: dict[int, Outcome]
    at_end: bool = False

    def mean(self, column: str) -> float:
        """Return the mean of ``column`` over the seeds."""
        return statistics.fmean(outcome[column] for outcome in self.outcomes.values())

    def curve(self, seed: int) -> list[tuple[float, float]]:
        """Return pairs of a number of steps and the loss after them, the last one with the final score."""
        outcome = self.outcomes[seed]
        points = outcome["curve"]
        scale = outcome["score"] / points[-1][1]
        return [(0.0, CHANCE), *((step, loss * scale) for step, loss in points)]

    def steps_to(self, target: float, seed: int) -> float | None:
        """Return the number of steps until the loss is ``target``, or None if it stays above."""
        for (before, high), (after, low) in itertools.pairwise(self.curve(seed)):
            if low <= target:
                return before + (after - before) * min(1.0, max(0.0, (high - target) / (high - low)))
        return None


def entries(results: Results, task: str, sweep: Sequence[int]) -> list[Entry]:
    """Return every method of ``task`` that was swept and then trained with other seeds.

    Runs from before curves were recorded are left out.
    """
    results = {run: outcome for run, outcome in results.items() if "curve" in outcome}
    found = []
    for swept in runs.chosen(results, sweep).values():
        alike = [run for run in results if replace(run, seed=0, steps=swept[0].steps) == swept[0]]
        alike = [run for run in alike if run.seed not in sweep]
        if swept[0].task != task or not alike:
            continue
        best = replace(swept[0], steps=max(run.steps for run in alike))
        seeds = sorted(run.seed for run in alike if run.steps == best.steps)
        outcomes = {seed: results[replace(best, seed=seed)] for seed in seeds}
        rates = [run.lr for run in swept]
        at_end = len(set(rates)) > 1 and best.lr in (min(rates), max(rates))
        entry = Entry(best, named(best), Method.of_run(best), outcomes, at_end)
        found.append(entry)
        if best.exchange == "dense" and best.optimizer == "adamw":
            found.append(in_half_precision(entry))
    return found


def named(run: Run) -> str:
    """Return the name of the kind of ``run``, without its swept settings."""
    return runs.label(runs.kind(run))


def in_half_precision(dense: Entry) -> Entry:
    """Return ``dense`` with half the bytes."""
    halves = "kilobytes", "kilobytes_after_start"
    outcomes = {
        seed: outcome | {name: outcome[name] / 2 for name in halves} for seed, outcome in dense.outcomes.items()
    }
    method = Method.of_run(dense.run, half_precision=True)
    return replace(dense, name=f"{dense.name} in fp16", method=method, outcomes=outcomes)


def dense_of(found: Sequence[Entry], optimizer: str = "adamw") -> Entry | None:
    """Return the dense training with ``optimizer``."""
    return next((each for each in found if each.method == Method("dense", optimizer)), None)


def reached(entry: Entry, dense: Entry) -> dict[int, float | None]:
    """Return the steps of each seed that dense training has, too, until the loss is the target."""
    seeds = [seed for seed in entry.outcomes if seed in dense.outcomes]
    return {seed: entry.steps_to(TARGET * dense.outcomes[seed]["score"], seed) for seed in seeds}


def seconds_after(entry: Entry, steps: float, paces: Paces, rate: float) -> tuple[float, bool]:
    """Return the seconds of the first ``steps`` steps, and whether they are measured."""
    columns = ("kilobytes", "kilobytes_after_start", "messages")
    outcome = {column: entry.mean(column) for column in columns}
    pace = paces.of(entry.method, outcome, entry.run.dense_steps, entry.run.steps, rate)
    return pace.after(steps, entry.run.dense_steps), pace.is_measured


def figures(found: Sequence[Entry], paces: Paces, target: str = "adamw") -> list[dict[str, Any]]:
    """Return a row for each method: its best setting, and what it reached. Seconds are None where nothing is known.

    Args:
        found: The methods.
        paces: What is known of the seconds of steps.
        target: The optimizer whose dense training others are compared with.
    """
    dense = dense_of(found, target)
    rows = []
    for entry in found:
        scores = [outcome["score"] for outcome in entry.outcomes.values()]
        steps = reached(entry, dense) if dense else {}
        known = [each for each in steps.values() if each is not None]
        row: dict[str, Any] = {
            "task": entry.run.task, "method": entry.name, "lr": entry.run.lr, "lr_is_at_end_of_sweep": entry.at_end,
            "schedule": entry.run.schedule, "outer_lr": entry.run.outer_lr, "outer_momentum": entry.run.outer_momentum,
            "match_length": entry.run.match_length, "seeds": sorted(entry.outcomes), "score": statistics.fmean(scores),
            "kilobytes": entry.mean("kilobytes"), "reached": len(known),
            "steps_to_target": statistics.fmean(known) if known else None,
        }  # fmt: skip
        if dense:
            gaps = [
                100 * (entry.outcomes[seed]["score"] / dense.outcomes[seed]["score"] - 1)
                for seed in entry.outcomes
                if seed in dense.outcomes
            ]
            row |= {"gap": statistics.fmean(gaps), "gap_range": [min(gaps), max(gaps)]} if gaps else {}
        row["seconds"] = {
            name: None
            if not known or not paces.knows(entry.method, rate)
            else dict(
                zip(("mean", "is_measured"), seconds_after(entry, row["steps_to_target"], paces, rate), strict=True)
            )
            for name, rate in RATES.items()
        }
        rows.append(row)

    def place(row: dict[str, Any]) -> tuple[float, float]:
        seconds = row["seconds"][PICTURED]
        return seconds["mean"] if seconds else math.inf, row["steps_to_target"] or math.inf

    return sorted(rows, key=place)


def table(rows: Sequence[dict[str, Any]], rates: Sequence[str] = tuple(RATES), target: str = "adamw") -> str:
    """Return ``rows`` as Markdown, fastest first, with the seconds at ``rates``."""
    dense = runs.OPTIMIZER_NAMES[target]
    head = ["method", "rate", f"loss against dense {dense}", "kB per step", "steps", *rates]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    same_schedule = len({row["schedule"] for row in rows}) == 1
    for row in rows:
        schedule = "" if same_schedule or row["schedule"] == "constant" else f", {row['schedule']}"
        cells = [
            row["method"],
            f"{row['lr']:g}{schedule}{' (end)' if row['lr_is_at_end_of_sweep'] else ''}",
            _gap(row, f"dense {dense}"),
            _rounded(row["kilobytes"]),
            _steps(row),
            *(_time(row, name) for name in rates),
        ]
        lines.append("|" + "|".join(f" {cell} " if cell else " " for cell in cells) + "|")
    return "\n".join(lines)


def _gap(row: dict[str, Any], dense: str) -> str:
    if row["method"] == dense or "gap" not in row:
        return ""
    low, high = row["gap_range"]
    return "0.0 %" if low == high == 0 else f"{low:+.1f} to {high:+.1f} %"


def _rounded(number: float) -> str:
    if number < 10:  # noqa: PLR2004
        return f"{number:.1f}"
    return f"{number:.0f}" if number < 10_000 else f"{number:,.0f}"  # noqa: PLR2004


def _steps(row: dict[str, Any]) -> str:
    if row["steps_to_target"] is None:
        return "never"
    some = f" ({row['reached']} of {len(row['seeds'])} seeds)" if row["reached"] < len(row["seeds"]) else ""
    return f"{row['steps_to_target']:.0f}{some}"


def sweep_table(results: Results, task: str, sweep: Sequence[int]) -> str:
    """Return what was swept of each method of ``task`` as Markdown, the best first."""
    lines = ["| method | rate, and rate and momentum of the outer step: mean loss |", "|---|---|"]
    for swept in runs.chosen(results, sweep).values():
        cells = []
        for run in swept:
            loss = statistics.fmean(results[replace(run, seed=seed)]["score"] for seed in sweep)
            cells.append(f"{_settings(run)}: {loss:.3f}")
        if swept[0].task == task:
            lines.append(f"| {named(swept[0])} | {'; '.join(cells)} |")
    return "\n".join(lines)


def _settings(run: Run) -> str:
    outer = "" if run.outer_lr == 1 and run.outer_momentum == 0 else f", {run.outer_lr:g} and {run.outer_momentum:g}"
    constant = " constant" if run.schedule == "constant" else ""
    return f"{run.lr:g}{constant}{outer}{', length restored' if run.match_length else ''}"


def _time(row: dict[str, Any], name: str) -> str:
    found = row["seconds"][name]
    if row["steps_to_target"] is None or found is None:
        return ""
    return f"{'' if found['is_measured'] else '~'}{_rounded(max(10.0, found['mean']))}"


def error_table(errors: Sequence[dict[str, Any]]) -> str:
    """Return the errors of the estimates as Markdown, and their mean size."""
    lines = ["| method | Mbit/s | measured ms | estimated ms | off by |", "|---|---|---|---|---|"]
    for row in errors:
        off = row["estimated"] / row["measured"] - 1
        measured, estimated = 1e3 * row["measured"], 1e3 * row["estimated"]
        lines.append(f"| {row['method']} | {row['rate'] / 1e6:g} | {measured:.0f} | {estimated:.0f} | {off:+.0%} |")
    sizes = [abs(row["estimated"] / row["measured"] - 1) for row in errors]
    return "\n".join([*lines, "", f"Mean size of the error {statistics.fmean(sizes):.0%}, largest {max(sizes):.0%}."])


def errors_of(found: Sequence[Entry], paces: Paces) -> list[dict[str, Any]]:
    """Return the measured and the estimated seconds of every measured step but those on the fastest network."""
    sent = {entry.method: {name: entry.mean(name) for name in ("kilobytes_after_start", "messages")} for entry in found}
    return [
        {"method": " ".join(map(str, filter(None, method))), "rate": rate, "measured": measured, "estimated": estimated}
        for method, rate, measured, estimated in paces.errors(sent)
    ]


def picture(found: Sequence[Entry], paces: Paces, path: Path, target: str = "adamw") -> None:
    """Write a PNG: the loss against bytes, and against seconds on one network where the seconds of steps are known.

    ``target`` is as in :func:`figures`. Methods that end far above dense training are left out.
    """
    import matplotlib as mpl
    from matplotlib.figure import Figure

    dense = dense_of(found, target)
    if dense:
        found = [entry for entry in found if entry.mean("score") < FAR * dense.mean("score")]
    styles = {
        entry.name: {"color": "black" if entry.method == Method("dense") else f"C{number % 10}", "marker": marker}
        for number, entry in enumerate(found)
        for marker in ("o", "s", "^")[number // 10 % 3]
    }
    with mpl.rc_context({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False}):
        figure = Figure(figsize=(6.5 if paces.is_empty else 12, 5.6), layout="constrained")
        left, *others = figure.subplots(1, 1 if paces.is_empty else 2, squeeze=False)[0]
        _against_bytes(left, found, styles)
        for axes in others:
            known = [entry for entry in found if paces.knows(entry.method, RATES[PICTURED])]
            _against_seconds(axes, known, partial(seconds_after, paces=paces, rate=RATES[PICTURED]), styles)
            if dense:
                axes.axhline(TARGET * dense.mean("score"), color="0.6", linewidth=0.8, linestyle=":")
                axes.set_ylim(top=SHOWN * dense.mean("score"))
        handles, names = figure.axes[-1].get_legend_handles_labels()
        figure.legend(handles, names, loc="outside lower center", ncols=3, frameon=False, fontsize=8)
        figure.savefig(path, dpi=130, format="png")


def _against_bytes(axes: Any, found: Sequence[Entry], styles: dict[str, dict[str, Any]]) -> None:
    """Draw the mean loss of each method against bytes. Dense ones are horizontal lines."""
    lines: dict[float, list[str]] = {}  # by their height, those near one another together
    for entry in sorted(found, key=lambda entry: -entry.mean("kilobytes")):
        name, scores = entry.name, [outcome["score"] for outcome in entry.outcomes.values()]
        mean, kilobytes = statistics.fmean(scores), entry.mean("kilobytes")
        if name.startswith("dense "):
            axes.axhline(mean, color="0.6", linewidth=0.8, linestyle="--")
            text = f"{name} ({kilobytes:.0f} kB)"
            near = next((other for other in lines if abs(other / mean - 1) < NEAR), mean)
            lines.setdefault(near, []).append(text)
            continue
        spread = [[mean - min(scores)], [max(scores) - mean]]
        axes.errorbar(kilobytes, mean, yerr=spread, label=name, fmt="", markersize=5, **styles[name])
    for height, texts in lines.items():
        place = "axes fraction", "data"
        axes.annotate(", ".join(texts), (0.01, height), xycoords=place, fontsize=8, va="bottom")
    axes.set(xscale="log", xlabel="kB per step and worker", ylabel="validation loss (nats per byte)")
    axes.set_xticks(TICKS, [f"{tick:g}" for tick in TICKS])
    axes.minorticks_off()
    axes.grid(alpha=0.25)


def _against_seconds(
    axes: Any, found: Sequence[Entry], after: Callable[[Entry, float], Any], styles: dict[str, dict[str, Any]]
) -> None:
    """Draw the mean loss of each method against the seconds of training that ``after`` returns."""
    for entry in found:
        steps, losses = mean_curve(entry)
        seconds = [after(entry, step)[0] for step in steps]
        axes.plot(
            seconds[1:], losses[1:], linewidth=1.2, markevery=[-1], markersize=5, label=entry.name, **styles[entry.name]
        )
    axes.set(xscale="log", xlabel=f"seconds of training at {PICTURED}", ylabel="validation loss (nats per byte)")
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.xaxis.set_minor_formatter(lambda value, _: f"{value:g}" if f"{value:g}"[0] in "25" else "")
    axes.grid(alpha=0.25)


def mean_curve(entry: Entry) -> tuple[list[float], list[float]]:
    """Return the steps of the first seed's curve, and the mean loss over the seeds after them."""
    curves = [entry.curve(seed) for seed in entry.outcomes]
    return [step for step, _ in curves[0]], [
        statistics.fmean(each[i][1] for each in curves) for i in range(len(curves[0]))
    ]


def smoke_results() -> Results:
    """Train a few steps of dense, Ok-Topk and DiLoCo at two rates, and another seed at the first of them."""
    dense = Run("gpt", 4, "adamw", 0.001, "dense")
    sparse = replace(dense, exchange="gradients", method="oktopk", values="4bit", density=0.03, dense_steps=1)
    local = replace(dense, exchange="updates", local_steps=2, outer_lr=0.7, outer_momentum=0.9)
    swept = [replace(each, seed=10) for each in (dense, sparse, local)] + [replace(dense, lr=1e-4, seed=10)]
    return {run: train(run, 1) for run in (*swept, dense, sparse, local)}


def arguments() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = script.parser(__doc__)
    parser.add_argument("--task", default="demo", choices=list(TASKS))
    parser.add_argument("--runs", type=Path, nargs="+", default=[FOLDER / "peers.json"], help="files of train.py")
    parser.add_argument("--race", type=Path, default=FOLDER / "race.json", help="file of race.py")
    parser.add_argument("--sweep", type=int, nargs="+", default=[10], help="seeds on which rates were swept")
    parser.add_argument("--target", default="adamw", help="the optimizer whose dense training has the loss to reach")
    parser.add_argument("--delay", default="", help="delay of the links on which steps were timed, such as 50ms")
    parser.add_argument("--plot", type=Path, help="write a PNG to this file")
    return parser


def main() -> None:
    """Print the tables, and write the requested files."""
    options = arguments().parse_args()
    options.task = "gpt" if options.smoke else options.task
    results = smoke_results() if options.smoke else runs.read(*options.runs)
    found = entries(results, options.task, options.sweep)
    print(f"Sweep on seeds {options.sweep}:\n\n{sweep_table(results, options.task, options.sweep)}\n", flush=True)
    if not found:
        raise SystemExit(f"no method of {options.task} was swept and then trained with other seeds")
    if dense_of(found, options.target) is None:
        known = ", ".join(entry.method.optimizer for entry in found if entry.method.name == "dense")
        raise SystemExit(f"--target {options.target}: {options.task} has dense runs of {known or 'no optimizer'}")
    steps = TASKS[options.task](None, 1).steps
    paces = Paces(race_results.read(options.race), options.task, WORKERS, steps, options.delay)
    rows, errors = figures(found, paces, options.target), errors_of(found, paces)
    print(f"{options.task}: to {TARGET:g} times the loss of dense {options.target}.\n")
    print(table(rows, target=options.target))
    if errors:
        print(f"\nSeconds of a step:\n\n{error_table(errors)}")
    about = {"target": options.target, "delay": options.delay}
    script.write(options.json, about | {"methods": rows, "errors": errors})
    if options.plot:
        picture(found, paces, options.plot, options.target)


if __name__ == "__main__":
    main()
