"""Packed sections: kernels equal the reference, bit for bit, and refuse the same words. Both lose nothing."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from kernel_cases import Guarded, agree, bits, both, cases, drawn, kernels_from, routes, seeds

from tritoncomm_kernels import Entries, quantize
from tritoncomm_kernels.formats import ENTRY_FORMATS, FORMATS, INDICES, Format
from tritoncomm_kernels.section_layout import Layout
from tritoncomm_kernels.sections import read_one, read_rows, write_one, write_rows

KINDS = ("normal", "heavy", "equal", "special", "tail", "outlier", "huge")
FP32, EIGHT, FOUR, TWO = (FORMATS[name] for name in ("fp32", "8bit", "4bit", "2bit"))
formats = st.sampled_from([INDICES, *(FORMATS[name] for name in ENTRY_FORMATS)])
rooms = st.sampled_from([1, 2, 31, 32, 33, 100, 1023, 1025, 1500])
spans = st.sampled_from([1, 2, 31, 33, 129, 400, 4096, 70_000, 2**31 - 1])
divisors = st.sampled_from([1, 1, 2, 3, 9, 64, 1000])
rows_drawn = st.lists(st.tuples(st.sampled_from(KINDS), st.sampled_from([0, 0.5, 1])), min_size=1, max_size=3)


def values_of(kind: str, count: int, seed: int) -> torch.Tensor:
    """Return ``count`` values to send. Only ``special`` has NaN and Inf."""
    rng = np.random.default_rng(seed)
    signs = torch.from_numpy(rng.choice([-1.0, 1.0], count)).float()
    if kind == "tail":  # what error feedback selects
        return signs * torch.from_numpy(1 + rng.exponential(0.2, count)).float()
    if kind == "outlier":
        return signs * torch.where(torch.arange(count) == count // 2, 1e30, 1.0)
    if kind == "huge":
        return signs * torch.where(torch.arange(count) % 3 == 0, torch.finfo(torch.float32).max, 2.5e38)
    return drawn(kind, count, seed)


def rows_of(layout: Layout, drawn_rows: list[tuple[str, float]], seed: int, spare: int) -> tuple[torch.Tensor, Entries]:
    """Return first coordinates, and rows with a kind of values and a share of the room each."""
    rng, room, span = np.random.default_rng(seed), layout.room + spare, layout.span
    highest = rng.choice([0, 1000, 2**30])
    lows = torch.from_numpy(rng.integers(0, 1 + min(highest, 2**31 - 1 - span), len(drawn_rows)).astype(np.int32))
    rows = Entries(torch.full((len(drawn_rows), room), -1, dtype=torch.int32), torch.zeros(len(drawn_rows), room))
    for row, (kind, share) in enumerate(drawn_rows):
        count = round(share * layout.room)
        places = rng.choice(span, count, replace=False) if span < 10**6 else rng.integers(0, span, count)
        places = torch.from_numpy(np.unique(places)).int()
        rows.indices[row, : len(places)] = places + lows[row]
        rows.values[row, : len(places)] = values_of(kind, len(places), seed + row)
    return lows, rows


@both
@given(rooms, spans, formats, rows_drawn, divisors, st.integers(0, 2), seeds)
@example(1100, 60_000, FOUR, [("tail", 0.5), ("heavy", 1), ("normal", 0)], 3, 1, 0)  # of two blocks, some left out
@example(33, 100, FP32, [("special", 1), ("normal", 0)], 1, 0, 0)  # NaN
@example(40, 4000, EIGHT, [("outlier", 1), ("special", 1), ("huge", 1)], 2, 0, 0)
@example(40, 4000, INDICES, [("normal", 1), ("normal", 0.5)], 1, 0, 0)  # indices alone
@example(1500, 400, FOUR, [("tail", 1)], 1, 0, 0)  # a bitmap without a free place
@example(100, 4096, FOUR, [("special", 1)], 1, 0, 0)
@cases(40)
def test_rows(
    device: str, room: int, span: int, fmt: Format, drawn_rows: list[tuple[str, float]], divisor: int, spare: int,
    seed: int,
) -> None:  # fmt: skip
    """The words are the same, and so are the entries that are sent and read. Entries left out come from all blocks.

    The receiver gets what the sender subtracts. The first row alone has the same section.
    """
    layout = Layout.of(room, span, fmt, divisor)
    lows, rows = rows_of(layout, drawn_rows, seed, spare)
    low, count = int(lows[0]), int((rows.indices[0] >= 0).sum())

    def call(guarded: Guarded) -> tuple[object, ...]:
        firsts = guarded.of(lows)
        words, sent = write_rows(layout, firsts, Entries(*map(guarded.of, rows)))
        found, malformed = read_rows(layout, firsts, words)
        assert malformed.tolist() == [0]
        assert bits(found.indices) == bits(sent.indices[:, : layout.room])
        if layout.quantized:
            assert bits(found.values * divisor) == bits(sent.values[:, : layout.room])
        values = guarded.of(rows.values[0, : count if fmt.bits else 0])
        alone, kept = write_one(layout, low, guarded.of(rows.indices[0, :count]), values)
        back = read_one(layout, low, guarded.of(alone))
        assert bits(alone) == bits(words[0])
        assert bits(back.indices) == bits(kept.indices) == bits(sent.indices[0, : kept.indices.numel()])
        assert bits(back.values) == bits(found.values[0, : back.values.numel()])
        return tuple(bits(part) for part in (words, *sent, *found, malformed, kept.values))

    agree(call, device)


@both
@pytest.mark.parametrize("fmt", [FOUR, EIGHT])
def test_values_that_would_become_0(device: str, fmt: Format) -> None:
    """They are left out of their row, and the words of the others move up."""
    layout, lows = Layout.of(4, 100, fmt), torch.tensor([0, 100], dtype=torch.int32)
    indices = torch.tensor([[3, 50, 99, -1], [100, 101, 102, 103]], dtype=torch.int32)
    values = torch.tensor([[1e-42, 1.0, -2.0, 0.0], [1.0, -1.0, 1e-42, 2.0]])

    def call(guarded: Guarded) -> tuple[list[list[int]], list[int]]:
        rows = Entries(guarded.of(indices), guarded.of(values))
        words, sent = write_rows(layout, guarded.of(lows), rows)
        return sent.indices.tolist(), bits(sent.values) + bits(words)

    assert agree(call, device)[0] == [[50, 99, -1, -1], [100, 101, 103, -1]]


@both
@given(st.sampled_from([(40, 4000), (5, 8), (1100, 60_000)]), formats, seeds, st.integers(0, 4))
@cases(16)
def test_hostile_words(device: str, shape: tuple[int, int], fmt: Format, seed: int, flips: int) -> None:
    """Random words and flipped bits are refused, or give ascending indices inside the range. Other rows keep theirs."""
    layout, rng = Layout.of(*shape, fmt), np.random.default_rng(seed)
    lows, rows = rows_of(layout, [("tail", 1), ("tail", 0.5), ("tail", 1)], seed, 0)
    with kernels_from("auto"):
        words, kept = write_rows(layout, lows, rows)
    if flips == 0:
        words[1] = torch.from_numpy(rng.integers(-(2**31), 2**31, layout.words, dtype=np.int64)).int()
    for place in rng.integers(0, 32 * layout.words, flips):
        words[1, place // 32] ^= np.uint32(1 << place % 32).astype(np.int32).item()

    def call(guarded: Guarded) -> tuple[list[int], ...]:
        found, malformed = read_rows(layout, guarded.of(lows), guarded.of(words))
        assert not layout.quantized or not found.values.isinf().any()
        return found.indices.tolist(), bits(found.values), malformed.tolist()

    indices, _, (malformed,) = agree(call, device)
    assert indices[::2] == [row[: layout.room] for row in kept.indices[::2].tolist()]
    read = [at for at in indices[1] if at >= 0]
    assert not (malformed and read)
    assert read == sorted({*read})
    assert all(lows[1] <= at < lows[1] + layout.span for at in read)


@both
@pytest.mark.parametrize("fmt", [FOUR, FP32])
def test_each_kind_of_malformed_row(device: str, fmt: Format) -> None:
    """Wrong counts, indices that do not ascend or lie outside, and invalid headers empty their rows and are counted."""
    layout = Layout.of(3, 70, fmt)
    low = layout.heads + layout.high_words
    lows = torch.zeros(10, dtype=torch.int32)
    rows = Entries(torch.tensor([[16, 17, 18]] * 10, dtype=torch.int32), torch.ones(10, 3))
    with kernels_from("auto"):
        words, _ = write_rows(layout, lows, rows)
    words[1, 0] = 2
    words[2, 0] = -1
    words[3, 0] = 2**31 - 1
    words[4, low] = words[4, low + 1] = 0  # equal indices
    words[5, layout.heads] = 0b111 << (layout.high_bits - 3)
    if layout.quantized:  # no such table, and scales that are infinite, negative and zero
        words[6:, 1] = torch.tensor([5, 0x7F800000, 0xBF800000 - 2**32, 1])

    def call(guarded: Guarded) -> tuple[list[list[int]], list[int]]:
        found, malformed = read_rows(layout, guarded.of(lows), guarded.of(words))
        return found.indices.tolist(), malformed.tolist()

    found, malformed = agree(call, device)
    wrong = range(1, 10) if layout.quantized else range(1, 6)
    assert malformed == [len(wrong)]
    assert found == [[-1] * 3 if row in wrong else [16, 17, 18] for row in range(10)]


def refusal(layout: Layout, words: torch.Tensor) -> str:
    """Return the error of reading ``words``, or nothing if they are read."""
    try:
        read_one(layout, 0, words)
    except ValueError as error:
        return str(error)
    return ""


@both
@pytest.mark.parametrize("beyond", [False, True])
def test_reach_of_a_table(device: str, beyond: bool) -> None:
    """The best table is taken at 32 times its top level, and another one above, as in the reference."""
    levels = quantize.menu(TWO)[0]
    edge = np.float32(32 * levels[-1])
    values = torch.ones(quantize.SAMPLE + 2)
    values[::2] = torch.tensor(levels).repeat(len(values) // 2)[: len(values) // 2]  # only these are in the sample
    values[1] = float(np.nextafter(edge, np.float32(np.inf)) if beyond else edge)
    layout = Layout.of(len(values), len(values), TWO)

    def call(guarded: Guarded) -> object:
        at = guarded.of(torch.arange(len(values), dtype=torch.int32))
        words, _ = write_one(layout, 0, at, guarded.of(values))
        assert (int(words[1]) % 2**16 > 0) == beyond
        return bits(words)

    agree(call, device)


@both
def test_long_samples(device: str) -> None:
    """The table is chosen from every third of 9000 values, which lie in several blocks."""
    values = values_of("tail", 9000, 0)
    values[1::3] *= 3  # not in the sample, and for another table
    layout, indices = Layout.of(9000, 300_000, FOUR), torch.arange(0, 27_000, 3, dtype=torch.int32)

    def call(guarded: Guarded) -> list[list[int]]:
        words, sent = write_one(layout, 0, guarded.of(indices), guarded.of(values))
        assert sent.indices.numel() == len(values)
        return [bits(sent.values), bits(words)]

    agree(call, device)


@both
def test_offsets_that_overflow(device: str) -> None:
    """High bits beyond the range, whose shift would overflow int32, are refused."""
    layout = Layout.of(2, 2**31 - 1, FP32)
    words = torch.zeros(layout.words, dtype=torch.int32)
    words[0], words[1] = 1, 1 << (layout.high_bits - 1)
    for choice, where in routes(device):
        with kernels_from(choice):
            assert "do not ascend inside" in refusal(layout, words.to(where))


@both
def test_more_bits_than_room(device: str) -> None:
    """A high part of ones alone writes no position beyond the room, and is refused."""
    layout = Layout.of(40, 4000, FOUR)

    def call(guarded: Guarded) -> list[int]:
        words = guarded.of(torch.full((1, layout.words), -1, dtype=torch.int32))
        lows = guarded.of(torch.zeros(1, dtype=torch.int32))
        return read_rows(layout, lows, words)[1].tolist()

    assert agree(call, device) == [1]
