"""Broken roundings. A law must catch each of them, or it proves nothing. Formats and tables are tested literally."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch
from test_rounded_values import ROUNDED, method
from tritoncomm.algorithms.spardl_working import WorkingVector
from tritoncomm.primitives import collectives
from tritoncomm.primitives.accumulator import Accumulator
from tritoncomm.primitives.exchange import Step
from tritoncomm.primitives.packing import Encoding, Section
from tritoncomm.scheduler.simulated import SimulatedScheduler

import laws
from depth import trials
from recipes import always_packed
from tritoncomm_kernels import Entries

Patch = pytest.MonkeyPatch


class LongerIntegers(laws.Case):
    """Gradients with more bits than rounded values have, whose sums are still exact."""

    def gradients(self) -> Iterator[torch.Tensor]:
        """See :meth:`laws.Case.gradients`."""
        for gradient in super().gradients():
            yield 37 * gradient


def conserves(values: str, name: str, world_size: int = 5, **fields: object) -> None:
    """Check that one step on exact gradients loses nothing. Few levels are multiples of the number of workers."""
    case = LongerIntegers(world_size, 120, ("random",), seed=5)
    laws.conservation(always_packed(method(name, density=0.1, values=values, **fields)), case, tolerance=0.0)


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


def threshold_of_rounded_sums(patch: Patch) -> None:
    """Learn the threshold from the values that were sent."""

    def wrong(entries, sent):
        return sent.values.abs()

    patch.setattr(collectives, "sent_magnitudes", wrong)


# Owners of Ok-Topk round sums. Ranks of SparDL round whatever they send on, and those of teams what they have merged.
CHECKS: dict[str, Callable[[str], None]] = {
    "oktopk": partial(conserves, name="oktopk"),
    "spardl": partial(conserves, name="spardl"),
    "teams": partial(conserves, name="spardl", world_size=8, teams=4),
    "least": least_is_exact,
}
CAUGHT = [
    ("oktopk", error_is_dropped),
    ("oktopk", error_is_returned_twice),
    ("oktopk", sender_keeps_half_of_what_it_sent),
    ("spardl", error_is_dropped),
    ("spardl", sender_keeps_half_of_what_it_sent),
    ("teams", forwarder_drops_its_error),
    ("teams", forwarder_returns_its_error_twice),
    ("oktopk", last_hop_in_units_of_the_sum),
    ("spardl", last_hop_in_units_of_the_sum),
    ("least", threshold_of_rounded_sums),
]


# Formats with most and with fewest levels.
@pytest.mark.parametrize("values", trials([ROUNDED[0], ROUNDED[-1]], ROUNDED))
@pytest.mark.parametrize(("check", "mutation"), CAUGHT, ids=lambda each: getattr(each, "__name__", each))
def test_a_broken_rounding_is_caught(check: str, mutation: Callable[[Patch], None], values: str) -> None:
    """The check fails on the mutation, and passes on the code as it is."""
    with pytest.MonkeyPatch.context() as patch:
        mutation(patch)
        with pytest.raises(AssertionError):
            CHECKS[check](values)
    CHECKS[check](values)
