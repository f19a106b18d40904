"""The sparse vector that every method returns."""

from __future__ import annotations

import torch

from tritoncomm.errors import ConfigurationError
from tritoncomm_kernels import Entries, set_at


class SparseVector:
    """A vector of ``numel`` coordinates that stores some of them.

    ``indices`` are int32, ascending and unique. ``values`` are fp32. A vector may store no coordinate at all. A vector
    made by :meth:`full` stores every coordinate and creates its indices on first access. One made by :meth:`padded`
    has padding after its entries. Treat both tensors as read-only. Raises :class:`~tritoncomm.ConfigurationError` for
    other dtypes or shapes.
    """

    __slots__ = ("_indices", "is_padded", "numel", "values")

    def __init__(self, indices: torch.Tensor, values: torch.Tensor, numel: int) -> None:
        if indices.dtype != torch.int32 or values.dtype != torch.float32:
            raise ConfigurationError(
                f"SparseVector needs int32 indices and float32 values, got {indices.dtype} and {values.dtype}"
            )
        if indices.ndim != 1 or indices.shape != values.shape:
            raise ConfigurationError(
                f"indices of shape {tuple(indices.shape)} and values of shape {tuple(values.shape)} "
                "must be one-dimensional and of equal length"
            )
        self._indices: torch.Tensor | None = indices
        self.values = values
        self.numel = numel
        self.is_padded = False

    @classmethod
    def padded(cls, entries: Entries, numel: int) -> SparseVector:
        """Return a vector whose number of coordinates only the device knows: ``entries`` has padding at the end.

        The index of padding is -1, and its value is 0.
        """
        vector = cls(entries.indices, entries.values, numel)
        vector.is_padded = True
        return vector

    def trimmed(self) -> SparseVector:
        """Return the vector without padding. On a GPU, the host waits for the number of coordinates."""
        if not self.is_padded:
            return self
        entries = Entries(self.indices, self.values).trimmed()
        return SparseVector(entries.indices, entries.values, self.numel)

    @classmethod
    def full(cls, values: torch.Tensor) -> SparseVector:
        """Return a vector that stores every coordinate of fp32 ``values`` (``[n]``). No indices are allocated."""
        vector = cls.__new__(cls)
        vector._indices = None  # noqa: SLF001 - of the same class
        vector.values = values
        vector.numel = values.numel()
        vector.is_padded = False
        return vector

    @property
    def indices(self) -> torch.Tensor:
        """Indices of the stored coordinates: int32, ascending, unique, each in ``[0, numel)``."""
        if self._indices is None:
            self._indices = torch.arange(self.numel, dtype=torch.int32, device=self.values.device)
        return self._indices

    @property
    def is_full(self) -> bool:
        """True if every coordinate is stored. A vector with padding is never full."""
        return not self.is_padded and self.values.shape[0] == self.numel

    @property
    def density(self) -> float:
        """Share of coordinates that are stored. It is 0.0 for a vector without coordinates."""
        return len(self) / self.numel if self.numel else 0.0

    def __len__(self) -> int:
        return int(torch.count_nonzero(self.indices >= 0)) if self.is_padded else self.values.numel()

    def __repr__(self) -> str:
        return f"SparseVector({len(self)} of {self.numel})"

    def with_values(self, values: torch.Tensor) -> SparseVector:
        """Return a vector with other ``values`` at the same coordinates."""
        if self.is_full:
            return SparseVector.full(values)
        if self.is_padded:
            return SparseVector.padded(Entries(self.indices, values), self.numel)
        return SparseVector(self.indices, values, self.numel)

    def read_from(self, dense: torch.Tensor) -> torch.Tensor:
        """Return ``dense`` (``[numel]``) at the stored coordinates. It is 0 at padding."""
        if self.is_full:
            return dense
        if self.is_padded:
            return torch.where(self.indices < 0, 0.0, dense[self.indices.clamp(min=0).long()])
        return dense.index_select(0, self.indices)

    def to_dense(self) -> torch.Tensor:
        """Return a new fp32 tensor ``[numel]`` with zeros at coordinates that are not stored."""
        return self.write_to(torch.empty(self.numel, dtype=torch.float32, device=self.values.device))

    def write_to(self, out: torch.Tensor) -> torch.Tensor:
        """Overwrite ``out`` (fp32 ``[numel]``) with the dense form and return it."""
        if self.is_full:
            return out.copy_(self.values)
        set_at(out.zero_(), Entries(self.indices, self.values + 0.0))  # turns -0.0 into 0.0, as in a sum
        return out
