"""The test of many tensors for a NaN or Inf, which reads each of them once."""

import math

import pytest
import torch
from tritoncomm.step.tensors.shards import all_finite

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


@pytest.mark.parametrize("dtype", DTYPES)
def test_values_of_a_dtype(dtype: torch.dtype) -> None:
    """NaN and Inf are found at any place, also two Inf that cancel. Values whose sum or squares overflow are finite."""
    values = torch.zeros(1001, dtype=dtype)
    for bad in (math.nan, math.inf, -math.inf):
        for place in (0, 500, 1000):
            assert not all_finite([values, values.index_fill(0, torch.tensor(place), bad)])
    values[0], values[1000] = math.inf, -math.inf
    assert not all_finite([values])
    assert not all_finite([values[:1], values[1000:]])
    for sign in (1, -1):
        large = torch.full((4096,), sign * torch.finfo(dtype).max, dtype=dtype)
        assert all_finite([large])
        assert all_finite([torch.cat([large, -large])])
        large[77] = math.nan
        assert not all_finite([large])


def test_any_tensors() -> None:
    """Nothing, empty tensors, several dtypes and sparse tensors."""
    assert all_finite([])
    assert all_finite([torch.empty(0), torch.empty(3, 0)])
    assert all_finite([torch.ones(2, dtype=dtype) for dtype in DTYPES])
    assert not all_finite([torch.ones(2), torch.full((2,), math.inf, dtype=torch.float64)])
    sparse = torch.sparse_coo_tensor(torch.tensor([[1, 1]]), torch.tensor([1.0, 2.0]), (4,), check_invariants=True)
    assert all_finite([sparse])
    assert not all_finite([sparse * math.nan])
