"""ExDyna's dynamic partitions: move borders so that every worker selects about as much as the others.

A vector is cut into blocks, and partitions are runs of whole blocks. All rules are exact integer
arithmetic, so every rank computes the same topology from the same counts.
"""

from __future__ import annotations

import torch

from tritoncomm_kernels.checks import INDEX_LIMIT, check_apart, check_vector
from tritoncomm_kernels.dispatch import kernel, triton_runs

RULES = ("paper", "pair_ratio", "prefix")
MAX_PARTITIONS = 1024
MAX_BLOCKS = 1 << 20  # keeps every product of the prefix rule below 2^63


def rebalance(
    blocks: torch.Tensor,
    first: torch.Tensor,
    counts: torch.Tensor,
    iteration: torch.Tensor,
    span: torch.Tensor,
    *,
    rank: int,
    block: int,
    numel: int,
    min_blocks: int,
    rule: str = "prefix",
    max_step: int = 1,
) -> None:
    """Move the borders by what the workers selected, and say where ``rank`` selects next.

    ``counts`` must not add up to more than ``numel``, as nobody can select an element twice.

    ``blocks`` (int32 ``[P]``, in place): blocks per partition. ``first`` (int32 ``[P]``) becomes the first
    block of each. ``counts`` (int32 ``[P]``): selected by each rank in ``iteration`` (int32 ``[1]``), when
    rank r had partition ``(iteration + r) mod P``. ``span`` (int32 ``[2]``) becomes the elements
    ``[start, stop)`` of the partition that ``rank`` has in the next iteration, with ``block`` elements per
    block and ``numel`` altogether; the last partition reaches to the end.

    ``rule="paper"``: ExDyna, section on dynamic partition allocation; one block between neighbours of which
    one is 5 % above and the other 5 % below the mean. ``rule="pair_ratio"``: the same, but one exceeds the
    other by more than a tenth, so that load crosses partitions near the mean. ``rule="prefix"``: every
    border on its own by how far the prefix sum is from its ideal, up to ``max_step`` blocks, noise of one
    standard deviation ignored. With fewer than one entry per partition borders stay. No partition shrinks below
    ``min_blocks``. One launch on a GPU, no host sync.
    Raises ``ValueError`` naming the argument that does not fit.
    """
    check_vector("blocks", blocks, dtypes=(torch.int32,))
    partitions = blocks.numel()
    for name, tensor, size in (
        ("first", first, partitions),
        ("counts", counts, partitions),
        ("iteration", iteration, 1),
        ("span", span, 2),
    ):
        check_vector(name, tensor, dtypes=(torch.int32,), numel=size, like=blocks)
    check_apart("first", first, "blocks", blocks)
    check_apart("counts", counts, "blocks", blocks)
    check_apart("counts", counts, "first", first)
    _check_numbers(partitions, rank, block, numel, min_blocks, max_step, rule)
    if triton_runs(blocks):
        kernel("rebalance_triton").rebalance(
            blocks, first, counts, iteration, span,
            rank=rank, block=block, numel=numel, min_blocks=min_blocks, max_step=max_step, rule=rule,
        )  # fmt: skip
        return
    sizes, starts, own_span = _rebalance(
        blocks.tolist(), counts.tolist(), int(iteration), rank, block, numel, min_blocks, max_step, rule
    )
    for tensor, content in ((blocks, sizes), (first, starts), (span, own_span)):
        tensor.copy_(torch.tensor(content, dtype=torch.int32))


def _rebalance(
    sizes: list[int],
    counts: list[int],
    step: int,
    rank: int,
    block: int,
    numel: int,
    min_blocks: int,
    max_step: int,
    rule: str,
) -> tuple[list[int], list[int], list[int]]:
    """The reference: blocks per partition, first blocks, and the next span of ``rank``."""
    partitions = len(sizes)
    load = [0] * partitions
    for sender, count in enumerate(counts):
        load[(step + sender) % partitions] = max(count, 0)
    if rule == "prefix":
        _prefix(load, sizes, min_blocks, max_step)
    else:
        _sweep(load, sizes, block * sum(load) // numel, min_blocks, rule)
    starts = [sum(sizes[:j]) for j in range(partitions)]
    own = (step + 1 + rank) % partitions
    stop = numel if own == partitions - 1 else min((starts[own] + sizes[own]) * block, numel)
    return sizes, starts, [min(starts[own] * block, numel), stop]


def _sweep(load: list[int], sizes: list[int], quantum: int, least: int, rule: str) -> None:
    """The sequential rules in place: each pair sees what the pair before it has moved."""
    mean = sum(load) // len(load)
    if mean == 0:
        return

    def overloaded(i: int, beside: int) -> bool:
        if rule == "pair_ratio":
            return 10 * load[i] > 11 * load[beside]
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
    """The prefix rule in place. A positive move takes blocks from the left side of a border."""
    partitions, total, prefix = len(load), sum(load), 0
    if total < partitions:  # says nothing about who has too much
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
        # A quarter of the surplus, in blocks of the density of the side that gives.
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


def _check_numbers(
    partitions: int, rank: int, block: int, numel: int, min_blocks: int, max_step: int, rule: str
) -> None:
    if not 1 <= partitions <= MAX_PARTITIONS:
        raise ValueError(f"blocks has {partitions} partitions: between 1 and {MAX_PARTITIONS} are supported")
    if rule not in RULES:
        raise ValueError(f"rule={rule!r} is not known: choose one of {', '.join(RULES)}")
    if not 0 <= rank < partitions:
        raise ValueError(f"rank={rank} is outside of {partitions} partitions: one rank per partition")
    if not 1 <= numel <= INDEX_LIMIT:
        raise ValueError(f"numel={numel} is not between 1 and {INDEX_LIMIT}: split the vector, or skip an empty one")
    if block < 1 or -(-numel // block) > MAX_BLOCKS:
        raise ValueError(f"block={block} for numel={numel}: choose at most {MAX_BLOCKS} blocks of at least 1 element")
    if min_blocks < 0 or max_step < 1:
        raise ValueError(f"min_blocks={min_blocks} must be at least 0 and max_step={max_step} at least 1")
