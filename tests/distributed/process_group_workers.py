"""Functions that run in the worker processes of tests on real gloo processes."""

from __future__ import annotations

import os
import threading
import time
import weakref
from contextvars import ContextVar
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import tritoncomm
from helpers import flat, loss_of, same_everywhere, tiny_model, total
from torch import nn
from tritoncomm import (
    ConfigMismatchError,
    NonFiniteError,
    Recipe,
    SimulatedWorld,
    SparseVector,
)
from tritoncomm.planning.link import measure_link
from tritoncomm.scheduler import messages
from tritoncomm.scheduler.cost import Traffic
from tritoncomm.scheduler.group_collectives import SMALL
from tritoncomm.scheduler.process_group import ProcessGroupScheduler
from tritoncomm.scheduler.rounds import AllGather, AllReduce, AllToAll, Pattern, Post, Round
from tritoncomm.scheduler.simulated import SimulatedScheduler
from tritoncomm.step.exchange.feedback import ErrorFeedback

import laws

# The models here are small. With the default ``dense_below``, all their tensors would be sent dense.
sparse_wrap = partial(tritoncomm.wrap, dense_below=0)

TIMEOUT = timedelta(seconds=10)
FAMILIES = ("random", "ties", "one-region", "zero", "disjoint", "cancelling", "random")


class Seen(NamedTuple):
    """The results of one step on one rank."""

    indices: list[int]
    value_bits: list[int]
    residual_bits: list[int]
    state: object
    sent: Traffic
    received: Traffic

    @classmethod
    def of(cls, mean: SparseVector, feedback: ErrorFeedback, sent: Traffic, received: Traffic) -> Seen:
        """Return the results as plain numbers, which can be sent between processes and compared."""
        mean = mean.trimmed()
        values, residual = (tensor.view(torch.int32).tolist() for tensor in (mean.values, feedback.residual))
        return cls(mean.indices.tolist(), values, residual, feedback.algorithm.state, sent, received)


def case_of(recipe: Recipe, world_size: int, steps: int) -> laws.Case:
    """Return the case on which processes and simulation are compared."""
    return laws.Case(world_size, laws.length(recipe, 211), FAMILIES[:steps], seed=world_size)


def exchanges(rank: int, world_size: int, send, runs: dict[str, tuple[Recipe, laws.Case]]) -> dict[str, list[Seen]]:
    """Run recipes between real processes and return the results of every step."""
    seen: dict[str, list[Seen]] = {}
    for name, (recipe, case) in runs.items():
        scheduler = ProcessGroupScheduler(subgroups=recipe.subgroups(world_size))
        feedback = ErrorFeedback(recipe.build(case.numel))
        seen[name] = []
        for gradient in case.gradients():
            mean = scheduler.run(feedback.begin(gradient[rank], rank, world_size))
            feedback.commit()
            seen[name].append(Seen.of(mean, feedback, scheduler.meter.sent, scheduler.meter.received))
    return seen


def collectives_in_backward(rank: int, world_size: int, send) -> None:
    """Context variables that autograd keeps in collectives of a backward pass are released in this thread."""
    variable: ContextVar[Any] = ContextVar("variable")
    scheduler = ProcessGroupScheduler()
    scheduler.agree_on_exchange_id()
    died_in: list[int] = []

    def exchanged(gradient: torch.Tensor) -> torch.Tensor:
        return scheduler.run(one_op(AllReduce("test", gradient)))

    def backward() -> None:
        value = nn.Module()
        weakref.finalize(value, lambda: died_in.append(threading.get_ident()))
        variable.set(value)
        x = torch.ones(1000, requires_grad=True)  # a shorter one is exchanged without a collective
        x.register_hook(exchanged)
        x.sum().backward()
        variable.set(None)

    for _ in range(50):
        backward()
        time.sleep(0.01)  # lets gloo release its reference, which may take longer on a busy machine
    assert len(died_in) in (48, 49), "the last one is still referenced, so this thread releases it"
    elsewhere = sum(thread != threading.get_ident() for thread in died_in)
    assert elsewhere <= 2, f"{elsewhere} of 50 died in a thread of gloo"


