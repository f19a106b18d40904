"""Parts of the same kernels: the scale of a section, its table, and which values fit beside others.

The squared errors of the tables are summed in fp64 in one program. The order of the sum differs from the reference, and
could only matter for tables whose errors agree to 15 digits. Everything else is one rounding, or integer.
"""

from functools import cache

import torch
import triton
import triton.language as tl

from tritoncomm_kernels import quantize

CHOOSE_WARPS = 8  # with 4, Triton 3.6 spills a register at 8 bits
NAN_HEADER = tl.constexpr(quantize.NAN_HEADER)
INFINITY_KEY = tl.constexpr(0x7F800000)
TABLES = tl.constexpr(quantize.TABLES)
REACH = tl.constexpr(quantize.REACH)
LEAST_SCALE = tl.constexpr(quantize.LEAST_SCALE)


@triton.jit
def extent_of(extents_ptr, tiles, BLOCK: tl.constexpr):
    """Return the smallest and the largest key of all blocks."""
    smallest = tl.full([BLOCK], 0x7FFFFFFF, tl.int32)
    largest = tl.zeros([BLOCK], tl.int32)
    start = 0
    while start < tiles:
        at = start + tl.arange(0, BLOCK)
        inside = at < tiles
        smallest = tl.minimum(smallest, tl.load(extents_ptr + 2 * at, mask=inside, other=0x7FFFFFFF))
        largest = tl.maximum(largest, tl.load(extents_ptr + 2 * at + 1, mask=inside, other=0))
        start += BLOCK
    return tl.min(smallest, axis=0), tl.max(largest, axis=0)


@triton.jit
def _scale(smallest, largest, cover, KEPT: tl.constexpr):
    """Return the scale: about the smallest magnitude, rounded towards zero to the bits of the mask ``KEPT``."""
    covered = tl.maximum(tl.maximum(smallest, tl.div_rn(largest, cover)), LEAST_SCALE)
    return (covered.to(tl.int32, bitcast=True) & KEPT).to(tl.float32, bitcast=True)


@triton.jit
def level_of(ratio, menu_ptr, table, inside, HALVINGS: tl.constexpr):
    """Return the level of each ratio: the number of midpoints below the centre of its bf16 cell."""
    centre = ((ratio.to(tl.int32, bitcast=True) & -65536) | 0x8000).to(tl.float32, bitcast=True)
    midpoints_ptr = menu_ptr + ((TABLES + table) << HALVINGS)
    level = tl.zeros_like(centre).to(tl.int32)
    for step in tl.static_range(HALVINGS):
        probe = level + (1 << (HALVINGS - 1 - step))
        midpoint = tl.load(midpoints_ptr + probe - 1, mask=inside, other=0.0)
        level = tl.where(midpoint < centre, probe, level)
    return level


@triton.jit
def header_of(
    values_ptr, extents_ptr, menu_ptr, count, tiles, stride, divisor, cover,
    KEPT: tl.constexpr, HALVINGS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Return the header: the scale, and the table with the least squared error over every ``stride``-th value."""
    smallest, largest = extent_of(extents_ptr, tiles, BLOCK)
    most = tl.div_rn(largest.to(tl.float32, bitcast=True), divisor)
    scale = _scale(tl.div_rn(smallest.to(tl.float32, bitcast=True), divisor), most, cover, KEPT)
    samples = tl.cdiv(count, stride)
    table = 0
    least = tl.full([], float("inf"), tl.float64)
    candidate = 0
    while candidate < TABLES:
        errors = tl.zeros([BLOCK], tl.float64)
        start = 0
        while start < samples:
            at = start + tl.arange(0, BLOCK)
            held = at < samples
            value = tl.load(values_ptr + at.to(tl.int64) * stride, mask=held, other=0.0)
            ratio = tl.div_rn(tl.div_rn(tl.abs(value), divisor), scale)
            level = level_of(ratio, menu_ptr, candidate, held, HALVINGS)
            miss = ratio - tl.load(menu_ptr + (candidate << HALVINGS) + level, mask=held, other=0.0)
            errors += tl.where(held, miss * miss, 0.0).to(tl.float64)
            start += BLOCK
        total = tl.sum(errors, axis=0)
        top = tl.load(menu_ptr + ((candidate + 1) << HALVINGS) - 1)
        better = (total < least) & (tl.div_rn(most, scale) <= REACH * top)
        table = tl.where(better, candidate, table)
        least = tl.where(better, total, least)
        candidate += 1
    header = scale.to(tl.int32, bitcast=True) | table
    return tl.where(largest >= INFINITY_KEY, NAN_HEADER, header)


@triton.jit
def least_key(extents_ptr, tiles, divisor, cover, half, fixed, KEPT: tl.constexpr, BLOCK: tl.constexpr):
    """Return the least key of a value that is sendable, and 1 if not all values are. ``fixed`` is a least key, or 0."""
    smallest, largest = extent_of(extents_ptr, tiles, BLOCK)
    finite = largest < INFINITY_KEY
    smallest = tl.div_rn(smallest.to(tl.float32, bitcast=True), divisor)
    scale = _scale(smallest, tl.div_rn(largest.to(tl.float32, bitcast=True), divisor), cover, KEPT)
    least = tl.where(fixed != 0, fixed, (scale * half).to(tl.int32, bitcast=True))
    return least, (finite & (smallest.to(tl.int32, bitcast=True) < least)).to(tl.int32)


@cache
def menu(bits: int, device: torch.device) -> torch.Tensor:
    """Return levels and midpoints of the tables (fp32 ``[2, tables, levels]``) on ``device``. The last is infinity."""
    levels = torch.tensor(quantize.menu(bits), dtype=torch.float64)
    midpoints = torch.full_like(levels, torch.inf)
    midpoints[:, :-1] = (levels[:, 1:] + levels[:, :-1]) / 2
    return torch.stack([levels, midpoints]).float().to(device)


def rule(bits: int, fixed: int) -> tuple[float, float, int]:
    """Return ``cover``, ``half`` and ``fixed`` of :func:`least_key`. A fixed least key needs no tables."""
    if fixed:
        return 1.0, 1.0, fixed
    return float(quantize.lookup(bits).cover), float(quantize.lookup(bits).half_least), 0


def kept_bits(divisor: int) -> int:
    """Return the mask of the bits of a scale, as a signed number."""
    return -1 << (24 - quantize.scale_bits(divisor))
