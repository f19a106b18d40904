"""Worker processes of tests/distributed/test_local_steps.py: the laws of the exchange of updates."""

from __future__ import annotations

import copy
import logging
import os
import re

import fsdp_models
import pytest
import torch
import torch.distributed as dist
import tritoncomm
from helpers import flat, log_lines, same_everywhere, total
from recovery_workers import BEHIND, LOST, TIMEOUT, not_confirmed
from torch import nn
from tritoncomm import NonFiniteError, OkTopk, PeerLostError, ProtocolMismatchError
from tritoncomm.planning import planner
from tritoncomm.scheduler import failure_report

METHODS = {
    "1 bit": tritoncomm.recipe("quantized", values="1bit"),
    "2 bits": tritoncomm.recipe("quantized", values="2bit"),
    "oktopk": OkTopk(density=0.1),
    "spardl": tritoncomm.recipe("spardl", density=0.2),
    "dense": tritoncomm.Dense(),
}
# DGC has a momentum of its own, and is refused.
OTHERS = {name: planner.at(name, 0.1) for name in tritoncomm.algorithms() if name not in (*METHODS, "quantized", "dgc")}
SHAPES = [(16, 16), (40,), (8, 8, 2)]


def parameters_of(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    """Return parameters that are small integers, the same on all ranks."""
    generator = torch.Generator().manual_seed(5)
    return [nn.Parameter(torch.randint(-8, 9, shape, generator=generator).to(dtype)) for shape in SHAPES]


def give(parameters: list[nn.Parameter], step: int, rank: int, world_size: int) -> None:
    """Give every parameter a gradient of small integers that are multiples of the number of workers."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    for parameter in parameters:
        drawn = torch.randint(-8, 9, parameter.shape, generator=generator)
        parameter.grad = (drawn * world_size).to(parameter.dtype)


def wrapped(parameters: list[nn.Parameter], recipe, **settings) -> tritoncomm.SparseOptimizer:
    """Return SGD that changes parameters by their gradients, and exchanges updates."""
    inner = torch.optim.SGD(parameters, lr=1.0)
    return tritoncomm.wrap(inner, exchange="updates", updates_algo=recipe, **settings)


def vector(parameters) -> torch.Tensor:
    """Return the values of tensors in one vector."""
    return torch.cat([p.detach().reshape(-1).float() for p in parameters])


def residual(optimizer: tritoncomm.SparseOptimizer) -> torch.Tensor:
    """Return the residual of this worker, in the order of the parameters."""
    return torch.cat(list(optimizer._exchange.vectors[0].residuals_by_parameter().values()))


def conserved(rank: int, world_size: int, send) -> None:
    """Per coordinate, residuals and changes before = world size x mean + residuals after, to the bit, and all agree.

    An exchange receives what the method predicts at most.
    """
    for name, recipe in (METHODS | OTHERS).items():
        for local_steps in (2, 3) if name in METHODS else (2,):
            parameters = parameters_of()
            optimizer = wrapped(parameters, recipe, local_steps=local_steps)
            for step in range(6):
                before, anchor = residual(optimizer).clone(), vector(optimizer._local.anchors)
                forecast = optimizer._exchange.vectors[0].feedback.algorithm.predicted_traffic(world_size)
                give(parameters, step, rank, world_size)
                gradient = vector([p.grad for p in parameters])
                own = vector(parameters)
                optimizer.step()
                if (step + 1) % local_steps:
                    assert torch.equal(vector(parameters), own - gradient), (name, step)
                    continue
                delta = anchor - (own - gradient)
                mean = anchor - vector(optimizer._local.anchors)
                left = total(before + delta) - world_size * mean - total(residual(optimizer))
                assert not left.any(), (name, local_steps, step)
                assert same_everywhere(vector(parameters).tolist()), (name, step)
                assert torch.equal(vector(parameters), vector(optimizer._local.anchors))
                received = optimizer._exchange.vectors[0].meter.received.bytes
                assert received <= forecast.received.bytes + 100 * world_size, name  # and the confirmation


def free_between_exchanges(rank: int, world_size: int, send) -> None:
    """Between exchanges nothing is sent, and parameters are what the bare optimizer makes of own gradients."""
    torch.manual_seed(0)
    bare = nn.Linear(8, 8)
    model = copy.deepcopy(bare)
    own = torch.optim.AdamW(bare.parameters(), lr=0.1)
    inner = torch.optim.AdamW(model.parameters(), lr=0.1)
    optimizer = tritoncomm.wrap(inner, local_steps=3, updates_algo=OkTopk(density=0.2), model=model)
    generator = torch.Generator().manual_seed(rank)
    for step in range(9):
        rows = torch.randn(4, 8, generator=generator)
        sent = optimizer.metrics()["bytes_sent_total"]
        for module, each in ((bare, own), (model, optimizer)):
            each.zero_grad()
            module(rows).square().mean().backward()
            each.step()
        exchanged = step % 3 == 2
        assert (optimizer.metrics()["bytes_sent_total"] > sent) == (exchanged and world_size > 1)
        assert optimizer.metrics()["steps_until_exchange"] == 3 - (step + 1) % 3
        if exchanged:
            assert same_everywhere(flat(model))
            with torch.no_grad():
                for mine, new in zip(bare.parameters(), model.parameters(), strict=True):
                    mine.copy_(new)
        else:
            assert flat(bare) == flat(model)
        with optimizer.averaged():
            assert same_everywhere(flat(model))
        assert exchanged or same_everywhere(flat(model)) == (world_size == 1)


def without_gradient(rank: int, world_size: int, send) -> None:
    """What has no gradient on any rank stays as it is, with its residual. What one rank trains, all get."""
    for local_steps in (1, 4):
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(*shape, bias=False) for shape in ((8, 23), (23, 8), (8, 3))))
        inner = torch.optim.NAdam(model.parameters(), lr=0.05)
        optimizer = tritoncomm.wrap(inner, model=model, local_steps=local_steps)
        generator = torch.Generator().manual_seed(rank)

        def train(steps: int, *, uses_last: bool, wrapped=optimizer, model=model, generator=generator) -> None:
            for _ in range(steps):
                wrapped.zero_grad()
                hidden = model[1](model[0](torch.randn(4, 8, generator=generator)))
                (model[2](hidden) if uses_last else hidden).square().mean().backward()
                wrapped.step()
            wrapped.merge()
            assert same_everywhere(flat(model))

        def last_layer(wrapped=optimizer, model=model) -> tuple[list[float], list[float]]:
            *_, owed = wrapped._exchange.vectors[0].residuals_by_parameter().values()
            return flat(model[2]), owed.tolist()

        never = last_layer()
        train(6, uses_last=False)
        assert last_layer() == never
        train(6, uses_last=True)
        kept = last_layer()
        assert world_size == 1 or any(kept[1])
        train(9, uses_last=False)
        assert last_layer() == kept
        train(4, uses_last=rank == 0)  # the others have no gradient
        assert last_layer()[0] != kept[0]
        optimizer.release()


def alone_with_a_residual(rank: int, world_size: int, send) -> None:
    """A worker that is left alone applies what it owes, also to what has no gradient any more, and is then itself."""
    alone = [dist.new_group([each]) for each in range(world_size)][rank]
    for kind, settings in ((torch.optim.NAdam, {}), (torch.optim.AdamW, {"density": 0.1, "dense_below": 0})):
        model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 30, bias=False))
        inner = kind(model.parameters(), lr=0.05)
        optimizer = tritoncomm.wrap(inner, model=model, broadcast_parameters=True, warmup_steps=0, **settings)
        generator = torch.Generator().manual_seed(rank)
        for step in range(9):
            optimizer.zero_grad()
            hidden = model[0](torch.randn(4, 8, generator=generator))
            (model[1](hidden) if step < 5 else hidden).square().mean().backward()
            if step == 5:
                optimizer.reset_process_group(alone)
                assert world_size == 1 or residual(optimizer).any()
            own = copy.deepcopy(model), copy.deepcopy(optimizer.optimizer.state_dict())
            given = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
            optimizer.step()
            assert step < 5 or not residual(optimizer).any()
            if step > 5:  # the bare optimizer's step, to the bit
                bare = kind(own[0].parameters(), lr=0.05)
                bare.load_state_dict(own[1])
                for mine, gradient in zip(own[0].parameters(), given, strict=True):
                    mine.grad = gradient
                bare.step()
                assert flat(own[0]) == flat(model)
        optimizer.release()


def length_is_matched(rank: int, world_size: int, send) -> None:
    """The mean of independent updates gets the length of one of them, and that of equal updates keeps its length."""
    parameters = [nn.Parameter(torch.zeros(20_000))]
    for seed, expected in ((rank, world_size**0.5), (0, 1.0)):
        before = parameters[0].detach().clone()
        optimizer = wrapped(parameters, "dense")
        gradient = torch.randn(20_000, generator=torch.Generator().manual_seed(seed))
        parameters[0].grad = gradient.clone()
        optimizer.step()
        mean = total(gradient) / world_size
        ratio = float((before - parameters[0].detach()).norm() / mean.norm())
        assert abs(ratio / expected - 1) < 0.1, ratio
        assert same_everywhere(parameters[0].tolist())
        optimizer.release()


def adam_of(model: nn.Module, recipe, **settings) -> tritoncomm.SparseOptimizer:
    """Return Adam with three local steps and outer momentum."""
    inner = torch.optim.Adam(model.parameters(), lr=0.05)
    options = {"local_steps": 3, "outer_lr": 0.8, "outer_momentum": 0.6, "updates_algo": recipe, **settings}
    return tritoncomm.wrap(inner, model=model, **options)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, step: int, rank: int) -> None:
    """Take a step by a batch of this worker."""
    rows = torch.randn(4, 8, generator=torch.Generator().manual_seed(100 * step + rank))
    optimizer.zero_grad()
    (model(rows) - rows).square().mean().backward()
    optimizer.step()


def merged_and_flushed(rank: int, world_size: int, send) -> None:
    """``merge()`` exchanges at any time, and ``flush()`` leaves no residual, no local step and equal ranks."""
    torch.manual_seed(0)
    model = nn.Linear(8, 8)
    optimizer = adam_of(model, METHODS["oktopk"])
    for step in range(4):
        train(model, optimizer, step, rank)
    assert same_everywhere(flat(model)) == (world_size == 1)
    optimizer.merge()
    assert same_everywhere(flat(model))
    assert optimizer.metrics()["exchanges"] == 2
    assert optimizer.metrics()["steps_until_exchange"] == 3
    train(model, optimizer, 4, rank)
    train(model, optimizer, 5, rank)
    assert optimizer.metrics()["exchanges"] == 2
    owed = total(residual(optimizer) + vector(optimizer._local.anchors) - vector(model.parameters())) / world_size
    expected = vector(optimizer._local.anchors) - 0.8 * owed
    optimizer.flush()
    assert same_everywhere(flat(model))
    assert not residual(optimizer).any()
    torch.testing.assert_close(vector(model.parameters()), expected)


def refused(rank: int, world_size: int, send) -> None:
    """A NaN leaves out the step of one rank, or refuses the exchange on all and changes nothing, as is asked for.

    The log of that rank names it and the parameter, and metrics count it.
    """
    for policy in ("skip", "raise"):
        parameters = parameters_of()
        optimizer = wrapped(parameters, METHODS["oktopk"], on_nonfinite=policy, outer_momentum=0.5)
        give(parameters, 0, rank, world_size)
        before, anchor = vector(parameters), vector(optimizer._local.anchors)
        if rank == 1:
            parameters[0].grad[0, 0] = float("nan")
        if policy == "raise":
            with pytest.raises(NonFiniteError):
                optimizer.step()
            own = vector([p.grad for p in parameters]) if rank != 1 else 0
            assert torch.equal(vector(parameters), before - own)
            assert torch.equal(vector(optimizer._local.anchors), anchor)
            assert not residual(optimizer).any()
            assert not optimizer._local.outer.state
            with pytest.raises(RuntimeError, match="call merge"):
                optimizer.step()
            optimizer.merge()
        else:
            with log_lines(logging.WARNING) as lines:
                optimizer.step()
            does = "left out a local step: NaN or Inf in"
            told = [does in line and "rank 1" in line and "(1 values)" in line for line in lines]
            assert told == ([True] if rank == 1 else [])
            figures = optimizer.metrics()
            assert figures["left_out_steps"] == (rank == 1)
        assert same_everywhere(vector(parameters).tolist())
        assert not torch.equal(vector(parameters), before)
        assert vector(parameters).isfinite().all()


def rates_differ(rank: int, world_size: int, send) -> None:
    """Learning rates of local steps may differ between ranks, and training goes on."""
    model = nn.Linear(8, 8)
    inner = torch.optim.AdamW(model.parameters(), lr=0.1)
    optimizer = tritoncomm.wrap(inner, model=model, local_steps=2, broadcast_parameters=True)
    for step in range(8):
        if rank == 1 and step == 2:
            optimizer.param_groups[0]["lr"] = 0.05
        train(model, optimizer, step, rank)
    assert optimizer.metrics()["exchanges"] == 4
    assert same_everywhere(flat(model))


def lost(rank: int, world_size: int, send) -> None:
    """If a worker is lost in an exchange, nothing has changed on the others, which repeat it without that worker."""
    failure_report._CLOSED_SECONDS, failure_report._SILENT_SECONDS = 1.0, 2.5
    parameters = parameters_of()
    optimizer = wrapped(parameters, METHODS["oktopk"], local_steps=2, timeout=TIMEOUT)
    for step in range(3):
        give(parameters, step, rank, world_size)
        optimizer.step()
    if rank == LOST:
        os._exit(0)
    before, anchor, owed = vector(parameters), vector(optimizer._local.anchors), residual(optimizer).clone()
    give(parameters, 3, rank, world_size)
    gradient = vector([p.grad for p in parameters])
    with pytest.raises(PeerLostError):
        optimizer.step()
    assert torch.equal(vector(parameters), before - gradient)
    assert torch.equal(vector(optimizer._local.anchors), anchor)
    assert torch.equal(residual(optimizer), owed)
    group = dist.new_group([0, 1], timeout=TIMEOUT, use_local_synchronization=True)
    assert not optimizer.reset_process_group(group)
    torch.testing.assert_close(residual(optimizer), owed * 2 / world_size)
    with pytest.raises(RuntimeError, match="call merge"):
        optimizer.step()
    kept = residual(optimizer) + anchor - vector(parameters)
    dist.all_reduce(kept, group=group)
    optimizer.merge()
    left = residual(optimizer).clone()
    dist.all_reduce(left, group=group)
    mean = anchor - vector(optimizer._local.anchors)
    torch.testing.assert_close(kept, 2 * mean + left, rtol=0, atol=1e-3)
    for step in range(4, 8):
        give(parameters, step, rank, 2)
        optimizer.step()
    assert same_everywhere(vector(parameters).tolist(), group)
    send((rank, "trained to the end"))
    os._exit(0)


def joins(rank: int, world_size: int, send) -> None:
    """A worker that joins has the state of another, and owes nothing. The others owe the same in the larger group."""
    last = world_size - 1
    groups = [dist.new_group(list(range(last))), dist.new_group([last])]
    for settings in ({}, {"outer_momentum": 0.5}):
        parameters = parameters_of(torch.float64)
        recipe = METHODS["oktopk"]
        optimizer = wrapped(parameters, recipe, local_steps=2, process_group=groups[rank == last], **settings)
        for step in range(4 if rank < last else 0):
            give(parameters, step, rank, last)
            optimizer.step()
        state = [[p.detach() for p in parameters], optimizer.state_dict()] if rank == 0 else [None, None]
        dist.broadcast_object_list(state, src=0)
        if rank == last:
            with torch.no_grad():
                torch._foreach_copy_(parameters, state[0])
            optimizer.load_state_dict(state[1], residuals="reset")
        owed = residual(optimizer).clone()
        assert (rank == last) != bool(owed.any())
        optimizer.reset_process_group(dist.group.WORLD)
        torch.testing.assert_close(residual(optimizer), owed * world_size / last)
        assert same_everywhere(vector(optimizer._local.anchors).tolist())
        kept, anchor = total(residual(optimizer)), vector(optimizer._local.anchors)
        for step in range(4, 8):
            give(parameters, step, rank, world_size)
            optimizer.step()
        assert same_everywhere(vector(parameters).tolist())
        assert optimizer.metrics()["exchanges"] == 4
        if not settings:  # what was owed, and the gradients of four steps, have moved the parameters or are owed still
            moved = world_size * (anchor - vector(parameters)) + total(residual(optimizer)) - kept
            for step in range(4, 8):
                give(parameters, step, rank, world_size)
                moved -= total(vector([p.grad for p in parameters]))
            torch.testing.assert_close(moved, torch.zeros_like(moved), rtol=0, atol=1e-2)
        optimizer.release()


def lost_in_confirmation(rank: int, world_size: int, send) -> None:
    """A worker that could not confirm an exchange that another one has applied applies it in the new group."""
    failure_report._CLOSED_SECONDS, failure_report._SILENT_SECONDS = 1.0, 2.5
    parameters = parameters_of()
    optimizer = wrapped(parameters, METHODS["oktopk"], local_steps=2, outer_momentum=0.5, timeout=TIMEOUT)
    for step in range(3):
        give(parameters, step, rank, world_size)
        optimizer.step()
    give(parameters, 3, rank, world_size)
    if rank == BEHIND:
        not_confirmed(optimizer._exchange)
        with pytest.raises(PeerLostError):
            optimizer.step()
    else:
        optimizer.step()
    if rank == LOST:
        os._exit(0)
    group = dist.new_group([0, 1], timeout=TIMEOUT, use_local_synchronization=True)
    assert optimizer.reset_process_group(group) == (rank == BEHIND)
    assert same_everywhere(vector(parameters).tolist(), group)
    for step in range(5, 9):
        give(parameters, step, rank, 2)
        optimizer.step()
    assert same_everywhere(vector(parameters).tolist(), group)
    send((rank, "trained to the end"))
    os._exit(0)


def kinds_of_models(rank: int, world_size: int, send) -> None:
    """A plain module and one in DDP end with the same bits, and buffers are broadcast as by DDP."""
    ends = []
    for kind in ("plain", "ddp"):
        torch.manual_seed(0)
        model = nn.Linear(8, 8)
        trained = nn.parallel.DistributedDataParallel(model) if kind == "ddp" else model
        optimizer = tritoncomm.wrap(
            torch.optim.RMSprop(model.parameters(), lr=0.01),
            model=trained,
            local_steps=2,
            updates_algo=METHODS["2 bits"],
        )
        for step in range(6):
            train(trained, optimizer, step, rank)
        assert same_everywhere(flat(model))
        ends.append(flat(model))
    assert ends[0] == ends[1]
    torch.manual_seed(0)
    model = nn.Linear(8, 8)
    trained = nn.parallel.DistributedDataParallel(model)  # it averages, because wrap() does not know it
    optimizer = tritoncomm.wrap(torch.optim.RMSprop(model.parameters(), lr=0.01))
    with log_lines() as lines:
        train(trained, optimizer, 0, rank)
    assert sum("pass model=ddp_model" in line for line in lines) == (rank == 0)


def scaled(rank: int, world_size: int, send) -> None:
    """Scales of a ``GradScaler`` may differ between ranks: an overflow leaves out a step of one rank alone."""
    ends = []
    for enabled in (False, True):
        torch.manual_seed(0)
        model = nn.Linear(8, 8)
        optimizer = adam_of(model, METHODS["2 bits"])
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, enabled=enabled)
        for step in range(6):
            rows = torch.randn(4, 8, generator=torch.Generator().manual_seed(100 * step + rank))
            optimizer.zero_grad()
            scaler.scale((model(rows) - rows).square().mean()).backward()
            if step in (4, 5) and rank == 1:  # the second one is exchanged
                model.weight.grad[0, 0] = float("inf")
            scaler.step(optimizer)
            scaler.update()
        assert same_everywhere(flat(model))
        ends.append(vector(model.parameters()))
        assert optimizer.metrics()["exchanges"] == 2
        assert not enabled or scaler.get_scale() == 2.0 ** (8 if rank == 1 else 10)
        saved = copy.deepcopy(optimizer.state_dict())  # the state of Adam is one of fewer steps on rank 1
        optimizer.load_state_dict(saved)
    torch.testing.assert_close(*ends, rtol=0, atol=1e-6)


def inside_averaged(rank: int, world_size: int, send) -> None:
    """Inside ``averaged()``, which may be nested, whatever would use or replace this worker's parameters raises."""
    torch.manual_seed(0)
    model = nn.Linear(8, 8)
    optimizer = adam_of(model, METHODS["2 bits"])
    train(model, optimizer, 0, rank)
    own = flat(model)
    actions = {
        "state_dict()": optimizer.state_dict,
        "copying": lambda: copy.deepcopy(optimizer),
        "merge()": optimizer.merge,
        "flush()": optimizer.flush,
        "step()": optimizer.step,
        "load_state_dict()": lambda: optimizer.load_state_dict(optimizer.optimizer.state_dict()),
    }
    with optimizer.averaged(), optimizer.averaged():
        assert same_everywhere(flat(model))
    assert flat(model) == own
    for name, action in actions.items():
        with optimizer.averaged():
            with optimizer.averaged():
                pass
            with pytest.raises(RuntimeError, match=re.escape(f"{name} inside averaged()")):
                action()
        assert flat(model) == own


def loaded_weights(rank: int, world_size: int, send) -> None:
    """Weights that are loaded after ``wrap`` become the anchor. Clamped weights are a step like others."""
    torch.manual_seed(0)
    model, other = nn.Linear(8, 8), nn.Linear(8, 8)
    optimizer = tritoncomm.wrap(torch.optim.RMSprop(model.parameters(), lr=1e-3), model=model)
    train(model, optimizer, 0, rank)
    for way in (model.load_state_dict, lambda _: optimizer.load_state_dict(optimizer.optimizer.state_dict())):
        model.load_state_dict(other.state_dict())
        way(other.state_dict())
        train(model, optimizer, 1, rank)
        assert float((vector(model.parameters()) - vector(other.parameters())).abs().max()) < 0.02
        assert same_everywhere(flat(model))
    with torch.no_grad():
        model.weight.clamp_(-0.3, 0.3)
    train(model, optimizer, 2, rank)
    assert same_everywhere(flat(model))
    optimizer.release()
    local = tritoncomm.wrap(torch.optim.RMSprop(model.parameters(), lr=1e-3), model=model, local_steps=4)
    train(model, local, 0, rank)
    with log_lines() as lines:
        with local.averaged():
            pass
        assert not lines
        model.load_state_dict(other.state_dict())  # between two exchanges, it counts as a step
        for _ in range(2):
            with local.averaged():
                assert flat(model) != flat(other)
    assert len([line for line in lines if "Before you load weights, call merge()" in line]) == 1
    local.merge()
    model.load_state_dict(other.state_dict())
    train(model, local, 1, rank)
    with local.averaged():
        assert flat(model) == flat(other)


def weights_of_one_rank(rank: int, world_size: int, send) -> None:
    """Weights that one rank loads alone, or that differ between ranks, are refused until all load a checkpoint."""
    for ranks in ({world_size - 1}, set(range(world_size))):
        torch.manual_seed(0)
        model, other = nn.Linear(8, 8), nn.Linear(8, 8)
        optimizer = tritoncomm.wrap(torch.optim.RMSprop(model.parameters(), lr=1e-3), model=model)
        train(model, optimizer, 0, rank)
        saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        if rank in ranks:
            with torch.no_grad():
                model.weight.mul_(2 + rank)
        if world_size > 1:
            with pytest.raises(ProtocolMismatchError, match=r"loaded weights of the common .*load the same checkpoint"):
                train(model, optimizer, 1, rank)
            for action in (optimizer.merge, optimizer.flush):
                with pytest.raises(ProtocolMismatchError, match="loaded weights"):
                    action()
        for state in (saved[1], saved[1] | {"tritoncomm": None}, {"state": {}} | saved[1]):
            model.load_state_dict(saved[0])  # the advice of the error
            optimizer.load_state_dict({key: value for key, value in state.items() if value is not None})
            model.load_state_dict(other.state_dict())
            train(model, optimizer, 1, rank)
            assert same_everywhere(flat(model))
            assert float((vector(model.parameters()) - vector(other.parameters())).abs().max()) < 0.02
            assert optimizer._local.outer.param_groups[0]["loaded weights"] == 0


def loaded_shards(rank: int, world_size: int, send) -> None:
    """What all replicas of a model with FSDP2 load is the anchor."""
    over = fsdp_models.mesh()
    model = fsdp_models.sharded(fsdp_models.Net(), over["shard"])
    replicas = over["replicate"].get_group()
    optimizer = tritoncomm.wrap(torch.optim.RMSprop(model.parameters(), lr=1e-4), model=model, process_group=replicas)

    def train(step: int) -> None:
        optimizer.zero_grad()
        fsdp_models.loss_of(model, rank, step).backward()
        optimizer.step()

    train(0)
    loaded = {name: 2 * parameter.detach() for name, parameter in model.state_dict().items()}
    model.load_state_dict(loaded)
    train(1)
    assert same_everywhere(fsdp_models.bits(model), replicas)
    for name, parameter in model.state_dict().items():
        assert float((parameter - loaded[name]).to_local().abs().max()) < 1e-2, name


def outer_rate(rank: int, world_size: int, send) -> None:
    """The outer rate can be set between two exchanges. One that differs between ranks is refused by name."""
    parameters = parameters_of()
    optimizer = wrapped(parameters, "dense", local_steps=2)
    for rate in (1.0, 0.5):
        optimizer.outer_lr = rate
        before, given = vector(parameters), torch.zeros(())
        for step in range(2):
            give(parameters, step, rank, world_size)
            given = given + vector([p.grad for p in parameters])
            optimizer.step()
        torch.testing.assert_close(before - vector(parameters), rate * total(given) / world_size)
    with pytest.raises(tritoncomm.ConfigurationError, match="outer_lr=-1"):
        optimizer.outer_lr = -1
    optimizer.outer_lr = 1.0 + (rank == world_size - 1)
    give(parameters, 0, rank, world_size)
    optimizer.step()
    if world_size > 1:
        with pytest.raises(tritoncomm.ProtocolMismatchError, match="lr of the common parameters"):
            optimizer.merge()
        optimizer.outer_lr = 1.0
    optimizer.merge()
    assert same_everywhere(vector(parameters).tolist())


def figures(rank: int, world_size: int, send) -> None:
    """Metrics count steps, exchanges and bytes. Synchronizing leaves gradients alone, and says so once."""
    parameters = parameters_of()
    optimizer = wrapped(parameters, METHODS["1 bit"], local_steps=2)
    with log_lines(logging.INFO) as lines:
        for step in range(5):
            give(parameters, step, rank, world_size)
            own = vector([p.grad for p in parameters])
            optimizer.synchronize()
            assert torch.equal(vector([p.grad for p in parameters]), own)
            before = vector(optimizer._local.anchors)
            optimizer.step()
            metrics = optimizer.metrics()
            assert metrics["inner_steps"] == step + 1
            assert metrics["exchanges"] == (step + 1) // 2
            assert metrics["bytes_per_step"] == pytest.approx(metrics["bytes_sent_total"] / (step + 1))
            if step == 0:
                moved = before - vector(parameters)
            if step == 1 and world_size > 1:  # a single worker has nothing to give
                assert metrics["delta_norm"] == pytest.approx(float((moved + own).norm()))
    assert len([line for line in lines if "gradients stay those of this worker" in line]) == 1
    assert metrics["dropped_deltas"] == 0
    with torch.no_grad():
        parameters[0][0, 0] = torch.nan if rank == 0 else 1.0
    optimizer.merge()
    assert optimizer.metrics()["dropped_deltas"] == (rank == 0)
    assert same_everywhere(vector(parameters).tolist())


def merged_on_one_rank(rank: int, world_size: int, send) -> None:
    """A rank that merges when the others do not is an error on all, and nothing has changed."""
    torch.manual_seed(0)
    model = nn.Linear(8, 8)
    optimizer = adam_of(model, METHODS["2 bits"])
    train(model, optimizer, 0, rank)
    if rank != 0:
        train(model, optimizer, 1, rank)
    wrong = optimizer.merge if rank == 0 else lambda: train(model, optimizer, 2, rank)
    with pytest.raises(tritoncomm.ProtocolMismatchError, match=r"local_steps of the common.*step\(\) equally often"):
        wrong()
    assert optimizer.metrics()["exchanges"] == 0


def one_bad_shard(rank: int, world_size: int, send) -> None:
    """With FSDP2, the shards of a replica leave out a step together, also if one of them alone has a NaN."""
    over = fsdp_models.mesh()
    model = fsdp_models.sharded(fsdp_models.Net(), over["shard"])
    inner = torch.optim.AdamW(model.parameters(), lr=0.01)
    replicas = over["replicate"].get_group()
    optimizer = tritoncomm.wrap(inner, model=model, process_group=replicas, local_steps=2, max_grad_norm=1.0)
    for step in range(4):
        optimizer.zero_grad()
        fsdp_models.loss_of(model, rank, step).backward()
        if step == 1 and rank == 0:
            model.head.weight.grad.to_local().fill_(float("nan"))
        before = fsdp_models.bits(model)
        optimizer.step()
        if step == 0:
            assert fsdp_models.bits(model) != before
    assert same_everywhere(fsdp_models.bits(model), replicas)
    assert optimizer.metrics()["exchanges"] == 2
