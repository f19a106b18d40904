"""Two data ranks of two tensor ranks train like one device, and replicated parameters stay equal."""

from __future__ import annotations

import copy
import os

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import tritoncomm
from kit import log_lines
from models import adamw, equal, exact, flat
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from tritoncomm import ConfigMismatchError, ConfigurationError, ExchangeError, checkpoint
from tritoncomm.step.saved.state import taken_over, with_checksum

from ranks import ranks


def tensor_grid() -> DeviceMesh:
    """Return two data ranks of two tensor ranks."""
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))


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


@ranks(4)
def test_tensor_parallel(rank, world_size):
    """Tensor-parallel DTensors train with a data-parallel group, clipped, like the same block on one device."""
    grid = tensor_grid()
    model, reference = Block(), Block()
    parallelize_module(model, grid["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    data = grid["data"].get_group()
    optimizer = tritoncomm.wrap(
        adamw(model), process_group=data, algo="topk_allgather", density=1.0, max_grad_norm=0.01
    )
    plain = adamw(reference)
    for step in range(3):
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
    sparse = exact(adamw(model), process_group=data)
    model(torch.randn(4, 8, generator=torch.Generator().manual_seed(grid["data"].get_local_rank()))).sum().backward()
    sparse.step()
    assert equal(model, data)
    both = init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("replicate", "shard", "tensor"))
    model = Block()
    parallelize_module(model, both["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    fully_shard(model, mesh=both["shard"])
    wrapped = tritoncomm.wrap(adamw(model), process_group=both["replicate"].get_group())
    assert len(wrapped._tritoncomm.setup.scope.vectors) == 2


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
        """Take some steps. Then replicas are equal, and so are all copies of replicated parameters, to the bit."""
        for step in range(first, last):
            generator = torch.Generator().manual_seed(100 * step + self.grid["data"].get_local_rank())
            self.optimizer.zero_grad()
            (self.model(torch.randint(64, (8,), generator=generator)) - 1).square().mean().backward()
            self.optimizer.step()
        parameters = self.model.parameters()
        copies = [p for p in parameters if not isinstance(p, DTensor) or p.placements[0].is_replicate()]
        assert len(copies) == 4  # the embedding, the norm, and the bias of the second linear layer
        assert equal(copies, self.grid["tensor"].get_group())
        assert equal(self.model, self.grid["data"].get_group())

    def state(self) -> dict[str, object]:
        """Return a copy of the optimizer's state."""
        return copy.deepcopy(self.optimizer.state_dict())


@ranks(4)
def test_shards_are_loaded_together(rank, world_size, tmp_path):
    """One shard alone shows that weights were loaded. All count as loaded, also in what is saved then."""
    grid = tensor_grid()
    for way in ("", "checkpoint", "state_dict"):  # in one test: what DTensor derives for each operation takes long
        run = again = TensorParallel(grid, updates=True)
        run.train(0, 2)
        state = {name: value.clone() for name, value in run.model.state_dict().items()}
        if grid["tensor"].get_local_rank() == 0:
            state["block.up.weight"].to_local().add_(0.5)
        state["block.norm.weight"] *= 1.0002
        run.model.load_state_dict(state)
        if way:
            again = TensorParallel(grid, updates=True)
            again.model.load_state_dict(state)
        if way == "checkpoint":
            checkpoint.save(run.optimizer, tmp_path)
            checkpoint.load(again.optimizer, tmp_path)
        if way == "state_dict":
            again.optimizer.load_state_dict(copy.deepcopy(run.optimizer.state_dict()))
        assert torch.equal(again.model.block.norm.weight, state["block.norm.weight"]), way
        again.train(2, 4)


@ranks(4)
def test_shards_are_broken_together(rank, world_size):
    """One shard alone shows that a local step has made parameters Inf. None of the copy takes part in the mean."""
    run = TensorParallel(tensor_grid(), updates=True)
    run.train(0, 3)

    def overflow(*_):
        if rank == 0:
            run.model.block.up.weight.data.to_local()[0, 0] = torch.inf

    hook = run.optimizer.register_step_post_hook(overflow)
    run.train(3, 4)
    hook.remove()
    assert run.optimizer.metrics()["dropped_deltas"] == (run.grid["data"].get_local_rank() == 0)
    run.train(4, 6)


@ranks(4, lost=(3,))
def test_rank_lost_where_shards_decide(rank, world_size):
    """All others name it, also those that do not wait for it."""
    run = TensorParallel(tensor_grid(), updates=True)
    run.train(0, 1)
    dist.barrier()
    if rank == 3:
        os._exit(0)
    with pytest.raises(ExchangeError, match="lost rank 3"):
        run.optimizer.flush()


ROUNDED = {"density": 0.1, "dense_below": 0, "values": "4bit", "warmup_steps": 1}


@ranks(4)
def test_replicated_parameters(rank, world_size):
    """Parameters that tensor parallelism replicates stay equal on all of its ranks, whatever changes."""
    grid = tensor_grid()
    clipped = TensorParallel(grid, dense_below=64, max_grad_norm=0.5, warmup_steps=2)
    clipped.train(0, 4)
    assert clipped.optimizer.metrics()["density_delivered"] < 0.9
    norms = tritoncomm.wrap(adamw(clipped.model.block), process_group=grid["data"].get_group(), dense_below=4)
    assert norms._tritoncomm.setup.scope.vectors[0].dense_numel == 24  # one-dimensional, in a vector of their own
    run = TensorParallel(grid, **ROUNDED)
    run.train(0, 4)
    assert run.optimizer.metrics()["residual_norm"] > 0
    run.optimizer.flush()
    assert run.optimizer.metrics()["residual_norm"] == 0
    run.train(4, 5)
    run.optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(3))]})
    run.train(5, 6)
    run.model(torch.arange(8)).sum().backward()
    if rank == 1:
        run.model.block.up.weight.grad.to_local()[0] = torch.nan
    before = flat(run.model)
    with log_lines() as lines:
        run.optimizer.step()
    assert torch.equal(flat(run.model), before)
    assert rank not in (0, 1) or any("rank 1: block.up.weight" in line for line in lines)


