"""Exchanges on emulated GPUs, and the same in simulation, for tests and for the count of synchronizations."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from tritoncomm import Recipe, SimulatedWorld
from tritoncomm.scheduler.process_group import ProcessGroupScheduler
from tritoncomm.step.exchange.claim import Vote, vote
from tritoncomm.step.exchange.feedback import ErrorFeedback

from emulated_cuda import ranks
from emulated_cuda.device import current_gpu, to_gpu, values_of


class Outcome(NamedTuple):
    """What a rank has after a step: the mean, its residual, and the bytes that it has sent and received."""

    indices: torch.Tensor
    values: torch.Tensor
    residual: torch.Tensor
    bytes_sent: int
    bytes_received: int

    def equals(self, other: Outcome) -> bool:
        """Whether all bits are equal, those of NaN included."""
        return self[3:] == other[3:] and all(
            a.shape == b.shape and torch.equal(a.view(torch.int32), b.view(torch.int32))
            for a, b in zip(self[:3], other[:3], strict=True)
        )


def gradients(world_size: int, numel: int, steps: int, *, seed: int = 0) -> list[torch.Tensor]:
    """Return heavy-tailed gradients ``[world_size, numel]`` of each step, which have a part in common."""
    generator = torch.Generator().manual_seed(seed)
    shape = (world_size, numel)
    common = torch.randn(numel, generator=generator)
    return [
        common + torch.randn(shape, generator=generator) * torch.randn(shape, generator=generator).exp()
        for _ in range(steps)
    ]


def emulated(recipe: Recipe, given: list[torch.Tensor], *, seed: int | None = 0) -> list[list[Outcome]]:
    """Return the outcome of each step by rank, of an exchange of the ``given`` gradients on emulated GPUs."""
    world_size, numel = given[0].shape

    def rank_of(rank: int) -> list[Outcome]:
        subgroups = recipe.subgroups(world_size)
        scheduler = ProcessGroupScheduler(None, device="cuda:0", stamp=repr(recipe), subgroups=subgroups)
        feedback = ErrorFeedback(recipe.build(numel), "cuda:0")
        outcomes = []
        for step in given:
            mean = scheduler.run(feedback.begin(to_gpu(step[rank]), rank, world_size)).trimmed()
            sent, received = scheduler.meter.sent.bytes, scheduler.meter.received.bytes
            feedback.commit()
            scheduler.run(vote(Vote(), scheduler.device, [scheduler]), new_step=False)
            parts = (mean.indices, mean.values, feedback.residual)
            outcomes.append(Outcome(*map(values_of, parts), sent, received))
        return outcomes

    return ranks.run(rank_of, world_size, seed=seed)


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


def counted(recipe: Recipe, world_size: int, *, numel: int = 9728) -> tuple[int, int]:
    """Return the host synchronizations and kernel launches of an ordinary step, of the rank that synchronizes most.

    A step is the exchange of one vector and its confirmation. The second is ordinary, except that Ok-Topk reuses its
    thresholds for the first time in the fourth.
    """
    innermost = recipe
    while hasattr(innermost, "recipe"):
        innermost = innermost.recipe
    steps = 4 if innermost.name == "oktopk" else 2
    given = gradients(world_size, numel, steps, seed=1)

    def rank_of(rank: int) -> tuple[int, int]:
        gpu = current_gpu()
        subgroups = recipe.subgroups(world_size)
        scheduler = ProcessGroupScheduler(None, device="cuda:0", stamp=repr(recipe), subgroups=subgroups)
        feedback = ErrorFeedback(recipe.build(numel), "cuda:0")
        for step in given:
            own = to_gpu(step[rank])
            gpu.reset()
            scheduler.run(feedback.begin(own, rank, world_size))
            feedback.commit()
            scheduler.run(vote(Vote(), scheduler.device, [scheduler]), new_step=False)
        return sum(gpu.syncs.values()), sum(gpu.launches.values())

    return max(ranks.run(rank_of, world_size, seed=None))
