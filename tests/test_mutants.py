"""Deliberately broken methods. The laws must catch each of them, or they prove nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import pytest
from tritoncomm.algorithms.base import Algorithm
from tritoncomm.algorithms.ok_topk import OkTopk, OkTopkAlgorithm
from tritoncomm.algorithms.topk_allgather import TopkAllgather, TopkAllgatherAlgorithm
from tritoncomm.primitives import packing
from tritoncomm.primitives.collectives import bruck_all_gather
from tritoncomm.primitives.selection import entries_to_keep
from tritoncomm.primitives.sparse_vector import SparseVector
from tritoncomm.scheduler.cost import Forecast

import laws
import tritoncomm_kernels as kernels

CASE = laws.Case(5, 90, ("random",) * 6, seed=3)
FLOATS = laws.Case(5, 90, ("random",) * 6, seed=3, exact=False)


class DropsOne(OkTopkAlgorithm):
    """Drops the last delivered entry after the residuals were cleared."""

    def reduce(self, acc, rank, world_size):
        mean = yield from super().reduce(acc, rank, world_size)
        return SparseVector(mean.indices[:-1], mean.values[:-1], mean.numel)


class SumsInArrivalOrder(TopkAllgatherAlgorithm):
    """Adds its own list first, so the ranks round differently."""

    def reduce(self, acc, rank, world_size):
        own = acc.top_k(self.k)
        message = packing.pack_padded(own.indices, own.values, 2 * self.k)
        blocks = yield from bruck_all_gather(message, [2 * self.k] * world_size, rank, world_size, phase="all-gather")
        lists = [packing.unpack_padded(block) for block in blocks]
        indices, sums = kernels.merge(lists[rank:] + lists[:rank], self.numel)
        acc.clear(own.indices)
        return SparseVector(indices, sums / world_size, self.numel)


class ForgetsToRollBack(OkTopkAlgorithm):
    """Counts the step before the exchange, in an attribute that a rollback does not restore."""

    taken = 0

    def reduce(self, acc, rank, world_size):
        self.taken += 1
        return (yield from super().reduce(acc, rank, world_size))

    def scheduled(self, step):
        return super().scheduled(self.taken)


class WritesTooEarly(OkTopkAlgorithm):
    """Clears the residual during its fourth operation, and restores it afterwards."""

    def writes(self, number):
        """Whether it does so during the operation with this number."""
        return number == 4

    def reduce(self, acc, rank, world_size):
        pattern, reply, number = super().reduce(acc, rank, world_size), None, 0
        try:
            while True:
                operation, number = pattern.send(reply), number + 1
                kept = acc.residual.clone()
                acc.residual.mul_(not self.writes(number))
                reply = yield operation
                acc.residual.copy_(kept)
        except StopIteration as stop:
            return stop.value


class WritesWhileItReuses(WritesTooEarly):
    """Clears the residual during operations of steps that reuse thresholds, and restores it afterwards."""

    def writes(self, number):
        return not self.scheduled(self.state.step)


class HidesNonFinite(TopkAllgatherAlgorithm):
    """Sends zeros instead of NaN and Inf."""

    def sent(self, values):
        """What it sends in place of ``values``."""
        return values.nan_to_num(0.0, 0.0, 0.0)

    def reduce(self, acc, rank, world_size):
        top_k = acc.top_k
        acc.top_k = lambda k: (own := top_k(k))._replace(values=self.sent(own.values))
        return (yield from super().reduce(acc, rank, world_size))


class ClampsItsEntries(HidesNonFinite):
    """Sends entries that are too large for a sum as smaller ones, and loses the difference."""

    def sent(self, values):
        return values.clamp(-1e37, 1e37)


class LosesOneAlone(TopkAllgatherAlgorithm):
    """Drops the last entry if there is a single worker."""

    def reduce(self, acc, rank, world_size):
        mean = yield from super().reduce(acc, rank, world_size)
        return mean if world_size > 1 else SparseVector(mean.indices[:-1], mean.values[:-1], mean.numel)


class ReturnsDescending(TopkAllgatherAlgorithm):
    """Returns its entries in descending order."""

    def reduce(self, acc, rank, world_size):
        mean = yield from super().reduce(acc, rank, world_size)
        return SparseVector(mean.indices.flip(0), mean.values.flip(0), mean.numel)


class CountsItsCalls(TopkAllgatherAlgorithm):
    """Returns values that depend on the number of calls in all runs."""

    calls = 0

    def reduce(self, acc, rank, world_size):
        type(self).calls += 1
        mean = yield from super().reduce(acc, rank, world_size)
        return SparseVector(mean.indices, mean.values * self.calls, mean.numel)


class ExceedsForecast(TopkAllgatherAlgorithm):
    """Predicts less traffic than it sends."""

    def predicted_traffic(self, world_size, *, ordinary=False):
        return Forecast({})


class WritesItsGradient(OkTopkAlgorithm):
    """Changes the gradient in place when there are several workers."""

    def reduce(self, acc, rank, world_size):
        if world_size > 1:
            acc.gradient[::2] = 0.0
        return (yield from super().reduce(acc, rank, world_size))


@dataclass(frozen=True, kw_only=True)
class Broken:
    """A recipe whose algorithm is of a broken ``kind``."""

    name: ClassVar[str] = "broken"
    kind: type[Algorithm] | None = None

    def build(self, numel, bounds=()):
        return self.kind(self, numel)


@dataclass(frozen=True, kw_only=True)
class BrokenOkTopk(Broken, OkTopk):
    """A recipe for a broken Ok-Topk."""


@dataclass(frozen=True, kw_only=True)
class BrokenTopk(Broken, TopkAllgather):
    """A recipe for a broken all-gather."""

    def build(self, numel, bounds=()):
        return self.kind(numel, entries_to_keep(numel, self.density))


def atomicity_in_every_round(recipe, case: laws.Case) -> None:
    """Fail every round once."""
    laws.atomicity(recipe, case, every_round=True)


@pytest.mark.parametrize(
    ("law", "recipe", "case"),
    [
        (laws.conservation, BrokenOkTopk(density=0.1, kind=DropsOne), CASE),
        (laws.equivalence, BrokenOkTopk(density=0.1, kind=DropsOne), CASE),
        (laws.agreement, BrokenTopk(density=0.5, kind=SumsInArrivalOrder), FLOATS),
        (laws.atomicity, BrokenOkTopk(density=0.1, kind=ForgetsToRollBack), CASE),
        (atomicity_in_every_round, BrokenOkTopk(density=0.1, kind=WritesTooEarly), CASE),
        (laws.atomicity, BrokenOkTopk(density=0.1, kind=WritesWhileItReuses), laws.FOUR_STEPS),
        (laws.faults, BrokenOkTopk(density=0.1, kind=ForgetsToRollBack), CASE),
        (laws.resume, BrokenOkTopk(density=0.1, kind=ForgetsToRollBack), CASE),
        (laws.determinism, BrokenTopk(density=0.1, kind=CountsItsCalls), CASE),
        (laws.form, BrokenTopk(density=0.1, kind=ReturnsDescending), CASE),
        (laws.identity, BrokenTopk(density=0.1, kind=LosesOneAlone), CASE),
        (laws.refusal, BrokenTopk(density=0.1, kind=HidesNonFinite), CASE),
        (laws.overflow, BrokenTopk(density=0.1, kind=ClampsItsEntries), CASE),
        (laws.conservation, BrokenOkTopk(density=0.1, kind=WritesItsGradient), CASE),
        (laws.equivalence, BrokenOkTopk(density=0.1, kind=WritesItsGradient), CASE),
        (laws.budget, BrokenTopk(density=0.1, kind=ExceedsForecast), CASE),
    ],
    ids=lambda value: getattr(value, "__name__", None) or getattr(getattr(value, "kind", None), "__name__", ""),
)
def test_broken_method_breaks_its_law(law, recipe, case: laws.Case) -> None:
    """A broken method breaks the law, and the intact method that it derives from obeys it.

    A step with other rounds than expected may miss a failure that is injected in one of them.
    """
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        law(recipe, case)
    kind = next(kind for kind in (OkTopk, TopkAllgather) if isinstance(recipe, kind))
    law(kind(density=recipe.density), case)


def test_exact_conservation_fails_on_rounded_sums() -> None:
    """Conservation without a tolerance fails on ordinary floats, so the exact form is strict."""
    recipe = TopkAllgather(density=0.5)
    with pytest.raises(AssertionError):
        laws.conservation(recipe, FLOATS)
