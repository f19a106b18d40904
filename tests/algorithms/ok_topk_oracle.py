"""A reference implementation of Ok-Topk in plain Python lists and sets, for all ranks at once.

It is only for inputs whose sums are exact in any order. It shares nothing with the library except the recipe and
the formula that corrects reused thresholds.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
from tritoncomm import OkTopk
from tritoncomm.algorithms.ok_topk_rules import WARM_START, corrected_threshold


@dataclass
class Step:
    """The result of one step."""

    selected: list[set[int]]
    sums: dict[int, float]
    residuals: list[list[float]]
    reevaluated: bool


class Oracle:
    """The state of all ranks."""

    def __init__(self, recipe: OkTopk, world_size: int, numel: int) -> None:
        self.recipe, self.world_size, self.numel = recipe, world_size, numel
        self.k = min(numel, max(1, int(numel * recipe.density)))
        strict = recipe.strict_volume
        self.local_cap = math.ceil(self.k * (1 if strict else recipe.local_cap))
        self.global_cap = math.ceil(self.k * (1 if strict else recipe.global_cap))
        self.local = [0.0] * world_size
        self.threshold = 0.0
        self.number = 0
        self.reevaluate = self.repartition = True
        self.cuts: list[int] = []
        self.residuals = [[0.0] * numel for _ in range(world_size)]

    def step(self, gradients: list[list[float]]) -> Step:
        """Run one step as in appendix A of the specification, with sets."""
        ranks = range(self.world_size)
        acc = [[e + g for e, g in zip(self.residuals[r], gradients[r], strict=True)] for r in ranks]
        period = self.recipe.reevaluate_every
        schedule = {0} | {2**i for i in range(30) if 2**i < period}
        reevaluate = self.reevaluate or self.number in schedule or self.number % period == 0
        chosen = [self._choose(r, acc[r], reevaluate=reevaluate) for r in ranks]
        if self.repartition or self.number % self.recipe.repartition_every == 0:
            self.cuts = self._cut(chosen)
        if self.recipe.strict_volume and not reevaluate and self.world_size > 1:
            chosen = [self._limit_pairs(r, acc[r], chosen[r]) for r in ranks]
        sums: dict[int, float] = {}
        for r in ranks:
            for j in chosen[r]:
                sums[j] = sums.get(j, 0.0) + acc[r][j]
        sums = {j: v for j, v in sums.items() if v != 0}
        kept, wanted = self._select(sums, reevaluate=reevaluate)
        delivered = {j: sums[j] for j in kept}
        loads = Counter(self._owner(j) for c in chosen for j in c)
        self._adapt(delivered, wanted, len(reaching(sums, self.threshold)), loads, reevaluate=reevaluate)
        for r in ranks:
            for j in delivered.keys() & chosen[r]:
                acc[r][j] = 0.0
        self.residuals = acc
        self.number += 1
        return Step([set(c) for c in chosen], delivered, self.residuals, reevaluate)

    def _choose(self, rank: int, acc: list[float], *, reevaluate: bool) -> list[int]:
        limit = self.local[rank]
        if reevaluate or limit <= 0:
            best = largest({j: v for j, v in enumerate(acc) if v}, self.k)
            self.local[rank] = min((abs(acc[j]) for j in best), default=0.0) if len(best) == self.k else 0.0
            return sorted(best)
        limit = self._lowered(limit)
        passing = reaching({j: v for j, v in enumerate(acc) if v}, limit)
        self.local[rank] = self._corrected(limit, passing, len(passing))
        return sorted(largest(passing, self.local_cap))

    def _lowered(self, limit: float) -> float:
        return limit * (WARM_START if self.recipe.correct_thresholds else 1.0)

    def _corrected(self, limit: float, passed: dict[int, float], count: int) -> float:
        if not self.recipe.correct_thresholds:
            return limit
        if count >= self.k and passed:
            return min(abs(passed[j]) for j in largest(passed, self.k))
        return corrected_threshold(limit, count, self.k, self.numel)

    def _cut(self, chosen: list[list[int]]) -> list[int]:
        size = self.world_size
        valid = [c for c in chosen if len(c) >= size]
        if not valid:
            return [self.numel * j // size for j in range(size + 1)]
        inner = [sum(c[len(c) * j // size] for c in valid) // len(valid) for j in range(1, size)]
        return [0, *inner, self.numel]

    def _owner(self, j: int) -> int:
        return bisect_right(self.cuts, j) - 1  # the last of those that begin there: others are empty

    def _limit_pairs(self, rank: int, acc: list[float], chosen: list[int]) -> list[int]:
        limit = math.ceil(self.k / self.world_size)
        kept: list[int] = []
        for owner in range(self.world_size):
            part = {j: acc[j] for j in chosen if self._owner(j) == owner}
            kept += part if owner == rank else largest(part, limit)
        return sorted(kept)

    def _select(self, sums: dict[int, float], *, reevaluate: bool) -> tuple[list[int], int]:
        if self.world_size == 1:
            return list(sums), len(sums)
        if reevaluate:
            return largest(sums, self.k), len(sums)
        passing = reaching(sums, self._lowered(self.threshold))
        wanted = len(passing)
        if wanted <= self.global_cap:
            return list(passing), wanted
        parts = [{j: v for j, v in passing.items() if self._owner(j) == r} for r in range(self.world_size)]
        shares = [Fraction(len(part) * self.global_cap, wanted) for part in parts]
        places = [int(share) for share in shares]
        for r in sorted(range(self.world_size), key=lambda r: (places[r] - shares[r], r)):
            places[r] += sum(places) < self.global_cap
        return [j for part, places_ in zip(parts, places, strict=True) for j in largest(part, places_)], wanted

    def _adapt(
        self, kept: dict[int, float], wanted: int, candidates: int, loads: Counter[int], *, reevaluate: bool
    ) -> None:
        self.reevaluate = self.repartition = False
        if self.world_size == 1:
            return
        skewed = max(loads.values(), default=0) > self.recipe.skew_trigger * loads.total() / self.world_size
        self.repartition = skewed and self.k >= self.world_size
        if reevaluate:
            if not kept:
                self.reevaluate = True
            else:
                self.threshold = min(map(abs, kept.values()))
            return
        self.reevaluate = not self.recipe.drift_low * self.k <= candidates <= self.recipe.drift_high * self.k
        self.threshold = self._corrected(self._lowered(self.threshold), kept, wanted)


def reaching(values: dict[int, float], limit: float) -> dict[int, float]:
    """Return the values whose magnitude reaches a limit, which is rounded to fp32. They have no more bits."""
    least = float(np.float32(limit))
    return {j: v for j, v in values.items() if abs(v) >= least}


def largest(values: dict[int, float], k: int) -> list[int]:
    """Return the indices of the ``k`` largest magnitudes, ties to the lower index."""
    return sorted(values, key=lambda j: (-abs(values[j]), j))[:k]
