"""Arguments that are process groups, on real gloo processes."""

from __future__ import annotations

import group_workers
import pytest
from helpers import run_workers


@pytest.mark.parametrize(
    "situation",
    [
        group_workers.scaler_of_a_group,
        group_workers.nodes_later,
        group_workers.one_node_later,
        group_workers.inherited_time_outs,
    ],
    ids=lambda each: each.__name__,
)
def test_situation(situation) -> None:
    """Four ranks pass."""
    assert run_workers(situation, 4) == [None] * 4
