"""Backward passes in any order, in modules of each kind: gradients that are used are applied once, others never."""

from __future__ import annotations

import pytest
import torch
import tritoncomm
from models import KINDS, adamw, equal, exact, flat, loss_of, net, opened, residual, sgd, total, train
from torch import nn
from tritoncomm.step.tensors.shards import local

from ranks import ranks

LR = 0.05
HALVES = ["0.weight", "0.bias", "4.weight", "4.bias"], ["2.weight", "2.bias"]


class Account:
    """A module of some kind, the gradients of it that were used, and what has come of them.

    The change of the parameters by SGD, times the number of ranks over the learning rate, plus the residuals of all
    ranks, is the sum of the gradients that were used.
    """

    def __init__(self, kind: str, rank: int) -> None:
        self.rank, self.twin = rank, net()
        self.model, self.given = opened(kind, net())
        self.parameters = dict(getattr(self.model, "module", self.model).named_parameters())
        self.start = {name: local(p.detach()).clone() for name, p in self.parameters.items()}
        self.used = {name: torch.zeros_like(start) for name, start in self.start.items()}

    def wrap(self, names=None, **settings) -> tritoncomm.SparseOptimizer:
        """Return a wrapped SGD without momentum, whose step is the gradient times the learning rate."""
        parameters = [self.parameters[name] for name in names or self.parameters]
        return exact(torch.optim.SGD(parameters, lr=LR), **{"density": 0.1} | self.given | settings)

    def backward(self, step: int, used=None) -> None:
        """Run a backward pass. A step will use the gradients of the parameters ``used``, by default of all."""
        for name, p in self.twin.named_parameters():
            p.data.copy_(local(self.parameters[name].detach()))
        names = list(self.parameters) if used is None else list(used)
        found = torch.autograd.grad(loss_of(self.twin, self.rank, step), list(self.twin.parameters()))
        for (name, _), gradient in zip(self.twin.named_parameters(), found, strict=True):
            self.used[name] += gradient * (name in names)
        loss_of(self.model, self.rank, step).backward()

    def train(self, optimizer: tritoncomm.SparseOptimizer, steps: range) -> None:
        """Take steps."""
        for step in steps:
            optimizer.zero_grad()
            self.backward(step)
            optimizer.step()

    def check(self, *optimizers: tritoncomm.SparseOptimizer) -> None:
        """Compare what was used with what has come of it, and what is left."""
        vectors = [vector for optimizer in optimizers for vector in optimizer._tritoncomm.setup.exchange.vectors]
        left = {p: part for vector in vectors for p, part in vector.residuals_by_parameter().items()}
        for name, p in self.parameters.items():
            used, pending = total(self.used[name]), total(left[p].reshape(self.start[name].shape))
            applied = (self.start[name] - local(p.detach())) * torch.distributed.get_world_size() / LR
            assert torch.allclose(applied + pending, used, atol=1e-4 * float(used.abs().max())), name


@ranks(2)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("situation", ["zero_grad", "flush", "no gradient", "synchronized"])
def test_parts_of_a_pass(rank, world_size, kind, situation):
    """A part of a pass that a step uses is used, and the others are not: by optimizer, and by parameter."""
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


@ranks(2)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("adds_up", [False, True])
def test_optimizers_in_turns(rank, world_size, kind, adds_up):
    """Of two optimizers, one steps after each pass, the other adds up two, or throws the first one away."""
    account = Account(kind, rank)
    one, other = (account.wrap(half) for half in HALVES)
    for step in range(8):
        one.zero_grad()
        if step % 2 == 0 or not adds_up:
            other.zero_grad()
        account.backward(step, HALVES[0] if step % 2 == 0 and not adds_up else None)
        one.step()
        if step % 2:
            other.step()
    account.check(one, other)


@ranks(2)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", ["step", "flush"])
def test_failing_flush(rank, world_size, kind, way):
    """A flush whose step a hook of the user prevents has applied nothing, and loses nothing. ``step`` repeats it."""
    account = Account(kind, rank)
    optimizer = account.wrap()
    account.train(optimizer, range(4))
    optimizer.zero_grad()
    handle = optimizer.register_step_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        optimizer.flush()
    handle.remove()
    account.check(optimizer)
    if way == "flush":
        optimizer.zero_grad()
        account.check(optimizer)
    getattr(optimizer, way)()
    account.check(optimizer)
    assert optimizer.metrics()["residual_norm"] < 1e-6


@ranks(2)
@pytest.mark.parametrize("kind", KINDS)
def test_changed_settings(rank, world_size, kind):
    """A bare state after ``synchronize``, a new density, micro-batches, and a rejected step lose nothing."""
    account = Account(kind, rank)
    optimizer = account.wrap()
    account.train(optimizer, range(3))
    bare = {key: each for key, each in optimizer.state_dict().items() if key != "tritoncomm"}
    optimizer.zero_grad()
    account.backward(9, ())
    optimizer.synchronize()
    optimizer.load_state_dict(bare)
    account.check(optimizer)
    assert optimizer.metrics()["steps"] == 3
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
    account.train(optimizer, range(60, 62))
    account.check(optimizer)


