"""Lists of entries with a fixed length: the operations of exchanges whose message lengths never depend on data.

A list has room for a fixed number of entries. Its entries come first, ascending by index. Padding follows, with the
index -1 and the value 0. The host therefore never needs to know how many entries there are. On a GPU no operation here
waits for the host, and the number of kernel launches does not depend on the number of rows.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from tritoncomm_kernels import devices
from tritoncomm_kernels.checks import INDEX_LIMIT, check_vector
from tritoncomm_kernels.compact import Selection, threshold_key
from tritoncomm_kernels.dispatch import kernel, triton_runs
from tritoncomm_kernels.mark import Marks, mark
from tritoncomm_kernels.scatter import MAX_LISTS, merge, scatter_add
from tritoncomm_kernels.threshold import (
    SHORT_SEGMENT,
    accumulate_top_k,
    magnitude_keys,
    top_k,
    top_k_into,
    top_k_places,
)
from tritoncomm_kernels.workspace import Workspace, copied_to

PADDING = -1


class Padded(NamedTuple):
    """Entries and padding: ``indices`` (int32) and ``values`` (fp32), ``[room]`` or ``[rows, room]``."""

    indices: torch.Tensor
    values: torch.Tensor

    @property
    def room(self) -> int:
        """Largest number of entries of a row."""
        return self.indices.shape[-1]

    @classmethod
    def of(cls, entries: Selection, room: int) -> Padded:
        """Return ``entries`` (at most ``room``) with padding, ``[room]``."""
        if entries.indices.device.type == "cpu":
            return cls.of_arrays(entries.indices.numpy(), entries.values.numpy(), room)
        indices = entries.indices.new_full((room,), PADDING)
        values = entries.values.new_zeros(room)
        indices[: entries.indices.numel()] = entries.indices
        values[: entries.values.numel()] = entries.values
        return cls(indices, values)

    @classmethod
    def of_arrays(cls, indices: npt.NDArray[np.int32], values: npt.NDArray[np.float32], room: int) -> Padded:
        """Return these entries (at most ``room``) on the CPU, with padding. Calls of numpy cost less than torch's."""
        padded = np.full(room, PADDING, np.int32), np.zeros(room, np.float32)
        padded[0][: indices.size], padded[1][: values.size] = indices, values
        return cls(torch.from_numpy(padded[0]), torch.from_numpy(padded[1]))

    def row(self, number: int) -> Padded:
        """Return one row, ``[room]``, as views."""
        return Padded(self.indices[number], self.values[number])

    def trimmed(self) -> Selection:
        """Return the entries of a single row without padding. On a GPU the host waits for their number."""
        if self.indices.device.type == "cpu":
            used = int(np.count_nonzero(self.indices.numpy() != PADDING))
        else:
            used = int(torch.count_nonzero(self.indices != PADDING))
        return Selection.of(self.indices[:used], self.values[:used])


def stacked(rows: Sequence[Padded]) -> Padded:
    """Return ``rows``, each ``[room]``, as one list of rows."""
    return Padded(torch.stack([row.indices for row in rows]), torch.stack([row.values for row in rows]))


def top_k_padded(
    residual: torch.Tensor, gradient: torch.Tensor | None, out: torch.Tensor, k: int, *, workspace: Workspace
) -> Padded:
    """Return the result of :func:`tritoncomm_kernels.accumulate_top_k` as ``[k]`` entries and padding.

    ``k`` is at least 1. If ``gradient`` is None, ``residual`` and ``out`` are the same tensor, and nothing is added.
    """
    if out.numel() and triton_runs(out):
        indices = out.new_full((k,), PADDING, dtype=torch.int32)
        values = out.new_zeros(k)
        taken = workspace.buffer("padded taken", 1, torch.int64, out.device)
        top_k_into(residual, gradient, out, indices, values, taken, workspace=workspace)
        return Padded(indices, values)
    selected = top_k(out, k) if gradient is None else accumulate_top_k(residual, gradient, out, k)
    return Padded.of(selected, k)


