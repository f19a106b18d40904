"""Recipes by name. A new method needs a file and its class below, or :func:`register`."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterable
from typing import Any, TypeVar

from tritoncomm.algorithms.base import Algorithm, Recipe
from tritoncomm.algorithms.dense import Dense
from tritoncomm.algorithms.exdyna import ExDyna, MiCRO
from tritoncomm.algorithms.hierarchical import Hierarchical
from tritoncomm.algorithms.ok_topk import OkTopk
from tritoncomm.algorithms.quantized import Quantized
from tritoncomm.algorithms.random_block import RandomBlock
from tritoncomm.algorithms.spardl import SparDL
from tritoncomm.algorithms.topk_allgather import TopkAllgather
from tritoncomm.algorithms.warmup import Warmup
from tritoncomm.errors import ConfigurationError

_RECIPES: tuple[type[Recipe], ...] = (Dense, ExDyna, MiCRO, OkTopk, Quantized, RandomBlock, SparDL, TopkAllgather)
_BY_NAME = {kind.name: kind for kind in _RECIPES}
_Kind = TypeVar("_Kind", bound=type[Recipe])

__all__ = [
    "Algorithm",
    "Dense",
    "ExDyna",
    "Hierarchical",
    "MiCRO",
    "OkTopk",
    "Quantized",
    "RandomBlock",
    "Recipe",
    "SparDL",
    "TopkAllgather",
    "Warmup",
    "algorithms",
    "at_density",
    "recipe",
    "register",
    "takes_density",
    "takes_updates",
]


def algorithms() -> list[str]:
    """Return the names that ``algo=`` and :func:`recipe` accept: those of the library, then registered ones."""
    return list(_BY_NAME)


def register(recipe_class: _Kind) -> _Kind:
    """Give the method of ``recipe_class`` its name, so that ``algo=``, :func:`recipe` and ``simulate`` accept it.

    Returns ``recipe_class``, so this is also a decorator. Registering a class again has no effect.

    Raises:
        ConfigurationError: It is not a recipe class with a name and a default for every field, or the name is taken.
    """
    if not (isinstance(recipe_class, type) and issubclass(recipe_class, Recipe)):
        raise ConfigurationError(f"register({recipe_class!r}): pass a class that is derived from tritoncomm.Recipe")
    name = getattr(recipe_class, "name", None)
    if not (isinstance(name, str) and name.isidentifier()):
        raise ConfigurationError(f"{recipe_class.__name__}.name is {name!r}: set it to an identifier, as 'my_method'")
    if not dataclasses.is_dataclass(recipe_class) or "__dataclass_params__" not in vars(recipe_class):
        raise ConfigurationError(f"{recipe_class.__name__}: decorate it by dataclass(frozen=True, kw_only=True)")
    missing = dataclasses.MISSING
    needed = [
        field.name
        for field in dataclasses.fields(recipe_class)
        if field.init and field.default is missing and field.default_factory is missing
    ]
    if needed:
        raise ConfigurationError(f"{recipe_class.__name__} has no default for {', '.join(needed)}: all fields need one")
    if _BY_NAME.setdefault(name, recipe_class) is not recipe_class:
        raise ConfigurationError(
            f"{recipe_class.__name__}.name is {name!r}, which is the name of {_BY_NAME[name].__qualname__}: choose "
            "another one"
        )
    return recipe_class


def recipe(name: str, **fields: Any) -> Recipe:
    """Return the recipe called ``name`` with ``fields`` set, for example ``recipe("oktopk", density=0.02)``.

    Raises :class:`~tritoncomm.ConfigurationError` for an unknown name or field. The message lists the known ones.
    """
    if not isinstance(name, str) or name not in _BY_NAME:
        raise ConfigurationError(f"unknown algorithm {name!r}: choose one of {', '.join(algorithms())}")
    known = field_names(name)
    unknown = set(fields) - set(known)
    if unknown:
        raise ConfigurationError(
            f"{name!r} has no field {with_suggestions(unknown, known)}: its fields are {', '.join(known) or 'none'}"
        )
    return _BY_NAME[name](**fields)


def at_density(name: str, density: float, **fields: Any) -> Recipe:
    """Return the recipe called ``name`` at ``density``. A method that has no density is returned without one.

    Raises the errors of :func:`recipe`.
    """
    return recipe(name, density=density, **fields) if takes_density(name) else recipe(name, **fields)


def takes_density(name: str) -> bool:
    """Return False for the name of a method that always delivers every entry, in few bits, and has no density."""
    return not isinstance(name, str) or name not in _BY_NAME or _BY_NAME[name].has_density


def takes_updates(algo: str | Recipe | None) -> bool:
    """Return False for a recipe, or the name of a method, that is made for gradients alone (see :class:`Recipe`)."""
    if isinstance(algo, Recipe):
        return algo.layers[-1].takes_updates
    return algo not in _BY_NAME or _BY_NAME[algo].takes_updates


def field_names(name: str) -> list[str]:
    """Return the names of the fields of the recipe called ``name``."""
    return [field.name for field in dataclasses.fields(_BY_NAME[name]) if field.init]


def with_suggestions(unknown: Iterable[str], known: Iterable[str]) -> str:
    """Return the ``unknown`` names, sorted and quoted, each with what it may be.

    This is the methods that have a field of that name, or the name in ``known`` that it resembles.
    """
    known = list(known)
    parts = []
    for name in sorted(unknown):
        owners = [method for method in algorithms() if name in field_names(method)]
        close = difflib.get_close_matches(name, known, n=1)
        if owners:
            parts.append(f"{name!r} (a field of {', '.join(owners)})")
        else:
            parts.append(f"{name!r} (did you mean {close[0]!r}?)" if close else repr(name))
    return ", ".join(parts)