def one_op(op: AllReduce) -> Pattern[torch.Tensor]:
    """Yield one operation and return its reply."""
    reply: torch.Tensor = yield op
    return reply


def laws_on_processes(rank: int, world_size: int, send, recipes: dict[str, Recipe]) -> None:
    """Check conservation, agreement, refusal and determinism of ``recipes``, with separate collectives."""
    for name, recipe in recipes.items():
        scheduler = ProcessGroupScheduler(subgroups=recipe.subgroups(world_size))
        numel = laws.length(recipe, 300)
        runs = [ErrorFeedback(recipe.build(numel)) for _ in range(2)]
        for step in range(5):
            gradient = torch.randn(numel, generator=torch.Generator().manual_seed(100 * step + rank))
            held = total(runs[0].residual.double() + gradient.double())
            means: list[SparseVector] = []
            for feedback in runs:
                means.append(scheduler.run(feedback.begin(gradient, rank, world_size)))
                feedback.commit()
            after = means[0].to_dense().double() * world_size + total(runs[0].residual.double())
            assert torch.allclose(held, after, atol=1e-5), name
            assert laws.same_vector(*means), name
            bits = means[0].to_dense().view(torch.int32)
            lowest, highest = bits.clone(), bits.clone()
            dist.all_reduce(lowest, dist.ReduceOp.MIN)
            dist.all_reduce(highest, dist.ReduceOp.MAX)
            assert torch.equal(lowest, highest), name
        before, state = runs[0].residual.clone(), runs[0].algorithm.state
        if rank == world_size - 1:
            gradient[7] = float("nan")
        try:
            scheduler.run(runs[0].begin(gradient, rank, world_size))
        except NonFiniteError:
            runs[0].rollback()
        else:
            raise AssertionError(f"{name} accepted a NaN")
        assert laws.same_bits(runs[0].residual, before)
        assert runs[0].algorithm.state == state


def wrapped_training(rank: int, world_size: int, send) -> None:
    """The dense method equals averaging by hand, and sparse methods keep replicas identical to the bit."""
    for algo, make in (
        ("dense", lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)),
        ("oktopk", lambda p: torch.optim.AdamW(p, lr=0.01)),
        ("oktopk", lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)),
        ("topk_allgather", lambda p: torch.optim.Adam(p, lr=0.01)),
    ):
        model, reference = tiny_model(), tiny_model()
        optimizer = sparse_wrap(make(model.parameters()), algo=algo, density=0.1, warmup_steps=2)
        plain = make(reference.parameters())
        for step in range(8):
            optimizer.zero_grad()
            loss_of(model, rank, step).backward()
            if rank == 0 and step % 2:
                model[0].bias.grad = None  # one rank has no gradient: it counts as zero
            optimizer.step()
            if algo == "dense":
                plain.zero_grad()
                for r in range(world_size):
                    loss = loss_of(reference, r, step) / world_size
                    kept = reference[0].bias.grad.clone() if reference[0].bias.grad is not None else None
                    loss.backward()
                    if r == 0 and step % 2:
                        reference[0].bias.grad = kept
                if world_size > 1:  # one worker takes the steps of the bare optimizer
                    if reference[0].bias.grad is None:
                        reference[0].bias.grad = torch.zeros(20)
                    reference.unused.grad = torch.zeros(5)
                plain.step()
        flat = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
        everybody = [None] * world_size
        dist.all_gather_object(everybody, flat.view(torch.int32).tolist())
        assert all(other == everybody[0] for other in everybody)
        if algo == "dense":
            expected = torch.cat([p.detach().reshape(-1) for p in reference.parameters()])
            assert torch.allclose(flat, expected, atol=1e-6)
        metrics = optimizer.metrics()
        assert metrics["steps"] == 8
        assert (metrics["bytes_sent"] > 0) == (world_size > 1)
        assert all(isinstance(value, float) for value in metrics.values())
        assert ("seconds_confirm" in metrics) == (world_size > 1)


