"""Real gloo processes: their results are those of the simulation, to the bit, and those of averaging by hand."""

from __future__ import annotations

import itertools
import os
import threading
import time
import weakref
from contextvars import ContextVar
from datetime import timedelta
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import tritoncomm
from models import adamw, equal, exact, sgd, tiny, train
from torch import nn
from torch.profiler import ProfilerActivity, profile
from tritoncomm import (
    ConfigMismatchError,
    ConfigurationError,
    Late,
    PeerLostError,
    SimulatedWorld,
    SparseVector,
    Updates,
    algorithms,
)
from tritoncomm.scheduler import group_collectives, messages
from tritoncomm.scheduler.cost import Traffic
from tritoncomm.scheduler.group_collectives import RADIX, SMALL
from tritoncomm.scheduler.process_group import ProcessGroupScheduler
from tritoncomm.scheduler.rounds import AllGather, AllReduce, AllToAll, InSubgroup, Pattern, Post, Round
from tritoncomm.scheduler.simulated import SimulatedScheduler
from tritoncomm.step.exchange.feedback import ErrorFeedback

import laws
from depth import DEEP
from ranks import ranks
from recipes import possible, shared_out

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
        """Return the results as plain numbers, which can be compared."""
        mean = mean.trimmed()
        values, owed = (tensor.view(torch.int32).tolist() for tensor in (mean.values, feedback.residual))
        return cls(mean.indices.tolist(), values, owed, feedback.algorithm.state, sent, received)


# Every method with each number of ranks, and other recipes with two or three of them.
RECIPES = shared_out({size: possible(0.07, size) for size in (2, 3)}) | {
    size: {name: each for name, each in possible(0.07, size).items() if DEEP or name in algorithms()} for size in (1, 5)
}


@pytest.fixture
def names(world_size):
    """The recipes to run. Workers do not know how deep a run is."""
    return [*RECIPES[world_size]]


@ranks(1, 2, 3, 5, limit=200.0)
@pytest.mark.parametrize("deep", [DEEP])
def test_equals_simulation(rank, world_size, deep, names):
    """Bits, residuals, states and traffic of every recipe equal those of the simulation, in each of its branches."""
    for name in names:
        recipe = possible(0.07, world_size)[name]
        families = FAMILIES if deep else FAMILIES[: laws.steps_of(recipe)]
        case = laws.Case(world_size, laws.length(recipe, 211), families, seed=world_size)
        scheduler = ProcessGroupScheduler(subgroups=recipe.subgroups(world_size))
        feedback, found = ErrorFeedback(recipe.build(case.numel)), []
        for gradient in case.gradients():
            mean = scheduler.run(feedback.begin(gradient[rank], rank, world_size))
            feedback.commit()
            found.append(Seen.of(mean, feedback, scheduler.meter.sent, scheduler.meter.received))
        of_ranks = [None] * world_size
        dist.gather_object(found, of_ranks if rank == 0 else None)
        world = SimulatedWorld(recipe, world_size, case.numel)
        for step, gradient in enumerate(case.gradients() if rank == 0 else ()):
            for each, mean in enumerate(world.step(gradient)):
                seen = Seen.of(mean, world.workers[each], world.traffic[each], world.received[each])
                assert of_ranks[each][step] == seen, (name, step, each)


def test_every_recipe_runs_between_processes():
    """No recipe is left out that accepts 2, 3 or 5 workers, and every method runs with all of these numbers."""
    accepted = {size: set(possible(0.07, size)) for size in RECIPES}
    assert set.union(*map(set, RECIPES.values())) >= set.union(*(accepted[size] for size in (2, 3, 5)))
    assert all(accepted[size] & {*algorithms()} <= set(RECIPES[size]) for size in accepted)


def one_op(op: AllReduce) -> Pattern[torch.Tensor]:
    """Yield one operation and return its reply."""
    reply: torch.Tensor = yield op
    return reply


