"""A profiler of PyTorch sees the phases of an exchange."""

from __future__ import annotations

import training_workers
from helpers import run_workers


def test_phases_are_events_of_a_profiler() -> None:
    """Every operation of a step is an event with the name of its phase on each rank, also within a subgroup."""
    for found in run_workers(training_workers.profiled, 4):
        assert {"counts", "split-and-reduce"} <= found.keys()  # of the exchange between nodes
        assert found["confirm"] == found["between nodes"] == 2
