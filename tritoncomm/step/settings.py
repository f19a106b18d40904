"""Arguments of ``wrap``, and their checks."""

from __future__ import annotations

import math
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

from tritoncomm.algorithms import Recipe, algorithms, takes_updates
from tritoncomm.errors import ConfigurationError
from tritoncomm.scheduler.process_group import is_distributed
from tritoncomm_kernels.formats import FORMATS, SMALL_FORMATS

DEFAULT_ALGO = "oktopk"
DEFAULT_UPDATES = "quantized"  # how updates are exchanged
# gloo waits for ever with shorter ones, and with some longer ones
_SHORTEST_TIMEOUT, _LONGEST_TIMEOUT = timedelta(milliseconds=1), timedelta(days=365)
# The format of values and of small tensors, and a density that brings the loss to that of dense or below. Measured:
# benchmarks/results/training.json
DEFAULT_DENSITY = 0.03
DEFAULT_VALUES = "4bit"
DENSE_BELOW = 1024
DEFAULT_SMALL = "8bit"
# Dense exchanges before the first sparse one. Thresholds and moments of the first steps are far from those that follow.
# 16 are as good as 20, and 10 are not at a density of 1 %. Two bits are as good as eight, and one is not. Measured:
# benchmarks/results/defaults.json
DEFAULT_WARMUP = 16
_MAX_CATCH_UP = 20.0  # of optimizers whose step is about as long as the learning rate
DEFAULT_START = "2bit"
NONFINITE_POLICIES = ("skip", "raise")


@dataclass(frozen=True, kw_only=True)
class Late:
    """Which entries are selected, and how far an optimizer catches up on those that were late.

    The argument ``late`` of :func:`~tritoncomm.wrap`. Optimizers with a rule for late gradients then take the
    staleness-aware step.

    Args:
        select_by: Criterion by which methods compare entries. ``"gradient"``: the gradient. ``"update"``: the gradient
            over the root of its second moment, which is proportional to Adam's update. ``"auto"``: ``"update"`` with
            the staleness-aware step, else ``"gradient"``. Default: ``"auto"``.
        max_catch_up: Maximum number of steps that one delivery counts for, at least 1. Up to three times as many if the
            deliveries to a tensor have the sign of those before. Default: None, which is 20, and no limit for SGD.
        max_relative_update: Maximum change of a tensor in one step by catching up, as a fraction of its norm. A root
            mean square change of one learning rate is always allowed, except for SGD. The limit holds less, the more
            deliveries have the sign of those before. Default: 0.05.

    Raises:
        ConfigurationError: An argument is invalid.
    """

    select_by: str = "auto"
    max_catch_up: float | None = None
    max_relative_update: float = 0.05

    def __post_init__(self) -> None:
        one_of("select_by", self.select_by, ("auto", "update", "gradient"))
        if self.max_catch_up is not None and not (is_number(self.max_catch_up) and self.max_catch_up >= 1):
            raise ConfigurationError(
                f"max_catch_up={self.max_catch_up!r}: must be at least 1, because a delivery is at least one step"
            )
        if not (is_number(self.max_relative_update) and self.max_relative_update >= 0):
            raise ConfigurationError(
                f"max_relative_update={self.max_relative_update!r}: must be a fraction of a tensor's norm, at least 0; "
                "use math.inf for no limit"
            )

    def limit(self, *, is_proportional: bool = False) -> float:
        """Return ``max_catch_up``. None is no limit if a step ``is_proportional`` to the gradient, else 20."""
        default = math.inf if is_proportional else _MAX_CATCH_UP
        return default if self.max_catch_up is None else self.max_catch_up


@dataclass(frozen=True, kw_only=True)
class Updates:
    """How updates are exchanged: what the steps of an optimizer have changed on each rank.

    The argument ``updates`` of :func:`~tritoncomm.wrap`.

    Args:
        algo: Name of a method, or a recipe. Small tensors travel like others, and no step at the start is dense.
            The ``algo`` of ``wrap`` is for gradients. Default: None, which is ``"quantized"`` with one bit.
        outer_lr: Rate of the step of the common parameters by the mean update. Default: 1, the mean itself.
        outer_momentum: Nesterov momentum of this step, in [0, 1). Default: 0.

    Raises:
        ConfigurationError: An argument is invalid.
    """

    algo: str | Recipe | None = None
    outer_lr: float = 1.0
    outer_momentum: float = 0.0

    def __post_init__(self) -> None:
        if self.algo is not None:
            check_algo(self.algo)
            if not takes_updates(self.algo):
                raise ConfigurationError(
                    f"algo={self.algo!r}: this method is for gradients alone: choose another method for updates"
                )
        check_outer_lr(self.outer_lr)
        if not (is_number(self.outer_momentum) and 0 <= self.outer_momentum < 1):
            raise ConfigurationError(f"outer_momentum={self.outer_momentum!r}: must be in [0, 1)")


