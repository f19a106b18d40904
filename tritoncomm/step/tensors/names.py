"""The parameters of an optimizer, and how messages call each: by its name, or by its position and shape."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.nn.parameter import is_lazy

# Why a checkpoint cannot be loaded.
OTHER_PARAMETERS = (
    "this checkpoint belongs to a model with other parameters, or in another order, or others were frozen at wrap(): "
    "pass them to the optimizer in the order of the run that saved, and freeze before wrap() what was frozen before it "
    "in that run, and the rest afterwards"
)


def label(name: str, position: int, parameter: torch.Tensor) -> str:
    """Return ``name``, or the ``position`` and the shape of ``parameter`` if that is empty."""
    return name or f"parameter {position}" + ("" if is_lazy(parameter) else f" of shape {tuple(parameter.shape)}")


def label_of(optimizer: torch.optim.Optimizer, parameter: torch.Tensor, names: Mapping[int, str]) -> str:
    """Return how messages call ``parameter`` of ``optimizer``: by the name it has there, or in ``names`` by its id."""
    position = 0
    for group in optimizer.param_groups:
        for number, each in enumerate(group["params"]):
            if each is parameter:
                own = group.get("param_names", ())
                return label(own[number] if own else names.get(id(parameter), ""), position + number, parameter)
        position += len(group["params"])
    return label(names.get(id(parameter), ""), position, parameter)


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


def device_of(optimizer: torch.optim.Optimizer) -> torch.device | None:
    """Return the device of the first parameter of ``optimizer``, or None if there is none."""
    parameters = (each for group in getattr(optimizer, "param_groups", ()) for each in group["params"])
    return next((parameter.device for parameter in parameters), None)
