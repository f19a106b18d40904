"""Worker processes of tests/distributed/test_doors.py: sharded models, two replicas of two shards each."""

from __future__ import annotations

import copy
import logging
import tempfile
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import tritoncomm
from fsdp_models import Net, loss_of, mesh, sharded
from helpers import adamw, log_lines, same_everywhere
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from tritoncomm import ConfigMismatchError, ConfigurationError, NonFiniteError, fsdp
from tritoncomm.checkpoint import ResidualState, reshard, save
from tritoncomm.step.checkpoint_format import with_checksum

import laws

SETTINGS = {"density": 0.2, "dense_below": 0}


def whole(model: nn.Module) -> list[int]:
    """Return the bits of all parameters of this rank's shards."""
    shards = [p.detach().to_local() if isinstance(p, DTensor) else p.detach() for p in model.parameters()]
    return torch.cat([shard.reshape(-1) for shard in shards]).view(torch.int32).tolist()


def train(model: nn.Module, optimizer: tritoncomm.SparseOptimizer, rank: int, first: int, last: int) -> None:
    """Take some steps."""
    for step in range(first, last):
        optimizer.zero_grad()
        loss_of(model, rank, step).backward()
        optimizer.step()


def hook_equals_step(rank: int, world_size: int, send) -> None:
    """With one parameter group, the hook of FSDP2 and ``wrap`` on the sharded model take the same steps to the bit."""
    grid = mesh()
    group = grid["replicate"].get_group()
    hooked, plain = fully_shard(Net(), mesh=grid["shard"]), fully_shard(Net(), mesh=grid["shard"])
    first = tritoncomm.wrap(adamw(hooked), model=hooked, process_group=group, warmup_steps=2, **SETTINGS)
    second = tritoncomm.wrap(adamw(plain), process_group=group, warmup_steps=2, **SETTINGS)
    for step in range(25):  # past the first renewal of the scale
        train(hooked, first, rank, step, step + 1)
        train(plain, second, rank, step, step + 1)
        assert whole(hooked) == whole(plain), step
    assert same_everywhere(whole(hooked), group)
    assert first.metrics()["density_delivered"] < 0.5
    state = first.state[next(iter(hooked.parameters()))]
    assert isinstance(state["exp_avg"], DTensor)
    assert isinstance(state["last_delivered"], DTensor)
    assert bool((state["last_delivered"].to_local() < 25).any())  # not every coordinate in every step
    with pytest.raises(ConfigurationError, match="pass process_group="):
        tritoncomm.wrap(adamw(net := fully_shard(Net(), mesh=grid["shard"])), model=net)
    with pytest.raises(ConfigurationError, match=r"is a DTensor over ranks.*pass process_group="):
        tritoncomm.wrap(adamw(fully_shard(Net(), mesh=grid["shard"])))
    with pytest.raises(ConfigurationError, match=r"is a DTensor over ranks.*pass process_group="):
        tritoncomm.wrap(adamw(fully_shard(Net(), mesh=grid)), process_group=group)  # FSDP averages over replicas itself


def warning_of_plain_adam(rank: int, world_size: int, send) -> None:
    """One warning names the fix for AdamW that is not wrapped. SGD and a wrapped optimizer get none."""
    grid = mesh()
    group = grid["replicate"].get_group()
    with log_lines() as lines:
        for make, wrapped in ((torch.optim.AdamW, False), (torch.optim.SGD, False), (torch.optim.AdamW, True)):
            model = sharded(Net(), grid["shard"])
            fsdp.register(model, group, **SETTINGS)
            optimizer = make(model.parameters(), lr=0.01)
            optimizer = tritoncomm.wrap(optimizer, model=model) if wrapped else optimizer
            train(model, optimizer, rank, 0, 2)
    warnings = [line for line in lines if "tritoncomm.wrap(optimizer, model=model)" in line]
    assert len(warnings) == (rank == 0)
    assert all(line.startswith("AdamW treats") for line in warnings)