@dataclass(frozen=True, kw_only=True)
class WrapOptions:
    """The arguments of :func:`tritoncomm.wrap` apart from the recipe and the groups, checked when constructed.

    ``late`` is None where no gradient is late, and where the optimizers take their own step. ``updates`` is None where
    gradients are exchanged.
    """

    late: Late | None
    updates: Updates | None
    on_nonfinite: str
    max_grad_norm: float | None
    timeout: timedelta | None
    dense_below: int
    small: str
    local_steps: int

    def __post_init__(self) -> None:
        one_of("on_nonfinite", self.on_nonfinite, NONFINITE_POLICIES)
        if self.max_grad_norm is not None and not (is_number(self.max_grad_norm) and self.max_grad_norm > 0):
            raise ConfigurationError(f"max_grad_norm={self.max_grad_norm!r}: must be a positive number, or None")
        dense_below, timeout = self.dense_below, self.timeout
        if isinstance(dense_below, bool) or not (isinstance(dense_below, int) and dense_below >= 0):
            raise ConfigurationError(
                f"dense_below={dense_below!r}: must be an int of at least 0; 0 sends no tensor dense"
            )
        if not (timeout is None or isinstance(timeout, timedelta)):
            raise ConfigurationError(f"timeout={timeout!r}: give a datetime.timedelta, or None")
        if timeout is not None and not _SHORTEST_TIMEOUT <= timeout <= _LONGEST_TIMEOUT:
            raise ConfigurationError(
                f"timeout={timeout}: must be at least 1 ms and at most {_LONGEST_TIMEOUT.days} days; None uses that of "
                "the group"
            )

    @property
    def matches_length(self) -> bool:
        """Whether the mean of updates gets the mean length of the workers' updates."""
        return self.updates is not None and self.local_steps == 1


def check_switch(name: str, value: object, kind: type) -> None:
    """Raise :class:`~tritoncomm.ConfigurationError` unless ``value`` is a bool, None or a ``kind``.

    ``name`` is the argument.
    """
    if not (value is None or isinstance(value, (bool, kind))):
        raise ConfigurationError(f"{name}={value!r}: give True, False, None, or a tritoncomm.{kind.__name__}")


def late_of(late: bool | Late | None) -> Late | None:
    """Return what ``late`` of ``wrap`` stands for, or None if every optimizer takes its own step."""
    check_switch("late", late, Late)
    return Late() if late is None or late is True else late or None


def check_algo(algo: object) -> None:
    """Raise :class:`~tritoncomm.ConfigurationError` unless ``algo`` is a recipe or the name of one."""
    if isinstance(algo, Recipe) or algo in algorithms():
        return
    if isinstance(algo, type) and issubclass(algo, Recipe):
        raise ConfigurationError(f"algo={algo.__name__}: pass an instance, such as {algo.__name__}()")
    fix = f" such as tritoncomm.Quantized(values={algo!r})" if isinstance(algo, str) and algo in FORMATS else ""
    raise ConfigurationError(
        f"algo is the unknown algorithm {algo!r}: choose one of {', '.join(algorithms())}, or a recipe{fix}"
    )


def check_local_steps(local_steps: int) -> None:
    """Raise :class:`~tritoncomm.ConfigurationError` unless ``local_steps`` is an int of at least 1."""
    if isinstance(local_steps, bool) or not (isinstance(local_steps, int) and local_steps >= 1):
        raise ConfigurationError(f"local_steps={local_steps!r}: must be an int of at least 1")


def check_outer_lr(outer_lr: float) -> None:
    """Raise :class:`~tritoncomm.ConfigurationError` unless ``outer_lr`` is a positive number."""
    if not (is_number(outer_lr) and 0 < outer_lr < math.inf):
        raise ConfigurationError(f"outer_lr={outer_lr!r}: must be a positive number; 1.0 goes to the mean")


def is_number(value: object) -> bool:
    """Return True for an int or a float, but not for a bool."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def one_of(name: str, value: str, choices: tuple[str, ...]) -> None:
    """Raise :class:`~tritoncomm.ConfigurationError` unless ``value`` is one of ``choices``."""
    if value not in choices:
        raise ConfigurationError(f"{name}={value!r}: choose one of {', '.join(map(repr, choices))}")


def restores(residuals: str) -> bool:
    """Return True if the argument ``residuals`` asks for those of a checkpoint, False if they begin at zero.

    Raises :class:`~tritoncomm.ConfigurationError` if it is neither ``"restore"`` nor ``"reset"``.
    """
    one_of("residuals", residuals, ("restore", "reset"))
    return residuals == "restore"


def check_group(name: str, group: object) -> None:
    """Raise :class:`~tritoncomm.ConfigurationError` unless ``group`` is None or a process group with this rank.

    ``name`` is the argument.
    """
    if group is None:
        return
    if not (dist.is_available() and dist.is_initialized()):
        raise ConfigurationError(f"{name} was given, but torch.distributed is not initialized")
    if group is dist.GroupMember.NON_GROUP_MEMBER or (
        isinstance(group, dist.ProcessGroup) and dist.get_rank(group) < 0
    ):
        raise ConfigurationError(f"this rank is not a member of {name}: make this call on the group's members only")
    if not isinstance(group, dist.ProcessGroup):
        raise ConfigurationError(
            f"{name}={group!r}: pass a process group, such as the result of torch.distributed.new_group() or of "
            "get_group() of a DeviceMesh, or None"
        )


def resolved_small(small: str | None) -> str:
    """Return the format of small tensors. None is :data:`DEFAULT_SMALL`.

    Raises :class:`~tritoncomm.ConfigurationError` for an unknown format.
    """
    chosen = DEFAULT_SMALL if small is None else small
    one_of("small", chosen, SMALL_FORMATS)
    return chosen


def is_alone(group: dist.ProcessGroup | None) -> bool:
    """Return True if the exchange in ``group`` has a single worker, which takes the optimizer's own steps."""
    return not (is_distributed() and dist.get_world_size(group) > 1)
