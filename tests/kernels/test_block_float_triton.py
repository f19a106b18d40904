"""Kernels of block floating point against their references: same words, same remainders, nothing written outside."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kernel_cases import DEVICES, FAMILIES, Guarded, cases, drawn, kernels_from, routes, seeds
from kernel_cases import bits as bits_of

import tritoncomm_kernels as kernels
from tritoncomm_kernels import block_float
from tritoncomm_kernels.dispatch import kernel

LENGTHS = (1, 2, 3, 7, 255, 256, 257, 700, 1030)
SCALES = (1.0, 1e-44, 2.0**-149, 1e30)
PARTS = (1, 2, 3, 7)
pytestmark = pytest.mark.parametrize("device", DEVICES)


def values_of(family: str, numel: int, seed: int, scale: float) -> torch.Tensor:
    """Return ``numel`` values of one family, of which half of the cases have a block that is not finite."""
    values = drawn(family, numel, seed) * scale
    if seed % 2:
        values[seed % numel] = (math.nan, math.inf, -math.inf, 3e38)[seed // 2 % 4]
    return values


def check_steps(device: str, bits: int, parts: int, values: torch.Tensor, seed: int) -> None:
    """Check the three steps, each from the same tensors: kernels write what references return, and nothing else."""
    length, part = -(-values.numel() // parts), seed % parts
    words = block_float.words(length, bits)
    generator = torch.Generator().manual_seed(seed)
    arrived = torch.randint(-(2**31), 2**31, (parts, words), generator=generator).to(torch.int32)
    with kernels_from("auto"):
        messages, left = kernels.quantize_parts(values, parts, bits)
        first_left = left.clone()
        block = kernels.quantize_mean(arrived, values, left, part, bits)
        read = kernels.dequantize_parts(arrived, values.numel(), bits)
    guarded, triton = Guarded(device), kernel("block_float_triton")
    held, rest, sent = guarded.of(values), guarded.poison(values.numel()), guarded.poison(parts * words, torch.int32)
    mean, given_words = guarded.poison(words, torch.int32), guarded.of(arrived.view(-1)).view(parts, words)
    out = guarded.poison(values.numel())
    with kernels_from("triton"):
        triton.quantize_parts(held, sent.view(parts, words), rest, length, bits)
        assert bits_of(sent) == bits_of(messages)
        assert bits_of(rest) == bits_of(first_left)
        triton.quantize_mean(given_words, held, rest, mean, part, length, bits)
        triton.dequantize_parts(given_words, out, length, bits)
    assert bits_of(mean) == bits_of(block)
    assert bits_of(rest) == bits_of(left)
    assert bits_of(out) == bits_of(read)
    guarded.check()


@given(
    bits=st.sampled_from([8, 4]), parts=st.sampled_from(PARTS), numel=st.sampled_from(LENGTHS),
    family=st.sampled_from(FAMILIES), scale=st.sampled_from(SCALES), seed=seeds,
)  # fmt: skip
@cases(40)
def test_steps(device: str, bits: int, parts: int, numel: int, family: str, scale: float, seed: int) -> None:
    """Any values and any received words, with a part that is empty or partly behind the last value."""
    check_steps(device, bits, parts, values_of(family, numel, seed, scale), seed)


@pytest.mark.parametrize("bits", [8, 4])
def test_ties(device: str, bits: int) -> None:
    """Halves of a step go to the even integer, and integers stay in their range."""
    top = 2 ** (bits - 1) - 1
    steps = torch.arange(-2 * top - 1, 2 * top + 2) / 2
    for scale in (1.0, 2.0**-148, 2.0**80):
        check_steps(device, bits, 1, steps * scale, 0)
        check_steps(device, bits, 3, steps * scale, 2)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("size", [2, 5])
def test_public_functions_launch_the_kernels(device: str, bits: int, size: int) -> None:
    """A mean over ranks has the same bits on both routes."""
    found = []
    for choice, where in routes(device):
        values = [drawn("normal", 700, rank).to(where) for rank in range(size)]
        with kernels_from(choice):
            sent, left = zip(*(kernels.quantize_parts(own, size, bits) for own in values), strict=True)
            blocks = [
                kernels.quantize_mean(torch.stack([each[rank] for each in sent]), values[rank], left[rank], rank, bits)
                for rank in range(size)
            ]
            mean = kernels.dequantize_parts(torch.stack(blocks), 700, bits)
        found.append([bits_of(tensor) for tensor in (mean, *left)])
    assert found[0] == found[1]


def test_nothing_waits(device: str) -> None:
    """No step waits for the GPU."""
    if device == "cpu":
        pytest.skip("waiting needs a GPU")
    values = drawn("normal", 1000, 0).to(device)

    def everything() -> None:
        messages, left = kernels.quantize_parts(values, 3, 8)
        kernels.quantize_mean(messages, values, left, 1, 8)
        kernels.dequantize_parts(messages, 1000, 8)

    everything()  # compiles
    try:
        torch.cuda.set_sync_debug_mode("error")
        everything()
    finally:
        torch.cuda.set_sync_debug_mode("default")
