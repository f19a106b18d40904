"""Whether ranks that hold the same shard still hold the same values: parameters, and the state of the optimizer."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from numbers import Real
from typing import Any
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist

from tritoncomm.errors import ProtocolMismatchError
from tritoncomm.scheduler.process_group import ProcessGroupScheduler
from tritoncomm.scheduler.ranks import global_ranks
from tritoncomm.scheduler.rounds import AllGather, Pattern
from tritoncomm.step import agree
from tritoncomm.step.number import number_of_text, numbers
from tritoncomm.step.shards import has_bits

EVERY = 100  # updates from one comparison to the next
EARLY = (1, 10)  # and some before: what makes replicas differ usually does so in the first step

# Parameters that local steps train, by id: they differ between ranks from one exchange to the next. An optimizer of
# another part of the same model must not compare them.
_TRAINED_LOCALLY: WeakValueDictionary[int, torch.Tensor] = WeakValueDictionary()


def let_differ(parameters: Iterable[torch.Tensor]) -> None:
    """Let optimizers that do not hold these ``parameters`` leave them out when they compare the model."""
    _TRAINED_LOCALLY.update((id(parameter), parameter) for parameter in parameters)


class Replica:
    """The values on this rank that all ranks with the same shard must have in common.

    These are all parameters of the original ``optimizer``, its state, and other parameters of the module.

    Args:
        optimizer: The original optimizer.
        names: The name of each parameter of the optimizer that is not ``ignored``, or ``""``. Default: none has a name.
        others: Parameters of the module that the optimizer does not hold, each with its name.
        ignored: Ids of the parameters that are this rank's own, see :mod:`tritoncomm.step.ignored`. Default: none.

    Attributes:
        agreed: The number of steps after which all ranks had equal values, when they were compared last.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        names: Sequence[str] = (),
        others: Sequence[tuple[torch.Tensor, str]] = (),
        ignored: Collection[int] = (),
    ) -> None:
        self._optimizer, self._ignored = optimizer, ignored
        self._names = {id(parameter): name for parameter, name in zip(self._held, names, strict=False)}
        self._others = list(others)
        self.agreed = 0

    @property
    def _held(self) -> list[torch.Tensor]:
        every = agree.named_parameters(self._optimizer)
        return [parameter for parameter, _ in every if id(parameter) not in self._ignored]

    @staticmethod
    def is_due(updates: int) -> bool:
        """Return True if ranks compare their values in the step behind this number of ``updates``."""
        return updates % EVERY == 0 or updates in EARLY

    def figures(self) -> dict[str, int]:
        """Return the number of each value, by its name. The host waits for a GPU once."""
        names, values = zip(*self._values(), strict=True)
        return dict(zip(names, numbers(values), strict=True))

    def _values(self) -> Iterator[tuple[str, torch.Tensor | float]]:
        """Return parameters, and then numbers and tensors of the state, each with its name."""
        named: dict[str, torch.Tensor] = {}
        for number, parameter in enumerate(self._held):
            position = f"parameter {number} of shape {tuple(parameter.shape)}"
            name = self._names.get(id(parameter)) or position
            named[f"{name} ({position})" if name in named else name] = parameter  # of two modules, names may be equal
        state = self._optimizer.state
        yield from ((name, parameter) for name, parameter in named.items() if has_bits(parameter))
        for each, name in self._others:
            if id(each) not in _TRAINED_LOCALLY:
                yield f"{name} (not held)" if name in named else name, each
        for name, parameter in named.items():
            if parameter in state:  # to read a state that is missing adds an empty one
                yield from _leaves(state[parameter], f"of {name}")

    def digest(self) -> int:
        """Return a digest of all figures."""
        return number_of_text(repr(self.figures()))

    def confirm_shards(self, all_shards: ProcessGroupScheduler, group: dist.ProcessGroup | None, steps: int) -> None:
        """Return if values are equal within each group of ranks with the same shard, after ``steps`` steps.

        ``group`` is the one of this rank. All ranks of ``all_shards`` call this together.

        Raises:
            ProtocolMismatchError: Values differ. All ranks raise it.
        """

        def gathering() -> Pattern[bool]:
            own = torch.tensor([_first_rank(group), self.digest()], device=all_shards.device)
            everybody = (yield AllGather("compare", own)).tolist()
            return len({tuple(each) for each in everybody}) == len({first_rank for first_rank, _ in everybody})

        if not all_shards.run(gathering(), new_step=False):
            found = self.difference(group, all_shards.group, all_shards.device, steps)
            raise ProtocolMismatchError(
                f"{all_shards.last_step} was rejected, and nothing has changed, because {found}"
            )
        self.agreed = steps

    def difference(
        self,
        group: dist.ProcessGroup | None,
        everybody: dist.ProcessGroup | None,
        device: torch.device | None,
        steps: int,
    ) -> str:
        """Return which values differ between ranks with the same shard after ``steps`` steps. Empty if none does.

        All ranks of ``everybody``, which are those of all shards, call this together. ``group`` is the one of this
        rank.
        """
        shard, figures = _first_rank(group), self.figures()
        told = agree.all_gather({"shard": shard, "digest": number_of_text(repr(figures))}, everybody, device)
        shards = {each["shard"] for each in told.values()}
        if len({(each["shard"], each["digest"]) for each in told.values()}) == len(shards):
            self.agreed = steps
            return ""
        told = agree.all_gather({"shard": shard, "figures": figures}, everybody, device)
        for shard in dict.fromkeys(each["shard"] for each in told.values()):
            alike = {rank: each["figures"] for rank, each in told.items() if each["shard"] == shard}
            names = list(dict.fromkeys(name for of_rank in alike.values() for name in of_rank))
            differ = [name for name in names if len({of_rank.get(name) for of_rank in alike.values()}) > 1]
            if differ:
                return self._described(differ, alike)
        return ""

    def _described(self, differ: Sequence[str], alike: Mapping[int, Mapping[str, int]]) -> str:
        by_figure: dict[int | None, list[int]] = {}
        for rank, figures in alike.items():
            by_figure.setdefault(figures.get(differ[0]), []).append(rank)
        further = f", and {len(differ) - 1} further values do" if len(differ) > 1 else ""
        return (
            f"{differ[0]} differs between ranks {' and '.join(map(str, by_figure.values()))}{further}. All were equal "
            f"when they were compared last, after step {self.agreed}. Something has changed values on some ranks "
            "outside of step(), or ranks have processors that round differently: load a checkpoint on all ranks, or "
            "call wrap(..., broadcast_parameters=True) again"
        )


def _first_rank(group: dist.ProcessGroup | None) -> int:
    """Return a number of the ranks that hold the same shard as this one."""
    return global_ranks(group)[0]


def _leaves(state: Any, name: str) -> Iterator[tuple[str, torch.Tensor | float]]:
    """Return the tensors and numbers in the ``state`` of a parameter, each with its name."""
    if isinstance(state, torch.Tensor):
        if has_bits(state):
            yield name, state
    elif isinstance(state, Real):
        yield name, float(state)
    elif isinstance(state, (Mapping, list, tuple)):
        entries = dict(state if isinstance(state, Mapping) else enumerate(state))
        for key in sorted(entries, key=str):
            yield from _leaves(entries[key], f"{key} {name}")
