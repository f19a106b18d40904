"""Worker processes of tests/distributed/test_training.py: gradients that are scaled, narrow or not finite."""

from __future__ import annotations

import logging
from contextlib import nullcontext

import pytest
import torch
import tritoncomm
from helpers import flat, log_lines, loss_of, residual, same_everywhere, sparse_sgd, sparse_wrap, tiny_model
from torch import nn
from tritoncomm import NonFiniteError
from tritoncomm.amp import GradScaler

import laws

SMALL = 2.0**8
ROUTES = ("step", "unscale", "synchronize")


def finish_gradients(optimizer: tritoncomm.SparseOptimizer, model: nn.Module, route: str) -> None:
    """Clip this rank's gradient, the averaged gradient, or neither."""
    if route == "synchronize":
        optimizer.synchronize()
    if route != "step":
        assert float(nn.utils.clip_grad_norm_(model.parameters(), 0.01)) > 0.01  # it does clip


def loss_scaling(rank: int, world_size: int, send, ours: bool, route: str) -> None:
    """After an overflow on one rank, all ranks skip the step. The run equals one without these batches."""
    model, plain = tiny_model(), tiny_model()
    optimizer, unscaled = sparse_sgd(model), sparse_sgd(plain)
    make = GradScaler if ours else torch.amp.GradScaler
    scaler = make("cpu", init_scale=SMALL, growth_interval=3)
    with log_lines(logging.WARNING) as warned:
        for step in range(7):
            overflow = step in {3, 5}
            optimizer.zero_grad()
            scaler.scale(loss_of(model, rank, step)).backward()
            if overflow and rank == 1:
                model[0].weight.grad[2, 1] = float("inf")
            before, residual_before = flat(model), residual(optimizer)
            if route != "step":
                scaler.unscale_(optimizer)
            finish_gradients(optimizer, model, route)
            scaler.step(optimizer)
            scaler.update()
            if overflow:
                assert flat(model) == before
                assert laws.same_bits(residual(optimizer), residual_before)
                assert optimizer.metrics()["skipped_steps"] == (1 if step == 3 else 2)
            else:
                unscaled.zero_grad()
                loss_of(plain, rank, step).backward()
                finish_gradients(unscaled, plain, route)
                unscaled.step()
            assert same_everywhere(flat(model))
            assert not ours or same_everywhere(scaler.get_scale())
    assert scaler.get_scale() != SMALL  # it has grown or backed off on the way
    count = sum("all scales stay equal" in line for line in warned)
    assert count == (0 if ours or rank == 1 else 1)  # on ranks that keep their scale
    assert flat(model) == flat(plain)
    assert laws.same_bits(residual(optimizer), residual(unscaled))


def scaled_synchronize(rank: int, world_size: int, send) -> None:
    """Averaging before unscaling is rejected."""
    model = tiny_model()
    optimizer = sparse_sgd(model)
    for make, late in ((torch.amp.GradScaler, "step"), (GradScaler, "step"), (GradScaler, "unscale_")):
        scaler = make("cpu", init_scale=SMALL)
        optimizer.zero_grad()
        scaler.scale(loss_of(model, rank, 0)).backward()
        optimizer.synchronize()
        with pytest.raises(RuntimeError, match="averaged scaled gradients"):
            getattr(scaler, late)(optimizer)


def no_gradients_under_a_scaler(rank: int, world_size: int, send) -> None:
    """A rank without gradients takes part in the exchange and in the scaler's agreement."""
    model = tiny_model()
    optimizer = sparse_sgd(model)
    scaler = GradScaler("cpu", init_scale=SMALL)
    for step in range(3):
        optimizer.zero_grad()
        loss = scaler.scale(loss_of(model, rank, step))
        if rank != 1:
            loss.backward()
        if step == 2:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
    assert optimizer.metrics()["steps"] == 3
    assert same_everywhere((flat(model), scaler.get_scale()))