@ranks(2)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", ["optimizer", "to zero", "model", "twice", "by hand", "synchronized"])
def test_discarded_passes(rank, world_size, kind, way):
    """A pass that no step uses changes nothing, to the bit, however its gradients were thrown away."""
    ends = []
    for discards in (False, True):
        model, given = opened(kind if discards else "plain", net())
        optimizer = exact(adamw(model), **given)
        for step in range(5):
            optimizer.zero_grad()
            for _ in range((1 + (way == "twice")) * discards * (step in (2, 4))):
                pending = residual(optimizer)
                (-3 * loss_of(model, rank, 99)).backward()
                if way == "synchronized":
                    optimizer.synchronize()
                if way == "model":
                    model.zero_grad()
                elif way == "by hand":
                    for parameter in model.parameters():
                        parameter.grad = None
                else:
                    optimizer.zero_grad(set_to_none=way != "to zero")
                assert torch.equal(residual(optimizer), pending)
            loss_of(model, rank, step).backward()
            optimizer.step()
        ends.append(torch.cat([flat(model), residual(optimizer)]))
    assert torch.equal(*ends)
    assert optimizer.metrics()["skipped_steps"] == 2 * (way == "synchronized")


def adversaries(kind: str, rank: int) -> torch.Tensor:
    """Train two models, of which one passes gradients through the other, as a GAN does."""
    torch.manual_seed(0)
    generator, given = opened(kind, nn.Sequential(nn.Linear(4, 30), nn.Tanh(), nn.Linear(30, 6)))
    of_generator = exact(adamw(generator), **given)
    critic, given = opened(kind, nn.Sequential(nn.Linear(6, 30), nn.Tanh(), nn.Linear(30, 1)))
    of_critic = exact(sgd(critic), **given)
    for step in range(4):
        source = torch.Generator().manual_seed(100 * step + rank)
        real, noise = torch.randn(8, 6, generator=source), torch.randn(8, 4, generator=source)
        of_critic.zero_grad()  # also of what the generator's pass has left
        critic(real).square().mean().backward()
        (1 - critic(generator(noise).detach())).square().mean().backward()
        of_critic.step()
        of_generator.zero_grad()
        critic(generator(noise)).square().mean().backward()
        of_generator.step()
    return torch.cat([flat(generator), flat(critic)])


def two_passes(kind: str, rank: int) -> torch.Tensor:
    """Train as sharpness-aware minimization does: a first pass moves the parameters, and the second one is used."""
    model, given = opened(kind, net())
    optimizer, parameters = exact(sgd(model), **given), list(model.parameters())
    for step in range(4):
        optimizer.zero_grad()
        loss_of(model, rank, step).backward()
        held = [local(p.detach()).clone() for p in parameters]
        with torch.no_grad():
            for p in parameters:  # by this rank's own gradient, so that ranks differ until they are moved back
                local(p).add_(local(p.grad).sign(), alpha=1e-3)
        optimizer.zero_grad()
        loss_of(model, rank, step).backward()
        with torch.no_grad():
            for p, before in zip(parameters, held, strict=True):
                local(p).copy_(before)
        optimizer.step()
    return flat(model)


def skipped_batches(kind: str, rank: int) -> torch.Tensor:
    """Leave out a batch on all ranks, and on one, which then takes part with zeros."""
    model, given = opened(kind, net())
    optimizer = exact(adamw(model), **given)
    for step in range(6):
        optimizer.zero_grad()
        loss_of(model, rank, step).backward()
        if step == 2:
            continue
        if step in (3, 4) and rank == 1:
            optimizer.zero_grad(set_to_none=step == 3)
        optimizer.step()
    assert optimizer.metrics()["steps"] == 5
    return flat(model)


def flushed(kind: str, rank: int) -> torch.Tensor:
    """Flush, and throw an exchange away, which does not take back the flush."""
    model, given = opened(kind, net())
    optimizer = exact(adamw(model), **given)
    train(model, optimizer, rank, range(4))
    optimizer.flush()
    after = flat(model)
    loss_of(model, rank, 6).backward()
    optimizer.synchronize()
    optimizer.zero_grad()
    assert optimizer.metrics()["residual_norm"] == 0
    assert torch.equal(flat(model), after)
    return after


LOOPS = {each.__name__: each for each in (adversaries, two_passes, skipped_batches, flushed)}


@ranks(2)
@pytest.mark.parametrize("loop", LOOPS)
def test_loops(rank, world_size, loop):
    """They end with the same bits for every kind of module, on all ranks."""
    plain, *others = [LOOPS[loop](kind, rank) for kind in KINDS]
    assert all(torch.equal(other, plain) for other in others)
    assert equal([plain])
