"""``benchmarks/best.py``: the choice of the best rate, steps and seconds to a loss, and the estimate of seconds."""

from __future__ import annotations

import importlib
import math
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest

from pages import ROOT

AT_START = 1300.0  # kilobytes of a dense step at the start, in 8 bits
NUMEL = 867_072  # parameters of the demo's model
LATENCY, ALONE, WORK = 1e-4, 0.08, 0.05


@pytest.fixture
def best(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module of that name, with the defaults of ``wrap`` that conftest.py changes."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    for module in ("step_seconds", "train"):
        monkeypatch.setattr(importlib.import_module(module), "DEFAULT_VALUES", "4bit")
    monkeypatch.setattr(importlib.import_module("exchanges"), "DEFAULT_SMALL", "8bit")
    return importlib.import_module("best")


def outcome(score: float, *curve: tuple[int, float], kilobytes: float = 5202.0) -> dict[str, Any]:
    """What a run leaves in a file."""
    points = [list(point) for point in curve or [(300, score)]]
    return {
        "score": score, "kilobytes": kilobytes, "kilobytes_after_start": kilobytes, "messages": 6.0, "curve": points,
    }  # fmt: skip


def row(best: ModuleType, contender: str, rate: float, kilobytes: float, step: float, start: float) -> Any:
    """A row of the race: 20 dense steps at the start, and 20 others."""
    worker = importlib.import_module("race_worker")
    cell = worker.Cell("demo", f"{rate:g}", 4, contender, 0, 300)
    return best.race_results.Row(
        cell, rate, "machine", 0.5, NUMEL, 20, LATENCY, ALONE, step, (AT_START + kilobytes) / 2, kilobytes,
        [start] * 20 + [step] * 20,
    )  # fmt: skip


@pytest.fixture
def paces(best: ModuleType) -> Any:
    """The paces of a race in which dense and Ok-Topk are as estimated, and PowerSGD is twice as slow."""
    found = []
    for rate in (1e7, 1e9):
        for contender, kilobytes, more in (("dense", 5202, 0), ("oktopk", 75, WORK), ("powersgd:rank=8", 500, 1)):
            exact = ALONE + more + kilobytes * 8e3 / rate
            found.append(row(best, contender, rate, kilobytes, exact, 1.5))
    return best.Paces({each.cell: each for each in found}, "demo", 4, 300)


def test_the_best_is_chosen_on_the_seeds_of_the_sweep(best: ModuleType) -> None:
    """It is the rate and the outer step with the lowest mean, whatever other seeds say. What lacks a seed is out."""
    plain = best.Run("demo", 300, "adamw", 0.0, "updates", local_steps=30)
    sweep = {  # rate, outer rate -> scores of seeds 10 and 11
        (0.1, 1.0): (2.0, 2.2), (0.2, 1.0): (1.9, 2.1), (0.4, 1.0): (2.3, 2.3), (0.2, 0.7): (1.8, 2.0),
        (0.3, 1.0): (1.0,),
    }  # fmt: skip
    results = {
        replace(plain, lr=lr, outer_lr=outer, seed=10 + number): outcome(score)
        for (lr, outer), scores in sweep.items()
        for number, score in enumerate(scores)
    }
    results |= {replace(plain, lr=lr, outer_lr=0.7, seed=0): outcome(score) for lr, score in ((0.2, 3.0), (0.1, 1.0))}
    (found,) = best.entries(results, "demo", [10, 11])
    assert (found.run.lr, found.run.outer_lr, list(found.outcomes), found.mean("score")) == (0.2, 0.7, [0], 3.0)
    assert not found.at_end
    assert best.entries(results, "gpt", [10, 11]) == []
    (swept,) = best.runs.chosen(results, [10, 11]).values()
    assert [(run.lr, run.outer_lr) for run in swept] == [(0.2, 0.7), (0.2, 1.0), (0.1, 1.0), (0.4, 1.0)]
    shown = "| 0.2, 0.7 and 0: 1.900; 0.2: 2.000; 0.1: 2.100; 0.4: 2.300 |"
    assert best.sweep_table(results, "demo", [10, 11]).endswith(shown)


def test_a_sweep_may_be_shorter(best: ModuleType) -> None:
    """Its best setting is shown with the other seeds, which have trained for longer."""
    plain = best.Run("demo", 100, "adamw", 0.0, "dense")
    results = {replace(plain, lr=lr, seed=10): outcome(score) for lr, score in ((0.1, 2.0), (0.2, 1.5), (0.4, 2.0))}
    results |= {replace(plain, lr=lr, seed=0, steps=300): outcome(1.0 + lr) for lr in (0.1, 0.2)}
    dense, _ = best.entries(results, "demo", [10])
    assert (dense.run.steps, dense.run.lr, dense.outcomes[0]["score"], dense.at_end) == (300, 0.2, 1.2, False)


def test_a_rate_at_the_end_of_the_sweep_is_marked(best: ModuleType) -> None:
    """A rate beyond might be better. Without other seeds a method is left out, and so are runs without a curve."""
    plain = best.Run("demo", 300, "adamw", 0.0, "dense")
    results = {replace(plain, lr=lr, seed=10): outcome(lr) for lr in (0.1, 0.2, 0.4)}
    assert best.entries(results, "demo", [10]) == []
    seed = replace(plain, lr=0.1, seed=0)
    assert best.entries(results | {seed: {"score": 1.0, "kilobytes": 1.0}}, "demo", [10]) == []
    dense, half = best.entries(results | {seed: outcome(1.0)}, "demo", [10])
    assert dense.at_end
    assert (dense.method.name, half.method.name, half.mean("kilobytes")) == ("dense", "fp16", 2601.0)
    assert half.curve(0) == dense.curve(0)


def test_steps_to_a_loss(best: ModuleType) -> None:
    """They are interpolated on a curve that ends with the final score, and may be none."""
    run = best.Run("demo", 300, "adamw", 0.1, "dense")
    curve = outcome(2.0, (100, 4.0), (200, 3.0), (300, 2.5))
    found = best.Entry(run, "", best.Method("dense"), {0: curve, 1: outcome(4.0)})
    assert found.curve(0) == [(0.0, math.log(256)), (100, pytest.approx(3.2)), (200, pytest.approx(2.4)), (300, 2.0)]
    assert found.steps_to(2.8, 0) == pytest.approx(150)
    assert found.steps_to(2.0, 0) == 300
    assert found.steps_to(1.99, 0) is None
    assert best.reached(found, found) == {
        0: pytest.approx(290),
        1: pytest.approx(300 * (math.log(256) - 4.08) / (math.log(256) - 4.0)),
    }


def test_seconds_are_measured_or_estimated(best: ModuleType, paces: Any) -> None:
    """The dense steps at the start count with their own seconds. Work is that of the method, or that of Ok-Topk."""
    sent = outcome(1.0, kilobytes=75) | {"kilobytes": (20 * AT_START + 280 * 75) / 300, "messages": 100.0}
    ok_topk = best.Method("oktopk", setting="0.03, 4bit")
    pace = paces.of(ok_topk, sent, 20, 300, 1e7)
    assert pace.is_measured
    assert pace.after(10, 20) == pytest.approx(15)
    assert pace.after(120, 20) == pytest.approx(30 + 100 * (ALONE + WORK + 0.06))
    other = sent | {"kilobytes": (20 * 400 + 280 * 75) / 300}  # a start in another format
    pace = paces.of(ok_topk, other, 20, 300, 1e7)
    assert not pace.is_measured
    assert pace.start == pytest.approx(ALONE + WORK + 0.32 + 100 * LATENCY)
    for name, steps in (("oktopk", 1), ("quantized", 4)):  # another density, and what is measured nowhere
        pace = paces.of(best.Method(name, local_steps=steps, setting="?"), sent, 20, 300, 1e7)
        assert not pace.is_measured
        base = ALONE + WORK / steps + 100 * LATENCY
        assert (pace.ordinary, pace.start) == (pytest.approx(base + 0.06), pytest.approx(base + 1.04))
    local = paces.of(best.Method("diloco", local_steps=30), outcome(1.0, kilobytes=100), 0, 300, 1e8)
    assert local.ordinary == pytest.approx(ALONE + 6 * LATENCY + 0.008)


def test_delays_are_measured(best: ModuleType) -> None:
    """Seconds on links with a delay are those of rows with it, and those of other rows are not."""
    rows = [row(best, name, 1e8, 75, 0.1, 0.2) for name in ("dense", "oktopk", "spardl")]
    cells = [replace(each.cell, network="100mbit" + " and 50ms" * late) for late, each in enumerate(rows)]
    cells[2] = replace(cells[2], network="100mbit and 5ms")
    rows = {cell: replace(each, cell=cell) for cell, each in zip(cells, rows, strict=True)}
    sparse = best.Method("oktopk", setting="0.03, 4bit")
    without, late = best.Paces(rows, "demo", 4, 300), best.Paces(rows, "demo", 4, 300, "50ms")
    assert [late.knows(method, 1e8) for method in (best.Method("dense"), sparse)] == [False, True]
    assert not late.knows(sparse, 1e7)
    assert late.of(sparse, outcome(1.0), 0, 300, 1e8).ordinary == 0.1
    assert late.errors({}) == []
    assert without.knows(sparse, 1e8)
    assert not without.of(sparse, outcome(1.0), 0, 300, 1e8).is_measured


def test_another_target(best: ModuleType, paces: Any) -> None:
    """Losses are held against those of dense training with the optimizer that is named."""
    runs = [best.Run("demo", 300, name, 0.1, "dense", seed=seed) for name in ("adamw", "muon") for seed in (0, 10)]
    results = {run: outcome(4.0 if run.optimizer == "adamw" else 2.0) for run in runs}
    found = best.entries(results, "demo", [10])
    gaps = {
        target: {row["method"]: row["gap"] for row in best.figures(found, paces, target)}
        for target in ("adamw", "muon")
    }
    assert gaps["adamw"] == {"dense AdamW": 0.0, "dense AdamW in fp16": 0.0, "dense Muon": -50.0}
    assert gaps["muon"] == {"dense AdamW": 100.0, "dense AdamW in fp16": 100.0, "dense Muon": 0.0}


def test_estimates_are_held_against_what_is_measured(best: ModuleType, paces: Any) -> None:
    """Where a method is as assumed, the error is 0. Its work is measured on the fastest network, which is left out."""
    found = [best.Entry(best.Run("demo", 300, "adamw", 0.1, "dense"), "", best.Method("dense"), {0: outcome(1.0)})]
    errors = {each["method"].split()[0]: each for each in best.errors_of(found, paces)}
    assert {name: each["rate"] for name, each in errors.items()} == dict.fromkeys(("dense", "oktopk", "powersgd"), 1e7)
    for name in ("oktopk", "powersgd"):
        assert errors[name]["estimated"] == pytest.approx(errors[name]["measured"])
    assert errors["dense"]["estimated"] == pytest.approx(errors["dense"]["measured"] + 6 * LATENCY)
    assert "| dense adamw 1 | 10 |" in best.error_table(list(errors.values()))


def test_estimates_have_headers(best: ModuleType) -> None:
    """What the kernel counts more for dense on a slow network than on the fastest one, others send more, too."""
    rows = [row(best, "dense", rate, kilobytes, 1.0, 1.0) for rate, kilobytes in ((1e7, 5500), (1e9, 5000))]
    paces = best.Paces({each.cell: each for each in rows}, "demo", 4, 300)
    for rate, factor in ((1e7, 1.1), (2e7, 1.1), (1e9, 1.0)):
        found = paces.estimate(best.Method("demo"), 100, 0, rate)
        assert found == pytest.approx(ALONE + factor * 100 * 8e3 / rate)


def test_runs_and_contenders_match(best: ModuleType) -> None:
    """A run of the harness and a text of the race that mean the same method are equal, whatever their rates are."""
    contender, run = (
        importlib.import_module("race_methods").Contender.parse,
        best.Run("demo", 300, "adamw", 0.1, "dense"),
    )
    updates = replace(run, exchange="updates", local_steps=30)
    sparse = replace(run, exchange="gradients", method="oktopk", values="4bit", density=0.03, dense_steps=20)
    muon: dict[str, Any] = {"optimizer": "muon", "method": "quantized", "density": 1.0}
    pairs = {
        "dense": run,
        "powersgd:rank=8": replace(sparse, method="powersgd", count=8, density=1.0, values="fp32"),
        "diloco:steps=30": replace(updates, outer_lr=0.7, outer_momentum=0.9),
        "oktopk:warmup_steps=20": sparse,
        "oktopk:density=0.01": replace(sparse, density=0.01),
        "quantized:values=2bit": replace(sparse, method="quantized", values="2bit", density=1.0),
        "dense:optimizer=muon": replace(run, optimizer="muon"),
        "quantized:optimizer=muon,warmup_steps=20": replace(updates, **muon, values="1bit", local_steps=1),
        "quantized:optimizer=muon,local_steps=30,values=2bit": replace(updates, **muon, values="2bit"),
    }
    for text, each in pairs.items():
        assert best.Method.of_contender(contender(text)) == best.Method.of_run(each), text
    assert len({best.Method.of_run(each) for each in pairs.values()}) == len(pairs)


def test_table(best: ModuleType, paces: Any) -> None:
    """It has the target's steps and seconds, fastest first, and says what never reaches it."""
    dense = best.Run("demo", 300, "adamw", 0.1, "dense")
    sparse = replace(dense, exchange="gradients", method="oktopk", values="4bit", density=0.03, dense_steps=20)
    results = {replace(run, seed=10): outcome(2.0) for run in (dense, sparse, replace(dense, optimizer="sgd"))}
    results[replace(dense, seed=0)] = outcome(2.0, (200, 2.04), (300, 2.0))
    results[replace(sparse, seed=0)] = outcome(1.9, (100, 2.04), (300, 1.9), kilobytes=75) | {
        "kilobytes": (20 * AT_START + 280 * 75) / 300
    }
    results[replace(dense, optimizer="sgd", seed=0)] = outcome(3.0)
    lines = best.table(best.figures(best.entries(results, "demo", [10]), paces)).splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]
    assert [each[0] for each in cells] == ["AdamW, Ok-Topk, 3 %", "dense AdamW in fp16", "dense AdamW", "dense SGD"]
    assert cells[0][1:5] == ["0.1", "-5.0 to -5.0 %", "157", "100"]
    assert cells[0][5] == f"{20 * 1.5 + 80 * (ALONE + WORK + 0.06):.0f}"
    assert cells[2][2:6] == ["", "5202", "200", f"{20 * 0 + 200 * (ALONE + 4.1616):.0f}"]
    assert cells[1][5].startswith("~")
    assert cells[3][4:] == ["never", "", "", "", ""]


