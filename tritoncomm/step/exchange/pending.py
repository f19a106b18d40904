"""The five states of one optimizer step, and the step itself: what is known of it, from every .grad to its mean."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Container, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

import torch

from tritoncomm.errors import ConfigurationError, NonFiniteError
from tritoncomm.scheduler.rounds import Pattern
from tritoncomm.scheduler.span import Span
from tritoncomm.scheduler.together import Running, run_together
from tritoncomm.step.exchange.decay import add_decay, with_decay
from tritoncomm.step.exchange.layout import Delivered, check_range, separate
from tritoncomm.step.exchange.vector import VectorExchange, listed
from tritoncomm.step.torch_internals import version_of


class State(Enum):
    """How far a step is. Residuals and methods change between READY and IDLE, when the step is applied."""

    IDLE = "nothing is under way"
    MEANS = "gradients are being exchanged"
    READY = "all ranks have the mean, which may be applied once"
    SUSPENDED = "this rank has the mean, and some ranks may have applied it"
    STOPPED = "an update of the parameters has begun, and is not complete"


# The state that follows each event. An event that a state does not list is an error in this library.
TRANSITIONS = {
    State.IDLE: {"exchange": State.MEANS, "skip": State.READY, "restart": State.IDLE},
    State.MEANS: {
        "confirm": State.READY,
        "reject": State.IDLE,  # a NaN, an overflow or an error on any rank
        "lose": State.SUSPENDED,  # a rank was lost or stopped in the confirmation
        "stop": State.STOPPED,  # a signal came after the confirmation
    },
    # Other ranks apply the step, so a signal before the update stops it like one within the update.
    State.READY: {"update": State.STOPPED, "stop": State.STOPPED, "discard": State.IDLE},
    State.SUSPENDED: {"exchange": State.MEANS, "catch up": State.READY, "restart": State.IDLE},
    # A stopped rank takes part in exchanges, so that the other ranks hear of it and reject them.
    State.STOPPED: {
        "updated": State.IDLE,
        "restart": State.IDLE,
        "exchange": State.STOPPED,
        "reject": State.STOPPED,
        "lose": State.STOPPED,
    },
}


@dataclass
class Part:
    """A vector whose mean is known, and not applied yet.

    ``sent`` is what was exchanged, and ``mean`` contains the decay.
    """

    vector: VectorExchange
    sent: Delivered
    mean: Delivered


@dataclass
class Pending:
    """A step from its beginning until it is applied, rejected or thrown away. An empty one takes its place then.

    It reads gradients by :meth:`read`, exchanges them by :meth:`deliver`, and replaces them by :meth:`write`.

    Attributes:
        scale: Loss scale by which gradients are divided. None without a scaler that has not unscaled them.
        decay: The share of each parameter (by id) that is added to the mean of its gradient.
        shown: Whether somebody may look at ``.grad``, and clip it, before the step is applied. It gets the decay then.
        is_flush: Whether all residuals are delivered, and no gradients.
        parts: The vectors whose means are known. There are none if the step was rejected, or is skipped.
        span: The time of the exchange. None before it has begun.
        error: Why this rank's gradients cannot be exchanged. This rank raises it after the exchange.
        look: Called with the gradients of this rank, flat. None looks at nothing.
        fault: What is NaN or Inf on this rank, for the error. If it is known before the exchange, the step is rejected.
        rejection: Why this rank rejects the step. None if it does not.
        gradients: Every ``.grad`` after the exchange, to detect gradients that are replaced.
        versions: Version of each ``.grad`` when a step began after the exchange, or failed before its update, to detect
            a further backward pass.
        is_taken: Whether the step has been taken, and a hook has failed after it.
    """

    scale: torch.Tensor | None = None
    decay: Mapping[int, float] = field(default_factory=dict)
    shown: bool = False
    is_flush: bool = False
    parts: list[Part] = field(default_factory=list)
    span: Span | None = None
    error: ConfigurationError | None = None
    look: Callable[[Sequence[torch.Tensor]], None] | None = None
    fault: str = ""
    rejection: NonFiniteError | None = None
    gradients: list[torch.Tensor | None] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    is_taken: bool = False

    def read(self, vectors: Sequence[VectorExchange], resting: Collection[int]) -> None:
        """Write what this rank gives into each ``vector.flat``: every ``.grad``, or zeros in a flush.

        If gradients cannot be exchanged, it is NaN, so that all ranks reject the step.

        Args:
            vectors: The flat vectors.
            resting: Ids of parameters whose gradients count as zero.
        """
        factor = self.factor  # the host waits for a GPU once
        try:
            for vector in vectors:
                if self.is_flush:
                    vector.flat.zero_()
                else:
                    vector.read_gradients(factor, resting)
        except ConfigurationError as error:
            self.error = error
        self.fault = str(self.error or self.fault)
        if self.look is not None and self.error is None:
            self.look([vector.flat for vector in vectors])
        for vector in vectors if self.fault else ():
            vector.flat.fill_(math.nan)

    def deliver(self, vectors: Sequence[VectorExchange], waiting: Collection[int], first: Pattern[None] | None) -> None:
        """Compute the mean of each ``vector.flat`` over ranks, of all entries in a flush.

        In ordinary steps of a static form, the host waits for a GPU as often for all vectors as for one. If a rank has
        a NaN or Inf, or a sum overflows, this rank rejects the step.

        Args:
            vectors: The flat vectors.
            waiting: Ids of parameters whose residual takes no part.
            first: A pattern that runs before that of the first vector, if any.

        Raises:
            ExchangeError: A peer was lost, or a wait timed out.
        """
        for vector in vectors:
            add_decay(vector, self.decay, waiting)
        run_together([self._exchanging(each, waiting, first if each is vectors[0] else None) for each in vectors])
        if self.rejection is not None:
            bad = {name: count for vector in vectors for name, count in vector.non_finite().items()}
            self.fault = self.fault or listed(bad)
            return
        self.parts.sort(key=lambda part: vectors.index(part.vector))
        for part in self.parts:
            part.mean = part.vector.delivered(with_decay(part.vector, part.sent.mean, self.decay))
        try:
            check_range([part.mean for part in self.parts])
        except NonFiniteError as error:
            self.rejection = error

    def _exchanging(
        self, vector: VectorExchange, waiting: Collection[int], first: Pattern[None] | None
    ) -> Running[None]:
        """Exchange ``vector``. See :meth:`VectorExchange.beginning`.

        An error that rejects the step may be that of this rank alone. The others then go on to the next vector, and so
        does this rank.
        """
        try:
            mean = yield from vector.beginning(dense=self.is_flush, first=first, waiting=waiting)
        except NonFiniteError as error:
            self.rejection = self.rejection or error
        else:
            sent = vector.delivered(mean)
            self.parts.append(Part(vector, sent, sent))

    def write(self, left: Container[int]) -> None:
        """Replace every ``.grad`` by its mean, except those of parameters whose ids are in ``left``.

        One that is shown has no decay. A single worker may keep its own.
        """
        separate([parameter for part in self.parts for parameter in part.vector.layout.parameters])
        for part in self.parts:
            each = part.sent if self.shown else part.mean
            if each.mean.is_padded:  # only the GPU knows the number of entries of each parameter
                each.layout.scatter_flat(part.vector.write(each.mean), left)
            elif self.is_flush or not part.vector.keeps_gradient:
                each.layout.scatter(each.entries, left)
            elif self.factor != 1.0:
                each.layout.multiply(self.factor)
            if self.is_flush:
                part.mean = part.mean.without_zeros()

    @property
    def factor(self) -> float:
        """By what gradients are multiplied. The host waits for a GPU if there is a loss scale."""
        return 1.0 if self.scale is None else 1.0 / float(self.scale)

    @property
    def is_untouched(self) -> bool:
        """True if nobody could change ``.grad`` since the mean was written to it."""
        return not (self.shown or self.is_flush or self.versions)

    def note_versions(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Note what ``gradients`` hold. They may not change from the beginning of a step to its update."""
        self.versions = self.versions or [*map(version_of, gradients)]

    def are_others(self, gradients: Sequence[torch.Tensor | None]) -> bool:
        """Return True if ``gradients`` are others than those after the exchange."""
        return [*map(id, gradients)] != [*map(id, self.gradients)]

    def are_changed(self, gradients: Sequence[torch.Tensor | None]) -> bool:
        """Return True if ``gradients`` have changed since :meth:`note_versions`."""
        return self.versions != [*map(version_of, gradients)]