def clipping_and_skipping(rank: int, world_size: int, send) -> None:
    """synchronize() averages once, and a NaN on one rank skips the step on all."""
    model = tiny_model()
    optimizer = sparse_wrap(torch.optim.SGD(model.parameters(), lr=1.0), density=0.2)
    loss_of(model, rank, 0).backward()
    optimizer.synchronize()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    everybody = [None] * world_size
    dist.all_gather_object(everybody, float(norm))
    assert len(set(everybody)) == 1
    before = [p.detach().clone() for p in model.parameters()]
    optimizer.step()
    moved = torch.cat([(p.detach() - b).reshape(-1) for p, b in zip(model.parameters(), before, strict=True)])
    assert 0.9e-3 < float(moved.norm()) < 1.1e-3
    assert optimizer.metrics()["steps"] == 1

    optimizer.zero_grad()
    loss_of(model, rank, 1).backward()
    if rank == 0:
        model[2].weight.grad[0, 0] = float("inf")
    before = [p.detach().clone() for p in model.parameters()]
    residuals = optimizer.state_dict()["tritoncomm"]["residuals"]
    optimizer.step()
    assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))
    assert all(map(torch.equal, residuals, optimizer.state_dict()["tritoncomm"]["residuals"]))
    assert optimizer.metrics()["skipped_steps"] == 1


def mismatches(rank: int, world_size: int, send) -> None:
    """A rank with a different configuration is named on every rank, with the field."""

    def attempt(named: str, build) -> None:
        try:
            build()
        except ConfigMismatchError as error:
            text = str(error)
            assert named in text, text
            assert "rank 1 has" in text, text
        else:
            raise AssertionError(f"no error about {named}")

    odd = rank == 1

    def wrap(model: nn.Module | None = None, **fields) -> object:
        model = model or tiny_model()
        return sparse_wrap(torch.optim.AdamW(model.parameters()), **fields)

    attempt("density", lambda: wrap(density=0.02 if odd else 0.01))
    attempt("algorithm", lambda: wrap(algo="topk_allgather" if odd else "oktopk"))
    attempt("repartition_every of OkTopk", lambda: wrap(repartition_every=7 if odd else 8))
    attempt("steps of Warmup", lambda: wrap(warmup_steps=7 if odd else 8))
    attempt("values of OkTopk", lambda: wrap(values="4bit" if odd else "fp32"))
    attempt("packed of OkTopk", lambda: wrap(packed=odd, values="fp32"))
    attempt("argument staleness", lambda: wrap(staleness="off" if odd else "aware"))
    attempt("argument small", lambda: wrap(small="8bit" if odd else "fp32"))
    attempt("optimizer", lambda: sparse_wrap((torch.optim.SGD if odd else torch.optim.Adam)(tiny_model().parameters())))
    attempt("values of parameter 1", lambda: wrap(tiny_model(seed=int(odd))))
    named = tiny_model(seed=int(odd))
    own = torch.optim.AdamW(named.parameters())
    attempt("values of 0.weight", lambda: sparse_wrap(own, model=named))
    attempt("dtype of parameter 0", lambda: wrap(tiny_model().double() if odd else tiny_model()))
    attempt("shape of parameter 0", lambda: wrap(nn.Linear(3 + odd, 2)))
    attempt("number of parameters", lambda: wrap(nn.Linear(3, 2, bias=odd)))
    attempt(
        "lr of parameter group 0", lambda: sparse_wrap(torch.optim.SGD(tiny_model().parameters(), lr=0.1 * (1 + odd)))
    )
    torch.manual_seed(0)
    a, b = nn.Parameter(torch.randn(3)), nn.Parameter(torch.randn(3))
    order = [b, a] if odd else [a, b]
    attempt("parameter order differs", lambda: sparse_wrap(torch.optim.SGD(order, lr=0.1)))
    named = [("b", a) if odd else ("a", a)]
    attempt("name of parameter 0", lambda: sparse_wrap(torch.optim.SGD(named, lr=0.1)))
    # A rank with wrong arguments does not block the others.
    try:
        wrap(density=0.0 if odd else 0.01)
    except ConfigMismatchError as error:
        outcome = str(error)
    except tritoncomm.ConfigurationError:
        outcome = "own"
    assert outcome == "own" if odd else "ranks [1] reported an error: rank 1: OkTopk(density=0.0)" in outcome
    wrap()


