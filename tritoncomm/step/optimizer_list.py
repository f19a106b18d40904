"""Several optimizers of one model as one optimizer."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from tritoncomm.errors import ConfigurationError
from tritoncomm.step.tensors.names import label_of
from tritoncomm.step.torch_internals import StateHooks, explain_cycles

__all__ = ["OptimizerList", "parts_of", "whole_of"]


class OptimizerList(torch.optim.Optimizer):
    """Several optimizers of different parameters, as one. They keep their state and parameter groups.

    :func:`~tritoncomm.wrap` makes it of a list. A trainer that takes a single optimizer takes it, too.

    ``param_groups`` are those of all, the same objects, so that learning rate schedulers of any of them work.
    ``OneCycleLR`` and ``CyclicLR`` on the list need ``cycle_momentum=False`` if its optimizers name their momentum
    differently.
    ``state_dict()`` holds all in the usual form, with parameters numbered through.

    Args:
        optimizers: The optimizers, at least one.

    Raises:
        ConfigurationError: The list is empty, an entry is no optimizer, or two of them hold the same parameter.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self.optimizers = list(optimizers)
        _check_list(self.optimizers, {})
        explain_cycles(_explanation)
        super().__setstate__({})  # only hooks and profiling: parameters and state stay where they are

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The parameter groups of all optimizers, in order. The list is a new one, its entries are not."""
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    @property
    def state(self) -> Any:  # type: ignore[override]
        """The states of the parameters of all optimizers. The dict is a new one, its entries are not."""
        found: defaultdict[Any, Any] = defaultdict(dict)
        for optimizer in self.optimizers:
            found.update(optimizer.state)
        return found

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """The default options that all optimizers have. Some schedulers set whatever is here, in all groups."""
        first, *others = [optimizer.defaults for optimizer in self.optimizers]
        return {name: value for name, value in first.items() if all(name in other for other in others)}

    @property
    def options(self) -> set[str]:
        """The names of the options that any of the optimizers has."""
        return {name for optimizer in self.optimizers for name in optimizer.defaults}

    def __repr__(self) -> str:
        return f"[{', '.join(map(repr, self.optimizers))}]"

    def __getstate__(self) -> dict[str, Any]:
        return {"optimizers": self.optimizers}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.optimizers = state["optimizers"]
        super().__setstate__({})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raise :class:`~tritoncomm.ConfigurationError`: nothing says which optimizer is meant."""
        raise ConfigurationError(
            "add_param_group() of a list of optimizers: nothing says which one is meant. Call flush(), which applies "
            "the residuals, add the group to one of the optimizers, and call wrap() again"
        )

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Let every optimizer take its step."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for optimizer in self.optimizers:
            optimizer.step()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients of all parameters."""
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of all optimizers."""
        hooks = StateHooks(self)
        hooks.run("state_dict_pre")
        return hooks.changed("state_dict_post", join([optimizer.state_dict() for optimizer in self.optimizers]))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what :meth:`state_dict` returned."""
        hooks = StateHooks(self)
        state_dict = hooks.changed("load_state_dict_pre", state_dict.copy())
        for optimizer, own in zip(self.optimizers, split(state_dict, self.optimizers), strict=True):
            optimizer.load_state_dict(own)
        hooks.run("load_state_dict_post")


def _explanation(optimizer: Any, schedule: str) -> ConfigurationError | None:
    """Return why ``schedule`` cannot cycle the momentum of ``optimizer``, if that is a list."""
    optimizers = parts_of(getattr(optimizer, "optimizer", optimizer))
    names = [next((name for name in ("momentum", "betas") if name in each.defaults), "none") for each in optimizers]
    if len(set(names)) <= 1:
        return None
    held = ", ".join(f"{type(each).__name__} has {name}" for each, name in zip(optimizers, names, strict=True))
    return ConfigurationError(
        f"{schedule}: {held}, and one schedule cycles the momentum of all by the same name: pass cycle_momentum=False, "
        f"or make a {schedule} for each optimizer of the list"
    )


def parts_of(optimizer: torch.optim.Optimizer) -> list[torch.optim.Optimizer]:
    """Return the optimizers of an :class:`OptimizerList`, or a list of ``optimizer`` itself."""
    return optimizer.optimizers if isinstance(optimizer, OptimizerList) else [optimizer]


def whole_of(
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer], names: Mapping[int, str]
) -> torch.optim.Optimizer:
    """Return ``optimizer``, or an :class:`OptimizerList` of a list, whose errors use ``names`` of parameters by id."""
    if not isinstance(optimizer, Sequence):
        return optimizer
    _check_list(optimizer, names)
    return OptimizerList(optimizer)


def join(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return one state dict for those of several optimizers. Parameters are numbered through.

    Other entries than ``state`` and ``param_groups`` are left out if there are several.
    """
    if len(states) == 1:
        return dict(states[0])
    state: dict[int, Any] = {}
    groups: list[dict[str, Any]] = []
    for each in states:
        start = sum(len(group["params"]) for group in groups)
        state |= {start + number: value for number, value in each["state"].items()}
        groups += [
            dict(group) | {"params": [start + number for number in group["params"]]} for group in each["param_groups"]
        ]
    return {"state": state, "param_groups": groups}


def split(state_dict: Mapping[str, Any], optimizers: Sequence[torch.optim.Optimizer]) -> Iterator[dict[str, Any]]:
    """Yield the state dict of each of ``optimizers`` from what :func:`join` returned.

    Parameters keep their numbers, or names: torch goes by their order.
    """
    if len(optimizers) == 1:
        yield dict(state_dict)
        return
    groups = list(state_dict["param_groups"])
    for optimizer in optimizers:
        own, groups = groups[: len(optimizer.param_groups)], groups[len(optimizer.param_groups) :]
        held = {key for group in own for key in group["params"]}
        yield {
            "state": {key: value for key, value in state_dict["state"].items() if key in held},
            "param_groups": own,
        }


def _check_list(optimizers: Sequence[torch.optim.Optimizer], names: Mapping[int, str]) -> None:
    """Raise :class:`~tritoncomm.ConfigurationError` if ``optimizers`` are none, or share parameters.

    ``names`` are those of parameters, by id.
    """
    if not optimizers:
        raise ConfigurationError("optimizer is an empty list: pass at least one optimizer")
    holder: dict[int, int] = {}
    for number, optimizer in enumerate(optimizers):
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise ConfigurationError(
                f"optimizer is a list, and its entry {number} is a {type(optimizer).__name__}: "
                "pass a list of torch.optim.Optimizer"
            )
        for parameter in (p for group in optimizer.param_groups for p in group["params"]):
            first = holder.setdefault(id(parameter), number)
            if first != number:
                before = optimizers[first]
                raise ConfigurationError(
                    f"optimizer is a list, and {label_of(before, parameter, names)} is in its entries {first} "
                    f"({type(before).__name__}) and {number} ({type(optimizer).__name__}): pass each parameter to one "
                    "of them"
                )
