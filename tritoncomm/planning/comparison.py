"""Every method on a simulated network: words, messages, balance and virtual time beside the papers' formulas."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import torch

from tritoncomm.algorithms import Recipe
from tritoncomm.errors import ConfigurationError
from tritoncomm.planning.synthetic_gradients import Gradients
from tritoncomm.scheduler.cost import WORD, Link
from tritoncomm.simulation import SimulatedWorld

Source = Callable[[int, int], Gradients]  # of (numel, rank)

STEPS = 4  # the fourth is the first that reuses Ok-Topk's thresholds
# Residual, sum, gradient, its noise and one vector of scratch, fp32.
_BYTES_PER_ELEMENT = 20
# Times that a worker holds what it gathered from all others, in buffers and while merging it; some methods gather
# a few times as much as their formula says.
_COPIES_OF_GATHERED = 6
# With fewer entries than this per worker and density, rounding would be measured.
_ENTRIES_PER_WORKER = 2
# What may be taken beyond the memory that was allowed, where there is no sense in less; the second for methods that
# gather from all, whose words are in proportion to k however small it is.
_LARGEST, _LARGEST_GATHERING = 16e9, 4e9

WHY = {
    "exdyna": "volume follows what is delivered, up to twice k while thresholds settle; unequal partitions cost more",
    "micro": "as exdyna; a fixed partition that holds the large gradients sends most of the entries",
    "gaussiank": "a normal fit lets more pass than asked for where tails are heavy, up to 1.5 k",
    "sidco": "a fit lets more or fewer pass than asked for, or there is less to send than k",
    "hard_threshold": "the threshold of the first step stays while residuals grow",
    "gtopk": "the table adds up both ways through the root; a rank receives one of them",
    "topk_dsa": "less than k may be there to send; an owner of a busy region receives more than its share",
    "oktopk": "frames, counts and sizes come on top, and on a step that re-evaluates the candidates for the k largest",
    "random_block": "blocks are rounded up to 128 elements, and the last block of the vector is short",
}


@dataclass(frozen=True)
class Row:
    """One method at one number of workers, on the last step; words and messages are per rank, received.

    ``simulated`` is the length of the vector that was exchanged; the figures are for ``numel``. ``delivered`` is in
    multiples of k: a method that delivers more sends more.
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
    delivered: float
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


