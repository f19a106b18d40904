"""The confirmation of a step by the ranks of all shards: each says a few words, and all count them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from tritoncomm.scheduler.process_group import ProcessGroupScheduler, take_suspects
from tritoncomm.scheduler.rounds import AllReduce, Pattern
from tritoncomm.step import agree


class Votes(NamedTuple):
    """What a rank, or the number of ranks that, say of a step.

    No rank gets more than one update ahead of another, because it is found out then. The remainder of the number of
    updates by 3 tells whether all have completed as many.
    """

    rejects: int
    is_stopped: int
    updates_leave_1: int
    updates_leave_2: int
    raises: int


def vote(
    rejected: bool,
    stepping: agree.Stepping,
    suspects: list[torch.Tensor],
    world_size: int,
    device: torch.device,
    *,
    raises: bool = False,
) -> Pattern[tuple[bool, bool, bool, bool]]:
    """Return whether any rank has ``rejected`` the step or counted ``suspects``, and whether all updates are alike.

    The last answer is whether any rank ``raises`` a flag. ``suspects`` are int64 ``[1]``. Updates are alike if none has
    stopped, and all ranks have completed as many.
    """
    remainder = stepping.updates % 3
    own = Votes(rejected, stepping.is_stopped, remainder == 1, remainder == 2, raises)  # noqa: PLR2004 - see Votes
    # Each word is filled by a kernel, because the host would wait for a GPU to copy them.
    words = torch.stack([torch.full((), int(each), dtype=torch.int64, device=device) for each in own])
    if device.type != "cpu":  # headers are counted on GPUs only, and all ranks have the same kind of device
        words = torch.cat([words, *(suspects or [words.new_zeros(1)])])
    counts = (yield AllReduce("commit", words)).tolist()
    total = Votes(*counts[: len(own)])
    alike = not total.is_stopped and all(n in (0, world_size) for n in (total.updates_leave_1, total.updates_leave_2))
    return bool(total.rejects), any(counts[len(own) :]), alike, bool(total.raises)


def confirm_shards(
    all_shards: ProcessGroupScheduler,
    stepping: agree.Stepping,
    schedulers: Sequence[ProcessGroupScheduler],
    *,
    rejected: bool,
    raises: bool,
) -> tuple[bool, bool]:
    """Return whether any rank of ``all_shards``, which has all shards, has ``rejected`` a step, or ``raises`` a flag.

    ``schedulers`` are those of the vectors of the step.

    Raises:
        ProtocolMismatchError: Ranks have not completed the same updates, or one has received a wrong message.
    """
    suspects = take_suspects(schedulers)
    found = vote(rejected, stepping, suspects, all_shards.world_size, all_shards.device, raises=raises)
    is_rejected, suspicious, alike, is_raised = all_shards.run(found)
    if suspicious:
        raise all_shards.suspicion()
    if not alike:  # options may differ between shards
        fields, group, device = stepping.update_fields, all_shards.group, all_shards.device
        raise agree.rejection(all_shards.last_step, fields, stepping, group, device)
    return is_rejected, is_raised
