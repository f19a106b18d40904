"""Every law of the exchange of updates holds for every recipe, with 1 to 17 simulated workers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from tritoncomm import Dense, algorithms
from tritoncomm.step.local import steps
from tritoncomm.step.local.steps import LocalSteps

import laws
import update_laws
from depth import DEEP, examples, trials
from recipes import NAMES, under_test
from update_laws import Setting

DENSITIES, SETTINGS = st.sampled_from([1e-6, 0.1, 0.9]), update_laws.settings()
METHODS = [name for name in NAMES if name in algorithms()]
# Other recipes than the methods have few workers, because the same code reads what they deliver. Not in a deep run.
FEW = trials(5, laws.MAX_WORLD_SIZE)
# Six steps, three of them local, so that the second exchange has residuals.
SIX = laws.Case(3, 90, ("random", "ties", "one-region", "random", "disjoint", "random"))
THREE_STEPS = Setting(local_steps=3)
# What a worker has changed travels by any recipe. What else is done with it hardly depends on the method, and that a
# recipe itself obeys these laws is tested in test_laws.py: recipes other than the methods are for a deep run.
MATRIX = pytest.mark.parametrize("name", NAMES)
OF_METHODS = pytest.mark.parametrize("name", NAMES if DEEP else METHODS)
# Methods and world sizes do not depend on each other: each method has every fourth size, and each size every fourth
# method. A deep run has all of them.
SIZES = [
    pytest.param(name, size, id=f"{name}-{size}")
    for number, name in enumerate(METHODS)
    for size in range(1, laws.MAX_WORLD_SIZE + 1)
    if DEEP or (number + size) % 4 == 0
]


def obeys(law: Callable[..., None], name: str, case: laws.Case, density: float, *args: object) -> None:
    """Check ``law`` on the recipe called ``name``, with a world size that the recipe accepts."""
    recipe = under_test(density)[name]
    size = case.world_size if name in METHODS else 1 + (case.world_size - 1) % FEW
    law(recipe, laws.fitted(dataclasses.replace(case, world_size=size), recipe), *args)


@MATRIX
@given(case=laws.cases(), density=DENSITIES, setting=SETTINGS)
@example(case=SIX, density=0.1, setting=Setting(local_steps=2, outer_momentum=0.5))
@examples(3)
def test_travels(name: str, case: laws.Case, density: float, setting: Setting) -> None:
    """What travels obeys the laws of every exchange, and replicas agree after each."""
    obeys(update_laws.travels, name, case, density, setting)


@pytest.mark.parametrize(("name", "world_size"), SIZES)
def test_travels_at_every_world_size(name: str, world_size: int) -> None:
    """So it does for every method, and at each world size."""
    case = dataclasses.replace(SIX, world_size=world_size, numel=640, families=SIX.families[: trials(4, 6)])
    recipe = under_test(0.05)[name]
    update_laws.travels(recipe, laws.fitted(case, recipe), Setting(local_steps=2, outer_momentum=0.5))


@pytest.mark.parametrize("name", [name for name in METHODS if name != "quantized"])  # it rounds
@given(case=laws.cases(), setting=SETTINGS)
@example(case=SIX, setting=Setting(local_steps=3))
@examples(4)
def test_averaging(name: str, case: laws.Case, setting: Setting) -> None:
    """Dense exchanges go to the mean of all workers' parameters, or take an outer step towards it."""
    plain = dataclasses.replace(setting, local_steps=max(2, setting.local_steps), dtype=torch.float32)
    obeys(update_laws.averaging, name, case, 1.0, plain)


# The threshold at which ``exdyna-paper`` begins is fixed.
@pytest.mark.parametrize("name", [name for name in NAMES if "exdyna-paper" not in name] if DEEP else METHODS)
@given(case=laws.cases(), density=DENSITIES)
@example(case=laws.FOUR_STEPS, density=0.1)
@examples(2)
def test_like_gradients(name: str, case: laws.Case, density: float) -> None:
    """With SGD and a merge after each step, the exchange of updates ends where that of gradients does."""
    obeys(update_laws.like_gradients, name, case, density)


@OF_METHODS
@given(case=laws.cases(), density=DENSITIES, setting=SETTINGS)
@example(case=SIX, density=0.1, setting=THREE_STEPS)
@examples(2)
def test_folding(name: str, case: laws.Case, density: float, setting: Setting) -> None:
    """Folding, and states for another number of workers, conserve what is owed."""
    obeys(update_laws.folding, name, case, density, setting)


@OF_METHODS
@given(case=laws.cases(), density=DENSITIES, setting=SETTINGS)
@example(case=SIX, density=0.1, setting=Setting(local_steps=3, outer_lr=0.5, outer_momentum=0.5))
@examples(2)
def test_resuming(name: str, case: laws.Case, density: float, setting: Setting) -> None:
    """Save, load and continue is never stopped, to the bit, between any two exchanges."""
    obeys(update_laws.resuming, name, case, density, setting)


