"""Results of ``race.py``: the file, the tables and the picture."""

from __future__ import annotations

import itertools
import json
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from tritoncomm import ConfigurationError
from tritoncomm.algorithms import Dense
from tritoncomm.planning import planner
from tritoncomm.scheduler.cost import Link
from tritoncomm.step.settings import DEFAULT_ALGO, DEFAULT_DENSITY, DEFAULT_VALUES

from race_methods import Contender
from race_worker import PARTS, Cell

TARGET = 1.02  # times the final loss of dense
_HEAD = (
    "| method | ms per step | compute | select | exchange | apply | hidden | kB per step | loss to dense "
    f"| s to {TARGET:g} x dense | times faster | seeds |"
)
Rows = dict[Cell, "Row"]


@dataclass(frozen=True)
class Row:
    """A run and its results, means over the workers.

    ``rate`` is the rate of every interface in bit/s, 0 if it is not limited. ``cores`` are the CPU cores for each
    worker. Averages over steps leave out the dense steps at the start. ``seconds`` holds the time of each step that was
    taken. A run that took fewer than ``cell.steps`` steps has no ``validations``: pairs of a number of steps and the
    loss after them.
    """

    cell: Cell
    rate: float
    machine: str
    cores: float
    numel: int
    warmup_steps: int
    latency: float
    seconds_alone: float
    hidden: float | None
    seconds_per_step: float
    parts: dict[str, float]
    kilobytes: float
    kilobytes_after_warmup: float
    seconds: list[float]
    validations: list[list[float]]

    @property
    def kilobytes_per_step(self) -> float:
        """Kilobytes per step, the mean over all steps of the run, of which those that were not taken are ordinary."""
        missing = self.cell.steps - len(self.seconds)
        return (self.kilobytes * len(self.seconds) + self.kilobytes_after_warmup * missing) / self.cell.steps

    @property
    def is_complete(self) -> bool:
        """Whether all steps were taken."""
        return bool(self.validations)


def read(path: Path | None) -> Rows:
    """Return the rows in ``path``, by cell."""
    if path is None or not path.exists():
        return {}
    found = [
        Row(**{field.name: row[field.name] for field in fields(Row)} | {"cell": Cell(**row["cell"])})
        for row in json.loads(path.read_text())["rows"]
    ]
    return {row.cell: row for row in found}


def write(rows: Rows, path: Path, about: dict[str, Any]) -> None:
    """Write all rows, with what follows from all of them."""
    content = [
        asdict(row)
        | {
            "kilobytes_per_step": row.kilobytes_per_step,
            "seconds_to_target": to_target(row, rows),
            "gap": gap(row, rows),
            "predicted": predicted(row, rows),
        }
        for row in rows.values()
    ]
    partial = path.with_suffix(".partial")  # a run that is stopped here must not lose the rows of hours
    partial.write_text(json.dumps(about | {"rows": content}, indent=1) + "\n")
    partial.replace(path)


def losses(row: Row, rows: Rows) -> list[list[float]]:
    """Return the validations of ``row``, or those of the same training at another rate.

    Training does not depend on the rate: exchanges add in the order of ranks, and steps are the same to the bit.
    """
    if row.is_complete:
        return row.validations
    others = (other for cell, other in rows.items() if replace(cell, network=row.cell.network) == row.cell)
    return next((other.validations for other in others if other.is_complete), [])


def curve(row: Row, rows: Rows) -> list[tuple[float, float]]:
    """Return pairs of seconds of training and the loss. Steps that were not taken count with the average."""
    times = [0.0]
    for step in range(row.cell.steps):
        times.append(times[-1] + (row.seconds[step] if step < len(row.seconds) else row.seconds_per_step))
    return [(times[int(step)], loss) for step, loss in losses(row, rows)]


def dense_loss(row: Row, rows: Rows) -> float | None:
    """Return the final loss of dense training with the same seed, at any rate."""
    dense = rows.get(replace(row.cell, contender="dense"))
    found = losses(dense, rows) if dense is not None else []
    if not found:
        fitting = (
            r for c, r in rows.items() if replace(c, network="") == replace(row.cell, network="", contender="dense")
        )
        found = next((r.validations for r in fitting if r.is_complete), [])
    return found[-1][1] if found else None


def to_target(row: Row, rows: Rows) -> float | None:
    """Return the seconds until the loss is 1.02 times dense's final loss, interpolated. None if it stays above."""
    final, points = dense_loss(row, rows), curve(row, rows)
    if final is None or not points:
        return None
    for (before, high), (after, low) in itertools.pairwise(points):
        if low <= TARGET * final:
            return before + (after - before) * min(1.0, max(0.0, (high - TARGET * final) / (high - low)))
    return None


