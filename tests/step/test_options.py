"""The defaults of ``wrap``, and the log line about the chosen method."""

from __future__ import annotations

import dataclasses
import inspect
import logging
import math

import pytest
import torch
import tritoncomm
from tritoncomm import (
    ConfigurationError,
    Dense,
    ExDyna,
    Hierarchical,
    Late,
    OkTopk,
    Quantized,
    Recipe,
    TopkAllgather,
    Updates,
    Warmup,
)
from tritoncomm.algorithms import algorithms, field_names
from tritoncomm.algorithms.base import StaticRecipe
from tritoncomm.planning import planner
from tritoncomm.step import settings as options
from tritoncomm.step.recipes import log_choice, readable_size, resolve_recipe, with_form

from baselines import DGC

# Read here: conftest.py changes some of them for each test.
DEFAULTS = {name: getattr(options, f"DEFAULT_{name}") for name in ("ALGO", "DENSITY", "SMALL", "VALUES", "WARMUP")}


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 bytes"),
        (999, "999 bytes"),
        (999.6, "1.00 kB"),
        (10_600, "10.6 kB"),
        (246_000, "246 kB"),
        (999_500, "1.00 MB"),
        (5.2e6, "5.20 MB"),
        (1.23e12, "1,230.00 GB"),
    ],
)
def test_readable_size(size: float, text: str) -> None:
    """A size has three digits and a unit, and no exponent."""
    assert readable_size(size) == text


@pytest.mark.parametrize(
    ("kind", "arguments", "named"),
    [
        (Late, {"select_by": "size"}, "select_by='size': choose one of 'auto', 'update', 'gradient'"),
        (Late, {"max_catch_up": 0.5}, r"max_catch_up=0\.5: must be at least 1"),
        (Late, {"max_relative_update": -0.1}, r"max_relative_update=-0\.1: must be a fraction"),
        (Late, {"max_relative_update": "a fifth"}, "max_relative_update='a fifth': must be a fraction"),
        (Late, {"max_relative_update": math.nan}, "max_relative_update=nan: must be a fraction"),
        (Updates, {"outer_lr": 0}, "outer_lr=0: must be a positive number"),
        (Updates, {"outer_momentum": 1.0}, r"outer_momentum=1\.0: must be in \[0, 1\)"),
        (Updates, {"algo": "1bit"}, r"algo is the unknown algorithm '1bit'.*values='1bit'"),
        (Updates, {"algo": Quantized}, "algo=Quantized: pass an instance"),
        (Updates, {"algo": DGC(density=0.1)}, r"algo=DGC\(.*: this method is for gradients alone"),
        (Updates, {"algo": "dgc"}, "algo='dgc': this method is for gradients alone"),
    ],
)
def test_options_check_themselves(kind: type, arguments: dict[str, object], named: str) -> None:
    """``Late`` and ``Updates`` name an invalid argument, its value and the fix when they are made."""
    with pytest.raises(ConfigurationError, match=named):
        kind(**arguments)


def test_unknown_keyword_is_named() -> None:
    """The error names the unknown keyword, the closest name, the function's arguments and the recipe's fields."""
    optimizer = torch.optim.SGD([torch.ones(3)], lr=0.1)
    with pytest.raises(ConfigurationError) as caught:
        tritoncomm.wrap(optimizer, OkTopk(), densty=0.1, taus=3)
    text = str(caught.value)
    assert "has no argument 'densty' (did you mean 'density'?), 'taus'" in text
    arguments, fields = text.split("its arguments are ")[1].split("; the fields of 'oktopk' are ")
    assert {"algo", "density", "warmup_steps", "dense_below", "max_grad_norm"} <= set(arguments.split(", "))
    assert "recipe_fields" not in arguments
    assert {"repartition_every", "bucket_width"} <= set(fields.split(", "))


TAKERS = [name for name in algorithms() if "values" in field_names(name)]
WARMUP = Warmup(recipe=OkTopk(), steps=3)