@OF_METHODS
@given(case=laws.cases(), density=DENSITIES, setting=SETTINGS, poisoned=st.booleans())
@example(case=laws.FOUR_STEPS, density=0.1, setting=Setting(local_steps=2, outer_momentum=0.5), poisoned=True)
@examples(2)
def test_atomicity(name: str, case: laws.Case, density: float, setting: Setting, poisoned: bool) -> None:
    """A failure in any phase changes nothing, and the exchange can be repeated."""
    law = lambda recipe, case, setting: update_laws.atomicity(recipe, case, setting, poisoned=poisoned)  # noqa: E731
    obeys(law, name, dataclasses.replace(case, families=case.families[:4]), density, setting)


@OF_METHODS
@given(
    case=laws.cases(min_world_size=2), density=DENSITIES, setting=SETTINGS, policy=st.sampled_from(["skip", "raise"])
)
@example(case=laws.FOUR_STEPS, density=0.1, setting=Setting(local_steps=2), policy="skip")
@example(case=laws.FOUR_STEPS, density=0.1, setting=Setting(local_steps=2), policy="raise")
@examples(2)
def test_refusal(name: str, case: laws.Case, density: float, setting: Setting, policy: str) -> None:
    """A NaN in one rank's update is a matter of this rank, or is refused by all, as is asked for."""
    obeys(update_laws.refusal, name, case, density, dataclasses.replace(setting, on_nonfinite=policy))


def test_broken_parameters_are_not_folded() -> None:
    """A worker whose parameters are NaN has nothing to add to its residual."""
    workers = update_laws.Workers(Dense(), SIX, THREE_STEPS)
    workers.take(next(SIX.gradients()))
    workers.each[1].parameters[0].data[0] = torch.nan
    before, deltas = workers.world.residuals, workers.deltas
    deltas[1] = 0.0
    update_laws.fold(workers)
    assert torch.equal(workers.world.residuals, before + deltas)
    assert workers.parameters.isfinite().all()


@given(case=laws.cases(max_world_size=1, exact=False), steps=st.integers(1, 4))
@examples(8)
def test_single_worker(case: laws.Case, steps: int) -> None:
    """A single worker is the bare optimizer, to the bit."""
    update_laws.single_worker(case, Setting(local_steps=steps))


def keeps_in_parameters(patch: pytest.MonkeyPatch) -> None:
    """Leave the parameters of a worker where they are, so that what is in the residual counts twice."""

    def settle(self: LocalSteps) -> None:
        self.withdraw()
        self.taken, self.is_pending = 0, False

    patch.setattr(LocalSteps, "settle", settle)


def delta_of_whole_anchor(patch: pytest.MonkeyPatch) -> None:
    """Take what was changed against the anchor with all its bits, so that rounding counts as progress."""
    patch.setattr(steps, "delta_of", torch.sub)


def momentum_of_a_failed_exchange(patch: pytest.MonkeyPatch) -> None:
    """Step the outer momentum before the exchange is known to succeed."""
    give_delta = LocalSteps.give

    def give(self: LocalSteps, **fields) -> None:
        give_delta(self, **fields)
        for anchor in self.anchors:
            self.outer.state[anchor]["momentum_buffer"] = anchor.grad.clone()

    patch.setattr(LocalSteps, "give", give)


def counts_on_after_merge(patch: pytest.MonkeyPatch) -> None:
    """Do not begin to count local steps from zero when they were exchanged."""
    settle_all = LocalSteps.settle

    def settle(self: LocalSteps) -> None:
        taken = self.taken
        settle_all(self)
        self.taken = taken % self._options.local_steps

    patch.setattr(LocalSteps, "settle", settle)


def drops_before_the_exchange(patch: pytest.MonkeyPatch) -> None:
    """Forget the state of the optimizers before the exchange is known to succeed."""
    give_delta = LocalSteps.give

    def give(self: LocalSteps, **fields) -> None:
        give_delta(self, **fields)
        for optimizer in self._optimizers:
            optimizer.state.clear()

    patch.setattr(LocalSteps, "give", give)


HALF = Setting(local_steps=4, outer_lr=0.5, outer_momentum=0.5, dtype=torch.bfloat16)
LARGE = dataclasses.replace(SIX, exponent=2)


@pytest.mark.parametrize(
    ("breaks", "law", "setting"),
    [
        (keeps_in_parameters, update_laws.travels, Setting(local_steps=2)),
        (delta_of_whole_anchor, update_laws.travels, HALF),
        (momentum_of_a_failed_exchange, update_laws.atomicity, Setting(outer_momentum=0.5)),
        (counts_on_after_merge, update_laws.travels, Setting(local_steps=4)),
        (drops_before_the_exchange, update_laws.atomicity, Setting()),
    ],
    ids=lambda each: getattr(each, "__name__", ""),
)
def test_planted_bugs(
    breaks: Callable[[pytest.MonkeyPatch], None],
    law: Callable[..., None],
    setting: Setting,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The law that should find a bug finds it, and holds without the bug."""
    for recipe in (Dense(), under_test(0.1)["oktopk"]):
        law(recipe, LARGE, setting)
    breaks(monkeypatch)
    for recipe in (Dense(), under_test(0.1)["oktopk"]):
        with pytest.raises(AssertionError):
            law(recipe, LARGE, setting)
