"""Every method on a simulated network: words, messages, balance and virtual time beside the papers' formulas."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from tritoncomm.algorithms import Recipe
from tritoncomm.cost import WORD, Link
from tritoncomm.gradients import Gradients
from tritoncomm.simulation import SimulatedWorld

Source = Callable[[int, int], Gradients]  # of (numel, rank)

STEPS = 4  # the fourth is the first that reuses Ok-Topk's thresholds
# Residual, sum, gradient and one vector of scratch, fp32.
_BYTES_PER_ELEMENT = 16
# With fewer entries than this per worker and density, rounding would be measured.
_ENTRIES_PER_WORKER = 2

WHY = {
    "exdyna": "partitions are cut to twice their share while thresholds settle, and unequal ones cost more",
    "micro": "fixed partitions: the worker whose partition holds the large gradients sends most of the entries",
    "gaussiank": "a normal fit lets more pass than asked for where tails are heavy, up to 1.5 k",
    "sidco": "a fit lets more or fewer pass than asked for",
    "hard_threshold": "the threshold of the first step stays while residuals grow",
    "gtopk": "the table adds up both ways through the root; a rank receives one of them",
    "topk_dsa": "an owner of a busy region receives more than its share",
    "oktopk": "frames, counts and sizes come on top; on busy regions an owner receives more than its share",
    "random_block": "blocks are rounded up to 128 elements",
}


@dataclass(frozen=True)
class Row:
    """One method at one number of workers, on the last step; words and messages are per rank, received.

    ``simulated`` is the length of the vector that was exchanged; the figures are for ``numel``.
    """

    method: str
    workers: int
    numel: int
    simulated: int
    density: float
    words: float
    busiest: float
    messages: float
    milliseconds: float
    formula_low: float
    formula_high: float
    formula_milliseconds: float

    @property
    def k(self) -> float:
        """Entries asked for."""
        return max(1.0, self.numel * self.density)

    @property
    def load(self) -> float:
        """The busiest rank over the mean."""
        return self.busiest / self.words if self.words else 1.0

    @property
    def as_predicted(self) -> bool:
        """Whether the mean is within the formula's range, 5 % forgiven."""
        return 0.95 * self.formula_low <= self.words <= 1.05 * self.formula_high

    def as_dict(self) -> dict[str, Any]:
        """All figures by name."""
        return {**dataclasses.asdict(self), "words_per_k": self.words / self.k, "max_over_mean": self.load}


def survey(
    recipes: Sequence[Recipe], workers: Sequence[int], numel: int, link: Link, source: Source, *,
    steps: int = STEPS, memory: float = 1e9,
) -> Iterator[Row]:  # fmt: skip
    """A :class:`Row` for every recipe at every number of workers, as they are measured.

    What does not fit into ``memory`` bytes is exchanged at a shorter vector and at half of that, and continued
    along a straight line: words, messages and virtual time are a constant and a part in proportion to the length.
    """
    for world_size in workers:
        for method in recipes:
            short = shortened(numel, world_size, method.density, memory)
            figures = _measure(method, world_size, short, link, source, steps)
            if short < numel:
                half = _measure(method, world_size, short // 2, link, source, steps)
                ahead = (numel - short) / (short - short // 2)
                figures = [max(0.0, full + ahead * (full - part)) for full, part in zip(figures, half, strict=True)]
            words, busiest, messages, seconds = figures
            formula = method.formula(numel, world_size)
            yield Row(
                method.name, world_size, numel, short, method.density, words, busiest, messages, seconds * 1e3,
                formula.low, formula.high, formula.seconds(link)[1] * 1e3,
            )  # fmt: skip


def shortened(numel: int, world_size: int, density: float, memory: float) -> int:
    """The length that is simulated for ``numel``."""
    fits = int(memory / (_BYTES_PER_ELEMENT * world_size))
    meaningful = int(2 * _ENTRIES_PER_WORKER * world_size / density)
    return min(numel, max(fits, meaningful))


def _measure(method: Recipe, world_size: int, numel: int, link: Link, source: Source, steps: int) -> list[float]:
    """Mean and largest words received, messages received on the busiest rank, and virtual seconds."""
    world = SimulatedWorld(method, world_size, numel, link=link)
    for step in range(steps):
        # Made anew for every step: holding them would take as much memory again.
        world.step(torch.stack([source(numel, rank).at(step) for rank in range(world_size)]))
    received = world.received
    return [
        fmean(traffic.bytes for traffic in received) / WORD,
        max(traffic.bytes for traffic in received) / WORD,
        float(max(traffic.messages for traffic in received)),
        world.seconds,
    ]


def table(rows: Sequence[Row], link: Link) -> str:
    """The rows as text, and what explains the differences."""
    network = f"{link.bandwidth * 8 / 1e9:g} Gbit/s, {link.latency * 1e6:g} us"
    head = ("method", "workers", "simulated", "words/k", "busiest", "formula", "messages", "max/mean", "ms", "formula")
    lines = [
        f"words per rank in multiples of k, frames and counts included; {network}",
        "{:16}{:>8}{:>11}{:>9}{:>9}{:>16}  {:>9}{:>9}{:>10}{:>10}".format(*head),
    ]
    for row in rows:
        low, high = row.formula_low / row.k, row.formula_high / row.k
        formula = f"{low:.2f}" if f"{low:.2f}" == f"{high:.2f}" else f"{low:.2f} to {high:.2f}"
        mark = "" if row.as_predicted else " *"
        lines.append(
            f"{row.method:16}{row.workers:8}{row.simulated:11}{row.words / row.k:9.2f}{row.busiest / row.k:9.2f}"
            f"{formula:>16}{mark:2}{row.messages:9.0f}{row.load:9.2f}{row.milliseconds:10.3f}"
            f"{row.formula_milliseconds:10.3f}"
        )
    different = sorted({row.method for row in rows if not row.as_predicted})
    lines += [f"* {method}: {WHY.get(method, 'counts and frames come on top')}" for method in different]
    if any(row.simulated < row.numel for row in rows):
        lines.append("simulated: shorter vectors, continued along a straight line")
    return "\n".join(lines)


def picture(rows: Sequence[Row], path: Path) -> None:
    """One PNG: words per rank against workers, the lower bound and dense drawn in."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    workers = sorted({row.workers for row in rows})
    with mpl.rc_context({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False}):
        figure = Figure(figsize=(8, 4.6), layout="constrained")
        axes = figure.subplots()
        colours = mpl.colormaps["tab20"].colors  # type: ignore[attr-defined]
        for number, method in enumerate(sorted({row.method for row in rows})):
            mine = [row for row in rows if row.method == method]
            dense = method == "dense"
            axes.plot(
                [row.workers for row in mine], [row.words / row.k for row in mine], "-" if dense else "o-",
                color="black" if dense else colours[number % len(colours)], label=method, markersize=4,
            )  # fmt: skip
        axes.plot(workers, [2 * (p - 1) / p for p in workers], "--", color="0.5", label="lower bound 2k(P-1)/P")
        axes.set(xscale="log", yscale="log", xlabel="workers", ylabel="words received per rank, in multiples of k")
        axes.set_xticks(workers, [str(p) for p in workers], minor=False)
        axes.minorticks_off()
        axes.grid(alpha=0.25)
        axes.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))
        axes.set_title(f"{rows[0].numel / 1e6:g} million values, density {rows[0].density:.2%}", fontsize=11)
        figure.savefig(path, dpi=120, format="png")
