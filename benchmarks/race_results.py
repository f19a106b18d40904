"""Results of ``race.py``: the file and the table."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from tritoncomm import ConfigurationError
from tritoncomm.algorithms import Dense
from tritoncomm.planning import planner
from tritoncomm.scheduler.cost import Link
from tritoncomm.step.settings import DEFAULT_ALGO, DEFAULT_DENSITY, DEFAULT_VALUES

from race_methods import Contender
from race_worker import Cell

Rows = dict[Cell, "Row"]


@dataclass(frozen=True)
class Row:
    """A run and its results, means over the workers.

    ``rate`` is the rate of every interface in bit/s, 0 if it is not limited. ``cores`` are the CPU cores for each
    worker. Averages over steps leave out the dense steps at the start. ``seconds`` holds the time of each step that was
    taken.
    """

    cell: Cell
    rate: float
    machine: str
    cores: float
    numel: int
    warmup_steps: int
    latency: float
    seconds_alone: float
    seconds_per_step: float
    kilobytes: float
    kilobytes_after_warmup: float
    seconds: list[float]

    @property
    def kilobytes_per_step(self) -> float:
        """Kilobytes per step, the mean over all steps of the run, of which those that were not taken are ordinary."""
        missing = self.cell.steps - len(self.seconds)
        return (self.kilobytes * len(self.seconds) + self.kilobytes_after_warmup * missing) / self.cell.steps


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
            "predicted": predicted(row, rows),
        }
        for row in rows.values()
    ]
    partial = path.with_suffix(".partial")  # a run that is stopped here must not lose the rows of hours
    partial.write_text(json.dumps(about | {"rows": content}, indent=1) + "\n")
    partial.replace(path)


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
    return row.rate == fastest and contender.name == DEFAULT_ALGO


def _estimate(row: Row) -> planner.Estimate | None:
    """Return what ``plan`` predicts without the work of the machine, or None for what it does not know."""
    contender = Contender.parse(row.cell.contender)
    known = contender.name == "dense" or contender.is_ours
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


def line(row: Row) -> str:
    """Return a line about one row."""
    return f"{row.cell}: {row.seconds_per_step:.3f} s/step, {row.kilobytes_per_step:.1f} kB/step"


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


def table(rows: Rows) -> str:
    """Return the results as Markdown, one table per task, number of workers and network, fastest first."""
    lines: list[str] = []
    for (task, workers, network), contenders in _groups(rows).items():
        numel, steps = contenders[0][0].numel, contenders[0][0].cell.steps
        lines += [
            "",
            f"{task}, {numel / 1e6:.2f} million parameters, {workers} workers, {network}, {steps} steps:",
            "",
            "| method | ms per step | predicted | kB per step | seeds |",
            "|---|---|---|---|---|",
        ]
        for own in sorted(contenders, key=lambda own: statistics.fmean(row.seconds_per_step for row in own)):
            foreseen = _mean(predicted(row, rows) for row in own)
            mark = " \\*" if is_measured(own[0], rows) else ""
            cells = [
                f"`{own[0].cell.contender}`",
                f"{1e3 * statistics.fmean(row.seconds_per_step for row in own):.0f}",
                "-" if foreseen is None else f"{1e3 * foreseen:.0f}{mark}",
                f"{statistics.fmean(row.kilobytes_per_step for row in own):.0f}",
                f"{len(own)}",
            ]
            lines.append("| " + " | ".join(cells) + " |")
    note = "\\* On the fastest network: what a step takes beside computation and the link was measured here."
    return "\n".join([*lines, "", note])
