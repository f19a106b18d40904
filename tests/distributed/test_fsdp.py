"""Sparse averaging over the replicas of FSDP2, on real gloo processes."""

from __future__ import annotations

from contextlib import suppress
from datetime import timedelta

import fsdp_pass_workers as passes
import fsdp_precision_workers as precision
import fsdp_workers
import pytest
from helpers import run_situations, run_workers
from tritoncomm.scheduler.local_workers import WorkerError


@pytest.mark.parametrize(
    "situations",
    [
        [fsdp_workers.dense_training, fsdp_workers.conservation],
        [fsdp_workers.accumulation, fsdp_workers.unused_layers_and_bf16],
        [precision.non_finite, precision.non_finite_shard, fsdp_workers.resume, passes.gradients_used_early],
        [fsdp_workers.rejected_models, fsdp_workers.first_fsdp, fsdp_workers.nodes, passes.used_twice],
        [
            *(passes.nested_passes, passes.several_roots, passes.other_orders, fsdp_workers.replaced_parameters),
            *(precision.zeroed_alone, passes.outside_of_backward, passes.gradient_hooks_differ),
            fsdp_workers.failed_write,
        ],
        [
            *(precision.loss_scaling, precision.fp16_reduction, precision.divided_after_the_hook),
            fsdp_workers.sparse_accumulation,
        ],
    ],
    ids=lambda situations: ",".join(situation.__name__ for situation in situations),
)
def test_situations(situations: list) -> None:
    """Each situation passes. The same processes run several situations, because starting them is slow."""
    run_situations(situations, 4)


def test_killed_rank() -> None:
    """All survivors raise an error that names the killed rank in the same backward pass, before any of them steps."""
    heard: list[tuple[int, str]] = []
    with suppress(WorkerError):
        run_workers(fsdp_workers.killed, 4, listen=heard.append, grace=timedelta(seconds=30))
    assert sorted(heard) == [(0, "named"), (2, "named"), (3, "named")]
