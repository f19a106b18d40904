"""The order in which ranks send to each other."""

from __future__ import annotations

import pytest
from tritoncomm.primitives.collectives import rotation


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 7, 8, 17])
@pytest.mark.parametrize("width", [1, 2, 4, 100])
def test_rotation(world_size: int, width: int) -> None:
    """Each step is a permutation, every ordered pair occurs once, and there are ceil(P/W) buckets."""
    schedules = [[pair for bucket in rotation(r, world_size, width) for pair in bucket] for r in range(world_size)]
    assert all(len(list(rotation(r, world_size, width))) == -(-world_size // width) for r in range(world_size))
    for step in zip(*schedules, strict=True):
        assert sorted(to for to, _ in step) == list(range(world_size))
        assert all(step[to][1] == rank for rank, (to, _) in enumerate(step))
    pairs = {(rank, to) for rank, schedule in enumerate(schedules) for to, _ in schedule}
    assert len(pairs) == world_size * (world_size - 1)
