"""How long each tensor of a vector has waited for a delivery."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection

import torch

from tritoncomm.step.flat import BucketLayout, Delivered
from tritoncomm_kernels import constant

logger = logging.getLogger("tritoncomm")

LONG = 100  # steps without a delivery, after which a tensor is counted, and named once


class Waiting:
    """The steps since the last delivery to each tensor of ``layout``, in which it had a gradient.

    Args:
        layout: The tensors of the vector.
        name_of: Returns the name of a tensor.
        warns: Whether this rank logs the warning.

    Attributes:
        steps: The numbers of steps, int32, in the order of ``layout``, on the device of the vector.
    """

    def __init__(self, layout: BucketLayout, name_of: Callable[[torch.Tensor], str], *, warns: bool) -> None:
        self._layout = layout
        self._name_of = name_of
        self._warns = warns
        self.steps = torch.zeros(len(layout.parameters), dtype=torch.int32, device=layout.device)

    def note(self, delivered: Delivered, left: Collection[int], residual: torch.Tensor) -> None:
        """Count a step with the entries ``delivered``. Tensors with an id in ``left`` took no part.

        This takes a few operations on as many numbers as there are tensors. The host does not wait for a GPU, except
        when ``left`` changes. A warning that is due is logged now, on a GPU when metrics are asked for.
        """
        took_part = self._flags([id(each) not in left for each in self._layout.parameters]) if left else 1
        self.steps = (self.steps + took_part) * self._lacks(delivered)
        if self._warns and self.steps.device.type == "cpu" and self.steps.numel():
            longest = int(self.steps.max())
            if longest >= LONG and longest % LONG == 0:
                self.share(residual)

    def _lacks(self, delivered: Delivered) -> torch.Tensor:
        """Return for each tensor 1 or True if nothing of it was ``delivered``, else 0 or False."""
        mean = delivered.mean
        if mean.is_full:
            return torch.zeros_like(self.steps)
        if not delivered.is_flat:
            return self._flags([not each.values.numel() for each in delivered.entries])
        ascending = mean.indices.remainder(mean.numel + 1)  # padding, at the end, has the index -1
        at = torch.searchsorted(ascending, constant(self._layout.bounds, ascending.device))
        return at[1:] == at[:-1]

    def _flags(self, holds: list[bool]) -> torch.Tensor:
        flags, device = [int(each) for each in holds], self.steps.device
        return torch.tensor(flags, dtype=torch.int32) if device.type == "cpu" else constant(flags, device)

    def share(self, residual: torch.Tensor) -> float:
        """Return the share of tensors that wait for 100 steps or more and have a ``residual``. Log their names, once.

        The host waits for a GPU.
        """
        parts = zip(self._layout.parameters, self._layout.parts(residual), self.steps.tolist(), strict=True)
        found = [parameter for parameter, part, steps in parts if steps >= LONG and bool(part.any())]
        if found and self._warns:
            self._warns = False
            logger.warning(
                "nothing was delivered for %d steps of %s, although gradients came: they are much smaller than those "
                "of other parameters, or the density is low for so many. Raise density, or let dense_below send "
                "tensors of this size completely in each step",
                LONG,
                ", ".join(self._name_of(each) for each in found),
            )
        return len(found) / max(len(self._layout.parameters), 1)
