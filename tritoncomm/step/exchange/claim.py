"""The one confirmation of a step: what ranks tell each other when they have the mean, and what must be equal on all."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from tritoncomm.errors import ProtocolMismatchError
from tritoncomm.scheduler.process_group import ProcessGroupScheduler, is_distributed, take_suspects
from tritoncomm.scheduler.rounds import AllReduce, Pattern
from tritoncomm.step.agree import LOADED, UPDATES, UPDATES_ADVICE, differences, option_numbers, worded
from tritoncomm.step.agree.number import number_of_text
from tritoncomm.step.agree.replica import Replica
from tritoncomm.step.agree.setup import labelled
from tritoncomm.step.exchange.vector import VectorExchange
from tritoncomm_kernels.devices import is_asynchronous

logger = logging.getLogger("tritoncomm")

# What to do if a field differs whose name begins with this. For others: _SAME_OPTIONS.
_ADVICE = {
    f"{LOADED} of": (
        "Since the last exchange, ranks have loaded weights that differ (a number stands for their bits, 0 for none): "
        "load the same checkpoint of the model and the optimizer on all"
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


class Claim(NamedTuple):
    """What this rank says of a step.

    Attributes:
        vectors: The vectors of the step.
        parameters: The parameters of all vectors, in an order that is the same on all ranks.
        optimizer: The optimizer that steps by the exchange. Numbers among its options must be equal.
        updates: The completed updates of this rank.
        is_stopped: Whether an error has stopped an update.
        presence: Which parameters had no gradient on any rank, as far as is known.
        replica: What is compared in this step beside. None in most steps.
        steps: Number of applied steps.
        group: The ranks with the same shard.
        shard: A number of this shard.
        all_shards: Scheduler of the ranks of all shards. None if the model has no shards.
        rejects: Whether this rank has rejected the step. It then has no mean, and compares no ``replica``.
    """

    vectors: Sequence[VectorExchange]
    parameters: Sequence[torch.Tensor]
    optimizer: torch.optim.Optimizer
    updates: int
    is_stopped: bool
    presence: Presence
    replica: Replica | None
    steps: int
    group: dist.ProcessGroup | None
    shard: int
    all_shards: ProcessGroupScheduler | None
    rejects: bool

    @property
    def _scheduler(self) -> ProcessGroupScheduler | None:
        """The scheduler of all ranks that confirm the step."""
        return self.all_shards or self.vectors[-1].scheduler

    def confirm(self) -> tuple[bool, bool]:
        """Return when all ranks have called this for the same step.

        The answers are whether any rank has rejected the step, and whether any has gradients of other parameters than
        in the last step. Without the wait, some ranks could apply a step that other ranks have lost.

        Raises:
            ProtocolMismatchError: Ranks with the same shard differ, or have received a wrong message; or not all have
                completed the same updates, or one has stopped. All ranks raise it, also if some have rejected the step.
        """
        scheduler, last = self._scheduler, self.vectors[-1]
        total = Vote(int(self.rejects), int(self.presence.is_new))
        if scheduler is not None and scheduler.world_size > 1:
            schedulers = [vector.scheduler for vector in self.vectors if vector.scheduler is not None]
            compared = None if self.replica is None or self.rejects else self.replica.digest()
            places = [(each.step, each.stamp) for each in schedulers]
            state = (self.presence.kinds(self.parameters), option_numbers(self.optimizer), compared)
            claim = lead(scheduler.rank, scheduler.world_size) * number_of_text(repr(self._updates))
            claim += lead(last.rank, last.world_size) * number_of_text(repr((self.shard, places, state)))
            total = Vote(total.rejects, total.raises, claim)
            found = vote(total, scheduler.device, [*dict.fromkeys((scheduler, *schedulers))])
            total = last.run(found) if self.all_shards is None else self.all_shards.run(found)
        if self.is_stopped or total.claim:
            error = self._error(is_rejected=bool(total.rejects))
            if error is not None:
                raise error
        if self.replica is not None and not total.rejects:
            self.replica.agreed = self.steps
        return bool(total.rejects), bool(total.raises)

    @property
    def _updates(self) -> object:
        return f"{self.updates}, and one that stopped" if self.is_stopped else self.updates

    def _error(self, *, is_rejected: bool) -> ProtocolMismatchError | None:
        """Return why ranks disagree. All ranks that confirm the step call this together.

        If some have rejected a step in which the others compare replicas, they may differ in that alone. Return None.
        """
        scheduler, device = self._scheduler, self.vectors[0].device
        step = "the step" if scheduler is None else scheduler.last_step
        group, found = self.group if self.all_shards is None else self.all_shards.group, dict[str, str]()
        if is_distributed():
            found = differences({"last step": step, UPDATES: self._updates}, group, device)
        if self.is_stopped or UPDATES in found:
            reason = f"ranks differ: {worded(found)}" if found else "an update has stopped on all ranks"
            return ProtocolMismatchError(f"{step} was rejected, because {reason}: {UPDATES_ADVICE}")
        found = found or differences(self._compared(), group, device, self.shard)
        reason = ""
        if found:
            advice = (text for begin, text in _ADVICE.items() if any(name.startswith(begin) for name in found))
            reason = f"ranks differ: {worded(found)}. {next(advice, _SAME_OPTIONS)}"
        elif self.replica is not None:
            if is_rejected:
                return None
            reason = self.replica.difference(group, device, self.steps, self.shard)
        if reason:
            return ProtocolMismatchError(f"{step} was rejected, and nothing has changed, because {reason}")
        return ProtocolMismatchError(
            f"{step} was rejected: another rank finished another one. Step the same optimizers in the same order on "
            "all ranks"
        )

    def _compared(self) -> dict[str, Any]:
        names = {id(each): vector.name_of(each) for vector in self.vectors for each in vector.parameters}
        return self.presence.fields(self.parameters, names) | option_numbers(self.optimizer)


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


_NONE: frozenset[int] = frozenset()


def resting(optimizer: torch.optim.Optimizer) -> frozenset[int]:
    """Return the ids of parameters whose group has a learning rate of 0, while that of another group is not.

    They are frozen by their rate, which all ranks compare. What is delivered to them would be lost to the others.
    """
    rates = [(group, group["lr"]) for group in optimizer.param_groups if group.get("lr") is not None]
    if all(float(rate) == 0 for _, rate in rates):
        return _NONE
    return frozenset(id(each) for group, rate in rates if float(rate) == 0 for each in group["params"])


class Presence:
    """Which parameters have no gradient in a step. Parameters are given by their ids.

    Attributes:
        absent: Those without gradient on any rank in the last confirmed step. They are equal on all ranks.
        waiting: Those to which this rank contributes nothing in this step, not even its residual. It has no gradient of
            them, and no rank had one in the step before. What nobody uses would otherwise be selected in every step.
            When another rank has a gradient again, the residual of this one waits for one step more.
    """

    def __init__(self) -> None:
        self.absent = self.waiting = self._missing = _NONE
        self._has_warned = False

    def begin(
        self, parameters: Sequence[torch.Tensor], *, leaves_none: bool = False, resting: Collection[int] = ()
    ) -> None:
        """Begin a step of ``parameters``, of which some have no ``.grad``, were frozen, or are ``resting`` (ids).

        With ``leaves_none``, these take part, too.
        """
        without = [
            key
            for each, key in zip(parameters, map(id, parameters), strict=True)
            if each.grad is None or not each.requires_grad or key in resting
        ]
        self._missing = self.absent if leaves_none else frozenset(without)
        self.waiting = _NONE if leaves_none else self._missing & self.absent

    @property
    def is_new(self) -> bool:
        """True if this rank lacks other gradients than all ranks did in the last step."""
        return self._missing != self.absent

    def agree(self, parameters: Sequence[torch.Tensor], vector: VectorExchange) -> None:
        """Find those of ``parameters`` that have no gradient on any rank of ``vector``, which all call this."""
        missing = self._missing
        if vector.world_size == 1:
            self.absent = missing
            return

        def counting() -> Pattern[list[int]]:
            flags = torch.tensor([id(each) in missing for each in parameters], dtype=torch.int32, device=vector.device)
            counts: list[int] = (yield AllReduce("missing gradients", flags)).tolist()
            return counts

        pairs = zip(parameters, vector.run(counting()), strict=True)
        self.absent = frozenset(id(each) for each, count in pairs if count == vector.world_size)

    def warn_once(self, step: int, *, speaks: bool) -> None:
        """Log once, on the rank that ``speaks``, that no rank had a gradient in the step with this number."""
        if self._has_warned or not speaks:
            return
        self._has_warned = True
        logger.warning(
            "no rank has a gradient of any parameter in step %d, which therefore changes nothing: call backward() "
            "before step(). With FSDP2, call set_requires_gradient_sync(True) before the last backward pass of each "
            "step, because .grad is None without it",
            step,
        )

    def kinds(self, parameters: Sequence[torch.Tensor]) -> list[int]:
        """Return numbers that must be equal on all ranks: which ``parameters`` are frozen, and which were absent."""
        keys = map(id, parameters)
        return [2 * (key in self.absent) + each.requires_grad for each, key in zip(parameters, keys, strict=True)]

    def fields(self, parameters: Sequence[torch.Tensor], names: Mapping[int, str]) -> dict[str, Any]:
        """Return what :meth:`kinds` says, by name. ``names`` are those of the parameters, by their ids."""
        named = labelled([(each, names[id(each)]) for each in parameters])
        frozen = {f"frozen state of {name}": not each.requires_grad for each, name in named}
        return frozen | {f"missing gradient of {name} before": id(each) in self.absent for each, name in named}

    def positions(self, parameters: Iterable[torch.Tensor]) -> list[int]:
        """Return the positions in ``parameters`` of those that were absent."""
        return [position for position, each in enumerate(parameters) if id(each) in self.absent]

    def set(self, parameters: Sequence[torch.Tensor], positions: Iterable[int]) -> None:
        """Let those of ``parameters`` at these positions be absent."""
        self.absent = frozenset(id(parameters[position]) for position in positions)
