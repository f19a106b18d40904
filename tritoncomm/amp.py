"""A gradient scaler that keeps its scale equal on all ranks."""

from __future__ import annotations

from typing import Any

import torch

from tritoncomm.optimizer import SparseOptimizer, stepper_of


class GradScaler(torch.amp.GradScaler):
    """A ``torch.amp.GradScaler`` that treats an overflow on one rank as an overflow on all ranks.

    All ranks skip the step together, also with ``torch.amp.GradScaler``. There, only the rank that overflowed lowers
    its scale. Results do not change, because residuals are in unscaled units, but part of the numeric range is wasted.
    A loop that steps the learning rate only if the scale has not fallen needs this class: otherwise ranks get different
    learning rates, and the next step raises. Where updates are exchanged, each rank leaves out its own steps, and has
    its own scale.

    Takes the arguments of ``torch.amp.GradScaler``. Nothing is sent for this: a wrapped optimizer knows after its step
    whether all ranks have skipped it.
    """

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Unscale the gradients of ``optimizer``, and look for an overflow on this rank.

        Raises :class:`RuntimeError` after ``optimizer.synchronize()``, which has averaged the scaled gradients.
        """
        if not (isinstance(optimizer, SparseOptimizer) and self.is_enabled()):
            super().unscale_(optimizer)
            return
        if optimizer.is_synchronized:
            raise RuntimeError(
                "synchronize() has averaged scaled gradients: call scaler.unscale_(optimizer) before synchronize()"
            )
        super().unscale_(optimizer)
        found = torch.stack([*self._found_inf_per_device(optimizer).values()]).amax()
        stepper_of(optimizer).found_in_unscale = found

    def _check_inf_per_device(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        return self._with_entry(super()._check_inf_per_device(optimizer))

    def _found_inf_per_device(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        return self._with_entry(super()._found_inf_per_device(optimizer))

    def _with_entry(self, found: dict[Any, torch.Tensor]) -> dict[Any, torch.Tensor]:
        """Return ``found`` with a flag, also on a rank without gradients, where torch finds none and raises."""
        assert self._scale is not None
        if not found:
            found[self._scale.device] = torch.zeros_like(self._scale)
        return found

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Take the step of ``optimizer``. If all ranks have skipped it, :meth:`update` lowers the scale of each."""
        wrapped = optimizer if self.is_enabled() and isinstance(optimizer, SparseOptimizer) else None
        if wrapped is not None:
            stepper_of(wrapped).keeps_scales_equal = True
        result = super().step(optimizer, *args, **kwargs)
        if wrapped is not None and wrapped.all_skipped:
            for found in self._found_inf_per_device(optimizer).values():
                found.fill_(1.0)
        return result


def with_equal_scales(scaler: torch.amp.GradScaler, device: torch.device) -> GradScaler:
    """Return a :class:`GradScaler` for ``device`` that continues from the ``scaler`` of a trainer."""
    if isinstance(scaler, GradScaler):
        return scaler
    found = GradScaler(device.type, enabled=scaler.is_enabled())
    found.load_state_dict(scaler.state_dict())
    return found
