"""The static form of SparDL: the same exchange in messages of a fixed length. The host reads results once, at the end.

See :mod:`tritoncomm.algorithms.spardl` for the method, and :class:`~tritoncomm.algorithms.base.StaticRecipe` for the
form. All blocks have the room of the largest budget and the span of the widest block. A block still takes no more than
its own budget. Unless a sum is exactly zero, the result has the same bits as that of the exact form.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch

import tritoncomm_kernels as kernels
from tritoncomm.algorithms.spardl_teams import Place, SparDLState, fewest, reduce_scatter_schedule
from tritoncomm.primitives.accumulator import Accumulator
from tritoncomm.primitives.collectives import bruck_all_gather
from tritoncomm.primitives.packing import Rows
from tritoncomm.primitives.verdict import Verdict, with_verdict
from tritoncomm.scheduler import cost
from tritoncomm.scheduler.cost import Forecast, both
from tritoncomm.scheduler.rounds import AllGather, Inbox, Pattern, Round
from tritoncomm_kernels import Padded, Workspace


class SparDLStaticStep:
    """One step of the static form on one rank.

    ``values`` is W, the working copy of the accumulator. Sent entries are removed from it, received ones are added.
    """

    def __init__(self, acc: Accumulator, verdict: Verdict, place: Place, residuals: str) -> None:
        self.acc = acc
        self.verdict = verdict
        self.place = place
        self.residuals = residuals
        self.workspace = acc.workspace
        self.values = acc.workspace.buffer("spardl", acc.numel, torch.float32, acc.device).copy_(acc.dense())
        self.sent: list[torch.Tensor] = []

    def run(self, state: SparDLState, *, recursive: bool) -> Pattern[tuple[Padded, SparDLState, dict[str, float]]]:
        """Return the means, the next state and the report. R-SAG merges the teams if ``recursive``, otherwise B-SAG.

        Follows :meth:`SparDLAlgorithm.reduce`.
        """
        place, own, figures = self.place, None, []
        self.acc.selected = 0
        yield from self._reduce_scatter()
        if place.teams > 1 and recursive:
            own = yield from self._merge_recursively()
        elif place.teams > 1:
            own, union = yield from self._merge_by_bruck(state)
            figures = [union]
        delivered = yield from self._all_gather(own)
        self._collect_residuals(delivered.indices)
        self.verdict.check_result(delivered.values)
        rows = yield from self.verdict.settle(place.world_size, [kernels.count_entries(delivered), *figures])
        found, *unions = rows[place.rank]
        if unions:
            state = state.started(place.budget, place.teams).after(unions[0], place.budget, place.teams)
        return delivered, state, {"delivered": float(found), "h": float(state.h)}

    def _reduce_scatter(self) -> Pattern[None]:
        """SRS: all blocks of a round are selected at once, and travel in one message."""
        place = self.place
        team, w, size = place.team, place.position, place.team_size
        for distance, count in reduce_scatter_schedule(size):
            to, source = team[(w + distance) % size], team[(w - distance) % size]
            message, _ = self._send(place.bag(w + distance, count))
            arriving = self._rows(place.bag(w, count))
            inbox: Inbox = yield Round("reduce-scatter", {to: message.reshape(-1)}, {source: count * arriving.words})
            received = self._read(arriving, inbox[source])
            kernels.add_rows(self.values, received, workspace=self.workspace)

    def _merge_recursively(self) -> Pattern[Padded]:
        """R-SAG: see :meth:`SparDLAlgorithm._merge_recursively`."""
        place, w, rounds = self.place, self.place.position, cost.log2(self.place.teams)
        rows = self._rows([w])
        message, own = self._send([w])
        for s in range(rounds):
            if s:  # 2^s ranks hold the same entries, and round them alike
                message, own = self._forward(own, rows, 1 / (1 << s))
            peer = ((place.rank // place.team_size) ^ (1 << s)) * place.team_size + w
            inbox: Inbox = yield Round("merge", {peer: message[0]}, {peer: rows.words})
            received = self._read(rows, inbox[peer])
            pair = Padded(*(torch.cat(parts) for parts in zip(own, received, strict=True)))
            union = kernels.merge_rows(pair, self.acc.numel, workspace=self.workspace)
            own = self._largest(union)
            if s + 1 < rounds:  # entries truncated in the last round are in no result
                _add_truncated(self.values, union, own, 1 / (2 << s), self.workspace)
        return own

    def _merge_by_bruck(self, state: SparDLState) -> Pattern[tuple[Padded, torch.Tensor]]:
        """B-SAG: see :meth:`SparDLAlgorithm._merge_by_bruck`. Also return the size of the union, int32 ``[1]``."""
        place, w = self.place, self.place.position
        room = first_room(place, state.h)
        message, _ = self._send([w], room=room, limit=None if state.h else fewest(place.budget, place.teams))
        rows = self._rows([w] * place.teams, room=room)
        blocks = yield from bruck_all_gather(
            message[0],
            [rows.words] * place.teams,
            place.rank // place.team_size,
            place.teams,
            phase="merge",
            ring=place.column,
        )
        lists = self._read(rows, torch.stack(blocks))
        union = kernels.merge_rows(lists, self.acc.numel, workspace=self.workspace)
        return self._largest(union), kernels.count_entries(union)

    def _all_gather(self, own: Padded | None) -> Pattern[Padded]:
        """Gather all blocks, as means. ``own`` is this rank's merged block, or None if there is one team."""
        place, w = self.place, self.place.position
        blocks = range(place.team_size)
        if own is None:
            message, _ = self._send([w], divisor=place.world_size)
        else:  # all teams round the same block
            message, _ = self._forward(own, self._rows([w], divisor=place.world_size), place.share)
        rows = self._rows(blocks, divisor=place.world_size)
        if place.teams > 1:
            words = [rows.words] * place.team_size
            parts = yield from bruck_all_gather(
                message[0], words, w, place.team_size, phase="all-gather", ring=place.team
            )
            message = torch.stack(parts)
        elif place.world_size > 1:
            message = yield AllGather("all-gather", message[0])
        gathered = self._read(rows, message)
        if any(stop - start < place.widest for start, stop in itertools.pairwise(place.cuts)):
            # A row may reach one element into the next block, unless its message is malformed.
            stops = kernels.constant(place.cuts[1:], self.acc.device)
            self.verdict.check_messages((gathered.indices >= stops[:, None]).sum(dtype=torch.int32).reshape(1))
        return kernels.joined(gathered, workspace=self.workspace)

    def _collect_residuals(self, final: torch.Tensor) -> None:
        """Write the new residual, see :meth:`SparDLAlgorithm._collect_residuals`."""
        if self.residuals == "global":
            left = kernels.values_at(self.values, final)
            self.verdict.check_sums(left)  # what several ranks truncate at one coordinate can overflow
            self.acc.replace_padded(Padded(final, left))
            return
        sent = torch.cat(self.sent)
        if self.residuals == "partial":  # W is not needed any more: mark the delivered coordinates in it
            self.values.zero_()
            kernels.set_at(self.values, Padded(final, torch.ones_like(final, dtype=torch.float32)))
            sent = torch.where(kernels.values_at(self.values, sent) > 0, sent, -1)
        self.acc.replace_padded(Padded(sent, torch.zeros_like(sent, dtype=torch.float32)))

    def _send(
        self, blocks: Sequence[int], *, room: int | None = None, limit: int | None = None, divisor: int = 1
    ) -> tuple[torch.Tensor, Padded]:
        """Move the largest entries of ``blocks`` from W to a message, int32 ``[blocks, words]``.

        ``room`` replaces the room of a block, and ``limit`` its budget. Also returns what the receivers get, times
        ``divisor``. What rounding takes away stays in W.
        """
        cuts, budgets, gap = self.place.segments(blocks)
        if limit is not None:
            budgets = [limit]
        bounds = kernels.constant(cuts, self.acc.device)
        rows = Rows(self.place.encoding, bounds[:-1], self.place.widest, room or self.place.room, divisor=divisor)
        self.acc.selected += sum(min(rows.room, budget) for budget in budgets)
        taken = kernels.top_k_rows(
            self.values, bounds, kernels.constant(budgets, self.acc.device), rows.room, workspace=self.workspace
        )
        message, sent = rows.encode(taken, workspace=self.workspace)
        if rows.rounds:
            kernels.add_rows(self.values, sent, scale=-1.0, workspace=self.workspace)
        else:
            kernels.set_at(self.values, taken.indices)
        if self.residuals != "global":
            self.sent.append(taken.indices.reshape(-1))
        return message if gap is None else torch.cat([message[:gap], message[gap + 1 :]]), sent

    def _forward(self, entries: Padded, rows: Rows, share: float) -> tuple[torch.Tensor, Padded]:
        """Return the message with merged ``entries`` (``[1, room]``), and what its receivers get.

        W gets ``share`` times what rounding takes away.
        """
        message, sent = rows.encode(entries, workspace=self.workspace)
        if rows.rounds:
            _add_rest(self.values, entries, sent, share, self.workspace)
        return message, sent

    def _largest(self, union: Padded) -> Padded:
        """Truncate the ``union`` of the teams' entries to the budget of the block, ``[1, room]``."""
        # Made on the device: the room changes with h, and the host would wait for the copy of a new constant.
        bounds = torch.arange(0, union.room + 1, union.room, dtype=torch.int32, device=self.acc.device)
        budget = kernels.constant((self.place.budget,), self.acc.device)
        return kernels.top_k_rows(
            union.values, bounds, budget, self.place.room, indices=union.indices, workspace=self.workspace
        )

    def _rows(self, blocks: Sequence[int], *, room: int | None = None, divisor: int = 1) -> Rows:
        """Return the layout of messages that hold one row for each of ``blocks``."""
        lows = kernels.constant([self.place.cuts[b] for b in blocks], self.acc.device)
        return Rows(self.place.encoding, lows, self.place.widest, room or self.place.room, divisor=divisor)

    def _read(self, rows: Rows, message: torch.Tensor) -> Padded:
        """Return the entries of a received message, one row for each block."""
        entries, malformed = rows.decode(message.view(-1, rows.words), workspace=self.workspace)
        self.verdict.check_messages(malformed)
        return entries


