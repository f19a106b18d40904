"""Situations of the staleness-aware step with DTensor parameters, run by every worker."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from tritoncomm.step.rules.adam import StalenessAwareAdam

# Rows of 5 are sharded unevenly, one row leaves the second of two ranks without any, and columns may be sharded, too.
SHAPES = [(6, 4), (5, 3), (1, 7), (9,), (3, 8)]
PLACEMENTS = [Shard(0), Shard(0), Shard(0), Replicate(), Shard(1)]
NAMES = [f"weight{i}" for i in range(len(SHAPES))]
STEPS = 24  # past the last step that always computes param_rms


def bits(tensor: torch.Tensor) -> list[int]:
    """Return the bits of the local elements."""
    tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return tensor.detach().contiguous().view(torch.int32).reshape(-1).tolist()


class Model(nn.Module):
    """Parameters of the shapes above, as DTensors on ``mesh``."""

    def __init__(self, mesh) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        for name, shape, placement in zip(NAMES, SHAPES, PLACEMENTS, strict=True):
            whole = torch.randn(shape, generator=generator)
            self.register_parameter(name, nn.Parameter(distribute_tensor(whole, mesh, [placement])))

    def local_copies(self) -> list[nn.Parameter]:
        """Return plain parameters with the values of the local shards."""
        return [nn.Parameter(parameter.to_local().detach().clone()) for parameter in self.parameters()]


def deliver(shards: list[nn.Parameter], step: int) -> list[torch.Tensor | None]:
    """Return delivered indices of the local shards, None for one of them."""
    found: list[torch.Tensor | None] = [torch.arange(shard.numel())[step % 3 :: 3] for shard in shards]
    found[3] = None
    return found


def set_gradients(model: Model, shards: list[nn.Parameter], mesh, step: int, *, partial: bool = False) -> None:
    """Set equal gradients on a model and on its local copies."""
    generator = torch.Generator().manual_seed(100 + step)
    for parameter, shard, placement in zip(model.parameters(), shards, PLACEMENTS, strict=True):
        whole = torch.randint(-64, 65, parameter.shape, generator=generator).float() * mesh.size()
        parameter.grad = distribute_tensor(whole, mesh, [placement])
        shard.grad = parameter.grad.to_local().clone()
        if partial:  # every rank holds a summand
            parameter.grad = DTensor.from_local(whole / mesh.size(), mesh, [Partial()], run_check=False)


def equal_to_shards(rank: int, world_size: int, send) -> None:
    """A step on DTensors has the bits of a step on their local shards, whatever the placements of the gradient."""
    mesh = init_device_mesh("cpu", (world_size,))
    for options in ({}, {"amsgrad": True, "weight_decay": 0.1}):
        model = Model(mesh)
        shards = model.local_copies()
        ours, plain = torch.optim.AdamW(model.parameters(), **options), torch.optim.AdamW(shards, **options)
        steps = StalenessAwareAdam(ours), StalenessAwareAdam(plain)
        for step in range(STEPS):
            set_gradients(model, shards, mesh, step, partial=step % 2 == 1)
            delivered = deliver(shards, step)
            steps[0].step(list(model.parameters()), delivered)
            steps[1].step(shards, delivered)
        for parameter, shard in zip(model.parameters(), shards, strict=True):
            state, expected = ours.state[parameter], plain.state[shard]
            assert bits(parameter) == bits(shard)
            assert float(state["step"]) == float(state["last_aware"]) == STEPS
            assert state["last_delivered"].dtype == torch.int32
            for name in ("exp_avg", "exp_avg_sq", "last_delivered", *(["max_exp_avg_sq"] if options else [])):
                assert state[name].placements == parameter.placements
                assert not shard.numel() or bits(state[name]) == bits(expected[name])
            assert not shard.numel() or bits(state["param_rms"]) == bits(expected["param_rms"])
        saved = StalenessAwareAdam.saved(ours, ours.state_dict())["state"]
        for number, (parameter, shape) in enumerate(
            zip(model.parameters(), ((6,), (5,), (1,), (9,), (8,)), strict=True)
        ):
            rms = saved[number]["param_rms"]
            assert rms.shape == shape
            assert all(value == bits(ours.state[parameter]["param_rms"])[0] for value in bits(rms))


def trained(mesh, steps: int) -> tuple[Model, torch.optim.AdamW]:
    """Return a model and its optimizer after some steps."""
    model = Model(mesh)
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.1)
    train(model, optimizer, mesh, range(steps))
    return model, optimizer


def train(model: Model, optimizer: torch.optim.AdamW, mesh, steps: range) -> None:
    """Take staleness-aware steps."""
    aware, shards = StalenessAwareAdam(optimizer), model.local_copies()
    for step in steps:
        set_gradients(model, shards, mesh, step)
        aware.step(list(model.parameters()), deliver(shards, step))


def save(model: Model, optimizer: torch.optim.AdamW, folder: str) -> None:
    """Save model and optimizer with torch.distributed.checkpoint."""
    state = {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)}
    states = StalenessAwareAdam.saved(optimizer, optimizer.state_dict())["state"]
    state["optimizer"]["state"] = dict(zip(NAMES, states.values(), strict=True))
    dcp.save(state, checkpoint_id=Path(folder))


def loaded(mesh, folder: str) -> tuple[Model, torch.optim.AdamW, dict]:
    """Return a model and its optimizer with the saved state, and this state."""
    model = Model(mesh)
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.1)
    state = {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)}
    entries = state["optimizer"]["state"]
    for name in NAMES:
        entries[name] |= template(model.get_parameter(name))
    dcp.load(state, checkpoint_id=Path(folder))
    model.load_state_dict(state["model"])
    set_optimizer_state_dict(model, optimizer, state["optimizer"])
    by_number = {number: entries[name] for number, name in enumerate(NAMES)}
    StalenessAwareAdam.restore(optimizer, optimizer.state_dict() | {"state": by_number})
    return model, optimizer, entries


def checkpoints(rank: int, world_size: int, send) -> None:
    """torch.distributed.checkpoint saves and loads the state. Training continues with the same bits."""
    mesh = init_device_mesh("cpu", (world_size,))
    folder = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(folder)
    model, optimizer = trained(mesh, 3)
    save(model, optimizer, folder[0])
    found = []
    for each, its_optimizer in ((model, optimizer), loaded(mesh, folder[0])[:2]):
        train(each, its_optimizer, mesh, range(3, 6))
        states = [its_optimizer.state[parameter] for parameter in each.parameters()]
        found.append([bits(parameter) for parameter in each.parameters()])
        found[-1] += [bits(state[name]) for state in states for name in ("exp_avg", "last_delivered", "param_rms")]
    assert found[0] == found[1]


def save_for_others(rank: int, world_size: int, send, folder: str) -> None:
    """Save after three steps. Send the root mean squares of this rank's rows."""
    model, optimizer = trained(init_device_mesh("cpu", (world_size,)), 3)
    save(model, optimizer, folder)
    send((rank, [float(optimizer.state[model.weight1]["param_rms"])] * len(model.weight1.to_local())))


def load_of_others(rank: int, world_size: int, send, folder: str) -> None:
    """Load the state of another number of ranks, and take a step."""
    mesh = init_device_mesh("cpu", (world_size,))
    model, optimizer, entries = loaded(mesh, folder)
    state, rows = optimizer.state[model.weight1], entries["weight1"]["param_rms"].to_local().tolist()
    assert float(state["param_rms"]) == rows[0]
    send((rows, state["last_delivered"].full_tensor().tolist()))
    train(model, optimizer, mesh, range(3, 4))
    assert float(state["last_aware"]) == 4


def template(parameter: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the owned entries of a parameter before any are loaded, from one step on a copy."""
    copy = nn.Parameter(parameter.detach().clone())
    copy.grad = torch.zeros_like(copy)
    optimizer = torch.optim.AdamW([copy])
    StalenessAwareAdam(optimizer).step([copy], [None])
    (saved,) = StalenessAwareAdam.saved(optimizer, optimizer.state_dict())["state"].values()
    return {name: saved[name] for name in ("last_delivered", "last_aware", "param_rms")}
