"""What ranks compare: their configuration at set-up, and their options and updates in every step."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from numbers import Real
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from tritoncomm.algorithms import Recipe
from tritoncomm.errors import (
    ConfigMismatchError,
    ExchangeError,
    NonFiniteError,
    ProtocolMismatchError,
)
from tritoncomm.scheduler.process_group import is_distributed, report_failure, reporting
from tritoncomm.scheduler.ranks import global_ranks
from tritoncomm.step.number import number_of_text, numbers
from tritoncomm.step.shards import local
from tritoncomm.step.torch_internals import is_interruption
from tritoncomm.version import __version__
from tritoncomm_kernels import devices

UPDATES = "completed updates"  # a field that ranks compare
LOADED = "loaded weights"  # an option of the optimizer of common parameters: a number of those loaded, or 0
UPDATES_ADVICE = (
    "an error or a signal has stopped a step between its exchange and the end of its update, so parameters may differ; "
    "load a checkpoint on all ranks"
)
_LONG = 8  # entries of a list that are not all written into a message
_CHECK = "configuration check"  # what has failed, in errors
_ERROR = "error"  # key of the error that a rank reports to the others
NOT_HELD = "values of parameters that the optimizer does not hold"  # as UPDATES
_EQUAL = "give all ranks the same parameters, or call wrap(..., broadcast_parameters=True)"
_NAMES = "parameter names"  # a field that ranks compare. Errors about other lists use it
# What to do if a field differs. For others: configure the ranks identically.
_ADVICE = {
    "parameter values": _EQUAL,
    NOT_HELD: _EQUAL,
    "optimizer state": "load the same state on all ranks",
    UPDATES: UPDATES_ADVICE,
}


def compare(fields: Mapping[str, Any], group: dist.ProcessGroup | None, device: torch.device | None = None) -> None:
    """Gather ``fields`` (small, picklable) of all ranks, and raise on all ranks if any value differs.

    ``device`` is the one of the exchange. See :func:`all_gather`.

    Raises:
        ConfigMismatchError: A field differs between ranks, or a rank called :func:`propagate_error`. The message names
            the fields, their values and the ranks.
    """
    found = differences(fields, group, device)
    if found:
        advice = "; ".join(dict.fromkeys(_ADVICE.get(name, "configure them identically") for name in found))
        raise ConfigMismatchError(f"ranks are configured differently; {advice}: {'; '.join(found.values())}")


def differences(
    fields: Mapping[str, Any], group: dist.ProcessGroup | None, device: torch.device | None = None
) -> dict[str, str]:
    """Gather ``fields`` like :func:`compare`, and return a text for each field that differs between ranks.

    Raises :class:`~tritoncomm.ConfigMismatchError` if a rank called :func:`propagate_error`.
    """
    gathered = all_gather(dict(fields), group, device)
    errors = {rank: entry[_ERROR] for rank, entry in gathered.items() if _ERROR in entry}
    if errors:
        reasons = "; ".join(f"rank {rank}: {reason}" for rank, reason in errors.items())
        raise ConfigMismatchError(f"ranks {sorted(errors)} reported an error: {reasons}")
    names = dict.fromkeys(name for entry in gathered.values() for name in entry)
    labels = fields.get(_NAMES, ())
    found = {
        name: _difference(name, {rank: entry.get(name) for rank, entry in gathered.items()}, labels) for name in names
    }
    return {name: text for name, text in found.items() if text}


@contextmanager
def propagate_errors(group: dist.ProcessGroup | None, device: torch.device | None = None) -> Iterator[None]:
    """Report an error that the body raises on this rank to the other ranks, whose next :func:`compare` raises it.

    If an interruption ends the body, they raise :class:`~tritoncomm.ExchangeError`.

    ``device`` is the current device in the body. See :func:`all_gather`.
    """
    try:
        with devices.on(device):
            yield
    except (ConfigMismatchError, ExchangeError):  # all ranks raise these
        raise
    except BaseException as error:
        if is_distributed() and is_interruption(error):
            report_failure(group, device, _CHECK, error, is_interruption)
        elif is_distributed():
            propagate_error(str(error), group, device)
        raise


def propagate_error(reason: str, group: dist.ProcessGroup | None, device: torch.device | None = None) -> None:
    """Take part in the :func:`compare` of the other ranks with the ``reason`` why this rank cannot start."""
    all_gather({_ERROR: reason}, group, device)


def all_gather(
    fields: dict[str, Any], group: dist.ProcessGroup | None, device: torch.device | None = None
) -> dict[int, dict[str, Any]]:
    """Return ``fields`` (small, picklable) of every rank by its global number, in the order of the group.

    NCCL sends objects from the current CUDA device, which is GPU 0 on every rank of a program that has not set it. They
    are therefore sent from ``device``, the one of the exchange. None is the current device.

    Raises:
        ExchangeError: A rank was lost, was interrupted, or did not take part.
    """
    gathered: list[Any] = [None] * dist.get_world_size(group)
    with reporting(group, device, _CHECK, is_interruption), devices.on(device):
        dist.all_gather_object(gathered, fields, group=group)
    return dict(zip(global_ranks(group), gathered, strict=True))


def device_of(optimizer: torch.optim.Optimizer) -> torch.device | None:
    """Return the device of the first parameter of ``optimizer``, or None if there is none."""
    parameters = (each for group in getattr(optimizer, "param_groups", ()) for each in group["params"])
    return next((parameter.device for parameter in parameters), None)


def parameter_fields(
    parameters: Sequence[torch.Tensor], names: Sequence[str], *, values: bool = True
) -> dict[str, Any]:
    """Return the fields that must agree about the parameters: names, shapes, dtypes, and numbers of the values.

    The fields are lists in the order of the optimizer's parameter groups. The order must agree, too. Without
    ``values``, the values may differ, because they are about to be broadcast.
    """
    return {
        "number of parameters": len(parameters),
        _NAMES: list(names),
        "parameter shapes": [tuple(p.shape) for p in parameters],
        "parameter dtypes": [str(p.dtype) for p in parameters],
        "parameter values": numbers(parameters) if values else "to be broadcast",
    }


def _is_number(value: object) -> bool:
    return isinstance(value, (Real, torch.Tensor)) and not isinstance(value, bool)


def compare_setup(
    optimizer: torch.optim.Optimizer,
    trained: Sequence[tuple[torch.Tensor, str]],
    recipe: Recipe,
    options: Any,
    steps: int,
    group: dist.ProcessGroup | None,
    *,
    others: Sequence[tuple[torch.Tensor, str]] = (),
    buffers: Sequence[tuple[torch.Tensor, str]] = (),
    broadcast: bool = False,
    caught_up: bool = False,
    stepped: Collection[int] = (),
    ignored: Collection[int] = (),
) -> None:
    """Check that all ranks of ``group`` are configured identically and are at the same step.

    Args:
        optimizer: The original optimizer.
        trained: Parameters of ``optimizer`` that require gradients, each with its name.
        recipe: The recipe of the exchange.
        options: The options of ``wrap``.
        steps: Number of committed steps.
        group: Process group of the exchange. None is the default group.
        others: Parameters of the module that ``optimizer`` does not hold, each with its name.
        buffers: Buffers of the module, each with its name. Their values may differ.
        broadcast: Whether to copy the values of all parameters and buffers from the group's first rank afterwards. If
            False, the values of ``trained`` and ``others`` must be equal.
        caught_up: Whether some ranks have just applied a step of the others. Schedules have not taken theirs there, so
            options may differ. The next step compares them.
        stepped: Ids of parameter groups by which ranks have stepped alone. An optimizer may keep numbers in them, such
            as an estimated rate, which then differ.
        ignored: Ids of parameters that are this rank's own, see :mod:`tritoncomm.step.ignored`.

    Raises:
        ConfigMismatchError: Anything differs. All ranks raise it.
    """
    if not is_distributed():
        return
    settings = [
        {k: v for k, v in g.items() if k not in ("params", "param_names") and not (id(g) in stepped and _is_number(v))}
        for g in optimizer.param_groups
    ]
    fields = {
        "version": __version__,
        "optimizer": type(optimizer).__name__,
        "algorithm": recipe.name,
        "density": recipe.density,
        "recipe": settings_of(*recipe.layers),
        "options": settings_of(options),
        "param_groups": repr(settings),
        "steps": steps,
        "broadcast_parameters": broadcast,
    }
    every, device = [each for each, _ in named_parameters(optimizer) if id(each) not in ignored], device_of(optimizer)
    parameters = [parameter for parameter, _ in trained]
    fields |= parameter_fields(parameters, [name for _, name in trained], values=not broadcast)
    fields["other parameters and buffers"] = [f"{name} {tuple(e.shape)} {e.dtype}" for e, name in (*others, *buffers)]
    fields["optimizer state"] = [_state_number(optimizer.state.get(parameter)) for parameter in parameters]
    if caught_up:
        del fields["param_groups"]
        try:
            compare(fields, group, device)
        except ConfigMismatchError as error:
            raise ConfigMismatchError(
                f"{error}. A step that not all ranks could confirm was repeated on the others, and its result differs: "
                "load a checkpoint. Steps can be repeated if gradients are clipped by max_grad_norm, or changed in a "
                "pre-hook of the optimizer, not in the loop"
            ) from None
        return
    if not broadcast:
        found = numbers(each for each, _ in others)
        fields[NOT_HELD] = [f"{name} {number}" for (_, name), number in zip(others, found, strict=True)]
        compare(fields, group, device)
        return
    fields["shapes and dtypes of all parameters"] = [f"{tuple(p.shape)} {p.dtype}" for p in every]
    compare(fields, group, device)
    _broadcast([*every, *(each for each, _ in (*others, *buffers))], group)
    compare({"parameters": "broadcast"}, group, device)  # a rank on which this has failed reports it here


def settings_of(*layers: Any) -> dict[str, Any]:
    """Return the fields of dataclasses by name. Those of a layer of a recipe also name the layer."""
    found: dict[str, Any] = {}
    for layer in layers:
        of = f"{type(layer).__name__}: " if isinstance(layer, Recipe) else ""
        values = {each.name: getattr(layer, each.name) for each in dataclasses.fields(layer)}
        found |= {of + name: value for name, value in values.items() if not isinstance(value, Recipe)}
    return found


def state_outline(state_dict: Mapping[str, Any]) -> list[str]:
    """Return the names, shapes and step counts of each parameter's state in the state dict of an optimizer.

    Other values are left out: after training on different processors, their last bits may differ.
    """
    return [f"{key}: {_outline(each)}" for key, each in sorted(state_dict["state"].items(), key=str)]


def _outline(state: Any) -> object:
    if isinstance(state, torch.Tensor) and state.dim() > 0:
        return tuple(state.shape)
    if isinstance(state, torch.Tensor) and devices.is_asynchronous(state.device):  # the host does not wait for it
        return ()
    if isinstance(state, (torch.Tensor, Real)):
        return float(state) if float(state).is_integer() else ()
    if isinstance(state, Mapping):
        return [(key, _outline(state[key])) for key in sorted(state, key=str) if state[key] is not None]
    return [_outline(each) for each in state] if isinstance(state, (list, tuple)) else type(state).__name__


def _state_number(state: Any) -> int:
    """Return a number of the tensors and numbers in the optimizer's ``state`` of a parameter. None has 0."""
    if isinstance(state, Mapping):  # to read a state that is missing adds an empty one
        state = [(key, state[key]) for key in sorted(state, key=str) if state[key] is not None]
    if type(state) is torch.Tensor or hasattr(state, "device_mesh"):  # not what a library stores in a format of its own
        return numbers([state])[0]
    if isinstance(state, (list, tuple)):
        found = [*map(_state_number, state)]
        return number_of_text(repr(found)) if any(found) else 0
    return number_of_text(repr(state)) if isinstance(state, (int, float, str)) else 0


