"""Exchanges on emulated GPUs, and the same in simulation."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import pytest
import torch
from tritoncomm import NonFiniteError, Recipe, SimulatedWorld, SparseVector
from tritoncomm.scheduler.process_group import ProcessGroupScheduler
from tritoncomm.scheduler.together import run_together
from tritoncomm.step.exchange.feedback import ErrorFeedback
from tritoncomm.step.exchange.scope import Vote, vote

import laws
from emulated_cuda import ranks
from emulated_cuda.device import to_gpu, values_of


class Outcome(NamedTuple):
    """What a rank has after a step: the mean, its residual, and the bytes that it has sent and received."""

    indices: torch.Tensor
    values: torch.Tensor
    residual: torch.Tensor
    bytes_sent: int
    bytes_received: int

    def equals(self, other: Outcome) -> bool:
        """Whether all bits are equal, those of NaN included."""
        return self[3:] == other[3:] and all(map(laws.same_bits, self[:3], other[:3]))


def gradients(world_size: int, numel: int, steps: int, *, seed: int = 0) -> list[torch.Tensor]:
    """Return heavy-tailed gradients ``[world_size, numel]`` of each step, which have a part in common."""
    generator = torch.Generator().manual_seed(seed)
    shape = (world_size, numel)
    common = torch.randn(numel, generator=generator)
    return [
        common + torch.randn(shape, generator=generator) * torch.randn(shape, generator=generator).exp()
        for _ in range(steps)
    ]


def emulated(
    recipe: Recipe, given: list[torch.Tensor], *, seed: int | None = 0, bind_device: bool = False
) -> list[list[Outcome]]:
    """Return the outcome of each step by rank, of an exchange of the ``given`` gradients on emulated GPUs."""
    return [vectors[0] for vectors in emulated_together(recipe, [given], seed=seed, bind_device=bind_device)]


def emulated_together(
    recipe: Recipe,
    given: Sequence[list[torch.Tensor]],
    *,
    seed: int | None = 0,
    bad_step: int = -1,
    bind_device: bool = False,
) -> list[list[list[Outcome]]]:
    """Return the outcomes by rank, vector and step, of vectors that are exchanged together.

    Before ``bad_step``, a step is rejected, and the means of another one are thrown away.
    """
    world_size = len(given[0][0])
    subgroups = recipe.subgroups(world_size)

    def rank_of(rank: int) -> list[list[Outcome]]:
        schedulers = [
            ProcessGroupScheduler(None, device="cuda:0", stamp=f"{recipe!r} {number}", subgroups=subgroups)
            for number in range(len(given))
        ]
        feedbacks = [ErrorFeedback(recipe.build(steps[0].shape[1]), "cuda:0") for steps in given]

        def means_of(step: int, *, poisoned: bool = False) -> list[SparseVector]:
            vectors = [to_gpu(steps[step][rank]) for steps in given]
            if poisoned and rank == step % world_size:
                vectors[-1][0] = torch.nan
            return run_together(
                [
                    scheduler.running(feedback.begin(vector, rank, world_size))
                    for scheduler, feedback, vector in zip(schedulers, feedbacks, vectors, strict=True)
                ]
            )

        outcomes: list[list[Outcome]] = [[] for _ in given]
        for step in range(len(given[0])):
            for poisoned in (True, False) if step == bad_step else ():
                with pytest.raises(NonFiniteError) if poisoned else nullcontext():
                    means_of(step, poisoned=poisoned)
                for feedback in feedbacks:
                    feedback.rollback()
            for number, mean in enumerate(mean.trimmed() for mean in means_of(step)):
                meter, feedback = schedulers[number].meter, feedbacks[number]
                feedback.commit()
                parts = (mean.indices, mean.values, feedback.residual)
                outcomes[number].append(Outcome(*map(values_of, parts), meter.sent.bytes, meter.received.bytes))
            schedulers[0].run(vote(Vote(), schedulers[0].device, schedulers), new_step=False)
        return outcomes

    return ranks.run(rank_of, world_size, seed=seed, bind_device=bind_device)


def simulated(recipe: Recipe, given: list[torch.Tensor]) -> list[list[Outcome]]:
    """Return the same as :func:`emulated`, of a simulation on the CPU."""
    world_size, numel = given[0].shape
    world = SimulatedWorld(recipe, world_size, numel)
    outcomes: list[list[Outcome]] = [[] for _ in range(world_size)]
    for step in given:
        means = world.step(step)
        for rank, mean in enumerate(mean.trimmed() for mean in means):
            traffic: Any = world.traffic[rank].bytes, world.received[rank].bytes
            residual = world.workers[rank].residual.clone()
            outcomes[rank].append(Outcome(mean.indices.clone(), mean.values.clone(), residual, *traffic))
    return outcomes
