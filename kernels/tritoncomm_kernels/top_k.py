"""Exact order statistics of magnitudes: the k-th largest, and the k largest.

Magnitudes are compared as integer keys, ``bits(x) & 0x7FFFFFFF``. The keys define a total order that is exact for
denormals, ranks NaN above infinity, and is the same on every device.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from tritoncomm_kernels.checks import check_vector
from tritoncomm_kernels.dispatch import kernel, triton_runs
from tritoncomm_kernels.entries import constant, joined, scatter_add
from tritoncomm_kernels.lists import PADDING, Entries, inside
from tritoncomm_kernels.memory import Guess
from tritoncomm_kernels.select import MAGNITUDE_MASK, SparseList, Sum, magnitude_keys, positions, select_keys

# A sample of one 128-byte line in 257 estimates the k-th magnitude. It is accurate enough that little more than k
# candidates pass the filter. Below SAMPLE_FROM elements, sampling costs more than it saves.
SAMPLE_LINE = 32
# An odd number of lines is no multiple of an even matrix width in lines. The sample then covers different columns.
SAMPLE_STRIDE = 257 * SAMPLE_LINE
SAMPLE_FROM = 1 << 17
# Segments up to this length are selected together, because separate calls would cost more than the work itself.
SHORT_SEGMENT = 1 << 14
SPARE_ROOM = 1 << 16  # places for more candidates than k, at least


def top_k(values: torch.Tensor, k: int, *, divisor: torch.Tensor | None = None) -> Entries:
    """Return the ``k`` entries of ``values`` (fp32 ``[n]``) with the largest magnitude, ascending by index.

    The result has exactly ``min(k, number of non-zeros)`` entries. Zeros are never selected. Ties go to the lower
    index, so all ranks break them in the same way. ``divisor`` is that of :func:`tritoncomm_kernels.select`. Raises
    ``ValueError`` for a negative ``k``, or a wrong dtype or shape.
    """
    return accumulate_top_k(values, None, values, k, divisor=divisor)


def accumulate_top_k_segments(
    residual: torch.Tensor,
    gradient: torch.Tensor | None,
    out: torch.Tensor,
    bounds: Sequence[int],
    budgets: Sequence[int],
    terms: Sequence[SparseList] = (),
) -> Entries:
    """Compute ``out = residual + gradient``. Select from each segment of ``out`` plus ``terms``, as one list.

    Up to ``budgets[i]`` entries are selected from ``bounds[i]`` up to ``bounds[i + 1]``, as by :func:`top_k`. Indices
    count from the start of the vector. ``terms`` are sparse lists, each with ascending and unique indices inside the
    vector, which are added list by list. ``out`` does not contain them afterwards. The other arguments are those of
    :func:`accumulate_top_k`. If ``gradient`` is None, ``residual`` and ``out`` must be the same tensor, and nothing is
    added. Otherwise the segments cover the whole vector. On a CPU, this is one pass over long segments, and short ones
    are selected together.
    """
    if len(bounds) != len(budgets) + 1 or any(a > b for a, b in itertools.pairwise(bounds)):
        raise ValueError(f"bounds={bounds!r} must be ascending, with one element more than the {len(budgets)} budgets")
    total = Sum.of(residual, gradient, out)
    if gradient is not None and (bounds[0], bounds[-1]) != (0, out.numel()):
        raise ValueError(f"bounds={bounds!r} must be those of segments that cover all {out.numel()} elements")
    widest = max((stop - start for start, stop in itertools.pairwise(bounds)), default=0)
    if widest >= SAMPLE_FROM and out.device.type == "cpu" and not triton_runs(out):  # else calls cost more than passes
        return _each_segment(total, bounds, budgets, terms)
    if gradient is not None:
        torch.add(residual, gradient, out=out)
    before = [out.index_select(0, indices) for indices, _ in terms]
    for indices, values in terms:
        scatter_add(out, indices, values)
    if out.numel() and budgets and triton_runs(out):
        cuts, limits = constant(bounds, out.device), constant(budgets, out.device)
        selected = joined(top_k_rows(out, cuts, limits, max(budgets))).trimmed()
    else:
        selected = _of_segments(out, bounds, budgets)
    for (indices, _), values in zip(terms, before, strict=True):
        out.index_copy_(0, indices.long(), values)
    return selected


def _each_segment(total: Sum, bounds: Sequence[int], budgets: Sequence[int], terms: Sequence[SparseList]) -> Entries:
    """Add and select one segment after the other, on the CPU."""
    parts = [Entries.empty((0,), total.out)]
    for start, stop, k in zip(bounds, bounds[1:], budgets, strict=False):
        part = _exact(total.part(start, stop), k, inside(terms, start, stop))
        parts.append(part._replace(indices=part.indices + start))
    return Entries.join(parts)


def _of_segments(vector: torch.Tensor, bounds: Sequence[int], budgets: Sequence[int]) -> Entries:
    """Select from all segments of a ``vector`` on the CPU, as one list.

    Short ones are rows of a matrix that is padded with zeros, which are never selected. One call for all rows takes
    less time than calls for each.
    """
    values, ends, limits = vector.numpy(), np.asarray(bounds), np.asarray(budgets)
    starts, stops = ends[:-1, None], ends[1:, None]
    width = int((stops - starts).max(initial=0))
    if len(budgets) <= 1 or not 0 < width <= SHORT_SEGMENT:
        return _each_segment(Sum(vector, None, vector), bounds, budgets, ())
    limits = np.minimum(limits, stops[:, 0] - starts[:, 0])
    places = starts + np.arange(width)
    keys = np.where(places < stops, values[np.minimum(places, len(values) - 1)].view(np.int32) & MAGNITUDE_MASK, 0)
    # The key of the last selected entry of each row. For a budget of 0 it is above every key.
    ranks = np.unique(width - limits[limits > 0])
    ordered = np.partition(keys, ranks, axis=1) if len(ranks) else keys
    rows = np.arange(len(keys))
    kth = np.where(limits > 0, ordered[rows, np.minimum(width - limits, width - 1)], np.iinfo(np.int32).max)[:, None]
    take = keys > kth
    equal = (keys == kth) & (kth > 0) & (limits > 0)[:, None]
    take |= equal & (np.cumsum(equal, axis=1) <= limits[:, None] - take.sum(1, keepdims=True))
    chosen = places[take]
    return Entries(torch.from_numpy(chosen.astype(np.int32)), torch.from_numpy(values[chosen]))


def accumulate_top_k(
    residual: torch.Tensor,
    gradient: torch.Tensor | None,
    out: torch.Tensor,
    k: int,
    *,
    divisor: torch.Tensor | None = None,
    guess: Guess | None = None,
) -> Entries:
    """Compute ``out = residual + gradient`` and return its ``k`` largest magnitudes, in one pass over n.

    The arguments are those of :func:`tritoncomm_kernels.accumulate_and_select`, and the ``guess`` of
    :func:`top_k_padded`. The result is that of :func:`top_k`. ``residual`` is only read, unless it is the same tensor
    as ``out``.
    """
    if k < 0:
        raise ValueError(f"k={k} is negative: must be at least 0")
    total = Sum.of(residual, gradient, out, divisor)
    if not out.numel() or not triton_runs(out):
        return _exact(total, k)
    k = min(k, out.numel())
    if not k:
        if gradient is not None:
            torch.add(residual, gradient, out=out)
        return Entries.empty((0,), out)
    entries, taken = _launch(total, k, guess)
    return entries.slice(0, int(taken))


def top_k_padded(
    residual: torch.Tensor,
    gradient: torch.Tensor | None,
    out: torch.Tensor,
    k: int,
    *,
    divisor: torch.Tensor | None = None,
    guess: Guess | None = None,
) -> Entries:
    """Return the result of :func:`accumulate_top_k` as ``[k]`` entries and padding. On a GPU, the host does not wait.

    ``k`` is at least 1. If ``gradient`` is None, ``residual`` and ``out`` must be the same tensor, and nothing is
    added. ``divisor`` is that of :func:`tritoncomm_kernels.select`. The search starts from a threshold, slightly below
    the k-th magnitude of the last call with this ``guess``. In the first call, a sample gives it. The result does not
    depend on it.
    """
    if k < 1:
        raise ValueError(f"k={k}: must be at least 1")
    if out.numel() and triton_runs(out):
        return _launch(Sum.of(residual, gradient, out, divisor), k, guess)[0]
    return accumulate_top_k(residual, gradient, out, k, divisor=divisor).padded(k)


def top_k_rows(
    values: torch.Tensor, bounds: torch.Tensor, budgets: torch.Tensor, room: int, *, indices: torch.Tensor | None = None
) -> Entries:
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
        return Entries.empty((rows, room), values)
    if triton_runs(values):
        found = Entries.empty((rows, room), values)
        kernel("top_k_triton").top_k_rows(values, bounds, budgets, indices, found)
        return found
    cuts = bounds.tolist()
    chosen, content = (part.numpy() for part in _of_segments(values, cuts, budgets.clamp(0, room).tolist()))
    counts = np.diff(chosen.searchsorted(cuts))
    used = np.arange(room) < counts[:, None]
    padded = np.full((rows, room), PADDING, np.int32), np.zeros((rows, room), np.float32)
    padded[0][used] = chosen if indices is None else indices.numpy()[chosen]
    padded[1][used] = content
    return Entries(torch.from_numpy(padded[0]), torch.from_numpy(padded[1]))


def largest_padded(entries: Entries, k: int, room: int | None = None) -> Entries:
    """Return the ``k`` entries of one row, which has slots, with the largest magnitudes. Zeros are never among them.

    The result has ``room`` slots, by default ``k``.
    """
    # Made on the device: numbers change, and the host would wait for the copy of a new constant.
    bounds = torch.arange(0, entries.room + 1, entries.room, dtype=torch.int32, device=entries.values.device)
    budget, room = bounds.new_full((1,), k), k if room is None else room
    return top_k_rows(entries.values, bounds, budget, room, indices=entries.indices).row(0)


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


def _exact(total: Sum, k: int, terms: Sequence[SparseList] = ()) -> Entries:
    """Add, filter with a slightly low threshold in the same pass, then select from the candidates only."""
    key = int(_guess(_with_terms(_sampled(total), terms), k, total.out.numel()))
    selected = select_keys(total, key, terms)
    if selected.room < k and key > 1:  # the estimate was too high, so use every non-zero as a candidate
        selected = select_keys(total.added, 1, terms)
    return largest(selected, k)


def largest(selected: Entries, k: int) -> Entries:
    """Return the ``k`` entries of ``selected`` with the largest magnitude, ascending by index."""
    if selected.indices.shape[0] <= k:
        return selected
    if k == 0:
        return selected.slice(0, 0)
    if not triton_runs(selected.values):
        return _largest_on_host(selected.indices.numpy(), selected.values.numpy(), k)
    x = selected.values
    found = Entries.empty((1, k), x)
    kernel("top_k_triton").top_k_rows(x, None, None, None, found)
    places = found.row(0).trimmed().indices.long()
    if len(places) < k:  # zeros are among them, the first ones
        zeros = positions(magnitude_keys(x) == 0)[: k - len(places)]
        places = torch.cat([places, zeros]).sort().values
    return Entries(selected.indices[places], x[places])


def _largest_on_host(indices: npt.NDArray[np.int32], values: npt.NDArray[np.float32], k: int) -> Entries:
    """Do the same in numpy, whose calls cost less than torch's."""
    keys = values.view(np.int32) & MAGNITUDE_MASK
    rank, order = keys.size - k, keys.copy()
    order.partition(rank)
    take = keys > order[rank]
    take[(keys == order[rank]).nonzero()[0][: k - np.count_nonzero(take)]] = True
    kept = take.nonzero()[0]
    return Entries(torch.from_numpy(indices[kept]), torch.from_numpy(values[kept]))