@torch.no_grad()
def _broadcast(tensors: Sequence[torch.Tensor], group: dist.ProcessGroup | None) -> None:
    """Copy the values of the group's first rank to its other ranks, after all of them have arrived.

    All are sent from the device of the first one, because a backend may support no other.
    """
    source = global_ranks(group)[0]
    shards = [local(tensor.detach()) for tensor in tensors]
    device = shards[0].device if shards else None
    received = [shard.to(device, copy=True, memory_format=torch.contiguous_format) for shard in shards]
    with reporting(group, device, "broadcast of parameters", is_interruption):
        for values in filter(torch.numel, received):
            dist.broadcast(values.reshape(-1).view(torch.uint8), src=source, group=group)  # any dtype
    for shard, values in zip(shards, received, strict=True):
        shard.copy_(values)


def named_parameters(optimizer: torch.optim.Optimizer) -> list[tuple[torch.Tensor, str]]:
    """Return the parameters of all groups with their names. Unnamed parameters have the name ``""``."""
    return [
        pair
        for group in optimizer.param_groups
        for pair in zip(group["params"], group.get("param_names", [""] * len(group["params"])), strict=True)
    ]


def parameter_ids(optimizer: torch.optim.Optimizer) -> set[int]:
    """Return the ids of the parameters of all groups."""
    return {id(parameter) for parameter, _ in named_parameters(optimizer)}


