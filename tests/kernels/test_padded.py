"""Lists with padding: reference and kernels against plain Python, bit for bit. Every slot is written, and nothing else.

Selection from segments, compaction, sums in row order, and single entries.
"""

from __future__ import annotations

import itertools
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from kernel_cases import (
    Guarded,
    agree,
    best,
    bits,
    both,
    cases,
    drawn,
    families,
    gpu_only,
    kernels_from,
    kernels_only,
    key_of,
    key_to_reach,
    launched,
    padded_rows,
    reaching,
    seeds,
)
from tritoncomm.primitives.sparse_vector import SparseVector

import tritoncomm_kernels as kernels
from tritoncomm_kernels import Entries
from tritoncomm_kernels.dispatch import kernel, launch
from tritoncomm_kernels.formats import FORMATS
from tritoncomm_kernels.section_layout import Layout
from tritoncomm_kernels.sections import check_rows, read_rows, write_rows

rows_drawn = st.lists(st.tuples(st.floats(0, 1), seeds), min_size=1, max_size=4)
lengths = st.sampled_from([1, 2, 33, 70, 500, 1100])
LENGTH = 608  # the bits of a union fill their words
JUNK = torch.tensor([-(2**31), -2, -1, LENGTH - 1, LENGTH, LENGTH + 1, 2**31 - 1], dtype=torch.int32)
Contents = tuple[list[int], list[int]]


def guarded_rows(guarded: Guarded, rows: Entries) -> Entries:
    """Return the same rows between guards."""
    return Entries(*map(guarded.of, rows))


def contents(found: Entries) -> Contents:
    """Return indices and bits of values."""
    return bits(found.indices), bits(found.values)


def listed(rows: Entries) -> list[tuple[int, np.float32]]:
    """Return the entries of all rows, without padding."""
    pairs = zip(rows.indices.reshape(-1).tolist(), rows.values.reshape(-1).numpy(), strict=True)
    return [(at, value) for at, value in pairs if at >= 0]


def filled(entries: list[tuple[int, np.float32]], room: int) -> Contents:
    """Return the contents of one row that holds ``entries`` and padding."""
    spare = room - len(entries)
    values = np.array([value for _, value in entries] + [0.0] * spare, dtype=np.float32)
    return [at for at, _ in entries] + [-1] * spare, bits(torch.from_numpy(values))


def with_holes(rows: Entries, seed: int) -> Entries:
    """Return rows of which some entries are padding."""
    gaps = torch.rand(rows.indices.shape, generator=torch.Generator().manual_seed(seed)) < 0.3
    return Entries(torch.where(gaps, -1, rows.indices), torch.where(gaps, 0.0, rows.values))


def check(device: str, call, expected: object, module: str = "entries_triton", **small: int) -> None:
    """Assert that ``call`` returns the ``expected`` result, on kernels also with ``small`` constants of a module."""
    assert agree(call, device) == expected
    if device != "reference" and small:
        with patch.multiple(kernel(module), **small):
            assert launched(call, device) == expected


@both
@given(lengths, families, seeds, st.tuples(st.integers(0, 1100), st.integers(0, 1100)), st.floats(0, 2))
@cases(30)
def test_count_inside(device: str, n: int, family: str, seed: int, ends: tuple[int, int], limit: float) -> None:
    """Entries that reach the threshold are counted inside the span only, which may be empty."""
    values, cut = drawn(family, n, seed), sorted(min(end, n) for end in ends)

    def call(guarded: Guarded) -> list[int]:
        span = guarded.of(torch.tensor(cut, dtype=torch.int32))
        return bits(kernels.count_inside(guarded.of(values), limit, span))

    key = key_to_reach(float(torch.tensor(limit)))
    check(device, call, [sum(key_of(value) >= key for value in values[cut[0] : cut[1]].tolist())])