SITES = {
    "updates, 2 bits": "Muon, 2 bits", "updates, 1 bit (the default)": "Muon, 1 bit",
    "4 local steps, 1 bit": "Muon, 1 bit, 4 local steps", "16 local steps, 2 bits": "Muon, 2 bits, 16 local steps",
    "16 local steps, 1 bit": "Muon, 1 bit, 16 local steps",
}  # fmt: skip


def cells_of(text: str) -> list[list[str]]:
    """Return the rows of a table in Markdown without its head."""
    lines = [line.strip()[1:-1].split("|") for line in text.splitlines() if line.startswith("| ")][1:]
    return [[cell.strip().strip("*") for cell in line] for line in lines]


def measured(best: ModuleType, task: str, file: str) -> list[dict[str, Any]]:
    """Return what ``best.py`` says of the committed runs of ``task``."""
    found = best.entries(best.runs.read(best.FOLDER / file), task, [10])
    paces = best.Paces(best.race_results.read(best.FOLDER / "race.json"), task, 4, best.TASKS[task](None, 1).steps)
    return best.figures(found, paces)


@pytest.mark.parametrize(
    ("task", "file", "title", "rates"),
    [
        ("demo", "pytorch_defaults.json", "Every method at its best", ["10 Mbit/s", "100 Mbit/s", "1 Gbit/s"]),
        ("gpt", "peers.json", "A smaller model, for longer", ["10 Mbit/s", "100 Mbit/s", "1 Gbit/s"]),
        ("gpt10m", "gpt10m.json", "A larger model", ["10 Mbit/s", "100 Mbit/s", "1 Gbit/s"]),
    ],
)
def test_page_has_the_figures(best: ModuleType, task: str, file: str, title: str, rates: list[str]) -> None:
    """The rows of the tables of the race are those that ``best.py`` prints."""
    section = (ROOT / "docs/explanation/race.md").read_text().partition(f"## {title}\n")[2].partition("\n## ")[0]
    printed = cells_of(best.table(measured(best, task, file), rates))
    shown = cells_of(section)
    assert [row for row in shown if row not in printed] == []
    assert len(shown) > len(rates)


