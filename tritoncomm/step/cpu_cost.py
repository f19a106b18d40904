"""What an exchange costs on a CPU beside the link: the work of this library, and the limit of gloo.

The work of an exchange is a + b n + c e + d m seconds of one core: n values, e entries and m messages. The entries are
those of the method's formula, half of its words. All constants were measured on one core of an AMD EPYC
(``benchmarks/results/cpu-cost-2026-11-22.md``). Packing is counted in :mod:`tritoncomm.step.packing`.
"""

from __future__ import annotations

from typing import NamedTuple

from tritoncomm.algorithms import Dense, Hierarchical, Recipe
from tritoncomm.scheduler.cost import Link
from tritoncomm.step.packing import unpacked

# Seconds of an exchange, and of each of its messages.
EXCHANGE, MESSAGE = 0.7e-3, 600e-6
# Bytes per second that gloo sends and receives at the same time with one core, whatever the link.
GLOO_BANDWIDTH = 0.8e9


class Work(NamedTuple):
    """Seconds of work for each value of the vector, and for each entry."""

    value: float
    entry: float


# Plain messages, the ordinary step of a method.
TABLE = {
    "dgc": Work(6.9e-9, 28e-9),
    "exdyna": Work(1.9e-9, 18e-9),
    "gaussiank": Work(8.2e-9, 48e-9),
    "gtopk": Work(2.4e-9, 35e-9),
    "hard_threshold": Work(3.9e-9, 80e-9),
    "micro": Work(2.2e-9, 9e-9),
    "oktopk": Work(2.5e-9, 45e-9),
    "random_block": Work(1.4e-9, 11e-9),
    "random_k": Work(1.0e-9, 91e-9),
    "sidco": Work(27e-9, 54e-9),
    "spardl": Work(1.7e-9, 112e-9),
    "topk_allgather": Work(2.0e-9, 56e-9),
    "topk_dsa": Work(1.1e-9, 14e-9),
}
_OTHER = Work(2e-9, 45e-9)  # a method that is not in the table
# What the rest of a sparse step of `wrap` has beyond the rest of a dense step, both with AdamW: collecting gradients,
# selection by update, the staleness-aware update, small tensors. Seconds, and seconds per value.
REST_OF_STEP, REST_OF_STEP_VALUE = 2.5e-3, 1e-9


def on_gloo(link: Link, cores: float = 1.0) -> Link:
    """Return ``link`` with no more than the bandwidth that gloo reaches with ``cores`` cores for each worker."""
    return link._replace(bandwidth=min(link.bandwidth, cores * GLOO_BANDWIDTH))


def work(recipe: Recipe, numel: int, world_size: int) -> tuple[float, float]:
    """Return the lowest and the highest seconds of work of one core in an ordinary exchange, without packing.

    Recipes around a method count as the method, and a hierarchical one as the method between nodes. Its sums within a
    node, and the all-reduce of :class:`~tritoncomm.algorithms.Dense`, are gloo's own work. A single worker has none.
    """
    while (inner := getattr(recipe, "recipe", None)) is not None:
        if isinstance(recipe, Hierarchical):
            world_size //= recipe.node_size
        recipe = inner
    if isinstance(recipe, Dense) or world_size <= 1 or numel == 0:
        return 0.0, 0.0
    formula, own = unpacked(recipe).formula(numel, world_size), TABLE.get(recipe.name, _OTHER)
    fixed = EXCHANGE + MESSAGE * formula.latencies + own.value * numel
    return fixed + own.entry * formula.low / 2, fixed + own.entry * formula.high / 2


def rest_of_step(numel: int) -> float:
    """Return the seconds that the rest of a sparse step takes longer than the rest of a dense step."""
    return REST_OF_STEP + REST_OF_STEP_VALUE * numel
