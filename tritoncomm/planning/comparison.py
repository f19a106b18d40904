"""Compare methods on a simulated network: words, messages, balance and virtual time, beside the predictions."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import torch

from tritoncomm.algorithms import Recipe
from tritoncomm.errors import ConfigurationError
from tritoncomm.planning.synthetic_gradients import Source
from tritoncomm.scheduler.cost import WORD, Link
from tritoncomm.simulation import SimulatedWorld

STEPS = 4  # the fourth step is the first that reuses Ok-Topk's thresholds
# Residual, sum, gradient, noise of the gradient, and one scratch vector, in fp32.
_BYTES_PER_ELEMENT = 20
# Copies of the gathered entries that a worker holds, in buffers and while merging. Some methods gather a few times the
# volume that they are predicted to.
_COPIES_OF_GATHERED = 6
# With fewer selected entries per worker, the figures would measure rounding.
_ENTRIES_PER_WORKER = 2
# Bytes that a simulation may use when `memory` allows only a vector that is too short to be meaningful. The second
# limit is for methods that gather entries from all workers. Their volume is proportional to k even if k is small.
_LARGEST, _LARGEST_GATHERING = 16e9, 4e9

WHY = {
    "exdyna": "volume follows the delivered entries, up to 2k while the threshold adapts; unequal partitions cost more",
    "micro": "as for exdyna; with fixed partitions, the one with the large gradients sends most of the entries",
    "oktopk": "regions do not receive the same number of entries; a re-evaluation adds candidates for the k largest",
    "random_block": "the last block of the vector is shorter",
}


@dataclass(frozen=True)
class Row:
    """The last step of one method at one number of workers.

    Attributes:
        method: Name of the method and the fields that differ from their defaults.
        workers: Number of workers.
        numel: Length of the vector. All figures refer to it.
        simulated: Length of the vector that was exchanged. If it is shorter than ``numel``, figures are extrapolated.
        density: Fraction of entries to deliver.
        words: Words of 4 bytes that a rank receives, mean over ranks.
        busiest: Words that the busiest rank receives.
        messages: Messages that a rank receives, maximum over ranks.
        milliseconds: Virtual time of the step.
        delivered: Delivered entries in multiples of k. A method that delivers more entries sends more words.
        predicted: Words that the busiest rank is predicted to receive in an ordinary step.
        predicted_milliseconds: Time that the step is predicted to take.
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
    predicted: float
    predicted_milliseconds: float

    @property
    def k(self) -> float:
        """Number of entries to deliver: ``numel`` times ``density``, at least 1."""
        return max(1.0, self.numel * self.density)

    @property
    def load(self) -> float:
        """Words of the busiest rank divided by the mean over ranks."""
        return self.busiest / self.words if self.words else 1.0

    @property
    def as_predicted(self) -> bool:
        """Whether ``busiest`` is what was predicted, with a tolerance of 10 %."""
        return 0.9 * self.predicted <= self.busiest <= 1.1 * self.predicted

    def as_dict(self) -> dict[str, Any]:
        """Return all figures by name."""
        return {**dataclasses.asdict(self), "words_per_k": self.words / self.k, "max_over_mean": self.load}


