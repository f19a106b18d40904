"""A small model in one process, its loss, and optimizers for it."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

import torch
import tritoncomm
from torch import nn

# The models here are small. With the default ``dense_below``, all their tensors would be sent dense.
sparse_wrap = partial(tritoncomm.wrap, dense_below=0)


def model() -> nn.Module:
    """Return a small model with fixed weights."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


def backward(net: nn.Module, seed: int = 0) -> torch.Tensor:
    """Backpropagate a loss and return it."""
    x = torch.randn(16, 4, generator=torch.Generator().manual_seed(seed))
    loss = (net(x) - x.sum(1, keepdim=True)).square().mean()
    loss.backward()
    return loss


def train(net: nn.Module, optimizer: torch.optim.Optimizer, steps: Iterable[int]) -> None:
    """Take ``steps``. The batch depends on the step."""
    for step in steps:
        optimizer.zero_grad()
        backward(net, step)
        optimizer.step()


def sgd(net: nn.Module) -> torch.optim.Optimizer:
    """Return SGD with momentum."""
    return torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
