"""Dense values in few bits: levels, scales, exact remainders, and words, against plain Python, and kernels beside them.

With 1 bit, the order of a sum chooses the scale. Tests of kernels then draw integers, whose sums are always exact.
"""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from kernel_cases import DENSE_LEVELS as LEVELS
from kernel_cases import FAMILIES, Guarded, cases, drawn, kernels_from, kernels_only, routes, seeds
from kernel_cases import bits as bits_of

import tritoncomm_kernels as kernels
from depth import DEEP, examples
from tritoncomm_kernels import dense_bits, quantize
from tritoncomm_kernels.dispatch import kernel
from tritoncomm_kernels.formats import FORMATS, INDICES

LENGTHS = (1, 2, 33, 63, 64, 65, 700, 1030, 2200)
SCALES = (1.0, 1e-44, 2.0**-149, 1e30)
words_of = st.lists(st.integers(-(2**31), 2**31 - 1), min_size=1, max_size=300)
every_format = pytest.mark.parametrize("name", LEVELS)


def rounded(value: Fraction, bits: int, *, up: bool) -> Fraction:
    """Return a positive ``value`` with that many significant bits, to nearest or upwards."""
    if not value:
        return value
    exponent = max(value.numerator.bit_length() - value.denominator.bit_length() - 1, -127)
    while Fraction(2) ** (exponent + 1) <= value:
        exponent += 1
    unit = Fraction(2) ** (max(exponent, -126) - bits + 1)
    return unit * (math.ceil(value / unit) if up else math.floor(value / unit + Fraction(1, 2)))


def cover(name: str) -> float:
    """Return half a step above the top level, in units of the scale: the largest ratio of two levels or more."""
    below, top = LEVELS[name][-2:]
    return top + (top - below) / 2


def expected(values: list[float], name: str, divisor: int = 1) -> list[Fraction]:
    """Return what a receiver gets for one block of ``values``, from the description of the format alone."""
    kept = quantize.scale_bits(divisor)
    magnitudes = [abs(Fraction(value)) for value in values]
    if len(LEVELS[name]) == 1:
        scale = rounded(sum(magnitudes) / len(values), kept, up=False)
    else:
        largest = np.float32(float(max(magnitudes))) / np.float32(cover(name))
        scale = rounded(Fraction(float(largest)), kept, up=True)
    levels = []
    for value, magnitude in zip(values, magnitudes, strict=True):
        level = sum(magnitude >= (below + above) * scale / 2 for below, above in itertools.pairwise(LEVELS[name]))
        sign = -1 if math.copysign(1, value) < 0 else 1
        levels.append(LEVELS[name][level if scale else 0] * scale * sign)
    return levels


