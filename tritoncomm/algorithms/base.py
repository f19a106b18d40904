"""The interface of an exchange method: a recipe holds the settings, an algorithm holds the state."""

from __future__ import annotations

import dataclasses
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch

from tritoncomm.errors import ConfigurationError
from tritoncomm.primitives.accumulator import Accumulator
from tritoncomm.primitives.carried import Carriers
from tritoncomm.primitives.packing import NO_VALUES, Encoding
from tritoncomm.primitives.sparse_vector import SparseVector
from tritoncomm.scheduler.cost import Forecast, Link
from tritoncomm.scheduler.rounds import Pattern
from tritoncomm_kernels.checks import INDEX_LIMIT
from tritoncomm_kernels.formats import ENTRY_FORMATS

Bounds = Sequence[int]


@dataclasses.dataclass(frozen=True)
class Stateless:
    """The state of a method that keeps nothing between steps."""


@dataclasses.dataclass(frozen=True)
class Counted:
    """The state of a method that draws from the number of successful exchanges, ``step``."""

    step: int = 0


class Algorithm(ABC):
    """One method for one flat vector of ``numel`` elements, with its state.

    ``state`` is immutable. A successful step replaces it as a whole, so a failed step is undone by restoring the old
    object. ``report`` holds figures about the last step, for the metrics: amounts, which are summed over vectors, and
    :class:`~tritoncomm.scheduler.meter.Ratio`. ``static`` says whether steps use the static form, and ``carried_by``
    what can carry other values in them, except dense ones.
    """

    state: Any
    static: bool = False
    carried_by: Carriers = Carriers()

    def __init__(self, numel: int) -> None:
        if numel > INDEX_LIMIT:
            raise ConfigurationError(
                f"numel={numel}: one exchange has at most {INDEX_LIMIT} values (int32 indices): shard the model by "
                "fully_shard(), or let several optimizers have a part of the parameters each, and wrap each"
            )
        self.numel = numel
        self.report: dict[str, float] = {}

    @abstractmethod
    def reduce(self, acc: Accumulator, rank: int, world_size: int) -> Pattern[SparseVector]:
        """Run the exchange of one step and return the mean over ranks, which is identical on all ranks.

        The generator yields operations (:data:`~tritoncomm.scheduler.rounds.Op`). It clears in ``acc`` exactly the part
        that this rank contributed to the mean. It raises :class:`~tritoncomm.NonFiniteError` on every rank if any rank
        holds a NaN or Inf.
        """

    @abstractmethod
    def predicted_traffic(self, world_size: int, *, ordinary: bool = False) -> Forecast:
        """Return what a rank sends and receives in a step, by phase.

        Without ``ordinary``, it is the most that any rank may send and receive in the next step, whatever its gradients
        are. It follows from the current state. The budget law checks it.

        With ``ordinary``, it is what the busiest rank sends and receives in an ordinary step, whatever the state is. An
        ordinary step reuses thresholds and regions, and its k entries are spread evenly over ranks and regions.
        """

    @property
    def is_static(self) -> bool:
        """True if the next step uses the static form, whose messages have a fixed length. See :class:`StaticRecipe`."""
        return self.static and not self.goes_dense

    @property
    def has_shared_verdict(self) -> bool:
        """True if all ranks check the same values in the next step, so that they agree without a message.

        On a GPU, and in the static form, ``acc.verdict`` then exists, and :meth:`reduce` must settle it. Otherwise it
        is None.
        """
        return self.goes_dense

    @property
    def goes_dense(self) -> bool:
        """True if the next step is a dense all-reduce of every entry, with any number of workers.

        Methods say so. An algorithm around another one does not.
        """
        return False

    def carriers(self, world_size: int, *, ordinary: bool = False) -> Carriers:
        """Return what can carry other values in the next step, or in an ``ordinary`` one."""
        return Carriers() if self.goes_dense else self.carried_by

    def prepare(self, acc: Accumulator, world_size: int) -> None:  # noqa: B027 - most do not change gradients
        """Change this rank's whole gradient before any part of it is exchanged, for example by clipping."""

    def dense_update(self, mean: torch.Tensor) -> torch.Tensor:
        """Return the update for coordinates that travel dense beside the vector, computed from their ``mean``."""
        return mean

    def invalidate_thresholds(self) -> None:  # noqa: B027 - most keep no threshold, or correct it in each step
        """Discard remembered thresholds. The units of the vector change with the next step."""

    def migrate(  # noqa: B027 - the state of most methods depends on the world size
        self, states: Sequence[Mapping[str, Any]], share: float, common: Mapping[str, Any]
    ) -> None:
        """Take over the state that does not depend on the world size from a run with another world size.

        ``states`` are the state dicts (:meth:`state_dict`) of the workers whose residuals this worker received. Each of
        these residuals was multiplied by ``share``. The list may be empty. ``common`` is the state dict of one worker,
        the same on all ranks.
        """

    def common_state(self) -> dict[str, Any]:
        """Return the part of the state that is identical on all ranks of a correct run."""
        return self.state_dict()

    def state_dict(self) -> dict[str, Any]:
        """Return the state as a dict of numbers, strings, tuples and tensors."""
        return dataclasses.asdict(self.state)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state that :meth:`state_dict` returned.

        Raises :class:`~tritoncomm.ConfigurationError` if its keys are not those of this algorithm.
        """
        known = {field.name for field in dataclasses.fields(self.state)}
        if set(state) != known:
            raise ConfigurationError(
                f"not a state of {type(self).__name__}: got keys {sorted(state)}, expected {sorted(known)}"
            )
        self.state = type(self.state)(**state)


class BudgetedAlgorithm(Algorithm):
    """A method that aims at ``k`` entries. If that is the whole vector, it is a dense all-reduce."""

    k: int

    @property
    def goes_dense(self) -> bool:
        return self.k >= self.numel


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe(ABC):
    """A method and its settings. ``density`` is the share of entries to deliver, in (0, 1].

    ``averages_when_dense`` says that a step at density 1 delivers the mean and has no other effect. Only then may the
    dense steps of a warm-up be quantized. ``has_density`` is False for a method that always delivers every entry, and
    whose density must therefore be 1. ``takes_updates`` is False for a method that is made for gradients, and
    would spoil the updates of an optimizer, for example by a momentum of its own.
    """

    name: ClassVar[str]
    averages_when_dense: ClassVar[bool] = False
    has_density: ClassVar[bool] = True
    takes_updates: ClassVar[bool] = True
    density: float = 0.01

    def __post_init__(self) -> None:
        check_number(self, "density")
        check(self, "density", 0 < self.density <= 1, "must be in (0, 1]")

    @property
    def layers(self) -> tuple[Recipe, ...]:
        """This recipe, and those inside of it if it wraps another one. The last one is the method."""
        return (self,)

    def with_method(self, change: Callable[[Recipe], Recipe]) -> Recipe:
        """Return a copy in which the method, the last of :attr:`layers`, is what ``change`` returns for it."""
        return change(self)

    @abstractmethod
    def build(self, numel: int, bounds: Bounds = ()) -> Algorithm:
        """Return a new algorithm for one flat vector of ``numel`` elements.

        ``bounds`` are the first coordinate of each tensor in the vector, ascending, and ``numel``. They are empty if
        the tensors are unknown. Most methods do not need them.
        """

    def check_world_size(self, world_size: int) -> None:  # noqa: B027 - most methods take any
        """Raise :class:`ConfigurationError` if the method cannot run with ``world_size`` workers and these settings."""

    def subgroups(self, world_size: int) -> list[tuple[int, ...]]:
        """Return the groups of ranks in which the method runs exchanges of its own. Most methods have none."""
        return []

    def compares_entries(self) -> bool:
        """Return True if the method selects entries by comparing their magnitudes, so that their units matter."""
        return True

    def delivers_all(self) -> bool:
        """Return True if every step delivers every entry, so that none of them is late."""
        return self.always_dense()

    def always_dense(self) -> bool:
        """Return True if every step delivers the exact mean of every entry."""
        return self.density == 1

    def dense_form(self) -> Recipe:
        """Return the recipe of the dense steps of a warm-up: the same method at density 1."""
        return dataclasses.replace(self, density=1.0)

    def check_optimizer(self, optimizer: torch.optim.Optimizer) -> None:  # noqa: B027 - most accept any
        """Raise :class:`ConfigurationError` if ``optimizer`` conflicts with the method."""


_FORMS = "must be True, False, 'auto', or a link such as '1gbit,50us'"


@dataclasses.dataclass(frozen=True, kw_only=True)
class StaticRecipe(Recipe):
    """A method that has the static form, at least with some settings.

    ``static`` says whether messages have a fixed length that does not depend on the data. The host then waits for a GPU
    twice in most steps, whatever the world size, and messages may be longer. Entries above a fixed length stay in the
    residual. ``"auto"`` means False. For vectors on a GPU, :func:`tritoncomm.wrap` resolves it to True if the settings
    have this form (:meth:`can_be_static`). A link such as ``"1gbit,50us"`` means the same, unless the longer messages
    take more time on this link than the waits. With nodes, it is the link between them.
    """

    static: bool | str = "auto"

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.static, str) and self.static != "auto":
            try:
                Link.parse(self.static)
            except ConfigurationError:
                check(self, "static", False, _FORMS)
        check(self, "static", isinstance(self.static, (str, bool)), _FORMS)
        has_form = self.static is not True or self.can_be_static()
        check(self, "static", has_form, f"{self.name} has no static form with these settings: leave out static")

    def can_be_static(self) -> bool:
        """Return True if the method has the static form with these settings."""
        return True


@dataclasses.dataclass(frozen=True, kw_only=True)
class IndexRecipe(Recipe):
    """A method that sends indices.

    ``packed`` says whether they are packed. A packed index needs about 2 + log2(1 / density) bits, a plain one 32. The
    result is the same. Packing takes time, so it pays on slow links. Rounded values are packed in any case, see
    :class:`EntryRecipe`.
    """

    packed: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check(self, "packed", isinstance(self.packed, bool), "must be True or False")

    @property
    def encoding(self) -> Encoding:
        """The format of messages."""
        return Encoding(NO_VALUES, self.packed)


@dataclasses.dataclass(frozen=True, kw_only=True)
class EntryRecipe(IndexRecipe):
    """A method whose messages hold entries: pairs of an index and a value.

    ``values`` is the format of a value on the wire. ``"fp32"`` sends all bits. Others, such as ``"4bit"``,
    round, and keep the exact difference in the residual: those with tables of
    :data:`tritoncomm_kernels.formats.FORMATS`. Messages with rounded values are
    always packed. ``packed`` is for ``"fp32"``.
    """

    values: str = "fp32"

    def __post_init__(self) -> None:
        super().__post_init__()
        check(
            self,
            "values",
            isinstance(self.values, str) and self.values in ENTRY_FORMATS,
            f"must be one of {', '.join(ENTRY_FORMATS)}",
        )

    @property
    def encoding(self) -> Encoding:
        """The format of messages."""
        return Encoding(self.values, self.packed or self.values != "fp32")


def check(recipe: Recipe, field: str, holds: bool, fix: str) -> None:
    """Raise :class:`ConfigurationError` unless ``holds``. The message names ``field``, its value and the ``fix``."""
    if not holds:
        value = getattr(recipe, field)
        raise ConfigurationError(f"{type(recipe).__name__}({field}={value!r}): {fix}")


def check_number(recipe: Recipe, *fields: str, whole: bool = False) -> None:
    """Check that each of ``fields`` is a number, and a whole number if ``whole`` is set."""
    for field in fields:
        value = getattr(recipe, field)
        is_number = isinstance(value, int if whole else (int, float)) and not isinstance(value, bool)
        check(recipe, field, is_number, f"must be a {'whole ' if whole else ''}number")
        if not whole:
            fits = isinstance(value, float) or abs(value) <= sys.float_info.max
            check(recipe, field, fits, "must be a number that a float can hold")


def check_at_least(recipe: Recipe, least: float, *fields: str, whole: bool = False) -> None:
    """Check that each of ``fields`` is a number of at least ``least``, and a whole number if ``whole`` is set."""
    check_number(recipe, *fields, whole=whole)
    for field in fields:
        check(recipe, field, getattr(recipe, field) >= least, f"must be at least {least}")
