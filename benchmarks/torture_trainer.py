"""A small model that ``torture.py`` trains with each library, and with this one in each kind of module."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import tritoncomm
import tritoncomm.checkpoint
import tritoncomm.step.agree
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from tritoncomm.step.shards import local

# This library with a plain module, with DDP, and with FSDP2 and as many replicas as workers.
OURS = WRAP, WRAP_DDP, WRAP_FSDP = "tritoncomm", "tritoncomm, DDP", "tritoncomm, FSDP2"
WORKERS = 3
VICTIM = 1
TIMEOUT = 4


class Net(nn.Module):
    """Two layers, of which the last may stay unused."""

    def __init__(self, numel: int) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, numel), nn.Linear(numel, 4)

    def forward(self, x: torch.Tensor, *, whole: bool = True) -> torch.Tensor:
        """Run both layers, or only the first if not ``whole``."""
        x = torch.relu(self.first(x))
        return self.last(x) if whole else x


def opened(model: nn.Module, library: str, *, unused: bool = False) -> tuple[nn.Module, dict[str, Any]]:
    """Return ``model`` in the kind of module of ``library``, and the arguments of ``wrap`` for it.

    If ``unused`` is set, a pass may leave parameters unused.
    """
    if library == WRAP_DDP:
        net = DistributedDataParallel(model, find_unused_parameters=unused)
        return net, {"model": net}
    if library == WRAP_FSDP:
        mesh = dist.device_mesh.init_device_mesh("cpu", (WORKERS, 1), mesh_dim_names=("replicate", "shard"))
        net = fully_shard(model, mesh=mesh["shard"])
        return net, {"model": net, "process_group": mesh["replicate"].get_group()}
    return model, {"model": model}


class Trainer:
    """A small model trained with one of the libraries. A step is forward, backward, exchange and update."""

    def __init__(
        self,
        library: str,
        rank: int,
        *,
        numel: int = 64,
        algo: str = "oktopk",
        density: float = 0.1,
        unused: bool = False,
    ) -> None:
        torch.manual_seed(0)
        self.model = Net(numel)
        self.library = library
        self.rank = rank
        self.state: Any = None
        self.net, arguments = opened(self.model, library, unused=unused)
        self.optimizer: torch.optim.Optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05)
        if library in OURS:
            self.optimizer = tritoncomm.wrap(
                self.optimizer, algo, density=density, dense_below=0, timeout=timedelta(seconds=TIMEOUT), **arguments
            )
        else:
            self.net = DistributedDataParallel(self.model)
            if library == "PowerSGD":
                self.state = PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2)
                self.net.register_comm_hook(self.state, powerSGD_hook)

    def loss(self, step: int) -> torch.Tensor:
        """Return the loss on a batch that depends on rank and step."""
        x = torch.randn(8, 16, generator=torch.Generator().manual_seed(100 * step + self.rank))
        return self.net(x).square().mean()

    def step(self, step: int, factor: float = 1.0) -> None:
        """Take one step. The loss is multiplied by ``factor``."""
        self.optimizer.zero_grad()
        (self.loss(step) * factor).backward()
        self.optimizer.step()

    def residual(self) -> torch.Tensor | None:
        """Return the residual as a flat tensor, or None if the library has none."""
        if isinstance(self.optimizer, tritoncomm.SparseOptimizer):
            return torch.cat(self.optimizer.state_dict()["tritoncomm"]["residuals"])
        if self.state is not None and self.state.error_dict:
            return torch.cat([error.reshape(-1) for error in self.state.error_dict.values()])
        return None

    def parameters(self) -> list[torch.Tensor]:
        """Return this rank's parameters, or its shards of them."""
        return [local(p.detach()) for p in self.model.parameters()]

    def finite(self) -> bool:
        """Return whether parameters and residual are finite."""
        residual = self.residual()
        return all(bool(p.isfinite().all()) for p in self.parameters()) and (
            residual is None or bool(residual.isfinite().all())
        )

    def ranks_agree(self) -> bool:
        """Return whether all ranks hold the same parameters."""
        everybody: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everybody, [p.tolist() for p in self.parameters()])
        return all(other == everybody[0] for other in everybody)
