"""How entries are packed: golden messages, exact residuals, edge cases and refusals."""

from __future__ import annotations

import math
import struct
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_section_rows import KINDS, values_of
from tritoncomm import ProtocolMismatchError
from tritoncomm.primitives import packing
from tritoncomm.primitives.packing import NO_VALUES, Encoding, Section, Sections

from depth import examples
from golden_sections import DELIVERED, GOLDEN, INPUTS, in_hex
from tritoncomm_kernels import Entries, sections
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
    kind, scale = draw(st.sampled_from([("bits", 1), ("normal", 1e-41), *((kind, 1) for kind in KINDS)]))
    values = values_of(kind, count, draw(st.integers(0, 2**31 - 1))).numpy()
    with np.errstate(all="ignore"):
        signed = (scale * values * generator.choice([-1.0, 1.0], count)).astype(np.float32)
    signed = np.where(np.isfinite(signed) & (signed != 0), signed, np.float32(1.5)).astype(np.float32)
    divisor = draw(st.sampled_from([1, 1, 2, 3, 7, 8, 9, 64, 127, 1000]))
    packed_as = draw(st.sampled_from([True, "always", False]))
    section = Section(low, low + span, room, draw(st.sampled_from(ENTRY_FORMATS)), divisor=divisor, packed=packed_as)
    return section, indices.tolist(), torch.from_numpy(signed)


@given(situation=situations())
@examples(300)
def test_what_rounding_takes_away_is_exact(situation: tuple[Section, list[int], torch.Tensor]) -> None:
    """Delivered values have the sign of the entry, are at most twice as large, and leave an exact remainder.

    An entry too small beside the others is left out, as if it was not there.
    """
    section, indices, values = situation
    message, found, delivered = packed(section, indices, values)
    chosen = section.sendable(Entries(torch.tensor(indices, dtype=torch.int32), values))
    assert chosen.indices.tolist() == found.tolist()  # what cannot be sent now leaves no trace, and a part of the
    half = chosen.slice(0, chosen.room // 2)  # others can be sent, too
    assert section.sendable(half).room == half.room
    assert torch.equal(section.encode(chosen.indices, chosen.values)[0], message)
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


@pytest.mark.parametrize("values", [*ENTRY_FORMATS, NO_VALUES])
@pytest.mark.parametrize(
    ("span", "room"),
    [(1, 1), (31, 5), (400, 8), (4001, 1000), (400_000, 1000), (2**31 - 1, 1), (2**31 - 1, 2), (2**31 - 1, 1025)],
)
def test_chunks_do_not_change_a_message(values: str, span: int, room: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of any size give the same words and the same entries, also where short sections are one chunk."""
    generator = np.random.default_rng(room)
    section = Section(7, 7 + span, room, values, divisor=3, packed="always")
    for count in {0, room // 2, room}:
        indices = np.sort(generator.choice(min(span, 2**20), count, replace=False)) * max(1, span // 2**20)
        numbers = torch.from_numpy(np.exp(generator.normal(0, 3, count)).astype(np.float32))
        numbers[400:401] = 1e20  # so that not all are sendable
        entries = torch.from_numpy(indices.astype(np.int32)) + 7, numbers if values != NO_VALUES else numbers[:0]
        found = []
        for at_once in (0, 1, 3):
            with monkeypatch.context() as patch:
                if at_once:
                    patch.setattr(sections, "_GROUPS_AT_ONCE", at_once)
                    patch.setattr(sections, "_WORDS_AT_ONCE", at_once)
                message, sent = section.encode(*entries)
                found.append([message, *sent, *section.decode(message)])
        assert torch.equal(found[0][3], found[0][1])
        for other in found[1:]:
            assert all(map(torch.equal, other, found[0]))


ONES = torch.ones(40)
LEFT_OUT = {
    "an outlier goes alone": (torch.where(torch.arange(40) == 7, 1e30, ONES), "4bit", 1, [7]),
    "denormals stay": (ONES * 1e-41, "4bit", 1, []),
    **{
        f"the largest in {values} over {divisor}": (ONES * torch.finfo(torch.float32).max, values, divisor, range(40))
        for values in ROUNDED
        for divisor in (1, 3, 64, 1000)
    },
}


@pytest.mark.parametrize("case", LEFT_OUT)
def test_what_is_sent_at_once(case: str) -> None:
    """Entries far below the largest wait until it is gone. Equal ones are sent, up to the end of fp32."""
    numbers, values, divisor, expected = LEFT_OUT[case]
    _, found, delivered = packed(Section(0, 1000, 40, values, divisor=divisor), list(range(40)), numbers)
    assert found.tolist() == list(expected)
    assert delivered.isfinite().all()


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
