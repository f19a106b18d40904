"""Entries with padding and the regions of the vector, in the static form. Nothing here waits for a GPU."""

from __future__ import annotations

import torch

from tritoncomm.primitives.packing import Rows
from tritoncomm.primitives.verdict import Verdict
from tritoncomm_kernels import Padded, Workspace
from tritoncomm_kernels.entries import PADDING

# Sums of 2^126 and more count as overflow if values are rounded, because what rounding cuts off must not overflow in
# the residual. This factor makes them infinite.
ROUNDED_MARGIN = 4.0


def ascending(indices: torch.Tensor, numel: int) -> torch.Tensor:
    """Return ``indices`` (int32 ``[m]``, padding at the end) with ``numel`` in place of padding, for a search."""
    return torch.where(indices < 0, numel, indices)


def among(kept: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """Return which of ``indices`` (int32, any shape) are in ``kept``, the result of :func:`ascending`. Bool."""
    if not kept.numel():
        return torch.zeros_like(indices, dtype=torch.bool)
    places = torch.searchsorted(kept, indices).clamp_(max=kept.numel() - 1)
    return kept[places] == indices


def region_starts(entries: Padded, bounds: torch.Tensor, numel: int) -> torch.Tensor:
    """Return where each region starts in one row of ``entries``, int32 ``[P + 1]``.

    ``bounds`` (int32 ``[P + 1]``) are the cuts. The result is that of
    :func:`~tritoncomm.primitives.region_cuts.offsets`.
    """
    return torch.searchsorted(ascending(entries.indices, numel), bounds, out_int32=True)


def only(entries: Padded, keep: torch.Tensor) -> Padded:
    """Return ``entries`` with padding in place of those that are not in ``keep``."""
    return Padded(torch.where(keep, entries.indices, PADDING), torch.where(keep, entries.values, 0.0))


def read_regions(
    rows: Rows, messages: torch.Tensor, high: int | torch.Tensor, verdict: Verdict, *, workspace: Workspace
) -> Padded:
    """Return the entries of received ``messages`` that are below ``high``, the end of their region.

    The others are reported as malformed. The format itself only ensures that they are inside the widest region.
    """
    lists, malformed = rows.decode(messages, workspace=workspace)
    outside = lists.indices >= high
    verdict.check_messages(malformed + outside.sum(dtype=torch.int32))
    return only(lists, ~outside)
