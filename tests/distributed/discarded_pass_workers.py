"""Worker processes of tests/distributed/test_door_edges.py: backward passes whose gradients are thrown away."""

from __future__ import annotations

import torch
import tritoncomm
from ddp_models import ddp, net
from fsdp_models import Net, mesh, sharded
from fsdp_models import loss_of as loss_of_shards
from helpers import adamw, flat, loss_of, same_everywhere
from sharded_door_workers import whole
from torch import nn

SETTINGS = {"density": 0.1, "dense_below": 0, "warmup_steps": 2}
WAYS = ("optimizer", "to zero", "model", "twice", "by hand")


def throw_away(way: str, model: nn.Module, optimizer: tritoncomm.SparseOptimizer, loss, rank: int) -> None:
    """Run a backward pass for gradients that no step uses, as an adversary does."""
    for number in range(2 if way == "twice" else 1):
        if number:
            optimizer.zero_grad()
        (-3 * loss(model, rank, 99)).backward()
    if way == "model":
        model.zero_grad()
    elif way == "by hand":
        for parameter in model.parameters():
            parameter.grad = None
    else:
        optimizer.zero_grad(set_to_none=way != "to zero")


def discarded_passes(rank: int, world_size: int, send) -> None:
    """A pass of DDP that no step uses changes nothing, to the bit, however its gradients were thrown away."""
    finals = []
    for way in ("none", *WAYS):
        model = ddp(net())
        optimizer = tritoncomm.wrap(adamw(model), model=model, **SETTINGS)
        for step in range(8):
            optimizer.zero_grad()
            if step in (2, 3, 6) and way != "none":  # DDP builds other buckets after the first pass
                saved = optimizer.state_dict()["tritoncomm"]
                throw_away(way, model, optimizer, loss_of, rank)
                if way not in ("model", "by hand"):  # which the optimizer does not see
                    present = optimizer.state_dict()["tritoncomm"]
                    for name, before in saved["residuals"].items():
                        assert torch.equal(present["residuals"][name], before), (way, step, name)
                    assert str(present["algorithm"]) == str(saved["algorithm"])
            loss_of(model, rank, step).backward()
            optimizer.step()
        assert same_everywhere(flat(model)), way
        finals.append((flat(model), optimizer.metrics()["residual_norm"]))
    assert float(finals[0][1]) > 0
    for way, final in zip(WAYS, finals[1:], strict=True):
        assert final == finals[0], way


def optimizers_in_turns(rank: int, world_size: int, send) -> None:
    """Of two optimizers of one model, one steps, and the other throws its gradients away. Its residual stays."""
    model = ddp(net())
    layers = model.module
    halves = [[*layers[0].parameters(), *layers[4].parameters()], [*layers[2].parameters()]]
    one, other = (tritoncomm.wrap(torch.optim.AdamW(half, lr=0.01), model=model, **SETTINGS) for half in halves)
    names = {"2.weight", "2.bias"}
    for step in range(8):
        for each in (one, other):
            each.zero_grad()
        loss_of(model, rank, step).backward()
        for each in (one, other):
            each.step()
        before = {name: kept.clone() for name, kept in one._hook.state_dict()["residuals"].items()}
        held = [parameter.detach().clone() for parameter in halves[1]]
        for each in (one, other):
            each.zero_grad()
        loss_of(model, rank, 50 + step).backward()
        one.step()
        if step % 2:
            other.zero_grad()
        model.zero_grad()
        loss_of(model, rank, 70 + step).backward()  # notices what was not used
        model.zero_grad()
        other.zero_grad()
        one.zero_grad()
        after = one._hook.state_dict()["residuals"]
        for name, kept in before.items():
            if name in names:
                assert torch.equal(after[name], kept), (step, name)
        assert step < 3 or not torch.equal(after["0.weight"], before["0.weight"])  # dense steps leave nothing
        assert all(torch.equal(p, q) for p, q in zip(halves[1], held, strict=True))
    assert same_everywhere(flat(model))


def flushed_and_synchronized(rank: int, world_size: int, send) -> None:
    """What a flush delivers is not taken back. An exchange by ``synchronize`` that no step uses is."""
    model = ddp(net())
    optimizer = tritoncomm.wrap(adamw(model), model=model, **SETTINGS)
    for step in range(5):
        optimizer.zero_grad()
        loss_of(model, rank, step).backward()
        optimizer.step()
    assert optimizer.metrics()["residual_norm"] > 0
    optimizer.flush()
    assert optimizer.metrics()["residual_norm"] == 0
    loss_of(model, rank, 6).backward()
    optimizer.zero_grad()
    assert optimizer.metrics()["residual_norm"] == 0
    finals = []
    for discards in (False, True):
        plain = net()
        optimizer = tritoncomm.wrap(adamw(plain), **SETTINGS)
        for step in range(6):
            optimizer.zero_grad()
            if discards and step in (2, 4):
                loss_of(plain, rank, 99).backward()
                optimizer.synchronize()
                optimizer.zero_grad()
            loss_of(plain, rank, step).backward()
            optimizer.step()
        finals.append((flat(plain), optimizer.metrics()["residual_norm"]))
    assert finals[0] == finals[1]
    assert float(finals[0][1]) > 0


def discarded_passes_of_shards(rank: int, world_size: int, send) -> None:
    """A pass of FSDP2 that no step uses changes nothing, to the bit. Neither do several that are discarded together."""
    grid = mesh()
    finals = []
    for way in ("none", *WAYS, "together"):
        model = sharded(Net(), grid["shard"])
        optimizer = tritoncomm.wrap(adamw(model), model=model, process_group=grid["replicate"].get_group(), **SETTINGS)
        for step in range(8):
            optimizer.zero_grad()
            if step in (2, 3, 6) and way != "none":
                for _ in range(3 if way == "together" else 0):  # each adds to what was delivered
                    loss_of_shards(model, rank, 98).backward()
                throw_away(way, model, optimizer, loss_of_shards, rank)
            loss_of_shards(model, rank, step).backward()
            optimizer.step()
        finals.append((whole(model), optimizer.metrics()["residual_norm"]))
    assert float(finals[0][1]) > 0
    for way, final in zip((*WAYS, "together"), finals[1:], strict=True):
        assert final == finals[0], way
