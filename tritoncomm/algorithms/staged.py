"""What is around the method of a flat vector: small tensors travel dense, and entries are compared by their update.

* A bias or the scale of a norm layer has only a few values, and every step should update them. They take so few bytes
  that a selection is not worthwhile. They are the tail of the vector.
* Adam moves all coordinates by similar amounts, whether their gradients are small or large. A method that compares
  gradients keeps selecting rows and tensors with large gradients, and the others wait. The method therefore sees every
  coordinate of the head divided by the root of its second moment. The moment is that of the delivered mean. All ranks
  have it, so nothing is sent for it. The scale is rounded to powers of two. Division and multiplication by it are
  therefore exact for values above 1e-32.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from tritoncomm.algorithms.base import Algorithm, Bounds, check, check_at_least, check_number
from tritoncomm.algorithms.warmup import warmup_of
from tritoncomm.algorithms.wrapper import WrapperAlgorithm, WrapperRecipe
from tritoncomm.errors import ConfigurationError
from tritoncomm.primitives.accumulator import Accumulator
from tritoncomm.primitives.carried import Carriers, carried, with_carried
from tritoncomm.primitives.packing import quotients
from tritoncomm.primitives.quantized_mean import QuantizedMean
from tritoncomm.primitives.second_moment import FactoredSecondMoment, Moment
from tritoncomm.primitives.sparse_vector import SparseVector
from tritoncomm.primitives.verdict import check_same
from tritoncomm.scheduler import cost
from tritoncomm.scheduler.cost import Forecast, both
from tritoncomm.scheduler.rounds import AllReduce, Pattern, read
from tritoncomm_kernels import Entries
from tritoncomm_kernels.formats import FORMATS, SMALL_FORMATS, Format

_PHASE, _QUANTIZED_PHASE = "small tensors", "small"
# Added to the second moment, in units of the mean of its tensor. It limits the gain of a row without gradient to 32.
_FLOOR = 2.0**-10
# A tensor of which nothing was delivered yet may have tiny gradients. With each renewal, its root is taken to be less
# by this factor.
_LOOK_DEEPER = 2.0**-3
# Thresholds are discarded if the scale changes at more than this share of the coordinates.
_NOTABLE = 0.1


@dataclass(frozen=True, kw_only=True)
class Staged(WrapperRecipe):
    """Send the last ``tail`` coordinates dense, and the others by ``recipe``, which may compare them by their update.

    ``small="fp32"`` sends the tail in one all-reduce. ``small="8bit"`` sends it in 8 bits in both directions, see
    :mod:`tritoncomm.primitives.quantized_mean`. Other formats must have a level for zero, too. It has a residual then,
    which holds what quantization cuts off. Steps in which ``recipe`` delivers every entry are quantized only if it
    quantizes them, too.

    ``shapes`` are the shapes of the tensors before the tail, in order. ``recipe`` is then applied to a vector that is
    divided by the root of its second moment, which decays by ``decay`` per step. Every ``renew_every`` steps a new
    scale is computed from it. Until the first time the scale is 1. Residuals stay in gradient units. The scale takes as
    much memory as the vector, and applying it takes two more passes over the vector. None compares by the gradient.
    Below ``epsilon``, the root for a tensor does not fall: Adam does not enlarge such gradients either.
    """

    name: ClassVar[str] = "staged"
    tail: int = 0
    small: str = "fp32"
    shapes: tuple[tuple[int, ...], ...] | None = None
    decay: float = 0.99
    renew_every: int = 20
    epsilon: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check(self, "recipe", not isinstance(self.recipe, Staged), "must not have stages already")
        check_at_least(self, 0, "tail", whole=True)
        check(self, "small", self.small in SMALL_FORMATS, f"must be one of {', '.join(SMALL_FORMATS)}")
        check_number(self, "decay")
        check(self, "decay", 0 <= self.decay < 1, "must be in [0, 1)")
        check_at_least(self, 1, "renew_every", whole=True)
        check_at_least(self, 0, "epsilon")
        compares = self.shapes is None or self.recipe.compares_entries()
        check(self, "recipe", compares, "must be a method that compares entries with each other, or leave out shapes")

    def build(self, numel: int, bounds: Bounds = ()) -> StagedAlgorithm:
        """Return the method for the coordinates before the tail, with its stages."""
        tail = min(self.tail, numel)
        scale = None
        if self.shapes is not None:
            matrices = FactoredSecondMoment(self.shapes)
            fix = f"have {matrices.numel} elements, but the vector has {numel - tail}: give the shapes of all tensors"
            check(self, "shapes", matrices.numel == numel - tail, fix)
            if matrices.numel:
                scale = Scale(matrices, self.decay, self.renew_every, self.epsilon)
        fmt = None if self.small == "fp32" or self.always_dense() else FORMATS[self.small]
        head = numel - tail
        inside = [*(bound for bound in bounds if bound < head), head] if bounds else ()
        return StagedAlgorithm(self.recipe.build(head, inside), tail, fmt, scale)


class StagedAlgorithm(WrapperAlgorithm):
    """Run ``inner`` on the scaled head of the vector, and send its tail dense.

    The tail has no state. It has a residual if it is rounded to ``fmt``. None stands for fp32.
    """

    def __init__(self, inner: Algorithm, tail: int, fmt: Format | None, scale: Scale | None) -> None:
        super().__init__(inner.numel + tail)
        self.inner = inner
        self._warmup = warmup_of(inner)
        self.tail = tail
        self.fmt = fmt
        self.scale = scale

    @property
    def state(self) -> tuple[Moment | None, Any]:
        """The moment, and the state of the inner algorithm."""
        return None if self.scale is None else self.scale.moment, self.inner.state

    @state.setter
    def state(self, state: tuple[Moment | None, Any]) -> None:
        moment, self.inner.state = state
        if self.scale is not None and moment is not None:
            self.scale.moment = moment

    def reduce(self, acc: Accumulator, rank: int, world_size: int) -> Pattern[SparseVector]:
        """Exchange the head, and the tail in its messages where it has such, else before it."""
        if not self.tail:
            return (yield from self._reduce_head(acc, rank, world_size))
        self.inner.prepare(acc, world_size)
        head, small = acc.split(self.inner.numel)
        # Without a head, its verdict would be read before the tail is there.
        carriers = self.inner.carriers(world_size) if self.inner.numel else Carriers()
        tail = self._reduce_tail(small, rank, world_size, carriers.width)
        head_pattern = self._reduce_head(head, rank, world_size)
        mean, (dense, left) = yield from carried(head_pattern, tail, _riding(carriers))
        small.clear_all()
        if left is not None:
            small.replace_range(0, left)
        acc.absorb(head, small)
        if mean.is_padded:
            return _behind(mean, dense)
        values = torch.cat([mean.values, dense])
        if mean.is_full:
            return SparseVector.full(values)
        places = torch.arange(self.inner.numel, self.numel, dtype=torch.int32, device=values.device)
        return SparseVector(torch.cat([mean.indices, places]), values, self.numel)

    def _reduce_tail(
        self, small: Accumulator, rank: int, world_size: int, width: int
    ) -> Pattern[tuple[torch.Tensor, torch.Tensor | None]]:
        """Return the update of the tail, and its residual if there is one, before the head's exchange has ended."""
        values, verdict, fmt = small.dense(), small.verdict, self._fmt
        left: torch.Tensor | None = None
        if fmt is not None:
            rounded = QuantizedMean(fmt, _QUANTIZED_PHASE, self.inner.is_static, width)
            mean, left = yield from rounded.of(values, rank, world_size, verdict)
        else:
            if world_size > 1:
                values = yield AllReduce(_PHASE, values)
            check_same(values, verdict)
            mean = quotients(values, world_size)
        dense = self.inner.dense_update(mean)
        if dense is not mean:
            check_same(dense, verdict)
        return dense, left

    def _reduce_head(self, acc: Accumulator, rank: int, world_size: int) -> Pattern[SparseVector]:
        divisors = None if self.scale is None else self.scale.divisors(acc.device)
        if divisors is None:
            mean = yield from self.inner.reduce(acc, rank, world_size)
        else:
            scaled = acc.scaled(divisors)
            mean = yield from self.inner.reduce(scaled, rank, world_size)
            acc.unscale_from(scaled, divisors)
            mean = mean.with_values(mean.values * mean.read_from(divisors))
        self.report = self.inner.report
        if self.scale is not None and (yield from self.scale.follow(mean, divisors, acc.device)):
            self.inner.invalidate_thresholds()
        return mean

    @property
    def _fmt(self) -> Format | None:
        """The format of the tail in the next step. In a dense step of a warm-up, it is quantized if the head is."""
        warmup = self._warmup
        return None if warmup is not None and warmup.is_dense and not warmup.quantizes else self.fmt

    def predicted_traffic(self, world_size: int, *, ordinary: bool = False) -> Forecast:
        """See :meth:`Algorithm.predicted_traffic`. The tail is added to the traffic of the inner method."""
        forecast = self.inner.predicted_traffic(world_size, ordinary=ordinary)
        fmt = self.fmt if ordinary else self._fmt
        if not self.tail:
            return forecast
        if fmt is None:
            return Forecast({**forecast.phases, _PHASE: both(cost.all_reduce(self.tail, cost.WORD, world_size))})
        collective = self.inner.is_static
        quantized = QuantizedMean(fmt, _QUANTIZED_PHASE, collective).traffic(self.tail, world_size)
        carriers = self.inner.carriers(world_size, ordinary=ordinary)
        return with_carried(forecast, quantized, _riding(carriers), framed=not collective)

    def migrate(self, states: Sequence[Mapping[str, Any]], share: float, common: Mapping[str, Any]) -> None:
        """Copy the moment, which is that of the mean, and what the method copies."""
        if self.scale is not None:
            moment = _moment(common)
            if moment is not None and moment.fits(self.scale.matrices):
                self.scale.moment = moment
        self.inner.migrate([state["inner"] for state in states], share, common["inner"])

    def common_state(self) -> dict[str, Any]:
        """Return the digest of the moment, and what the method has in common."""
        moment = None if self.scale is None else self.scale.moment.digest()
        return {"moment": moment, "inner": self.inner.common_state()}

    def state_dict(self) -> dict[str, Any]:
        """Return the state. ``"moment"`` is None without a scale."""
        moment = None if self.scale is None else dict(vars(self.scale.moment))
        return {"moment": moment, "inner": self.inner.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state, with or without a moment.

        Without one, a new moment begins. A moment that is not needed is ignored. Thresholds of the method, which belong
        to its units, are then determined again.
        """
        moment = _moment(state)
        if self.scale is not None and moment is not None and not moment.fits(self.scale.matrices):
            matrices = self.scale.matrices
            raise ConfigurationError(
                f"loaded second moment has {len(moment.rows)} rows and {len(moment.columns)} columns, expected "
                f"{sum(matrices.rows)} and {sum(matrices.columns)}: use the parameters and settings with which it was "
                "saved"
            )
        self.inner.load_state_dict(state["inner"])
        if self.scale is not None:
            self.scale.moment = moment or Moment.of(self.scale.matrices)
        elif moment is not None:
            self.inner.invalidate_thresholds()


class Scale:
    """The divisors of the coordinates, and the second moment that determines them.

    Attributes:
        matrices: The tensors of the vector.
        moment: The second moment. It is replaced, never modified.
    """

    def __init__(self, matrices: FactoredSecondMoment, decay: float, renew_every: int, epsilon: float) -> None:
        self.matrices = matrices
        self._epsilon = epsilon
        self._decay = decay
        self._renew_every = renew_every
        self.moment = Moment.of(matrices)
        # Cache: a value of moment.used and the scale computed from it.
        self._cached: tuple[object, torch.Tensor | None] = None, None

    def divisors(self, device: torch.device) -> torch.Tensor | None:
        """Return the divisors of the coordinates (fp32 ``[numel]``, powers of two), or None while all are equal."""
        used = self.moment.used
        if used is not self._cached[0]:
            scale = None if used is None else self._root(device)
            differs = scale is not None and bool(scale.min() < scale.max())
            self._cached = used, scale if differs else None
        return self._cached[1]

    def follow(self, mean: SparseVector, before: torch.Tensor | None, device: torch.device) -> Pattern[bool]:
        """Add the ``mean`` that was delivered to the moment. Return True if thresholds no longer apply.

        They were found for the divisors ``before``.
        """
        used, self.moment = self.moment.used, self._after(mean)
        return self.moment.used is not used and (yield from self._renew(before, device))

    def _renew(self, before: torch.Tensor | None, device: torch.device) -> Pattern[bool]:
        """Compute the scale again, and return True if thresholds for the one ``before`` no longer apply."""
        assert self.moment.used is not None
        after = self._root(device, (yield from read("moment", self.moment.used[0])))
        changed = torch.count_nonzero(after != (1.0 if before is None else before))
        differs, count = yield from read("moment", torch.stack([(after.min() < after.max()).long(), changed]))
        self._cached = self.moment.used, after if differs else None
        if before is None or not differs:
            return before is not None or bool(differs)
        return bool(count > _NOTABLE * len(after))

    def _root(self, device: torch.device, sums: list[float] | None = None) -> torch.Tensor:
        """Return the scale. ``sums`` is the content of the rows of the moment, if it is known."""
        assert self.moment.used is not None
        rows, columns = self.moment.used
        unknown = _LOOK_DEEPER ** (2 * (self.moment.steps // self._renew_every - 1))
        smallest = self._epsilon**2
        return self.matrices.root(rows.to(device), columns.to(device), _FLOOR, sums, smallest, unknown)

    def _after(self, mean: SparseVector) -> Moment:
        """Return the moment after a step that delivered ``mean``."""
        before, decay = self.moment, self._decay
        rows, columns = (
            decay * held.to(new.device) + (1 - decay) * new
            for held, new in zip((before.rows, before.columns), self.matrices.sums(mean), strict=True)
        )
        steps = before.steps + 1
        return Moment(steps, rows, columns, (rows, columns) if steps % self._renew_every == 0 else before.used)

    def keep(self, before: Moment, tensors: Collection[int]) -> None:
        """Let the moment of ``tensors``, given by their positions, be that of ``before``: they took no step."""

        def mixed(held: torch.Tensor, now: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
            pairs = zip(torch.split(held.to(now.device), list(lengths)), torch.split(now, list(lengths)), strict=True)
            return torch.cat([then if i in tensors else new for i, (then, new) in enumerate(pairs)])

        moment, matrices = self.moment, self.matrices
        rows = mixed(before.rows, moment.rows, matrices.rows)
        columns = mixed(before.columns, moment.columns, matrices.columns)
        self.moment = Moment(moment.steps, rows, columns, moment.used)

    def adopt_tensors(self, sources: Sequence[tuple[Scale, int] | None]) -> None:
        """Copy the moment of each tensor of this vector from a tensor of another vector.

        Args:
            sources: For each tensor, a scale and the position of the same tensor in its vector. None if the tensor is
                new, then its moment is zero.
        """
        known = [source[0].moment for source in sources if source is not None]
        if not known:
            return
        # A new tensor takes what it has here: zeros.
        parts = [(source or (self, place)) for place, source in enumerate(sources)]
        pieces = zip(*(scale._of_tensor(place) for scale, place in parts), strict=True)  # noqa: SLF001 - of the same class
        rows, columns, *used = (torch.cat([each.to(known[0].rows.device) for each in part]) for part in pieces)
        is_used = any(moment.used is not None for moment in known)
        self.moment = Moment(known[0].steps, rows, columns, (used[0], used[1]) if is_used else None)

    def _of_tensor(self, place: int) -> list[torch.Tensor]:
        """Return rows and columns of the tensor at ``place``, and those of the current scale, which may be zeros."""
        moment, lengths = self.moment, (self.matrices.rows, self.matrices.columns)
        now = moment.rows, moment.columns
        used = (torch.zeros_like(each) for each in now) if moment.used is None else moment.used
        return [torch.split(held, own)[place] for held, own in zip((*now, *used), lengths * 2, strict=True)]


def _riding(carriers: Carriers) -> dict[str, str]:
    """Return the phases of the rounded tail, and those of the head in which they travel."""
    return {f"{_QUANTIZED_PHASE}-{leg}": phase for leg, phase in carriers.phases.items()}


def _moment(state: Mapping[str, Any]) -> Moment | None:
    content = state["moment"]
    if content is None:
        return None
    used = None if content["used"] is None else tuple(content["used"])
    return Moment(int(content["steps"]), content["rows"], content["columns"], used)


def _behind(head: SparseVector, tail: torch.Tensor) -> SparseVector:
    """Return ``head``, which has padding, with the values ``tail`` (fp32 ``[m]``) behind it. No wait for a GPU."""
    extra = tail.numel()
    places = torch.arange(head.numel, head.numel + extra, dtype=torch.int32, device=tail.device)
    at = (head.indices >= 0).sum() + torch.arange(extra, device=tail.device)
    indices = torch.nn.functional.pad(head.indices, (0, extra), value=-1).index_copy_(0, at, places)
    values = torch.nn.functional.pad(head.values, (0, extra)).index_copy_(0, at, tail)
    return SparseVector.padded(Entries(indices, values), head.numel + extra)
