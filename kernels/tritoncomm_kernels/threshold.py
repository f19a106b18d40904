"""Exact order statistics of magnitudes: the k-th largest, and the k largest.

Magnitudes are compared as integer keys, ``bits(x) & 0x7FFFFFFF``. The keys define a total order that is exact for
denormals, ranks NaN above infinity, and is the same on every device.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import numpy.typing as npt
import torch

from tritoncomm_kernels.accumulate import accumulate, check_addends
from tritoncomm_kernels.checks import check_apart, check_vector
from tritoncomm_kernels.compact import Selection, SparseList, accumulate_and_select_keys, positions, select_keys
from tritoncomm_kernels.dispatch import kernel, triton_runs
from tritoncomm_kernels.expand import expand
from tritoncomm_kernels.mark import MAGNITUDE_MASK, Marks, mark
from tritoncomm_kernels.scatter import scatter_add
from tritoncomm_kernels.workspace import Workspace

# A sample of one 128-byte line in 257 estimates the k-th magnitude. It is accurate enough that little more than k
# candidates pass the filter. Below SAMPLE_FROM elements, sampling costs more than it saves.
SAMPLE_LINE = 32
# An odd number of lines is no multiple of an even matrix width in lines. The sample then covers different columns.
SAMPLE_STRIDE = 257 * SAMPLE_LINE
SAMPLE_FROM = 1 << 17
# Segments up to this length are selected together, because separate calls would cost more than the work itself.
SHORT_SEGMENT = 1 << 14
Integers = npt.NDArray[np.int64]
# On a GPU the next call may start from the k-th magnitude of this call, times this factor. For normally distributed
# values at density 1 %, 1.4 k candidates then pass.
WARM_SLACK = 0.95


def magnitude_keys(values: torch.Tensor) -> torch.Tensor:
    """Return integer keys (int32, same shape) that order ``values`` (fp32) by magnitude, with NaN largest."""
    return values.view(torch.int32) & MAGNITUDE_MASK


def top_k(
    values: torch.Tensor, k: int, *, divisor: torch.Tensor | None = None, workspace: Workspace | None = None
) -> Selection:
    """Return the ``k`` entries of ``values`` (fp32 ``[n]``) with the largest magnitude, ascending by index.

    The result has exactly ``min(k, number of non-zeros)`` entries. Zeros are never selected. Ties go to the lower
    index, so all ranks break them in the same way. ``divisor`` is that of :func:`tritoncomm_kernels.select`.
    ``workspace`` keeps GPU scratch memory between calls. Raises ``ValueError`` for a negative ``k``, or a wrong dtype
    or shape.
    """
    _check_k(k)
    check_vector("values", values)
    if divisor is not None:
        sample = _divided(_sample_lines(values), divisor)
        return _exact(partial(select_keys, values, divisor=divisor), sample, k, values.numel())
    if values.numel() and triton_runs(values):
        return _read_back(values, None, values, k, workspace)
    return _exact(partial(select_keys, values), _sample_lines(values), k, values.numel())


def top_k_segments(
    values: torch.Tensor, bounds: Sequence[int], budgets: Sequence[int], *, workspace: Workspace | None = None
) -> Selection:
    """Select up to ``budgets[i]`` entries from each segment ``values[bounds[i] : bounds[i + 1]]``, as one list.

    Each segment is selected as by :func:`top_k`. Indices count from the start of ``values`` (fp32 ``[n]``). On a CPU,
    short segments are selected together.
    """
    _check_segments(bounds, budgets)
    check_vector("values", values)
    if _are_short(bounds) and values.device.type == "cpu" and not triton_runs(values):
        widest = max(stop - start for start, stop in itertools.pairwise(bounds))
        places, take = top_k_places(values.numpy(), np.asarray(bounds), np.asarray(budgets), widest)
        chosen = places[take]
        return Selection.of(torch.from_numpy(chosen.astype(np.int32)), torch.from_numpy(values.numpy()[chosen]))
    parts = []
    for start, stop, k in zip(bounds, bounds[1:], budgets, strict=False):
        part = top_k(values[start:stop], k, workspace=workspace)
        parts.append(part._replace(indices=part.indices + start))
    return Selection.join(parts) if parts else Selection.of(values.new_empty(0, dtype=torch.int32), values[:0])


def accumulate_top_k_segments(
    residual: torch.Tensor,
    gradient: torch.Tensor | None,
    out: torch.Tensor,
    bounds: Sequence[int],
    budgets: Sequence[int],
    terms: Sequence[SparseList] = (),
    *,
    workspace: Workspace | None = None,
) -> Selection:
    """Compute ``out = residual + gradient``. Select from each segment of ``out`` plus ``terms``, as one list.

    ``terms`` are sparse lists, each with ascending and unique indices inside the vector, which are added list by list.
    ``out`` does not contain them afterwards. The other arguments are those of :func:`accumulate_top_k` and
    :func:`top_k_segments`, and the segments cover the whole vector. If ``gradient`` is None, ``residual`` and ``out``
    must be the same tensor, and nothing is added. On a CPU, this is one pass over long segments.
    """
    _check_segments(bounds, budgets)
    check_addends(residual, gradient, out)
    if not bounds or bounds[0] != 0 or bounds[-1] != out.numel():
        raise ValueError(f"bounds={bounds!r} must be those of segments that cover all {out.numel()} elements")
    widest = max((stop - start for start, stop in itertools.pairwise(bounds)), default=0)
    if widest >= SAMPLE_FROM and out.device.type == "cpu" and not triton_runs(out):  # else calls cost more than passes
        parts = []
        for start, stop, k in zip(bounds, bounds[1:], budgets, strict=False):
            own = slice(start, stop)
            addends = None if gradient is None else (residual[own], gradient[own])
            part = _exact_sum(addends, out[own], k, terms=_inside(terms, start, stop))
            parts.append(part._replace(indices=part.indices + start))
        return Selection.join(parts)
    if gradient is not None:
        accumulate(residual, gradient, out)
    before = [out.index_select(0, indices) for indices, _ in terms]
    for indices, values in terms:
        scatter_add(out, indices, values)
    selected = top_k_segments(out, bounds, budgets, workspace=workspace)
    for (indices, _), values in zip(terms, before, strict=True):
        out.index_copy_(0, indices.long(), values)
    return selected


def top_k_places(
    values: npt.NDArray[np.float32], bounds: Integers, budgets: Integers, width: int
) -> tuple[Integers, npt.NDArray[np.bool_]]:
    """Select from all segments at once, as rows of a matrix padded with zeros. Zeros are never selected.

    Returns positions in ``values``, and which are selected, both ``[rows, width]``. ``width`` is that of the longest
    segment.
    """
    starts, stops = bounds[:-1, None], bounds[1:, None]
    budgets = np.minimum(budgets, stops[:, 0] - starts[:, 0])
    places = starts + np.arange(width)
    keys = np.where(places < stops, values[np.minimum(places, len(values) - 1)].view(np.int32) & MAGNITUDE_MASK, 0)
    # The key of the last selected entry of each row. For a budget of 0 it is above every key.
    ranks = np.unique(width - budgets[budgets > 0])
    ordered = np.partition(keys, ranks, axis=1) if len(ranks) else keys
    rows = np.arange(len(keys))
    kth = np.where(budgets > 0, ordered[rows, np.minimum(width - budgets, width - 1)], np.iinfo(np.int32).max)[:, None]
    take = keys > kth
    equal = (keys == kth) & (kth > 0) & (budgets > 0)[:, None]
    take |= equal & (np.cumsum(equal, axis=1) <= budgets[:, None] - take.sum(1, keepdims=True))
    return places, take


def accumulate_top_k(
    residual: torch.Tensor,
    gradient: torch.Tensor,
    out: torch.Tensor,
    k: int,
    *,
    divisor: torch.Tensor | None = None,
    workspace: Workspace | None = None,
) -> Selection:
    """Compute ``out = residual + gradient`` and return its ``k`` largest magnitudes, in one pass over n.

    The arguments are those of :func:`tritoncomm_kernels.accumulate_and_select`. The result is that of :func:`top_k`.
    ``residual`` is only read, unless it is the same tensor as ``out``.
    """
    _check_k(k)
    check_addends(residual, gradient, out)
    if divisor is None and out.numel() and triton_runs(out):
        return _read_back(residual, gradient, out, k, workspace)
    return _exact_sum((residual, gradient), out, k, divisor=divisor)


def top_k_into(
    residual: torch.Tensor,
    gradient: torch.Tensor | None,
    out: torch.Tensor,
    indices: torch.Tensor,
    values: torch.Tensor,
    taken: torch.Tensor,
    *,
    workspace: Workspace,
) -> None:
    """Write the result of :func:`accumulate_top_k` to preallocated tensors. On a GPU there is no host synchronization.

    ``indices`` (int32) and ``values`` (fp32) are ``[k]``, with ``k`` at least 1. ``taken`` (int64 ``[1]``) is set to
    the number of entries written. The other slots keep their content. If ``gradient`` is None, ``residual`` and
    ``out`` must be the same tensor, and nothing is added. The search starts from a threshold, slightly below the k-th
    magnitude of the last call with this ``workspace``. In the first call, a sample gives it. The result does not depend
    on it.
    """
    check_vector("indices", indices, dtypes=(torch.int32,), like=out)
    check_vector("values", values, numel=indices.numel(), like=out)
    check_vector("taken", taken, dtypes=(torch.int64,), numel=1, like=out)
    check_apart("values", values, "out", out)
    check_apart("indices", indices, "out", out)
    check_apart("indices", indices, "values", values)
    check_addends(residual, gradient, out)
    if indices.numel() == 0:
        raise ValueError("indices has no elements: k must be at least 1")
    if out.numel() and triton_runs(out):
        _launch(residual, gradient, out, indices, values, taken, workspace)
        return
    k = indices.numel()
    selected = top_k(out, k) if gradient is None else accumulate_top_k(residual, gradient, out, k)
    taken.fill_(selected.found)
    indices[: selected.found] = selected.indices
    values[: selected.found] = selected.values


def kth_magnitude(values: torch.Tensor, k: int) -> float:
    """Return the ``k``-th largest magnitude of ``values`` (fp32 ``[n]``), or 0.0 with fewer than ``k`` non-zeros."""
    selected = top_k(values, k)
    if k == 0 or len(selected.values) < k:
        return 0.0
    return smallest_magnitude(selected.values)


def smallest_magnitude(values: torch.Tensor) -> float:
    """Return the smallest magnitude of ``values`` by key order, or 0.0 for an empty tensor."""
    if values.numel() == 0:
        return 0.0
    return float(magnitude_keys(values).min().view(torch.float32))


def _exact_sum(
    addends: tuple[torch.Tensor, torch.Tensor] | None,
    out: torch.Tensor,
    k: int,
    *,
    divisor: torch.Tensor | None = None,
    terms: Sequence[SparseList] = (),
) -> Selection:
    """Add the ``addends`` into ``out`` and select from the result, see :func:`_exact`. Without them, only select."""
    sample = _sample_lines(out) if addends is None else _sample_lines(addends[0]) + _sample_lines(addends[1])
    sample = _with_terms(_divided(sample, divisor), terms)
    unadded = [addends] if addends is not None else []

    def candidates(key: int) -> Selection:
        if unadded:
            return accumulate_and_select_keys(*unadded.pop(), out, key, divisor=divisor, terms=terms)
        return select_keys(out, key, divisor=divisor, terms=terms)

    return _exact(candidates, sample, k, out.numel())


def _exact(candidates: Callable[[int], Selection], sample: torch.Tensor, k: int, numel: int) -> Selection:
    """Filter with a slightly low threshold, then select from the candidates only."""
    key = _sampled_key(sample, k, numel)
    selected = candidates(key)
    if selected.found < k and key > 1:  # the estimate was too high, so use every non-zero as a candidate
        selected = candidates(1)
    return largest(selected, k)


def largest(selected: Selection, k: int, *, workspace: Workspace | None = None) -> Selection:
    """Return the ``k`` entries of ``selected`` with the largest magnitude, ascending by index."""
    if len(selected.values) <= k:
        return Selection(selected.indices, selected.values, len(selected.values))
    if k == 0:
        return Selection(selected.indices[:0], selected.values[:0], 0)
    if triton_runs(selected.values):
        places, values, found = _read_back(selected.values, None, selected.values, k, workspace, whole=True)
        if found == k:
            return Selection(selected.indices[places], values, k)
    if selected.values.device.type == "cpu":
        return _largest_on_host(selected.indices.numpy(), selected.values.numpy(), k)
    keys = magnitude_keys(selected.values)
    kth = _kth_key(keys, k)
    take = keys > kth
    take[positions(keys == kth)[: k - int(torch.count_nonzero(take))]] = True
    kept = positions(take)
    return Selection(selected.indices[kept], selected.values[kept], k)


def _largest_on_host(indices: npt.NDArray[np.int32], values: npt.NDArray[np.float32], k: int) -> Selection:
    """Same in numpy, whose calls cost less than torch's."""
    keys = values.view(np.int32) & MAGNITUDE_MASK
    rank = len(keys) - k
    kth = np.partition(keys, rank)[rank]
    take = keys > kth
    take[np.flatnonzero(keys == kth)[: k - np.count_nonzero(take)]] = True
    kept = np.flatnonzero(take)
    return Selection(torch.from_numpy(indices[kept]), torch.from_numpy(values[kept]), k)