def _difference(name: str, told: Mapping[int, Any], labels: Sequence[str] = ()) -> str:
    """Return a text about a field of which the ranks have ``told`` their values. It is empty if they are equal."""
    values = list(told.values())
    if all(value == values[0] for value in values):
        return ""
    if all(isinstance(v, dict) for v in values):
        return _dict_difference(name, told)
    if all(isinstance(v, list) for v in values) and len({len(v) for v in values}) == 1:
        return _list_difference(name, told, labels)
    if any(isinstance(v, list) and len(v) > _LONG for v in values):
        told = {rank: f"{len(v)} entries" if isinstance(v, list) else v for rank, v in told.items()}
    return f"{name}: {_sides(told)}"


def _dict_difference(name: str, told: Mapping[int, dict[str, Any]]) -> str:
    """Describe each entry of :func:`settings_of` that differs, or which layers there are if these differ."""
    first = next(iter(told.values()))
    if any(set(v) != set(first) for v in told.values()):
        layers = {rank: list(dict.fromkeys(key.rpartition(": ")[0] for key in v)) for rank, v in told.items()}
        around = {rank: " around ".join(each) for rank, each in layers.items()}
        return _difference(name, around) or f"{name}: other fields"
    found = []
    for key in first:
        column = {rank: v[key] for rank, v in told.items()}
        if any(value != first[key] for value in column.values()):
            layer, _, field = key.rpartition(": ")
            sides = _sides(column, f"{field}=")
            found.append(f"{layer}: {sides}" if layer else sides)
    return f"{name}: {'; '.join(found)}"


