"""Unusual situations of a hook, on real gloo processes."""

from __future__ import annotations

from contextlib import suppress
from datetime import timedelta
from functools import partial

import conservation_workers
import discarded_pass_workers
import door_edge_workers
import door_model_workers
import pytest
import sharded_edge_workers
from helpers import run_situations, run_workers
from tritoncomm.scheduler.local_workers import WorkerError


@pytest.mark.parametrize(
    "situations",
    [
        [
            door_edge_workers.settings_of_a_hook,
            door_edge_workers.groups_and_settings,
            door_edge_workers.two_optimizers,
        ],
        [
            door_edge_workers.states_of_other_ranks,
            door_edge_workers.replaced_optimizer,
            door_edge_workers.zero_gradients,
        ],
        [door_edge_workers.copied_model, door_edge_workers.early_termination],
        [door_edge_workers.groups_are_used_again],
        [door_model_workers.other_strides, door_model_workers.unfrozen_later],
        [door_model_workers.gradients_of_others, door_model_workers.unsuitable_models],
        [door_model_workers.static_graph_of_two_types],
        [
            discarded_pass_workers.discarded_passes,
            discarded_pass_workers.optimizers_in_turns,
            discarded_pass_workers.flushed_and_synchronized,
        ],
        [
            conservation_workers.bare_steps_between,
            conservation_workers.parts_of_a_pass,
            conservation_workers.failing_flush,
            conservation_workers.synchronized_and_loaded,
        ],
    ],
    ids=lambda situations: ",".join(situation.__name__ for situation in situations),
)
def test_ddp(situations: list) -> None:
    """Each situation passes. The same processes run several situations, because starting them is slow."""
    run_situations(situations, 3)


@pytest.mark.parametrize(
    "situations",
    [
        [sharded_edge_workers.groups_are_used_again, sharded_edge_workers.parameters_without_shards],
        [sharded_edge_workers.discarded_micro_batches, sharded_edge_workers.stopped_update],
        [sharded_edge_workers.saved_micro_batches, sharded_edge_workers.scaled_micro_batches],
        [discarded_pass_workers.discarded_passes_of_shards],
    ],
    ids=lambda situations: ",".join(situation.__name__ for situation in situations),
)
def test_sharded(situations: list) -> None:
    """Each situation passes with two replicas of two shards."""
    run_situations(situations, 4)


def test_conservation_by_shards() -> None:
    """What two optimizers of FSDP2 use is applied once. The two replicas have one shard each."""
    run_situations([conservation_workers.shards_in_turns], 2)


@pytest.mark.parametrize("world_size", [1, 2])
def test_sparse_gradients(world_size: int) -> None:
    """Sparse gradients are defined under a hook, and do not make it wait for ever."""
    assert (
        run_workers(door_edge_workers.sparse_gradients, world_size, limit=timedelta(seconds=30)) == [None] * world_size
    )


def texts_of(worker, world_size: int, **fields) -> list[str]:
    """Return the error of each rank. The workers end without a result."""
    heard: list[tuple[int, str]] = []
    with suppress(WorkerError):
        run_workers(partial(worker, **fields), world_size, listen=heard.append, grace=timedelta(seconds=40))
    assert [rank for rank, _ in sorted(heard)] == list(range(world_size))
    return [text for _, text in sorted(heard)]


@pytest.mark.parametrize("started", [False, True])
@pytest.mark.parametrize("known", [True, False])
def test_join(known: bool, started: bool) -> None:
    """All ranks raise an error that names ``join()``: the rank without batches, and those that have some."""
    texts = texts_of(door_edge_workers.joined, 2, known=known, started=started)
    assert all("join()" in text and "same number of batches" in text for text in texts), texts
    assert not known or all(text.startswith("ConfigurationError") for text in texts)


@pytest.mark.parametrize("started", [False, True])
@pytest.mark.parametrize("everywhere", [False, True])
def test_unused_parameter(everywhere: bool, started: bool) -> None:
    """All ranks name the cause, an unused parameter, and ``find_unused_parameters``."""
    texts = texts_of(door_edge_workers.unused_parameter, 3, everywhere=everywhere, started=started)
    assert all("find_unused_parameters" in text and "no gradient" in text for text in texts), texts
