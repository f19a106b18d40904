"""Local gradients that a script changes before ``step()``, on real gloo processes."""

from __future__ import annotations

import local_changes_workers as workers
import pytest
from helpers import run_situations


@pytest.mark.parametrize(
    ("world_size", "situations"),
    [
        (2, [workers.ordinary_loops, workers.assigned_loops, workers.hooks_are_removed]),
        (2, [workers.scaled_loops, workers.clipped_loops]),
        (4, [workers.backward_after_synchronize, workers.without_gradients]),
    ],
    ids=["silent", "heard", "sharded"],
)
def test_situations(world_size: int, situations: list) -> None:
    """Each situation passes. The same processes run several situations, because starting them is slow."""
    run_situations(situations, world_size)
