"""Draw the loss against the seconds of training of one race: the picture of the README.

``python benchmarks/race_picture.py --json benchmarks/results/race.json --network 100mbit --plot race.png``
draws it again. Runs with seed 0 of the demo's model with four workers are shown, one curve for each contender.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import race_results
from race_results import Row, Rows

# The contenders, and the label of each, with its height above the end of the curve in points.
LABELS = {
    "dense": ("dense DDP", 4),
    "fp16": ("fp16 hook", -3),
    "powersgd:rank=8": ("PowerSGD", 3),
    "diloco:steps=30": ("DiLoCo", 4),
    "oktopk:warmup_steps=20": ("tritoncomm, the default", -7),
    "oktopk": ("tritoncomm, 6 dense steps", -21),
    "spardl:warmup_steps=20": ("tritoncomm, SparDL", -37),
}
COLORS = {"dense": "black", "fp16": "0.45", "powersgd:rank=8": "C1", "diloco:steps=30": "C3"}
OURS = {"oktopk:warmup_steps=20": ("C0", "-"), "oktopk": ("C0", "--"), "spardl:warmup_steps=20": ("C2", "-")}


def chosen(rows: Rows, network: str) -> list[Row]:
    """Return the rows of the picture, in the order of ``LABELS``."""
    found = {
        cell.contender: row
        for cell, row in rows.items()
        if (cell.task, cell.workers, cell.network, cell.seed) == ("demo", 4, network, 0)
    }
    return [found[name] for name in LABELS if name in found]


def draw(rows: Rows, network: str, path: Path) -> None:
    """Write the PNG."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    style = {"font.size": 10, "axes.spines.top": False, "axes.spines.right": False}
    with mpl.rc_context(style):
        figure = Figure(figsize=(8, 4), layout="constrained")
        axes = figure.subplots()
        shown = chosen(rows, network)
        for row in shown:
            _line(axes, row, race_results.curve(row, rows))
        dense = race_results.dense_loss(shown[0], rows)
        if dense is not None:
            target = race_results.TARGET * dense
            axes.axhline(target, color="0.7", linewidth=0.8, linestyle=":", zorder=0)
            axes.annotate("2 % above dense", (90, target), (0, 4), textcoords="offset points", color="0.4", fontsize=9)
        axes.set(xlabel="seconds of training", ylabel="validation loss, nats per byte", xlim=0, ylim=(1.7, 3.6))
        figure.savefig(path, dpi=150, format="png")


def _line(axes: Any, row: Row, points: Sequence[tuple[float, float]]) -> None:
    name = row.cell.contender
    label, height = LABELS[name]
    color, style = OURS.get(name, (COLORS.get(name, "0.5"), "-"))
    axes.plot(*zip(*points, strict=True), style, color=color, linewidth=2.2 if name in OURS else 1.4)
    axes.annotate(
        label, points[-1], (6, height), textcoords="offset points", color=color, va="center", annotation_clip=False
    )


def main() -> None:
    """Draw."""
    parser = argparse.ArgumentParser(description="Draw the loss against the seconds of training of one race.")
    parser.add_argument("--json", type=Path, required=True, help="results of race.py")
    parser.add_argument("--network", default="100mbit", help="the network whose runs are drawn")
    parser.add_argument("--plot", type=Path, required=True, help="PNG to write")
    options = parser.parse_args()
    draw(race_results.read(options.json), options.network, options.plot)


if __name__ == "__main__":
    main()
