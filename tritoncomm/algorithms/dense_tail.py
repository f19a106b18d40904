"""Send small tensors dense, in fp32 or in 8 bits, and the rest of the vector by any method.

A bias or the scale of a norm layer has only a few values, and every step should update them. They take so few bytes
that a selection is not worthwhile.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

import tritoncomm_kernels as kernels
from tritoncomm.algorithms.base import Algorithm, check, check_at_least
from tritoncomm.algorithms.wrapper import WrapperAlgorithm, WrapperRecipe
from tritoncomm.errors import NonFiniteError
from tritoncomm.primitives.accumulator import Accumulator
from tritoncomm.primitives.quantized_mean import BITS, DENSE_FORMATS, quantized_mean, traffic
from tritoncomm.primitives.sparse_vector import SparseVector
from tritoncomm.primitives.verdict import REJECTED, Verdict
from tritoncomm.scheduler import cost
from tritoncomm.scheduler.cost import Forecast, both
from tritoncomm.scheduler.rounds import AllReduce, Pattern
from tritoncomm_kernels import Padded

_PHASE, _QUANTIZED_PHASE = "small tensors", "small"


@dataclass(frozen=True, kw_only=True)
class DenseTail(WrapperRecipe):
    """Send the last ``tail`` coordinates dense and the others by ``recipe``. Small tensors are placed last.

    ``small="fp32"`` sends them in one all-reduce. ``small="8bit"`` sends them in 8 bits in both directions, see
    :mod:`tritoncomm.primitives.quantized_mean`. They have a residual then, which holds what quantization cuts off.
    Steps in which ``recipe`` delivers every entry are quantized only if it quantizes them, too.
    """

    name: ClassVar[str] = "dense_tail"
    tail: int
    small: str = "fp32"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least(self, 0, "tail", whole=True)
        check(self, "small", self.small in DENSE_FORMATS, "must be 'fp32' or '8bit'")

    def build(self, numel: int) -> DenseTailAlgorithm:
        """See :meth:`Recipe.build`."""
        tail = min(self.tail, numel)
        bits = None if self.small == "fp32" or self.delivers_all() else BITS[self.small]
        return DenseTailAlgorithm(self.recipe.build(numel - tail), tail, bits)


class DenseTailAlgorithm(WrapperAlgorithm):
    """Run the inner algorithm on the head of the vector.

    The tail has no state. It has a residual if it is sent in ``bits`` bits. None stands for fp32.
    """

    def __init__(self, inner: Algorithm, tail: int, bits: int | None) -> None:
        super().__init__(inner.numel + tail)
        self._inner = inner
        self.tail = tail
        self.bits = bits

    @property
    def inner(self) -> Algorithm:
        """The algorithm for the head of the vector."""
        return self._inner

    @property
    def _bits(self) -> int | None:
        """The bits of the tail in the next step. In a dense step of a warm-up, it is quantized if the head is."""
        exact = self.inner.warms_up_dense and not self.inner.quantizes_warmup
        return None if exact else self.bits

    def reduce(self, acc: Accumulator, rank: int, world_size: int) -> Pattern[SparseVector]:
        """See :meth:`Algorithm.reduce`."""
        if not self.tail:
            mean = yield from self.inner.reduce(acc, rank, world_size)
            self.report = self.inner.report
            return mean
        self.inner.prepare(acc, world_size)
        head, small = acc.split(self.inner.numel)
        small_mean, left = yield from self._tail_mean(small.dense(), rank, world_size, acc.verdict)
        dense = self.inner.dense_update(small_mean)  # before the exchange of the head, which ends with the verdict
        if dense is not small_mean:
            self._check(dense, acc.verdict)
        mean = yield from self.inner.reduce(head, rank, world_size)
        small.clear_all()
        if left is not None:
            small.replace_range(0, left)
        acc.absorb(head, small)
        self.report = self.inner.report
        if mean.is_padded:
            return _behind(mean, dense)
        values = torch.cat([mean.values, dense])
        if mean.is_full:
            return SparseVector.full(values)
        places = torch.arange(self.inner.numel, self.numel, dtype=torch.int32, device=values.device)
        return SparseVector(torch.cat([mean.indices, places]), values, self.numel)

    def _tail_mean(
        self, values: torch.Tensor, rank: int, world_size: int, verdict: Verdict | None
    ) -> Pattern[tuple[torch.Tensor, torch.Tensor | None]]:
        """Return the mean over ranks of ``values`` (fp32 ``[tail]``), and the residual if there is one."""
        bits, phase = self._bits, _QUANTIZED_PHASE
        if bits is not None:
            collective = self.inner.is_static
            return (
                yield from quantized_mean(
                    values, rank, world_size, bits=bits, phase=phase, verdict=verdict, collective=collective
                )
            )
        if world_size > 1:
            values = yield AllReduce(_PHASE, values)
        self._check(values, verdict)
        return values / world_size, None

    @staticmethod
    def _check(values: torch.Tensor, verdict: Verdict | None) -> None:
        """Find NaN and Inf in ``values``, which are the same on all ranks."""
        if verdict is not None:
            verdict.check_result(values)
        elif kernels.has_non_finite(values):
            raise NonFiniteError(REJECTED)

    def predicted_traffic(self, world_size: int, *, ordinary: bool = False) -> Forecast:
        """See :meth:`Algorithm.predicted_traffic`."""
        bits = self.bits if ordinary else self._bits
        return self._with_tail(self.inner.predicted_traffic(world_size, ordinary=ordinary), bits, world_size)

    def _with_tail(self, forecast: Forecast, bits: int | None, world_size: int) -> Forecast:
        if not self.tail:
            return forecast
        if bits is not None:
            collective = self.inner.is_static
            quantized = traffic(self.tail, world_size, bits=bits, phase=_QUANTIZED_PHASE, collective=collective)
            return Forecast({**forecast.phases, **quantized})
        return Forecast({**forecast.phases, _PHASE: both(cost.all_reduce(self.tail, cost.WORD, world_size))})


def _behind(head: SparseVector, tail: torch.Tensor) -> SparseVector:
    """Return ``head``, which has padding, with the values ``tail`` (fp32 ``[m]``) behind it. No wait for a GPU."""
    extra = tail.numel()
    places = torch.arange(head.numel, head.numel + extra, dtype=torch.int32, device=tail.device)
    at = (head.indices >= 0).sum() + torch.arange(extra, device=tail.device)
    indices = torch.nn.functional.pad(head.indices, (0, extra), value=-1).index_copy_(0, at, places)
    values = torch.nn.functional.pad(head.values, (0, extra)).index_copy_(0, at, tail)
    return SparseVector.padded(Padded(indices, values), head.numel + extra)
