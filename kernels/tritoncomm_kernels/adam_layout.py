"""Where the numbers are that the kernels of an Adam update read from device memory."""

from __future__ import annotations

from typing import Any, NamedTuple


class Scalars(NamedTuple):
    """The numbers of one step: the elements of :attr:`AdamControl.scalars <tritoncomm_kernels.AdamControl>`, in order.

    * ``steps``: the optimizer's step count, counted from 1
    * ``clock``: the number of the step in which ``last`` counts, which may have begun at another time
    * ``rate``: the learning rate divided by the first bias correction
    * ``correction``: the second bias correction, 1 - beta2^steps
    * ``per_correction``: 1 divided by it
    * ``root``: its square root
    * ``epsilon``: Adam's option
    * ``catch_up``: ``max_catch_up``, the limit on the staleness that counts for the distance
    * ``steady``: the same limit where gradients are steady
    * ``walk``: ``max_sqrt_staleness``, the limit in multiples of sqrt(tau)
    * ``distance``: 32 divided by the first bias correction, which turns a move into 1/32 of learning rates
    * ``change``: 32 times ``max_relative_update``, divided by the learning rate; infinite without a limit
    """

    steps: Any
    clock: Any
    rate: Any
    correction: Any
    per_correction: Any
    root: Any
    epsilon: Any
    catch_up: Any
    steady: Any
    walk: Any
    distance: Any
    change: Any


class Row(NamedTuple):
    """One tensor in a table of int64 numbers: addresses, then sizes.

    An address of 0 stands for a tensor that there is not. The kernels for many tensors read ``indices`` and the number
    of ``entries``, and no indices mean all coordinates. Those for a flat list read ``start``, the index of the first
    element, and ``channels`` and ``positions`` of an image whose channels are innermost in memory.
    """

    parameter: int
    gradient: int
    first: int
    second: int
    last: int
    param_rms: int
    maximum: int
    numel: int
    indices: int = 0
    entries: int = 0
    start: int = 0
    channels: int = 1
    positions: int = 1