@ranks(4)
def test_states_of_replicated_parameters(rank, world_size, tmp_path):
    """States of several vectors continue to the bit, move to other ranks, and are loaded on all ranks or none."""
    grid = tensor_grid()
    run = TensorParallel(grid, **ROUNDED)
    run.train(0, 3)
    state, norm = run.state(), run.optimizer.metrics()["residual_norm"]
    resumed, moved = TensorParallel(grid, run), TensorParallel(grid, run)
    assert [each.shape for each in state["tritoncomm"]["residuals"]] == [p.shape for p in run.model.parameters()]
    damaged = copy.deepcopy(state)
    damaged["tritoncomm"]["steps"] += rank == 1
    with pytest.raises((ConfigurationError, ConfigMismatchError), match="corrupt"):
        resumed.optimizer.load_state_dict(damaged)
    assert resumed.optimizer.metrics()["residual_norm"] == 0
    dcp.save({"residuals": checkpoint.ResidualState(run.optimizer)}, checkpoint_id=tmp_path)
    residuals = checkpoint.ResidualState(moved.optimizer, checkpoint_id=tmp_path)
    dcp.load({"residuals": residuals}, checkpoint_id=tmp_path)
    assert moved.state()["tritoncomm"]["checksum"] == state["tritoncomm"]["checksum"]
    checkpoint.save(run.optimizer, tmp_path / "own")
    saved = TensorParallel(grid, run)
    checkpoint.load(saved.optimizer, tmp_path / "own")
    assert saved.state()["tritoncomm"]["checksum"] == state["tritoncomm"]["checksum"]
    resumed.optimizer.load_state_dict(state)

    own = state["tritoncomm"]
    converted = taken_over(own, [own], rank=grid["data"].get_local_rank(), world_size=2)
    moved.optimizer.load_state_dict(copy.deepcopy(state) | {"tritoncomm": converted})
    assert moved.optimizer.metrics()["residual_norm"] == norm
    moved.train(3, 4)
    fields = {key: value for key, value in state["tritoncomm"].items() if key not in ("schema", "checksum")}
    fields["algorithm"] = fields["algorithm"][:1]  # as if all parameters had been in one vector
    moved.optimizer.load_state_dict(copy.deepcopy(state) | {"tritoncomm": with_checksum(**fields)})
    assert moved.optimizer.metrics()["residual_norm"] == norm
    moved.train(4, 5)

    for each in (run, resumed, saved):
        each.train(3, 5)
    assert torch.equal(flat(resumed.model), flat(run.model))
    assert torch.equal(flat(saved.model), flat(run.model))