def top_k_rows(
    values: torch.Tensor,
    bounds: torch.Tensor,
    budgets: torch.Tensor,
    room: int,
    *,
    indices: torch.Tensor | None = None,
    workspace: Workspace,
) -> Padded:
    """Return the largest entries of each segment of ``values`` (fp32 ``[n]``), ``[rows, room]``.

    Row r holds the ``min(room, budgets[r])`` largest non-zeros of ``values[bounds[r] : bounds[r + 1]]``, by the rules
    of :func:`tritoncomm_kernels.top_k`. ``bounds`` (int32 ``[rows + 1]``) do not descend and lie in ``[0, n]``.
    ``budgets`` are int32 ``[rows]``. Both are on the device of ``values``. Indices are positions in ``values``, or the
    elements of ``indices`` (int32 ``[n]``) there.
    """
    rows = budgets.numel()
    check_vector("values", values)
    check_vector("bounds", bounds, dtypes=(torch.int32,), numel=rows + 1, like=values)
    check_vector("budgets", budgets, dtypes=(torch.int32,), like=values)
    if indices is not None:
        check_vector("indices", indices, dtypes=(torch.int32,), numel=values.numel(), like=values)
    if not rows or not room:
        return Padded(values.new_empty((rows, room), dtype=torch.int32), values.new_empty((rows, room)))
    if triton_runs(values):
        padded: Padded = _on_gpu(rows).top_k_rows(values, bounds, budgets, room, indices, workspace)
        return padded
    cuts, parts = bounds.tolist(), []
    widest = max(stop - start for start, stop in itertools.pairwise(cuts))
    if 0 < widest <= SHORT_SEGMENT and values.device.type == "cpu":
        return _top_k_rows_on_host(values, bounds, budgets, room, indices, widest)
    for row, budget in enumerate(budgets.tolist()):
        part = top_k(values[cuts[row] : cuts[row + 1]], min(room, max(0, budget)))
        places = part.indices + cuts[row]
        parts.append(Padded.of(Selection.of(places if indices is None else indices[places.long()], part.values), room))
    return stacked(parts)


def _top_k_rows_on_host(
    values: torch.Tensor,
    bounds: torch.Tensor,
    budgets: torch.Tensor,
    room: int,
    indices: torch.Tensor | None,
    widest: int,
) -> Padded:
    """Select from all rows at once in numpy, whose calls cost less than torch's."""
    limits = np.clip(budgets.numpy(), 0, room).astype(np.int64)
    places, take = top_k_places(values.numpy(), bounds.numpy().astype(np.int64), limits, widest)
    chosen, counts = places[take], take.sum(1)
    padded = np.full((len(limits), room), PADDING, np.int32), np.zeros((len(limits), room), np.float32)
    used = np.arange(room) < counts[:, None]
    padded[0][used] = chosen if indices is None else indices.numpy()[chosen]
    padded[1][used] = values.numpy()[chosen]
    return Padded(torch.from_numpy(padded[0]), torch.from_numpy(padded[1]))


def reaching(entries: Padded, threshold: torch.Tensor | float, *, workspace: Workspace) -> Padded:
    """Return the entries of one row whose magnitude is at least ``threshold``: a number, or fp32 ``[1]`` on the device.

    The result has the same room. A number may be anything: no zero reaches it, and every NaN does. On the device, the
    threshold must be positive and not NaN, which is not checked. A number takes fewer launches.
    """
    keys = magnitude_keys(entries.values)
    if isinstance(threshold, torch.Tensor):
        check_vector("threshold", threshold, numel=1, like=entries.values)
        keep = (keys >= magnitude_keys(threshold)) & (entries.indices != PADDING)
    else:
        keep = keys >= threshold_key(threshold)  # the value of padding is 0
    return joined(
        Padded(torch.where(keep, entries.indices, PADDING)[None], torch.where(keep, entries.values, 0.0)[None]),
        workspace=workspace,
    )


