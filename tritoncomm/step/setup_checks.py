"""Checks before anything is exchanged: ranks are configured alike, and nobody else averages the gradients."""

from __future__ import annotations

import gc
import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from torch.nn.parallel import DistributedDataParallel

from tritoncomm.algorithms import Recipe
from tritoncomm.errors import ConfigMismatchError, ConfigurationError, ExchangeError
from tritoncomm.scheduler.process_group import is_distributed
from tritoncomm.version import __version__

_REFUSED = "refused"


def compare(fields: Mapping[str, Any], group: dist.ProcessGroup | None) -> None:
    """Gather ``fields`` (small, picklable) of all ranks; all ranks raise alike when any differ.

    Raises :class:`~tritoncomm.ConfigMismatchError` that names every differing field, the values and
    the ranks that hold them.
    """
    everybody = gather(dict(fields), group)
    refused = {rank: e[_REFUSED] for rank, e in enumerate(everybody) if _REFUSED in e}
    if refused:
        reasons = "; ".join(f"rank {rank}: {reason}" for rank, reason in refused.items())
        raise ConfigMismatchError(f"ranks {sorted(refused)} refused to start: {reasons}")
    differences = [text for name in fields if (text := _difference(name, [e.get(name) for e in everybody]))]
    if differences:
        raise ConfigMismatchError(
            "ranks are configured differently; make them equal before wrapping (for parameter values: "
            "wrap(..., broadcast_parameters=True)): " + "; ".join(differences)
        )


@contextmanager
def propagate_errors(group: dist.ProcessGroup | None) -> Iterator[None]:
    """An argument that the body refuses on this rank is an error in the others' next :func:`compare`."""
    try:
        yield
    except (ConfigMismatchError, ExchangeError):  # known to all
        raise
    except Exception as error:
        if is_distributed():
            propagate_error(str(error), group)
        raise


def propagate_error(reason: str, group: dist.ProcessGroup | None) -> None:
    """Take part in the others' :func:`compare` with a ``reason`` why this rank cannot start."""
    gather({_REFUSED: reason}, group)


def gather(fields: dict[str, Any], group: dist.ProcessGroup | None) -> list[dict[str, Any]]:
    """``fields`` (small, picklable) of every rank, by rank."""
    everybody: list[Any] = [None] * dist.get_world_size(group)
    try:
        dist.all_gather_object(everybody, fields, group=group)
    except RuntimeError as error:
        raise ExchangeError(f"a rank was lost, or did not come, while set-ups were compared: {error}") from error
    return everybody


def parameter_fields(parameters: Sequence[torch.Tensor], names: Sequence[str]) -> dict[str, Any]:
    """What must agree about the parameters: names, shapes, dtypes, and the values by digest.

    The order is part of it: the fields are lists in the order of the optimizer's groups.
    """
    return {
        "number of parameters": len(parameters),
        "parameter names": list(names),
        "parameter shapes": [tuple(p.shape) for p in parameters],
        "parameter dtypes": [str(p.dtype) for p in parameters],
        "parameter values": [digest(p) for p in parameters],
    }


def digest(tensor: torch.Tensor) -> str:
    """A short digest of the bytes of ``tensor``."""
    data = tensor.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8)
    return hashlib.blake2b(data.numpy().data, digest_size=8).hexdigest()


def compare_setup(
    optimizer: torch.optim.Optimizer,
    trained: Sequence[torch.Tensor],
    recipe: Recipe,
    options: object,
    steps: int,
    group: dist.ProcessGroup | None,
    *,
    broadcast: bool = False,
) -> None:
    """Check that all ranks of ``group`` are configured identically and are at the same step.

    ``trained`` are the parameters of ``optimizer`` that require gradients. With ``broadcast``, all parameters of the
    optimizer then get the values of the group's first rank. Otherwise the values must be equal.
    Raises :class:`~tritoncomm.ConfigMismatchError` on all ranks if anything differs.
    """
    if not is_distributed():
        return
    settings = [{k: v for k, v in g.items() if k not in ("params", "param_names")} for g in optimizer.param_groups]
    fields = {
        "version": __version__,
        "optimizer": type(optimizer).__name__,
        "algorithm": recipe.name,
        "density": recipe.density,
        "recipe": repr(recipe),
        "options": repr(options),
        "param_groups": repr(settings),
        "steps": steps,
        "broadcast_parameters": broadcast,
    }
    names = dict(named_parameters(optimizer))
    fields |= parameter_fields(trained, [names[parameter] for parameter in trained])
    if broadcast:
        fields["parameter values"] = "broadcast from the first rank"
        fields["shapes of all parameters"] = [tuple(parameter.shape) for parameter in names]
    compare(fields, group)
    if broadcast:
        _broadcast(list(names), group)


