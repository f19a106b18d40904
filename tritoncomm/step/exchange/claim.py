"""The one confirmation of a step: what ranks tell each other when they have the mean, and what must be equal on all."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

import torch

from tritoncomm.scheduler.process_group import ProcessGroupScheduler, take_suspects
from tritoncomm.scheduler.rounds import AllReduce, Pattern
from tritoncomm.step.agree import LOADED
from tritoncomm_kernels.devices import is_asynchronous

# What to do if a field differs whose name begins with this. For others: _SAME_OPTIONS.
_ADVICE = {
    f"{LOADED} of": (
        "Since the last exchange, weights were loaded that differ between ranks (a number stands for their bits, 0 for "
        "none), or changed outside of step(), as by Embedding(max_norm=...) or by another optimizer with the same "
        "parameters: load the same checkpoint of the model and the optimizer on all, and let step() alone change it"
    ),
    "local_steps of": (
        "All ranks call step() equally often before they exchange, a rank without a batch without gradients: let the "
        "others catch up, then repeat the exchange"
    ),
}
_SAME_OPTIONS = (
    "Use the same options and freeze the same parameters on all ranks; a schedule that follows a loss needs its mean "
    "over ranks. Then repeat the step"
)

_HALF = 32  # bits


def advice(found: Collection[str]) -> str:
    """Return what to do if fields with the names ``found`` differ between ranks."""
    return next(
        (text for begin, text in _ADVICE.items() if any(name.startswith(begin) for name in found)), _SAME_OPTIONS
    )


class Vote(NamedTuple):
    """What a rank says of a step in numbers, or the sum over all ranks.

    Attributes:
        rejects: 1 if it has rejected the step.
        raises: 1 if it raises a flag.
        claim: The sum of numbers of what it has in common with others, each times :func:`lead` among these.
    """

    rejects: int = 0
    raises: int = 0
    claim: int = 0


def lead(rank: int, world_size: int) -> int:
    """Return a factor of numbers. Their sum over ranks is zero if they are equal, and otherwise by chance alone."""
    return 1 if rank else 1 - world_size


def vote(own: Vote, device: torch.device, schedulers: Sequence[ProcessGroupScheduler] = ()) -> Pattern[Vote]:
    """Return the sum of the votes of all ranks. ``schedulers`` are those of the vote and of the vectors of the step.

    Raises:
        ProtocolMismatchError: A GPU has received a wrong header. All ranks raise it.
    """
    # Each word is filled by a kernel, because the host would wait for a GPU to copy them.
    told = ((own.rejects << _HALF) + own.raises, own.claim)
    words = [torch.full((1,), each, dtype=torch.int64, device=device) for each in told]
    if is_asynchronous(device):  # headers are counted on GPUs only, and all ranks have the same kind of device
        words += take_suspects(schedulers) or [torch.zeros_like(words[0])]
    flags, claim, *suspects = (yield AllReduce("confirm", torch.cat(words))).tolist()
    if any(suspects):
        raise schedulers[0].suspicion()
    return Vote(flags >> _HALF, flags % (1 << _HALF), claim)
