# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators, allow-incomplete-defs
"""Kernel of :mod:`tritoncomm_kernels.rebalance`: one program with one lane per partition, without host access."""

import torch
import triton
import triton.language as tl

from tritoncomm_kernels.dispatch import launch


@triton.jit
def _sweep(load, blocks, lane, partitions, quantum, least):
    """Apply the rule of the paper, border by border. Each border sees the moves of the borders before it."""
    mean = tl.sum(load, axis=0) // partitions
    left = tl.zeros([], tl.int32)
    last = tl.where(mean > 0, partitions - 1, 0)
    while left < last:
        load_left = tl.sum(tl.where(lane == left, load, 0), axis=0)
        load_right = tl.sum(tl.where(lane == left + 1, load, 0), axis=0)
        size_left = tl.sum(tl.where(lane == left, blocks, 0), axis=0)
        size_right = tl.sum(tl.where(lane == left + 1, blocks, 0), axis=0)
        high_left = (100 * load_left > 105 * mean).to(tl.int32)
        high_right = (100 * load_right > 105 * mean).to(tl.int32)
        excess_left = high_left * (100000 * load_right < 95238 * mean).to(tl.int32)
        excess_right = high_right * (100000 * load_left < 95238 * mean).to(tl.int32)
        leftwards = excess_left * (size_left - 1 >= least).to(tl.int32)
        rightwards = (1 - leftwards) * excess_right * (size_right - 1 >= least).to(tl.int32)
        move = leftwards - rightwards
        shift = tl.where(lane == left + 1, move, 0) - tl.where(lane == left, move, 0)
        blocks += shift
        load += shift * quantum
        left += 1
    return blocks


@triton.jit
def _border_moves(load, blocks, lane, partitions, total, max_step, PARTITIONS: tl.constexpr):
    """Return how many blocks each border moves to the left under the prefix rule, before ``least`` is applied."""
    ahead = tl.cumsum(load, axis=0) * partitions - (lane + 1).to(tl.int64) * total
    distance = tl.where(ahead < 0, -ahead, ahead)
    bounded = tl.minimum(distance, 1 << 31)
    noise = total * (lane + 1).to(tl.int64) * (partitions - 1 - lane).to(tl.int64)
    still = (20 * distance <= total) | (bounded * bounded <= noise) | (lane >= partitions - 1) | (total < partitions)
    source = tl.minimum(tl.where(ahead > 0, lane, lane + 1), PARTITIONS - 1)
    crowd = tl.maximum(tl.gather(load, source, axis=0), 1)
    width = tl.gather(blocks, source, axis=0).to(tl.int64)
    steps = (distance * width) // (4 * partitions * crowd)
    steps = tl.minimum(tl.maximum(steps, 1), max_step).to(tl.int32)
    return tl.where(still, 0, tl.where(ahead > 0, steps, -steps))


@triton.jit(do_not_specialize=["partitions", "rotation", "block", "n", "least", "max_step"])
def rebalance_kernel(
    blocks_ptr, bounds_ptr, counts_ptr, partitions, rotation, block, n, least, max_step,
    PARTITIONS: tl.constexpr, PREFIX: tl.constexpr,
):  # fmt: skip
    """Move the borders according to the counts, and write the first element of each partition, and the end."""
    lane = tl.arange(0, PARTITIONS)
    real = lane < partitions
    # Counts are in rank order. Partition j belonged to rank (j - rotation) mod P.
    owner = lane - rotation
    owner = tl.where(owner < 0, owner + partitions, owner)
    load = tl.maximum(tl.load(counts_ptr + owner, mask=real, other=0), 0).to(tl.int64)
    blocks = tl.load(blocks_ptr + lane, mask=real, other=0)
    total = tl.sum(load, axis=0)
    if PREFIX:
        move = _border_moves(load, blocks, lane, partitions, total, max_step, PARTITIONS)
        before = tl.gather(move, tl.maximum(lane - 1, 0), axis=0)
        before = tl.where(lane > 0, before, 0)
        left_over = blocks - tl.maximum(move, 0) - tl.maximum(-before, 0)
        # A border stays if the partition that it would shrink falls below ``least``. Growth does not count.
        own_stays = left_over < least
        next_stays = tl.gather(own_stays.to(tl.int32), tl.minimum(lane + 1, PARTITIONS - 1), axis=0) != 0
        move = tl.where(tl.where(move > 0, own_stays, next_stays), 0, move)
        before = tl.where(lane > 0, tl.gather(move, tl.maximum(lane - 1, 0), axis=0), 0)
        blocks += tl.where(real, before - move, 0)
    else:
        quantum = (block.to(tl.int64) * total) // n
        blocks = _sweep(load, blocks.to(tl.int64), lane, partitions, quantum, least).to(tl.int32)
    start = (tl.cumsum(blocks, axis=0) - blocks).to(tl.int64) * block
    tl.debug_barrier()  # with fewer partitions than threads, several threads read what one of them overwrites
    tl.store(blocks_ptr + lane, blocks, mask=real)
    tl.store(bounds_ptr + lane, tl.minimum(start, n).to(tl.int32), mask=real)
    tl.store(bounds_ptr + partitions, n)


def warps(partitions: int) -> int:
    """Return the number of warps. One warp holds up to 256 partitions in registers and would spill with more."""
    return 1 if partitions <= 256 else 4


def rebalance(
    blocks: torch.Tensor,
    bounds: torch.Tensor,
    counts: torch.Tensor,
    *,
    rotation: int,
    block: int,
    numel: int,
    min_blocks: int,
    max_step: int,
    rule: str,
) -> None:
    """Launch the kernel on checked arguments."""
    partitions = blocks.numel()
    lanes = max(2, triton.next_power_of_2(partitions))
    launch(
        rebalance_kernel, (1,), blocks, bounds, counts, partitions, rotation, block, numel, min_blocks, max_step,
        like=blocks, warps=warps(lanes),
        PARTITIONS=lanes, PREFIX=rule == "prefix",
    )  # fmt: skip
