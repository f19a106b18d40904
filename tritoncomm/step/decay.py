"""Weight decay that is a part of the gradient: the part of it that all ranks know.

Parameters are equal on all ranks, so the decay of a step is added to the mean that the exchange has delivered, and not
sent. Coordinates of which nothing was delivered keep it in the residual: it is late there, like the gradient, and is
selected with it.

Where the decay of one step is as large as most delivered entries, which are sums of several gradients, it outweighs the
gradient. It is delivered there at once. In the residual it would be selected again and again: it would take the place
of gradients, and wait for its turn, although nothing has to be sent.
"""

from __future__ import annotations

from collections.abc import Container, Mapping

import torch

from tritoncomm.primitives.sparse_vector import SparseVector
from tritoncomm.step.shards import local
from tritoncomm.step.vector import VectorExchange
from tritoncomm_kernels import Padded


def with_decay(vector: VectorExchange, mean: SparseVector, shares: Mapping[int, float]) -> SparseVector:
    """Return the ``mean`` of ``vector`` with the decay of this step, before the step is committed.

    A mean with padding gets no further coordinates: the host does not know their number.

    Args:
        vector: The vector. The residual that the step will leave gets the rest of the decay.
        mean: What was exchanged. All ranks have the same.
        shares: The share of each parameter, by its id, that is its decay.
    """
    if not vector.recipe.layers[-1].averages_when_dense or not any(
        id(parameter) in shares for parameter in vector.parameters
    ):
        return mean
    numel = mean.numel
    decay = torch.zeros(numel + 1, dtype=torch.float32, device=vector.device)  # the last place is that of padding
    for parameter, part in zip(vector.layout.parameters, vector.layout.parts(decay[:numel]), strict=True):
        if id(parameter) in shares:
            held = local(parameter.detach())
            part.view(held.shape).add_(held, alpha=shares[id(parameter)])
    if mean.is_full:
        return SparseVector.full(mean.values + decay[:numel])
    places = mean.indices.long()
    if mean.is_padded:
        places = torch.where(places < 0, numel, places)
    values = mean.values + decay[places]
    decay[places] = 0.0
    if mean.is_padded:
        whole = SparseVector.padded(Padded(mean.indices, values), numel)
    else:
        large = _outweighing(vector, mean, decay[:numel])
        order = torch.cat([places, large]).argsort()
        merged = torch.cat([values, decay[large]])[order]
        whole = SparseVector(torch.cat([mean.indices, large.to(torch.int32)])[order], merged, numel)
        decay[large] = 0.0
    vector.feedback.pending.add_(decay[:numel])
    return whole


def add_decay(vector: VectorExchange, shares: Mapping[int, float], waiting: Container[int]) -> None:
    """Add the decay of this step to the gradients of ``vector``, if its method does more than to average them.

    ``dgc`` applies momentum to what it is given, and decay must pass it, too. ``shares`` are as in :func:`with_decay`.
    Parameters ``waiting`` (by id) have no gradient on any rank, and do not decay.
    """
    if vector.recipe.layers[-1].averages_when_dense:
        return
    for parameter, part in zip(vector.layout.parameters, vector.layout.parts(vector.flat), strict=True):
        if id(parameter) in shares and id(parameter) not in waiting:
            held = local(parameter.detach())
            part.view(held.shape).add_(held, alpha=shares[id(parameter)])


def _outweighing(vector: VectorExchange, mean: SparseVector, decay: torch.Tensor) -> torch.Tensor:
    """Return the coordinates at which ``decay`` is as large as the median of the entries of ``mean``.

    Both are compared as the method compares entries. Small tensors, which travel dense, do not count. A median does not
    depend on the order in which a processor adds.
    """
    head, scale = mean.numel - vector.dense_numel, vector.scale
    count = int(torch.count_nonzero(mean.indices < head))
    divisors = None if scale is None else scale.divisors(vector.device)
    sizes, limits = decay[:head].abs(), mean.values[:count].abs()
    if divisors is not None:
        sizes /= divisors
        limits = limits / divisors[mean.indices[:count].long()]
    if not count or not bool(limits.median() > 0):
        return mean.indices[:0].long()
    return (sizes >= limits.median()).nonzero().view(-1)
