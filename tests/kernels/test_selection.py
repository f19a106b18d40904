"""Accumulate, mark, expand and select exactly k: reference and kernels against plain Python, bit for bit."""

from __future__ import annotations

import importlib
import itertools
import math
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kernel_cases import (
    DEVICES,
    FAMILIES,
    SPECIAL,
    Guarded,
    agree,
    best,
    bits,
    both,
    cases,
    drawn,
    dtypes,
    families,
    gpu_only,
    gradient,
    kernels_from,
    kernels_only,
    key_of,
    key_to_reach,
    launched,
    powers,
    reaching,
    seeds,
    sizes,
    thresholds,
    tiles,
)

import tritoncomm_kernels as kernels
from depth import examples, trials
from tritoncomm_kernels.checks import INDEX_LIMIT
from tritoncomm_kernels.dispatch import kernel
from tritoncomm_kernels.select import HOST_CHUNK, TILES_SUMMED_IN_PLACE

# The functions of these names hide the modules in the package.
select, top_k = (importlib.import_module(f"tritoncomm_kernels.{name}") for name in ("select", "top_k"))
many, few = cases(150), cases(60)
some = sizes.filter(bool)
any_bits = st.sampled_from([*FAMILIES, "bits"])


@kernels_only
@given(some, any_bits, any_bits, seeds, dtypes, thresholds, tiles, st.data())
@many
def test_mark(
    device: str, n: int, family: str, other: str, seed: int, dtype: torch.dtype, limit: float, tile: int,
    data: st.DataObject,
) -> None:  # fmt: skip
    """Sum, mask and counts equal those that are computed element by element, for any bits and keys of all thresholds.

    With and without a gradient, a divisor and a span, in place or not.
    """
    adds, place, ranged, divides = data.draw(st.tuples(*[st.booleans()] * 4))
    span = data.draw(st.tuples(st.integers(-5, n + 5), st.integers(-5, n + 5)))
    residual, added = drawn(family, n, seed), gradient(other, n, seed + 1, dtype)
    divisor = powers(n, seed) if divides else None

    def call(guarded: Guarded) -> list[list[int]]:
        x, gradients = guarded.of(residual), guarded.of(added) if adds else None
        out = x if place or not adds else guarded.poison(n)
        marks = triton.empty_marks(x, tile=tile)
        at = torch.tensor(span, dtype=torch.int32, device=guarded.device) if ranged else None
        key = torch.tensor([key_to_reach(limit)], dtype=torch.int32, device=guarded.device)
        by = guarded.of(divisor) if divides else None
        triton.mark(select.Sum(x, gradients, out, by), key, marks, span=at)
        return [bits(each) for each in (out, x, *marks)]

    triton = kernel("select_triton")
    out, held, mask, counts = launched(call, device)
    total = residual + added if adds else residual
    keys = (total / divisor if divides else total).view(torch.int32).bitwise_and(0x7FFFFFFF).tolist()
    chosen = [i for i, key in enumerate(keys) if key >= key_to_reach(limit) and (not ranged or span[0] <= i < span[1])]
    assert out == bits(total)
    assert held == (out if place else bits(residual))
    assert {32 * i + bit for i, word in enumerate(mask) for bit in range(32) if word >> bit & 1} == {*chosen}
    assert counts == [sum(t * tile <= i < (t + 1) * tile for i in chosen) for t in range(-(-n // tile))]


@kernels_only
@given(some, families, seeds, thresholds, tiles, st.sampled_from(["none", "some", "exact", "more"]), st.booleans())
@many
def test_expand(device: str, n: int, family: str, seed: int, limit: float, tile: int, room: str, divides: bool) -> None:
    """Entries ascend up to the capacity, and the vector does not change. With a divisor, they are quotients."""
    values = drawn(family, n, seed)
    divisor = powers(n, seed) if divides else None
    quotients = values / divisor if divides else values
    chosen = reaching(quotients, limit)
    capacity = {"none": 0, "some": len(chosen) // 2, "exact": len(chosen), "more": len(chosen) + 3}[room]

    def call(guarded: Guarded) -> list[list[int]]:
        x = guarded.of(values)
        marks = triton.empty_marks(x, tile=tile)
        by = guarded.of(divisor) if divides else None
        key = torch.tensor([key_to_reach(limit)], dtype=torch.int32, device=guarded.device)
        triton.mark(select.Sum(x, None, x, by), key, marks)
        indices, out = guarded.poison(capacity, torch.int32), guarded.poison(capacity)
        found = guarded.poison(1, torch.int64)
        triton.expand(select.Sum(x, None, x, by), marks, indices, out, found)
        return [bits(t) for t in (x, indices, out, found)]

    triton = kernel("select_triton")
    after, indices, out, found = launched(call, device)
    content, written = bits(quotients), chosen[:capacity]
    assert found == [len(chosen)]
    assert indices[: len(written)] == written
    assert out[: len(written)] == [content[i] for i in written]
    assert after == bits(values)


@kernels_only
@pytest.mark.parametrize("words", [8, 32, 128])
@pytest.mark.parametrize("scanned", [False, True])
def test_launch_shapes_keep_the_result(device: str, words: int, scanned: bool) -> None:
    """The words per program, and the way in which counts are summed, do not change the result."""
    x, triton = drawn("heavy", 5000, 3).to(device), kernel("select_triton")
    marks = triton.empty_marks(x, tile=256)
    with kernels_from("triton"):
        triton.mark(select.Sum(x, None, x), torch.tensor([key_of(0.5)], dtype=torch.int32, device=device), marks)
        expected = kernels.select(x, 0.5)
    guarded = Guarded(device)
    indices, values = guarded.poison(expected.room, torch.int32), guarded.poison(expected.room)
    found = guarded.poison(1, torch.int64)
    with patch.multiple(triton, WORDS=words, TILES_SUMMED_IN_PLACE=0 if scanned else TILES_SUMMED_IN_PLACE):
        triton.expand(select.Sum(x, None, x), marks, indices, values, found)
    guarded.check()
    assert found.item() == expected.room
    assert torch.equal(indices, expected.indices)
    assert bits(values) == bits(expected.values)


@both
@given(sizes, families, seeds, dtypes, thresholds, st.booleans(), st.sampled_from([1, 7, 256, HOST_CHUNK]))
@few
def test_select(
    device: str, n: int, family: str, seed: int, dtype: torch.dtype, limit: float, divides: bool, chunk: int
) -> None:
    """Selections ascend, are the same from a sum and from its parts, and do not change their inputs."""
    residual, added = drawn(family, n, seed), gradient("normal", n, seed + 1, dtype)
    divisor = powers(n, seed) if divides else None

    def call(guarded: Guarded) -> list[list[int]]:
        held, out = guarded.of(residual), guarded.poison(n)
        by = guarded.of(divisor) if divides else None
        with patch.object(select, "HOST_CHUNK", chunk):
            first = kernels.accumulate_and_select(held, guarded.of(added), out, limit, divisor=by)
            again = kernels.select(out, limit, divisor=by)
        return [bits(each) for each in (*first, *again, out, held)]

    total = residual + added
    quotients = total / divisor if divides else total
    chosen = reaching(quotients, limit)
    selected = [chosen, bits(quotients[chosen])]
    assert agree(call, device) == [*selected, *selected, bits(total), bits(residual)]


@both
@given(sizes, families, seeds, st.integers(0, 2100), st.booleans())
@few
def test_top_k(device: str, n: int, family: str, seed: int, k: int, divides: bool) -> None:
    """The k largest of a vector, a sum and a list are selected, ties to the lower index. Only a list may have zeros."""
    residual, added = drawn(family, n, seed), drawn("heavy", n, seed + 1)
    divisor = powers(n, seed) if divides else None

    def call(guarded: Guarded) -> list[object]:
        x, out = guarded.of(residual), guarded.poison(n)
        by = guarded.of(divisor) if divides else None
        listed = kernels.Entries(torch.arange(n, dtype=torch.int32, device=guarded.device) * 3, x)
        alone = kernels.top_k(x, k, divisor=by)
        summed = kernels.accumulate_top_k(x, guarded.of(added), out, k, divisor=by)
        tensors = (*alone, *summed, out, *kernels.largest(listed, k), x)
        return [*map(bits, tensors), key_of(kernels.kth_magnitude(x, k))]

    total, expected = residual + added, []
    for values in (residual, total):
        quotients = values / divisor if divides else values
        expected += [best(quotients, k), bits(quotients[best(quotients, k)])]
    keys = list(map(key_of, residual.tolist()))
    order = sorted(range(n), key=lambda at: (-keys[at], at))
    largest = sorted(order[:k])
    kth = keys[order[k - 1]] if 0 < k <= n else 0
    listed = [[3 * at for at in largest], bits(residual[largest])]
    assert agree(call, device) == [*expected, bits(total), *listed, bits(residual), kth]


@both
@given(sizes, families, seeds, st.integers(1, 2100), st.booleans())
@cases(60)
def test_top_k_padded(device: str, n: int, family: str, seed: int, k: int, divides: bool) -> None:
    """Three steps with one guess select exactly k entries, the later ones started from the last threshold."""
    divisor = powers(n, seed) if divides else None
    steps = [drawn(family, n, seed + i) * (1.0, 0.01, 8.0)[i] for i in range(3)]

    def call(guarded: Guarded) -> list[list[int]]:
        guess, seen = kernels.Guess(), []
        for values in steps:
            out, zeros = guarded.poison(n), guarded.of(torch.zeros(n))
            by = guarded.of(divisor) if divides else None
            found = kernels.top_k_padded(zeros, guarded.of(values), out, k, divisor=by, guess=guess)
            seen += [bits(t) for t in (out, *found)]
        return seen

    seen = agree(call, device)
    for step, values in enumerate(steps):
        chosen = best(values / divisor if divides else values, k)
        assert seen[3 * step + 1] == chosen + [-1] * (k - len(chosen))


LONG = [(k, kind) for k in (1300, 69_000) for kind in ("normal", "ties", "equal", "sparse", "overflowing")]
# Kernels take the same ways for all others. A deep run has all.
OF_KERNELS = trials([*((1300, kind) for kind in ("normal", "sparse", "overflowing")), (69_000, "ties")], LONG)


@pytest.mark.parametrize(
    ("device", "k", "kind"),
    [
        *(
            ("reference", *each)
            for each in (*LONG, (1, "clustered"), (140_000, "normal"), (9000, "sampled lines only"))
        ),
        *(
            pytest.param(*device.values, *each, marks=device.marks, id=f"{device.id}-{each[0]}-{each[1]}")
            for device in DEVICES
            for each in OF_KERNELS
        ),
    ],
)
def test_long_top_k(device: str, kind: str, k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The result on a long vector is exact, however wrong the first guess from a sample is."""
    n = 140_000
    if device != "cuda":  # an eighth of all lengths leads to the same branches
        n, k = n // 8, max(1, k // 8)
        monkeypatch.setattr(top_k, "SAMPLE_FROM", top_k.SAMPLE_FROM // 8)
        monkeypatch.setattr(top_k, "SAMPLE_STRIDE", 33 * top_k.SAMPLE_LINE)
        monkeypatch.setattr(top_k, "SPARE_ROOM", top_k.SPARE_ROOM // 8)
    families = {"sparse": "normal", "overflowing": "equal", "sampled lines only": "zero"}
    values = drawn(families.get(kind, kind), n, k)
    if kind == "sparse":
        values *= torch.rand(n, generator=torch.Generator().manual_seed(0)) < 0.001
    elif kind == "overflowing":  # almost all values are equal, so the guess admits everything
        values[::1000] *= 2
    elif kind == "sampled lines only":  # all large values lie where the sample reads
        for start in range(0, n - top_k.SAMPLE_LINE, top_k.SAMPLE_STRIDE):
            values[start : start + top_k.SAMPLE_LINE] = 1.0
        values[1::2] += 0.25

    def call(guarded: Guarded) -> list[list[int]]:
        x, divisor = guarded.of(values), guarded.of(powers(n, k))
        found = [kernels.top_k(x, k), kernels.top_k(x, k, divisor=divisor)]
        return [bits(part) for selected in found for part in selected]

    found = agree(call, device)
    assert [found[0], found[2]] == [best(values, k), best(values / powers(n, k), k)]


@pytest.mark.parametrize("factor", [0.0, 0.2, 3.0])
def test_sample_does_not_alias_with_matrix_widths(factor: float) -> None:
    """Columns that differ from the rest do not make the first guess admit many times k candidates."""
    x = torch.randn(1 << 21, generator=torch.Generator().manual_seed(0))
    x.view(-1, 1024)[:, :32] *= factor
    k, admitted, keys = x.numel() // 100, [], select.select_keys

    def noted(*args: object, **given: object) -> kernels.Entries:
        admitted.append(keys(*args, **given))
        return admitted[-1]

    with patch.object(top_k, "select_keys", noted):
        assert kernels.top_k(x, k).room == k
    assert [found.room < 2 * k for found in admitted] == [True]


Drawn = tuple[list[int], list[int], list[tuple[float, float]], list[dict[int, float]]]


def tensor(values: list[float]) -> torch.Tensor:
    """Return an fp32 tensor."""
    return torch.from_numpy(np.array(values, dtype=np.float32))


@st.composite
def segments_and_terms(draw: st.DrawFn) -> Drawn:
    """Bounds and budgets of segments, a pair of addends per coordinate, and lists of terms by coordinate."""
    widths = draw(st.lists(st.integers(0, 30), min_size=1, max_size=5))
    bounds = [sum(widths[:at]) for at in range(len(widths) + 1)]
    budgets = draw(st.lists(st.integers(0, 8), min_size=len(widths), max_size=len(widths)))
    numbers = st.one_of(st.sampled_from(SPECIAL), st.floats(width=32, allow_nan=False))
    addends = draw(st.lists(st.tuples(numbers, numbers), min_size=bounds[-1], max_size=bounds[-1]))
    places = st.integers(0, max(0, bounds[-1] - 1))
    terms = draw(st.lists(st.dictionaries(places, numbers, max_size=12 if addends else 0), max_size=3))
    return bounds, budgets, addends, terms


@given(segments_and_terms(), st.booleans(), st.sampled_from([1, 8, 1 << 17]), st.sampled_from([0, 1 << 14]))
@examples(200)
def test_accumulate_top_k_segments(drawn: Drawn, added: bool, chunk: int, short: int) -> None:
    """Entries are those of the sum with all terms, as if each segment was alone. ``out`` is the sum without them.

    Chunks and short segments are made small, so that all branches are reached. A sum that is computed already stays.
    """
    bounds, budgets, addends, terms = drawn
    residual, gradient = (tensor([pair[at] for pair in addends]) for at in (0, 1))
    plain = residual + gradient
    whole = plain.clone()
    for listed in terms:
        for at, term in listed.items():
            whole[at] += tensor([term])[0]
    expected = [
        start + at
        for (start, stop), budget in zip(itertools.pairwise(bounds), budgets, strict=True)
        for at in best(whole[start:stop], budget)
    ]
    lists = [
        (torch.tensor(sorted(listed), dtype=torch.int32), tensor([listed[at] for at in sorted(listed)]))
        for listed in terms
    ]
    out = plain.clone() if added else torch.full_like(plain, math.nan)
    with (
        patch.object(select, "HOST_CHUNK", chunk),
        patch.object(top_k, "SHORT_SEGMENT", short),
        patch.object(top_k, "SAMPLE_FROM", 20),
        patch.object(top_k, "SAMPLE_LINE", 2),
        patch.object(top_k, "SAMPLE_STRIDE", 5),
    ):
        found = kernels.accumulate_top_k_segments(
            out if added else residual, None if added else gradient, out, bounds, budgets, lists
        )
    assert found.indices.dtype == torch.int32
    assert found.indices.tolist() == expected
    assert bits(found.values) == bits(whole[expected])
    assert bits(out) == bits(plain)
    if not terms:
        beyond = torch.cat([plain, tensor([9.0])])  # after the last segment
        found = kernels.accumulate_top_k_segments(beyond, None, beyond, bounds, budgets)
        assert found.indices.tolist() == expected


@kernels_only
def test_segments_with_terms(device: str) -> None:
    """Kernels select from segments of a sum with terms what the reference does, and the terms leave the sum again."""

    def call(guarded: Guarded) -> list[list[int]]:
        residual, added = (guarded.of(drawn("normal", 700, seed)) for seed in (1, 2))
        terms = [(guarded.of(torch.tensor([3, 40], dtype=torch.int32)), guarded.of(torch.tensor([9.0, -9.0])))]
        out = guarded.poison(700)
        found = kernels.accumulate_top_k_segments(residual, added, out, [0, 30, 30, 700], [4, 2, 60], terms)
        assert {3, 40} < {*found.indices.tolist()}
        return [*map(bits, found), bits(out)]

    agree(call, device)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 3.4e38, None])
@pytest.mark.parametrize("position", [0, HOST_CHUNK - 1, HOST_CHUNK, -1])
def test_has_non_finite(value: float | None, position: int) -> None:
    """One NaN or Inf is found anywhere, and large finite values are not taken for one, whatever their sum."""
    values = torch.full((2 * HOST_CHUNK + 5,), 3.0e38)
    if value is not None:
        values[position] = value
    assert kernels.has_non_finite(values) == (value is not None and not math.isfinite(value))
    assert not kernels.has_non_finite(values[:0])


@gpu_only
def test_longest_vector(device: str) -> None:
    """Positions near the limit of int32 are selected. Only a GPU has the memory for this test."""
    if torch.cuda.mem_get_info()[0] < 40 << 30:
        pytest.skip("needs a GPU with 40 GiB free")
    n = INDEX_LIMIT
    places = [0, 1, 4095, 2**30, n - 4097, n - 2, n - 1]
    residual, gradient = torch.zeros(n, device=device), torch.zeros(n, device=device)
    residual[places] = torch.arange(1.0, 1.0 + len(places), device=device)
    selected = kernels.accumulate_and_select(residual, gradient, residual, 0.5)
    assert selected.indices.tolist() == places
    assert selected.values.tolist() == [1.0 + i for i in range(len(places))]
    assert kernels.top_k(residual, 3).indices.tolist() == places[-3:]


@gpu_only
def test_cuda_graph_replay(device: str) -> None:
    """A CUDA graph of a selection replays with new inputs: nothing waits for the host or allocates memory."""
    n, k, guess = 100_000, 1000, kernels.Guess()
    residual, added, out = (torch.empty(n, device=device) for _ in range(3))
    triton = kernel("select_triton")
    marks, least = triton.empty_marks(out), torch.ones(1, dtype=torch.int32, device=device)
    room = 60_000  # enough at the first threshold, not at the second
    indices, values = (torch.empty(room, dtype=d, device=device) for d in (torch.int32, torch.float32))
    found = torch.zeros(1, dtype=torch.int64, device=device)

    def step() -> kernels.Entries:
        triton.mark(select.Sum(residual, added, out), least, marks)
        triton.expand(select.Sum(residual, added, out), marks, indices, values, found)
        return kernels.top_k_padded(out, None, out, k, guess=guess)

    residual.normal_()
    added.normal_()
    step()  # compiles, and makes a first guess
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        best = step()
    for seed, threshold in enumerate((1.5, 0.75)):
        residual.copy_(drawn("normal", n, seed))
        added.copy_(drawn("heavy", n, seed))
        least.fill_(key_of(threshold))
        graph.replay()
        total = residual + added
        reaching, largest = kernels.select(total, threshold), kernels.top_k(total, k)
        assert found.item() == reaching.room
        written = min(room, reaching.room)
        assert torch.equal(indices[:written], reaching.indices[:room])
        assert torch.equal(values[:written], reaching.values[:room])
        assert torch.equal(best.indices, largest.indices)
        assert torch.equal(best.values, largest.values)
