"""Notice that a script changes this rank's own gradients between the backward pass and ``step()``, as by clipping."""

from __future__ import annotations

import logging
import math
import weakref
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from tritoncomm.scheduler.process_group import is_distributed
from tritoncomm.step.torch_internals import at_end_of_backward, backward_pass, version_of

logger = logging.getLogger("tritoncomm")


class LocalChanges:
    """Knows the version of each ``.grad`` at the end of the last backward pass since :meth:`forget`.

    Parameters are not kept alive, and their hooks are removed when this object is garbage. DTensors are left out: an
    operation on several of them, as in ``clip_grad_norm_``, changes no version.

    Args:
        parameters: The parameters whose gradients are exchanged.
    """

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        plain = [parameter for parameter in parameters if not hasattr(parameter, "device_mesh")]
        self._parameters = [weakref.ref(parameter) for parameter in plain]
        self._versions: dict[int, tuple[int, int]] = {}  # id and version of the gradient of each parameter, by its id
        self._pass = -1
        self._has_warned = False
        hook = _noting(weakref.ref(self))
        for parameter in plain:
            handle = parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
            weakref.finalize(self, handle.remove).atexit = False

    def forget(self) -> None:
        """Forget what was noted, because ``.grad`` is about to hold something else."""
        self._versions.clear()

    def note_after_backward(self) -> None:
        """Note all versions at the end of the backward pass under way."""
        number = backward_pass()
        if number != self._pass and not self._has_warned:
            self._pass = number
            at_end_of_backward(self._note)

    def _note(self) -> None:
        for parameter, gradient in self._present():
            self._versions[id(parameter)] = id(gradient), version_of(gradient)

    def _present(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        alive = (reference() for reference in self._parameters)
        return [(each, each.grad) for each in alive if each is not None and each.grad is not None]

    def warn(self, *, scaled: bool = False) -> None:
        """Log once, on the first rank, what to write instead if a gradient was changed since the last backward pass.

        A ``GradScaler`` changes gradients without a new version. A limit that gradients do not reach multiplies them by
        1, which is a new version, too. It is not told apart: that would take one more pass over all gradients in every
        step, and a wait for a GPU, and later gradients may reach the limit.

        Args:
            scaled: Whether gradients are multiplied by the scale of a ``GradScaler``.
        """
        if self._has_warned:
            return
        changed = []
        for parameter, gradient in self._present():
            identity, version = self._versions.get(id(parameter), (0, 0))
            if identity == id(gradient) and version != version_of(gradient):
                changed.append(gradient)
        norm = float(torch.nn.utils.get_total_norm(changed)) if changed else 0.0
        if norm == 0 or not math.isfinite(norm):  # they were reset, or the exchange says what is wrong
            return
        self._has_warned = True
        if not is_distributed() or dist.get_rank() == 0:
            nearest = float(f"{norm:.1e}")
            is_limit = not scaled and abs(norm - nearest) < _TOLERANCE * nearest
            logger.warning("%s", _advice(nearest if is_limit else None))


_TOLERANCE = 1e-4  # clip_grad_norm_ adds 1e-6 to the norm


def _advice(limit: float | None) -> str:
    """Return what to write instead of clipping to ``limit``, if that is known."""
    seen = (
        "gradients were changed in place between backward() and step(), where they are still those of this rank alone"
    )
    if limit is None:
        return (
            f"{seen}. Call optimizer.synchronize() before the line that changes them, or, if it is clip_grad_norm_, "
            "pass max_grad_norm= to wrap() and remove it. A factor that is equal on all ranks needs no change"
        )
    return (
        f"{seen}. This looks like clip_grad_norm_ with {limit:g}: pass max_grad_norm={limit:g} to wrap() and remove "
        "the line that clips, or call optimizer.synchronize() before it"
    )


def _noting(reference: weakref.ref[LocalChanges]) -> Callable[[torch.Tensor], None]:
    """Return a hook for parameters, which does not keep the object alive."""

    def note(_: torch.Tensor) -> None:
        changes = reference()
        if changes is not None:
            changes.note_after_backward()

    return note
