"""Lists with padding against plain Python: selection, compaction, sums in row order, and sections of many rows."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kernel_cases import FAMILIES, bits, drawn, key_of, new_memory_filled, padded_rows, seeds

import tritoncomm_kernels as kernels
from depth import examples
from tritoncomm_kernels import Entries, Workspace
from tritoncomm_kernels.formats import FORMATS, INDICES, Format
from tritoncomm_kernels.section_layout import Layout
from tritoncomm_kernels.sections import check_rows, read_rows, write_rows

families = st.sampled_from(FAMILIES)
rows_drawn = st.lists(st.tuples(st.floats(0, 1), seeds), min_size=1, max_size=5)
lengths = st.sampled_from([1, 2, 31, 70])


@pytest.fixture(autouse=True)
def _filled() -> object:
    with new_memory_filled(), np.errstate(all="ignore"):
        yield


def largest(values: list[float], k: int) -> list[int]:
    """Return the positions of the ``k`` largest magnitudes, ascending, by sorting."""
    found = [place for place, value in enumerate(values) if key_of(value)]
    return sorted(sorted(found, key=lambda place: (-key_of(values[place]), place))[: max(0, k)])


def lists_of(rows: Entries) -> list[list[tuple[int, np.float32]]]:
    """Return the entries of each row, without padding."""
    parts = zip(rows.indices.tolist(), rows.values.numpy(), strict=True)
    return [[(at, value) for at, value in zip(*part, strict=True) if at >= 0] for part in parts]


def check(found: Entries, expected: list[tuple[int, float]]) -> None:
    """Assert that one row holds the ``expected`` entries and padding."""
    spare = found.room - len(expected)
    assert found.indices.dtype == torch.int32
    assert found.indices.tolist() == [at for at, _ in expected] + [-1] * spare
    values = np.array([value for _, value in expected] + [0.0] * spare, dtype=np.float32)
    assert bits(found.values) == bits(torch.from_numpy(values))


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(-1, 9)), max_size=5), families, seeds, st.booleans())
@examples(100)
def test_top_k_rows(segments: list[tuple[int, int]], family: str, seed: int, named: bool) -> None:
    """Each row has the largest entries of its segment. Indices are positions, or the given ones."""
    cuts = np.cumsum([3, *(length for length, _ in segments)])
    values = drawn(family, int(cuts[-1]) + 2, seed)
    names = torch.randperm(values.numel(), generator=torch.Generator().manual_seed(seed)).to(torch.int32)
    bounds = torch.from_numpy(cuts.astype(np.int32))
    budgets = torch.tensor([budget for _, budget in segments], dtype=torch.int32)
    found = kernels.top_k_rows(values, bounds, budgets, 6, indices=names if named else None, workspace=Workspace())
    assert found.indices.shape == found.values.shape == (len(segments), 6)
    for row, (start, stop) in enumerate(itertools.pairwise(cuts)):
        places = [int(start) + at for at in largest(values[start:stop].tolist(), min(6, segments[row][1]))]
        check(found.row(row), [(int(names[at]) if named else at, float(values[at])) for at in places])


@given(lengths, families, seeds, st.integers(1, 9), st.booleans())
@examples(60)
def test_top_k_of_a_sum_and_of_a_list(n: int, family: str, seed: int, k: int, added: bool) -> None:
    """The k largest of a vector or of a sum of two fill k slots, and so do the k largest of a list."""
    residual, gradient = drawn(family, n, seed), drawn("normal", n, seed + 1)
    out = torch.empty(n) if added else residual
    found = kernels.top_k_padded(residual, gradient if added else None, out, k, workspace=Workspace())
    assert bits(out) == bits(residual + gradient if added else residual)
    expected = [(at, out[at].item()) for at in largest(out.tolist(), k)]
    check(found, expected)
    again = kernels.largest_padded(found, max(1, k - 2), workspace=Workspace())
    check(again, [expected[at] for at in largest([value for _, value in expected], max(1, k - 2))])


@given(rows_drawn, families, seeds, st.floats(0, 2))
@examples(60)
def test_compaction(drawn_rows: list[tuple[float, int]], family: str, seed: int, limit: float) -> None:
    """Padding moves behind all entries. A threshold keeps the entries that reach it, and they can be counted."""
    rows = padded_rows(40, drawn_rows, family, spare=2)
    gaps = torch.rand(rows.indices.shape, generator=torch.Generator().manual_seed(seed)) < 0.3
    holes = Entries(torch.where(gaps, -1, rows.indices), torch.where(gaps, 0.0, rows.values))
    check(kernels.joined(holes, workspace=Workspace()), [entry for row in lists_of(holes) for entry in row])
    assert kernels.count_entries(rows).tolist() == [len(row) for row in lists_of(rows)]
    threshold = torch.tensor([limit], dtype=torch.float32)
    reaching = [entry for entry in lists_of(rows)[0] if key_of(entry[1]) >= key_of(np.float32(limit))]
    check(kernels.reaching(rows.row(0), threshold, workspace=Workspace()), reaching)
    nonzero = [entry for entry in reaching if entry[1] != 0]
    check(kernels.reaching(rows.row(0), float(threshold), workspace=Workspace()), nonzero)
    assert kernels.count_entries(rows.row(0)).tolist() == [len(lists_of(rows)[0])]
    count = sum(key_of(value) >= max(1, key_of(np.float32(limit))) for _, value in lists_of(rows)[0])
    assert kernels.count_reaching(rows.row(0).values, threshold).tolist() == [count]
    assert kernels.count_reaching(rows.row(0).values, float(threshold)).tolist() == [count]


@given(lengths, rows_drawn, families, st.integers(0, 3))
@examples(60)
def test_merge_rows(n: int, drawn_rows: list[tuple[float, int]], family: str, spare: int) -> None:
    """The union ascends, and the terms of an index are added in row order."""
    rows = padded_rows(n, drawn_rows, family, spare)
    sums: dict[int, np.float32] = {}
    for row in lists_of(rows):
        for at, value in row:
            sums[at] = sums.get(at, np.float32(0)) + value
    found = kernels.merge_rows(rows, n, workspace=Workspace())
    assert found.room == min(rows.indices.numel(), n)
    check(found, sorted(sums.items()))


@given(lengths, rows_drawn, families, st.sampled_from([1.0, -1.0, 0.3]), st.sampled_from([0, 7]))
@examples(60)
def test_add_rows(n: int, drawn_rows: list[tuple[float, int]], family: str, scale: float, offset: int) -> None:
    """Scaled rows are added in order to what the output holds, from an offset on."""
    rows = padded_rows(n, drawn_rows, family, spare=1)
    base = drawn(family, n, 0)
    expected, out = base.numpy().copy(), base.clone()
    for row in lists_of(rows):
        for at, value in row:
            expected[at] += value * np.float32(scale)
    moved = rows._replace(indices=torch.where(rows.indices < 0, -1, rows.indices + offset))
    kernels.add_rows(out, moved, offset=offset, scale=scale, workspace=Workspace())
    assert bits(out) == bits(torch.from_numpy(expected))
    dense = kernels.decompress_padded(torch.empty(n), rows.row(0), workspace=Workspace())
    assert bits(dense) == bits(
        torch.zeros(n).index_add_(0, rows.row(0).trimmed().indices, rows.row(0).trimmed().values)
    )


@given(lengths, st.floats(0, 1), seeds, families)
@examples(60)
def test_single_entries(n: int, share: float, seed: int, family: str) -> None:
    """Values are set, cleared and read at the indices of entries. Padding does nothing, and reads 0."""
    entries, base = padded_rows(n, [(share, seed)], "normal", spare=2), drawn(family, n, seed)
    held = dict(lists_of(entries)[0])
    for given_values in (True, False):
        out = base.clone()
        kernels.set_at(out, entries.row(0) if given_values else entries.indices[0])
        put = {at: value if given_values else 0.0 for at, value in held.items()}
        assert bits(out) == bits(torch.tensor([put.get(at, base[at].item()) for at in range(n)]))
    read = kernels.values_at(base, entries.indices)
    assert bits(read) == bits(torch.tensor([base[at].item() if at >= 0 else 0.0 for at in entries.indices[0].tolist()]))
    assert read.shape == entries.indices.shape


def test_nothing() -> None:
    """Without rows, slots or coordinates, results are empty or all padding, and nothing is written."""
    held, integers = Workspace(), torch.zeros(1, dtype=torch.int32)
    empty = Entries(integers[:0].reshape(2, 0), torch.zeros(2, 0))
    assert kernels.top_k_rows(torch.ones(3), integers, integers[:0], 4, workspace=held).values.shape == (0, 4)
    assert kernels.top_k_rows(torch.ones(3), integers.repeat(2), integers, 0, workspace=held).values.shape == (1, 0)
    none = kernels.top_k_rows(torch.ones(0), integers.repeat(2), integers + 2, 2, workspace=held)
    check(none.row(0), [])
    assert kernels.joined(empty, workspace=held).room == 0
    assert kernels.merge_rows(empty, 5, workspace=held).room == 0
    assert kernels.count_entries(empty).tolist() == [0, 0]
    out = torch.ones(2)
    kernels.add_rows(out, empty, workspace=held)
    kernels.add_rows(out[:0], Entries(integers - 1, torch.zeros(1)), workspace=held)
    kernels.set_at(out, integers[:0])
    assert out.tolist() == [1, 1]
    assert kernels.values_at(out, empty.indices).shape == (2, 0)
    assert kernels.values_at(out[:0], integers - 1).tolist() == [0]
    layout = Layout.of(3, 0, FORMATS["4bit"])
    lows, nowhere = integers.repeat(2), Entries(integers.repeat(2, 3) - 1, torch.zeros(2, 3))
    words, sent = write_rows(layout, lows, nowhere, workspace=held)
    assert words.shape == (2, 0)
    assert sent.indices.tolist() == nowhere.indices.tolist()
    found, malformed = read_rows(layout, lows, words, workspace=held)
    assert found.indices.shape == (2, 0)
    assert malformed.tolist() == [0]


@pytest.mark.parametrize("fmt", [INDICES, FORMATS["4bit"], FORMATS["fp32"]])
def test_sections_of_rows(fmt: Format) -> None:
    """What is written is read. Values too small beside the largest stay behind. A malformed row has no entries."""
    layout, lows = Layout.of(4, 100, fmt), torch.tensor([0, 100, 200], dtype=torch.int32)
    indices = torch.tensor([[3, 50, 99, -1], [-1] * 4, [200, 201, -1, -1]], dtype=torch.int32)
    values = torch.tensor([[1.0, 1e-42, -2.0, 0.0], [0.0] * 4, [1e30, -1e-30, 0.0, 0.0]])
    words, sent = write_rows(layout, lows, Entries(indices, values), divisor=2, workspace=Workspace())
    small = {(0, 1), (2, 1)} if layout.quantized else set()
    kept = [[(row, at) for at in range(4) if indices[row, at] >= 0 and (row, at) not in small] for row in range(3)]
    assert [[at for at, _ in row] for row in lists_of(sent)] == [[int(indices[at]) for at in row] for row in kept]
    if not layout.quantized:
        assert bits(sent.values) == bits(values)
    words[2, layout.heads] ^= 1 << 31
    found, malformed = read_rows(layout, lows, words, divisor=2, workspace=Workspace())
    assert malformed.tolist() == [1]
    assert found.indices.tolist() == [sent.indices[0].tolist(), [-1] * 4, [-1] * 4]
    scale = {0: 0.0, 32: 1.0}.get(fmt.bits, 2.0)
    assert bits(found.values[0] * scale) == bits(sent.values[0] if fmt.bits else torch.zeros(4))


def test_plain_rows_are_checked() -> None:
    """A plain row whose indices do not ascend inside the range, or that has padding in between, loses all entries."""
    indices = [[0, 9, -1], [1, 1, 2], [4, 3, -1], [-1, 5, 6], [0, 10, -1], [-2, 0, 1], [-1, -1, -1]]
    rows = Entries(torch.tensor(indices, dtype=torch.int32), torch.ones(7, 3))
    clean, wrong = check_rows(rows, torch.zeros(7, dtype=torch.int32), 10)
    assert wrong.tolist() == [5]
    assert clean.indices.tolist() == [[0, 9, -1], *([[-1, -1, -1]] * 6)]
    assert clean.values.tolist() == [[1, 1, 0], *([[0, 0, 0]] * 6)]
