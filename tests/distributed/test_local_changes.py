"""Local gradients that a script changes before ``step()``, on real gloo processes."""

from __future__ import annotations

import local_changes_workers
import pytest
from helpers import run_situations


@pytest.mark.parametrize(
    "situations",
    [
        [local_changes_workers.ordinary_loops, local_changes_workers.hooks_are_removed],
        [local_changes_workers.scaled_loops, local_changes_workers.clipped_loops, local_changes_workers.lists],
    ],
    ids=lambda situations: ",".join(situation.__name__ for situation in situations),
)
def test_situations(situations: list) -> None:
    """Each situation passes. The same processes run several situations, because starting them is slow."""
    run_situations(situations, 2)
