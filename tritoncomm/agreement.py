"""What the ranks of a wrapped optimizer must have in common, and the exchange that they then share."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from tritoncomm import fingerprint
from tritoncomm.algorithms import Recipe
from tritoncomm.errors import ConfigurationError
from tritoncomm.exchange import GradientExchange, is_initialised
from tritoncomm.settings import Options, is_dense
from tritoncomm.stepper import takes_aware_step
from tritoncomm.version import __version__


def named_parameters(optimizer: torch.optim.Optimizer) -> list[tuple[torch.Tensor, str]]:
    """The parameters of all groups, with their names if they were given by name."""
    return [
        pair
        for group in optimizer.param_groups
        for pair in zip(group["params"], group.get("param_names", [""] * len(group["params"])), strict=True)
    ]


def build(
    optimizer: torch.optim.Optimizer, recipe: Recipe, options: Options, group: dist.ProcessGroup | None
) -> GradientExchange:
    """An exchange of the gradients of everything that is trained."""
    trained = [(parameter, name) for parameter, name in named_parameters(optimizer) if parameter.requires_grad]
    return GradientExchange(
        [parameter for parameter, _ in trained],
        recipe,
        group,
        options.timeout,
        options.dense_below,
        [name for _, name in trained],
        by_update=selects_by_update(optimizer, recipe, options),
    )


def selects_by_update(optimizer: torch.optim.Optimizer, recipe: Recipe, options: Options) -> bool:
    """What ``select_by`` means for this optimizer and recipe."""
    if options.select_by == "gradient" or is_dense(recipe) or recipe.density == 1:
        return False
    if options.select_by == "update" and not recipe.compares_entries():
        raise ConfigurationError(f"select_by='update': {recipe!r} does not compare entries, leave select_by out")
    return recipe.compares_entries() and (options.select_by == "update" or takes_aware_step(optimizer, options))


def compare(
    exchange: GradientExchange,
    recipe: Recipe,
    optimizer: torch.optim.Optimizer,
    options: Options,
    group: dist.ProcessGroup | None,
) -> None:
    """Raise :class:`~tritoncomm.ConfigMismatchError` on all ranks unless all are set up alike and at the same step."""
    if not is_initialised():
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
        "steps": exchange.steps,
    }
    names = dict(named_parameters(optimizer))
    parameters = exchange.parameters
    fields |= fingerprint.parameter_fields(parameters, [names[parameter] for parameter in parameters])
    fingerprint.compare(fields, group)


def check_groups(state: dict[str, Any], optimizer: torch.optim.Optimizer) -> None:
    """Raise :class:`~tritoncomm.ConfigurationError` for what ``load_state_dict`` would refuse."""
    if not isinstance(state, dict) or not {"state", "param_groups"} <= set(state):
        has = sorted(state) if isinstance(state, dict) else type(state).__name__
        raise ConfigurationError(f"this is no state of an optimizer: it has {has}")
    saved = [len(group.get("params", ())) for group in state["param_groups"]]
    here = [len(group["params"]) for group in optimizer.param_groups]
    if saved != here:
        raise ConfigurationError(f"this checkpoint has parameter groups of {saved} parameters, here they have {here}")