@torch.no_grad()
def _broadcast(parameters: Sequence[torch.Tensor], group: dist.ProcessGroup | None) -> None:
    """Copy the values of the group's first rank to its other ranks."""
    source = dist.get_process_group_ranks(group or dist.group.WORLD)[0]
    for parameter in parameters:
        values = parameter.detach().contiguous()
        try:
            dist.broadcast(values, src=source, group=group)
        except RuntimeError as error:
            raise ExchangeError(f"a rank was lost while parameters were broadcast: {error}") from error
        parameter.copy_(values)


def named_parameters(optimizer: torch.optim.Optimizer) -> list[tuple[torch.Tensor, str]]:
    """The parameters of all groups, with their names if they were given by name."""
    return [
        pair
        for group in optimizer.param_groups
        for pair in zip(group["params"], group.get("param_names", [""] * len(group["params"])), strict=True)
    ]


def check_state_dict(state: dict[str, Any], optimizer: torch.optim.Optimizer) -> None:
    """Raise :class:`~tritoncomm.ConfigurationError` for what ``load_state_dict`` would refuse."""
    if not isinstance(state, dict) or not {"state", "param_groups"} <= set(state):
        has = sorted(state) if isinstance(state, dict) else type(state).__name__
        raise ConfigurationError(f"this is no state of an optimizer: it has {has}")
    saved = [len(group.get("params", ())) for group in state["param_groups"]]
    here = [len(group["params"]) for group in optimizer.param_groups]
    if saved != here:
        raise ConfigurationError(f"this checkpoint has parameter groups of {saved} parameters, here they have {here}")


def check_not_reduced(parameters: Iterable[torch.Tensor]) -> None:
    """Raise :class:`~tritoncomm.ConfigurationError` when a living DDP module reduces one of ``parameters``.

    DDP leaves no mark on its parameters, so its modules are looked for among all living objects; once or twice
    in a run, some milliseconds each.
    """
    wanted = {id(parameter) for parameter in parameters}
    for module in [thing for thing in gc.get_objects() if issubclass(type(thing), DistributedDataParallel)]:
        hooks = [hook for hook, _ in getattr(module, "_comm_hooks", [])]
        if noop_hook in hooks:
            continue
        for name, parameter in module.module.named_parameters():
            if id(parameter) in wanted and parameter.requires_grad:
                raise ConfigurationError(
                    f"parameter {name!r} belongs to a DistributedDataParallel module, which averages its gradient "
                    "densely before this optimizer sees it: train the plain module (ddp_model.module), or keep DDP "
                    "and call tritoncomm.ddp.register(ddp_model) instead of wrap()"
                )


def _difference(name: str, values: Sequence[Any]) -> str:
    if all(value == values[0] for value in values):
        return ""
    if all(isinstance(v, list) for v in values) and len({len(v) for v in values}) == 1:
        return _list_difference(name, values)
    sides = [f"{_ranks(values, value)} {value!r}" for value in _distinct(values)]
    return f"{name}: " + ", ".join(sides)


def _list_difference(name: str, values: Sequence[list[Any]]) -> str:
    """Name the first position, and say so when the same things stand in another order."""
    first = next(i for i in range(len(values[0])) if any(v[i] != values[0][i] for v in values))
    if all(sorted(map(str, v)) == sorted(map(str, values[0])) for v in values):
        name += " (the same ones in another order: parameter order differs)"
    column = [value[first] for value in values]
    sides = [f"{_ranks(column, value)} {value!r}" for value in _distinct(column)]
    return f"{name}, first at parameter {first}: " + ", ".join(sides)


def _distinct(values: Sequence[Any]) -> list[Any]:
    return [value for i, value in enumerate(values) if value not in values[:i]]


def _ranks(values: Sequence[Any], value: Any) -> str:
    ranks = [rank for rank, other in enumerate(values) if other == value]
    return f"rank {ranks[0]} has" if len(ranks) == 1 else f"ranks {ranks} have"
