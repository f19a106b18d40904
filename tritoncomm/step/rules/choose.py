"""Which optimizers have a rule for late gradients, and so what travels: gradients, or what a step has changed."""

from __future__ import annotations

import logging
from typing import Any

import torch
import torch.distributed as dist

from tritoncomm.algorithms import Recipe
from tritoncomm.errors import ConfigurationError
from tritoncomm.scheduler.ranks import speaks
from tritoncomm.step.optimizer_list import parts_of
from tritoncomm.step.recipes import never_delays
from tritoncomm.step.rules.adam import StalenessAwareAdam
from tritoncomm.step.rules.late import AwareStep
from tritoncomm.step.rules.lion import LateLion
from tritoncomm.step.rules.sgd import LateSGD
from tritoncomm.step.settings import Late, Updates, WrapOptions, check_local_steps, check_switch
from tritoncomm.step.torch_internals import steps_as

logger = logging.getLogger("tritoncomm")


RULES: list[type[AwareStep]] = [StalenessAwareAdam, LateLion, LateSGD]


def add_rule(rule: type[AwareStep]) -> None:
    """Let ``rule`` replace the step of the optimizers that it fits, before the rules of the library.

    Call it on all ranks, before :func:`tritoncomm.wrap`.

    Raises:
        ConfigurationError: ``rule`` is no class of a rule.
    """
    if not (isinstance(rule, type) and issubclass(rule, AwareStep)):
        raise ConfigurationError(f"rule={rule!r}: pass a class that derives from tritoncomm.LateRule")
    if rule not in RULES:
        RULES.insert(0, rule)


def is_linear(optimizer: torch.optim.Optimizer) -> bool:
    """Return True if the update of ``optimizer`` is linear in the gradient. A step of a subclass may not be.

    A delayed delivery then only delays the update.
    """
    return steps_as(optimizer, (torch.optim.SGD,))


def find_rule(optimizer: torch.optim.Optimizer) -> type[AwareStep] | None:
    """Return the rule for ``optimizer``, or None if there is none for its type."""
    return next((rule for rule in RULES if rule.fits(optimizer)), None)


def keeps_points(optimizer: torch.optim.Optimizer) -> bool:
    """Return True for schedule-free optimizers.

    They keep a second copy of the parameters, which steps by this worker's gradients and attracts the parameters. It is
    no part of an update: on workers that exchange updates, the copies would drift apart.
    """
    return any("ScheduleFree" in kind.__name__ for kind in type(optimizer).__mro__)


def exchanges_updates(optimizer: torch.optim.Optimizer) -> bool:
    """Return True if by default what the steps of ``optimizer`` change is exchanged, False if its gradients are.

    A late gradient is only late for an optimizer whose step is linear in it, and for one that has a rule. A list
    exchanges gradients if that holds for all of its optimizers.
    """
    return not all(is_linear(each) or find_rule(each) or keeps_points(each) for each in parts_of(optimizer))


def updates_of(
    optimizer: torch.optim.Optimizer, updates: bool | Updates | None, local_steps: int, recipe: Recipe
) -> Updates | None:
    """Return how ``optimizer`` exchanges updates, or None if it exchanges gradients.

    ``optimizer`` may be a list of them, and ``recipe`` is for gradients. The others are arguments of ``wrap``.

    Raises:
        ConfigurationError: An argument is invalid, or an optimizer cannot exchange updates.
    """
    check_switch("updates", updates, Updates)
    check_local_steps(local_steps)
    if updates is False and local_steps > 1:
        raise ConfigurationError(f"local_steps={local_steps} needs the exchange of updates: leave out updates=False")
    chosen: bool | Updates | None = updates
    if updates is None:
        chosen = local_steps > 1 or (exchanges_updates(optimizer) and not never_delays(recipe))
    if not chosen:
        return None
    reason = f"local_steps={local_steps}" if local_steps > 1 else f"updates={updates!r}"
    advice = "leave it out, and the gradients are exchanged, or use another optimizer"
    if updates is None and local_steps == 1:
        reason = "the list exchanges updates, because one of its optimizers has no rule for late gradients"
        advice = "call wrap() for it alone, or pass updates=False"
    for each in filter(keeps_points, parts_of(optimizer)):
        raise ConfigurationError(
            f"{reason}: {type(each).__name__} keeps a copy of the parameters that is not exchanged and would drift "
            f"apart between ranks: {advice}"
        )
    return chosen if isinstance(chosen, Updates) else Updates()


def tell_effects(
    optimizer: torch.optim.Optimizer,
    options: WrapOptions,
    recipe: Recipe,
    given: dict[str, Any],
    group: dist.ProcessGroup | None,
) -> None:
    """Log which arguments have no effect, and which optimizers that exchange gradients have no rule for late ones.

    Args:
        optimizer: The optimizer, or the list of them.
        options: The options of ``wrap``.
        recipe: The recipe of the exchange.
        given: The arguments of ``wrap`` that are for gradients, by name. Those that are None were not given.
        group: The process group, whose first rank logs what has no effect.
    """
    parts = parts_of(optimizer)
    if options.updates is None:
        without = [each for each in parts if not is_linear(each) and find_rule(each) is None]
        if without and not never_delays(recipe):
            logger.info(
                "%s exchanges gradients, and has no rule for late ones: it treats a sum of several as one gradient. "
                "With algo='quantized' none is late, and updates=True needs no rule",
                " and ".join(type(each).__name__ for each in without),
            )
        late = given["late"]
        has_rule = any(find_rule(each) is not None for each in parts) or getattr(late, "select_by", "") == "update"
        if isinstance(late, Late) and (never_delays(recipe) or not has_rule) and speaks(group):
            why = f"none is late with {recipe.name!r}" if never_delays(recipe) else "the optimizer has no rule for them"
            logger.warning("without effect: late=%r. This is for late gradients, and %s: leave it out", late, why)
        return
    if any(part.get("dense") for part in optimizer.param_groups):
        given = {name: value for name, value in given.items() if name != "small"}
    unused = ", ".join(f"{name}={value!r}" for name, value in given.items() if value is not None)
    if unused and speaks(group):
        logger.warning(
            "without effect: %s. What this sets is for gradients, and updates are exchanged (%s): leave it out, or "
            "pass updates=False%s. The method of updates is updates=Updates(algo=...)",
            unused,
            " and ".join(type(each).__name__ for each in parts),
            "" if options.local_steps == 1 else " without local_steps",
        )


def takes_aware_step(optimizer: torch.optim.Optimizer, late: Late | None) -> bool:
    """Return True if ``optimizer`` takes the staleness-aware step."""
    return late is not None and find_rule(optimizer) is not None


def selects_by_update(optimizer: torch.optim.Optimizer, recipe: Recipe, late: Late | None) -> bool:
    """Return True if ``recipe`` selects entries by their update, False if by their gradient."""
    if late is None or late.select_by == "gradient" or recipe.delivers_all():
        return False
    if late.select_by == "update" and not recipe.compares_entries():
        raise ConfigurationError(
            f"select_by='update' needs a method that compares entries, and {recipe.name!r} does not: omit select_by"
        )
    return recipe.compares_entries() and (late.select_by == "update" or takes_aware_step(optimizer, late))
