"""The DDP communication hook, on real gloo processes."""

from __future__ import annotations

from contextlib import suppress
from datetime import timedelta

import ddp_precision_workers as precision
import ddp_workers
import pytest
from helpers import run_situations, run_workers
from tritoncomm.scheduler.local_workers import WorkerError


@pytest.mark.parametrize(
    "situations",
    [
        [ddp_workers.dense_equals_ddp, ddp_workers.conservation],
        [
            ddp_workers.warm_up,
            ddp_workers.training,
            ddp_workers.exchange_thread,
            ddp_workers.accumulation,
            precision.half_precision_wrappers,
        ],
        [precision.loss_scaling, ddp_workers.resume],
        [
            precision.non_finite,
            precision.zeroed_alone,
            precision.half_precision_buckets,
            ddp_workers.small_tensors,
            ddp_workers.changed_density,
        ],
        [ddp_workers.mismatched_settings, ddp_workers.hooks_that_torch_rejects, ddp_workers.raw_accumulation],
    ],
    ids=lambda situations: ",".join(situation.__name__ for situation in situations),
)
@pytest.mark.parametrize("world_size", [3])
def test_situations(situations: list, world_size: int) -> None:
    """Each situation passes. The same processes run several situations, because starting them is slow."""
    run_situations(situations, world_size)


def test_one_worker() -> None:
    """A single worker is the bare optimizer behind bare DDP."""
    run_situations([ddp_workers.one_worker, ddp_workers.one_worker_skips, ddp_workers.one_worker_unscales], 1)


def test_nodes() -> None:
    """Two nodes of two ranks exchange sparsely between the nodes."""
    assert run_workers(ddp_workers.nodes, 4) == [None] * 4


def test_killed_rank() -> None:
    """backward() of the survivors raises an error that names the killed rank. They continue in a new group."""
    heard: list[tuple[int, str]] = []
    with suppress(WorkerError):
        run_workers(ddp_workers.killed, 3, listen=heard.append, grace=timedelta(seconds=30))
    assert sorted(heard) == [(0, "continued"), (0, "named"), (2, "continued"), (2, "named")]
