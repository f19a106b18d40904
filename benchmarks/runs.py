"""Runs of ``train.py``: what identifies one, the file that holds them, and its name in tables."""

from __future__ import annotations

import fcntl
import json
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Run:
    """One run.

    Attributes:
        task: Name in ``tasks.TASKS``.
        steps: Number of steps.
        optimizer: Name in ``workers.OPTIMIZERS``.
        lr: Highest learning rate.
        exchange: "dense", "gradients" or "updates".
        method: Method of the exchange.
        values: Format of a value on the wire.
        density: Density of the method.
        local_steps: Steps between two exchanges of updates.
        outer_lr: Rate of the step that applies a mean of updates.
        outer_momentum: Nesterov momentum of that step.
        match_length: Whether a mean of updates is lengthened to the mean of their lengths.
        seed: Seed of the model and the data.
        count: Rank of PowerSGD, or entries per chunk of DeMo and SparseLoCo.
        decay: Factor of the residuals before an exchange of updates.
        dense_steps: Dense exchanges of gradients at the start.
        dense_values: Their format.
        schedule: "cosine" is a warm-up and then half a cosine, "constant" only the warm-up, "falling" only the cosine.
        beta2: Second beta of AdamW.
        weight_decay: Weight decay of AdamW.
        select_by: "update" or "gradient", as in :class:`tritoncomm.Late`.
        staleness: "aware" or "off", which is ``late=False`` of ``wrap``.
    """

    task: str
    steps: int
    optimizer: str
    lr: float
    exchange: str
    method: str = "dense"
    values: str = "fp32"
    density: float = 1.0
    local_steps: int = 1
    outer_lr: float = 1.0
    outer_momentum: float = 0.0
    match_length: bool = False
    seed: int = 0
    count: int = 0
    decay: float = 1.0
    dense_steps: int = 0
    dense_values: str = "fp32"
    schedule: str = "cosine"
    beta2: float = 0.95
    weight_decay: float = 0.1
    select_by: str = "update"
    staleness: str = "aware"


Outcome = dict[str, Any]  # the columns that a run adds to a row
Results = dict[Run, Outcome]
_SWEPT: dict[str, Any] = {
    "lr": 0.0,
    "outer_lr": 1.0,
    "outer_momentum": 0.0,
    "match_length": False,
    "schedule": "cosine",
}


def kind(run: Run) -> Run:
    """Return ``run`` without its seed and what is swept: rate and schedule, and how a mean of updates is applied."""
    return replace(run, seed=0, **_SWEPT)


def chosen(results: Results, sweep: Sequence[int]) -> dict[Run, list[Run]]:
    """Return what was swept of each kind, best first, with seed 0: by the mean score of the seeds ``sweep``.

    What has not been trained with all of these seeds is left out.
    """
    scores: dict[Run, list[float]] = {}
    for run, outcome in results.items():
        if run.seed in sweep:
            scores.setdefault(replace(run, seed=0), []).append(outcome["score"])
    found: dict[Run, list[Run]] = {}
    for run in sorted((run for run in scores if len(scores[run]) == len(sweep)), key=lambda run: _mean(scores[run])):
        found.setdefault(kind(run), []).append(run)
    return found


def read(*paths: Path | None) -> Results:
    """Return the finished runs in those of ``paths`` that exist."""
    found: Results = {}
    for path in paths:
        if path is not None and path.exists():
            found |= _parsed(path.read_text())
    return found


def add(path: Path, run: Run, outcome: Outcome, about: dict[str, Any]) -> None:
    """Add a run to the file ``path``, which another process may be changing. ``about`` is for a new file."""
    with path.open("a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # until the file is closed
        file.seek(0)
        text = file.read()
        held = json.loads(text) if text else about
        rows = [asdict(each) | columns for each, columns in ((_parsed(text) if text else {}) | {run: outcome}).items()]
        file.truncate(0)
        file.write(json.dumps(held | {"rows": rows}, indent=1) + "\n")


def _parsed(text: str) -> Results:
    names = [field.name for field in fields(Run)]
    return {
        _run(row): {key: value for key, value in row.items() if key not in names} for row in json.loads(text)["rows"]
    }


def _run(row: dict[str, Any]) -> Run:
    return Run(**{field.name: row.get(field.name, field.default) for field in fields(Run)})


OPTIMIZER_NAMES = {
    "adamw": "AdamW", "sgd": "SGD", "lion": "Lion", "muon": "Muon", "adafactor": "Adafactor",
    "schedule-free": "schedule-free AdamW",
}  # fmt: skip
_PEERS = {"powersgd": "PowerSGD, rank {}", "demo": "DeMo", "sparseloco": "SparseLoCo"}
_BY_UPDATES = "muon", "adafactor"  # what these exchange by default need not be said


def label(run: Run) -> str:
    """Return the name of the group of runs that differ from ``run`` in their seeds alone."""
    name = OPTIMIZER_NAMES[run.optimizer]
    if run.exchange == "dense":
        return f"dense {name}"
    how = {"quantized": bits_of(run), "oktopk": f"Ok-Topk, {100 * run.density:g} %"}.get(run.method, run.method)
    if run.exchange == "updates" and run.optimizer not in _BY_UPDATES:
        how = f"updates, {how}"
    parts = [name, how]
    if run.method in _PEERS:
        parts = [_PEERS[run.method].format(run.count)]
    elif run.method == "dense" and run.local_steps > 1:
        parts = ["DiLoCo"]
    elif run.decay != 1:
        parts = ["MuLoCo"]
    if run.local_steps > 1:
        parts.append(f"{run.local_steps} local steps")
    parts += ["by gradient"] * (run.select_by == "gradient") + ["no rule"] * (run.staleness == "off")
    if run.outer_momentum or run.outer_lr != 1:
        parts.append(f"outer {run.outer_lr:g} and {run.outer_momentum:g}")
    return ", ".join(parts)


def bits_of(run: Run) -> str:
    """Return the format of the values of ``run`` in words."""
    return run.values.replace("bit", " bit" if run.values == "1bit" else " bits")


def _mean(values: Iterable[float]) -> float:
    return statistics.fmean(values)
