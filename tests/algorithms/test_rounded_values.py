"""Packed indices and rounded values, method by method: what changes, and what must not."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Sequence

import pytest
import torch
import tritoncomm
from tritoncomm import SimulatedWorld
from tritoncomm.algorithms import algorithms
from tritoncomm.algorithms.base import EntryRecipe, IndexRecipe, StaticRecipe
from tritoncomm.primitives.packing import Encoding
from tritoncomm.scheduler.rounds import Op, round_of

import laws
from depth import DEEP, trials
from laws import heavy_tailed
from recipes import FIELDS, SHORT, always_packed, under_test
from tritoncomm_kernels.formats import ENTRY_FORMATS, FORMATS

ENTRY = [name for name in algorithms() if isinstance(under_test(0.1)[name], EntryRecipe)]
INDEX = [name for name in algorithms() if isinstance(under_test(0.1)[name], IndexRecipe)]
FORMS = [(name, "exact") for name in ENTRY]
FORMS += [(name, "static") for name in ENTRY if isinstance(under_test(0.1)[name], StaticRecipe)]
ROUNDED = [name for name in ENTRY_FORMATS if name != "fp32"]
INDEX_BITS = {0.001: 11.969, 0.01: 8.56, 0.05: 6.25}  # of an entry, by density, of 25 million values


def method(name: str, **fields: object) -> tritoncomm.Recipe:
    """Return the recipe called ``name``."""
    return tritoncomm.recipe(name, **{**FIELDS.get(name, {}), **fields})


@pytest.mark.parametrize("name", INDEX)
@pytest.mark.parametrize("world_size", [2, 5])
def test_packing_changes_no_bit(name: str, world_size: int) -> None:
    """Packed messages deliver the same bits as plain ones, and leave the same residuals, with fewer bytes."""
    worlds = [SimulatedWorld(method(name, density=0.02, packed=packed), world_size, 20_000) for packed in (False, True)]
    sent = [0, 0]
    for step in range(4):
        gradients = heavy_tailed(world_size, 20_000, step)
        plain, packed = (world.step(gradients)[0] for world in worlds)
        assert laws.same_vector(plain, packed)
        assert laws.same_bits(worlds[0].residuals, worlds[1].residuals)
        for at, world in enumerate(worlds):
            phases = [phase for meter in world.scheduler.meters for phase in meter.sent_by_phase.items()]
            sent[at] += sum(traffic.bytes for name_, traffic in phases if name_ != "histogram")  # it holds no entries
    assert sent[1] < 0.85 * sent[0]


@pytest.mark.parametrize("values", ROUNDED)
@pytest.mark.parametrize(("name", "form"), FORMS)
def test_laws_of_every_format(name: str, form: str, values: str) -> None:
    """The laws of recorded runs, and those of rejected and failed steps, hold for every format in both forms.

    What a failed step leaves behind does not depend on the format, so only a deep run fails steps of every format.
    """
    more = {**({"static": True} if form == "static" else {}), **(SHORT if name == "oktopk" else {})}
    recipe = always_packed(method(name, density=0.1, values=values, **more))
    steps, two_steps = (
        dataclasses.replace(laws.FOUR_STEPS, families=laws.FOUR_STEPS.families[:number])
        for number in (laws.steps_of(recipe), 2)
    )
    run = laws.recorded(recipe, steps)
    for law in laws.OF_RUNS:
        law.check(run)
    laws.refusal(recipe, two_steps, math.inf)
    laws.overflow(recipe, two_steps)
    if DEEP or values == "4bit":
        laws.atomicity(recipe, two_steps)


@pytest.mark.parametrize("name", ENTRY)
def test_rounding_reports_its_error(name: str) -> None:
    """The metrics hold the relative error of the values sent, less with more bits, and what could not be sent."""
    errors: dict[int, float] = {}
    for values in ROUNDED:
        recipe = method(name, density=0.02, values=values)
        world = SimulatedWorld(recipe, 3, 20_000)
        world.step(heavy_tailed(3, 20_000))
        report = world.workers[1].algorithm.report
        assert report["unsendable"] == 0 or not recipe.compares_entries()  # where some are far smaller than others
        errors[FORMATS[values].bits] = max(report["quantisation_error"], errors.get(FORMATS[values].bits, 0.0))
    by_bits = [errors[bits] for bits in sorted(errors, reverse=True)]
    assert by_bits == sorted(set(by_bits))
    assert 0 < by_bits[0] < by_bits[-1] < 0.5
    exact = SimulatedWorld(method(name, density=0.02), 3, 20_000)
    exact.step(heavy_tailed(3, 20_000))
    assert "quantisation_error" not in exact.workers[1].algorithm.report


@pytest.mark.parametrize(("density", "numel"), [(0.001, 4_000_000), (0.01, 400_000), (0.05, 400_000)])
@pytest.mark.parametrize("values", ENTRY_FORMATS)
def test_bits_per_entry_on_the_wire(values: str, density: float, numel: int) -> None:
    """An all-gather sends within 2 % of the format's bits per entry, its message headers included."""
    world = SimulatedWorld(method("topk_allgather", density=density, values=values, packed=True), 2, numel)
    world.step(heavy_tailed(2, numel))
    bits = INDEX_BITS[density] + FORMATS[values].bits
    assert 8 * world.traffic[0].bytes / (numel * density) == pytest.approx(bits, rel=0.02)