def sent_of(values: torch.Tensor, name: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the message that another rank gets of ``values`` as the first of two parts, its values, and the rest."""
    both = torch.cat([values, torch.zeros(-len(values) % dense_bits.BLOCK + dense_bits.part_length(len(values), 1))])
    left = both.clone()
    message = kernels.round_parts(left, 2, 1, FORMATS[name])
    return message, kernels.read_parts(message, len(both), FORMATS[name])[: len(values)], left[: len(values)]


@every_format
@pytest.mark.parametrize("exponent", [-140, -20, 0, 60])
def test_levels_are_those_of_the_description(name: str, exponent: int) -> None:
    """What is received is what plain Python makes of the description, for whole blocks of integers and halves.

    Zeros become the lowest level, with the sign of the zero. A block of zeros stays zero.
    """
    generator = torch.Generator().manual_seed(FORMATS[name].bits)
    values = torch.randint(-2000, 2000, (4, dense_bits.BLOCK), generator=generator).float() / 2
    values[1] = values[1].clamp(-1, 1)  # ties
    values[2, 5:] = values[3] = 0.0
    values[2, 9] = -0.0
    values = values * 2.0**exponent
    _, received, left = sent_of(values.view(-1), name)
    for block, found in zip(values, received.view(4, -1), strict=True):
        assert [Fraction(level) for level in found.tolist()] == expected(block.tolist(), name)
    assert not left.view(4, -1)[3].any()


@every_format
@given(words=words_of)
@example(words=[4194305])
@examples(20)
def test_rest_is_rounded_once(name: str, words: list[int]) -> None:
    """The rest is the value minus what is received, rounded once, for any bits. It is exact unless it must be rounded.

    With two levels or more, it is at most half of the widest step. A scale below the normal numbers may be too small by
    the rounding of a denormal, which the largest values exceed by as many times as they are larger. With a level for
    zero, the rest is always exact.
    """
    values = torch.tensor(words, dtype=torch.int32).view(torch.float32)
    values = torch.where(values.abs() < 2.0**100, values, 1.0)
    message, received, left = sent_of(values, name)
    scales = dense_bits.scales_of(message, 2 * dense_bits.part_length(len(values), 1), FORMATS[name])[0].tolist()
    for place, (value, level, rest) in enumerate(zip(*map(torch.Tensor.tolist, (values, received, left)), strict=True)):
        exact = Fraction(value) - Fraction(level)
        assert Fraction(rest) == Fraction(float(torch.tensor(float(exact), dtype=torch.float32)))
        assert LEVELS[name][0] or exact == Fraction(rest)
        if len(LEVELS[name]) > 1:
            widest = max(above - below for below, above in itertools.pairwise(LEVELS[name]))
            scale = Fraction(scales[place // dense_bits.BLOCK])
            half = scale * widest / 2
            denormal = math.ceil(cover(name) + 1) * Fraction(2) ** -150 if scale < Fraction(2) ** -126 else 0
            half += half / 2**15 * (LEVELS[name][0] == 0)  # the quotient by 255 is rounded
            assert abs(exact) <= max(half + denormal, Fraction(2) ** -133)


def test_words_of_a_message() -> None:
    """A message has the announced length and these words: signs and steps in planes of 32 values, then bf16 scales."""
    for name in LEVELS:
        for numel in LENGTHS:
            for parts in (1, 2, 5):
                length = dense_bits.part_length(numel, parts)
                assert length % dense_bits.BLOCK == 0
                assert parts * length >= numel > 0
                message = kernels.round_parts(torch.ones(numel), parts, 0, FORMATS[name])
                assert message.shape == (parts, dense_bits.words(length, FORMATS[name]))
                assert not message[0].any()
    assert dense_bits.words(128, FORMATS["1bit"]) == 4 + 1
    assert dense_bits.words(64, FORMATS["3bit"]) == 6 + 1
    values = torch.ones(64)
    values[0] = values[33] = -1.0
    message, _, _ = sent_of(values, "1bit")
    assert message[0].tolist() == [1, 2, 0x3F80]
    # The largest magnitude is 8, so the scale is 2, and the levels are 2 and 6, of either sign.
    message, received, _ = sent_of(torch.tensor([8.0, -8.0, 1.0, -5.0]), "2bit")
    assert received.tolist() == [6.0, -6.0, 2.0, -6.0]
    # The code of 2 is 00, of 6 it is 01, of -2 it is 10, and of -6 it is 11. The other values are zeros: 00.
    assert message[0].tolist() == [0b1011, 0b1010, 0, 0, 0x4000]


@every_format
@pytest.mark.parametrize("parts", [2, 3, 7, 17, 65])  # scales of the mean have 8, 6 and 4 bits
@pytest.mark.parametrize("held", [64, 60, 1])
def test_means_are_added_in_order(name: str, parts: int, held: int) -> None:
    """The owner adds what it reads and its own values in the order of ranks, in fp64. Nothing of the sum is lost.

    A part that holds fewer values than its block does not count what the messages have behind them.
    """
    generator = torch.Generator().manual_seed(parts)
    ranks = torch.randint(-40, 40, (parts, 64 * (parts - 1) + held), generator=generator).float()
    own, total = parts - 1, torch.zeros(held, dtype=torch.float64)
    sent = [values.clone() for values in ranks]
    messages = torch.stack(
        [kernels.round_parts(left, parts, rank, FORMATS[name])[own] for rank, left in enumerate(sent)]
    )
    for rank, values in enumerate(ranks):
        part = slice(64 * own, 64 * own + held)
        total += (values if rank == own else values - sent[rank])[part].double()
    before = sent[own].clone()
    message = kernels.round_mean(messages, sent[own], own, FORMATS[name])
    mean = kernels.read_parts(message.repeat(parts, 1), 64 * parts, FORMATS[name])[:held]
    assert torch.equal(sent[own][64 * own :].double(), total - parts * mean.double())
    assert torch.equal((mean * parts).double(), mean.double() * parts)
    assert torch.equal(sent[own][: 64 * own], before[: 64 * own])  # other parts stay
    expected_levels = expected((total.float() / parts).tolist(), name, parts)
    assert [Fraction(level) for level in mean.tolist()] == expected_levels


@every_format
def test_not_finite_blocks_are_marked(name: str) -> None:
    """A block with NaN, Inf or a magnitude that is too large becomes NaN as a whole, and other blocks do not."""
    # With one level, the scale is a mean of 64 magnitudes.
    too_large = 2 * dense_bits.LIMIT * (LEVELS[name][-1] + 1) * (dense_bits.BLOCK if len(LEVELS[name]) == 1 else 1)
    for bad in (math.nan, -math.nan, math.inf, -math.inf, 3e38, -too_large):
        values = torch.ones(256)
        values[70] = bad
        message, received, _ = sent_of(values, name)
        assert received[64:128].isnan().all()
        assert received[:64].isfinite().all()
        assert received[128:].isfinite().all()
        assert dense_bits.scales_of(message, 512, FORMATS[name])[0].isnan().tolist() == [False, True, False, False]
    _, received, left = sent_of(torch.full((64,), 2.0**103), name)
    assert received.isfinite().all()
    assert left.isfinite().all()


@every_format
def test_hostile_messages_can_be_read(name: str) -> None:
    """Values of random words are NaN or below a known magnitude, and their scales say which."""
    generator, numel, parts = torch.Generator().manual_seed(FORMATS[name].bits), 20_000, 7
    words = dense_bits.words(dense_bits.part_length(numel, parts), FORMATS[name])
    messages = torch.randint(-(2**31), 2**31, (parts, words), generator=generator).to(torch.int32)
    values = kernels.read_parts(messages, numel, FORMATS[name])
    assert (values.isnan() | (values.abs() <= 2 * dense_bits.LIMIT * (LEVELS[name][-1] + 1))).all()
    of_values = (
        dense_bits.scales_of(messages, numel, FORMATS[name]).view(-1)[: -(-numel // 64)].repeat_interleave(64)[:numel]
    )
    assert torch.equal(of_values.isnan(), values.isnan())
    mine = torch.ones(numel)
    assert kernels.round_mean(messages, mine, 3, FORMATS[name]).shape == (words,)


@every_format
@pytest.mark.parametrize("numel", [1000, 6000])
def test_chunks_change_nothing(name: str, numel: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Values at once and in chunks of two blocks have the same messages, means and remainders."""
    start = torch.randn(numel, generator=torch.Generator().manual_seed(numel))

    def everything() -> list[torch.Tensor]:
        values = start.clone()
        messages = kernels.round_parts(values, 3, 1, FORMATS[name])
        block = kernels.round_mean(messages[:1].repeat(3, 1), values, 1, FORMATS[name])
        return [messages, block, values, kernels.read_parts(block.repeat(3, 1), numel, FORMATS[name])]

    whole = everything()
    monkeypatch.setattr(dense_bits, "_CHUNK", 4 * dense_bits.BLOCK)
    assert all(map(torch.equal, everything(), whole))


def test_arguments() -> None:
    """Other dtypes and shapes, no values, and other formats are errors that name the argument."""
    with pytest.raises(ValueError, match=r"values has dtype torch\.float64"):
        kernels.round_parts(torch.ones(5, dtype=torch.float64), 2, 0, FORMATS["1bit"])
    with pytest.raises(ValueError, match="no values"):
        kernels.round_parts(torch.ones(0), 2, 0, FORMATS["1bit"])
    for fmt in (INDICES, FORMATS["fp32"]):
        with pytest.raises(ValueError, match=f"format {fmt.name} has no levels .* one of 8bit, 7bit"):
            kernels.round_mean(torch.zeros(2, 3, dtype=torch.int32), torch.ones(5), 0, fmt)
        with pytest.raises(ValueError, match=f"format {fmt.name} has no levels .* one of 8bit, 7bit"):
            kernels.read_parts(torch.zeros(2, 3, dtype=torch.int32), 5, fmt)


def values_of(family: str, numel: int, seed: int, scale: float, name: str) -> torch.Tensor:
    """Return ``numel`` values of one family, of which half of the cases have a block that is not finite."""
    values = drawn(family, numel, seed)
    if len(LEVELS[name]) == 1:
        values, scale = values.nan_to_num(3.0).mul_(2).clamp_(-6, 6).round_(), 2.0 ** round(math.log2(scale))
    values = values * scale
    if seed % 2:
        values[seed % numel] = (math.nan, math.inf, -math.inf, 3e38)[seed // 2 % 4]
    return values


def arrived_at(part: int, values: torch.Tensor, parts: int, name: str, seed: int) -> torch.Tensor:
    """Return what arrives at the owner of a part. With two levels or more, the last message has random words."""
    with kernels_from("auto"):
        sent = [
            kernels.round_parts(values.flip(0).roll(rank), parts, (part + 1) % parts, FORMATS[name])
            for rank in range(parts)
        ]
    arrived = torch.stack([each[part] for each in sent])
    if len(LEVELS[name]) > 1:
        generator = torch.Generator().manual_seed(seed)
        arrived[-1] = torch.randint(-(2**31), 2**31, arrived[-1].shape, generator=generator).to(torch.int32)
    return arrived


def check_steps(device: str, name: str, parts: int, values: torch.Tensor, seed: int) -> None:
    """Check the three steps, each from the same tensors: kernels write what references return, and nothing else."""
    length, part = dense_bits.part_length(values.numel(), parts), seed % parts
    words = dense_bits.words(length, FORMATS[name])
    arrived = arrived_at(part, values, parts, name, seed)
    with kernels_from("auto"):
        left = values.clone()
        messages = kernels.round_parts(left, parts, part, FORMATS[name])
        first_left = left.clone()
        block = kernels.round_mean(arrived, left, part, FORMATS[name])
        read = kernels.read_parts(arrived, values.numel(), FORMATS[name])
    guarded, triton = Guarded(device), kernel("dense_bits_triton")
    held, sent = guarded.of(values), guarded.poison(parts * words, torch.int32)
    mean, given_words = guarded.poison(words, torch.int32), guarded.of(arrived)
    out = guarded.poison(values.numel())
    with kernels_from("triton"):
        triton.round_parts(held, sent.view(parts, words), part, length, FORMATS[name])
        assert bits_of(sent) == bits_of(messages)
        assert bits_of(held) == bits_of(first_left)
        triton.round_mean(given_words, held, mean, part, length, FORMATS[name])
        triton.read_parts(given_words, out, length, FORMATS[name])
    assert bits_of(mean) == bits_of(block)
    assert bits_of(held) == bits_of(left)
    assert bits_of(out) == bits_of(read)
    guarded.check()


@kernels_only
@given(
    name=st.sampled_from([*LEVELS]), parts=st.sampled_from([1, 2, 3, 4, 7]), numel=st.sampled_from(LENGTHS),
    family=st.sampled_from(FAMILIES), scale=st.sampled_from(SCALES), seed=seeds,
)  # fmt: skip
@example(name="1bit", parts=1, numel=1030, family="special", scale=1.0, seed=0)  # the scale of a mean is rounded up
@cases(40)
def test_steps(device: str, name: str, parts: int, numel: int, family: str, scale: float, seed: int) -> None:
    """Any values and received words, with a part that is empty or partly behind the last value."""
    # The mean of integers over ranks is exact, and so are sums of it, for a power of two.
    parts = {3: 2, 7: 8}.get(parts, parts) if len(LEVELS[name]) == 1 else parts
    check_steps(device, name, parts, values_of(family, numel, seed, scale, name), seed)


@kernels_only
@every_format
def test_every_format(device: str, name: str) -> None:
    """Each format, with steps at their borders, zeros of both signs, and a block of zeros."""
    top = 2 ** FORMATS[name].bits
    steps = torch.cat([torch.arange(-top, top + 1) / 2, torch.tensor([0.0, -0.0]), torch.zeros(192)])
    scales = (1.0, 2.0**-148, 2.0**80)
    for scale, seed in itertools.product(scales, (0, 1)) if DEEP else zip(scales, (0, 1, 0), strict=True):
        check_steps(device, name, 4, steps * scale, seed)


@kernels_only
def test_ordinary_floats_with_one_bit(device: str) -> None:
    """Whatever the order of a sum, the rest is the value minus what is read, and scales differ by one bit at most."""
    values, scales = drawn("heavy", 5000, 3), []
    for choice, where in routes(device):
        with kernels_from(choice):
            left = values.clone().to(where)
            messages = kernels.round_parts(left, 4, 1, FORMATS["1bit"])
            read = kernels.read_parts(messages, 5000, FORMATS["1bit"])
        length = dense_bits.part_length(5000, 4)
        others = torch.ones(5000, dtype=torch.bool)
        others[length : 2 * length] = False
        assert torch.equal((values - read.cpu())[others], left.cpu()[others])
        scales.append(dense_bits.scales_of(messages, 5000, FORMATS["1bit"]).cpu().view(torch.int32) >> 16)
    assert (scales[0] - scales[1]).abs().max() <= 1