def compare_methods(
    recipes: Sequence[Recipe], workers: Sequence[int], numel: int, link: Link, source: Source, *,
    steps: int = STEPS, memory: float = 1e9,
) -> Iterator[Row]:  # fmt: skip
    """A :class:`Row` for every recipe at every number of workers, as they are measured.

    What does not fit into ``memory`` bytes is exchanged at a shorter vector and at half of that, and continued
    along a straight line: words, messages and virtual time are a constant and a part in proportion to the length.
    """
    for world_size in workers:
        for method in recipes:
            gathered = max(0.0, method.formula(numel, world_size).high / numel - 2.0) if numel else 0.0
            short = shortened(numel, world_size, method.density, memory, gathered)
            figures = _measure(method, world_size, short, link, source, steps)
            if short < numel:
                half = _measure(method, world_size, short // 2, link, source, steps)
                figures = _continued(figures, half, short, numel, link)
            formula = method.formula(numel, world_size)
            yield Row(
                label(method), world_size, numel, short, method.density, figures.words, figures.busiest,
                figures.messages, figures.seconds * 1e3, figures.delivered,
                formula.low, formula.high, formula.seconds(link)[1] * 1e3,
            )  # fmt: skip


def label(recipe: Recipe) -> str:
    """The method's name, and what is set otherwise than usual."""
    changed = [
        f"{field.name}={getattr(recipe, field.name)}"
        for field in dataclasses.fields(recipe)
        if field.name not in ("density", "reduced_lr") and getattr(recipe, field.name) != field.default
    ]
    return " ".join([recipe.name, *changed])


def shortened(numel: int, world_size: int, density: float, memory: float, gathered: float = 0.0) -> int:
    """The length that is simulated for ``numel``: what fits, but at least what makes sense with so many workers.

    A method that gathers more than a dense exchange receives, by ``gathered`` words per element, may be simulated at
    less: each worker receives from each, however little. Raises :class:`~tritoncomm.ConfigurationError` when what
    makes sense takes more than ``memory`` and 16 GB.
    """
    meaningful = min(numel, int(2 * _ENTRIES_PER_WORKER * world_size / density))
    needed, largest = meaningful * world_size * _BYTES_PER_ELEMENT, max(memory, _LARGEST)
    if needed > largest:
        raise ConfigurationError(
            f"{world_size} workers at density {density} take {needed / 1e9:.0f} GB to be simulated in earnest: "
            "choose a higher density, fewer workers, or more memory if there is"
        )
    per_element = world_size * (_BYTES_PER_ELEMENT + _COPIES_OF_GATHERED * WORD * gathered)
    worth = int(max(memory, _LARGEST_GATHERING) / per_element) if gathered else meaningful
    return min(numel, max(int(memory / per_element), min(meaningful, worth)))


class _Figures(NamedTuple):
    """Per rank: words received, on average and at most, messages received at most, virtual time, entries over k."""

    words: float
    busiest: float
    messages: float
    seconds: float
    delivered: float


def _measure(method: Recipe, world_size: int, numel: int, link: Link, source: Source, steps: int) -> _Figures:
    world = SimulatedWorld(method, world_size, numel, link=link)
    sources, delivered = [source(numel, rank) for rank in range(world_size)], 0
    for step in range(steps):
        means = world.step(torch.stack([gradients.at(step) for gradients in sources]))
        delivered = len(means[0])
    received = world.received
    return _Figures(
        fmean(traffic.bytes for traffic in received) / WORD,
        max(traffic.bytes for traffic in received) / WORD,
        float(max(traffic.messages for traffic in received)),
        world.seconds,
        delivered / max(1, int(numel * method.density)),
    )


def _continued(full: _Figures, half: _Figures, short: int, numel: int, link: Link) -> _Figures:
    """What ``numel`` elements take, from ``short`` of them and half as many.

    Words are a constant (frames, counts) and a part in proportion to the length, unless the two took different
    kinds of steps: then all of them are taken in proportion. Time grows by the bytes of the busiest rank.
    """
    ahead = (numel - short) / (short - short // 2)

    def longer(whole: float, part: float) -> float:
        return whole + ahead * (whole - part) if full.messages == half.messages else whole * numel / short

    words = max(0.0, longer(full.words, half.words))
    busiest = max(words, longer(full.busiest, half.busiest))
    seconds = full.seconds + link.transfer(WORD * max(0.0, busiest - full.busiest))
    return full._replace(words=words, busiest=busiest, seconds=seconds)


def table(rows: Sequence[Row], link: Link) -> str:
    """The rows as text, and what explains the differences."""
    network = f"{link.bandwidth * 8 / 1e9:g} Gbit/s, {link.latency * 1e6:g} us"
    head = (
        "method", "workers", "simulated", "delivered/k", "words/k", "busiest", "formula", "messages", "max/mean", "ms",
        "formula ms",
    )  # fmt: skip
    wide = max([16, *(len(row.method) + 2 for row in rows)])
    lines = [
        f"words per rank in multiples of k, frames and counts included; {network}",
        f"{head[0]:{wide}}" + "{:>8}{:>11}{:>12}{:>9}{:>9}{:>16}  {:>9}{:>9}{:>10}{:>11}".format(*head[1:]),
    ]
    for row in rows:
        low, high = row.formula_low / row.k, row.formula_high / row.k
        formula = f"{low:.2f}" if f"{low:.2f}" == f"{high:.2f}" else f"{low:.2f} to {high:.2f}"
        mark = "" if row.as_predicted else " *"
        lines.append(
            f"{row.method:{wide}}{row.workers:8}{row.simulated:11}{row.delivered:12.2f}"
            f"{row.words / row.k:9.2f}{row.busiest / row.k:9.2f}{formula:>16}{mark:2}"
            f"{row.messages:9.0f}{row.load:9.2f}{row.milliseconds:10.3f}"
            f"{row.formula_milliseconds:11.3f}"
        )
    different = sorted({row.method for row in rows if not row.as_predicted})
    lines += [f"* {method}: {WHY.get(method.split()[0], 'counts and frames come on top')}" for method in different]
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