def groups_of_parameters(rank: int, world_size: int, send) -> None:
    """Several parameter groups, accumulation, clipping, a new density and a flush."""
    grid = mesh()
    group = grid["replicate"].get_group()
    model = sharded(Net(), grid["shard"])
    optimizer = tritoncomm.wrap(adamw(model), model=model, process_group=group, max_grad_norm=0.5, **SETTINGS)
    assert len(optimizer._exchange.vectors) > 2
    for step in range(6):
        optimizer.zero_grad()
        for micro in range(2):
            if step % 2:  # without this switch each micro-batch is exchanged, and the step uses the entries of both
                model.set_requires_gradient_sync(micro == 1)
            loss_of(model, rank, 2 * step + micro).backward()
        model.set_requires_gradient_sync(True)
        optimizer.step()
        assert same_everywhere(whole(model), group)
    assert optimizer.metrics()["steps"] == 9
    assert same_everywhere(optimizer.metrics()["grad_norm"])
    optimizer.set_density(0.6)
    train(model, optimizer, rank, 20, 22)
    assert 0.5 < optimizer.metrics()["density_delivered"] < 0.9
    before = whole(model)
    optimizer.flush()
    assert whole(model) != before
    assert optimizer.metrics()["residual_norm"] == 0
    assert same_everywhere(whole(model), group)
    train(model, optimizer, rank, 22, 24)
    with pytest.raises(ConfigurationError, match="a sharded model cannot change its groups"):
        optimizer.reset_process_group()


def rejected_steps(rank: int, world_size: int, send) -> None:
    """A NaN on one rank skips the step of all shards and replicas, or raises on all. Nothing else changes."""
    for hook in (True, False):
        for policy in ("skip", "raise", "zero"):
            grid = mesh()
            group = grid["replicate"].get_group()
            model = sharded(Net(), grid["shard"])
            fields = {"model": model} if hook else {}
            optimizer = tritoncomm.wrap(adamw(model), process_group=group, on_nonfinite=policy, **fields, **SETTINGS)
            train(model, optimizer, rank, 0, 2)
            before, pending = whole(model), copy.deepcopy(optimizer.state_dict()["tritoncomm"]["residuals"])
            optimizer.zero_grad()
            loss = loss_of(model, rank, 2) * (float("nan") if rank == 1 and policy != "zero" else 1)
            raises = (
                pytest.raises(NonFiniteError, match="NaN or Inf in the gradients of rank")
                if policy == "raise"
                else nullcontext()
            )
            with log_lines(logging.WARNING) as lines, raises:
                loss.backward()
                optimizer.step()
            assert (whole(model) == before) == (policy != "zero")
            if policy != "zero":
                now = optimizer.state_dict()["tritoncomm"]["residuals"]
                pairs = zip(
                    *(each.values() if isinstance(each, dict) else each for each in (pending, now)), strict=True
                )
                assert all(laws.same_bits(a, b) for a, b in pairs)
                assert optimizer.metrics()["skipped_steps"] == 1
            assert any("step skipped on all ranks" in line for line in lines) == (policy == "skip")
            train(model, optimizer, rank, 3, 4)
            assert all(p.to_local().isfinite().all() for p in model.parameters())


