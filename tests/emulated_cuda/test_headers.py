"""Wrong headers on emulated GPUs: they are counted on the device, and some message of the same step reports them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import tritoncomm
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from tritoncomm import Hierarchical, Recipe, SparDL, fsdp
from tritoncomm.ddp import CommState, comm_hook
from tritoncomm.scheduler import wire

from emulated_cuda import doors, exchanges, ranks


def corrupt(monkeypatch: pytest.MonkeyPatch, chosen: Callable[[wire.Frame], bool] = lambda frame: True) -> None:
    """Send the ``chosen`` messages with the number of another step."""
    right = wire.framed_on_device

    def wrong(payload: torch.Tensor, frame: wire.Frame) -> torch.Tensor:
        message = right(payload, frame)
        if chosen(frame):
            message[:1].add_(7)
        return message

    monkeypatch.setattr(wire, "framed_on_device", wrong)


@pytest.mark.parametrize(
    "recipe", [SparDL(density=0.2), Hierarchical(recipe=SparDL(density=0.2), node_size=2)], ids=["flat", "nodes"]
)
def test_exchange(recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    """The confirmation reports them, also those of subgroups."""
    corrupt(monkeypatch)
    with pytest.raises(ranks.RankError, match="message of another step"):
        exchanges.emulated(recipe, exchanges.gradients(4, 60, 2))


@pytest.mark.parametrize("bucket", range(3))
def test_buckets(bucket: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The confirmation of a backward pass reports them, whatever bucket of DDP they belong to."""
    stamps: set[int | None] = set()
    corrupt(monkeypatch, lambda frame: frame.stamp in stamps)

    def train(rank: int) -> None:
        model = doors.model_on("cuda")
        state = CommState(None, "spardl", density=0.1, warmup_steps=0, dense_below=5, static=False)
        state.name(dict(model.named_parameters()))
        state.reducer = doors.PythonReducer(model, state, comm_hook, 3)
        for step in range(3):
            if step == 2:
                stamps.add(state.exchange.vectors[bucket].scheduler._stamp)
            model.zero_grad()
            doors.loss_of(model, rank, step, "cuda").backward()
            assert step < 2, "the step was committed"

    with pytest.raises(ranks.RankError, match=r"ProtocolMismatchError.*message of another step"):
        ranks.run(train, 4, seed=None)


def test_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    """The verdict of all shards reports them."""
    corrupt(monkeypatch)

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
