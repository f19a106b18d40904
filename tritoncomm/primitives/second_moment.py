"""The second moment of sparse vectors, kept as one number for every row and every column of their matrices.

Factored as in *Adafactor: Adaptive Learning Rates with Sublinear Memory Cost* (section 3): row mean times column mean
over the mean of the whole matrix. Everything is computed so that it does not depend on the order of additions, which
differs between runs on a GPU, and between machines: ranks have to find the same powers of two.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate

import torch

from tritoncomm.primitives.sparse_vector import SparseVector

_BITS = 62  # of the integers in which squares are summed
_TINY = torch.finfo(torch.float64).tiny
_BIAS, _MANTISSA = 127, 23  # of fp32


class FactoredSecondMoment:
    """Tensors of ``shapes``, one after the other in a flat vector, each cut into rows and columns as few as possible.

    A tensor with one dimension, but for those of 1, has one mean for all of it.
    """

    def __init__(self, shapes: Sequence[Sequence[int]]) -> None:
        self.sizes = [math.prod(shape) for shape in shapes]
        # Rows, columns, and how many coordinates next to each other share both.
        self.cuts = [_cut(shape) for shape in shapes]
        self.numel = sum(self.sizes)
        self.rows = [rows for rows, _, _ in self.cuts]
        self.columns = [columns for _, columns, _ in self.cuts]
        self._table: torch.Tensor | None = None

    def sums(self, vector: SparseVector) -> tuple[torch.Tensor, torch.Tensor]:
        """The sum of squares in each row ``[sum(rows)]`` and in each column ``[sum(columns)]``, fp64."""
        largest = vector.values.abs().max().double().square() if len(vector) else torch.zeros((), dtype=torch.float64)
        # Squares are added as whole units: integers have no rounding that depends on the order.
        unit = (largest * 2.0 ** (len(vector).bit_length() - _BITS)).clamp_min(_TINY).to(vector.values.device)
        by_row, by_column = self._dense(vector, unit) if vector.is_full else self._sparse(vector, unit)
        return by_row * unit, by_column * unit

    def _sparse(self, vector: SparseVector, unit: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        counts = _counted(vector.values, unit)
        row, column = self._places(vector.indices)
        by_row = counts.new_zeros(sum(self.rows)).index_add_(0, row, counts)
        return by_row, counts.new_zeros(sum(self.columns)).index_add_(0, column, counts)

    def _dense(self, vector: SparseVector, unit: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """One matrix after the other, without an index for every value."""
        by_row, by_column = [unit[None][:0].long()], [unit[None][:0].long()]
        for part, cut in zip(torch.split(vector.values, self.sizes), self.cuts, strict=True):
            counts = _counted(part, unit).view(cut)
            by_row.append(counts.sum((1, 2)))
            by_column.append(counts.sum((0, 2)))
        return torch.cat(by_row), torch.cat(by_column)

    def _places(self, indices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The row and the column of each of ``indices``, counted through all matrices."""
        if self._table is None or self._table.device != indices.device:
            starts = [[0, *accumulate(lengths)][:-1] for lengths in (self.sizes, self.rows, self.columns)]
            table = [*starts, [max(columns, 1) for columns in self.columns], [max(run, 1) for _, _, run in self.cuts]]
            self._table = torch.tensor(table, dtype=torch.int64, device=indices.device)
        start, first_row, first_column, columns, run = self._table
        place = indices.long()
        matrix = torch.searchsorted(start, place, right=True) - 1
        cell = (place - start[matrix]) // run[matrix]
        return first_row[matrix] + cell // columns[matrix], first_column[matrix] + cell % columns[matrix]

    def root(self, rows: torch.Tensor, columns: torch.Tensor, floor: float) -> torch.Tensor:
        """The square root of (second moment / its mean + ``floor``) over that of ``floor``; fp32 ``[numel]``.

        As powers of two from 1 on. ``rows`` and ``columns`` are what :meth:`sums` returns, or averages of it.
        """
        mean = math.fsum(rows.tolist()) / max(self.numel, 1)
        out = torch.empty(self.numel, device=rows.device)
        parts = zip(torch.split(rows, self.rows), torch.split(columns, self.columns), strict=True)
        for part, cut, (row, column) in zip(torch.split(out, self.sizes), self.cuts, parts, strict=True):
            whole = max(math.fsum(row.tolist()) * max(cut[2], 1) * mean, _TINY)
            # Half the binary exponent, rounded down, is the exponent of the root: no logarithm has to agree.
            exponents = torch.frexp((row / whole)[:, None] * column + floor).exponent >> 1
            exponents += _BIAS - (math.frexp(floor)[1] >> 1)
            part.view(cut).copy_((exponents << _MANTISSA).view(torch.float32)[:, :, None])
        return out


def _cut(shape: Sequence[int]) -> tuple[int, int, int]:
    """Rows, columns, and coordinates in a row and column, for a tensor of ``shape``."""
    dimensions = [size for size in shape if size != 1]
    if len(dimensions) < 2:  # noqa: PLR2004 - nothing to cut between
        return 1, 1, math.prod(shape)
    cuts = [(math.prod(dimensions[:i]), math.prod(dimensions[i:])) for i in range(1, len(dimensions))]
    return *min(cuts, key=sum), 1


def _counted(values: torch.Tensor, unit: torch.Tensor) -> torch.Tensor:
    """Squares of ``values`` in whole units, int64."""
    return (values.double().square_() / unit).round_().long()
