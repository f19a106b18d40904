"""Anchors: copies of parameters in fp32, from which changes of these parameters are told."""

from __future__ import annotations

import torch

from tritoncomm.step.tensors.shards import like_parameter, local


def anchor_of(parameter: torch.Tensor) -> torch.Tensor:
    """Return a copy of ``parameter`` that requires gradients, with the same sharding, in fp32 or a wider dtype."""
    own = local(parameter.detach())
    dtype = torch.promote_types(own.dtype, torch.float32)
    return like_parameter(parameter, own.to(dtype, copy=True).reshape(-1)).requires_grad_()


def delta_of(anchor: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Return what was changed of ``parameter`` since it was the ``anchor``, in the dtype of the anchor.

    The anchor counts with the precision of the parameter.
    """
    return anchor.to(parameter.dtype).to(anchor.dtype, copy=True).sub_(parameter)


def write(tensor: torch.Tensor, values: torch.Tensor) -> None:
    """Overwrite ``tensor`` with ``values`` of the same shape. Of DTensors, this rank writes its shard."""
    local(tensor.detach()).copy_(local(values.detach()))