def _list_difference(name: str, told: Mapping[int, list[Any]], labels: Sequence[str]) -> str:
    """Describe the first difference between lists, and whether only their order differs.

    ``labels`` are the names of the entries, if they have names.
    """
    values = list(told.values())
    first = next(i for i in range(len(values[0])) if any(v[i] != values[0][i] for v in values))
    if all(sorted(map(str, v)) == sorted(map(str, values[0])) for v in values):
        name += " (the same values in another order: parameter order differs)"
    label = labels[first] if len(labels) == len(values[0]) and name != _NAMES else ""
    sides = _sides({rank: value[first] for rank, value in told.items()})
    return f"{name}, first at parameter {label or first}: {sides}"


def _sides(told: Mapping[int, Any], field: str = "") -> str:
    """Return which ranks have ``told`` which value, each value behind ``field``."""
    values, sides = list(told.values()), []
    for number, value in enumerate(values):
        if value not in values[:number]:
            ranks = [rank for rank, other in told.items() if other == value]
            have = f"rank {ranks[0]} has" if len(ranks) == 1 else f"ranks {ranks} have"
            sides.append(f"{have} {field}{value!r}")
    return ", ".join(sides)


class Stepping(NamedTuple):
    """The optimizer that steps by an exchange, its completed updates, and whether an error has stopped one."""

    optimizer: torch.optim.Optimizer
    updates: int
    is_stopped: bool

    @property
    def text(self) -> str:
        """What must be equal on all ranks: updates, and numbers among the options, such as learning rates.

        Options are those of the optimizer's class. Others, which users add to groups, may differ between ranks. The
        host waits for no GPU: the value of an option that is a tensor on a GPU is left out.
        """
        names = sorted(self._names)
        options = [[_numbers(group.get(name)) for name in names] for group in self.optimizer.param_groups]
        return repr((options, self.updates, self.is_stopped))

    @property
    def update_fields(self) -> dict[str, Any]:
        """The completed updates, by name."""
        return {UPDATES: f"{self.updates}, and one that stopped" if self.is_stopped else self.updates}

    @property
    def option_fields(self) -> dict[str, Any]:
        """The options in :attr:`text`, by name."""
        fields: dict[str, Any] = {}
        for position, group in enumerate(self.optimizer.param_groups):
            label = _label(group, position)
            for name in self._names:
                value = _numbers(group.get(name))
                fields[f"{name} of {label}"] = tuple(value) if isinstance(value, list) else value
        return fields

    @property
    def _names(self) -> list[str]:
        """The names of all options. A list of optimizers has those of each."""
        return list(getattr(self.optimizer, "options", getattr(self.optimizer, "defaults", ())))


