"""Quantization of every value to 1 to 8 bits, in both directions, with error feedback.

Nothing is selected, and no indices travel. Sending the sign of each entry with error feedback follows F. Seide et al.,
"1-Bit Stochastic Gradient Descent and Application to Data-Parallel Distributed Training of Speech DNNs", 2014.
Compressing in both directions, with an error at the worker and one at the server, follows H. Tang et al.,
"DoubleSqueeze", ICML 2019.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import ClassVar

from tritoncomm.algorithms.base import Algorithm, Bounds, Recipe, Stateless, StaticRecipe, check
from tritoncomm.primitives.accumulator import Accumulator
from tritoncomm.primitives.carried import Carriers
from tritoncomm.primitives.collectives import dense_exchange
from tritoncomm.primitives.quantized_mean import QuantizedMean
from tritoncomm.primitives.sparse_vector import SparseVector
from tritoncomm.scheduler import cost
from tritoncomm.scheduler.cost import Forecast
from tritoncomm.scheduler.rounds import Pattern
from tritoncomm_kernels.formats import DENSE_FORMATS, FORMATS, Format

_PHASE = "quantized"


@dataclass(frozen=True, kw_only=True)
class Quantized(StaticRecipe):
    """Deliver every entry in every step, in few bits per value.

    The vector is cut into one part per rank. Each rank sends every part to its owner. The owner adds them in the order
    of ranks, and sends the mean to all. ``values`` is the format in both directions, ``"1bit"`` to ``"8bit"``, or
    another one with levels of :data:`tritoncomm_kernels.formats.FORMATS`. 64 values share a scale of 16 bits. With 1
    bit, a value is sent as its sign times the mean magnitude of these 64. The library's formats of more bits have
    levels of equal distance up to the largest magnitude, and only 8 bits have one for zero, see
    :mod:`tritoncomm_kernels.dense_bits`. What rounding cuts off stays in the residual of the rank that rounds. A
    magnitude of 2**104 or more, with 8 bits 2**112, rejects the step. With ``"fp32"``, nothing is rounded, and the
    exchange is a dense all-reduce.

    All messages have a known length, and the host never waits for a GPU to learn one. ``static`` says whether they
    travel by an all-to-all and an all-gather instead of messages between two ranks. ``density`` must be 1, because
    every entry is delivered. It exists because all recipes have this field.
    """

    name: ClassVar[str] = "quantized"
    averages_when_dense: ClassVar[bool] = True
    has_density: ClassVar[bool] = False
    density: float = dataclasses.field(default=1.0, repr=False)
    values: str = "1bit"

    def __post_init__(self) -> None:
        super().__post_init__()
        fix = "must be 1, because quantized delivers every entry: leave out density, and choose the bits by values"
        check(self, "density", self.density == 1, fix)
        known = isinstance(self.values, str) and self.values in DENSE_FORMATS
        check(self, "values", known, f"must be one of {', '.join(DENSE_FORMATS)}")

    @property
    def rounded_to(self) -> Format | None:
        """The format that values are rounded to. None stands for fp32."""
        return FORMATS[self.values] if FORMATS[self.values].levels else None

    def compares_entries(self) -> bool:
        """See :meth:`Recipe.compares_entries`. All entries are delivered."""
        return False

    def delivers_all(self) -> bool:
        return True

    def always_dense(self) -> bool:
        return self.rounded_to is None

    def dense_form(self) -> Recipe:
        """See :meth:`Recipe.dense_form`. It does not round."""
        return dataclasses.replace(self, values="fp32")

    def build(self, numel: int, bounds: Bounds = ()) -> QuantizedAlgorithm:
        return QuantizedAlgorithm(self, numel)


class QuantizedAlgorithm(Algorithm):
    """A reduce-scatter and an all-gather of rounded values. All that is kept between steps is the residual."""

    has_shared_verdict = True
    carried_by = Carriers({leg: f"{_PHASE}-{leg}" for leg in ("scatter", "gather")})

    def __init__(self, recipe: Quantized, numel: int) -> None:
        super().__init__(numel)
        self.recipe, self.static = recipe, recipe.static is True
        self.mean = QuantizedMean(FORMATS[recipe.values], _PHASE, self.static)
        self.state = Stateless()

    @property
    def goes_dense(self) -> bool:
        return self.recipe.rounded_to is None

    def reduce(self, acc: Accumulator, rank: int, world_size: int) -> Pattern[SparseVector]:
        return dense_exchange(acc, world_size) if self.goes_dense else self.mean.deliver_all(acc, rank, world_size)

    def predicted_traffic(self, world_size: int, *, ordinary: bool = False) -> Forecast:
        """See :meth:`Algorithm.predicted_traffic`. It is exact: 2n(P-1)/P values of ``bits + 1/4`` bits."""
        if self.goes_dense:
            return cost.dense(self.numel, world_size)
        return Forecast(self.mean.traffic(self.numel, world_size))
