"""Checkpoints: bit-identical resume, and the same pending update with another world size."""

from __future__ import annotations

from pathlib import Path

import checkpoint_workers
import pytest
import torch
import tritoncomm
from helpers import run_workers
from hypothesis import given
from hypothesis import strategies as st
from tritoncomm.demo.local_workers import WorkerError
from tritoncomm.step.saved import state as exchange_state

from depth import DEEP


@given(before=st.integers(1, 12), after=st.integers(1, 12), seed=st.integers(0, 1000))
def test_pending_update_is_conserved(before: int, after: int, seed: int) -> None:
    """Another number of ranks conserves sum(residual) / world_size, exactly if both numbers are powers of two."""
    generator = torch.Generator().manual_seed(seed)
    states = [
        {"residuals": [torch.randint(-64, 65, (n,), generator=generator).float() * before for n in (2, 3)]}
        for _ in range(before)
    ]
    pending = sum(torch.cat(state["residuals"]).double() for state in states) / before
    parameters = [torch.nn.Parameter(torch.zeros(n)) for n in (3, 2)]
    exchange = tritoncomm.wrap(torch.optim.SGD(parameters))._tritoncomm.setup.exchange
    methods = [vector.feedback.algorithm.state_dict() for vector in exchange.vectors]
    of_ranks = [
        exchange_state.carry_over(
            exchange,
            [state | {"algorithm": methods} for state in states[rank::after]],
            after / before,
            methods,
            parameters[::-1],
        )
        for rank in range(after)
    ]
    now = sum(feedback.residual.double() for (feedback,) in of_ranks) / after
    now = torch.cat([now[3:], now[:3]])  # the states have the parameters in the other order
    exact = (before & (before - 1)) == 0 and (after & (after - 1)) == 0
    assert torch.equal(now, pending) if exact else torch.allclose(now, pending, rtol=1e-5, atol=1e-4)


def test_killed_saves(tmp_path: Path) -> None:
    """A rank is killed at ten places of a save into a used folder, which then has the old state, or the new one."""
    heard: list[tuple[int, int, list[str]]] = []
    for place in range(len(checkpoint_workers.PLACES)):
        with pytest.raises(WorkerError) as caught:
            run_workers(checkpoint_workers.killed, 2, str(tmp_path / str(place)), place, listen=heard.append)
        assert "not killed" not in str(caught.value)
    expected = {
        place: [digests for _, _, digests in sorted(each for each in heard if each[0] == place)] for place, *_ in heard
    }
    assert len(expected) == len(checkpoint_workers.PLACES) == 10
    run_workers(checkpoint_workers.left_of_kills, 2, str(tmp_path), expected)


def test_sizes(tmp_path: Path) -> None:
    """The state of the optimizer is not written by every rank."""
    run_workers(checkpoint_workers.sizes, 4, str(tmp_path))


def test_drifted_replicas(tmp_path: Path) -> None:
    """They are refused, not blended."""
    run_workers(checkpoint_workers.drifted, 3, str(tmp_path))


def test_save_between_exchanges(tmp_path: Path) -> None:
    """Workers merge their local steps before they save. One, two or three workers go on from there."""
    heard: list[tuple[list[float], list[int]]] = []
    run_workers(checkpoint_workers.between_exchanges, 2, str(tmp_path), listen=heard.append)
    for world_size in (1, 2, 3):
        run_workers(checkpoint_workers.taken_up, world_size, str(tmp_path), listen=heard.append)
    (pending, weights), *others = heard
    assert any(pending)
    for found, other_weights in others:
        assert found == pytest.approx(pending, rel=1e-5, abs=1e-6)
        assert other_weights == weights


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
