"""The five states of one optimizer step, and what there is of it from its beginning to its end."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

import torch

from tritoncomm.errors import ConfigurationError, NonFiniteError
from tritoncomm.scheduler.span import Span
from tritoncomm.step.exchange.layout import Delivered
from tritoncomm.step.exchange.vector import VectorExchange
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

    Attributes:
        scale: Loss scale by which gradients are divided. None without a scaler that has not unscaled them.
        decay: The share of each parameter (by id) that is added to the mean of its gradient.
        shown: Whether somebody may look at ``.grad``, and clip it, before the step is applied. It gets the decay then.
        is_flush: Whether all residuals are delivered, and no gradients.
        parts: The vectors whose means are known. There are none if the step was rejected, or is skipped.
        span: The time of the exchange. None before it has begun.
        error: Why this rank's gradients cannot be exchanged. This rank raises it after the exchange.
        look: Called on the first rank with its gradients, flat, unless they are shards. None looks at nothing.
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