@both
@given(
    st.lists(st.tuples(st.sampled_from([0, 1, 30, 64, 200, 700]), st.integers(-1, 99)), max_size=4),
    st.integers(0, 70),
    families,
    seeds,
    st.sampled_from([1, 90]),
    st.booleans(),
    st.integers(0, 1),
)
@example([(200, 70), (64, 9)], 3, "ties", 0, 90, True, 0)  # ties in several blocks and programs
@example([(64, 99), (700, 2)], 0, "equal", 0, 90, False, 1)
@cases(8)
def test_top_k_rows(
    device: str, segments: list[tuple[int, int]], first: int, family: str, seed: int, room: int, named: bool,
    shift: int,
) -> None:  # fmt: skip
    """Each row has the largest entries of its segment, whose indices are positions, or the given ones."""
    cuts = torch.tensor([first, *(length for length, _ in segments)]).cumsum(0).to(torch.int32)
    values = drawn(family, int(cuts[-1]) + 2, seed)
    names = torch.randperm(values.numel(), generator=torch.Generator().manual_seed(seed)).to(torch.int32)
    limits = torch.tensor([budget for _, budget in segments], dtype=torch.int32)

    def call(guarded: Guarded) -> Contents:
        x = guarded.of(torch.cat([torch.zeros(shift), values]))[shift:]  # an address that is no multiple of 16 bytes
        bounds, budgets, at = guarded.of(cuts), guarded.of(limits), guarded.of(names) if named else None
        return contents(kernels.top_k_rows(x, bounds, budgets, room, indices=at))

    expected: Contents = [], []
    for (start, stop), (_, budget) in zip(itertools.pairwise(cuts.tolist()), segments, strict=True):
        chosen = [start + at for at in best(values[start:stop], min(room, budget))]
        row = filled([(int(names[at]) if named else at, values.numpy()[at]) for at in chosen], room)
        expected[0].extend(row[0])
        expected[1].extend(row[1])
    check(device, call, expected, "top_k_triton", **({"BLOCK": 128, "RESIDENT": 5} if segments else {}))


@kernels_only
@pytest.mark.parametrize("cuts", [[-5, 40, 20, 2**31 - 1], [90, 0, -(2**31), 50], [200, 201, 202, 203]])
def test_bounds_outside(device: str, cuts: list[int]) -> None:
    """Bounds that descend or lie outside of the vector select only elements of it."""
    guarded, values = Guarded(device), drawn("normal", 90, 0)
    bounds = torch.tensor(cuts, dtype=torch.int32, device=device)
    budgets = torch.full((3,), 60, dtype=torch.int32, device=device)
    with kernels_from("triton", guarded):
        found = kernels.top_k_rows(guarded.of(values), bounds, budgets, 60)
    guarded.check()
    for indices, content in zip(found.indices.tolist(), found.values, strict=True):
        used = [at for at in indices if at >= 0]
        assert used == sorted(used)
        assert bits(content[: len(used)]) == bits(values[used])


@both
@given(lengths, rows_drawn, families, seeds, st.integers(0, 2))
@cases(8)
def test_joined(device: str, n: int, drawn_rows: list[tuple[float, int]], family: str, seed: int, spare: int) -> None:
    """Entries keep their order, and all padding moves behind them, also from between entries."""
    holes = with_holes(padded_rows(n, drawn_rows, family, spare), seed)

    def call(guarded: Guarded) -> Contents:
        return contents(kernels.joined(guarded_rows(guarded, holes)))

    slots = holes.indices.numel()
    check(device, call, filled(listed(holes), slots), **({"MOVE": 32} if slots else {}))


@both
@given(lengths, st.floats(0, 1), seeds, families, st.floats(0, 2), st.integers(1, 9))
@cases(8)
def test_part_of_a_list(device: str, n: int, share: float, seed: int, family: str, limit: float, k: int) -> None:
    """The entries of one row that reach a threshold, and the k largest, fill other slots. They can be counted."""
    rows = padded_rows(n, [(share, seed)], family, spare=2)
    threshold = float(torch.tensor(limit))

    def call(guarded: Guarded) -> list[object]:
        row = guarded_rows(guarded, rows).row(0)
        parts = kernels.reaching(row, limit), kernels.largest_padded(row, k)
        counts = kernels.count_entries(row), kernels.count_reaching(row.values, limit)
        return [*map(contents, parts), [each.tolist() for each in counts]]

    entries, room = listed(rows), rows.indices.numel()
    passed = [entry for entry in entries if key_of(entry[1]) >= key_to_reach(threshold)]
    chosen = [entries[at] for at in best(torch.tensor([value for _, value in entries]), k)]
    count = len(reaching(rows.values[0], threshold))
    check(device, call, [filled(passed, room), filled(chosen, k), [[len(entries)], [count]]])


