# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators, allow-incomplete-defs
"""Kernels of :mod:`tritoncomm_kernels.top_k`: a radix select per segment, and the ordered emit.

Of one segment, candidates may be known: the entries that pass a slightly low threshold. If too few or too many pass,
the same kernels read the whole vector instead. Every program derives the choice from numbers in device memory, so the
host does not wait and every step has the same launches.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from tritoncomm_kernels import memory, select_triton
from tritoncomm_kernels.bits_triton import bits_in, divided, key_of, lowest_bit, pack_words
from tritoncomm_kernels.dispatch import launch
from tritoncomm_kernels.lists import Entries
from tritoncomm_kernels.select import Sum

BLOCK, WARPS = 4096, 8
PROGRAMS = 512  # maximum; each program reads a contiguous share, and one load covers the counts of all earlier programs
RESIDENT = 1024  # programs of 8 warps that a large GPU runs at a time
DIGITS = tl.constexpr(4)  # of a key
# The next call may start from the k-th magnitude of this call, times this factor. For normally distributed values at
# density 1 %, 1.4 k candidates then pass.
WARM_SLACK = tl.constexpr(0.95)


@triton.jit
def _source(candidates_ptr, found_ptr, guess_ptr, n, room, capacity):
    """Return the length of what to select from, and 1 if it is the candidates. ``guess`` was their threshold."""
    length = n
    listed = 0
    if candidates_ptr is not None:
        found = tl.load(found_ptr)
        # A guess of 1 admits every non-zero. Then fewer than k candidates are correct.
        short = (found < room) & (tl.load(guess_ptr) > 1)
        listed = ((short == 0) & (found <= capacity)).to(tl.int32)
        length = tl.where(listed != 0, found.to(tl.int32), n)
    return length, listed


@triton.jit
def _segment(bounds_ptr, n, BLOCK: tl.constexpr):
    """Return the start and end of the row's segment, and the blocks from and to which this program reads it.

    Blocks are aligned, so only those at the ends of a segment need masks. The segment is inside the vector, whatever
    the bounds are. Without bounds, there is one segment.
    """
    start = tl.zeros([], tl.int32)
    stop = n
    if bounds_ptr is not None:
        row = tl.program_id(1)
        start = tl.minimum(tl.maximum(tl.load(bounds_ptr + row), 0), n)
        stop = tl.minimum(tl.maximum(tl.load(bounds_ptr + row + 1), start), n)
    last = tl.cdiv(stop, BLOCK)
    each = tl.cdiv(last - start // BLOCK, tl.num_programs(0))
    first = start // BLOCK + tl.program_id(0) * each
    return start, stop, first, tl.minimum(first + each, last)


@triton.jit
def _keys(values_ptr, divisor_ptr, candidates_ptr, listed, block, start, stop, BLOCK: tl.constexpr):
    """Return the keys of a block. Outside the segment they are 0, which is never selected.

    Candidates are quotients. Only the whole vector has still to be divided, if there is a divisor.
    """
    first = block * BLOCK
    at = first + tl.arange(0, BLOCK)
    if candidates_ptr is not None:  # a vector and its candidates start at 0
        passed = tl.load(candidates_ptr + at, mask=at < tl.where(listed != 0, stop, 0), other=0.0)
        whole = at < tl.where(listed != 0, 0, stop)
        dense = tl.load(values_ptr + at, mask=whole, other=0.0)
        values = tl.where(listed != 0, passed, divided(dense, divisor_ptr, at, whole))
    elif (first >= start) & (first + BLOCK <= stop):
        values = tl.load(values_ptr + at)
    else:
        values = tl.load(values_ptr + at, mask=(at >= start) & (at < stop), other=0.0)
    return key_of(values)


@triton.jit
def _kth(histogram_ptr, budgets_ptr, digits, room):
    """Return the first ``digits`` digits of the k-th key of this row, and how many entries with these digits to take.

    Digits have 8 bits from bit 30 down. The last one repeats a bit, which all its keys share. Every program computes
    this from the counts of the digits. A kernel that picks a digit would be a launch more per digit.
    """
    lane = tl.arange(0, 256)
    prefix = tl.zeros([], tl.int32)
    remaining = room
    if budgets_ptr is not None:
        remaining = tl.minimum(tl.maximum(tl.load(budgets_ptr + tl.program_id(1)), 0), room)
    digit = 0
    while digit < digits:
        counts = tl.load(histogram_ptr + (digit * tl.num_programs(1) + tl.program_id(1)) * 256 + lane)
        found = tl.sum(counts, axis=0)
        reached = found - tl.cumsum(counts, axis=0) + counts
        remaining = tl.minimum(remaining, found)  # at most as many entries as there are non-zeros
        value = tl.max(tl.where(reached >= remaining, lane, 0), axis=0)
        prefix = prefix | (value << tl.maximum(23 - 8 * digit, 0))
        remaining -= tl.sum(tl.where(lane > value, counts, 0), axis=0)
        digit += 1
    return prefix, remaining


@triton.jit(do_not_specialize=["n", "room", "capacity", "digit"], do_not_specialize_on_alignment=["bounds_ptr"])
def histogram_kernel(
    values_ptr, divisor_ptr, bounds_ptr, budgets_ptr, candidates_ptr, found_ptr, guess_ptr, histogram_ptr,
    n, room, capacity, digit, BLOCK: tl.constexpr,
):  # fmt: skip
    """Build the histogram of one digit over the non-zero keys of a segment that match the digits so far."""
    prefix, _ = _kth(histogram_ptr, budgets_ptr, digit, room)
    length, listed = _source(candidates_ptr, found_ptr, guess_ptr, n, room, capacity)
    start, stop, block, last = _segment(bounds_ptr, length, BLOCK)
    counts = tl.zeros([256], tl.int32)
    while block < last:
        keys = _keys(values_ptr, divisor_ptr, candidates_ptr, listed, block, start, stop, BLOCK)
        agree = (keys > 0) & (((keys ^ prefix) >> (31 - 8 * digit)) == 0)
        counts += tl.histogram((keys >> tl.maximum(23 - 8 * digit, 0)) & 255, 256, mask=agree)
        block += 1
    own_ptr = histogram_ptr + (digit * tl.num_programs(1) + tl.program_id(1)) * 256
    tl.atomic_add(own_ptr + tl.arange(0, 256), counts, mask=counts > 0, sem="relaxed")


@triton.jit(do_not_specialize=["n", "room", "capacity"], do_not_specialize_on_alignment=["bounds_ptr"])
def count_kernel(
    values_ptr, divisor_ptr, bounds_ptr, budgets_ptr, candidates_ptr, found_ptr, guess_ptr, histogram_ptr,
    above_ptr, equal_ptr, n, room, capacity, BLOCK: tl.constexpr,
):  # fmt: skip
    """Count, per program, the keys of its share that are above the k-th key of the row, and those equal to it."""
    row = tl.program_id(1)
    kth, _ = _kth(histogram_ptr, budgets_ptr, DIGITS, room)
    length, listed = _source(candidates_ptr, found_ptr, guess_ptr, n, room, capacity)
    start, stop, block, last = _segment(bounds_ptr, length, BLOCK)
    above = tl.zeros([BLOCK], tl.int32)
    equal = tl.zeros([BLOCK], tl.int32)
    while block < last:
        keys = _keys(values_ptr, divisor_ptr, candidates_ptr, listed, block, start, stop, BLOCK)
        above += (keys > kth).to(tl.int32)
        equal += (keys == kth).to(tl.int32)
        block += 1
    own = row * tl.num_programs(0) + tl.program_id(0)
    tl.store(above_ptr + own, tl.sum(above, axis=0))
    tl.store(equal_ptr + own, tl.sum(equal, axis=0))


@triton.jit
def _report(taken_ptr, next_ptr, kth, taken, room):
    """Write the number of entries. Let the next call start slightly below the k-th magnitude of this call."""
    if tl.program_id(0) == 0:
        tl.store(taken_ptr, taken.to(tl.int64))
        magnitude = kth.to(tl.float32, bitcast=True) * WARM_SLACK
        # A NaN or infinity is no usable threshold. With fewer than k entries there is no k-th magnitude.
        usable = (kth < 0x7F800000) & (taken >= room)
        tl.store(next_ptr, tl.maximum(tl.where(usable, magnitude.to(tl.int32, bitcast=True), 1), 1))


@triton.jit
def _emit_candidates(
    candidates_ptr, indices_ptr, out_indices_ptr, out_values_ptr, block, last, stop, room, kth, ties, above, equal,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the entries of some blocks of candidates. Return ``above`` and ``equal``, the numbers of them up to there.

    Nearly all candidates are taken. A loop over the bits of a word, as in sparse blocks, would have 32 iterations.
    """
    while block < last:
        at = block * BLOCK + tl.arange(0, BLOCK)
        values = tl.load(candidates_ptr + at, mask=at < stop, other=0.0)
        keys = key_of(values)
        is_above = (keys > kth).to(tl.int32)
        is_tied = (keys == kth).to(tl.int32)
        tied_before = equal + tl.cumsum(is_tied, axis=0) - is_tied
        slot = above + tl.cumsum(is_above, axis=0) - is_above + tl.minimum(tied_before, ties)
        take = ((is_above != 0) | ((is_tied != 0) & (tied_before < ties))) & (at < stop) & (slot < room)
        tl.store(out_indices_ptr + slot, tl.load(indices_ptr + at, mask=take, other=0), mask=take)
        tl.store(out_values_ptr + slot, values, mask=take)
        above += tl.sum(is_above, axis=0)
        equal += tl.sum(is_tied, axis=0)
        block += 1
    return above, equal


