"""Worker processes of tests/distributed/test_model_laws.py: runs of DDP and FSDP2 with prescribed gradients."""

from __future__ import annotations

import copy
import math
from functools import cache
from typing import Any, NamedTuple

import torch
import tritoncomm
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from tritoncomm import Recipe, SparseVector
from tritoncomm.scheduler.cost import Forecast
from tritoncomm.scheduler.meter import Meter
from tritoncomm.step import settings as options
from tritoncomm.step.exchange.stages import Staged
from tritoncomm.step.tensors.shards import local

import laws

SHARDS = 2  # of FSDP, if the number of ranks is even


class Setup(NamedTuple):
    """One run: a kind of module, a recipe, the shapes of the parameters, and the families of gradients of its steps.

    Each shard of FSDP has the shapes ``shapes[0]`` if there is one shape. Otherwise shards may differ in size.
    """

    kind: str
    recipe: Recipe
    shapes: tuple[tuple[int, ...], ...]
    families: tuple[str, ...]
    optimizer: str = "SGD"
    dense_below: int = 0
    small: str = "fp32"

    @property
    def is_one_tensor(self) -> bool:
        """Whether the model has one parameter, so that the recipe alone decides what is sent."""
        return len(self.shapes) == 1

    @property
    def whole(self) -> Recipe:
        """The recipe of the flat vector, with what ``wrap`` adds to it."""
        return Staged(recipe=self.recipe, shapes=self.shapes if self.optimizer == "AdamW" else None)

    def shards(self, world_size: int) -> int:
        """Return the number of ranks that share one copy of the parameters."""
        return SHARDS if self.kind == "fsdp" and world_size % SHARDS == 0 else 1

    def global_shapes(self, world_size: int) -> list[tuple[int, ...]]:
        """Return the shapes of the unsharded parameters."""
        if not self.is_one_tensor:
            return list(self.shapes)
        ((rows, *columns),) = self.shapes
        return [(rows * self.shards(world_size), *columns)]


class Seen(NamedTuple):
    """One step on one rank: the prescribed gradient, and what ``step()`` made of it.

    With several parameters, values are in the order of the parameters, and the fields after ``after`` are None.
    """

    gradient: torch.Tensor
    before: torch.Tensor
    mean: SparseVector
    after: torch.Tensor
    state: Any = None
    saved: Any = None
    allowed: Forecast | None = None
    meter: Meter | None = None


class Part(nn.Module):
    """A parameter of zeros whose gradient is the input."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(shape))

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        """Return a loss that has the gradient ``given``."""
        return (self.weight * given).sum()


class Prescribed(nn.Module):
    """Parameters whose gradients are the inputs."""

    def __init__(self, shapes: list[tuple[int, ...]]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(map(Part, shapes))

    def forward(self, given: list[torch.Tensor]) -> torch.Tensor:
        """Return a loss that has the gradients ``given``."""
        return torch.stack([part(one) for part, one in zip(self.parts, given, strict=True)]).sum()


@cache
def mesh_of(replicas: int, shards: int) -> DeviceMesh:
    """Return the mesh of all ranks. It is created once, because process groups are never freed."""
    return init_device_mesh("cpu", (replicas, shards), mesh_dim_names=("replicate", "shard"))


class Trained:
    """A model, and its wrapped optimizer, on one rank."""

    def __init__(self, setup: Setup, rank: int, world_size: int) -> None:
        self.setup, self.rank = setup, rank
        self.shards = setup.shards(world_size)
        self.shapes = setup.global_shapes(world_size)
        self.module = Prescribed(self.shapes)
        settings: dict[str, Any] = {
            "algo": setup.recipe,
            "dense_below": setup.dense_below,
            "small": setup.small,
            "warmup_steps": 0,
        }
        if setup.kind == "ddp":
            self.model: nn.Module = DistributedDataParallel(self.module)
        else:
            mesh = mesh_of(world_size // self.shards, self.shards)
            for part in self.module.parts:
                fully_shard(part, mesh=mesh["shard"])
            self.model = fully_shard(self.module, mesh=mesh["shard"])
            settings["process_group"] = mesh["replicate"].get_group()
        kind = getattr(torch.optim, setup.optimizer)
        self.optimizer = tritoncomm.wrap(kind(self.model.parameters(), lr=1.0), model=self.model, **settings)

    def step(self, given: torch.Tensor) -> SparseVector:
        """Take a step with the gradient ``given``, a flat vector. Return the mean of this rank's shards."""
        self.optimizer.zero_grad()
        split = given.split([math.prod(shape) for shape in self.shapes])
        self.model([part.view(shape) for part, shape in zip(split, self.shapes, strict=True)]).backward()
        self.optimizer.synchronize()
        gradient, delivered = (
            self.flat([p.grad for p in self.model.parameters()]),
            self.optimizer._tritoncomm.setup.exchange.delivered,
        )
        mean = sparse(gradient)
        if self.setup.is_one_tensor and delivered is not None:  # it may have entries of zero
            mean = delivered[0].mean.trimmed()
            mean = SparseVector(mean.indices.clone(), mean.values.clone(), mean.numel)
            assert torch.equal(mean.to_dense(), gradient), self.setup
        self.optimizer.step()
        return mean

    def flat(self, tensors: list[torch.Tensor]) -> torch.Tensor:
        """Return a copy of this rank's shards of ``tensors`` as a flat vector."""
        return torch.cat([local(tensor.detach()).reshape(-1) for tensor in tensors]).clone()

    def parameters(self) -> torch.Tensor:
        """Return a copy of this rank's shards of the parameters."""
        return self.flat(list(self.model.parameters()))

    def residual(self) -> torch.Tensor:
        """Return a copy of this rank's residual in the order of the parameters."""
        parts = self.optimizer._tritoncomm.setup.vector.residuals_by_parameter()
        return torch.cat([parts[p] for p in self.model.parameters()])

    def state(self) -> Any:
        """Return a copy of the state of the method."""
        return copy.deepcopy(self.optimizer._tritoncomm.setup.vector.feedback.algorithm.state)

    def prescribed(self, given: torch.Tensor) -> torch.Tensor:
        """Return this rank's shard of the gradient, from the gradients of all ranks. FSDP averages over the shards."""
        position = self.rank % self.shards
        own = given[self.rank - position :][: self.shards].mean(0).split([math.prod(shape) for shape in self.shapes])
        chunks = [part.view(shape).chunk(self.shards) for part, shape in zip(own, self.shapes, strict=True)]
        return torch.cat([chunk[position].reshape(-1) for chunk in chunks if position < len(chunk)])


