"""All ranks draw the same conclusion from a vote."""

from __future__ import annotations

import pytest
import torch
from tritoncomm.scheduler.simulated import SimulatedScheduler
from tritoncomm.step.agree.number import number_of_text
from tritoncomm.step.exchange.claim import Vote, lead, vote


def votes(updates: list[str], rejected: int = -1, raising: int = -1) -> list[Vote]:
    """Return the sum of the votes on each rank. ``updates`` are those of each rank."""
    size = len(updates)
    own = [
        Vote(int(rank == rejected), int(rank == raising), lead(rank, size) * number_of_text(each))
        for rank, each in enumerate(updates)
    ]
    return SimulatedScheduler(size).run([vote(each, torch.device("cpu")) for each in own])


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
    found = votes([*map(str, updates)])
    assert found == found[:1] * len(updates)
    assert (found[0].claim == 0) == alike


def test_one_rank_counts() -> None:
    """So does a step that one rank rejected, a flag of one, and an update that stopped on one."""
    assert votes(["4", "4", "4"], rejected=1) == [Vote(rejects=1)] * 3
    assert votes(["4", "4", "4"], raising=1) == [Vote(raises=1)] * 3
    assert all(found.claim for found in votes(["4", "4", "4, and one that stopped"]))


def test_groups_that_differ_in_the_same_way() -> None:
    """In each of two groups, one rank has another number, and the groups' numbers do not cancel each other."""
    for odd in ((0, 3), (0, 2), (1, 2), (1,)):
        own = [Vote(claim=lead(rank % 2, 2) * number_of_text(f"shard {rank // 2} {rank in odd}")) for rank in range(4)]
        found = SimulatedScheduler(4).run([vote(each, torch.device("cpu")) for each in own])
        assert all(each.claim for each in found)
