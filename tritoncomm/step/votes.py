"""The confirmation of a step: what ranks tell each other when they have the mean, and what must be equal on all."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist

from tritoncomm.scheduler.process_group import ProcessGroupScheduler, take_suspects
from tritoncomm.scheduler.rounds import AllReduce, Pattern
from tritoncomm.step import agree
from tritoncomm.step.presence import Presence
from tritoncomm.step.replicas import Replica
from tritoncomm.step.vector import VectorExchange


class Confirmation(NamedTuple):
    """What this rank says of a step.

    Attributes:
        vectors: The vectors whose mean it has.
        parameters: The parameters of all vectors, in an order that is the same on all ranks.
        stepping: Its completed updates, and the options of its optimizer.
        presence: Which parameters had no gradient on any rank, as far as is known.
        replica: What is compared in this step beside. None in most steps.
        group: The ranks with the same shard.
        steps: Number of applied steps.
    """

    vectors: Sequence[VectorExchange]
    parameters: Sequence[torch.Tensor]
    stepping: agree.Stepping
    presence: Presence
    replica: Replica | None
    group: dist.ProcessGroup | None
    steps: int

    def within_group(self) -> bool:
        """Return when all ranks of :attr:`group` have called this for the same step.

        The answer is whether any rank has gradients of other parameters than in the last step.

        Raises:
            ProtocolMismatchError: Ranks differ, or one has stopped. All ranks raise it.
        """
        *others, last = self.vectors
        replica, presence, stepping, device = self.replica, self.presence, self.stepping, self.vectors[0].device
        text = presence.kinds(self.parameters) + stepping.text + (f" {replica.digest()}" if replica is not None else "")
        alike, news = last.confirm(text, others, raises=presence.is_new)
        if not alike or stepping.is_stopped:
            step = "the step" if last.scheduler is None else last.scheduler.last_step
            names = {id(p): vector.name_of(p) for vector in self.vectors for p in vector.parameters}
            fields = presence.fields(self.parameters, names) | stepping.update_fields | stepping.option_fields
            values = (
                None if replica is None else partial(replica.difference, self.group, self.group, device, self.steps)
            )
            raise agree.rejection(step, {"last step": step} | fields, stepping, self.group, device, values)
        if replica is not None:
            replica.agreed = self.steps
        return news

    def of_all_shards(self, all_shards: ProcessGroupScheduler, *, rejected: bool) -> tuple[bool, bool]:
        """Do the same as :meth:`within_group` for the ranks of ``all_shards``.

        The first answer is whether any of them has ``rejected`` the step.
        """
        schedulers = [vector.scheduler for vector in self.vectors if vector.scheduler is not None]
        raises = self.presence.is_new
        is_rejected, news = confirm_shards(all_shards, self.stepping, schedulers, rejected=rejected, raises=raises)
        if self.replica is not None and not is_rejected:
            self.replica.confirm_shards(all_shards, self.group, self.steps)
        return is_rejected, news


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