def gap(row: Row, rows: Rows) -> float | None:
    """Return how far the final loss is above that of dense, in percent."""
    final, own = dense_loss(row, rows), losses(row, rows)
    return None if final is None or not own else 100 * (own[-1][1] / final - 1)


def predicted(row: Row, rows: Rows) -> float | None:
    """Return the seconds per step that ``plan`` predicts, or None for what it does not know.

    It is given the rate of the interface, the measured latency, the seconds of a step without exchange, and the
    :func:`work` of this machine. Computation hides nothing if workers share cores.
    """
    estimate = _estimate(row)
    if estimate is None or estimate.is_dense:
        return None if estimate is None else estimate.step
    measured = work(row, rows)
    return None if measured is None else estimate.step + measured


def work(row: Row, rows: Rows) -> float | None:
    """Return the seconds of a step of the default method that are neither computation nor the link.

    They are the mean over the runs on the fastest network with the task, workers and machine of ``row``. None without.
    """
    same = [
        other
        for other in rows.values()
        if (other.cell.task, other.cell.workers, other.machine) == (row.cell.task, row.cell.workers, row.machine)
        and is_measured(other, rows)
    ]
    found = [(other, estimate) for other in same if (estimate := _estimate(other)) is not None]
    return _mean(max(0.0, other.seconds_per_step - estimate.step) for other, estimate in found)


def is_measured(row: Row, rows: Rows) -> bool:
    """Whether :func:`work` is measured in the run of ``row``, so that its prediction is no prediction."""
    fastest = max(other.rate for other in rows.values())
    contender = Contender.parse(row.cell.contender)
    return row.rate == fastest and contender.name == DEFAULT_ALGO and contender.get("door", "wrap") == "wrap"


def _estimate(row: Row) -> planner.Estimate | None:
    """Return what ``plan`` predicts without the work of the machine, or None for what it does not know."""
    contender = Contender.parse(row.cell.contender)
    known = contender.name == "dense" or (contender.is_ours and contender.get("door", "wrap") == "wrap")
    if row.rate == 0 or not known or contender.exchanges_updates or contender.optimizer != "adamw":
        return None
    setting = planner.Setting(
        numel=row.numel,
        workers=row.cell.workers,
        link=Link(row.latency, row.rate / 8),
        step=row.seconds_alone,
        overlap=planner.OVERLAP if row.cores >= 1 else 0.0,
        values=contender.get("values", DEFAULT_VALUES),
    )
    density = contender.get("density", DEFAULT_DENSITY)
    try:
        return setting.estimate(Dense() if contender.name == "dense" else setting.at(contender.name, density))
    except ConfigurationError:
        return None


def line(row: Row, rows: Rows) -> str:
    """Return a line about one row."""
    reached, behind = to_target(row, rows), gap(row, rows)
    parts = ", ".join(f"{name} {row.parts[name]:.3f}" for name in PARTS)
    return (
        f"{row.cell}: {row.seconds_per_step:.3f} s/step ({parts}), {row.kilobytes_per_step:.1f} kB/step, "
        f"gap {'?' if behind is None else f'{behind:+.1f} %'}, "
        f"target after {'?' if reached is None else f'{reached:.1f} s'}"
    )


def _groups(rows: Rows) -> dict[tuple[str, int, str], list[list[Row]]]:
    """Return the rows by task, workers and network, and there by contender: one row per seed."""
    grouped: dict[tuple[str, int, str], dict[str, list[Row]]] = {}
    for cell, row in rows.items():
        grouped.setdefault((cell.task, cell.workers, cell.network), {}).setdefault(cell.contender, []).append(row)
    return {key: list(found.values()) for key, found in grouped.items()}


def _mean(values: Iterable[float | None]) -> float | None:
    found = list(values)
    known = [value for value in found if value is not None]
    return statistics.fmean(known) if known and len(known) == len(found) else None


def _text(value: float | None, form: str, scale: float = 1.0) -> str:
    return "-" if value is None else format(value * scale, form)


