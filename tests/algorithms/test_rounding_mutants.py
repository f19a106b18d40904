"""Broken packings and roundings. A test or a law must catch each of them, or these prove nothing."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import pytest
import test_quantize as formats
import torch
from test_rounded_values import ROUNDED, method, sparse_floats
from tritoncomm import SimulatedWorld
from tritoncomm.algorithms.spardl_working import WorkingVector
from tritoncomm.primitives import collectives, packing
from tritoncomm.primitives.accumulator import Accumulator
from tritoncomm.primitives.exchange import Step
from tritoncomm.primitives.packing import Encoding, Section
from tritoncomm.scheduler.simulated import SimulatedScheduler

import laws
from golden_sections import GOLDEN, A, in_hex
from recipes import always_packed
from tritoncomm_kernels import Entries, quantize, sections
from tritoncomm_kernels.formats import FORMATS, Format

Patch = pytest.MonkeyPatch
GOLDEN_FORMATS = [values for name, values in GOLDEN if name == "A"]


class LongerIntegers(laws.Case):
    """Gradients with more bits than rounded values have, whose sums are still exact."""

    def gradients(self) -> Iterator[torch.Tensor]:
        """See :meth:`laws.Case.gradients`."""
        for gradient in super().gradients():
            yield 37 * gradient


def conserves(name: str, values: str, **fields: object) -> None:
    """Check that one step on exact gradients loses nothing. Few levels are multiples of the number of workers."""
    case = LongerIntegers(5, 120, ("random",), seed=5)
    laws.conservation(always_packed(method(name, density=0.1, values=values, **fields)), case, tolerance=0.0)


def ok_topk_conserves(values: str) -> None:
    """Check Ok-Topk, whose owners round sums."""
    conserves("oktopk", values)


def spardl_conserves(values: str) -> None:
    """Check SparDL, whose ranks round whatever they send on."""
    conserves("spardl", values)


def merges_conserve(values: str) -> None:
    """Check SparDL's teams, whose ranks round what they have merged."""
    case = LongerIntegers(8, 120, ("random",), seed=5)
    laws.conservation(always_packed(method("spardl", density=0.1, values=values, teams=4)), case, tolerance=0.0)


def is_golden(values: str) -> None:
    """Check the words of a section."""
    bounds, indices, numbers = A
    section = Section(*bounds, values, packed="always")
    message, _ = section.encode(torch.tensor(indices, dtype=torch.int32), torch.tensor(numbers))
    assert in_hex(message) == GOLDEN["A", values]


def at_most_twice(values: str) -> None:
    """Check that no delivered value is more than twice its entry."""
    numbers = torch.linspace(1, 3, 64)
    _, sent = Section(0, 5000, 64, values).encode(torch.arange(64, dtype=torch.int32), numbers)
    assert (sent.values <= 2 * numbers[sent.indices.long()]).all()


def counts_stay(values: str) -> None:
    """Check that Ok-Topk delivers about k entries in every step, but perhaps one after a re-evaluation."""
    world = SimulatedWorld(method("oktopk", density=0.02, values=values), 4, 20_000)
    found = [len(world.step(sparse_floats(4, 20_000, step))[0]) for step in range(24)]
    assert sorted(found[8:])[1] > 300


def least_is_exact(values: str) -> None:
    """Check that ranks learn the smallest magnitude of what was sent before it is rounded."""
    blocks = [Entries(torch.tensor([at, at + 9]).int(), torch.tensor([1.001, -3.7]) * (at + 1)) for at in (2, 60)]
    regions = collectives.Regions((0, 50, 100), [2, 2], Encoding(values, "always"), 2)
    patterns = [
        collectives.gather_regions(block, regions, rank, 2, trigger=math.inf, width=1, phase="all-gather")
        for rank, block in enumerate(blocks)
    ]
    for gathered in SimulatedScheduler(2).run(patterns):
        assert gathered.least.view(torch.float32) == blocks[0].values[0]


