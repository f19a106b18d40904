"""One flat vector of gradients: its residual, its method with the stages around it, and who sends its messages.

The norm of several of them is limited together.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from tritoncomm.algorithms import Dense, Recipe
from tritoncomm.algorithms.staged import Scale, Staged, StagedAlgorithm
from tritoncomm.primitives.mean_norm import gain_of_mean, norm_of_mean, random_signs, sketch
from tritoncomm.primitives.sparse_vector import SparseVector
from tritoncomm.scheduler.meter import Meter, Ratio
from tritoncomm.scheduler.process_group import ProcessGroupScheduler, is_distributed
from tritoncomm.scheduler.rounds import Pattern, Result
from tritoncomm.scheduler.simulated import SimulatedScheduler
from tritoncomm.scheduler.span import Span
from tritoncomm.scheduler.together import Running
from tritoncomm.step import settings
from tritoncomm.step.exchange.feedback import Ages, ErrorFeedback
from tritoncomm.step.exchange.layout import BucketLayout, Delivered
from tritoncomm.step.recipes import never_delays, with_form
from tritoncomm.step.settings import WrapOptions
from tritoncomm.step.tensors.shards import local, pieces
from tritoncomm.step.torch_internals import is_interruption
from tritoncomm_kernels import has_non_finite
from tritoncomm_kernels.devices import is_asynchronous

_NAMED = 5  # parameters that a text about NaN and Inf names


@dataclass(frozen=True, kw_only=True)
class ExchangeOptions:
    """The settings of a flat vector.

    Attributes:
        recipe: The recipe of the exchange.
        wrap: The options of ``wrap``.
        group: Process group of the exchange. None is the default group.
        dense: Ids of the parameters that travel dense.
        epsilon: The number that the optimizer adds to the root of a second moment, if entries are selected by their
            update. None selects by the gradient.
        is_late: Whether the optimizer has a rule for late gradients.
    """

    recipe: Recipe
    wrap: WrapOptions
    group: dist.ProcessGroup | None = None
    dense: frozenset[int] = frozenset()
    epsilon: float | None = None
    is_late: bool = False


class _Times(NamedTuple):
    """Where the time of one step went: ``meter`` has the waiting, ``whole`` is None if there was no step."""

    meter: Meter
    selecting: list[Span]
    whole: Span | None


class VectorExchange:
    """One rank's exchange of the gradients of ``parameters`` as one flat vector.

    Small tensors are sent dense, at the end of the vector. Without an initialized process group, this is the exchange
    of a single worker. A :class:`~tritoncomm.step.exchange.machine.GradientExchange` decides when the steps of an
    exchange happen. Settings of a vector never change: its successor is a new object, see
    :mod:`tritoncomm.step.saved.state`.

    Args:
        parameters: Parameters whose gradients are exchanged, and what messages call them. Of a DTensor, the local shard
            is exchanged.
        options: Settings of the exchange.

    Attributes:
        layout: Position of each parameter in the flat vector.
        large: The parameters that are not sent dense. They are the first ones of the vector.
        device: Device of the exchange.
        flat: The flat vector, fp32 ``[numel]``.
        feedback: The residual, the ages of its entries, and the algorithm with its state.
        dense_numel: Number of elements that are sent dense.
        scheduler: Runs the exchange. None before :meth:`connect`, and without a process group.
        delays: Whether the recipe delivers entries with a delay.
        is_bare: Whether a single worker delivers every entry. The method's state waits until there are several workers.
        keeps_gradient: Whether the mean is the gradient itself: a single worker has no residual that it could apply.
        meter: Traffic and waiting time of the last step.
        last: Metrics of the last step. ``seconds_apply`` has a meaning only in the sum over all vectors.
    """

    def __init__(self, parameters: Sequence[tuple[torch.Tensor, str]], options: ExchangeOptions) -> None:
        self.options = options
        ordered = sorted(parameters, key=lambda each: id(each[0]) in options.dense)
        self.large = [parameter for parameter, _ in ordered if id(parameter) not in options.dense]
        self.layout = BucketLayout([parameter for parameter, _ in ordered], [name for _, name in ordered])
        self.dense_numel = self.layout.bounds[-1] - self.layout.bounds[len(self.large)]
        self.device = self.layout.device
        self.flat = torch.zeros(self.layout.numel, dtype=torch.float32, device=self.device)
        recipe, group = options.recipe, options.group
        self.rank, self.world_size = (dist.get_rank(group), dist.get_world_size(group)) if is_distributed() else (0, 1)
        self.is_bare = settings.is_alone(group)
        self.delays = not (self.is_bare or never_delays(recipe))
        recipe.check_world_size(self.world_size)  # before process groups are created for it
        self.method = with_form(recipe, self.device, self.layout.numel - self.dense_numel, self.world_size)
        self.scheduler: ProcessGroupScheduler | None = None
        self.feedback = self.new_feedback()
        self._without_residual: ErrorFeedback | None = None
        self.keeps_gradient = False
        self._signs: torch.Tensor | None = None
        self.gain: torch.Tensor | None = None
        self.meter = Meter()
        self.last: dict[str, float] = {}
        self._last_mean: SparseVector | None = None
        self._times = _Times(self.meter, [], None)
        self.measure(None, None)

    def connect(self) -> None:
        """Make the scheduler, if there is a process group. Its ranks call this together, and may create others."""
        if not is_distributed():
            return
        recipe, wrap = self.options.recipe, self.options.wrap
        shapes = [(name, tuple(p.shape)) for p, name in self.layout.named]
        stamp = f"{recipe.name} {self.method!r} {self.dense_numel} values dense in {wrap.small} {shapes}"
        subgroups = recipe.subgroups(self.world_size)
        self.scheduler = ProcessGroupScheduler(
            self.options.group, wrap.timeout, self.device, stamp, subgroups, is_interruption=is_interruption
        )

    def look_for_residual(self, rests: Collection[int]) -> bool:
        """Set and return :attr:`keeps_gradient`. The residual of parameters in ``rests`` (ids) waits."""
        if self.is_bare and self._without_residual is not self.feedback:
            residual = self.feedback.residual
            if not residual.any():
                self._without_residual = self.feedback  # from now on, it delivers every entry
            elif rests:
                residual = residual.clone()
                for own in self._slices(rests):
                    residual[own].zero_()
            self.keeps_gradient = not residual.any()
        return self.keeps_gradient

    @property
    def scale(self) -> Scale | None:
        """The scale by which entries are compared. None if they are compared by their gradient."""
        algorithm = self.feedback.algorithm
        assert isinstance(algorithm, StagedAlgorithm)
        return algorithm.scale

    def new_feedback(self) -> ErrorFeedback:
        """Return an error feedback without residual for this vector."""
        options = self.options
        whole = Staged(
            recipe=self.method,
            tail=self.dense_numel,
            small=options.wrap.small,
            shapes=None if options.epsilon is None else tuple(tuple(local(each).shape) for each in self.large),
            epsilon=options.epsilon or 0.0,
        )
        feedback = ErrorFeedback(whole.build(self.layout.numel, self.layout.bounds), self.device)
        if options.is_late and not self.is_bare:  # a single worker takes the optimizer's own steps
            feedback.ages = Ages(self.layout.parameters, self.layout.bounds)
        return feedback

    def commit(self, left: Collection[int]) -> None:
        """Let residual and method be those after the step.

        ``left`` are ids of the parameters that are left alone. Their residuals and moments are those before the step.
        """
        scale = self.scale
        before = None if scale is None else scale.moment
        self.feedback.commit(self._slices(left))
        if scale is not None and before is not None and left:
            scale.keep(before, [place for place, parameter in enumerate(self.large) if id(parameter) in left])

    def _slices(self, parameters: Collection[int]) -> list[slice]:
        """Return the coordinates of the ``parameters``, given by their ids."""
        if not parameters:
            return []
        pairs = zip(self.layout.parameters, pairwise(self.layout.bounds), strict=True)
        return [slice(start, stop) for parameter, (start, stop) in pairs if id(parameter) in parameters]

    def sketch(self, place: str | None = None) -> torch.Tensor:
        """Return a sketch of :attr:`flat`, see :mod:`tritoncomm.primitives.mean_norm`.

        Sketches of several vectors may be added up if each has a ``place`` of its own, which is the same on all ranks
        with the same shard, and always the same: signs are those of it and of the names of the parameters.
        """
        if self._signs is None:
            seed = () if place is None else (zlib.crc32(f"{place} {self.layout.labels}".encode()),)
            self._signs = random_signs(self.flat.numel(), self.flat.device, *seed)
        return sketch(self.flat, self._signs)

    def beginning(self, *, dense: bool, first: Pattern[Any] | None, waiting: Collection[int]) -> Running[SparseVector]:
        """Return a generator that exchanges :attr:`flat`, which is only read, for :func:`run_together`.

        It returns the mean. Commit or roll back :attr:`feedback` next. It rolls back itself if the exchange fails.
        ``dense`` delivers all entries, whatever the recipe. ``first`` is a pattern that runs before that of the method.
        ``waiting`` are ids of parameters whose residual takes no part.
        """
        self.gain, delivers_all = None, dense or self.is_bare
        algorithm = Dense().build(self.layout.numel) if delivers_all else None
        pattern = self.feedback.begin(self.flat, self.rank, self.world_size, algorithm, self._slices(waiting))
        if self.options.wrap.matches_length and not delivers_all:
            pattern = _after(self._measuring(), pattern)
        if first is not None:
            pattern = _after(first, pattern)
        try:
            if self.scheduler is None:
                return SimulatedScheduler(1).run([pattern])[0]
            try:
                return (yield from self.scheduler.running(pattern))
            finally:
                self.meter = self.scheduler.meter
        except BaseException:
            self.feedback.rollback()
            raise

    def _measuring(self) -> Pattern[None]:
        """Find out how much longer the vectors of the ranks are than their mean."""
        self.gain = yield from gain_of_mean(self.flat, self.sketch(), self.world_size)

    def run(self, pattern: Pattern[Result]) -> Result:
        """Run a pattern that belongs to the step that was exchanged last, by several ranks, and count its traffic."""
        assert self.scheduler is not None
        result = self.scheduler.run(pattern, new_step=False)
        self.meter.add(self.scheduler.meter)
        return result

    @property
    def residual_norm(self) -> float:
        """The 2-norm of this rank's residual."""
        norm = float(self.feedback.residual.norm())
        # The squares may overflow in fp32.
        return norm if math.isfinite(norm) else float(self.feedback.residual.double().norm())

    def read_gradients(self, factor: float, resting: Collection[int]) -> None:
        """Copy every ``.grad``, times ``factor``, into :attr:`flat`.

        Gradients of parameters with an id in ``resting`` count as zero.

        Raises:
            ConfigurationError: A gradient is not dense.
        """
        self.layout.read_gradients(self.flat, sparse=self.keeps_gradient)
        for own in self._slices(resting):
            self.flat[own].zero_()
        if factor != 1.0:
            self.flat.mul_(factor)

    def delivered(self, mean: SparseVector) -> Delivered:
        """Return ``mean`` with the place and the age of each of its entries."""
        return Delivered(mean, self.layout, self.feedback.ages)

    def write(self, mean: SparseVector) -> torch.Tensor:
        """Write ``mean`` into :attr:`flat` and return it."""
        return mean.write_to(self.flat)

    def residuals_by_parameter(self) -> dict[torch.Tensor, torch.Tensor]:
        """Return flat views of this rank's residual by parameter."""
        return dict(zip(self.layout.parameters, self.layout.parts(self.feedback.residual), strict=True))

    def non_finite(self) -> dict[str, int]:
        """Return the number of NaN or Inf values in :attr:`flat` of each parameter that has any, by name."""
        if not has_non_finite(self.flat):
            return {}
        parts = zip(self.layout.labels, self.layout.parts(self.flat), strict=True)
        counts = {name: int((~part.isfinite()).sum()) for name, part in parts}
        return {name: count for name, count in counts.items() if count}

    def density_delivered(self) -> float:
        """Return the share of coordinates that the last step delivered, 0.0 if it was rejected."""
        return self._last_mean.density if self._last_mean is not None else 0.0

    def measure(self, mean: SparseVector | None, span: Span | None) -> None:
        """Record the metrics of a step with the time ``span``. ``mean`` is None if the step was rejected.

        On a GPU, the times are those of the step before: the GPU may still be at work on this one.
        """
        self._last_mean = mean  # its density is computed when it is asked for: a GPU has to count its entries
        meter, accumulator = self.meter, self.feedback.accumulator
        times = _Times(meter, accumulator.spans if accumulator else [], span)
        if is_asynchronous(self.device):
            self._times, times = times, self._times
        times.meter.settle()
        selecting, waited, sent = math.fsum([each.seconds for each in times.selecting]), times.meter.waited, meter.sent
        whole = times.whole.seconds if times.whole is not None else 0.0
        self.last = {
            "density": Ratio(self.options.recipe.density),
            "selected": float(accumulator.selected) if accumulator else 0.0,
            "bytes_sent": float(sent.bytes),
            "bytes_received": float(meter.received.bytes),
            "messages_sent": float(sent.messages),
            "seconds_select": selecting,
            "seconds_exchange": waited,
            "seconds_apply": whole - selecting - waited,  # the first of several vectors has their whole time
            **{f"seconds_{phase.replace(' ', '_')}": seconds for phase, seconds in times.meter.seconds.items()},
            **self.feedback.algorithm.report,
        }


