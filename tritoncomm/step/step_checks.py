"""Checks of every step: all ranks use the same options, and have completed the same updates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from tritoncomm.errors import ProtocolMismatchError
from tritoncomm.scheduler.process_group import is_distributed
from tritoncomm.scheduler.rounds import AllReduce, Pattern
from tritoncomm.step import setup_checks

_RANKS = 1 << 15  # above the number of ranks


class Stepping(NamedTuple):
    """An optimizer that steps by the means of an exchange, its completed updates, and whether the last one stopped."""

    optimizer: torch.optim.Optimizer
    updates: int
    is_stopped: bool


def options_and_updates(stepping: Stepping) -> str:
    """Return what must be equal on all ranks as a text: updates, and numbers among options, such as learning rates.

    Options are those of the optimizer's class. Others, which users add to groups, may differ between ranks. The host
    waits for no GPU: the value of an option that is a tensor on a GPU is left out.
    """
    names = sorted(set(getattr(stepping.optimizer, "defaults", ())))
    options = [[_numbers(group.get(name)) for name in names] for group in stepping.optimizer.param_groups]
    return repr((options, stepping.updates, stepping.is_stopped))


def update_fields(stepping: Sequence[Stepping]) -> dict[str, Any]:
    """Return the completed updates of the optimizers, by name."""
    return {
        setup_checks.UPDATES + _of(number, stepping): f"{one.updates}, and one that stopped"
        if one.is_stopped
        else one.updates
        for number, one in enumerate(stepping)
    }


def option_fields(stepping: Sequence[Stepping]) -> dict[str, Any]:
    """Return the options that :func:`options_and_updates` compares, by name."""
    fields: dict[str, Any] = {}
    for number, (optimizer, *_) in enumerate(stepping):
        for position, group in enumerate(optimizer.param_groups):
            for name in getattr(optimizer, "defaults", ()):
                value = _numbers(group.get(name))
                text = f"{name} of parameter group {position}{_of(number, stepping)}"
                fields[text] = tuple(value) if isinstance(value, list) else value
    return fields


def _of(number: int, stepping: Sequence[Stepping]) -> str:
    return f" of optimizer {number}" if len(stepping) > 1 else ""


def rejection(
    step: str,
    fields: Mapping[str, Any],
    stepping: Sequence[Stepping],
    group: dist.ProcessGroup | None,
    device: torch.device | None,
) -> ProtocolMismatchError:
    """Return the error about ``step``, which was rejected. All ranks of ``group`` call this together.

    It names those of ``fields`` that differ between ranks.
    """
    found = setup_checks.differences(fields, group, device) if is_distributed() else {}
    differ = f"ranks differ: {'; '.join(found.values())}"
    if any(one.is_stopped for one in stepping) or any(name.startswith(setup_checks.UPDATES) for name in found):
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


def _numbers(value: object) -> object:
    if isinstance(value, torch.Tensor):
        return float(value) if value.device.type == "cpu" and value.numel() == 1 else None
    if isinstance(value, Real):
        return float(value)
    return [_numbers(each) for each in value] if isinstance(value, (list, tuple)) else None


def vote(
    rejected: bool,
    stepping: Sequence[Stepping],
    suspects: list[torch.Tensor],
    world_size: int,
    device: torch.device,
) -> Pattern[tuple[bool, bool, bool]]:
    """Return whether any rank has ``rejected`` the step or counted ``suspects``, and whether all updates are alike.

    ``suspects`` are int64 ``[1]``. Updates are alike if none has stopped, and the optimizer with the most completed
    updates has as many on all ranks.
    """
    stopped = any(one.is_stopped for one in stepping)
    # No rank gets more than one update ahead of another, because it is found out then.
    remainder = max((one.updates for one in stepping), default=0) % 3
    properties = (rejected, stopped, *(remainder == ahead for ahead in (1, 2)))
    # One word that a kernel fills, because the host would wait for a GPU to copy several. It counts ranks by their
    # properties, whose sums do not mix. All ranks conclude the same from the counts.
    own = sum(holds * _RANKS**place for place, holds in enumerate(properties))
    words = torch.full((1,), own, dtype=torch.int64, device=device)
    if device.type != "cpu":  # headers are counted on GPUs only, and all ranks have the same kind of device
        words = torch.cat([words, *(suspects or [words.new_zeros(1)])])
    total, *suspicious = (yield AllReduce("commit", words)).tolist()
    of_rejected, of_stopped, *of_ahead = (total // _RANKS**place % _RANKS for place in range(len(properties)))
    alike = not of_stopped and all(count in (0, world_size) for count in of_ahead)
    return bool(of_rejected), any(suspicious), alike
