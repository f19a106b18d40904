"""The staleness-aware step with DTensor parameters, on real gloo processes."""

from __future__ import annotations

from pathlib import Path

import dtensor_workers
import pytest
from helpers import run_situations, run_workers


@pytest.mark.parametrize("world_size", [1, 2])
def test_situations(world_size: int) -> None:
    """Each situation passes on a mesh of one and of two devices."""
    situations = [dtensor_workers.equal_to_shards, dtensor_workers.checkpoints]
    run_situations(situations, world_size)


def test_another_number_of_ranks(tmp_path: Path) -> None:
    """A checkpoint of two ranks loads on one. The root mean square of each row is that of its former shard."""
    saved: list[tuple[int, list[float]]] = []
    run_workers(dtensor_workers.save_for_others, 2, str(tmp_path), listen=saved.append)
    rows = [value for _, values in sorted(saved) for value in values]
    heard: list[tuple[list[float], list[list[int]]]] = []
    run_workers(dtensor_workers.load_of_others, 1, str(tmp_path), listen=heard.append)
    ((param_rms, last_delivered),) = heard
    assert param_rms == rows
    assert len(set(rows)) == 2
    assert len(last_delivered) == 5
    assert all(0 < step <= 3 for row in last_delivered for step in row)