def _read_back(
    residual: torch.Tensor,
    gradient: torch.Tensor | None,
    out: torch.Tensor,
    k: int,
    workspace: Workspace | None,
    *,
    whole: bool = False,
) -> Selection:
    """Launch the kernels, then read the number of entries back to the host."""
    held = workspace if workspace is not None else Workspace()
    k = min(k, out.numel())
    if k == 0:
        if gradient is not None:
            accumulate(residual, gradient, out)
        return Selection.of(out.new_empty(0, dtype=torch.int32), out.new_empty(0))
    indices, values = out.new_empty(k, dtype=torch.int32), out.new_empty(k)
    taken = held.buffer("top-k taken", 1, torch.int64, out.device)
    _launch(residual, gradient, out, indices, values, taken, held, whole=whole)
    found = int(taken)
    return Selection.of(indices[:found], values[:found])


def _launch(
    residual: torch.Tensor,
    gradient: torch.Tensor | None,
    out: torch.Tensor,
    indices: torch.Tensor,
    values: torch.Tensor,
    taken: torch.Tensor,
    workspace: Workspace,
    *,
    whole: bool = False,
) -> None:
    """Filter candidates with a first guess, then launch radix select and ordered emit. No host synchronization."""
    n, k = out.numel(), indices.numel()

    use = "largest" if whole else "top-k"  # each has its own guess in the workspace

    def integers(name: str, size: int) -> torch.Tensor:
        return workspace.buffer(f"{use} {name}", size, torch.int32, out.device)

    radix = kernel("threshold_triton")
    scratch = {
        "state": integers("state", radix.STATE_WORDS),
        "histogram": integers("histogram", 256),
        "above": integers("above", radix.PROGRAMS),
        "equal": integers("equal", radix.PROGRAMS),
    }
    is_first = not workspace.holds(f"{use} guess", torch.int32, out.device)
    guess = integers("guess", 1)
    found = workspace.buffer(f"{use} found", 1, torch.int64, out.device)
    candidates = None
    if not whole:
        if is_first:
            guess.fill_(_sampled_guess(residual, gradient, k, n))
        room = min(n, max(2 * k, k + 65536))
        candidates = integers("positions", room), workspace.buffer("top-k values", room, torch.float32, out.device)
        marks = Marks.empty(n, out.device, workspace, name=use)
        mark(residual, gradient, out, guess, marks)
        expand(out, marks, *candidates, found, workspace=workspace)
    radix.largest(out, candidates, found, guess, scratch, k, indices, values, taken, slack=WARM_SLACK)


