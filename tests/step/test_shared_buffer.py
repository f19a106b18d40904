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

from aged import Aged

SHAPES = [(40, 50), (7,), (200, 100), (), (30, 20)]
NAMES = ("exp_avg", "exp_avg_sq")


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


def aged(optimizer: torch.optim.Optimizer) -> Aged:
    """Return the rule of ``optimizer``."""
    return Aged(StalenessAwareAdam(optimizer))


def own_of(aware: Aged) -> list[torch.Tensor]:
    """Return the parameters."""
    return [parameter for group in aware.optimizer.param_groups for parameter in group["params"]]


def train(aware: Aged, first: int, last: int, *, subsets: bool = False) -> None:
    """Take steps with random deliveries. With ``subsets``, some parameters have no gradient in some steps."""
    own = own_of(aware)
    for step in range(first, last):
        generator, delivered = torch.Generator().manual_seed(step), []
        for number, parameter in enumerate(own):
            absent = subsets and (step + number) % 3 == 0
            parameter.grad = None if absent else torch.randn(parameter.shape, generator=generator)
            chosen = (torch.rand(parameter.numel(), generator=generator) < 0.1).nonzero().squeeze(1)
            delivered.append(None if step % 4 == 0 or number % 2 else chosen)
        aware.step(own, delivered)


def held(aware: Aged) -> list[torch.Tensor]:
    """Return all parameters, states and ages."""
    of_state = aware.optimizer.state
    return [tensor for p in own_of(aware) for tensor in (p.detach(), *of_state[p].values(), *aware.ages(p))]


def shares(aware: Aged) -> bool:
    """Return whether each entry has one buffer."""
    states = list(aware.optimizer.state.values())
    return all(len({state[name].untyped_storage().data_ptr() for state in states}) == 1 for name in NAMES)


@pytest.mark.parametrize("options", [{}, {"amsgrad": True}], ids=["plain", "amsgrad"])
@pytest.mark.parametrize("subsets", [False, True])
def test_same_bits(options: dict[str, Any], subsets: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Buffers do not change a bit, for sparse, dense and mixed deliveries and changing sets of parameters."""
    results = []
    for together in (True, False):
        if not together:
            monkeypatch.setattr(adam, "share_buffers", lambda *_: None)
        aware = aged(torch.optim.AdamW(parameters(), lr=0.01, **options))
        train(aware, 0, 1)
        train(aware, 1, 12, subsets=subsets)
        assert shares(aware) == together
        results.append(held(aware))
    assert all(map(torch.equal, *results))


def saved(aware: Aged) -> io.BytesIO:
    """Return a checkpoint."""
    file = io.BytesIO()
    torch.save(aware.optimizer.state_dict(), file)
    file.seek(0)
    return file


@pytest.mark.parametrize("way", ["load", "deepcopy"])
def test_checkpoints_and_copies(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint is not larger than with separate tensors. What is loaded or copied is independent and continues."""
    first = aged(torch.optim.AdamW(parameters(), lr=0.01))
    train(first, 0, 5)
    assert shares(first)
    with monkeypatch.context() as patch:
        patch.setattr(adam, "share_buffers", lambda *_: None)
        apart = aged(torch.optim.AdamW(parameters(), lr=0.01))
        train(apart, 0, 5)
    assert len(saved(first).getvalue()) <= len(saved(apart).getvalue())
    if way == "deepcopy":
        other = aged(copy.deepcopy(first.optimizer))
    else:
        other = aged(torch.optim.AdamW([nn.Parameter(p.detach().clone()) for p in own_of(first)]))
        other.optimizer.load_state_dict(torch.load(saved(first)))
    other.take_over(own_of(other), first, own_of(first))
    before = [tensor.clone() for tensor in held(first)]
    train(other, 5, 9)
    assert shares(other)
    assert all(map(torch.equal, held(first), before)), "memory is not shared with the copy"
    train(first, 5, 9)
    assert all(map(torch.equal, held(first), held(other)))
