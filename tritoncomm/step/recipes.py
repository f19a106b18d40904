"""The recipe that the arguments of ``wrap`` describe, its other forms, and what is logged of it."""

from __future__ import annotations

import dataclasses
import inspect
import logging
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from tritoncomm.algorithms import (
    Dense,
    Hierarchical,
    Recipe,
    Warmup,
    algorithms,
    at_density,
    field_names,
    recipe,
    with_suggestions,
)
from tritoncomm.algorithms.base import Algorithm, StaticRecipe
from tritoncomm.algorithms.wrapper import WrapperRecipe
from tritoncomm.errors import ConfigurationError
from tritoncomm.scheduler import cost
from tritoncomm.scheduler.cost import Link
from tritoncomm.scheduler.ranks import global_ranks, own_rank, rank_text
from tritoncomm.step import settings as defaults
from tritoncomm.step.agree.private_group import numbered_groups
from tritoncomm.step.settings import check_algo, check_group
from tritoncomm_kernels.devices import is_asynchronous

logger = logging.getLogger("tritoncomm")


def resolve_recipe(
    algo: str | Recipe,
    density: float | None,
    warmup_steps: int | None,
    fields: dict[str, Any],
    node_group: dist.ProcessGroup | None = None,
    group: dist.ProcessGroup | None = None,
    *,
    small: str = "fp32",
) -> Recipe:
    """Return the recipe that the arguments of ``wrap`` describe.

    Args:
        algo: Name of a method, or a recipe.
        density: Fraction of entries to deliver. None is the density of a recipe, and ``DEFAULT_DENSITY`` otherwise.
        warmup_steps: Number of dense exchanges before the first sparse one. None is ``DEFAULT_WARMUP``, and 0 for a
            recipe that delivers every entry or wraps another one.
        fields: Further fields of the recipe.
        node_group: Ranks of this rank's node. None if nodes are not treated separately.
        group: Process group of the exchange. None is the default group.
        small: Format of small tensors. That of the dense exchanges at the start depends on it.

    Raises:
        ConfigurationError: An argument is invalid.
    """
    check_algo(algo)
    if not (warmup_steps is None or (type(warmup_steps) is int and warmup_steps >= 0)):
        raise ConfigurationError(f"warmup_steps={warmup_steps!r}: must be a whole number of at least 0, or None")
    if not isinstance(algo, Recipe):
        _check_packed(fields)
        fields = {**default_fields(algo, fields), **fields}
        if density is None:
            chosen = at_density(algo, defaults.DEFAULT_DENSITY, **fields)
        else:
            chosen = recipe(algo, density=density, **fields)
    else:
        given = sorted(fields) + ([] if density in (None, algo.density) else ["density"])
        if given:
            raise ConfigurationError(f"algo is a recipe and carries its own {', '.join(given)}: set it in the recipe")
        chosen = algo
    if warmup_steps is None:
        needs_none = chosen.delivers_all() or isinstance(chosen, WrapperRecipe)
        warmup_steps = 0 if needs_none else defaults.DEFAULT_WARMUP
    if warmup_steps != 0:
        # fp32 rounds nothing, and neither does a method that applies momentum in dense steps.
        values = "fp32" if small == "fp32" or not chosen.averages_when_dense else defaults.DEFAULT_START
        chosen = Warmup(recipe=chosen, steps=warmup_steps, values=values)
    return with_nodes(chosen, node_group, group)


def _check_packed(fields: Mapping[str, Any]) -> None:
    """Raise :class:`~tritoncomm.ConfigurationError` if the user asks for plain messages with rounded values."""
    values = fields.get("values", "fp32")
    if fields.get("packed") is False and values != "fp32":
        raise ConfigurationError(
            f"packed=False: values={values!r} are always packed: leave out packed, or choose values='fp32'"
        )


