"""Exact order statistics of magnitudes: the k-th largest, and the k largest.

Magnitudes are compared as integer keys, ``bits(x) & 0x7FFFFFFF``: a total order that is exact for
denormals, ranks NaN above infinity, and is the same on every device.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import numpy as np
import torch

from tritoncomm_kernels.compact import (
    MAGNITUDE_MASK,
    Selection,
    accumulate_and_select_keys,
    select_keys,
)

# A sample of one 128-byte line in 256 estimates the k-th magnitude closely enough that the filter
# admits little more than k candidates; below this many elements sampling costs more than it saves.
SAMPLE_LINE = 32
SAMPLE_STRIDE = 257 * SAMPLE_LINE  # odd in lines, or a matrix width that divides it would show the same columns only
SAMPLE_FROM = 1 << 17


def magnitude_keys(values: torch.Tensor) -> torch.Tensor:
    """Integer keys (int32, same shape) that order fp32 ``values`` by magnitude, NaN largest."""
    return values.view(torch.int32) & MAGNITUDE_MASK


def top_k(values: torch.Tensor, k: int) -> Selection:
    """The ``k`` largest magnitudes of ``values`` (fp32 ``[n]``), ascending by index.

    Exactly ``min(k, number of non-zeros)`` entries: zeros are never selected and ties go to the
    lower index, as every rank must break them. Raises ``ValueError`` for a negative ``k``.
    """
    _check_k(k)
    sample = _sample_lines(values)
    return _exact(partial(select_keys, values), sample, k, values.numel())


def accumulate_top_k(residual: torch.Tensor, gradient: torch.Tensor, out: torch.Tensor, k: int) -> Selection:
    """``out = residual + gradient`` and the ``k`` largest magnitudes of it, in one pass over n.

    The arguments are as for :func:`tritoncomm_kernels.accumulate_and_select`, the result as for
    :func:`top_k`. ``residual`` is read only.
    """
    _check_k(k)
    sample = _sample_lines(residual) + _sample_lines(gradient)
    first = True

    def candidates(key: int) -> Selection:
        nonlocal first
        if first:
            first = False
            return accumulate_and_select_keys(residual, gradient, out, key)
        return select_keys(out, key)

    return _exact(candidates, sample, k, out.numel())


def kth_magnitude(values: torch.Tensor, k: int) -> float:
    """The ``k``-th largest ``|values|`` (fp32 ``[n]``); 0.0 when fewer than ``k`` are non-zero."""
    selected = top_k(values, k)
    if k == 0 or len(selected.values) < k:
        return 0.0
    return smallest_magnitude(selected.values)


def smallest_magnitude(values: torch.Tensor) -> float:
    """The smallest ``|values|`` by key order; 0.0 for an empty tensor."""
    if values.numel() == 0:
        return 0.0
    return float(magnitude_keys(values).min().view(torch.float32))


def _exact(candidates: Callable[[int], Selection], sample: torch.Tensor, k: int, numel: int) -> Selection:
    """Filter by a threshold slightly too low, then finish on the candidates alone."""
    key = _sampled_key(sample, k, numel)
    selected = candidates(key)
    if selected.found < k and key > 1:  # the sample misjudged: every non-zero is a candidate
        selected = candidates(1)
    return largest(selected, k)


def largest(selected: Selection, k: int) -> Selection:
    """The ``k`` entries of ``selected`` with the largest magnitude, still ascending by index."""
    if len(selected.values) <= k:
        return Selection(selected.indices, selected.values, len(selected.values))
    if k == 0:
        return Selection(selected.indices[:0], selected.values[:0], 0)
    keys = magnitude_keys(selected.values)
    kth = _kth_key(keys, k)
    take = keys > kth
    equal = (keys == kth).nonzero().squeeze(1)
    take[equal[: k - int(take.sum())]] = True
    positions = take.nonzero().squeeze(1)
    return Selection(selected.indices[positions], selected.values[positions], k)


def _kth_key(keys: torch.Tensor, k: int) -> int:
    if keys.device.type == "cpu":
        rank = keys.numel() - k
        return int(np.partition(keys.numpy(), rank)[rank])
    return int(torch.topk(keys, k, sorted=False).values.min())


def _sample_lines(values: torch.Tensor) -> torch.Tensor:
    """One line in every stride, fp32; empty where the vector is too short for sampling."""
    if values.numel() < SAMPLE_FROM:
        return values.new_empty(0, dtype=torch.float32)
    rows = values.numel() // SAMPLE_STRIDE
    lines = values[: rows * SAMPLE_STRIDE].view(rows, SAMPLE_STRIDE)[:, :SAMPLE_LINE]
    return lines.reshape(-1).to(torch.float32)


def _sampled_key(sample: torch.Tensor, k: int, numel: int) -> int:
    """A key that about 1.15 k elements, and with high probability at least k, reach."""
    size = sample.numel()
    expected = k * size / numel if numel else 0.0
    rank = math.ceil(1.15 * expected + 3.0 * math.sqrt(expected) + 1.0)
    if rank >= size:
        return 1
    return max(1, _kth_key(magnitude_keys(sample), rank))


def _check_k(k: int) -> None:
    if k < 0:
        raise ValueError(f"k={k} is negative: ask for at least 0 elements")
