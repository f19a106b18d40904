"""Kernels of dense values in few bits against their references: same words, same remainders, nothing written outside.

With 1 bit, the order of a sum chooses the scale. These tests draw integers then, whose sums are exact in any order.
"""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kernel_cases import DEVICES, FAMILIES, Guarded, cases, drawn, kernels_from, routes, seeds
from kernel_cases import bits as bits_of

import tritoncomm_kernels as kernels
from tritoncomm_kernels import dense_bits
from tritoncomm_kernels.dispatch import kernel
from tritoncomm_kernels.formats import FORMATS

LENGTHS = (1, 2, 33, 63, 64, 65, 700, 1030, 2200)
SCALES = (1.0, 1e-44, 2.0**-149, 1e30)
PARTS = (1, 2, 3, 4, 7)
WIDTHS = list(range(1, 9))
FORMAT = {bits: FORMATS[f"{bits}bit"] for bits in WIDTHS}
pytestmark = pytest.mark.parametrize("device", DEVICES)


def values_of(family: str, numel: int, seed: int, scale: float, bits: int) -> torch.Tensor:
    """Return ``numel`` values of one family, of which half of the cases have a block that is not finite."""
    values = drawn(family, numel, seed)
    if bits == 1:
        values, scale = values.nan_to_num(3.0).mul_(2).clamp_(-6, 6).round_(), 2.0 ** round(math.log2(scale))
    values = values * scale
    if seed % 2:
        values[seed % numel] = (math.nan, math.inf, -math.inf, 3e38)[seed // 2 % 4]
    return values


def arrived_at(part: int, values: torch.Tensor, parts: int, bits: int, seed: int) -> torch.Tensor:
    """Return what arrives at the owner of a part. With two bits or more, the last message has random words."""
    with kernels_from("auto"):
        sent = [
            kernels.round_parts(values.flip(0).roll(rank), parts, (part + 1) % parts, FORMAT[bits])
            for rank in range(parts)
        ]
    arrived = torch.stack([each[part] for each in sent])
    if bits > 1:
        generator = torch.Generator().manual_seed(seed)
        arrived[-1] = torch.randint(-(2**31), 2**31, arrived[-1].shape, generator=generator).to(torch.int32)
    return arrived


def check_steps(device: str, bits: int, parts: int, values: torch.Tensor, seed: int) -> None:
    """Check the three steps, each from the same tensors: kernels write what references return, and nothing else."""
    length, part = dense_bits.part_length(values.numel(), parts), seed % parts
    words = dense_bits.words(length, FORMAT[bits])
    arrived = arrived_at(part, values, parts, bits, seed)
    with kernels_from("auto"):
        left = values.clone()
        messages = kernels.round_parts(left, parts, part, FORMAT[bits])
        first_left = left.clone()
        block = kernels.round_mean(arrived, left, part, FORMAT[bits])
        read = kernels.read_parts(arrived, values.numel(), FORMAT[bits])
    guarded, triton = Guarded(device), kernel("dense_bits_triton")
    held, sent = guarded.of(values), guarded.poison(parts * words, torch.int32)
    mean, given_words = guarded.poison(words, torch.int32), guarded.of(arrived.view(-1)).view(parts, words)
    out = guarded.poison(values.numel())
    with kernels_from("triton"):
        triton.round_parts(held, sent.view(parts, words), part, length, FORMAT[bits])
        assert bits_of(sent) == bits_of(messages)
        assert bits_of(held) == bits_of(first_left)
        triton.round_mean(given_words, held, mean, part, length, FORMAT[bits])
        triton.read_parts(given_words, out, length, FORMAT[bits])
    assert bits_of(mean) == bits_of(block)
    assert bits_of(held) == bits_of(left)
    assert bits_of(out) == bits_of(read)
    guarded.check()


@given(
    bits=st.sampled_from(WIDTHS), parts=st.sampled_from(PARTS), numel=st.sampled_from(LENGTHS),
    family=st.sampled_from(FAMILIES), scale=st.sampled_from(SCALES), seed=seeds,
)  # fmt: skip
@cases(40)
def test_steps(device: str, bits: int, parts: int, numel: int, family: str, scale: float, seed: int) -> None:
    """Any values and received words, with a part that is empty or partly behind the last value."""
    # The mean of integers over ranks is exact, and so are sums of it, for a power of two.
    parts = {3: 2, 7: 8}.get(parts, parts) if bits == 1 else parts
    check_steps(device, bits, parts, values_of(family, numel, seed, scale, bits), seed)


@pytest.mark.parametrize("bits", WIDTHS)
def test_every_width(device: str, bits: int) -> None:
    """Each number of bits, with steps at their borders, zeros of both signs, and a block of zeros."""
    top = 2**bits
    steps = torch.cat([torch.arange(-top, top + 1) / 2, torch.tensor([0.0, -0.0]), torch.zeros(192)])
    for scale in (1.0, 2.0**-148, 2.0**80):
        for seed in (0, 1):
            check_steps(device, bits, 4, steps * scale, seed)


@pytest.mark.parametrize("size", [2, 5])
@pytest.mark.parametrize("bits", [1, 2, 8])
def test_public_functions_launch_the_kernels(device: str, bits: int, size: int) -> None:
    """A mean over ranks has the same bits on both routes."""
    start = [torch.randint(-6, 7, (700,), generator=torch.Generator().manual_seed(rank)) for rank in range(size)]
    found = []
    for choice, where in routes(device):
        with kernels_from(choice):
            values = [each.float().to(where) for each in start]
            sent = [kernels.round_parts(own, size, rank, FORMAT[bits]) for rank, own in enumerate(values)]
            blocks = [
                kernels.round_mean(torch.stack([each[rank] for each in sent]), own, rank, FORMAT[bits])
                for rank, own in enumerate(values)
            ]
            mean = kernels.read_parts(torch.stack(blocks), 700, FORMAT[bits])
        found.append([bits_of(tensor) for tensor in (mean, *values)])
    assert found[0] == found[1]


def test_ordinary_floats_with_one_bit(device: str) -> None:
    """Whatever the order of a sum, the rest is the value minus what is read, and scales differ by one bit at most."""
    values, scales = drawn("heavy", 5000, 3), []
    for choice, where in routes(device):
        with kernels_from(choice):
            left = values.clone().to(where)
            messages = kernels.round_parts(left, 4, 1, FORMAT[1])
            read = kernels.read_parts(messages, 5000, FORMAT[1])
        length = dense_bits.part_length(5000, 4)
        others = torch.ones(5000, dtype=torch.bool)
        others[length : 2 * length] = False
        assert torch.equal((values - read.cpu())[others], left.cpu()[others])
        scales.append(dense_bits.scales_of(messages, 5000, FORMAT[1]).cpu().view(torch.int32) >> 16)
    assert (scales[0] - scales[1]).abs().max() <= 1


def test_nothing_waits(device: str) -> None:
    """No step waits for the GPU."""
    if device == "cpu":
        pytest.skip("waiting needs a GPU")
    values = drawn("normal", 1000, 0).to(device)

    def everything() -> None:
        messages = kernels.round_parts(values, 3, 1, FORMAT[2])
        kernels.round_mean(messages, values, 1, FORMAT[2])
        kernels.read_parts(messages, 1000, FORMAT[2])

    everything()  # compiles
    try:
        torch.cuda.set_sync_debug_mode("error")
        everything()
    finally:
        torch.cuda.set_sync_debug_mode("default")