def _launch(total: Sum, k: int, guess: Guess | None) -> tuple[Entries, torch.Tensor]:
    """Select by kernels, which start from the last call with this ``guess``. No host synchronization.

    Returns ``[k]`` entries and padding, and the number of entries (int64 ``[1]``).
    """
    guess, numel = guess or Guess(), total.out.numel()
    if guess.key is None:
        guess.key = torch.empty(1, dtype=torch.int32, device=total.out.device).fill_(_guess(_sampled(total), k, numel))
    room = min(numel, max(2 * k, k + SPARE_ROOM))
    found: tuple[Entries, torch.Tensor] = kernel("top_k_triton").top_k(total, guess.key, k, room)
    return found


def _sample_lines(values: torch.Tensor) -> torch.Tensor:
    """Return one line of every stride, in fp32. The result is empty if the vector is too short for sampling."""
    if values.numel() < SAMPLE_FROM:
        return values.new_empty(0, dtype=torch.float32)
    rows = values.numel() // SAMPLE_STRIDE
    lines = values[: rows * SAMPLE_STRIDE].view(rows, SAMPLE_STRIDE)[:, :SAMPLE_LINE]
    return lines.reshape(-1).to(torch.float32)


def _sampled(total: Sum) -> torch.Tensor:
    """Return a sample of the sum, divided by the divisor."""
    sample = _sample_lines(total.residual)
    if total.gradient is not None:
        sample = sample + _sample_lines(total.gradient)
    return sample if total.divisor is None else sample / _sample_lines(total.divisor)


