"""The accumulator: residual plus gradient of one flat vector, added on first use."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

import tritoncomm_kernels as kernels
from tritoncomm.primitives.region_cuts import offsets
from tritoncomm.primitives.sparse_vector import SparseVector
from tritoncomm.primitives.verdict import Verdict
from tritoncomm.scheduler.span import Span
from tritoncomm_kernels import Entries, Guess
from tritoncomm_kernels.lists import inside

Answer = TypeVar("Answer")
Guesses = defaultdict[str, Guess]


class Accumulator:
    """The sum ``residual + gradient`` of one flat vector, computed on first use.

    The first call decides how the sum is computed. :meth:`dense` only adds. :meth:`at_least` and :meth:`top_k` add and
    select in one pass. ``residual`` (fp32 ``[n]``) and ``gradient`` (fp32, bf16 or fp16 ``[n]``) are never written. The
    sum is stored in ``scratch`` (fp32 ``[n]``), and methods such as :meth:`clear` edit it there. After a successful
    exchange ``scratch`` becomes the new residual.

    ``numel`` is the length n of the vector, and ``device`` its device, on which messages are created. ``guesses`` say
    where searches for the largest entries begin on a GPU, from step to step, by name: those of this vector, and of
    others that a method computes. ``spans`` are the times of the work of this object. ``selected`` is the number of
    entries that this rank selected last. ``verdict`` collects what is wrong in a step that does not wait for a GPU: in
    the static form, and on a GPU if the algorithm's ``has_shared_verdict`` is True. It is None in other steps.
    """

    def __init__(
        self,
        residual: torch.Tensor,
        gradient: torch.Tensor,
        scratch: torch.Tensor,
        guesses: Guesses | None = None,
        verdict: Verdict | None = None,
    ) -> None:
        self.numel, self.device = residual.shape[0], residual.device
        self._residual = residual
        self._gradient = gradient
        self._scratch = scratch
        self.guesses = defaultdict(Guess) if guesses is None else guesses
        self.verdict = verdict
        # Callers see everything divided by the scale. The sum in ``scratch`` is divided late or never.
        self._scale: torch.Tensor | None = None
        self._is_divided = False
        self._added = self._is_in_blocks = False
        self._log: list[Entries] = []
        self.spans: list[Span] = []
        self.selected = 0

    @property
    def gradient(self) -> torch.Tensor:
        """This step's gradient ``[n]``, in the units of this accumulator. Read-only."""
        return self._gradient if self._scale is None else self._gradient / self._scale

    @property
    def residual(self) -> torch.Tensor:
        """Residual before this step ``[n]``, in the units of this accumulator. Read-only."""
        return self._residual if self._scale is None else self._residual / self._scale

    @property
    def _divisor(self) -> torch.Tensor | None:
        """What the sum in ``scratch`` has still to be divided by, if anything."""
        return None if self._is_divided else self._scale

    def replace_gradient(self, update: torch.Tensor) -> None:
        """Replace the gradient by ``update`` (fp32 ``[n]``). Call this before the sum is computed."""
        assert not self._added
        self._gradient = update

    def split(self, *cuts: int) -> list[Accumulator]:
        """Return accumulators for the coordinates between ``cuts``. They share memory with this one."""
        parts = []
        for own in itertools.starmap(slice, itertools.pairwise((0, *cuts, self.numel))):
            memory = self._residual[own], self._gradient[own], self._scratch[own]
            part = Accumulator(*memory, self.guesses, self.verdict)
            part._added, part._is_divided = self._added, self._is_divided
            part._scale = None if self._scale is None else self._scale[own]
            parts.append(part)
        return parts

    def scaled(self, scale: torch.Tensor) -> Accumulator:
        """Return this accumulator divided by ``scale`` (fp32 ``[n]``, powers of two).

        Call this before the sum is computed. The result shares the scratch memory. Pass it to :meth:`unscale_from`
        after the exchange. A selection divides what it compares, and the sum itself is divided only when a method needs
        it. Multiples of powers of two are exact, so the result is the same.
        """
        assert not self._added
        scaled = Accumulator(self._residual, self._gradient, self._scratch, self.guesses, self.verdict)
        scaled._scale = scale
        return scaled

    def unscale_from(self, scaled: Accumulator, scale: torch.Tensor) -> None:
        """Convert the remaining sum back from the units of ``scaled``, after the exchange.

        ``scaled`` is the result of :meth:`scaled` for the same ``scale``. Its time and selection are taken over.
        """
        scaled._add_undivided()
        if scaled._is_divided:
            self._timed(lambda: self._scratch.mul_(scale))
        self.absorb(scaled)

    def absorb(self, *parts: Accumulator) -> None:
        """Take over the results of ``parts``, accumulators of parts of this vector.

        The sum is marked as computed. The times of ``parts`` are added to ``spans``, and ``selected`` becomes the
        sum of theirs.
        """
        self._added = True
        self.selected = 0
        for part in parts:
            self.spans += part.spans
            self.selected += part.selected

    def dense(self) -> torch.Tensor:
        """Return the whole sum, fp32 ``[n]``. Callers must not write to it."""
        self._add()
        return self._scratch

    def edit(self, work: Callable[[torch.Tensor], Answer]) -> Answer:
        """Return the result of ``work``, which gets the whole sum (fp32 ``[n]``) and replaces it by what remains."""
        self._add()
        self.selected = self.numel
        return self._timed(lambda: work(self._scratch))

    def at_least(self, threshold: float) -> Entries:
        """Return the non-zero entries with magnitude at least ``threshold``, ascending by index.

        NaN and Inf are always selected. The sum is not changed. If it is not computed yet, one fused pass adds and
        selects.
        """
        return self._select(kernels.accumulate_and_select, threshold)

    def at_least_inside(self, threshold: float, start: int, stop: int) -> tuple[Entries, bool]:
        """Return the entries of :meth:`at_least` from ``start`` up to ``stop``, and whether the whole sum is finite.

        On a CPU, one pass over the other coordinates looks for NaN and Inf only, and selects nothing.
        """
        if self.device.type != "cpu":
            passed = self.at_least(threshold)
            low, high = offsets(passed.indices, (start, stop))
            return passed.slice(low, high), not kernels.has_non_finite(passed.values)
        before, middle, after = self.split(start, stop)
        own = middle.at_least(threshold)
        finite = [part.is_finite() for part in (before, after)]  # each of them adds its part of the sum
        self.absorb(before, middle, after)
        return own._replace(indices=own.indices + start), all(finite) and not kernels.has_non_finite(own.values)

    def top_k(self, k: int) -> Entries:
        """Return the ``k`` entries of largest magnitude, ascending by index.

        Ties go to the lower index. Zeros are never selected. In a step with a verdict, the list has room for ``k``
        entries, and nothing waits for a GPU.
        """
        operation = kernels.accumulate_top_k if self.verdict is None else kernels.top_k_padded
        return self._select(operation, k, guess=self.guesses["vector"])

    def top_k_blocks(self, bounds: Sequence[int], budgets: Sequence[int], terms: Sequence[Entries] = ()) -> Entries:
        """Return the ``budgets[i]`` largest entries from ``bounds[i]`` up to ``bounds[i + 1]``, after adding ``terms``.

        The sum gets those entries of ``terms`` that are in the blocks, list by list, and :meth:`undo` takes them back.
        In the first call, the sum may not be computed yet. This and later calls then compute it in their blocks only,
        in the same pass. Select each block once, and use no other coordinate before the last call.
        """
        if self._divisor is not None:
            self._add()
        self._is_in_blocks = self._is_in_blocks or not self._added
        start, stop = bounds[0], bounds[-1]
        own, added = slice(start, stop), inside(terms, start, stop)
        gradient, base = (self._gradient, self._residual) if self._is_in_blocks else (None, self._scratch)
        entries = self._timed(
            lambda: kernels.accumulate_top_k_segments(
                base[own],
                None if gradient is None else gradient[own],
                self._scratch[own],
                [bound - start for bound in bounds],
                budgets,
                added,
            )
        )
        for indices, values in added:
            self.remember(indices + start)
            self.add(indices + start, values)
        self.selected += entries.room
        return entries._replace(indices=entries.indices + start)

    def values_at(self, indices: torch.Tensor) -> torch.Tensor:
        """Return the sum at ``indices``, and 0 for padding. Nothing waits for a GPU."""
        return self._read(self.dense(), indices)

    def remember(self, indices: torch.Tensor, values: torch.Tensor | None = None) -> None:
        """Let :meth:`undo` restore the sum at ``indices``, where it is ``values`` now. By default, they are read."""
        self._log.append(Entries(indices, self.values_at(indices) if values is None else values))

    def undo(self) -> None:
        """Restore what :meth:`remember` was given, the latest first."""
        while self._log:
            self.replace(*self._log.pop())

    def clear(self, indices: torch.Tensor) -> None:
        """Set the sum to zero at ``indices``, because these entries have been delivered. Padding is ignored."""
        self._add_undivided()
        self._timed(lambda: kernels.set_at(self._scratch, indices))

    def subtract(self, delivered: Entries, *, rounded: bool) -> None:
        """Remove the ``delivered`` entries from the sum.

        If values were ``rounded``, they are subtracted, and the exact difference stays. Otherwise the sum becomes zero
        at their indices. See :meth:`clear`.
        """
        if rounded:
            self.add(delivered.indices, delivered.values, scale=-1.0)
        else:
            self.clear(delivered.indices)

    def replace(self, indices: torch.Tensor, values: torch.Tensor) -> None:
        """Overwrite the sum at ``indices`` (unique) with ``values``. Padding is ignored."""
        self._add()
        self._timed(lambda: kernels.set_at(self._scratch, Entries(indices, values)))

    def replace_range(self, start: int, values: torch.Tensor) -> None:
        """Overwrite the sum with ``values``, from coordinate ``start`` on."""
        self._add()
        self._timed(lambda: self._scratch[start : start + values.numel()].copy_(values))

    def add(self, indices: torch.Tensor, values: torch.Tensor, *, scale: float = 1.0) -> None:
        """Add ``scale`` times ``values`` to the sum at ``indices`` (``[m]`` or ``[rows, m]``, unique in a row).

        Rows are added in order. A rank that drops partial sums of other ranks adds them here. They stay in its
        residual. In a step with a verdict there may be padding, and nothing waits for a GPU.
        """
        self._add_undivided()
        values = self._undivided(values, indices)
        if self.verdict is None:
            self._timed(lambda: kernels.scatter_add(self._scratch, indices, values if scale == 1.0 else scale * values))
        else:
            rows = Entries(indices, values)
            self._timed(lambda: kernels.add_rows(self._scratch, rows, scale=scale))

    def vector(self, entries: Entries) -> SparseVector:
        """Return ``entries`` as a vector of this length. In a step with a verdict, they may have padding."""
        if self.verdict is None:
            return SparseVector(entries.indices, entries.values, self.numel)
        return SparseVector.padded(entries, self.numel)

    def clear_all(self) -> None:
        """Set the whole sum to zero, because all of it has been delivered."""
        self._added = True
        self.selected = self.numel
        self._scratch.zero_()

    def is_finite(self) -> bool:
        """Return False if the sum contains a NaN or Inf. If the sum is not computed yet, one pass adds and checks."""
        return self.at_least(math.inf).room == 0

    def values_or_nan(self, indices: torch.Tensor) -> torch.Tensor:
        """Return the sum at ``indices``, or NaN if the sum has a NaN or Inf anywhere. Nothing waits for a GPU."""
        if self.device.type == "cpu":
            finite = torch.tensor(self.is_finite(), device="cpu")  # before dense(): the same pass adds and checks
        else:
            self._add()
            finite = self._timed(lambda: torch.isfinite(self._scratch).all())
        return torch.where(finite, self.dense().index_select(0, indices), torch.nan)

    def _add(self) -> None:
        """Compute the sum, in the units of this accumulator."""
        self._add_undivided()
        divisor = self._divisor
        if divisor is not None:
            self._is_divided = True
            self._timed(lambda: self._scratch.div_(divisor))

    def _add_undivided(self) -> None:
        if not self._added:
            self._timed(lambda: torch.add(self._residual, self._gradient, out=self._scratch))

    def _undivided(self, values: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        """Return ``values`` for ``indices``, which may hold padding, in the units of the sum in ``scratch``."""
        return values if self._divisor is None else values * self._read(self._divisor, indices)

    def _read(self, vector: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        if self.verdict is None:  # without padding, torch is faster than the kernels
            return vector.index_select(0, indices)
        return kernels.values_at(vector, indices)

    def _select(self, operation: Callable[..., Entries], limit: float, **given: Guess) -> Entries:
        """Return the result of an operation of the kernels, which first adds what is not added yet."""
        base, gradient = (self._scratch, None) if self._added else (self._residual, self._gradient)
        selection = self._timed(lambda: operation(base, gradient, self._scratch, limit, divisor=self._divisor, **given))
        self.selected = selection.indices.shape[0]
        return selection

    def _timed(self, work: Callable[[], Answer]) -> Answer:
        span = Span(self.device)
        answer = work()
        self._added = True
        self.spans.append(span.end())
        return answer