def first_room(place: Place, h: int) -> int:
    """Return the entries that each team sends in B-SAG: ``h``, or before the first step the largest first h."""
    return h or fewest(place.room, place.teams)


def static_forecast(place: Place, h: int, recursive: bool) -> Forecast:
    """Return the exact traffic of one step. ``h`` is that of B-SAG, and 0 before the first step."""
    world_size, size, teams = place.world_size, place.team_size, place.teams
    lows = torch.zeros(1, dtype=torch.int32)

    def words(room: int) -> int:
        return Rows(place.encoding, lows, place.widest, room).words

    within = both(cost.bruck(words(place.room), size))
    phases = {"reduce-scatter": within, "all-gather": within}
    if teams == 1:
        phases["all-gather"] = both(cost.all_gather(words(place.room), cost.WORD, world_size))
    elif recursive:
        rounds = cost.log2(teams)
        phases["merge"] = both(cost.messages(rounds, rounds * words(place.room)))
    else:
        phases["merge"] = both(cost.bruck(words(first_room(place, h)), teams))
    bruck = teams > 1 and not recursive
    return with_verdict(Forecast(phases), world_size, 1 + bruck)


def _add_rest(values: torch.Tensor, entries: Padded, sent: Padded, share: float, workspace: Workspace) -> None:
    """Add ``share`` times ``entries`` less what was ``sent`` of them, rounded, to ``values`` (fp32 ``[n]``)."""
    held = kernels.values_at(values, entries.indices)
    kernels.set_at(values, entries)
    kernels.add_rows(values, sent, scale=-1.0, workspace=workspace)
    rest = kernels.values_at(values, entries.indices)
    left = held + (rest if share == 1.0 else share * rest)
    kernels.set_at(values, entries._replace(values=left))


def _add_truncated(values: torch.Tensor, union: Padded, kept: Padded, share: float, workspace: Workspace) -> None:
    """Add ``share`` times the entries of ``union``, but those that were ``kept``, to ``values`` (fp32 ``[n]``)."""
    before = kernels.values_at(values, kept.indices)
    kernels.add_rows(values, union, scale=share, workspace=workspace)
    kernels.set_at(values, kept._replace(values=before))
