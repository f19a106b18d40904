"""Notice that a script changes this rank's own gradients between the backward pass and ``step()``, as by clipping."""

from __future__ import annotations

import logging
import math
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
import torch.distributed as dist

from tritoncomm.scheduler.process_group import is_distributed
from tritoncomm.step.shards import local
from tritoncomm.step.torch_internals import at_end_of_backward, backward_pass, version_of
from tritoncomm_kernels.devices import is_asynchronous, synchronize

logger = logging.getLogger("tritoncomm")


class LocalChanges:
    """Knows the norm and the version of each ``.grad`` at the end of the last backward pass since :meth:`forget`.

    Norms take a pass over all gradients, and a GPU's host waits for them. They are compared in the first 10 steps, on a
    GPU in the first, and in every 100th. In between, versions tell that gradients were changed in place, and norms are
    compared from the next step on, because a version also grows when nothing changes: a limit that gradients do not
    reach multiplies them by 1. An operation on several DTensors, as in ``clip_grad_norm_``, changes no version, and
    neither does one on ``.data``.

    Gradients that a script assigns have no earlier norm. A change of those is reported only if they were changed in
    place, and their norm was the same round number in three comparisons in a row.

    Parameters are not kept alive, and their hooks are removed when this object is garbage.

    Args:
        parameters: The parameters whose gradients are exchanged.
        can_synchronize: Whether ``synchronize()`` exchanges all gradients that a script may clip together.
    """

    def __init__(self, parameters: Sequence[torch.Tensor], *, can_synchronize: bool = True) -> None:
        self._parameters = [weakref.ref(parameter) for parameter in parameters]
        self._can_synchronize = can_synchronize
        self._versions: dict[int, tuple[int, int]] = {}  # id and version of the gradient of each parameter, by its id
        self._notes_norms = False
        self._norms: dict[int, torch.Tensor] = {}  # norm of the gradient of each parameter, by its id
        self._limits: deque[float | None] = deque(maxlen=3)  # round norms of assigned gradients
        self._steps = 0
        self._first = 1 if any(is_asynchronous(parameter.device) for parameter in parameters) else _FIRST
        self._pass = -1
        self._accumulated: set[int] = set()  # ids of the gradients to which a backward pass has added
        self._has_warned = False
        # With CPUOffloadPolicy, hooks make FSDP2 wait for each gradient that it copies to the CPU.
        hook = _noting(weakref.ref(self))
        for parameter in parameters:
            handle = parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
            weakref.finalize(self, handle.remove).atexit = False

    def forget(self) -> None:
        """Forget what was noted, because ``.grad`` is about to hold something else."""
        self._accumulated.clear()
        self._versions.clear()
        self._norms.clear()

    def have_accumulated(self, gradients: Iterable[torch.Tensor | None]) -> bool:
        """Return True if a backward pass has added to one of ``gradients`` since :meth:`forget`."""
        return any(id(gradient) in self._accumulated for gradient in gradients if gradient is not None)

    def note_after_backward(self, gradient: torch.Tensor | None) -> None:
        """Note all versions at the end of the backward pass under way, which has added to ``gradient``."""
        self._accumulated.add(id(gradient))
        number = backward_pass()
        if number != self._pass and not self._has_warned:
            self._pass = number
            at_end_of_backward(self._note)

    def _note(self) -> None:
        present = self._present()
        self._versions |= {key: (id(gradient), version_of(gradient)) for key, gradient in present.items()}
        if self._is_due or self._notes_norms:
            for device in {gradient.device for gradient in present.values() if _is_shard(gradient)}:
                synchronize(device)  # after all but the last backward pass, FSDP2 may still write on other streams
            self._norms |= zip(present, _norms(present.values()), strict=True)

    @property
    def _is_due(self) -> bool:
        """True in the steps in which all norms are compared."""
        return self._steps < self._first or self._steps % _EVERY == 0

    def _present(self) -> dict[int, torch.Tensor]:
        """Return the dense gradients, by the ids of their parameters."""
        alive = (reference() for reference in self._parameters)
        found = {id(each): each.grad for each in alive if each is not None and each.grad is not None}
        return {key: gradient for key, gradient in found.items() if gradient.layout is torch.strided}

    def warn(self, *, scaled: bool = False) -> None:
        """Log once, on the first rank, what to write instead if a gradient was changed since the last backward pass.

        A factor that is a power of two, as the scale of a ``GradScaler``, does not count. On a GPU, the host waits once
        in a step in which norms are compared.

        Args:
            scaled: Whether gradients are multiplied by the scale of a ``GradScaler``.
        """
        if self._has_warned:
            return
        present = self._present()
        noted = {key: each for key, each in present.items() if self._versions.get(key, (0, 0))[0] == id(each)}
        norm = self._norm_of_changed(noted)
        # The norm of one shard is not what was limited.
        is_whole = all(each.device_mesh.size() == 1 for each in noted.values() if _is_shard(each))  # type: ignore[attr-defined]
        limit = _round(norm) if norm and is_whole and not scaled else None
        if not norm and not scaled and self._is_due:
            limit = self._limit_of_assigned(present, noted)
        self._steps += 1
        if not norm and limit is None:
            return
        self._has_warned = True
        cut = None if scaled or limit is not None else _limit_of_values(noted.values())
        if not is_distributed() or dist.get_rank() == 0:
            logger.warning("%s", _advice(limit, cut, can_synchronize=self._can_synchronize))

    def _norm_of_changed(self, noted: Mapping[int, torch.Tensor]) -> float:
        """Return the norm of those gradients that were changed since they were noted, or 0 if there is none."""
        compared = {key: gradient for key, gradient in noted.items() if key in self._norms}
        others = [key for key in noted if key not in compared]
        self._notes_norms |= any(self._versions[key][1] != version_of(noted[key]) for key in others)
        if not compared:
            return 0.0
        norm = _total_of_changed([self._norms[key] for key in compared], _norms(compared.values()))
        return norm if math.isfinite(norm) else 0.0  # else the exchange says what is wrong

    def _limit_of_assigned(
        self, present: Mapping[int, torch.Tensor], noted: Mapping[int, torch.Tensor]
    ) -> float | None:
        """Return the limit to which gradients are clipped, some of which no backward pass has left. None if unknown."""
        assigned = [gradient for key, gradient in present.items() if key not in noted]
        if not assigned or any(_is_shard(each) for each in present.values()) or 0 in map(version_of, assigned):
            return None
        limit = _round(float(torch.nn.utils.get_total_norm(list(present.values()))))
        self._limits.append(limit)
        return limit if self._limits.count(limit) == self._limits.maxlen else None  # not by chance


