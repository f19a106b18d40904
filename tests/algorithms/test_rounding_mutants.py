"""Broken packings and roundings. A test or a law must catch each of them, or these prove nothing."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from test_rounded_values import method, sparse_floats
from tritoncomm import SimulatedWorld
from tritoncomm.algorithms import spardl
from tritoncomm.algorithms.ok_topk import OkTopkAlgorithm
from tritoncomm.primitives import collectives
from tritoncomm.primitives.accumulator import Accumulator
from tritoncomm.primitives.selection import rest_of
from tritoncomm.scheduler.wire import Section

import laws
from tritoncomm_kernels import quantize, sections

Patch = pytest.MonkeyPatch
A = [3, 17, 18, 40, 99, 255, 256, 300], [1, -1.25, 1.5, -2, 1.0625, 1, -3, 1.125]
A_4BIT = [8, 0x3F800001, 0x15097, 0x33, 0x35, 0xA0, 0xA8, 0x26, 0x82, 0x44, 0x48, 0x4A]


def conserves(name: str, **fields: object) -> None:
    """Check that one step on exact gradients loses nothing, with three workers."""
    case = laws.Case(3, 120, ("random",), seed=5)
    laws.conservation(method(name, density=0.1, values="4bit", packed="always", **fields), case, tolerance=0.0)


def ok_topk_conserves() -> None:
    """Check Ok-Topk, whose owners round sums."""
    conserves("oktopk", exact_select="histogram")


def spardl_conserves() -> None:
    """Check SparDL, whose ranks round whatever they send on."""
    conserves("spardl")


def is_golden() -> None:
    """Check the words of a section."""
    section = Section(0, 400, 8, "4bit", packed="always")
    message, _ = section.pack(torch.tensor(A[0], dtype=torch.int32), torch.tensor(A[1]))
    assert message.tolist() == A_4BIT


def at_most_twice() -> None:
    """Check that no delivered value is more than twice its entry."""
    values = torch.linspace(1, 3, 64)
    _, sent = Section(0, 5000, 64, "1bit").pack(torch.arange(64, dtype=torch.int32), values)
    assert (sent.values <= 2 * values[sent.indices.long()]).all()


def counts_stay() -> None:
    """Check that Ok-Topk delivers about k entries in every step, with values of one bit."""
    world = SimulatedWorld(method("oktopk", density=0.02, values="1bit"), 4, 20_000)
    found = [len(world.step(sparse_floats(4, 20_000, step))[0]) for step in range(24)]
    assert min(found[8:]) > 300


def low_bits_off_by_one(patch: Patch) -> None:
    """Store one low bit more than the shortest form has."""
    right = sections.Layout.of.__func__

    def wrong(cls: type, room: int, span: int, bits: int) -> sections.Layout:
        found = right(cls, room, span, bits)
        return found if found.plain else found._replace(low_bits=found.low_bits + 1)

    patch.setattr(sections.Layout, "of", classmethod(wrong))


def planes_in_the_wrong_order(patch: Patch) -> None:
    """Store the highest bit of every entry first."""
    for name in ("_write_indices", "_write_few_indices"):  # of long sections, and of short ones
        patch.setattr(sections, name, _with_planes_reversed(getattr(sections, name)))


def _with_planes_reversed(right: Callable[..., None]) -> Callable[..., None]:
    def wrong(layout: sections.Layout, low: int, indices: np.ndarray, codes: np.ndarray | None, words: np.ndarray):
        right(layout, low, indices, codes, words)
        start = layout.heads + layout.high_words
        rows = words[start : layout.words - layout.value_words].reshape(layout.groups, layout.planes)
        rows[:] = rows[:, ::-1].copy()

    return wrong


def error_is_dropped(patch: Patch) -> None:
    """Clear what was sent, as if it had arrived in full."""
    patch.setattr(Accumulator, "subtract", lambda self, sent, *, rounded: self.clear(sent.indices))


def error_is_returned_twice(patch: Patch) -> None:
    """Let the owner keep what the block's rounding cut off twice."""
    right = OkTopkAlgorithm._rest

    def wrong(self, sums, sent):
        rest = right(self, sums, sent)
        return rest._replace(values=2 * rest.values)

    patch.setattr(OkTopkAlgorithm, "_rest", wrong)


def sender_keeps_half_of_what_it_sent(patch: Patch) -> None:
    """Subtract half of what was sent."""
    patch.setattr(Accumulator, "subtract", lambda self, sent, *, rounded: self.add(sent.indices, -sent.values / 2))


def sender_drops_its_error(patch: Patch) -> None:
    """Keep nothing of what rounding cuts off from a block."""
    patch.setattr(spardl, "rest_of", lambda entries, sent: sent.slice(0, 0))


def sender_returns_its_error_twice(patch: Patch) -> None:
    """Keep what rounding cuts off from a block twice."""

    def wrong(entries, sent):
        rest = rest_of(entries, sent)
        return rest._replace(values=2 * rest.values)

    patch.setattr(spardl, "rest_of", wrong)


def last_hop_in_units_of_the_sum(patch: Patch) -> None:
    """Send rounded sums, and divide them by the world size afterwards."""
    right_pack, right_unpack = Section.pack, Section.unpack

    def in_sums(section: Section) -> Section:
        return Section(section.low, section.high, section.room, section.values, 1, section.packed)

    def unpack(section: Section, message: torch.Tensor):
        found = right_unpack(in_sums(section), message)
        return found._replace(values=found.values / section.divisor)

    patch.setattr(Section, "pack", lambda section, *entries: right_pack(in_sums(section), *entries))
    patch.setattr(Section, "unpack", unpack)


def lowest_level_too_high(patch: Patch) -> None:
    """Use a lowest level of 2.1 times the scale."""
    menu = {**quantize._MENU, 1: ((134,),) * 5}
    patch.setattr(quantize, "_MENU", menu)
    quantize.lookup.cache_clear()


def threshold_of_rounded_sums(patch: Patch) -> None:
    """Learn the threshold from the values that were sent."""

    def wrong(entries, sent):
        return sent.values.abs()

    patch.setattr(collectives, "sent_magnitudes", wrong)


@pytest.mark.parametrize(
    ("check", "mutation"),
    [
        (is_golden, low_bits_off_by_one),
        (is_golden, planes_in_the_wrong_order),
        (ok_topk_conserves, error_is_dropped),
        (ok_topk_conserves, error_is_returned_twice),
        (ok_topk_conserves, sender_keeps_half_of_what_it_sent),
        (spardl_conserves, sender_drops_its_error),
        (spardl_conserves, sender_returns_its_error_twice),
        (ok_topk_conserves, last_hop_in_units_of_the_sum),
        (spardl_conserves, last_hop_in_units_of_the_sum),
        (at_most_twice, lowest_level_too_high),
        (counts_stay, threshold_of_rounded_sums),
    ],
    ids=lambda part: part.__name__,
)
def test_a_broken_rounding_is_caught(check: Callable[[], None], mutation: Callable[[Patch], None]) -> None:
    """The check passes on the code as it is, and fails on the mutation."""
    check()
    with pytest.MonkeyPatch.context() as patch:
        mutation(patch)
        with pytest.raises(AssertionError):
            check()
    quantize.lookup.cache_clear()
    check()