def default_fields(algo: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields in which ``wrap`` differs from the recipe of ``algo``: ``DEFAULT_VALUES`` for entries.

    The result is empty if the user has ``given`` the format of values, or plain messages.
    """
    sends_entries = algo in algorithms() and {"values", "packed"} <= set(field_names(algo))
    is_open = "values" not in given and given.get("packed") is not False
    return {"values": defaults.DEFAULT_VALUES} if sends_entries and is_open else {}


# Whose fields are no arguments of wrap(): it has an argument for each of them.
_OPTIONS = (defaults.Late, defaults.Updates)


def arguments_of(function: Callable[..., Any]) -> list[str]:
    """Return the names of the arguments of ``function`` that are not collected."""
    parameters = inspect.signature(function).parameters.values()
    return [parameter.name for parameter in parameters if parameter.kind is not parameter.VAR_KEYWORD]


def check_keywords(called: str, arguments: Sequence[str], algo: str | Recipe, given: Iterable[str]) -> None:
    """Raise :class:`~tritoncomm.ConfigurationError` if a keyword is neither an argument nor a field of the recipe.

    Args:
        called: What the user called. It collects keywords that are not its arguments.
        arguments: Its arguments.
        algo: One of these, the method. An unknown name is not checked here.
        given: The collected keywords.
    """
    if isinstance(algo, Recipe):
        name, known = algo.name, [field.name for field in dataclasses.fields(algo)]
    elif algo in algorithms():
        name, known = algo, field_names(algo)
    else:
        return
    fields = [field for field in known if field not in arguments]
    unknown = set(given) - set(fields)
    if unknown:
        homes = {each.name: kind for kind in _OPTIONS for each in dataclasses.fields(kind)}
        inside = [f"{each} is one of tritoncomm.{homes[each].__name__}; " for each in sorted(unknown & homes.keys())]
        raise ConfigurationError(
            f"{called}() has no argument {with_suggestions(unknown, [*arguments, *fields])}: its arguments "
            f"are {', '.join(arguments)}; {''.join(inside)}the fields of {name!r} are {', '.join(fields)}"
        )


def with_nodes(chosen: Recipe, node_group: dist.ProcessGroup | None, group: dist.ProcessGroup | None) -> Recipe:
    """Return ``chosen``, used between the nodes of ``node_group`` only. None does not treat nodes separately.

    Raises:
        ConfigurationError: ``node_group`` is not a node of consecutive ranks.
    """
    if node_group is None:
        return chosen
    check_group("node_group", node_group)
    if isinstance(chosen, Hierarchical):
        raise ConfigurationError(f"node_group was given, and algo={chosen!r} has nodes already: pass one of both")
    group_ranks = global_ranks(group)
    node = global_ranks(node_group)
    places = [group_ranks.index(rank) if rank in group_ranks else -1 for rank in node]
    if own_rank() not in node or places[0] % len(node) or places != list(range(places[0], places[0] + len(node))):
        raise ConfigurationError(
            f"node_group has {rank_text(*node)} of {rank_text(*group_ranks)}: each node must have consecutive ranks, "
            "as torchrun numbers them, all nodes the same number of ranks, and node_group must contain this rank"
        )
    return Hierarchical(recipe=chosen, node_size=len(node))


def nodes_of(chosen: Recipe) -> dict[str, Any]:
    """Return what ranks compare before some of them create process groups for the nodes of ``chosen``."""
    if isinstance(chosen, Hierarchical):
        return {"node size (node_group)": chosen.node_size} | numbered_groups()
    return {"node size (node_group)": None}


# Seconds that messages of a fixed length save on a GPU, estimated: with 8 workers, the host waits 2 instead of 37
# times, at 15 us, and launches 262 kernels instead of 419, at 5 us (benchmarks/results/synchronisations.json). Nothing
# was timed.
STATIC_SAVES = 1.3e-3


def static_takes(method: StaticRecipe, numel: int, workers: int, link: Link) -> float:
    """Return how many seconds an ordinary exchange takes longer on ``link`` if messages have a fixed length."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the recipe has warned when the user made it
        forms = [replace(method, static=static).build(numel) for static in (True, False)]
    static, exact = (form.predicted_traffic(workers, ordinary=True).seconds(link) for form in forms)
    return static - exact


def with_form(chosen: Recipe, device: torch.device | str, numel: int, workers: int) -> Recipe:
    """Return ``chosen`` with ``static="auto"``, or a link, resolved for vectors of ``numel`` values on ``device``.

    On a GPU it is True if the method has the static form, unless this takes longer between ``workers`` on that link. On
    a CPU it stays.
    """
    method = chosen.layers[-1]
    if not isinstance(method, StaticRecipe) or isinstance(method.static, bool):
        return chosen
    if not is_asynchronous(torch.device(device)):
        return chosen
    nodes = [layer for layer in chosen.layers if isinstance(layer, Hierarchical)]
    # Padding would hide that nodes deliver every entry.
    static = method.can_be_static() and not (nodes and chosen.delivers_all())
    if static and method.static != "auto":
        for layer in nodes:  # the link is between them
            numel, workers = -(-numel // layer.node_size), max(1, workers // layer.node_size)
        static = static_takes(method, numel, workers, Link.parse(method.static)) <= STATIC_SAVES
    return chosen.with_method(lambda inner: replace(inner, static=static))  # type: ignore[call-arg]


def without_encoding(chosen: Recipe) -> Recipe:
    """Return ``chosen`` with plain messages and fp32 values. No state depends on the format of messages."""
    plain = {"values": "fp32", "packed": False, "static": "auto"}

    def exact(layer: Recipe) -> Recipe:
        names = {field.name for field in dataclasses.fields(layer)}
        changed: dict[str, Any] = {name: value for name, value in plain.items() if name in names}
        if isinstance(layer, WrapperRecipe):
            changed["recipe"] = exact(layer.recipe)
        return replace(layer, **changed)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the recipe has warned when the user made it
        return exact(chosen)


def is_dense(chosen: Recipe) -> bool:
    """Return True if ``chosen`` is :class:`~tritoncomm.Dense`, or a wrapper around it. No entry is delayed then."""
    return isinstance(chosen.layers[-1], Dense)


def never_delays(chosen: Recipe) -> bool:
    """Return True if ``chosen`` delivers every entry in every step, whatever its density."""
    return is_dense(chosen) or not chosen.layers[-1].has_density


def log_choice(
    recipe: Recipe,
    rank: int,
    world_size: int,
    parts: Sequence[tuple[Algorithm, int]],
) -> None:
    """Log on rank 0 which method is used, and how many bytes it is predicted to save.

    The level is WARNING if nothing is saved and the density is not 1.

    Args:
        recipe: The recipe in use.
        rank: Rank in the group.
        world_size: Number of ranks in the group.
        parts: The vectors that are exchanged separately. Each is its algorithm, and the number of its values that
            belong to small tensors, which are sent dense.
    """
    if rank != 0 or world_size == 1 or not parts:
        return
    received = sum(algorithm.predicted_traffic(world_size, ordinary=True).received.bytes for algorithm, _ in parts)
    dense = sum(cost.dense(algorithm.numel, world_size).received.bytes for algorithm, _ in parts)
    numel, small = sum(algorithm.numel for algorithm, _ in parts), sum(small for _, small in parts)
    dense_chosen = recipe.always_dense()
    saves = received < dense or dense_chosen
    name = repr(recipe) if saves else f"algo={recipe.name!r}, density={recipe.density:g}"
    text = f"{name} over {world_size} ranks: {numel:,} values"
    if small and not is_dense(recipe):
        text += f", of which {small:,} in small tensors are sent dense"
    text += f"; each rank receives {readable_size(received)} per step"
    if 0 < received < dense:
        text += f", {dense / received:.3g} times less than the {readable_size(dense)} of a dense all-reduce"
    elif received and not dense_chosen:
        text += f", which is not less than the {readable_size(dense)} of a dense all-reduce: use algo='dense'"
    logger.log(logging.INFO if saves else logging.WARNING, "%s", text)


def readable_size(size: float) -> str:
    """Return ``size`` (bytes) with a unit and three digits, for example ``"5.20 MB"``."""
    for unit in ("bytes", "kB", "MB"):
        if size < 999.5:  # noqa: PLR2004 - more would be printed with four digits
            digits = f"{size:.0f}" if unit == "bytes" else f"{size:#.3g}".rstrip(".")
            return f"{digits} {unit}"
        size /= 1000
    return f"{size:,.2f} GB"
