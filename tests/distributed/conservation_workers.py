"""Worker processes of tests/distributed/test_door_edges.py: gradients that are used are applied once, others never.

Whatever order a program calls things in, the change of the parameters by SGD, times the number of ranks over the
learning rate, plus the residuals of all ranks, is the sum of the gradients that were used.
"""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch
import tritoncomm
from ddp_models import ddp, net
from fsdp_models import Net, sharded
from fsdp_models import loss_of as loss_of_shards
from helpers import loss_of, total
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from tritoncomm.step.shards import local

LR = 0.05
SETTINGS = {"density": 0.1, "dense_below": 0, "warmup_steps": 0, "select_by": "gradient"}
ONE, OTHER = ["0.weight", "0.bias", "4.weight", "4.bias"], ["2.weight", "2.bias"]


def sgd(parameters: Iterable[torch.Tensor]) -> torch.optim.SGD:
    """Return SGD without momentum, whose step is the gradient times the learning rate."""
    return torch.optim.SGD(parameters, lr=LR)


class Account:
    """The gradients of ``model`` that were used, and what has come of them. ``twin`` is a plain model of its kind."""

    def __init__(self, model: nn.Module, twin: nn.Module, rank: int, loss=loss_of) -> None:
        self.rank, self.loss, self.twin, self.bare = rank, loss, twin, getattr(model, "module", model)
        self.model, self.parameters = model, dict(self.bare.named_parameters())
        self.start = {name: local(p.detach()).clone() for name, p in self.parameters.items()}
        self.used = {name: torch.zeros_like(start) for name, start in self.start.items()}

    def backward(self, step: int, used: Iterable[str] | None = None) -> None:
        """Run a backward pass. A step will use the gradients of the parameters ``used``, by default of all."""
        for name, p in self.twin.named_parameters():
            p.data.copy_(local(self.parameters[name].detach()))
        names = list(self.parameters) if used is None else list(used)
        gradients = torch.autograd.grad(self.loss(self.twin, self.rank, step), list(self.twin.parameters()))
        for (name, _), gradient in zip(self.twin.named_parameters(), gradients, strict=True):
            self.used[name] += gradient * (name in names)
        self.loss(self.model, self.rank, step).backward()

    def step(self, optimizer: torch.optim.Optimizer, steps: range) -> None:
        """Train."""
        for step in steps:
            optimizer.zero_grad()
            self.backward(step)
            optimizer.step()

    def check(self, exchange, situation: str) -> None:
        """Compare what was used with what has come of it, and what is left."""
        left = {p: part for vector in exchange.vectors for p, part in vector.residuals_by_parameter().items()}
        world_size = torch.distributed.get_world_size()
        for name, p in self.parameters.items():
            used, residual = total(self.used[name]), total(left[p].reshape(self.start[name].shape))
            applied = (self.start[name] - local(p.detach())) * world_size / LR
            assert torch.allclose(applied + residual, used, atol=1e-4 * float(used.abs().max())), (situation, name)


def bare_steps_between(rank: int, world_size: int, send) -> None:
    """A step of an optimizer that is not wrapped, or not any more, is not taken back."""
    for situation in ("released", "registered", "wrapped again", "deleted"):
        model = ddp(net())
        raw = sgd(model.parameters())
        state = tritoncomm.ddp.register(model, density=0.1, dense_below=0, warmup_steps=0)
        account = Account(model, net(), rank)
        if situation != "registered":
            optimizer = tritoncomm.wrap(raw, model=model, select_by="gradient")
            account.step(optimizer, range(3))
            optimizer.release()
            if situation == "deleted":
                del optimizer
        for step in range(3, 6):
            raw.zero_grad()
            account.backward(step)
            raw.step()
            if situation == "released":
                optimizer.zero_grad()
        if situation != "released":
            optimizer = tritoncomm.wrap(raw, model=model, select_by="gradient")
            optimizer.zero_grad()
            account.step(optimizer, range(6, 8))
            optimizer.zero_grad()
        account.check(state.exchange, situation)


def parts_of_a_pass(rank: int, world_size: int, send) -> None:
    """A part of a pass that a step uses is used, and the others are not: by optimizer, and by parameter."""
    for situation in ("zero_grad", "flush", "no gradient"):
        model = ddp(net())
        account = Account(model, net(), rank)
        groups = [[account.parameters[name] for name in names] for names in (ONE, OTHER)]
        one, other = (tritoncomm.wrap(sgd(group), model=model, **SETTINGS) for group in groups)
        for step in range(4):
            one.zero_grad()
            other.zero_grad()
            account.backward(step)
            one.step()
            other.step()
        model.zero_grad()
        account.backward(9, ONE)
        if situation == "no gradient":
            for p in groups[1]:
                p.grad = None
            other.step()
        one.step()
        if situation == "flush":
            one.flush()
        else:
            other.zero_grad()
        model.zero_grad()
        account.backward(10)
        one.step()
        other.step()
        account.check(one._exchange, situation)


def failing_flush(rank: int, world_size: int, send) -> None:
    """A flush whose step a hook of the user prevents has applied nothing, and loses nothing."""
    for hooked in (True, False):
        model = net()
        outer = ddp(model) if hooked else model
        raw = sgd(model.parameters())
        optimizer = tritoncomm.wrap(raw, **({"model": outer} if hooked else {}), **SETTINGS)
        account = Account(outer, net(), rank)
        account.step(optimizer, range(4))
        optimizer.zero_grad()
        handle = raw.register_step_pre_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            optimizer.flush()
        handle.remove()
        optimizer.zero_grad()
        account.check(optimizer._exchange, f"hooked {hooked}")
        optimizer.flush()
        account.check(optimizer._exchange, f"flushed, hooked {hooked}")
        assert optimizer.metrics()["residual_norm"] < 1e-6


def synchronized_and_loaded(rank: int, world_size: int, send) -> None:
    """What ``synchronize`` has delivered before a state without residual is loaded is not lost."""
    model = net()
    optimizer = tritoncomm.wrap(sgd(model.parameters()), **SETTINGS)
    account = Account(model, net(), rank)
    account.step(optimizer, range(4))
    steps = optimizer.metrics()["steps"]
    optimizer.zero_grad()
    account.backward(9, ())
    optimizer.synchronize()
    optimizer.load_state_dict(optimizer.optimizer.state_dict())
    account.check(optimizer._exchange, "loaded")
    assert optimizer.metrics()["steps"] == steps


def shards_in_turns(rank: int, world_size: int, send) -> None:
    """Of two optimizers of FSDP2, one steps after each pass, the other adds up two, or throws the first one away."""
    grid = init_device_mesh("cpu", (world_size, 1), mesh_dim_names=("replicate", "shard"))
    for situation in ("adds up", "thrown away"):
        model = sharded(Net(), grid["shard"])
        names = [name for name, _ in model.named_parameters()]
        account = Account(model, Net(), rank, loss_of_shards)
        halves = names[: len(names) // 2], names[len(names) // 2 :]
        group = grid["replicate"].get_group()
        one, other = (
            tritoncomm.wrap(
                sgd([account.parameters[name] for name in half]), model=model, process_group=group, **SETTINGS
            )
            for half in halves
        )
        for step in range(8):
            one.zero_grad()
            if step % 2 == 0 or situation == "thrown away":
                other.zero_grad()
            account.backward(step, halves[0] if step % 2 == 0 and situation == "thrown away" else None)
            one.step()
            if step % 2:
                other.step()
        one.zero_grad()
        other.zero_grad()
        account.check(one._exchange, situation)