@triton.jit
def _emit_elements(
    values_ptr, divisor_ptr, candidates_ptr, listed, indices_ptr, out_indices_ptr, out_values_ptr,
    block, last, start, stop, room, kth, ties, above, equal, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the entries of some blocks of a vector. Before them are ``above`` and ``equal``."""
    word = tl.arange(0, BLOCK // 32) * 32
    while block < last:
        keys = _keys(values_ptr, divisor_ptr, candidates_ptr, listed, block, start, stop, BLOCK)
        tied = pack_words(keys == kth, BLOCK)
        mask = pack_words(keys > kth, BLOCK) | tied
        tied_here = bits_in(tied)
        above_here = bits_in(mask) - tied_here
        tied_before = equal + tl.cumsum(tied_here, axis=0) - tied_here
        above_before = above + tl.cumsum(above_here, axis=0) - above_here
        left = tl.max(above_here + tied_here, axis=0)
        while left > 0:  # each iteration takes the lowest set bit of every word
            is_tied = ((tied & mask & (0 - mask)) != 0).to(tl.int32)
            slot = above_before + tl.minimum(tied_before, ties)
            take = (mask != 0) & ((is_tied == 0) | (tied_before < ties)) & (slot < room)
            element = block * BLOCK + word + lowest_bit(mask)
            index = element
            if indices_ptr is not None:
                index = tl.load(indices_ptr + element, mask=take, other=0)
            value = tl.load(values_ptr + element, mask=take, other=0.0)
            tl.store(out_indices_ptr + slot, index, mask=take)
            tl.store(out_values_ptr + slot, divided(value, divisor_ptr, element, take), mask=take)
            tied_before += is_tied
            above_before += 1 - is_tied
            mask = mask & (mask - 1)
            left -= 1
        above += tl.sum(above_here, axis=0)
        equal += tl.sum(tied_here, axis=0)
        block += 1


@triton.jit(do_not_specialize=["n", "room", "capacity"], do_not_specialize_on_alignment=["indices_ptr", "bounds_ptr"])
def emit_kernel(
    values_ptr, divisor_ptr, bounds_ptr, budgets_ptr, candidates_ptr, found_ptr, guess_ptr, histogram_ptr,
    above_ptr, equal_ptr, indices_ptr, out_indices_ptr, out_values_ptr, taken_ptr, next_ptr, n, room, capacity,
    PROGRAMS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the entries above the k-th key of a row, the first ones equal to it, and padding, in order of position.

    The index of an entry is the position, or is read from ``indices``: those of the candidates if there are such. Then
    also write the number of entries, and the ``next`` guess.
    """
    program, programs, row = tl.program_id(0), tl.num_programs(0), tl.program_id(1)
    kth, ties = _kth(histogram_ptr, budgets_ptr, DIGITS, room)
    length, listed = _source(candidates_ptr, found_ptr, guess_ptr, n, room, capacity)
    start, stop, block, last = _segment(bounds_ptr, length, BLOCK)
    lane = tl.arange(0, PROGRAMS)
    counts = tl.load(above_ptr + row * programs + lane, mask=lane < programs, other=0)
    taken = tl.sum(counts, axis=0) + ties
    above = tl.sum(tl.where(lane < program, counts, 0), axis=0)
    equal = tl.sum(tl.load(equal_ptr + row * programs + lane, mask=lane < program, other=0), axis=0)
    if candidates_ptr is not None:
        _report(taken_ptr, next_ptr, kth, taken, room)
    out_indices_ptr += row.to(tl.int64) * room
    out_values_ptr += row.to(tl.int64) * room
    ordered = tl.where(listed != 0, last, block)
    if candidates_ptr is not None:
        above, equal = _emit_candidates(
            candidates_ptr, indices_ptr, out_indices_ptr, out_values_ptr, block, ordered, stop, room,
            kth, ties, above, equal, BLOCK,
        )  # fmt: skip
        indices_ptr = None
    _emit_elements(
        values_ptr, divisor_ptr, candidates_ptr, listed, indices_ptr, out_indices_ptr, out_values_ptr,
        ordered, last, start, stop, room, kth, ties, above, equal, BLOCK,
    )  # fmt: skip
    taken += program * PROGRAMS
    while taken < room:
        tl.store(out_indices_ptr + taken + lane, -1, mask=lane < room - taken)
        tl.store(out_values_ptr + taken + lane, 0.0, mask=lane < room - taken)
        taken += programs * PROGRAMS


def top_k(total: Sum, guess: torch.Tensor, k: int, room: int) -> tuple[Entries, torch.Tensor]:
    """Filter candidates by the key ``guess`` (int32 ``[1]``), then select from them. Set the guess of the next call.

    There is ``room`` for so many candidates. Arguments are checked, and not empty. Returns ``[k]`` entries and padding,
    and the number of entries (int64 ``[1]``).
    """
    out = total.out
    places, following = (memory.scratch(size, torch.int32, out) for size in (room, 1))
    passed, found = memory.scratch(room, torch.float32, out), memory.scratch(1, torch.int64, out)
    taken, marks, rows = torch.empty_like(found), select_triton.empty_marks(out), Entries.empty((1, k), out)
    select_triton.mark(total, guess, marks)
    select_triton.expand(total, marks, places, passed, found)
    top_k_rows(
        out, None, None, places, rows,
        divisor=total.divisor, candidates=(passed, found, guess), told=(taken, following),
    )  # fmt: skip
    guess.copy_(following)
    return rows.row(0), taken


def top_k_rows(
    values: torch.Tensor,
    bounds: torch.Tensor | None,
    budgets: torch.Tensor | None,
    indices: torch.Tensor | None,
    out: Entries,
    *,
    divisor: torch.Tensor | None = None,
    candidates: tuple[torch.Tensor | None, ...] = (None, None, None),
    told: tuple[torch.Tensor | None, ...] = (None, None),
) -> None:
    """Launch a radix select per segment, and the ordered emit, on checked arguments with at least one row and slot.

    ``candidates`` of one segment, the whole vector, are the values that pass a guess, their number, and the guess.
    ``indices`` are then their positions. They may be quotients by a ``divisor``, which is that of the vector. What is
    ``told`` of it is the number of entries, and the next guess.
    """
    n, (rows, room) = values.numel(), out.indices.shape
    if values.data_ptr() % 16:  # the kernels need twice the registers for such a tensor, and few are long
        values = values.clone()
    programs = max(1, min(PROGRAMS, triton.cdiv(n, BLOCK), triton.cdiv(RESIDENT, rows)))
    histogram = memory.scratch(rows * 256 * DIGITS.value, torch.int32, values).zero_()
    above, equal = (memory.scratch(rows * programs, torch.int32, values) for _ in range(2))
    source = values, divisor, bounds, budgets, *candidates, histogram
    lengths = n, room, 0 if candidates[0] is None else candidates[0].numel()
    grid = programs, rows
    size: dict[str, Any] = {"like": values, "warps": WARPS, "BLOCK": BLOCK}
    for digit in range(DIGITS.value):
        launch(histogram_kernel, grid, *source, *lengths, digit, **size)
    launch(count_kernel, grid, *source, above, equal, *lengths, **size)
    launch(
        emit_kernel, grid, *source, above, equal, indices, *out, *told, *lengths,
        PROGRAMS=PROGRAMS, **size,
    )  # fmt: skip
