"""Worker processes of tests/distributed/test_discarded_passes.py: backward passes whose gradients are thrown away."""

from __future__ import annotations

from collections.abc import Callable

import torch
from ddp_models import net
from helpers import loss_of, same_everywhere
from model_kinds import KINDS, SETTINGS, adamw, bits, opened, sgd, wrapped
from torch import nn
from tritoncomm import SparseOptimizer, wrap
from tritoncomm.step.tensors.shards import local

import laws

WAYS = ("optimizer", "to zero", "model", "twice", "by hand", "synchronized", "autograd.grad")


def throw_away(way: str, model: nn.Module, optimizer: SparseOptimizer, rank: int) -> None:
    """Run a backward pass for gradients that no step uses."""
    if way == "autograd.grad":
        torch.autograd.grad(loss_of(getattr(model, "module", model), rank, 99), next(iter(model.parameters())))
        return
    for number in range(2 if way == "twice" else 1):
        if number:
            optimizer.zero_grad()
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


def discarded_passes(rank: int, world_size: int, send) -> None:
    """A pass that no step uses changes nothing, to the bit, however its gradients were thrown away."""
    finals = {}
    for kind in KINDS:
        for way in ("none", *WAYS) if kind != "plain" else ("none", "synchronized"):
            if (kind, way) == ("fsdp", "autograd.grad"):
                continue  # FSDP2 replaces the parameters during a pass
            model, optimizer = wrapped(kind, net(), adamw)
            for step in range(6):
                optimizer.zero_grad()
                if step in (2, 3, 5) and way != "none":
                    saved = optimizer.state_dict()["tritoncomm"]
                    throw_away(way, model, optimizer, rank)
                    present = optimizer.state_dict()["tritoncomm"]
                    assert all(map(laws.same_bits, present["residuals"], saved["residuals"])), (kind, way, step)
                    assert str(present["algorithm"]) == str(saved["algorithm"])
                loss_of(model, rank, step).backward()
                optimizer.step()
            finals[kind, way] = bits(model), optimizer.metrics()["residual_norm"]
            assert optimizer.metrics()["skipped_steps"] == (3 if way == "synchronized" else 0)
    assert float(finals["plain", "none"][1]) > 0
    for place, final in finals.items():
        assert final == finals["plain", "none"], place


def alike(train: Callable[..., list[int]], rank: int) -> None:
    """Raise unless ``train(kind, rank)`` returns the same bits for every kind of module, on all ranks."""
    plain, *others = [train(kind, rank) for kind in KINDS]
    assert all(other == plain for other in others), train.__name__
    assert same_everywhere(plain)


def adversaries(rank: int, world_size: int, send) -> None:
    """Two models, each with an optimizer, of which one passes gradients through the other, as a GAN does."""
    alike(_adversaries, rank)


def _adversaries(kind: str, rank: int) -> list[int]:
    torch.manual_seed(0)
    generator, of_generator = wrapped(kind, nn.Sequential(nn.Linear(4, 30), nn.Tanh(), nn.Linear(30, 6)), adamw)
    critic, of_critic = wrapped(kind, nn.Sequential(nn.Linear(6, 30), nn.Tanh(), nn.Linear(30, 1)), sgd)
    for step in range(5):
        source = torch.Generator().manual_seed(100 * step + rank)
        real, noise = torch.randn(8, 6, generator=source), torch.randn(8, 4, generator=source)
        of_critic.zero_grad()  # also of what the generator's pass has left
        critic(real).square().mean().backward()
        (1 - critic(generator(noise).detach())).square().mean().backward()
        of_critic.step()
        of_generator.zero_grad()
        critic(generator(noise)).square().mean().backward()
        of_generator.step()
    assert of_critic.metrics()["steps"] == of_generator.metrics()["steps"] == 5
    return bits(generator, critic)


def optimizers_in_turns(rank: int, world_size: int, send) -> None:
    """Two optimizers of one model: one steps, and the other throws its gradients away, or adds them up."""
    alike(_in_turns, rank)


def _in_turns(kind: str, rank: int) -> list[int]:
    model, given = opened(kind, net())
    parameters = list(model.parameters())
    halves = parameters[:2] + parameters[4:], parameters[2:4]
    one, other = (wrap(adamw(half), **SETTINGS, **given) for half in halves)
    for step in range(8):
        one.zero_grad()
        if step % 4 < 2:
            other.zero_grad()
        loss_of(model, rank, step).backward()
        held = bits(nn.ParameterList(halves[1]))
        one.step()
        assert bits(nn.ParameterList(halves[1])) == held
        if step % 4 == 3:
            other.step()  # over two passes
    assert (one.metrics()["steps"], other.metrics()["steps"]) == (8, 2)
    return bits(model)


def two_passes(rank: int, world_size: int, send) -> None:
    """Sharpness-aware minimization: a first pass moves the parameters, and the step uses the second one alone."""
    alike(_two_passes, rank)


def _two_passes(kind: str, rank: int) -> list[int]:
    model, optimizer = wrapped(kind, net(), sgd)
    parameters = list(model.parameters())
    for step in range(5):
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
    return bits(model)


def skipped_batches(rank: int, world_size: int, send) -> None:
    """A batch that all ranks skip, or one rank alone, which then takes part with zeros."""
    alike(_skipped_batches, rank)


def _skipped_batches(kind: str, rank: int) -> list[int]:
    model, optimizer = wrapped(kind, net(), adamw)
    for step in range(6):
        optimizer.zero_grad()
        loss_of(model, rank, step).backward()
        if step == 2:
            optimizer.zero_grad()
            continue
        if step in (3, 4) and rank == 1:
            optimizer.zero_grad(set_to_none=step == 3)
        optimizer.step()
    assert optimizer.metrics()["steps"] == 5
    return bits(model)


def flushed_and_synchronized(rank: int, world_size: int, send) -> None:
    """What a flush delivers is not taken back by ``zero_grad()``. An exchange that no step uses is."""
    for kind in KINDS:
        model, optimizer = wrapped(kind, net(), adamw)
        for step in range(5):
            optimizer.zero_grad()
            loss_of(model, rank, step).backward()
            optimizer.step()
        assert optimizer.metrics()["residual_norm"] > 0
        optimizer.flush()
        assert optimizer.metrics()["residual_norm"] == 0
        after = bits(model)
        loss_of(model, rank, 6).backward()
        optimizer.synchronize()
        assert optimizer.metrics()["residual_norm"] == 0
        optimizer.zero_grad()
        assert optimizer.metrics()["residual_norm"] == 0
        assert bits(model) == after
