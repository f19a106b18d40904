"""Replicas are equal whatever the number of threads, on real gloo processes."""

from __future__ import annotations

from datetime import timedelta
from functools import partial

import thread_workers
from helpers import run_workers

from depth import DEEP

LIMIT = timedelta(minutes=10)  # more threads than cores wait for one another


def test_two_ranks() -> None:
    """No sum that decides a bit of a parameter depends on how many threads compute it."""
    run_workers(partial(thread_workers.two_ranks, deep=DEEP), 2, limit=LIMIT)


def test_four_ranks() -> None:
    """Nor do those of nodes and of shards."""
    run_workers(partial(thread_workers.four_ranks, deep=DEEP), 4, limit=LIMIT)
