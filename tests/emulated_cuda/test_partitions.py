"""The partitions of ExDyna in the static form: they move on the device, and nothing waits for them."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from tritoncomm import ExDyna, SimulatedWorld
from tritoncomm.algorithms.exdyna import ExDynaState, MiCRO
from tritoncomm.errors import NonFiniteError
from tritoncomm.scheduler.process_group import ProcessGroupScheduler
from tritoncomm.step.exchange.claim import Vote, vote
from tritoncomm.step.exchange.feedback import ErrorFeedback

from emulated_cuda import ranks
from emulated_cuda.device import current_gpu, to_gpu, values_of
from emulated_cuda.exchanges import gradients

ORDINARY = 2  # host synchronizations of an exchange and its confirmation
NUMEL, STEPS = 9728, 6
AMPLE = 30.0  # room for all entries that pass, so that the static form and the exact form deliver the same
RULES = ("prefix", "paper")


class Step(NamedTuple):
    """What a rank has after a step: the saved state, how often the host has waited, and the launches of the kernel."""

    state: dict[str, Any]
    syncs: int
    launches: int


def recipe_of(rule: str, **fields: object) -> ExDyna:
    """Return ExDyna with a rule and few blocks, so that each move changes what is selected."""
    return ExDyna(density=0.05, rebalance=rule, blocks=64, capacity=AMPLE, **fields)


def uneven(world_size: int, steps: int = STEPS) -> list[torch.Tensor]:
    """Return gradients that are larger at one end of the vector, so that partitions move in every step."""
    slope = torch.linspace(2.0, 0.1, NUMEL)
    return [each * slope for each in gradients(world_size, NUMEL, steps, seed=world_size)]


def worker(recipe: ExDyna, rank: int, world_size: int) -> tuple[ErrorFeedback, Callable[[torch.Tensor], None]]:
    """Return what a rank keeps between steps, and a function that takes a step with a gradient."""
    scheduler = ProcessGroupScheduler(None, device="cuda:0", stamp=repr(recipe))
    feedback = ErrorFeedback(recipe.build(NUMEL), "cuda:0")

    def step(gradient: torch.Tensor) -> None:
        scheduler.run(feedback.begin(gradient, rank, world_size))
        feedback.commit()
        scheduler.run(vote(Vote(), scheduler.device, [scheduler]), new_step=False)

    return feedback, step


def on_gpus(recipe: ExDyna, given: list[torch.Tensor]) -> list[list[Step]]:
    """Return what each rank has after each step, on emulated GPUs."""
    world_size = given[0].shape[0]

    def main(rank: int) -> list[Step]:
        gpu, found = current_gpu(), []
        feedback, step = worker(recipe, rank, world_size)
        for each in given:
            own = to_gpu(each[rank])
            gpu.reset()
            step(own)
            syncs, launches = gpu.syncs.total(), gpu.launches["rebalance"]
            found.append(Step(feedback.algorithm.state_dict(), syncs, launches))
        return found

    return ranks.run(main, world_size, seed=world_size)


def simulated(recipe: ExDyna, given: list[torch.Tensor]) -> list[dict[str, Any]]:
    """Return the state after each step of a simulation on the CPU."""
    world, found = SimulatedWorld(recipe, given[0].shape[0], NUMEL), []
    for each in given:
        world.step(each)
        found.append(world.workers[0].algorithm.state_dict())
    return found


@pytest.mark.parametrize("world_size", [2, 3, 8])
@pytest.mark.parametrize("rule", RULES)
def test_partitions_move_on_the_device(rule: str, world_size: int) -> None:
    """One launch moves the borders as on a CPU, in the static form and the exact one, and no wait is added."""
    given = uneven(world_size)
    expected = simulated(recipe_of(rule, static=False), given)
    assert simulated(recipe_of(rule, static=True), given) == expected
    assert len({state["blocks"] for state in expected}) > 2, "the borders do not move"
    for steps in on_gpus(recipe_of(rule, static=True), given):
        assert [step.state for step in steps] == expected
        assert [step.launches for step in steps] == [1] * STEPS
        estimates = [True, *(step.state["threshold"] == 0 for step in steps[:-1])]
        assert all(step.syncs <= ORDINARY for step, new in zip(steps, estimates, strict=True) if not new)
        assert not all(estimates)


@pytest.mark.parametrize("world_size", [1, 3])
def test_fixed_partitions(world_size: int) -> None:
    """MiCRO has no borders to move, and neither has a single rank. Neither waits."""
    given = uneven(world_size)
    fields = {"density": 0.05, "capacity": AMPLE, "static": True}
    for recipe in (MiCRO(**fields), *([ExDyna(**fields)] if world_size == 1 else [])):
        expected = simulated(recipe, given)
        for steps in on_gpus(recipe, given):
            assert [step.state for step in steps] == expected
            assert [step.launches for step in steps] == [0] * STEPS
            assert all(step.syncs <= ORDINARY for step in steps[1:])


def test_state_on_the_device() -> None:
    """A failed step restores the old state, whose partitions no step writes. A checkpoint holds numbers, and resumes.

    A group of another size starts with equal partitions.
    """
    recipe, given = recipe_of("prefix", static=True), uneven(3)
    bad = given[3].clone()
    bad[1, 5] = float("nan")

    def main(rank: int) -> list[dict[str, Any]]:
        feedback, step = worker(recipe, rank, 3)
        for each in given[:3]:
            step(to_gpu(each[rank]))
        before, saved = feedback.algorithm.state, feedback.algorithm.state_dict()
        with pytest.raises(NonFiniteError):
            step(to_gpu(bad[rank]))
        feedback.rollback()
        assert feedback.algorithm.state is before
        file = io.BytesIO()
        torch.save(feedback.state_dict() | {"residual": values_of(feedback.residual)}, file)
        file.seek(0)
        resumed, again = worker(recipe, rank, 3)
        resumed.load_state_dict(torch.load(file, weights_only=True))
        assert resumed.algorithm.state == ExDynaState(**saved)
        assert feedback.algorithm.common_state() == resumed.algorithm.common_state() == saved
        found = []
        for each in given[3:]:
            step(to_gpu(each[rank]))
            again(to_gpu(each[rank]))
            found.append(feedback.algorithm.state_dict())
            assert resumed.algorithm.state_dict() == found[-1]
            assert torch.equal(values_of(feedback.residual), values_of(resumed.residual))
        feedback.algorithm.state = before
        assert feedback.algorithm.state_dict() == saved, "a later step has written the partitions of an earlier one"
        return found

    expected = simulated(recipe, given)[3:]
    assert ranks.run(main, 3) == [expected] * 3

    def alone(rank: int) -> dict[str, Any]:
        feedback, step = worker(recipe, rank, 2)
        feedback.algorithm.load_state_dict(expected[-1])
        step(to_gpu(given[0][rank]))
        return feedback.algorithm.state_dict()

    world = SimulatedWorld(recipe, 2, NUMEL)
    for each in world.workers:
        each.algorithm.state = replace(ExDynaState(), **expected[-1])
    world.step(given[0][:2])
    assert ranks.run(alone, 2) == [world.workers[0].algorithm.state_dict()] * 2
