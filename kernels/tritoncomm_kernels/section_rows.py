"""Write and read many sections at once: rows of messages with one layout, whose number of entries is on the device.

See :mod:`tritoncomm_kernels.sections` for the format of a section. On a GPU, only :func:`write_one` and
:func:`read_one` wait for the host, and the number of kernel launches does not depend on the number of rows.
"""

from __future__ import annotations

from typing import Any

import torch

from tritoncomm_kernels.compact import Selection
from tritoncomm_kernels.dispatch import kernel, triton_runs
from tritoncomm_kernels.padded import PADDING, Padded, check_launch, stacked
from tritoncomm_kernels.section_layout import VALUE_BITS, Layout
from tritoncomm_kernels.sections import read_section, write_sendable
from tritoncomm_kernels.workspace import Workspace

_EXACT = 0, VALUE_BITS["fp32"]  # bits of values that are not rounded


def write_one(
    layout: Layout, low: int, indices: torch.Tensor, values: torch.Tensor, *, divisor: int = 1
) -> tuple[torch.Tensor, Selection]:
    """Return one section (int32 ``[layout.words]``) of ``indices`` (int32 ``[m]``) and ``values`` (fp32 ``[m]``).

    Also returns the entries as they are read, see :func:`write_rows`. On a GPU, the host waits once for their number,
    if values are rounded.
    """
    if indices.is_cpu and not triton_runs(indices):
        return write_sendable(layout, low, indices, values, divisor=divisor)
    sent_values = values if layout.bits else torch.zeros(indices.shape, device=indices.device)
    entries = Padded(indices[None], sent_values[None])
    messages, sent = write_rows(layout, indices.new_full((1,), low), entries, divisor=divisor, workspace=Workspace())
    return messages[0], sent.row(0).trimmed() if layout.bits not in _EXACT else Selection.of(indices, values)


def read_one(layout: Layout, low: int, section: torch.Tensor, *, divisor: int = 1) -> Selection:
    """Return the entries of ``section`` (int32 ``[layout.words]``), or raise ``ValueError`` if it is malformed.

    See :func:`tritoncomm_kernels.sections.read_section`. On a GPU, the host waits once, for the checks and the number
    of entries.
    """
    if section.is_cpu and not triton_runs(section):
        return read_section(layout, low, section, divisor=divisor)
    lows = section.new_full((1,), low)
    found, malformed = read_rows(layout, lows, section[None], divisor=divisor, workspace=Workspace())
    count, wrong = torch.stack([(found.indices[0] != PADDING).sum(), malformed[0]]).tolist()
    if wrong:
        raise ValueError("its counts differ, its indices do not ascend inside the range, or its header is invalid")
    return Selection.of(found.indices[0, :count], found.values[0, : count if layout.bits else 0])


def write_rows(
    layout: Layout, lows: torch.Tensor, entries: Padded, *, divisor: int = 1, workspace: Workspace
) -> tuple[torch.Tensor, Padded]:
    """Return one section per row of ``entries`` (int32 ``[rows, layout.words]``), and the entries as they are read.

    Indices of row r start at ``lows[r]`` (int32 ``[rows]``, on the device). Entries that are too small beside the
    largest one of their row are left out (:func:`tritoncomm_kernels.sections.sendable_together`). The values of the
    returned entries are those that :func:`read_rows` returns, times ``divisor``. Values of 0 bits are returned as they
    are.
    """
    messages = entries.indices.new_empty((len(lows), layout.words))
    if not layout.room or not entries.values.numel():
        return messages.zero_(), entries
    if triton_runs(entries.values):
        sent_rows: Padded = _on_gpu(len(lows)).write_rows(layout, lows, entries, messages, divisor, workspace)
        return messages, sent_rows
    sent = []
    for row, low in enumerate(lows.tolist()):
        part = entries.row(row).trimmed()
        words, found = write_sendable(layout, low, part.indices.cpu(), part.values.cpu(), divisor=divisor)
        messages[row] = words
        on_device = Selection.of(found.indices.to(messages.device), found.values.to(messages.device))
        sent.append(Padded.of(on_device, entries.room))
    return messages, stacked(sent)


def read_rows(
    layout: Layout, lows: torch.Tensor, messages: torch.Tensor, *, divisor: int = 1, workspace: Workspace
) -> tuple[Padded, torch.Tensor]:
    """Return the entries of ``messages`` (int32 ``[rows, layout.words]``), and how many are malformed (int32 ``[1]``).

    A malformed row (see :func:`tritoncomm_kernels.sections.read_section`) has no entries. Indices are therefore always
    ascending and inside their range.
    """
    shape = len(lows), layout.room
    if not layout.room or not len(lows):
        return Padded(messages.new_empty(shape), messages.new_empty(shape, dtype=torch.float32)), messages.new_zeros(1)
    if triton_runs(messages):
        found_rows: tuple[Padded, torch.Tensor] = _on_gpu(len(lows)).read_rows(
            layout, lows, messages, divisor, workspace
        )
        return found_rows
    rows, malformed = [], 0
    nothing = Selection.of(messages.new_empty(0), messages.new_empty(0, dtype=torch.float32))
    for row, low in enumerate(lows.tolist()):
        try:
            found = read_section(layout, low, messages[row], divisor=divisor)
        except ValueError:
            found, malformed = nothing, malformed + 1
        rows.append(Padded.of(found, layout.room))
    return stacked(rows), messages.new_full((1,), malformed)


def check_rows(rows: Padded, lows: torch.Tensor, span: int) -> tuple[Padded, torch.Tensor]:
    """Return ``rows`` (plain, as received) without malformed ones, and how many are malformed (int32 ``[1]``).

    A row is malformed unless its indices ascend inside ``[lows[r], lows[r] + span)`` and its padding stands at the end.
    """
    indices, used = rows.indices, rows.indices != PADDING
    low = lows[:, None]
    bad = used & ((indices < low) | (indices - low >= span))  # low + span may overflow
    bad[:, 1:] |= used[:, 1:] & ((indices[:, 1:] <= indices[:, :-1]) | ~used[:, :-1])
    wrong = bad.any(1)
    keep = used & ~wrong[:, None]
    clean = Padded(torch.where(keep, indices, PADDING), torch.where(keep, rows.values, 0.0))
    return clean, wrong.sum(dtype=torch.int32).reshape(1)


def _on_gpu(rows: int) -> Any:
    check_launch(rows)
    return kernel("section_rows_triton")
