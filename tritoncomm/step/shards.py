"""Local shards of DTensors, and DTensors made from one value per shard."""

from __future__ import annotations

from typing import Any

import torch

_PLAIN = (torch.Tensor, torch.nn.Parameter)


def local(tensor: Any) -> torch.Tensor:
    """Return the local shard of a DTensor, which shares its memory. Return any other tensor unchanged."""
    found: torch.Tensor = tensor.to_local() if type(tensor) not in _PLAIN and hasattr(tensor, "to_local") else tensor
    return found


def local_gradient(parameter: torch.Tensor) -> torch.Tensor:
    """Return the local shard of ``parameter.grad``, after redistributing it to the placements of the parameter."""
    gradient: Any = parameter.grad
    if type(gradient) not in _PLAIN and hasattr(gradient, "placements"):
        placements = parameter.placements  # type: ignore[attr-defined]
        gradient = gradient if gradient.placements == placements else gradient.redistribute(placements=placements)
    return local(gradient)


def one_per_shard(parameter: Any, value: torch.Tensor) -> torch.Tensor:
    """Return ``value`` (``[]``) of the local shard of ``parameter``, in a form that a checkpoint can reshard.

    If no dimension is sharded, this is ``value``. Otherwise it is a DTensor with the sharded dimensions of
    ``parameter``, in the dtype of ``value``. All local elements are ``value``. One number per rank would belong to the
    number of ranks. One per index of a sharded dimension exists for any number of ranks.
    """
    sharded = sorted({placement.dim for placement in getattr(parameter, "placements", ()) if hasattr(placement, "dim")})
    if not sharded:
        return value.clone()
    from torch.distributed.tensor import zeros

    # A sharded dimension is the only one, or one of few, so its number changes.
    placements = [_renumbered(placement, sharded) for placement in parameter.placements]
    shape = [parameter.shape[dim] for dim in sharded]
    held = zeros(shape, dtype=value.dtype, device_mesh=parameter.device_mesh, placements=placements)
    held.to_local().fill_(value)
    return held


def _renumbered(placement: Any, sharded: list[int]) -> Any:
    if not hasattr(placement, "dim"):
        return placement
    settings = {"split_factor": placement.split_factor} if hasattr(placement, "split_factor") else {}
    return type(placement)(sharded.index(placement.dim), **settings)
