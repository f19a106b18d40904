"""Which method, at which density, or none: the papers' formulas on a given network."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from tritoncomm.algorithms import Dense, RandomBlock, Recipe, algorithms, recipe
from tritoncomm.errors import ConfigurationError
from tritoncomm.scheduler.cost import Link

DENSITIES = (0.001, 0.01, 0.05)
# What the plan chooses among, and the density at which they ended within 2.4 % of the dense run's loss with AdamW
# (benchmarks/training.py; exdyna: 4.7 %). At 1 % they were 3 to 10 % behind after 300 to 400 steps.
TRUSTED = ("oktopk", "spardl")
TRUSTED_DENSITY = 0.05
# Selection is not counted, so less than this share of the dense step has to be predicted.
WORTH_IT = 0.95
# Backward is about two thirds of a step's computation, and most of it is behind the first bucket.
OVERLAP = 0.5


class Estimate(NamedTuple):
    """One choice: seconds of the exchange, from and to, and of the whole step at worst."""

    recipe: Recipe
    low: float
    high: float
    step: float

    @property
    def is_dense(self) -> bool:
        """Whether this is a plain all-reduce."""
        return isinstance(self.recipe, Dense)


def estimates(
    numel: int, world_size: int, link: Link, step_seconds: float = 0.0, *, densities: Sequence[float] = DENSITIES,
    overlap: float = OVERLAP,
) -> list[Estimate]:  # fmt: skip
    """Every method at every density beside dense, fastest step first.

    ``step_seconds`` is the computation of a step. A dense all-reduce hides behind ``overlap`` of it, as
    ``DistributedDataParallel`` does; a sparse exchange starts after the backward pass. Selection is not counted: it
    depends on the device (``python benchmarks/selection.py`` measures it). Raises
    :class:`~tritoncomm.ConfigurationError` for numbers that make no sense.
    """
    if numel < 1 or world_size < 1:
        raise ConfigurationError(f"numel={numel}, workers={world_size}: there must be at least 1 of each")
    if not (step_seconds >= 0 and 0 <= overlap <= 1):
        raise ConfigurationError(f"step_seconds={step_seconds}, overlap={overlap}: give 0 or more, and a share of it")
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
    """The fastest of the trusted methods at ``density``, or dense where that is about as fast."""
    candidates = estimates(numel, world_size, link, step_seconds, densities=(density,), overlap=overlap)
    dense = next(estimate for estimate in candidates if estimate.is_dense)
    trusted = next(estimate for estimate in candidates if estimate.recipe.name in TRUSTED)
    return trusted.recipe if trusted.step < WORTH_IT * dense.step else dense.recipe


def at(name: str, density: float) -> Recipe:
    """The method called ``name`` at ``density``."""
    if name == RandomBlock.name:  # the plan says what its warning would
        return RandomBlock(density=density, reduced_lr=True)
    return recipe(name, density=density)


def _estimate(method: Recipe, numel: int, world_size: int, link: Link, step_seconds: float) -> Estimate:
    low, high = method.formula(numel, world_size).seconds(link)
    return Estimate(method, low, high, step_seconds + high)


def advice(numel: int, world_size: int, link: Link, step_seconds: float, *, overlap: float = OVERLAP) -> str:
    """The plan as text: the ranking, whether staying dense is faster, and the line of code to use."""
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
        "By the upper ends of the papers' formulas. Neither selection on the device is counted, nor the all-reduce of",
        f"small tensors; a dense all-reduce hides behind {overlap:.0%} of the computation. Speed is not all: random_k",
        "and random_block take a lower learning rate, and at 1 % and below AdamW needs more steps than at 5 %.",
        "",
    ]
    chosen = recommend(numel, world_size, link, TRUSTED_DENSITY, step_seconds, overlap=overlap)
    if isinstance(chosen, Dense):
        lines.append(
            f"Stay dense: at {TRUSTED_DENSITY:.0%}, where they came within 2.4 % of its loss, {' and '.join(TRUSTED)} "
            f"are not predicted to be at least {1 - WORTH_IT:.0%} faster."
        )
        return "\n".join(lines)
    lines.append(f"optimizer = tritoncomm.wrap(optimizer, algo={chosen.name!r}, density={chosen.density})")
    return "\n".join(lines)