@pytest.mark.parametrize(("density", "numel"), [(0.01, 1_000_000), (0.05, 200_000)])
def test_bits_per_entry_of_oktopk(density: float, numel: int) -> None:
    """A step of Ok-Topk that reuses its thresholds sends within 2 % of the format's bits per entry in both phases.

    Message headers are included. What depends on no entry, counts and sizes, is 96 bytes per rank.
    """
    world = SimulatedWorld(method("oktopk", density=density, values="4bit"), 4, numel)
    world.step(laws.normal(4, numel))
    for worker in world.workers:  # the first steps determine thresholds again
        worker.algorithm.state = dataclasses.replace(worker.algorithm.state, step=3)
    entries: Counter[str] = Counter()

    def count(_: int, ops: Sequence[Op]) -> None:
        for op in ops:
            sends = round_of(op).sends  # the first word of a section is its number of entries
            entries[op.phase] += sum(int(message[0]) for message in sends.values())

    mean = world.step(laws.normal(4, numel, seed=1), before_round=count)[0]
    assert world.workers[0].algorithm.report["reevaluated"] == 0
    entries["all-gather"] = 3 * len(mean)  # each block arrives at three ranks
    moved = [meter.received_by_phase for meter in world.scheduler.meters]
    for phase in ("split-and-reduce", "all-gather"):
        bits = 8 * sum(by_phase[phase].bytes for by_phase in moved) / entries[phase]
        assert bits == pytest.approx(INDEX_BITS[density] + 4, rel=0.02)
    assert all(by_phase["counts"].bytes + by_phase["sizes"].bytes == 96 for by_phase in moved)


def test_ties_are_no_drift() -> None:
    """With few levels, sums are often equal. Ok-Topk still determines its thresholds as seldom as with exact values."""
    counts = dict.fromkeys(trials(("fp32", "2bit", "1bit"), ("fp32", "3bit", "2bit", "1bit")), 0.0)
    for values in counts:
        world = SimulatedWorld(method("oktopk", density=0.01, values=values), 4, 20_000)
        for step in range(trials(40, 70)):
            world.step(laws.normal(4, 20_000, seed=step))
            counts[values] += world.workers[0].algorithm.report["reevaluated"]
    assert max(counts.values()) <= counts["fp32"] + 2, counts


def test_bound_of_several_sections() -> None:
    """The bound for any split of entries and coordinates over sections holds, and is within 3 % for even ones."""
    generator = torch.Generator().manual_seed(0)
    for values in ENTRY_FORMATS:
        encoding = Encoding(values, True)
        for span, entries, sections in ((10_000, 500, 7), (10_000, 9_000, 3), (25_000_000, 250_000, 16), (40, 3, 2)):
            for trial in range(30):
                share = torch.rand(2, sections, generator=generator) ** (trial % 4)
                spans = (share[0] / share[0].sum() * span).long().tolist()
                rooms = (share[1] / share[1].sum() * entries).long().tolist()
                used = sum(encoding.words(u, min(m, u)) for u, m in zip(spans, rooms, strict=True))
                assert used <= encoding.words_at_most(span, entries, sections)
        large = encoding.words(25_000_000, 250_000)
        assert large <= encoding.words_at_most(25_000_000, 250_000, 1) <= 1.03 * large
