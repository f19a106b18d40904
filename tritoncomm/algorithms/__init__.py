"""Recipes by name. A new method needs one file and one entry in ``_RECIPES``."""

from __future__ import annotations

import dataclasses
from typing import Any

from tritoncomm.algorithms.base import Algorithm, Recipe
from tritoncomm.algorithms.dense import Dense
from tritoncomm.algorithms.dense_tail import DenseTail
from tritoncomm.algorithms.dgc import DGC
from tritoncomm.algorithms.exdyna import ExDyna, MiCRO
from tritoncomm.algorithms.gtopk import GTopk
from tritoncomm.algorithms.hierarchical import Hierarchical
from tritoncomm.algorithms.ok_topk import OkTopk
from tritoncomm.algorithms.preconditioned import Preconditioned
from tritoncomm.algorithms.random_block import RandomBlock
from tritoncomm.algorithms.random_k import RandomK
from tritoncomm.algorithms.spardl import SparDL
from tritoncomm.algorithms.threshold_allgather import GaussianK, HardThreshold, SIDCo
from tritoncomm.algorithms.topk_allgather import TopkAllgather
from tritoncomm.algorithms.topk_dsa import TopkDSA
from tritoncomm.algorithms.warmup import Warmup
from tritoncomm.errors import ConfigurationError

_RECIPES: tuple[type[Recipe], ...] = (
    Dense,
    DGC,
    ExDyna,
    GaussianK,
    GTopk,
    HardThreshold,
    MiCRO,
    OkTopk,
    RandomBlock,
    RandomK,
    SIDCo,
    SparDL,
    TopkAllgather,
    TopkDSA,
)
_BY_NAME = {kind.name: kind for kind in _RECIPES}

__all__ = [
    "DGC",
    "Algorithm",
    "Dense",
    "DenseTail",
    "ExDyna",
    "GTopk",
    "GaussianK",
    "HardThreshold",
    "Hierarchical",
    "MiCRO",
    "OkTopk",
    "Preconditioned",
    "RandomBlock",
    "RandomK",
    "Recipe",
    "SIDCo",
    "SparDL",
    "TopkAllgather",
    "TopkDSA",
    "Warmup",
    "algorithms",
    "recipe",
]


def algorithms() -> list[str]:
    """Return the names that ``algo=`` and :func:`recipe` accept, sorted."""
    return sorted(_BY_NAME)


def recipe(name: str, **fields: Any) -> Recipe:
    """Return the recipe called ``name`` with ``fields`` set, for example ``recipe("oktopk", density=0.02)``.

    Raises :class:`~tritoncomm.ConfigurationError` for an unknown name or field. The message lists the known ones.
    """
    if not isinstance(name, str) or name not in _BY_NAME:
        raise ConfigurationError(f"unknown algorithm {name!r}: choose one of {', '.join(algorithms())}")
    kind = _BY_NAME[name]
    known = [field.name for field in dataclasses.fields(kind) if field.init]
    unknown = sorted(set(fields) - set(known))
    if unknown:
        raise ConfigurationError(
            f"{name!r} has no field {', '.join(map(repr, unknown))}: its fields are {', '.join(known)}"
        )
    return kind(**fields)