def low_bits_off_by_one(patch: Patch) -> None:
    """Store one low bit more than the shortest form has."""
    right = sections.Layout.of.__func__

    def wrong(cls: type, room: int, span: int, fmt: Format) -> sections.Layout:
        found = right(cls, room, span, fmt)
        return found if found.plain else dataclasses.replace(found, low_bits=found.low_bits + 1)

    patch.setattr(sections.Layout, "of", classmethod(wrong))


def planes_in_the_wrong_order(patch: Patch) -> None:
    """Store the highest bit of every entry first."""
    patch.setattr(sections, "_write_indices", _with_planes_reversed(sections._write_indices))


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
    right = Step.rest

    def wrong(self, gathered):
        rest = right(self, gathered)
        return rest._replace(values=2 * rest.values)

    patch.setattr(Step, "rest", wrong)


def sender_keeps_half_of_what_it_sent(patch: Patch) -> None:
    """Subtract half of what was sent."""
    patch.setattr(Accumulator, "subtract", lambda self, sent, *, rounded: self.add(sent.indices, -sent.values / 2))


def forwarder_drops_its_error(patch: Patch) -> None:
    """Keep nothing of what rounding cuts off from merged entries."""
    patch.setattr(WorkingVector, "keep_rest", lambda self, entries, sent, share: None)


def forwarder_returns_its_error_twice(patch: Patch) -> None:
    """Keep what rounding cuts off from merged entries twice."""
    right = WorkingVector.keep_rest

    def wrong(self, entries, sent, share):
        right(self, entries, sent, share)
        right(self, entries, sent, share)

    patch.setattr(WorkingVector, "keep_rest", wrong)


def last_hop_in_units_of_the_sum(patch: Patch) -> None:
    """Send rounded sums, and divide them by the world size afterwards."""
    right_encode, right_decode = Section.encode, Section.decode

    def in_sums(section: Section) -> Section:
        return Section(section.low, section.high, section.room, section.values, 1, section.packed)

    def decode(section: Section, message: torch.Tensor):
        found = right_decode(in_sums(section), message)
        return found._replace(values=found.values / section.divisor)

    patch.setattr(Section, "encode", lambda section, *entries: right_encode(in_sums(section), *entries))
    patch.setattr(Section, "decode", decode)


def lowest_level_too_high(patch: Patch) -> None:
    """Use a lowest level of 2.1 times the scale."""
    for name in ROUNDED:
        levels = tuple(range(134, 134 + len(FORMATS[name].tables[0])))
        replace_format(patch, name, (levels,) * len(FORMATS[name].tables))


def replace_format(patch: Patch, name: str, tables: tuple[tuple[int, ...], ...]) -> None:
    """Give a format other tables."""
    other = dataclasses.replace(FORMATS[name], tables=tables)
    patch.setitem(FORMATS, name, other)
    patch.setitem(packing._FORMATS, name, other)


def threshold_of_rounded_sums(patch: Patch) -> None:
    """Learn the threshold from the values that were sent."""

    def wrong(entries, sent):
        return sent.values.abs()

    patch.setattr(collectives, "sent_magnitudes", wrong)


def form_switches_one_early(patch: Patch) -> None:
    """Give low bits to the longest range that has a bitmap."""
    with_form(patch, lambda room: 4 * room, lambda room, span, fmt: (room, span, fmt, False, 2, 2 * room))


def form_switches_one_late(patch: Patch) -> None:
    """Use a bitmap for the shortest range that has low bits."""
    with_form(patch, lambda room: 4 * room + 1, lambda room, span, fmt: (room, span, fmt, True, 0, span))


def with_form(patch: Patch, edge: Callable[[int], int], wrong: Callable[[int, int, Format], tuple]) -> None:
    """Replace the layout of ranges as long as ``edge(room)``."""
    right = sections.Layout.of.__func__

    def of(cls: type, room: int, span: int, fmt: Format) -> sections.Layout:
        return cls(*wrong(room, span, fmt)) if span == edge(room) else right(cls, room, span, fmt)

    patch.setattr(sections.Layout, "of", classmethod(of))


def shorter_reach(patch: Patch) -> None:
    """Allow a table up to 24 times its top level."""
    patch.setattr(quantize, "REACH", 24.0)


def longer_reach(patch: Patch) -> None:
    """Allow a table up to 512 times its top level."""
    patch.setattr(quantize, "REACH", 512.0)


