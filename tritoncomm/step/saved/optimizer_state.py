"""The state dict of an optimizer around the state of its exchange: its keys, and the marks of a residual beside it."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from tritoncomm.errors import ConfigurationError
from tritoncomm.scheduler.ranks import speaks
from tritoncomm.step.exchange.machine import GradientExchange
from tritoncomm.step.torch_internals import is_for_checkpoint

logger = logging.getLogger("tritoncomm")

_MARK = "tritoncomm"  # key in a parameter group


def check_state_dict(state: dict[str, Any], optimizer: torch.optim.Optimizer) -> None:
    """Raise :class:`~tritoncomm.ConfigurationError` if ``optimizer`` cannot load ``state``."""
    if not isinstance(state, dict) or not {"state", "param_groups"} <= set(state):
        found = sorted(state) if isinstance(state, dict) else type(state).__name__
        raise ConfigurationError(f"not an optimizer state_dict: expected keys 'state', 'param_groups', got {found}")
    saved = [len(group.get("params", ())) for group in state["param_groups"]]
    here = [len(group["params"]) for group in optimizer.param_groups]
    if saved != here:
        raise ConfigurationError(
            f"state_dict has parameter groups of {saved} parameters, the parameter groups of the optimizer have {here}"
        )


def keys_of(state_dict: Mapping[str, Any]) -> list[Any]:
    """Return the keys of all parameters in the ``state_dict`` of an optimizer, in their order."""
    return [key for group in state_dict["param_groups"] for key in group["params"]]


def states_of(state_dict: Mapping[str, Any]) -> dict[int, Any]:
    """Return the states in the ``state_dict`` of an optimizer by the number of their parameter, whatever their keys."""
    states = state_dict["state"]
    return {number: states[key] for number, key in enumerate(keys_of(state_dict)) if key in states}


def marked(state_dict: dict[str, Any], exchange: GradientExchange) -> dict[str, Any]:
    """Return the ``state_dict`` of an optimizer with a mark in its groups, if residuals are a part of its state.

    The groups of an optimizer that loads it without them keep the mark, see :func:`warn_about_lost_residual`.
    """
    if not exchange.steps or is_for_checkpoint() or not any(each.delays for each in exchange.scope.vectors):
        return state_dict
    return state_dict | {"param_groups": [{**group, _MARK: True} for group in state_dict["param_groups"]]}


def unmarked(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the optimizer's class loads of ``state_dict``."""
    groups = [{key: value for key, value in group.items() if key != _MARK} for group in state_dict["param_groups"]]
    return {key: value for key, value in state_dict.items() if key != "tritoncomm"} | {"param_groups": groups}


def remove_marks(groups: Iterable[dict[str, Any]]) -> bool:
    """Remove the marks of parameter ``groups``, see :func:`marked`. Return whether there was any."""
    found = [group.pop(_MARK, False) for group in groups]
    return any(found)


def warn_about_lost_residual(
    groups: Iterable[dict[str, Any]], everybody: dist.ProcessGroup | None, level: int = logging.WARNING
) -> bool:
    """Log if parameter ``groups`` are of a wrapped optimizer, whose residual was not loaded with it. Return whether.

    The first rank of the process group ``everybody`` logs it.
    """
    is_marked = remove_marks(groups)
    if not is_marked or not speaks(everybody):
        return is_marked
    logger.log(
        level,
        "the optimizer holds the state of an earlier run with wrap(), without its residuals, which are lost: call "
        "load_state_dict() of the wrapped optimizer with its state of each rank, see tritoncomm.checkpoint, or in "
        "a trainer resume from a checkpoint that it saved with tritoncomm",
    )
    return is_marked
