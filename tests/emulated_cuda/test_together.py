"""Vectors that are exchanged together, like the buckets behind a hook, have the bits of each alone."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from tritoncomm import NonFiniteError
from tritoncomm.scheduler.process_group import ProcessGroupScheduler
from tritoncomm.scheduler.together import run_together
from tritoncomm.step.exchange.feedback import ErrorFeedback

import laws
import recipes
from depth import DEEP, trials
from emulated_cuda import exchanges, ranks
from emulated_cuda.device import to_gpu, values_of
from emulated_cuda.exchanges import Outcome

LENGTHS = (90, 1, 257)  # one value, and no multiple of anything
STEPS, BAD_STEP = trials(4, 8), 2
# Vectors of one method that read the host alike, and others that read it at other times. A deep run has all recipes.
BRIEF = {
    "dense-tail-oktopk-static",
    "dgc-4bit",
    "exdyna",
    "exdyna-static-packed",
    "gtopk",
    "micro-static",
    "oktopk-short-periods",
    "oktopk-static-4bit",
    "random-block-static-4bit",
    "sidco",
    "spardl-static-3-teams-4bit",
    "topk_dsa",
}
NAMES = [
    name
    for name in recipes.NAMES
    if (DEEP or name in BRIEF)
    and laws.length(recipes.under_test(0.1)[name], LENGTHS[0]) == LENGTHS[0]  # or the recipe is for one length
]


def _together(name: str, given: Sequence[list[torch.Tensor]], *, seed: int) -> list[list[list[Outcome]]]:
    """Return the outcomes by rank, vector and step. Before one step, one is rejected, and a mean is thrown away."""
    recipe = recipes.under_test(0.1)[name]
    world_size = len(given[0][0])
    subgroups = recipe.subgroups(world_size)

    def rank_of(rank: int) -> list[list[Outcome]]:
        schedulers = [
            ProcessGroupScheduler(None, device="cuda:0", stamp=f"{recipe!r} {number}", subgroups=subgroups)
            for number in range(len(given))
        ]
        feedbacks = [ErrorFeedback(recipe.build(steps[0].shape[1]), "cuda:0") for steps in given]

        def begin(step: int, *, poisoned: bool = False) -> list:
            vectors = [to_gpu(steps[step][rank].clone()) for steps in given]
            if poisoned and rank == step % world_size:
                vectors[-1][0] = torch.nan
            return [
                scheduler.running(feedback.begin(vector, rank, world_size))
                for scheduler, feedback, vector in zip(schedulers, feedbacks, vectors, strict=True)
            ]

        outcomes: list[list[Outcome]] = [[] for _ in given]
        for step in range(len(given[0])):
            if step == BAD_STEP:
                with pytest.raises(NonFiniteError):
                    run_together(begin(step, poisoned=True))
                for feedback in feedbacks:
                    feedback.rollback()
                run_together(begin(0))
                for feedback in feedbacks:
                    feedback.rollback()
            means = [mean.trimmed() for mean in run_together(begin(step))]
            for number, (mean, scheduler, feedback) in enumerate(zip(means, schedulers, feedbacks, strict=True)):
                feedback.commit()
                moved = scheduler.meter.sent.bytes, scheduler.meter.received.bytes
                parts = (mean.indices, mean.values, feedback.residual)
                outcomes[number].append(Outcome(*map(values_of, parts), *moved))
        return outcomes

    return ranks.run(rank_of, world_size, seed=seed)


@pytest.mark.parametrize("name", NAMES)
def test_vectors_together_equal_each_alone(name: str) -> None:
    """Means, residuals and bytes are those of a simulation of each vector alone, also after a rejected step."""
    world_size = laws.fitted(laws.Case(3, LENGTHS[0], ("random",)), recipes.under_test(0.1)[name]).world_size
    given = [exchanges.gradients(world_size, numel, STEPS, seed=numel) for numel in LENGTHS]
    found = _together(name, given, seed=world_size)
    for number, steps in enumerate(given):
        alone = exchanges.simulated(recipes.under_test(0.1)[name], steps)
        for rank in range(world_size):
            for step, (own, other) in enumerate(zip(found[rank][number], alone[rank], strict=True)):
                assert own.equals(other), f"vector {number}, rank {rank}, step {step}"
