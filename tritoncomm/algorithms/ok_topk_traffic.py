"""The room of Ok-Topk's messages, and the traffic that follows: of an even step, at most, and with fixed room."""

from __future__ import annotations

import math
from dataclasses import dataclass

from tritoncomm.algorithms.ok_topk_rules import Figures
from tritoncomm.primitives import distributed_topk
from tritoncomm.primitives.packing import Encoding
from tritoncomm.primitives.verdict import with_verdict
from tritoncomm.scheduler import cost
from tritoncomm.scheduler.cost import Flow, Forecast, both


@dataclass(frozen=True)
class Caps:
    """The limits of a step of :class:`~tritoncomm.OkTopk`, from which its traffic follows.

    ``local_cap`` and ``global_cap`` are the largest number of entries that a rank selects, and that a step delivers.
    ``pair_share`` and ``owner_share`` are the room of a message to one owner and of one owner, in multiples of an even
    share of these caps. They are infinite where only the caps limit exact lengths. Blocks are balanced if the largest
    exceeds ``balance_trigger`` times the mean size.
    """

    numel: int
    k: int
    encoding: Encoding
    local_cap: int
    global_cap: int
    pair_share: float
    owner_share: float
    balance_trigger: float

    def pair_room(self, world_size: int) -> int:
        """Return the largest number of entries that a rank sends to one owner in a step that reuses thresholds."""
        return math.ceil(min(self.local_cap, self.pair_share * self.local_cap / world_size))

    def owner_room(self, world_size: int) -> int:
        """Return the largest number of sums that one owner sends in a step that reuses thresholds."""
        return math.ceil(min(self.global_cap, self.owner_share * self.global_cap / world_size))

    def fixed(
        self, world_size: int, span: int | None, *, reevaluate: bool = False, repartition: bool = False
    ) -> Forecast:
        """Return the traffic of a step with fixed room.

        It is exact if ``span``, the width of the widest region, is given. Without ``span`` it is an upper bound.
        """
        rooms = (self.k, self.k) if reevaluate else (self.pair_room(world_size), self.owner_room(world_size))
        pair, block = (self._row_words(room, span) for room in rooms)
        phases = {
            "split-and-reduce": both(cost.all_to_all(pair + 1, cost.WORD, world_size)),
            "all-gather": both(cost.all_gather(block, cost.WORD, world_size)),
        }
        if repartition:
            phases["repartition"] = both(cost.all_reduce(world_size, 2 * cost.WORD, world_size))
        if reevaluate:
            phases["rooms"] = both(cost.all_gather(1, cost.WORD, world_size))
            phases["sizes"] = both(cost.all_gather(1, cost.WORD, world_size))
            phases.update(distributed_topk.forecast(world_size).phases)
        figures = len(Figures._fields) - (not self.encoding.rounds)
        return with_verdict(Forecast(phases), world_size, figures, phase="all-gather")

    def even(self, world_size: int) -> Forecast:
        """Return the traffic of a step that reuses thresholds and cuts. 4k(P-1)/P words, if plain.

        Every rank has k/P entries for every owner, and every owner delivers k/P sums. Nothing is balanced.
        """
        peers, rounds = world_size - 1, cost.log2(world_size)
        section = self.encoding.words(-(-self.numel // world_size), -(-self.k // world_size))
        gathered = section + int(self.encoding.rounds)
        return Forecast(
            {
                "counts": both(cost.all_to_all(1, 8, world_size)),
                "split-and-reduce": both(cost.messages(peers, peers * section)),
                "sizes": both(cost.all_gather(3, 8, world_size)),
                "all-gather": both(cost.messages(rounds, peers * gathered)),
            }
        )

    def most(self, world_size: int, region: int, *, reevaluate: bool, repartition: bool) -> Forecast:
        """Return the most that a step sends and receives.

        Args:
            world_size: Number of ranks, at least 2.
            region: Width of the widest region.
            reevaluate: Whether the step computes thresholds.
            repartition: Whether it computes the cuts.
        """
        peers = world_size - 1
        sent = self.k if reevaluate else self.local_cap
        pair = sent if reevaluate else self.pair_room(world_size)
        sizes = cost.all_gather(3, 8, world_size)
        phases = {
            "counts": both(cost.all_to_all(1, 8, world_size)),
            # A rank sends each entry once. In the worst case one owner receives all entries of all peers, as far as
            # its region has room for them.
            "split-and-reduce": Flow(
                cost.messages(peers, self._words(min(sent, peers * pair), peers)),
                cost.messages(peers, peers * self.encoding.words_at_most(region, pair, 1)),
            ),
            "sizes": both(sizes),
        }
        if repartition:
            phases["repartition"] = both(cost.all_reduce(world_size, 8, world_size))
        if reevaluate:
            phases.update(distributed_topk.forecast(world_size).phases)
        return Forecast(phases | self._gathering(self.k if reevaluate else self.global_cap, world_size))

    def _gathering(self, delivered: int, world_size: int) -> dict[str, Flow]:
        """Return the most that it takes to balance and gather ``delivered`` entries."""
        peers, rounds = world_size - 1, cost.log2(world_size)
        phases: dict[str, Flow] = {}
        share = math.ceil(delivered / world_size)
        largest = max(share, math.ceil(min(delivered, self.balance_trigger * delivered / world_size)))
        pieces = world_size
        if self.balance_trigger < world_size:
            pieces = 2 * world_size - 1  # a balanced block may hold entries of several regions
            phases["balance"] = Flow(
                cost.messages(peers, self._exact_words(delivered, peers)),
                cost.messages(peers, self._exact_words(share, peers)),
            )
        # Bruck: each block arrives once, but a rank sends its own block, which may be large, in every round.
        extra = int(self.encoding.rounds)
        received = self._words(delivered, pieces) + extra * world_size
        leaving = min(rounds * received, peers * (self._words(largest, min(pieces, largest)) + extra))
        phases["all-gather"] = Flow(cost.messages(rounds, leaving), cost.messages(rounds, received))
        return phases

    def _row_words(self, room: int, span: int | None) -> int:
        of_rows = self.encoding.of_rows
        return of_rows.words_at_most(self.numel, room, 1) if span is None else of_rows.words(span, room)

    def _words(self, entries: int, sections: int) -> int:
        return self.encoding.words_at_most(self.numel, entries, sections)

    def _exact_words(self, entries: int, sections: int) -> int:
        """Return the words of entries whose values are not rounded."""
        return Encoding("fp32", self.encoding.packed).words_at_most(self.numel, entries, sections)
