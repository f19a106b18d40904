"""Short runs whose learning rate bounds how far the parameters get, beside dense runs of the same seed."""

from __future__ import annotations

import pytest
import torch
import tritoncomm
from torch.nn import Parameter

from depth import trials

RANK, IN, OUT = 8, 128, 256
DEFAULTS = {"warmup_steps": 20, "values": "4bit", "small": "8bit"}  # of wrap, which tests change


def left(seed: int, *, sparse: bool) -> float:
    """Fit a matrix by two adapters, of which one starts at zero, as in LoRA. Return the squared distance left."""
    generator = torch.Generator().manual_seed(seed)
    down = Parameter(torch.randn(RANK, IN, generator=generator) / IN**0.5)
    up = Parameter(torch.zeros(OUT, RANK))
    target = torch.randn(OUT, RANK, generator=generator) @ torch.randn(RANK, IN, generator=generator)
    target /= (IN * RANK) ** 0.5
    optimizer = torch.optim.AdamW([down, up], lr=2e-3)
    if sparse:
        optimizer = tritoncomm.wrap(optimizer, dense_below=0, **DEFAULTS)
    for _ in range(150):
        inputs = torch.randn(32, IN, generator=generator)
        loss = (inputs @ (2 * up @ down - target).T).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return float((2 * up.detach() @ down.detach() - target).square().sum())


@pytest.mark.parametrize("seed", trials([0], [0, 1, 2]))
def test_adapters_that_start_at_zero(seed: int) -> None:
    """With the defaults, 3 % of the entries leave no more than a dense run.

    Seeds 0 to 4 left 0.86 to 0.91 of it. A limit by the norm of the weights, which starts at zero, left 1.34 to 1.68.
    """
    assert left(seed, sparse=True) < left(seed, sparse=False)