def deliveries(rank: int, world_size: int, send) -> None:
    """A step uses the entries of its own backward passes, and skips if one of them was rejected."""
    grid = mesh()
    group = grid["replicate"].get_group()
    finals = []
    for set_to_none in (True, False):
        model = sharded(Net(), grid["shard"])
        optimizer = tritoncomm.wrap(adamw(model), model=model, process_group=group, **SETTINGS)
        for step in range(8):
            optimizer.zero_grad(set_to_none=set_to_none)
            loss_of(model, rank, step).backward()
            given = sum(len(each.mean) for each in optimizer._exchange.delivered)
            assert given < 0.5 * sum(each.layout.numel for each in optimizer._exchange.delivered)
            optimizer.step()
        finals.append(whole(model))
    assert finals[0] == finals[1]
    for bad in (0, 1):  # of two passes that are exchanged and added up
        before = whole(model)
        optimizer.zero_grad()
        for micro in range(2):
            (loss_of(model, rank, 10 + micro) * (float("nan") if rank == 0 and micro == bad else 1)).backward()
        optimizer.step()
        assert whole(model) == before
    train(model, optimizer, rank, 12, 13)
    assert all(p.to_local().isfinite().all() for p in model.parameters())


def distributed_checkpoint(rank: int, world_size: int, send) -> None:
    """``torch.distributed.checkpoint`` saves and loads the optimizer's state and the residuals, to the bit."""
    grid = mesh()
    group = grid["replicate"].get_group()
    folder = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(folder)

    def made() -> tuple[nn.Module, tritoncomm.SparseOptimizer]:
        model = sharded(Net(), grid["shard"])
        return model, tritoncomm.wrap(adamw(model), model=model, process_group=group, **SETTINGS)

    unhooked = sharded(Net(), grid["shard"])
    alone = tritoncomm.wrap(adamw(unhooked), process_group=group, **SETTINGS)
    with pytest.raises(ConfigurationError, match=r"sharded.*see tritoncomm\.checkpoint\.ResidualState"):
        save(alone, folder[0])
    keys = [None] * world_size
    dist.all_gather_object(keys, list(ResidualState(alone).state_dict()))
    assert len({key for key, _ in keys}) == world_size
    model, optimizer = made()
    train(model, optimizer, rank, 0, 7)
    parts, states = get_state_dict(model, optimizer)
    dcp.save({"model": parts, "optimizer": states, "residuals": ResidualState(optimizer)}, checkpoint_id=folder[0])
    train(model, optimizer, rank, 7, 12)
    for fields in ({}, {"checkpoint_id": folder[0]}, {"storage_reader": dcp.FileSystemReader(folder[0])}):
        again, resumed = made()
        parts, states = get_state_dict(again, resumed)
        content = {"model": parts, "optimizer": states, "residuals": ResidualState(resumed, **fields)}
        dcp.load(content, checkpoint_id=folder[0])
        set_state_dict(again, resumed, model_state_dict=content["model"], optim_state_dict=content["optimizer"])
        train(again, resumed, rank, 7, 12)
        assert whole(again) == whole(model)
    with pytest.raises(ConfigurationError, match=r"checkpoint_id=.*nowhere: no checkpoint can be read"):
        ResidualState(optimizer, checkpoint_id=f"{folder[0]}/nowhere")


