"""Copies between the gradients of many parameters and one flat vector."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch

from tritoncomm.errors import ConfigurationError


def split_by_size(
    parameters: Sequence[torch.Tensor], dense_below: int, *, flattened: bool | None = None
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Split ``parameters`` into large ones, which are worth a sparse exchange, and small ones. The order is kept.

    A parameter is small if it has fewer than ``dense_below`` elements, or at most one dimension, like a bias or the
    weight of a norm.

    Args:
        parameters: Parameters to split.
        dense_below: Number of elements. 0 makes no parameter small.
        flattened: Whether the model has one-dimensional shards only. Then the number of dimensions does not matter.
            None decides this from ``parameters``, which may be a part of the model.

    Returns:
        The large parameters and the small parameters.
    """
    if flattened is None:
        flattened = all(parameter.dim() <= 1 for parameter in parameters)

    def is_small(parameter: torch.Tensor) -> bool:
        return parameter.numel() < dense_below or (dense_below > 0 and parameter.dim() <= 1 and not flattened)

    small = [is_small(parameter) for parameter in parameters]
    return (
        [parameter for parameter, holds in zip(parameters, small, strict=True) if not holds],
        [parameter for parameter, holds in zip(parameters, small, strict=True) if holds],
    )


class BucketLayout:
    """The position of each parameter in one flat fp32 vector, in the given order, without padding.

    Attributes:
        parameters: The parameters, in the order of the vector.
        bounds: Start of each parameter in the vector, followed by the length of the vector.

    Raises:
        ConfigurationError: A parameter is complex, a DTensor or listed twice, or the parameters are on several devices.
    """

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        self.parameters = list(parameters)
        self.bounds = [0, *accumulate(p.numel() for p in self.parameters)]
        devices = {p.device for p in self.parameters}
        if len(devices) > 1:
            raise ConfigurationError(f"parameters are on {sorted(map(str, devices))}: use one optimizer per device")
        if len({id(p) for p in self.parameters}) < len(self.parameters):
            raise ConfigurationError("a parameter is listed twice: pass each parameter to the optimizer once")
        for parameter in self.parameters:
            if hasattr(parameter, "to_local"):
                raise ConfigurationError(
                    f"a parameter of shape {tuple(parameter.shape)} is a DTensor, which is sharded over ranks: "
                    "with FSDP2, use tritoncomm.fsdp.register()"
                )
            if parameter.is_complex():
                raise ConfigurationError(
                    f"a parameter of shape {tuple(parameter.shape)} is {parameter.dtype}: "
                    "convert it with torch.view_as_real first"
                )

    @property
    def numel(self) -> int:
        """Length of the flat vector."""
        return self.bounds[-1]

    @property
    def device(self) -> torch.device:
        """Device of the flat vector. The CPU if there are no parameters."""
        return self.parameters[0].device if self.parameters else torch.device("cpu")

    def gather(self, flat: torch.Tensor) -> torch.Tensor:
        """Copy every ``.grad`` into ``flat`` (fp32 ``[numel]``) and return it. A missing gradient counts as zero."""
        for parameter, part in zip(self.parameters, self.parts(flat), strict=True):
            if parameter.grad is None:
                part.zero_()
            elif parameter.grad.layout != torch.strided:
                raise ConfigurationError(
                    f"a parameter of shape {tuple(parameter.shape)} has a gradient of layout {parameter.grad.layout}: "
                    "only dense gradients are supported, use Embedding(sparse=False)"
                )
            else:
                part.copy_(parameter.grad.detach().reshape(-1))
        return flat

    def fits_dtypes(self, flat: torch.Tensor) -> bool:
        """Return False if a value of ``flat`` overflows in the dtype of its parameter."""
        pairs = zip(self.parameters, self.parts(flat), strict=True)
        return all(fits_dtype(part, parameter.dtype) for parameter, part in pairs)

    def scatter(self, flat: torch.Tensor) -> None:
        """Copy ``flat`` (fp32 ``[numel]``) into every ``.grad``, and create missing ones.

        The ``.grad`` of a parameter that was frozen becomes None.
        """
        for parameter, part in zip(self.parameters, self.parts(flat), strict=True):
            if not parameter.requires_grad:
                parameter.grad = None
            elif parameter.grad is None or 0 in parameter.grad.stride():
                # Elements of an expanded gradient share memory, and cannot hold different values.
                parameter.grad = part.view(parameter.shape).to(parameter.dtype, copy=True)
            else:
                parameter.grad.detach().copy_(part.view(parameter.shape))

    def parts(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Return the view of ``flat`` that belongs to each parameter."""
        return [flat[a:b] for a, b in zip(self.bounds, self.bounds[1:], strict=False)]

    def split(self, indices: torch.Tensor) -> list[torch.Tensor]:
        """Split ascending ``indices`` (int32) of the flat vector into int64 indices of each flattened parameter."""
        bounds = torch.tensor(self.bounds, dtype=torch.int64, device=indices.device)
        cuts = torch.searchsorted(indices.long(), bounds).tolist()
        return [indices[a:b].long() - start for a, b, start in zip(cuts, cuts[1:], self.bounds, strict=False)]


# The mean includes residuals, so it may be larger than every gradient.
OVERFLOWS = (
    "the mean of gradients plus residuals overflows in {}; residuals are unchanged: use bfloat16, or a GradScaler"
)


def fits_dtype(values: torch.Tensor, dtype: torch.dtype) -> bool:
    """Return False if one of ``values`` (fp32) overflows in ``dtype``. Only fp16 has a smaller range than fp32."""
    return dtype != torch.float16 or bool((values.abs() <= torch.finfo(dtype).max).all())
