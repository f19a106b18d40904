"""Selection of large entries: how many to keep, and how to fit a threshold to a distribution."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from statistics import NormalDist

import torch

import tritoncomm_kernels as kernels
from tritoncomm_kernels import Selection, Workspace


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
_GAUSSIAN_TRIES, _GAUSSIAN_STEP = 20, 1.02


def gaussian_selection(values: torch.Tensor, k: int) -> Selection:
    """Return about the ``k`` largest entries of fp32 ``values``, by a normal fit.

    The threshold is mean + z sigma, corrected by counting. With tails heavier than normal more entries pass than
    requested. At low density it can be several times as many. S. Shi et al., "Understanding Top-k Sparsification in
    Distributed Deep Learning", 2019.
    """
    double = values.double()
    mean, sigma = float(double.mean()), float(double.std()) if values.numel() > 1 else 0.0
    threshold = mean + NormalDist().inv_cdf(1 - k / values.numel() / 2) * sigma
    lowest = threshold / _GAUSSIAN_STEP**_GAUSSIAN_TRIES
    candidates = kernels.select(values, lowest)
    keys = kernels.magnitude_keys(candidates.values)

    def count() -> int:
        return int(torch.count_nonzero(keys >= kernels.threshold_key(threshold)))

    first = count()
    for _ in range(_GAUSSIAN_TRIES):
        now = count()
        if first < 3 * k / 4 and now < 3 * k / 4:
            threshold /= _GAUSSIAN_STEP
        elif first > 5 * k / 4 and now > 5 * k / 4:
            threshold *= _GAUSSIAN_STEP
        else:
            break
    passed = keys >= kernels.threshold_key(threshold)
    if not passed.any():  # the values have no tail
        return kernels.top_k(values, k)
    return Selection.of(candidates.indices[passed], candidates.values[passed])


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
    density = k / values.numel()
    stages = 1 if density >= _FIRST_STAGE else stages
    shares = [density]
    if stages > 1:
        shares = [_FIRST_STAGE, *[(density / _FIRST_STAGE) ** (1 / (stages - 1))] * (stages - 1)]
    tail = Selection.of(torch.arange(values.numel(), dtype=torch.int32, device=values.device), values)
    shift = 0.0
    for share in shares:
        excess = tail.values.abs().double() - shift
        mean, variance = float(excess.mean()), float(excess.var()) if tail.found > 1 else 0.0
        if not (variance > 0 and mean > 0):
            return None
        threshold = shift + _pareto_excess(mean, variance, share)
        passed = kernels.magnitude_keys(tail.values) >= kernels.threshold_key(threshold)
        tail = Selection.of(tail.indices[passed], tail.values[passed])
        if tail.found == 0:
            return None
        shift = kernels.smallest_magnitude(tail.values)
    return tail


def _pareto_excess(mean: float, variance: float, share: float) -> float:
    """Return the value that a ``share`` of a generalized Pareto distribution with this mean and variance exceeds."""
    ratio = mean * mean / variance
    shape, scale = (ratio - 1) / 2, mean * (ratio + 1) / 2
    if abs(shape) < _EXPONENTIAL:
        return -scale * math.log(share)
    return float(scale * (1 - share**shape) / shape)
