"""Unusual situations of a hook, on real gloo processes."""

from __future__ import annotations

import door_edge_workers
import pytest
from helpers import run_workers, several


@pytest.mark.parametrize(
    "situations",
    [
        [door_edge_workers.settings_of_a_hook],
        [door_edge_workers.copied_model],
    ],
    ids=lambda situations: ",".join(situation.__name__ for situation in situations),
)
def test_ddp(situations: list) -> None:
    """Each situation passes. The same processes run several situations, because starting them is slow."""
    done: list[str] = []
    run_workers(several, 3, situations, listen=done.append)
    assert done == [situation.__name__ for situation in situations]
