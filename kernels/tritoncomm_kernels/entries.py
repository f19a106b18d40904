"""Operations on lists of entries (:mod:`tritoncomm_kernels.lists`): compaction, unions, sums, and single entries.

Sums of several lists are in their order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tritoncomm_kernels import devices
from tritoncomm_kernels.checks import INDEX_LIMIT, check_vector
from tritoncomm_kernels.dispatch import kernel, triton_runs
from tritoncomm_kernels.lists import PADDING, Entries
from tritoncomm_kernels.memory import copied_to
from tritoncomm_kernels.select import SparseList, magnitude_keys, positions, threshold_key

Integers = npt.NDArray[np.int32]
# On a CPU, indices are searched in a list that is this many times longer. Otherwise the two lists are merged.
_MUCH_LONGER = 8


def reaching(entries: Entries, threshold: float) -> Entries:
    """Return the entries of one row whose magnitude is at least ``threshold``, any number.

    The result has the same room. No zero reaches the threshold, and every NaN does.
    """
    passed = magnitude_keys(entries.values) >= threshold_key(threshold)  # the value of padding is 0
    return joined(entries.only(passed))


def joined(rows: Entries) -> Entries:
    """Return the entries of all rows as one row, ``[rows * room]``, with all padding at the end.

    The indices of a row must be above those of the rows before it. Here padding may stand between entries.
    """
    indices, values = rows.indices.reshape(-1), rows.values.reshape(-1)
    if not indices.numel():
        return Entries(indices, values)
    if triton_runs(values):
        padded: Entries = kernel("entries_triton").joined(Entries(indices[None], values[None]))
        return padded.row(0)
    used = indices.numpy() != PADDING
    return Entries.of_arrays(indices.numpy()[used], values.numpy()[used], indices.numel())


def merge_rows(rows: Entries, numel: int) -> Entries:
    """Return the union of all rows with the sums of their values, ``[min(rows * room, numel)]``.

    Terms are added in row order, as by :func:`tritoncomm_kernels.merge`. All indices are in ``[0, numel)``, as
    :func:`tritoncomm_kernels.sections.read_rows` guarantees.
    """
    count, room = rows.indices.shape
    if not 0 <= numel <= INDEX_LIMIT:
        raise ValueError(f"numel={numel}: must be from 0 to {INDEX_LIMIT}; split a longer vector")
    capacity = min(count * room, numel)
    if not capacity:
        return Entries(rows.indices.reshape(-1)[:0], rows.values.reshape(-1)[:0])
    if triton_runs(rows.values):
        padded: Entries = kernel("entries_triton").merge_rows(rows, numel, capacity)
        return padded
    lists = [rows.row(number).trimmed() for number in range(count)]
    return merge(lists, numel).padded(capacity)


def add_rows(out: torch.Tensor, rows: Entries, *, offset: int = 0, scale: float = 1.0) -> None:
    """Add ``scale`` times the values of all rows to ``out`` (fp32 ``[n]``) at ``indices - offset``, in row order.

    Indices are unique inside a row and lie in the range of ``out``. Between rows they may repeat.
    """
    check_vector("out", out)
    if not out.numel() or not rows.indices.numel():
        return
    rows = Entries(rows.indices.reshape(-1, rows.room), rows.values.reshape(-1, rows.room))
    if triton_runs(out):
        kernel("entries_triton").add_rows(out, rows, offset, float(scale))
        return
    sums, indices, terms = out.numpy(), rows.indices.numpy(), rows.values.numpy()
    with np.errstate(over="ignore", invalid="ignore"):  # the caller checks the sums
        for places, row in zip(indices, terms if scale == 1.0 else terms * np.float32(scale), strict=True):
            used = places != PADDING
            sums[places[used] - offset] += row[used]


def set_at(out: torch.Tensor, entries: Entries | torch.Tensor) -> None:
    """Set ``out`` (fp32 ``[n]``) to the values of ``entries`` at their indices, or to 0 if only indices are given."""
    check_vector("out", out)
    indices, values = (entries, None) if isinstance(entries, torch.Tensor) else entries
    indices = indices.reshape(-1)
    if not out.numel() or not indices.numel():
        return
    if triton_runs(out):
        kernel("entries_triton").set_at(out, indices, None if values is None else values.reshape(-1))
        return
    places = indices.numpy()
    used = places != PADDING if places.min() < 0 else slice(None)  # without padding, nothing is copied
    out.numpy()[places[used]] = 0.0 if values is None else values.reshape(-1).numpy()[used]


def values_at(values: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """Return ``values`` (fp32 ``[n]``) at ``indices`` (int32), and 0 for padding. The shape is that of ``indices``."""
    check_vector("values", values)
    if not values.numel() or not indices.numel():
        return values.new_zeros(indices.shape)
    if triton_runs(values):
        picked: torch.Tensor = kernel("entries_triton").values_at(values, indices)
        return picked
    places = indices.numpy()
    return torch.from_numpy(np.where(places != PADDING, values.numpy()[places], np.float32(0.0)))


def count_reaching(values: torch.Tensor, threshold: float) -> torch.Tensor:
    """Return how many of ``values`` (fp32) are non-zero with magnitude at least ``threshold``: int32 ``[1]``.

    NaN and Inf count.
    """
    return (magnitude_keys(values) >= threshold_key(threshold)).sum(dtype=torch.int32).reshape(1)


def count_inside(values: torch.Tensor, threshold: float, span: torch.Tensor) -> torch.Tensor:
    """Return the result of :func:`count_reaching` for ``values[span[0] : span[1]]``: int32 ``[1]``.

    ``values`` (fp32 ``[n]``) are contiguous. ``span`` (int32 ``[2]``) is on their device.
    """
    check_vector("values", values)
    check_vector("span", span, dtypes=(torch.int32,), numel=2, like=values)
    if values.numel() and triton_runs(values):
        found: torch.Tensor = kernel("select_triton").count_inside(values, threshold_key(threshold), span)
        return found
    return count_reaching(values[slice(*span.tolist())], threshold)


def count_entries(entries: Entries) -> torch.Tensor:
    """Return the number of entries of each row, int32 ``[rows]``, or ``[1]`` for a single row."""
    return (entries.indices != PADDING).sum(-1, dtype=torch.int32).reshape(-1)


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
        held = _constants[key] = copied_to(torch.tensor(content, dtype=torch.int32, device="cpu"), device)
    return held


_MOST_CONSTANTS = 4096
_constants: dict[tuple[tuple[int, ...], torch.device, Any], torch.Tensor] = {}


def scatter_add(out: torch.Tensor, indices: torch.Tensor, values: torch.Tensor) -> None:
    """Add ``values`` to ``out`` at ``indices`` (int32 or int64), in place.

    The indices must be unique, so the result does not depend on an order. Uses torch operators on every device.
    """
    if out.device.type == "cpu":
        out.index_add_(0, indices, values)
    else:  # on CUDA, index_add_ uses atomics, which flush denormals
        at = indices.long()
        out.index_copy_(0, at, out.index_select(0, at) + values)


def merge(lists: Sequence[SparseList], numel: int) -> Entries:
    """Merge sparse lists of one vector of ``numel`` elements.

    ``lists`` has at least one list, each with ascending and unique indices. Returns the ascending union of the
    indices (int32) and the sums (fp32). The terms of a coordinate are added in the order of ``lists``, so all ranks
    with the same lists compute the same bits. Raises ``ValueError`` for an index outside ``[0, numel)``.
    """
    if not lists:
        raise ValueError("lists is empty: pass at least one sparse list, which may have no entries")
    if not 0 <= numel <= INDEX_LIMIT:
        raise ValueError(f"numel={numel} is not in [0, {INDEX_LIMIT}]: split the vector")
    for rank, (indices, values) in enumerate(lists):
        check_vector(f"lists[{rank}].values", values, like=lists[0][1])
        check_vector(f"lists[{rank}].indices", indices, dtypes=(torch.int32,), numel=values.shape[0], like=values)
    if not numel:
        _check_inside(any(indices.numel() for indices, _ in lists), numel)
        return Entries(*lists[0])
    if triton_runs(lists[0][1]):
        return _merge_triton(lists, numel)
    return _merge_host(lists, numel)


def common_positions(sought: torch.Tensor, among: torch.Tensor) -> torch.Tensor:
    """Return the positions in ``sought`` of the elements that are also in ``among``. Both are ascending and unique."""
    length, others = sought.shape[0], among.shape[0]
    if sought.device.type != "cpu" or _MUCH_LONGER * length <= others:
        if not others:
            return torch.zeros(0, dtype=torch.int64, device=sought.device)
        where = torch.searchsorted(among, sought).clamp_(max=others - 1)
        return positions(among[where] == sought)
    if torch.equal(sought, among):
        return torch.arange(length, device="cpu")
    # A stable sort of two ascending lists is one merge. Of two equal indices, the sought one comes first.
    ascending, order = _merged([sought, among])
    return torch.from_numpy(order[:-1][ascending[1:] == ascending[:-1]])


def _merged(lists: Sequence[torch.Tensor]) -> tuple[Integers, npt.NDArray[np.intp]]:
    """Return the elements of ascending ``lists`` in ascending order, and the position of each in their concatenation.

    Equal elements stay in the order of the lists. numpy's stable sort finds ascending runs and merges them.
    """
    joined = np.concatenate([part.numpy() for part in lists])
    order = joined.argsort(kind="stable")
    return joined.take(order), order


def _merge_host(lists: Sequence[SparseList], numel: int) -> Entries:
    """Merge without a search. Only coordinates of several lists are added, in the order of the lists."""
    ascending, order = _merged([indices for indices, _ in lists])
    _check_inside(ascending.size and (int(ascending[0]) < 0 or int(ascending[-1]) >= numel), numel)
    values = np.concatenate([part.numpy() for _, part in lists]).take(order)
    is_first = np.ones(ascending.size, dtype=np.bool_)
    np.not_equal(ascending[1:], ascending[:-1], out=is_first[1:])
    first, again = is_first.nonzero()[0], (~is_first).nonzero()[0]
    with np.errstate(over="ignore", invalid="ignore"):  # the caller checks the sums
        sums = values.take(first) + np.float32(0.0)  # a sum starts at 0.0, which turns -0.0 into 0.0
        np.add.at(sums, again - np.arange(1, again.size + 1), values.take(again))
    return Entries(torch.from_numpy(ascending.take(first)), torch.from_numpy(sums))


def _merge_triton(lists: Sequence[SparseList], numel: int) -> Entries:
    """Merge as rows with padding. The only host synchronization reads how many entries the union has."""
    room = max(indices.numel() for indices, _ in lists)
    missing = [room - indices.numel() for indices, _ in lists]
    pad = torch.nn.functional.pad
    rows = Entries.stacked(
        [Entries(pad(at, (0, n), value=PADDING), pad(x, (0, n))) for (at, x), n in zip(lists, missing, strict=True)]
    )
    union = merge_rows(rows, numel)
    indices = torch.cat([indices for indices, _ in lists])
    outside = ((indices < 0) | (indices >= numel)).any()
    used, wrong = torch.stack([(union.indices != PADDING).sum(), outside]).tolist()
    _check_inside(wrong, numel)
    return union.slice(0, used)


def _check_inside(outside: int | bool, numel: int) -> None:
    if outside:
        raise ValueError(f"lists contain an index outside [0, {numel}): a peer sent a malformed list")
