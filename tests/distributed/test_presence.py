"""Ranks that have gradients of different parameters."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.distributed as dist
from kit import everywhere
from models import equal, exact, flat, same, total
from torch import nn
from tritoncomm import Late, PeerLostError

from ranks import ranks

SHAPES = [(16, 16), (40,), (8, 8, 2), (24, 12)]
DECAY = 0.5
STEPS = 8  # see drawn()
KINDS = {
    "SGD": partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.1),
    "AdamW": partial(torch.optim.AdamW, lr=0.01),
    "Adam": partial(torch.optim.Adam, lr=0.01, weight_decay=0.1),
}


def drawn(step: int, rank: int) -> list[torch.Tensor | None]:
    """Return a gradient of small integers for each parameter, or None. Sums and their means over 4 are exact.

    In turn: all ranks have all; one parameter is nobody's for two steps; every rank lacks others; nobody has any; every
    rank lacks others again.
    """
    generator = torch.Generator().manual_seed(100 * step + rank)
    gradients: list[torch.Tensor | None] = [
        torch.randint(-8, 9, shape, generator=generator).float() * 4 for shape in SHAPES
    ]
    lacking = torch.rand(len(SHAPES), generator=generator) < 0.6
    for position in range(len(SHAPES)):
        nobodys = (position == 3 and 2 <= step < 4) or (position == 1 and step == 3) or step == 6
        if nobodys or (step >= 4 and bool(lacking[position])):
            gradients[position] = None
    return gradients


def made() -> list[nn.Parameter]:
    """Return parameters."""
    return [nn.Parameter(torch.ones(shape)) for shape in SHAPES]


def take(optimizer, parameters, step: int, rank: int) -> None:
    """Take a step."""
    for parameter, gradient in zip(parameters, drawn(step, rank), strict=True):
        parameter.grad = gradient
    optimizer.step()


CASES = [
    *((algo, {}) for algo in ("oktopk", "spardl", "exdyna", "topk_allgather", "random_block", "dense")),
    *((algo, {"small": "8bit", "dense_below": 50, "warmup_steps": 1}) for algo in ("oktopk", "exdyna")),
    ("spardl", {"values": "4bit"}),
    ("oktopk", {"late": Late(select_by="update")}),
]


@ranks(4)
@pytest.mark.parametrize(("algo", "fields"), CASES)
def test_conservation(rank, world_size, algo, fields):
    """Per coordinate, what was held and came equals what was delivered and is held, to the bit, for each pattern.

    What nobody had a gradient of keeps its residual on every rank. Also with small tensors of 8 bits, values of 4,
    dense first steps, and a decay that is part of the gradient.
    """
    parameters = made()
    by_update = "late" in fields
    kind = partial(torch.optim.AdamW, lr=1e-9) if by_update else partial(torch.optim.SGD, lr=0.0, weight_decay=DECAY)
    by_gradient = {"late": Late(select_by="gradient")}
    fields = by_gradient | fields
    optimizer = exact(kind(parameters), algo, **fields)
    tolerance = 0 if fields == by_gradient else 1e-3
    decay = DECAY if optimizer._tritoncomm.setup.decays_in_vector and not by_update else 0.0
    vector = optimizer._tritoncomm.setup.scope.vectors[0]
    for step in range(STEPS):
        held = {p: r.clone() for p, r in vector.residuals_by_parameter().items()}
        for parameter, gradient in zip(parameters, drawn(step, rank), strict=True):
            parameter.grad = gradient
        if by_update:  # the staleness-aware step does not write .grad
            optimizer.synchronize()
        else:
            optimizer.step()
        means = [None if parameter.grad is None else parameter.grad.clone() for parameter in parameters]
        if by_update:
            optimizer.step()
        left, came, went = vector.residuals_by_parameter(), [], []
        of_ranks = [drawn(step, each) for each in range(world_size)]
        for position, (parameter, gradient) in enumerate(zip(parameters, of_ranks[rank], strict=True)):
            is_used = any(each[position] is not None for each in of_ranks)
            assert (means[position] is not None) == is_used, (step, position)
            if not is_used:
                assert torch.equal(left[parameter], held[parameter]), (step, position)
                continue
            own = held[parameter].flatten() + decay
            came.append(own if gradient is None else own + gradient.flatten())
            went.append(means[position].flatten() + left[parameter].flatten())  # of all ranks, means add up
        if came:
            sums = total(torch.stack([torch.cat(came), torch.cat(went)]))
            assert torch.allclose(*sums, rtol=0, atol=tolerance), step
            assert equal(each for each in means if each is not None)


@ranks(4)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("algo", "density"), [("dense", None), ("oktopk", 1.0)])
def test_trained_like_dense(rank, world_size, kind, algo, density):
    """The dense method and density 1 take the steps of torch over the mean of those gradients that there are."""
    ours, reference = made(), made()
    optimizer = exact(KINDS[kind](ours), algo, **({} if density is None else {"density": density}))
    plain = KINDS[kind](reference)
    for step in range(STEPS):
        take(optimizer, ours, step, rank)
        for position, parameter in enumerate(reference):
            found = [each for r in range(world_size) if (each := drawn(step, r)[position]) is not None]
            parameter.grad = sum(found) / world_size if found else None
        plain.step()
    for one, other in zip(ours, reference, strict=True):
        assert torch.allclose(one, other, atol=1e-5)
        for name in ("exp_avg", "exp_avg_sq", "momentum_buffer", "step"):
            mine, theirs = optimizer.state[one], plain.state[other]
            assert (name in mine) == (name in theirs)
            assert name not in theirs or torch.allclose(mine[name], theirs[name], atol=1e-4), name


@ranks(4)
@pytest.mark.parametrize("lacks", ["nothing", "a head", "others"])
def test_traffic(rank, world_size, lacks):
    """A model with all gradients, or with a head that nobody uses, exchanges nothing more, except in its first step."""
    parameters = made()
    optimizer = exact(torch.optim.SGD(parameters, lr=0.1))
    lacking = {"nothing": None, "a head": 3, "others": rank}[lacks]
    asks = []
    for _ in range(3):
        for position, parameter in enumerate(parameters):
            parameter.grad = None if position == lacking else torch.ones(SHAPES[position])
        optimizer.step()
        asks.append("seconds_missing_gradients" in optimizer.metrics())
    assert asks == {"nothing": [False] * 3, "a head": [True, False, False], "others": [True] * 3}[lacks]


@ranks(2)
def test_lost_before_it_knew(rank, world_size):
    """A rank that is lost while ranks tell each other what they lack learns it when it catches up."""
    parameters = made()
    optimizer = exact(torch.optim.SGD(parameters, lr=0.1, momentum=0.9))
    take(optimizer, parameters, 0, rank)
    presence, agree = optimizer._tritoncomm.setup.exchange.presence, optimizer._tritoncomm.setup.exchange.presence.agree

    def lost(*arguments) -> None:
        before = presence.absent
        agree(*arguments)
        presence.absent = before
        raise PeerLostError("lost rank 0", [0])

    if rank == 1:
        presence.agree = lost
        with pytest.raises(PeerLostError):
            take(optimizer, parameters, 3, rank)
    else:
        take(optimizer, parameters, 3, rank)
    group = dist.new_group()
    assert everywhere(optimizer.reset_process_group(group)) == [False, True]
    assert parameters[3].grad is None
    for step in (2, 6):
        take(optimizer, parameters, step, rank)
    assert same(flat(parameters).tolist())
