"""Memory on a device: what kernels pass on, where a top-k begins, and copies from the host."""

from __future__ import annotations

import torch

from tritoncomm_kernels.devices import is_asynchronous


class Guess:
    """Where the next top-k of a vector begins: a ``key``, int32 ``[1]`` on its device. There is none at first.

    Each vector has its own, which belongs to the owner of the vector.
    """

    key: torch.Tensor | None = None


def scratch(size: int, dtype: torch.dtype, like: torch.Tensor) -> torch.Tensor:
    """Return memory for ``size`` elements on the device of ``like``, for what one kernel writes and a later one reads.

    It holds anything. The allocator gives the memory of one step to the next one, without asking the driver.
    """
    return torch.empty(size, dtype=dtype, device=like.device)


def copied_to(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a copy of ``host`` on ``device``. A GPU copies it from pinned memory, so the host does not wait."""
    return host.pin_memory().to(device, non_blocking=True) if is_asynchronous(device) else host.to(device)
