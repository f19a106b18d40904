"""Optimizers wrapped around the hook of a model, on real gloo processes."""

from __future__ import annotations

import door_workers
import pytest
import sharded_door_workers
from helpers import run_situations, run_workers


@pytest.mark.parametrize(
    "situations",
    [
        [door_workers.several_buckets, door_workers.buckets_keep_moments],
        [door_workers.registered_before, door_workers.warning_of_plain_adam, door_workers.life_of_a_step],
        [door_workers.rejected_steps, door_workers.loss_scaling, door_workers.resume, door_workers.density_and_flush],
        [door_workers.ddp_options, door_workers.new_module_after_a_lost_rank],
        [door_workers.between_backward_and_step, door_workers.rejected_while_buckets_change],
    ],
    ids=lambda situations: ",".join(situation.__name__ for situation in situations),
)
def test_ddp(situations: list) -> None:
    """Each situation passes. The same processes run several situations, because starting them is slow."""
    run_situations(situations, 3)


def test_one_bucket_equals_wrap() -> None:
    """DDP and ``wrap(model=)`` take the steps of ``wrap`` on the plain module."""
    assert run_workers(door_workers.one_bucket_equals_wrap, 2) == [None] * 2


def test_one_worker() -> None:
    """Every door is the bare optimizer with one worker."""
    assert run_workers(door_workers.one_worker, 1) == [None] * 1


@pytest.mark.parametrize(
    "situations",
    [
        [sharded_door_workers.hook_equals_step, sharded_door_workers.groups_of_parameters],
        [sharded_door_workers.rejected_steps, sharded_door_workers.distributed_checkpoint],
        [sharded_door_workers.deliveries, sharded_door_workers.mixed_precision, sharded_door_workers.tensor_parallel],
        [
            sharded_door_workers.replicated_parameters,
            sharded_door_workers.states_of_replicated_parameters,
            sharded_door_workers.warning_of_plain_adam,
        ],
    ],
    ids=lambda situations: ",".join(situation.__name__ for situation in situations),
)
def test_sharded(situations: list) -> None:
    """Each situation passes with two replicas of two shards."""
    run_situations(situations, 4)
