"""What an exchange delivers: the means of its vectors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from tritoncomm.errors import NonFiniteError
from tritoncomm.primitives.sparse_vector import SparseVector
from tritoncomm.step.bucket import BucketLayout, Entries, FlatDelivery
from tritoncomm_kernels import Padded


@dataclass(frozen=True)
class Delivered:
    """The mean of one flat vector, and the position of each parameter in this vector."""

    mean: SparseVector
    layout: BucketLayout

    @cached_property
    def entries(self) -> list[Entries]:
        """The delivered entries of each parameter, in the order of ``layout``.

        The host waits for the number of entries of a mean with padding.
        """
        return self.layout.split(self.mean.trimmed())

    @property
    def is_flat(self) -> bool:
        """True if the mean has padding: only the device knows its number of entries. See :meth:`flat`."""
        return self.mean.is_padded

    def flat(self, *, read_gradients: bool) -> FlatDelivery:
        """Return a mean with padding as one list, for a step that need not know the entries of each parameter."""
        entries = Padded(self.mean.indices, self.mean.values)
        return FlatDelivery(self.layout.parameters, self.layout.bounds[:-1], entries, read_gradients)

    def without_zeros(self) -> Delivered:
        """Return the same mean without its entries of zero. The host waits for their number."""
        found = self.mean.values.nonzero().reshape(-1).to(torch.int32)
        return Delivered(SparseVector(found, self.mean.values[found.long()], self.mean.numel), self.layout)


def scattered(means: list[Delivered], *, zeros: bool) -> list[Delivered]:
    """Replace every ``.grad`` by its mean. Return ``means``, with or without their entries of zero."""
    for delivered in means:
        delivered.layout.scatter(delivered.entries)
    return means if zeros else [delivered.without_zeros() for delivered in means]


def check_range(delivered: Sequence[Delivered]) -> None:
    """Raise :class:`~tritoncomm.NonFiniteError` if a mean overflows in the dtype of its parameter.

    All ranks have the same means, so all of them raise or none. The host waits for a GPU at most once.
    """
    flags = [flag for each in delivered if (flag := each.layout.overflow(each.mean)) is not None]
    if flags and bool(torch.stack(flags).any()):  # the mean includes residuals: it may exceed every gradient
        raise NonFiniteError(
            "the mean of gradients plus residuals overflows in torch.float16. Residuals are unchanged, so this may "
            "recur in every step: use bfloat16, or a GradScaler if gradients are still scaled; or discard the "
            "residuals with optimizer.load_state_dict(optimizer.state_dict(), residuals='reset')"
        )
