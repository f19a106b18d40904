"""Blocks of the vector, each with a budget of entries, that travel together in one message between two ranks."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch

import tritoncomm_kernels as kernels
from tritoncomm.primitives.exchange import Step
from tritoncomm.primitives.fixed_exchange import FixedStep
from tritoncomm.primitives.packing import Sections, runs
from tritoncomm_kernels import Entries

Ranges = Sequence[tuple[int, int, int]]


class ExactBlocks(Sections):
    """Some blocks of the vector, and their message, which has the exact length of their budgets.

    ``ranges`` has the first coordinate, the end and the budget of each block, in ascending order. At most one gap is
    between them.
    """

    def __init__(self, step: Step, ranges: Ranges) -> None:
        super().__init__(step.encoding, ranges)
        self._step = step

    def largest(self) -> Entries:
        """Return the largest entries of each block of the accumulator, as many as its budget.

        The blocks then have what :meth:`Step.add` was given for them.
        """
        parts = [
            self._step.acc.top_k_blocks(
                [run[0][0], *(high for _, high, _ in run)], [budget for *_, budget in run], self._step.terms
            )
            for run in runs(self.ranges)
        ]
        return Entries.join(parts)


class FixedBlocks:
    """Some blocks whose message has one row for each, with ``room`` slots in ``span`` coordinates."""

    def __init__(self, step: FixedStep, ranges: Ranges, span: int, room: int) -> None:
        self._step, self._ranges, self._room = step, ranges, room
        self._section = step.encoding.section(0, span, room)
        first, *others = runs(ranges)
        # For one selection, a gap is a block without budget.
        self._gap = len(first) if others else None
        self._selected = [*first, *((first[-1][1], run[0][0], 0) for run in others), *itertools.chain(*others)]
        self.words = len(ranges) * self._section.words

    def largest(self) -> Entries:
        """See :meth:`ExactBlocks.largest`. There is one row for each block, and one without entries for a gap."""
        acc = self._step.acc
        bounds = kernels.constant([self._selected[0][0], *(high for _, high, _ in self._selected)], acc.device)
        budgets = kernels.constant([budget for *_, budget in self._selected], acc.device)
        acc.selected += sum(min(self._room, budget) for *_, budget in self._ranges)
        return kernels.top_k_rows(acc.dense(), bounds, budgets, self._room)

    def encode(self, indices: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, Entries]:
        """Return the message (int32 ``[words]``) with the entries of :meth:`largest`, and what receivers get."""
        lows = self._step.lows([bounds[:2] for bounds in self._selected])
        message, sent = self._section.encode_rows(lows, Entries(indices, values))
        if self._gap is not None:
            message = torch.cat([message[: self._gap], message[self._gap + 1 :]])
        return message.reshape(-1), sent

    def decode(self, message: torch.Tensor) -> Entries:
        """Return the entries of a received ``message``.

        An index between the end of a block and its span is not rejected.
        """
        ranges = [(low, low + self._section.high) for low, *_ in self._ranges]
        return self._step.read(message.view(len(ranges), -1), ranges, self._section)


Blocks = ExactBlocks | FixedBlocks
