"""Arguments of ``wrap``, and their checks."""

from __future__ import annotations

import inspect
import logging
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from datetime import timedelta
from types import MappingProxyType

import torch
import torch.distributed as dist
from torch.nn.parameter import is_lazy

from tritoncomm.algorithms import Recipe, algorithms, takes_updates
from tritoncomm.errors import ConfigurationError
from tritoncomm.scheduler.process_group import is_distributed
from tritoncomm.step.tensors.names import label_of
from tritoncomm.step.torch_internals import has_hooks, is_flattened, is_zero, original_class
from tritoncomm_kernels.formats import FORMATS, SMALL_FORMATS

logger = logging.getLogger("tritoncomm")

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


def check_optimizer(
    optimizer: torch.optim.Optimizer, *, alone: bool, names: Mapping[int, str] = MappingProxyType({})
) -> None:
    """Raise :class:`~tritoncomm.ConfigurationError` if ``optimizer`` cannot be wrapped.

    ``alone``: there is a single worker, whose gradients are not exchanged. ``names`` are those of parameters, by id.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigurationError(
            f"optimizer is a {type(optimizer).__name__}: pass a torch.optim.Optimizer, or a list of them"
        )
    if not has_hooks(optimizer):
        _refuse_prepared(optimizer)
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ConfigurationError(
            "LBFGS evaluates its closure several times per step and cannot be wrapped: use an optimizer that takes one "
            "gradient per step"
        )
    if isinstance(optimizer, torch.optim.SparseAdam) and not alone:
        raise ConfigurationError("SparseAdam needs sparse gradients, which are not exchanged: use Adam with dense ones")
    if is_zero(optimizer) and not alone:
        raise ConfigurationError(
            "ZeroRedundancyOptimizer steps a part of the parameters on each rank, by the gradients of this rank, and "
            "broadcasts them densely: pass the optimizer of all parameters, or shard the model by fully_shard()"
        )
    _check_closure(optimizer)
    for parameter in (p for group in optimizer.param_groups for p in group["params"]):
        if is_lazy(parameter):
            raise ConfigurationError(
                f"{label_of(optimizer, parameter, names)} of a lazy module has no shape before the first pass: call "
                "model() once with a batch before wrap()"
            )
        if parameter.is_meta:
            raise ConfigurationError(
                f"{label_of(optimizer, parameter, names)} is on the meta device, without values: call "
                "model.to_empty(device=...) and load or initialize the weights before wrap()"
            )
        if is_flattened(parameter) and not alone:
            raise ConfigurationError(
                f"{label_of(optimizer, parameter, names)} is sharded by FullyShardedDataParallel, which is not "
                "supported: use fully_shard() and pass the model to wrap(..., model=model)"
            )


def check_trained(
    optimizer: torch.optim.Optimizer, names: Mapping[int, str], *, alone: bool, ignored: Collection[int] = ()
) -> None:
    """Raise :class:`~tritoncomm.ConfigurationError` if all parameters of ``optimizer`` are frozen, or DDP ignores them.

    ``names`` are those of parameters, by id, and ``ignored`` are the ids of those that DDP ignores. A single worker,
    ``alone``, may have nothing to train.
    """
    if alone:
        return
    every = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    parameters = [parameter for parameter in every if id(parameter) not in ignored]
    if every and not parameters:
        raise ConfigurationError(
            "optimizer holds only parameters that DDP was told to ignore, the first of them "
            f"{label_of(optimizer, every[0], names)}: they are this rank's own, and nothing is exchanged, so do not "
            "wrap it"
        )
    if not any(parameter.requires_grad for parameter in parameters):
        first = f", the first of them {label_of(optimizer, parameters[0], names)}" if parameters else ""
        raise ConfigurationError(
            f"optimizer holds {len(parameters)} parameters, and none has requires_grad=True{first}: unfreeze what will "
            "train before wrap(), or do not wrap this optimizer"
        )


def _check_closure(optimizer: torch.optim.Optimizer) -> None:
    """Raise :class:`~tritoncomm.ConfigurationError` if ``step()`` of ``optimizer`` cannot be called without arguments.

    The closure is called before the exchange, and the optimizer steps by averaged gradients without it.
    """
    _, *arguments = inspect.signature(original_class(optimizer).step).parameters.items()
    for name, each in arguments:
        if each.default is each.empty and each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD):
            raise ConfigurationError(
                f"{type(optimizer).__name__}.step() needs its argument {name!r}, and a wrapped optimizer calls a "
                f"closure once, before the exchange: give it a default, {name}=None, and let step() use .grad, or use "
                "another optimizer"
            )


# What to call instead of wrap() for an optimizer that a trainer has prepared, by a part of the name of its module.
_INSTEAD = {
    "accelerate": "call tritoncomm.integrations.accelerate.wrap(accelerator, model, optimizer)",
    "fabric": "wrap it before: model = fabric.setup_module(model), then optimizer = "
    "fabric.setup_optimizers(tritoncomm.wrap(optimizer, model=model))",
    "lightning": "pass Trainer(strategy=SparseDDPStrategy()) of tritoncomm.integrations.lightning",
}


def _refuse_prepared(optimizer: torch.optim.Optimizer) -> None:
    """Raise :class:`~tritoncomm.ConfigurationError` about an ``optimizer`` that stands for another one."""
    module = type(optimizer).__module__
    instead = next((call for name, call in _INSTEAD.items() if name in module), "pass the optimizer that it stands for")
    raise ConfigurationError(
        f"optimizer is a {type(optimizer).__name__} of {module}, which stands for another optimizer: {instead}"
    )
