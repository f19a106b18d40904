"""The sparse vector: what every method delivers."""

from __future__ import annotations

import torch

from tritoncomm.errors import ConfigurationError
from tritoncomm_kernels import Workspace, decompress


class SparseVector:
    """``numel`` coordinates of which some are stored: ascending unique int32 indices, fp32 values.

    An empty support is legal. A vector made by :meth:`full` stores every coordinate and creates its
    indices only when somebody asks for them. Treat the tensors as read-only.
    """

    __slots__ = ("_indices", "numel", "values")

    def __init__(self, indices: torch.Tensor, values: torch.Tensor, numel: int) -> None:
        if indices.dtype != torch.int32 or values.dtype != torch.float32:
            raise ConfigurationError(
                f"SparseVector takes int32 indices and float32 values, got {indices.dtype} and {values.dtype}"
            )
        if indices.dim() != 1 or indices.shape != values.shape:
            raise ConfigurationError(
                f"indices {tuple(indices.shape)} and values {tuple(values.shape)} "
                "must be one-dimensional and equally long"
            )
        self._indices: torch.Tensor | None = indices
        self.values = values
        self.numel = numel

    @classmethod
    def full(cls, values: torch.Tensor) -> SparseVector:
        """Every coordinate of the fp32 vector ``values`` (``[n]``), without storing indices."""
        vector = cls.__new__(cls)
        vector._indices = None  # noqa: SLF001 - our own
        vector.values = values
        vector.numel = values.numel()
        return vector

    @property
    def indices(self) -> torch.Tensor:
        """Ascending, unique, int32, each in ``[0, numel)``."""
        if self._indices is None:
            self._indices = torch.arange(self.numel, dtype=torch.int32, device=self.values.device)
        return self._indices

    @property
    def is_full(self) -> bool:
        """True when every coordinate is stored."""
        return self.values.numel() == self.numel

    @property
    def density(self) -> float:
        """Stored share of the coordinates; 0.0 for a vector without coordinates."""
        return self.values.numel() / self.numel if self.numel else 0.0

    def __len__(self) -> int:
        return self.values.numel()

    def __repr__(self) -> str:
        return f"SparseVector({len(self)} of {self.numel})"

    def to_dense(self) -> torch.Tensor:
        """A new fp32 ``[numel]`` tensor with zeros where nothing is stored."""
        return self.write_to(torch.empty(self.numel, device=self.values.device))

    def write_to(self, out: torch.Tensor, *, workspace: Workspace | None = None) -> torch.Tensor:
        """Overwrite ``out`` (fp32 ``[numel]``) with the dense form and return it.

        ``workspace`` keeps a GPU's scratch memory from step to step.
        """
        if self.is_full:
            return out.copy_(self.values)
        return decompress(out, self.indices, self.values, workspace=workspace)
