"""A checkpoint is the same whatever the module is wrapped in, on real gloo processes."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import checkpoint_kind_workers as workers
from helpers import run_situations


def test_ddp_and_plain_module(tmp_path: Path) -> None:
    """What was saved with a plain module loads under DDP, and the other way round, to the bit."""
    situations = [
        partial(workers.saved_by_rank, folder=str(tmp_path)),
        partial(workers.saved_together, folder=str(tmp_path)),
    ]
    run_situations(situations, 2)
