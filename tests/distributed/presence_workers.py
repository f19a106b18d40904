"""Worker processes of tests/distributed/test_presence.py: ranks that have gradients of different parameters."""

from __future__ import annotations

import copy
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from helpers import same_everywhere, sparse_wrap, total
from torch import nn
from tritoncomm import NonFiniteError, PeerLostError
from tritoncomm.step.exchange.machine import State

SHAPES = [(16, 16), (40,), (8, 8, 2), (24, 12)]
DECAY = 0.5


def drawn(step: int, rank: int) -> list[torch.Tensor | None]:
    """Return a gradient of small integers for each parameter, or None. Sums and their means over 4 are exact.

    In turn: all ranks have all; one parameter is nobody's for five steps; every rank lacks others; nobody has any.
    """
    generator = torch.Generator().manual_seed(100 * step + rank)
    gradients: list[torch.Tensor | None] = [
        torch.randint(-8, 9, shape, generator=generator).float() * 4 for shape in SHAPES
    ]
    lacking = torch.rand(len(SHAPES), generator=generator) < 0.6
    for position in range(len(SHAPES)):
        nobodys = (position == 3 and 3 <= step < 8) or (position == 1 and step == 6) or step == 15
        if nobodys or (step >= 8 and bool(lacking[position])):
            gradients[position] = None
    return gradients


def conservation(rank: int, world_size: int, send) -> None:
    """Per coordinate, what was held and came equals what was delivered and is held, to the bit, for each pattern.

    What nobody had a gradient of keeps its residual on every rank. All methods, also with values of 4 bits, small
    tensors of 8 bits, dense first steps and a decay that is part of the gradient.
    """
    methods = ("oktopk", "spardl", "exdyna", "topk_allgather", "random_k", "random_block", "dense")
    for algo in methods:
        for fields in ({}, {"small": "8bit", "dense_below": 50, "warmup_steps": 2}):
            parameters = [nn.Parameter(torch.ones(shape)) for shape in SHAPES]
            inner = torch.optim.SGD(parameters, lr=0.0, weight_decay=DECAY)
            optimizer = sparse_wrap(inner, algo, select_by="gradient", **({} if algo == "dense" else fields))
            decay = DECAY if optimizer._decays_in_vector else 0.0
            for step in range(20):
                held = {p: r.clone() for p, r in optimizer._vector.residuals_by_parameter().items()}
                gradients = drawn(step, rank)
                for parameter, gradient in zip(parameters, gradients, strict=True):
                    parameter.grad = None if gradient is None else gradient.clone()
                optimizer.step()
                left = optimizer._vector.residuals_by_parameter()
                for position, (parameter, gradient) in enumerate(zip(parameters, gradients, strict=True)):
                    place = algo, fields, step, position
                    is_used = total(torch.tensor(float(gradient is not None))) > 0
                    assert (parameter.grad is not None) == is_used, place
                    if not is_used:
                        assert torch.equal(left[parameter], held[parameter]), place
                        continue
                    own = held[parameter].view(parameter.shape) + decay
                    came = total(own if gradient is None else own + gradient)
                    went = world_size * parameter.grad + total(left[parameter].view(parameter.shape))
                    if fields:
                        assert torch.allclose(came, went, atol=1e-3), place
                    else:
                        assert torch.equal(came, went), place
            assert same_everywhere([p.grad is None or p.grad.tolist() for p in parameters])


def trained_like_dense(rank: int, world_size: int, send) -> None:
    """The dense method and density 1 take the steps of torch over the mean of those gradients that there are."""
    kinds = {
        "SGD": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9, weight_decay=0.1),
        "AdamW": lambda ps: torch.optim.AdamW(ps, lr=0.01),
        "Adam": lambda ps: torch.optim.Adam(ps, lr=0.01, weight_decay=0.1),
    }
    for make in kinds.values():
        for algo, density in (("dense", None), ("oktopk", 1.0)):
            ours, reference = ([nn.Parameter(torch.ones(shape)) for shape in SHAPES] for _ in range(2))
            optimizer, plain = sparse_wrap(make(ours), algo, density=density), make(reference)
            for step in range(20):
                for parameter, gradient in zip(ours, drawn(step, rank), strict=True):
                    parameter.grad = gradient
                for position, parameter in enumerate(reference):
                    found = [each for r in range(world_size) if (each := drawn(step, r)[position]) is not None]
                    parameter.grad = sum(found) / world_size if found else None
                optimizer.step()
                plain.step()
            for one, other in zip(ours, reference, strict=True):
                assert torch.allclose(one, other, atol=1e-5)
                for name in ("exp_avg", "exp_avg_sq", "momentum_buffer", "step"):
                    state = optimizer.state[one], plain.state[other]
                    assert (name in state[0]) == (name in state[1])
                    assert name not in state[1] or torch.allclose(*(each[name] for each in state), atol=1e-4), name


