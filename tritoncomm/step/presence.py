"""Which parameters have a gradient on any rank, and a rate. PyTorch leaves the others alone, and so do all ranks."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch

from tritoncomm.scheduler.rounds import AllReduce, Pattern
from tritoncomm.step.agree.setup import labelled
from tritoncomm.step.vector import VectorExchange

logger = logging.getLogger("tritoncomm")

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
        self, parameters: Iterable[torch.Tensor], *, leaves_none: bool = False, resting: Collection[int] = ()
    ) -> None:
        """Begin a step of ``parameters``, of which some have no ``.grad``, were frozen, or are ``resting`` (ids).

        With ``leaves_none``, these take part, too.
        """
        without = (
            id(each) for each in parameters if each.grad is None or not each.requires_grad or id(each) in resting
        )
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

    def kinds(self, parameters: Iterable[torch.Tensor]) -> str:
        """Return a text that must be equal on all ranks: which ``parameters`` are frozen, and which were absent."""
        return "".join(str(2 * (id(each) in self.absent) + each.requires_grad) for each in parameters)

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
