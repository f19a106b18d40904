"""The factored second moment of sparse vectors: one number for every row and every column of their matrices.

The factors are those of *Adafactor: Adaptive Learning Rates with Sublinear Memory Cost* (section 3): row mean times
column mean, divided by the mean of the whole matrix. No result depends on the order of additions. That order differs
between runs on a GPU and between machines, but all ranks must compute the same powers of two.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import numpy.typing as npt
import torch

from tritoncomm.primitives.sparse_vector import SparseVector

_BITS = 62  # width of the integers that sum squares
_TINY = torch.finfo(torch.float64).tiny
# On a CPU with this many entries per matrix, one matrix after the other costs less than all at once.
_MANY_PER_MATRIX = 256
_BIAS, _MANTISSA = 127, 23  # exponent bias and mantissa bits of fp32
_BIAS_64, _MANTISSA_64 = 1023, 52  # and of fp64
_LEAST = 2.0**-100  # means of tensors are taken to differ by at most this factor: fp32 holds all roots
_ROOT_BLOCK = 1 << 15  # elements whose roots are computed together: their fp64 squares take 256 KiB


class FactoredSecondMoment:
    """Row and column statistics of the tensors in a flat vector.

    Tensors of ``shapes`` lie one after the other in the vector. Each is treated as a matrix with the fewest possible
    rows plus columns. A tensor with at most one dimension larger than 1 has a single mean. ``sizes``, ``rows`` and
    ``columns`` have one integer per tensor. ``numel`` is the length of the vector.
    """

    def __init__(self, shapes: Sequence[Sequence[int]]) -> None:
        self.sizes = [math.prod(shape) for shape in shapes]
        # For each tensor: rows, columns, and how many adjacent coordinates share both.
        self.cuts = [_cut(shape) for shape in shapes]
        self.numel = sum(self.sizes)
        self.rows = [rows for rows, _, _ in self.cuts]
        self.columns = [columns for _, columns, _ in self.cuts]
        # Where each tensor begins, and its rows and its columns in those of all. The last number is their end.
        self._starts = [[0, *accumulate(lengths)] for lengths in (self.sizes, self.rows, self.columns)]
        self._table: tuple[torch.Tensor, ...] | None = None

    def sums(self, vector: SparseVector) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the sum of squares of each row ``[sum(rows)]`` and of each column ``[sum(columns)]``, both fp64."""
        count = vector.values.shape[0]  # padding, with its value 0, counts too
        largest = (
            vector.values.abs().max().double().square() if count else vector.values.new_zeros((), dtype=torch.float64)
        )
        # Squares are added as integer multiples of a unit. An integer sum does not depend on the order.
        unit = (largest * 2.0 ** (count.bit_length() - _BITS)).clamp_min(_TINY).to(vector.values.device)
        by_row, by_column = self._dense(vector, unit) if vector.is_full else self._sparse(vector, unit)
        return by_row * unit, by_column * unit

    def _sparse(self, vector: SparseVector, unit: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        counts = _counted(vector.values, unit)
        row, column = self._places(vector)
        by_row = counts.new_zeros(sum(self.rows)).index_add_(0, row, counts)
        return by_row, counts.new_zeros(sum(self.columns)).index_add_(0, column, counts)

    def _dense(self, vector: SparseVector, unit: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Sum one matrix after the other. This avoids an index for every value."""
        by_row, by_column = [unit[None][:0].long()], [unit[None][:0].long()]
        for part, cut in zip(torch.split(vector.values, self.sizes), self.cuts, strict=True):
            counts = _counted(part, unit).view(cut)
            by_row.append(counts.sum((1, 2)))
            by_column.append(counts.sum((0, 2)))
        return torch.cat(by_row), torch.cat(by_column)

    def _places(self, vector: SparseVector) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the row and the column of each index of ``vector``, numbered across all matrices."""
        indices = vector.indices.clamp(min=0) if vector.is_padded else vector.indices
        if self._table is None or self._table[0].device != indices.device:
            starts = [each[:-1] for each in self._starts]
            table = [*starts, [max(columns, 1) for columns in self.columns], [max(run, 1) for _, _, run in self.cuts]]
            self._table = torch.tensor(table, dtype=torch.int64, device=indices.device).unbind()
        many = indices.shape[0] > _MANY_PER_MATRIX * len(self.sizes)
        if many and indices.device.type == "cpu" and not vector.is_padded:
            return self._places_by_matrix(indices.numpy())
        start, first_row, first_column, columns, run = self._table
        place = indices.long()
        matrix = torch.searchsorted(start, place, right=True) - 1
        cell = torch.floor_divide(place - start[matrix], run[matrix])
        row = torch.floor_divide(cell, columns[matrix])
        return first_row[matrix] + row, first_column[matrix] + cell % columns[matrix]

    def _places_by_matrix(self, indices: npt.NDArray[np.int32]) -> tuple[torch.Tensor, torch.Tensor]:
        """Do the same as :meth:`_places` for ascending ``indices``, with one division by a number for each matrix."""
        rows, columns = (np.empty(indices.size, dtype=np.int64) for _ in range(2))
        starts, first_rows, first_columns = self._starts
        bounds = np.searchsorted(indices, np.asarray(starts, dtype=np.int32)).tolist()
        for matrix, (_, width, run) in enumerate(self.cuts):
            own = slice(bounds[matrix], bounds[matrix + 1])
            if own.start < own.stop:
                cell = (indices[own] - np.int32(starts[matrix])) // np.int32(run)
                row = cell // np.int32(width)
                np.add(row, first_rows[matrix], out=rows[own])
                np.add(cell - row * np.int32(width), first_columns[matrix], out=columns[own])
        return torch.from_numpy(rows), torch.from_numpy(columns)

    def root(
        self,
        rows: torch.Tensor,
        columns: torch.Tensor,
        floor: float,
        sums: list[float] | None = None,
        smallest: float = 0.0,
        unknown: float = 1.0,
    ) -> torch.Tensor:
        """Return sqrt((second moment + ``floor`` x mean of its tensor) / mean of all / ``floor``), fp32 ``[numel]``.

        The values are rounded to powers of two. The floor limits how much the rows of one tensor differ, and not how
        much tensors do.

        Args:
            rows: A result of :meth:`sums`, or an average of such results.
            columns: See ``rows``.
            floor: See above.
            sums: The content of ``rows``, if it is known.
            smallest: The smallest mean of a tensor. Below it, it counts as this.
            unknown: Stands for the mean of a tensor without a moment, as a share of the mean of all.
        """
        sums = rows.tolist() if sums is None else sums  # a GPU is read once, not once for each matrix
        mean = math.fsum(sums) / max(self.numel, 1)
        out = torch.empty(self.numel, dtype=torch.float32, device=rows.device)
        parts = zip(torch.split(rows, self.rows), torch.split(columns, self.columns), strict=True)
        for part, cut, start, (row, column) in zip(
            torch.split(out, self.sizes), self.cuts, self._starts[1], parts, strict=False
        ):
            total = math.fsum(sums[start : start + len(row)])
            whole = max(total * max(cut[2], 1) * mean, _TINY)
            share = max(total / part.numel(), smallest) / mean if total and mean else unknown
            own = floor * min(max(share, _LEAST), 1 / _LEAST)
            # The exponent of the root is half the binary exponent, rounded down. This is exact on every device.
            shift = _BIAS - (math.frexp(floor)[1] >> 1)
            if out.device.type == "cpu":
                _write_roots(part.numpy().reshape(cut), (row / whole).numpy(), column.numpy(), own, shift)
                continue
            exponents = torch.frexp((row / whole)[:, None] * column + own).exponent >> 1
            exponents += shift
            part.view(cut).copy_((exponents << _MANTISSA).view(torch.float32)[:, :, None])
        return out


@dataclass(frozen=True, eq=False)
class Moment:
    """Moving averages of the sums of squares per row and per column (fp64).

    ``used`` holds the averages from which the current scale was computed, or None before the first scale. Moments are
    never modified.
    """

    steps: int
    rows: torch.Tensor
    columns: torch.Tensor
    used: tuple[torch.Tensor, torch.Tensor] | None = None

    @classmethod
    def of(cls, matrices: FactoredSecondMoment) -> Moment:
        """Return the moment before the first step."""
        rows, columns = (
            torch.zeros(sum(part), dtype=torch.float64, device="cpu") for part in (matrices.rows, matrices.columns)
        )
        return cls(0, rows, columns)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Moment) and self.digest() == other.digest()

    __hash__ = None  # type: ignore[assignment]

    def digest(self) -> str:
        """Return a hash of all bits of the moment."""
        content = hashlib.blake2b(str(self.steps).encode(), digest_size=16)
        for part in (self.rows, self.columns, *(self.used or ())):
            content.update(part.cpu().numpy().data)
        return content.hexdigest()

    def fits(self, matrices: FactoredSecondMoment) -> bool:
        """Return True if the moment has the rows and columns of ``matrices``."""
        return len(self.rows) == sum(matrices.rows) and len(self.columns) == sum(matrices.columns)


def _write_roots(
    out: npt.NDArray[np.float32],
    row: npt.NDArray[np.float64],
    column: npt.NDArray[np.float64],
    floor: float,
    shift: int,
) -> None:
    """Write 2^(e // 2 + ``shift`` - bias) to ``out`` (``[rows, columns, run]``), where e = frexp(row x column + floor).

    A block of rows stays in cache. The exponents are read from the bits, because all numbers are normal and positive.
    """
    block = max(1, _ROOT_BLOCK // max(1, column.size))
    for start in range(0, row.size, block):
        squares = row[start : start + block, None] * column
        squares += floor
        bits = squares.view(np.int64)
        bits >>= _MANTISSA_64
        bits -= _BIAS_64 - 1  # frexp's mantissa is below 1
        bits >>= 1
        bits += shift
        bits <<= _MANTISSA
        np.copyto(out.view(np.int32)[start : start + block], bits[:, :, None], casting="unsafe")


def _cut(shape: Sequence[int]) -> tuple[int, int, int]:
    """Return rows, columns, and coordinates per pair of row and column, for a tensor of ``shape``."""
    dimensions = [size for size in shape if size != 1]
    if len(dimensions) < 2:  # noqa: PLR2004 - a vector is not split
        return 1, 1, math.prod(shape)
    cuts = [(math.prod(dimensions[:i]), math.prod(dimensions[i:])) for i in range(1, len(dimensions))]
    return *min(cuts, key=sum), 1


def _counted(values: torch.Tensor, unit: torch.Tensor) -> torch.Tensor:
    """Return the squares of ``values`` as int64 multiples of ``unit``."""
    return (values.double().square_() / unit).round_().long()
