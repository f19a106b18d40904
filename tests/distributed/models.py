"""Modules for tests between processes: plain, in DDP, or sharded by FSDP2, and their wrapped optimizers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import tritoncomm
from kit import everywhere
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from tritoncomm import PeerLostError, Recipe, SparseOptimizer
from tritoncomm.algorithms import staged
from tritoncomm.checkpoint import ResidualState
from tritoncomm.scheduler import failure_report
from tritoncomm.step.exchange import feedback
from tritoncomm.step.tensors.shards import local

import laws

KINDS = ("plain", "ddp", "fsdp")
# The first step is sparse, and nothing is rounded, so that results are equal to the bit.
EXACT = {"dense_below": 0, "warmup_steps": 0, "small": "fp32"}


def exact(optimizer: Any, algo: str | Recipe = "oktopk", **fields: Any) -> SparseOptimizer:
    """Wrap ``optimizer`` so that nothing is rounded, and the first step is sparse."""
    if isinstance(algo, str) and algo != "dense":
        own = {name: fields.pop(name) for name in ("density", "values", "static") if name in fields}
        algo = tritoncomm.recipe(algo, **{"density": 0.2} | own)
    return tritoncomm.wrap(optimizer, algo, **EXACT | fields)


@contextmanager
def renewed_every(steps: int) -> Iterator[None]:
    """Let scales of optimizers that are wrapped here, and norms of parameters, be renewed after so many steps."""
    kind = staged.Scale
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(feedback, "RENEW_RMS_EVERY", steps)
        patch.setattr(staged, "Scale", lambda matrices, decay, _, epsilon: kind(matrices, decay, steps, epsilon))
        yield


@contextmanager
def unconfirmed(optimizer: SparseOptimizer, *, cuts: bool = False) -> Iterator[None]:
    """Let this rank lose rank 2 at the end of the confirmation in the body, which all the others complete.

    If it ``cuts`` its connections, as a rank does that loses another one, the others learn of it.
    """
    exchange = optimizer._tritoncomm.setup.exchange
    confirm = exchange._confirm

    def lost() -> None:
        confirm()
        if cuts:
            failure_report.cut_connections(None)
        raise PeerLostError("lost rank 2", [2])

    exchange._confirm = lost
    with pytest.raises(PeerLostError):
        yield
    del exchange._confirm


def adamw(model: nn.Module, **fields: Any) -> torch.optim.AdamW:
    """Return AdamW with settings at which sparse steps matter."""
    return torch.optim.AdamW(model.parameters(), **{"lr": 0.01, "weight_decay": 0.1} | fields)


def sgd(model: nn.Module, **fields: Any) -> torch.optim.SGD:
    """Return SGD with momentum."""
    return torch.optim.SGD(model.parameters(), **{"lr": 0.1, "momentum": 0.9} | fields)


def net(seed: int = 0) -> nn.Sequential:
    """Return a model that fills several small buckets of DDP."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 40), nn.Tanh(), nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 3))


def tiny(seed: int = 0) -> nn.Sequential:
    """Return a model with an unused parameter and a frozen one."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 20), nn.Tanh(), nn.Linear(20, 3))
    model.unused = nn.Parameter(torch.ones(5))
    model.frozen = nn.Parameter(torch.ones(4), requires_grad=False)
    return model


class Uneven(nn.Module):
    """A model whose shapes two shards do not divide, with a layer that may stay unused."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(6, 9)
        self.spare = nn.Linear(9, 9)
        self.head = nn.Linear(9, 3)

    def forward(self, x: torch.Tensor, spare: bool = True) -> torch.Tensor:
        """Run with or without the spare layer."""
        x = torch.tanh(self.first(x))
        return self.head(self.spare(x) if spare else x)


def ddp(model: nn.Module, **fields: Any) -> DistributedDataParallel:
    """Put a model into DDP with small buckets."""
    return DistributedDataParallel(model, **{"bucket_cap_mb": 0.003} | fields)


def mesh(shards: int = 2) -> DeviceMesh:
    """Return a mesh of replicas of so many shards."""
    shape = (dist.get_world_size() // shards, shards)
    return init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))


def sharded(model: nn.Module, over: DeviceMesh, **fields: Any) -> nn.Module:
    """Shard every layer as a group of its own, and the rest, as the head of :class:`Uneven`, as another group."""
    layers = [model.first, model.spare] if isinstance(model, Uneven) else model.children()
    for layer in layers:
        if list(layer.parameters()):
            fully_shard(layer, mesh=over["shard"], **fields)
    return fully_shard(model, mesh=over["shard"], **fields)


def opened(
    kind: str, model: nn.Module, shards: int = 1, over: DeviceMesh | None = None, **fields: Any
) -> tuple[nn.Module, dict[str, Any]]:
    """Return ``model`` as a module of the kind, and the arguments of ``wrap`` that belong to it.

    ``over`` is another mesh than that of :func:`mesh`, and ``fields`` are options of DDP.
    """
    if kind == "ddp":
        outer = ddp(model, **fields)
        return outer, {"model": outer}
    if kind == "fsdp":
        over = mesh(shards) if over is None else over
        return sharded(model, over), {"model": model, "process_group": over["replicate"].get_group()}
    return model, {}


