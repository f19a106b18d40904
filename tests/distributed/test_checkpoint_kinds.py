"""A checkpoint is the same whatever the module is wrapped in, on real gloo processes."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import checkpoint_kind_workers as workers
import pytest
from helpers import run_situations, run_workers


def test_ddp_and_plain_module(tmp_path: Path) -> None:
    """What was saved with a plain module loads under DDP, and the other way round, to the bit."""
    situations = [
        partial(workers.saved_by_rank, folder=str(tmp_path)),
        partial(workers.saved_together, folder=str(tmp_path)),
    ]
    run_situations(situations, 2)


@pytest.mark.parametrize("shards", [False, True], ids=["to shards", "from shards"])
def test_shards_and_plain_module(shards: bool, tmp_path: Path) -> None:
    """What was saved with a plain module loads under FSDP2, and the other way round. The pending update is kept."""
    worker = partial(workers.to_and_from_shards, shards=shards)
    assert run_workers(worker, 4, str(tmp_path)) == [None] * 4