def _label(group: Mapping[str, Any], position: int) -> str:
    """Return what errors call a parameter group."""
    return str(group.get("label", f"parameter group {position}"))


def _numbers(value: object) -> object:
    if isinstance(value, torch.Tensor):
        return float(value) if value.device.type == "cpu" and value.numel() == 1 else None
    if isinstance(value, Real):
        return float(value)
    return [_numbers(each) for each in value] if isinstance(value, (list, tuple)) else None


def rejection(
    step: str,
    fields: Mapping[str, Any],
    stepping: Stepping,
    group: dist.ProcessGroup | None,
    device: torch.device | None,
    otherwise: Callable[[], str] | None = None,
) -> ProtocolMismatchError:
    """Return the error about ``step``, which was rejected. All ranks of ``group`` call this together.

    It names those of ``fields`` that differ between ranks. If none does, ``otherwise`` is called on all ranks, and
    returns another reason, or an empty text.
    """
    found = differences(fields, group, device) if is_distributed() else {}
    differ = f"ranks differ: {'; '.join(found.values())}"
    if stepping.is_stopped or UPDATES in found:
        reason = differ if found else "an update has stopped on all ranks"
        return ProtocolMismatchError(f"{step} was rejected, because {reason}: {UPDATES_ADVICE}")
    if found:
        advice = (
            "Use the same options and freeze the same parameters on all ranks; a schedule that follows a loss needs "
            "its mean over ranks. Then repeat the step"
        )
        if any(name.startswith("local_steps of") for name in found):
            advice = (
                "All ranks call step() equally often before they exchange, a rank without a batch without gradients: "
                "let the others catch up, then repeat the exchange"
            )
        if any(name.startswith(f"{LOADED} of") for name in found):
            advice = (
                "Since the last exchange, ranks have loaded weights that differ (a number stands for their bits, 0 for "
                "none): load the same checkpoint of the model and the optimizer on all"
            )
        return ProtocolMismatchError(f"{step} was rejected, and nothing has changed, because {differ}. {advice}")
    reason = "" if otherwise is None else otherwise()
    if reason:
        return ProtocolMismatchError(f"{step} was rejected, and nothing has changed, because {reason}")
    return ProtocolMismatchError(
        f"{step} was rejected: another rank finished another one. Step the same optimizers in the same order on all "
        "ranks"
    )


def naming(
    error: NonFiniteError, at_fault: str, group: dist.ProcessGroup | None, device: torch.device | None
) -> NonFiniteError:
    """Return ``error``, or one that names the ranks and what is ``at_fault`` on each. All ranks of ``group`` call this.

    ``at_fault`` is empty on a rank without NaN and Inf.
    """
    told = {0: {"at fault": at_fault}}
    if is_distributed():
        told = all_gather(told[0], group, device)
    bad = {rank: fields["at fault"] for rank, fields in told.items() if fields["at fault"]}
    if not bad:
        return error
    named = "; ".join(f"rank {rank}: {text}" for rank, text in bad.items())
    return NonFiniteError(f"NaN or Inf in the gradients of {named}; nothing was applied", bad)
