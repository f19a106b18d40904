"""``algo="auto"``: measure the network, ask the planner."""

from __future__ import annotations

import logging
from typing import Any

import torch
import torch.distributed as dist

from tritoncomm.algorithms import Dense, Recipe
from tritoncomm.errors import ConfigurationError
from tritoncomm.planning.planner import recommend
from tritoncomm.scheduler.link import measure_link
from tritoncomm.scheduler.process_group import is_distributed
from tritoncomm.step import setup_checks

logger = logging.getLogger("tritoncomm")


def automatic_recipe(
    optimizer: torch.optim.Optimizer, density: float, group: dist.ProcessGroup | None, fields: dict[str, Any]
) -> Recipe:
    """What the planner makes of the measured network and of this model; the same on all ranks.

    Raises :class:`~tritoncomm.ConfigurationError` for ``fields``, which belong to a method, and
    :class:`~tritoncomm.ConfigMismatchError` when another rank does not ask for the same.
    """
    if fields:
        named = ", ".join(sorted(fields))
        raise ConfigurationError(f"algo='auto' chooses the method and its settings: leave out {named}")
    if not (isinstance(density, (int, float)) and 0 < density <= 1):
        raise ConfigurationError(f"density={density!r}: choose a share above 0 and at most 1")
    parameters = [p for g in optimizer.param_groups for p in g["params"] if p.requires_grad]
    numel = sum(parameter.numel() for parameter in parameters)
    if not is_distributed() or dist.get_world_size(group) == 1 or numel == 0:
        return Dense()
    # Before anything is measured: a rank that does something else must not leave the others waiting.
    setup_checks.compare({"algorithm": "auto", "density": density, "elements": numel}, group)
    link = measure_link(group, parameters[0].device)
    chosen = recommend(numel, dist.get_world_size(group), link, density)
    if dist.get_rank(group) == 0:
        logger.info(
            "algo='auto': %.3g Gbit/s and %.3g us per message measured, using %r",
            8e-9 * link.bandwidth, 1e6 * link.latency, chosen,
        )  # fmt: skip
    return chosen
