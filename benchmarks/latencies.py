"""How often a step waits for the delay of a network, on the virtual clock of simulated workers."""

from __future__ import annotations

from dataclasses import replace

import torch
import tritoncomm
from tritoncomm.scheduler.cost import Link, all_reduce

from optimizer_runs import Outcome, Run
from optimizers import layout_of, recipe_of, world_of
from tasks import TASKS, WORKERS

_SIMULATED = "dense", "oktopk", "quantized"
_STEPS = 6  # some of them search thresholds and regions, which is rare in training
_SUM = all_reduce(1, 4, WORKERS).messages


def per_step(run: Run, outcome: Outcome) -> float:
    """Return the number of delays that follow one another in an ordinary step of ``run``.

    They are the seconds of an exchange on a network with a delay of one second and no other limit. Sums and gathers
    pass a ring. A step of :func:`tritoncomm.wrap` has one sum more, in which it is confirmed. Of methods that do not
    run on the scheduler, every message that a worker sends counts.
    """
    if run.exchange == "dense":
        return float(_SUM)
    if run.method not in _SIMULATED:
        return float(outcome["messages"])
    parameters = list(TASKS[run.task](None, 1).model().parameters())
    together = []  # exchanges of one step, whose messages are under way at the same time
    if run.sends_gradients:
        world = world_of(replace(run, dense_steps=0), layout_of(parameters), by_update=True)
        assert isinstance(world, tritoncomm.SimulatedWorld)
        together.append(_delays(world.recipe, world.numel))
    if run.exchange == "updates":
        numel = sum(parameter.numel() for parameter in parameters)
        together.append(_delays(recipe_of(run), numel) + _SUM * run.match_length)
    return (max(together) + _SUM) / run.local_steps


def _delays(recipe: tritoncomm.Recipe, numel: int) -> float:
    world = tritoncomm.SimulatedWorld(recipe, WORKERS, numel, link=Link(latency=1.0, bandwidth=float("inf")))
    generator = torch.Generator().manual_seed(0)
    seconds = []
    for _ in range(_STEPS):
        world.step(torch.randn(WORKERS, numel, generator=generator))
        seconds.append(world.seconds)
    return min(seconds)