def _with_terms(sample: torch.Tensor, terms: Sequence[SparseList]) -> torch.Tensor:
    """Return the ``sample`` of a vector after ``terms`` were added to the vector, on the CPU."""
    for indices, values in terms if sample.numel() else ():
        line, place = np.divmod(indices.numpy(), SAMPLE_STRIDE)
        sampled = np.flatnonzero((place < SAMPLE_LINE) & (line < sample.numel() // SAMPLE_LINE))
        at = torch.from_numpy(line[sampled] * SAMPLE_LINE + place[sampled])
        sample = sample.index_add(0, at, values[torch.from_numpy(sampled)])
    return sample


def _guess(sample: torch.Tensor, k: int, numel: int) -> torch.Tensor | int:
    """Return a key that about 1.15 k of ``numel`` elements reach, and at least k with high probability.

    It is the key of that rank in the ``sample``, or 1, which all non-zeros reach. Nothing waits for a GPU.
    """
    size = sample.numel()
    expected = k * size / numel if numel else 0.0
    rank = math.ceil(1.15 * expected + 3.0 * math.sqrt(expected) + 1.0)
    if rank >= size:
        return 1
    keys = magnitude_keys(sample)
    if keys.device.type == "cpu":  # numpy is far faster there
        return max(1, int(np.partition(keys.numpy(), size - rank)[size - rank]))
    return torch.topk(keys, rank, sorted=False).values.min().clamp(min=1)
