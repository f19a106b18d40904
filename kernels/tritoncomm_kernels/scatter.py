"""Scatter a sparse list into a dense vector, and merge several lists into one, with sums in rank order."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from tritoncomm_kernels.checks import INDEX_LIMIT, check_vector
from tritoncomm_kernels.compact import SparseList, positions
from tritoncomm_kernels.dispatch import kernel, triton_runs
from tritoncomm_kernels.workspace import Workspace

MAX_LISTS = 65535  # limit of the second dimension of a CUDA grid
Integers = npt.NDArray[np.int32]
# On a CPU, indices are searched in a list that is this many times longer. Otherwise the two lists are merged.
_MUCH_LONGER = 8


def scatter_add(out: torch.Tensor, indices: torch.Tensor, values: torch.Tensor) -> None:
    """Add ``values`` to ``out`` at ``indices`` (int32 or int64), in place.

    The indices must be unique, so the result does not depend on an order. Uses torch operators on every device.
    """
    if out.device.type == "cpu":
        out.index_add_(0, indices, values)
    else:  # on CUDA, index_add_ uses atomics, which flush denormals
        at = indices.long()
        out.index_copy_(0, at, out.index_select(0, at) + values)


def scatter_add_lists(out: torch.Tensor, indices: torch.Tensor, values: torch.Tensor, counts: Sequence[int]) -> None:
    """Apply :func:`scatter_add` to consecutive lists with ``counts`` entries each, in order.

    Indices are unique inside a list. Between lists they may repeat, and then the terms are added in list order.
    """
    if out.device.type == "cpu":  # np.add.at adds element by element, in order
        with np.errstate(over="ignore", invalid="ignore"):  # the caller checks the sums
            np.add.at(out.numpy(), indices.numpy(), values.numpy())
        return
    for part, amounts in zip(torch.split(indices, list(counts)), torch.split(values, list(counts)), strict=True):
        scatter_add(out, part, amounts)


def decompress(out: torch.Tensor, indices: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Overwrite ``out`` (fp32 ``[n]``) with the dense form of one sparse list, and return ``out``.

    ``indices`` (int32 or int64, ascending and unique) and ``values`` (fp32) are ``[k]``. The caller must make sure
    that all indices are inside ``[0, n)``. Uses torch operators on every device.
    """
    return out.zero_().index_copy_(0, indices.long(), values + 0.0)  # adding 0.0 turns -0.0 into 0.0, as in a sum


def merge(lists: Sequence[SparseList], numel: int, *, workspace: Workspace | None = None) -> SparseList:
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
        check_vector(f"lists[{rank}].indices", indices, dtypes=(torch.int32,), numel=values.numel(), like=values)
    if numel and triton_runs(lists[0][1]):
        return _merge_triton(list(lists), numel, workspace if workspace is not None else Workspace())
    if lists[0][1].device.type == "cpu":
        return _merge_host(lists, numel)
    joined, order = torch.sort(torch.cat([indices for indices, _ in lists]), stable=True)
    _check_inside(joined.numel() and (int(joined[0]) < 0 or int(joined[-1]) >= numel), numel)
    union, places = torch.unique_consecutive(joined, return_inverse=True)
    where = torch.empty_like(places)
    where[order] = places
    sums = torch.zeros(union.numel(), dtype=torch.float32, device=union.device)
    # Indices are unique inside a list, so adding one list at a time fixes the order of additions on every device.
    starts = torch.split(where, [indices.numel() for indices, _ in lists])
    for at, (_, values) in zip(starts, lists, strict=True):
        scatter_add(sums, at, values)
    return union, sums


def common_positions(sought: torch.Tensor, among: torch.Tensor) -> torch.Tensor:
    """Return the positions in ``sought`` of the elements that are also in ``among``. Both are ascending and unique."""
    if among.numel() == 0 or sought.numel() == 0:
        return torch.empty(0, dtype=torch.int64, device=sought.device)
    if sought.device.type == "cpu" and _MUCH_LONGER * sought.numel() > among.numel():
        # A stable sort of two ascending lists is one merge. Of two equal indices, the sought one comes first.
        ascending, order = _merged([sought, among])
        return torch.from_numpy(order[np.flatnonzero(ascending[1:] == ascending[:-1])])
    where = torch.searchsorted(among, sought).clamp_(max=among.numel() - 1)
    return positions(among[where] == sought)


