"""``algo="auto"``: measure the network and let the planner choose the recipe."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from tritoncomm.algorithms import Dense, Recipe
from tritoncomm.errors import ConfigurationError
from tritoncomm.planning.planner import recommend
from tritoncomm.scheduler.link import measure_link
from tritoncomm.scheduler.process_group import is_distributed
from tritoncomm.step import agree, options
from tritoncomm.step.options import check_keywords
from tritoncomm_kernels.section_layout import VALUE_BITS

logger = logging.getLogger("tritoncomm")


def automatic_recipe(
    optimizer: torch.optim.Optimizer,
    density: float,
    group: dist.ProcessGroup | None,
    fields: dict[str, Any],
    function: Callable[..., Any],
    *,
    buckets: int = 0,
) -> Recipe:
    """Return the recipe that the planner recommends for the measured network and this model.

    The result is the same on all ranks. Without a process group, with one rank, or with no trainable parameter, it is
    :class:`~tritoncomm.Dense` and nothing is measured.

    Args:
        optimizer: Its parameters that require a gradient are counted.
        density: Fraction of entries to deliver, in (0, 1].
        group: Process group to measure. None is the default group.
        fields: Further recipe fields that the user passed. Only ``values`` is possible, because a field belongs to one
            method.
        function: The function that the user called. Errors list its arguments.
        buckets: Number of buckets of DDP, whose hook exchanges them. 0 means without a hook.

    Raises:
        ConfigurationError: ``fields`` has another name, or ``density`` is out of range.
        ConfigMismatchError: Another rank passed a different algorithm, density or number of elements.
    """
    check_keywords(function, "auto", fields)
    values = fields.get("values", options.DEFAULT_VALUES)
    others = sorted(set(fields) - {"values"})
    if others:
        named = ", ".join(others)
        raise ConfigurationError(
            f"algo='auto' chooses the method and its fields: leave out {named}, or pass the name of a method as algo"
        )
    if not (isinstance(density, (int, float)) and 0 < density <= 1):
        raise ConfigurationError(f"density must be in (0, 1], got {density!r}")
    if values not in VALUE_BITS:
        raise ConfigurationError(f"values={values!r}: must be one of {', '.join(VALUE_BITS)}")
    parameters = [p for g in optimizer.param_groups for p in g["params"] if p.requires_grad]
    numel = sum(parameter.numel() for parameter in parameters)
    if not is_distributed() or dist.get_world_size(group) == 1 or numel == 0:
        return Dense()
    # Compare before measuring. Otherwise a rank with another configuration would leave the others waiting.
    device = parameters[0].device
    agree.compare({"algorithm": "auto", "density": density, "elements": numel, "values": values}, group, device)
    link = measure_link(group, device)
    chosen = recommend(
        numel, dist.get_world_size(group), link, density, values=values, device=device, buckets=buckets,
        wrapped_dense=True,
    )  # fmt: skip
    if dist.get_rank(group) == 0:
        logger.info(
            "algo='auto': measured %.3g Gbit/s and %.3g us per message, using %r",
            8e-9 * link.bandwidth, 1e6 * link.latency, chosen,
        )  # fmt: skip
    return chosen
