"""The table of synchronizations and launches that plans use, against counts on emulated GPUs."""

from __future__ import annotations

import pytest
import torch
import tritoncomm
from tritoncomm import OkTopk, RandomBlock, Recipe, SparDL, Warmup, algorithms
from tritoncomm.algorithms import Dense, Hierarchical
from tritoncomm.algorithms.base import IndexRecipe, StaticRecipe
from tritoncomm.errors import ConfigurationError
from tritoncomm.planning import planner
from tritoncomm.step import gpu_cost

from depth import DEEP
from emulated_cuda import ranks
from emulated_cuda.device import current_gpu, to_gpu
from emulated_cuda.exchanges import DENSITIES, DENSITY, counted

VALUES = {"plain": "fp32", "packed": "fp32", "rounded": "4bit"}


def _recipe(name: str, form: str, how: str):
    """Return the recipe that a row of the table stands for."""
    density = DENSITIES.get(name, DENSITY)
    found = planner.at(name, density)
    fields = {"values": VALUES[how]} if hasattr(found, "values") else {}
    if isinstance(found, StaticRecipe):
        fields |= {"static": form == "static"}
    if isinstance(found, IndexRecipe) and how != "rounded":
        fields |= {"packed": how == "packed"}
    return type(found)(**{"density": density, **fields}, **({"reduced_lr": True} if name == "random_block" else {}))


def _check(found: tuple[float, float], expected: tuple[float, float]) -> None:
    for count, figure, few in zip(found, expected, (1, 4), strict=True):
        assert figure == pytest.approx(count, rel=0.1, abs=few), (found, expected)


@pytest.mark.parametrize("key", gpu_cost.TABLE, ids=" ".join)
def test_table_is_counted(key: tuple[str, str, str]) -> None:
    """Each row is what is counted with 2 and 8 workers, and in a deep run about what is counted with 4."""
    recipe = _recipe(*key)
    for world_size in (2, 8):
        assert gpu_cost.counts(recipe, world_size) == counted(recipe, world_size)
    if DEEP:
        _check(counted(recipe, 4), gpu_cost.counts(recipe, 4))


@pytest.mark.parametrize(
    "key", [key for key in gpu_cost.TABLE if key[1] == "static" and key[2] != "plain"], ids=" ".join
)
def test_packing_costs_few_launches(key: tuple[str, str, str]) -> None:
    """In the form of messages that GPUs use, packing and rounding add no wait, and at most 12 launches."""
    for world_size in (2, 8, 64, 1024):
        packed, plain = (gpu_cost.counts(_recipe(key[0], "static", how), world_size) for how in (key[2], "plain"))
        assert packed.synchronizations == plain.synchronizations
        assert packed.launches <= plain.launches + 12


def test_static_forms_have_no_loop_over_workers() -> None:
    """No count of a static form grows with the number of workers faster than with its logarithm."""
    assert not {key: row for key, row in gpu_cost.TABLE.items() if key[1] == "static" and any(b for _, b, _ in row)}


@pytest.mark.parametrize("name", sorted({name for name, form, _ in gpu_cost.TABLE if form == "static"}))
def test_static_forms_wait_twice_with_more_workers(name: str) -> None:
    """With 16 workers a static form waits twice, too, and launches are those of the table."""
    recipe = _recipe(name, "static", "rounded" if (name, "static", "rounded") in gpu_cost.TABLE else "packed")
    syncs, launches = counted(recipe, 16)
    assert syncs == 2
    _check((syncs, launches), gpu_cost.counts(recipe, 16))


@pytest.mark.parametrize("recipe", [OkTopk(static=False), SparDL(static=False)], ids=["oktopk", "spardl"])
def test_growth_holds_for_more_workers(recipe: StaticRecipe) -> None:
    """The counts that were fitted at 2, 4 and 8 workers hold at 16, and in a deep run at 6."""
    for world_size in (6, 16) if DEEP else (16,):
        _check(counted(recipe, world_size), gpu_cost.counts(recipe, world_size))