def reach_without_its_end(patch: Patch) -> None:
    """Exclude a table at 32 times its top level."""
    patch.setattr(quantize, "REACH", float(np.nextafter(np.float32(32), np.float32(0))))


def one_more_bit_in_a_scale(patch: Patch) -> None:
    """Keep one bit more in the scale of a mean."""
    patch.setattr(quantize, "scale_bits", lambda divisor: max(1, min(8, 12 - (divisor - 1).bit_length())))


# Every one of these checks finds the mutation in each of the formats beside it.
CAUGHT = [
    (is_golden, low_bits_off_by_one, GOLDEN_FORMATS),
    (is_golden, planes_in_the_wrong_order, GOLDEN_FORMATS),
    (ok_topk_conserves, error_is_dropped, ROUNDED),
    (ok_topk_conserves, error_is_returned_twice, ROUNDED),
    (ok_topk_conserves, sender_keeps_half_of_what_it_sent, ROUNDED),
    (spardl_conserves, error_is_dropped, ROUNDED),
    (spardl_conserves, sender_keeps_half_of_what_it_sent, ROUNDED),
    (merges_conserve, forwarder_drops_its_error, ROUNDED),
    (merges_conserve, forwarder_returns_its_error_twice, ROUNDED),
    (ok_topk_conserves, last_hop_in_units_of_the_sum, ROUNDED),
    (spardl_conserves, last_hop_in_units_of_the_sum, ROUNDED),
    (at_most_twice, lowest_level_too_high, ROUNDED),
    (counts_stay, threshold_of_rounded_sums, ["1bit"]),  # with more levels, counts hardly change
    (least_is_exact, threshold_of_rounded_sums, ROUNDED),
    (formats.test_reach_of_tables, shorter_reach, ["1bit", "2bit", "3bit", "4bit", "8bit"]),
    (formats.test_reach_of_tables, longer_reach, ["2bit", "3bit", "4bit", "8bit"]),
    (formats.test_reach_of_tables, reach_without_its_end, ["2bit", "3bit", "4bit", "8bit"]),
    (formats.test_rest_of_a_mean_is_exact, one_more_bit_in_a_scale, [15, 127, 1023]),
]


def fails(check: Callable[[], None], mutation: Callable[[Patch], None]) -> None:
    """Assert that ``check`` fails on the mutation."""
    with pytest.MonkeyPatch.context() as patch:
        mutation(patch)
        forget()
        with pytest.raises(AssertionError):
            check()
    forget()


def forget() -> None:
    """Let lookups and masks be computed anew."""
    quantize.lookup.cache_clear()
    quantize._scale_mask.cache_clear()


@pytest.mark.parametrize(
    ("check", "mutation", "argument"),
    [pytest.param(c, m, a, id=f"{c.__name__}-{m.__name__}-{a}") for c, m, found_in in CAUGHT for a in found_in],
)
def test_a_broken_rounding_is_caught(
    check: Callable[[object], None], mutation: Callable[[Patch], None], argument: object
) -> None:
    """The check fails on the mutation, and passes on the code as it is."""
    fails(lambda: check(argument), mutation)
    check(argument)


@pytest.mark.parametrize("mutation", [form_switches_one_early, form_switches_one_late], ids=lambda m: m.__name__)
def test_a_form_that_switches_elsewhere_is_caught(mutation: Callable[[Patch], None]) -> None:
    """The check fails on the mutation, and passes on the code as it is."""
    fails(formats.test_form_switches, mutation)
    formats.test_form_switches()


@pytest.mark.parametrize("values", formats.MENU)
def test_a_broken_menu_is_caught(values: str) -> None:
    """A level at either end of a table that is 1/64 too low or too high is found."""
    tables = FORMATS[values].tables
    for number, table in enumerate(tables):
        for place in {0, len(table) - 1}:
            for by in (-1, 1):
                wrong = (*table[:place], table[place] + by, *table[place + 1 :])
                menu = (*tables[:number], wrong, *tables[number + 1 :])
                fails(partial(formats.test_menu, values), partial(replace_format, name=values, tables=menu))
    formats.test_menu(values)
