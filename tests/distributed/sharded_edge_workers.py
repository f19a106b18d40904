"""Worker processes of tests/distributed/test_door_edges.py: two replicas of two shards in unusual situations."""

from __future__ import annotations

import gc

import tritoncomm
from door_edge_workers import groups_of_torch
from fsdp_workers import Net, loss_of, mesh, sharded
from sharded_door_workers import adamw


def groups_are_used_again(rank: int, world_size: int, send) -> None:
    """Wrapping an optimizer of shards again, or another model, creates no further process group."""
    grid = mesh()
    replicas = grid["replicate"].get_group()
    model = sharded(Net(), grid["shard"])
    counts = []
    for step in range(6):
        optimizer = tritoncomm.wrap(adamw(model), process_group=replicas, density=0.1, dense_below=0)
        loss_of(model, rank, step).backward()
        optimizer.step()
        optimizer.zero_grad()
        counts.append(groups_of_torch())
    assert counts[1:] == counts[1:2] * 5, counts
    del optimizer
    for _ in range(5):
        model = sharded(Net(), grid["shard"])
        optimizer = tritoncomm.wrap(adamw(model), model=model, process_group=replicas, density=0.1)
        loss_of(model, rank, 0).backward()
        optimizer.step()
        counts.append(groups_of_torch())
        del model, optimizer
        gc.collect()
    assert counts[-1] == counts[1], counts
