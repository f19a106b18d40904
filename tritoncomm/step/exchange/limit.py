"""Limit the norm of the mean of the gradients of a step, before they are exchanged."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from tritoncomm.primitives.mean_norm import WIDTH, norm_of_mean
from tritoncomm.scheduler.rounds import Pattern
from tritoncomm.step.exchange.layout import BucketLayout
from tritoncomm.step.exchange.vector import VectorExchange
from tritoncomm.step.tensors.shards import pieces


def clipped(
    vectors: Sequence[VectorExchange],
    limit: float,
    shard: int,
    shards: int,
    world_size: int,
    counted: torch.Tensor | None = None,
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
        counted: The sketch of other gradients that count in the norm.
    """
    is_whole = len(vectors) == 1 and shard == 0 and counted is None
    total, *others = [
        vector.sketch(None if is_whole else f"{shard}, vector {number}") / _copies(vector, shards) ** 0.5
        for number, vector in enumerate(vectors)
    ]
    others += [] if counted is None else [counted]
    for other in others:
        total += other
    norm = yield from norm_of_mean(total, world_size)
    # A NaN or Inf stays where it is, so that the error names its rank and parameter.
    factor = torch.where(norm.isfinite() & (norm > limit), limit / norm, 1.0).float()
    for vector in vectors:
        vector.flat.mul_(factor)
    return norm


def sketch_of_owners(
    vectors: Sequence[VectorExchange],
    owners: Mapping[int, torch.Tensor],
    shard: int,
    shards: int,
    scale: torch.Tensor | None,
) -> torch.Tensor:
    """Return a sketch of the gradients of parameters whose updates are exchanged, for :func:`clipped`.

    It is zero if any is NaN or Inf, because this worker then leaves out its step. Each ``vector.flat`` is overwritten.

    Args:
        vectors: The vectors of their anchors.
        owners: The parameter of each anchor, by the id of the anchor.
        shard: Number of this rank's shard of the model.
        shards: Number of shards.
        scale: Loss scale of the gradients. None if they are not scaled.
    """
    total = torch.zeros(WIDTH, device=vectors[0].device)
    for number, vector in enumerate(vectors):
        own = {owners[id(anchor)]: vector.name_of(anchor) for anchor in vector.layout.parameters}
        BucketLayout(list(own), list(own.values())).read_gradients(vector.flat)
        total += vector.sketch(f"{shard}, anchors {number}") / _copies(vector, shards) ** 0.5
    if scale is not None:
        total /= scale.to(total.device)
    return torch.where(total.isfinite().all(), total, 0.0)


def _copies(vector: VectorExchange, shards: int) -> int:
    """Return the number of ranks with other shards of the model, this one included, that hold copies of ``vector``."""
    return shards // pieces(vector.parameters[0]) if vector.parameters else 1
