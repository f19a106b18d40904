"""Kernels of :mod:`tritoncomm_kernels.threshold`: radix select over candidates, and the ordered emit.

Candidates are the entries that pass a slightly low threshold. If too few or too many pass, the same kernels read the
whole vector instead. The choice is a flag in device memory, so the host does not wait and every step has the same
launches.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from tritoncomm_kernels.bits_triton import key_of
from tritoncomm_kernels.dispatch import on_device_of

BLOCK, WARPS = 1024, 8
PROGRAMS = 512  # maximum; each program reads a contiguous share, and one load covers the counts of all earlier programs
# Key digits from the top: 8, 8, 8 and 7 bits. In Triton 3.6 the instructions grow in proportion to the bins of a digit.
DIGITS = ((23, 8), (15, 8), (7, 8), (0, 7))

# Words of the state. At the end, PREFIX is the k-th key, and REMAINING is the number of entries equal to it to take.
PREFIX = tl.constexpr(0)
REMAINING = tl.constexpr(1)
WHOLE = tl.constexpr(2)
TAKEN = tl.constexpr(3)
STATE_WORDS = 4


@triton.jit(do_not_specialize=["k", "capacity"])
def begin_kernel(state_ptr, histogram_ptr, found_ptr, guess_ptr, k, capacity, WHOLE_ONLY: tl.constexpr):
    """Initialize a selection of ``k`` entries, and choose between the candidates and the whole vector."""
    tl.store(histogram_ptr + tl.arange(0, 256), tl.zeros([256], tl.int32))
    found = tl.load(found_ptr)
    # A guess of 1 admits every non-zero. Then fewer than k candidates are correct.
    short = (found < k) & (tl.load(guess_ptr) > 1)
    whole = (short | (found > capacity)).to(tl.int32)
    if WHOLE_ONLY:
        whole = 1
    tl.store(state_ptr + PREFIX, 0)
    tl.store(state_ptr + REMAINING, k)
    tl.store(state_ptr + WHOLE, whole)
    tl.store(state_ptr + TAKEN, 0)


@triton.jit
def _length(state_ptr, found_ptr, capacity, n):
    found = tl.minimum(tl.load(found_ptr), capacity).to(tl.int32)
    return tl.where(tl.load(state_ptr + WHOLE) != 0, n, found)


@triton.jit
def _keys(candidates_ptr, values_ptr, whole, at, stop):
    """Return the keys of the source in use. From ``stop`` on they are 0, which is never selected."""
    candidates = tl.load(candidates_ptr + at, mask=at < tl.where(whole != 0, 0, stop), other=0.0)
    dense = tl.load(values_ptr + at, mask=at < tl.where(whole != 0, stop, 0), other=0.0)
    return tl.where(whole != 0, key_of(dense), key_of(candidates))


@triton.jit
def _share(length, BLOCK: tl.constexpr):
    """Return the start and end of this program's contiguous share."""
    blocks = tl.cdiv(length, BLOCK)
    each = tl.cdiv(blocks, tl.num_programs(0)) * BLOCK
    start = tl.minimum(tl.program_id(0).to(tl.int64) * each, length).to(tl.int32)
    return start, tl.minimum(start.to(tl.int64) + each, length).to(tl.int32)


