"""Expand a bit mask into ascending indices and values: the second half of selection on a GPU."""

from __future__ import annotations

import torch

from tritoncomm_kernels.checks import check_apart, check_vector
from tritoncomm_kernels.dispatch import kernel, triton_runs
from tritoncomm_kernels.mark import Marks, check_marks
from tritoncomm_kernels.workspace import Workspace


def expand(
    values: torch.Tensor,
    marks: Marks,
    indices: torch.Tensor,
    out: torch.Tensor,
    found: torch.Tensor,
    *,
    workspace: Workspace | None = None,
) -> None:
    """Write the marked elements of ``values`` (fp32 ``[n]``) to ``indices`` and ``out``, in ascending order.

    ``indices`` (int32) and ``out`` (fp32) are ``[capacity]``. Slots after the last entry keep their content.
    ``found`` (int64 ``[1]``) is set to the number of marked elements, which may exceed the capacity. Raises
    ``ValueError`` naming the invalid argument.
    """
    check_vector("values", values)
    check_marks(values, marks)
    check_vector("indices", indices, dtypes=(torch.int32,), like=values)
    check_vector("out", out, numel=indices.numel(), like=values)
    check_vector("found", found, dtypes=(torch.int64,), numel=1, like=values)
    check_apart("out", out, "values", values)
    check_apart("indices", indices, "values", values)
    check_apart("indices", indices, "out", out)
    if values.numel() == 0:
        found.zero_()
    elif triton_runs(values):
        held = workspace if workspace is not None else Workspace()
        offsets = held.buffer("expand offsets", marks.counts.numel(), torch.int32, values.device)
        kernel("expand_triton").expand(values, marks.bits, marks.counts, offsets, indices, out, found)
    else:
        _expand(values, marks, indices, out, found)


def _expand(values: torch.Tensor, marks: Marks, indices: torch.Tensor, out: torch.Tensor, found: torch.Tensor) -> None:
    """Reference of :func:`expand`, in torch operators."""
    lanes = torch.arange(32, dtype=torch.int32, device=values.device)
    marked = ((marks.bits[:, None] >> lanes) & 1).view(-1).nonzero().squeeze(1)
    found.fill_(marked.numel())
    written = marked[: indices.numel()]
    indices[: written.numel()] = written.to(torch.int32)
    out[: written.numel()] = values[written]
