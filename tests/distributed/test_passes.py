"""Backward passes in any order, in modules of each kind: gradients that are used are applied once, others never."""

from __future__ import annotations

import pytest
import torch
from models import KINDS, adamw, equal, exact, flat, loss_of, net, opened, residual, sgd, train
from torch import nn
from tritoncomm.step.tensors.shards import local

from ranks import ranks


@ranks(2)
@pytest.mark.parametrize("way", ["step", "flush"])
def test_failing_flush(rank, world_size, way):
    """A flush whose step a hook of the user prevents has applied nothing, and loses nothing. ``step`` repeats it."""
    ends = []
    for fails in (False, True):
        model = net()
        optimizer = exact(sgd(model))
        train(model, optimizer, rank, range(4))
        optimizer.zero_grad()
        if fails:
            before, pending = flat(model), residual(optimizer)
            handle = optimizer.register_step_pre_hook(lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                optimizer.flush()
            handle.remove()
            assert torch.equal(flat(model), before)
            assert torch.equal(residual(optimizer), pending)
            if way == "flush":
                optimizer.zero_grad()
        getattr(optimizer, way if fails else "flush")()
        assert not residual(optimizer).any()
        ends.append(flat(model))
    assert torch.equal(*ends)


WAYS = ["to zero", "twice", "synchronized"]


@ranks(2)
@pytest.mark.parametrize(
    ("way", "kind"), [("model", "plain"), ("by hand", "plain"), *((way, kind) for way in WAYS for kind in KINDS)]
)
def test_discarded_passes(rank, world_size, kind, way):
    """A pass that no step uses changes nothing, to the bit, however its gradients were thrown away."""
    ends = []
    for discards in (False, True):
        model, given = opened(kind if discards else "plain", net())
        optimizer = exact(adamw(model), **given)
        for step in range(3):
            optimizer.zero_grad()
            for _ in range((1 + (way == "twice")) * discards * (step > 0)):
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


LOOPS = {each.__name__: each for each in (adversaries, two_passes, skipped_batches)}


@ranks(2)
@pytest.mark.parametrize("loop", LOOPS)
def test_loops(rank, world_size, loop):
    """They end with the same bits for every kind of module, on all ranks."""
    plain, *others = [LOOPS[loop](kind, rank) for kind in KINDS]
    assert all(torch.equal(other, plain) for other in others)
    assert equal([plain])
