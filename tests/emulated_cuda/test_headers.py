"""Wrong headers on emulated GPUs: they are counted on the device, and some message of the same step reports them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import tritoncomm
from tritoncomm import Hierarchical, Recipe, SparDL
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


@pytest.mark.parametrize("kind", ["plain", "fsdp"])
def test_step(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The confirmation of a step reports them, and so does the verdict of all shards. Nothing is applied."""
    is_wrong: set[bool] = set()
    corrupt(monkeypatch, lambda frame: bool(is_wrong))

    def train(rank: int) -> None:
        model, given = doors.grouped("cuda") if kind == "fsdp" else (doors.model_on("cuda"), {})
        fields = {"density": 0.1, "warmup_steps": 0, "dense_below": 5, "static": False}
        optimizer = tritoncomm.wrap(torch.optim.SGD(model.parameters(), lr=0.1), "spardl", **fields, **given)
        for step in range(3):
            if step == 2:
                ranks.meet()
                is_wrong.add(True)
            optimizer.zero_grad()
            doors.loss_of(model, rank, step, "cuda").backward()
            optimizer.step()
            assert step < 2, "the step was applied"

    with pytest.raises(ranks.RankError, match=r"ProtocolMismatchError.*message of another step"):
        ranks.run(train, 4, seed=None)
