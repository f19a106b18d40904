"""A checkpoint is the same whatever the module is wrapped in, on real gloo processes."""

from __future__ import annotations

from pathlib import Path

import checkpoint_kind_workers as workers
from helpers import run_workers


def test_ddp_and_plain_module(tmp_path: Path) -> None:
    """What was saved with a plain module loads under DDP, and the other way round, to the bit."""
    assert run_workers(workers.saved_by_rank, 2, str(tmp_path)) == [None] * 2
