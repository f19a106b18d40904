"""All ranks draw the same conclusion from a vote."""

from __future__ import annotations

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


def test_one_rank_counts() -> None:
    """So does a step that one rank rejected, a flag of one, and an update that stopped on one."""
    assert votes(["4", "4", "4"], rejected=1) == [Vote(rejects=1)] * 3
    assert votes(["4", "4", "4"], raising=1) == [Vote(raises=1)] * 3
    assert all(found.claim for found in votes(["4", "4", "4, and one that stopped"]))
