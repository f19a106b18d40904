"""Block floating point: exact remainders, errors of at most half a step, and the bytes of a message."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from depth import examples
from tritoncomm_kernels import block_float

LENGTHS = (1, 2, 3, 7, 255, 256, 257, 511, 1000)
LARGEST = {8: 2.0**112, 4: 2.0**108}  # is refused, and the number before it is not
words_of = st.lists(st.integers(-(2**31), 2**31 - 1), min_size=1, max_size=300)


def floats(words: list[int]) -> torch.Tensor:
    """Return the fp32 numbers with these bits, of which those that are not accepted are replaced by 1."""
    values = torch.tensor(words, dtype=torch.int32).view(torch.float32)
    return torch.where(values.abs() < LARGEST[4], values, 1.0)


def exact_and_near(values: torch.Tensor, bits: int) -> None:
    """Check that the difference of each value and what is decoded is exact in fp32, and at most one step."""
    sent = block_float.decode(block_float.encode(values[None], bits)[0], values.numel(), bits)[0]
    left = values - sent
    for start in range(0, values.numel(), block_float.BLOCK):
        block = slice(start, start + block_float.BLOCK)
        step = Fraction(float(values[block].abs().max().double())) / 2 ** (bits - 2)
        for value, quantized, rest in zip(*(part[block].tolist() for part in (values, sent, left)), strict=True):
            assert Fraction(value) - Fraction(quantized) == Fraction(rest)
            assert abs(Fraction(rest)) <= max(step, Fraction(2) ** -149)
            assert value * quantized >= 0.0


@pytest.mark.parametrize("bits", [8, 4])
@given(words=words_of)
@examples(40)
def test_remainder_is_exact_for_random_bits(bits: int, words: list[int]) -> None:
    """Value minus decoded value is exact in fp32, for any bits."""
    exact_and_near(floats(words), bits)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("scale", [1.0, 1e-44, 2.0**-149, 1e30])
def test_remainder_is_exact_at_every_scale(bits: int, length: int, scale: float) -> None:
    """The same for normal values, denormals and large values, and for lengths around the size of a block."""
    exact_and_near(torch.randn(length, generator=torch.Generator().manual_seed(length)) * scale, bits)


@pytest.mark.parametrize("bits", [8, 4])
@given(words=words_of, rows=st.integers(1, 9), repeats=st.integers(1, 20), exponent=st.integers(-60, 60))
@examples(100)
def test_fp32_and_chunks_change_nothing(bits: int, words: list[int], rows: int, repeats: int, exponent: int) -> None:
    """Values in fp32 and in fp64, at once and in chunks of one block, have the same messages, means and remainders."""
    values = torch.tensor(words, dtype=torch.int32).view(torch.float32).repeat(repeats) * 2.0**exponent
    table = values.repeat(rows, 1) * torch.linspace(0.5, 1, rows)[:, None]
    message, sent = block_float.encode(table, bits)
    wide, expected = block_float.encode(table.double(), bits)
    assert torch.equal(message, wide)
    assert torch.equal(sent.double().nan_to_num(7e99), expected.nan_to_num(7e99))

    def mean() -> list[torch.Tensor]:
        messages, left = block_float.quantize_parts(values, rows, bits)
        block = block_float.quantize_mean(messages[:1].repeat(rows, 1), values, left, 0, bits)
        found = block_float.dequantize_parts(block.repeat(rows, 1), values.numel(), bits)
        return [messages, block, left.nan_to_num(7e33), found.nan_to_num(7e33)]

    whole = mean()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(block_float, "_CHUNK", 1)
        assert all(map(torch.equal, mean(), whole))
        assert torch.equal(block_float.encode(table, bits)[0], message)


@pytest.mark.parametrize("bits", [8, 4])
def test_integers_that_fit_are_exact(bits: int) -> None:
    """Integers of the range, times a power of two, are decoded as they are."""
    top = 2 ** (bits - 1) - 1
    values = torch.arange(-top, top + 1).float()
    for exponent in (-149, -20, 0, 90):
        scaled = (values.double() * 2.0**exponent).float()
        message = block_float.encode(scaled[None], bits)[0]
        assert torch.equal(block_float.decode(message, len(values), bits)[0].float(), scaled)


def test_ties_go_to_even_and_the_range_is_symmetric() -> None:
    """A half is rounded to the even integer, and 127.9 steps become 127."""
    values = torch.tensor([[100.0, 0.5, 1.5, 2.5, -0.5, -1.5, 127.9, -127.9]])
    decoded = block_float.decode(block_float.encode(values, 8)[0], 8, 8)
    assert decoded.tolist() == [[100.0, 0.0, 2.0, 2.0, 0.0, -2.0, 127.0, -127.0]]


def test_words_of_a_message() -> None:
    """A message has the announced length and these words: integers, then one exponent per block, lowest byte first."""
    for bits in (8, 4):
        for length in LENGTHS:
            message = block_float.encode(torch.ones(3, length), bits)[0]
            assert message.shape == (3, block_float.words(length, bits))
    assert block_float.words(1000, 8) == 250 + 1
    assert block_float.words(1025, 8) == 257 + 2
    assert block_float.words(1000, 4) == 125 + 1
    values = torch.tensor([[64.0, -2.0, 4.0, 6.0, -128.0]])  # steps of 2
    assert block_float.encode(values, 8)[0].tolist() == [[0x0302FF20, 0xC0, 1 + 149]]
    assert block_float.encode(torch.tensor([[4.0, -1.0, 7.0]]), 4)[0].tolist() == [[0x7F4, 149]]


@pytest.mark.parametrize("bits", [8, 4])
def test_not_finite_blocks_are_marked(bits: int) -> None:
    """A block with NaN, Inf or a value that is too large becomes NaN as a whole, and other blocks do not."""
    largest = LARGEST[bits]
    for bad in (math.nan, -math.nan, math.inf, -math.inf, 3e38, -largest):
        values = torch.ones(2, 600)
        values[1, 300] = bad
        decoded = block_float.decode(block_float.encode(values, bits)[0], 600, bits)
        assert decoded[0].eq(1).all()
        assert decoded[1, :256].eq(1).all()
        assert decoded[1, 256:512].isnan().all()
        assert decoded[1, 512:].eq(1).all()
    below = torch.full((1, 9), largest * (1 - 2**-24))
    assert block_float.decode(block_float.encode(below, bits)[0], 9, bits).isfinite().all()


@pytest.mark.parametrize("bits", [8, 4])
@given(words=words_of)
@examples(40)
def test_any_words_can_be_decoded(bits: int, words: list[int]) -> None:
    """Words from anywhere become fp32 values that are NaN or below a known magnitude."""
    length = next(n for n in range(1000, 0, -1) if block_float.words(n, bits) <= max(2, len(words)))
    message = torch.tensor((words * 2)[: block_float.words(length, bits)], dtype=torch.int32)[None]
    decoded = block_float.decode(message, length, bits)
    assert decoded.shape == (1, length)
    assert (decoded.isnan() | (decoded.abs() <= 2.0**112)).all()


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("flipped", [False, True])
def test_100_000_hostile_messages_can_be_decoded(bits: int, flipped: bool) -> None:
    """Random messages, and messages with one flipped bit, are NaN or below a known magnitude."""
    count, length, generator = 100_000, 21, torch.Generator().manual_seed(bits)
    words = block_float.words(length, bits)
    if flipped:
        message = block_float.encode(torch.randn(count, length, generator=generator), bits)[0]
        place = torch.randint(32 * words, (count, 1), generator=generator)
        flips = torch.where(torch.arange(words) == place // 32, torch.ones((), dtype=torch.int64) << place % 32, 0)
        message = message ^ flips.to(torch.int32)
    else:
        message = torch.randint(-(2**31), 2**31, (count, words), generator=generator).to(torch.int32)
    decoded = block_float.decode(message, length, bits)
    assert (decoded.isnan() | (decoded.abs() <= 2.0**112)).all()
    assert decoded.isnan().any(1).float().mean() < 0.05


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_same_bits_on_a_gpu() -> None:
    """A GPU writes the same words and reads the same values."""
    words = torch.randint(-(2**31), 2**31 - 1, (5, 3000), generator=torch.Generator().manual_seed(0))
    values = words.to(torch.int32).view(torch.float32)
    for bits in (8, 4):
        message = block_float.encode(values, bits)[0]
        assert torch.equal(block_float.encode(values.cuda(), bits)[0].cpu(), message)
        decoded = block_float.decode(message, 3000, bits)
        there = block_float.decode(message.cuda(), 3000, bits).cpu()
        assert torch.equal(there.nan_to_num(), decoded.nan_to_num())
        assert torch.equal(there.isnan(), decoded.isnan())