def joined(rows: Padded, *, workspace: Workspace) -> Padded:
    """Return the entries of all rows as one row, ``[rows * room]``, with all padding at the end.

    The indices of a row must be above those of the rows before it. Here padding may stand between entries.
    """
    indices, values = rows.indices.reshape(-1), rows.values.reshape(-1)
    if not indices.numel():
        return Padded(indices, values)
    if triton_runs(values):
        padded: Padded = _on_gpu().joined(indices, values, workspace)
        return padded
    if values.device.type == "cpu":
        used = indices.numpy() != PADDING
        return Padded.of_arrays(indices.numpy()[used], values.numpy()[used], indices.numel())
    keep = indices != PADDING
    return Padded.of(Selection.of(indices[keep], values[keep]), indices.numel())


def merge_rows(rows: Padded, numel: int, *, workspace: Workspace) -> Padded:
    """Return the union of all rows with the sums of their values, ``[min(rows * room, numel)]``.

    Terms are added in row order, as by :func:`tritoncomm_kernels.merge`. All indices are in ``[0, numel)``, as
    :func:`tritoncomm_kernels.section_rows.read_rows` guarantees.
    """
    count, room = rows.indices.shape
    if not 0 <= numel <= INDEX_LIMIT:
        raise ValueError(f"numel={numel}: must be from 0 to {INDEX_LIMIT}; split a longer vector")
    capacity = min(count * room, numel)
    if not capacity:
        return Padded(rows.indices.reshape(-1)[:0], rows.values.reshape(-1)[:0])
    if triton_runs(rows.values):
        padded: Padded = _on_gpu(count).merge_rows(rows, numel, capacity, workspace)
        return padded
    lists = [rows.row(number).trimmed()[:2] for number in range(count)]
    return Padded.of(Selection.of(*merge(lists, numel)), capacity)


def largest_padded(entries: Padded, k: int, *, workspace: Workspace) -> Padded:
    """Return the ``k`` entries of one row with the largest magnitudes, ``[k]``. Zeros are never among them."""
    bounds = torch.arange(2, dtype=torch.int32, device=entries.values.device) * entries.room
    budget = torch.full((1,), k, dtype=torch.int32, device=entries.values.device)
    return top_k_rows(entries.values, bounds, budget, k, indices=entries.indices, workspace=workspace).row(0)


def add_rows(out: torch.Tensor, rows: Padded, *, offset: int = 0, scale: float = 1.0, workspace: Workspace) -> None:
    """Add ``scale`` times the values of all rows to ``out`` (fp32 ``[n]``) at ``indices - offset``, in row order.

    Indices are unique inside a row and lie in the range of ``out``. Between rows they may repeat.
    """
    check_vector("out", out)
    if not out.numel() or not rows.indices.numel():
        return
    rows = Padded(rows.indices.reshape(-1, rows.room), rows.values.reshape(-1, rows.room))
    if triton_runs(out):
        _on_gpu(rows.indices.shape[0]).add_rows(out, rows, offset, float(scale), workspace)
        return
    if out.device.type == "cpu":
        sums, indices, terms = out.numpy(), rows.indices.numpy(), rows.values.numpy()
        with np.errstate(over="ignore", invalid="ignore"):  # the caller checks the sums
            for places, row in zip(indices, terms if scale == 1.0 else terms * np.float32(scale), strict=True):
                used = places != PADDING
                sums[places[used] - offset] += row[used]
        return
    for number in range(rows.indices.shape[0]):
        entries = rows.row(number).trimmed()
        scatter_add(out, entries.indices - offset, entries.values * scale if scale != 1.0 else entries.values)


def set_at(out: torch.Tensor, entries: Padded | torch.Tensor) -> None:
    """Set ``out`` (fp32 ``[n]``) to the values of ``entries`` at their indices, or to 0 if only indices are given."""
    check_vector("out", out)
    indices, values = (entries, None) if isinstance(entries, torch.Tensor) else entries
    indices = indices.reshape(-1)
    if not out.numel() or not indices.numel():
        return
    if triton_runs(out):
        _on_gpu().set_at(out, indices, None if values is None else values.reshape(-1))
        return
    if out.device.type == "cpu":
        used = indices.numpy() != PADDING
        out.numpy()[indices.numpy()[used]] = 0.0 if values is None else values.reshape(-1).numpy()[used]
        return
    keep = indices != PADDING
    out[indices[keep].long()] = 0.0 if values is None else values.reshape(-1)[keep]


