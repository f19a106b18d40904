"""The process-group scheduler and the wrapped optimizer on real gloo processes."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import process_group_workers
import pytest
import torch
from helpers import possible, run_workers, shared_out
from process_group_workers import Seen
from tritoncomm import SimulatedWorld, algorithms
from tritoncomm.demo.local_workers import WorkerError

from depth import DEEP

# Each method at every world size, and each of the other recipes at one of them where several workers run.
RECIPES = {1: possible(0.07, 1)} | shared_out({size: possible(0.07, size) for size in (2, 3, 5)})


@pytest.mark.parametrize("world_size", RECIPES)
def test_equals_simulation(world_size: int) -> None:
    """Bits, residuals, states and traffic of every recipe equal those of the simulation.

    Methods take seven steps, and so does everything in a deep run. Five reach both periods of the other recipes.
    """
    runs = {
        name: (recipe, process_group_workers.case_of(recipe, world_size, 7 if DEEP or name in algorithms() else 5))
        for name, recipe in RECIPES[world_size].items()
    }
    found = run_workers(process_group_workers.exchanges, world_size, runs)
    assert list(found[0]) == list(runs)
    for name, (recipe, case) in runs.items():
        world = SimulatedWorld(recipe, world_size, case.numel)
        for step, gradient in enumerate(case.gradients()):
            means = world.step(gradient)
            for rank, worker in enumerate(world.workers):
                seen = Seen.of(means[rank], worker, world.traffic[rank], world.received[rank])
                assert found[rank][name][step] == seen, (name, step, rank)


def test_every_recipe_runs_between_processes() -> None:
    """No recipe is left out that accepts 2, 3 or 5 workers, and every method runs with all of these numbers."""
    accepted = {size: set(possible(0.07, size)) for size in (2, 3, 5)}
    assert set.union(*(set(RECIPES[size]) for size in accepted)) == set.union(*accepted.values())
    assert all(accepted[size] & {*algorithms()} <= set(RECIPES[size]) for size in accepted)


@pytest.mark.parametrize("world_size", [1, 2, 3, 5] if DEEP else [3])
def test_laws(world_size: int) -> None:
    """Conservation, agreement, determinism and refusal hold between real processes.

    A deep run has every recipe. Otherwise they only equal the simulation, in which the laws hold.
    """
    recipes = {name: each for name, each in possible(0.05, world_size).items() if DEEP or name in algorithms()}
    assert run_workers(process_group_workers.laws_on_processes, world_size, recipes) == [None] * world_size


@pytest.mark.parametrize("world_size", [1, 3])
def test_wrapped_training(world_size: int) -> None:
    """Replicas stay identical, and the dense method equals averaging by hand."""
    assert run_workers(process_group_workers.wrapped_training, world_size) == [None] * world_size


def test_clipping_and_skipping() -> None:
    """Clipping sees the averaged gradients, and all ranks skip the same steps."""
    assert run_workers(process_group_workers.clipping_and_skipping, 3) == [None] * 3


def test_mismatched_configurations() -> None:
    """Every rank names each field that differs."""
    assert run_workers(process_group_workers.mismatches, 3) == [None] * 3


def test_small_tensors_in_8_bits() -> None:
    """Small tensors in 8 bits lose nothing, and a checkpoint fits a run in which they travel in fp32."""
    assert run_workers(process_group_workers.small_in_8_bits, 3) == [None] * 3


def test_ranks_load_together() -> None:
    """All ranks load a checkpoint together, or none does."""
    assert run_workers(process_group_workers.loading, 3) == [None] * 3


@pytest.mark.parametrize("world_size", [2, 3])
def test_measured_link(world_size: int) -> None:
    """All ranks measure the same link."""
    assert run_workers(process_group_workers.measured_link, world_size) == [None] * world_size


def test_rejected_gradients() -> None:
    """If one rank cannot exchange its gradient, no rank waits for it."""
    assert run_workers(process_group_workers.rejected_gradients, 3) == [None] * 3


def test_process_group_after_wrap() -> None:
    """The first exchange raises an error if the process group was initialized after wrap()."""
    assert run_workers(process_group_workers.late_group, 2) == [None] * 2


def test_collectives_in_backward_are_released_here() -> None:
    """Collectives that autograd started are released in this thread. A gloo thread would abort at interpreter exit."""
    assert run_workers(process_group_workers.collectives_in_backward, 1) == [None]


def test_subgroups() -> None:
    """Two groups exchange at the same time. A rank outside of a group is rejected."""
    rejected: list[str] = []
    assert run_workers(process_group_workers.subgroups, 5, listen=rejected.append) == [None] * 5
    assert len(rejected) == 5


@pytest.mark.parametrize("world_size", [1, 2, 5])
def test_collectives(world_size: int) -> None:
    """Collectives of all kinds, dtypes and lengths equal those of the simulation."""
    assert run_workers(process_group_workers.collectives, world_size) == [None] * world_size


def test_receives_are_ahead() -> None:
    """A message never waits for its receive to be posted."""
    heard: list[str] = []
    with suppress(WorkerError):  # they end without a result
        run_workers(process_group_workers.receives_are_ahead, 2, listen=heard.append)
    assert heard == ["done"]


def test_profiles() -> None:
    """A receive that is posted ahead does not outlive a profiler that was told of its begin."""
    assert run_workers(process_group_workers.profiled, 2) == [None] * 2


def test_another_default_group(tmp_path: Path) -> None:
    """The default group is that of the moment."""
    assert run_workers(process_group_workers.another_default_group, 2, str(tmp_path / "store")) == [None] * 2


def test_crash_shows_the_failing_rank() -> None:
    """The traceback is that of the failing rank, not that of a rank that lost its peer."""
    with pytest.raises(WorkerError, match=r"worker 1 failed:(.|\n)*ZeroDivisionError: the bug of rank 1"):
        run_workers(process_group_workers.crash, 3)


def test_killed_worker_ends_the_run() -> None:
    """A worker that dies without a traceback raises an error instead of a hang."""
    with pytest.raises(WorkerError, match="worker 0 died without a traceback"):
        run_workers(process_group_workers.vanish, 2)


def test_threads_are_limited_in_workers_only() -> None:
    """Workers limit their threads. The number of threads of this process stays the same."""
    threads = torch.get_num_threads()
    run_workers(process_group_workers.rejected_gradients, 2)
    assert torch.get_num_threads() == threads
