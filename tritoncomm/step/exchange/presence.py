"""Which parameters have a gradient in a step, and which of them can change in it."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from tritoncomm.scheduler.rounds import AllReduce, Pattern
from tritoncomm.step.agree.setup import labelled
from tritoncomm.step.exchange.vector import VectorExchange

logger = logging.getLogger("tritoncomm")

_NONE: frozenset[int] = frozenset()


def without_rate(optimizer: torch.optim.Optimizer) -> frozenset[int]:
    """Return the ids of parameters whose group has a learning rate of 0, while that of another group is not.

    They are frozen by their rate, which all ranks compare. What is delivered to them would be lost to the others.
    """
    if len(optimizer.param_groups) == 1:  # a rate on a GPU is not read
        return _NONE
    rates = [(group, group["lr"]) for group in optimizer.param_groups if group.get("lr") is not None]
    if all(float(rate) == 0 for _, rate in rates):
        return _NONE
    return frozenset(id(each) for group, rate in rates if float(rate) == 0 for each in group["params"])


def frozen(optimizer: torch.optim.Optimizer, owned: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> frozenset[int]:
    """Return the ids of the tensors whose owners cannot change in a step of ``optimizer``: nothing applies their mean.

    Owners require no gradients, or have a learning rate of 0 while others have one. ``owned`` are pairs of a tensor and
    its owner, which is the parameter of an anchor, or the tensor itself.
    """
    unrated = without_rate(optimizer)
    return frozenset(id(each) for each, owner in owned if not owner.requires_grad or id(owner) in unrated)


class Presence:
    """Which parameters have no gradient in a step. Parameters are given by their ids.

    Attributes:
        absent: Those without gradient on any rank in the last confirmed step. They are equal on all ranks.
        waiting: Those whose residual takes no part in this step on this rank: the ``resting`` ones, and those that it
            leaves out, and all ranks did in the step before. What nobody uses would otherwise be selected in every
            step. When another rank has a gradient again, the residual of this one waits for one step more.
        resting: Those whose residual is afterwards what it was before, although their gradient is averaged: they have
            a learning rate of 0, which all ranks have in common.
    """

    def __init__(self) -> None:
        self.absent = self.waiting = self.resting = self._missing = _NONE
        self._has_warned = False

    def begin(self, missing: frozenset[int], resting: frozenset[int] = _NONE) -> None:
        """Begin a step from which this rank leaves out what is ``missing`` (ids), and in which some are ``resting``."""
        self._missing, self.resting, self.waiting = missing, resting, missing & self.absent | resting

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
