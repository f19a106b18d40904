"""Recipes: lookup by name, and fields."""

from __future__ import annotations

import dataclasses
import importlib
import math
import re

import pytest
import tritoncomm
from tritoncomm import ConfigurationError, ExDyna, Hierarchical, OkTopk, RandomBlock, Recipe, SparDL

from baselines import DGC, GaussianK, HardThreshold, TopkDSA


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
    with pytest.raises(ConfigurationError, match=r"has no field 'static' \(a field of exdyna, micro, oktopk"):
        tritoncomm.recipe("dgc", static=True)
    with pytest.raises(ConfigurationError, match=r"TopkAllgather\(density=2\)"):
        tritoncomm.recipe("topk_allgather", density=2)


WRONG: dict[type[Recipe], list[dict[str, object]]] = {
    OkTopk: [
        {"density": 0.0}, {"density": 1.5}, {"repartition_every": 0}, {"bucket_width": 0}, {"local_cap": 0.5},
        {"global_cap": math.inf}, {"local_cap": math.nan}, {"static_room": 0.5}, {"static_room": math.inf},
        {"static_room": 10**400},
    ],
    ExDyna: [{"mode": "x"}, {"rebalance": "x"}, {"threshold_rule": "x"}, {"capacity": 0.5}, {"blocks": 0}],
    SparDL: [{"teams": 0}, {"teams": "some"}, {"sag": "x"}, {"residuals": "x"}],
    RandomBlock: [{"mode": "x"}, {"seed": 0.5}, {"alignment": 0}],
    DGC: [{"momentum": 1.0}, {"clip_scale": "x"}, {"clip_norm": -1}],
    TopkDSA: [{"dense_switch": 1.5}],
    HardThreshold: [{"threshold": 0.0}],
    GaussianK: [{"max_ratio": 0.5}],
}  # fmt: skip


@pytest.mark.parametrize(("kind", "fields"), [(kind, fields) for kind, rows in WRONG.items() for fields in rows])
def test_bad_fields(kind: type[Recipe], fields: dict[str, object]) -> None:
    """The error names the invalid field and its value."""
    ((name, value),) = fields.items()
    with pytest.raises(ConfigurationError, match=re.escape(f"{name}={value!r}")):
        kind(**{"density": 0.5} | fields)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"values": "5bit"}, "values='5bit'.*must be one of fp32, 8bit"),
        ({"packed": "auto"}, "packed='auto'.*must be True or False"),
    ],
)
def test_choices_are_listed(fields: dict[str, object], said: str) -> None:
    """The error about a field with few values lists them."""
    with pytest.raises(ConfigurationError, match=said):
        OkTopk(**fields)


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


def test_nodes_are_not_nested():
    """Nodes of nodes would exchange in groups that no scheduler has."""
    inner = Hierarchical(recipe=OkTopk(density=0.1), node_size=2)
    with pytest.raises(ConfigurationError, match=r"recipe=Hierarchical\(.*must not be a Hierarchical itself"):
        Hierarchical(recipe=inner, node_size=2)