def record(rank: int, world_size: int, send, setups: list[Setup]) -> list[list[Seen]]:
    """Record the runs of ``setups``."""
    # A single worker selects entries and keeps a residual, as in simulation: the laws would say little otherwise.
    options.SINGLE_WORKER_SELECTS = True
    return [recorded(rank, world_size, setup) for setup in setups]


def recorded(rank: int, world_size: int, setup: Setup) -> list[Seen]:
    """Record one run. One of its steps is rejected first, and before another one it is resumed from a saved state."""
    trained, seen = Trained(setup, rank, world_size), []
    numel = sum(math.prod(shape) for shape in trained.shapes)
    # The fourth step is the first that reuses the thresholds of Ok-Topk.
    rejected, resumed = max(len(setup.families) // 3, min(3, len(setup.families) // 2)), len(setup.families) * 2 // 3
    for step, given in enumerate(laws.Case(world_size, numel, setup.families, seed=world_size).gradients()):
        if step == rejected:
            rejects_nan(trained, given, step % world_size)
        if step == resumed:
            trained = resume(trained, rank, world_size)
        before = trained.residual()
        if not setup.is_one_tensor:
            mean = trained.step(given[rank])
            seen.append(Seen(trained.prescribed(given), before, mean, trained.residual()))
            continue
        feedback = trained.optimizer._tritoncomm.setup.vector.feedback
        saved = copy.deepcopy(feedback.state_dict())
        allowed = feedback.algorithm.predicted_traffic(world_size // trained.shards)
        mean, meter = trained.step(given[rank]), copy.deepcopy(trained.optimizer._tritoncomm.setup.vector.meter)
        seen.append(
            Seen(trained.prescribed(given), before, mean, trained.residual(), trained.state(), saved, allowed, meter)
        )
    if setup.optimizer == "SGD":  # with learning rate 1, from zero
        assert torch.equal(trained.parameters(), -sum(step.mean.to_dense() for step in seen)), setup
    return seen


def sparse(dense: torch.Tensor) -> SparseVector:
    """Return the entries of ``dense`` that are not zero."""
    indices = dense.nonzero().reshape(-1)
    return SparseVector(indices.to(torch.int32), dense[indices], dense.numel())


def rejects_nan(trained: Trained, given: torch.Tensor, bad: int) -> None:
    """After a NaN on rank ``bad``, every rank skips the step, and nothing else changes."""
    poisoned = given[trained.rank].clone()
    if trained.rank == bad:
        poisoned[len(poisoned) // 2] = math.nan
    parameters, residual, state = trained.parameters(), trained.residual(), trained.state()
    skipped = trained.optimizer.metrics()["skipped_steps"]
    trained.step(poisoned)
    assert trained.optimizer.metrics()["skipped_steps"] == skipped + 1, trained.setup
    assert laws.same_bits(trained.parameters(), parameters), trained.setup
    assert laws.same_bits(trained.residual(), residual), trained.setup
    assert trained.state() == state, trained.setup


def resume(trained: Trained, rank: int, world_size: int) -> Trained:
    """Return a new model and a new optimizer with the parameters and the saved state of ``trained``."""
    again = Trained(trained.setup, rank, world_size)
    with torch.no_grad():
        for new, old in zip(again.model.parameters(), trained.model.parameters(), strict=True):
            local(new).copy_(local(old))
    again.optimizer.load_state_dict(copy.deepcopy(trained.optimizer.state_dict()))
    return again
