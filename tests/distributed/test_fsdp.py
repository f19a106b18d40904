"""Sparse averaging over the replicas of FSDP2, on real gloo processes."""

from __future__ import annotations

from contextlib import suppress
from datetime import timedelta

import fsdp_workers
import pytest
from helpers import run_workers, several
from tritoncomm.scheduler.local_workers import WorkerError


@pytest.mark.parametrize(
    "situations",
    [
        [fsdp_workers.dense_training, fsdp_workers.conservation],
        [fsdp_workers.accumulation, fsdp_workers.unused_layers_and_bf16],
        [
            fsdp_workers.non_finite,
            fsdp_workers.non_finite_shard,
            fsdp_workers.resume,
            fsdp_workers.gradients_used_early,
        ],
        [fsdp_workers.rejected_models, fsdp_workers.first_fsdp, fsdp_workers.nodes, fsdp_workers.used_twice],
        [
            *(fsdp_workers.nested_passes, fsdp_workers.several_roots, fsdp_workers.other_orders),
            fsdp_workers.replaced_parameters,
            *(fsdp_workers.zeroed_alone, fsdp_workers.outside_of_backward, fsdp_workers.gradient_hooks_differ),
            fsdp_workers.failed_write,
        ],
        [
            *(fsdp_workers.loss_scaling, fsdp_workers.fp16_reduction, fsdp_workers.divided_after_the_hook),
            fsdp_workers.sparse_accumulation,
        ],
    ],
    ids=lambda situations: ",".join(situation.__name__ for situation in situations),
)
def test_situations(situations: list) -> None:
    """Each situation passes. The same processes run several situations, because starting them is slow."""
    done: list[str] = []
    run_workers(several, 4, situations, listen=done.append)
    assert done == [situation.__name__ for situation in situations]


def test_killed_rank() -> None:
    """All survivors raise an error that names the killed rank in the same backward pass, before any of them steps."""
    heard: list[tuple[int, str]] = []
    with suppress(WorkerError):
        run_workers(fsdp_workers.killed, 4, listen=heard.append, grace=timedelta(seconds=30))
    assert sorted(heard) == [(0, "named"), (2, "named"), (3, "named")]
