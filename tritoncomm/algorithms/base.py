"""The contract of an exchange method: a recipe that a user writes, an algorithm that holds its state."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch

from tritoncomm.errors import ConfigurationError
from tritoncomm.primitives.accumulator import Accumulator
from tritoncomm.primitives.sparse_vector import SparseVector
from tritoncomm.scheduler import cost
from tritoncomm.scheduler.cost import Forecast, Formula
from tritoncomm.scheduler.rounds import Pattern
from tritoncomm_kernels import Workspace
from tritoncomm_kernels.checks import INDEX_LIMIT


@dataclasses.dataclass(frozen=True)
class Stateless:
    """The state of a method that remembers nothing."""


class Algorithm(ABC):
    """The state of one method for one flat vector of ``numel`` elements.

    ``state`` is immutable and replaced as a whole when a step has gone through, so that a failed step
    is undone by putting the old one back. ``report`` says what the last step did, for the metrics.
    """

    state: Any

    def __init__(self, numel: int) -> None:
        if numel > INDEX_LIMIT:
            raise ConfigurationError(
                f"numel={numel}: indices are int32, split the vector into parts of at most {INDEX_LIMIT}"
            )
        self.numel = numel
        self.workspace = Workspace()  # scratch memory of the kernels, kept between steps
        self.report: dict[str, float] = {}

    @abstractmethod
    def reduce(self, acc: Accumulator, rank: int, world_size: int) -> Pattern[SparseVector]:
        """The exchange of one step: yields rounds, returns the mean over ranks, the same on all.

        Clears in ``acc`` exactly what this rank contributed to that mean. Raises
        :class:`~tritoncomm.NonFiniteError` on every rank when any rank holds a NaN or Inf.
        """

    @abstractmethod
    def predicted_traffic(self, world_size: int) -> Forecast:
        """Upper bound, per rank, phase and direction, for the next step from the present state."""

    def ordinary_traffic(self, world_size: int) -> Forecast:
        """The paper's formula: what most steps of a long run cost at most."""
        return self.predicted_traffic(world_size)

    def prepare(self, acc: Accumulator, world_size: int) -> None:  # noqa: B027 - most take gradients as they are
        """Change this rank's gradient as a whole, before any of it is exchanged: clipping, for example."""

    def dense_update(self, mean: torch.Tensor) -> torch.Tensor:
        """What to hand to the optimizer for coordinates that travel dense beside the vector, from their mean."""
        return mean

    def invalidate_thresholds(self) -> None:  # noqa: B027 - most remember none, or follow by themselves
        """The vector is in other units from the next step on: find anew whatever magnitudes were compared with."""

    def adopt_across_layout(self, other: Algorithm) -> None:  # noqa: B027 - most methods have nothing to inherit
        """Take over from ``other``, of the same recipe for another vector, what does not depend on the vector."""

    def adopt_across_density(self, other: Algorithm) -> None:  # noqa: B027 - most methods start afresh
        """Take over from ``other``, of the same recipe at another density, what does not depend on the density."""

    def migrate(  # noqa: B027 - what most methods have learnt belongs to a world size
        self, states: Sequence[Mapping[str, Any]], share: float, common: Mapping[str, Any]
    ) -> None:
        """Take over what does not depend on the number of workers from another number of them.

        ``states`` (:meth:`state_dict`) are of the workers whose residuals this one got, each times ``share``;
        there may be none. ``common`` is the state of one worker, the same on all ranks.
        """

    def common_state(self) -> dict[str, Any]:
        """What of the state is the same on all ranks in a sound run."""
        return self.state_dict()

    def state_dict(self) -> dict[str, Any]:
        """The state as plain numbers, strings and tuples."""
        return dataclasses.asdict(self.state)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from what :meth:`state_dict` returned."""
        known = {field.name for field in dataclasses.fields(self.state)}
        if set(state) != known:
            raise ConfigurationError(
                f"this is not a state of {type(self).__name__}: it has {sorted(state)}, needed are {sorted(known)}"
            )
        self.state = type(self.state)(**state)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe(ABC):
    """What a user writes: a method and its settings. ``density`` is the share of entries to deliver."""

    name: ClassVar[str]
    density: float = 0.01

    def __post_init__(self) -> None:
        check_number(self, "density")
        check(self, "density", 0 < self.density <= 1, "choose a share above 0 and at most 1")

    @abstractmethod
    def build(self, numel: int) -> Algorithm:
        """A fresh algorithm for one flat vector of ``numel`` elements."""

    def check_world_size(self, world_size: int) -> None:  # noqa: B027 - most methods take any
        """Raise :class:`ConfigurationError` when the method cannot run with ``world_size`` workers as it is set."""

    def subgroups(self, world_size: int) -> list[tuple[int, ...]]:
        """Groups of ranks among which the method exchanges by itself; most have none."""
        return []

    def compares_entries(self) -> bool:
        """True when entries are chosen by how large they are beside others, so that their units decide."""
        return True

    def check_optimizer(self, optimizer: torch.optim.Optimizer) -> None:  # noqa: B027 - most go with any
        """Raise :class:`ConfigurationError` when ``optimizer`` would undo what the method does."""

    def formula(self, numel: int, world_size: int) -> Formula:
        """The method's row in the papers' tables, for an ordinary step; from :meth:`predicted_traffic` unless given."""
        forecast = self.predicted_traffic(numel, world_size)
        words = forecast.received.bytes / cost.WORD
        return Formula(forecast.received.messages, words, words)

    def predicted_traffic(self, numel: int, world_size: int) -> Forecast:
        """The paper's formula for ``numel`` elements, phase by phase: what most steps of a long run cost at most."""
        return self.build(numel).ordinary_traffic(world_size)


def check(recipe: Recipe, field: str, holds: bool, fix: str) -> None:
    """Raise :class:`ConfigurationError` naming ``field`` of ``recipe``, its value and the ``fix``."""
    if not holds:
        value = getattr(recipe, field)
        raise ConfigurationError(f"{type(recipe).__name__}({field}={value!r}): {fix}")


def check_number(recipe: Recipe, *fields: str, whole: bool = False) -> None:
    """Every one of ``fields`` is a number; a whole one if asked for."""
    for field in fields:
        value = getattr(recipe, field)
        is_number = isinstance(value, int if whole else (int, float)) and not isinstance(value, bool)
        check(recipe, field, is_number, f"give a {'whole ' if whole else ''}number")


def check_at_least(recipe: Recipe, least: float, *fields: str, whole: bool = False) -> None:
    """Every one of ``fields`` is a number, a whole one if asked for, of at least ``least``."""
    check_number(recipe, *fields, whole=whole)
    for field in fields:
        check(recipe, field, getattr(recipe, field) >= least, f"choose at least {least}")
