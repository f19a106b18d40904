"""Unusual situations of a hook, on real gloo processes."""

from __future__ import annotations

import door_edge_workers
import pytest
import sharded_edge_workers
from helpers import run_workers, several


@pytest.mark.parametrize(
    "situations",
    [
        [door_edge_workers.settings_of_a_hook],
        [door_edge_workers.copied_model],
        [door_edge_workers.groups_are_used_again],
    ],
    ids=lambda situations: ",".join(situation.__name__ for situation in situations),
)
def test_ddp(situations: list) -> None:
    """Each situation passes. The same processes run several situations, because starting them is slow."""
    done: list[str] = []
    run_workers(several, 3, situations, listen=done.append)
    assert done == [situation.__name__ for situation in situations]


@pytest.mark.parametrize(
    "situations",
    [
        [sharded_edge_workers.groups_are_used_again],
    ],
    ids=lambda situations: ",".join(situation.__name__ for situation in situations),
)
def test_sharded(situations: list) -> None:
    """Each situation passes with two replicas of two shards."""
    done: list[str] = []
    run_workers(several, 4, situations, listen=done.append)
    assert done == [situation.__name__ for situation in situations]
