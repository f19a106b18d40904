"""The number of a tensor tells its bits and their places, and nothing else."""

from __future__ import annotations

import pytest
import torch
from tritoncomm.step.agree.number import number_of, numbers

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("numel", [1, 2, 3, 7, 8, 9, 64, 300])
def test_every_bit_counts(dtype: torch.dtype, numel: int) -> None:
    """Whatever the dtype and the length, the number changes with each byte."""
    values = torch.arange(numel).to(dtype)
    before = number_of(values)
    for place in range(values.numel() * values.element_size()):
        changed = values.clone()
        changed.view(torch.uint8)[place] ^= 1
        assert number_of(changed) != before


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("numel", [2, 9, 33, 200])
def test_places_count(dtype: torch.dtype, numel: int) -> None:
    """Two values that change places change the number, also two that differ in their sign alone."""
    for values in (torch.arange(numel).to(dtype), torch.full((numel,), 0.5).to(dtype)):
        values[0] = -values[1]
        seen = {int(number_of(values))}
        for place in range(1, numel):
            moved = values.clone()
            moved[0], moved[place] = values[place], values[0]
            seen.add(int(number_of(moved)))
        assert len(seen) == numel
        assert number_of(values.flip(0)) != number_of(values)


def test_rows_and_columns_that_move() -> None:
    """So do blocks of any length that change places, and a transposed matrix."""
    values = torch.arange(4096, dtype=torch.float32)
    moved = [values.roll(2**power) for power in range(12)]
    moved += [values.view(2**power, -1).t().reshape(-1) for power in range(1, 12)]
    assert len({*numbers([values, *moved])}) == 1 + len(moved)


def test_memory_does_not_count() -> None:
    """Equal values have equal numbers, whatever their strides and alignment."""
    values = torch.randn(2, 4, 3, 5)
    strided = values.to(memory_format=torch.channels_last)
    shifted = torch.randn(values.numel() + 1)[1:].view(values.shape).copy_(values)
    assert len({*numbers([values, strided, shifted])}) == 1
    assert (
        len({*numbers([torch.ones(1), torch.ones(()).expand(1), torch.as_strided(torch.ones(3), (1,), (0,), 1)])}) == 1
    )
    assert len({*numbers([values.bool(), values.bool()[:, :, :, [0, 1, 2, 3, 4]]])}) == 1


def test_zeros_have_no_number() -> None:
    """The number of zeros, and of no values, is zero. Gradients of zeros are not taken for averaged ones."""
    for shape in ((0,), (3,), (5, 7), (40, 40)):
        assert number_of(torch.zeros(shape)) == 0
    assert number_of(torch.zeros(3, dtype=torch.bfloat16)) == 0


def test_other_values() -> None:
    """Numbers and texts have a number, too, which a float holds."""
    found = numbers([1.0, 2.0, "text", torch.ones(2), torch.ones(2, dtype=torch.complex64).conj()])
    assert len({*found}) == 5
    assert all(int(float(number)) == number for number in found[:3])
