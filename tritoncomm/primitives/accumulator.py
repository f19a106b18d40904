"""Residual plus gradient, not yet added: what an algorithm compresses."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import TypeVar

import torch

import tritoncomm_kernels as kernels
from tritoncomm_kernels import Selection, Workspace

Answer = TypeVar("Answer")


class Accumulator:
    """``residual + gradient`` for one flat vector, computed by whichever pass is asked for first.

    ``residual`` (fp32 ``[n]``) and ``gradient`` (fp32, bf16 or fp16 ``[n]``) are only read. The sum and
    what :meth:`clear` removes from it live in ``scratch`` (fp32 ``[n]``), which becomes the residual
    once the exchange has succeeded. ``workspace`` keeps a GPU's scratch memory from step to step.
    ``seconds`` is the time spent here, ``selected`` how many entries this rank last chose.
    """

    def __init__(
        self,
        residual: torch.Tensor,
        gradient: torch.Tensor,
        scratch: torch.Tensor,
        workspace: Workspace | None = None,
    ) -> None:
        self._residual = residual
        self._gradient = gradient
        self._scratch = scratch
        self.workspace = workspace if workspace is not None else Workspace()
        self._scale: torch.Tensor | None = None
        self._added = False
        self.seconds = 0.0
        self.selected = 0

    @property
    def numel(self) -> int:
        """Length n of the vector."""
        return self._residual.numel()

    @property
    def device(self) -> torch.device:
        """Where the vector lies; messages are made there."""
        return self._residual.device

    @property
    def gradient(self) -> torch.Tensor:
        """This step's gradient ``[n]``; read-only."""
        return self._gradient if self._scale is None else self._gradient / self._scale

    @property
    def residual(self) -> torch.Tensor:
        """What was owed before this step ``[n]``; read-only."""
        return self._residual if self._scale is None else self._residual / self._scale

    def replace_gradient(self, update: torch.Tensor) -> None:
        """Take ``update`` (fp32 ``[n]``) in place of the gradient; before anything else is asked for."""
        assert not self._added
        self._gradient = update

    def split(self, at: int) -> tuple[Accumulator, Accumulator]:
        """The coordinates below ``at``, and the others; before anything else is asked for."""
        assert not self._added
        head, tail = (
            Accumulator(self._residual[part], self._gradient[part], self._scratch[part], self.workspace)
            for part in (slice(None, at), slice(at, None))
        )
        return head, tail

    def scaled(self, scale: torch.Tensor) -> Accumulator:
        """This in units of ``scale`` (fp32 ``[n]``), for :meth:`unscale_from`. Before anything else is asked for."""
        assert not self._added
        self._add()
        self._timed(lambda: self._scratch.div_(scale))
        scaled = Accumulator(self._residual, self._gradient, self._scratch, self.workspace)
        scaled._scale, scaled._added = scale, True
        return scaled

    def unscale_from(self, scaled: Accumulator, scale: torch.Tensor) -> None:
        """Owe what is left of ``scaled``, which :meth:`scaled` made with the same ``scale``."""
        self._timed(lambda: self._scratch.mul_(scale))
        self.absorb(scaled)

    def absorb(self, *parts: Accumulator) -> None:
        """Count what the accumulators of parts of the vector have done as done here."""
        self._added = True
        self.seconds += sum(part.seconds for part in parts)
        self.selected = sum(part.selected for part in parts)

    def dense(self) -> torch.Tensor:
        """The whole sum, fp32 ``[n]``; read-only for the caller."""
        self._add()
        return self._scratch

    def at_least(self, threshold: float) -> Selection:
        """Non-zero entries with magnitude at least ``threshold``, ascending, in one fused pass.

        Nothing is removed yet. NaN and Inf are always among what is selected.
        """
        return self._select(
            lambda: kernels.accumulate_and_select(
                self._residual, self._gradient, self._scratch, threshold, workspace=self.workspace
            ),
            lambda: kernels.select(self._scratch, threshold, workspace=self.workspace),
        )

    def top_k(self, k: int) -> Selection:
        """The ``k`` largest magnitudes, ascending by index, ties to the lower index, zeros never."""
        return self._select(
            lambda: kernels.accumulate_top_k(
                self._residual, self._gradient, self._scratch, k, workspace=self.workspace
            ),
            lambda: kernels.top_k(self._scratch, k, workspace=self.workspace),
        )

    def clear(self, indices: torch.Tensor) -> None:
        """Remove the entries at ``indices``: they have been delivered and are no longer owed."""
        self._add()
        self._timed(lambda: self._scratch.index_fill_(0, indices.long(), 0.0))

    def clear_range(self, start: int, stop: int) -> None:
        """:meth:`clear` for the coordinates from ``start`` up to ``stop``."""
        self._add()
        self._timed(self._scratch[start:stop].zero_)

    def replace(self, indices: torch.Tensor, values: torch.Tensor) -> None:
        """Owe ``values`` at ``indices`` (unique), whatever was owed there before."""
        self._add()
        self._timed(lambda: self._scratch.index_copy_(0, indices.long(), values))

    def replace_range(self, start: int, values: torch.Tensor) -> None:
        """:meth:`replace` for as many coordinates from ``start`` on as there are ``values``."""
        self._add()
        self._timed(lambda: self._scratch[start : start + values.numel()].copy_(values))

    def add(self, indices: torch.Tensor, values: torch.Tensor) -> None:
        """Owe ``values`` on top at ``indices`` (unique): another rank's mass that this one has cut."""
        self._add()
        self._timed(lambda: kernels.scatter_add(self._scratch, indices, values))

    def clear_all(self) -> None:
        """Remove everything: the whole sum has been delivered."""
        self._added = True
        self.selected = self.numel
        self._scratch.zero_()

    def is_finite(self) -> bool:
        """False when the sum has a NaN or Inf anywhere; found in the pass that adds."""
        return self.at_least(math.inf).found == 0

    def _add(self) -> None:
        if not self._added:
            self._timed(lambda: kernels.accumulate(self._residual, self._gradient, self._scratch))

    def _select(self, first: Callable[[], Selection], again: Callable[[], Selection]) -> Selection:
        selection = self._timed(again if self._added else first)
        self.selected = selection.found
        return selection

    def _timed(self, work: Callable[[], Answer]) -> Answer:
        started = time.perf_counter()
        answer = work()
        self._added = True
        self.seconds += time.perf_counter() - started
        return answer
