"""Worker processes of tests/distributed/test_tensor_parallel.py: two data ranks of two tensor ranks."""

from __future__ import annotations

import copy
import tempfile

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import tritoncomm
from fsdp_models import SETTINGS, bits
from helpers import adamw, log_lines, same_everywhere
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from tritoncomm import ConfigMismatchError, ConfigurationError, checkpoint
from tritoncomm.step.saved.state import taken_over, with_checksum


class Block(nn.Module):
    """A norm and two linear layers, as tensor parallelism splits them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm = nn.LayerNorm(8)
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Run the block."""
        return self.down(torch.relu(self.up(self.norm(x))))


def tensor_parallel(rank: int, world_size: int, send) -> None:
    """Tensor-parallel DTensors train with a data-parallel group, clipped, like the same block on one device."""
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    model, reference = Block(), Block()
    parallelize_module(model, grid["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    data = grid["data"].get_group()
    optimizer = tritoncomm.wrap(
        adamw(model), process_group=data, algo="topk_allgather", density=1.0, max_grad_norm=0.01
    )
    plain = adamw(reference)
    for step in range(5):
        optimizer.zero_grad()
        plain.zero_grad()
        for replica in range(2):
            x = torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * step + replica))
            (reference(x).square().mean() / 2).backward()
            if replica == grid["data"].get_local_rank():
                model(x).square().mean().backward()
        optimizer.step()
        gradients = [parameter.grad for parameter in reference.parameters()]
        norm = optimizer.metrics()["grad_norm"]
        assert norm == pytest.approx(float(torch.nn.utils.get_total_norm(gradients)), rel=0.15)  # an estimate
        assert norm > 0.02
        torch._foreach_mul_(gradients, 0.01 / norm)
        plain.step()
    for (name, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
        full = p.full_tensor() if isinstance(p, DTensor) else p
        assert torch.allclose(full, q, atol=1e-5), name
    sparse = tritoncomm.wrap(adamw(model), process_group=data, **SETTINGS)
    model(torch.randn(4, 8, generator=torch.Generator().manual_seed(grid["data"].get_local_rank()))).sum().backward()
    sparse.step()
    assert same_everywhere(bits(model), data)
    both = init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("replicate", "shard", "tensor"))
    model = Block()
    parallelize_module(model, both["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    fully_shard(model, mesh=both["shard"])
    wrapped = tritoncomm.wrap(adamw(model), process_group=both["replicate"].get_group())
    assert len(wrapped._tritoncomm.setup.exchange.vectors) == 2


class Embedded(nn.Module):
    """An embedding, which tensor parallelism replicates, before a block."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(64, 8)
        self.block = Block()

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Run the embedding and the block."""
        found = self.embedding(tokens)
        return found + self.block(found)


class TensorParallel:
    """An :class:`Embedded` over two tensor ranks and two data ranks, with its wrapped optimizer.

    ``like`` is another one with the same parameters, whose optimizer begins from scratch.
    """

    def __init__(self, grid: DeviceMesh, like: TensorParallel | None = None, **fields: object) -> None:
        self.grid, self.fields = grid, fields
        self.model = Embedded()
        parallelize_module(self.model.block, grid["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        if like is not None:
            self.fields = like.fields
            self.model.load_state_dict(like.model.state_dict())
        self.optimizer = tritoncomm.wrap(
            adamw(self.model), model=self.model, process_group=grid["data"].get_group(), **self.fields
        )

    def train(self, first: int, last: int) -> None:
        """Take some steps. Replicas stay equal, and so do all copies of replicated parameters, to the bit."""
        for step in range(first, last):
            generator = torch.Generator().manual_seed(100 * step + self.grid["data"].get_local_rank())
            self.optimizer.zero_grad()
            (self.model(torch.randint(64, (8,), generator=generator)) - 1).square().mean().backward()
            self.optimizer.step()
            parameters = self.model.parameters()
            copies = [p for p in parameters if not isinstance(p, DTensor) or p.placements[0].is_replicate()]
            assert len(copies) == 4  # the embedding, the norm, and the bias of the second linear layer
            assert same_everywhere(bits(nn.ParameterList(copies)), self.grid["tensor"].get_group()), step
            assert same_everywhere(bits(self.model), self.grid["data"].get_group()), step

    def state(self) -> dict[str, object]:
        """Return a copy of the optimizer's state."""
        return copy.deepcopy(self.optimizer.state_dict())


def tensor_grid() -> DeviceMesh:
    """Return two data ranks of two tensor ranks."""
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))


ROUNDED = {"density": 0.1, "dense_below": 0, "values": "4bit", "warmup_steps": 1}


def replicated_parameters(rank: int, world_size: int, send) -> None:
    """Parameters that tensor parallelism replicates stay equal on all of its ranks, whatever changes."""
    grid = tensor_grid()
    clipped = TensorParallel(grid, dense_below=64, max_grad_norm=0.5)
    clipped.train(0, 25)
    assert clipped.optimizer.metrics()["density_delivered"] < 0.9
    norms = tritoncomm.wrap(adamw(clipped.model.block), process_group=grid["data"].get_group(), dense_below=4)
    assert norms._tritoncomm.setup.exchange.vectors[0].dense_numel == 24  # one-dimensional, in a vector of their own
    run = TensorParallel(grid, **ROUNDED)
    run.train(0, 7)
    assert run.optimizer.metrics()["residual_norm"] > 0
    run.optimizer.flush()
    assert run.optimizer.metrics()["residual_norm"] == 0
    run.train(7, 9)
    run.optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(3))]})
    run.train(9, 11)
    run.model(torch.arange(8)).sum().backward()
    if rank == 1:
        run.model.block.up.weight.grad.to_local()[0] = torch.nan
    before = bits(run.model)
    with log_lines() as lines:
        run.optimizer.step()
    assert bits(run.model) == before
    assert rank not in (0, 1) or any("rank 1: block.up.weight" in line for line in lines)


