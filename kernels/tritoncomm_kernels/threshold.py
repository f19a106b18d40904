"""Exact order statistics of magnitudes: the k-th largest, and the k largest.

Magnitudes are compared as integer keys, ``bits(x) & 0x7FFFFFFF``: a total order that is exact for
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
from tritoncomm_kernels.checks import check_apart, check_same, check_vector
from tritoncomm_kernels.compact import Selection, accumulate_and_select_keys, positions, select_keys
from tritoncomm_kernels.dispatch import kernel, triton_runs
from tritoncomm_kernels.expand import expand
from tritoncomm_kernels.mark import MAGNITUDE_MASK, Marks, mark
from tritoncomm_kernels.workspace import Workspace

# A sample of one 128-byte line in 256 estimates the k-th magnitude closely enough that the filter
# admits little more than k candidates; below this many elements sampling costs more than it saves.
SAMPLE_LINE = 32
SAMPLE_STRIDE = 257 * SAMPLE_LINE  # odd in lines, or a matrix width that divides it would show the same columns only
SAMPLE_FROM = 1 << 17
# Segments up to this long are selected together: below it the calls would cost more than the work.
_SHORT_SEGMENT = 1 << 14
Integers = npt.NDArray[np.int64]
# On a GPU the next step may start from this step's k-th magnitude, lowered by so much: over normal values at
# 1 % that admits 1.4 k candidates.
WARM_SLACK = 0.95


def magnitude_keys(values: torch.Tensor) -> torch.Tensor:
    """Integer keys (int32, same shape) that order fp32 ``values`` by magnitude, NaN largest."""
    return values.view(torch.int32) & MAGNITUDE_MASK


def top_k(values: torch.Tensor, k: int, *, workspace: Workspace | None = None) -> Selection:
    """The ``k`` largest magnitudes of ``values`` (fp32 ``[n]``), ascending by index.

    Exactly ``min(k, number of non-zeros)`` entries: zeros are never selected and ties go to the
    lower index, as every rank must break them. ``workspace`` keeps a GPU's scratch memory from step
    to step. Raises ``ValueError`` for a negative ``k`` or a wrong dtype or shape.
    """
    _check_k(k)
    check_vector("values", values)
    if values.numel() and triton_runs(values):
        return _read_back(values, None, values, k, workspace)
    return _exact(partial(select_keys, values), _sample_lines(values), k, values.numel())


def top_k_segments(
    values: torch.Tensor, bounds: Sequence[int], budgets: Sequence[int], *, workspace: Workspace | None = None
) -> Selection:
    """The largest of each segment ``values[bounds[i] : bounds[i + 1]]``, up to ``budgets[i]`` entries, as one list.

    Each as :func:`top_k` would select it; indices count from the start of ``values`` (fp32 ``[n]``). Many
    short segments are selected together on a CPU.
    """
    if len(bounds) != len(budgets) + 1 or any(a > b for a, b in itertools.pairwise(bounds)):
        raise ValueError(f"bounds={bounds!r}: give ascending numbers, one more than the {len(budgets)} budgets")
    check_vector("values", values)
    widest = max((b - a for a, b in itertools.pairwise(bounds)), default=0)
    if len(budgets) > 1 and 0 < widest <= _SHORT_SEGMENT and values.device.type == "cpu" and not triton_runs(values):
        return _top_k_rows(values, np.asarray(bounds), np.asarray(budgets), widest)
    parts = []
    for start, stop, k in zip(bounds, bounds[1:], budgets, strict=False):
        part = top_k(values[start:stop], k, workspace=workspace)
        parts.append(part._replace(indices=part.indices + start))
    return Selection.join(parts) if parts else Selection.of(values.new_empty(0, dtype=torch.int32), values[:0])


def _top_k_rows(values: torch.Tensor, bounds: Integers, budgets: Integers, width: int) -> Selection:
    """Segments as the rows of a matrix, padded with zeros, which are never selected."""
    starts, stops = bounds[:-1, None], bounds[1:, None]
    budgets = np.minimum(budgets, stops[:, 0] - starts[:, 0])
    places = starts + np.arange(width)
    floats = values.numpy()
    keys = np.where(places < stops, floats[np.minimum(places, len(floats) - 1)].view(np.int32) & MAGNITUDE_MASK, 0)
    # The last of the k largest of each row; a budget of 0 is above every key.
    ranks = np.unique(width - budgets[budgets > 0])
    ordered = np.partition(keys, ranks, axis=1) if len(ranks) else keys
    rows = np.arange(len(keys))
    kth = np.where(budgets > 0, ordered[rows, np.minimum(width - budgets, width - 1)], np.iinfo(np.int32).max)[:, None]
    take = keys > kth
    equal = (keys == kth) & (kth > 0) & (budgets > 0)[:, None]
    take |= equal & (np.cumsum(equal, axis=1) <= budgets[:, None] - take.sum(1, keepdims=True))
    chosen = places[take]
    return Selection.of(torch.from_numpy(chosen.astype(np.int32)), torch.from_numpy(floats[chosen]))


def accumulate_top_k(
    residual: torch.Tensor,
    gradient: torch.Tensor,
    out: torch.Tensor,
    k: int,
    *,
    workspace: Workspace | None = None,
) -> Selection:
    """``out = residual + gradient`` and the ``k`` largest magnitudes of it, in one pass over n.

    The arguments are as for :func:`tritoncomm_kernels.accumulate_and_select`, the result as for
    :func:`top_k`. ``residual`` is read only.
    """
    _check_k(k)
    check_addends(residual, gradient, out)
    if out.numel() and triton_runs(out):
        return _read_back(residual, gradient, out, k, workspace)
    sample = _sample_lines(residual) + _sample_lines(gradient)
    first = True

    def candidates(key: int) -> Selection:
        nonlocal first
        if first:
            first = False
            return accumulate_and_select_keys(residual, gradient, out, key)
        return select_keys(out, key)

    return _exact(candidates, sample, k, out.numel())


def top_k_into(
    residual: torch.Tensor,
    gradient: torch.Tensor | None,
    out: torch.Tensor,
    indices: torch.Tensor,
    values: torch.Tensor,
    taken: torch.Tensor,
    *,
    workspace: Workspace,
    warm: bool = False,
    clear: bool = False,
) -> None:
    """:func:`accumulate_top_k` into given memory, with nothing that waits for the host on a GPU.

    ``indices`` (int32) and ``values`` (fp32) are ``[k]``, ``k`` at least 1; ``taken`` (int64 ``[1]``)
    becomes the number written, the other slots keep what they held. Without ``gradient``, ``residual``
    must be ``out``, and nothing is added. With ``warm`` the first threshold is a little below the k-th
    magnitude of the last call with this ``workspace``, otherwise it is estimated from a sample; the
    result is the same. With ``clear`` the selected elements become 0 in ``out``.
    """
    check_vector("indices", indices, dtypes=(torch.int32,), like=out)
    check_vector("values", values, numel=indices.numel(), like=out)
    check_vector("taken", taken, dtypes=(torch.int64,), numel=1, like=out)
    check_apart("values", values, "out", out)
    check_apart("indices", indices, "out", out)
    check_apart("indices", indices, "values", values)
    if gradient is not None:
        check_addends(residual, gradient, out)
    else:
        check_vector("out", out)
        check_same("residual", residual, "out", out)
    if indices.numel() == 0:
        raise ValueError("indices has no elements: k must be at least 1")
    if out.numel() and triton_runs(out):
        _launch(residual, gradient, out, indices, values, taken, workspace, warm=warm, clear=clear)
        return
    k = indices.numel()
    selected = top_k(out, k) if gradient is None else accumulate_top_k(residual, gradient, out, k)
    taken.fill_(selected.found)
    indices[: selected.found] = selected.indices
    values[: selected.found] = selected.values
    if clear:
        out.index_fill_(0, selected.indices.long(), 0.0)


def kth_magnitude(values: torch.Tensor, k: int) -> float:
    """The ``k``-th largest ``|values|`` (fp32 ``[n]``); 0.0 when fewer than ``k`` are non-zero."""
    selected = top_k(values, k)
    if k == 0 or len(selected.values) < k:
        return 0.0
    return smallest_magnitude(selected.values)


def smallest_magnitude(values: torch.Tensor) -> float:
    """The smallest ``|values|`` by key order; 0.0 for an empty tensor."""
    if values.numel() == 0:
        return 0.0
    return float(magnitude_keys(values).min().view(torch.float32))


def _exact(candidates: Callable[[int], Selection], sample: torch.Tensor, k: int, numel: int) -> Selection:
    """Filter by a threshold slightly too low, then finish on the candidates alone."""
    key = _sampled_key(sample, k, numel)
    selected = candidates(key)
    if selected.found < k and key > 1:  # the sample misjudged: every non-zero is a candidate
        selected = candidates(1)
    return largest(selected, k)


def largest(selected: Selection, k: int, *, workspace: Workspace | None = None) -> Selection:
    """The ``k`` entries of ``selected`` with the largest magnitude, still ascending by index."""
    if len(selected.values) <= k:
        return Selection(selected.indices, selected.values, len(selected.values))
    if k == 0:
        return Selection(selected.indices[:0], selected.values[:0], 0)
    if triton_runs(selected.values):
        places, values, found = _read_back(selected.values, None, selected.values, k, workspace, whole=True)
        if found == k:
            return Selection(selected.indices[places], values, k)
    keys = magnitude_keys(selected.values)
    kth = _kth_key(keys, k)
    take = keys > kth
    take[positions(keys == kth)[: k - int(torch.count_nonzero(take))]] = True
    kept = positions(take)
    return Selection(selected.indices[kept], selected.values[kept], k)


def _read_back(
    residual: torch.Tensor,
    gradient: torch.Tensor | None,
    out: torch.Tensor,
    k: int,
    workspace: Workspace | None,
    *,
    whole: bool = False,
) -> Selection:
    """Launch the kernels, then wait for how many entries there are."""
    held = workspace if workspace is not None else Workspace()
    k = min(k, out.numel())
    if k == 0:
        if gradient is not None:
            accumulate(residual, gradient, out)
        return Selection.of(out.new_empty(0, dtype=torch.int32), out.new_empty(0))
    indices, values = out.new_empty(k, dtype=torch.int32), out.new_empty(k)
    taken = held.buffer("top-k taken", 1, torch.int64, out.device)
    _launch(residual, gradient, out, indices, values, taken, held, warm=True, clear=False, whole=whole)
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
    warm: bool,
    clear: bool,
    whole: bool = False,
) -> None:
    """Candidates above a first guess, then radix select and ordered emit over them; no host sync."""
    n, k = out.numel(), indices.numel()

    use = "largest" if whole else "top-k"  # each remembers a guess of its own

    def integers(name: str, size: int) -> torch.Tensor:
        return workspace.buffer(f"{use} {name}", size, torch.int32, out.device)

    radix = kernel("threshold_triton")
    scratch = {
        "state": integers("state", radix.STATE_WORDS),
        "histogram": integers("histogram", 256),
        "above": integers("above", radix.PROGRAMS),
        "equal": integers("equal", radix.PROGRAMS),
    }
    warm = warm and workspace.holds(f"{use} guess", torch.int32, out.device)
    guess = integers("guess", 1)
    found = workspace.buffer(f"{use} found", 1, torch.int64, out.device)
    candidates = None
    if not whole:
        if not warm:
            guess.fill_(_sampled_guess(residual, gradient, k, n))
        room = min(n, max(2 * k, k + 65536))
        candidates = integers("positions", room), workspace.buffer("top-k values", room, torch.float32, out.device)
        marks = Marks.empty(n, out.device, workspace, name=use)
        mark(residual, gradient, out, guess, marks)
        expand(out, marks, *candidates, found, workspace=workspace)
    radix.largest(out, candidates, found, guess, scratch, k, indices, values, taken, slack=WARM_SLACK, clear=clear)


def _kth_key(keys: torch.Tensor, k: int) -> int:
    if keys.device.type == "cpu":
        rank = keys.numel() - k
        return int(np.partition(keys.numpy(), rank)[rank])
    return int(torch.topk(keys, k, sorted=False).values.min())


def _sample_lines(values: torch.Tensor) -> torch.Tensor:
    """One line in every stride, fp32; empty where the vector is too short for sampling."""
    if values.numel() < SAMPLE_FROM:
        return values.new_empty(0, dtype=torch.float32)
    rows = values.numel() // SAMPLE_STRIDE
    lines = values[: rows * SAMPLE_STRIDE].view(rows, SAMPLE_STRIDE)[:, :SAMPLE_LINE]
    return lines.reshape(-1).to(torch.float32)


def _sampled_key(sample: torch.Tensor, k: int, numel: int) -> int:
    """A key that about 1.15 k elements, and with high probability at least k, reach."""
    rank = _sample_rank(sample.numel(), k, numel)
    return 1 if rank is None else max(1, _kth_key(magnitude_keys(sample), rank))


def _sampled_guess(residual: torch.Tensor, gradient: torch.Tensor | None, k: int, numel: int) -> torch.Tensor | int:
    """The same without waiting for the device."""
    sample = _sample_lines(residual)
    if gradient is not None:
        sample = sample + _sample_lines(gradient)
    rank = _sample_rank(sample.numel(), k, numel)
    if rank is None:
        return 1
    return torch.topk(magnitude_keys(sample), rank, sorted=False).values.min().clamp(min=1)


def _sample_rank(size: int, k: int, numel: int) -> int | None:
    """Which of ``size`` sampled magnitudes to start from; None for all non-zeros."""
    expected = k * size / numel if numel else 0.0
    rank = math.ceil(1.15 * expected + 3.0 * math.sqrt(expected) + 1.0)
    return None if rank >= size else rank


def _check_k(k: int) -> None:
    if k < 0:
        raise ValueError(f"k={k} is negative: ask for at least 0 elements")
