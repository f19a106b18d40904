"""A parameter that has a gradient on no rank is left alone, as torch leaves it alone, and its residual waits."""

from __future__ import annotations

import torch
import tritoncomm
from torch.nn import Parameter


def pair() -> tuple[Parameter, Parameter]:
    """Return a parameter that is used in every step, and one that is not."""
    return Parameter(torch.ones(64, 64)), Parameter(torch.ones(64, 64))


def take(optimizer: torch.optim.Optimizer, p: Parameter, q: Parameter, steps: int, *, uses: bool) -> None:
    """Take ``steps``, in which the loss ``uses`` both parameters, or the first one alone."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        optimizer.zero_grad(set_to_none=True)
        loss = (p * torch.randn(p.shape, generator=generator)).mean()
        if uses:
            loss = loss + (q * torch.randn(q.shape, generator=generator)).mean()
        loss.backward()
        optimizer.step()


def test_a_moment_waits() -> None:
    """The scale of the selection does not forget a tensor that takes no steps."""
    p, q = pair()
    optimizer = tritoncomm.wrap(torch.optim.AdamW([p, q], lr=0.01), density=0.1)
    take(optimizer, p, q, 4, uses=True)
    vector = optimizer._tritoncomm.setup.scope.vectors[0]
    before = torch.split(vector.scale.moment.rows, [64, 64])[1].clone()
    take(optimizer, p, q, 4, uses=False)
    rows = torch.split(vector.scale.moment.rows, [64, 64])
    assert torch.equal(rows[1], before)
    assert vector.scale.moment.steps == 8


def test_a_residual_takes_no_place() -> None:
    """After the first step without gradient, all that is delivered belongs to the other parameter, until a flush."""
    p, q = pair()
    optimizer = tritoncomm.wrap(torch.optim.SGD([p, q], lr=1.0), "topk_allgather", density=0.1)
    take(optimizer, p, q, 4, uses=True)
    take(optimizer, p, q, 2, uses=False)
    assert int(torch.count_nonzero(p.grad)) == int(0.1 * 2 * 64 * 64)
    value, residual = (
        q.detach().clone(),
        optimizer._tritoncomm.setup.scope.vectors[0].residuals_by_parameter()[q].clone(),
    )
    optimizer.flush()
    assert torch.allclose(q.detach(), value - residual.view(64, 64))
    assert optimizer.metrics()["residual_norm"] == 0
    take(optimizer, p, q, 1, uses=False)
    assert q.grad is None


def test_all_rates_of_zero() -> None:
    """At the end of a schedule all rates are zero, and all gradients are exchanged: nothing rests."""
    p, q = pair()
    optimizer = tritoncomm.wrap(torch.optim.SGD([{"params": [p]}, {"params": [q]}], lr=0.0), density=0.1)
    take(optimizer, p, q, 3, uses=True)
    assert p.grad is not None
    assert q.grad is not None
