"""The sparse vector that every method returns."""

from __future__ import annotations

import torch

from tritoncomm.errors import ConfigurationError
from tritoncomm_kernels import Workspace, decompress


class SparseVector:
    """A vector of ``numel`` coordinates that stores some of them.

    ``indices`` are int32, ascending and unique. ``values`` are fp32. A vector may store no coordinate at all. A vector
    made by :meth:`full` stores every coordinate and creates its indices on first access. Treat both tensors as
    read-only. Raises :class:`~tritoncomm.ConfigurationError` for other dtypes or shapes.
    """

    __slots__ = ("_indices", "numel", "values")

    def __init__(self, indices: torch.Tensor, values: torch.Tensor, numel: int) -> None:
        if indices.dtype != torch.int32 or values.dtype != torch.float32:
            raise ConfigurationError(
                f"SparseVector needs int32 indices and float32 values, got {indices.dtype} and {values.dtype}"
            )
        if indices.dim() != 1 or indices.shape != values.shape:
            raise ConfigurationError(
                f"indices of shape {tuple(indices.shape)} and values of shape {tuple(values.shape)} "
                "must be one-dimensional and of equal length"
            )
        self._indices: torch.Tensor | None = indices
        self.values = values
        self.numel = numel

    @classmethod
    def full(cls, values: torch.Tensor) -> SparseVector:
        """Return a vector that stores every coordinate of fp32 ``values`` (``[n]``). No indices are allocated."""
        vector = cls.__new__(cls)
        vector._indices = None  # noqa: SLF001 - of the same class
        vector.values = values
        vector.numel = values.numel()
        return vector

    @property
    def indices(self) -> torch.Tensor:
        """Indices of the stored coordinates: int32, ascending, unique, each in ``[0, numel)``."""
        if self._indices is None:
            self._indices = torch.arange(self.numel, dtype=torch.int32, device=self.values.device)
        return self._indices

    @property
    def is_full(self) -> bool:
        """True if every coordinate is stored."""
        return self.values.numel() == self.numel

    @property
    def density(self) -> float:
        """Share of coordinates that are stored. It is 0.0 for a vector without coordinates."""
        return self.values.numel() / self.numel if self.numel else 0.0

    def __len__(self) -> int:
        return self.values.numel()

    def __repr__(self) -> str:
        return f"SparseVector({len(self)} of {self.numel})"

    def to_dense(self) -> torch.Tensor:
        """Return a new fp32 tensor ``[numel]`` with zeros at coordinates that are not stored."""
        return self.write_to(torch.empty(self.numel, device=self.values.device))

    def plus(self, other: SparseVector) -> SparseVector:
        """Return the sum with ``other``, which has the same ``numel``. It stores the coordinates that either stores."""
        if self.is_full or other.is_full:
            return SparseVector.full(self.to_dense() + other.to_dense())
        indices, places = torch.unique(torch.cat([self.indices, other.indices]), return_inverse=True)
        values = self.values.new_zeros(len(indices))
        for part, vector in zip(torch.split(places, [len(self), len(other)]), (self, other), strict=True):
            values[part] += vector.values
        return SparseVector(indices, values, self.numel)

    def write_to(self, out: torch.Tensor, *, workspace: Workspace | None = None) -> torch.Tensor:
        """Overwrite ``out`` (fp32 ``[numel]``) with the dense form and return it.

        ``workspace`` keeps a GPU's scratch memory from step to step.
        """
        if self.is_full:
            return out.copy_(self.values)
        return decompress(out, self.indices, self.values, workspace=workspace)
