"""Selection of large entries: how many to keep, and how to fit a threshold to a distribution."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from statistics import NormalDist

import torch

import tritoncomm_kernels as kernels
from tritoncomm_kernels import Padded, Selection, Workspace


def entries_to_keep(numel: int, density: float) -> int:
    """Return k = floor(numel x density), at least 1 and at most ``numel``. It is 0 only for an empty vector."""
    return min(numel, max(1, int(numel * density)))


def largest_parts(
    entries: Selection, starts: Sequence[int], limits: Sequence[int], *, workspace: Workspace
) -> Selection:
    """Return the ``limits[p]`` largest entries of each part ``starts[p]`` to ``starts[p + 1]`` of ``entries``."""
    parts = [entries.slice(start, stop) for start, stop in itertools.pairwise(starts)]
    return Selection.join(
        [kernels.largest(part, limit, workspace=workspace) for part, limit in zip(parts, limits, strict=True)]
    )


def left_out(union: Selection, kept: Selection) -> Selection:
    """Return the entries of ``union`` that are not in ``kept``.

    ``kept`` is a subset of ``union``. Both are ascending.
    """
    cut = torch.ones(union.found, dtype=torch.bool, device=union.values.device)
    cut[kernels.common_positions(union.indices, kept.indices)] = False
    return Selection.of(union.indices[cut], union.values[cut])


def before_rounding(entries: Selection, sent: Selection) -> torch.Tensor:
    """Return the values (fp32 ``[m]``) that the ``sent`` entries have in ``entries``."""
    return entries.values[kernels.common_positions(entries.indices, sent.indices)]


class RoundingError:
    """How much rounding has cut off from the entries that a rank has sent in a step."""

    def __init__(self) -> None:
        self._rest = self._whole = 0.0
        self._unsent = 0

    def add(self, entries: Selection, sent: Selection) -> None:
        """Count a message. ``sent`` are those of its ``entries`` that could be sent, with rounded values."""
        exact = before_rounding(entries, sent)
        self._rest += float((exact - sent.values).double().square().sum())
        self._whole += float(exact.double().square().sum())
        self._unsent += entries.found - sent.found

    def figures(self) -> dict[str, float]:
        """Return the relative error of values (root of the ratio of squares), and the number of unsendable entries."""
        error = math.sqrt(self._rest / self._whole) if self._whole else 0.0
        return {"quantisation_error": error, "unsendable": float(self._unsent)}


def rounding_figures(entries: Selection, sent: Selection) -> dict[str, float]:
    """Return :meth:`RoundingError.figures` of a step that sends one message."""
    error = RoundingError()
    error.add(entries, sent)
    return error.figures()


def rest_of(entries: Selection, sent: Selection) -> Selection:
    """Return what is left of ``entries`` after a part of them was ``sent``, perhaps with rounded values. No zeros."""
    values = entries.values.clone()
    values[kernels.common_positions(entries.indices, sent.indices)] -= sent.values
    left = values != 0
    return Selection.of(entries.indices[left], values[left])


# As in the GaussianK code released with Ok-Topk: up to 20 corrections of 2 %, until the count is within 25 % of k.
_GAUSSIAN_TRIES, _GAUSSIAN_STEP, GAUSSIAN_MARGIN = 20, 1.02, 1.25
# The thresholds that are tried, as multiples of the first one, which is in the middle.
_GAUSSIAN_SCALES = [_GAUSSIAN_STEP**power for power in range(-_GAUSSIAN_TRIES, _GAUSSIAN_TRIES + 1)]


def gaussian_selection(values: torch.Tensor, k: int) -> Selection:
    """Return about the ``k`` largest entries of fp32 ``values``, by a normal fit.

    The threshold is mean + z sigma, corrected by counting. With tails heavier than normal more entries pass than
    requested. At low density it can be several times as many. S. Shi et al., "Understanding Top-k Sparsification in
    Distributed Deep Learning", 2019.
    """
    first = float(_gaussian_threshold(values, k))
    candidates = kernels.select(values, first * _GAUSSIAN_SCALES[0])
    keys = kernels.magnitude_keys(candidates.values)

    def passed(place: int) -> torch.Tensor:
        return keys >= kernels.threshold_key(first * _GAUSSIAN_SCALES[place])

    def count(place: int) -> int:
        return int(torch.count_nonzero(passed(place)))

    place = _GAUSSIAN_TRIES
    while place > 0 and count(place) < k * (2 - GAUSSIAN_MARGIN):
        place -= 1
    if place == _GAUSSIAN_TRIES:
        while place < 2 * _GAUSSIAN_TRIES and count(place) > k * GAUSSIAN_MARGIN:
            place += 1
    chosen = passed(place)
    if not chosen.any():  # the values have no tail
        return kernels.top_k(values, k)
    return Selection.of(candidates.indices[chosen], candidates.values[chosen])


def gaussian_padded(
    values: torch.Tensor, entries: Padded, k: int, *, workspace: Workspace
) -> tuple[Padded, torch.Tensor]:
    """Return the largest entries of :func:`gaussian_selection`, and the number of all (int32 ``[1]``).

    Nothing waits for a GPU. ``entries`` are the largest of ``values``, more than ``GAUSSIAN_MARGIN`` times k of them.
    The result has the same room.
    """
    scales = kernels.constant(_GAUSSIAN_SCALES, values.device, dtype=torch.float64)
    # Bits of positive floats ascend as integers. Padding is zero, which never passes.
    limits = (_gaussian_threshold(values, k) * scales).float().view(torch.int32).clamp(min=1)
    keys = torch.sort(kernels.magnitude_keys(entries.values)).values
    counts = entries.room - torch.searchsorted(keys, limits)
    # Whole numbers, because a comparison with a float rounds large counts.
    too_few = (counts[1 : _GAUSSIAN_TRIES + 1] < math.ceil(k * (2 - GAUSSIAN_MARGIN))).sum()
    too_many = (counts[_GAUSSIAN_TRIES:-1] > math.floor(k * GAUSSIAN_MARGIN)).sum()
    place = _GAUSSIAN_TRIES - too_few + too_many
    reach = limits.index_select(0, place.reshape(1)).view(torch.float32)
    passed = kernels.count_reaching(values, reach)
    return _fitted_or_largest(entries, reach, passed, passed > 0, k, workspace=workspace)


def _gaussian_threshold(values: torch.Tensor, k: int) -> torch.Tensor:
    """Return the magnitude that ``k`` of ``values`` exceed if they are normal, fp64 ``[]``."""
    double = values.double()
    sigma = double.std() if values.numel() > 1 else 0.0
    return double.mean() + NormalDist().inv_cdf(1 - k / values.numel() / 2) * sigma


# SIDCo: the share that passes the first of several stages, the smallest k that is fitted, and the largest shape of a
# Pareto distribution that is treated as exponential.
_FIRST_STAGE, _FEWEST, _EXPONENTIAL = 0.25, 4, 1e-9


def sidco_selection(values: torch.Tensor, k: int, stages: int) -> Selection | None:
    """Return about the ``k`` largest entries of fp32 ``values``, by generalized Pareto fits in ``stages`` stages.

    Each stage fits the tail above the threshold of the previous one. The result is None if there is no tail to fit: too
    few values, or values without spread. A. Abdelmoniem et al., "An Efficient Statistical-based Gradient Compression
    Technique for Distributed Training Systems" (SIDCo), MLSys 2021, variant P.
    """
    if k < _FEWEST:
        return None
    tail = Selection.of(torch.arange(values.numel(), dtype=torch.int32, device=values.device), values)
    shift = 0.0
    for share in _sidco_shares(k, values.numel(), stages):
        excess = tail.values.abs().double() - shift
        mean, variance = excess.mean(), excess.var() if tail.found > 1 else excess.new_zeros(())
        if not (variance > 0 and mean > 0):
            return None
        threshold = shift + float(_pareto_excess(mean, variance, share))
        passed = kernels.magnitude_keys(tail.values) >= kernels.threshold_key(threshold)
        tail = Selection.of(tail.indices[passed], tail.values[passed])
        if tail.found == 0:
            return None
        shift = kernels.smallest_magnitude(tail.values)
    return tail


def sidco_padded(
    values: torch.Tensor, entries: Padded, k: int, stages: int, *, workspace: Workspace
) -> tuple[Padded, torch.Tensor, torch.Tensor]:
    """Return the largest entries of :func:`sidco_selection`, the number of all, and whether there is a tail to fit.

    The two are int32 ``[1]``. Without a tail, the entries are the ``k`` largest of ``values``. Nothing waits for a GPU.
    ``entries`` are the largest of ``values``, at least ``k``. The result has the same room. Moments are sums over the
    whole vector, so that thresholds may differ from those of :func:`sidco_selection` by rounding.
    """
    keys, magnitudes = kernels.magnitude_keys(values), values.abs().double()
    inside, shift = torch.ones_like(keys, dtype=torch.bool), magnitudes.new_zeros(())
    has_tail = torch.full((1,), k >= _FEWEST, device=values.device)
    limit = keys.new_ones(1)
    for share in _sidco_shares(k, values.numel(), stages) if k >= _FEWEST else ():
        count = inside.sum()
        mean = torch.where(inside, magnitudes - shift, 0.0).sum() / count
        variance = torch.where(inside, magnitudes - shift - mean, 0.0).square().sum() / (count - 1)
        has_tail = has_tail & (variance > 0) & (mean > 0)
        limit = (shift + _pareto_excess(mean, variance, share)).float().reshape(1).view(torch.int32).clamp(min=1)
        inside = keys >= limit
        has_tail = has_tail & inside.any()
        shift = torch.where(inside, magnitudes, math.inf).amin()
    own, passed = _fitted_or_largest(
        entries, limit.view(torch.float32), inside.sum(dtype=torch.int32).reshape(1), has_tail, k, workspace=workspace
    )
    return own, passed, has_tail.int()


def _sidco_shares(k: int, numel: int, stages: int) -> list[float]:
    """Return the share of the entries of the previous stage that passes each stage."""
    density = k / numel
    if stages == 1 or density >= _FIRST_STAGE:
        return [density]
    return [_FIRST_STAGE, *[(density / _FIRST_STAGE) ** (1 / (stages - 1))] * (stages - 1)]


def _pareto_excess(mean: torch.Tensor, variance: torch.Tensor, share: float) -> torch.Tensor:
    """Return the value that a ``share`` of a generalized Pareto distribution with this mean and variance exceeds."""
    ratio = mean * mean / variance
    shape, scale = (ratio - 1) / 2, mean * (ratio + 1) / 2
    exponential = -scale * math.log(share)
    return torch.where(shape.abs() < _EXPONENTIAL, exponential, scale * (1 - share**shape) / shape)


def _fitted_or_largest(
    entries: Padded, reach: torch.Tensor, passed: torch.Tensor, fits: torch.Tensor, k: int, *, workspace: Workspace
) -> tuple[Padded, torch.Tensor]:
    """Return the ``entries`` that ``reach`` the threshold, of which ``passed`` exist, or the ``k`` largest.

    ``fits`` (``[1]``) says which.
    """
    by_fit = kernels.reaching(entries, reach, workspace=workspace)
    by_rank = kernels.largest_padded(entries, k, workspace=workspace)
    missing = (0, entries.room - k)
    indices = torch.nn.functional.pad(by_rank.indices, missing, value=-1)
    values = torch.nn.functional.pad(by_rank.values, missing)
    own = Padded(torch.where(fits, by_fit.indices, indices), torch.where(fits, by_fit.values, values))
    return own, torch.where(fits, passed, kernels.count_entries(by_rank))
