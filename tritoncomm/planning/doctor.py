"""Will compression pay here? Measured on the ranks that are there, not predicted."""

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
from tritoncomm.planning import planner
from tritoncomm.planning.synthetic_gradients import LayeredGradients
from tritoncomm.primitives.accumulator import Accumulator
from tritoncomm.primitives.selection import entries_to_keep
from tritoncomm.scheduler.cost import Link
from tritoncomm.scheduler.link import measure_link
from tritoncomm.scheduler.process_group import ProcessGroupScheduler, is_distributed
from tritoncomm.step.error_feedback import ErrorFeedback

DENSITIES = (0.001, 0.01, 0.05, 0.2)
_REPEATS = 3


@dataclass(frozen=True)
class Diagnosis:
    """Seconds on the slowest rank. ``break_even``: the density at which sparse and dense take as long; 0 if none.

    ``dense`` and ``sparse`` (by density) are exchanges of ``numel`` values, selection included; from the cost formulas
    and the selection that was measured when there is one worker alone. ``pays``: the exchange at ``density`` is faster
    than what of a dense all-reduce does not hide behind ``step`` seconds of computation.
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
    pays: bool

    def as_dict(self) -> dict[str, Any]:
        """Plain figures, for JSON."""
        return {
            "workers": self.workers, "numel": self.numel, "method": self.method, "density": self.density,
            "measured": self.measured, "link_bits_per_second": 8 * self.link.bandwidth,
            "link_latency_seconds": self.link.latency, "selection_seconds": self.selection,
            "dense_seconds": self.dense, "sparse_seconds": {str(d): s for d, s in self.sparse.items()},
            "break_even_density": self.break_even, "pays": self.pays,
        }  # fmt: skip

    def report(self) -> str:
        """For people."""
        how = "measured" if self.measured else "predicted for the given link, as this is one process alone"
        lines = [
            f"{self.workers} workers, {self.numel:,} values, exchanges {how}",
            f"link        {8e-9 * self.link.bandwidth:.3g} Gbit/s, {1e6 * self.link.latency:.3g} us per message",
            f"selection   {1e3 * self.selection:.2f} ms at {self.density:.2%}",
            f"dense       {1e3 * self.dense:.2f} ms",
        ]
        lines += [
            f"{self.method:12}{1e3 * seconds:.2f} ms at {density:.2%}, {seconds / self.dense:.2f}x dense"
            for density, seconds in self.sparse.items()
        ]
        lines.append(f"break-even  at a density of {self.break_even:.2%}" if self.break_even else "break-even  nowhere")
        verdict = "Compression pays" if self.pays else "Stay dense: compression does not pay"
        lines.append(
            f"{verdict} at {self.density:.2%}" + (f" with {1e3 * self.step:g} ms steps." if self.step else ".")
        )
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
    """Measure on the default process group; alone, predict for ``workers`` on ``link``. All ranks call this alike.

    ``method`` makes the recipe for a density. The verdict is the same on all ranks.
    """
    densities = sorted({*DENSITIES, density})
    gradient = LayeredGradients(numel, dist.get_rank() if is_distributed() else 0).at(0).to(device)
    selection = _best(lambda: _select(gradient, density), device)
    if is_distributed() and dist.get_world_size() > 1:
        workers = dist.get_world_size()
        found = measure_link(None, device)
        dense = _exchange_seconds(Dense(), gradient, device)
        sparse = {d: _exchange_seconds(method(d), gradient, device) for d in densities}
    else:
        found = link or Link.parse("10gbit,30us")
        dense = Dense().formula(numel, workers).seconds(found)[1]
        sparse = {d: selection + method(d).formula(numel, workers).seconds(found)[1] for d in densities}
    selection, dense, *others = _slowest([selection, dense, *sparse.values()], device)
    sparse = dict(zip(sparse, others, strict=True))
    exposed = max(0.0, dense - planner.OVERLAP * step_seconds)
    return Diagnosis(
        workers=workers, numel=numel, method=method(density).name, density=density, step=step_seconds, link=found,
        measured=is_distributed() and dist.get_world_size() > 1, selection=selection, dense=dense, sparse=sparse,
        break_even=break_even(sparse, dense), pays=sparse[density] < planner.WORTH_IT * exposed,
    )  # fmt: skip


def break_even(sparse: dict[float, float], dense: float) -> float:
    """Where the exchange would take as long as ``dense``: between two densities, along a line in their logarithms."""
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
    """The usual step: after the first ones, in which methods look for their thresholds."""
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
        if torch.device(device).type == "cuda":  # pragma: no cover - needs a GPU
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - started)
    return min(seconds)


def _slowest(seconds: Sequence[float], device: torch.device | str) -> list[float]:
    times = torch.tensor(seconds, dtype=torch.float64, device=device)
    if is_distributed():
        dist.all_reduce(times, dist.ReduceOp.MAX)
    found: list[float] = times.tolist()
    return found