def table(rows: Rows) -> str:
    """Return the results as Markdown, one table per task, number of workers and network, fastest to the target first.

    ``hidden`` is the share of the exchange that backward did not wait for.
    """
    lines: list[str] = []
    for (task, workers, network), contenders in _groups(rows).items():
        dense = next((own for own in contenders if own[0].cell.contender == "dense"), [])
        numel, steps = contenders[0][0].numel, contenders[0][0].cell.steps
        dense_time = _mean(to_target(row, rows) for row in dense)
        lines += [
            "",
            f"{task}, {numel / 1e6:.2f} million parameters, {workers} workers, {network}, {steps} steps:",
            "",
            _HEAD,
            "|---|---|---|---|---|---|---|---|---|---|---|---|",
        ]
        for own in sorted(contenders, key=lambda own: _mean(to_target(row, rows) for row in own) or math.inf):
            reached = [to_target(row, rows) for row in own]
            time = _mean(reached)
            cells = [
                f"`{own[0].cell.contender}`" + ("" if own[0].is_complete else " *"),
                f"{1e3 * statistics.fmean(row.seconds_per_step for row in own):.0f}",
                *(f"{1e3 * statistics.fmean(row.parts[name] for row in own):.0f}" for name in PARTS),
                _text(_mean(row.hidden for row in own), ".0%"),
                f"{statistics.fmean(row.kilobytes_per_step for row in own):.0f}",
                _text(_mean(gap(row, rows) for row in own), "+.1f") + " %",
                "not reached" if time is None else f"{time:.0f}{_spread(reached)}",
                _text(dense_time / time if time and dense_time else None, ".1f"),
                f"{len(own)}",
            ]
            lines.append("| " + " | ".join(cells) + " |")
    if any(not row.is_complete for row in rows.values()):
        lines += ["", "\\* The losses are those of the same run at another rate. Some steps were timed."]
    return "\n".join(lines)


def _spread(values: Sequence[float | None]) -> str:
    known = [value for value in values if value is not None]
    return f" ({min(known):.0f} to {max(known):.0f})" if len(known) > 1 else ""


def plan_table(rows: Rows) -> str:
    """Return the predictions of ``plan`` beside the measured times of a step, as Markdown."""
    lines = [
        "",
        "Predictions of `plan`. Its `--work-ms` is what a step of the default method took beside computation and the",
        "link on the fastest network. \\* marks these runs.",
        "",
        "| task | workers | network | method | measured ms | predicted ms | off by |",
        "|---|---|---|---|---|---|---|",
    ]
    for (task, workers, network), contenders in _groups(rows).items():
        for own in contenders:
            foreseen = _mean(predicted(row, rows) for row in own)
            measured = statistics.fmean(row.seconds_per_step for row in own)
            if foreseen is not None:
                mark = " \\*" if is_measured(own[0], rows) else ""
                lines.append(
                    f"| {task} | {workers} | {network} | `{own[0].cell.contender}`{mark} | {measured * 1e3:.0f} "
                    f"| {foreseen * 1e3:.0f} | {foreseen / measured - 1:+.0%} |"
                )
    return "\n".join(lines)


def picture(rows: Rows, path: Path) -> None:
    """Write a PNG of the loss against the seconds of training: a row of panels per task, a panel per network."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    groups = _groups(rows)
    tasks = list(dict.fromkeys((task, workers) for task, workers, _ in groups))
    wide = max(sum(key[:2] == task for key in groups) for task in tasks)
    names = list(dict.fromkeys(cell.contender for cell in rows))
    colors = {name: f"C{number % 10}" if name != "dense" else "black" for number, name in enumerate(names)}
    with mpl.rc_context({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False}):
        figure = Figure(figsize=(5.2 * wide + 1, 4.0 * len(tasks) + 0.8), layout="constrained")
        grid = figure.subplots(len(tasks), wide, squeeze=False, sharey="row")
        for panels, task in zip(grid, tasks, strict=True):
            chosen = [(network, found) for (*key, network), found in groups.items() if tuple(key) == task]
            for axes, (network, found) in zip(panels, chosen, strict=False):
                _panel(axes, found, rows, colors)
                axes.set_title(f"{task[0]}, {task[1]} workers, {network}")
            panels[0].set_ylabel("validation loss, nats per byte")
            for axes in panels[len(chosen) :]:
                axes.set_axis_off()
        handles = {
            label: handle
            for axes in figure.axes
            for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
        }
        figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=3, frameon=False)
        figure.savefig(path, dpi=120, format="png")


def _panel(axes: Any, contenders: list[list[Row]], rows: Rows, colors: dict[str, str]) -> None:
    finals = [final for own in contenders for row in own if (final := dense_loss(row, rows)) is not None]
    if finals:
        axes.axhline(TARGET * statistics.fmean(finals), color="0.6", linewidth=0.8, linestyle=":")
    for own in contenders:
        name = own[0].cell.contender
        style = "-" if Contender.parse(name).is_ours or name == "dense" else "--"
        for number, row in enumerate(own):
            points = [(seconds, loss) for seconds, loss in curve(row, rows) if seconds > 0]
            if points:
                label = name if number == 0 else None
                axes.plot(*zip(*points, strict=True), style, color=colors[name], linewidth=1.3, label=label)
    axes.set(xscale="log", xlabel="seconds of training")
