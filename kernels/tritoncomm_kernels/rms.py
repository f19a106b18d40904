"""The root mean square of tensors, in bits that do not depend on the order of summation."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tritoncomm_kernels.checks import GRADIENT_DTYPES, channels_last
from tritoncomm_kernels.dispatch import kernel, triton_runs

_PART, _LONG = 1 << 16, 1 << 22  # elements whose squares are in memory at a time, of a CPU (its cache) and a GPU
_SMALL = 1 << 14  # elements below which tensors on the CPU are computed together, and how many together
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
    """Return :func:`root_mean_square` of each tensor.

    On a GPU, tensors of one dtype (fp32, bf16 or fp16) that are contiguous or in ``torch.channels_last`` take four
    launches, and the host does not wait.
    """
    # In the order of memory, which changes no bit.
    tensors = [tensor if channels_last(tensor) is None else tensor.movedim(1, -1) for tensor in tensors]
    alike: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for position, tensor in enumerate(tensors):
        if tensor.dtype in GRADIENT_DTYPES and tensor.is_contiguous():
            alike.setdefault((tensor.device, tensor.dtype), []).append(position)
    found: dict[int, torch.Tensor] = {}
    for positions in alike.values():
        found.update(zip(positions, together([tensors[i] for i in positions]).unbind(), strict=True))
    return [found[i] if i in found else root_mean_square(tensor) for i, tensor in enumerate(tensors)]


def together(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return :func:`root_mean_square` of contiguous tensors of one dtype and device, fp32 ``[tensors]``."""
    if triton_runs(tensors[0]):
        launched: torch.Tensor = kernel("rms_triton").root_mean_squares(tensors)
        return launched
    found = torch.empty(len(tensors), dtype=torch.float32, device=tensors[0].device)
    small = [
        i
        for i, tensor in enumerate(tensors)
        if tensor.numel() < _SMALL and tensor.dtype == torch.float32 and tensor.device.type == "cpu"
    ]
    for part in consecutive([tensors[i].numel() for i in small], _SMALL):
        results = _of_arrays([tensors[i].numpy(force=True).reshape(-1) for i in small[part]])
        found[small[part]] = torch.from_numpy(results)
    for i in {*range(len(tensors))}.difference(small):
        found[i] = root_mean_square(tensors[i])
    return found


def consecutive(counts: Sequence[int], size: int) -> list[slice]:
    """Return consecutive ranges of ``counts``. Each ends where its sum reaches ``size``."""
    parts, start, waiting = [], 0, 0
    for stop, count in enumerate(counts, 1):
        waiting += count
        if waiting >= size or stop == len(counts):
            parts.append(slice(start, stop))
            start, waiting = stop, 0
    return parts


def square_root(values: torch.Tensor) -> torch.Tensor:
    """Return correctly rounded square roots. torch's on the CPU is off by one unit for one value in eight."""
    if values.device.type == "cpu":
        with np.errstate(invalid="ignore"):
            return torch.from_numpy(np.asarray(np.sqrt(values.numpy())))
    return values.sqrt()


def _of_arrays(arrays: list[npt.NDArray[Any]]) -> npt.NDArray[Any]:
    """Return :func:`root_mean_square` of fp32 ``arrays``, none of which is empty."""
    sizes = [array.size for array in arrays]
    starts, flat = [0, *accumulate(sizes[:-1])], np.concatenate(arrays)
    with np.errstate(all="ignore"):
        top = np.maximum(np.maximum.reduceat(np.abs(flat), starts), np.finfo(np.float32).tiny)
        flat /= np.repeat(top, sizes)
        flat *= flat
        flat *= np.float32(UNIT)
        totals = np.add.reduceat(flat.astype(np.int32), starts, dtype=np.int64)
        mean = totals.astype(np.float32) / np.array([size * UNIT for size in sizes], np.float32)
        found: npt.NDArray[Any] = np.where(np.isfinite(top), top * np.sqrt(mean), np.float32(math.nan))
        return found
