"""Bytes and seconds per step, from what the workers of a script have reported."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from tritoncomm.scheduler.cost import Link
from tritoncomm.slow.launcher import Step


class Interval(NamedTuple):
    """From the end of a step to that of the next one.

    ``seconds`` and ``sent``, in bytes, are means over the workers. ``busiest`` are the bytes that a worker has sent or
    received, whichever are most.
    """

    seconds: float
    sent: float
    busiest: int


def steps_of(workers: Sequence[Sequence[Step]]) -> list[Sequence[Step]]:
    """Return the steps of the optimizer that has taken most in worker 0, by worker, and as many of each worker.

    If several optimizers step in turn, that is the first of them. So each step of it is one of the training.
    """
    counts = Counter(step.number for step in workers[0])
    chosen = max(counts, key=lambda number: (counts[number], -number), default=0)
    found = [[step for step in steps if step.number == chosen] for steps in workers]
    return [steps[: min(map(len, found))] for steps in found]


def intervals(workers: Sequence[Sequence[Step]]) -> list[Interval]:
    """Return what lies between the steps, of which each worker has equally many."""
    found = []
    for each in zip(*(pairwise(steps) for steps in workers), strict=True):
        sent = [after.sent - before.sent for before, after in each]
        received = [after.received - before.received for before, after in each]
        seconds = statistics.fmean(after.seconds - before.seconds for before, after in each)
        found.append(Interval(seconds, statistics.fmean(sent), max(*sent, *received)))
    return found


def table(workers: Sequence[Sequence[Step]], link: Link) -> str:
    """Return a line for each half of the steps: what starts differently has gone over to its usual step by the second.

    ``workers`` are the steps of each worker. The first step is left out, because it has no begin.
    """
    chosen = steps_of(workers)
    found = intervals(chosen)
    if not found:
        return f"{len(chosen[0])} steps of an optimizer were counted: figures need at least 2."
    lines = [f"{'steps':>12}{'MB sent':>12}{'s on the link':>15}{'s per step':>12}{'median':>10}"]
    half = len(found) // 2
    for first, part in ((2, found[:half]), (2 + half, found[half:])):
        if part:
            on_link = statistics.fmean(link.transfer(each.busiest) for each in part)
            sent = statistics.fmean(each.sent for each in part)
            seconds = [each.seconds for each in part]
            lines.append(
                f"{f'{first} to {first + len(part) - 1}':>12}{sent / 1e6:>12.4f}"
                f"{on_link:>15.4f}{statistics.fmean(seconds):>12.4f}{statistics.median(seconds):>10.4f}"
            )
    return "\n".join([f"{len(chosen[0])} steps of {chosen[0][0].name}, per step and worker:", *lines])
