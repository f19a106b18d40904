"""The contract of a rule for late gradients, and what rules have in common: ages, limits, ways of delivery.

A rule is a subclass of :class:`LateRule` in a file of its own. It says what a step does with a gradient that stands for
several steps. :mod:`tritoncomm.step.rules.lion` is an example. Adam's rule has kernels instead
(:mod:`tritoncomm.step.rules.adam`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from tritoncomm.errors import ConfigurationError
from tritoncomm.step.exchange.layout import Delivered
from tritoncomm.step.settings import Late
from tritoncomm.step.tensors.shards import local
from tritoncomm_kernels import root_mean_square
from tritoncomm_kernels.adam import beta_tables, decays
from tritoncomm_kernels.devices import is_asynchronous

__all__ = ["AwareStep", "LateRule"]

_BITS = 24  # of the largest step count that fp32 holds
MAX_SQRT_STALENESS = 3.0  # as for Adam: noise would have moved a coordinate by about sqrt(tau) steps

Held = dict[str, torch.Tensor]


class AwareStep(ABC):
    """A step that knows which entries were delivered, and how long ago each coordinate's last delivery was.

    The state in ``optimizer.state`` is that of the optimizer, which must be able to continue from it. How late
    entries are is kept by the exchange, see :class:`~tritoncomm.step.exchange.feedback.Ages`. A step writes
    the number of the step there for each coordinate that was delivered.

    A step promises:

    * If every coordinate is delivered in every step, the result is that of the optimizer up to rounding.
    * A coordinate that is not delivered does not change, except by weight decay.
    * The result depends only on values that are equal on all ranks. Replicas stay bit-identical, nothing is sent.

    Args:
        optimizer: The optimizer.
        late: How far a delivery catches up.

    Attributes:
        optimizer: The optimizer.
        unsupported: Options that the optimizer must not use.
        others: Names of optimizers outside torch to which the rule applies, for the table in the pages.
        reads_first: Whether a step reads several parameters before it writes to the first. They cannot share memory.
    """

    optimizer: torch.optim.Optimizer
    unsupported: ClassVar[tuple[str, ...]] = ()
    others: ClassVar[tuple[str, ...]] = ()
    reads_first: ClassVar[bool] = False

    def __init__(self, optimizer: torch.optim.Optimizer, late: Late) -> None:
        self.optimizer, self._late = optimizer, late
        self.check_options()

    @staticmethod
    @abstractmethod
    def fits(optimizer: torch.optim.Optimizer) -> bool:
        """Return True if this replaces the step of ``optimizer``."""

    def check_options(self) -> None:
        """Raise :class:`~tritoncomm.ConfigurationError` if the optimizer uses an option that is not supported."""
        for group in self.optimizer.param_groups:
            for option in self.unsupported:
                if group.get(option):
                    raise ConfigurationError(
                        f"{option}={group[option]!r} is not supported by the staleness-aware step: leave it out, or "
                        "pass late=False"
                    )

    def begin(self) -> None:  # noqa: B027 - most optimizers keep nothing for all of their parameters
        """Begin a step of the optimizer, before :meth:`step` of each of its flat vectors."""

    @abstractmethod
    def step(self, delivered: Delivered) -> None:
        """Update the parameters of one flat vector that are the optimizer's and have a ``.grad``.

        ``delivered`` is the averaged gradient of the vector. What it stores is delivered. If it has padding, only the
        device knows how much that is, and nothing waits for a GPU. The step has begun in its ages.
        """


class LateRule(AwareStep):
    """The step of an optimizer for gradients that are delivered late.

    A coordinate gets the sum s of tau gradients after tau steps. The rule treats it as tau steps with the gradient
    s / tau. A coordinate that is not delivered takes no step, except for decoupled weight decay. One delivery moves a
    coordinate by f dense steps, with f at most tau, 3 sqrt(tau) and ``max_catch_up``. If the update of a tensor would
    be longer than ``max_relative_update`` of its norm, its factors are scaled down together, but never below 1. Root
    mean square changes of one learning rate are always allowed.

    If a step ``is_proportional`` to the gradient, noise has cancelled in the late sum as it does in its parts, and a
    learning rate is not a length. f is then tau, unless ``max_catch_up`` is given, and nothing is always allowed.

    Args:
        optimizer: The optimizer.
        late: What ``wrap`` was given, with ``max_catch_up`` and ``max_relative_update``.

    Attributes:
        held: Names of the tensors, shaped like the parameter, that the optimizer keeps in its state.
        counts_in: Where the optimizer counts its steps, by the name ``"step"``: in the ``"state"`` of each parameter,
            or in its ``"group"``. None if it does not.
        is_proportional: Whether a step is proportional to the gradient. If not, it is about as long as the learning
            rate.
    """

    held: ClassVar[tuple[str, ...]] = ()
    counts_in: ClassVar[str | None] = None
    is_proportional: ClassVar[bool] = False

    def __init__(self, optimizer: torch.optim.Optimizer, late: Late) -> None:
        if self.counts_in not in (None, "state", "group"):
            raise ConfigurationError(f"counts_in={self.counts_in!r}: must be 'state', 'group' or None")
        if isinstance(self.held, str):
            raise ConfigurationError(f"held={self.held!r}: must be a tuple of names, such as ({self.held!r},)")
        super().__init__(optimizer, late)

    @abstractmethod
    def advance(
        self, group: Mapping[str, Any], held: Held, mean: torch.Tensor, tau: torch.Tensor
    ) -> tuple[torch.Tensor, Held]:
        """Return the direction of a dense step, in units of the learning rate, and what the optimizer then keeps.

        All tensors are fp32 ``[k]``, one value for each coordinate. With ``tau`` = 1, the parameter minus the learning
        rate times the direction must be what the optimizer itself makes of the gradient ``mean``.

        Args:
            group: The options of the optimizer.
            held: What the optimizer keeps, by the names in :attr:`held`. If it counts its steps, ``"step"`` is the
                number of this one, from 1 (fp32 ``[]``). Where that is ``tau``, nothing was delivered before. A group
                also counts steps in which this parameter had no gradient, and ``tau`` does not: the first delivery of a
                parameter that has missed steps is then known by what :meth:`initial` has left in ``held``.
            mean: The delivered sum divided by ``tau``.
            tau: The number of steps since the last delivery, at least 1.
        """

    @staticmethod
    def powers(beta: float, tau: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ``beta`` to the power of ``tau``, and 1 minus this power, with the same bits on every processor."""
        power, complement = beta_tables((beta, beta), tau.dtype, torch.device("cpu"))[:2].tolist()
        return decays(tau.to(torch.int32), power, complement, bits=_BITS if is_asynchronous(tau.device) else None)

    def initial(self, group: Mapping[str, Any], name: str, parameter: torch.Tensor) -> torch.Tensor:
        """Return what the optimizer keeps by the ``name`` (one of :attr:`held`) before its first step. Default: 0."""
        return torch.zeros_like(parameter)

    def decay(self, group: Mapping[str, Any]) -> float:
        """Return the factor by which decoupled weight decay multiplies every coordinate in each step."""
        return 1.0

    def begin(self) -> None:
        """Count the step where the optimizer does so for a group. See :meth:`AwareStep.begin`."""
        for group in self.optimizer.param_groups if self.counts_in == "group" else ():
            group["step"] = group.get("step", 0) + 1

    @torch.no_grad()
    def step(self, delivered: Delivered) -> None:
        """Update the parameters of one flat vector. See :meth:`AwareStep.step`.

        Of a mean with padding, every coordinate is read and written, delivered or not, without a wait for the device.
        """
        ages, layout = delivered.ages, delivered.layout
        entries = _everywhere(delivered) if delivered.mean.is_padded else [(*each, None) for each in delivered.entries]
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                number = layout.places.get(id(parameter))
                if number is None or parameter.grad is None:
                    continue
                own, (indices, given, chosen) = local(parameter), entries[number]
                state, count = self._counted(group, parameter)
                stored = {name: local(state[name]) for name in self.held}
                stored |= {"parameter": own, "last": ages.last[number]}
                flat = {name: each.reshape(-1) for name, each in stored.items()}  # a copy if it is not contiguous
                at = flat if indices is None else {name: each.index_select(0, indices) for name, each in flat.items()}
                new = self._moved(group, at | count, given, ages.steps, own.numel(), ages.rms[number], chosen)
                if self.decay(group) != 1:
                    flat["parameter"].mul_(self.decay(group))
                for name, target in ((name, flat[name]) for name in new):
                    value = new[name].to(target.dtype)
                    if indices is not None:
                        target.index_copy_(0, indices, value)
                    else:
                        target.copy_(value if chosen is None else torch.where(chosen, value, target))
                    if not stored[name].is_contiguous():
                        stored[name].copy_(target.view(own.shape))

    def _moved(
        self,
        group: Mapping[str, Any],
        at: Held,
        given: torch.Tensor,
        steps: int,
        numel: int,
        rms: torch.Tensor,
        chosen: torch.Tensor | None,
    ) -> Held:
        """Return the new values of coordinates with the old values ``at``, of a tensor of ``numel`` elements.

        Only those that are ``chosen`` count for the limit per tensor. None chooses all.
        """
        rate = float(group["lr"])
        tau = (steps - at["last"]).clamp_(min=1).float()
        held = {name: _wide(value) for name, value in at.items() if name not in ("parameter", "last")}
        direction, new = self.advance(group, held, given / tau, tau)
        shapes = [direction.shape, *(new[name].shape for name in self.held if name in new)]
        if shapes != [tau.shape] * (1 + len(self.held)):
            raise ConfigurationError(
                f"{type(self).__name__}.advance() has returned shapes {[*map(tuple, shapes)]} of a direction and of "
                f"{[*new]}: return a direction, and a dict of {[*self.held]}, each of shape {tuple(tau.shape)}"
            )
        factor = tau if self.is_proportional else torch.minimum(tau, MAX_SQRT_STALENESS * tau.sqrt())
        factor = factor.clamp(max=self._late.limit(is_proportional=self.is_proportional))
        counted = direction if chosen is None else torch.where(chosen, direction, 0.0)
        length = rate * _root_mean_square(factor * counted, numel)
        limit = (self._late.max_relative_update * rms).clamp(min=0.0 if self.is_proportional else rate)
        share = (limit / length).nan_to_num(1.0).clamp(max=1.0)
        factor = (factor * share).clamp_(min=1.0)
        # With this function, a step of SGD that is not late has the bits of torch's.
        moved = torch.add(_wide(at["parameter"]) * self.decay(group), factor * direction, alpha=-rate)
        return {**new, "parameter": moved, "last": torch.full_like(at["last"], steps)}

    def _counted(self, group: Mapping[str, Any], parameter: torch.Tensor) -> tuple[dict[str, Any], Held]:
        """Count the step in the state of ``parameter``, if that is where the optimizer does. Return both.

        Where the optimizer keeps nothing yet, the state gets :meth:`initial` values.
        """
        state: dict[str, Any] = self.optimizer.state[parameter]
        for name in self.held:
            if state.get(name) is None:
                state[name] = self.initial(group, name, parameter)
        if self.counts_in is None:
            return state, {}
        if self.counts_in == "state":
            state["step"] = state.get("step", 0) + 1
        return state, {
            "step": torch.tensor(float((group if self.counts_in == "group" else state)["step"]), device="cpu")
        }


