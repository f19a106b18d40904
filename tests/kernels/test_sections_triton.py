"""Kernels that write and read packed sections equal the reference, bit for bit, and refuse the same words."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from kernel_cases import DEVICES, Guarded, agree, bits, cases, drawn, kernels_from, seeds

from tritoncomm_kernels import Workspace, quantize
from tritoncomm_kernels.dispatch import kernel
from tritoncomm_kernels.section_layout import VALUE_BITS, Layout
from tritoncomm_kernels.sections import read_section, sendable_together, write_section

pytestmark = pytest.mark.parametrize("device", DEVICES)
KINDS = ("normal", "heavy", "equal", "special", "tail", "outlier", "huge")
formats = st.sampled_from([0, *sorted(VALUE_BITS.values())])
spans = st.sampled_from([1, 2, 31, 33, 129, 400, 4096, 70_000, 2**31 - 1])
rooms = st.sampled_from([1, 2, 31, 32, 33, 100, 1023, 1025, 1500])
divisors = st.sampled_from([1, 1, 2, 3, 9, 64, 1000])
lows = st.sampled_from([0, 1, 1000, 2**30])


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


def refusal(layout: Layout, words: torch.Tensor) -> str:
    """Return the error of reading ``words``, or nothing if they are read."""
    try:
        read_section(layout, 0, words)
    except ValueError as error:
        return str(error)
    return ""


def entries(layout: Layout, low: int, kind: str, share: float, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ascending indices and values that may be put into a section."""
    rng = np.random.default_rng(seed)
    count = round(share * layout.room)
    span = min(layout.span, 2**31 - 1 - low)
    chosen = rng.choice(span, count, replace=False) if span < 10**6 else rng.integers(0, span, count)
    chosen = np.unique(chosen)
    return torch.from_numpy(chosen + low).to(torch.int32), values_of(kind, len(chosen), seed)


@given(rooms, spans, formats, lows, st.sampled_from(KINDS), st.sampled_from([0, 0.5, 1]), divisors, seeds)
@example(1500, 400, 4, 0, "tail", 1, 1, 0)  # a bitmap without a free place
@example(100, 4096, 4, 1000, "tail", 0.5, 1, 0)
@example(100, 4096, 4, 0, "special", 1, 1, 0)  # NaN
@example(33, 400, 16, 0, "huge", 1, 2, 0)
@example(33, 4096, 0, 7, "tail", 1, 2, 0)  # indices alone
@cases(60)
def test_sections(
    device: str, room: int, span: int, width: int, low: int, kind: str, share: float, divisor: int, seed: int
) -> None:  # fmt: skip
    """The same values are sendable, the words are the same, and the receiver gets what the sender subtracts."""
    layout = Layout.of(room, min(span, 2**31 - 1 - low), width)
    indices, values = entries(layout, low, kind, share, seed)

    def call(guarded: Guarded) -> tuple[object, ...]:
        at, x, workspace = guarded.of(indices), guarded.of(values), Workspace()
        keep = sendable_together(x, width, divisor, workspace=workspace) if 0 < width < 32 else None
        if keep is not None:
            at, x = at[keep], x[keep]
        out = guarded.poison(layout.words, torch.int32)
        delivered = write_section(layout, low, at, x, out, divisor=divisor, workspace=workspace)
        assert not refusal(layout, out)
        found = read_section(layout, low, out, divisor=divisor, workspace=workspace)
        assert bits(found.indices) == bits(at)
        assert width in {0, 32} or bits(found.values * divisor) == bits(delivered)
        return keep is None or bits(keep.int()), bits(out), bits(delivered), bits(found.values)

    agree(call, device)


