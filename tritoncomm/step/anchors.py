"""Anchors: copies of parameters in fp32, from which changes of these parameters are told."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tritoncomm.step.shards import like_parameter, local


def anchor_of(parameter: torch.Tensor) -> torch.Tensor:
    """Return a copy of ``parameter`` that requires gradients, with the same sharding, in fp32 or a wider dtype."""
    own = local(parameter.detach())
    dtype = torch.promote_types(own.dtype, torch.float32)
    return like_parameter(parameter, own.to(dtype, copy=True).reshape(-1)).requires_grad_()


def delta_of(anchor: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Return what was changed of ``parameter`` since it was the ``anchor``, in the dtype of the anchor."""
    return rounded(anchor, parameter).sub_(parameter)


def rounded(anchor: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Return ``anchor`` with the precision of ``parameter``, as a new tensor with the dtype of the anchor."""
    return anchor.to(parameter.dtype).to(anchor.dtype, copy=True)


def all_finite(tensors: Sequence[torch.Tensor]) -> bool:
    """Return True if no tensor has a NaN or Inf. The host waits for a GPU once.

    A sum that has met a NaN or Inf never becomes finite again, and takes a small part of the time of a test of each
    value. If a sum is not finite, products with 0 decide, because finite values may overflow.
    """
    dense = [each if each.layout is torch.strided else each.coalesce().values() for each in tensors]
    found = [each for each in dense if each.numel()]
    if not found:
        return True
    return _are_finite([each.sum() for each in found]) or _are_finite([(each * 0).sum() for each in found])


def _are_finite(figures: Sequence[torch.Tensor]) -> bool:
    return bool(torch.stack(list(figures)).isfinite().all())


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """Return a flat copy of ``tensor``, or of this rank's shard of a DTensor."""
    return local(tensor.detach()).reshape(-1).clone()


def write(tensor: torch.Tensor, values: torch.Tensor) -> None:
    """Overwrite ``tensor``, or this rank's shard of a DTensor, with flat ``values``."""
    own = local(tensor.detach())
    own.copy_(values.view(own.shape))
