"""Select entries by the size of Adam's update. This works for any method that compares entries.

Adam moves all coordinates by similar amounts, whether their gradients are small or large. A method that compares
gradients keeps selecting rows with large gradients, and the other rows wait. Here the method sees every coordinate
divided by the root of its second moment. The moment is that of the delivered mean. All ranks have it, so nothing is
sent for it. The scale is rounded to powers of two. Division and multiplication by it are therefore exact for values
above 1e-32.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from tritoncomm.algorithms.base import Algorithm, check, check_at_least, check_number
from tritoncomm.algorithms.wrapper import WholeVectorWrapper, WrapperRecipe
from tritoncomm.errors import ConfigurationError
from tritoncomm.primitives.accumulator import Accumulator
from tritoncomm.primitives.second_moment import FactoredSecondMoment, Moment
from tritoncomm.primitives.sparse_vector import SparseVector
from tritoncomm.scheduler.rounds import Pattern, read
from tritoncomm_kernels import Padded

# Added to the second moment, in units of its mean. It limits the gain of a row without gradient to 32.
_FLOOR = 2.0**-10
# Thresholds are discarded if the scale changes at more than this share of the coordinates.
_NOTABLE = 0.1


@dataclass(frozen=True, kw_only=True)
class Preconditioned(WrapperRecipe):
    """Apply ``recipe`` to a vector that is divided by the root of its second moment.

    ``shapes`` are the shapes of the tensors in the vector, in order. The second moment decays by ``decay`` per step.
    Every ``renew_every`` steps a new scale is computed from it. Until the first time the scale is 1. Residuals stay in
    gradient units. The scale takes as much memory as the vector, and applying it takes two more passes over the vector.
    """

    name: ClassVar[str] = "preconditioned"
    shapes: tuple[tuple[int, ...], ...]
    decay: float = 0.99
    renew_every: int = 20

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number(self, "decay")
        check(self, "decay", 0 <= self.decay < 1, "must be in [0, 1)")
        check_at_least(self, 1, "renew_every", whole=True)
        compares = "must be a method that compares entries with each other, and not preconditioned already"
        check(self, "recipe", self.recipe.compares_entries(), compares)

    def compares_entries(self) -> bool:
        """See :meth:`Recipe.compares_entries`. A recipe cannot be preconditioned twice."""
        return False

    def build(self, numel: int) -> PreconditionedAlgorithm:
        """See :meth:`Recipe.build`."""
        matrices = FactoredSecondMoment(self.shapes)
        holds = f"have {matrices.numel} elements, but the vector has {numel}: give the shapes of all its tensors"
        check(self, "shapes", matrices.numel == numel, holds)
        return PreconditionedAlgorithm(self, matrices)


class PreconditionedAlgorithm(WholeVectorWrapper):
    """Run the inner algorithm on the scaled vector, and track the moment that determines the scale."""

    def __init__(self, recipe: Preconditioned, matrices: FactoredSecondMoment) -> None:
        super().__init__(matrices.numel)
        self.recipe = recipe
        self._matrices = matrices
        self._inner = recipe.recipe.build(matrices.numel)
        self._moment = Moment.of(matrices)
        # Cache: a value of moment.used and the scale computed from it.
        self._scale: tuple[object, torch.Tensor | None] = None, None

    @property
    def inner(self) -> Algorithm:
        """The algorithm for the scaled vector."""
        return self._inner

    @property
    def state(self) -> tuple[Moment, Any]:
        """The moment and the state of the inner algorithm."""
        return self._moment, self.inner.state

    @state.setter
    def state(self, state: tuple[Moment, Any]) -> None:
        self._moment, self.inner.state = state

    def reduce(self, acc: Accumulator, rank: int, world_size: int) -> Pattern[SparseVector]:
        """See :meth:`Algorithm.reduce`."""
        scale = self.scale(acc.device)
        if scale is None:
            mean = yield from self.inner.reduce(acc, rank, world_size)
        else:
            scaled = acc.scaled(scale)
            mean = yield from self.inner.reduce(scaled, rank, world_size)
            acc.unscale_from(scaled, scale)
            mean = _times(mean, scale)
        self.report = self.inner.report
        before, self._moment = self._moment.used, self._after(mean)
        if self._moment.used is not before and (yield from self._renew(scale, acc.device)):
            self.inner.invalidate_thresholds()
        return mean

    def _renew(self, before: torch.Tensor | None, device: torch.device) -> Pattern[bool]:
        """Compute the scale again, and return True if thresholds for the one ``before`` no longer apply."""
        assert self._moment.used is not None
        after = self._root(device, (yield from read("moment", self._moment.used[0])))
        if not after.numel():
            self._scale = self._moment.used, None
            return False
        changed = torch.count_nonzero(after != (1.0 if before is None else before))
        differs, count = yield from read("moment", torch.stack([(after.min() < after.max()).long(), changed]))
        self._scale = self._moment.used, after if differs else None
        if before is None or not differs:
            return before is not None or bool(differs)
        return bool(count > _NOTABLE * len(after))

    def scale(self, device: torch.device) -> torch.Tensor | None:
        """Return the divisors of the coordinates (fp32 ``[numel]``, powers of two), or None while all are equal."""
        used = self._moment.used
        if used is not self._scale[0]:
            scale = None if used is None else self._root(device)
            differs = scale is not None and scale.numel() > 0 and bool(scale.min() < scale.max())
            self._scale = used, scale if differs else None
        return self._scale[1]

    def _root(self, device: torch.device, sums: list[float] | None = None) -> torch.Tensor:
        """Return the scale. ``sums`` is the content of the rows of the moment, if it is known."""
        assert self._moment.used is not None
        rows, columns = self._moment.used
        return self._matrices.root(rows.to(device), columns.to(device), _FLOOR, sums)

    def _after(self, mean: SparseVector) -> Moment:
        """Return the moment after a step that delivered ``mean``."""
        before, decay = self._moment, self.recipe.decay
        rows, columns = (
            decay * held.to(new.device) + (1 - decay) * new
            for held, new in zip((before.rows, before.columns), self._matrices.sums(mean), strict=True)
        )
        steps = before.steps + 1
        return Moment(steps, rows, columns, (rows, columns) if steps % self.recipe.renew_every == 0 else before.used)

    def adopt_tensors(self, sources: Sequence[tuple[PreconditionedAlgorithm, int] | None]) -> None:
        """Copy the moment of each tensor of this vector from a tensor of another vector.

        Args:
            sources: For each tensor, an algorithm and the place of the same tensor in its vector. None if the tensor is
                new, then its moment is zero.
        """
        known = [source for source in sources if source is not None]
        if not known:
            return
        moments = [algorithm._moment for algorithm, _ in known]  # noqa: SLF001 - of the same class

        def joined(part: str, lengths: Sequence[int], *, used: bool) -> torch.Tensor:
            parts = [
                torch.zeros(length, dtype=torch.float64) if source is None else source[0]._part(part, source[1], used)  # noqa: SLF001
                for source, length in zip(sources, lengths, strict=True)
            ]
            return torch.cat([piece.to(moments[0].rows.device) for piece in parts])

        rows, columns = self._matrices.rows, self._matrices.columns
        used = None
        if any(moment.used is not None for moment in moments):
            used = joined("rows", rows, used=True), joined("columns", columns, used=True)
        self._moment = Moment(
            moments[0].steps, joined("rows", rows, used=False), joined("columns", columns, used=False), used
        )

    def _part(self, part: str, place: int, used: bool) -> torch.Tensor:
        """Return the rows or the columns of the tensor at ``place``: those of the current scale if ``used``."""
        rows = part == "rows"
        lengths = self._matrices.rows if rows else self._matrices.columns
        whole = self._moment.rows if rows else self._moment.columns
        if used:
            held = self._moment.used
            whole = torch.zeros_like(whole) if held is None else held[0 if rows else 1]
        return torch.split(whole, lengths)[place]

    def adopt_across_density(self, other: Algorithm) -> None:
        """See :meth:`Algorithm.adopt_across_density`. Copies the moment."""
        assert isinstance(other, PreconditionedAlgorithm)
        self._moment = other._moment  # noqa: SLF001 - of the same class
        super().adopt_across_density(other)

    def migrate(self, states: Sequence[Mapping[str, Any]], share: float, common: Mapping[str, Any]) -> None:
        """See :meth:`Algorithm.migrate`. Copies the moment, which is that of the mean."""
        moment = _moment(common)
        if moment is not None and moment.fits(self._matrices):
            self._moment = moment
        self.inner.migrate([without_scale(state) for state in states], share, without_scale(common))

    def common_state(self) -> dict[str, Any]:
        """See :meth:`Algorithm.common_state`."""
        return {"moment": self._moment.digest(), "inner": self.inner.common_state()}

    def state_dict(self) -> dict[str, Any]:
        """See :meth:`Algorithm.state_dict`."""
        moment = self._moment
        content = {"steps": moment.steps, "rows": moment.rows, "columns": moment.columns, "used": moment.used}
        return {"moment": content, "inner": self.inner.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See :meth:`Algorithm.load_state_dict`.

        A state of the inner algorithm alone is accepted too. It starts a new moment.
        """
        moment = _moment(state)
        if moment is not None and not moment.fits(self._matrices):
            raise ConfigurationError(
                f"loaded second moment has {len(moment.rows)} rows and {len(moment.columns)} columns, expected "
                f"{sum(self._matrices.rows)} and {sum(self._matrices.columns)}: use the parameters and settings "
                "with which it was saved"
            )
        self.inner.load_state_dict(without_scale(state))
        self._moment = moment or Moment.of(self._matrices)


def without_scale(state: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the inner algorithm's part of a :class:`PreconditionedAlgorithm` state. Return other states unchanged."""
    return state["inner"] if set(state) == {"moment", "inner"} else state


def _moment(state: Mapping[str, Any]) -> Moment | None:
    if set(state) != {"moment", "inner"}:
        return None
    content = state["moment"]
    used = None if content["used"] is None else tuple(content["used"])
    return Moment(int(content["steps"]), content["rows"], content["columns"], used)


def _times(mean: SparseVector, scale: torch.Tensor) -> SparseVector:
    if mean.is_full:
        return SparseVector.full(mean.values * scale)
    if mean.is_padded:  # the value of padding is 0, whatever its scale
        values = mean.values * scale[mean.indices.clamp(min=0).long()]
        return SparseVector.padded(Padded(mean.indices, values), mean.numel)
    return SparseVector(mean.indices, mean.values * scale.index_select(0, mean.indices), mean.numel)
