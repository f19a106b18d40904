"""Mark the elements that reach a threshold with one bit each: the first half of selection on a GPU.

:func:`mark` adds, compares, and writes a bit mask with one count per tile. :mod:`tritoncomm_kernels.expand` turns the
mask into ascending indices and values. Neither waits for the host.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from tritoncomm_kernels.accumulate import add, check_addends
from tritoncomm_kernels.checks import check_apart, check_vector
from tritoncomm_kernels.dispatch import kernel, triton_runs
from tritoncomm_kernels.workspace import Workspace

MAGNITUDE_MASK = 0x7FFFFFFF
NON_FINITE_KEY = 0x7F800000  # the key of infinity; Inf and NaN have keys from here on
NAN_KEY = NON_FINITE_KEY + 1  # the smallest key of a NaN
TILE = 4096  # elements per program, 16 per thread; see accumulate_triton
MIN_TILE, MAX_TILE = 64, 1 << 16


class Marks(NamedTuple):
    """A selection as a bit mask, on the device of its vector.

    * ``bits`` (int32 ``[tiles * tile / 32]``): bit j of word w is set if element 32 w + j is marked.
    * ``counts`` (int32 ``[tiles]``): number of marked elements per tile.
    * ``flags`` (int32 ``[1]``): bit 0 is set if a sum is Inf or NaN. It is never cleared.
    """

    bits: torch.Tensor
    counts: torch.Tensor
    flags: torch.Tensor

    @classmethod
    def empty(
        cls,
        numel: int,
        device: torch.device,
        workspace: Workspace | None = None,
        *,
        tile: int = TILE,
        name: str = "mark",
    ) -> Marks:
        """Allocate marks for ``numel`` elements, from ``workspace`` if it is given. ``flags`` is set to 0.

        Marks from one workspace with the same ``name`` share memory.
        """
        held = workspace if workspace is not None else Workspace()
        tiles = max(1, -(-numel // tile))
        bits = held.buffer(f"{name} bits", tiles * tile // 32, torch.int32, device)
        counts = held.buffer(f"{name} counts", tiles, torch.int32, device)
        flags = held.buffer(f"{name} flags", 1, torch.int32, device).zero_()
        return cls(bits, counts, flags)


def mark(
    residual: torch.Tensor,
    gradient: torch.Tensor | None,
    out: torch.Tensor,
    threshold: torch.Tensor,
    marks: Marks,
    *,
    span: torch.Tensor | None = None,
) -> None:
    """Compute ``out = residual + gradient`` and mark its elements with magnitude at least ``threshold``.

    ``threshold`` is ``[1]`` on the device: fp32, or int32 for an integer key. A threshold or key of 0 or below marks
    every non-zero. A NaN threshold marks only NaNs. Zeros are never marked. NaNs reach every threshold, and every key
    up to 0x7F800001. ``span`` (int32 ``[2]``, on the device) restricts marking to positions ``span[0] <= i < span[1]``.
    The sum is computed everywhere. Without ``gradient``, ``residual`` and ``out`` must be the same tensor, which is
    only read. The other arguments are those of :func:`tritoncomm_kernels.accumulate`.
    """
    check_addends(residual, gradient, out)
    _check_limits(out, threshold, span)
    check_marks(out, marks)
    if out.numel() == 0:
        marks.bits.zero_()
        marks.counts.zero_()
    elif triton_runs(out):
        kernel("mark_triton").mark(residual, gradient, out, threshold, span, *marks)
    else:
        if gradient is not None:
            add(residual, gradient, out)
        write_marks(out, threshold, marks, span)


def write_marks(values: torch.Tensor, threshold: torch.Tensor, marks: Marks, span: torch.Tensor | None) -> None:
    """Write the marks of ``values``, the finished sums: the torch reference, without host synchronization."""
    keys = values.view(torch.int32) & MAGNITUDE_MASK
    chosen = keys >= as_key(threshold)
    if span is not None:
        at = torch.arange(values.numel(), dtype=torch.int32, device=values.device)
        chosen &= (at >= span[0]) & (at < span[1])
    padded = torch.zeros(marks.bits.numel() * 32, dtype=torch.int32, device=values.device)
    padded[: chosen.numel()] = chosen
    weights = torch.ones((), dtype=torch.int32, device=values.device) << torch.arange(
        32, dtype=torch.int32, device=values.device
    )
    marks.bits.copy_((padded.view(-1, 32) * weights).sum(1, dtype=torch.int32))
    marks.counts.copy_(padded.view(marks.counts.numel(), -1).sum(1, dtype=torch.int32))
    marks.flags.bitwise_or_((keys >= NON_FINITE_KEY).any().to(torch.int32))


def as_key(threshold: torch.Tensor) -> torch.Tensor:
    """Return the integer key of a ``threshold`` in device memory (``[1]``). An int32 threshold already is a key."""
    if threshold.dtype == torch.int32:
        return threshold.clamp(min=1)
    key = torch.where(threshold > 0, threshold.view(torch.int32), 1)
    return torch.where(threshold.isnan(), NAN_KEY, key)


def _check_limits(values: torch.Tensor, threshold: torch.Tensor, span: torch.Tensor | None) -> None:
    check_vector("threshold", threshold, dtypes=(torch.float32, torch.int32), numel=1, like=values)
    if span is not None:
        check_vector("span", span, dtypes=(torch.int32,), numel=2, like=values)


def check_marks(values: torch.Tensor, marks: Marks) -> None:
    """Raise ``ValueError`` unless ``marks`` were allocated for the number of elements of ``values``."""
    tiles = marks.counts.numel()
    check_vector("marks.counts", marks.counts, dtypes=(torch.int32,), like=values)
    check_vector("marks.bits", marks.bits, dtypes=(torch.int32,), like=values)
    check_vector("marks.flags", marks.flags, dtypes=(torch.int32,), numel=1, like=values)
    check_apart("marks.bits", marks.bits, "values", values)
    tile = marks.bits.numel() * 32 // max(tiles, 1)
    fits = MIN_TILE <= tile <= MAX_TILE and tile & (tile - 1) == 0 and tile * tiles == marks.bits.numel() * 32
    if not fits or tiles != max(1, -(-values.numel() // tile)):
        raise ValueError(
            f"marks have {marks.bits.numel()} words in {tiles} tiles, which do not fit {values.numel()} elements: "
            f"create them with Marks.empty({values.numel()}, ...)"
        )