@ranks(1, 2, 5, 8)
@pytest.mark.parametrize("radix", [3, RADIX])
def test_collectives(rank, world_size, radix):
    """Short collectives, which are messages, and long ones, of the backend, give what the simulation gives.

    Sums of short ones have its bits: ranks are added in order. gloo adds in another one, so long ones get integers.
    Messages of 8 ranks travel in one round, or in two, of which the second one is not full, as those of 20 do.
    """
    scheduler, simulated = ProcessGroupScheduler(), SimulatedScheduler(world_size)
    generator = torch.Generator().manual_seed(world_size)
    dtypes = (torch.int32, torch.int64, torch.float32, torch.float64)
    sizes = (0, 1, SMALL, SMALL + 8)  # in bytes, the limits of what is cut into messages
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(group_collectives, "RADIX", radix)
        for dtype, size in itertools.product(dtypes, sizes):
            numel = -(-size // dtype.itemsize)
            values = torch.randn(world_size, numel, generator=generator).to(dtype)
            rows = (1e3 * torch.randn(world_size, world_size, numel, generator=generator)).to(dtype)
            values = values if size <= SMALL else values.round()
            for kind, tensors in (AllReduce, values), (AllGather, values), (AllToAll, rows), (AllToAll, rows[..., 0:1]):
                expected = simulated.run([one_op(kind("test", tensor)) for tensor in tensors])[rank]
                found = scheduler.run(one_op(kind("test", tensors[rank])))
                assert found.dtype == dtype
                assert torch.equal(found, expected), (kind, dtype, size)
                assert scheduler.meter.sent == simulated.meters[rank].sent


class Counting:
    """A process group that counts the bytes that it is given to send."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group, self.bytes = group, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.group, name)

    def send(self, tensors: list[torch.Tensor], *arguments: Any) -> Any:
        """Count and send."""
        self.bytes += sum(each.nbytes for each in tensors)
        return self.group.send(tensors, *arguments)


@ranks(3)
@pytest.mark.parametrize("name", ["oktopk", "oktopk-4bit", "spardl", "exdyna", "topk_allgather-4bit", "quantized"])
def test_bytes_given_to_gloo(rank, world_size, name):
    """The traffic of each round is what gloo is given, to the byte. That of the simulation is the same, see above."""
    recipe = possible(0.07, world_size)[name]
    case = laws.Case(world_size, laws.length(recipe, 20_000), FAMILIES[:4])
    scheduler, counted = ProcessGroupScheduler(subgroups=recipe.subgroups(world_size)), 0
    perform, group = scheduler._perform, scheduler._messages.group

    def performed(op):
        nonlocal counted
        if not isinstance(op, Round | Post):
            return perform(op)
        given, before = Counting(group), scheduler.meter.sent.bytes
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(messages.Messages, "group", given)
            reply = perform(op)
        assert given.bytes == scheduler.meter.sent.bytes - before
        counted += given.bytes
        return reply

    scheduler._perform = performed
    feedback = ErrorFeedback(recipe.build(case.numel))
    for gradient in case.gradients():
        scheduler.run(feedback.begin(gradient[rank], rank, world_size))
        feedback.commit()
    assert counted > 0


@ranks(5)
def test_subgroups(rank, world_size):
    """Two groups exchange at the same time. A rank outside of a group is rejected."""
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3, 4])]
    group, outside = groups if rank in (0, 2) else groups[::-1]
    scheduler = ProcessGroupScheduler(group)
    size = dist.get_world_size(group)
    recipe = tritoncomm.OkTopk(density=0.1)
    simulated, feedback = SimulatedWorld(recipe, size, 100), ErrorFeedback(recipe.build(100))
    for gradient in laws.Case(size, 100, FAMILIES).gradients():
        mean = scheduler.run(feedback.begin(gradient[scheduler.rank], scheduler.rank, size))
        feedback.commit()
        assert laws.same_vector(mean, simulated.step(gradient)[0])
    with pytest.raises(ConfigurationError, match="not a member"):
        exact(sgd(tiny()), process_group=outside)


@ranks(3)
def test_differences_are_named(rank, world_size):
    """Steps of a warm-up, arguments and parameters of one rank are named on every rank, with the field."""
    odd = rank == 1

    def attempt(named, model=None, optimizer=adamw, **fields):
        with pytest.raises(ConfigMismatchError, match="rank 1 has") as caught:
            tritoncomm.wrap(optimizer(tiny() if model is None else model), **fields)
        assert named in str(caught.value)

    attempt("steps of Warmup", warmup_steps=7 if odd else 8)
    attempt("'Warmup around OkTopk'", warmup_steps=0 if odd else 8)
    attempt("argument late: ranks [0, 2] have True, rank 1 has False", late=not odd)
    attempt("argument late.max_catch_up", late=Late(max_catch_up=5 if odd else 6))
    attempt("argument updates: ranks [0, 2] have False, rank 1 has True", updates=odd, algo="quantized")
    attempt("argument updates.outer_lr", updates=Updates(outer_lr=0.5 if odd else 1.0))
    attempt("broadcast_parameters", broadcast_parameters=odd)
    attempt("content of parameter 1", tiny(seed=int(odd)))
    attempt("dtype of parameter 0", tiny().double() if odd else tiny(), broadcast_parameters=True)
    attempt("shape of parameter 0", nn.Linear(3 + odd, 2), broadcast_parameters=True)
    attempt("number of parameters", nn.Linear(3, 2, bias=odd), broadcast_parameters=True)
    a, b = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.ones(3))
    attempt("parameter order differs", optimizer=lambda _: torch.optim.SGD([b, a] if odd else [a, b], lr=0.1))
    attempt("name of parameter 0", optimizer=lambda _: torch.optim.SGD([("b" if odd else "a", a)], lr=0.1))
    with pytest.MonkeyPatch.context() as patch:
        if odd:
            patch.setattr(tritoncomm.step.agree.setup, "__version__", "0.0.1")
        attempt("version: ranks [0, 2] have")
    exact(adamw(tiny()))


@ranks(2)
def test_late_group(rank, world_size):
    """The first step raises an error if the process group did not exist at wrap()."""
    model = tiny()
    group = dist.distributed_c10d._get_default_group()
    dist.distributed_c10d._update_default_pg(None)
    optimizer = exact(sgd(model))
    dist.distributed_c10d._update_default_pg(group)
    with pytest.raises(ConfigurationError, match=r"after wrap\(\)"):
        train(model, optimizer, rank, [0])


@ranks(2)
def test_another_default_group(rank, world_size, tmp_path):
    """An optimizer goes on with another default group, and its messages pass through that one."""
    model = tiny()
    optimizer = exact(sgd(model))
    train(model, optimizer, rank, [0])
    dist.destroy_process_group()
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=rank, world_size=world_size)
    assert dist.group.WORLD not in messages._mailboxes
    train(model, optimizer, rank, [1])
    assert messages._mailboxes[dist.group.WORLD].sent
    assert equal(model)


@ranks(1)
def test_collectives_in_backward_are_released_here(rank, world_size):
    """Collectives that autograd started are released in this thread. A gloo thread would abort at interpreter exit."""
    variable: ContextVar[Any] = ContextVar("variable")
    scheduler = ProcessGroupScheduler()
    scheduler.agree_on_exchange_id()
    died_in: list[int] = []

    def backward():
        value = nn.Module()
        weakref.finalize(value, lambda: died_in.append(threading.get_ident()))
        variable.set(value)
        x = torch.ones(1000, requires_grad=True)  # a shorter one is exchanged without a collective
        x.register_hook(lambda gradient: scheduler.run(one_op(AllReduce("test", gradient))))
        x.sum().backward()
        variable.set(None)

    for _ in range(50):
        backward()
        time.sleep(0.01)  # lets gloo release its reference, which may take longer on a busy machine
    assert len(died_in) in (48, 49), "the last one is still referenced, so this thread releases it"
    elsewhere = sum(thread != threading.get_ident() for thread in died_in)
    assert elsewhere <= 2, f"{elsewhere} of 50 died in a thread of gloo"


@ranks(2, lost=(1,))
def test_receives_are_ahead(rank, world_size):
    """When a round begins, the receives of its messages wait already: also after another exchange in the group.

    A message that has arrived is read, though its sender has ended since. The next one is lost.
    """
    schedulers = [ProcessGroupScheduler(timeout=timedelta(seconds=10), stamp=name) for name in ("one", "two")]
    peer, words = 1 - rank, torch.arange(5000, dtype=torch.int32)

    def message(size):
        inbox = yield Round("test", {peer: words[:size]}, {peer: size})
        return inbox[peer]

    schedulers[0].run(message(1))
    box = messages._mailboxes[dist.group.WORLD]
    for turn, size in enumerate((5000, 3, 4999, 1)):
        posted = [number for number, *_ in box.ahead[peer]]
        assert posted == [box.posted[peer] - 1, box.posted[peer]]
        assert torch.equal(schedulers[turn % 2].run(message(size)), words[:size])
        assert posted[0] not in [number for number, *_ in box.ahead[peer]]
    assert box.sent[peer] == box.posted[peer] - 2
    if rank == 1:

        def last():
            yield Post(Round("test", {peer: words[:7]}, {}))

        schedulers[0].run(last())
        time.sleep(0.2)
        os._exit(0)
    time.sleep(1.0)

    def listening():
        inbox = yield Round("test", {}, {peer: 7})
        return inbox[peer]

    assert torch.equal(schedulers[0].run(listening()), words[:7])
    with pytest.raises(PeerLostError):
        schedulers[0].run(listening())


@ranks(4)
@pytest.mark.parametrize(
    ("algo", "ordinary", "reevaluated"), [("oktopk", 6, 11), ("spardl", 6, 0), ("quantized", 4, 0)]
)
def test_delays_of_a_step(rank, world_size, algo, ordinary, reevaluated):
    """In a step with small tensors and its confirmation, few messages follow one another: one in each round.

    These are Ok-Topk's counts, entries, sizes and two rounds of its all-gather, and the confirmation. To re-evaluate
    thresholds, it sums four histograms, and gathers shares. SparDL sends small tensors to their owners in one round of
    its own. Nothing travels around a ring of gloo, whose messages follow one another, too.
    """
    parameters = [nn.Parameter(torch.ones(shape)) for shape in ((80, 40), (40,))]
    density = {} if algo == "quantized" else {"density": 0.05}
    optimizer = tritoncomm.wrap(torch.optim.SGD(parameters, lr=0.01), algo, warmup_steps=0, dense_below=100, **density)
    wait_, seen = messages.Messages.wait, []

    def noted(self, token):
        inbox = wait_(self, token)
        seen.append(len(inbox))
        return inbox

    generator, delays = torch.Generator().manual_seed(rank), {0.0: set(), 1.0: set()}
    for step in range(1, 7):  # the first two also compare what the ranks have
        for parameter in parameters:
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        seen.clear()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(messages.Messages, "wait", noted)
            if step > 2:
                patch.setattr(dist, "all_reduce", None)
            optimizer.step()
        if step > 2:
            delays[optimizer.metrics().get("reevaluated", 0.0)].add(len(seen))
    assert delays == {0.0: {ordinary}, 1.0: {reevaluated} - {0}}


@ranks(4)
def test_profiles(rank, world_size):
    """Every operation of a rank is an event with the name of its phase, also in nodes, if a profile begins in between.

    A receive that is posted ahead does not outlive a profiler that was told of its begin.
    """
    model = tiny()
    group = dist.new_group([rank // 2 * 2, rank // 2 * 2 + 1], use_local_synchronization=True)
    optimizer = exact(sgd(model), node_group=group)
    for first in (0, 4):
        train(model, optimizer, rank, [first])
        if rank > 0:
            train(model, optimizer, rank, range(first + 1, first + 3))
            continue
        with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
            train(model, optimizer, rank, range(first + 1, first + 3))
        names = [event.name for event in profiler.events()]
        assert {"counts", "split-and-reduce"} <= set(names)  # of the exchange between nodes
        assert names.count("confirm") == names.count("between nodes") == 2
        assert {"confirm", "between nodes"} <= {event.name for event in profiler.events() if event.is_user_annotation}
        assert any("gloo:recv" in name for name in names)
        del profiler


# What a method must not yield, by what the error says. Both ranks do it.
WRONG = {
    "peer 2: peers are numbers below 2": Round("x", {2: torch.zeros(1, dtype=torch.int32)}, {}),
    "peer -1": Round("x", {}, {-1: 1}),
    "its own": Round("x", {0: torch.zeros(1, dtype=torch.int32)}, {0: 1, 1: 1}),
    "None, which is no operation: yield one of Round": None,
    "one of Round, Post": InSubgroup("x", (0, 1), (each for each in [None])),
    r"runs in \(0,\), and subgroups": InSubgroup("x", (0,), (each for each in [None])),
}


@ranks(2)
@pytest.mark.parametrize("said", WRONG)
def test_what_a_method_must_not_yield(rank, world_size, said):
    """The error says so, and the process lives: gloo would end it."""

    def pattern():
        yield WRONG[said]

    with pytest.raises((tritoncomm.ExchangeError, tritoncomm.ProtocolMismatchError), match=said):
        ProcessGroupScheduler(None, subgroups=[(0, 1)]).run(pattern())