def _kth_key(keys: torch.Tensor, k: int) -> int:
    if keys.device.type == "cpu":
        rank = keys.numel() - k
        return int(np.partition(keys.numpy(), rank)[rank])
    return int(torch.topk(keys, k, sorted=False).values.min())


def _sample_lines(values: torch.Tensor) -> torch.Tensor:
    """Return one line of every stride, in fp32. The result is empty if the vector is too short for sampling."""
    if values.numel() < SAMPLE_FROM:
        return values.new_empty(0, dtype=torch.float32)
    rows = values.numel() // SAMPLE_STRIDE
    lines = values[: rows * SAMPLE_STRIDE].view(rows, SAMPLE_STRIDE)[:, :SAMPLE_LINE]
    return lines.reshape(-1).to(torch.float32)


def _divided(sample: torch.Tensor, divisor: torch.Tensor | None) -> torch.Tensor:
    return sample if divisor is None else sample / _sample_lines(divisor)


def _with_terms(sample: torch.Tensor, terms: Sequence[SparseList]) -> torch.Tensor:
    """Return the ``sample`` of a vector after ``terms`` were added to the vector, on the CPU."""
    for indices, values in terms if sample.numel() else ():
        line, place = np.divmod(indices.numpy(), SAMPLE_STRIDE)
        sampled = np.flatnonzero((place < SAMPLE_LINE) & (line < sample.numel() // SAMPLE_LINE))
        at = torch.from_numpy(line[sampled] * SAMPLE_LINE + place[sampled])
        sample = sample.index_add(0, at, values[torch.from_numpy(sampled)])
    return sample


def _inside(terms: Sequence[SparseList], start: int, stop: int) -> list[SparseList]:
    """Return the entries of sparse lists on the CPU from ``start`` up to ``stop``, counted from ``start``.

    Lists without entries there are left out.
    """
    parts = []
    for indices, values in terms:
        first, last = indices.numpy().searchsorted([start, stop])
        if first < last:
            parts.append((indices[first:last] - start, values[first:last]))
    return parts


def _sampled_key(sample: torch.Tensor, k: int, numel: int) -> int:
    """Return a key that about 1.15 k elements reach, and at least k with high probability."""
    rank = _sample_rank(sample.numel(), k, numel)
    return 1 if rank is None else max(1, _kth_key(magnitude_keys(sample), rank))


def _sampled_guess(residual: torch.Tensor, gradient: torch.Tensor | None, k: int, numel: int) -> torch.Tensor | int:
    """Same as :func:`_sampled_key`, without host synchronization."""
    sample = _sample_lines(residual)
    if gradient is not None:
        sample = sample + _sample_lines(gradient)
    rank = _sample_rank(sample.numel(), k, numel)
    if rank is None:
        return 1
    return torch.topk(magnitude_keys(sample), rank, sorted=False).values.min().clamp(min=1)


def _sample_rank(size: int, k: int, numel: int) -> int | None:
    """Return the rank among ``size`` sampled magnitudes to use as threshold, or None to take all non-zeros."""
    expected = k * size / numel if numel else 0.0
    rank = math.ceil(1.15 * expected + 3.0 * math.sqrt(expected) + 1.0)
    return None if rank >= size else rank


def _are_short(bounds: Sequence[int]) -> bool:
    """Return True for several segments that are short enough to be selected together on a CPU."""
    widths = [stop - start for start, stop in itertools.pairwise(bounds)]
    return len(widths) > 1 and 0 < max(widths) <= SHORT_SEGMENT


def _check_segments(bounds: Sequence[int], budgets: Sequence[int]) -> None:
    if len(bounds) != len(budgets) + 1 or any(a > b for a, b in itertools.pairwise(bounds)):
        raise ValueError(f"bounds={bounds!r} must be ascending, with one element more than the {len(budgets)} budgets")


def _check_k(k: int) -> None:
    if k < 0:
        raise ValueError(f"k={k} is negative: must be at least 0")
