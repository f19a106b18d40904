"""Kernels that accumulate, mark, expand and select exactly k equal the reference and plain Python, bit for bit."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kernel_cases import (
    DEVICES,
    SPECIAL,
    Guarded,
    agree,
    bits,
    cases,
    drawn,
    dtypes,
    families,
    gradient,
    kernels_from,
    key_of,
    key_to_reach,
    powers,
    routes,
    seeds,
    sizes,
    thresholds,
    tiles,
)

import tritoncomm_kernels as kernels
from depth import trials
from tritoncomm_kernels.checks import INDEX_LIMIT
from tritoncomm_kernels.dispatch import kernel
from tritoncomm_kernels.select import TILES_SUMMED_IN_PLACE

pytestmark = pytest.mark.parametrize("device", DEVICES)
many = cases(150)
few = cases(50)


@given(st.lists(st.tuples(st.sampled_from(SPECIAL), st.sampled_from(SPECIAL)), max_size=70))
@few
def test_sums_by_hand(device: str, pairs: list[tuple[float, float]]) -> None:
    """The sum equals that of numpy's fp32 scalars, element by element."""
    residual, added = (torch.tensor([pair[i] for pair in pairs], device=device) for i in (0, 1))
    out, limit = torch.full_like(residual, math.nan), torch.tensor([1.0], device=device)
    with kernels_from("triton"):
        kernels.mark(residual, added, out, limit, kernels.Marks.empty(len(pairs), out.device, tile=64))
        by_hand = [float(np.float32(r) + np.float32(g)) for r, g in pairs]
    assert bits(out) == bits(torch.tensor(by_hand))


