"""What an exchange costs on a CPU beside the link: the work of this library, and the limit of gloo.

The work of an exchange is a + b n + c e + d m seconds of one core: n values, e entries and m messages. The entries are
those of the method's formula, half of its words. The constants were measured on two cores of an AMD
EPYC (``benchmarks/results/cpu_cost.json``). Packing is counted in :mod:`tritoncomm.step.packing`.
"""

from __future__ import annotations

from typing import NamedTuple

from tritoncomm.algorithms import Hierarchical, Recipe
from tritoncomm.scheduler.cost import Link
from tritoncomm.step.packing import unpacked

# Seconds of an exchange, and of each of its messages.
EXCHANGE, MESSAGE = 0.66e-3, 610e-6
# Bytes per second that gloo sends and receives at the same time with one core, whatever the link.
GLOO_BANDWIDTH = 0.8e9


class Work(NamedTuple):
    """Seconds of work for each value of the vector, and for each entry."""

    value: float
    entry: float


# Plain messages, the ordinary step of a method.
TABLE = {
    "dense": Work(2.2e-9, 0.0),
    "dgc": Work(6.9e-9, 21e-9),
    "exdyna": Work(1.8e-9, 8e-9),
    "gaussiank": Work(8.3e-9, 40e-9),
    "gtopk": Work(2.1e-9, 30e-9),
    "hard_threshold": Work(3.9e-9, 69e-9),
    "micro": Work(2.1e-9, 0.0),
    "oktopk": Work(2.5e-9, 40e-9),
    "random_block": Work(1.4e-9, 4e-9),
    "random_k": Work(0.8e-9, 63e-9),
    "sidco": Work(27.0e-9, 47e-9),
    "spardl": Work(1.7e-9, 105e-9),
    "topk_allgather": Work(1.9e-9, 50e-9),
    "topk_dsa": Work(2.8e-9, 4.9e-9),
}
OTHER = Work(2e-9, 45e-9)  # a method that is not in the table: about that of the top-k methods
# What the hook of DDP adds to a step, and to the exchange of each of its buckets: handing gradients over between
# the reducer, the thread that exchanges and the optimizer, beside a backward pass that needs the interpreter too.
# ``benchmarks/cpu_cost.py --race`` fits them.
HOOK, BUCKET = 14e-3, 4.6e-3
# What the rest of a sparse step of `wrap` has beyond the rest of a dense step, both with AdamW: collecting gradients,
# selection by update, the staleness-aware update, small tensors. Seconds, and seconds per value.
REST, REST_VALUE = 3.2e-3, 0.6e-9
# Seconds for each value of a dense exchange in 8 bits: quantizing, averaging and decoding. ``benchmarks/sections.py``
# measured 19 to 27 ns with 0.9 and 25 million values (``sections.json``).
QUANTIZE = 24e-9


def on_gloo(link: Link, cores: float = 1.0) -> Link:
    """Return ``link`` with no more than the bandwidth that gloo reaches with ``cores`` cores for each worker."""
    return link._replace(bandwidth=min(link.bandwidth, min(1.0, cores) * GLOO_BANDWIDTH))


def work(recipe: Recipe, numel: int, world_size: int) -> tuple[float, float]:
    """Return the lowest and the highest seconds of work of one core in an ordinary exchange, without packing.

    Recipes around a method count as the method, one that delivers everything as dense, and a hierarchical one as the
    method between nodes: its sums within a node are gloo's own work. So is the all-reduce of a dense exchange, of which
    only what is around it counts. A single worker has none.
    """
    for layer in recipe.layers:
        if isinstance(layer, Hierarchical):
            world_size, numel = world_size // layer.node_size, -(-numel // layer.node_size)
    recipe = recipe.layers[-1]
    if world_size <= 1 or numel == 0:
        return 0.0, 0.0
    if recipe.delivers_all():
        dense = EXCHANGE + MESSAGE + TABLE["dense"].value * numel
        return dense, dense
    formula, own = unpacked(recipe).formula(numel, world_size), TABLE.get(recipe.name, OTHER)
    fixed = EXCHANGE + MESSAGE * formula.latencies + own.value * numel
    return fixed + own.entry * formula.low / 2, fixed + own.entry * formula.high / 2


def hook(buckets: int) -> float:
    """Return the seconds of work that the hook of DDP adds to a step with so many ``buckets``. 0 means no hook."""
    return HOOK + BUCKET * buckets if buckets else 0.0


def rest_of_step(numel: int) -> float:
    """Return the seconds that the rest of a sparse step takes longer than the rest of a dense step."""
    return REST + REST_VALUE * numel