def small_in_8_bits(rank: int, world_size: int, send) -> None:
    """What is sent in 8 bits has a residual, in dense steps too. A run in fp32 resumes it, and flush() delivers it."""
    model = tiny_model()
    trained = [p for p in model.parameters() if p is not model.unused and p is not model.frozen]

    def wrapped(small: str) -> tritoncomm.SparseOptimizer:
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        return tritoncomm.wrap(sgd, density=0.2, warmup_steps=1, dense_below=100, small=small)

    def step(optimizer: tritoncomm.SparseOptimizer, number: int) -> torch.Tensor:
        """Take a step, and return what was delivered to the parameters beyond the mean of this step's gradients."""
        optimizer.zero_grad()
        loss_of(model, rank, number).backward()
        dense = total(torch.cat([p.grad.reshape(-1) for p in trained])) / world_size
        optimizer.synchronize()
        delivered = torch.cat([p.grad.reshape(-1) for p in trained])
        optimizer.step()
        return delivered - dense

    def small_residual(optimizer: tritoncomm.SparseOptimizer) -> torch.Tensor:
        return optimizer._vector.feedback.residual[-optimizer._vector.dense_numel :]

    first = wrapped("8bit")
    surplus = step(first, 0)
    both = first._vector.feedback.residual[: -first._vector.dense_numel], small_residual(first)
    assert all(total(part.abs()).any() for part in both)
    assert {"seconds_small-gather", "seconds_dense-gather"} <= first.metrics().keys()
    for number in range(1, 4):
        surplus += step(first, number)
    assert total(small_residual(first).abs()).any()
    assert "seconds_dense-gather" not in first.metrics()
    second = wrapped("fp32")
    second.load_state_dict(first.state_dict())
    surplus += step(second, 4)
    assert not small_residual(second).any()
    pending = second._vector.residuals_by_parameter()
    left = total(torch.cat([pending[p] for p in trained])) / world_size
    assert torch.allclose(surplus + left, torch.zeros_like(surplus), atol=1e-6)
    third = wrapped("8bit")
    third.load_state_dict(second.state_dict())
    step(third, 5)
    assert total(small_residual(third).abs()).any()
    third.flush()
    assert not third._vector.feedback.residual.any()
    bits = torch.cat([p.detach().reshape(-1) for p in model.parameters()]).view(torch.int32)
    assert torch.equal(total(bits), world_size * bits)


def loading(rank: int, world_size: int, send) -> None:
    """Checkpoints of different steps, or one that a rank rejects, raise an error on every rank and change nothing."""
    model = tiny_model()
    optimizer = sparse_wrap(torch.optim.SGD(model.parameters(), lr=0.1), density=0.2)
    saved = []
    for step in range(3):
        optimizer.zero_grad()
        loss_of(model, rank, step).backward()
        optimizer.step()
        saved.append(optimizer.state_dict())
    residual_norm = optimizer.metrics()["residual_norm"]
    with pytest.raises(ConfigMismatchError, match=r"loaded state: .*rank 1 has"):
        optimizer.load_state_dict(saved[0 if rank == 1 else 1])
    saved[1]["tritoncomm"]["world_size"] += rank == 1
    expected = tritoncomm.ConfigurationError if rank == 1 else ConfigMismatchError
    with pytest.raises(expected, match="written with world_size"):
        optimizer.load_state_dict(saved[1])
    assert optimizer.metrics()["residual_norm"] == residual_norm
    optimizer.load_state_dict(saved[2])