@ranks(2)
@pytest.mark.parametrize("placement", [Shard(0), Shard(1), Replicate()])
def test_partial_gradients(rank, world_size, placement):
    """A gradient of which every rank holds a summand, as sequence parallelism leaves it, is summed for the step."""
    grid = init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "tensor"))
    ends = []
    for is_partial in (False, True):
        whole = nn.Parameter(distribute_tensor(torch.ones(5, 6), grid["tensor"], [placement]))
        optimizer = exact(torch.optim.AdamW([whole], lr=0.1), process_group=grid["data"].get_group())
        for step in range(3):
            given = torch.randint(-8, 9, (5, 6), generator=torch.Generator().manual_seed(step)).float()
            part = DTensor.from_local(given / 2, grid["tensor"], [Partial()], run_check=False)
            whole.grad = part if is_partial else distribute_tensor(given, grid["tensor"], [placement])
            optimizer.step()
        ends.append(flat([whole]))
    assert torch.equal(*ends)


class OfRows(torch.optim.Optimizer):
    """Keeps a mean square of each row, as Adafactor does, which a shard of the rows has of its own."""

    @torch.no_grad()
    def step(self, closure=None) -> None:
        """Take the step."""
        for group in self.param_groups:
            for p in group["params"]:
                square = p.grad.square().mean(-1, keepdim=True)
                self.state[p]["square"] = self.state[p].get("square", 0.0) + square
                p.sub_(group["lr"] * p.grad / (self.state[p]["square"].sqrt() + 1e-3))


def squares(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return the state of all rows of each parameter."""
    found = [optimizer.state[p]["square"] for p in optimizer.param_groups[0]["params"]]
    return [each.full_tensor() if isinstance(each, DTensor) else each for each in found]


@ranks(4)
def test_states_of_rows_on_another_mesh(rank, world_size, tmp_path):
    """A parameter that tensor parallelism leaves whole is sharded by FSDP2, and so are the states of its rows."""
    grid = tensor_grid()
    model = Embedded()
    parallelize_module(model.block, grid["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    given = {"algo": "dense", "small": "fp32", "process_group": grid["data"].get_group()}
    optimizer = tritoncomm.wrap(OfRows(model.parameters(), {"lr": 0.01}), model=model, **given)
    tokens = torch.randint(64, (8,), generator=torch.Generator().manual_seed(grid["data"].get_local_rank()))
    model(tokens).square().mean().backward()
    optimizer.step()
    checkpoint.save(optimizer, tmp_path)
    other = fully_shard(Embedded(), mesh=grid["tensor"])
    resumed = tritoncomm.wrap(OfRows(other.parameters(), {"lr": 0.01}), model=other, **given)
    checkpoint.load(resumed, tmp_path)
    for loaded, saved in zip(squares(resumed), squares(optimizer), strict=True):
        assert torch.equal(loaded, saved)
    other(tokens).square().mean().backward()
    resumed.step()
