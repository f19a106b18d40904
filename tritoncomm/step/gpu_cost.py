"""What an exchange costs on a GPU beside the link: host synchronizations and kernel launches, counted in emulation.

Each count of an ordinary step is a + b P + c ceil(log2 P), where P is the number of workers. ``python
benchmarks/gpu_cost.py`` prints the table, from counts on emulated GPUs (``tests/emulated_cuda``) with 2, 4 and 8
workers and about 10,000 values. With exact lengths and so few entries per message that packed ones become plain,
counts are higher: with 64 workers, twice those of the table for Ok-Topk and SparDL. No GPU was used, and nothing was
timed. The seconds of one synchronization and one launch are assumptions.
"""

from __future__ import annotations

from typing import NamedTuple

from tritoncomm.algorithms import Hierarchical, Recipe
from tritoncomm.algorithms.base import IndexRecipe
from tritoncomm.errors import ConfigurationError
from tritoncomm.scheduler.cost import log2

# Seconds of a host synchronization, with the work that the GPU misses meanwhile, and of a kernel launch.
SYNCHRONIZATION, LAUNCH = 15e-6, 5e-6


class Counts(NamedTuple):
    """Host synchronizations and kernel launches of one rank in one step."""

    synchronizations: float = 0.0
    launches: float = 0.0

    @property
    def seconds(self) -> float:
        """The assumed seconds: 15 us for each synchronization, and 5 us for each launch."""
        return self.synchronizations * SYNCHRONIZATION + self.launches * LAUNCH

    def plus(self, other: Counts) -> Counts:
        """Return the sum of these counts and ``other``."""
        return Counts(self.synchronizations + other.synchronizations, self.launches + other.launches)


_Growth = tuple[float, float, float]  # a, b and c

# Method, form, format of messages: synchronizations, launches. One vector, the exchange and its confirmation, default
# settings, density 3 %, topk_dsa 1 %.
TABLE: dict[tuple[str, str, str], tuple[_Growth, _Growth]] = {
    ("dense", "exact", "plain"): ((2, 0, 0), (17, 0, 0)),
    ("dgc", "exact", "plain"): ((4, 2, 0), (41, 13, 11)),
    ("dgc", "exact", "packed"): ((4, 1, 0), (40, 5, 11)),
    ("dgc", "exact", "rounded"): ((8, 1, 0), (59, 5, 11)),
    ("exdyna", "exact", "plain"): ((8, 2, 0), (29, 11, 11)),
    ("exdyna", "exact", "packed"): ((8, 1, 0), (30, 3, 11)),
    ("exdyna", "static", "plain"): ((2, 0, 0), (95, 0, 0)),
    ("exdyna", "static", "packed"): ((2, 0, 0), (82, 0, 0)),
    ("gaussiank", "exact", "plain"): ((13, 2, 0), (47, 13, 11)),
    ("gaussiank", "exact", "packed"): ((13, 1, 0), (46, 5, 11)),
    ("gaussiank", "exact", "rounded"): ((18, 1, 0), (67, 5, 11)),
    ("gtopk", "exact", "plain"): ((5, 0, 8), (43, 0, 63)),
    ("hard_threshold", "exact", "plain"): ((7, 2, 0), (33, 13, 11)),
    ("hard_threshold", "exact", "packed"): ((7, 1, 0), (32, 5, 11)),
    ("hard_threshold", "exact", "rounded"): ((12, 1, 0), (53, 5, 11)),
    ("micro", "exact", "plain"): ((8, 2, 0), (29, 11, 11)),
    ("micro", "exact", "packed"): ((8, 1, 0), (30, 3, 11)),
    ("micro", "static", "plain"): ((2, 0, 0), (95, 0, 0)),
    ("micro", "static", "packed"): ((2, 0, 0), (82, 0, 0)),
    ("oktopk", "exact", "plain"): ((20, 0.5, 0), (85, 19.5, 0)),
    ("oktopk", "exact", "packed"): ((17, 2, 0), (71, 25.5, 8)),
    ("oktopk", "exact", "rounded"): ((23, 5, 0), (110, 31.5, 8)),
    ("oktopk", "static", "plain"): ((2, 0, 0), (187, 0, 1)),
    ("oktopk", "static", "packed"): ((2, 0, 0), (163, 0, 1)),
    ("oktopk", "static", "rounded"): ((2, 0, 0), (189, 0, 1)),
    ("random_block", "exact", "plain"): ((2, 0, 0), (26, 0, 0)),
    ("random_block", "exact", "rounded"): ((2, 0, 0), (27, 10, 11)),
    ("random_block", "static", "plain"): ((2, 0, 0), (26, 0, 0)),
    ("random_block", "static", "rounded"): ((2, 0, 0), (35, 0, 0)),
    ("random_k", "exact", "plain"): ((2, 0, 0), (26, 0, 0)),
    ("sidco", "exact", "plain"): ((24, 2, 0), (116, 13, 11)),
    ("sidco", "exact", "packed"): ((24, 1, 0), (115, 5, 11)),
    ("sidco", "exact", "rounded"): ((29, 1, 0), (136, 5, 11)),
    ("spardl", "exact", "plain"): ((0, 4, 6), (-2, 46, 46)),
    ("spardl", "exact", "packed"): ((1, 5, 2), (-8, 36, 60)),
    ("spardl", "exact", "rounded"): ((10, 6, 11), (17, 44.5, 131)),
    ("spardl", "static", "plain"): ((2, 0, 0), (55.5, 0, 41.5)),
    ("spardl", "static", "packed"): ((2, 0, 0), (43.5, 0, 29.5)),
    ("spardl", "static", "rounded"): ((2, 0, 0), (43.5, 0, 33.5)),
    ("topk_allgather", "exact", "plain"): ((4, 2, 0), (37, 13, 11)),
    ("topk_allgather", "exact", "packed"): ((4, 1, 0), (36, 5, 11)),
    ("topk_allgather", "exact", "rounded"): ((8, 1, 0), (55, 5, 11)),
    ("topk_allgather", "static", "plain"): ((2, 0, 0), (65, 0, 0)),
    ("topk_allgather", "static", "packed"): ((2, 0, 0), (53, 0, 0)),
    ("topk_allgather", "static", "rounded"): ((2, 0, 0), (55, 0, 0)),
    ("topk_dsa", "exact", "plain"): ((9, 4, 0), (21, 40, 11)),
}
# What the rest of a sparse step of `wrap` has beyond the rest of a dense step, both with AdamW: selection by update,
# the staleness-aware update, small tensors in 8 bits. Counted with 2 workers, after the first 20 steps.
REST_OF_STEP = Counts(0, 49)
# What a hierarchical exchange adds within a node, where P is the size of the node.
_WITHIN_NODE: tuple[_Growth, _Growth] = ((5, 0, 0), (29, 0, 11))


