"""The second moment of sparse vectors, kept as one number for every row and every column of their matrices.

Factored as in *Adafactor: Adaptive Learning Rates with Sublinear Memory Cost* (section 3): row mean times column mean
over the mean of the whole matrix. The memory is that of rows and columns, the work that of what was delivered.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from math import prod

import torch

from tritoncomm.sparse import SparseVector

_BITS = 62  # of the integers in which squares are summed
_TINY = torch.finfo(torch.float64).tiny


class Matrices:
    """Tensors of ``shapes``, one after the other in a flat vector, each a matrix of its first dimension by the others.

    A tensor of one dimension is one row, and all of it one column.
    """

    def __init__(self, shapes: Sequence[Sequence[int]]) -> None:
        self._sizes = [prod(shape) for shape in shapes]
        self._rows = [shape[0] if len(shape) > 1 else 1 for shape in shapes]
        self._columns = [prod(shape[1:]) if len(shape) > 1 else 1 for shape in shapes]
        # How many coordinates next to each other lie in one row and one column.
        self._run = [shape[0] if len(shape) == 1 else 1 for shape in shapes]
        self.numel, self.rows, self.columns = sum(self._sizes), sum(self._rows), sum(self._columns)
        self._table: torch.Tensor | None = None

    def sums(self, vector: SparseVector) -> tuple[torch.Tensor, torch.Tensor]:
        """The sum of squares in each row ``[rows]`` and in each column ``[columns]``, fp64."""
        squares = vector.values.double().square()
        largest = squares.max() if len(vector) else squares.new_zeros(())
        # In whole units, because the order in which a GPU adds floats differs from run to run.
        unit = (largest * 2.0 ** (len(vector).bit_length() - _BITS)).clamp_min(_TINY)
        counts = (squares / unit).round_().long()
        row, column = self._places(vector.indices)
        by_row = counts.new_zeros(self.rows).index_add_(0, row, counts)
        by_column = counts.new_zeros(self.columns).index_add_(0, column, counts)
        return by_row * unit, by_column * unit

    def _places(self, indices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The row and the column of each of ``indices``, counted through all matrices."""
        if self._table is None or self._table.device != indices.device:
            starts = [[0, *accumulate(lengths)][:-1] for lengths in (self._sizes, self._rows, self._columns)]
            table = [*starts, [max(columns, 1) for columns in self._columns], self._run]
            self._table = torch.tensor(table, dtype=torch.int64, device=indices.device)
        start, first_row, first_column, columns, run = self._table
        place = indices.long()
        matrix = torch.searchsorted(start, place, right=True) - 1
        cell = (place - start[matrix]) // run[matrix]
        return first_row[matrix] + cell // columns[matrix], first_column[matrix] + cell % columns[matrix]

    def root(self, rows: torch.Tensor, columns: torch.Tensor, *, power: float, floor: float) -> torch.Tensor:
        """``(second moment / its mean + floor) ** power`` of each coordinate, as a power of two; fp32 ``[numel]``.

        ``rows`` and ``columns`` are what :meth:`sums` returns, or averages of it. 1 everywhere where they are zero.
        """
        mean = rows.sum() / max(self.numel, 1)
        parts = zip(torch.split(rows, self._rows), torch.split(columns, self._columns), self._run, strict=True)
        moments = [
            (torch.outer(row, column) / (row.sum() * max(run, 1)).clamp_min(_TINY)).reshape(-1).repeat_interleave(run)
            for row, column, run in parts
        ]
        relative = torch.cat([rows[:0], *moments]) / mean.clamp_min(_TINY) + floor
        exponents = relative.log2().mul_(power).round_()
        return torch.where(mean > 0, exponents, 0.0).exp2().float()
