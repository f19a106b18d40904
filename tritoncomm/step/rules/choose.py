"""Which optimizers have a rule for late gradients, and so what travels: gradients, or what a step has changed."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from tritoncomm.algorithms import Dense, Recipe, takes_density, takes_updates
from tritoncomm.errors import ConfigurationError
from tritoncomm.scheduler.process_group import is_distributed
from tritoncomm.step.optimizer_list import parts_of
from tritoncomm.step.recipes import never_delays
from tritoncomm.step.rules.adam import StalenessAwareAdam
from tritoncomm.step.rules.aware import AwareStep
from tritoncomm.step.rules.lion import LateLion
from tritoncomm.step.rules.sgd import LateSGD
from tritoncomm.step.settings import DEFAULT_ALGO, WrapOptions
from tritoncomm.step.torch_internals import steps_as

logger = logging.getLogger("tritoncomm")


RULES: list[type[AwareStep]] = [StalenessAwareAdam, LateLion, LateSGD]


def add_rule(rule: type[AwareStep]) -> None:
    """Let ``rule`` replace the step of the optimizers that it fits, before the rules of the library.

    Call it on all ranks, before :func:`tritoncomm.wrap`.
    """
    if rule not in RULES:
        RULES.insert(0, rule)


# Optimizers whose update is linear in the gradient. A delayed delivery only delays the update.
_LINEAR = (torch.optim.SGD,)


def is_linear(optimizer: torch.optim.Optimizer) -> bool:
    """Return True if the update of ``optimizer`` is linear in the gradient. A step of a subclass may not be."""
    return steps_as(optimizer, _LINEAR)


def find_rule(optimizer: torch.optim.Optimizer) -> type[AwareStep] | None:
    """Return the rule for ``optimizer``, or None if there is none for its type."""
    return next((rule for rule in RULES if rule.fits(optimizer)), None)


def keeps_points(optimizer: torch.optim.Optimizer) -> bool:
    """Return True for schedule-free optimizers.

    They keep a second copy of the parameters, which steps by this worker's gradients and attracts the parameters. It is
    no part of an update: on workers that exchange updates, the copies would drift apart.
    """
    return any("ScheduleFree" in kind.__name__ for kind in type(optimizer).__mro__)


def exchanges_updates(optimizer: torch.optim.Optimizer, options: WrapOptions) -> bool:
    """Return True if what the steps of ``optimizer`` change is exchanged, False if its gradients are.

    A late gradient is only late for an optimizer whose step is linear in it, and for one that has a rule. A list
    exchanges gradients if that holds for all of its optimizers.
    """
    if options.local_steps > 1 or options.exchange != "auto":
        return options.local_steps > 1 or options.exchange == "updates"
    return not all(is_linear(each) or find_rule(each) or keeps_points(each) for each in parts_of(optimizer))


def delivers_at_once(algo: str | Recipe) -> bool:
    """Return True if ``algo`` delivers every entry in every step, so that no optimizer needs a rule."""
    return never_delays(algo) if isinstance(algo, Recipe) else algo == Dense.name or not takes_density(algo)


def check_exchange(optimizer: torch.optim.Optimizer, options: WrapOptions, given: Mapping[str, Any]) -> None:
    """Check that the arguments of ``wrap`` fit what the optimizers exchange. Log those that have no effect.

    Args:
        optimizer: The optimizer, or the list of them.
        options: The options of ``wrap``.
        given: Those other arguments that the user has given, by name.

    Raises:
        ConfigurationError: An argument is for the exchange of updates, and none exchanges them, or it is impossible.
    """
    parts, sends_updates = parts_of(optimizer), exchanges_updates(optimizer, options)
    names = " and ".join(type(each).__name__ for each in parts)
    if options.local_steps > 1 and given.get("staleness") == "aware":
        raise ConfigurationError(
            f"staleness='aware' with local_steps={options.local_steps}: updates are exchanged, which have no late "
            "gradients; leave out staleness"
        )
    if sends_updates:
        _check_points(parts, options)
    for name in ["updates_algo", *(["algo"] if sends_updates else [])]:
        if not takes_updates(given.get(name)):
            raise ConfigurationError(
                f"{name}={given[name]!r}: this method is for gradients, and {names} exchanges updates: choose another "
                "method"
            )
    without = [each for each in parts if not sends_updates and not is_linear(each) and find_rule(each) is None]
    if without and not delivers_at_once(given.get("algo", DEFAULT_ALGO)):
        logger.info(
            "%s exchanges gradients, and has no rule for late ones: it treats a sum of several as one gradient. "
            "With algo='quantized' none is late, and exchange='updates' needs no rule",
            " and ".join(type(each).__name__ for each in without),
        )
    if not sends_updates:
        plain = {"outer_lr": 1.0, "outer_momentum": 0.0}
        unused = [name for name, default in plain.items() if getattr(options, name) != default]
        unused += [name for name in given if name == "updates_algo"]
        if unused:
            advice = "leave it out" if any(map(keeps_points, parts)) else "pass exchange='updates' or local_steps"
            raise ConfigurationError(
                f"{unused[0]} is for optimizers that exchange updates, and {names} exchanges gradients: {advice}"
            )
    else:
        whole = any(group.get("dense") for group in optimizer.param_groups)
        effective = {
            "updates_algo",
            *(["small"] if whole else []),
            *(["staleness"] if given.get("staleness") == "off" else []),
        }
        unused = [name for name in given if name not in effective]
        if unused and (not is_distributed() or dist.get_rank() == 0):
            logger.warning(
                "without effect: %s. What this sets is for gradients, and updates are exchanged (%s): pass a recipe as "
                "updates_algo, or exchange='gradients'",
                ", ".join(f"{name}={given[name]!r}" for name in unused),
                names,
            )


def _check_points(parts: Sequence[torch.optim.Optimizer], options: WrapOptions) -> None:
    """Raise :class:`~tritoncomm.ConfigurationError` if one of ``parts`` that exchange updates :func:`keeps_points`."""
    for each in filter(keeps_points, parts):
        reason, advice = "exchange='updates'", "leave it out, and the gradients are exchanged, or use another optimizer"
        if options.local_steps > 1:
            reason = f"local_steps={options.local_steps}"
        elif options.exchange == "auto":
            reason = "the list exchanges updates, because one of its optimizers has no rule for late gradients"
            advice = "call wrap() for it alone, or pass exchange='gradients'"
        raise ConfigurationError(
            f"{reason}: {type(each).__name__} keeps a copy of the parameters that is not exchanged and would drift "
            f"apart between ranks: {advice}"
        )


def takes_aware_step(optimizer: torch.optim.Optimizer, options: WrapOptions) -> bool:
    """Return True if ``optimizer`` takes the staleness-aware step."""
    return options.staleness == "aware" and find_rule(optimizer) is not None


def selects_by_update(optimizer: torch.optim.Optimizer, recipe: Recipe, options: WrapOptions) -> bool:
    """Return True if ``recipe`` selects entries by their update, False if by their gradient."""
    if options.select_by == "gradient" or recipe.delivers_all():
        return False
    if options.select_by == "update" and not recipe.compares_entries():
        raise ConfigurationError(
            f"select_by='update' needs a method that compares entries, and {recipe.name!r} does not: omit select_by"
        )
    return recipe.compares_entries() and (options.select_by == "update" or takes_aware_step(optimizer, options))
