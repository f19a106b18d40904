"""Checks of every step: all ranks use the same options, and have completed the same updates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from tritoncomm.errors import NonFiniteError, ProtocolMismatchError
from tritoncomm.scheduler.process_group import ProcessGroupScheduler, is_distributed, take_suspects
from tritoncomm.scheduler.rounds import AllReduce, Pattern
from tritoncomm.step import setup_checks


class Stepping(NamedTuple):
    """The optimizer that steps by an exchange, its completed updates, and whether an error has stopped one."""

    optimizer: torch.optim.Optimizer
    updates: int
    is_stopped: bool

    @property
    def text(self) -> str:
        """What must be equal on all ranks: updates, and numbers among the options, such as learning rates.

        Options are those of the optimizer's class. Others, which users add to groups, may differ between ranks. The
        host waits for no GPU: the value of an option that is a tensor on a GPU is left out.
        """
        names = sorted(set(getattr(self.optimizer, "defaults", ())))
        options = [[_numbers(group.get(name)) for name in names] for group in self.optimizer.param_groups]
        return repr((options, self.updates, self.is_stopped))

    @property
    def update_fields(self) -> dict[str, Any]:
        """The completed updates, by name."""
        return {setup_checks.UPDATES: f"{self.updates}, and one that stopped" if self.is_stopped else self.updates}

    @property
    def option_fields(self) -> dict[str, Any]:
        """The options in :attr:`text`, by name."""
        fields: dict[str, Any] = {}
        for position, group in enumerate(self.optimizer.param_groups):
            for name in getattr(self.optimizer, "defaults", ()):
                value = _numbers(group.get(name))
                fields[f"{name} of parameter group {position}"] = tuple(value) if isinstance(value, list) else value
        return fields


def _numbers(value: object) -> object:
    if isinstance(value, torch.Tensor):
        return float(value) if value.device.type == "cpu" and value.numel() == 1 else None
    if isinstance(value, Real):
        return float(value)
    return [_numbers(each) for each in value] if isinstance(value, (list, tuple)) else None


class Votes(NamedTuple):
    """What a rank, or the number of ranks that, say of a step.

    No rank gets more than one update ahead of another, because it is found out then. The remainder of the number of
    updates by 3 tells whether all have completed as many.
    """

    rejects: int
    is_stopped: int
    updates_leave_1: int
    updates_leave_2: int


def vote(
    rejected: bool, stepping: Stepping, suspects: list[torch.Tensor], world_size: int, device: torch.device
) -> Pattern[tuple[bool, bool, bool]]:
    """Return whether any rank has ``rejected`` the step or counted ``suspects``, and whether all updates are alike.

    ``suspects`` are int64 ``[1]``. Updates are alike if none has stopped, and all ranks have completed as many.
    """
    remainder = stepping.updates % 3
    own = Votes(rejected, stepping.is_stopped, remainder == 1, remainder == 2)  # noqa: PLR2004 - see Votes
    # Each word is filled by a kernel, because the host would wait for a GPU to copy them.
    words = torch.stack([torch.full((), int(each), dtype=torch.int64, device=device) for each in own])
    if device.type != "cpu":  # headers are counted on GPUs only, and all ranks have the same kind of device
        words = torch.cat([words, *(suspects or [words.new_zeros(1)])])
    counts = (yield AllReduce("commit", words)).tolist()
    total = Votes(*counts[: len(own)])
    alike = not total.is_stopped and all(n in (0, world_size) for n in (total.updates_leave_1, total.updates_leave_2))
    return bool(total.rejects), any(counts[len(own) :]), alike


def confirm_shards(
    verdict: ProcessGroupScheduler, stepping: Stepping, schedulers: Sequence[ProcessGroupScheduler], *, rejected: bool
) -> bool:
    """Return whether any rank of ``verdict``, which has all shards, has ``rejected`` a step.

    ``schedulers`` are those of the vectors of the step.

    Raises:
        ProtocolMismatchError: Ranks have not completed the same updates, or one has received a wrong message.
    """
    suspects = take_suspects(schedulers)
    found = vote(rejected, stepping, suspects, verdict.world_size, verdict.device)
    is_rejected, suspicious, alike = verdict.run(found)
    if suspicious:
        raise verdict.suspicion()
    if not alike:  # options may differ between shards
        raise rejection(verdict.last_step, stepping.update_fields, stepping, verdict.group, verdict.device)
    return is_rejected


def rejection(
    step: str,
    fields: Mapping[str, Any],
    stepping: Stepping,
    group: dist.ProcessGroup | None,
    device: torch.device | None,
) -> ProtocolMismatchError:
    """Return the error about ``step``, which was rejected. All ranks of ``group`` call this together.

    It names those of ``fields`` that differ between ranks.
    """
    found = setup_checks.differences(fields, group, device) if is_distributed() else {}
    differ = f"ranks differ: {'; '.join(found.values())}"
    if stepping.is_stopped or setup_checks.UPDATES in found:
        reason = differ if found else "an update has stopped on all ranks"
        return ProtocolMismatchError(f"{step} was rejected, because {reason}: {setup_checks.UPDATES_ADVICE}")
    if found:
        return ProtocolMismatchError(
            f"{step} was rejected, and nothing has changed, because {differ}. Use the same options and freeze the same "
            "parameters on all ranks; a schedule that follows a loss needs its mean over ranks. Then repeat the step"
        )
    return ProtocolMismatchError(
        f"{step} was rejected: another rank finished another one. Step the same optimizers in the same order on all "
        "ranks"
    )


def naming(
    error: NonFiniteError, at_fault: str, group: dist.ProcessGroup | None, device: torch.device | None
) -> NonFiniteError:
    """Return ``error``, or one that names the ranks and what is ``at_fault`` on each. All ranks of ``group`` call this.

    ``at_fault`` is empty on a rank without NaN and Inf.
    """
    told = [{"at fault": at_fault}]
    if is_distributed():
        told = setup_checks.gather(told[0], group, device)
    bad = {rank: fields["at fault"] for rank, fields in enumerate(told) if fields["at fault"]}
    if not bad:
        return error
    named = "; ".join(f"rank {rank}: {text}" for rank, text in bad.items())
    return NonFiniteError(f"NaN or Inf in the gradients of {named}; nothing was applied", bad)
