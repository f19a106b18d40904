"""Sparse averaging over the replicas of FSDP2, on real gloo processes."""

from __future__ import annotations

from contextlib import suppress
from datetime import timedelta

import pytest
from tritoncomm.scheduler.local_workers import WorkerError

import gloo_fsdp
from gloo_training import several
from workers import run_workers


@pytest.mark.parametrize(
    "situations",
    [
        [gloo_fsdp.dense_training, gloo_fsdp.conservation],
        [gloo_fsdp.accumulation, gloo_fsdp.unused_and_narrow],
        [gloo_fsdp.non_finite, gloo_fsdp.resume],
        [gloo_fsdp.refusals, gloo_fsdp.nodes, gloo_fsdp.used_twice],
        [gloo_fsdp.loss_scaling, gloo_fsdp.narrow_reduction, gloo_fsdp.sparse_accumulation],
    ],
    ids=lambda situations: ",".join(situation.__name__ for situation in situations),
)
def test_situations(situations: list) -> None:
    """What the sentences of the situations say; processes are started once for several."""
    done: list[str] = []
    run_workers(several, 4, situations, listen=done.append)
    assert done == [situation.__name__ for situation in situations]


def test_killed_rank() -> None:
    """All survivors are told in the same pass, before any of them steps."""
    heard: list[tuple[int, str]] = []
    with suppress(WorkerError):
        run_workers(gloo_fsdp.killed, 4, listen=heard.append, grace=timedelta(seconds=30))
    assert sorted(heard) == [(0, "named"), (2, "named"), (3, "named")]