def compare_methods(
    recipes: Sequence[Recipe], workers: Sequence[int], numel: int, link: Link, source: Source, *,
    steps: int = STEPS, memory: float = 1e9,
) -> Iterator[Row]:  # fmt: skip
    """Yield a :class:`Row` for each recipe at each number of workers, as soon as it is measured.

    A vector that does not fit into ``memory`` is replaced by a shorter one. That one and one of half its length are
    exchanged, and the figures are extrapolated linearly to ``numel``. This works because words and virtual time are a
    constant plus a part proportional to the length.

    Args:
        recipes: Methods to compare.
        workers: Numbers of workers.
        numel: Length of the vector.
        link: Bandwidth and latency of every rank's network interface.
        source: Function of ``(numel, rank)`` that returns the gradients of a rank.
        steps: Steps to simulate. The last one is reported.
        memory: Bytes that a simulation may use.

    Raises:
        ConfigurationError: A method is for other numbers of workers. See :func:`shortened`, too.
    """
    for world_size in workers:  # before the first of them takes its time
        for method in recipes:
            method.check_world_size(world_size)
    for world_size in workers:
        for method in recipes:
            predicted = method.build(numel).predicted_traffic(world_size, ordinary=True)
            words = predicted.received.bytes / WORD
            gathered = max(0.0, words / numel - 2.0) if numel else 0.0
            short = shortened(numel, world_size, method.density, memory, gathered)
            figures = _measure(method, world_size, short, link, source, steps)
            if short < numel:
                half = _measure(method, world_size, short // 2, link, source, steps)
                figures = _continued(figures, half, short, numel, link)
            yield Row(
                label(method), world_size, numel, short, method.density, figures.words, figures.busiest,
                figures.messages, figures.seconds * 1e3, figures.delivered,
                words, predicted.seconds(link) * 1e3,
            )  # fmt: skip


def label(recipe: Recipe) -> str:
    """Return the name of the method, followed by the fields that differ from their defaults."""
    changed = [
        f"{field.name}={getattr(recipe, field.name)}"
        for field in dataclasses.fields(recipe)
        if field.name not in ("density", "reduced_lr") and getattr(recipe, field.name) != field.default
    ]
    return " ".join([recipe.name, *changed])


def shortened(numel: int, world_size: int, density: float, memory: float, gathered: float = 0.0) -> int:
    """Return the vector length to simulate in place of ``numel``.

    It is the longest that fits into ``memory`` bytes. It is not shorter than a minimum, below which a worker would
    select so few entries that the figures would measure rounding. If the minimum does not fit, up to 16 GB are used.

    ``gathered`` is the number of words per element that a method receives beyond a dense exchange. With ``gathered``
    above 0 the length may be below the minimum, because every worker receives from every other at any length. The
    limit is then 4 GB.

    Raises :class:`~tritoncomm.ConfigurationError` when the minimum takes more than both ``memory`` and 16 GB.
    """
    meaningful = min(numel, int(2 * _ENTRIES_PER_WORKER * world_size / density))
    needed, largest = meaningful * world_size * _BYTES_PER_ELEMENT, max(memory, _LARGEST)
    if needed > largest:
        raise ConfigurationError(
            f"a meaningful simulation of {world_size} workers at density {density} takes {needed / 1e9:.0f} GB: "
            "choose a higher density, fewer workers, or more memory"
        )
    per_element = world_size * (_BYTES_PER_ELEMENT + _COPIES_OF_GATHERED * WORD * gathered)
    worth = int(max(memory, _LARGEST_GATHERING) / per_element) if gathered else meaningful
    return min(numel, max(int(memory / per_element), min(meaningful, worth)))


class _Figures(NamedTuple):
    """Measured figures of one step: the fields of :class:`Row` with the same names, and ``seconds`` of virtual time."""

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
    """Extrapolate the figures to ``numel`` elements from ``short`` elements (``full``) and half of that (``half``).

    Words are a constant (headers, counts) plus a part proportional to the length. If the two runs took different kinds
    of steps, with different numbers of messages, all words are treated as proportional. Time grows by the bytes of the
    busiest rank.
    """
    ahead = (numel - short) / (short - short // 2)

    def longer(whole: float, part: float) -> float:
        return whole + ahead * (whole - part) if full.messages == half.messages else whole * numel / short

    words = max(0.0, longer(full.words, half.words))
    busiest = max(words, longer(full.busiest, half.busiest))
    seconds = full.seconds + link.transfer(WORD * max(0.0, busiest - full.busiest))
    return full._replace(words=words, busiest=busiest, seconds=seconds)


def table(rows: Sequence[Row], link: Link) -> str:
    """Return the rows as a text table. Notes below it explain differences from the predictions."""
    network = link.readable()
    head = (
        "method", "workers", "simulated", "delivered/k", "words/k", "busiest", "predicted", "messages", "max/mean",
        "ms", "predicted ms",
    )  # fmt: skip
    wide = max([16, *(len(row.method) + 2 for row in rows)])
    lines = [
        f"last step: words received per rank in multiples of k, with headers and counts; virtual time on {network}",
        f"{head[0]:{wide}}" + "{:>8}{:>11}{:>12}{:>9}{:>9}{:>11}  {:>9}{:>9}{:>10}{:>14}".format(*head[1:]),
    ]
    for row in rows:
        mark = "" if row.as_predicted else " *"
        lines.append(
            f"{row.method:{wide}}{row.workers:8}{row.simulated:11}{row.delivered:12.2f}"
            f"{row.words / row.k:9.2f}{row.busiest / row.k:9.2f}{row.predicted / row.k:11.2f}{mark:2}"
            f"{row.messages:9.0f}{row.load:9.2f}{row.milliseconds:10.3f}"
            f"{row.predicted_milliseconds:14.3f}"
        )
    different = sorted({row.method for row in rows if not row.as_predicted})
    lines += [
        f"* {method} differs from its prediction: {WHY.get(method.split()[0], 'it is an estimate')}"
        for method in different
    ]
    if any(row.simulated < row.numel for row in rows):
        lines.append("simulated: length that was exchanged; the figures are extrapolated linearly to the full length")
    return "\n".join(lines)


def picture(rows: Sequence[Row], path: Path) -> None:
    """Write a PNG of the words per rank against the number of workers, with the lower bound."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.6), layout="constrained")
    axes = figure.subplots()
    axes.set_prop_cycle(color=mpl.colormaps["tab20"].colors)  # type: ignore[attr-defined]
    for method in dict.fromkeys(row.method for row in rows):
        curve = {row.workers: row.words / row.k for row in rows if row.method == method}
        axes.plot(list(curve), list(curve.values()), "o-", label=method)
    workers = sorted({row.workers for row in rows})
    axes.plot(workers, [2 * (p - 1) / p for p in workers], "--", color="gray", label="lower bound 2k(P-1)/P")
    scale = "log" if any(row.words for row in rows) else "linear"  # one worker receives nothing
    axes.set(xscale="log", yscale=scale, xlabel="workers", ylabel="words received per rank, in multiples of k")
    axes.set_xticks(workers, [str(p) for p in workers])
    axes.minorticks_off()
    axes.set_title(f"{rows[0].numel / 1e6:g} million values, density {rows[0].density:.2%}")
    axes.legend(fontsize="small", loc="center left", bbox_to_anchor=(1.0, 0.5))
    figure.savefig(path, dpi=120, format="png")