def replicas_stay_equal(rank: int, world_size: int, send) -> None:
    """Sparse steps leave the same parameters and states on all ranks, also after a load, a flush and a skipped step."""
    for make, fields in (
        (lambda ps: torch.optim.AdamW(ps, lr=0.01), {"values": "4bit"}),
        (lambda ps: torch.optim.SGD(ps, lr=0.01, momentum=0.9), {"max_grad_norm": 1.0}),
    ):
        parameters = [nn.Parameter(torch.ones(shape)) for shape in SHAPES]
        optimizer = sparse_wrap(make(parameters), on_nonfinite="raise", **fields)
        resumed = None
        for step in range(20):
            for own in filter(None, (optimizer, resumed)):
                tensors = [p for group in own.param_groups for p in group["params"]]
                for parameter, gradient in zip(tensors, drawn(step, rank), strict=True):
                    parameter.grad = gradient
                if step == 9 and rank == 1:
                    tensors[0].grad = torch.full(SHAPES[0], float("nan"))
                if step == 9:
                    with pytest.raises(NonFiniteError):
                        own.step()
                else:
                    own.step()
                if step == 12:
                    own.flush()
            if step == 5:
                others = [nn.Parameter(p.detach().clone()) for p in parameters]
                resumed = sparse_wrap(make(others), on_nonfinite="raise", **fields)
                resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        assert all(map(torch.equal, parameters, others))
        states = [{name: torch.as_tensor(v).tolist() for name, v in optimizer.state[p].items()} for p in parameters]
        assert same_everywhere([[p.tolist() for p in parameters], states])


def traffic(rank: int, world_size: int, send) -> None:
    """A model with all gradients, or with a head that nobody uses, exchanges nothing more, except in its first step."""
    phases = []
    for lacking in ((), (3,), (rank % 4,)):
        parameters = [nn.Parameter(torch.ones(shape)) for shape in SHAPES]
        optimizer = sparse_wrap(torch.optim.SGD(parameters, lr=0.1))
        asks = []
        for _ in range(3):
            for position, parameter in enumerate(parameters):
                parameter.grad = None if position in lacking else torch.ones(SHAPES[position])
            optimizer.step()
            asks.append("seconds_missing_gradients" in optimizer.metrics())
        phases.append(asks)
    assert phases == [[False] * 3, [True, False, False], [True] * 3]


def lost_before_it_knew(rank: int, world_size: int, send) -> None:
    """A rank that is lost while ranks tell each other what they lack learns it when it catches up."""
    group = dist.new_group([0, 1], timeout=timedelta(seconds=20))
    other = dist.new_group([0, 1], timeout=timedelta(seconds=20))
    if rank > 1:
        return
    parameters = [nn.Parameter(torch.ones(shape)) for shape in SHAPES]
    optimizer = sparse_wrap(torch.optim.SGD(parameters, lr=0.1, momentum=0.9), process_group=group)

    def step(number: int) -> None:
        for parameter, gradient in zip(parameters, drawn(number, rank), strict=True):
            parameter.grad = gradient
        optimizer.step()

    step(0)
    step(1)
    presence, agree = optimizer._exchange.presence, optimizer._exchange.presence.agree

    def lost(*arguments) -> None:
        before = presence.absent
        agree(*arguments)
        presence.absent = before
        raise PeerLostError("lost rank 2", [2])

    if rank == 1:
        presence.agree = lost
        with pytest.raises(PeerLostError):
            step(3)
        assert optimizer._exchange.state is State.SUSPENDED
    else:
        step(3)
    assert optimizer.reset_process_group(other) == (rank == 1)
    assert parameters[3].grad is None
    step(4)
    step(9)
    assert same_everywhere([p.tolist() for p in parameters], other)
