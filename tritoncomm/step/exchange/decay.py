"""Weight decay that is a part of the gradient: the part of it that all ranks know.

Parameters are equal on all ranks, so the decay of a step is added to the mean that the exchange has delivered, and not
sent. Coordinates of which nothing was delivered keep it in the residual: it is late there, like the gradient, and is
selected with it.

Where the decay of one step is as large as most delivered entries, which are sums of several gradients, it outweighs the
gradient. It is delivered there at once. In the residual it would be selected again and again: it would take the place
of gradients, and wait for its turn, although nothing has to be sent.

To leave it out of the residual, and to add it where an entry is delivered, for all steps that it is late, has as good a
loss. But rows without gradient hardly decay then (``benchmarks/results/decay.json``).
"""

from __future__ import annotations

from collections.abc import Container, Mapping

import torch

from tritoncomm.primitives.sparse_vector import SparseVector
from tritoncomm.step.exchange.vector import VectorExchange
from tritoncomm.step.tensors.shards import local


def with_decay(vector: VectorExchange, mean: SparseVector, shares: Mapping[int, float]) -> SparseVector:
    """Return the ``mean`` of ``vector`` with the decay of this step, before the step is committed.

    A mean with padding gets no further coordinates: the host does not know their number.

    Args:
        vector: The vector. Its ``flat`` is overwritten. The residual that the step will leave gets the rest of the
            decay.
        mean: What was exchanged. All ranks have the same.
        shares: The share of each parameter, by its id, that is its decay.
    """
    if not _decays(vector, shares):
        return mean
    decay = _decay(vector, shares)
    whole = mean.with_values(mean.values + mean.read_from(decay))
    if mean.is_full:
        return whole
    large = None if mean.is_padded else _outweighing(vector, mean, decay)
    if large is not None:
        places = mean.indices.long()
        indices = large.index_fill_(0, places, True).nonzero().view(-1)
        values = decay.index_copy(0, places, whole.values)[indices]
        whole = SparseVector(indices.to(torch.int32), values, mean.numel)
    vector.feedback.pending.add_(_without(decay, whole))
    return whole


def show_decay(vector: VectorExchange, mean: SparseVector, shares: Mapping[int, float], left: Container[int]) -> None:
    """Add to every ``.grad``, which holds what was exchanged, the decay that ``mean`` has beside it.

    Parameters have not changed since :func:`with_decay`. Those with an id in ``left`` have no gradient.
    """
    if not _decays(vector, shares):
        return
    decay = _decay(vector, shares)
    if not mean.is_full:
        decay = vector.write(mean.with_values(mean.read_from(decay)))
    for parameter, part in zip(vector.layout.parameters, vector.layout.parts(decay), strict=True):
        if parameter.grad is not None and id(parameter) not in left:
            gradient = local(parameter.grad.detach())
            gradient.add_(part.view(gradient.shape))


def add_decay(vector: VectorExchange, shares: Mapping[int, float], waiting: Container[int]) -> None:
    """Add the decay of this step to the gradients of ``vector``, if its method does more than to average them.

    ``dgc`` applies momentum to what it is given, and decay must pass it, too. ``shares`` are as in :func:`with_decay`.
    Parameters ``waiting`` (by id) have no gradient on any rank, and do not decay.
    """
    if not vector.options.recipe.layers[-1].averages_when_dense:
        _add(vector, {key: share for key, share in shares.items() if key not in waiting})


def _decays(vector: VectorExchange, shares: Mapping[int, float]) -> bool:
    """Return True if the decay of a parameter is added to the mean, see :func:`add_decay`."""
    own = vector.layout.places.keys()
    return not own.isdisjoint(shares) and vector.options.recipe.layers[-1].averages_when_dense


def _decay(vector: VectorExchange, shares: Mapping[int, float]) -> torch.Tensor:
    """Write the decay of one step into ``vector.flat``, and return it."""
    vector.flat.zero_()
    _add(vector, shares)
    return vector.flat


def _add(vector: VectorExchange, shares: Mapping[int, float]) -> None:
    """Add the decay of one step to ``vector.flat``."""
    for parameter, part in zip(vector.layout.parameters, vector.layout.parts(vector.flat), strict=True):
        if id(parameter) in shares:
            held = local(parameter.detach())
            part.view(held.shape).add_(held, alpha=shares[id(parameter)])


def _without(decay: torch.Tensor, mean: SparseVector) -> torch.Tensor:
    """Return ``decay``, which may be overwritten, with zeros at the coordinates of ``mean``."""
    places = mean.indices.long()
    if not mean.is_padded:
        return decay.index_fill_(0, places, 0.0)
    wider = torch.cat([decay, decay.new_zeros(1)])  # the last place is that of padding
    return wider.index_fill_(0, torch.where(places < 0, mean.numel, places), 0.0)[:-1]


def _outweighing(vector: VectorExchange, mean: SparseVector, decay: torch.Tensor) -> torch.Tensor | None:
    """Return at which coordinates (bool ``[numel]``) ``decay`` is as large as the median of the entries of ``mean``.

    None stands for no coordinate. Both are compared as the method compares entries. Small tensors, which travel dense,
    do not count. A median does not depend on the order in which a processor adds.
    """
    head, scale = mean.numel - vector.dense_numel, vector.scale
    count = int(torch.count_nonzero(mean.indices < head))
    if not count:
        return None
    divisors = None if scale is None else scale.divisors(vector.device)
    sizes, limits = decay[:head], mean.values[:count].abs()
    if divisors is not None:
        sizes = sizes / divisors
        limits = limits / divisors[mean.indices[:count].long()]
    limit = limits.median()
    if not bool((limit > 0) & (torch.stack(sizes.aminmax()).abs().max() >= limit)):
        return None
    large = torch.zeros(mean.numel, dtype=torch.bool, device=decay.device)
    torch.ge(sizes.abs(), limit, out=large[:head])
    return large
