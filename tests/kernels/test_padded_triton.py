"""Kernels for lists with padding equal the reference, bit for bit, and write every slot and nothing else."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from kernel_cases import (
    DEVICES,
    Dirty,
    Guarded,
    agree,
    bits,
    cases,
    drawn,
    families,
    kernels_from,
    key_of,
    key_to_reach,
    padded_rows,
    seeds,
)

import tritoncomm_kernels as kernels
from tritoncomm_kernels import Entries, Workspace
from tritoncomm_kernels.dispatch import kernel, launch

pytestmark = pytest.mark.parametrize("device", DEVICES)
rows_drawn = st.lists(st.tuples(st.floats(0, 1), seeds), min_size=1, max_size=4)
lengths = st.sampled_from([1, 33, 500, 1100])
LENGTH = 608  # the bits of a union fill their words
JUNK = torch.tensor([-(2**31), -2, -1, LENGTH - 1, LENGTH, LENGTH + 1, 2**31 - 1], dtype=torch.int32)


def guarded_rows(guarded: Guarded, rows: Entries) -> Entries:
    """Return the same rows between guards."""
    shape = rows.indices.shape
    indices, values = guarded.of(rows.indices.reshape(-1)), guarded.of(rows.values.reshape(-1))
    return Entries(indices.view(shape), values.view(shape))


def contents(found: Entries) -> tuple[list[int], list[int]]:
    """Return indices and bits of values."""
    return bits(found.indices), bits(found.values)


@given(lengths, families, seeds, st.tuples(st.integers(0, 1100), st.integers(0, 1100)), st.floats(0, 2))
@cases(30)
def test_count_inside(device: str, n: int, family: str, seed: int, ends: tuple[int, int], limit: float) -> None:
    """Entries that reach the threshold are counted inside the span only, which may be empty."""
    values, cut = drawn(family, n, seed), sorted(min(end, n) for end in ends)

    def call(guarded: Guarded) -> list[int]:
        span, reach = guarded.of(torch.tensor(cut, dtype=torch.int32)), guarded.of(torch.tensor([limit]))
        return bits(kernels.count_inside(guarded.of(values), reach, span, workspace=Dirty(guarded)))

    inside = values[cut[0] : cut[1]].tolist()
    key = key_to_reach(float(torch.tensor(limit)))
    assert agree(call, device) == [sum(key_of(value) >= key for value in inside)]


@given(
    st.lists(st.tuples(st.sampled_from([0, 1, 30, 64, 200, 700]), st.integers(-1, 99)), min_size=1, max_size=4),
    st.integers(0, 70),
    families,
    seeds,
    st.sampled_from([1, 90]),
    st.booleans(),
)
@example([(200, 70), (64, 9)], 3, "ties", 0, 90, True)  # ties in several blocks and programs
@example([(64, 99), (700, 2)], 0, "equal", 0, 90, False)
@cases(8)
def test_top_k_rows(
    device: str, segments: list[tuple[int, int]], first: int, family: str, seed: int, room: int, named: bool
) -> None:
    """Every row has the entries of the reference and padding, for whole blocks and for several small ones."""
    cuts = torch.tensor([first, *(length for length, _ in segments)]).cumsum(0).to(torch.int32)
    values = drawn(family, int(cuts[-1]) + 2, seed)
    names = torch.randperm(values.numel(), generator=torch.Generator().manual_seed(seed)).to(torch.int32)
    limits = torch.tensor([budget for _, budget in segments], dtype=torch.int32)

    def call(guarded: Guarded, **small: int) -> tuple[list[int], list[int]]:
        x, bounds, budgets = guarded.of(values), guarded.of(cuts), guarded.of(limits)
        at = guarded.of(names) if named else None
        if small:
            shape = len(segments), room
            found = Entries(*(guarded.poison(shape[0] * room, d).view(shape) for d in (torch.int32, torch.float32)))
            kernel("top_k_triton").top_k_rows(x, bounds, budgets, at, found, Dirty(guarded), **small)
            return contents(found)
        return contents(kernels.top_k_rows(x, bounds, budgets, room, indices=at, workspace=Dirty(guarded)))

    expected = agree(call, device)
    guarded = Guarded(device)
    with kernels_from("triton"):
        assert call(guarded, block=128, resident=5) == expected
    guarded.check()


@pytest.mark.parametrize("cuts", [[-5, 40, 20, 2**31 - 1], [90, 0, -(2**31), 50], [200, 201, 202, 203]])
def test_bounds_outside(device: str, cuts: list[int]) -> None:
    """Bounds that descend or lie outside of the vector select only elements of it."""
    guarded, values = Guarded(device), drawn("normal", 90, 0)
    bounds = torch.tensor(cuts, dtype=torch.int32, device=device)
    budgets = torch.full((3,), 60, dtype=torch.int32, device=device)
    with kernels_from("triton"):
        found = kernels.top_k_rows(guarded.of(values), bounds, budgets, 60, workspace=Dirty(guarded))
    guarded.check()
    for indices, content in zip(found.indices.tolist(), found.values, strict=True):
        used = [at for at in indices if at >= 0]
        assert used == sorted(used)
        assert bits(content[: len(used)]) == bits(values[used])


def test_unaligned_values(device: str) -> None:
    """A tensor that does not start at a multiple of 16 bytes gives the same entries."""
    values = drawn("ties", 300, 0)
    bounds, budgets = torch.tensor([0, 130, 299], dtype=torch.int32), torch.tensor([7, 40], dtype=torch.int32)

    def call(guarded: Guarded) -> tuple[list[int], list[int]]:
        x = guarded.of(values)[1:]
        assert x.data_ptr() % 16
        at = guarded.of(bounds), guarded.of(budgets)
        return contents(kernels.top_k_rows(x, *at, 40, workspace=Dirty(guarded)))

    agree(call, device)


@given(lengths, rows_drawn, families, seeds, st.integers(0, 2))
@cases(8)
def test_joined(device: str, n: int, drawn_rows: list[tuple[float, int]], family: str, seed: int, spare: int) -> None:
    """Entries keep their order, and all padding moves behind them, also from between entries."""
    rows = padded_rows(n, drawn_rows, family, spare)
    gaps = torch.rand(rows.indices.shape, generator=torch.Generator().manual_seed(seed)) < 0.3
    holes = Entries(torch.where(gaps, -1, rows.indices), torch.where(gaps, 0.0, rows.values))

    def call(guarded: Guarded, **small: int) -> tuple[list[int], list[int]]:
        entries = guarded_rows(guarded, holes)
        if small:
            flat = Entries(*(part.view(1, -1) for part in entries))
            return contents(kernel("entries_triton").joined(flat, Dirty(guarded), **small))
        return contents(kernels.joined(entries, workspace=Dirty(guarded)))

    expected = agree(call, device)
    if holes.indices.numel():
        guarded = Guarded(device)
        with kernels_from("triton"):
            assert call(guarded, block=32) == expected
        guarded.check()


@given(lengths, rows_drawn, families, st.integers(0, 2))
@example(1100, [(1.0, 0), (0.9, 1), (0.9, 2)], "heavy", 0)  # many indices in several rows
@cases(8)
def test_merge_rows(device: str, n: int, drawn_rows: list[tuple[float, int]], family: str, spare: int) -> None:
    """Union, sums in row order and padding have the same bits, also for small tiles."""
    rows = padded_rows(n, drawn_rows, family, spare)

    def call(guarded: Guarded, **small: int) -> tuple[list[int], list[int]]:
        entries, held = guarded_rows(guarded, rows), Dirty(guarded)
        if small:
            capacity = min(rows.indices.numel(), n)
            return contents(kernel("entries_triton").merge_rows(entries, n, capacity, held, **small))
        return contents(kernels.merge_rows(entries, n, workspace=held))

    expected = agree(call, device)
    if rows.indices.numel():
        guarded = Guarded(device)
        with kernels_from("triton"):
            assert call(guarded, tile=64, entries=32) == expected
        guarded.check()


@given(lengths, rows_drawn, families, st.sampled_from([1.0, -1.0, 0.3]), st.sampled_from([0, 7, 2**30]))
@example(1100, [(1.0, 0), (0.9, 1), (0.9, 2)], "heavy", 0.3, 7)
@cases(16)
def test_add_rows(
    device: str, n: int, drawn_rows: list[tuple[float, int]], family: str, scale: float, offset: int
) -> None:
    """Rows are added in order to what the output holds, for one row, several rows, and small tiles."""
    rows = padded_rows(n, drawn_rows, family, spare=1)
    moved = rows._replace(indices=torch.where(rows.indices < 0, -1, rows.indices + offset))

    def call(guarded: Guarded, **small: int) -> list[int]:
        out, entries, held = guarded.of(drawn(family, n, 0)), guarded_rows(guarded, moved), Dirty(guarded)
        if small:
            kernel("entries_triton").add_rows(out, entries, offset, scale, held, **small)
        else:
            kernels.add_rows(out, entries, offset=offset, scale=scale, workspace=held)
        return bits(out)

    expected = agree(call, device)
    guarded = Guarded(device)
    with kernels_from("triton"):
        assert call(guarded, tile=64, entries=32) == expected
    guarded.check()


@given(lengths, st.floats(0, 1), seeds, families, st.booleans())
@cases(16)
def test_single_entries(device: str, n: int, share: float, seed: int, family: str, clear: bool) -> None:
    """Values are set, cleared and read in the same places, and padding is skipped."""
    entries = padded_rows(n, [(share, seed)], "normal", spare=2)

    def call(guarded: Guarded) -> tuple[list[int], list[int]]:
        out, held = guarded.of(drawn(family, n, seed)), guarded_rows(guarded, entries)
        read = kernels.values_at(out, held.indices)
        kernels.set_at(out, held.indices if clear else held)
        return bits(read), bits(out)

    agree(call, device)


@pytest.mark.parametrize("count", [1, 2])
def test_bad_indices_never_write_outside(device: str, count: int) -> None:
    """An index outside of the vector is skipped, or reads 0."""
    guarded = Guarded(device)
    held = Dirty(guarded)
    rows = Entries(JUNK.repeat(count, 1), torch.ones(count, JUNK.numel()))
    with kernels_from("triton"):
        entries, out = guarded_rows(guarded, rows), guarded.of(torch.zeros(LENGTH))
        kernels.merge_rows(entries, LENGTH, workspace=held)
        for offset in (0, 5, 2**31 - 1):
            kernels.add_rows(out, entries, offset=offset, workspace=held)
        kernels.set_at(out, entries)
        kernels.set_at(out, entries.indices)
        assert kernels.values_at(out, entries.indices).tolist() == [[0.0] * JUNK.numel()] * count
    guarded.check()


def test_too_many_rows_are_named(device: str) -> None:
    """More rows than a grid can have are rejected before a launch."""
    with pytest.raises(ValueError, match="65536 rows are too many for one launch"):
        launch(None, (1, 65536), like=torch.empty(0, device=device), warps=1)


def test_nothing_waits(device: str) -> None:
    """No operation waits for the GPU."""
    if device == "cpu":
        pytest.skip("waiting needs a GPU")
    rows, out, held = padded_rows(1000, [(0.9, 0), (0.8, 1)], "normal", 3), torch.ones(1000, device=device), Workspace()
    rows = Entries(*(part.to(device) for part in rows))
    bounds = torch.tensor([0, 400, 1000], dtype=torch.int32, device=device)

    def everything() -> None:
        kernels.top_k_rows(out, bounds, bounds[1:], 300, workspace=held)
        kernels.top_k_padded(out, None, out, 9, workspace=held)
        kernels.largest_padded(rows.row(0), 9, workspace=held)
        kernels.reaching(rows.row(0), out[:1], workspace=held)
        kernels.joined(rows, workspace=held)
        kernels.merge_rows(rows, 1000, workspace=held)
        kernels.add_rows(out, rows, workspace=held)
        kernels.decompress_padded(out, rows.row(0), workspace=held)
        kernels.set_at(out, rows.row(1))
        kernels.values_at(out, rows.indices)

    everything()  # compiles, and copies constants
    try:
        torch.cuda.set_sync_debug_mode("error")
        everything()
    finally:
        torch.cuda.set_sync_debug_mode("default")
