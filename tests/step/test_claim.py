"""All ranks draw the same conclusion from a vote."""

from __future__ import annotations

import torch
from tritoncomm.scheduler.simulated import SimulatedScheduler
from tritoncomm.step.agree.number import number_of_text
from tritoncomm.step.exchange.claim import Vote, lead, vote


def votes(*own: Vote) -> list[Vote]:
    """Return the sum of the votes on each rank."""
    return SimulatedScheduler(len(own)).run([vote(each, torch.device("cpu")) for each in own])


def claims(*updates: str) -> list[Vote]:
    """Return votes of ranks that have completed these updates."""
    return [Vote(claim=lead(rank, len(updates)) * number_of_text(each)) for rank, each in enumerate(updates)]


def test_one_rank_counts() -> None:
    """So does a step that one rank rejected, a flag of one, and an update that stopped on one."""
    assert votes(Vote(), Vote(rejects=1), Vote()) == [Vote(rejects=1)] * 3
    assert votes(Vote(), Vote(raises=1), Vote()) == [Vote(raises=1)] * 3
    assert votes(*claims("4", "4", "4")) == [Vote()] * 3
    assert all(found.claim for found in votes(*claims("4", "4", "4, and one that stopped")))
