"""Checkpoints: bit-identical resume, and the same pending update with another world size."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import checkpoint_workers
import pytest
import torch
from helpers import run_workers
from hypothesis import given
from hypothesis import strategies as st
from tritoncomm import ConfigurationError
from tritoncomm.checkpoint import reshard
from tritoncomm.demo.local_workers import WorkerError
from tritoncomm.step import state as exchange_state

from depth import DEEP


def states(residuals: Sequence[torch.Tensor]) -> list[dict[str, object]]:
    """Return the states that ranks with these residuals save."""
    return [
        exchange_state.with_checksum(
            rank=rank,
            world_size=len(residuals),
            recipe="oktopk",
            settings="",
            residuals=[residual[:2], residual[2:]],
            algorithm=[{"taken": 3}],
            steps=5,
            absent=[1],
            local=None,
        )
        for rank, residual in enumerate(residuals)
    ]


@given(before=st.integers(1, 12), after=st.integers(1, 12), seed=st.integers(0, 1000))
def test_pending_update_is_conserved(before: int, after: int, seed: int) -> None:
    """reshard() conserves sum(residual) / world_size, exactly if both world sizes are powers of two."""
    values = torch.randint(-64, 65, (before, 5), generator=torch.Generator().manual_seed(seed)).float() * before
    pending = values.double().sum(0) / before
    resharded = reshard(states(list(values)), after)
    assert [state["rank"] for state in resharded] == list(range(after))
    now = sum((owed(state["before"]) for state in resharded), start=torch.zeros(5, dtype=torch.float64)) / after
    exact = (before & (before - 1)) == 0 and (after & (after - 1)) == 0
    assert torch.equal(now, pending) if exact else torch.allclose(now, pending, rtol=1e-5, atol=1e-4)
    for state in resharded:
        exchange_state.check(state, world_size=after)
        assert len(state["before"]["states"]) == len(range(state["rank"], before, after))


def owed(before: dict) -> torch.Tensor:
    """Return the residual of a rank that takes over others."""
    parts = [torch.cat(state["residuals"]).double() for state in before["states"]]
    return sum(parts, start=torch.zeros(5, dtype=torch.float64)) * before["share"]


def test_inconsistent_states_are_rejected() -> None:
    """The error names a missing, duplicated or foreign rank."""
    three = states([torch.ones(5)] * 3)
    with pytest.raises(ConfigurationError, match="world_size=3"):
        reshard(three[:2], 4)
    with pytest.raises(ConfigurationError, match="rank=0, here it is 1"):
        reshard([three[0], three[0], three[2]], 4)
    other = states([torch.ones(6)] * 3)
    with pytest.raises(ConfigurationError, match="ranks 0 and 1 belong to models with other parameters"):
        reshard([three[0], other[1], three[2]], 4)


def test_killed_and_resumed_equals_gone_on(tmp_path: Path) -> None:
    """A run that is resumed by other processes equals one that goes on, bit for bit, for every state and rank.

    A deep run has every recipe. Otherwise the laws resume the other ones.
    """
    names = checkpoint_workers.names_of_runs(3, every=DEEP)
    straight: list[tuple[str, int, str]] = []
    with pytest.raises(WorkerError):
        run_workers(checkpoint_workers.until_killed, 3, str(tmp_path), names, listen=straight.append)
    resumed: list[tuple[str, int, str]] = []
    run_workers(checkpoint_workers.resumed, 3, str(tmp_path), names, listen=resumed.append)
    assert sorted(resumed) == sorted(straight)
    assert len(straight) > 3 * 25


@pytest.mark.parametrize(("before", "after"), [(4, 2), (3, 4), (2, 1)])
@pytest.mark.parametrize("recipe", ["oktopk", "exdyna", "dgc"])
def test_resume_with_another_world_size(recipe: str, before: int, after: int, tmp_path: Path) -> None:
    """The pending update stays the same whether ranks are added or removed."""
    pending: list[list[float]] = []
    run_workers(checkpoint_workers.write, before, str(tmp_path), recipe, listen=pending.append)
    run_workers(checkpoint_workers.read, after, str(tmp_path), recipe, listen=pending.append)
    assert any(pending[0])
    assert pending[1] == pytest.approx(pending[0], rel=1e-5, abs=1e-6)


def test_resume_with_other_nodes(tmp_path: Path) -> None:
    """Two nodes become one of two, three or four ranks, and two again. The pending update stays the same, exactly."""
    chains = checkpoint_workers.CHAINS
    for number in range(3):
        for size in dict.fromkeys(chain[number] for chain in chains):
            alike = [place for place, chain in enumerate(chains) if chain[number] == size]
            run_workers(checkpoint_workers.in_nodes, size[0], str(tmp_path), alike, number)


@pytest.mark.parametrize("situation", [checkpoint_workers.damaged, checkpoint_workers.foreign])
def test_bad_checkpoints_are_rejected(situation, tmp_path: Path) -> None:
    """All ranks reject the checkpoint and report the reason."""
    run_workers(situation, 3, str(tmp_path))


def test_distributed_checkpoint(tmp_path: Path) -> None:
    """A run can be saved and resumed with torch.distributed.checkpoint."""
    run_workers(checkpoint_workers.distributed_checkpoint, 2, str(tmp_path))


def test_one_state_for_all_ranks() -> None:
    """The state of rank 0 loads on all ranks if it has no residual, in DDP and without it."""
    assert run_workers(checkpoint_workers.one_state_for_all, 3) == [None] * 3
