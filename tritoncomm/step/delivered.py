"""What an exchange delivers: the means of its vectors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from tritoncomm.errors import NonFiniteError
from tritoncomm.primitives.sparse_vector import SparseVector
from tritoncomm.step.bucket import BucketLayout, Entries, FlatDelivery, fits_half
from tritoncomm_kernels import Padded


@dataclass(frozen=True)
class Delivered:
    """The mean of one flat vector, and the position of each parameter in this vector."""

    mean: SparseVector
    layout: BucketLayout

    @cached_property
    def entries(self) -> list[Entries]:
        """The delivered entries of each parameter, in the order of ``layout``, on the device of the parameters.

        The host waits for the number of entries of a mean with padding.
        """
        mean, device = self.mean.trimmed(), self.layout.device
        if mean.values.device != device:  # of parameters that FSDP has offloaded
            mean = SparseVector(mean.indices.to(device), mean.values.to(device), mean.numel)
        return self.layout.split(mean)

    @property
    def is_flat(self) -> bool:
        """True if the mean has padding, and is on the device of the parameters. See :meth:`flat`."""
        return self.mean.is_padded and self.mean.values.device == self.layout.device

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


def added(before: list[Delivered], means: list[Delivered]) -> list[Delivered]:
    """Return the sums of the means of the same vectors. Their entries are those of either."""
    held = {id(earlier.layout): earlier for earlier in before}
    for new in means:
        earlier = held.get(id(new.layout))
        held[id(new.layout)] = new if earlier is None else Delivered(earlier.mean.plus(new.mean), new.layout)
    return list(held.values())


def check_range(
    delivered: Sequence[tuple[BucketLayout, SparseVector]], scale: float, dtypes: Sequence[torch.dtype]
) -> None:
    """Raise :class:`~tritoncomm.NonFiniteError` if ``scale`` times a mean overflows in its dtype of ``dtypes``.

    Without ``dtypes``, in the dtype of each parameter. All ranks have the same means, so all of them raise or none. The
    host waits for a GPU at most once.
    """
    if dtypes:
        half = [mean.values for (_, mean), dtype in zip(delivered, dtypes, strict=True) if dtype == torch.float16]
        flags = [~fits_half(values if scale == 1.0 else values * scale).all() for values in half]
    else:
        flags = [flag for layout, mean in delivered if (flag := layout.overflow(mean)) is not None]
    if flags and bool(torch.stack(flags).any()):  # the mean includes residuals: it may exceed every gradient
        raise NonFiniteError(
            "the mean of gradients plus residuals overflows in torch.float16. Residuals are unchanged, so this may "
            "recur in every step: use bfloat16, or a GradScaler if gradients are still scaled; or discard the "
            "residuals with optimizer.load_state_dict(optimizer.state_dict(), residuals='reset')"
        )
