"""Notice clipping of one rank's gradients, and backward passes that a step lacks, or that come after its exchange."""

from __future__ import annotations

import logging
import weakref
from collections import Counter
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.hooks import RemovableHandle

from tritoncomm.scheduler.ranks import speaks
from tritoncomm.step.torch_internals import fsdp_modules, holds_gradients

logger = logging.getLogger("tritoncomm")

_STEPS, _TIMES = 10, 3
_TOLERANCE = 1e-4  # clip_grad_norm_ adds 1e-6 to the norm


class LocalClipping:
    """Notices a script that clips this rank's own gradients, by their norm.

    Three gradients of the first ten steps whose norm is the same round number have been clipped to it.
    """

    def __init__(self) -> None:
        self._steps = 0
        self._norms: list[torch.Tensor] = []

    def look(self, gradients: Sequence[torch.Tensor]) -> None:
        """Look at flat vectors of unscaled gradients. In the tenth step, log what to write instead.

        The host then waits for a GPU.
        """
        if self._steps == _STEPS:
            return
        self._steps += 1
        self._norms.append(nn.utils.get_total_norm(gradients))
        if self._steps == _STEPS:
            self._tell()

    def _tell(self) -> None:
        rounded = ((norm, float(f"{norm:.1e}")) for norm in torch.stack(self._norms).tolist())  # to two digits
        counts = Counter(limit for norm, limit in rounded if abs(norm - limit) < _TOLERANCE * limit)
        limit, times = max(counts.items(), key=lambda each: each[1], default=(0.0, 0))
        if times >= _TIMES:
            logger.warning(
                "the gradients of this rank had the norm %g in %d of the first %d steps: this looks like "
                "clip_grad_norm_ between backward() and step(), where gradients are still those of one rank. Pass "
                "max_grad_norm=%g to wrap() and remove the line that clips, or call optimizer.synchronize() before it",
                *(limit, times, _STEPS, limit),
            )


class LateBackward:
    """Notices a backward pass that adds gradients of this rank to a mean."""

    def __init__(self) -> None:
        self._handles: list[RemovableHandle] = []
        self._changed: set[int] = set()  # ids of the gradients to which a backward pass has added

    def watch(self, parameters: Iterable[torch.Tensor]) -> None:
        """Watch ``parameters`` until :meth:`forget`."""
        changed = self._changed

        def note(parameter: torch.Tensor) -> None:
            changed.add(id(parameter.grad))

        for parameter in parameters:
            if parameter.requires_grad:
                self._handles.append(parameter.register_post_accumulate_grad_hook(note))  # type: ignore[no-untyped-call]

    def forget(self) -> None:
        """Forget what was noticed."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._changed.clear()

    def check(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Raise :class:`RuntimeError` if a backward pass has added to one of ``gradients``."""
        if self._changed and any(id(each) in self._changed for each in gradients if each is not None):
            raise RuntimeError(
                "a backward pass has added gradients of this rank to the mean since synchronize(): call step() before "
                "the next backward pass, or optimizer.zero_grad() on all ranks, which discards what was averaged"
            )


class UnreducedPasses:
    """Notices gradients of ``model`` that FSDP2 has kept back when a step is taken.

    Attributes:
        modules: What FSDP2 shards. Empty once a warning was logged.
    """

    def __init__(self, model: nn.Module | None) -> None:
        self.modules = [weakref.ref(each) for each in fsdp_modules(model)]

    def look(self, group: dist.ProcessGroup | None) -> None:
        """Look before a step. Log what to do, once, on the first rank of ``group``."""
        held = [each for each in (reference() for reference in self.modules) if each is not None]
        if not any(map(holds_gradients, held)):
            return
        self.modules = []
        if speaks(group):
            logger.warning(
                "FSDP has not reduced all backward passes before this step: .grad is without them, and a later step "
                "gets them. Call model.set_requires_gradient_sync(True) before the last backward pass of each step"
            )