@pytest.mark.parametrize(
    "inner", [OkTopk(density=DENSITY), RandomBlock(density=DENSITY, values="4bit", reduced_lr=True)], ids=repr
)
@pytest.mark.parametrize(("world_size", "node_size"), [(4, 2), (8, 4)])
def test_nodes_are_counted(world_size: int, node_size: int, inner: Recipe) -> None:
    """A hierarchical exchange is counted as the method between nodes, and the sums within a node."""
    recipe = Hierarchical(recipe=inner, node_size=node_size)
    _check(counted(recipe, world_size), gpu_cost.counts(recipe, world_size))


def test_every_method_and_form_is_in_the_table() -> None:
    """The table has every method, and the static form of exactly those methods that have it."""
    static = {
        name for name in algorithms() if isinstance(r := planner.at(name, DENSITY), StaticRecipe) and r.can_be_static()
    }
    assert {name for name, _, _ in gpu_cost.TABLE} == set(algorithms())
    assert {name for name, form, _ in gpu_cost.TABLE if form == "static"} == static


def test_counts_of_other_recipes() -> None:
    """A wrapper counts as its method, a method that delivers everything as dense, and a single worker as nothing."""
    method = OkTopk(density=DENSITY)
    assert gpu_cost.counts(Warmup(recipe=method, steps=2), 8) == gpu_cost.counts(method, 8)
    assert gpu_cost.counts(OkTopk(density=1), 8) == gpu_cost.counts(Dense(), 8)
    assert gpu_cost.counts(method, 1) == gpu_cost.Counts() == (0, 0)
    assert gpu_cost.Counts(2, 100).seconds == pytest.approx(2 * 15e-6 + 100 * 5e-6)


def test_unknown_method_is_named() -> None:
    """The error for a method without counts names it, and says how to add it."""

    class Another(OkTopk):
        name = "another"

    with pytest.raises(ConfigurationError, match="'another' are not known: count them with"):
        gpu_cost.counts(Another(), 4)
    assert not gpu_cost.is_known(Warmup(recipe=Another(), steps=1))
    assert gpu_cost.is_known(Warmup(recipe=OkTopk(), steps=1))


def _step_of_wrap(method: str, **fields: str) -> int:
    """Return the launches of a step of AdamW from ``wrap`` with two workers, after the first 20."""
    shapes = [(64, 64), (64, 48), (40, 64), (64,), (48,), (40,)]

    def rank_of(rank: int) -> int:
        generator = torch.Generator().manual_seed(rank)
        parameters = [torch.nn.Parameter(to_gpu(torch.ones(shape))) for shape in shapes]
        inner = torch.optim.AdamW(parameters, lr=1e-3, foreach=True)
        optimizer = tritoncomm.wrap(inner, method, density=DENSITY, warmup_steps=0, small="8bit", **fields)
        for _ in range(24):
            for parameter in parameters:
                parameter.grad = to_gpu(torch.randn(parameter.shape, generator=generator))
            current_gpu().reset()
            optimizer.step()
        return current_gpu().launches.total()

    return max(ranks.run(rank_of, 2, seed=None))


def test_rest_of_a_sparse_step() -> None:
    """A sparse step of AdamW has as many more launches than a dense one, beside the exchange, as plans count."""
    rest = {
        name: _step_of_wrap(name, **({"values": "4bit"} if name != "dense" else {}))
        - gpu_cost.counts(recipe, 2).launches
        for name, recipe in (
            ("dense", Dense()),
            ("spardl", SparDL(values="4bit", static=True)),
            ("oktopk", OkTopk(values="4bit", static=True)),
        )
    }
    for name in planner.TRUSTED:
        assert rest[name] - rest["dense"] == pytest.approx(gpu_cost.REST_OF_STEP.launches, rel=0.1)