@triton.jit(do_not_specialize=["capacity", "n"])
def histogram_kernel(
    candidates_ptr, values_ptr, found_ptr, state_ptr, histogram_ptr, capacity, n,
    SHIFT: tl.constexpr, BITS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Build the histogram of one digit over the non-zero keys that match the prefix so far."""
    whole = tl.load(state_ptr + WHOLE)
    prefix = tl.load(state_ptr + PREFIX)
    counts = tl.zeros([256], tl.int32)
    start, stop = _share(_length(state_ptr, found_ptr, capacity, n), BLOCK)
    while start < stop:
        at = start + tl.arange(0, BLOCK)
        keys = _keys(candidates_ptr, values_ptr, whole, at, stop)
        agree = (keys > 0) & (((keys ^ prefix) >> (SHIFT + BITS)) == 0)
        counts += tl.histogram((keys >> SHIFT) & ((1 << BITS) - 1), 256, mask=agree)
        start += BLOCK
    tl.atomic_add(histogram_ptr + tl.arange(0, 256), counts, mask=counts > 0, sem="relaxed")


@triton.jit
def pick_kernel(state_ptr, histogram_ptr, SHIFT: tl.constexpr, FIRST: tl.constexpr):
    """Determine one digit of the k-th key: the largest digit that at least ``REMAINING`` keys reach."""
    lane = tl.arange(0, 256)
    counts = tl.load(histogram_ptr + lane)
    tl.store(histogram_ptr + lane, tl.zeros([256], tl.int32))
    reached = tl.sum(counts, axis=0) - tl.cumsum(counts, axis=0) + counts
    remaining = tl.load(state_ptr + REMAINING)
    if FIRST:  # take at most as many entries as there are non-zeros
        remaining = tl.minimum(remaining, tl.sum(counts, axis=0))
        tl.store(state_ptr + TAKEN, remaining)
    digit = tl.max(tl.where(reached >= remaining, lane, 0), axis=0)
    above = tl.sum(tl.where(lane > digit, counts, 0), axis=0)
    prefix = tl.load(state_ptr + PREFIX)
    tl.debug_barrier()  # every lane reads the state, and one writes it
    tl.store(state_ptr + PREFIX, prefix | (digit << SHIFT))
    tl.store(state_ptr + REMAINING, remaining - above)


@triton.jit(do_not_specialize=["capacity", "n"])
def count_kernel(
    candidates_ptr, values_ptr, found_ptr, state_ptr, above_ptr, equal_ptr, capacity, n, BLOCK: tl.constexpr
):
    """Count, per program, the keys of its share that are above the k-th key, and those equal to it."""
    whole = tl.load(state_ptr + WHOLE)
    kth = tl.load(state_ptr + PREFIX)
    start, stop = _share(_length(state_ptr, found_ptr, capacity, n), BLOCK)
    above = tl.zeros([BLOCK], tl.int32)
    equal = tl.zeros([BLOCK], tl.int32)
    while start < stop:
        at = start + tl.arange(0, BLOCK)
        keys = _keys(candidates_ptr, values_ptr, whole, at, stop)
        above += (keys > kth).to(tl.int32)
        equal += (keys == kth).to(tl.int32)
        start += BLOCK
    tl.store(above_ptr + tl.program_id(0), tl.sum(above, axis=0))
    tl.store(equal_ptr + tl.program_id(0), tl.sum(equal, axis=0))


@triton.jit(do_not_specialize=["capacity", "n", "room", "slack"])
def emit_kernel(
    candidates_ptr, positions_ptr, values_ptr, found_ptr, state_ptr, above_ptr, equal_ptr,
    out_indices_ptr, out_values_ptr, taken_ptr, guess_ptr, capacity, n, room, slack,
    BLOCK: tl.constexpr, PROGRAMS: tl.constexpr,
):  # fmt: skip
    """Write the entries above the k-th key, and the first entries equal to it, in order of position."""
    program = tl.program_id(0)
    whole = tl.load(state_ptr + WHOLE)
    kth = tl.load(state_ptr + PREFIX)
    ties = tl.load(state_ptr + REMAINING)
    lane = tl.arange(0, PROGRAMS)
    earlier = lane < program
    above = tl.sum(tl.load(above_ptr + lane, mask=earlier, other=0), axis=0)
    equal = tl.sum(tl.load(equal_ptr + lane, mask=earlier, other=0), axis=0)
    if program == 0:
        tl.store(taken_ptr, tl.load(state_ptr + TAKEN).to(tl.int64))
        # The next call starts slightly below the k-th magnitude of this call.
        magnitude = kth.to(tl.float32, bitcast=True) * slack
        # A NaN or infinity is no usable threshold. With fewer than k entries there is no k-th magnitude.
        usable = (kth < 0x7F800000) & (tl.load(state_ptr + TAKEN) >= room)
        next_key = tl.where(usable, magnitude.to(tl.int32, bitcast=True), 1)
        tl.store(guess_ptr, tl.maximum(next_key, 1))
    start, stop = _share(_length(state_ptr, found_ptr, capacity, n), BLOCK)
    while start < stop:
        at = start + tl.arange(0, BLOCK)
        keys = _keys(candidates_ptr, values_ptr, whole, at, stop)
        is_above = (keys > kth).to(tl.int32)
        is_equal = (keys == kth).to(tl.int32)
        above_before = above + tl.cumsum(is_above, axis=0) - is_above
        equal_before = equal + tl.cumsum(is_equal, axis=0) - is_equal
        slot = above_before + tl.minimum(equal_before, ties)
        take = ((is_above != 0) | ((is_equal != 0) & (equal_before < ties))) & (slot < room)
        element = tl.where(
            whole != 0, at, tl.load(positions_ptr + at, mask=take & (at < tl.where(whole != 0, 0, stop)), other=0)
        )
        value = tl.load(values_ptr + element, mask=take, other=0.0)
        tl.store(out_indices_ptr + slot, element, mask=take)
        tl.store(out_values_ptr + slot, value, mask=take)
        above += tl.sum(is_above, axis=0)
        equal += tl.sum(is_equal, axis=0)
        start += BLOCK


def largest(
    values: torch.Tensor,
    candidates: tuple[torch.Tensor, torch.Tensor] | None,
    found: torch.Tensor,
    guess: torch.Tensor,
    scratch: dict[str, torch.Tensor],
    k: int,
    indices: torch.Tensor,
    out: torch.Tensor,
    taken: torch.Tensor,
    *,
    slack: float,
    block: int = BLOCK,
) -> None:
    """Launch radix select and emit on checked, non-empty arguments.

    ``candidates`` are (positions, values). ``found`` is the number of entries that passed the threshold, which may
    exceed their capacity. None selects from all of ``values``.
    """
    state, histogram, above, equal = (scratch[name] for name in ("state", "histogram", "above", "equal"))
    n = values.numel()
    positions, magnitudes = candidates if candidates is not None else (indices, values)
    capacity = positions.numel() if candidates is not None else 0
    programs = min(triton.cdiv(max(capacity, n), block), PROGRAMS)
    source, lengths = (magnitudes, values, found, state), (capacity, n)
    single: dict[str, Any] = {"num_warps": 1, "enable_fp_fusion": False}
    many: dict[str, Any] = {"BLOCK": block, "num_warps": WARPS, "enable_fp_fusion": False}
    with on_device_of(values):
        begin_kernel[(1,)](state, histogram, found, guess, k, capacity, WHOLE_ONLY=candidates is None, **single)
        for shift, bits in DIGITS:
            histogram_kernel[(programs,)](*source, histogram, *lengths, SHIFT=shift, BITS=bits, **many)
            pick_kernel[(1,)](state, histogram, SHIFT=shift, FIRST=shift == DIGITS[0][0], **single)
        count_kernel[(programs,)](*source, above, equal, *lengths, **many)
        emit_kernel[(programs,)](
            magnitudes, positions, values, found, state, above, equal,
            indices, out, taken, guess, *lengths, indices.numel(), slack,
            PROGRAMS=PROGRAMS, **many,
        )  # fmt: skip
