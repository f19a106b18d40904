"""The code in the documentation runs."""

from __future__ import annotations

import importlib
import re
from typing import Any

import pytest
import torch
import tritoncomm
from tritoncomm import Late, Warmup
from tritoncomm.__main__ import main
from tritoncomm.step.rules import choose as rules

import laws
import recipes
from deliveries import take_step
from emulated_cuda import exchanges
from pages import ROOT, blocks

PAGES = ["README.md", "CONTRIBUTING.md", "benchmarks/README.md", "benchmarks/results/README.md", "kernels/README.md"]
PAGES += sorted(str(file.relative_to(ROOT)) for file in (ROOT / "docs").rglob("*.md"))


def documented_method() -> Any:
    """Return the method on the page, which is short."""
    (code,) = blocks("docs/how-to/add-an-algorithm.md")
    assert code.count("\n") < 90
    names: dict[str, Any] = {"__name__": "page"}
    exec(compile(code, "add-an-algorithm.md", "exec", dont_inherit=True), names)  # noqa: S102 - our own page
    return names["MyTensorTopk"]


def test_documented_method_obeys_the_laws() -> None:
    """The method on the page runs as printed, is short, and obeys all laws, also with rounded values."""
    method = documented_method()
    case = laws.Case(5, 60, ("random", "ties", "zero", "random"))
    for fields in ({"density": 0.4}, {"density": 1.0}, {"density": 0.1, "values": "4bit"}):
        recipe = method(**fields)
        run = laws.recorded(recipe, case)
        for law in laws.OF_RUNS:
            law.check(run)
        for law in (laws.identity, laws.atomicity, laws.refusal, laws.determinism, laws.overflow, laws.faults):
            law(recipe, case)


def test_documented_method_selects_in_each_tensor() -> None:
    """The method on the page has a budget for every tensor, in simulation and in ``wrap``."""
    method = documented_method()
    recipe = method(density=0.1)
    world = tritoncomm.SimulatedWorld(recipe, 2, 100, bounds=(0, 40, 100))
    mean = world.step(torch.arange(1.0, 101.0).repeat(2, 1))[0]
    assert mean.indices.tolist() == [36, 37, 38, 39, 94, 95, 96, 97, 98, 99]
    parameters = [torch.nn.Parameter(torch.zeros(shape)) for shape in ((4, 10), (3,), (6, 10))]
    optimizer = tritoncomm.wrap(torch.optim.SGD(parameters, lr=1.0), algo=recipe, dense_below=10)
    for parameter in parameters:
        parameter.grad = torch.arange(1.0, 1.0 + parameter.numel()).view(parameter.shape)
    optimizer.step()
    assert [int(parameter.count_nonzero()) for parameter in parameters] == [4, 3, 6]
    for bounds in ((0, 50), (1, 100), (0, 60, 40, 100)):
        with pytest.raises(tritoncomm.ConfigurationError, match="bounds must ascend from 0 to numel=100"):
            tritoncomm.SimulatedWorld(recipe, 2, 100, bounds=bounds)


def test_documented_method_on_gpus() -> None:
    """The method on the page, which knows nothing of verdicts, is trained on emulated GPUs, with a dense warm-up."""
    method = documented_method()
    recipe = Warmup(recipe=method(density=0.4), steps=2)
    given = exchanges.gradients(2, 60, 4)
    found, expected = exchanges.emulated(recipe, given), exchanges.simulated(recipe, given)
    for own, other in zip(found, expected, strict=True):
        assert all(outcome.equals(same) for outcome, same in zip(own, other, strict=True))


def test_registered_method_works_everywhere(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    """A registered method works in ``algo=``, under the laws, and in ``plan`` and ``simulate``."""
    method = documented_method()
    module = importlib.import_module("tritoncomm.algorithms")
    monkeypatch.setattr(module, "_BY_NAME", dict(module._BY_NAME))
    assert tritoncomm.register(method) is method
    assert "my_tensor_topk" in tritoncomm.algorithms()
    assert recipes.under_test(0.3)["my_tensor_topk"] == tritoncomm.recipe("my_tensor_topk", density=0.3)
    assert main(["plan", "--numel", "1e7", "--workers", "16", "--all"]) == 0
    assert "my_tensor_topk" in capsys.readouterr().out
    assert main(["simulate", "--algo", "my_tensor_topk", "--workers", "4", "--numel", "1e5", "--steps", "2"]) == 0
    assert "my_tensor_topk" in capsys.readouterr().out


def test_documented_optimizer_has_a_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    """The optimizer of the page trains by gradients, and by its own step if all are delivered at once."""
    monkeypatch.setattr(rules, "RULES", list(rules.RULES))
    (page,) = blocks("docs/how-to/add-an-optimizer.md")
    names: dict[str, Any] = {}
    exec(page, names)  # noqa: S102 - the code of a page
    (ours, theirs), ends = ([torch.nn.Parameter(torch.ones(40, 40)) for _ in range(2)], [])
    generator = torch.Generator().manual_seed(0)
    rule = names["LateSignum"](names["Signum"]([ours]), Late())
    plain = names["Signum"]([theirs])
    for _ in range(5):
        ours.grad = torch.randn(40, 40, generator=generator)
        theirs.grad = ours.grad.clone()
        take_step(rule, [ours], [None])
        plain.step()
    torch.testing.assert_close(ours, theirs)
    optimizer = tritoncomm.wrap(names["Signum"]([ours]), density=0.1, warmup_steps=0)
    assert optimizer.metrics()["density"] == 0.1
    for _ in range(5):
        ours.grad = torch.randn(40, 40, generator=generator)
        before = ours.detach().clone()
        optimizer.step()
        ends.append(int((ours != before).sum()))
    assert all(0 < moved < 400 for moved in ends)


def test_documented_simulation_runs() -> None:
    """The loop on the page runs on a smaller vector."""
    (code,) = blocks("docs/how-to/simulate.md")
    names: dict[str, object] = {}
    exec(code.replace("1_000_000", "1_000").replace("64", "7"), names)  # noqa: S102 - our own page
    assert len(names["means"]) == 7


def test_readme_is_short() -> None:
    """The README has at most 700 words."""
    assert len((ROOT / "README.md").read_text().split()) <= 700


@pytest.mark.parametrize("page", PAGES)
def test_relative_links_exist(page: str) -> None:
    """Every relative link points to an existing file, and to a heading that it has."""
    for target, anchor in re.findall(r"\]\((?!http)([^)#\s]*)#?([^)\s]*)\)", (ROOT / page).read_text()):
        file = (ROOT / page).parent / target if target else ROOT / page
        assert file.exists(), target
        assert not anchor or anchor in anchors(file.read_text()), f"{target}#{anchor}"


def anchors(text: str) -> set[str]:
    """Return the anchors of the headings of a page, as GitHub and MyST make them."""
    headings = re.findall(r"^#+ (.+)$", re.sub(r"(?ms)^```.*?^```", "", text), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_every_page_is_listed() -> None:
    """The index of the documentation lists every page once."""
    pages = {str(file.relative_to(ROOT / "docs")).removesuffix(".md") for file in (ROOT / "docs").rglob("*.md")}
    listed = re.findall(r"(?m)^([a-z-]+(?:/[a-z-]+)?)$", (ROOT / "docs/index.md").read_text())
    assert sorted(listed) == sorted(pages - {"index"})
