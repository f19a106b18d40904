"""What a checkpoint may hold: plain data, states of any shape on any mesh, several optimizers, and no failed save."""

from __future__ import annotations

import resource
from collections import deque
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import tritoncomm
from kit import gradient, made, sgd, sparse, take, weight, write
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from tritoncomm import ConfigMismatchError, ConfigurationError, checkpoint

from ranks import ranks

ERRORS = (ConfigMismatchError, ConfigurationError)


@ranks(2)
def test_numbers_of_numpy_are_saved_as_numbers(rank, world_size, tmp_path):
    """A schedule may compute a rate by NumPy, and an optimizer may keep such a number."""
    p, optimizer = made("adamw")
    take(optimizer, [p], rank, range(2), world_size)
    optimizer.param_groups[0]["lr"] = np.float64(0.125)
    optimizer.param_groups[0]["betas"] = (np.float32(0.5), 0.75)
    optimizer.state[p]["limits"] = {"count": np.int64(3), "is_full": np.bool_(True)}
    checkpoint.save(optimizer, tmp_path)
    q, again = made("adamw")
    checkpoint.load(again, tmp_path)
    assert again.param_groups[0]["lr"] == 0.125
    assert again.param_groups[0]["betas"] == (0.5, 0.75)
    assert again.state[q]["limits"] == {"count": 3, "is_full": True}


class Pair(NamedTuple):
    """What an optimizer may keep."""

    first: str
    second: str


UNREADABLE = {
    "a queue": (deque([1.0]), "deque"),
    "an array": (np.ones(3), "ndarray"),
    "a generator": (torch.Generator(), "Generator"),
    "a named tuple": (Pair("a", "b"), "Pair"),
    "a function": (lambda step: step, "function"),
}


@ranks(2)
@pytest.mark.parametrize("what", UNREADABLE)
def test_what_cannot_be_loaded_is_not_saved(rank, world_size, what, tmp_path):
    """All ranks raise an error that says where it is and what it is, and the save before stays."""
    value, name = UNREADABLE[what]
    p, optimizer = made("adamw")
    take(optimizer, [p], rank, range(2), world_size)
    checkpoint.save(optimizer, tmp_path)
    optimizer.param_groups[0]["history"] = [0, value] if rank == 1 else [0, 0]
    kind = ConfigurationError if rank == 1 else ConfigMismatchError
    with pytest.raises(kind, match=rf"param_groups\[0\]\['history'\]\[1\].*{name}"):
        checkpoint.save(optimizer, tmp_path)
    del optimizer.param_groups[0]["history"]
    optimizer.state[p]["history"] = value
    with pytest.raises(ConfigurationError, match=rf"state\[0\]\['history'\].*{name}"):
        checkpoint.save(optimizer, tmp_path)
    _, again = made("adamw")
    checkpoint.load(again, tmp_path)
    assert again.metrics()["steps"] == 2


@ranks(2)
def test_what_cannot_be_loaded_is_no_part_of_a_checkpoint_of_torch(rank, world_size, tmp_path):
    """All ranks raise if one cannot save its state, which is a part of ResidualState where updates are exchanged."""
    p = weight(64)
    optimizer = tritoncomm.wrap(torch.optim.AdamW([p], lr=0.01), local_steps=2)
    take(optimizer, [p], rank, range(2), world_size)
    if rank == 1:
        optimizer.state[p]["history"] = deque([1.0])
    with pytest.raises(ConfigurationError if rank == 1 else ConfigMismatchError, match="deque"):
        dcp.save({"residuals": checkpoint.ResidualState(optimizer)}, checkpoint_id=tmp_path)


@ranks(2)
def test_saved_objects_are_refused_together(rank, world_size, tmp_path):
    """What torch read as plain data at the save, and does not at the load, is a ConfigurationError."""
    p, optimizer = made("adamw")
    take(optimizer, [p], rank, range(2), world_size)
    optimizer.param_groups[0]["history"] = range(3)
    with torch.serialization.safe_globals([range]):
        checkpoint.save(optimizer, tmp_path)
    _, again = made("adamw")
    with pytest.raises(ConfigurationError, match="range"):
        checkpoint.load(again, tmp_path)
    assert again.metrics()["steps"] == 0
    with torch.serialization.safe_globals([range]):
        checkpoint.load(again, tmp_path)
    assert again.metrics()["steps"] == 2


