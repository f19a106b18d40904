"""All ranks draw the same conclusion from a vote."""

from __future__ import annotations

import pytest
import torch
from tritoncomm.scheduler.simulated import SimulatedScheduler
from tritoncomm.step.agree import Stepping
from tritoncomm.step.votes import vote

OPTIMIZER = torch.optim.SGD([torch.zeros(1)])


def votes(
    updates: list[int], rejected: int = -1, stopped: int = -1, raising: int = -1
) -> list[tuple[bool, bool, bool, bool]]:
    """Return what each rank concludes. ``updates`` are those of each rank."""
    patterns = [
        vote(
            rank == rejected,
            Stepping(OPTIMIZER, own, rank == stopped),
            [],
            len(updates),
            torch.device("cpu"),
            raises=rank == raising,
        )
        for rank, own in enumerate(updates)
    ]
    return SimulatedScheduler(len(updates)).run(patterns)


@pytest.mark.parametrize(
    ("updates", "alike"),
    [
        ([5, 5, 5], True),
        ([1023, 1023], True),
        ([0, 0, 0], True),
        ([5, 5, 6], False),
        ([1, 2, 3], False),  # rank 1 has the mean
        ([0, 1, 2, 1], False),
        ([7, 9], False),
    ],
)
def test_ranks_agree_on_whether_their_updates_are_alike(updates: list[int], alike: bool) -> None:
    """Otherwise some would wait for the others, to name the difference."""
    assert votes(updates) == [(False, False, alike, False)] * len(updates)


def test_one_rank_counts() -> None:
    """A step that one rank rejected is rejected, and an update that stopped on one is not alike."""
    assert votes([4, 4, 4], rejected=1) == [(True, False, True, False)] * 3
    assert votes([4, 4, 4], stopped=2) == [(False, False, False, False)] * 3
    assert votes([4, 4], rejected=0, stopped=0) == [(True, False, False, False)] * 2
    assert votes([4, 4, 4], raising=1) == [(False, False, True, True)] * 3
