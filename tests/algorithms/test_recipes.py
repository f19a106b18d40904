"""Recipes: lookup by name, and fields."""

from __future__ import annotations

import dataclasses

import pytest
import tritoncomm
from tritoncomm import ConfigurationError, OkTopk


def test_recipes_by_name() -> None:
    """Recipes are listed, baselines last, and found by name. The error for an unknown name or field lists the known."""
    names = tritoncomm.algorithms()
    modules = {name: type(tritoncomm.recipe(name, density=1.0)).__module__ for name in names}
    assert names == sorted(names, key=lambda name: (".baselines." in modules[name], name))
    assert {"dense", "oktopk", "topk_dsa"} < set(names)
    assert tritoncomm.recipe("oktopk", density=0.02) == OkTopk(density=0.02)
    with pytest.raises(ConfigurationError, match=r"unknown algorithm 'okaytopk'.*dense, exdyna.*topk_dsa"):
        tritoncomm.recipe("okaytopk")
    with pytest.raises(ConfigurationError, match=r"no field 'tau'.*repartition_every"):
        tritoncomm.recipe("oktopk", tau=3)
    with pytest.raises(ConfigurationError, match=r"no field 'repartition' \(did you mean 'repartition_every'\?\): its"):
        tritoncomm.recipe("oktopk", repartition=3)
    with pytest.raises(ConfigurationError, match=r"TopkAllgather\(density=2\)"):
        tritoncomm.recipe("topk_allgather", density=2)


def test_recipes_are_frozen() -> None:
    """A recipe cannot change under an algorithm that was built from it."""
    with pytest.raises(dataclasses.FrozenInstanceError):
        OkTopk().density = 0.5


def test_dense_ignores_density() -> None:
    """``density`` has no effect on ``Dense``, so its repr does not show it."""
    assert repr(tritoncomm.Dense(density=0.01)) == "Dense()"
    assert tritoncomm.recipe("dense", density=0.01).density == 0.01
