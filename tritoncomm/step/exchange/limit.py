"""Limit the norm of the mean of the gradients of a step, before they are exchanged."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tritoncomm.primitives.mean_norm import norm_of_mean
from tritoncomm.scheduler.rounds import Pattern
from tritoncomm.step.exchange.vector import VectorExchange
from tritoncomm.step.tensors.shards import pieces


def clipped(
    vectors: Sequence[VectorExchange],
    limit: float,
    shard: int,
    shards: int,
    world_size: int,
) -> Pattern[torch.Tensor]:
    """Scale each ``vector.flat``, so that the norm of the mean of all of them is at most ``limit``.

    The norm is an estimate, equal on all ranks (:mod:`tritoncomm.primitives.mean_norm`). It is returned, fp64 ``[]``.
    The pattern reads nothing on the host, so :func:`~tritoncomm.scheduler.together.run_together` does not begin with
    another vector before all are scaled.

    Tensor parallelism keeps copies of some parameters, which are in vectors of their own. They count once: the sketch
    of each of n copies is divided by the root of n.

    Args:
        vectors: All flat vectors of this rank.
        limit: The largest norm.
        shard: Number of this rank's shard of the model, equal on the ranks that hold the same shard.
        shards: Number of shards.
        world_size: Number of ranks that hold the same shard.
    """
    is_whole = len(vectors) == 1 and shard == 0
    total, *others = [
        vector.sketch(None if is_whole else f"{shard}, vector {number}") / _copies(vector, shards) ** 0.5
        for number, vector in enumerate(vectors)
    ]
    for other in others:
        total += other
    norm = yield from norm_of_mean(total, world_size)
    # A NaN or Inf stays where it is, so that the error names its rank and parameter.
    factor = torch.where(norm.isfinite() & (norm > limit), limit / norm, 1.0).float()
    for vector in vectors:
        vector.flat.mul_(factor)
    return norm


def _copies(vector: VectorExchange, shards: int) -> int:
    """Return the number of ranks with other shards of the model, this one included, that hold copies of ``vector``."""
    return shards // pieces(vector.parameters[0]) if vector.parameters else 1
