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


def in_sums(section: Section) -> Section:
    """Return the section of sums, of which the given one is that of means."""
    return Section(section.low, section.high, section.room, section.values, 1, section.packed)


# Owners of Ok-Topk round sums. Ranks of SparDL round whatever they send on, and those of teams what they have merged.
CHECKS: dict[str, Callable[[str], None]] = {
    "oktopk": partial(conserves, name="oktopk"),
    "spardl": partial(conserves, name="spardl"),
    "teams": partial(conserves, name="spardl", world_size=8, teams=4),
    "least": least_is_exact,
}
rest, keep_rest, encode, decode = Step.rest, WorkingVector.keep_rest, Section.encode, Section.decode
# The checks that fail, and what is replaced by what.
MUTANTS: dict[str, tuple[tuple[str, ...], dict[tuple[object, str], Callable[..., object]]]] = {
    "what was sent is cleared, as if it had arrived in full": (
        ("oktopk", "spardl"),
        {(Accumulator, "subtract"): lambda self, sent, *, rounded: self.clear(sent.indices)},
    ),
    "the sender keeps half of what it sent": (
        ("oktopk", "spardl"),
        {(Accumulator, "subtract"): lambda self, sent, *, rounded: self.add(sent.indices, -sent.values / 2)},
    ),
    "the owner keeps twice what rounding cut off": (
        ("oktopk",),
        {(Step, "rest"): lambda *given: (found := rest(*given))._replace(values=2 * found.values)},
    ),
    "nothing of what rounding cuts off merged entries is kept": (
        ("teams",), {(WorkingVector, "keep_rest"): lambda *given: None}
    ),
    "what rounding cuts off merged entries is kept twice": (
        ("teams",), {(WorkingVector, "keep_rest"): lambda *given: [keep_rest(*given) for _ in range(2)]}
    ),
    "rounded sums are sent, and divided by the world size afterwards": (
        ("oktopk", "spardl"),
        {
            (Section, "encode"): lambda section, *entries: encode(in_sums(section), *entries),
            (Section, "decode"): lambda section, message: (found := decode(in_sums(section), message))._replace(
                values=found.values / section.divisor
            ),
        },
    ),
    "the threshold is learnt from the values that were sent": (
        ("least",), {(collectives, "sent_magnitudes"): lambda entries, sent: sent.values.abs()}
    ),
}  # fmt: skip
# Formats with most and with fewest levels.
some_formats = pytest.mark.parametrize("values", trials([ROUNDED[0], ROUNDED[-1]], ROUNDED))


@some_formats
@pytest.mark.parametrize(
    ("mutant", "check"), [(name, check) for name, (fails, _) in MUTANTS.items() for check in fails]
)
def test_a_broken_rounding_is_caught(check: str, mutant: str, values: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The check fails on the mutant."""
    for replaced, by in MUTANTS[mutant][1].items():
        monkeypatch.setattr(*replaced, by)
    with pytest.raises(AssertionError):
        CHECKS[check](values)


@some_formats
@pytest.mark.parametrize("check", CHECKS)
def test_nothing_is_broken(check: str, values: str) -> None:
    """Each check passes on the code as it is."""
    CHECKS[check](values)
