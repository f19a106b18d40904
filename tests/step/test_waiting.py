"""A metric tells how long entries wait for their delivery."""

from __future__ import annotations

import torch
import tritoncomm
from torch.nn import Parameter


def run(
    make: type[torch.optim.Optimizer], steps: int, **fields
) -> tuple[list[dict[str, float]], tritoncomm.SparseOptimizer]:
    """Train two matrices and a vector. Return the metrics of each step, and the optimizer."""
    shapes = (64, 64), (64, 64), (64,)
    parameters = [Parameter(torch.zeros(shape)) for shape in shapes]
    optimizer = tritoncomm.wrap(
        make(parameters, lr=1e-3), density=0.03, values="fp32", dense_below=100, updates=False, **fields
    )
    generator, found = torch.Generator().manual_seed(0), []
    for _ in range(steps):
        for parameter in parameters:
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        optimizer.step()
        found.append(optimizer.metrics())
    return found, optimizer


def test_the_longest_wait_of_an_entry() -> None:
    """Adam knows when each entry was delivered, and some entries wait for long."""
    found, optimizer = run(torch.optim.AdamW, 60)
    last = min(int(each.min()) for each in optimizer.state_dict()["tritoncomm"]["last"])
    assert found[-1]["longest_wait"] == 60 - last > 20
    dense, _ = run(torch.optim.AdamW, 5, warmup_steps=5)
    assert [each["longest_wait"] for each in dense] == [0.0] * 5


def test_an_optimizer_that_knows_no_wait() -> None:
    """Without a staleness-aware step, nothing knows when an entry was delivered."""
    found, _ = run(torch.optim.Adagrad, 5)
    assert [each["longest_wait"] for each in found] == [0.0] * 5
