"""Reusable exchange patterns for any number of workers."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch

from tritoncomm.errors import ProtocolMismatchError
from tritoncomm.primitives import packing
from tritoncomm.primitives.accumulator import Accumulator
from tritoncomm.primitives.packing import Encoding, Section, Sections, quotients
from tritoncomm.primitives.region_cuts import balanced_pieces, balanced_sizes, moves
from tritoncomm.primitives.selection import NO_KEY, before_rounding
from tritoncomm.primitives.sparse_vector import SparseVector
from tritoncomm.primitives.verdict import NAN_OR_INF, check_same, non_finite
from tritoncomm.scheduler.ranks import named, rank_text
from tritoncomm.scheduler.rounds import AllGather, AllReduce, AllToAll, Inbox, Pattern, Post, Round, Wait, read
from tritoncomm_kernels import Entries

OVERFLOW = "a sum of finite gradients overflows"
NON_FINITE = -1  # sent in place of a count, so that a NaN or Inf is reported without an extra message


def rotation(rank: int, world_size: int, width: int) -> list[list[tuple[int, int]]]:
    """Return the peers of each bucket of the destination rotation, as lists of (destination, source) pairs.

    In rotation step s, rank r sends to (r + s) mod P and receives from (r - s) mod P. No rank is the destination of two
    senders in one step. Step 0 is the local copy. The first bucket therefore holds ``width - 1`` peers, and later ones
    hold ``width`` (Ok-Topk, section "split and reduce").
    """
    return [
        [((rank + s) % world_size, (rank - s) % world_size) for s in range(world_size)[first or 1 : first + width]]
        for first in range(0, world_size, width)
    ]


def rotate(
    sends: Mapping[int, torch.Tensor],
    receives: Mapping[int, int],
    consume: Callable[[Inbox], None],
    rank: int,
    world_size: int,
    *,
    width: int,
    phase: str,
) -> Pattern[None]:
    """Exchange messages with all peers by destination rotation, one bucket at a time.

    ``sends`` maps peers to messages. ``receives`` maps peers to message lengths in words. ``consume`` gets the messages
    of one bucket by source, in rotation order: r - 1, r - 2, and so on. While it runs, the next bucket is in transit.
    """
    arrived: Inbox = {}
    for number, pairs in enumerate(rotation(rank, world_size, width)):
        bucket = Round(
            phase,
            {to: sends[to] for to, _ in pairs if to in sends},
            {source: receives[source] for _, source in pairs if source in receives},
        )
        if number == 0:  # there is nothing to do in the meantime
            inbox: Inbox = yield bucket
        else:
            ticket = yield Post(bucket)
            if arrived:
                consume(arrived)
            inbox = yield Wait(ticket)
        arrived = {source: inbox[source] for _, source in pairs if source in inbox}
    if arrived:
        consume(arrived)


def bruck_all_gather(
    block: torch.Tensor,
    words: Sequence[int],
    position: int,
    size: int,
    *,
    phase: str,
    ring: Sequence[int] | None = None,
) -> Pattern[list[torch.Tensor]]:
    """All-gather the int32 ``block`` of every participant. Return the blocks by position.

    ``words[p]`` is the length of the block at position p. All participants must know it. ``ring`` lists the
    participating ranks by position; the default is all ``size`` ranks. This is Bruck's algorithm. It takes ceil(log2 P)
    rounds for any P, and each rank receives every other block once.
    """
    peers = range(size) if ring is None else ring
    slots = [block]  # slots[s] is the block of position + s, modulo size
    while (have := len(slots)) < size:
        count = min(have, size - have)
        to, first = peers[(position - have) % size], (position + have) % size
        source = peers[first]
        lengths = [words[(first + i) % size] for i in range(count)]
        inbox: Inbox = yield Round(phase, {to: torch.cat(slots[:count])}, {source: sum(lengths)})
        arrived = inbox.get(source, block.new_empty(0))
        slots += arrived.split_with_sizes(lengths)
    return [slots[(p - position) % size] for p in range(size)]


def share_counts(counts: Sequence[int], finite: bool, device: torch.device, *, limit: int) -> Pattern[list[int]]:
    """Send ``counts[r]`` to rank r, and return the received counts by source.

    ``counts[r]`` is the number of entries that this rank has for rank r. A received count is at most ``limit``. All
    ranks raise
    :class:`~tritoncomm.NonFiniteError` if any rank is not ``finite``.
    """
    outgoing = counts if finite else [NON_FINITE] * len(counts)
    words = torch.tensor(outgoing, dtype=torch.int64, device=device)
    incoming: list[int] = yield from read("counts", (yield AllToAll("counts", words)))
    bad = [rank for rank, count in enumerate(incoming) if count == NON_FINITE]
    if bad:
        raise non_finite(bad)
    return checked_counts("counts", incoming, limit)


def share_rows(
    row: Sequence[int],
    finite: bool,
    world_size: int,
    device: torch.device,
    *,
    phase: str,
    limit: int,
    reason: str = NAN_OR_INF,
) -> Pattern[list[list[int]]]:
    """All-gather one ``row`` of integers per rank. Return the columns, each with one value per rank.

    The first integer of a row is a count in [0, ``limit``]. All ranks raise :class:`~tritoncomm.NonFiniteError` if any
    rank is not ``finite``. The message names these ranks and the ``reason``. One worker alone sends nothing.
    """
    told = [row[0] if finite else NON_FINITE, *row[1:]]
    # Each word is filled where it is sent from: the host would wait for a GPU to copy them.
    words = torch.cat([torch.full((1,), each, dtype=torch.int64, device=device) for each in told])
    everybody = (yield AllGather(phase, words)) if world_size > 1 else words[None]
    columns: list[list[int]] = yield from read(phase, everybody.t())
    bad = [rank for rank, first in enumerate(columns[0]) if first == NON_FINITE]
    if bad:
        raise non_finite(bad, reason)
    checked_counts(phase, columns[0], limit)
    if row[0] not in columns[0]:
        raise ProtocolMismatchError(f"phase {phase!r}: sent {row[0]}, which is not among the received {columns[0]}")
    return columns


def mean_over_ranks(value: float, world_size: int, device: torch.device, *, phase: str) -> Pattern[float]:
    """Return the mean of all ranks' ``value``, or infinity if it is not finite. One worker alone sends nothing.

    Values are added in rank order, so that all ranks get the same bits.
    """
    words = torch.tensor([value], dtype=torch.float64, device=device)
    everybody = (yield AllGather(phase, words)) if world_size > 1 else words
    mean = sum((yield from read(phase, everybody.flatten()))) / world_size
    return mean if math.isfinite(mean) else math.inf


def checked_counts(phase: str, counts: list[int], limit: int) -> list[int]:
    """Return ``counts``, from all ranks. Lengths of messages depend on them.

    Raises :class:`ProtocolMismatchError` unless they are in [0, limit].
    """
    wrong = [source for source, count in enumerate(counts) if not 0 <= count <= limit]
    if wrong:
        raise ProtocolMismatchError(
            f"phase {phase!r}: received counts {[counts[source] for source in wrong]} from "
            f"{rank_text(*named(wrong))}: they must be in [0, {limit}]"
        )
    return counts


def gather_blocks(
    block: Entries, sizes: Sequence[int], numel: int, rank: int, world_size: int, *, phase: str
) -> Pattern[Entries]:
    """All-gather the entries of all ranks. Return them in rank order.

    Rank r holds a part of the vector, with ``sizes[r]`` entries. The parts are consecutive in rank order.
    """
    words = [2 * size for size in sizes]
    message = packing.encode(block.indices, block.values)
    blocks = yield from bruck_all_gather(message, words, rank, world_size, phase=phase)
    gathered = Entries.join([packing.decode(part) for part in blocks])
    packing.check_indices(gathered.indices, 0, numel)
    return gathered


class Regions(NamedTuple):
    """The entries of all ranks before they are gathered. Rank r holds ``sizes[r]`` entries in its region of ``cuts``.

    ``encoding`` is the format of messages. Values are divided by ``divisor`` at the receivers.
    """

    cuts: Sequence[int]
    sizes: list[int]
    encoding: Encoding
    divisor: int = 1

    def blocks(self, *, balanced: bool) -> list[Sections]:
        """Return the layout of every rank's message, before or after balancing.

        A balanced block may hold entries of several regions. Each has a section of its own.
        """
        if not balanced:
            pieces = [[(owner, size)] for owner, size in enumerate(self.sizes)]
        else:
            pieces = balanced_pieces(self.sizes)
        return [
            Sections(
                self.encoding,
                [(self.cuts[owner], self.cuts[owner + 1], count) for owner, count in parts],
                divisor=self.divisor,
            )
            for parts in pieces
        ]


class Gathered(NamedTuple):
    """Entries of all ranks, as one ascending list: means if values are rounded, else sums.

    ``own`` are those of this rank, ``sent`` those of them that were sent, with the values that arrive. ``least`` is the
    key of the smallest magnitude of all ranks before rounding (int32 ``[1]``), or None if it is unknown.
    """

    entries: Entries
    own: Entries
    sent: Entries
    least: torch.Tensor | None = None


def gather_regions(
    block: Entries, regions: Regions, rank: int, world_size: int, *, trigger: float, width: int, phase: str
) -> Pattern[Gathered]:
    """All-gather the entries of all ranks' regions. Balance the blocks first if their sizes are uneven.

    Blocks are balanced if the largest one exceeds ``trigger`` times the mean size. ``width`` is the number of peers per
    bucket of the rotation.
    """
    sizes, total = regions.sizes, sum(regions.sizes)
    if sizes[rank] != block.indices.shape[0]:
        raise ProtocolMismatchError(
            f"phase {phase!r}: received sizes {sizes}, but {rank_text(*named([rank]))} has {block.room} entries to send"
        )
    balanced = max(sizes) > max(trigger * total / world_size, -(-total // world_size))
    if balanced:
        block = yield from _balance(block, regions, rank, world_size, width)
        sizes = balanced_sizes(total, world_size)
    if not regions.encoding.packed:
        entries = yield from gather_blocks(block, sizes, regions.cuts[-1], rank, world_size, phase=phase)
        return Gathered(entries, block, block)
    layouts = regions.blocks(balanced=balanced)
    message, sent = layouts[rank].encode(block.indices, block.values)
    extra = int(regions.encoding.rounds)
    if extra:  # thresholds must not be learnt from rounded values
        magnitudes = sent_magnitudes(block, sent)
        least = magnitudes.min() if sent.indices.shape[0] else magnitudes.new_tensor(math.inf)
        message = torch.cat([message, least.reshape(1).view(torch.int32)]) if message.numel() else message
    words = [layout.words + extra if layout.words else 0 for layout in layouts]
    blocks = yield from bruck_all_gather(message, words, rank, world_size, phase=phase)
    own = Entries(sent.indices, quotients(sent.values, regions.divisor))
    parts = [own] * world_size  # the own one needs no decoding
    for source, (layout, part) in enumerate(zip(layouts, blocks, strict=True)):
        if source != rank:
            parts[source] = layout.decode(part[: layout.words])
    entries = Entries.join(parts)
    if balanced:  # several blocks hold parts of one region, and each was checked by itself
        packing.check_indices(entries.indices, 0, regions.cuts[-1])
    return Gathered(entries, block, sent, _least_key(blocks) if extra else None)


def _least_key(blocks: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return :attr:`Gathered.least`. The last word of a block is its smallest magnitude, infinite without entries."""
    least = math.inf
    for block in blocks:
        if block.shape[0]:
            own = float(block[-1:].view(torch.float32))
            if not own > 0:
                raise ProtocolMismatchError(
                    f"phase 'all-gather': received {own} as smallest magnitude: it must be above 0"
                )
            least = min(least, own)
    if least == math.inf:
        return torch.tensor([NO_KEY], dtype=torch.int32, device="cpu")
    return torch.tensor([least], dtype=torch.float32, device="cpu").view(torch.int32)