def loss_of(model: nn.Module, rank: int, step: int, **fields: Any) -> torch.Tensor:
    """Return the loss of a batch that depends on rank and step."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    x, y = torch.randn(8, 6, generator=generator), torch.randn(8, 3, generator=generator)
    return (model(x, **fields) - y).square().mean()


def train(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, steps: Iterable[int]) -> None:
    """Take ``steps``."""
    for step in steps:
        optimizer.zero_grad()
        loss_of(model, rank, step).backward()
        optimizer.step()


def flat(parameters: nn.Module | Iterable[torch.Tensor]) -> torch.Tensor:
    """Return a copy of this rank's values of all parameters as one vector."""
    tensors = parameters.parameters() if isinstance(parameters, nn.Module) else parameters
    return torch.cat([local(each.detach()).reshape(-1).float() for each in tensors]).clone()


def gradients(model: nn.Module) -> torch.Tensor:
    """Return a copy of this rank's values of all gradients as one vector."""
    return flat(each.grad for each in model.parameters() if each.grad is not None)


def equal(model: nn.Module | Iterable[torch.Tensor], group: dist.ProcessGroup | None = None) -> bool:
    """Return whether all ranks of ``group`` have the same bits."""
    return same(flat(model).numpy().tobytes(), group)


def same(value: object, group: dist.ProcessGroup | None = None) -> bool:
    """Return whether all ranks of ``group`` have the same value."""
    first, *others = everywhere(value, group)
    return all(other == first for other in others)


def total(x: torch.Tensor, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """Return the sum over ranks."""
    y = x.clone()
    dist.all_reduce(y, group=group)
    return y


def residual(optimizer: SparseOptimizer) -> torch.Tensor:
    """Return a copy of this rank's residual."""
    return torch.cat([vector.feedback.residual for vector in optimizer._tritoncomm.setup.scope.vectors]).clone()


def muon(model: nn.Module) -> list[torch.optim.Optimizer]:
    """Return Muon for matrices, which has no rule for late gradients, and AdamW for the rest, which has one."""
    matrices = [p for p in model.parameters() if p.dim() > 1]
    rest = [p for p in model.parameters() if p.dim() == 1]
    return [torch.optim.Muon(matrices, lr=0.05, weight_decay=0.0), torch.optim.AdamW(rest, lr=0.02)]


def content(model: nn.Module, optimizer: SparseOptimizer, **fields: Any) -> dict[str, Any]:
    """Return what torch.distributed.checkpoint saves and loads."""
    weights, state = get_state_dict(model, optimizer)
    return {"model": weights, "optimizer": state, "residuals": ResidualState(optimizer, **fields)}


def load(model: nn.Module, optimizer: SparseOptimizer, path: Path, **fields: Any) -> None:
    """Resume as docs/how-to/checkpoints.md shows."""
    state = content(model, optimizer, **fields)
    dcp.load(state, checkpoint_id=path)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])


class Pair:
    """A plain module, and the same module in DDP: each has an optimizer, and they train alike to the bit.

    Args:
        make: Returns the module.
        optimizer: Returns the optimizer of a module.
        settings: Arguments of :func:`exact`.
        **fields: Arguments of ``DistributedDataParallel``.
    """

    def __init__(
        self,
        make: Callable[[], nn.Module] = net,
        optimizer: Callable[[nn.Module], torch.optim.Optimizer] = adamw,
        settings: dict[str, Any] = {},  # noqa: B006 - it is not changed
        **fields: Any,
    ) -> None:
        self.plain = make()
        self.model = ddp(make(), **fields)
        self.of_plain = exact(optimizer(self.plain), **settings)
        self.of_model = exact(optimizer(self.model), **settings, model=self.model)

    @property
    def both(self) -> tuple[tuple[nn.Module, SparseOptimizer], ...]:
        """Each module with its optimizer."""
        return (self.plain, self.of_plain), (self.model, self.of_model)

    def step(self, backward: Callable[[nn.Module], object], *, set_to_none: bool = True) -> None:
        """Take a step of both with the gradients that ``backward`` computes, and compare."""
        for model, optimizer in self.both:
            optimizer.zero_grad(set_to_none=set_to_none)
            backward(model)
            optimizer.step()
        self.check()

    def check(self) -> None:
        """Raise if parameters, residuals or the number of steps differ."""
        assert torch.equal(flat(self.plain), flat(self.model))
        assert laws.same_bits(residual(self.of_plain), residual(self.of_model))
        counts = [[each.metrics()[name] for name in ("steps", "skipped_steps")] for _, each in self.both]
        assert counts[0] == counts[1]


class Shards:
    """A sharded model and plain parameters of the same shards, which train alike to the bit.

    Args:
        model: A model that is sharded.
        group: The replicas of this rank.
        optimizer: Returns the optimizer of a module.
        settings: Arguments of :func:`exact`.
    """

    def __init__(
        self,
        model: nn.Module,
        group: dist.ProcessGroup,
        optimizer: Callable[[nn.Module], torch.optim.Optimizer] = adamw,
        **settings: Any,
    ) -> None:
        self.model, self.parameters = model, list(model.parameters())  # the model may hold others after a pass
        self.plain = nn.ParameterList([nn.Parameter(local(p.detach()).clone()) for p in self.parameters])
        self.optimizer = exact(optimizer(model), model=model, process_group=group, **settings)
        self.of_plain = exact(optimizer(self.plain), process_group=group, **settings)

    def take(self) -> None:
        """Take a step of both with the present gradients of the model, which are this replica's own, and compare."""
        for plain, parameter in zip(self.plain, self.parameters, strict=True):
            plain.grad = None if parameter.grad is None else local(parameter.grad).clone()
        self.optimizer.step()
        self.of_plain.step()
        assert torch.equal(flat(self.parameters), flat(self.plain))
        assert laws.same_bits(residual(self.optimizer), residual(self.of_plain))
        assert self.optimizer.metrics()["steps"] == self.of_plain.metrics()["steps"]