_FIRST, _EVERY = 10, 100  # steps
_TOLERANCE = 1e-4  # clip_grad_norm_ adds 1e-6 to the norm


def _norms(gradients: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Return the norm of each of the gradients, of this rank's shard of a DTensor."""
    shards = [local(gradient) for gradient in gradients]
    return list(torch._foreach_norm(shards)) if shards else []  # noqa: SLF001 - its public users return the norm of all


def _is_shard(gradient: torch.Tensor) -> bool:
    return hasattr(gradient, "device_mesh")


def _round(norm: float) -> float | None:
    """Return the number of two digits that ``norm`` is, as after clipping to it. None if it is no such number."""
    nearest = float(f"{norm:.1e}")
    return nearest if abs(norm - nearest) < _TOLERANCE * nearest else None


def _total_of_changed(before: Sequence[torch.Tensor], now: Sequence[torch.Tensor]) -> float:
    """Return the norm of the gradients with the norms ``now`` that have changed, but for powers of two."""
    device = now[0].device
    both = torch.stack([each.to(device, torch.float32) for each in (*before, *now)]).view(2, -1)
    then, since = torch.frexp(both).mantissa
    return float(torch.linalg.vector_norm(torch.where(then != since, both[1], 0.0)))


def _limit_of_values(gradients: Iterable[torch.Tensor]) -> float | None:
    """Return the round number that several values have and none exceeds, as after ``clip_grad_value_``. None if not."""
    shards = [shard for gradient in gradients if (shard := local(gradient.detach())).numel()]
    largest = max((float(shard.abs().max()) for shard in shards), default=0.0)
    count = sum(int(torch.count_nonzero(shard.abs() == largest)) for shard in shards)
    return _round(largest) if count > 1 else None


def _advice(limit: float | None, cut: float | None, *, can_synchronize: bool) -> str:
    """Return what to write instead of clipping norms to ``limit`` or values to ``cut``, if one of them is known."""
    seen = (
        "gradients were changed in place between backward() and step(), where they are still those of this rank alone"
    )
    if limit is not None:
        otherwise = ", or call optimizer.synchronize() before it" if can_synchronize else ""
        return (
            f"{seen}. This looks like clip_grad_norm_ with {limit:g}: pass max_grad_norm={limit:g} to wrap() and "
            f"remove the line that clips{otherwise}"
        )
    if cut is not None:
        return (
            f"{seen}. This looks like clip_grad_value_ with {cut:g}, which may stay. It cuts more than in a dense run, "
            "because the gradients of one rank are larger than their mean, but after synchronize() it would cut sums "
            "of several steps"
        )
    fix = "If the line that changes them is clip_grad_norm_, pass max_grad_norm= to wrap() and remove it"
    otherwise = ". Otherwise call optimizer.synchronize() before it" if can_synchronize else ""
    return f"{seen}. {fix}{otherwise}. A linear change that is equal on all ranks, such as a factor or a mask, may stay"


def _noting(reference: weakref.ref[LocalChanges]) -> Callable[[torch.Tensor], None]:
    """Return a hook for parameters, which does not keep the object alive."""

    def note(parameter: torch.Tensor) -> None:
        changes = reference()
        if changes is not None:
            changes.note_after_backward(parameter.grad)

    return note
