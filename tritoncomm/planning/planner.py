"""Recommend a method and a density for a given network, or dense, from the papers' cost formulas.

The formula of a method is its ``Recipe.formula`` in :mod:`tritoncomm.algorithms`. :mod:`tritoncomm.scheduler.cost`
turns it into seconds on a network.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from tritoncomm.algorithms import Dense, RandomBlock, Recipe, algorithms, recipe
from tritoncomm.errors import ConfigurationError
from tritoncomm.scheduler.cost import Link

DENSITIES = (0.001, 0.01, 0.05)
# The methods that are recommended, and the density at which their loss ended 1.6 to 3.8 % below the dense run's with
# AdamW (benchmarks/results/training-2026-11-21.md). At 1 % it ended 0.6 to 1.9 % above.
TRUSTED = ("oktopk", "spardl")
TRUSTED_DENSITY = 0.05
# A sparse step must be predicted to take less than this fraction of a dense step. The margin is for the selection,
# which is not counted.
WORTH_IT = 0.95
# The backward pass is about two thirds of a step's computation. Most of it follows the first bucket.
OVERLAP = 0.5


class Estimate(NamedTuple):
    """The predicted cost of one recipe, in seconds.

    ``low`` and ``high`` are the lower and upper end of the exchange time. ``step`` is the time of a whole training step
    with ``high``.
    """

    recipe: Recipe
    low: float
    high: float
    step: float

    @property
    def is_dense(self) -> bool:
        """Whether the recipe is a plain all-reduce."""
        return isinstance(self.recipe, Dense)


def estimates(
    numel: int, world_size: int, link: Link, step_seconds: float = 0.0, *, densities: Sequence[float] = DENSITIES,
    overlap: float = OVERLAP,
) -> list[Estimate]:  # fmt: skip
    """Return the estimates of dense and of every method at every density, fastest step first.

    A dense all-reduce overlaps with computation, as in ``DistributedDataParallel``. A sparse exchange starts after the
    backward pass. Selection is not counted, because it depends on the device: ``python benchmarks/selection.py``
    measures it.

    Args:
        numel: Number of parameters.
        world_size: Number of workers.
        link: Bandwidth and latency of every rank's network interface.
        step_seconds: Seconds of computation in one training step.
        densities: Densities to estimate.
        overlap: Fraction of the computation that hides a dense all-reduce, in [0, 1].

    Raises:
        ConfigurationError: A number is out of range.
    """
    if numel < 1 or world_size < 1:
        raise ConfigurationError(f"numel and workers must be at least 1, got numel={numel}, workers={world_size}")
    if not (step_seconds >= 0 and 0 <= overlap <= 1):
        raise ConfigurationError(
            f"step_seconds must be at least 0 and overlap in [0, 1], got step_seconds={step_seconds}, overlap={overlap}"
        )
    dense = Dense()
    low, high = dense.formula(numel, world_size).seconds(link)
    found = [Estimate(dense, low, high, step_seconds + max(0.0, high - overlap * step_seconds))]
    for name in algorithms():
        if name != dense.name:
            found += [_estimate(at(name, density), numel, world_size, link, step_seconds) for density in densities]
    return sorted(found, key=lambda estimate: (estimate.step, estimate.recipe.name, estimate.recipe.density))


def recommend(
    numel: int, world_size: int, link: Link, density: float, step_seconds: float = 0.0, *, overlap: float = OVERLAP
) -> Recipe:
    """Return the fastest of the trusted methods at ``density``, or dense if that takes nearly the same time.

    The sparse step must take less than 95 % of the dense step. See :func:`estimates` for the arguments.
    """
    candidates = estimates(numel, world_size, link, step_seconds, densities=(density,), overlap=overlap)
    dense = next(estimate for estimate in candidates if estimate.is_dense)
    trusted = next(estimate for estimate in candidates if estimate.recipe.name in TRUSTED)
    return trusted.recipe if trusted.step < WORTH_IT * dense.step else dense.recipe


def at(name: str, density: float) -> Recipe:
    """Return the recipe of the method ``name`` at ``density``."""
    if name == RandomBlock.name:  # advice() prints the note that its warning would give
        return RandomBlock(density=density, reduced_lr=True)
    return recipe(name, density=density)


def _estimate(method: Recipe, numel: int, world_size: int, link: Link, step_seconds: float) -> Estimate:
    low, high = method.formula(numel, world_size).seconds(link)
    return Estimate(method, low, high, step_seconds + high)


def advice(numel: int, world_size: int, link: Link, step_seconds: float, *, overlap: float = OVERLAP) -> str:
    """Return the plan as text: the ranking, then the line of code to use or the advice to stay dense.

    See :func:`estimates` for the arguments.
    """
    ranked = estimates(numel, world_size, link, step_seconds, overlap=overlap)
    dense = next(estimate for estimate in ranked if estimate.is_dense)
    lines = [
        f"{numel:,} parameters, {world_size} workers, {link.bandwidth * 8 / 1e9:g} Gbit/s, {link.latency * 1e6:g} us",
        f"{'method':16}{'density':>9}{'exchange ms':>22}{'step ms':>10}{'vs dense':>10}",
    ]
    for estimate in ranked:
        low, high = estimate.low * 1e3, estimate.high * 1e3
        exchange = f"{low:.2f}" if f"{low:.2f}" == f"{high:.2f}" else f"{low:.2f} to {high:.2f}"
        density = "" if estimate.is_dense else f"{estimate.recipe.density:.1%}"
        ratio = estimate.step / dense.step if dense.step else 1.0
        lines.append(f"{estimate.recipe.name:16}{density:>9}{exchange:>22}{estimate.step * 1e3:10.2f}{ratio:9.2f}x")
    lines += [
        "",
        "Exchange times come from the papers' cost formulas. Step times use the upper end of a range.",
        f"A dense all-reduce overlaps with {overlap:.0%} of the computation, a sparse exchange with none of it.",
        (
            "Not counted: selection on the device, and the all-reduce of small tensors.\n\n"
            "A faster step is not always faster training. random_k and random_block need a lower learning rate.\n"
            "At densities of 1% and below, AdamW needs more steps than at 5%."
        ),
        "",
    ]
    chosen = recommend(numel, world_size, link, TRUSTED_DENSITY, step_seconds, overlap=overlap)
    if isinstance(chosen, Dense):
        lines.append(
            f"Stay dense: at density {TRUSTED_DENSITY:.0%}, a step with {' or '.join(TRUSTED)} is not predicted to be "
            f"more than {1 - WORTH_IT:.0%} faster than a dense step.\n"
            "At this density, both methods reached the dense run's loss in the training benchmark."
        )
        return "\n".join(lines)
    lines.append(f"Use:\noptimizer = tritoncomm.wrap(optimizer, algo={chosen.name!r}, density={chosen.density})")
    return "\n".join(lines)
