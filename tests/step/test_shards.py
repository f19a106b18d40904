"""Which ranks share a parameter."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from tritoncomm.step.shards import by_split


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
