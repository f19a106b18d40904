"""The five states of one optimizer step, and what there is of it from its beginning to its end."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

import torch

from tritoncomm.errors import NonFiniteError
from tritoncomm.primitives.sparse_vector import SparseVector
from tritoncomm.scheduler.rounds import Pattern
from tritoncomm.scheduler.span import Span
from tritoncomm.scheduler.together import Running, run_together
from tritoncomm.step.exchange.decay import add_decay, with_decay
from tritoncomm.step.exchange.layout import Delivered, check_range
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
    State.SUSPENDED: {"exchange": State.MEANS, "catch up": State.READY, "discard": State.IDLE},
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
    """A vector whose mean is known, and not applied yet, and the time of its exchange.

    ``sent`` is what was exchanged, and ``mean`` contains the decay. Of vectors that are exchanged together, the first
    has the time of all.
    """

    vector: VectorExchange
    sent: SparseVector
    mean: SparseVector
    span: Span | None = None


@dataclass
class Pending:
    """A step from its beginning until it is applied, rejected or thrown away. An empty one takes its place then.

    Attributes:
        scale: Loss scale by which gradients are divided. None without a scaler that has not unscaled them.
        decay: The share of each parameter (by id) that is added to the mean of its gradient.
        hides_decay: Whether ``.grad`` gets this share when the step is applied, because somebody clips it before.
        is_flush: Whether all residuals are delivered.
        parts: The vectors whose means are known.
        fault: What is NaN or Inf on this rank, for the error. If it is known before the exchange, the step is rejected.
        rejection: Why this rank rejects the step. None if it does not.
        delivered: The means of a step that is READY. None if it was skipped, and in other states.
        gradients: Every ``.grad`` after the exchange, to detect gradients that are replaced.
        versions: Version of each ``.grad`` when a step began after the exchange, or failed before its update, to detect
            a further backward pass.
        is_taken: Whether the step has been taken, and a hook has failed after it.
    """

    scale: torch.Tensor | None = None
    decay: Mapping[int, float] = field(default_factory=dict)
    hides_decay: bool = False
    is_flush: bool = False
    parts: list[Part] = field(default_factory=list)
    fault: str = ""
    rejection: NonFiniteError | None = None
    delivered: list[Delivered] | None = None
    gradients: list[torch.Tensor | None] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    is_taken: bool = False

    def note_versions(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Note what ``gradients`` hold. They may not change from the beginning of a step to its update."""
        self.versions = self.versions or [*map(version_of, gradients)]

    def are_others(self, gradients: Sequence[torch.Tensor | None]) -> bool:
        """Return True if ``gradients`` are others than those after the exchange."""
        return [*map(id, gradients)] != [*map(id, self.gradients)]

    def are_changed(self, gradients: Sequence[torch.Tensor | None]) -> bool:
        """Return True if ``gradients`` have changed since :meth:`note_versions`."""
        return self.versions != [*map(version_of, gradients)]

    def deliver(
        self,
        vectors: Sequence[VectorExchange],
        clipping: Pattern[None] | None,
        waiting: Collection[int],
        span: Span,
    ) -> None:
        """Compute the mean of each ``vector.flat`` over ranks, or note why this rank rejects the step.

        Args:
            vectors: The flat vectors.
            clipping: A pattern that runs before they are exchanged, if any.
            waiting: Ids of parameters whose residual takes no part.
            span: The time of the exchange, which ends here.
        """
        for vector in vectors:
            add_decay(vector, self.decay, waiting)
        run_together([self._exchanging(each, clipping if each is vectors[0] else None, waiting) for each in vectors])
        if self.rejection is None:
            self.parts.sort(key=lambda part: vectors.index(part.vector))
            for part in self.parts:
                part.mean = with_decay(part.vector, part.sent, self.decay)
            self.parts[0].span = span.end()
            try:
                check_range([part.vector.delivered(part.mean) for part in self.parts])
            except NonFiniteError as error:
                self.rejection = error
            return
        bad = {name: count for vector in vectors for name, count in vector.non_finite().items()}
        self.fault = self.fault or listed(bad)
        known = [part.vector for part in self.parts]
        first, *others = [vector for vector in vectors if vector not in known]
        first.measure(None, span.end())
        for vector in others:
            vector.measure(None, None)

    def _exchanging(
        self, vector: VectorExchange, first: Pattern[None] | None, waiting: Collection[int]
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
            self.parts.append(Part(vector, mean, mean))