def find(sought: torch.Tensor, among: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return which elements of ``sought`` are in ``among`` (bool ``[m]``), and where there (int64 ``[m]``).

    Both are ascending and unique. The position of an element that is not there means nothing, but is inside ``among``
    unless that is empty. Nothing waits for a GPU.
    """
    if among.numel() == 0:
        return torch.zeros_like(sought, dtype=torch.bool), torch.zeros_like(sought, dtype=torch.int64)
    if sought.device.type != "cpu":
        where = torch.searchsorted(among, sought).clamp_(max=among.numel() - 1)
        return among[where] == sought, where
    if torch.equal(sought, among):
        return torch.ones_like(sought, dtype=torch.bool), torch.arange(sought.numel())
    ascending, order = _merged([sought, among])
    pairs = np.flatnonzero(ascending[1:] == ascending[:-1])
    found, places = np.zeros(sought.numel(), dtype=np.bool_), np.zeros(sought.numel(), dtype=np.int64)
    found[order[pairs]] = True
    places[order[pairs]] = order[pairs + 1] - sought.numel()
    return torch.from_numpy(found), torch.from_numpy(places)


def _merged(lists: Sequence[torch.Tensor]) -> tuple[Integers, npt.NDArray[np.intp]]:
    """Return the elements of ascending ``lists`` in ascending order, and the position of each in their concatenation.

    Equal elements stay in the order of the lists. numpy's stable sort finds ascending runs and merges them.
    """
    joined = np.concatenate([part.numpy() for part in lists])
    order = np.argsort(joined, kind="stable")
    return joined.take(order), order


def _merge_host(lists: Sequence[SparseList], numel: int) -> SparseList:
    """Merge without a search. Only coordinates of several lists are added, in the order of the lists."""
    ascending, order = _merged([indices for indices, _ in lists])
    _check_inside(ascending.size and (int(ascending[0]) < 0 or int(ascending[-1]) >= numel), numel)
    values = np.concatenate([part.numpy() for _, part in lists]).take(order)
    is_first = np.ones(ascending.size, dtype=np.bool_)
    np.not_equal(ascending[1:], ascending[:-1], out=is_first[1:])
    first, again = np.flatnonzero(is_first), np.flatnonzero(~is_first)
    with np.errstate(over="ignore", invalid="ignore"):  # the caller checks the sums
        sums = values.take(first) + np.float32(0.0)  # a sum starts at 0.0, which turns -0.0 into 0.0
        np.add.at(sums, again - np.arange(1, again.size + 1), values.take(again))
    return torch.from_numpy(ascending.take(first)), torch.from_numpy(sums)


def _merge_triton(lists: list[SparseList], numel: int, workspace: Workspace) -> SparseList:
    """Merge through a bit mask of the union. The only host synchronization is there to allocate the union."""
    tritons, device = kernel("scatter_triton"), lists[0][1].device

    def integers(name: str, size: int) -> torch.Tensor:
        return workspace.buffer(f"merge {name}", size, torch.int32, device)

    words = -(-numel // 32)
    groups = -(-words // tritons.WORDS)
    bits, ranks = integers("bits", words), integers("ranks", words)
    counts, offsets = integers("counts", groups + 1), integers("offsets", groups)
    counts[groups:].zero_()  # the last element counts invalid indices, so one synchronization reads all counts
    tritons.mark_union(lists, bits, counts[:groups], offsets, counts[groups:], numel)
    *_, invalid = per_group = counts.tolist()
    _check_inside(invalid, numel)
    size = sum(per_group) - invalid
    union = torch.empty(size, dtype=torch.int32, device=device)
    sums = torch.zeros(size, dtype=torch.float32, device=device)
    tritons.add_union(lists, bits, offsets, ranks, union, sums, numel)
    return union, sums


def _check_inside(outside: int | bool, numel: int) -> None:
    if outside:
        raise ValueError(f"lists contain an index outside [0, {numel}): a peer sent a malformed list")
