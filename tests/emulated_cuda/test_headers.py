"""Wrong headers on emulated GPUs: they are counted on the device, and some message of the same step reports them."""

from __future__ import annotations

import pytest
import torch
import tritoncomm
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from tritoncomm import Hierarchical, Recipe, SparDL, fsdp
from tritoncomm.scheduler import wire

from emulated_cuda import doors, exchanges, ranks


@pytest.fixture(autouse=True)
def _wrong_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Send headers with the number of another step."""
    right = wire.framed_on_device

    def wrong(payload: torch.Tensor, frame: wire.Frame) -> torch.Tensor:
        message = right(payload, frame)
        message[:1].add_(7)
        return message

    monkeypatch.setattr(wire, "framed_on_device", wrong)


@pytest.mark.parametrize(
    "recipe", [SparDL(density=0.2), Hierarchical(recipe=SparDL(density=0.2), node_size=2)], ids=["flat", "nodes"]
)
def test_exchange(recipe: Recipe) -> None:
    """The confirmation reports them, also those of subgroups."""
    with pytest.raises(ranks.RankError, match="message of another step"):
        exchanges.emulated(recipe, exchanges.gradients(4, 60, 2))


def test_shards() -> None:
    """The verdict of all shards reports them."""

    def train(rank: int) -> None:
        mesh = init_device_mesh("cuda", (2, 2), mesh_dim_names=("replicate", "shard"))
        model = doors.model_on("cuda")
        for layer in model:
            if list(layer.parameters()):
                fully_shard(layer, mesh=mesh["shard"])
        fully_shard(model, mesh=mesh["shard"])
        group = mesh["replicate"].get_group()
        fsdp.register(model, group, "spardl", density=0.1, warmup_steps=0, dense_below=5, static=False)
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = tritoncomm.wrap(inner, model=model, process_group=group)
        for step in range(2):
            optimizer.zero_grad()
            doors.loss_of(model, rank, step, "cuda").backward()
            optimizer.step()

    with pytest.raises(ranks.RankError, match="message of another step"):
        ranks.run(train, 4, seed=None)
