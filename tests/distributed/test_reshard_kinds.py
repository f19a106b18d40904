"""What one kind of module has saved loads in another one, with any number of ranks, on real gloo processes."""

from __future__ import annotations

from pathlib import Path

import pytest
import reshard_kind_workers as workers
from helpers import run_workers
from saved_run import OF_ADAM

Found = tuple[dict[str, list], dict[str, list]]
SAVED = [("plain", 1), ("ddp", 1), ("fsdp", 2)]


def _heard(worker, world_size: int, *args) -> dict[str, Found]:
    """Return the pending update and the state that rank 0 has sent, by what it has called them."""
    heard: list[tuple[str, dict, dict]] = []
    run_workers(worker, world_size, *args, listen=heard.append)
    return {name: (pending, state) for name, pending, state in heard}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, Found]]:
    """Return the folder into which four ranks have saved modules of each kind, and what they have saved."""
    folder = str(tmp_path_factory.mktemp("saved"))
    return folder, _heard(workers.save, 4, folder, SAVED)


@pytest.mark.parametrize(
    ("world_size", "kinds"),
    [
        (1, [("plain", 1)]),
        (2, [("plain", 1), ("ddp", 1), ("fsdp", 1), ("fsdp", 2)]),
        (4, [("plain", 1), ("ddp", 1), ("fsdp", 1), ("fsdp", 2)]),
    ],
)
def test_every_kind_loads_every_kind(saved, world_size: int, kinds: list[tuple[str, int]]) -> None:
    """Parameters, Adam's state and the pending update are those of the save, to the bit, in both ways of saving."""
    folder, before = saved
    assert set(before) == {kind for kind, _ in SAVED}
    found = _heard(workers.load, world_size, folder, list(before), kinds)
    assert len(found) == len(before) * len(kinds)
    for name, (pending, state) in found.items():
        pending_before, state_before = before[name.split()[0]]
        assert all(any(update) for update in pending_before.values())
        assert pending == pending_before, name  # exact, because all numbers of replicas are powers of two
        assert {key.split()[-1] for key in state} >= set(OF_ADAM)
        assert state == {key: state_before[key] for key in state}, name


@pytest.mark.parametrize("situation", [workers.refused, workers.stages])
def test_what_cannot_be_loaded(situation, tmp_path: Path) -> None:
    """The error names the fix, and nothing changes."""
    assert run_workers(situation, 4, str(tmp_path)) == [None] * 4


def test_momentum_of_a_method(tmp_path: Path) -> None:
    """It belongs to the shards of the save."""
    assert run_workers(workers.momentum, 4, str(tmp_path)) == [None] * 4