def sent_magnitudes(entries: Entries, sent: Entries) -> torch.Tensor:
    """Return the magnitudes of those ``entries`` that were ``sent``, before rounding."""
    return before_rounding(entries, sent).abs()


def _balance(block: Entries, regions: Regions, rank: int, world_size: int, width: int) -> Pattern[Entries]:
    """Move entries until all ranks hold equal shares in the same order (Ok-Topk, "data balancing").

    Values are not rounded on this way.
    """
    cuts = regions.cuts
    exact = Encoding("fp32", regions.encoding.packed)
    leaving, arriving = moves(regions.sizes, rank)
    parts = {rank: block.slice(*leaving.pop(rank))} if rank in leaving else {}

    def section(owner: int, count: int) -> Section:
        return exact.section(cuts[owner], cuts[owner + 1], count)

    def keep(arrived: Inbox) -> None:
        parts.update((source, section(source, arriving[source]).decode(part)) for source, part in arrived.items())

    slices = {p: block.slice(start, stop) for p, (start, stop) in leaving.items()}
    sends = {p: section(rank, part.room).encode(part.indices, part.values)[0] for p, part in slices.items()}
    receives = {p: section(p, count).words for p, count in arriving.items() if p != rank}
    yield from rotate(sends, receives, keep, rank, world_size, width=width, phase="balance")
    return Entries.join([block.slice(0, 0), *(parts[p] for p in sorted(parts))])


