"""Select, compact and exact top-k against plain Python lists, bit for bit."""

from __future__ import annotations

import importlib
import math
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kernel_cases import key_of

import tritoncomm_kernels as kernels
from depth import examples
from tritoncomm_kernels.select import HOST_CHUNK, true_positions

# The functions of these names hide the modules in the package.
select, top_k = (importlib.import_module(f"tritoncomm_kernels.{name}") for name in ("select", "top_k"))
SPECIAL = [0.0, -0.0, 1.0, -1.0, 1.0, 5e-324, 1e-45, -1e-45, 1e-40, math.inf, -math.inf, math.nan, 3.4e38, -2.5, 2.5]
floats = st.one_of(st.sampled_from(SPECIAL), st.floats(width=32))
vectors = st.lists(floats, max_size=70)
thresholds = st.one_of(st.sampled_from([0.0, -1.0, math.nan, math.inf, 1.0, 1e-45]), st.floats(width=32))


def expected_key(limit: float) -> int:
    """Return the key of a threshold, computed by hand."""
    if math.isnan(limit):
        return 0x7F800001  # of the first NaN
    return key_of(limit) if limit > 0 and key_of(limit) else 1


def tensor(values: list[float]) -> torch.Tensor:
    """Return an fp32 tensor without rounding the payloads of NaN."""
    return torch.from_numpy(np.array(values, dtype=np.float32))


def bits(values: torch.Tensor) -> list[int]:
    """Return the bit patterns."""
    return values.view(torch.int32).tolist()


def one_nan(values: torch.Tensor) -> torch.Tensor:
    """Return ``values`` with the same bits for each NaN."""
    return torch.where(values.isnan(), torch.tensor(math.nan), values)


def by_list(values: torch.Tensor, key: int) -> list[int]:
    """Return the positions that reach a key, as a second oracle."""
    return [i for i, b in enumerate(bits(values)) if b & 0x7FFFFFFF >= key]


@pytest.mark.parametrize("payload", [1, 0x400000, 0x7FFFFF])
def test_nan_threshold_selects_every_nan(payload: int) -> None:
    """A NaN threshold selects NaNs of any payload and sign, which depends on the device, and nothing else."""
    nan = torch.tensor([0x7F800000 | payload], dtype=torch.int32).view(torch.float32)
    values = torch.cat([torch.tensor([math.inf, 1.0, 0.0, -math.inf]), nan, -nan])
    assert kernels.select(values, math.nan).indices.tolist() == [4, 5]
    marks = kernels.Marks.empty(values.numel(), "cpu")
    kernels.mark(values, None, values, torch.tensor([math.nan]), marks)
    assert marks.bits[0] == 0b110000


@given(vectors, thresholds)
@examples(300)
def test_select(values: list[float], limit: float) -> None:
    """Selections ascend, skip zeros, have every NaN, and do not change the vector."""
    x = tensor(values)
    before = bits(x)
    expected = by_list(x, expected_key(limit))
    got = kernels.select(x, limit)
    assert got.room == len(expected)
    assert got.indices.tolist() == expected
    assert bits(got.values) == [before[i] for i in expected]
    assert bits(x) == before


@given(vectors, st.data())
@examples(200)
def test_accumulate_and_select(values: list[float], data: st.DataObject) -> None:
    """The fused pass equals addition followed by selection, and does not change its inputs."""
    limit = data.draw(thresholds)
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
    residual = tensor(values)
    gradient = tensor(data.draw(st.lists(floats, min_size=len(values), max_size=len(values)))).to(dtype)
    out = torch.full_like(residual, math.nan)
    inputs = bits(residual)
    total = torch.add(residual, gradient)
    got = kernels.accumulate_and_select(residual, gradient, out, limit)
    # The sum of two NaNs has the bits of either: this depends on the instruction that torch chooses.
    assert bits(one_nan(out)) == bits(one_nan(total))
    expected = kernels.select(out, limit)
    assert got.indices.tolist() == expected.indices.tolist()
    assert bits(got.values) == bits(expected.values)
    assert bits(residual) == inputs


