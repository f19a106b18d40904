"""FSDP2 inside of replicas that exchange sparsely, on real gloo processes: two replicas of two shards."""

from __future__ import annotations

from contextlib import suppress
from datetime import timedelta

import fsdp_edge_workers as edges
import fsdp_workers
import pytest
from helpers import run_situations, run_workers
from tritoncomm.demo.local_workers import WorkerError


@pytest.mark.parametrize(
    "situations",
    [
        [
            *(fsdp_workers.shards_of_one_rank, fsdp_workers.shards_of_two_ranks, fsdp_workers.settings_of_fsdp),
            *(fsdp_workers.accumulation, fsdp_workers.passes, fsdp_workers.gradients_of_others),
            fsdp_workers.clipped_after_synchronize,
        ],
        [
            *(fsdp_workers.dense_training, fsdp_workers.conservation, fsdp_workers.loss_scaling),
            *(fsdp_workers.rejected_steps, fsdp_workers.life_of_a_step, fsdp_workers.nodes),
        ],
        [
            *(edges.refused_groups, edges.refused_models, edges.groups_are_used_again, edges.stopped_update),
            edges.options_that_differ,
        ],
    ],
    ids=lambda situations: f"{situations[0].__name__} and others",
)
def test_situations(situations: list) -> None:
    """Each situation passes. The same processes run several situations, because starting them is slow."""
    run_situations(situations, 4)


def test_killed_rank() -> None:
    """All survivors raise an error that names the killed rank in the same step, before any of them steps."""
    heard: list[tuple[int, str]] = []
    with suppress(WorkerError):
        run_workers(edges.killed, 4, listen=heard.append, grace=timedelta(seconds=30))
    assert sorted(heard) == [(0, "named"), (2, "named"), (3, "named")]
