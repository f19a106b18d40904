"""A gradient scaler whose ranks agree."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from tritoncomm.optim import SparseOptimizer
from tritoncomm.scheduler.process_group import is_distributed


class GradScaler(torch.amp.GradScaler):
    """``torch.amp.GradScaler``, but an overflow on one rank is an overflow on all: scales stay equal.

    With torch's own, a wrapped optimizer skips the step on all ranks too, but only the rank that overflowed lowers
    its scale. That changes no result, as residuals are in unscaled units, and wastes range. Arguments are torch's,
    and ``process_group`` (None: the default one).
    """

    def __init__(
        self, device: str = "cuda", *args: Any, process_group: dist.ProcessGroup | None = None, **kwargs: Any
    ) -> None:
        super().__init__(device, *args, **kwargs)
        self.process_group = process_group

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """As torch's; raises :class:`RuntimeError` after ``optimizer.synchronize()``, which averaged what is scaled."""
        if isinstance(optimizer, SparseOptimizer) and optimizer.is_synchronized and self.is_enabled():
            raise RuntimeError("synchronize() has averaged scaled gradients: call scaler.unscale_(optimizer) before it")
        super().unscale_(optimizer)
        if self.is_enabled():
            found = self._agree(self._found_inf_per_device(optimizer))
            if isinstance(optimizer, SparseOptimizer):
                optimizer.note_unscaled(found)

    def _check_inf_per_device(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        found = super()._check_inf_per_device(optimizer)
        self._agree(found)
        return found

    def _agree(self, found: dict[Any, torch.Tensor]) -> torch.Tensor:
        """Whether any rank has found an overflow; one collective, also on a rank without any gradient."""
        assert self._scale is not None
        flags = [flag.to(self._scale.device) for flag in found.values()]
        flag = torch.stack(flags).amax() if flags else torch.zeros_like(self._scale)
        if is_distributed():
            dist.all_reduce(flag, dist.ReduceOp.MAX, group=self.process_group)
        for own in found.values():
            own.copy_(flag)
        if not flags:
            found[flag.device] = flag
        return flag