@pytest.mark.parametrize("beyond", [False, True])
def test_reach_of_a_table(device: str, beyond: bool) -> None:
    """The best table is taken at 32 times its top level, and another one above, as in the reference."""
    levels = quantize.menu(2)[0]
    edge = np.float32(32 * levels[-1])
    values = torch.ones(quantize.SAMPLE + 2)
    values[::2] = torch.tensor(levels).repeat(len(values) // 2)[: len(values) // 2]  # only these are in the sample
    values[1] = float(np.nextafter(edge, np.float32(np.inf)) if beyond else edge)
    layout = Layout.of(len(values), len(values), 2)

    def call(guarded: Guarded) -> object:
        at, x = guarded.of(torch.arange(len(values), dtype=torch.int32)), guarded.of(values)
        out = guarded.poison(layout.words, torch.int32)
        write_section(layout, 0, at, x, out, workspace=Workspace())
        assert (int(out[1]) % 2**16 > 0) == beyond
        return bits(out)

    agree(call, device)


@given(st.sampled_from([(40, 4000), (5, 8), (33, 2**31 - 1), (1100, 60_000)]), formats, seeds, st.integers(0, 6))
@cases(120)
def test_hostile_words(device: str, shape: tuple[int, int], width: int, seed: int, flips: int) -> None:
    """Random words and flipped bits are refused by both, or give the same entries. Nothing outside is written."""
    layout = Layout.of(*shape, width)
    rng = np.random.default_rng(seed)
    words = torch.zeros(layout.words, dtype=torch.int32)
    with kernels_from("torch"):
        write_section(layout, 0, *entries(layout, 0, "tail", 0.9, seed), words)
    if flips == 0:
        words = torch.from_numpy(rng.integers(-(2**31), 2**31, layout.words, dtype=np.int64)).int()
    for place in rng.integers(0, 32 * layout.words, flips):
        words[place // 32] ^= np.uint32(1 << place % 32).astype(np.int32).item()

    def call(guarded: Guarded) -> object:
        try:
            found = read_section(layout, 0, guarded.of(words))
        except ValueError:
            return "refused"
        assert found.indices.numel() <= layout.room
        assert (found.indices[1:] > found.indices[:-1]).all()
        return bits(found.indices), bits(found.values)

    agree(call, device)


@pytest.mark.parametrize("word", [-1, 9, 2**31 - 1, -(2**31)])
def test_counts_beyond_the_room(device: str, word: int) -> None:
    """A count that is negative or larger than the room is refused, and writes nothing outside of the output."""
    layout = Layout.of(8, 400, 4)
    words = torch.zeros(layout.words, dtype=torch.int32, device=device)
    words[0] = word
    for choice in ("torch", "triton"):
        with kernels_from(choice):
            assert f"reports {word} entries and holds 0" in refusal(layout, words)


@pytest.mark.parametrize("header", [0x3F800005, -0x40800000, 0x7F800000, 0x00000001])
def test_headers_no_encoder_writes(device: str, header: int) -> None:
    """A table outside the menu, and a scale that is negative, zero or infinite, are refused by both."""
    layout = Layout.of(8, 400, 4)
    words = torch.zeros(layout.words, dtype=torch.int32, device=device)
    indices, values = torch.arange(8, dtype=torch.int32, device=device), torch.ones(8, device=device)
    for choice in ("torch", "triton"):
        with kernels_from(choice):
            write_section(layout, 0, indices, values, words)
            words[1] = header
            assert "header" in refusal(layout, words)


def test_offsets_that_overflow(device: str) -> None:
    """High bits beyond the range, whose shift would overflow int32, are refused."""
    layout = Layout.of(2, 2**31 - 1, 32)
    words = torch.zeros(layout.words, dtype=torch.int32, device=device)
    words[0], words[1] = 1, 1 << (layout.high_bits - 1)
    for choice in ("torch", "triton"):
        with kernels_from(choice):
            assert "do not ascend inside" in refusal(layout, words)


def test_equal_indices(device: str) -> None:
    """Two entries with the same index are refused by both, although their high bits do not descend."""
    layout = Layout.of(8, 400, 32)
    words = torch.zeros(layout.words, dtype=torch.int32, device=device)
    indices, values = torch.tensor([16, 17], dtype=torch.int32, device=device), torch.ones(2, device=device)
    for choice in ("torch", "triton"):
        with kernels_from(choice):
            write_section(layout, 0, indices, values, words)
            assert words[layout.heads + layout.high_words] == 2  # the lowest bits: 0 and 1
            words[layout.heads + layout.high_words] = 0
            assert "do not ascend inside" in refusal(layout, words)


@pytest.mark.parametrize("scanned", [False, True])
def test_both_ways_to_sum_counts(device: str, scanned: bool) -> None:
    """A high part of several tiles is read with and without a separate scan of their counts."""
    layout = Layout.of(30_000, 90_000, 4)
    indices, values = entries(layout, 7, "tail", 1, 0)
    words = torch.zeros(layout.words, dtype=torch.int32, device=device)
    with kernels_from("torch"):
        write_section(layout, 7, indices, values, words)
        expected = read_section(layout, 7, words)
    scratch, found = read_guarded(layout, 7, words, tiles_summed_in_place=0 if scanned else 8192)
    assert scratch["counts"].numel() > 2
    verdict = scratch["verdict"].tolist()
    assert verdict[0] == verdict[2] == 30_000
    assert not any(verdict[3:])
    assert torch.equal(found[0], expected.indices)
    assert torch.equal(found[1], expected.values)


def test_more_bits_than_room(device: str) -> None:
    """A high part of ones alone writes no position beyond the room."""
    layout = Layout.of(40, 4000, 4)
    words = torch.full((layout.words,), -1, dtype=torch.int32, device=device)
    scratch, _ = read_guarded(layout, 0, words)
    assert scratch["verdict"].tolist()[2] == 32 * layout.high_words > layout.room


def read_guarded(
    layout: Layout, low: int, words: torch.Tensor, **options: int
) -> tuple[dict[str, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
    """Run the reading kernels between guards, and return scratch memory and entries."""
    guarded, module = Guarded(words.device.type), kernel("sections_triton")
    tiles, blocks = -(-layout.high_words // module.WORDS), -(-layout.room // module.BLOCK)
    sizes = {"counts": tiles, "offsets": tiles, "slots": layout.room, "verdict": module.VERDICT + blocks}
    scratch = {name: guarded.poison(size, torch.int32) for name, size in sizes.items()}
    found = guarded.poison(layout.room, torch.int32), guarded.poison(layout.room)
    with np.errstate(all="ignore"):
        module.read(words, scratch, *found, layout, low, quantize.limit(1), **options)
    guarded.check()
    return scratch, found


def test_long_samples(device: str) -> None:
    """The table is chosen from every third of 9000 values, which lie in several blocks."""
    values = values_of("tail", 9000, 0)
    values[1::3] *= 3  # not in the sample, and for another table
    layout = Layout.of(9000, 300_000, 4)
    indices = torch.arange(0, 27_000, 3, dtype=torch.int32)

    def call(guarded: Guarded) -> list[list[int]]:
        out = guarded.poison(layout.words, torch.int32)
        x = guarded.of(values)
        assert sendable_together(x, 4) is None
        return [bits(write_section(layout, 0, guarded.of(indices), x, out)), bits(out)]

    agree(call, device)


def test_writing_never_waits(device: str) -> None:
    """Writing a section does not wait for the GPU."""
    if device == "cpu":
        pytest.skip("waiting needs a GPU")
    layout, workspace = Layout.of(1000, 90_000, 4), Workspace()
    indices, values = (part.to(device) for part in entries(layout, 0, "tail", 1, 0))
    words = torch.empty(layout.words, dtype=torch.int32, device=device)
    write_section(layout, 0, indices, values, words, workspace=workspace)  # compiles, and copies the tables
    try:
        torch.cuda.set_sync_debug_mode("error")
        write_section(layout, 0, indices, values, words, workspace=workspace)
    finally:
        torch.cuda.set_sync_debug_mode("default")