@both
@given(lengths, rows_drawn, families, st.integers(0, 2))
@example(1100, [(1.0, 0), (0.9, 1), (0.9, 2)], "heavy", 0)  # many indices in several rows
@example(70_000, [(0.5, 1), (0.6, 2)], "normal", 0)  # several groups of words
@cases(8)
def test_merge_rows(device: str, n: int, drawn_rows: list[tuple[float, int]], family: str, spare: int) -> None:
    """The union ascends, and the terms of an index are added in row order, for any tiles, and without padding."""
    rows = padded_rows(n, drawn_rows, family, spare)
    capacity = min(rows.indices.numel(), n)

    def call(guarded: Guarded) -> Contents:
        entries = guarded_rows(guarded, rows)
        found = kernels.merge_rows(entries, n)
        lists = [entries.row(number).trimmed() for number in range(len(drawn_rows))]
        assert contents(kernels.merge(lists, n)) == contents(found.trimmed())
        return contents(found)

    sums: dict[int, np.float32] = {}
    with np.errstate(all="ignore"):
        for at, value in listed(rows):
            sums[at] = sums.get(at, np.float32(0)) + value
    small = {"UNION_TILE": 64, "ENTRIES": 32} if rows.indices.numel() and n < 70_000 else {}
    check(device, call, filled(sorted(sums.items()), capacity), **small)


@both
@given(lengths, rows_drawn, families, st.sampled_from([1.0, -1.0, 0.3]), st.sampled_from([0, 7, 2**30]))
@example(1100, [(1.0, 0), (0.9, 1), (0.9, 2)], "heavy", 0.3, 7)
@cases(16)
def test_add_rows(
    device: str, n: int, drawn_rows: list[tuple[float, int]], family: str, scale: float, offset: int
) -> None:
    """Scaled rows are added in order to what the output holds, from an offset on. One row can also replace it."""
    rows = padded_rows(n, drawn_rows, family, spare=1)
    moved = rows._replace(indices=torch.where(rows.indices < 0, -1, rows.indices + offset))

    def call(guarded: Guarded) -> list[list[int]]:
        out, entries = guarded.of(drawn(family, n, 0)), guarded_rows(guarded, moved)
        kernels.add_rows(out, entries, offset=offset, scale=scale)
        row = guarded_rows(guarded, rows).row(0)
        dense = guarded.poison(n)
        return [bits(out), bits(SparseVector.padded(row, n).write_to(dense))]

    expected, dense = drawn(family, n, 0).numpy().copy(), torch.zeros(n)
    with np.errstate(all="ignore"):
        for at, value in listed(rows):
            expected[at] += value * np.float32(scale)
    for at, value in listed(rows.row(0)):
        dense[at] += float(value)
    check(device, call, [bits(torch.from_numpy(expected)), bits(dense)], DENSE_TILE=64, ENTRIES=32)


@both
@given(lengths, st.floats(0, 1), seeds, families, st.booleans())
@cases(16)
def test_single_entries(device: str, n: int, share: float, seed: int, family: str, clear: bool) -> None:
    """Values are set, cleared and read at the indices of entries. Padding does nothing, and reads 0."""
    entries, base = padded_rows(n, [(share, seed)], "normal", spare=2), drawn(family, n, seed)

    def call(guarded: Guarded) -> Contents:
        out, held = guarded.of(base), guarded_rows(guarded, entries)
        read = kernels.values_at(out, held.indices)
        assert read.shape == held.indices.shape
        kernels.set_at(out, held.indices if clear else held)
        return bits(read), bits(out)

    out = base.clone()
    for at, value in listed(entries):
        out[at] = 0.0 if clear else float(value)
    read = [base[at].item() if at >= 0 else 0.0 for at in entries.indices[0].tolist()]
    check(device, call, (bits(torch.tensor(read)), bits(out)))


