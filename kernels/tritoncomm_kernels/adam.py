"""Adam update for sparse gradients whose coordinates are delivered with a delay.

The staleness tau of a delivery is the number of steps since the coordinate's last delivery. A delivered sum s is
treated as tau steps with gradient s / tau.

How many steps it counts for depends on whether gradients are steady. Successive deliveries of a coordinate then have
the same sign. If they are noise, or if the step before went too far, they have not. This is counted for each tensor.

Powers of the betas are products from a table of repeated squares, so every device computes the same bits.
``1 - beta^tau`` is summed from the same table, without cancellation. The distance that a tensor moves is summed in
integers, because integer sums do not depend on the order. Signs are counted in the same way.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from tritoncomm_kernels.memory import copied_to

POWERS = 31  # repeated squares of beta, one per value bit of tau (int32)
# Squared distances are summed as int64, in units of 1/32 of a learning rate. One coordinate counts for at most 2^31,
# which is a distance of 1448 learning rates. A sum of 2^31 such squares does not overflow.
FINE, LARGEST_SQUARE = 32.0, 2.0**31
# A delivery of steady gradients counts for at most this many times max_catch_up. An entry without gradients for 1000
# steps waits as long, and the one that then comes stands for none of them.
STEADY = 3.0
# The steps before a delivery count for at least so many where they limit the weight of the second moment. The limit is
# then above 0.95^tau. A shorter memory ends higher at 0.95, and far higher at high rates
# (benchmarks/results/second_moment.json).
MEMORY = 78.0
# A mean that is so many times the root of its second moment counts for one step: most of it is one gradient, to which
# dense Adam, too, gives about one step at a time. A moment of less weight than the second number is not compared.
OUTLIER, LEAST_WEIGHT = 5.0, 2.0**-16
# Two counts in one int64 sum: an entry that agrees counts 1, and one that disagrees this. A tensor has fewer than 2^31
# entries (INDEX_LIMIT).
DISAGREES = 1 << 32


class Scalars(NamedTuple):
    """The numbers of one step: the elements of :attr:`AdamControl.scalars`, in order.

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


@dataclass(frozen=True)
class AdamStates:
    """Optimizer states of many parameters: one tensor per parameter in each field.

    Every tensor except those of ``param_rms`` has the shape of its parameter. ``first`` and ``second`` are Adam's
    moments. ``maximum`` is the running maximum of the second moment for AMSGrad, or None. ``last`` (int32) is the clock
    of each coordinate's last delivery. ``param_rms`` (fp32, one element) is the root mean square of the parameter and
    may be some steps old.
    """

    first: Sequence[torch.Tensor]
    second: Sequence[torch.Tensor]
    last: Sequence[torch.Tensor]
    param_rms: Sequence[torch.Tensor]
    maximum: Sequence[torch.Tensor] | None = None

    def columns(self) -> list[Sequence[torch.Tensor]]:
        """Return the fields that there are, ``maximum`` last."""
        return [self.first, self.second, self.last, self.param_rms, *([] if self.maximum is None else [self.maximum])]