def test_readme_has_the_figures(best: ModuleType) -> None:
    """The sentences below the picture have the seconds of the same runs."""
    rows = {row["method"]: row for row in measured(best, "demo", "pytorch_defaults.json")}

    def seconds(method: str) -> list[str]:
        times = [best._time(rows[method], rate) for rate in ("10 Mbit/s", "100 Mbit/s")]
        assert not any(time.startswith("~") for time in times)
        return times

    dense, adamw, muon = map(seconds, ("dense AdamW", "AdamW, Ok-Topk, 3 %", "Muon, 1 bit, 4 local steps"))
    text = " ".join((ROOT / "README.md").read_text().partition("\n## ")[0].split())
    assert f"dense DDP takes {dense[0]} s at 10 Mbit/s and {dense[1]} s at 100 Mbit/s." in text
    assert (
        f"takes {adamw[0]} and {adamw[1]} s with AdamW, and {muon[0]} and {muon[1]} s with Muon and four local steps"
        in text
    )


def test_page_on_sites_has_the_figures(best: ModuleType) -> None:
    """So has the table on local steps."""
    found = best.entries(best.runs.read(best.FOLDER / "peers.json"), "gpt", [10])
    rows, steps = best.race_results.read(best.FOLDER / "race.json"), best.TASKS["gpt"](None, 1).steps
    plain, late = (
        {row["method"]: row for row in best.figures(found, best.Paces(rows, "gpt", 4, steps, delay))}
        for delay in ("", "50ms")
    )
    dense = plain["dense AdamW"]
    for name, kilobytes, loss, beside, seconds, delayed in cells_of((ROOT / "docs/how-to/across-sites.md").read_text()):
        method = "dense Muon" if name == "dense gradients" else SITES[name]
        row = plain[method]
        below = f"{100 * (1 - row['score'] / dense['score']):.1f} % below"
        fewer = dense["kilobytes"] / row["kilobytes"]
        assert [kilobytes, loss] == [best._rounded(row["kilobytes"]), f"{row['score']:.3f}"], name
        assert beside.startswith(below), name
        assert fewer == 1 or f"{fewer:.0f} times fewer" in beside, name
        assert seconds == best._time(row, "10 Mbit/s"), name
        assert delayed == best._time(late[method], "100 Mbit/s"), name