def rejected_gradients(rank: int, world_size: int, send) -> None:
    """A rank whose gradient cannot be exchanged raises an error, and the others skip the step."""
    table = nn.Embedding(5, 2, sparse=rank == 1)
    nn.init.ones_(table.weight)
    optimizer = sparse_wrap(torch.optim.SGD(table.parameters(), lr=0.1))
    table(torch.tensor([1])).sum().backward()
    try:
        optimizer.step()
    except tritoncomm.ConfigurationError:
        assert rank == 1
    else:
        assert rank != 1
        assert optimizer.metrics()["skipped_steps"] == 1
    assert torch.equal(table.weight, torch.ones(5, 2))


def late_group(rank: int, world_size: int, send) -> None:
    """The first step raises an error if the process group did not exist at wrap()."""
    weight = nn.Parameter(torch.ones(3))
    weight.grad = torch.ones(3)
    group = dist.distributed_c10d._get_default_group()
    dist.distributed_c10d._update_default_pg(None)
    optimizer = sparse_wrap(torch.optim.SGD([weight], lr=0.1))
    dist.distributed_c10d._update_default_pg(group)
    with pytest.raises(tritoncomm.ConfigurationError, match=r"after wrap\(\)"):
        optimizer.step()


def subgroups(rank: int, world_size: int, send) -> None:
    """Groups exchange independently of each other, with the ranks of each group."""
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3, 4])]
    group = groups[0] if rank in (0, 2) else groups[1]
    scheduler = ProcessGroupScheduler(group)
    size = dist.get_world_size(group)
    recipe = tritoncomm.OkTopk(density=0.1)
    simulated, feedback = SimulatedWorld(recipe, size, 100), ErrorFeedback(recipe.build(100))
    for gradient in laws.Case(size, 100, FAMILIES).gradients():
        mean = scheduler.run(feedback.begin(gradient[scheduler.rank], scheduler.rank, size))
        feedback.commit()
        assert laws.same_vector(mean, simulated.step(gradient)[0])
    outside = groups[1] if rank in (0, 2) else groups[0]
    try:
        sparse_wrap(torch.optim.SGD([nn.Parameter(torch.ones(3))], lr=0.1), process_group=outside)
    except (tritoncomm.ConfigurationError, ValueError) as error:
        send(str(error))


