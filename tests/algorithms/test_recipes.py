"""Recipes: lookup by name, and fields."""

from __future__ import annotations

import dataclasses
import importlib

import pytest
import tritoncomm
from tritoncomm import ConfigurationError, Hierarchical, OkTopk, Recipe


def test_recipes_by_name() -> None:
    """Recipes are listed, registered ones last, and found by name. Errors for an unknown name or field list them."""
    names = tritoncomm.algorithms()
    modules = {name: type(tritoncomm.recipe(name, density=1.0)).__module__ for name in names}
    assert names == sorted(names, key=lambda name: (modules[name].startswith("baselines."), name))
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mine(OkTopk):
    """A method of a user."""

    name = "mine"
    strict_volume: bool = True


@pytest.fixture
def _few_names(monkeypatch: pytest.MonkeyPatch) -> None:
    module = importlib.import_module("tritoncomm.algorithms")
    monkeypatch.setattr(module, "_BY_NAME", {"oktopk": OkTopk})


@pytest.mark.usefixtures("_few_names")
def test_registered_names() -> None:
    """A registered recipe is found by its name, with its fields. Registering it again has no effect."""
    with pytest.raises(ConfigurationError, match="unknown algorithm 'mine'"):
        tritoncomm.recipe("mine")
    assert tritoncomm.register(Mine) is Mine
    assert tritoncomm.register(Mine) is Mine
    assert tritoncomm.algorithms() == ["oktopk", "mine"]
    assert tritoncomm.recipe("mine", density=0.1) == Mine(density=0.1)


@pytest.mark.usefixtures("_few_names")
def test_what_cannot_be_registered() -> None:
    """The error says what is wrong: no recipe class, no name, a taken name, a field without a default."""
    for wrong in (Mine(), "mine", int):
        with pytest.raises(ConfigurationError, match=r"register\(.*\): pass a class that is derived from"):
            tritoncomm.register(wrong)
    plain = type("Plain", (OkTopk,), {"name": "plain"})
    with pytest.raises(ConfigurationError, match=r"Plain: decorate it by dataclass\(frozen=True, kw_only=True\)"):
        tritoncomm.register(plain)
    for name in ("", "my method", 3):
        unnamed = type("Unnamed", (OkTopk,), {"name": name})
        with pytest.raises(ConfigurationError, match=r"Unnamed\.name is .*: set it to an identifier"):
            tritoncomm.register(unnamed)
    with pytest.raises(ConfigurationError, match=r"Recipe.name is None: set it"):
        tritoncomm.register(Recipe)
    taken = dataclasses.make_dataclass("Taken", [], bases=(Mine,), namespace={"name": "oktopk"}, frozen=True)
    with pytest.raises(ConfigurationError, match=r"Taken\.name is 'oktopk', which is the name of OkTopk: choose"):
        tritoncomm.register(taken)
    with pytest.raises(ConfigurationError, match="Hierarchical has no default for recipe, node_size: all fields need"):
        tritoncomm.register(Hierarchical)
    assert tritoncomm.algorithms() == ["oktopk"]
