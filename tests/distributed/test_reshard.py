"""Checkpoints of torch.distributed.checkpoint that are loaded on another mesh, on real gloo processes."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest
import reshard_workers
from helpers import run_workers
from reshard_workers import ENTRIES
from saved_run import OF_ADAM


class Saved(NamedTuple):
    """A folder, and the pending update and the optimizer's state of what it holds."""

    folder: str
    pending: dict
    state: dict


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """Return what two replicas of two shards have saved."""
    folder = str(tmp_path_factory.mktemp("saved"))
    return Saved(folder, *_heard(reshard_workers.save, 4, folder, (2, 2))[0])


def _heard(worker, world_size: int, *args) -> list[tuple[dict, dict]]:
    """Return what rank 0 has sent of each mesh."""
    heard: list[tuple[dict, dict]] = []
    run_workers(worker, world_size, *args, listen=heard.append)
    return heard


def _check(found: tuple[dict, dict], saved: Saved, entries: tuple[str, ...] = ENTRIES) -> None:
    pending, state = found
    assert any(any(update) for update in saved.pending.values())
    assert pending == saved.pending  # exact, because all numbers of replicas are powers of two
    assert state == {name: value for name, value in saved.state.items() if name.split()[-1] in entries}
    assert {name.split()[-1] for name in state} == set(entries)


def test_another_number_of_ranks(saved: Saved) -> None:
    """Two replicas, or two shards, take over the state and the pending update of two by two, to the bit."""
    two, one = _heard(reshard_workers.load, 2, saved.folder, [(2, 1), (1, 2)])
    _check(two, saved)
    _check(one, saved, OF_ADAM)  # a single replica takes the optimizer's own steps


def test_another_mesh_of_as_many_ranks(saved: Saved) -> None:
    """So do four replicas, four shards, and a mesh with its dimensions in the other order."""
    four, one = _heard(reshard_workers.load, 4, saved.folder, [(4, 1), (1, 4)])
    _check(four, saved)
    _check(one, saved, OF_ADAM)
    _check(_heard(reshard_workers.order_of_dimensions, 4, saved.folder)[0], saved)


@pytest.mark.parametrize("world_size", [2, 4])
def test_without_the_place_of_the_checkpoint(saved: Saved, world_size: int) -> None:
    """ResidualState then does not know who has saved. All ranks raise an error that says how to tell it."""
    assert run_workers(reshard_workers.refused, world_size, saved.folder) == [None] * world_size


def test_three_replicas(saved: Saved) -> None:
    """Two replicas become three, up to the rounding of the factor."""
    ((pending, _),) = _heard(reshard_workers.load, 3, saved.folder, [(3, 1)])
    assert all(pending[name] == pytest.approx(update, rel=1e-5, abs=1e-9) for name, update in saved.pending.items())


def test_from_one_replica(tmp_path: Path) -> None:
    """A single replica of two shards saves no residuals. Two replicas load the rest before ``wrap``."""
    ((_, before),) = _heard(reshard_workers.save, 2, str(tmp_path), (1, 2))
    ((pending, state),) = _heard(reshard_workers.from_one_replica, 2, str(tmp_path))
    assert not any(any(update) for update in pending.values())
    assert {name: value for name, value in state.items() if name.split()[-1] in OF_ADAM} == before


def test_the_same_mesh(tmp_path: Path) -> None:
    """A run continues to the bit."""
    assert run_workers(reshard_workers.same_mesh, 4, str(tmp_path)) == [None] * 4


def test_a_model_that_is_not_sharded(tmp_path: Path) -> None:
    """The pending update of two ranks is that of three."""
    heard: list[list[float]] = []
    run_workers(reshard_workers.save_plain, 2, str(tmp_path), listen=heard.append)
    before, heard = heard[0], []
    run_workers(reshard_workers.load_plain, 3, str(tmp_path), listen=heard.append)
    assert any(before)
    assert len(heard) == 3
    assert all(update == pytest.approx(before, rel=1e-5, abs=1e-6) for update in heard)