@pytest.mark.parametrize(
    ("algo", "fields", "said"),
    [
        (None, {"outer_lr": 0.5}, r"'outer_lr'.*; outer_lr is one of tritoncomm\.Updates; the fields"),
        *((algo, {"values": "4bit"}, rf"'values' \(a field of {', '.join(TAKERS)}\)") for algo in ("dense", "exdyna")),
        # The fields of a recipe that contains another are its own.
        (WARMUP, {"step": 2}, r"'step' \(did you mean 'steps'\?\).* are recipe, steps"),
        (WARMUP, {"steps": 2}, "carries its own steps"),
    ],
)
def test_field_of_other_methods(algo: str | Recipe | None, fields: dict[str, object], said: str) -> None:
    """The error about a field that the method does not have names those that have it."""
    assert {"oktopk", "spardl", "quantized"} < set(TAKERS)
    with pytest.raises(ConfigurationError, match=said):
        tritoncomm.wrap(torch.optim.SGD([torch.ones(3)], lr=0.1), algo, **fields)
    if isinstance(algo, str):
        with pytest.raises(ConfigurationError, match=said):
            tritoncomm.recipe(algo, **fields)


def test_static_form_on_a_gpu() -> None:
    """On a GPU, a method with a static form uses it, unless the user asks for something else."""
    methods = [method for name in algorithms() if isinstance(method := planner.at(name, 0.01), StaticRecipe)]
    other = [(TopkAllgather(static=False), False), (ExDyna(mode="paper"), False)]
    for method, static in [*other, *((each, each.can_be_static()) for each in methods)]:
        assert with_form(method, "cuda", 100, 2).static is static
        assert with_form(method, "cpu", 100, 2) == method
    assert with_form(Dense(), "cuda", 100, 2) == Dense()
    assert with_form(Warmup(recipe=TopkAllgather(), steps=2), "cuda", 100, 2).recipe.static is True
    for inner, static in ((TopkAllgather(), True), (Quantized(), False)):
        assert with_form(Hierarchical(recipe=inner, node_size=2), "cuda", 100, 2).recipe.static is static


def test_static_form_by_link() -> None:
    """On a GPU with a given link, messages have a fixed length where they take no longer than they save in waits."""
    for link, static in (("3gbit,30us", False), ("5gbit,30us", True), ("100mbit,50us", False)):
        method = OkTopk(density=0.03, values="4bit", static=link)
        assert with_form(method, "cuda", 10_900_000, 8).static is static
        assert with_form(method, "cpu", 10_900_000, 8).build(100).is_static is False
    for wrong in ("slow", "1gbit", 3):
        with pytest.raises(ConfigurationError, match=r"static=.*or a link such as '1gbit,50us'"):
            OkTopk(static=wrong)


@pytest.mark.parametrize(
    ("recipe", "numel", "level", "said"),
    [
        (
            OkTopk(density=0.01),
            1_000_000,
            logging.INFO,
            "each rank receives 120 kB per step, 49.9 times less than the 6.00 MB",
        ),
        (OkTopk(density=0.9), 1_000_000, logging.WARNING, "not less than the 6.00 MB of a dense all-reduce: use algo="),
        (OkTopk(density=0.9), 1_000_000, logging.WARNING, "algo='oktopk', density=0.9 over 4 ranks: 1,000,000 values"),
        (Dense(density=0.01), 1_000_000, logging.INFO, "Dense() over 4 ranks: 1,000,000 values; each rank receives"),
    ],
)
def test_choice_is_logged(recipe: Recipe, numel: int, level: int, said: str, caplog: pytest.LogCaptureFixture) -> None:
    """The line states the savings. It is a warning if there are none, unless dense was requested.

    A warning names what to change, and not all fields of the recipe.
    """
    caplog.set_level(logging.INFO, "tritoncomm")
    log_choice(recipe, 0, 4, [(recipe.build(numel), 0)])
    (record,) = caplog.records
    assert record.levelno == level
    assert said in record.getMessage()
    assert "e+" not in record.getMessage()
    assert level == logging.INFO or len(record.getMessage()) < 200
    for rank, world_size in ((1, 4), (0, 1)):  # another rank than the first one, and where nothing is exchanged
        log_choice(recipe, rank, world_size, [(recipe.build(numel), 0)])
    assert caplog.records == [record]