@dataclass(frozen=True)
class AdamControl:
    """Settings of one step. Numbers that change between steps are in device memory.

    New numbers therefore need no new compilation, and a captured CUDA graph can be replayed with them. To replay a
    captured step, write the next numbers into ``scalars`` outside the graph. Write ``param_rms`` of
    :class:`AdamStates` too, whenever it is computed again.

    ``scalars`` (fp64) holds the numbers of :class:`Scalars`, in this order.

    ``betas`` and ``maximize`` are Adam's options. Coupled weight decay is not among them: gradients must contain it.
    """

    scalars: torch.Tensor
    betas: tuple[float, float]
    maximize: bool = False

    @classmethod
    def of(
        cls,
        *,
        steps: int,
        learning_rate: float,
        betas: tuple[float, float],
        epsilon: float,
        max_catch_up: float,
        device: torch.device,
        maximize: bool = False,
        max_sqrt_staleness: float = 3.0,
        max_relative_update: float = 0.05,
        clock: int | None = None,
    ) -> AdamControl:
        """Build the settings of step number ``steps`` on ``device`` from the hyper-parameters of the optimizer.

        ``clock`` is the number of the step in which ages are counted: tau = ``clock`` - ``last``. Default: ``steps``.

        A delivery moves its coordinate as far as f dense steps would. f is between two numbers. For steady gradients it
        is min(tau, 3 * ``max_catch_up``). For others it is min(tau, ``max_catch_up``, ``max_sqrt_staleness`` *
        sqrt(tau)). The root mean square of a tensor's change by the latter is limited to ``max_relative_update`` times
        ``param_rms``, or to one learning rate where that is more. Above the limit, every such number shrinks by the
        same factor, but not below 1.

        In the second moment, a mean over tau steps is smaller than gradients of single steps, such as those of a dense
        start. With a beta2 near 1, these would count for a thousand steps, in which all moves are too short. What the
        bias-corrected moment holds of earlier steps therefore weighs at most (b / (b + tau))^4 where the moment becomes
        smaller by this, with b = max(t - tau, 78). A beta2 of 0.95 or less forgets sooner by itself. Where gradients
        grow, as those of adapters do, forgetting would make the steps shorter.

        A mean of more than 5 times the root of the moment before counts for one step, if that moment is not 0, unless
        gradients are steady: most of it is one gradient, such as that of a broken batch, and dense Adam moves by about
        one step at a time, too.

        The weight of the first number is 0 where q = (a - d - 3 sqrt(n)) / n is at most 1/4, 1 from 1/2 on, and linear
        between. Of the n delivered entries of a tensor, a have the sign of their first moment, and d have the other
        one. Entries that are 0, or have a moment of 0, do not count. Language models have q below 1/4 in nearly all
        steps. 3 sqrt(n) are three standard deviations, so that a tensor with few entries is not steady by chance.
        """
        correct1, correct2 = 1 - betas[0] ** steps, 1 - betas[1] ** steps
        scalars = Scalars(
            steps=steps,
            clock=steps if clock is None else clock,
            rate=learning_rate / correct1,
            correction=correct2,
            per_correction=1 / correct2,
            root=math.sqrt(correct2),
            epsilon=epsilon,
            catch_up=max_catch_up,
            steady=STEADY * max_catch_up,
            walk=max_sqrt_staleness,
            distance=FINE / correct1,
            change=FINE * max_relative_update / learning_rate if learning_rate else 0.0,  # a rate of 0 moves nothing
        )
        on_device = copied_to(torch.tensor(scalars, dtype=torch.float64, device="cpu"), device)
        return cls(on_device, betas, maximize)


def decay(parameters: list[torch.Tensor], keep: float) -> None:
    """Multiply all ``parameters`` by ``keep``, in place."""
    if keep == 1:
        return
    if parameters[0].dtype == torch.float16:
        for parameter in parameters:  # _foreach_mul_ would round the factor to fp16, too, on the CPU
            parameter.mul_(keep)
    else:
        torch._foreach_mul_(parameters, keep)


def decays(
    tau: torch.Tensor,
    powers: torch.Tensor | Sequence[float],
    complements: torch.Tensor | Sequence[float],
    bits: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``(beta^tau, 1 - beta^tau)``, built from the lowest bit of tau upwards.

    ``powers`` and ``complements`` are those of 1, 2, 4, ..., on the device of ``tau`` or as fp32 numbers. ``bits`` is
    how many tau has at most. The host waits for a GPU to know it, unless it is given.
    """
    dtype = powers.dtype if isinstance(powers, torch.Tensor) else torch.float32
    power = torch.ones(tau.shape, dtype=dtype, device=tau.device)
    complement = torch.zeros_like(power)
    if bits is None:
        bits = int(tau.max()).bit_length() if tau.numel() else 0
    for bit in range(bits):
        used = (tau >> bit) & 1 != 0
        # 1 - b^(s+t) = (1 - b^s) + b^s (1 - b^t) adds positive terms only, so nothing cancels.
        complement = torch.where(used, complement + power * complements[bit], complement)
        power = torch.where(used, power * powers[bit], power)
    return power, complement


@lru_cache(maxsize=64)
def beta_tables(betas: tuple[float, float], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return ``[4, POWERS]``: beta1^(2^i), 1 - beta1^(2^i), and the same for beta2, computed in double precision."""
    rows = [row for beta in betas for row in _squares(beta)]
    return torch.tensor(rows, dtype=torch.float64, device="cpu").to(device, dtype)


def _squares(beta: float) -> list[list[float]]:
    if beta == 0:
        return [[0.0] * POWERS, [1.0] * POWERS]
    logs = [math.log(beta) * 2.0**i for i in range(1, POWERS)]
    return [[beta, *map(math.exp, logs)], [1 - beta, *(-math.expm1(log) for log in logs)]]
