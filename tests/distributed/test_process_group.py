"""The same patterns on real gloo processes."""

from __future__ import annotations

import process_group_workers
import pytest
import torch
from helpers import run_workers
from process_group_workers import Seen
from tritoncomm import SimulatedWorld
from tritoncomm.scheduler.local_workers import WorkerError


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
def test_equals_simulation(world_size: int) -> None:
    """Bits, residuals, states and traffic of every recipe equal the simulation's."""
    found = run_workers(process_group_workers.exchanges, world_size)
    recipes = process_group_workers.possible(0.07, world_size)
    assert list(found[0]) == list(recipes)
    for name, recipe in recipes.items():
        case = process_group_workers.case_of(recipe, world_size)
        world = SimulatedWorld(recipe, world_size, case.numel)
        for step, gradient in enumerate(case.gradients()):
            means = world.step(gradient)
            for rank, worker in enumerate(world.workers):
                seen = Seen.of(means[rank], worker, world.traffic[rank], world.received[rank])
                assert found[rank][name][step] == seen, (name, step, rank)


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
def test_laws(world_size: int) -> None:
    """Conservation, agreement, determinism and refusal hold between real processes."""
    assert run_workers(process_group_workers.laws_on_processes, world_size) == [None] * world_size


@pytest.mark.parametrize("world_size", [1, 3])
def test_wrapped_training(world_size: int) -> None:
    """Replicas stay identical; the dense method equals averaging by hand."""
    assert run_workers(process_group_workers.wrapped_training, world_size) == [None] * world_size


def test_clipping_and_skipping() -> None:
    """Clipping sees averages, and a skipped step is everybody's."""
    assert run_workers(process_group_workers.clipping_and_skipping, 3) == [None] * 3


def test_mismatched_set_ups() -> None:
    """Each differing field is named on every rank."""
    assert run_workers(process_group_workers.mismatches, 3) == [None] * 3


def test_loading() -> None:
    """All ranks load together, or none."""
    assert run_workers(process_group_workers.loading, 3) == [None] * 3


@pytest.mark.parametrize("world_size", [2, 3])
def test_automatic_choice(world_size: int) -> None:
    """A measured link, the same plan on every rank."""
    assert run_workers(process_group_workers.automatic, world_size) == [None] * world_size


def test_unfit_gradients() -> None:
    """Nobody waits for a rank whose gradient cannot be exchanged."""
    assert run_workers(process_group_workers.unfit_gradients, 3) == [None] * 3


def test_process_group_after_wrap() -> None:
    """Wrapping too early is noticed at the first exchange."""
    assert run_workers(process_group_workers.late_group, 2) == [None] * 2


def test_collectives_of_a_backward_pass_end_here() -> None:
    """No thread of gloo lets go of what autograd left in a collective: at the interpreter's end it would abort."""
    assert run_workers(process_group_workers.collectives_in_backward, 1) == [None]


def test_subgroups() -> None:
    """Two groups exchange at once; a rank outside of its group is refused."""
    refused: list[str] = []
    assert run_workers(process_group_workers.subgroups, 5, listen=refused.append) == [None] * 5
    assert len(refused) == 5


def test_crash_shows_the_first_cause() -> None:
    """The traceback is the culprit's, not that of a rank that lost its peer."""
    with pytest.raises(WorkerError, match=r"worker 1 failed:(.|\n)*ZeroDivisionError: the bug of rank 1"):
        run_workers(process_group_workers.crash, 3)


def test_killed_worker_ends_the_run() -> None:
    """No traceback, no hang."""
    with pytest.raises(WorkerError, match="worker 0 died without a traceback"):
        run_workers(process_group_workers.vanish, 2)


def test_threads_are_limited_in_workers_only() -> None:
    """The environment of this process is as before."""
    threads = torch.get_num_threads()
    run_workers(process_group_workers.unfit_gradients, 2)
    assert torch.get_num_threads() == threads
