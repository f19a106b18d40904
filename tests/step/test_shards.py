"""Which ranks share a parameter."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from tritoncomm.step.tensors.shards import by_split


def test_a_cached_mesh_of_an_earlier_process_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch gives a new DTensor an equal mesh from its cache, whose process groups may be gone."""
    monkeypatch.setattr(dist.distributed_c10d._world, "group_count", 1)  # as after a failed init_process_group()
    for attempt in range(2):
        dist.init_process_group("gloo", init_method=f"file://{tmp_path}/{attempt}", rank=0, world_size=1)
        try:
            model = fully_shard(nn.Linear(3, 3), mesh=init_device_mesh("cpu", (1,)))
            assert by_split(list(model.parameters())) == [[0, 1]]
        finally:
            dist.destroy_process_group()


def parameter(ranks: list[list[int]], place: list[int], *placements: object) -> SimpleNamespace:
    """A parameter on the mesh ``ranks``, in which this rank is at ``place``."""
    mesh = SimpleNamespace(mesh=torch.tensor(ranks), get_coordinate=lambda: place)
    return SimpleNamespace(device_mesh=mesh, placements=placements)


def test_which_ranks_split_a_parameter() -> None:
    """Meshes with the ranks in another order are alike if they split over the same ranks."""
    replicate, shard = Replicate(), Shard(0)
    parameters = [
        parameter([[0, 1], [2, 3]], [1, 0], replicate, shard),  # over 2 and 3
        parameter([[3, 2], [1, 0]], [0, 1], replicate, shard),
        parameter([[2, 0], [3, 1]], [0, 0], shard, replicate),
        parameter([[0, 1], [2, 3]], [1, 0], shard, replicate),  # over 0 and 2
        parameter([[0, 1], [2, 3]], [1, 0], shard, Shard(1)),  # over both
        parameter([[0, 1], [2, 3]], [1, 0], replicate, replicate),
        SimpleNamespace(),  # a plain tensor: this rank has all of it
    ]
    assert by_split(parameters) == [[0, 1, 2], [3], [4], [5, 6]]