def clipped(vectors: Sequence[VectorExchange], limit: float, shard: int, shards: int) -> Pattern[torch.Tensor]:
    """Scale each ``vector.flat``, so that the norm of the mean of all of them is at most ``limit``.

    The norm is an estimate, equal on all ranks (:mod:`tritoncomm.primitives.mean_norm`). It is returned, fp64 ``[]``.
    The pattern reads nothing on the host, so :func:`~tritoncomm.scheduler.together.run_together` does not begin with
    another vector before all are scaled.

    Tensor parallelism keeps copies of some parameters, which are in vectors of their own. They count once: the sketch
    of each of n copies is divided by the root of n.

    Args:
        vectors: All flat vectors of this rank.
        limit: The largest norm.
        shard: Number of this rank's shard of the model, equal on the ranks that hold the same shard.
        shards: Number of shards.
    """
    is_whole = len(vectors) == 1 and shard == 0
    total, *others = [
        vector.sketch(None if is_whole else f"{shard}, vector {number}") / _copies(vector, shards) ** 0.5
        for number, vector in enumerate(vectors)
    ]
    for other in others:
        total += other
    norm = yield from norm_of_mean(total, vectors[0].world_size)
    # A NaN or Inf stays where it is, so that the error names its rank and parameter.
    factor = torch.where(norm.isfinite() & (norm > limit), limit / norm, 1.0).float()
    for vector in vectors:
        vector.flat.mul_(factor)
    return norm


def _copies(vector: VectorExchange, shards: int) -> int:
    """Return the number of ranks with other shards of the model, this one included, that hold copies of ``vector``."""
    return shards // pieces(vector.layout.parameters[0]) if vector.layout.parameters else 1


def _after(first: Pattern[Any], second: Pattern[Result]) -> Pattern[Result]:
    yield from first
    return (yield from second)


def listed(bad: Mapping[str, int]) -> str:
    """Return ``bad``, a number of values by parameter name, as text. Of many parameters, it names the first."""
    named = [f"{name} ({count} values)" for name, count in bad.items()]
    others = len(named) - _NAMED
    return ", ".join(named[:_NAMED]) + (f" and {others} other parameters" if others > 0 else "")