def values_at(values: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """Return ``values`` (fp32 ``[n]``) at ``indices`` (int32), and 0 for padding. The shape is that of ``indices``."""
    check_vector("values", values)
    if not values.numel() or not indices.numel():
        return values.new_zeros(indices.shape)
    if triton_runs(values):
        picked: torch.Tensor = _on_gpu().values_at(values, indices)
        return picked
    if values.device.type == "cpu":
        places = indices.numpy()
        return torch.from_numpy(np.where(places != PADDING, values.numpy()[places], np.float32(0.0)))
    keep = indices != PADDING
    found = values.new_zeros(indices.shape)
    found[keep] = values[indices[keep].long()]
    return found


def count_reaching(values: torch.Tensor, threshold: torch.Tensor | float) -> torch.Tensor:
    """Return how many of ``values`` (fp32) are non-zero with magnitude at least ``threshold``: int32 ``[1]``.

    ``threshold`` is a number, or fp32 ``[1]`` on the device, where it must be positive and not NaN, which is not
    checked. NaN and Inf count. A number takes fewer launches.
    """
    keys = magnitude_keys(values)
    if isinstance(threshold, torch.Tensor):
        reached = (keys >= magnitude_keys(threshold)) & (keys > 0)
    else:
        reached = keys >= threshold_key(threshold)
    return reached.sum(dtype=torch.int32).reshape(1)


def count_inside(
    values: torch.Tensor, threshold: torch.Tensor, span: torch.Tensor, *, workspace: Workspace
) -> torch.Tensor:
    """Return the result of :func:`count_reaching` for ``values[span[0] : span[1]]``: int32 ``[1]``.

    ``values`` (fp32 ``[n]``) are contiguous. ``threshold`` (fp32 ``[1]``) and ``span`` (int32 ``[2]``) are on their
    device.
    """
    if values.device.type == "cpu" and not triton_runs(values):
        return count_reaching(values[slice(*span.tolist())], threshold)
    marks = Marks.empty(values.numel(), values.device, workspace)
    mark(values, None, values, threshold, marks, span=span)
    return marks.counts.sum(dtype=torch.int32).reshape(1)


def count_entries(entries: Padded) -> torch.Tensor:
    """Return the number of entries of each row, int32 ``[rows]``, or ``[1]`` for a single row."""
    return (entries.indices != PADDING).sum(-1, dtype=torch.int32).reshape(-1)


def decompress_padded(out: torch.Tensor, entries: Padded, *, workspace: Workspace) -> torch.Tensor:
    """Overwrite ``out`` (fp32 ``[n]``) with the dense form of one row, and return ``out``."""
    out.zero_()
    add_rows(out, entries, workspace=workspace)
    return out


def constant(content: Sequence[int], device: torch.device) -> torch.Tensor:
    """Return ``content`` as an int32 tensor on ``device``, which must not be written.

    It is copied there only once, unless thousands of others have been needed since.
    """
    # Work on another stream does not wait for the copy, so each stream has its own.
    key = (tuple(content), device, devices.current_stream(device))
    held = _constants.get(key)
    if held is None:
        while len(_constants) >= _MOST_CONSTANTS:
            _constants.pop(next(iter(_constants)))
        held = _constants[key] = copied_to(torch.tensor(content, dtype=torch.int32), device)
    return held


_MOST_CONSTANTS = 4096
_constants: dict[tuple[tuple[int, ...], torch.device, Any], torch.Tensor] = {}


def check_launch(rows: int) -> None:
    """Raise ``ValueError`` if a GPU cannot handle so many rows in one launch."""
    if rows > MAX_LISTS:
        raise ValueError(f"{rows} rows are too many for one launch: pass at most {MAX_LISTS}")


def _on_gpu(rows: int = 1) -> Any:
    check_launch(rows)
    return kernel("padded_triton")