def policies_under_a_scaler(rank: int, world_size: int, send) -> None:
    """This library's scaler skips an overflow for any ``on_nonfinite``. With torch's, ``on_nonfinite`` decides."""
    for policy in ("raise", "skip"):
        model = tiny_model()
        optimizer = sparse_sgd(model, on_nonfinite=policy)
        scaler = GradScaler("cpu", init_scale=SMALL)
        before = flat(model)
        scaler.scale(loss_of(model, rank, 0)).backward()
        if rank == 1:
            model[0].weight.grad[0, 0] = float("inf")
        scaler.unscale_(optimizer)
        optimizer.synchronize()
        scaler.step(optimizer)
        scaler.update()
        assert flat(model) == before, policy
        assert optimizer.metrics()["skipped_steps"] == 1, policy
        assert scaler.get_scale() == SMALL / 2
        scaler = torch.amp.GradScaler("cpu", init_scale=SMALL)
        optimizer.zero_grad()
        scaler.scale(loss_of(model, rank, 0)).backward()
        if rank == 1:
            model[0].weight.grad[0, 0] = float("inf")
        scaler.unscale_(optimizer)
        with pytest.raises(NonFiniteError) if policy == "raise" else nullcontext():
            optimizer.synchronize()
        if policy != "raise":
            scaler.step(optimizer)
        assert same_everywhere(flat(model))
        assert flat(model) == before


def autocast(rank: int, world_size: int, send) -> None:
    """Replicas agree and the loss falls with bf16 forward passes and with bf16 parameters."""
    for dtype in (torch.float32, torch.bfloat16):
        model = tiny_model().to(dtype)
        optimizer = sparse_wrap(torch.optim.AdamW(model.parameters(), lr=0.01))
        losses = []
        for step in range(30):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = loss_of(model, rank, step % 3)
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
        assert losses[-1] < losses[0]
        assert same_everywhere(torch.cat([p.detach().float().reshape(-1) for p in model.parameters()]).tolist())
        assert residual(optimizer).dtype == torch.float32


def non_finite(rank: int, world_size: int, send) -> None:
    """All ranks skip or raise together, and the error names the rank and the parameter."""
    for policy in ("skip", "raise"):
        model = tiny_model()
        optimizer = sparse_sgd(model, on_nonfinite=policy)
        named = sparse_wrap(torch.optim.SGD(tiny_model().named_parameters(), lr=0.1), on_nonfinite=policy)
        loss_of(model, rank, 0).backward()
        optimizer.step()
        optimizer.zero_grad()
        loss_of(model, rank, 1).backward()
        if rank == 1:
            model[2].weight.grad[0, :2] = torch.tensor([float("nan"), float("inf")])
        before, residual_before = flat(model), residual(optimizer)
        if policy == "raise":
            with pytest.raises(NonFiniteError, match=r"rank 1: parameter 3 of shape \(3, 20\) \(2 values\)") as caught:
                optimizer.step()
            assert caught.value.ranks == (1,)
        else:
            optimizer.step()
        metrics = optimizer.metrics()
        assert metrics["skipped_steps"] == 1
        assert flat(model) == before
        assert laws.same_bits(residual(optimizer), residual_before)
        assert same_everywhere(flat(model))
        assert residual(optimizer).isfinite().all()
        del named


def names_in_messages(rank: int, world_size: int, send) -> None:
    """Errors contain the names of parameters that were passed with names."""
    model = tiny_model()
    optimizer = sparse_wrap(torch.optim.SGD(model.named_parameters(), lr=0.1), on_nonfinite="raise")
    loss_of(model, rank, 0).backward()
    model[0].bias.grad[rank] = float("nan") if rank != 1 else 0.0
    with pytest.raises(NonFiniteError, match=r"rank 0: 0\.bias \(1 values\); rank 2: 0\.bias \(1 values\)"):
        optimizer.step()
