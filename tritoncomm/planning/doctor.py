"""Decide whether sparse exchange is faster than dense, by measuring on the ranks that are running."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

import tritoncomm_kernels as kernels
from tritoncomm.algorithms import Dense, Recipe
from tritoncomm.errors import ConfigurationError
from tritoncomm.planning import planner
from tritoncomm.planning.synthetic_gradients import LayeredGradients
from tritoncomm.primitives.accumulator import Accumulator
from tritoncomm.primitives.selection import entries_to_keep
from tritoncomm.scheduler.cost import Link
from tritoncomm.scheduler.link import measure_link
from tritoncomm.scheduler.process_group import ProcessGroupScheduler, is_distributed
from tritoncomm.step.packing import Packing, describe, resolve
from tritoncomm.step.vector import ErrorFeedback

DENSITIES = (0.001, 0.01, 0.05, 0.2)
_REPEATS = 3


@dataclass(frozen=True)
class Diagnosis:
    """The result of :func:`diagnose`. All times are seconds on the slowest rank.

    With several ranks, exchange times are measured. In a single process, they are predicted as by ``plan``, see
    :func:`tritoncomm.planning.planner.estimates`. Only the selection is measured, and shown beside them.

    Attributes:
        workers: Number of workers.
        numel: Number of values exchanged.
        method: Name of the method.
        density: Density that ``selection`` and ``pays`` refer to.
        step: Seconds of computation in one training step.
        link: Measured link, or the given one in a single process.
        measured: Whether exchange times are measured rather than predicted.
        selection: Time of the selection at ``density``.
        dense: Time of a dense all-reduce.
        sparse: Time of the sparse exchange by density, selection included.
        break_even: Density at which sparse and dense take the same time, with what the rest of a sparse step takes
            longer. 0 if sparse is slower at every density.
        packing: How the messages at ``density`` travel, and the time that packing takes (predicted).
        rest: What the rest of a sparse step takes longer than that of a dense one (predicted).
        warmup: Time of the exchange in one of the dense steps of ``wrap`` at the start, predicted if quantized.
        quantizes_warmup: Whether these steps are quantized.
        pays: Whether the sparse exchange at ``density``, and what the rest of a sparse step takes longer (predicted),
            take less than 95 % of the exposed time of a dense all-reduce. The exposed time is the part that computation
            does not hide.
    """

    workers: int
    numel: int
    method: str
    density: float
    step: float
    link: Link
    measured: bool
    selection: float
    dense: float
    sparse: dict[float, float]
    break_even: float
    packing: Packing
    rest: float
    warmup: float
    quantizes_warmup: bool
    pays: bool

    def as_dict(self) -> dict[str, Any]:
        """Return the figures as a dictionary that can be written as JSON."""
        return {
            "workers": self.workers, "numel": self.numel, "method": self.method, "density": self.density,
            "measured": self.measured, "link_bits_per_second": 8 * self.link.bandwidth,
            "link_latency_seconds": self.link.latency, "selection_seconds": self.selection,
            "dense_seconds": self.dense, "sparse_seconds": {str(d): s for d, s in self.sparse.items()},
            "break_even_density": self.break_even, "packed": self.packing.packed,
            "packing_seconds": self.packing.seconds, "pays": self.pays,
        }  # fmt: skip

    def report(self) -> str:
        """Return the figures and the conclusion as text."""
        how = "measured" if self.measured else "predicted for the given link (this is a single process)"
        lines = [
            f"{self.workers} workers, {self.numel:,} values, exchanges {how}",
            f"link        {8e-9 * self.link.bandwidth:.3g} Gbit/s, {1e6 * self.link.latency:.3g} us per message",
            f"selection   {1e3 * self.selection:.2f} ms at density {self.density:.2%}",
            *([f"packing     {how}"] if (how := describe([self.packing])) else []),
            f"dense       {1e3 * self.dense:.2f} ms",
        ]
        lines += [
            f"{self.method:12}{1e3 * seconds:.2f} ms at density {density:.2%}, {seconds / self.dense:.2f}x dense"
            for density, seconds in self.sparse.items()
        ]
        lines.append(
            f"break-even  at density {self.break_even:.2%}" if self.break_even else "break-even  none: dense is faster"
        )
        conclusion = "Compression pays" if self.pays else "Stay dense: compression does not pay"
        lines.append(
            f"{conclusion} at density {self.density:.2%}"
            + (f" with {1e3 * self.step:g} ms of computation per step." if self.step else ".")
        )
        if self.pays and self.density < 1:
            others = self.step + self.rest
            dense, sparse = self.warmup + others, self.sparse[self.density] + others
            lines.append(planner.dense_start(dense, sparse, quantized=self.quantizes_warmup))
        return "\n".join(lines)


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
    the selection is measured and the exchanges are predicted.

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
    densities = sorted({*DENSITIES, density})
    gradient = LayeredGradients(numel, dist.get_rank() if is_distributed() else 0).at(0).to(device)
    selection = _best(lambda: _select(gradient, density), device)
    if together:
        workers = dist.get_world_size()
        found = measure_link(None, device)
        dense = _exchange_seconds(Dense(), gradient, device)
    else:
        found = link or Link.parse("10gbit,30us")
        dense = planner.ddp_seconds(numel, workers, found, device)
    packings = {d: resolve(method(d), numel, workers, device, planner.usable(found, device)) for d in densities}
    if together:
        sparse = {d: _exchange_seconds(packing.recipe, gradient, device) for d, packing in packings.items()}
    else:
        # On a CPU, the prediction includes the selection. On a GPU, it includes its launches alone, some tens of
        # microseconds that are counted twice.
        more = selection if torch.device(device).type == "cuda" else 0.0
        sparse = {
            d: more + planner.exchange_seconds(packing, numel, workers, found, device)[1]
            for d, packing in packings.items()
        }
    selection, dense, *others = _slowest([selection, dense, *sparse.values()], device)
    sparse = dict(zip(sparse, others, strict=True))
    rest = planner.rest_of_step(numel, device)
    exposed = max(0.0, dense - planner.OVERLAP * step_seconds)
    quantizes = method(density).averages_when_dense
    return Diagnosis(
        workers=workers, numel=numel, method=method(density).name, density=density, step=step_seconds, link=found,
        measured=together, selection=selection, dense=dense, sparse=sparse,
        break_even=break_even({d: seconds + rest for d, seconds in sparse.items()}, dense), packing=packings[density],
        rest=rest, warmup=planner.warmup_seconds(numel, workers, found, device) if quantizes else dense,
        quantizes_warmup=quantizes,
        pays=sparse[density] + rest < planner.WORTH_IT * exposed,
    )  # fmt: skip


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


def _select(gradient: torch.Tensor, density: float) -> None:
    residual, scratch = torch.zeros_like(gradient), torch.empty_like(gradient)
    Accumulator(residual, gradient, scratch, kernels.Workspace()).top_k(entries_to_keep(gradient.numel(), density))


def _exchange_seconds(recipe: Recipe, gradient: torch.Tensor, device: torch.device | str) -> float:
    """Return the seconds of one exchange. The first step is not timed, because methods search thresholds in it."""
    scheduler = ProcessGroupScheduler(None, device=device, stamp=repr(recipe))
    feedback = ErrorFeedback(recipe.build(gradient.numel()), device)

    def step() -> None:
        scheduler.run(feedback.begin(gradient, scheduler.rank, scheduler.world_size))
        feedback.commit()

    step()
    return _best(step, device)


def _best(work: Callable[[], None], device: torch.device | str) -> float:
    seconds = []
    for _ in range(_REPEATS):
        if is_distributed():
            dist.barrier()
        started = time.perf_counter()
        work()
        if torch.device(device).type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - started)
    return min(seconds)


def _slowest(seconds: Sequence[float], device: torch.device | str) -> list[float]:
    times = torch.tensor(seconds, dtype=torch.float64, device=device)
    if is_distributed():
        dist.all_reduce(times, dist.ReduceOp.MAX)
    found: list[float] = times.tolist()
    return found