def shared_mean(acc: Accumulator, indices: torch.Tensor, world_size: int, *, phase: str) -> Pattern[SparseVector]:
    """Return the mean of all accumulators at ``indices`` (int32 ``[m]``, the same on all ranks), and clear them there.

    A rank with a NaN or Inf at any coordinate sends NaN. All ranks then see NaN in the sum and raise
    :class:`~tritoncomm.NonFiniteError`.
    """
    total = yield from _summed(acc.values_or_nan(indices), acc, world_size, phase)
    acc.clear(indices)
    acc.selected = indices.numel()
    return acc.vector(Entries(indices, quotients(total, world_size)))


def dense_exchange(acc: Accumulator, world_size: int) -> Pattern[SparseVector]:
    """Return the mean of all accumulators, and clear them.

    A NaN or Inf on any rank makes the sum non-finite on every rank. All ranks then raise
    :class:`~tritoncomm.NonFiniteError`, and no flag is needed.
    """
    total = yield from _summed(acc.dense(), acc, world_size, "all-reduce")
    mean = SparseVector.full(quotients(total, world_size))
    acc.clear_all()
    return mean


def _summed(values: torch.Tensor, acc: Accumulator, world_size: int, phase: str) -> Pattern[torch.Tensor]:
    """Return the sum of all ranks' ``values``. All ranks reject the step if it has a NaN or Inf."""
    if world_size > 1 and values.numel():
        values = yield AllReduce(phase, values)
    check_same(values, acc.verdict)
    if acc.verdict is not None:
        yield from acc.verdict.settle(world_size)
    return values
