"""The laws of the exchange of updates, one function each, and the simulated workers that they check.

Every worker has parameters and an optimizer of its own in :class:`~tritoncomm.step.local.steps.LocalSteps`, as in
training. Between them is a :class:`~tritoncomm.SimulatedWorld`. Numbers are as in :mod:`laws`, and the optimizer is SGD
at the rate 1, so that all sums are exact. What travels obeys the laws of every exchange, where what a worker has
changed takes the place of its gradient: :func:`recorded` returns a run for them.
"""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice

import pytest
import torch
from hypothesis import strategies as st
from tritoncomm import Dense, NonFiniteError, Recipe, Updates
from tritoncomm.primitives.mean_norm import gain_of_mean, random_signs, sketch
from tritoncomm.scheduler.simulated import BeforeRound, SimulatedScheduler
from tritoncomm.step.exchange.layout import BucketLayout
from tritoncomm.step.local.steps import LocalSteps
from tritoncomm.step.settings import WrapOptions

import laws

Inner = Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]


def sgd(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """Return SGD that subtracts gradients, with a momentum that keeps numbers exact."""
    return torch.optim.SGD(parameters, lr=1.0, momentum=0.5)


@dataclass(frozen=True)
class Setting:
    """The options of a run, the optimizer of each worker, and the dtype of its parameters."""

    local_steps: int = 1
    outer_lr: float = 1.0
    outer_momentum: float = 0.0
    on_nonfinite: str = "skip"
    dtype: torch.dtype = torch.float32
    inner: Inner = field(default=sgd, repr=False)

    @property
    def options(self) -> WrapOptions:
        """The options of ``wrap``."""
        return WrapOptions(
            updates=Updates(outer_lr=self.outer_lr, outer_momentum=self.outer_momentum),
            local_steps=self.local_steps,
            on_nonfinite=self.on_nonfinite,
            late=None, max_grad_norm=None, timeout=None, dense_below=0, small="fp32",
        )  # fmt: skip


def settings() -> st.SearchStrategy[Setting]:
    """Return a hypothesis strategy for settings."""
    return st.builds(
        Setting,
        local_steps=st.integers(1, 4),
        outer_lr=st.sampled_from([1.0, 0.5]),
        outer_momentum=st.sampled_from([0.0, 0.5]),
        dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    )


class Workers:
    """Simulated workers with an optimizer each, which exchange updates.

    Attributes:
        world: What is between them, with the residuals.
        each: The local steps of each worker.
    """

    def __init__(self, recipe: Recipe, case: laws.Case, setting: Setting) -> None:
        self.world = laws.world_of(recipe, case)
        self.setting = setting
        self._scale = 2.0**case.exponent
        self._signs = random_signs(case.numel, "cpu")
        self.optimizers = [setting.inner(self._parameters(case.numel)) for _ in range(case.world_size)]
        self.each = [LocalSteps(optimizer, setting.options, {}, alone=False) for optimizer in self.optimizers]

    def _parameters(self, numel: int) -> list[torch.nn.Parameter]:
        generator = torch.Generator().manual_seed(numel)
        first = -(-numel // 3)
        lengths = [length for length in (first, numel - first) if length]
        drawn = [torch.randint(-50, 51, (length,), generator=generator) * self._scale for length in lengths]
        return [torch.nn.Parameter(values.to(self.setting.dtype)) for values in drawn]

    def take(self, gradient: torch.Tensor) -> None:
        """Let every worker take a step by its row of ``gradient``, which must be ``[world_size, numel]``."""
        for own, optimizer, row in zip(self.each, self.optimizers, gradient, strict=True):
            parts = torch.split(row, [parameter.numel() for parameter in own.parameters])
            for parameter, part in zip(own.parameters, parts, strict=True):
                parameter.grad = part.to(parameter.dtype)
            own.take(optimizer, None, None)

    @property
    def is_due(self) -> bool:
        """Whether an exchange is next. All workers agree."""
        (answer,) = {own.is_due for own in self.each}
        return answer

    def merge(self, before_round: BeforeRound | None = None) -> list:
        """Exchange what the workers have changed, and return each worker's mean."""
        layouts, rows = [BucketLayout(own.anchors) for own in self.each], []
        for own, layout in zip(self.each, layouts, strict=True):
            own.give(alone=False)
            rows.append(layout.read_gradients(torch.empty(layout.numel)))
        means = self.world.step(torch.stack(rows), before_round=before_round)
        for own, layout, mean, gain in zip(self.each, layouts, means, self._gains(rows), strict=True):
            layout.scatter(layout.split(mean))
            with torch.no_grad(), own.settling(dict.fromkeys(map(id, own.anchors), gain)):
                own.outer.step()
        return means

    def _gains(self, rows: list[torch.Tensor]) -> list[torch.Tensor | None]:
        if not self.setting.options.matches_length:
            return [None] * len(rows)
        scheduler = SimulatedScheduler(len(rows))
        gains = scheduler.run([gain_of_mean(row, sketch(row, self._signs), len(rows)) for row in rows])
        assert all(1 <= float(gain) <= math.sqrt(len(rows)) + 1e-6 for gain in gains)
        return gains

    @property
    def parameters(self) -> torch.Tensor:
        """The parameters of all workers, ``[world_size, numel]``."""
        return torch.stack([flat(own.parameters) for own in self.each])

    @property
    def anchors(self) -> torch.Tensor:
        """The anchor of each worker, fp32 ``[world_size, numel]``."""
        return torch.stack([flat(own.anchors) for own in self.each])

    @property
    def momenta(self) -> torch.Tensor:
        """The outer momentum of each worker, fp32 ``[world_size, numel]``, of zeros before the first exchange."""
        found = [[own.outer.state[anchor].get("momentum_buffer") for anchor in own.anchors] for own in self.each]
        return torch.stack(
            [
                flat([torch.zeros_like(a) if m is None else m for a, m in zip(own.anchors, momenta, strict=True)])
                for own, momenta in zip(self.each, found, strict=True)
            ]
        )

    @property
    def deltas(self) -> torch.Tensor:
        """What each worker has changed since the last exchange, by the formula: ``[world_size, numel]``."""
        return self.anchors.to(self.setting.dtype).float() - self.parameters.float()

    @property
    def everything(self) -> list:
        """All that an exchange changes, of all workers."""
        inner = [[optimizer.state_dict()["state"]] for optimizer in self.optimizers]
        counts = [(own.taken, own.is_pending, own.total, own.dropped) for own in self.each]
        tensors = [self.world.residuals, self.parameters, self.anchors, self.momenta]
        return copy.deepcopy([*tensors, counts, inner, laws.states_of(self.world)])


def flat(tensors: list[torch.Tensor]) -> torch.Tensor:
    """Return the values of ``tensors`` in one vector."""
    return torch.cat([each.detach().reshape(-1) for each in tensors])


def same(one: object, other: object) -> bool:
    """Whether two nested structures are equal, their tensors bit for bit."""
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and one.dtype == other.dtype and _same_values(one, other)
    if isinstance(one, dict):
        return set(one) == set(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


def _same_values(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.shape == other.shape and torch.equal(one.float().view(torch.int32), other.float().view(torch.int32))


def recorded(recipe: Recipe, case: laws.Case, setting: Setting) -> laws.Run:
    """Run a case, and return its exchanges as a run whose gradients are what the workers have changed.

    Steps that are left after the last exchange are merged, as at the end of training.

    Checks *freedom*: up to an exchange, parameters are what the bare optimizer makes of the worker's gradients. Checks
    *agreement*: after it, parameters, anchors and outer momenta are equal on all ranks, to the bit.
    """
    workers, steps = Workers(recipe, case, setting), []
    alone = [Bare(row, setting) for row in workers.parameters]
    for number, gradient in enumerate(case.gradients(), 1):
        workers.take(gradient)
        for bare, row, own in zip(alone, gradient, workers.parameters, strict=True):
            bare.step(row)
            assert _same_values(bare.parameter.detach(), own)
        assert workers.is_due == (not number % setting.local_steps)
        if workers.is_due or number == len(case.families):
            steps.append(_exchanged(workers))
            for bare, own in zip(alone, workers.parameters, strict=True):
                bare.parameter.data.copy_(own)
    return laws.Run(recipe, case, steps, [])


class Bare:
    """A worker that is alone, with ``values`` for its parameter."""

    def __init__(self, values: torch.Tensor, setting: Setting) -> None:
        self.parameter = torch.nn.Parameter(values.clone())
        self.optimizer = setting.inner([self.parameter])

    def step(self, gradient: torch.Tensor) -> None:
        """Take a step."""
        self.parameter.grad = gradient.to(self.parameter.dtype)
        self.optimizer.step()


def _exchanged(workers: Workers) -> laws.Step:
    world, before, deltas = workers.world, workers.world.residuals, workers.deltas
    allowed = world.predicted_traffic
    means = workers.merge()
    for values in (workers.parameters, workers.anchors, workers.momenta):
        assert all(_same_values(row, values[0]) for row in values)
    assert _same_values(workers.parameters, workers.anchors.to(workers.setting.dtype))
    assert not any(own.taken or own.is_pending for own in workers.each)
    return laws.Step(deltas, before, means, world.residuals, [], allowed, world.scheduler.meters)


def travels(recipe: Recipe, case: laws.Case, setting: Setting) -> None:
    """What travels obeys the laws of every exchange, freedom and agreement."""
    run = recorded(recipe, case, setting)
    # A gain is no power of two, and bf16 parameters are rounded, so that later sums are, too.
    is_exact = setting.dtype == torch.float32 and setting.local_steps > 1
    laws.conservation.check(run, tolerance=None if is_exact else 2.0**-20)
    for law in (laws.agreement, laws.form, laws.budget, *([laws.equivalence] if is_exact else [])):
        law.check(run)


def averaging(recipe: Recipe, case: laws.Case, setting: Setting) -> None:
    """If all is delivered, parameters after an exchange are the mean of those before, and outer steps are SGD's."""
    workers = Workers(recipe, case, setting)
    anchor, momentum = workers.anchors[0].double(), torch.zeros(case.numel, dtype=torch.float64)
    for gradient in case.gradients():
        workers.take(gradient)
        if not workers.is_due:
            continue
        mean = workers.parameters.double().mean(0)
        delta = workers.anchors[0].double() - mean
        momentum = setting.outer_momentum * momentum + delta
        anchor -= setting.outer_lr * (delta + setting.outer_momentum * momentum)
        workers.merge()
        assert torch.equal(workers.anchors[0].double(), anchor)
        if (setting.outer_lr, setting.outer_momentum) == (1.0, 0.0):
            assert torch.equal(workers.parameters[0].double(), mean)
        assert not workers.world.residuals.any()


def like_gradients(recipe: Recipe, case: laws.Case) -> None:
    """With SGD at a rate of 1/2, and a merge after each step, updates end where gradients do: same indices, same bits.

    Residuals are in units of updates, a half of those of gradients. If values are rounded on the wire, parameters are
    no integers after the first exchange, and what is subtracted from them rounds, too.
    """
    setting = Setting(local_steps=2, inner=lambda parameters: torch.optim.SGD(parameters, lr=0.5))
    workers, world = Workers(recipe, case, setting), laws.world_of(recipe, case)
    parameters = workers.parameters[0].clone()
    for gradient in islice(case.gradients(), 1 if laws.slack(recipe) else None):
        workers.take(gradient)
        means = workers.merge()
        expected = world.step(gradient)[0]
        parameters -= 0.5 * expected.to_dense()
        assert torch.equal(means[0].indices, expected.indices)
        assert torch.equal(workers.parameters[0], parameters)
        assert torch.equal(workers.world.residuals, 0.5 * world.residuals)


def folding(recipe: Recipe, case: laws.Case, setting: Setting) -> None:
    """Between any two exchanges, to fold leaves what each rank owes as it is."""
    workers = Workers(recipe, case, setting)
    for gradient in case.gradients():
        workers.take(gradient)
        owed = workers.world.residuals + workers.deltas
        fold(workers)
        assert torch.equal(workers.world.residuals, owed)
        assert not workers.deltas.any()
        assert not any(own.taken for own in workers.each)


def fold(workers: Workers) -> None:
    """Let all workers add what they have changed to their residuals."""
    for own, worker in zip(workers.each, workers.world.workers, strict=True):
        own.fold(dict(zip(own.anchors, BucketLayout(own.anchors).parts(worker.residual), strict=True)))


def resuming(recipe: Recipe, case: laws.Case, setting: Setting) -> None:
    """A run that is saved and loaded at any number of local steps continues to the bit, whatever the model was."""
    workers = Workers(recipe, case, setting)
    for number, gradient in enumerate(case.gradients()):
        again = Workers(recipe, case, setting)
        states = copy.deepcopy([(own.saved(), inner.state_dict()) for own, inner in _pairs(workers)])
        again.world.load_state_dict(copy.deepcopy(workers.world.state_dict()))
        for (own, inner), (local, state) in zip(_pairs(again), states, strict=True):
            inner.load_state_dict(state)
            own.load(local)
        assert same(again.everything[:-1], workers.everything[:-1]), number
        workers.take(gradient)
        again.take(gradient)
        if workers.is_due:
            workers.merge()
            again.merge()
        assert same(again.everything, workers.everything), number


def _pairs(workers: Workers) -> Iterator[tuple[LocalSteps, torch.optim.Optimizer]]:
    return zip(workers.each, workers.optimizers, strict=True)


def atomicity(recipe: Recipe, case: laws.Case, setting: Setting, *, poisoned: bool = False) -> None:
    """A failure in any round of an exchange leaves everything as it was, and the exchange can be repeated.

    In each phase one round fails, drawn with the seed of the case. With ``poisoned``, a parameter of the last worker is
    NaN, and this worker gives nothing.
    """
    workers, control = Workers(recipe, case, setting), Workers(recipe, case, setting)
    generator = random.Random(case.seed)  # noqa: S311 - not for secrets
    for gradient in case.gradients():
        for each in (workers, control):
            each.take(gradient)
            if poisoned:
                each.each[-1].parameters[0].data[0] = math.nan
        if not workers.is_due:
            continue
        phases: dict[str, list[int]] = {}
        control.merge(lambda number, ops, phases=phases: phases.setdefault(ops[0].phase, []).append(number))
        before = workers.everything
        for fatal in (generator.choice(numbers) for numbers in phases.values()):
            with pytest.raises(laws.InjectedFailure):
                workers.merge(_failing(fatal))
            assert same(workers.everything, before)
        workers.merge()
        assert same(workers.everything, control.everything)


def _failing(fatal: int) -> BeforeRound:
    def fail(number: int, _: object) -> None:
        if number == fatal:
            raise laws.InjectedFailure

    return fail


def refusal(recipe: Recipe, case: laws.Case, setting: Setting) -> None:
    """A NaN in what one rank has changed is this rank's matter alone under "skip", and refuses all under "raise"."""
    workers = Workers(recipe, case, setting)
    bad = case.seed % case.world_size
    for gradient in case.gradients():
        workers.take(gradient)
        if not workers.is_due:
            continue
        workers.each[bad].parameters[-1].data[0] = math.nan
        before, deltas = workers.everything, workers.deltas
        if setting.on_nonfinite == "raise":
            with pytest.raises(NonFiniteError):
                workers.merge()
            assert sorted(workers.world.scheduler.raised) == list(range(case.world_size))
            assert same(workers.everything, before)
            return
        residuals, inner = workers.world.residuals, copy.deepcopy([each.state_dict() for each in workers.optimizers])
        dropped = [own.dropped for own in workers.each]
        (mean, *_) = workers.merge()
        deltas[bad] = 0.0
        step = laws.Step(deltas, residuals, [mean], workers.world.residuals, [], [], [])
        laws.conservation.check(laws.Run(recipe, case, [step], []), tolerance=2.0**-20)
        assert workers.parameters.isfinite().all()
        assert all(_same_values(row, workers.parameters[0]) for row in workers.parameters)
        for rank, (own, optimizer) in enumerate(_pairs(workers)):
            assert own.dropped == dropped[rank] + (rank == bad)
            assert not optimizer.state if rank == bad else same(optimizer.state_dict(), inner[rank])


def single_worker(case: laws.Case, setting: Setting) -> None:
    """A single worker with the outer rate 1 and no outer momentum is the bare optimizer, to the bit."""
    workers = Workers(Dense(), case, setting)
    bare = Bare(workers.parameters[0], setting)
    for gradient in case.gradients():
        workers.take(gradient)
        bare.step(gradient[0])
        if workers.is_due:
            workers.each[0].give(alone=True)
            workers.each[0].settle()
        assert _same_values(bare.parameter.detach(), workers.parameters[0])
