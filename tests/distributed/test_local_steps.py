"""The exchange of updates, and of several optimizers together, on real gloo processes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import local_steps_checkpoint_workers as checkpoints
import local_steps_workers as workers
import optimizer_list_workers as optimizers
import pytest
from helpers import reports, run_situations, run_workers

SITUATIONS = [
    workers.conserved,
    workers.free_between_exchanges,
    workers.without_gradient,
    workers.alone_with_a_residual,
    workers.length_is_matched,
    workers.merged_and_flushed,
    workers.refused,
    optimizers.several_optimizers,
    workers.rates_differ,
    optimizers.clipped_together,
    optimizers.not_clipped_twice,
    optimizers.scaled_list,
    optimizers.local_steps_beside,
    workers.kinds_of_models,
    workers.scaled,
    checkpoints.copied,
    workers.inside_averaged,
    workers.loaded_weights,
    workers.weights_of_one_rank,
    workers.outer_rate,
    workers.figures,
    workers.merged_on_one_rank,
    optimizers.mixed_skip,
    optimizers.parameter_that_was_added,
    optimizers.options_of_one_rank,
]


@pytest.mark.parametrize("world_size", [2, 3, 5])
def test_situations(world_size: int) -> None:
    """Each situation passes."""
    run_situations(SITUATIONS, world_size)


def test_one_worker() -> None:
    """A worker that is alone in its process group exchanges with nobody."""
    needs_others = {
        workers.refused, workers.rates_differ, workers.kinds_of_models, workers.merged_on_one_rank,
        optimizers.mixed_skip,
    }  # fmt: skip
    run_situations([each for each in SITUATIONS if each not in needs_others], 1)


@pytest.mark.parametrize("situation", [workers.lost, workers.lost_in_confirmation])
def test_lost_worker(situation: Callable[..., None]) -> None:
    """The other two workers repeat or complete the exchange, and train to the end."""
    assert reports(situation, 3) == dict.fromkeys((0, 1), ("trained to the end",))


def test_joining_worker() -> None:
    """A third worker joins two, and all train on."""
    run_workers(workers.joins, 3)


def test_shards(tmp_path: Path) -> None:
    """Two replicas of two shards each train, stop and resume."""
    run_workers(checkpoints.sharded, 4, str(tmp_path))
    run_workers(workers.one_bad_shard, 4)
    run_workers(workers.loaded_shards, 4)


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
def test_checkpoints(world_size: int, tmp_path: Path) -> None:
    """Local steps, and a list of optimizers, can be saved and resumed."""
    run_workers(checkpoints.in_checkpoints, world_size, str(tmp_path / "local steps"))
    run_workers(checkpoints.list_in_a_checkpoint, world_size, str(tmp_path / "list"))
