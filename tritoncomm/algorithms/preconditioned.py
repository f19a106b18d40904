"""Any method that compares entries, choosing them by the update that Adam makes of them.

Adam moves all coordinates alike, those with small gradients as far as those with large ones. A method that compares
gradients serves rows of large ones again and again and lets the others wait. Here it sees every coordinate divided by
the root of its second moment. That moment is of what has been delivered, which all ranks know, so that nothing is sent
for it; and it is rounded to powers of two, so that dividing and multiplying lose no bit of a value above 1e-32.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from tritoncomm.algorithms.base import Algorithm, check, check_at_least, check_number
from tritoncomm.algorithms.wrapper import WholeVectorWrapper, WrapperRecipe
from tritoncomm.errors import ConfigurationError
from tritoncomm.primitives.accumulator import Accumulator
from tritoncomm.primitives.second_moment import FactoredSecondMoment
from tritoncomm.primitives.sparse_vector import SparseVector
from tritoncomm.scheduler.cost import Forecast
from tritoncomm.scheduler.rounds import Pattern

_FLOOR = 2.0**-10  # of a moment, in means: a row without gradient is not blown up more than 32 times
_NOTABLE = 0.1  # share of the coordinates whose scale changes, from which thresholds are of no more use


@dataclass(frozen=True, kw_only=True)
class Preconditioned(WrapperRecipe):
    """``recipe`` for vectors in which tensors of ``shapes`` lie one after the other.

    The second moment decays by ``decay`` per step; the scale is made of it every ``renew_every`` steps, and is 1 until
    then. What is owed stays in units of the gradient. It takes the memory of the vector once more, and two passes.
    """

    name: ClassVar[str] = "preconditioned"
    shapes: tuple[tuple[int, ...], ...]
    decay: float = 0.99
    renew_every: int = 20

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number(self, "decay")
        check(self, "decay", 0 <= self.decay < 1, "choose a share from 0 on and below 1")
        check_at_least(self, 1, "renew_every", whole=True)
        compares = "give a method that compares entries with each other, and not twice"
        check(self, "recipe", self.recipe.compares_entries(), compares)

    def compares_entries(self) -> bool:
        """See :meth:`Recipe.compares_entries`: it does already."""
        return False

    def build(self, numel: int) -> PreconditionedAlgorithm:
        """See :meth:`Recipe.build`."""
        matrices = FactoredSecondMoment(self.shapes)
        holds = f"has {matrices.numel} elements, this vector {numel}: give the shapes of what lies in it"
        check(self, "shapes", matrices.numel == numel, holds)
        return PreconditionedAlgorithm(self, matrices)


@dataclass(frozen=True, eq=False)
class Moment:
    """Moving averages of the sums of squares per row and column (fp64), and those of which the scale is made.

    ``used`` is None until there is one. Never written to.
    """

    steps: int
    rows: torch.Tensor
    columns: torch.Tensor
    used: tuple[torch.Tensor, torch.Tensor] | None = None

    @classmethod
    def of(cls, matrices: FactoredSecondMoment) -> Moment:
        """Before the first step."""
        rows, columns = (torch.zeros(sum(part), dtype=torch.float64) for part in (matrices.rows, matrices.columns))
        return cls(0, rows, columns)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Moment) and self.digest() == other.digest()

    __hash__ = None  # type: ignore[assignment]

    def digest(self) -> str:
        """Of all bits."""
        content = hashlib.blake2b(str(self.steps).encode(), digest_size=16)
        for part in (self.rows, self.columns, *(self.used or ())):
            content.update(part.cpu().numpy().data)
        return content.hexdigest()

    def fits(self, matrices: FactoredSecondMoment) -> bool:
        """True when it is of these matrices."""
        return len(self.rows) == sum(matrices.rows) and len(self.columns) == sum(matrices.columns)

    def extended(self, matrices: FactoredSecondMoment) -> Moment:
        """The same, with zeros for further matrices at the end."""

        def pad(part: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
            return torch.cat([part, part.new_zeros(sum(lengths) - len(part))])

        rows, columns = pad(self.rows, matrices.rows), pad(self.columns, matrices.columns)
        used = self.used and (pad(self.used[0], matrices.rows), pad(self.used[1], matrices.columns))
        return Moment(self.steps, rows, columns, used)


class PreconditionedAlgorithm(WholeVectorWrapper):
    """The inner algorithm on a scaled vector, and the moment that the scale is made of."""

    def __init__(self, recipe: Preconditioned, matrices: FactoredSecondMoment) -> None:
        super().__init__(matrices.numel)
        self.recipe = recipe
        self._matrices = matrices
        self._inner = recipe.recipe.build(matrices.numel)
        self._moment = Moment.of(matrices)
        # Made of moment.used, and kept as long as it is the same.
        self._scale: tuple[object, torch.Tensor | None] = None, None

    @property
    def inner(self) -> Algorithm:
        """For the scaled vector."""
        return self._inner

    @property
    def state(self) -> tuple[Moment, Any]:
        """The moment, and the inner state."""
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
        self._moment = self._after(mean)
        if self._moment.used is not None and _differ(scale, self.scale(acc.device)):
            self.inner.invalidate_thresholds()
        return mean

    def scale(self, device: torch.device) -> torch.Tensor | None:
        """What coordinates are divided by (fp32 ``[numel]``, powers of two); None while that is the same for all."""
        used = self._moment.used
        if used is not self._scale[0]:
            scale = None if used is None else self._matrices.root(used[0].to(device), used[1].to(device), _FLOOR)
            differs = scale is not None and scale.numel() > 0 and bool(scale.min() < scale.max())
            self._scale = used, scale if differs else None
        return self._scale[1]

    def _after(self, mean: SparseVector) -> Moment:
        """The moment after a step that has delivered ``mean``."""
        before, decay = self._moment, self.recipe.decay
        rows, columns = (
            decay * held.to(new.device) + (1 - decay) * new
            for held, new in zip((before.rows, before.columns), self._matrices.sums(mean), strict=True)
        )
        steps = before.steps + 1
        return Moment(steps, rows, columns, (rows, columns) if steps % self.recipe.renew_every == 0 else before.used)

    def ordinary_traffic(self, world_size: int) -> Forecast:
        """See :meth:`Algorithm.ordinary_traffic`: the inner algorithm's."""
        return self.inner.ordinary_traffic(world_size)

    def adopt_across_layout(self, other: Algorithm) -> None:
        """See :meth:`Algorithm.adopt_across_layout`: the moment of tensors that both have, when new ones come last."""
        assert isinstance(other, PreconditionedAlgorithm)
        shapes = other.recipe.shapes
        if shapes == self.recipe.shapes[: len(shapes)]:
            self._moment = other._moment.extended(self._matrices)  # noqa: SLF001 - of the same class
        super().adopt_across_layout(other)

    def adopt_across_density(self, other: Algorithm) -> None:
        """See :meth:`Algorithm.adopt_across_density`: the moment."""
        assert isinstance(other, PreconditionedAlgorithm)
        self._moment = other._moment  # noqa: SLF001 - of the same class
        super().adopt_across_density(other)

    def migrate(self, states: Sequence[Mapping[str, Any]], share: float, common: Mapping[str, Any]) -> None:
        """See :meth:`Algorithm.migrate`: the moment, which is that of the mean."""
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
        """See :meth:`Algorithm.load_state_dict`; the inner algorithm's own state begins a new moment."""
        moment = _moment(state)
        if moment is not None and not moment.fits(self._matrices):
            raise ConfigurationError(
                f"a moment of {len(moment.rows)} rows and {len(moment.columns)} columns was loaded, needed are "
                f"{sum(self._matrices.rows)} and {sum(self._matrices.columns)}: wrap as it was saved"
            )
        self.inner.load_state_dict(without_scale(state))
        self._moment = moment or Moment.of(self._matrices)


def without_scale(state: Mapping[str, Any]) -> Mapping[str, Any]:
    """The inner algorithm's part of the state of a :class:`PreconditionedAlgorithm`; any other state as it is."""
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
    return SparseVector(mean.indices, mean.values * scale[mean.indices.long()], mean.numel)


def _differ(before: torch.Tensor | None, after: torch.Tensor | None) -> bool:
    """True when magnitudes have changed their meaning notably."""
    if before is None or after is None:
        return before is not after
    return before is not after and int(torch.count_nonzero(before != after)) > _NOTABLE * len(after)