@pytest.mark.parametrize("ranged", [True, False])
@given(st.lists(st.sampled_from(SPECIAL), max_size=70), thresholds, st.integers(-5, 75), st.integers(-5, 75))
@many
def test_mark_by_hand(device: str, ranged: bool, values: list[float], limit: float, low: int, high: int) -> None:
    """Bit mask and counts equal those that plain Python computes element by element."""
    n = len(values)
    x = torch.tensor(values, device=device)
    marks = kernels.Marks.empty(n, x.device, tile=64)
    limits, span = torch.tensor([limit], device=device), torch.tensor([low, high], dtype=torch.int32, device=device)
    with kernels_from("triton"):
        kernels.mark(x, None, x, limits, marks, span=span if ranged else None)
    chosen = [i for i, value in enumerate(values) if key_of(value) >= key_to_reach(limit)]
    chosen = [i for i in chosen if low <= i < high or not ranged]
    words = [0] * marks.bits.numel()
    for i in chosen:
        words[i // 32] |= 1 << (i % 32)
    assert [word & 0xFFFFFFFF for word in marks.bits.tolist()] == words
    assert marks.counts.tolist() == [sum(t * 64 <= i < t * 64 + 64 for i in chosen) for t in range(max(1, -(-n // 64)))]


@given(sizes, families, families, seeds, dtypes, thresholds, tiles, st.data())
@many
def test_mark(
    device: str, n: int, family: str, other: str, seed: int, dtype: torch.dtype, limit: float, tile: int,
    data: st.DataObject,
) -> None:  # fmt: skip
    """Sum, mask and counts equal the reference with and without a span, in place or not, for all thresholds."""
    place, ranged, keyed = data.draw(st.tuples(st.booleans(), st.booleans(), st.booleans()))
    span = data.draw(st.tuples(st.integers(0, n), st.integers(0, n)))
    below = data.draw(st.sampled_from([1, 0, -1, -(2**31)]))  # keys that stand for every non-zero
    divides = data.draw(st.booleans())

    def call(guarded: Guarded) -> list[list[int]]:
        residual = guarded.of(drawn(family, n, seed))
        added = guarded.of(gradient(other, n, seed + 1, dtype))
        out = residual if place else guarded.poison(n)
        empty = kernels.Marks.empty(n, residual.device, tile=tile)
        marks = kernels.Marks(
            guarded.poison(empty.bits.numel(), torch.int32),
            guarded.poison(empty.counts.numel(), torch.int32),
        )
        at = torch.tensor(span, dtype=torch.int32, device=guarded.device) if ranged else None
        exact = key_to_reach(limit) if limit > 0 or math.isnan(limit) else below
        key = torch.tensor([exact], dtype=torch.int32) if keyed else torch.tensor([limit])
        divisor = guarded.of(powers(n, seed)) if divides else None
        kernels.mark(residual, added, out, key.to(guarded.device), marks, span=at, divisor=divisor)
        return [bits(t) for t in (out, residual, added, *marks)]

    agree(call, device)


@given(sizes, families, seeds, thresholds, tiles, st.sampled_from(["none", "some", "exact", "more"]), st.booleans())
@many
def test_expand(device: str, n: int, family: str, seed: int, limit: float, tile: int, room: str, divides: bool) -> None:
    """Entries ascend up to the capacity, and the vector does not change. With a divisor, they are quotients."""
    values = drawn(family, n, seed)
    divisor = powers(n, seed) if divides else None
    quotients = values / divisor if divides else values
    chosen = [i for i, v in enumerate(quotients.tolist()) if key_of(v) >= key_to_reach(limit)]
    capacity = {"none": 0, "some": len(chosen) // 2, "exact": len(chosen), "more": len(chosen) + 3}[room]

    def call(guarded: Guarded) -> list[list[int]]:
        x = guarded.of(values)
        marks = kernels.Marks.empty(n, x.device, tile=tile)
        by = guarded.of(divisor) if divides else None
        kernels.mark(x, None, x, torch.tensor([limit], device=guarded.device), marks, divisor=by)
        indices, out = guarded.poison(capacity, torch.int32), guarded.poison(capacity)
        found = guarded.poison(1, torch.int64)
        kernels.expand(x, marks, indices, out, found, divisor=by)
        return [bits(t) for t in (x, indices, out, found)]

    after, indices, out, found = agree(call, device)
    content, written = bits(quotients), chosen[:capacity]
    assert found == [len(chosen)]
    assert indices[: len(written)] == written
    assert out[: len(written)] == [content[i] for i in written]
    assert after == bits(values)


@pytest.mark.parametrize("words", [8, 32, 128])
@pytest.mark.parametrize("scanned", [False, True])
def test_launch_shapes_keep_the_result(device: str, words: int, scanned: bool) -> None:
    """The words per program, and the way in which counts are summed, do not change the result."""
    x = drawn("heavy", 5000, 3).to(device)
    marks = kernels.Marks.empty(5000, x.device, tile=256)
    with kernels_from("triton"):
        kernels.mark(x, None, x, torch.tensor([0.5], device=device), marks)
        expected = kernels.select(x, 0.5)
    guarded = Guarded(device)
    indices, values = guarded.poison(expected.room, torch.int32), guarded.poison(expected.room)
    found = guarded.poison(1, torch.int64)
    kernel("select_triton").expand(
        x, None, *marks, indices, values, found, words=words,
        tiles_summed_in_place=0 if scanned else TILES_SUMMED_IN_PLACE,
    )  # fmt: skip
    guarded.check()
    assert found.item() == expected.room
    assert torch.equal(indices, expected.indices)
    assert bits(values) == bits(expected.values)


@given(sizes, families, seeds, dtypes, thresholds, st.booleans())
@few
def test_select(device: str, n: int, family: str, seed: int, dtype: torch.dtype, limit: float, divides: bool) -> None:
    """The selections that the algorithms call equal the reference."""

    def call(guarded: Guarded) -> tuple[object, ...]:
        residual = guarded.of(drawn(family, n, seed))
        added = guarded.of(gradient("normal", n, seed + 1, dtype))
        out = guarded.poison(n)
        divisor = guarded.of(powers(n, seed)) if divides else None
        first = kernels.accumulate_and_select(residual, added, out, limit, divisor=divisor)
        again = kernels.select(out, limit, divisor=divisor)
        tensors = (*first[:2], *again[:2], out, residual)
        return first.room, again.room, *(bits(t) for t in tensors)

    agree(call, device)


@given(sizes, families, seeds, st.integers(1, 2100), st.booleans())
@cases(60)
def test_top_k_padded(device: str, n: int, family: str, seed: int, k: int, divides: bool) -> None:
    """Three steps with one workspace select exactly k entries, the later ones started from the last threshold."""
    divisor = powers(n, seed) if divides else None
    steps = [drawn(family, n, seed + i) * (1.0, 0.01, 8.0)[i] for i in range(3)]

    def call(guarded: Guarded) -> list[list[int]]:
        workspace, seen = kernels.Workspace(), []
        for values in steps:
            out, zeros = guarded.poison(n), guarded.of(torch.zeros(n))
            by = guarded.of(divisor) if divides else None
            found = kernels.top_k_padded(zeros, guarded.of(values), out, k, divisor=by, workspace=workspace)
            seen += [bits(t) for t in (out, *found)]
        return seen

    seen = agree(call, device)
    for step, values in enumerate(steps):
        keys = [bit & 0x7FFFFFFF for bit in bits(values / divisor if divides else values)]
        best = sorted(sorted((i for i in range(n) if keys[i]), key=lambda i: (-keys[i], i))[:k])
        assert seen[3 * step + 1] == best + [-1] * (k - len(best))


def test_top_k_ties(device: str) -> None:
    """Both threes are selected, then the two ones with the lowest indices. There is no padding."""
    guarded = Guarded(device)
    out = guarded.of(torch.tensor([1.0, 0.0, 3.0, -1.0, 1.0, 0.5, -3.0, 1.0]))
    with kernels_from("triton"):
        found = kernels.top_k_padded(out, None, out, 4, workspace=kernels.Workspace())
    guarded.check()
    assert found.indices.tolist() == [0, 2, 3, 6]
    assert found.values.tolist() == [1.0, 3.0, -1.0, -3.0]


@pytest.mark.parametrize(
    ("k", "kind"),
    [(1300, kind) for kind in ("normal", "ties", "equal", "sparse", "overflowing")]
    + [(69_000, kind) for kind in ("ties", "overflowing", *(["normal", "equal", "sparse"] if trials(0, 1) else []))],
)
def test_long_top_k(device: str, kind: str, k: int) -> None:
    """The result on a long vector is exact, with too many and with too few candidates of the first guess."""
    n = 140_000
    values = drawn({"sparse": "normal", "overflowing": "equal"}.get(kind, kind), n, k)
    if kind == "sparse":
        values *= torch.rand(n, generator=torch.Generator().manual_seed(0)) < 0.001
    elif kind == "overflowing":  # almost all values are equal, so the guess admits everything
        values[::1000] *= 2

    def call(guarded: Guarded) -> list[list[int]]:
        x, divisor = guarded.of(values), guarded.of(powers(n, k))
        found = [kernels.top_k(x, k), kernels.top_k(x, k, divisor=divisor)]
        return [bits(part) for selected in found for part in selected[:2]]

    agree(call, device)


@given(sizes, families, seeds, st.integers(0, 300))
@few
def test_largest(device: str, n: int, family: str, seed: int, k: int) -> None:
    """The largest entries of a selection equal the reference. The selection may hold zeros."""

    def call(guarded: Guarded) -> tuple[list[int], list[int]]:
        indices = torch.arange(n, dtype=torch.int32, device=guarded.device) * 3
        selected = kernels.largest(kernels.Entries(indices, guarded.of(drawn(family, n, seed))), k)
        return bits(selected.indices), bits(selected.values)

    agree(call, device)


@pytest.mark.parametrize("limit", [0.0, 1.0, math.nan])
def test_mark_a_million_elements(device: str, limit: float) -> None:
    """Marks of a long vector with large tiles equal the reference."""
    n = (1 << 20) + 77
    x = drawn("heavy", n, 0)
    masks = []
    for choice, where in routes(device):
        own, limits = x.to(where), torch.tensor([limit], device=where)
        marks = kernels.Marks.empty(n, own.device, tile=1 << 16 if device == "cpu" else 4096)
        with kernels_from(choice):
            kernels.mark(own, None, own, limits, marks)
        masks.append([t.cpu() for t in marks])
    assert all(torch.equal(a, b) for a, b in zip(*masks, strict=True))


def test_longest_vector(device: str) -> None:
    """Positions near the limit of int32 are selected. Only a GPU has the memory for this test."""
    if device == "cpu" or torch.cuda.mem_get_info()[0] < 40 << 30:
        pytest.skip("needs a GPU with 40 GiB free")
    n = INDEX_LIMIT
    places = [0, 1, 4095, 2**30, n - 4097, n - 2, n - 1]
    residual, gradient = torch.zeros(n, device=device), torch.zeros(n, device=device)
    residual[places] = torch.arange(1.0, 1.0 + len(places), device=device)
    selected = kernels.accumulate_and_select(residual, gradient, residual, 0.5)
    assert selected.indices.tolist() == places
    assert selected.values.tolist() == [1.0 + i for i in range(len(places))]
    assert kernels.top_k(residual, 3).indices.tolist() == places[-3:]


def test_cuda_graph_replay(device: str) -> None:
    """A CUDA graph of a selection replays with new inputs: nothing waits for the host or allocates memory."""
    if device == "cpu":
        pytest.skip("CUDA graphs need a GPU")
    n, k, workspace = 100_000, 1000, kernels.Workspace()
    residual, added, out = (torch.empty(n, device=device) for _ in range(3))
    marks, limit = kernels.Marks.empty(n, out.device), torch.ones(1, device=device)
    room = 60_000  # enough at the first threshold, not at the second
    indices, values = (torch.empty(room, dtype=d, device=device) for d in (torch.int32, torch.float32))
    found = torch.zeros(1, dtype=torch.int64, device=device)

    def step() -> kernels.Entries:
        kernels.mark(residual, added, out, limit, marks)
        kernels.expand(out, marks, indices, values, found)
        return kernels.top_k_padded(out, None, out, k, workspace=workspace)

    residual.normal_()
    added.normal_()
    step()  # compiles, and allocates the workspace
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        best = step()
    for seed, threshold in enumerate((1.5, 0.75)):
        residual.copy_(drawn("normal", n, seed))
        added.copy_(drawn("heavy", n, seed))
        limit.fill_(threshold)
        graph.replay()
        total = residual + added
        reaching, largest = kernels.select(total, threshold), kernels.top_k(total, k)
        assert found.item() == reaching.room
        written = min(room, reaching.room)
        assert torch.equal(indices[:written], reaching.indices[:room])
        assert torch.equal(values[:written], reaching.values[:room])
        assert torch.equal(best.indices, largest.indices)
        assert torch.equal(best.values, largest.values)
