"""Seconds of a step on a slow network: those that ``race.py`` has measured, and an estimate of the others.

A run matches a row of ``race.json`` with the same task, workers, number of steps, rate, optimizer and method: its name,
density, format, rank and local steps. The number of dense steps at the start may differ, because their seconds are
measured apart from those of the others. If their bytes differ, as in another format, their seconds are estimated.

The estimate is a sum of four parts:

* the seconds of a step that exchanges nothing;
* the work of the machine for an exchange: how much longer steps of the method take on the fastest network. A method
  that is not measured there has the work of Ok-Topk, in the steps that exchange;
* the bytes over the rate. Bytes are multiplied by the overhead of headers and acknowledgements: the bytes that the
  kernel counts in dense training at that rate, over those on the fastest network, where it counts packets before they
  are cut;
* a latency for each message.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

from tritoncomm.step.settings import DEFAULT_DENSITY, DEFAULT_VALUES

from race_methods import RIVALS, Contender
from race_results import Row, Rows
from runs import Outcome, Run

_WORK_OF = "oktopk"
_ALIKE = 0.15  # what the kernel counts is a few per cent more than what is sent


class Method(NamedTuple):
    """What a run and a row of the race have in common. ``setting`` holds the rank, the density or the format."""

    name: str
    optimizer: str = "adamw"
    local_steps: int = 1
    setting: str = ""

    @classmethod
    def of_run(cls, run: Run, *, half_precision: bool = False) -> Method:
        """Return that of ``run``, or with ``half_precision`` that of a dense run whose gradients travel in fp16."""
        if run.exchange == "dense":
            return cls("fp16" if half_precision else "dense", run.optimizer)
        settings = {"powersgd": f"{run.count}", "dense": "", "demo": f"{run.count}", "sparseloco": f"{run.count}"}
        entries = run.values if run.method == "quantized" else f"{run.density:g}, {run.values}"
        setting = settings.get(run.method, entries)
        name = "diloco" if (run.method, run.exchange) == ("dense", "updates") else run.method
        return cls(name, run.optimizer, run.local_steps, setting)

    @classmethod
    def of_contender(cls, contender: Contender) -> Method:
        """Return that of a contender of the race."""
        name, optimizer, local_steps = contender.name, contender.optimizer, contender.local_steps
        if name in RIVALS:
            return cls(name, optimizer, local_steps, f"{contender.get('rank', 1)}" if name == "powersgd" else "")
        if name == "quantized":
            return cls(name, optimizer, local_steps, contender.get("values", "1bit"))
        density = contender.get("density", DEFAULT_DENSITY)
        return cls(name, optimizer, local_steps, f"{density:g}, {contender.get('values', DEFAULT_VALUES)}")


@dataclass(frozen=True)
class Pace:
    """Seconds of a step on one network: of ordinary ones, and of the dense ones at the start."""

    ordinary: float
    start: float
    is_measured: bool

    def after(self, steps: float, dense_steps: int) -> float:
        """Return the seconds of the first ``steps`` steps, of which ``dense_steps`` are the start."""
        return min(steps, dense_steps) * self.start + max(0.0, steps - dense_steps) * self.ordinary


class Paces:
    """The seconds of steps of ``task`` on networks of any rate, by the rows of the race with ``steps`` steps.

    On links with a ``delay``, a text such as 50ms, only what is measured is known.
    """

    def __init__(self, rows: Rows, task: str, workers: int, steps: int, delay: str = "") -> None:
        self._rows: dict[tuple[Method, float], list[Row]] = {}
        self._estimates = not delay
        for cell, row in rows.items():
            fits = (cell.task, cell.workers, cell.steps) == (task, workers, steps)
            if fits and row.rate and cell.network.partition(" and ")[2] == delay:
                self._rows.setdefault((Method.of_contender(Contender.parse(cell.contender)), row.rate), []).append(row)

    @property
    def is_empty(self) -> bool:
        """Whether nothing is measured, so that nothing can be estimated either."""
        return not self._rows

    def knows(self, method: Method, rate: float) -> bool:
        """Whether the seconds of steps of ``method`` at ``rate`` bit/s are measured, or can be estimated."""
        return (method, rate) in self._rows or (self._estimates and not self.is_empty)

    def of(self, method: Method, outcome: Outcome, dense_steps: int, steps: int, rate: float) -> Pace:
        """Return the seconds of steps of ``method`` that send what ``outcome`` says, at ``rate`` bit/s."""
        ordinary = outcome["kilobytes_after_start"]
        at_start = (outcome["kilobytes"] * steps - ordinary * (steps - dense_steps)) / max(1, dense_steps)
        start = self.estimate(method, at_start, outcome["messages"], rate)
        rows = self._rows.get((method, rate))
        if rows is None:
            return Pace(self.estimate(method, ordinary, outcome["messages"], rate), start, is_measured=False)
        alike = [row for row in rows if dense_steps and math.isclose(_at_start(row), at_start, rel_tol=_ALIKE)]
        measured = [second for row in alike for second in row.seconds[: row.warmup_steps]]
        start = statistics.fmean(measured) if measured else start
        return Pace(_mean(rows, lambda row: row.seconds_per_step), start, bool(measured) or not dense_steps)

    def estimate(self, method: Method, kilobytes: float, messages: float, rate: float) -> float:
        """Return the estimated seconds of a step in which each worker sends this much."""
        latency = _mean(self._all(lambda _, at: at == self._nearest(rate)), lambda row: row.latency)
        transfer = kilobytes * self._overhead(rate) * 8e3 / rate
        return self._alone(method) + self._work(method) + transfer + messages * latency

    def errors(self, sent: dict[Method, Outcome]) -> list[tuple[Method, float, float, float]]:
        """Return the method, the rate, and the measured and estimated seconds of each measured step but the fastest.

        ``sent`` says what methods send. Those of others are the bytes that the kernel counted on the fastest network.
        """
        found = []
        for (method, rate), rows in sorted(self._rows.items()) if self._estimates else ():
            if rate == self._fastest:  # the work is measured there
                continue
            outcome = sent.get(method) or {"kilobytes_after_start": self._counted(method), "messages": 0.0}
            guess = self.estimate(method, outcome["kilobytes_after_start"], outcome["messages"], rate)
            found.append((method, rate, _mean(rows, lambda row: row.seconds_per_step), guess))
        return found

    @property
    def _fastest(self) -> float:
        return max(rate for _, rate in self._rows)

    def _nearest(self, rate: float) -> float:
        return min((at for _, at in self._rows), key=lambda at: abs(at - rate))

    def _overhead(self, rate: float) -> float:
        """Return the bytes that the kernel counts in dense training at ``rate``, over those on the fastest network."""
        dense = Method("dense")
        rows, fastest = (self._rows.get((dense, at)) for at in (self._nearest(rate), self._fastest))
        if not rows or not fastest:
            return 1.0
        return _mean(rows, lambda row: row.kilobytes_after_warmup) / _mean(
            fastest, lambda row: row.kilobytes_after_warmup
        )

    def _all(self, fits: Callable[[Method, float], bool]) -> list[Row]:
        return [row for key, rows in self._rows.items() if fits(*key) for row in rows]

    def _alone(self, method: Method) -> float:
        """Return the seconds of a step of the optimizer that exchanges nothing. AdamW's if it is not measured."""
        rows = self._all(lambda other, _: other.optimizer == method.optimizer)
        return _mean(rows or self._all(lambda *_: True), lambda row: row.seconds_alone)

    def _work(self, method: Method) -> float:
        """Return the seconds of work of a step, beside computation and the link, on the fastest network."""
        if method.name in ("dense", "fp16", "diloco"):
            return 0.0
        fastest = {each: rows for (each, rate), rows in self._rows.items() if rate == self._fastest}
        same = {each: rows for each, rows in fastest.items() if each.name == method.name}
        found = same or {each: rows for each, rows in fastest.items() if each.name == _WORK_OF}
        per_exchange = [each.local_steps * self._more(row) for each, rows in found.items() for row in rows]
        return max(0.0, statistics.fmean(per_exchange)) / method.local_steps if per_exchange else 0.0

    def _more(self, row: Row) -> float:
        return row.seconds_per_step - row.seconds_alone - row.kilobytes_after_warmup * 8e3 / row.rate

    def _counted(self, method: Method) -> float:
        rows = self._rows.get((method, self._fastest)) or self._all(lambda other, _: other == method)
        return _mean(rows, lambda row: row.kilobytes_after_warmup)


def _at_start(row: Row) -> float:
    """Return the kilobytes that a host sent in each dense step at the start of ``row``. 0 if it had none."""
    steps = len(row.seconds)
    total = row.kilobytes * steps - row.kilobytes_after_warmup * (steps - row.warmup_steps)
    return total / row.warmup_steps if row.warmup_steps else 0.0


def _mean(rows: Iterable[Any], value: Callable[[Any], float]) -> float:
    return statistics.fmean(value(row) for row in rows)
