"""Backward passes whose gradients no step uses, with every kind of module, on real gloo processes."""

from __future__ import annotations

import discarded_pass_workers as workers
from helpers import run_situations


def test_situations() -> None:
    """Each situation passes."""
    run_situations(
        [
            workers.discarded_passes,
            workers.adversaries,
            workers.optimizers_in_turns,
            workers.two_passes,
            workers.skipped_batches,
            workers.flushed_and_synchronized,
        ],
        2,
    )
