"""Any method, choosing entries in units of Adam's step instead of units of the gradient.

Adam moves all coordinates alike, those with small gradients as far as those with large ones. A method that compares
magnitudes serves rows of large gradients again and again and lets the others wait. Here it sees every coordinate
divided by the root of its second moment. That moment is taken from what has been delivered, which all ranks know, so
that nothing is sent for it; and it is rounded to powers of two, so that no bit is lost by dividing and multiplying.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

import tritoncomm_kernels as kernels
from tritoncomm.accumulator import Accumulator
from tritoncomm.algorithms.around import AlgorithmAround, RecipeAround
from tritoncomm.algorithms.base import Algorithm, check, check_at_least, check_number
from tritoncomm.cost import Forecast
from tritoncomm.errors import ConfigurationError, NonFiniteError
from tritoncomm.factored import Matrices
from tritoncomm.scheduler.rounds import Pattern
from tritoncomm.sparse import SparseVector


@dataclass(frozen=True, kw_only=True)
class Preconditioned(RecipeAround):
    """``recipe`` for vectors in which tensors of ``shapes`` lie one after the other.

    The second moment decays by ``decay`` per step. A coordinate is divided by ``(moment / mean moment + floor) **
    power``, which is computed every ``renew_every`` steps; until the first time it is 1. What is owed stays in units of
    the gradient. It costs three more passes over the vector, and memory of three times its size.
    """

    name: ClassVar[str] = "preconditioned"
    shapes: tuple[tuple[int, ...], ...]
    decay: float = 0.99
    power: float = 0.5
    floor: float = 1e-3
    renew_every: int = 20

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number(self, "decay", "power")
        check(self, "decay", 0 <= self.decay < 1, "choose a share from 0 on and below 1")
        check(self, "power", 0 <= self.power <= 1, "choose 0.5 for a root, 0 for none")
        check_number(self, "floor")
        check(self, "floor", self.floor > 0, "choose a small share of the mean, above 0")
        check_at_least(self, 1, "renew_every", whole=True)

    def build(self, numel: int) -> PreconditionedAlgorithm:
        """See :meth:`Recipe.build`."""
        matrices = Matrices(self.shapes)
        holds = f"has {matrices.numel} elements, this vector {numel}: give the shapes of what lies in it"
        check(self, "shapes", matrices.numel == numel, holds)
        return PreconditionedAlgorithm(self, matrices)


@dataclass(frozen=True, eq=False)
class Moment:
    """Moving averages of the sums of squares per row and column (fp64), and those of which the scale was made.

    ``used`` is None until then. Never written to.
    """

    steps: int
    rows: torch.Tensor
    columns: torch.Tensor
    used: tuple[torch.Tensor, torch.Tensor] | None = None

    def _content(self) -> tuple[torch.Tensor, ...]:
        return (self.rows, self.columns, *(self.used or ()))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Moment):
            return NotImplemented
        mine, theirs = self._content(), other._content()
        return self.steps == other.steps and len(mine) == len(theirs) and all(map(torch.equal, mine, theirs))

    __hash__ = None  # type: ignore[assignment]


class PreconditionedAlgorithm(AlgorithmAround):
    """The inner algorithm on a scaled vector, and the moment that the scale is made of."""

    def __init__(self, recipe: Preconditioned, matrices: Matrices) -> None:
        super().__init__(matrices.numel)
        self.recipe = recipe
        self._matrices = matrices
        self._inner = recipe.recipe.build(matrices.numel)
        self._moment = self._nothing()
        # Made of moment.used, and kept as long as it is the same.
        self._scale: tuple[object, torch.Tensor] | None = None

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
            divided = acc.divided(scale)
            mean = yield from self.inner.reduce(divided, rank, world_size)
            acc.take_back(divided, scale)
            mean = _times(mean, scale)
            if kernels.has_non_finite(mean.values):  # on all ranks alike
                raise NonFiniteError("the mean of the gradients overflows; nothing was applied")
        self.report = self.inner.report
        self._moment = self._after(mean)
        return mean

    def scale(self, device: torch.device) -> torch.Tensor | None:
        """What coordinates are divided by (fp32 ``[numel]``, powers of two); None while that is 1 everywhere."""
        used = self._moment.used
        if used is None:
            return None
        if self._scale is None or self._scale[0] is not used:
            rows, columns = (part.to(device) for part in used)
            self._scale = used, self._matrices.root(rows, columns, power=self.recipe.power, floor=self.recipe.floor)
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

    def _nothing(self) -> Moment:
        rows, columns = (
            torch.zeros(length, dtype=torch.float64) for length in (self._matrices.rows, self._matrices.columns)
        )
        return Moment(0, rows, columns)

    def prepare(self, acc: Accumulator, world_size: int) -> None:
        """See :meth:`Algorithm.prepare`."""
        self.inner.prepare(acc, world_size)

    def dense_update(self, mean: torch.Tensor) -> torch.Tensor:
        """See :meth:`Algorithm.dense_update`."""
        return self.inner.dense_update(mean)

    def predicted_traffic(self, world_size: int) -> Forecast:
        """See :meth:`Algorithm.predicted_traffic`: the inner algorithm's."""
        return self.inner.predicted_traffic(world_size)

    def ordinary_traffic(self, world_size: int) -> Forecast:
        """See :meth:`Algorithm.ordinary_traffic`: the inner algorithm's."""
        return self.inner.ordinary_traffic(world_size)

    def follow(self, other: Algorithm) -> None:
        """See :meth:`Algorithm.follow`: the moment."""
        assert isinstance(other, PreconditionedAlgorithm)
        self._moment = other._moment  # noqa: SLF001 - of the same class
        super().follow(other)

    def migrate(self, states: Sequence[Mapping[str, Any]], share: float, common: Mapping[str, Any]) -> None:
        """See :meth:`Algorithm.migrate`: the moment, which is that of the mean."""
        self._moment = self._loaded(common)
        self.inner.migrate([state["inner"] for state in states], share, common["inner"])

    def common_state(self) -> dict[str, Any]:
        """See :meth:`Algorithm.common_state`: of the moment, the steps and the sum."""
        moment = self._moment
        return {"steps": moment.steps, "moment": float(moment.rows.sum()), "inner": self.inner.common_state()}

    def state_dict(self) -> dict[str, Any]:
        """See :meth:`Algorithm.state_dict`."""
        moment = self._moment
        return {
            "steps": moment.steps,
            "rows": moment.rows,
            "columns": moment.columns,
            "used": moment.used,
            "inner": self.inner.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See :meth:`Algorithm.load_state_dict`."""
        if set(state) != {"steps", "rows", "columns", "used", "inner"}:
            raise ConfigurationError(f"this is not a state of a preconditioned method: it has {sorted(state)}")
        moment = self._loaded(state)
        self.inner.load_state_dict(state["inner"])
        self._moment = moment

    def _loaded(self, state: Mapping[str, Any]) -> Moment:
        used = None if state["used"] is None else tuple(state["used"])
        moment = Moment(int(state["steps"]), state["rows"], state["columns"], used)
        expected = (len(self._moment.rows), len(self._moment.columns))
        if (len(moment.rows), len(moment.columns)) != expected:
            raise ConfigurationError(
                f"a moment of {len(moment.rows)} rows and {len(moment.columns)} columns was loaded, needed are "
                f"{expected[0]} and {expected[1]}: wrap as it was saved"
            )
        return moment


def _times(mean: SparseVector, scale: torch.Tensor) -> SparseVector:
    if mean.is_full:
        return SparseVector.full(mean.values * scale)
    return SparseVector(mean.indices, mean.values * scale[mean.indices.long()], mean.numel)