def mixed_precision(rank: int, world_size: int, send) -> None:
    """Parameters in bf16 keep an fp32 master copy, which the step updates, and replicas stay equal."""
    grid = mesh()
    group = grid["replicate"].get_group()
    losses = []
    for reduce_dtype in (None, torch.float32, torch.bfloat16):  # the first one trains in fp32
        param_dtype = torch.bfloat16 if reduce_dtype else None
        policy = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=reduce_dtype)
        model = sharded(Net(), grid["shard"], mp_policy=policy)
        optimizer = tritoncomm.wrap(adamw(model), model=model, process_group=group, **SETTINGS)
        train(model, optimizer, rank, 0, 20)
        losses.append(float(sum(loss_of(model, rank, step) for step in range(4)).detach()))
        model.reshard()  # a forward pass alone leaves the parameters of the root whole
        assert losses[-1] == pytest.approx(losses[0], rel=0.15)
        assert {p.dtype for p in model.parameters()} == {torch.float32}
        assert {state["exp_avg"].dtype for state in optimizer.state.values()} == {torch.float32}
        assert same_everywhere(whole(model), group)


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
        norm = torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.01)
        assert norm > 0.02
        assert optimizer.metrics()["grad_norm"] == pytest.approx(float(norm), rel=1e-4)
        plain.step()
    for (name, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
        full = p.full_tensor() if isinstance(p, DTensor) else p
        assert torch.allclose(full, q, atol=1e-5), name
    sparse = tritoncomm.wrap(adamw(model), process_group=data, **SETTINGS)
    model(torch.randn(4, 8, generator=torch.Generator().manual_seed(grid["data"].get_local_rank()))).sum().backward()
    sparse.step()
    assert same_everywhere(whole(model), data)
    with pytest.raises(ConfigurationError, match=r"model has no sharded module.*tritoncomm\.wrap\(.*process_group"):
        fsdp.register(model, data)
    both = init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("replicate", "shard", "tensor"))
    model = Block()
    parallelize_module(model, both["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    fully_shard(model, mesh=both["shard"])
    with pytest.raises(ConfigurationError, match=r"Block is sharded by FSDP2 and tensor-parallel.*without model="):
        fsdp.register(model, both["replicate"].get_group())
    wrapped = tritoncomm.wrap(adamw(model), process_group=both["replicate"].get_group())
    assert len(wrapped._exchange.vectors) == 2


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
        self.optimizer = tritoncomm.wrap(adamw(self.model), process_group=grid["data"].get_group(), **self.fields)

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
            assert same_everywhere(whole(nn.ParameterList(copies)), self.grid["tensor"].get_group()), step
            assert same_everywhere(whole(self.model), self.grid["data"].get_group()), step

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
    assert norms._exchange.vectors[0].dense_numel == 24  # one-dimensional, in a vector of their own
    with pytest.raises(ConfigurationError, match="choose 'skip' or 'raise'"):
        TensorParallel(grid, on_nonfinite="zero")
    run = TensorParallel(grid, **ROUNDED)
    run.train(0, 5)
    run.optimizer.set_density(0.3)
    run.train(5, 7)
    assert run.optimizer.metrics()["residual_norm"] > 0
    run.optimizer.flush()
    assert run.optimizer.metrics()["residual_norm"] == 0
    run.train(7, 9)
    run.optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(3))]})
    run.train(9, 11)
    run.model(torch.arange(8)).sum().backward()
    if rank == 1:
        run.model.block.up.weight.grad.to_local()[0] = torch.nan
    before = whole(run.model)
    with log_lines() as lines:
        run.optimizer.step()
    assert whole(run.model) == before
    assert rank not in (0, 1) or any("rank 1: parameter 3 of shape (16, 8)" in line for line in lines)


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
    dcp.save({"residuals": ResidualState(run.optimizer)}, checkpoint_id=folder[0])
    dcp.load({"residuals": ResidualState(moved.optimizer, checkpoint_id=folder[0])}, checkpoint_id=folder[0])
    assert moved.state()["tritoncomm"]["checksum"] == state["tritoncomm"]["checksum"]
    resumed.optimizer.load_state_dict(state)

    states = [None] * 2
    dist.all_gather_object(states, state["tritoncomm"], group=grid["data"].get_group())
    converted = reshard(states, 2)[grid["data"].get_local_rank()]
    moved.optimizer.load_state_dict(copy.deepcopy(state) | {"tritoncomm": converted})
    assert moved.optimizer.metrics()["residual_norm"] == norm
    moved.train(5, 7)
    fields = {key: value for key, value in state["tritoncomm"].items() if key not in ("schema", "checksum")}
    fields["algorithm"] = fields["algorithm"]["vectors"][0]  # as if all parameters had been in one vector
    moved.optimizer.load_state_dict(copy.deepcopy(state) | {"tritoncomm": with_checksum(**fields)})
    assert moved.optimizer.metrics()["residual_norm"] == norm
    moved.train(7, 9)

    run.train(5, 8)
    resumed.train(5, 8)
    assert whole(resumed.model) == whole(run.model)