def collectives(rank: int, world_size: int, send) -> None:
    """Short collectives, which are messages, and long ones, of the backend, give what the simulation gives.

    Sums of short ones have its bits: ranks are added in order. gloo adds in another one, so long ones get integers.
    """
    scheduler, simulated = ProcessGroupScheduler(), SimulatedScheduler(world_size)
    generator = torch.Generator().manual_seed(world_size)
    for dtype in (torch.int32, torch.int64, torch.float32, torch.float64):
        for size in (0, 1, SMALL // dtype.itemsize, SMALL // dtype.itemsize + 1):
            values = torch.randn(world_size, size, generator=generator).to(dtype)
            rows = (1e3 * torch.randn(world_size, world_size, size, generator=generator)).to(dtype)
            values = values if size * dtype.itemsize <= SMALL else values.round()
            for kind, tensors in (
                (AllReduce, values),
                (AllGather, values),
                (AllToAll, rows),
                (AllToAll, rows[..., 0:1]),
            ):
                expected = simulated.run([one_op(kind("test", tensor)) for tensor in tensors])[rank]
                found = scheduler.run(one_op(kind("test", tensors[rank])))
                assert found.dtype == dtype
                assert torch.equal(found, expected), (kind, dtype, size)
                assert scheduler.meter.sent == simulated.meters[rank].sent


def receives_are_ahead(rank: int, world_size: int, send) -> None:
    """When a round begins, the receives of its messages wait already: also after another exchange in the group.

    A message that has arrived is read, though its sender has ended since. The next one is lost.
    """
    schedulers = [ProcessGroupScheduler(timeout=TIMEOUT, stamp=name) for name in ("one", "two")]
    peer, words = 1 - rank, torch.arange(5000, dtype=torch.int32)

    def message(size: int) -> Pattern[torch.Tensor]:
        inbox = yield Round("test", {peer: words[:size]}, {peer: size})
        return inbox[peer]

    schedulers[0].run(message(1))
    box = messages._mailboxes[dist.group.WORLD]
    for number, size in enumerate((5000, 3, 4999, 1)):
        posted = [each.number for each in box.ahead[peer]]
        assert posted == [box.posted[peer] - 1, box.posted[peer]]
        assert torch.equal(schedulers[number % 2].run(message(size)), words[:size])
        assert posted[0] not in [each.number for each in box.ahead[peer]]
    assert box.sent[peer] == box.posted[peer] - 2
    if rank == 1:

        def last() -> Pattern[None]:
            yield Post(Round("test", {peer: words[:7]}, {}))

        schedulers[0].run(last())
        time.sleep(0.2)
        os._exit(0)
    time.sleep(1.0)

    def listening() -> Pattern[torch.Tensor]:
        inbox = yield Round("test", {}, {peer: 7})
        return inbox[peer]

    assert torch.equal(schedulers[0].run(listening()), words[:7])
    with pytest.raises(tritoncomm.PeerLostError):
        schedulers[0].run(listening())
    send("done")
    os._exit(0)


def profiled(rank: int, world_size: int, send) -> None:
    """Training goes on beside profiles that begin and end between its steps. They see the whole of an operation."""
    model = tiny_model()
    optimizer = sparse_wrap(torch.optim.SGD(model.parameters(), lr=0.1), density=0.2)
    for step in range(24):
        if step % 4 == 0:
            profile = torch.profiler.profile(record_shapes=True)
            profile.start()
        optimizer.zero_grad()
        loss_of(model, rank, step).backward()
        optimizer.step()
        if step % 4 == 2:
            profile.stop()
            assert any("gloo:recv" in event.name for event in profile.events())
            del profile


def another_default_group(rank: int, world_size: int, send, file: str) -> None:
    """An optimizer goes on with another default group, and its messages pass through that one."""
    model = tiny_model()
    optimizer = sparse_wrap(torch.optim.SGD(model.parameters(), lr=0.1), density=0.2)

    def step(number: int) -> None:
        optimizer.zero_grad()
        loss_of(model, rank, number).backward()
        optimizer.step()

    step(0)
    dist.destroy_process_group()
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=world_size)
    assert dist.group.WORLD not in messages._mailboxes
    step(1)
    assert messages._mailboxes[dist.group.WORLD].sent
    assert same_everywhere(flat(model), None)


def crash(rank: int, world_size: int, send) -> None:
    """Rank 1 fails while the others are in a collective."""
    if rank == 1:
        raise ZeroDivisionError("the bug of rank 1")
    dist.barrier()


def vanish(rank: int, world_size: int, send) -> None:
    """Rank 0 dies without a traceback."""
    if rank == 0:
        os._exit(9)
    time.sleep(600)


def measured_link(rank: int, world_size: int, send) -> None:
    """All ranks measure the same link."""
    link = measure_link(None)
    everybody = [None] * world_size
    dist.all_gather_object(everybody, tuple(link))
    assert all(other == tuple(link) for other in everybody)
    assert 0 < link.latency < 1
    assert link.bandwidth > 1e6
