"""The test of many tensors for a NaN or Inf, which reads each of them once."""

import math

import pytest
import torch
from tritoncomm.step.tensors.shards import all_finite

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_bad_value_is_found(dtype: torch.dtype, bad: float) -> None:
    """A single NaN or Inf is found at any place, whatever stands before and behind it."""
    values = torch.zeros(1001, dtype=dtype)
    for place in (0, 500, 1000):
        tensor = values.index_fill(0, torch.tensor(place), bad)
        assert not all_finite([values, tensor])


@pytest.mark.parametrize("dtype", DTYPES)
def test_infinities_that_cancel_are_found(dtype: torch.dtype) -> None:
    """Inf and minus Inf do not cancel, in one tensor or in several."""
    tensor = torch.zeros(1001, dtype=dtype)
    tensor[0], tensor[1000] = math.inf, -math.inf
    assert not all_finite([tensor])
    assert not all_finite([tensor[:1], tensor[1000:]])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sign", [1, -1])
def test_large_values_are_finite(dtype: torch.dtype, sign: int) -> None:
    """Finite values whose sum or squares overflow are finite, also if partial sums overflow in both directions."""
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
