"""SparseVector."""

from __future__ import annotations

import pytest
import torch
from tritoncomm import ConfigurationError, SparseVector


def test_dense_form_and_density() -> None:
    """A sparse vector has a dense form and a density. A full one creates its indices when they are read."""
    vector = SparseVector(torch.tensor([1, 3], dtype=torch.int32), torch.tensor([2.0, -1.0]), 5)
    assert vector.to_dense().tolist() == [0, 2, 0, -1, 0]
    assert (len(vector), vector.density, vector.is_full) == (2, 0.4, False)
    full = SparseVector.full(torch.arange(3.0))
    assert full.is_full
    assert full.indices.tolist() == [0, 1, 2]
    assert full.to_dense().tolist() == [0, 1, 2]
    assert repr(vector) == "SparseVector(2 of 5)"


@pytest.mark.parametrize(
    ("indices", "values", "named"),
    [
        (torch.tensor([1]), torch.ones(1), "int64"),
        (torch.tensor([1], dtype=torch.int32), torch.ones(1).double(), "float64"),
        (torch.tensor([1], dtype=torch.int32), torch.ones(2), r"\(1,\) and values of shape \(2,\)"),
    ],
)
def test_bad_tensors_are_rejected(indices: torch.Tensor, values: torch.Tensor, named: str) -> None:
    """Wrong dtypes and lengths are rejected by name."""
    with pytest.raises(ConfigurationError, match=named):
        SparseVector(indices, values, 9)
