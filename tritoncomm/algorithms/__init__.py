"""Recipes by name. A new method needs one file and one entry in ``_RECIPES`` or ``_BASELINES``."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterable
from typing import Any

from tritoncomm.algorithms.base import Algorithm, Recipe
from tritoncomm.algorithms.baselines.dgc import DGC
from tritoncomm.algorithms.baselines.gtopk import GTopk
from tritoncomm.algorithms.baselines.random_k import RandomK
from tritoncomm.algorithms.baselines.threshold_allgather import GaussianK, HardThreshold, SIDCo
from tritoncomm.algorithms.baselines.topk_dsa import TopkDSA
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
_BASELINES: tuple[type[Recipe], ...] = (DGC, GaussianK, GTopk, HardThreshold, RandomK, SIDCo, TopkDSA)
_BY_NAME = {kind.name: kind for kind in (*_RECIPES, *_BASELINES)}

__all__ = [
    "DGC",
    "Algorithm",
    "Dense",
    "ExDyna",
    "GTopk",
    "GaussianK",
    "HardThreshold",
    "Hierarchical",
    "MiCRO",
    "OkTopk",
    "Quantized",
    "RandomBlock",
    "RandomK",
    "Recipe",
    "SIDCo",
    "SparDL",
    "TopkAllgather",
    "TopkDSA",
    "Warmup",
    "algorithms",
    "at_density",
    "recipe",
    "takes_density",
]


def algorithms() -> list[str]:
    """Return the names that ``algo=`` and :func:`recipe` accept: methods to train with, then those to compare with."""
    return list(_BY_NAME)


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
            f"{name!r} has no field {with_suggestions(unknown, known)}: its fields are {', '.join(known)}"
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
