"""A gradient scaler that keeps its scale equal on all ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from tritoncomm.errors import ExchangeError
from tritoncomm.optimizer import SparseOptimizer
from tritoncomm.scheduler.failure_report import is_interruption
from tritoncomm.scheduler.process_group import is_distributed, report_failure
from tritoncomm.step.options import check_group


class GradScaler(torch.amp.GradScaler):
    """A ``torch.amp.GradScaler`` that treats an overflow on one rank as an overflow on all ranks.

    All ranks therefore lower their scale together. With ``torch.amp.GradScaler``, a wrapped optimizer also skips the
    step on all ranks, but only the rank that overflowed lowers its scale. Results do not change, because residuals
    are in unscaled units, but part of the numeric range is wasted. A loop that steps the learning rate only if the
    scale has not fallen needs this class: otherwise ranks get different learning rates, and the next step raises.

    Takes the arguments of ``torch.amp.GradScaler``, and ``process_group``, whose ranks agree. None is the group of the
    wrapped optimizer, also after ``reset_process_group()``. Without a wrapped one it is the default group.
    """

    def __init__(
        self, device: str = "cuda", *args: Any, process_group: dist.ProcessGroup | None = None, **kwargs: Any
    ) -> None:
        check_group("process_group", process_group)
        super().__init__(device, *args, **kwargs)
        self.process_group = process_group

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Unscale the gradients of ``optimizer``, and look for an overflow on any rank.

        Raises :class:`RuntimeError` after ``optimizer.synchronize()``, which has averaged the scaled gradients.
        """
        if isinstance(optimizer, SparseOptimizer) and optimizer.is_synchronized and self.is_enabled():
            raise RuntimeError(
                "synchronize() has averaged scaled gradients: call scaler.unscale_(optimizer) before synchronize()"
            )
        super().unscale_(optimizer)
        if self.is_enabled():
            found = self._agree(self._found_inf_per_device(optimizer), optimizer)
            if isinstance(optimizer, SparseOptimizer):
                optimizer.note_unscaled(found)

    def _check_inf_per_device(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        found = super()._check_inf_per_device(optimizer)
        self._agree(found, optimizer)
        return found

    def _agree(self, found: dict[Any, torch.Tensor], optimizer: torch.optim.Optimizer) -> torch.Tensor:
        """Set every flag of ``found`` to the maximum over all ranks, and return it: 1 for an overflow, else 0.

        Where only updates are exchanged, an overflow is a matter of one rank, and nothing is sent. A rank without
        gradients takes part in the all-reduce, and gets an entry in ``found``.
        """
        assert self._scale is not None
        if isinstance(optimizer, SparseOptimizer) and optimizer.exchanges_only_updates:
            return torch.stack([flag.to(self._scale.device) for flag in found.values()] or [self._scale * 0]).amax()
        flags = [flag.to(self._scale.device) for flag in found.values()]
        flag = torch.stack(flags).amax() if flags else torch.zeros_like(self._scale)
        if is_distributed():
            _all_reduce(flag, self.process_group, optimizer)
        for own in found.values():
            own.copy_(flag)
        if not flags:
            found[flag.device] = flag
        return flag


def with_equal_scales(scaler: torch.amp.GradScaler, device: torch.device) -> GradScaler:
    """Return a :class:`GradScaler` for ``device`` that continues from the ``scaler`` of a trainer."""
    if isinstance(scaler, GradScaler):
        return scaler
    found = GradScaler(device.type, enabled=scaler.is_enabled())
    found.load_state_dict(scaler.state_dict())
    return found


def _all_reduce(flag: torch.Tensor, group: dist.ProcessGroup | None, optimizer: torch.optim.Optimizer) -> None:
    """Set ``flag`` to its maximum over the ranks of ``group``, or of a wrapped ``optimizer``.

    Raises :class:`~tritoncomm.ExchangeError` if a rank was lost, or did not answer in time.
    """
    exchange = None
    if isinstance(optimizer, SparseOptimizer):
        exchange = optimizer._exchange  # noqa: SLF001 - of this library
        group = group or optimizer._everybody  # noqa: SLF001
    try:
        work = dist.all_reduce(flag, dist.ReduceOp.MAX, group=group, async_op=True)
        timeout = None if exchange is None or flag.device.type != "cpu" else exchange.options.timeout
        work.wait() if timeout is None else work.wait(timeout)
    except BaseException as error:
        if is_interruption(error):
            report_failure(group, flag.device, "unscale_() of a GradScaler", error)
        elif isinstance(error, RuntimeError):
            if exchange is not None and exchange.vectors:
                nothing = torch.zeros(1, dtype=torch.int64, device=exchange.vectors[0].device)
                exchange.vectors[0].equal_on_all_ranks(nothing)  # raises an error that names the lost rank
            raise ExchangeError(f"GradScaler: a rank was lost or did not take part: {error}") from error
        raise