def _everywhere(delivered: Delivered) -> list[tuple[None, torch.Tensor, torch.Tensor]]:
    """Return the mean of every coordinate of each parameter, and which of them were delivered, of a mean with padding.

    The first entry is None instead of indices, as in :attr:`Delivered.entries`.
    """
    numel, places = delivered.mean.numel, delivered.mean.indices.long()
    places = torch.where(places < 0, numel, places)  # the place of padding is behind all others
    sums = torch.zeros(numel + 1, dtype=torch.float32, device=places.device)
    sums[places] = delivered.mean.values
    is_delivered = torch.zeros(numel + 1, dtype=torch.bool, device=places.device)
    is_delivered[places] = True
    parts = delivered.layout.parts
    return [(None, *both) for both in zip(parts(sums), parts(is_delivered), strict=True)]


def _root_mean_square(values: torch.Tensor, numel: int) -> torch.Tensor:
    """Return the root mean square of ``values`` and of zeros, ``numel`` elements together, as fp32 ``[]``."""
    if not values.numel():
        return torch.zeros((), device=values.device)
    return root_mean_square(values).mul_((values.numel() / numel) ** 0.5)


def _wide(values: torch.Tensor) -> torch.Tensor:
    """Return ``values`` in fp32, or in fp64 if they are."""
    return values.to(torch.promote_types(values.dtype, torch.float32))
