"""Notice that a script changes this rank's own gradients between the backward pass and ``step()``, as by clipping."""

from __future__ import annotations

import logging
import math
import weakref
from collections.abc import Callable, Iterable, Sequence

import torch
import torch.distributed as dist

from tritoncomm.scheduler.process_group import is_distributed
from tritoncomm.step.torch_internals import at_end_of_backward, backward_pass, version_of

logger = logging.getLogger("tritoncomm")


class LocalChanges:
    """Knows the version of each ``.grad`` at the end of the last backward pass since :meth:`forget`.

    A version also grows when nothing changes: a limit that gradients do not reach multiplies them by 1. So after the
    first step in which versions have grown, the norms of gradients are noted, too: one more pass over them, in scripts
    that touch them, until there is something to say.

    Parameters are not kept alive, and their hooks are removed when this object is garbage. DTensors are left out: an
    operation on several of them, as in ``clip_grad_norm_``, changes no version.

    Args:
        parameters: The parameters whose gradients are exchanged.
        can_synchronize: Whether ``synchronize()`` exchanges all gradients that a script may clip together.
    """

    def __init__(self, parameters: Sequence[torch.Tensor], *, can_synchronize: bool = True) -> None:
        plain = [parameter for parameter in parameters if not hasattr(parameter, "device_mesh")]
        self._parameters = [weakref.ref(parameter) for parameter in plain]
        self._can_synchronize = can_synchronize
        self._versions: dict[int, tuple[int, int]] = {}  # id and version of the gradient of each parameter, by its id
        self._notes_norms = False
        self._norms: dict[int, torch.Tensor] = {}  # norm of the gradient of each parameter, by its id
        self._pass = -1
        self._has_warned = False
        hook = _noting(weakref.ref(self))
        for parameter in plain:
            handle = parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
            weakref.finalize(self, handle.remove).atexit = False

    def forget(self) -> None:
        """Forget what was noted, because ``.grad`` is about to hold something else."""
        self._versions.clear()
        self._norms.clear()

    def note_after_backward(self) -> None:
        """Note all versions at the end of the backward pass under way."""
        number = backward_pass()
        if number != self._pass and not self._has_warned:
            self._pass = number
            at_end_of_backward(self._note)

    def _note(self) -> None:
        present = self._present()
        self._versions |= {key: (id(gradient), version_of(gradient)) for key, gradient in present.items()}
        if self._notes_norms:
            self._norms |= zip(present, _norms(present.values()), strict=True)

    def _present(self) -> dict[int, torch.Tensor]:
        """Return the dense gradients, by the ids of their parameters."""
        alive = (reference() for reference in self._parameters)
        found = {id(each): each.grad for each in alive if each is not None and each.grad is not None}
        return {key: gradient for key, gradient in found.items() if gradient.layout is torch.strided}

    def warn(self, *, scaled: bool = False) -> None:
        """Log once, on the first rank, what to write instead if a gradient was changed since the last backward pass.

        A factor that is a power of two, as the scale of a ``GradScaler``, does not count. On a GPU, the host waits for
        norms once in a step in which versions have grown.

        Args:
            scaled: Whether gradients are multiplied by the scale of a ``GradScaler``.
        """
        if self._has_warned:
            return
        touched = {
            key: gradient
            for key, gradient in self._present().items()
            if key in self._versions and self._versions[key][0] == id(gradient)
            if self._versions[key][1] != version_of(gradient)
        }
        before = [self._norms[key] for key in touched if key in self._norms]
        if not touched or len(before) < len(touched):
            self._notes_norms |= bool(touched)
            return
        now = _norms(touched.values())
        norm = _total_of_changed(before, now)
        if norm == 0 or not math.isfinite(norm):  # unchanged, reset, or the exchange says what is wrong
            return
        self._has_warned = True
        if not is_distributed() or dist.get_rank() == 0:
            nearest = float(f"{norm:.1e}")
            is_limit = not scaled and abs(norm - nearest) < _TOLERANCE * nearest
            logger.warning("%s", _advice(nearest if is_limit else None, can_synchronize=self._can_synchronize))


_TOLERANCE = 1e-4  # clip_grad_norm_ adds 1e-6 to the norm


def _norms(gradients: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    return list(torch._foreach_norm(list(gradients)))  # noqa: SLF001 - its public users return the norm of all


def _total_of_changed(before: Sequence[torch.Tensor], now: Sequence[torch.Tensor]) -> float:
    """Return the norm of all gradients with the norms ``now``. It is 0 if none has changed, but for powers of two."""
    device = now[0].device
    both = torch.stack([each.to(device, torch.float32) for each in (*before, *now)]).view(2, -1)
    then, since = torch.frexp(both).mantissa
    total = torch.where((then != since).any(), torch.linalg.vector_norm(both[1]), 0.0)
    return float(total)


def _advice(limit: float | None, *, can_synchronize: bool) -> str:
    """Return what to write instead of clipping to ``limit``, if that is known."""
    seen = (
        "gradients were changed in place between backward() and step(), where they are still those of this rank alone"
    )
    if limit is not None:
        otherwise = ", or call optimizer.synchronize() before it" if can_synchronize else ""
        return (
            f"{seen}. This looks like clip_grad_norm_ with {limit:g}: pass max_grad_norm={limit:g} to wrap() and "
            f"remove the line that clips{otherwise}"
        )
    fix = "If the line that changes them is clip_grad_norm_, pass max_grad_norm= to wrap() and remove it"
    otherwise = ". Otherwise call optimizer.synchronize() before it" if can_synchronize else ""
    return f"{seen}. {fix}{otherwise}. A factor that is equal on all ranks needs no change"


def _noting(reference: weakref.ref[LocalChanges]) -> Callable[[torch.Tensor], None]:
    """Return a hook for parameters, which does not keep the object alive."""

    def note(_: torch.Tensor) -> None:
        changes = reference()
        if changes is not None:
            changes.note_after_backward()

    return note