@kernels_only
@pytest.mark.parametrize("count", [1, 2])
def test_bad_indices_never_write_outside(device: str, count: int) -> None:
    """An index outside of the vector is skipped, or reads 0. In a list without padding, it is an error."""
    guarded = Guarded(device)
    rows = Entries(JUNK.repeat(count, 1), torch.ones(count, JUNK.numel()))
    with kernels_from("triton", guarded):
        entries, out = guarded_rows(guarded, rows), guarded.of(torch.zeros(LENGTH))
        for wrong in (JUNK, JUNK[-1:], JUNK[2:3]):
            with pytest.raises(ValueError, match=rf"index outside \[0, {LENGTH}\)"):
                kernels.merge([(guarded.of(wrong), guarded.of(torch.ones(len(wrong))))] * count, LENGTH)
        kernels.merge_rows(entries, LENGTH)
        for offset in (0, 5, 2**31 - 1):
            kernels.add_rows(out, entries, offset=offset)
        kernels.set_at(out, entries)
        kernels.set_at(out, entries.indices)
        assert kernels.values_at(out, entries.indices).tolist() == [[0.0] * JUNK.numel()] * count
    guarded.check()


@kernels_only
def test_too_many_rows_are_named(device: str) -> None:
    """More rows than a grid can have are rejected before a launch."""
    with pytest.raises(ValueError, match="65536 rows are too many for one launch"):
        launch(None, (1, 65536), like=torch.empty(0, device=device), warps=1)


@gpu_only
def test_nothing_waits(device: str) -> None:
    """No operation on lists with padding or on values in few bits waits for the GPU."""
    from compile_cases import static_form  # noqa: PLC0415 - Triton is optional

    static_form(2, device)  # compiles, and copies constants
    try:
        torch.cuda.set_sync_debug_mode("error")
        static_form(2, device)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_nothing() -> None:
    """Without rows, slots or coordinates, results are empty or all padding, and nothing is written."""
    integers = torch.zeros(1, dtype=torch.int32)
    empty = Entries(integers[:0].reshape(2, 0), torch.zeros(2, 0))
    assert kernels.top_k_rows(torch.ones(3), integers.repeat(2), integers, 0).values.shape == (1, 0)
    none = kernels.top_k_rows(torch.ones(0), integers.repeat(2), integers + 2, 2)
    assert contents(none) == filled([], 2)
    assert kernels.joined(empty).room == 0
    assert kernels.merge_rows(empty, 5).room == 0
    assert kernels.count_entries(empty).tolist() == [0, 0]
    out = torch.ones(2)
    assert [part.numel() for part in kernels.merge([(integers[:0], out[:0])], 0)] == [0, 0]
    kernels.add_rows(out, empty)
    kernels.add_rows(out[:0], Entries(integers - 1, torch.zeros(1)))
    kernels.set_at(out, integers[:0])
    assert out.tolist() == [1, 1]
    assert kernels.values_at(out, empty.indices).shape == (2, 0)
    assert kernels.values_at(out[:0], integers - 1).tolist() == [0]
    layout = Layout.of(3, 0, FORMATS["4bit"])
    lows, nowhere = integers.repeat(2), Entries(integers.repeat(2, 3) - 1, torch.zeros(2, 3))
    words, sent = write_rows(layout, lows, nowhere)
    assert words.shape == (2, 0)
    assert sent.indices.tolist() == nowhere.indices.tolist()
    found, malformed = read_rows(layout, lows, words)
    assert found.indices.shape == (2, 0)
    assert malformed.tolist() == [0]


def test_plain_rows_are_checked() -> None:
    """A plain row whose indices do not ascend inside the range, or that has padding in between, loses all entries."""
    indices = [[0, 9, -1], [1, 1, 2], [4, 3, -1], [-1, 5, 6], [0, 10, -1], [-2, 0, 1], [-1, -1, -1]]
    rows = Entries(torch.tensor(indices, dtype=torch.int32), torch.ones(7, 3))
    clean, wrong = check_rows(rows, torch.zeros(7, dtype=torch.int32), 10)
    assert wrong.tolist() == [5]
    assert clean.indices.tolist() == [[0, 9, -1], *([[-1, -1, -1]] * 6)]
    assert clean.values.tolist() == [[1, 1, 0], *([[0, 0, 0]] * 6)]
