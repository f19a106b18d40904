"""From a bit mask to ascending indices and values: the second half of selecting on a GPU."""

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
    clear: bool = False,
    clear_also: torch.Tensor | None = None,
    workspace: Workspace | None = None,
) -> None:
    """Write the marked elements of ``values`` (fp32 ``[n]``), ascending, to ``indices`` and ``out``.

    ``indices`` (int32) and ``out`` (fp32) are ``[capacity]``; slots beyond the last entry keep what they
    held. ``found`` (int64 ``[1]``) becomes the number of marked elements, also of those that did not
    fit. With ``clear`` the written elements, and no others, become 0 in ``values``, and with
    ``clear_also`` (fp32 ``[n]``) there as well. Raises ``ValueError`` naming the argument that does not fit.
    """
    check_vector("values", values)
    check_marks(values, marks)
    check_vector("indices", indices, dtypes=(torch.int32,), like=values)
    check_vector("out", out, numel=indices.numel(), like=values)
    check_vector("found", found, dtypes=(torch.int64,), numel=1, like=values)
    check_apart("out", out, "values", values)
    check_apart("indices", indices, "values", values)
    check_apart("indices", indices, "out", out)
    if clear_also is not None:
        check_vector("clear_also", clear_also, numel=values.numel(), like=values)
        check_apart("clear_also", clear_also, "values", values)
    if values.numel() == 0:
        found.zero_()
    elif triton_runs(values):
        held = workspace if workspace is not None else Workspace()
        offsets = held.buffer("expand offsets", marks.counts.numel(), torch.int32, values.device)
        kernel("expand_triton").expand(
            values, marks.bits, marks.counts, offsets, indices, out, found, clear=clear, clear_also=clear_also
        )
    else:
        _expand(values, marks, indices, out, found, clear=clear, clear_also=clear_also)


def _expand(
    values: torch.Tensor,
    marks: Marks,
    indices: torch.Tensor,
    out: torch.Tensor,
    found: torch.Tensor,
    *,
    clear: bool,
    clear_also: torch.Tensor | None,
) -> None:
    """The reference, in torch operators."""
    lanes = torch.arange(32, dtype=torch.int32, device=values.device)
    marked = ((marks.bits[:, None] >> lanes) & 1).view(-1).nonzero().squeeze(1)
    found.fill_(marked.numel())
    written = marked[: indices.numel()]
    indices[: written.numel()] = written.to(torch.int32)
    out[: written.numel()] = values[written]
    for cleared in (values if clear else None, clear_also):
        if cleared is not None:
            cleared[written] = 0.0
