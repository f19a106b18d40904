"""What must be equal on all ranks before they exchange anything: configuration, parameters, and optimizer state."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from numbers import Real
from typing import Any

import torch
import torch.distributed as dist

from tritoncomm.algorithms import Recipe
from tritoncomm.scheduler.process_group import is_distributed, reporting
from tritoncomm.scheduler.ranks import global_ranks
from tritoncomm.step.agree import LOADED, STATE, compare, telling
from tritoncomm.step.settings import Late, Updates
from tritoncomm.step.tensors.shards import has_bits, local
from tritoncomm.step.torch_internals import is_interruption, original_class
from tritoncomm.version import __version__
from tritoncomm_kernels import devices

Named = Sequence[tuple[torch.Tensor, str]]  # tensors, each with its name


def settings_of(optimizer: torch.optim.Optimizer, recipe: Recipe, options: Any) -> dict[str, Any]:
    """Return what is compared of the optimizer's class, the recipe and the ``options``."""
    fields: dict[str, Any] = {
        "version": __version__,
        "optimizer": original_class(optimizer).__name__,
        "algorithm": recipe.name,
        "recipe": " around ".join(type(layer).__name__ for layer in recipe.layers),
        "number of parameter groups": len(optimizer.param_groups),
    }
    for layer in recipe.layers:
        fields |= {f"{name} of {type(layer).__name__}": value for name, value in _fields_of(layer)}
    return fields | {f"argument {name}": value for name, value in _fields_of(options)}


def options_of(groups: Iterable[dict[str, Any]], *, without_numbers: bool) -> dict[str, Any]:
    """Return what is compared of parameter ``groups``."""
    return {
        f"{name} of {_label(each, position)}": value
        for position, each in enumerate(groups)
        for name, value in each.items()
        if name not in ("params", "param_names") and not (without_numbers and _is_number(value))
    }


def labelled(trained: Named) -> Named:
    """Return each parameter with a name that no other has. Of two modules, names may be equal, and it may have none."""
    counts, labels = Counter(name for _, name in trained), list[str]()
    for position, (_, name) in enumerate(trained):
        place = f"parameter {position}"
        labels.append(place if not name else name if counts[name] == 1 else f"{name} ({place})")
    return [(each, label) for (each, _), label in zip(trained, labels, strict=True)]


def _fields_of(layer: Any) -> Iterable[tuple[str, Any]]:
    """Return the names and values of the fields of a dataclass, and of dataclasses in it, such as ``late.select_by``.

    A recipe in a recipe is a layer of its own, and that of updates is the recipe of the exchange.
    """
    for each in dataclasses.fields(layer):
        value = getattr(layer, each.name)
        if each.name in ("late", "updates"):
            yield each.name, value is not None  # for wrap(), None may be either
        if isinstance(value, (Late, Updates)):
            yield from ((f"{each.name}.{name}", inner) for name, inner in _fields_of(value) if name != "algo")
        elif each.name not in ("late", "updates") and not isinstance(value, Recipe):
            yield each.name, value


def _is_number(value: object) -> bool:
    return isinstance(value, (Real, torch.Tensor)) and not isinstance(value, bool)


def leaves(state: Any, name: str) -> Iterator[tuple[str, torch.Tensor | float | str]]:
    """Return the tensors, numbers and texts in the ``state`` of a parameter, each with its name."""
    if isinstance(state, torch.Tensor):
        if has_bits(state):
            yield name, state
    elif isinstance(state, (Real, str)):
        yield name, state if isinstance(state, str) else float(state)
    elif isinstance(state, (Mapping, list, tuple)):
        entries = dict(state if isinstance(state, Mapping) else enumerate(state))
        for key in sorted(entries, key=str):
            yield from leaves(entries[key], f"{key} {name}")


def state_outline(states: Mapping[Any, Any]) -> dict[str, Any]:
    """Return the shapes and step counts in the state of each parameter in an optimizer, by their names.

    Other values are left out: after training on different processors, their last bits may differ.
    """
    found = (leaf for key, each in states.items() for leaf in leaves(each, f"of parameter {key}"))
    return {f"{STATE}: {name}": _outline(leaf) for name, leaf in found}


def _outline(leaf: torch.Tensor | float | str) -> object:
    if isinstance(leaf, torch.Tensor) and (leaf.dim() > 0 or devices.is_asynchronous(leaf.device)):
        return tuple(leaf.shape)  # the host does not wait for a number on a GPU
    if isinstance(leaf, str):
        return leaf
    return float(leaf) if float(leaf).is_integer() else ()


@torch.no_grad()
def broadcast(
    named: Named, group: dist.ProcessGroup | None, everybody: dist.ProcessGroup | None, device: torch.device | None
) -> None:
    """Copy the values of the first rank of ``group`` to its others, after all of ``everybody`` have arrived.

    Values are sent from the device of the first one, because a backend may support no other.
    """
    if not is_distributed():
        return
    source = global_ranks(group)[0]
    shards = [local(tensor.detach()) for tensor, _ in named]
    sender = shards[0].device if shards else None
    received = [shard.to(sender, copy=True, memory_format=torch.contiguous_format) for shard in shards]
    compare({"memory": "is enough"}, everybody, device)  # else the others would wait in a broadcast
    with telling(everybody, group, device), reporting(group, sender, "broadcast of parameters", is_interruption):
        for values in filter(torch.numel, received):
            dist.broadcast(values.reshape(-1).view(torch.uint8), src=source, group=group)  # any dtype
    for shard, values in zip(shards, received, strict=True):
        shard.copy_(values)
    compare({"parameters": "broadcast"}, everybody, device)  # a rank on which this has failed reports it here


def option_numbers(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the numbers among the options of ``optimizer``, such as learning rates, which ranks compare in every step.

    Options are those of the optimizer's class. Others, which users add to groups, may differ between ranks. A list of
    optimizers has those of each. The host waits for no GPU: the value of an option that is a tensor on a GPU is left
    out.
    """
    names = sorted(getattr(optimizer, "options", getattr(optimizer, "defaults", ())))
    groups = [(each, _label(each, position)) for position, each in enumerate(optimizer.param_groups)]
    return {f"{name} of {text}": _numbers(each[name]) for each, text in groups for name in names if name in each}


def _label(group: Mapping[str, Any], position: int) -> str:
    """Return what errors call a parameter group."""
    return "the common parameters" if LOADED in group else f"parameter group {position}"


def _numbers(value: object) -> object:
    match value:
        case torch.Tensor():
            return float(value) if value.device.type == "cpu" and value.numel() == 1 else None
        case list() | tuple():
            return tuple(map(_numbers, value))
        case float() | int() | Real():
            return float(value)
    return None
