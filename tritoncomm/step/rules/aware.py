"""The contract of a step that knows how late gradients are."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

import torch

from tritoncomm.errors import ConfigurationError
from tritoncomm.step.exchange.layout import Delivered
from tritoncomm.step.settings import Late

__all__ = ["AwareStep"]


class AwareStep(ABC):
    """A step that knows which entries were delivered, and how long ago each coordinate's last delivery was.

    The state in ``optimizer.state`` is that of the optimizer, which must be able to continue from it. How late
    entries are is kept by the exchange, see :class:`~tritoncomm.step.exchange.feedback.Ages`. A step writes
    the number of the step there for each coordinate that was delivered.

    A step promises:

    * If every coordinate is delivered in every step, the result is that of the optimizer up to rounding.
    * A coordinate that is not delivered does not change, except by weight decay.
    * The result depends only on values that are equal on all ranks. Replicas stay bit-identical, nothing is sent.

    Args:
        optimizer: The optimizer.
        late: How far a delivery catches up.

    Attributes:
        optimizer: The optimizer.
        unsupported: Options that the optimizer must not use.
        others: Names of optimizers outside torch to which the rule applies, for the table in the pages.
    """

    optimizer: torch.optim.Optimizer
    unsupported: ClassVar[tuple[str, ...]] = ()
    others: ClassVar[tuple[str, ...]] = ()

    def __init__(self, optimizer: torch.optim.Optimizer, late: Late) -> None:
        self.optimizer, self._late = optimizer, late
        self.check_options()

    @staticmethod
    @abstractmethod
    def fits(optimizer: torch.optim.Optimizer) -> bool:
        """Return True if this replaces the step of ``optimizer``."""

    def check_options(self) -> None:
        """Raise :class:`~tritoncomm.ConfigurationError` if the optimizer uses an option that is not supported."""
        for group in self.optimizer.param_groups:
            for option in self.unsupported:
                if group.get(option):
                    raise ConfigurationError(
                        f"{option}={group[option]!r} is not supported by the staleness-aware step: leave it out, or "
                        "pass late=False"
                    )

    def begin(self) -> None:  # noqa: B027 - most optimizers keep nothing for all of their parameters
        """Begin a step of the optimizer, before :meth:`step` of each of its flat vectors."""

    @abstractmethod
    def step(self, delivered: Delivered) -> None:
        """Update the parameters of one flat vector that are the optimizer's and have a ``.grad``.

        ``delivered`` is the averaged gradient of the vector. What it stores is delivered. If it has padding, only the
        device knows how much that is, and nothing waits for a GPU. The step has begun in its ages.
        """
