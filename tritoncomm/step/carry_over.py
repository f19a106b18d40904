"""What a new exchange takes over from the one before: after a change of parameters, density or process group."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tritoncomm.step.stages import Scale
from tritoncomm.step.vector_exchange import VectorExchange


def across_layout(new: VectorExchange, before: Sequence[VectorExchange]) -> None:
    """Continue in ``new`` with other parameters, or with other bounds between the vectors.

    Residuals and second moments are those of the parameters that ``before`` has. State that does not depend on the
    vector is that of the first vector of ``before``.
    """
    adopt_residuals(new, before)
    if not before:
        return
    new.feedback.algorithm.adopt_across_layout(before[0].feedback.algorithm)
    own = new.scale
    if own is None:
        return
    sources: dict[int, tuple[Scale, int]] = {}
    for vector in before:
        scale = vector.scale
        if scale is not None:
            sources |= {id(parameter): (scale, position) for position, parameter in enumerate(vector.large)}
    own.adopt_tensors([sources.get(id(parameter)) for parameter in new.large])


def adopt_residuals(new: VectorExchange, before: Sequence[VectorExchange]) -> None:
    """Copy the residuals of the parameters that ``before`` has."""
    own = new.residuals_by_parameter()
    for vector in before:
        for parameter, residual in vector.residuals_by_parameter().items():
            if parameter in own:
                own[parameter].copy_(residual)


def across_density(new: VectorExchange, before: VectorExchange) -> None:
    """Continue in ``new`` with another density of the same method."""
    new.feedback.residual.copy_(before.feedback.residual)
    new.feedback.algorithm.adopt_across_density(before.feedback.algorithm)


def across_groups(new: VectorExchange, before: VectorExchange) -> None:
    """Continue in ``new`` in another process group, possibly of another size.

    The residual is scaled by the ratio of world sizes. This rank's contribution to the mean stays the same. The recipe
    may differ only in :class:`~tritoncomm.Hierarchical`.
    """
    share = new.world_size / before.world_size
    torch.mul(before.feedback.residual, share, out=new.feedback.residual)
    state = before.feedback.algorithm.state_dict()
    # Within nodes, the state of a rank belongs to a part of the vector. This part may be another one now.
    same = new.recipe == before.recipe
    new.feedback.algorithm.migrate([state] if same else [], share, state)
