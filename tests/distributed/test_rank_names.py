"""Every text that names ranks, and every attribute that has them, has their global numbers."""

from __future__ import annotations

import pytest
import rank_name_workers
from helpers import reports, run_workers

SITUATIONS = [
    rank_name_workers.settings,
    rank_name_workers.options,
    rank_name_workers.drift,
    rank_name_workers.nan_gradient,
    rank_name_workers.inf_residual,
    rank_name_workers.lonely_gradient,
    rank_name_workers.scale,
    rank_name_workers.numbers_received,
    rank_name_workers.messages,
    rank_name_workers.failed,
    rank_name_workers.places,
]


@pytest.mark.parametrize("situation", SITUATIONS, ids=lambda each: each.__name__)
def test_names_in_a_group(situation) -> None:
    """Ranks 2 and 3 are called that in a group of these two."""
    run_workers(situation, 4)


def test_names_of_lost_ranks() -> None:
    """So is a rank that was lost."""
    assert reports(rank_name_workers.lost, 4)