def counts(recipe: Recipe, world_size: int) -> Counts:
    """Return the counts of an ordinary step of ``recipe``, for one vector on a GPU.

    They hold the selection, the exchange and its confirmation. They do not hold the copies between gradients and the
    vector, small tensors, selection by update, and the update of the parameters (:data:`REST_OF_STEP`). Steps that
    evaluate thresholds again have more. Recipes around a method count as the method, and a hierarchical one as the
    method between nodes and the sums within a node. ``static="auto"`` and ``packed="auto"`` are exact and plain, see
    :func:`~tritoncomm.step.packing.resolve`. A single worker has none.

    Raises:
        ConfigurationError: The method is not in :data:`TABLE`.
    """
    within = Counts()
    for layer in recipe.layers:
        if isinstance(layer, Hierarchical) and world_size > 1:
            within = within.plus(_at(_WITHIN_NODE, layer.node_size))
            world_size //= layer.node_size
    recipe = recipe.layers[-1]
    if world_size <= 1:
        return within
    key = _key(recipe)
    if key not in TABLE:
        raise ConfigurationError(
            f"the synchronizations and launches of {recipe.name!r} are not known: count them with "
            f"benchmarks/gpu_cost.py, and add them to tritoncomm.step.gpu_cost.TABLE as {key}"
        )
    return within.plus(_at(TABLE[key], world_size))


def is_known(recipe: Recipe) -> bool:
    """Return True if the table has the counts of ``recipe``, or of the method that it wraps."""
    return _key(recipe.layers[-1]) in TABLE


def _key(method: Recipe) -> tuple[str, str, str]:
    if method.delivers_all():
        return "dense", "exact", "plain"
    return method.name, form(method), _format(method)


def form(recipe: Recipe) -> str:
    """Return the form of the messages of a method: ``"static"`` if they have a fixed length, otherwise ``"exact"``."""
    return "static" if getattr(recipe, "static", False) is True else "exact"


def _format(recipe: Recipe) -> str:
    if getattr(recipe, "values", "fp32") != "fp32":
        return "rounded"
    return "packed" if isinstance(recipe, IndexRecipe) and recipe.encoding.packed else "plain"


def _at(growths: tuple[_Growth, _Growth], world_size: int) -> Counts:
    rounds = log2(world_size)
    return Counts(*(a + b * world_size + c * rounds for a, b, c in growths))
