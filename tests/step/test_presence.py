"""A parameter that has a gradient on no rank is left alone, as torch leaves it alone, and its residual waits."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import tritoncomm
from torch.nn import Parameter

MAKERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "SGD": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9, weight_decay=0.1),
    "Adam": lambda ps: torch.optim.Adam(ps, lr=0.01, weight_decay=0.1),
    "AdamW": lambda ps: torch.optim.AdamW(ps, lr=0.01, weight_decay=0.1),
    "RMSprop": lambda ps: torch.optim.RMSprop(ps, lr=0.01, momentum=0.9, weight_decay=0.1),
}


def pair() -> tuple[Parameter, Parameter]:
    """Return a parameter that is used in every step, and one that is not."""
    return Parameter(torch.ones(64, 64)), Parameter(torch.ones(64, 64))


def take(optimizer: torch.optim.Optimizer, p: Parameter, q: Parameter, steps: int, *, using: Callable[[int], bool]):
    """Take ``steps``, in some of which the loss uses ``q``."""
    generator = torch.Generator().manual_seed(0)
    for step in range(steps):
        optimizer.zero_grad(set_to_none=True)
        loss = (p * torch.randn(p.shape, generator=generator)).mean()
        if using(step):
            loss = loss + (q * torch.randn(q.shape, generator=generator)).mean()
        loss.backward()
        optimizer.step()


ALGORITHMS = ("oktopk", "spardl", "exdyna", "topk_allgather", "dgc", "random_k", "random_block")


@pytest.mark.parametrize(
    ("kind", "algo"),
    [("Adam", "oktopk"), ("RMSprop", "oktopk"), *((kind, algo) for kind in ("SGD", "AdamW") for algo in ALGORITHMS)],
)
def test_nothing_of_it_changes(kind: str, algo: str) -> None:
    """Values, state, step count and residual stay to the bit, from the first step without gradient on."""
    p, q = pair()
    make = MAKERS[kind] if algo != "dgc" else lambda ps: torch.optim.SGD(ps, lr=0.1)
    fields = {"values": "8bit"} if algo == "oktopk" else {}
    optimizer = tritoncomm.wrap(make([p, q]), algo, updates=False, density=0.1, warmup_steps=2, small="8bit", **fields)
    take(optimizer, p, q, 8, using=lambda _: True)

    def held() -> tuple[Any, ...]:
        residual = optimizer._tritoncomm.setup.vector.residuals_by_parameter()[q].clone()
        return q.detach().clone(), copy.deepcopy(dict(optimizer.state[q])), residual

    value, state, residual = held()
    assert residual.any()
    take(optimizer, p, q, 5, using=lambda _: False)
    assert q.grad is None
    assert torch.equal(held()[0], value)
    assert torch.equal(held()[2], residual)
    for name, content in held()[1].items():
        assert torch.equal(content, state[name]) if isinstance(content, torch.Tensor) else content == state[name], name
    take(optimizer, p, q, 3, using=lambda _: True)
    assert not torch.equal(q.detach(), value)
    assert not torch.equal(held()[2], residual)


def test_a_moment_waits() -> None:
    """The scale of the selection does not forget a tensor that takes no steps."""
    p, q = pair()
    optimizer = tritoncomm.wrap(MAKERS["AdamW"]([p, q]), density=0.1)
    take(optimizer, p, q, 4, using=lambda _: True)
    vector = optimizer._tritoncomm.setup.vector
    before = torch.split(vector.scale.moment.rows, [64, 64])[1].clone()
    take(optimizer, p, q, 4, using=lambda _: False)
    rows = torch.split(vector.scale.moment.rows, [64, 64])
    assert torch.equal(rows[1], before)
    assert vector.scale.moment.steps == 8


def test_a_residual_takes_no_place() -> None:
    """After the first step without gradient, all that is delivered belongs to the other parameter, until a flush."""
    p, q = pair()
    optimizer = tritoncomm.wrap(torch.optim.SGD([p, q], lr=1.0), "topk_allgather", density=0.1)
    take(optimizer, p, q, 4, using=lambda _: True)
    take(optimizer, p, q, 2, using=lambda _: False)
    assert int(torch.count_nonzero(p.grad)) == int(0.1 * 2 * 64 * 64)
    value, residual = q.detach().clone(), optimizer._tritoncomm.setup.vector.residuals_by_parameter()[q].clone()
    optimizer.flush()
    assert torch.allclose(q.detach(), value - residual.view(64, 64))
    assert optimizer.metrics()["residual_norm"] == 0
    take(optimizer, p, q, 1, using=lambda _: False)
    assert q.grad is None


def test_all_rates_of_zero() -> None:
    """At the end of a schedule all rates are zero, and all gradients are exchanged: nothing rests."""
    p, q = pair()
    optimizer = tritoncomm.wrap(torch.optim.SGD([{"params": [p]}, {"params": [q]}], lr=0.0), density=0.1)
    take(optimizer, p, q, 3, using=lambda _: True)
    assert p.grad is not None
    assert q.grad is not None


@pytest.mark.parametrize("algo", ["dense", "quantized"])
def test_a_rate_of_zero_without_delays(algo: str) -> None:
    """Where nothing is delayed nothing competes, and a group without a rate keeps its moments, as in torch."""
    p, q = pair()
    inner = MAKERS["AdamW"]([p])
    inner.add_param_group({"params": [q], "lr": 0.0})
    take(tritoncomm.wrap(inner, algo), p, q, 3, using=lambda _: True)
    assert inner.state[q]["exp_avg"].any()