def states_of_replicated_parameters(rank: int, world_size: int, send) -> None:
    """States of several vectors continue to the bit, move to other ranks, and are loaded on all ranks or none."""
    grid = tensor_grid()
    run = TensorParallel(grid, **ROUNDED)
    run.train(0, 5)
    state, norm = run.state(), run.optimizer.metrics()["residual_norm"]
    resumed, moved = TensorParallel(grid, run), TensorParallel(grid, run)
    shards = [p.to_local() if isinstance(p, DTensor) else p for p in run.model.parameters()]
    assert [len(each) for each in state["tritoncomm"]["residuals"]] == [shard.numel() for shard in shards]
    damaged = copy.deepcopy(state)
    damaged["tritoncomm"]["steps"] += rank == 1
    with pytest.raises((ConfigurationError, ConfigMismatchError), match="corrupt"):
        resumed.optimizer.load_state_dict(damaged)
    assert resumed.optimizer.metrics()["residual_norm"] == 0
    folder = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(folder)
    dcp.save({"residuals": checkpoint.ResidualState(run.optimizer)}, checkpoint_id=folder[0])
    residuals = checkpoint.ResidualState(moved.optimizer, checkpoint_id=folder[0])
    dcp.load({"residuals": residuals}, checkpoint_id=folder[0])
    assert moved.state()["tritoncomm"]["checksum"] == state["tritoncomm"]["checksum"]
    checkpoint.save(run.optimizer, f"{folder[0]}/own")
    saved = TensorParallel(grid, run)
    checkpoint.load(saved.optimizer, f"{folder[0]}/own")
    assert saved.state()["tritoncomm"]["checksum"] == state["tritoncomm"]["checksum"]
    resumed.optimizer.load_state_dict(state)

    own = state["tritoncomm"]
    converted = taken_over(own, [own], rank=grid["data"].get_local_rank(), world_size=2)
    moved.optimizer.load_state_dict(copy.deepcopy(state) | {"tritoncomm": converted})
    assert moved.optimizer.metrics()["residual_norm"] == norm
    moved.train(5, 7)
    fields = {key: value for key, value in state["tritoncomm"].items() if key not in ("schema", "checksum")}
    fields["algorithm"] = fields["algorithm"][:1]  # as if all parameters had been in one vector
    moved.optimizer.load_state_dict(copy.deepcopy(state) | {"tritoncomm": with_checksum(**fields)})
    assert moved.optimizer.metrics()["residual_norm"] == norm
    moved.train(7, 9)

    for each in (run, resumed, saved):
        each.train(5, 8)
    assert bits(resumed.model) == bits(saved.model) == bits(run.model)
