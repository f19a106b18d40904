"""The root mean square of tensors, in bits that do not depend on the order of summation."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from tritoncomm_kernels.checks import channels_last
from tritoncomm_kernels.devices import is_asynchronous
from tritoncomm_kernels.memory import copied_to

_PART, _LONG = 1 << 16, 1 << 22  # elements whose squares are in memory at a time, of a CPU (its cache) and a GPU
_SMALL, _SHORT = 1 << 11, 1 << 20  # elements below which tensors are computed together, on a CPU and on a GPU
UNIT = 2.0**24  # squares are rounded down to multiples of 1 / UNIT of the largest one


def root_mean_square(tensor: torch.Tensor) -> torch.Tensor:
    """Return the root mean square of ``tensor`` (any float dtype, not empty) as fp32 ``[]``.

    The order of summation does not change the bits, because squares are rounded down to multiples of 2^-24 of the
    largest square. Elements below 1/4096 of the largest therefore count as 0. The result is NaN if any element is not
    finite.
    """
    low, high = tensor.detach().aminmax()
    wide = torch.promote_types(tensor.dtype, torch.float32)
    top = torch.maximum(-low, high).to(wide).clamp(min=torch.finfo(wide).tiny)
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    flat = tensor.detach().reshape(-1)
    for part in torch.split(flat, _PART if tensor.device.type == "cpu" else _LONG):
        share = part.to(wide) / top
        total += (share * share * UNIT).to(torch.int32).sum(dtype=torch.int64)
    mean = total.to(wide) / torch.full_like(top, tensor.numel() * UNIT)
    return torch.where(top.isfinite(), top * square_root(mean), math.nan).to(torch.float32)


def root_mean_squares(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return :func:`root_mean_square` of each tensor. Small ones of one dtype and device are computed together.

    The host does not wait for a GPU.
    """
    # In the order of memory, which changes no bit.
    tensors = [tensor if channels_last(tensor) is None else tensor.movedim(1, -1) for tensor in tensors]
    alike: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for position, tensor in enumerate(tensors):
        if tensor.numel() < (_SHORT if is_asynchronous(tensor.device) else _SMALL):
            alike.setdefault((tensor.device, tensor.dtype), []).append(position)
    found: dict[int, torch.Tensor] = {}
    for positions in alike.values():
        for part in consecutive([tensors[i].numel() for i in positions], _PART):
            own = positions[part]
            found.update(zip(own, _together([tensors[i] for i in own]).unbind(), strict=True))
    return [found[i] if i in found else root_mean_square(tensor) for i, tensor in enumerate(tensors)]


def consecutive(counts: Sequence[int], size: int) -> list[slice]:
    """Return consecutive ranges of ``counts``. Each ends where its sum reaches ``size``."""
    parts, start, waiting, end = [], 0, 0, len(counts)
    for stop, count in enumerate(counts, 1):
        waiting += count
        if waiting >= size or stop == end:
            parts.append(slice(start, stop))
            start, waiting = stop, 0
    return parts


def square_root(values: torch.Tensor) -> torch.Tensor:
    """Return correctly rounded square roots. torch's on the CPU is off by one unit for one value in eight."""
    if values.device.type == "cpu":
        with np.errstate(invalid="ignore"):
            return torch.from_numpy(np.asarray(np.sqrt(values.numpy())))
    return values.sqrt()


def _together(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return :func:`root_mean_square` of non-empty tensors of one dtype and device, fp32 ``[tensors]``."""
    wide, device = torch.promote_types(tensors[0].dtype, torch.float32), tensors[0].device
    counts = torch.tensor(list(map(torch.Tensor.numel, tensors)), device="cpu")
    sizes, units = copied_to(counts, device), copied_to((counts.double() * UNIT).to(wide), device)
    flat = torch.cat([tensor.detach().reshape(-1) for tensor in tensors]).to(wide)
    top = torch.segment_reduce(flat.abs(), "max", lengths=sizes, unsafe=True).clamp_(min=torch.finfo(wide).tiny)
    flat = flat.div_(torch.repeat_interleave(top, sizes, output_size=flat.numel()))
    squares = flat.square_().mul_(UNIT).trunc_().double()
    # Sums of so few integers are exact in fp64. If an element is not finite, its square is NaN, and so is the result.
    totals = torch.segment_reduce(squares, "sum", lengths=sizes, unsafe=True)
    return (top * square_root(totals.to(wide) / units)).to(torch.float32)
