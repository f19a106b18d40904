"""Decide whether sparse exchange is faster than dense, by measuring on the ranks that are running."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from tritoncomm.algorithms import Dense, Recipe, takes_density
from tritoncomm.errors import ConfigurationError
from tritoncomm.planning import planner
from tritoncomm.planning.link import measure_link
from tritoncomm.planning.synthetic_gradients import LayeredGradients
from tritoncomm.scheduler.cost import Link
from tritoncomm.scheduler.process_group import ProcessGroupScheduler, is_distributed
from tritoncomm.scheduler.ranks import own_rank
from tritoncomm.simulation import SimulatedWorld
from tritoncomm.step.exchange.feedback import ErrorFeedback
from tritoncomm.step.recipes import with_form
from tritoncomm_kernels import devices

DENSITIES = (0.001, 0.01, 0.05, 0.2)
_REPEATS = 3


@dataclass(frozen=True)
class Diagnosis:
    """The result of :func:`diagnose`. All times are seconds on the slowest rank.

    With several ranks, exchange times are measured. In a single process, the time on the link is predicted as by
    ``plan``, see :mod:`tritoncomm.planning.planner`, and only the work beside it is measured.

    Attributes:
        workers: Number of workers.
        numel: Number of values exchanged.
        method: Name of the method.
        values: Format of values on the wire, or empty for a method without one.
        density: Density that ``work`` and ``pays`` refer to.
        step: Seconds of computation in one training step.
        link: Measured link, or the given one in a single process.
        measured: Whether exchange times are measured rather than predicted.
        work: Time of the sparse exchange at ``density`` beside the link: selection, packing, merging.
        dense: Time of a dense all-reduce.
        sparse: Time of the sparse exchange by density, work included.
        break_even: Density at which sparse and dense take the same time. 0 if sparse is slower at every density.
        advice: Sentences on the dense steps at the start of ``wrap``, and on the length of messages on GPUs.
        pays: Whether the sparse exchange at ``density`` takes less than 95 % of the exposed time of a dense all-reduce.
            The exposed time is the part that computation does not hide. The update of the parameters is not counted.
    """

    workers: int
    numel: int
    method: str
    values: str
    density: float
    step: float
    link: Link
    measured: bool
    work: float
    dense: float
    sparse: dict[float, float]
    break_even: float
    advice: list[str]
    pays: bool

    def as_dict(self) -> dict[str, Any]:
        """Return the figures as a dictionary that can be written as JSON."""
        return {
            "workers": self.workers, "numel": self.numel, "method": self.method, "density": self.density,
            "measured": self.measured, "link_bits_per_second": 8 * self.link.bandwidth,
            "link_latency_seconds": self.link.latency, "work_seconds": self.work, "dense_seconds": self.dense,
            "sparse_seconds": {str(d): s for d, s in self.sparse.items()}, "break_even_density": self.break_even,
            "pays": self.pays,
        }  # fmt: skip

    def report(self) -> str:
        """Return the figures and the conclusion as text."""
        how = "measured" if self.measured else "predicted for the given link (this is a single process)"
        lines = [
            f"{self.workers} workers, {self.numel:,} values, exchanges {how}",
            f"link        {self.link.readable()} per message",
            f"work        {1e3 * self.work:.2f} ms at density {self.density:.2%}: selection, packing, merging",
            f"dense       {1e3 * self.dense:.2f} ms",
        ]
        varies = takes_density(self.method)
        sparse = self.sparse if varies else {self.density: self.sparse[self.density]}
        lines += [
            f"{self.method:11} {1e3 * seconds:.2f} ms{f' at density {density:.2%}' if varies else ''}, "
            f"{seconds / self.dense:.2f}x dense"
            for density, seconds in sparse.items()
        ]
        if not self.break_even:
            lines.append("break-even  none: dense is faster")
        elif varies:
            where = "above" if self.break_even == max(sparse) else "at"
            lines.append(f"break-even  {where} density {self.break_even:.2%}")
        conclusion = "Compression pays" if self.pays else "Stay dense: compression does not pay"
        lines.append(
            conclusion
            + (f" at density {self.density:.2%}" if varies else "")
            + (f" with {1e3 * self.step:g} ms of computation per step." if self.step else ".")
        )
        lines += self.advice
        lines.append("Not counted: the update of the parameters, which takes longer after a sparse exchange.")
        if self.method in planner.TRUSTED:  # what is planned
            lines.append(f"For other links: {self.command()}")
        return "\n".join(lines)

    def command(self) -> str:
        """Return the command that plans with these figures."""
        link = f"{_plain(8e-6 * self.link.bandwidth)}mbit,{_plain(1e6 * self.link.latency)}us"
        values = f" --values {self.values}" if self.values else ""
        times = f"--step-ms {_plain(1e3 * self.step)} --work-ms {_plain(1e3 * self.work)}"
        exchange = f"--numel {self.numel} --workers {self.workers} --density {self.density:g}{values} --link {link}"
        return f"python -m tritoncomm plan {exchange} {times}"


def diagnose(
    numel: int,
    method: Callable[[float], Recipe],
    density: float,
    step_seconds: float = 0.0,
    *,
    link: Link | None = None,
    workers: int = 2,
    device: torch.device | str = "cpu",
) -> Diagnosis:
    """Measure dense and sparse exchanges on the default process group.

    Every rank must call this with the same arguments, and every rank gets the same result. In a single process,
    the work is measured and the time on the link is predicted.

    Args:
        numel: Number of values to exchange.
        method: Function that returns the recipe for a density.
        density: Density to decide on. :data:`DENSITIES` are measured as well.
        step_seconds: Seconds of computation in one training step. Half of it can hide a dense all-reduce.
        link: Link to predict for in a single process. The default is 10 Gbit/s and 30 us per message.
        workers: Number of workers to predict for in a single process, at least 2.
        device: Device of the gradients.

    Raises:
        ConfigurationError: A single process is to predict for fewer than 2 workers.
    """
    together = is_distributed() and dist.get_world_size() > 1
    if not together and workers < 2:  # noqa: PLR2004 - one worker exchanges nothing
        raise ConfigurationError(f"workers={workers}: one worker exchanges nothing, predict for 2 or more")
    gradient = LayeredGradients(numel, own_rank()).at(0).to(device)
    if together:
        workers, link = dist.get_world_size(), measure_link(None, device)
    recipes = {each: with_form(method(each), device, numel, workers) for each in sorted({*DENSITIES, density})}
    link = link or Link()
    on_link = {each: planner.exchange_seconds(recipe, numel, workers, link) for each, recipe in recipes.items()}
    dense = planner.exchange_seconds(Dense(), numel, workers, link)
    if together:
        dense = _exchange_seconds(Dense(), gradient, device)
    timed = _exchange_seconds if together else _work_seconds
    dense, *times = _slowest([dense, *(timed(recipe, gradient, device) for recipe in recipes.values())], device)
    sparse = dict(zip(recipes, times, strict=True))
    if not together:
        sparse = {each: seconds + on_link[each] for each, seconds in sparse.items()}
    work = max(0.0, sparse[density] - on_link[density])
    exposed = max(0.0, dense - planner.OVERLAP * step_seconds)
    setting = planner.Setting(numel=numel, workers=workers, link=link, step=step_seconds, work=work, device=device)
    pays = sparse[density] < planner.WORTH_IT * exposed
    starts = pays and not recipes[density].delivers_all()
    advice = [planner.dense_start(setting, recipes[density])] if starts else []
    advice += planner.form_advice(setting, recipes[density])
    return Diagnosis(
        workers=workers, numel=numel, method=recipes[density].name,
        values=getattr(recipes[density], "values", ""), density=density, step=step_seconds, link=link,
        measured=together, work=work, dense=dense, sparse=sparse, break_even=break_even(sparse, dense),
        advice=advice, pays=pays,
    )  # fmt: skip


def _plain(number: float) -> str:
    """Return ``number`` with three decimals at most and no exponent."""
    return f"{number:.3f}".rstrip("0").rstrip(".")


def break_even(sparse: dict[float, float], dense: float) -> float:
    """Return the density at which the sparse exchange takes ``dense`` seconds, or 0 if it is never faster.

    ``sparse`` maps densities to seconds. Between two densities, time is interpolated over the logarithm of the density.
    If sparse is faster at every density, the largest of them is returned.
    """
    below = [density for density, seconds in sparse.items() if seconds < dense]
    if not below:
        return 0.0
    low = max(below)
    above = [density for density in sparse if density > low]
    if not above:
        return low
    high = min(above)
    share = (dense - sparse[low]) / (sparse[high] - sparse[low])
    return math.exp(math.log(low) + share * (math.log(high) - math.log(low)))


def _work_seconds(recipe: Recipe, gradient: torch.Tensor, device: torch.device | str) -> float:
    """Return the seconds that a rank works in an exchange, measured in a simulation of two. The first is not timed."""
    world = SimulatedWorld(recipe, 2, gradient.numel(), device=device)
    gradients = torch.stack([gradient, gradient.flip(0)])
    world.step(gradients)
    return _best(lambda: world.step(gradients), device) / 2


def _exchange_seconds(recipe: Recipe, gradient: torch.Tensor, device: torch.device | str) -> float:
    """Return the seconds of one exchange. The first step is not timed, because methods search thresholds in it."""
    scheduler = ProcessGroupScheduler(None, device=device, stamp=repr(recipe))
    feedback = ErrorFeedback(recipe.build(gradient.numel()), device)

    def step() -> None:
        scheduler.run(feedback.begin(gradient, scheduler.rank, scheduler.world_size))
        feedback.commit()

    step()
    return _best(step, device)


def _best(work: Callable[[], object], device: torch.device | str) -> float:
    seconds = []
    for _ in range(_REPEATS):
        if is_distributed():
            dist.barrier()
        started = time.perf_counter()
        work()
        devices.synchronize(torch.device(device))
        seconds.append(time.perf_counter() - started)
    return min(seconds)


def _slowest(seconds: Sequence[float], device: torch.device | str) -> list[float]:
    times = torch.tensor(seconds, dtype=torch.float64, device=device)
    if is_distributed():
        dist.all_reduce(times, dist.ReduceOp.MAX)
    found: list[float] = times.tolist()
    return found
