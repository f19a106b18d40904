"""Metrics and a warning tell that something waits for its delivery."""

from __future__ import annotations

import logging

import pytest
import torch
import tritoncomm
from torch.nn import Parameter

SGD = torch.optim.SGD, {"lr": 1e-3}
ADAMW = torch.optim.AdamW, {"lr": 1e-3}


def run(
    make: tuple, steps: int, *, small: float, uses: bool = True, **fields
) -> tuple[list[dict[str, float]], tritoncomm.SparseOptimizer]:
    """Train two matrices and a vector, of which the second matrix has gradients that are ``small`` times those."""
    a, b, bias = Parameter(torch.zeros(64, 64)), Parameter(torch.zeros(64, 64)), Parameter(torch.zeros(64))
    inner = make[0]([a, b, bias], **make[1])
    optimizer = tritoncomm.wrap(inner, density=0.03, values="fp32", dense_below=100, **fields)
    generator, found = torch.Generator().manual_seed(0), []
    for _ in range(steps):
        for parameter, factor in ((a, 1.0), (b, small), (bias, 1.0)):
            parameter.grad = factor * torch.randn(parameter.shape, generator=generator)
        if not uses:
            b.grad = None
        optimizer.step()
        found.append(optimizer.metrics())
    return found, optimizer


@pytest.mark.parametrize("static", [False, True])
def test_a_tensor_that_starves_is_named_once(caplog: pytest.LogCaptureFixture, static: bool) -> None:
    """Nothing of it is delivered for 100 steps: the share is 1/3, and one warning names it."""
    fields = {"algo": tritoncomm.TopkAllgather(density=0.03, static=static)} if static else {}
    with caplog.at_level(logging.WARNING, "tritoncomm"):
        if static:
            a, b = Parameter(torch.zeros(64, 64)), Parameter(torch.zeros(64, 64))
            optimizer = tritoncomm.wrap(torch.optim.SGD([a, b], lr=1e-3), dense_below=0, **fields)
            for _ in range(250):
                a.grad, b.grad = torch.randn(64, 64), 1e-9 * torch.randn(64, 64)
                optimizer.step()
            last, share = optimizer.metrics(), 1 / 2
        else:
            found, _ = run(SGD, 250, small=1e-9)
            assert [each["share_without_delivery"] for each in found[:99]] == [0.0] * 99
            last, share = found[-1], 1 / 3
    assert last["share_without_delivery"] == pytest.approx(share)
    assert last["longest_wait"] == 250
    warned = [record.getMessage() for record in caplog.records if "nothing was delivered" in record.getMessage()]
    assert len(warned) == 1
    assert "100 steps of parameter 1 of shape (64, 64)" in warned[0]


def test_the_longest_wait_of_an_entry() -> None:
    """Adam knows when each entry was delivered. Every tensor gets something, and some entries wait for long."""
    found, optimizer = run(ADAMW, 60, small=1.0)
    assert found[-1]["share_without_delivery"] == 0.0
    assert int(optimizer._vector.waiting.steps.max()) < 5
    last = min(int(state["last_delivered"].min()) for state in optimizer.state.values())
    assert found[-1]["longest_wait"] == 60 - last > 20
    dense, _ = run(ADAMW, 5, small=1.0, warmup_steps=5)
    assert [each["longest_wait"] for each in dense] == [0.0] * 5


def test_what_nobody_uses_does_not_wait(caplog: pytest.LogCaptureFixture) -> None:
    """Steps in which no rank has a gradient do not count."""
    found, _ = run(SGD, 150, small=1.0, uses=False)
    assert found[-1]["share_without_delivery"] == 0.0
    assert found[-1]["longest_wait"] < 5
    assert not caplog.records
