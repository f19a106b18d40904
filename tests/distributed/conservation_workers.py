"""Worker processes of tests/distributed/test_conservation.py: gradients that are used are applied once, others never.

Whatever order a program calls things in, the change of the parameters by SGD, times the number of ranks over the
learning rate, plus the residuals of all ranks, is the sum of the gradients that were used.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product

import pytest
import torch
import tritoncomm
from ddp_models import net
from helpers import loss_of, total
from model_kinds import KINDS, opened
from tritoncomm.step.tensors.shards import local

LR = 0.05
SETTINGS = {"density": 0.1, "dense_below": 0, "warmup_steps": 0, "select_by": "gradient"}
HALVES = ["0.weight", "0.bias", "4.weight", "4.bias"], ["2.weight", "2.bias"]


class Account:
    """The gradients of a module of some kind that were used, and what has come of them."""

    def __init__(self, kind: str, rank: int) -> None:
        self.rank, self.twin = rank, net()
        self.model, self.given = opened(kind, net())
        self.parameters = dict(getattr(self.model, "module", self.model).named_parameters())
        self.start = {name: local(p.detach()).clone() for name, p in self.parameters.items()}
        self.used = {name: torch.zeros_like(start) for name, start in self.start.items()}

    def wrap(self, names: Iterable[str] | None = None, **settings) -> tritoncomm.SparseOptimizer:
        """Return a wrapped SGD without momentum, whose step is the gradient times the learning rate."""
        parameters = [self.parameters[name] for name in (self.parameters if names is None else names)]
        return tritoncomm.wrap(torch.optim.SGD(parameters, lr=LR), **SETTINGS | self.given | settings)

    def backward(self, step: int, used: Iterable[str] | None = None) -> None:
        """Run a backward pass. A step will use the gradients of the parameters ``used``, by default of all."""
        for name, p in self.twin.named_parameters():
            p.data.copy_(local(self.parameters[name].detach()))
        names = list(self.parameters) if used is None else list(used)
        gradients = torch.autograd.grad(loss_of(self.twin, self.rank, step), list(self.twin.parameters()))
        for (name, _), gradient in zip(self.twin.named_parameters(), gradients, strict=True):
            self.used[name] += gradient * (name in names)
        loss_of(self.model, self.rank, step).backward()

    def step(self, optimizer: torch.optim.Optimizer, steps: range) -> None:
        """Train."""
        for step in steps:
            optimizer.zero_grad()
            self.backward(step)
            optimizer.step()

    def check(self, *optimizers: tritoncomm.SparseOptimizer) -> None:
        """Compare what was used with what has come of it, and what is left."""
        vectors = [vector for optimizer in optimizers for vector in optimizer._exchange.vectors]
        left = {p: part for vector in vectors for p, part in vector.residuals_by_parameter().items()}
        world_size = torch.distributed.get_world_size()
        for name, p in self.parameters.items():
            used, residual = total(self.used[name]), total(left[p].reshape(self.start[name].shape))
            applied = (self.start[name] - local(p.detach())) * world_size / LR
            assert torch.allclose(applied + residual, used, atol=1e-4 * float(used.abs().max())), name


def parts_of_a_pass(rank: int, world_size: int, send) -> None:
    """A part of a pass that a step uses is used, and the others are not: by optimizer, and by parameter."""
    for kind, situation in product(KINDS, ("zero_grad", "flush", "no gradient", "synchronized")):
        account = Account(kind, rank)
        one, other = (account.wrap(half) for half in HALVES)
        for step in range(4):
            one.zero_grad()
            other.zero_grad()
            account.backward(step)
            one.step()
            other.step()
        one.zero_grad()
        other.zero_grad()
        account.backward(9, HALVES[0])
        if situation == "no gradient":
            for name in HALVES[1]:
                account.parameters[name].grad = None
            other.step()
        if situation == "synchronized":
            other.synchronize()
        one.step()
        if situation == "flush":
            one.flush()
        other.zero_grad()
        one.zero_grad()
        account.backward(10)
        one.step()
        other.step()
        account.check(one, other)


def optimizers_in_turns(rank: int, world_size: int, send) -> None:
    """Of two optimizers, one steps after each pass, the other adds up two, or throws the first one away."""
    for kind, situation in product(KINDS, ("adds up", "thrown away")):
        account = Account(kind, rank)
        one, other = (account.wrap(half) for half in HALVES)
        for step in range(8):
            one.zero_grad()
            if step % 2 == 0 or situation == "thrown away":
                other.zero_grad()
            account.backward(step, HALVES[0] if step % 2 == 0 and situation == "thrown away" else None)
            one.step()
            if step % 2:
                other.step()
        account.check(one, other)


def failing_flush(rank: int, world_size: int, send) -> None:
    """A flush whose step a hook of the user prevents has applied nothing, and loses nothing."""
    for kind in KINDS:
        account = Account(kind, rank)
        optimizer = account.wrap()
        account.step(optimizer, range(4))
        optimizer.zero_grad()
        handle = optimizer.optimizer.register_step_pre_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            optimizer.flush()
        handle.remove()
        account.check(optimizer)
        optimizer.zero_grad()
        account.check(optimizer)
        optimizer.flush()
        account.check(optimizer)
        assert optimizer.metrics()["residual_norm"] < 1e-6


def synchronized_and_loaded(rank: int, world_size: int, send) -> None:
    """What ``synchronize`` has exchanged before a state without residual is loaded is not lost."""
    for kind in KINDS:
        account = Account(kind, rank)
        optimizer = account.wrap()
        account.step(optimizer, range(4))
        steps = optimizer.metrics()["steps"]
        optimizer.zero_grad()
        account.backward(9, ())
        optimizer.synchronize()
        account.check(optimizer)  # residuals change when the step is applied
        optimizer.load_state_dict(optimizer.optimizer.state_dict())
        account.check(optimizer)
        assert optimizer.metrics()["steps"] == steps


def changed_settings(rank: int, world_size: int, send) -> None:
    """A new density, by saving and loading, accumulation, and rejected steps lose nothing."""
    for kind in KINDS:
        account = Account(kind, rank)
        optimizer = account.wrap()
        account.step(optimizer, range(3))
        state = optimizer.state_dict()
        optimizer = account.wrap(density=0.3)
        optimizer.load_state_dict(state)
        account.check(optimizer)
        for step in range(3, 6):
            optimizer.zero_grad()
            for micro in range(2):
                account.backward(10 * step + micro)
            optimizer.step()
        optimizer.zero_grad()
        account.backward(99, ())
        if rank == 1:
            local(next(iter(account.parameters.values())).grad)[0, 0] = float("inf")
        optimizer.step()
        assert optimizer.metrics()["skipped_steps"] == 1
        account.step(optimizer, range(60, 62))
        account.check(optimizer)
