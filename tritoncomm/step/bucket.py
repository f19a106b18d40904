"""Many gradients as one flat vector, and back."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch

from tritoncomm.errors import ConfigurationError


def split_by_size(
    parameters: Sequence[torch.Tensor], dense_below: int, *, flattened: bool | None = None
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """``parameters`` that are worth a sparse exchange, and the small ones; in the order given.

    Small are those of fewer than ``dense_below`` elements, and those of at most one dimension: biases and the
    scales of norms. The latter only beside others, as a model of ``flattened`` shards has nothing else; None: when
    these ``parameters``, which may be a part of the model, have nothing else. ``dense_below=0`` makes nothing small.
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
    """Where each parameter lies in one flat fp32 vector, in the order given, without padding.

    Raises :class:`~tritoncomm.ConfigurationError` for parameters that cannot share one real vector:
    complex ones, or ones on several devices.
    """

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        self.parameters = list(parameters)
        self.bounds = [0, *accumulate(p.numel() for p in self.parameters)]
        devices = {p.device for p in self.parameters}
        if len(devices) > 1:
            raise ConfigurationError(f"parameters lie on {sorted(map(str, devices))}: wrap one optimizer per device")
        if len({id(p) for p in self.parameters}) < len(self.parameters):
            raise ConfigurationError("a parameter is listed twice: give each to the optimizer once")
        for parameter in self.parameters:
            if hasattr(parameter, "to_local"):
                raise ConfigurationError(
                    f"a parameter of shape {tuple(parameter.shape)} is a DTensor, of which this rank holds a part: "
                    "under FSDP2 use tritoncomm.fsdp.register()"
                )
            if parameter.is_complex():
                raise ConfigurationError(
                    f"a parameter of shape {tuple(parameter.shape)} is {parameter.dtype}: "
                    "view it as real (torch.view_as_real) first"
                )

    @property
    def numel(self) -> int:
        """Length of the flat vector."""
        return self.bounds[-1]

    @property
    def device(self) -> torch.device:
        """Where the flat vector lies; the CPU for a model without parameters."""
        return self.parameters[0].device if self.parameters else torch.device("cpu")

    def gather(self, flat: torch.Tensor) -> torch.Tensor:
        """Copy every ``.grad`` into ``flat`` (fp32 ``[numel]``) and return it; no gradient counts as zero."""
        for parameter, part in zip(self.parameters, self.parts(flat), strict=True):
            if parameter.grad is None:
                part.zero_()
            elif parameter.grad.layout != torch.strided:
                raise ConfigurationError(
                    f"a parameter of shape {tuple(parameter.shape)} has a gradient of layout {parameter.grad.layout}: "
                    "use Embedding(sparse=False)"
                )
            else:
                part.copy_(parameter.grad.detach().reshape(-1))
        return flat

    def fits_dtypes(self, flat: torch.Tensor) -> bool:
        """False when a value of ``flat`` would overflow in the narrower gradient it belongs to."""
        pairs = zip(self.parameters, self.parts(flat), strict=True)
        return all(fits_dtype(part, parameter.dtype) for parameter, part in pairs)

    def scatter(self, flat: torch.Tensor) -> None:
        """Copy ``flat`` (fp32 ``[numel]``) into every ``.grad``, creating those that are missing.

        Parameters that have been frozen get none.
        """
        for parameter, part in zip(self.parameters, self.parts(flat), strict=True):
            if not parameter.requires_grad:
                parameter.grad = None
            elif parameter.grad is None or 0 in parameter.grad.stride():
                # Several elements of an expanded gradient share memory and cannot hold an average each.
                parameter.grad = part.view(parameter.shape).to(parameter.dtype, copy=True)
            else:
                parameter.grad.detach().copy_(part.view(parameter.shape))

    def parts(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """The view of ``flat`` that belongs to each parameter."""
        return [flat[a:b] for a, b in zip(self.bounds, self.bounds[1:], strict=False)]

    def split(self, indices: torch.Tensor) -> list[torch.Tensor]:
        """Ascending flat ``indices`` (int32) as int64 indices into each flattened parameter."""
        bounds = torch.tensor(self.bounds, dtype=torch.int64, device=indices.device)
        cuts = torch.searchsorted(indices.long(), bounds).tolist()
        return [indices[a:b].long() - start for a, b, start in zip(cuts, cuts[1:], self.bounds, strict=False)]


def fits_dtype(values: torch.Tensor, dtype: torch.dtype) -> bool:
    """False when one of ``values`` (fp32) overflows in ``dtype``; only fp16 reaches less far than fp32."""
    return dtype != torch.float16 or bool((values.abs() <= torch.finfo(dtype).max).all())
