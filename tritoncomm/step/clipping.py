"""Limit the norm of the mean of the gradients of a step, before they are exchanged."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from tritoncomm.errors import ConfigurationError
from tritoncomm.primitives.mean_norm import WIDTH, norm_of_mean
from tritoncomm.scheduler.rounds import Pattern
from tritoncomm.step.flat import BucketLayout
from tritoncomm.step.names import label
from tritoncomm.step.options import WrapOptions
from tritoncomm.step.vector import VectorExchange

logger = logging.getLogger("tritoncomm")


def clipped(
    vectors: Sequence[VectorExchange], limit: float, shard: int, world_size: int, counted: torch.Tensor | None = None
) -> Pattern[torch.Tensor]:
    """Scale each ``vector.flat``, so that the norm of the mean of all of them is at most ``limit``.

    The norm is an estimate, equal on all ranks (:mod:`tritoncomm.primitives.mean_norm`). It is returned, fp64 ``[]``.
    The pattern reads nothing on the host, so :func:`~tritoncomm.scheduler.together.run_together` does not begin with
    another vector before all are scaled.

    Args:
        vectors: All flat vectors of this rank.
        limit: The largest norm.
        shard: Number of this rank's shard of the model, equal on the ranks that hold the same shard.
        world_size: Number of ranks that hold the same shard.
        counted: The sketch of other gradients that count in the norm.
    """
    is_whole = len(vectors) == 1 and shard == 0 and counted is None
    total, *others = [vector.sketch(None if is_whole else shard) for vector in vectors]
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
    vectors: Sequence[VectorExchange], owners: Mapping[int, torch.Tensor], shard: int, scale: torch.Tensor | None
) -> torch.Tensor:
    """Return a sketch of the gradients of parameters whose updates are exchanged, for :func:`clipped`.

    It is zero if any is NaN or Inf, because this worker then leaves out its step. Each ``vector.flat`` is overwritten.

    Args:
        vectors: The vectors of their anchors.
        owners: The parameter of each anchor, by the id of the anchor.
        shard: Number of this rank's shard of the model.
        scale: Loss scale of the gradients. None if they are not scaled.
    """
    total = torch.zeros(WIDTH, device=vectors[0].device)
    for vector in vectors:
        own = {owners[id(anchor)]: vector.name_of(anchor) for anchor in vector.layout.parameters}
        BucketLayout(list(own), list(own.values())).read_gradients(vector.flat)
        total += vector.sketch(shard)
    if scale is not None:
        total /= scale.to(total.device)
    return torch.where(total.isfinite().all(), total, 0.0)


def with_clipping(options: WrapOptions, optimizer: torch.optim.Optimizer) -> WrapOptions:
    """Return ``options`` with the default of ``clip_by`` for ``optimizer``. The other one is logged."""
    if options.clip_by is not None or options.max_grad_norm is None:
        return options
    trained = [each for group in optimizer.param_groups for each in group["params"] if each.requires_grad]
    if not _copied(trained):
        return replace(options, clip_by="gradient")
    if dist.get_rank() == 0:
        logger.warning(
            "max_grad_norm=%s limits what is delivered (clip_by='delivered'), because tensor parallelism keeps copies "
            "of parameters, which would count several times in the norm of the gradient",
            options.max_grad_norm,
        )
    return replace(options, clip_by="delivered")


def check_clipping(limit: float | None, trained: Sequence[tuple[torch.Tensor, str]]) -> None:
    """Raise :class:`~tritoncomm.ConfigurationError` if there is a ``limit`` that cannot be kept.

    ``trained`` are the parameters, each given with its name. Ranks with other shards may hold copies of a parameter,
    which would count several times.
    """
    copied = set() if limit is None else set(map(id, _copied([parameter for parameter, _ in trained])))
    for position, (parameter, name) in enumerate(trained):
        if id(parameter) in copied:
            raise ConfigurationError(
                f"clip_by='gradient': ranks with other shards hold copies of {label(name, position, parameter)}, which "
                "would count several times in the norm: use clip_by='delivered'"
            )


def _copied(parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return those of ``parameters`` of which ranks that hold other shards of the model hold copies."""
    if not any(hasattr(parameter, "device_mesh") for parameter in parameters):
        return []
    return [parameter for parameter in parameters if _has_copies(parameter)]


def _has_copies(parameter: Any) -> bool:
    """Return True if ranks that hold other shards of the model hold a copy of ``parameter``."""
    if not hasattr(parameter, "device_mesh"):
        return True
    mesh = parameter.device_mesh
    return any(each.is_replicate() and mesh.size(dimension) > 1 for dimension, each in enumerate(parameter.placements))
