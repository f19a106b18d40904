"""States in one buffer per entry: the same bits, and checkpoints and copies of the same size."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from torch import nn
from tritoncomm.step.rules import adam
from tritoncomm.step.rules.adam import StalenessAwareAdam
from tritoncomm.step.tensors.shared_buffer import share_buffers

SHAPES = [(40, 50), (7,), (200, 100), (), (30, 20)]
NAMES = ("exp_avg", "exp_avg_sq", "last_delivered")


def moved(tensors: list[torch.Tensor]) -> bool:
    """Return whether share_buffers() moves ``tensors`` into one buffer, and check that values and shapes are kept."""
    states = [{"a": tensor, "b": 1} for tensor in tensors]
    share_buffers(states, ["a"])
    assert all(torch.equal(state["a"], tensor) for state, tensor in zip(states, tensors, strict=True))
    return len({state["a"].untyped_storage().data_ptr() for state in states}) == 1


def test_tensors_of_one_kind_are_moved() -> None:
    """Contiguous tensors of one dtype become parts of one buffer, empty ones and scalars too."""
    assert moved([torch.ones(3, 4), torch.tensor(2.0), torch.zeros(0), torch.arange(5.0)])
    assert moved([torch.arange(3, dtype=torch.int32), torch.arange(4, dtype=torch.int32)])


@pytest.mark.parametrize(
    "other",
    [
        torch.ones(4, dtype=torch.float64),
        torch.ones(4, 2).t(),
        torch.ones(8)[:4],
        torch.ones(4, device="meta"),
        nn.Parameter(torch.ones(4)),
        torch.ones(4).share_memory_(),
    ],
    ids=["dtype", "strides", "view", "device", "class", "memory of several processes"],
)
def test_other_tensors_stay(other: torch.Tensor) -> None:
    """If one tensor cannot be moved, all tensors of its name stay where they are."""
    states = [{"a": tensor} for tensor in (torch.ones(2), other)]
    before = [state["a"] for state in states]
    share_buffers(states, ["a"])
    assert all(state["a"] is tensor for state, tensor in zip(states, before, strict=True))


def parameters() -> list[nn.Parameter]:
    """Return parameters with fixed values."""
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]


def train(optimizer: torch.optim.Optimizer, first: int, last: int, *, subsets: bool = False) -> None:
    """Take steps with random deliveries. With ``subsets``, some parameters have no gradient in some steps."""
    aware = StalenessAwareAdam(optimizer)
    own = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for step in range(first, last):
        generator, delivered = torch.Generator().manual_seed(step), []
        for number, parameter in enumerate(own):
            absent = subsets and (step + number) % 3 == 0
            parameter.grad = None if absent else torch.randn(parameter.shape, generator=generator)
            chosen = (torch.rand(parameter.numel(), generator=generator) < 0.1).nonzero().squeeze(1)
            delivered.append(None if step % 4 == 0 or number % 2 else chosen)
        aware.step(own, delivered)


def held(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return all parameters and states."""
    own = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return [tensor for p in own for tensor in (p.detach(), *optimizer.state[p].values())]


def shares(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether each entry has one buffer."""
    states = list(optimizer.state.values())
    return all(len({state[name].untyped_storage().data_ptr() for state in states}) == 1 for name in NAMES)


@pytest.mark.parametrize("options", [{}, {"amsgrad": True}], ids=["plain", "amsgrad"])
@pytest.mark.parametrize("subsets", [False, True])
def test_same_bits(options: dict[str, Any], subsets: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Buffers do not change a bit, for sparse, dense and mixed deliveries and changing sets of parameters."""
    results = []
    for together in (True, False):
        if not together:
            monkeypatch.setattr(adam, "share_buffers", lambda *_: None)
        optimizer = torch.optim.AdamW(parameters(), lr=0.01, **options)
        train(optimizer, 0, 1)
        train(optimizer, 1, 12, subsets=subsets)
        assert shares(optimizer) == together
        results.append(held(optimizer))
    assert all(map(torch.equal, *results))


def saved(optimizer: torch.optim.Optimizer) -> io.BytesIO:
    """Return a checkpoint."""
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    return file


@pytest.mark.parametrize("way", ["load", "deepcopy"])
def test_checkpoints_and_copies(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint is not larger than with separate tensors. What is loaded or copied is independent and continues."""
    optimizer = torch.optim.AdamW(parameters(), lr=0.01)
    train(optimizer, 0, 5)
    assert shares(optimizer)
    with monkeypatch.context() as patch:
        patch.setattr(adam, "share_buffers", lambda *_: None)
        apart = torch.optim.AdamW(parameters(), lr=0.01)
        train(apart, 0, 5)
    assert len(saved(optimizer).getvalue()) <= len(saved(apart).getvalue())
    if way == "deepcopy":
        other = copy.deepcopy(optimizer)
    else:
        other = torch.optim.AdamW([nn.Parameter(p.detach().clone()) for p in optimizer.param_groups[0]["params"]])
        state = torch.load(saved(optimizer))
        other.load_state_dict(state)
        StalenessAwareAdam.restore(other, state)
    before = [tensor.clone() for tensor in held(optimizer)]
    train(other, 5, 9)
    assert shares(other)
    assert all(map(torch.equal, held(optimizer), before)), "memory is not shared with the copy"
    train(optimizer, 5, 9)
    assert all(map(torch.equal, held(optimizer), held(other)))