def test_default_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """A method starts with 16 dense steps, unless it delivers every entry or the recipe wraps another one."""
    number = DEFAULTS["WARMUP"]
    assert number == 16
    assert f"Default: None, which is {number} for a method" in inspect.getdoc(tritoncomm.wrap)
    assert inspect.signature(tritoncomm.wrap).parameters["warmup_steps"].default is None
    monkeypatch.setattr(options, "DEFAULT_WARMUP", number)

    def resolved(algo: str | tritoncomm.Recipe, density: float = 0.01, steps: int | None = None) -> tritoncomm.Recipe:
        return resolve_recipe(algo, density, steps, {})

    method = tritoncomm.OkTopk(density=0.01)
    assert resolved("oktopk") == tritoncomm.Warmup(recipe=method, steps=number)
    assert resolved(method) == tritoncomm.Warmup(recipe=method, steps=number)
    assert resolved("oktopk", steps=0) == method
    assert resolved("oktopk", 1.0) == tritoncomm.OkTopk(density=1.0)
    assert isinstance(resolved("dense"), tritoncomm.Dense)
    chosen = tritoncomm.Warmup(recipe=method, steps=3)
    assert resolved(chosen) == chosen
    assert chosen.name == "oktopk"


def test_default_formats(monkeypatch: pytest.MonkeyPatch) -> None:
    """Entries travel in 4 bits, small tensors in 8 and dense steps in 2, at 3 %, unless the user asks for more."""
    text = " ".join(inspect.getdoc(tritoncomm.wrap).split())
    assert f'``"{DEFAULTS["ALGO"]}"``' in text.split("algo: ")[1].split(" density: ")[0]
    assert f"Default: None, which is {DEFAULTS['DENSITY']}, or the density of a recipe" in text
    for name in ("VALUES", "SMALL"):
        monkeypatch.setattr(options, f"DEFAULT_{name}", DEFAULTS[name])

    def wrapped(**arguments: object) -> tritoncomm.SparseOptimizer:
        return tritoncomm.wrap(torch.optim.AdamW([torch.nn.Parameter(torch.zeros(40, 50))]), **arguments)

    assert wrapped().recipe == OkTopk(density=0.03, values="4bit")
    assert wrapped().recipe.encoding.rounds
    assert wrapped(values="fp32").recipe == OkTopk(density=0.03)
    assert wrapped(packed=False).recipe == OkTopk(density=0.03)
    assert wrapped(packed=True).recipe == OkTopk(density=0.03, values="4bit", packed=True)
    assert wrapped(algo=OkTopk(density=0.2)).recipe == OkTopk(density=0.2)
    assert wrapped(algo="exdyna").recipe == ExDyna(density=0.03)
    assert wrapped(algo="dense").recipe.name == "dense"
    start = tritoncomm.Warmup(recipe=OkTopk(density=0.03, values="4bit"), steps=3, values="2bit")
    assert wrapped(warmup_steps=3).recipe == start
    assert wrapped(warmup_steps=3, small="fp32").recipe == dataclasses.replace(start, values="fp32")
    momentum = resolve_recipe("dgc", 0.03, 3, {}, small="8bit")
    assert momentum.values == "fp32"
    with pytest.raises(ConfigurationError, match="packed=False: values='2bit' are always packed: leave out packed"):
        wrapped(values="2bit", packed=False)
    with pytest.raises(ConfigurationError, match="unknown algorithm 'auto'"):
        wrapped(algo="auto")
    assert options.resolved_small(None) == "8bit"
    with pytest.raises(ConfigurationError, match=r"small='9bit'"):
        wrapped(small="9bit")


@pytest.mark.parametrize(("name", "value"), [("dense", "yes"), ("density", 0.5), ("algo", "spardl")])
def test_options_of_a_group(name: str, value: object) -> None:
    """What a parameter group says has an effect, or is refused: at ``wrap``, and of a group that is added."""
    added = {"params": [torch.nn.Parameter(torch.zeros(4, 4))], name: value}
    with pytest.raises(ConfigurationError, match=f"a parameter group has {name}={value!r}"):
        tritoncomm.wrap(torch.optim.SGD([added]))
    optimizer = tritoncomm.wrap(torch.optim.SGD([torch.nn.Parameter(torch.zeros(4, 4))]))
    with pytest.raises(ConfigurationError, match=f"a parameter group has {name}={value!r}"):
        optimizer.add_param_group(added)
    assert len(optimizer.param_groups) == 1
