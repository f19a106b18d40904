"""What a front door is told: checked once, the same for all of them."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from tritoncomm.algorithms import Algorithm, Dense, Hierarchical, Recipe, Warmup, recipe
from tritoncomm.errors import ConfigurationError
from tritoncomm.scheduler import cost
from tritoncomm.step import setup_checks

logger = logging.getLogger("tritoncomm")

DEFAULT_DENSITY = 0.01
DENSE_BELOW = 1024
NONFINITE_POLICIES = ("skip", "raise", "zero")


@dataclass(frozen=True, kw_only=True)
class WrapOptions:
    """What :func:`tritoncomm.wrap` was told, beyond the recipe."""

    staleness: str = "aware"
    select_by: str = "auto"
    max_catch_up: float = 20.0
    max_relative_update: float = 0.2
    on_nonfinite: str = "skip"
    max_grad_norm: float | None = None
    timeout: timedelta | None = None
    dense_below: int = DENSE_BELOW

    def __post_init__(self) -> None:
        one_of("staleness", self.staleness, ("aware", "off"))
        one_of("select_by", self.select_by, ("auto", "update", "gradient"))
        one_of("on_nonfinite", self.on_nonfinite, NONFINITE_POLICIES)
        if not (is_number(self.max_catch_up) and self.max_catch_up >= 1):
            raise ConfigurationError(
                f"max_catch_up={self.max_catch_up!r}: a delivery is at least one step, give a number from 1 on"
            )
        if not (is_number(self.max_relative_update) and self.max_relative_update >= 0):
            raise ConfigurationError(
                f"max_relative_update={self.max_relative_update!r}: give a share of a tensor's norm, 0 or more; "
                "math.inf is no limit"
            )
        if self.max_grad_norm is not None and not (is_number(self.max_grad_norm) and self.max_grad_norm > 0):
            raise ConfigurationError(f"max_grad_norm={self.max_grad_norm!r}: give a positive number, or None")
        check_dense_below(self.dense_below)
        check_timeout(self.timeout)


def is_number(value: object) -> bool:
    """True for an int or a float, but not for a bool."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def one_of(name: str, value: str, choices: tuple[str, ...]) -> None:
    """Raise :class:`~tritoncomm.ConfigurationError` unless ``value`` is one of ``choices``."""
    if value not in choices:
        raise ConfigurationError(f"{name}={value!r}: choose one of {', '.join(map(repr, choices))}")


def check_dense_below(dense_below: int) -> None:
    """Raise :class:`~tritoncomm.ConfigurationError` unless it is a number of elements."""
    if not (isinstance(dense_below, int) and dense_below >= 0):
        raise ConfigurationError(f"dense_below={dense_below!r}: give a number of elements, 0 for none dense")


def check_timeout(timeout: timedelta | None) -> None:
    """Raise :class:`~tritoncomm.ConfigurationError` unless it is a ``timedelta`` or None."""
    if not (timeout is None or isinstance(timeout, timedelta)):
        raise ConfigurationError(f"timeout={timeout!r}: give a datetime.timedelta, or None")


def resolve_recipe(
    algo: str | Recipe,
    density: float,
    warmup_steps: int,
    fields: dict[str, Any],
    node_group: dist.ProcessGroup | None = None,
    group: dist.ProcessGroup | None = None,
) -> Recipe:
    """The recipe that ``algo`` stands for, after ``warmup_steps`` dense ones, between the nodes of ``node_group``."""
    if not isinstance(algo, Recipe):
        chosen = recipe(algo, density=density, **fields)
    else:
        given = sorted(fields) + ([] if density in (DEFAULT_DENSITY, algo.density) else ["density"])
        if given:
            raise ConfigurationError(f"algo is a recipe and carries its own {', '.join(given)}: set it there")
        chosen = algo
    return with_warmup_and_nodes(chosen, warmup_steps, node_group, group)


def with_warmup_and_nodes(
    chosen: Recipe, warmup_steps: int, node_group: dist.ProcessGroup | None, group: dist.ProcessGroup | None
) -> Recipe:
    """``chosen`` after ``warmup_steps`` dense steps, between the nodes of ``node_group``."""
    if warmup_steps != 0:
        chosen = Warmup(recipe=chosen, steps=warmup_steps)
    if node_group is None:
        return chosen
    everybody = dist.get_process_group_ranks(group or dist.group.WORLD)
    node = dist.get_process_group_ranks(node_group)
    places = [everybody.index(rank) if rank in everybody else -1 for rank in node]
    if dist.get_rank() not in node or places[0] % len(node) or places != list(range(places[0], places[0] + len(node))):
        raise ConfigurationError(
            f"node_group holds ranks {node} of {everybody}: nodes must be equally large, of consecutive ranks, as "
            "torchrun numbers them, and this rank in its own"
        )
    setup_checks.compare({"node size": len(node)}, group)  # before groups are made of it
    return Hierarchical(recipe=chosen, node_size=len(node))


def with_density(chosen: Recipe, density: float) -> Recipe:
    """``chosen`` at another density."""
    inner = getattr(chosen, "recipe", None)
    if inner is not None:
        return replace(chosen, recipe=with_density(inner, density))  # type: ignore[call-arg]
    return replace(chosen, density=density)


def is_dense(chosen: Recipe) -> bool:
    """True when nothing is ever late."""
    inner = getattr(chosen, "recipe", None)
    return is_dense(inner) if inner is not None else isinstance(chosen, Dense)


def check_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Raise :class:`~tritoncomm.ConfigurationError` for what cannot be wrapped."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigurationError(f"optimizer is a {type(optimizer).__name__}: pass a torch.optim.Optimizer")
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ConfigurationError("LBFGS evaluates its closure several times per step and cannot be wrapped")


def log_choice(recipe: Recipe, rank: int, world_size: int, parts: Sequence[tuple[Algorithm, int]]) -> None:
    """Log once, on rank 0, which method was chosen and how many bytes it is predicted to save.

    ``parts`` are the vectors that are exchanged separately: the algorithm of each, and how many of its values belong
    to small tensors, which are sent dense. The level is WARNING if nothing is saved.
    """
    if rank != 0 or world_size == 1 or not parts:
        return
    received = sum(algorithm.ordinary_traffic(world_size).received.bytes for algorithm, _ in parts)
    dense = sum(cost.dense(algorithm.numel, world_size).received.bytes for algorithm, _ in parts)
    numel, small = sum(algorithm.numel for algorithm, _ in parts), sum(small for _, small in parts)
    text = f"{recipe!r} over {world_size} ranks: {numel:,} values"
    if small and not is_dense(recipe):
        text += f", of which {small:,} in small tensors are sent dense"
    text += f"; each rank receives {readable_size(received)} per step"
    saves = received < dense
    if saves:
        text += f", {dense / received:.3g} times less than the {readable_size(dense)} of a dense all-reduce"
    elif not is_dense(recipe) and recipe.density < 1:
        text += f", which is not less than the {readable_size(dense)} of a dense all-reduce: use algo='dense'"
    logger.log(logging.INFO if saves or recipe.density == 1 else logging.WARNING, "%s", text)


def readable_size(size: float) -> str:
    """``size`` in bytes with a unit and three digits, for example ``"5.20 MB"``."""
    for unit in ("bytes", "kB", "MB"):
        if size < 999.5:  # noqa: PLR2004 - more would be printed with four digits
            return f"{size:.3g} {unit}" if unit == "bytes" else f"{size:#.3g} {unit}".replace(". ", " ")
        size /= 1000
    return f"{size:,.2f} GB"
