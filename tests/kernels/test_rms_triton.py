"""Kernels for root mean squares equal the reference, bit for bit, for any grid, and write nothing else."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from kernel_cases import DEVICES, INTERPRETED, Guarded, bits, cases, drawn, families, kernels_from, seeds

import tritoncomm_kernels as kernels
from tritoncomm_kernels.dispatch import kernel

pytestmark = pytest.mark.parametrize("device", DEVICES)
lengths = st.sampled_from([1, 2, 255, 256, 257, 1030, 2100])


def check(device: str, tensors: list[torch.Tensor], *, block: int, programs: int) -> None:
    """Check the kernels on guarded copies against the reference."""
    with kernels_from("torch"):
        expected = [bits(kernels.root_mean_square(tensor)) for tensor in tensors]
    guarded = Guarded(device)
    held = [guarded.of(tensor) for tensor in tensors]
    with kernels_from("triton"):
        found = kernel("rms_triton").root_mean_squares(held, block=block, programs=programs)
    assert [bits(value) for value in found] == expected
    assert [bits(tensor) for tensor in held] == [bits(tensor) for tensor in tensors]
    guarded.check()


@given(
    tensors=st.lists(st.tuples(lengths, families, st.sampled_from([1.0, 1e-30, 1e-44, 1e30])), min_size=1, max_size=4),
    dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
    grid=st.sampled_from([(1024, 64), (256, 1), (256, 3)]),
    seed=seeds,
)
@example(tensors=[(1, "special", 1.0)], dtype=torch.bfloat16, grid=(1024, 64), seed=0)  # one denormal
@cases(30)
def test_many_tensors(
    device: str, tensors: list[tuple[int, str, float]], dtype: torch.dtype, grid: tuple[int, int], seed: int
) -> None:
    """Tensors of several lengths, scales and dtypes, with NaN, Inf and denormals among them."""
    each = [(drawn(family, n, seed + i) * scale).to(dtype) for i, (n, family, scale) in enumerate(tensors)]
    if INTERPRETED and dtype == torch.bfloat16:  # the interpreter reads bf16 denormals as 0, as a GPU does not
        for values in each:
            values[values.abs() < torch.finfo(dtype).tiny] = 0.0
    check(device, each, block=grid[0], programs=grid[1])


@pytest.mark.parametrize("count", [1, 127, 128, 129])
def test_one_number_per_tensor(device: str, count: int) -> None:
    """As many results as tensors, of more tensors than the last kernel handles in a program."""
    check(device, [torch.full((1,), float(i)) for i in range(count)], block=256, programs=1)


@pytest.mark.parametrize("bad", [math.nan, -math.inf])
def test_not_finite(device: str, bad: float) -> None:
    """NaN and Inf make the result of their tensor NaN, and of no other."""
    tensors = [torch.ones(700), torch.ones(700), torch.ones(700)]
    tensors[1][600] = bad
    check(device, tensors, block=256, programs=3)


def test_public_function(device: str) -> None:
    """Both routes return the same for tensors of all kinds, also those that the kernels do not take."""
    whole = drawn("normal", 1200, 1).to(device).view(30, 40)
    tensors = [whole, whole.t(), whole.double(), whole.half(), whole[:, :7], whole.bfloat16()[3]]
    found = []
    for choice in ("torch", "triton"):
        with kernels_from(choice):
            found.append([bits(value) for value in kernels.root_mean_squares(tensors)])
    assert found[0] == found[1]


def test_nothing_waits(device: str) -> None:
    """The host does not wait."""
    if device == "cpu":
        pytest.skip("waiting needs a GPU")
    tensors = [torch.ones(3000, device=device), torch.ones(7, device=device)]
    kernels.root_mean_squares(tensors)  # compiles
    try:
        torch.cuda.set_sync_debug_mode("error")
        kernels.root_mean_squares(tensors)
    finally:
        torch.cuda.set_sync_debug_mode("default")