@contextmanager
def full_disk(limit: int):
    """Let this process write no file of more than ``limit`` bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@ranks(2)
@pytest.mark.parametrize("at", [0, 1, None])
def test_failed_saves_leave_nothing(rank, world_size, at, tmp_path):
    """On a full disk, each attempt needs the same room, and the last complete one stays."""
    p, optimizer = made("adamw")
    take(optimizer, [p], rank, range(3), world_size)
    checkpoint.save(optimizer, tmp_path)
    dist.barrier()
    if at is None and rank == 0:
        (tmp_path / "checkpoint.unfinished").mkdir()  # it fails at its end
    dist.barrier()
    before = set(tmp_path.rglob("*"))
    for _ in range(2):
        with full_disk(2000 if rank == at else 2**30), pytest.raises(ERRORS, match="cannot be written"):
            checkpoint.save(optimizer, tmp_path)
        dist.barrier()
        assert set(tmp_path.rglob("*")) == before
    _, again = made("adamw")
    checkpoint.load(again, tmp_path)
    assert again.metrics()["steps"] == 3


def replicated(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor, of shards as a copy on each rank."""
    places = [Replicate()] * len(getattr(tensor, "placements", ()))
    return tensor.redistribute(placements=places) if places else tensor


class Normalized(torch.optim.Optimizer):
    """Keeps a number per row and one per column of a gradient, and copies of a mean and of a plain tensor."""

    def __init__(self, parameters) -> None:
        super().__init__(parameters, {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure=None) -> None:
        """Divide by the size of a row and of a column, and add the mean."""
        for p in self.param_groups[0]["params"]:
            state, squares = self.state[p], p.grad.square()
            values = {"row": squares.mean(1, keepdim=True), "column": replicated(squares).mean(0)}
            for name, value in (values | {"mean": replicated(p.grad)}).items():
                state.setdefault(name, torch.zeros_like(value)).lerp_(value, 0.25)
            state["known"] = state.get("known", torch.zeros(3)) + 1
            sizes = (state["row"] * state["column"]).sqrt() + 1e-6
            p.sub_((p.grad + state["mean"]) / sizes, alpha=0.01)


class Shards:
    """A layer whose rows three shards do not divide, over some shards or as a plain module."""

    def __init__(self, shards: int | None, world_size: int = 4) -> None:
        from torch.distributed.fsdp import fully_shard  # noqa: PLC0415 - takes a while

        torch.manual_seed(0)
        self.model, group = nn.Linear(6, 7, bias=False), None
        if shards is not None:
            mesh = init_device_mesh("cpu", (world_size // shards, shards), mesh_dim_names=("replicate", "shard"))
            fully_shard(self.model, mesh=mesh["shard"])
            group = mesh["replicate"].get_group()
        self.optimizer = tritoncomm.wrap(Normalized(self.model.parameters()), model=self.model, process_group=group)

    def train(self, rank: int, steps: range) -> None:
        """Take steps."""
        for step in steps:
            x = gradient(24, rank, step).view(4, 6) / 64
            (self.model(x) - 1).square().sum().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    @property
    def state(self) -> dict[str, torch.Tensor]:
        """The state of the parameter."""
        return self.optimizer.state[self.model.weight]

    def placements(self) -> dict[str, object]:
        """How its tensors are split, None if they are plain."""
        return {name: getattr(each, "placements", None) for name, each in self.state.items()}

    def whole(self) -> dict[str, torch.Tensor]:
        """Its tensors."""
        return {name: each.full_tensor() if isinstance(each, DTensor) else each for name, each in self.state.items()}


@ranks(4)
@pytest.mark.parametrize("shards", [1, 2])
def test_small_states_of_shards_go_on_to_the_bit(rank, world_size, shards, tmp_path):
    """They are split as they were: one number per row, copies, and plain tensors."""
    run = Shards(shards)
    run.train(rank, range(3))
    checkpoint.save(run.optimizer, tmp_path)
    weights = {name: each.clone() for name, each in run.model.state_dict().items()}
    run.train(rank, range(3, 6))
    again = Shards(shards)
    again.model.load_state_dict(weights)
    checkpoint.load(again.optimizer, tmp_path)
    assert again.placements() == run.placements()
    assert isinstance(again.state["row"], DTensor)
    again.train(rank, range(3, 6))
    assert torch.equal(again.model.weight.full_tensor(), run.model.weight.full_tensor())
    assert all(torch.equal(each, run.whole()[name]) for name, each in again.whole().items())


@ranks(4)
@pytest.mark.parametrize(("before", "after"), [(2, 4), (4, 2), (2, 1), (2, None), (None, 2)])
def test_small_states_on_another_mesh(rank, world_size, before, after, tmp_path):
    """They are split as their parameter is where their size is the same, and copies elsewhere."""
    run = Shards(before)
    run.train(rank, range(3))
    checkpoint.save(run.optimizer, tmp_path)
    expected = run.whole()
    again = Shards(after)
    checkpoint.load(again.optimizer, tmp_path)
    assert isinstance(again.state["row"], DTensor) == (after is not None)
    if after is not None:
        assert again.state["row"].placements == (Shard(0),)
        assert again.state["column"].placements == (Replicate(),)
    found = again.whole()
    if rank == 0:  # of the first replica, before and after
        assert all(torch.equal(each, expected[name]) for name, each in found.items())
    again.train(rank, range(3, 5))


@ranks(4)
def test_partial_sums_are_not_saved(rank, world_size, tmp_path):
    """A checkpoint would have the part of one rank."""
    run = Shards(2)
    run.train(rank, range(2))
    run.state["sum"] = run.state["row"].sum(0)
    assert run.state["sum"].placements[0].is_partial()
    with pytest.raises(ConfigurationError, match=r"0\.sum .* partial sum"):
        checkpoint.save(run.optimizer, tmp_path)


def two(sizes: tuple[int, int], group=None) -> dict:
    """Return two parameters with an optimizer each, by name."""
    p, q = map(weight, sizes)
    fields = {"density": 1 / 32, "process_group": group}
    return {"hidden": (p, sparse(sgd([p]), **fields)), "rest": (q, sparse(sgd([q]), **fields))}


@ranks(3)
@pytest.mark.parametrize("sizes", [(64, 32), (64, 64)])
def test_two_optimizers_in_a_checkpoint_of_torch(rank, world_size, sizes, tmp_path):
    """Each finds its own residuals by its name, also on fewer ranks, and with equal shapes."""
    run = two(sizes)
    for number, (p, optimizer) in enumerate(run.values()):
        take(optimizer, [p], rank, range(10 * number, 10 * number + 3), world_size)
    states = {name: checkpoint.ResidualState(optimizer) for name, (_, optimizer) in run.items()}
    dcp.save(states, checkpoint_id=tmp_path)
    values = {name: p.detach().clone() for name, (p, _) in run.items()}
    for _, optimizer in run.values():
        optimizer.flush()
    group = dist.new_group([0, 1])
    if rank == 2:
        return
    again = two(sizes, group=group)
    for name in (None, "other"):
        with pytest.raises(ConfigurationError, match=r"states of 'hidden', 'rest': pass as name"):
            checkpoint.ResidualState(again["rest"][1], tmp_path, name=name)
    states = {name: checkpoint.ResidualState(optimizer, tmp_path, name=name) for name, (_, optimizer) in again.items()}
    dcp.load(states, checkpoint_id=tmp_path, process_group=group)
    for name, (p, optimizer) in again.items():
        write(p, values[name])
        optimizer.flush()
        assert torch.allclose(p, run[name][0])
        assert not torch.equal(p, values[name])
