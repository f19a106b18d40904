"""The flat vectors that the parameters of a wrapped optimizer form."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from tritoncomm.algorithms import Recipe
from tritoncomm.errors import ConfigurationError
from tritoncomm.scheduler.ranks import global_ranks
from tritoncomm.step import agree
from tritoncomm.step import settings as defaults
from tritoncomm.step.agree.private_group import scheduler_of_all_shards
from tritoncomm.step.exchange.machine import GradientExchange
from tritoncomm.step.exchange.vector import ExchangeOptions, VectorExchange
from tritoncomm.step.optimizer_list import parts_of
from tritoncomm.step.rules.choose import selects_by_update, takes_aware_step
from tritoncomm.step.settings import WrapOptions
from tritoncomm.step.tensors.names import label
from tritoncomm.step.tensors.shards import by_split, local, mesh_ranks


def exchange_of(
    optimizer: torch.optim.Optimizer,
    recipe: Recipe,
    trained: Sequence[tuple[torch.Tensor, str]],
    options: WrapOptions,
    group: dist.ProcessGroup | None,
    *,
    dense: Collection[int],
    before: GradientExchange | None,
) -> GradientExchange:
    """Return an exchange of the gradients of the parameters ``trained``, each given with its name.

    Args:
        optimizer: The optimizer, or the list of them.
        recipe: The recipe of the exchange.
        trained: Its parameters that require gradients.
        options: The options of ``wrap``. If updates are exchanged, they are the gradients of the anchor
            (:class:`~tritoncomm.step.local.steps.LocalSteps`), which are not clipped, and of which nothing travels
            dense.
        group: Process group of the exchange. None is the default group.
        dense: Ids of the parameters that travel dense, whatever their size.
        before: The exchange that this one replaces, if any.
    """
    parameters = [parameter for parameter, _ in trained]
    flattened = all(parameter.dim() <= 1 for parameter in parameters)
    vectors: list[VectorExchange] = []
    common = ExchangeOptions(
        recipe=recipe,
        group=group,
        timeout=options.timeout,
        flattened=flattened,
        dense=frozenset(dense),
        small=options.small,
        single_worker_selects=defaults.SINGLE_WORKER_SELECTS,
        matches_length=options.matches_length,
    )
    for part in parts_of(optimizer):
        held = agree.parameter_ids(part)
        own = [(parameter, name) for parameter, name in trained if id(parameter) in held]
        if own or not trained:
            vectors += _vectors(own, _options_of(part, common, options) if options.updates is None else common)
    all_shards = None
    if check_shards(trained, group):
        all_shards = None if before is None else before.all_shards
        all_shards = all_shards or scheduler_of_all_shards(recipe.name, options.timeout, local(parameters[0]).device)
    exchange = GradientExchange(optimizer, vectors[-1].options, all_shards=all_shards)
    exchange.trained = parameters
    exchange.vectors = vectors
    return exchange


def _options_of(optimizer: torch.optim.Optimizer, common: ExchangeOptions, options: WrapOptions) -> ExchangeOptions:
    """Return the settings of the vectors of ``optimizer``: those that all have in ``common``, and its own."""
    recipe = common.recipe
    return replace(
        common,
        dense_below=options.dense_below,
        max_gradient_norm=options.max_grad_norm,
        by_update=selects_by_update(optimizer, recipe, options.late),
        is_late=takes_aware_step(optimizer, options.late),
        epsilon=min((float(each["eps"]) for each in optimizer.param_groups if _has_epsilon(each)), default=0.0),
    )


def _has_epsilon(group: Mapping[str, Any]) -> bool:
    """Return True if ``eps`` is a number. Adafactor has two."""
    return isinstance(group.get("eps"), (int, float, torch.Tensor))


def dense_ids(optimizer: torch.optim.Optimizer) -> set[int]:
    """Return the ids of the parameters whose group says ``dense=True``.

    Raises:
        ConfigurationError: A group says something else than True or False.
    """
    found: set[int] = set()
    for group in optimizer.param_groups:
        chosen = group.get("dense", False)
        if not isinstance(chosen, bool):
            raise ConfigurationError(f"a parameter group has dense={chosen!r}: it must be True or False")
        found.update(map(id, group["params"]) if chosen else ())
    return found


def _vectors(trained: Sequence[tuple[torch.Tensor, str]], options: ExchangeOptions) -> list[VectorExchange]:
    """Return the flat vectors of the parameters ``trained``, each given with its name.

    Selection depends on the whole vector. Parameters that tensor parallelism replicates have a vector of their own, so
    that the ranks with copies of them select the same entries. Otherwise there is one vector.
    """
    parameters = [parameter for parameter, _ in trained]
    groups = by_split(parameters)
    if len(groups) <= 1:
        return [VectorExchange(parameters, [name for _, name in trained], options)]
    # A vector counts its own parameters. Errors count those of the optimizer.
    names = [label(name, i, p) for i, (p, name) in enumerate(trained)]
    return [VectorExchange([parameters[i] for i in own], [names[i] for i in own], options) for own in groups]


def check_shards(trained: Sequence[tuple[torch.Tensor, str]], group: dist.ProcessGroup | None) -> bool:
    """Return whether any parameter is a DTensor, whose shard is exchanged with the ranks of ``group``.

    ``trained`` are the parameters, each given with its name.

    Raises:
        ConfigurationError: Ranks of ``group`` hold other shards, or average the gradient already.
    """
    found = False
    for position, (parameter, name) in enumerate(trained):
        if not hasattr(parameter, "device_mesh"):
            continue
        found = True
        mesh = mesh_ranks(parameter)
        ranks = set(global_ranks(group))
        if mesh & ranks != {dist.get_rank()}:
            raise ConfigurationError(
                f"{label(name, position, parameter)} is a DTensor over ranks {sorted(mesh)}, and the exchange is over "
                f"ranks {sorted(ranks)}: pass process_group=, the ranks that hold the same shard "
                '(mesh["replicate"].get_group()), and apply fully_shard() or parallelize_module() with the other '
                "dimensions of the mesh; with a single copy of the model there is nothing to exchange"
            )
    return found
