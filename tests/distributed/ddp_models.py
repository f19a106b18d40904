"""Models behind DDP with several small buckets, and the residuals of its hook."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def net(seed: int = 0) -> nn.Module:
    """Return a model that fills several small buckets."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 40), nn.Tanh(), nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 3))


class HeadFirst(nn.Module):
    """Registers its last layer first. When DDP rebuilds its buckets, the first of them then has the first parameter."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.head, self.one, self.two = nn.Linear(40, 3), nn.Linear(6, 40), nn.Linear(40, 40)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the output."""
        return self.head(self.two(self.one(x).tanh()).tanh())


def ddp(model: nn.Module, **fields) -> DistributedDataParallel:
    """Wrap a model in DDP with small buckets."""
    return DistributedDataParallel(model, bucket_cap_mb=0.003, **fields)
