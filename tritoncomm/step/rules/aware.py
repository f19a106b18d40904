"""The contract of a step that knows how late gradients are."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import torch

from tritoncomm.step.exchange.feedback import Ages
from tritoncomm.step.exchange.layout import Delivered
from tritoncomm.step.settings import WrapOptions

__all__ = ["AwareStep"]


class AwareStep(ABC):
    """A step that knows which entries were delivered, and how long ago each coordinate's last delivery was.

    The state in ``optimizer.state`` is that of the original optimizer, which must be able to continue from it. How late
    entries are is in the ledger of the exchange, see :class:`~tritoncomm.step.exchange.feedback.Ages`. A step writes
    the number of the step there for each coordinate that was delivered.

    A step promises:

    * If every coordinate is delivered in every step, the result is that of the original optimizer up to rounding.
    * A coordinate that is not delivered does not change, except by weight decay.
    * The result depends only on values that are equal on all ranks. Replicas stay bit-identical, nothing is sent.

    Attributes:
        optimizer: The original optimizer.
        others: Names of optimizers outside torch to which the rule applies, for a list.
    """

    optimizer: torch.optim.Optimizer
    others: ClassVar[tuple[str, ...]] = ()

    @staticmethod
    @abstractmethod
    def fits(optimizer: torch.optim.Optimizer) -> bool:
        """Return True if this replaces the step of ``optimizer``."""

    @classmethod
    @abstractmethod
    def from_options(cls, optimizer: torch.optim.Optimizer, options: WrapOptions) -> AwareStep:
        """Return the step of ``optimizer`` with the options of ``wrap``."""

    def check_options(self) -> None:  # noqa: B027 - most optimizers have no option that is not supported
        """Raise :class:`~tritoncomm.ConfigurationError` if the optimizer uses an option that is not supported."""

    @abstractmethod
    def step(
        self,
        parameters: Sequence[torch.Tensor],
        delivered: Sequence[torch.Tensor | None],
        ages: Ages,
        values: Sequence[torch.Tensor] | None = None,
    ) -> None:
        """Update ``parameters`` from the averaged gradients in ``.grad``.

        Args:
            parameters: Parameters to update, those of ``ages``. Other parameters of the optimizer do not change.
            delivered: Ascending int64 indices of the delivered coordinates of each flattened parameter, of its local
                shard if it is a DTensor. None means all.
            ages: How late they are. The step has begun there.
            values: What ``.grad`` holds at the delivered coordinates, before it was rounded to its dtype: fp32 ``[k]``
                beside ``[k]`` indices, or all values. Reading them is faster. None reads ``.grad``.
        """

    @abstractmethod
    def step_flat(self, delivered: Delivered, *, read_gradients: bool) -> None:
        """Do the same for a mean with padding, whose number of entries only the device knows.

        Nothing waits for a GPU. ``read_gradients`` says that ``.grad`` may have changed, and is read at the entries
        instead of their values.
        """
