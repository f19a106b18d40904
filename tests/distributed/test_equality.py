"""Replicas stay equal, or all ranks learn which value differs, on real gloo processes."""

from __future__ import annotations

from functools import partial

import equality_workers
from helpers import run_situations, run_workers


def test_situations() -> None:
    """Each situation passes. The same processes run several situations, because starting them is slow."""
    situations = [
        equality_workers.rest_of_the_model,
        equality_workers.drifting,
        equality_workers.steps_by_other_names,
        equality_workers.steps_that_need_a_closure,
        equality_workers.parameters_of_another_model,
        equality_workers.drift_from_the_first_step,
        equality_workers.optimizers_that_exchange,
        equality_workers.held_later,
    ]
    run_situations(situations, 2)


def test_shards() -> None:
    """So do replicas of a sharded model."""
    run_workers(equality_workers.shards, 4)


def test_save(tmp_path) -> None:
    """A save refuses replicas that differ."""
    run_workers(partial(equality_workers.saved, folder=str(tmp_path)), 2)
