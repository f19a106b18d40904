"""Calls of the package on inputs that reach most of what is in the compiled kernels."""

from __future__ import annotations

import torch
from kernel_cases import Guarded, bits, drawn, gradient, padded_rows

import tritoncomm_kernels as kernels
from tritoncomm_kernels.formats import FORMATS
from tritoncomm_kernels.section_layout import Layout
from tritoncomm_kernels.sections import read_rows, write_rows


def select(guarded: Guarded) -> list[list[int]]:
    """Return what reaches a threshold, of a 16-bit gradient. All warps have a part of the last tile."""
    out, added = guarded.poison(7000), guarded.of(gradient("normal", 7000, 2, torch.bfloat16))
    found = kernels.accumulate_and_select(guarded.of(drawn("normal", 7000, 1)), added, out, 1.5)
    return [bits(found.indices), bits(found.values), bits(out)]


def expand(guarded: Guarded) -> list[list[int]]:
    """Return entries of so many tiles that their counts are summed in two steps, by many programs.

    Some words have several bits.
    """
    n, tile = 170_000, 64
    values = drawn("normal", n, 1)
    values[9000:9400] *= 4
    x = guarded.of(values)
    marks = kernels.Marks.empty(n, x.device, tile=tile)
    kernels.mark(x, None, x, torch.tensor([3.5]), marks)
    indices, out, found = guarded.poison(320, torch.int32), guarded.poison(320), guarded.poison(1, torch.int64)
    kernels.expand(x, marks, indices, out, found)
    return [bits(indices), bits(out), bits(found)]


def top(guarded: Guarded) -> list[list[int]]:
    """Return the largest elements."""
    found = kernels.top_k(guarded.of(drawn("heavy", 3000, 3)), 100)
    return [bits(found.indices), bits(found.values)]


def merge(guarded: Guarded) -> list[list[int]]:
    """Return the union and the sums of rows."""
    rows = padded_rows(12_000, [(0.6, 1), (0.7, 2), (0.5, 3)], "heavy")
    found = kernels.merge_rows(kernels.Entries(*map(guarded.of, rows)), 12_000, workspace=kernels.Workspace())
    return [bits(found.indices), bits(found.values)]


def sections(guarded: Guarded) -> list[list[int]]:
    """Return packed rows, and what is read from them."""
    rows = padded_rows(3000, [(0.6, 1), (0.7, 2)], "normal")
    layout = Layout.of(rows.indices.shape[1], 3000, FORMATS["4bit"])
    given = kernels.Entries(*map(guarded.of, rows))
    lows = guarded.of(torch.zeros(2, dtype=torch.int32))
    held = kernels.Workspace()
    words, sent = write_rows(layout, lows, given, workspace=held)
    return [bits(words), *map(bits, sent), *map(bits, read_rows(layout, lows, words, workspace=held)[0])]


def rebalance(guarded: Guarded) -> list[list[int]]:
    """Return partitions of which some borders moved. There are more threads than partitions."""
    blocks = guarded.of(torch.full((12,), 9, dtype=torch.int32))
    counts = guarded.of(torch.arange(12, dtype=torch.int32) * 70)
    bounds = guarded.poison(13, torch.int32)
    kernels.rebalance(blocks, bounds, counts, iteration=3, block=32, numel=12 * 9 * 32, min_blocks=1, rule="prefix")
    return [bits(blocks), bits(bounds)]


def segments(guarded: Guarded) -> list[list[int]]:
    """Return the largest entries of segments, without padding between, and how many reach a threshold."""
    x, cuts = guarded.of(drawn("heavy", 9000, 1)), guarded.of(torch.tensor([0, 4500, 9000], dtype=torch.int32))
    held = kernels.Workspace()
    found = kernels.top_k_rows(x, cuts, guarded.of(torch.tensor([300, 40], dtype=torch.int32)), 350, workspace=held)
    reach, span = guarded.of(torch.tensor([1.0])), guarded.of(torch.tensor([100, 8000], dtype=torch.int32))
    passed = kernels.count_inside(x, reach, span, workspace=held)
    return [*map(bits, found), *map(bits, kernels.joined(found, workspace=held)), bits(passed)]


def rounded(guarded: Guarded) -> list[list[int]]:
    """Return a mean of two ranks in 4 bits, and what is left."""
    values, fmt = [guarded.of(drawn("normal", 3000, rank)) for rank in range(2)], FORMATS["4bit"]
    levels = [kernels.round_parts(own, 2, rank, fmt) for rank, own in enumerate(values)]
    arrived = [torch.stack([messages[rank] for messages in levels]) for rank in range(2)]
    parts = [kernels.round_mean(arrived[rank], own, rank, fmt) for rank, own in enumerate(values)]
    return [*map(bits, values), bits(kernels.read_parts(torch.stack(parts), 3000, fmt))]


def lists(guarded: Guarded) -> list[list[int]]:
    """Return the sums of lists, a vector with entries of a list replaced, and its values there before."""
    rows = padded_rows(3000, [(0.6, 1), (0.7, 2)], "heavy")
    held = [kernels.Entries(guarded.of(rows.row(i).indices), guarded.of(rows.row(i).values)) for i in range(2)]
    found = kernels.merge([each.trimmed()[:2] for each in held], 3000, workspace=kernels.Workspace())
    x = guarded.of(drawn("normal", 3000, 3))
    before = kernels.values_at(x, held[0].indices)
    kernels.set_at(x, held[0])
    return [*map(bits, found), bits(before), bits(x)]


def adam(guarded: Guarded) -> list[list[int]]:
    """Return two parameters and their moments after two updates: from a list with padding, and of all coordinates."""
    columns, states, control = _adam_of_two(guarded)
    indices, values = (guarded.of(part[0]) for part in padded_rows(733, [(0.8, 4)], "normal", spare=3))
    flat = kernels.AdamFlat(columns[0], states, [0, 700])
    flat.update(indices, control, values=values, keep=0.999)
    flat.update(None, control, values=guarded.of(drawn("heavy", 733, 5)))
    return [bits(tensor) for column in (columns[0], states.first, states.second, states.last) for tensor in column]


def _adam_of_two(guarded: Guarded) -> tuple[list[list[torch.Tensor]], kernels.AdamStates, kernels.AdamControl]:
    sizes = (700, 33)
    columns = [[guarded.of(drawn("heavy", n, 9 * n + i)) for n in sizes] for i in range(2)]
    moments = [[guarded.of(drawn("heavy", n, 9 * n + i).abs()) for n in sizes] for i in (2, 3)]
    last = [guarded.of(torch.arange(n, dtype=torch.int32) % 7) for n in sizes]
    states = kernels.AdamStates(*moments, last, [torch.tensor(0.01), torch.tensor(3.0)], None)
    numbers = {"learning_rate": 0.01, "betas": (0.9, 0.999), "epsilon": 1e-8}
    limits = {"max_catch_up": 20, "max_relative_update": 0.2}
    control = kernels.AdamControl.of(steps=9, **numbers, **limits, device=columns[0][0].device)
    return columns, states, control


CALLS = {
    call.__name__: call
    for call in (
        *(select, expand, top, merge, sections, rebalance, segments, rounded),
        *(lists, adam),
    )
}
