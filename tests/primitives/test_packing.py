"""How entries are packed: golden messages, exact residuals, edge cases and hostile words."""

from __future__ import annotations

import math
import struct
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_rounded_values import INDEX_BITS
from tritoncomm import ProtocolMismatchError
from tritoncomm.primitives import packing
from tritoncomm.primitives.packing import NO_VALUES, Encoding, Section, Sections

from depth import examples, trials
from golden_sections import DELIVERED, GOLDEN, INPUTS, A, in_hex
from tritoncomm_kernels import Entries, quantize, sections
from tritoncomm_kernels.formats import ENTRY_FORMATS, FORMATS

ROUNDED = tuple(name for name in ENTRY_FORMATS if name != "fp32")


def packed(section: Section, indices: list[int], values: object) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the message, and the indices and values that its receiver gets. Both ends must agree on them."""
    vector = values if isinstance(values, torch.Tensor) else torch.tensor(values, dtype=torch.float32)
    message, delivered = section.encode(torch.tensor(indices, dtype=torch.int32), vector)
    assert message.dtype == torch.int32
    assert message.numel() == section.words
    found = section.decode(message)
    assert torch.equal(found.indices, delivered.indices)
    expected = delivered.values / section.divisor  # exact if values are rounded
    assert torch.equal(found.values.nan_to_num(nan=7e33), expected.nan_to_num(nan=7e33))
    return message, delivered.indices, delivered.values


@given(st.sets(st.integers(0, 2**31 - 2)))
def test_pack_and_unpack(chosen: set[int]) -> None:
    """Packing keeps indices and values bit for bit, NaN and -0.0 included."""
    indices = torch.tensor(sorted(chosen), dtype=torch.int32)
    values = torch.tensor([float("nan"), -0.0, 1e-45, 3.0]).repeat(len(chosen))[: len(chosen)]
    got, floats = packing.decode(packing.encode(indices, values))
    packing.check_indices(got, 0, 2**31 - 1)
    assert torch.equal(got, indices)
    assert torch.equal(floats.view(torch.int32), values.view(torch.int32))


@given(st.lists(st.sets(st.integers(0, 99), max_size=8), min_size=1, max_size=6), st.integers(0, 3))
def test_pack_parts(parts: list[set[int]], free: int) -> None:
    """Messages are read together as they are one by one. Padded messages keep their length."""
    lists = [torch.tensor(sorted(part), dtype=torch.int32) for part in parts]
    values = [torch.randn(len(indices)) for indices in lists]
    messages = [packing.encode(indices, floats) for indices, floats in zip(lists, values, strict=True)]
    for indices, floats in zip(lists, values, strict=True):
        padded = packing.pack_padded(indices, floats, 2 * (len(indices) + free))
        assert padded.numel() == 2 * (len(indices) + free)
        assert all(map(torch.equal, packing.unpack_padded(padded), (indices, floats)))
    indices, floats = packing.decode_parts(messages)
    assert torch.equal(indices, torch.cat(lists))
    assert torch.equal(floats, torch.cat(values))


@pytest.mark.parametrize("indices", [[-1, 2], [2, 2], [3, 1], [4, 10], [1, 5, 4, 9], [5, 1, 2, 3], [1, 2, 3, 10]])
def test_malformed_indices_are_rejected(indices: list[int]) -> None:
    """Indices that do not ascend inside the receiver's range are rejected."""
    message = packing.encode(torch.tensor(indices, dtype=torch.int32), torch.ones(len(indices)))
    with pytest.raises(ProtocolMismatchError, match="not strictly increasing"):
        packing.check_indices(packing.decode(message)[0], 0, 10)


@pytest.mark.parametrize(("name", "values"), GOLDEN)
def test_golden_sections(name: str, values: str) -> None:
    """A section has exactly the words of the format, and decodes to exactly these numbers."""
    bounds, indices, numbers = INPUTS[name]
    message, found, delivered = packed(Section(*bounds, values, packed="always"), indices, numbers)
    assert in_hex(message) == GOLDEN[name, values]
    assert found.tolist() == indices
    expected = DELIVERED.get((name, values), numbers)
    assert torch.equal(delivered.nan_to_num(nan=-1), torch.tensor(expected, dtype=torch.float32).nan_to_num(nan=-1))


