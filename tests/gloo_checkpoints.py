"""Worker processes of tests/test_checkpoints.py."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import tritoncomm
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from tritoncomm import ConfigMismatchError, ConfigurationError, checkpoint

import laws
from gloo_training import flat, residual, same_everywhere
from gloo_workers import loss_of, possible, tiny_model, total

MAKERS = {
    "sgd": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "plain": partial(torch.optim.SGD, lr=0.1),
    "adamw": partial(torch.optim.AdamW, lr=0.01),
}


def wrap(model, recipe="oktopk", make="adamw", **fields) -> tritoncomm.SparseOptimizer:
    """Wrapped, without small tensors."""
    return tritoncomm.wrap(MAKERS[make](model.parameters()), recipe, dense_below=0, **fields)


def train(model, optimizer, rank: int, first: int, last: int) -> None:
    """Some steps."""
    for step in range(first, last):
        optimizer.zero_grad()
        loss_of(model, rank, step).backward()
        optimizer.step()


def every_recipe(rank: int, world_size: int, send, folder: str) -> None:
    """Kill and resume equals never killed, to the bit: parameters, residuals and states of every recipe."""
    for name, recipe in possible(0.15, world_size).items():
        if hasattr(recipe, "tail"):
            continue  # wrap adds it itself
        make = "plain" if "dgc" in name or "exponential" in name else "adamw"
        straight, stopped = tiny_model(), tiny_model()
        first, second = wrap(straight, recipe, make), wrap(stopped, recipe, make)
        train(straight, first, rank, 0, 5)
        train(stopped, second, rank, 0, 3)
        checkpoint.save(second, Path(folder) / name)
        resumed = tiny_model()
        resumed.load_state_dict(stopped.state_dict())
        third = wrap(resumed, recipe, make)
        checkpoint.load(third, Path(folder) / name)
        train(resumed, third, rank, 3, 5)
        assert flat(resumed) == flat(straight), name
        assert laws.same_bits(residual(third), residual(first)), name
        assert third._exchange.feedback.algorithm.state == first._exchange.feedback.algorithm.state, name


def write(rank: int, world_size: int, send, folder: str, recipe: str) -> None:
    """Train, save, and say what is pending."""
    model = tiny_model()
    optimizer = wrap(model, recipe, "plain", density=0.1, warmup_steps=2)
    train(model, optimizer, rank, 0, 5)
    checkpoint.save(optimizer, folder)
    pending = total(residual(optimizer)) / world_size
    if rank == 0:
        torch.save(model.state_dict(), Path(folder) / "model.pt")
        send(pending.tolist())


def read(rank: int, world_size: int, send, folder: str, recipe: str) -> None:
    """Another number of ranks owes the same together, and trains on, past its warm-up."""
    model = tiny_model()
    optimizer = wrap(model, recipe, "plain", density=0.1, warmup_steps=2)
    model.load_state_dict(torch.load(Path(folder) / "model.pt"))
    checkpoint.load(optimizer, folder)
    pending = total(residual(optimizer)) / world_size
    if rank == 0:
        send(pending.tolist())
    train(model, optimizer, rank, 5, 8)
    assert optimizer.metrics()["density_delivered"] < 0.6
    assert same_everywhere(flat(model))


def damaged(rank: int, world_size: int, send, folder: str) -> None:
    """Corrupt, truncated, foreign, missing or another rank's: file and reason are named, nothing changes anywhere."""
    model = tiny_model()
    optimizer = wrap(model, density=0.1)
    train(model, optimizer, rank, 0, 3)
    checkpoint.save(optimizer, folder)
    file = Path(folder) / f"rank-1-of-{world_size}.pt"
    whole = file.read_bytes()
    train(model, optimizer, rank, 3, 5)
    before, owed = flat(model), residual(optimizer)
    state = str(optimizer.state_dict()["state"])

    def attempt(named: str) -> None:
        dist.barrier()
        error = ConfigurationError if rank == 1 else ConfigMismatchError
        with pytest.raises(error, match=named):
            checkpoint.load(optimizer, folder)
        assert flat(model) == before
        assert laws.same_bits(residual(optimizer), owed)
        assert str(optimizer.state_dict()["state"]) == state
        dist.barrier()

    def put(content: bytes) -> None:
        if rank == 1:
            file.write_bytes(content)

    put(whole[: len(whole) // 2])
    attempt(r"rank-1-of-3\.pt cannot be loaded")
    put(b"nothing of the kind")
    attempt(r"rank-1-of-3\.pt cannot be loaded")
    if rank == 1:
        other = torch.load(Path(folder) / "rank-0-of-3.pt")
        torch.save(other, file)
    attempt("written with rank=0, here it is 1")
    if rank == 1:
        file.write_bytes(whole)
        changed = torch.load(file)
        changed["tritoncomm"]["residuals"][0][0] += 1
        torch.save(changed, file)
    attempt("corrupt: its checksum")
    if rank == 1:
        torch.save({"epoch": 3}, file)
    attempt("no state of a wrapped optimizer")
    if rank == 1:
        changed = torch.load(Path(folder) / "rank-2-of-3.pt")
        changed["param_groups"][0]["params"].pop()
        torch.save(changed, file)
    attempt("corrupt: the checksum of the optimizer")
    put(whole)
    dist.barrier()
    checkpoint.load(optimizer, folder)
    assert optimizer.metrics()["residual_norm"] != float(owed.norm())


def distributed_checkpoint(rank: int, world_size: int, send, folder: str) -> None:
    """torch.distributed.checkpoint: every rank's residual comes back to it, and the run goes on to the bit."""
    for make in MAKERS:
        straight, stopped = tiny_model(), tiny_model()
        first, second = wrap(straight, make=make, density=0.1), wrap(stopped, make=make, density=0.1)
        train(straight, first, rank, 0, 6)
        train(stopped, second, rank, 0, 4)
        second.zero_grad()
        content = {
            "model": stopped.state_dict(),
            "optimizer": get_optimizer_state_dict(stopped, second),
            "owed": checkpoint.Owed(second),
        }
        path = f"{folder}/{make}"
        dcp.save(content, checkpoint_id=path)
        resumed = tiny_model(seed=0)
        third = wrap(resumed, make=make, density=0.1)
        content = {
            "model": resumed.state_dict(),
            "optimizer": get_optimizer_state_dict(resumed, third),
            "owed": checkpoint.Owed(third),
        }
        dcp.load(content, checkpoint_id=path)
        resumed.load_state_dict(content["model"])
        set_optimizer_state_dict(resumed, third, content["optimizer"])
        assert laws.same_bits(residual(third), residual(second)), make
        train(resumed, third, rank, 4, 6)
        assert flat(resumed) == flat(straight), make
        assert laws.same_bits(residual(third), residual(first)), make
