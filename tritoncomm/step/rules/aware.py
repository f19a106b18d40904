"""The contract of a step that knows how late gradients are, and what is saved of it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import torch

from tritoncomm.step.exchange.layout import Delivered
from tritoncomm.step.settings import WrapOptions
from tritoncomm.step.tensors.shards import one_of_shard, one_per_shard

__all__ = ["AwareStep"]

# The root mean square of a parameter is measured every so many steps, and in each of as many first ones, because
# weights may start at zero. In between, a norm changes little, or it grows and is underestimated.
RENEW_RMS_EVERY = 20
EXACT = 4  # bytes of a float type that holds any step count


class AwareStep(ABC):
    """A step that knows which entries were delivered, and how long ago each coordinate's last delivery was.

    Its state stays in ``optimizer.state``, so that a checkpoint holds it. To the state of each parameter it adds
    ``last_delivered`` (int32, shaped like the parameter), the step of each coordinate's last delivery, ``param_rms``
    (fp32 ``[]``), the root mean square of the parameter, and a count of steps with the name in :attr:`counter`. Other
    entries are those of the original optimizer, which must be able to continue from them.

    A step promises:

    * If every coordinate is delivered in every step, the result is that of the original optimizer up to rounding.
    * A coordinate that is not delivered does not change, except by weight decay.
    * The result depends only on values that are equal on all ranks. Replicas stay bit-identical, nothing is sent.
    * If the original optimizer takes a step by itself, the next step still works: it counts every coordinate as
      delivered in that step.

    Attributes:
        counter: See above.
        others: Names of optimizers outside torch to which the rule applies, for a list.
    """

    counter: ClassVar[str]
    others: ClassVar[tuple[str, ...]] = ()

    @staticmethod
    @abstractmethod
    def fits(optimizer: torch.optim.Optimizer) -> bool:
        """Return True if this replaces the step of ``optimizer``."""

    @classmethod
    @abstractmethod
    def from_options(cls, optimizer: torch.optim.Optimizer, options: WrapOptions) -> AwareStep:
        """Return the step of ``optimizer`` with the options of ``wrap``."""

    def check_options(self) -> None:  # noqa: B027 - most optimizers have no option that is not supported
        """Raise :class:`~tritoncomm.ConfigurationError` if the optimizer uses an option that is not supported."""

    @abstractmethod
    def step(
        self,
        parameters: Sequence[torch.Tensor],
        delivered: Sequence[torch.Tensor | None],
        values: Sequence[torch.Tensor] | None = None,
    ) -> None:
        """Update ``parameters`` from the averaged gradients in ``.grad``.

        Args:
            parameters: Parameters to update. Other parameters of the optimizer do not change.
            delivered: Ascending int64 indices of the delivered coordinates of each flattened parameter, of its local
                shard if it is a DTensor. None means all.
            values: What ``.grad`` holds at the delivered coordinates, before it was rounded to its dtype: fp32 ``[k]``
                beside ``[k]`` indices, or all values. Reading them is faster. None reads ``.grad``.
        """

    @abstractmethod
    def step_flat(self, delivered: Delivered, *, read_gradients: bool) -> None:
        """Do the same for a mean with padding, whose number of entries only the device knows.

        Nothing waits for a GPU. ``read_gradients`` says that ``.grad`` may have changed, and is read at the entries
        instead of their values.
        """

    @classmethod
    def saved(cls, optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Return ``state_dict`` of ``optimizer`` with a ``param_rms`` that any sharding can load."""
        states = dict(state_dict["state"])
        for key, parameter in _keys(optimizer, state_dict):
            state = states.get(key, {})
            if "param_rms" in state:
                states[key] = state | {"param_rms": one_per_shard(parameter, one_of_shard(state["param_rms"]))}
        return state_dict | {"state": states}

    @classmethod
    def restore(cls, optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
        """Restore the added entries after ``optimizer.load_state_dict(state_dict)``.

        The optimizer casts its state to the dtype of the parameter, which may not hold step counts exactly.
        """
        for key, parameter in _keys(optimizer, state_dict):
            saved = state_dict["state"].get(key, {})
            if "last_delivered" in saved:
                state, device, count = optimizer.state[parameter], parameter.device, saved[cls.counter]
                state["last_delivered"] = saved["last_delivered"].to(device, torch.int32, copy=True)
                state[cls.counter] = count.clone() if isinstance(count, torch.Tensor) else count
                if "param_rms" in saved:
                    state["param_rms"] = one_of_shard(saved["param_rms"]).to(device, torch.float32, copy=True)


def _keys(optimizer: torch.optim.Optimizer, state_dict: Mapping[str, Any]) -> Iterator[tuple[Any, torch.Tensor]]:
    """Yield the key of each parameter in ``state_dict``, and the parameter."""
    for saved, group in zip(state_dict["param_groups"], optimizer.param_groups, strict=True):
        yield from zip(saved["params"], group["params"], strict=True)