def test_golden_empty_sections() -> None:
    """A section without entries is all zeros. One without room has no words."""
    message, *_ = packed(Section(0, 100, 3, "4bit", packed="always"), [], [])
    assert message.tolist() == [0] * 12
    assert Section(5, 5, 3, "4bit").words == 0
    message, *_ = packed(Section(5, 50, 0, "4bit"), [], [])
    assert message.numel() == 0


@pytest.mark.parametrize("density", INDEX_BITS)
def test_bits_per_entry(density: float) -> None:
    """The bits per entry of 25 million coordinates are those of the specification for an index, and of the format."""
    numel = 25_000_000
    room = int(numel * density)
    found = [32 * Section(0, numel, room, values).words / room for values in ENTRY_FORMATS]
    expected = [INDEX_BITS[density] + FORMATS[values].bits for values in ENTRY_FORMATS]
    assert found == pytest.approx(expected, abs=0.005)


@pytest.mark.parametrize("values", ENTRY_FORMATS)
@given(room=st.integers(0, 3000), span=st.integers(1, 2**31 - 1))
@examples(60)
def test_never_longer_than_plain(values: str, room: int, span: int) -> None:
    """A section never takes more than the two words per entry of a plain message."""
    section = Section(0, span, room, values)
    assert section.words <= 2 * min(room, span)
    if section.is_packed:
        exact = 2 + math.log2(span / min(room, span)) + FORMATS[values].bits
        assert 32 * section.words <= min(room, span) * exact + 31 * (math.log2(span) + 32) + 160