@given(vectors, st.integers(0, 80))
@examples(300)
def test_top_k(values: list[float], k: int) -> None:
    """Exactly the min(k, non-zeros) largest entries are selected, ties to the lower index, in ascending order."""
    x = tensor(values)
    keys = [b & 0x7FFFFFFF for b in bits(x)]
    order = sorted((i for i, key in enumerate(keys) if key), key=lambda i: (-keys[i], i))
    expected = sorted(order[:k])
    got = kernels.top_k(x, k)
    assert got.indices.tolist() == expected
    assert got.room == len(expected)
    assert bits(got.values) == [bits(x)[i] for i in expected]
    kth = keys[order[k - 1]] if 0 < k <= len(order) else 0
    found = kernels.kth_magnitude(x, k)
    assert math.isnan(found) if kth > 0x7F800000 else key_of(found) == kth


@pytest.mark.parametrize("k", [1, 17, 2000, 150_000, 299_999, 300_000])
@pytest.mark.parametrize("kind", ["normal", "heavy", "sparse", "equal", "clustered", "sampled lines only"])
def test_top_k_of_long_vectors(kind: str, k: int) -> None:
    """The sampled first guess never changes the result, however wrong it is."""
    n = 300_000
    generator = torch.Generator().manual_seed(k)
    x = torch.randn(n, generator=generator)
    if kind == "heavy":
        x = x.exp() * x.sign()
    elif kind == "sparse":
        x *= torch.rand(n, generator=generator) < 0.01
    elif kind == "equal":
        x = x.sign()
    elif kind == "clustered":
        x[: n // 2] = 0.0
    elif kind == "sampled lines only":  # all large values lie where the sample reads
        x = torch.zeros(n)
        for start in range(0, n - top_k.SAMPLE_LINE, top_k.SAMPLE_STRIDE):
            x[start : start + top_k.SAMPLE_LINE] = 1.0
        x[1::2] += 0.25
    got = kernels.top_k(x, k)
    keys = kernels.magnitude_keys(x).numpy()
    order = np.argsort(-keys.astype(np.int64), kind="stable")[:k]
    expected = np.sort(order[keys[order] > 0])
    assert np.array_equal(got.indices.numpy(), expected)
    out = torch.empty(n)
    fused = kernels.accumulate_top_k(torch.zeros(n), x, out, k)
    assert torch.equal(fused.indices, got.indices)
    assert torch.equal(out, x)


@pytest.mark.parametrize("width", [256, 1024, 8192])
@pytest.mark.parametrize("factor", [0.0, 0.2, 3.0])
def test_sample_does_not_alias_with_matrix_widths(width: int, factor: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Columns that differ from the rest do not make the first guess admit many times k candidates."""
    x = torch.randn(1 << 21, generator=torch.Generator().manual_seed(0))
    x.view(-1, width)[:, :32] *= factor
    admitted = []
    keys = select.select_keys
    monkeypatch.setattr(
        top_k, "select_keys", lambda *args, **given: admitted.append(found := keys(*args, **given)) or found
    )
    k = x.numel() // 100
    assert kernels.top_k(x, k).room == k
    assert len(admitted) == 1
    assert admitted[0].room < 2 * k


@given(st.lists(st.booleans(), max_size=200), st.booleans())
@examples(100)
def test_positions_of_flags(flags: list[bool], few: bool) -> None:
    """Both ways to find true flags give their ascending positions, whatever their number."""
    found = true_positions(np.array(flags, dtype=np.bool_), few=few)
    assert found.tolist() == [i for i, flag in enumerate(flags) if flag]


def test_chunk_sizes_give_the_same_result(monkeypatch: pytest.MonkeyPatch) -> None:
    """All chunk sizes give the same result."""
    x = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    expected = kernels.select(x, 0.5)
    for chunk in (1, 7, 256, 999, 1000, 4096):
        monkeypatch.setattr(select, "HOST_CHUNK", chunk)
        got = kernels.select(x, 0.5)
        assert got.room == expected.room
        assert torch.equal(got.indices, expected.indices)
        assert torch.equal(got.values, expected.values)


@given(vectors, thresholds, st.integers(1, 80), st.booleans())
@examples(50)
def test_divisor(values: list[float], limit: float, k: int, added: bool) -> None:
    """Quotients are compared and returned, and the values keep their units."""
    x = tensor(values)
    divisor = 2.0 ** (torch.arange(len(values)) % 5)
    base, gradient = (x, torch.zeros_like(x)) if added else (None, None)
    for quotients, divided in (
        (kernels.select(x / divisor, limit), lambda out: kernels.select(out, limit, divisor=divisor)),
        (kernels.top_k(x / divisor, k), lambda out: kernels.top_k(out, k, divisor=divisor)),
        (
            kernels.select(x / divisor, limit),
            lambda out: kernels.accumulate_and_select(base, gradient, out, limit, divisor=divisor),
        ),
        (
            kernels.top_k(x / divisor, k),
            lambda out: kernels.accumulate_top_k(base, gradient, out, k, divisor=divisor),
        ),
    )[2 * added : 2 * added + 2]:
        out = x.clone()
        got = divided(out)
        assert got.indices.tolist() == quotients.indices.tolist()
        assert bits(got.values) == bits(quotients.values)
        assert bits(out + 0.0) == bits(x + 0.0)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"residual": torch.zeros(3, dtype=torch.float64)}, "residual has dtype torch.float64"),
        ({"gradient": torch.zeros(3, dtype=torch.int32)}, "gradient has dtype torch.int32"),
        ({"gradient": torch.zeros(4)}, "gradient has 4 elements, expected 3"),
        ({"gradient": torch.zeros(6)[::2]}, "gradient is not contiguous"),
        ({"out": torch.zeros(1, 3)}, "out has shape"),
    ],
)
def test_accumulate_names_bad_arguments(arguments: dict[str, object], named: str) -> None:
    """The error names the wrong argument, before anything is written."""
    good = {"residual": torch.zeros(3), "gradient": torch.zeros(3), "out": torch.zeros(3)}
    with pytest.raises(ValueError, match=named):
        kernels.accumulate_and_select(**(good | arguments), threshold=1.0)


def test_bad_counts_are_named() -> None:
    """A negative k is rejected."""
    with pytest.raises(ValueError, match="k=-2"):
        kernels.top_k(torch.zeros(3), -2)


@given(st.lists(st.tuples(st.lists(floats, max_size=9), st.integers(0, 6)), max_size=7), st.integers(0, 3))
@examples(200)
def test_top_k_segments(segments: list[tuple[list[float], int]], rest: int) -> None:
    """Each segment is selected as if it were alone. Values after the last segment are ignored."""
    values = tensor([value for segment, _ in segments for value in segment] + [9.0] * rest)
    bounds, expected = [0], []
    for segment, budget in segments:
        alone = kernels.top_k(tensor(segment), budget)
        expected += (alone.indices + bounds[-1]).tolist()
        bounds.append(bounds[-1] + len(segment))
    found = kernels.top_k_segments(values, bounds, [budget for _, budget in segments])
    assert found.indices.dtype == torch.int32
    assert found.indices.tolist() == expected
    assert bits(found.values) == bits(values[found.indices.long()])


Drawn = tuple[list[int], list[int], list[tuple[float, float]], list[dict[int, float]]]


@st.composite
def segments_and_terms(draw: st.DrawFn) -> Drawn:
    """Bounds and budgets of segments, a pair of addends per coordinate, and lists of terms by coordinate."""
    widths = draw(st.lists(st.integers(0, 30), min_size=1, max_size=5))
    bounds = [sum(widths[:at]) for at in range(len(widths) + 1)]
    budgets = draw(st.lists(st.integers(0, 8), min_size=len(widths), max_size=len(widths)))
    numbers = st.one_of(st.sampled_from(SPECIAL), st.floats(width=32, allow_nan=False))  # NaNs of one payload
    addends = draw(st.lists(st.tuples(numbers, numbers), min_size=bounds[-1], max_size=bounds[-1]))
    places = st.integers(0, max(0, bounds[-1] - 1))
    terms = draw(st.lists(st.dictionaries(places, numbers, max_size=12 if addends else 0), max_size=3))
    return bounds, budgets, addends, terms


@given(segments_and_terms(), st.booleans(), st.sampled_from([1, 8, 1 << 17]), st.sampled_from([0, 1 << 14]))
@examples(400)
def test_accumulate_top_k_segments(drawn: Drawn, added: bool, chunk: int, short: int) -> None:
    """Entries are those of the sum with all terms, by Python lists. ``out`` is the sum without them.

    Chunks and short segments are made small, so that all branches are reached. A sum that is computed already stays.
    """
    bounds, budgets, addends, terms = drawn
    residual, gradient = (tensor([pair[at] for pair in addends]) for at in (0, 1))
    plain = residual + gradient
    whole = plain.clone()
    for listed in terms:
        for at, term in listed.items():
            whole[at] += tensor([term])[0]
    expected = []
    for start, stop, budget in zip(bounds, bounds[1:], budgets, strict=False):
        keys = {at: b & 0x7FFFFFFF for at, b in enumerate(bits(whole)) if start <= at < stop and b & 0x7FFFFFFF}
        expected += sorted(sorted(keys, key=lambda at: (-keys[at], at))[:budget])
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
    assert bits(one_nan(found.values)) == bits(one_nan(whole[expected]))
    assert bits(one_nan(out)) == bits(one_nan(plain))


def test_accumulate_top_k_segments_samples_the_terms() -> None:
    """A long segment is scanned once: the threshold is estimated with the terms, and few candidates pass it."""
    generator = torch.Generator().manual_seed(0)
    residual, gradient = torch.randn(2, 1 << 19, generator=generator)
    indices = torch.randperm(1 << 19, generator=generator)[: 1 << 17].sort().values
    terms = [(indices.int(), 10 * torch.randn(1 << 17, generator=generator))]
    whole = (residual + gradient).index_add(0, *terms[0])
    out, keys = torch.full_like(residual, math.nan), select.select_keys
    with patch.object(top_k, "select_keys", side_effect=keys) as scans, patch.object(top_k, "largest", lambda s, k: s):
        found = kernels.accumulate_top_k_segments(residual, gradient, out, [0, 1 << 19], [50_000], terms)
    assert scans.call_count == 1
    assert 50_000 <= found.room < 80_000
    assert torch.equal(found.values, whole[found.indices.long()])
    assert torch.equal(out, residual + gradient)


def test_accumulate_top_k_segments_covers_the_vector() -> None:
    """Every coordinate is added, so that every coordinate must be in a segment."""
    vector = torch.ones(9)
    for bounds in ([1, 9], [0, 8], []):
        with pytest.raises(ValueError, match="bounds="):
            kernels.accumulate_top_k_segments(vector, vector, torch.empty(9), bounds, [1] * (len(bounds) - 1))


@pytest.mark.parametrize(("bounds", "budgets"), [([0, 4], [1, 1]), ([3, 1], [1])])
def test_bad_segments_are_rejected(bounds: list[int], budgets: list[int]) -> None:
    """Bounds must ascend, and there must be one more of them than budgets."""
    with pytest.raises(ValueError, match="bounds="):
        kernels.top_k_segments(torch.ones(9), bounds, budgets)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 3.4e38, None])
@pytest.mark.parametrize("position", [0, HOST_CHUNK - 1, HOST_CHUNK, -1])
def test_has_non_finite(value: float | None, position: int) -> None:
    """One NaN or Inf is found anywhere, and large finite values are not taken for one, whatever their sum."""
    values = torch.full((2 * HOST_CHUNK + 5,), 3.0e38)
    if value is not None:
        values[position] = value
    assert kernels.has_non_finite(values) == (value is not None and not math.isfinite(value))
    assert not kernels.has_non_finite(values[:0])
