"""Whether ranks that hold the same shard still hold the same values: parameters, and the state of the optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist

from tritoncomm.step.agree import differences, propagate_errors
from tritoncomm.step.agree.number import number_of_text, numbers
from tritoncomm.step.agree.setup import Named, labelled, leaves
from tritoncomm.step.tensors.names import label
from tritoncomm.step.tensors.shards import has_bits

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

    These are all parameters of ``optimizer``, its state, and other parameters of the module.

    Args:
        optimizer: The optimizer.
        common: Returns its parameters that all ranks have in common, each with its name or ``""``.
        others: Parameters of the module that the optimizer does not hold, each with its name.

    Attributes:
        agreed: The number of steps after which all ranks had equal values, when they were compared last.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        common: Callable[[], Named],
        others: Named = (),
    ) -> None:
        self._optimizer, self._common, self._others = optimizer, common, others
        self.agreed = 0

    @staticmethod
    def is_due(updates: int) -> bool:
        """Return True if ranks compare their values in the step behind this number of ``updates``."""
        return updates % EVERY == 0 or updates in EARLY

    def values(self) -> dict[str, torch.Tensor]:
        """Return parameters, each by its name."""
        held = [(each, label(name, i, each)) for i, (each, name) in enumerate(self._common())]
        return {name: each for each, name in labelled(held)}

    def state(self) -> dict[str, Any]:
        """Return tensors, numbers and texts in the state of the optimizer, each by its name."""
        state = self._optimizer.state  # to read a state that is missing adds an empty one
        held = ((name, state[parameter]) for name, parameter in self.values().items() if parameter in state)
        return {text: leaf for name, of in held for text, leaf in leaves(of, f"of {name}")}

    def figures(self) -> dict[str, int]:
        """Return the number of each parameter, and then of the state, by its name. The host waits for a GPU once."""
        named = self.values()
        others = [(name, each) for each, name in self._others if id(each) not in _TRAINED_LOCALLY]
        found: dict[str, Any] = {name: parameter for name, parameter in named.items() if has_bits(parameter)}
        found |= {f"{name} (not held)" if name in named else name: each for name, each in others}
        found |= self.state()
        return dict(zip(found, numbers(found.values()), strict=True))

    def digest(self) -> int:
        """Return a number of all figures."""
        return number_of_text(repr(self.figures()))

    def difference(
        self, everybody: dist.ProcessGroup | None, device: torch.device | None, steps: int, shard: int = 0
    ) -> str:
        """Return which values differ between ranks with the same ``shard`` after ``steps`` steps. Empty if none does.

        All ranks of ``everybody``, which are those of all shards, call this together.
        """
        with propagate_errors(everybody, device):
            figures = self.figures()
        found = differences(figures, everybody, device, shard)
        if not found:
            self.agreed = steps
            return ""
        name, sides = next(iter(found.items()))
        further = f", and {len(found) - 1} further values do" if len(found) > 1 else ""
        return (
            f"{name} differs between ranks: {sides} (numbers of their bits){further}. All were equal when they were "
            f"compared last, after step {self.agreed}. Something has changed values on some ranks outside of step(), "
            "such as Embedding(max_norm=...) or a loop that moves parameters and back: take it out. Or ranks have "
            "processors that round differently. Then load a checkpoint on all ranks, or call wrap(..., "
            "broadcast_parameters=True) again"
        )