@st.composite
def situations(draw: st.DrawFn) -> tuple[Section, list[int], torch.Tensor]:
    """Sections of every format with indices and values of very different distributions, at every bound."""
    low = draw(st.sampled_from([0, 1, 1000, 2**31 - 5000]))
    span = draw(st.sampled_from([1, 2, 31, 32, 33, 129, 400, 4096]))
    full = draw(st.booleans())
    count = span if full and span < 500 else draw(st.integers(0, min(span, 200)))
    room = count + draw(st.sampled_from([0, 0, 1, 31, 40, 300]))
    generator = np.random.default_rng(draw(st.integers(0, 2**32)))
    indices = np.sort(generator.choice(span, count, replace=False)) + low
    kind = draw(
        st.sampled_from(["bits", "normal", "tails", "equal", "denormal", "outlier", "huge", "tail of a residual"])
    )
    if kind == "bits":
        values = generator.integers(0, 2**32, count, dtype=np.uint32).view(np.float32)
    elif kind == "tails":
        values = np.exp(generator.normal(0, 6, count))
    elif kind == "equal":
        values = np.full(count, generator.normal())
    elif kind == "denormal":
        values = generator.normal(size=count) * 1e-41
    elif kind == "outlier":
        values = np.where(np.arange(count) == count // 2, 1e30, 1.0)
    elif kind == "huge":
        values = generator.uniform(1e38, 3.4e38, count)
    else:
        values = generator.normal(size=count) if kind == "normal" else 1 + generator.exponential(0.2, count)
    with np.errstate(all="ignore"):
        signed = (values * generator.choice([-1.0, 1.0], count)).astype(np.float32)
    signed = np.where(np.isfinite(signed) & (signed != 0), signed, np.float32(1.5)).astype(np.float32)
    divisor = draw(st.sampled_from([1, 1, 2, 3, 7, 8, 9, 64, 127, 1000]))
    packed_as = draw(st.sampled_from([True, "always", False]))
    section = Section(low, low + span, room, draw(st.sampled_from(ENTRY_FORMATS)), divisor=divisor, packed=packed_as)
    return section, indices.tolist(), torch.from_numpy(signed)


@given(situation=situations())
@examples(600)
def test_what_rounding_takes_away_is_exact(situation: tuple[Section, list[int], torch.Tensor]) -> None:
    """Delivered values have the sign of the entry, are at most twice as large, and leave an exact remainder."""
    section, indices, values = situation
    _, found, delivered = packed(section, indices, values)
    places = np.searchsorted(indices, found.numpy())
    assert [indices[place] for place in places] == found.tolist()
    sent = values.numpy()[places]
    if not section.rounds:
        assert np.array_equal(sent, delivered.numpy())
        return
    for before, after in zip(sent.tolist(), delivered.tolist(), strict=True):
        assert after != 0
        assert math.isfinite(after)
        assert (after > 0) == (before > 0)
        remainder = struct.unpack("f", struct.pack("f", float(np.float32(before) - np.float32(after))))[0]
        assert Fraction(before) - Fraction(after) == Fraction(remainder)
        if section.divisor == 1:
            assert abs(after) <= 2 * abs(before)


@given(situation=situations())
@examples(200)
def test_the_rest_can_be_sent_later(situation: tuple[Section, list[int], torch.Tensor]) -> None:
    """An entry too small beside the others is left out. A part of what a section can hold, it can hold together."""
    section, indices, values = situation
    entries = section.sendable(Entries(torch.tensor(indices, dtype=torch.int32), values))
    assert section.sendable(entries).room == entries.room
    half = entries.slice(0, entries.room // 2)
    assert section.sendable(half).room == half.room
    _, found, _ = packed(section, entries.indices.tolist(), entries.values)
    assert found.numel() == entries.room


@pytest.mark.parametrize("values", ENTRY_FORMATS)
@pytest.mark.parametrize(("span", "room"), [(3000, 1000), (400_000, 1000), (2**31 - 1, 1025)])
def test_chunks_do_not_change_a_message(values: str, span: int, room: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of any size give the same words and the same entries."""
    generator = np.random.default_rng(0)
    indices = np.unique(generator.integers(0, span, room - 20)).astype(np.int32)
    numbers = np.exp(generator.normal(0, 3, len(indices))).astype(np.float32)
    numbers[500] = 1e20  # so that not all are sendable
    section = Section(0, span, room, values, divisor=3, packed="always")
    messages = []
    for at_once in (0, 1, 3):
        if at_once:
            monkeypatch.setattr(sections, "_GROUPS_AT_ONCE", at_once)
            monkeypatch.setattr(sections, "_WORDS_AT_ONCE", at_once)
            monkeypatch.setattr(quantize, "_CHUNK", 50 * at_once)
        messages.append(packed(section, indices.tolist(), torch.from_numpy(numbers)))
    for message in messages[1:]:
        assert all(torch.equal(a, b) for a, b in zip(messages[0], message, strict=True))


@pytest.mark.parametrize("values", [*ENTRY_FORMATS, NO_VALUES])
@pytest.mark.parametrize(
    ("span", "room"), [(1, 1), (31, 5), (400, 8), (4001, 1000), (2**31 - 1, 1), (2**31 - 1, 2), (10**6, 33)]
)
def test_few_entries_at_once(values: str, span: int, room: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Short sections are one chunk, and have the words and entries of many chunks, with up to 38 planes."""
    generator = np.random.default_rng(room)
    for count in {0, room // 2, room}:
        indices = np.sort(generator.choice(min(span, 2**20), count, replace=False)) * max(1, span // 2**20)
        numbers = torch.from_numpy(np.exp(generator.normal(0, 2, count)).astype(np.float32))
        entries = torch.from_numpy(indices.astype(np.int32)) + 7, numbers if values != NO_VALUES else numbers[:0]
        section = Section(7, 7 + span, room, values, divisor=3, packed="always")
        few = section.encode(*entries)
        with monkeypatch.context() as patch:
            patch.setattr(sections, "_GROUPS_AT_ONCE", 1)
            patch.setattr(sections, "_WORDS_AT_ONCE", 1)
            many = section.encode(*entries)
            found = section.decode(few[0])
        assert torch.equal(few[0], many[0])
        assert torch.equal(few[1].indices, many[1].indices)
        assert torch.equal(few[1].values, many[1].values)
        again = section.decode(few[0])
        assert torch.equal(found.indices, few[1].indices)
        assert torch.equal(again.indices, found.indices)
        assert torch.equal(again.values, found.values)


@pytest.mark.parametrize("values", ENTRY_FORMATS)
def test_what_cannot_be_sent_is_left_out(values: str) -> None:
    """A section is that of the entries of ``sendable`` alone, also if these are not all."""
    generator = np.random.default_rng(0)
    for trial in range(40):
        numbers = torch.from_numpy(np.exp(generator.normal(0, trial / 4, 50)).astype(np.float32))
        if trial % 9 == 0:
            numbers[trial] = math.nan
        indices = torch.arange(0, 500, 10, dtype=torch.int32)
        section = Section(0, 500, 60, values, divisor=1 + trial % 3, packed="always")
        message, sent = section.encode(indices, numbers)
        chosen = section.sendable(Entries(indices, numbers))
        again, all_sent = section.encode(chosen.indices, chosen.values)
        assert torch.equal(message, again)
        assert torch.equal(sent.indices, chosen.indices)
        assert torch.equal(all_sent.indices, chosen.indices)
        assert torch.equal(sent.values.view(torch.int32), all_sent.values.view(torch.int32))


def test_an_outlier_delays_the_others() -> None:
    """One outlier of 1e30 is sent alone. The ones beside it are sent once it is gone."""
    section = Section(0, 1000, 100, "4bit")
    indices, values = list(range(0, 1000, 10)), torch.ones(100)
    values[40] = 1e30
    _, found, _ = packed(section, indices, values)
    assert found.tolist() == [400]
    values[40] = 1.0
    _, found, _ = packed(section, indices, values)
    assert found.numel() == 100


@pytest.mark.parametrize("divisor", [1, 2, 3, 7, 64, 1000])
@pytest.mark.parametrize("values", ROUNDED)
def test_the_largest_numbers_are_sent(values: str, divisor: int) -> None:
    """Equal numbers near the end of fp32 are sent, and what is delivered is finite."""
    for number in (2.5e38, torch.finfo(torch.float32).max):
        section = Section(0, 1000, 40, values, divisor=divisor)
        _, found, delivered = packed(section, list(range(40)), torch.full((40,), number))
        assert found.numel() == 40
        assert delivered.isfinite().all()


def test_denormals_stay_in_the_residual() -> None:
    """A section of denormal numbers delivers nothing at low widths."""
    _, found, _ = packed(Section(0, 1000, 40, "4bit"), list(range(40)), torch.full((40,), 1e-41))
    assert found.numel() == 0


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("values", ENTRY_FORMATS)
def test_not_a_number_arrives(values: str, bad: float) -> None:
    """A NaN or Inf among the values reaches the receiver, which then rejects the step."""
    numbers = torch.linspace(1, 2, 64)
    numbers[5] = bad
    message, delivered = Section(0, 5000, 64, values).encode(torch.arange(64, dtype=torch.int32), numbers)
    assert not Section(0, 5000, 64, values).decode(message).values.isfinite().all()
    assert not delivered.values.isfinite().all()


# Section (low, high, room) and number of entries: short low bits, a bitmap, the longest range, one entry, many groups.
HOSTILE = [
    ((100, 4100, 40), 37),
    ((5, 45, 20), 20),
    ((0, 2**31 - 1, 33), 33),
    ((7, 300, 1), 1),
    ((0, 90_000, 1500), 1400),
]


def tampered(good: np.ndarray, section: Section, kind: int, generator: np.random.Generator) -> np.ndarray:
    """Return hostile words made from those of a section."""
    words = good.copy()
    high = slice(section.layout.heads, section.layout.heads + section.layout.high_words)
    if kind == 0:
        return generator.integers(-(2**31), 2**31, len(words), dtype=np.int64).astype(np.int32)
    if kind == 1:  # count and high part are intact
        words[high.stop :] = generator.integers(-(2**31), 2**31, len(words) - high.stop, dtype=np.int64)
    elif kind == 2:  # the number of bits in the high part is intact, unless both places are the same
        string = np.unpackbits(words[high].view(np.uint8), bitorder="little")
        string[generator.choice(np.flatnonzero(string))] = 0
        string[generator.integers(len(string))] = 1
        words[high] = np.packbits(string, bitorder="little").view(np.int32)
    elif kind == 3:
        words[generator.integers(len(words))] = generator.choice([0, 1, -1, 2**31 - 1, -(2**31), 0x7F800000])
    else:
        for place in generator.integers(0, 32 * len(words), generator.integers(1, 6)):
            words[place // 32] ^= np.uint32(1 << place % 32).view(np.int32)
    return words


@pytest.mark.parametrize("values", [*ENTRY_FORMATS, NO_VALUES])
def test_hostile_words(values: str) -> None:
    """Random and tampered sections are rejected, or give ascending indices inside the range."""
    generator = np.random.default_rng(0)
    number = trials(1500, 100_000)
    targets = [Section(*bounds, values, packed="always") for bounds, _ in HOSTILE]
    messages = []
    for section, (_, count) in zip(targets, HOSTILE, strict=True):
        span = section.high - section.low
        indices = np.unique(generator.integers(0, span, count)) if span > 10**6 else generator.permutation(span)[:count]
        entries = torch.from_numpy(np.sort(indices).astype(np.int32) + section.low)
        sent = 1 + generator.exponential(0.2, entries.numel()).astype(np.float32)
        given_values = torch.from_numpy(sent[:0] if values == NO_VALUES else sent)
        messages.append(section.encode(entries, given_values)[0].numpy())
    rejected = accepted = 0
    for trial in range(number):
        which = trial % 4 if trial % 40 else 4  # the long section takes most of the time
        section = targets[which]
        words = tampered(messages[which], section, int(generator.integers(5)), generator)
        try:
            found = section.decode(torch.from_numpy(words))
        except ProtocolMismatchError:
            rejected += 1
            continue
        accepted += 1
        indices = found.indices.numpy()
        assert len(indices) <= section.room
        assert len(found.values) == (0 if values == NO_VALUES else len(indices))
        assert (indices[1:] > indices[:-1]).all()
        assert not len(indices) or section.low <= indices[0] <= indices[-1] < section.high
        if values != "fp32":
            assert not np.isinf(found.values.numpy()).any()
    assert min(rejected, accepted) > number / 10


@pytest.mark.parametrize("header", [0x3F800005, 0xBF800000, 0x7F800000, 0x00000001])
def test_headers_no_encoder_writes(header: int) -> None:
    """A table outside the menu, and a scale that is negative, zero or infinite, are rejected."""
    section = Section(0, 400, 8, "4bit", packed="always")
    message, *_ = packed(section, A[1], A[2])
    message[1] = int(np.array(header, np.uint32).view(np.int32))
    with pytest.raises(ProtocolMismatchError, match="malformed section"):
        section.decode(message)


@pytest.mark.parametrize("packed_as", [True, "always", False])
def test_several_sections_in_a_message(packed_as: bool | str) -> None:
    """A message holds entries of several ranges, with gaps between them, and each range keeps to its own."""
    bounds = [(0, 900, 30), (900, 1000, 10), (2000, 9000, 0), (9000, 20000, 50)]
    encoding = Encoding("4bit" if packed_as else "fp32", packed_as)
    message = Sections(encoding, bounds)
    indices = torch.cat([torch.arange(low, low + room) for low, _, room in bounds]).int()
    words, delivered = message.encode(indices, torch.linspace(1, 2, 90))
    assert words.numel() == message.words
    found = message.decode(words)
    assert torch.equal(found.indices, indices)
    assert torch.equal(found.values, delivered.values)
    moved = Sections(encoding, [(low + 5000, high + 5000, room) for low, high, room in bounds])
    if not packed_as:  # the indices of a packed section are relative to its range
        with pytest.raises(ProtocolMismatchError):
            moved.decode(words)


def test_too_many_entries() -> None:
    """More entries than the section has room for are an error of the caller."""
    with pytest.raises(ValueError, match="room=2"):
        Section(0, 10, 2).encode(torch.arange(3, dtype=torch.int32), torch.ones(3))


def test_unknown_format() -> None:
    """A format that does not exist is an error, not a section without values."""
    with pytest.raises(KeyError, match="5bit"):
        Section(0, 10, 2, "5bit").encode(torch.arange(2, dtype=torch.int32), torch.ones(2))


@pytest.mark.parametrize("values", ENTRY_FORMATS)
@pytest.mark.parametrize("packed_as", ["always", False])
def test_other_lengths_are_rejected(values: str, packed_as: object) -> None:
    """A message of another length than that of the section is rejected by name."""
    section = Section(0, 400, 8, values, packed=packed_as)
    for words in (0, section.words - 1, section.words + 1):
        with pytest.raises(ProtocolMismatchError, match=f"received {words} words .*, expected {section.words}"):
            section.decode(torch.zeros(words, dtype=torch.int32))
