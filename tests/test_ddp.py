"""The DDP communication hook, on real gloo processes."""

from __future__ import annotations

from contextlib import suppress
from datetime import timedelta

import pytest
from tritoncomm.scheduler.local_workers import WorkerError

import gloo_ddp
from gloo_training import several
from workers import run_workers


@pytest.mark.parametrize(
    "situations",
    [
        [gloo_ddp.dense_is_ddp, gloo_ddp.conservation],
        [gloo_ddp.training, gloo_ddp.beside_backward, gloo_ddp.accumulation, gloo_ddp.narrow_wrappers],
        [gloo_ddp.loss_scaling, gloo_ddp.resume],
        [gloo_ddp.non_finite, gloo_ddp.narrow_buckets, gloo_ddp.small_tensors, gloo_ddp.settings_in_between],
        [gloo_ddp.disagreement, gloo_ddp.what_torch_refuses, gloo_ddp.raw_accumulation],
    ],
    ids=lambda situations: ",".join(situation.__name__ for situation in situations),
)
@pytest.mark.parametrize("world_size", [3])
def test_situations(situations: list, world_size: int) -> None:
    """What the sentences of the situations say; processes are started once for several."""
    done: list[str] = []
    run_workers(several, world_size, situations, listen=done.append)
    assert done == [situation.__name__ for situation in situations]


def test_nodes() -> None:
    """Two nodes of two ranks."""
    run_workers(gloo_ddp.nodes, 4)


def test_killed_rank() -> None:
    """The survivors are told out of backward()."""
    heard: list[tuple[int, str]] = []
    with suppress(WorkerError):
        run_workers(gloo_ddp.killed, 3, listen=heard.append, grace=timedelta(seconds=30))
    assert sorted(heard) == [(0, "named"), (2, "named")]
