"""Threshold selection and compaction: one pass that adds, compares and gathers.

The pass works chunk by chunk so that everything between reading the inputs and writing the
accumulator stays in cache; no temporary is ever as long as the vector.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from tritoncomm_kernels.accumulate import add, check_addends
from tritoncomm_kernels.checks import check_vector
from tritoncomm_kernels.dispatch import triton_runs
from tritoncomm_kernels.expand import expand
from tritoncomm_kernels.mark import MAGNITUDE_MASK, Marks, mark
from tritoncomm_kernels.workspace import Workspace

# 2^18 elements: 1 MiB of keys fits the second-level cache; 2^15 and 2^20 measured 1.3x and 1.05x slower.
HOST_CHUNK = 1 << 18


class Selection(NamedTuple):
    """What passed a threshold: ascending int32 ``indices``, fp32 ``values``, and how many were ``found``.

    ``found`` exceeds ``len(indices)`` when a capacity cut the output short.
    """

    indices: torch.Tensor
    values: torch.Tensor
    found: int

    @classmethod
    def of(cls, indices: torch.Tensor, values: torch.Tensor) -> Selection:
        """Just these entries, none cut off."""
        return cls(indices, values, indices.numel())

    @classmethod
    def join(cls, parts: Sequence[Selection]) -> Selection:
        """The entries of ``parts`` (at least one), one after the other."""
        return cls.of(torch.cat([part.indices for part in parts]), torch.cat([part.values for part in parts]))

    def slice(self, start: int, stop: int) -> Selection:
        """The entries from ``start`` up to ``stop`` (views)."""
        return Selection.of(self.indices[start:stop], self.values[start:stop])


def threshold_key(threshold: float) -> int:
    """The integer key that a magnitude must reach to be selected by ``threshold`` (fp32).

    Positive thresholds map to their bits, everything else to 1 so that zeros are never selected;
    a NaN threshold selects nothing but NaNs.
    """
    if math.isnan(threshold):
        return MAGNITUDE_MASK
    if threshold <= 0:
        return 1
    with np.errstate(over="ignore"):
        return max(1, int(np.float32(threshold).view(np.int32)))


def select(
    values: torch.Tensor,
    threshold: float,
    *,
    capacity: int | None = None,
    clear: bool = False,
    workspace: Workspace | None = None,
) -> Selection:
    """Every entry of ``values`` (fp32 ``[n]``, contiguous) with ``|x| >= threshold``, ascending.

    Zeros are never selected, NaN always is. At most ``capacity`` entries are written; with
    ``clear`` exactly the written ones become 0 in ``values``, so that overflow loses nothing.
    ``workspace`` keeps a GPU's scratch memory from step to step. Raises ``ValueError`` for a wrong
    dtype, shape or capacity.
    """
    return select_keys(values, threshold_key(threshold), capacity=capacity, clear=clear, workspace=workspace)


def accumulate_and_select(
    residual: torch.Tensor,
    gradient: torch.Tensor,
    out: torch.Tensor,
    threshold: float,
    *,
    capacity: int | None = None,
    clear: bool = False,
    workspace: Workspace | None = None,
) -> Selection:
    """``out = residual + gradient``, then :func:`select` on ``out``, fused into one pass.

    ``residual`` and ``out`` are fp32 ``[n]`` and may be the same tensor; ``gradient`` is fp32, bf16
    or fp16 ``[n]``. Raises ``ValueError`` naming the argument that does not fit.
    """
    key = threshold_key(threshold)
    return accumulate_and_select_keys(residual, gradient, out, key, capacity, clear=clear, workspace=workspace)


def accumulate_and_select_keys(
    residual: torch.Tensor,
    gradient: torch.Tensor,
    out: torch.Tensor,
    key: int,
    capacity: int | None = None,
    *,
    clear: bool = False,
    workspace: Workspace | None = None,
) -> Selection:
    """:func:`accumulate_and_select` with the threshold already turned into a key."""
    check_addends(residual, gradient, out)
    return _scan(out, key, capacity, clear, (residual, gradient), workspace)


def select_keys(
    values: torch.Tensor,
    key: int,
    capacity: int | None = None,
    *,
    clear: bool = False,
    workspace: Workspace | None = None,
) -> Selection:
    """:func:`select` with the threshold already turned into a key."""
    check_vector("values", values)
    return _scan(values, key, capacity, clear, None, workspace)


def has_non_finite(values: torch.Tensor) -> bool:
    """True when any entry of fp32 ``values`` is Inf or NaN."""
    return values.numel() > 0 and not bool(torch.isfinite(values).all())


Addends = tuple[torch.Tensor, torch.Tensor] | None


def _scan(
    out: torch.Tensor, key: int, capacity: int | None, clear: bool, addends: Addends, workspace: Workspace | None
) -> Selection:
    if capacity is not None and capacity < 0:
        raise ValueError(f"capacity={capacity} is negative: give None for no limit")
    room = out.numel() if capacity is None else capacity
    if out.numel() == 0:
        return Selection(out.new_empty(0, dtype=torch.int32), out.new_empty(0), 0)
    if triton_runs(out):
        return _scan_triton(out, key, room, clear, addends, workspace if workspace is not None else Workspace())
    scan = _scan_host if out.device.type == "cpu" else _scan_device
    return scan(out, key, room, clear, addends)


def _scan_triton(
    out: torch.Tensor, key: int, room: int, clear: bool, addends: Addends, workspace: Workspace
) -> Selection:
    """Mark and expand. The one host sync, between the two, is there to allocate what is needed and no more."""
    marks = Marks.empty(out.numel(), out.device, workspace, name="select")
    limit = workspace.buffer("select key", 1, torch.int32, out.device).fill_(key)
    residual, gradient = addends if addends is not None else (out, None)
    mark(residual, gradient, out, limit, marks)
    count = int(marks.counts.sum())
    written = min(count, room)
    indices = out.new_empty(written, dtype=torch.int32)
    values = out.new_empty(written)
    found = workspace.buffer("select found", 1, torch.int64, out.device)
    expand(out, marks, indices, values, found, clear=clear, workspace=workspace)
    return Selection(indices, values, count)


def _scan_host(out: torch.Tensor, key: int, room: int, clear: bool, addends: Addends) -> Selection:
    """The chunk loop on numpy, whose integer compare and flatnonzero measured faster than torch's."""
    keys = np.empty(min(HOST_CHUNK, out.numel()), dtype=np.int32)
    mask = np.empty(keys.shape, dtype=np.bool_)
    indices, values, count = [], [], 0
    for start in range(0, out.numel(), HOST_CHUNK):
        part = out[start : start + HOST_CHUNK]
        if addends is not None:
            residual, gradient = (a[start : start + HOST_CHUNK] for a in addends)
            add(residual, gradient, part)
        floats, size = part.numpy(), part.numel()
        np.bitwise_and(floats.view(np.int32), MAGNITUDE_MASK, out=keys[:size])
        found = np.flatnonzero(np.greater_equal(keys[:size], key, out=mask[:size]))
        written = found[: max(0, room - count)]
        count += found.size
        values.append(floats[written])
        indices.append((written + start).astype(np.int32))
        if clear:
            floats[written] = 0.0
    joined = torch.from_numpy(np.concatenate(indices)), torch.from_numpy(np.concatenate(values))
    return Selection(*joined, count)


def _scan_device(out: torch.Tensor, key: int, room: int, clear: bool, addends: Addends) -> Selection:
    """The same with torch operators alone, on whichever device the tensors are."""
    if addends is not None:
        residual, gradient = addends
        add(residual, gradient, out)
    found = positions((out.view(torch.int32) & MAGNITUDE_MASK) >= key)
    written = found[:room]
    values = out[written]
    if clear:
        out[written] = 0.0
    return Selection(written.to(torch.int32), values, found.numel())


def positions(mask: torch.Tensor) -> torch.Tensor:
    """Ascending int64 positions of the true entries of a boolean ``mask`` (``[n]``)."""
    if mask.device.type == "cpu":  # numpy's is three times faster than nonzero() there
        return torch.from_numpy(np.flatnonzero(mask.numpy()))
    return mask.nonzero().squeeze(1)
