"""Dynamic partitions of ExDyna: move borders until all ranks select similar numbers of entries.

A vector is split into blocks, and a partition is a run of whole blocks. All rules use exact integer arithmetic, so
every rank computes the same partitions from the same counts.
"""

from __future__ import annotations

import itertools

import torch

from tritoncomm_kernels.checks import INDEX_LIMIT, check_apart, check_vector
from tritoncomm_kernels.dispatch import kernel, triton_runs

RULES = ("paper", "prefix")
MAX_PARTITIONS = 1024
MAX_BLOCKS = 1 << 20  # keeps every product of the prefix rule below 2^63


def rebalance(
    blocks: torch.Tensor,
    bounds: torch.Tensor,
    counts: torch.Tensor,
    *,
    iteration: int,
    block: int,
    numel: int,
    min_blocks: int,
    rule: str = "prefix",
    max_step: int = 1,
) -> None:
    """Move the borders of the partitions according to ``counts``, for the next iteration.

    All tensors are int32. ``blocks`` and ``bounds`` are written.

    * ``blocks`` (``[P]``): blocks per partition, updated in place.
    * ``bounds`` (``[P + 1]``): set to the first element of each partition, and to ``numel``, the end of the last one.
    * ``counts`` (``[P]``): number of entries that each rank selected in this iteration. No element is selected twice,
      so the sum must not exceed ``numel``.
    * ``iteration``: number of this iteration, in which rank r selected in partition ``(iteration + r) mod P``.
    * ``block``: elements per block. ``numel``: elements of the vector.
    * ``min_blocks``: no partition shrinks below this number of blocks.

    ``rule`` selects how borders move. If there is less than one entry per partition, they stay.

    * ``"paper"``: the rule of ExDyna, section on dynamic partition allocation. Of two neighbors, one that is more than
      5 % above the mean gives a block to one that is more than 5 % below it.
    * ``"prefix"``: each border moves on its own by up to ``max_step`` blocks. The distance follows from the difference
      between the prefix sum of the counts and its ideal value. Differences within one standard deviation, or within
      5 % of the mean load, are ignored.

    On a GPU this is one launch without host synchronization. Raises ``ValueError`` naming the invalid argument.
    """
    check_vector("blocks", blocks, dtypes=(torch.int32,))
    partitions = blocks.numel()
    check_vector("bounds", bounds, dtypes=(torch.int32,), numel=partitions + 1, like=blocks)
    check_vector("counts", counts, dtypes=(torch.int32,), numel=partitions, like=blocks)
    check_apart("bounds", bounds, "blocks", blocks)
    check_apart("counts", counts, "blocks", blocks)
    check_apart("counts", counts, "bounds", bounds)
    _check_numbers(partitions, block, numel, min_blocks, max_step, rule)
    rotation = iteration % partitions
    if triton_runs(blocks):
        kernel("rebalance_triton").rebalance(
            blocks, bounds, counts,
            rotation=rotation, block=block, numel=numel, min_blocks=min_blocks, max_step=max_step, rule=rule,
        )  # fmt: skip
        return
    load = [max(count, 0) for count in counts.tolist()]
    load = load[partitions - rotation :] + load[: partitions - rotation]  # from the order of ranks to partitions
    sizes = blocks.tolist()
    if rule == "prefix":
        _prefix(load, sizes, min_blocks, max_step)
    else:
        _sweep(load, sizes, block * sum(load) // numel, min_blocks)
    starts = itertools.accumulate(sizes[:-1], initial=0)
    blocks.copy_(torch.tensor(sizes, dtype=torch.int32, device="cpu"))
    bounds.copy_(
        torch.tensor([*(min(start * block, numel) for start in starts), numel], dtype=torch.int32, device="cpu")
    )


def _sweep(load: list[int], sizes: list[int], quantum: int, least: int) -> None:
    """Apply the rule of the paper in place. Each pair sees the moves of the pairs before it."""
    mean = sum(load) // len(load)
    if mean == 0:
        return

    def overloaded(i: int, beside: int) -> bool:
        return 100 * load[i] > 105 * mean and 100000 * load[beside] < 95238 * mean

    for left in range(len(load) - 1):
        right = left + 1
        if overloaded(left, right) and sizes[left] - 1 >= least:
            source, target = left, right
        elif overloaded(right, left) and sizes[right] - 1 >= least:
            source, target = right, left
        else:
            continue
        sizes[source] -= 1
        sizes[target] += 1
        load[source] -= quantum
        load[target] += quantum


def _prefix(load: list[int], sizes: list[int], least: int, max_step: int) -> None:
    """Apply the prefix rule in place. A positive move takes blocks from the left side of a border."""
    partitions, total, prefix = len(load), sum(load), 0
    if total < partitions:  # too few entries to compare loads
        return
    moves = []
    for i in range(partitions - 1):
        prefix += load[i]
        ahead = prefix * partitions - (i + 1) * total
        noise = total * (i + 1) * (partitions - 1 - i)
        if 20 * abs(ahead) <= total or ahead * ahead <= noise:
            moves.append(0)
            continue
        source = i if ahead > 0 else i + 1
        # Move a quarter of the surplus, converted to blocks by the density of the side that shrinks.
        steps = abs(ahead) * sizes[source] // (4 * partitions * max(load[source], 1))
        steps = min(max(steps, 1), max_step)
        moves.append(steps if ahead > 0 else -steps)
    left_over = list(sizes)
    for i, move in enumerate(moves):
        left_over[i] -= max(move, 0)
        left_over[i + 1] -= max(-move, 0)
    for i, move in enumerate(moves):
        if left_over[i if move > 0 else i + 1] >= least:
            sizes[i] -= move
            sizes[i + 1] += move


def _check_numbers(partitions: int, block: int, numel: int, min_blocks: int, max_step: int, rule: str) -> None:
    if not 1 <= partitions <= MAX_PARTITIONS:
        raise ValueError(f"blocks has {partitions} elements: the number of partitions must be in [1, {MAX_PARTITIONS}]")
    if rule not in RULES:
        raise ValueError(f"rule={rule!r} is unknown: must be one of {', '.join(RULES)}")
    if not 1 <= numel <= INDEX_LIMIT:
        raise ValueError(f"numel={numel} is not in [1, {INDEX_LIMIT}]: split a longer vector, skip an empty one")
    if block < 1 or -(-numel // block) > MAX_BLOCKS:
        raise ValueError(f"block={block} for numel={numel}: must be at least 1 and give at most {MAX_BLOCKS} blocks")
    if min_blocks < 0 or max_step < 1:
        raise ValueError(f"min_blocks={min_blocks} must be at least 0, and max_step={max_step} at least 1")
