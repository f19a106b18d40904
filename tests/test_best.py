"""``benchmarks/best.py``: what it chooses, and that the pages have the figures that it prints."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import best
from pages import ROOT


def outcome(score: float) -> dict[str, Any]:
    """What a run leaves in a file."""
    sent = {"kilobytes": 5202.0, "kilobytes_after_start": 5202.0, "messages": 6.0}
    return {"score": score, "curve": [[300, score]], **sent}


def test_the_best_is_chosen_on_the_seeds_of_the_sweep() -> None:
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
    lowest = {run: each for run, each in results.items() if run.lr in (0.2, 0.4)}  # a rate beyond might be better
    assert best.entries(lowest, "demo", [10, 11])[0].at_end
    assert best.entries(results, "gpt", [10, 11]) == []
    (swept,) = best.runs.chosen(results, [10, 11]).values()
    assert [(run.lr, run.outer_lr) for run in swept] == [(0.2, 0.7), (0.2, 1.0), (0.1, 1.0), (0.4, 1.0)]
    shown = "| 0.2, 0.7 and 0: 1.900; 0.2: 2.000; 0.1: 2.100; 0.4: 2.300 |"
    assert best.sweep_table(results, "demo", [10, 11]).endswith(shown)


def test_another_target() -> None:
    """Losses are held against those of dense training with the optimizer that is named."""
    runs = [best.Run("demo", 300, name, 0.1, "dense", seed=seed) for name in ("adamw", "muon") for seed in (0, 10)]
    results = {run: outcome(4.0 if run.optimizer == "adamw" else 2.0) for run in runs}
    found = best.entries(results, "demo", [10])
    gaps = {
        target: {row["method"]: row["gap"] for row in best.figures(found, best.Paces({}, "demo", 4, 300), target)}
        for target in ("adamw", "muon")
    }
    assert gaps["adamw"] == {"dense AdamW": 0.0, "dense AdamW in fp16": 0.0, "dense Muon": -50.0}
    assert gaps["muon"] == {"dense AdamW": 100.0, "dense AdamW in fp16": 100.0, "dense Muon": 0.0}


SITES = {
    "updates, 2 bits": "Muon, 2 bits", "updates, 1 bit (the default)": "Muon, 1 bit",
    "4 local steps, 1 bit": "Muon, 1 bit, 4 local steps", "16 local steps, 2 bits": "Muon, 2 bits, 16 local steps",
    "16 local steps, 1 bit": "Muon, 1 bit, 16 local steps",
}  # fmt: skip


def cells_of(text: str) -> list[list[str]]:
    """Return the rows of a table in Markdown without its head."""
    lines = [line.strip()[1:-1].split("|") for line in text.splitlines() if line.startswith("| ")][1:]
    return [[cell.strip().strip("*") for cell in line] for line in lines]


def measured(task: str, file: str) -> list[dict[str, Any]]:
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
def test_page_has_the_figures(task: str, file: str, title: str, rates: list[str]) -> None:
    """The rows of the tables of the race are those that ``best.py`` prints."""
    section = (ROOT / "docs/explanation/race.md").read_text().partition(f"## {title}\n")[2].partition("\n## ")[0]
    printed = cells_of(best.table(measured(task, file), rates))
    shown = cells_of(section)
    assert [row for row in shown if row not in printed] == []
    assert len(shown) > len(rates)
    places = [printed.index(row) for row in shown]  # fastest first
    assert places == sorted(places)


def test_readme_has_the_figures() -> None:
    """The sentences below the picture have the seconds of the same runs."""
    rows = {row["method"]: row for row in measured("demo", "pytorch_defaults.json")}

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


def test_page_on_sites_has_the_figures() -> None:
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
