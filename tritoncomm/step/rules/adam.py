"""Adam and AdamW for sparse gradients that are delivered with a delay.

With error feedback, a coordinate receives zeros for tau - 1 steps, then the sum of tau gradients. Unmodified Adam
treats the zeros as gradients. Both moments decay, the sum enters the second moment squared, and a coordinate with a
steady gradient moves only 1/sqrt(tau) of the distance that it should.

Here, a delivery of the sum s after tau steps counts as tau steps with gradient s / tau. A coordinate without a delivery
takes no step. The update uses only values that are equal on all ranks: replicas stay bit-identical, nothing is sent.

The arithmetic is in :mod:`tritoncomm_kernels.adam`. This module holds the optimizer's state and settings.
"""

from __future__ import annotations

from collections.abc import Container, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from tritoncomm.errors import ConfigurationError
from tritoncomm.step.exchange.feedback import Ages
from tritoncomm.step.exchange.layout import Delivered
from tritoncomm.step.rules.aware import AwareStep
from tritoncomm.step.settings import MAX_CATCH_UP, MAX_RELATIVE_UPDATE, WrapOptions
from tritoncomm.step.tensors.shards import local_shards
from tritoncomm.step.torch_internals import written_step
from tritoncomm_kernels import AdamControl, AdamFlat, AdamStates

_UNSUPPORTED = ("capturable", "differentiable")


@dataclass(frozen=True)
class StalenessAwareAdam(AwareStep):
    """Takes the step of a ``torch.optim.Adam`` or ``AdamW`` for the delivered coordinates only.

    The optimizer keeps its state (``step``, ``exp_avg``, ``exp_avg_sq``). Bias corrections go by its ``step``, and ages
    by the steps of the exchange, which may have begun at another time.

    A DTensor is updated as its local shard, which counts as a tensor of its own. Nothing is communicated. Its moments
    are DTensors of the same placements.

    A delivery after tau steps counts for up to tau dense steps: it catches up. Three limits shorten this, but never to
    less than one dense step. They hold less, the more deliveries to a tensor have the sign of those before: gradients
    are then steady, and a late one stands for all steps that it has waited. See
    :meth:`tritoncomm_kernels.AdamControl.of`.

    If every coordinate is delivered in every step, the result is torch's own up to rounding. The cost is proportional
    to the number of delivered entries, except for weight decay and root mean squares. ``foreach`` and ``fused`` only
    select among torch's loops and have no effect. Coupled weight decay is not added: ``.grad`` must contain it, see
    :func:`~tritoncomm.step.rules.step.coupled_decay`.

    Attributes:
        optimizer: The Adam or AdamW optimizer.
        max_catch_up: Maximum number of dense steps that one delivery counts for, at least 1. Up to three times as many
            where gradients are steady.
        max_sqrt_staleness: A delivery after tau steps counts for at most this many times sqrt(tau) steps, at least 1.
            Noise would have moved the coordinate by about sqrt(tau) steps.
        max_relative_update: Maximum change of a tensor in one step, as a fraction of its norm. A root mean square
            change of one learning rate is always allowed.
    """

    optimizer: torch.optim.Optimizer
    max_catch_up: float = MAX_CATCH_UP
    max_sqrt_staleness: float = 3.0
    max_relative_update: float = MAX_RELATIVE_UPDATE
    # Prepared updates, by the first parameter of each. They are used again while the tensors stay the same.
    _flat: dict[int, AdamFlat] = field(default_factory=dict, init=False, repr=False, compare=False)

    @staticmethod
    def fits(optimizer: torch.optim.Optimizer) -> bool:
        """Return True for ``Adam`` and ``AdamW``, and for subclasses that do not override ``step``."""
        kinds = torch.optim.Adam, torch.optim.AdamW
        return isinstance(optimizer, kinds) and written_step(optimizer) in map(written_step, kinds)

    @classmethod
    def from_options(cls, optimizer: torch.optim.Optimizer, options: WrapOptions) -> StalenessAwareAdam:
        """Return the step of ``optimizer`` with the options of ``wrap``."""
        if any(float(group["eps"]) == 0 for group in optimizer.param_groups):
            raise ConfigurationError(
                "eps=0: a delivered gradient of 0 would become 0 / 0 in the staleness-aware step; build the optimizer "
                'with eps above 0, such as 1e-12, or pass staleness="off"'
            )
        limit = MAX_CATCH_UP if options.max_catch_up is None else options.max_catch_up
        return cls(optimizer, limit, max_relative_update=options.max_relative_update)

    def __post_init__(self) -> None:
        for name, least in (("max_catch_up", 1), ("max_sqrt_staleness", 1), ("max_relative_update", 0)):
            if not getattr(self, name) >= least:
                raise ConfigurationError(f"{name}={getattr(self, name)!r}: must be at least {least}")
        self.check_options()

    def check_options(self) -> None:
        """Raise :class:`~tritoncomm.ConfigurationError` if the optimizer uses an option that is not supported."""
        for group in self.optimizer.param_groups:
            for option in _UNSUPPORTED:
                if group.get(option):
                    raise ConfigurationError(
                        f"{option}=True is not supported by the staleness-aware step: "
                        f'build the optimizer without it, or pass staleness="off"'
                    )

    @torch.no_grad()
    def step(self, delivered: Delivered) -> None:
        """Update the parameters of one flat vector. See :meth:`AwareStep.step`."""
        self.check_options()
        mean, layout, ages = delivered.mean, delivered.layout, delivered.ages
        indices = None if mean.is_full else mean.indices
        place = {id(parameter): number for number, parameter in enumerate(layout.parameters)}
        for group, own, steps in self._counted(place):
            shards = local_shards(own)
            filled = sorted((i for i, shard in enumerate(shards) if shard.numel()), key=lambda i: place[id(own[i])])
            if not filled:
                continue
            places = [place[id(own[i])] for i in filled]
            parameters, starts = [shards[i] for i in filled], [layout.bounds[each] for each in places]
            states = _columns([self.optimizer.state[own[i]] for i in filled], places, ages, amsgrad=group["amsgrad"])
            flat = self._flat.get(id(own[filled[0]]))
            if flat is None or not flat.holds(parameters, states, starts):
                flat = self._flat[id(own[filled[0]])] = AdamFlat(parameters, states, starts)
            control, keep = self._settings(group, steps, ages.steps, layout.device)
            flat.update(indices, control, values=mean.values, keep=keep)

    def _counted(self, exchanged: Container[int]) -> Iterator[tuple[dict[str, Any], list[torch.Tensor], int]]:
        """Count a step in the states of the parameters whose ids are ``exchanged``.

        Yields the parameter group, parameters that are at the same step, as all usually are, and their step.
        """
        for group in self.optimizer.param_groups:
            alike: dict[int, list[torch.Tensor]] = {}
            for parameter in group["params"]:
                if id(parameter) in exchanged and parameter.grad is not None and parameter.numel():
                    steps = int(self._state(group, parameter)["step"])
                    alike.setdefault(steps, []).append(parameter)
            for steps, own in alike.items():
                states = [self.optimizer.state[parameter] for parameter in own]
                counts = [state["step"] for state in states]
                torch._foreach_copy_(counts, [counts[0] + 1] * len(counts))
                yield group, own, steps + 1

    def _settings(
        self, group: dict[str, Any], steps: int, clock: int, device: torch.device
    ) -> tuple[AdamControl, float]:
        """Return the settings of the update, and the factor of decoupled weight decay."""
        learning_rate, (beta1, beta2) = float(group["lr"]), map(float, group["betas"])
        control = AdamControl.of(
            steps=steps,
            clock=clock,
            learning_rate=learning_rate,
            betas=(beta1, beta2),
            epsilon=float(group["eps"]),
            max_catch_up=self.max_catch_up,
            max_sqrt_staleness=self.max_sqrt_staleness,
            max_relative_update=self.max_relative_update,
            device=device,
            maximize=group["maximize"],
        )
        decoupled = group.get("decoupled_weight_decay", isinstance(self.optimizer, torch.optim.AdamW))
        return control, 1 - learning_rate * float(group["weight_decay"]) if decoupled else 1.0

    def _state(self, group: dict[str, Any], parameter: torch.Tensor) -> dict[str, Any]:
        """Return the state of ``parameter``, which is created if there is none."""
        state: dict[str, Any] = self.optimizer.state[parameter]
        if not state:
            state["step"] = torch.tensor(0.0, dtype=torch.float32)
            state["exp_avg"] = torch.zeros_like(parameter)
            state["exp_avg_sq"] = torch.zeros_like(parameter)
            if group["amsgrad"]:
                state["max_exp_avg_sq"] = torch.zeros_like(parameter)
        elif state["step"].device.type != "cpu":  # a loaded one, where reading it takes a wait
            state["step"] = state["step"].cpu()
        return state


def _columns(states: list[dict[str, Any]], places: list[int], ages: Ages, *, amsgrad: bool) -> AdamStates:
    """Return the local shards of ``states``, and what is at these ``places`` of the ages."""
    return AdamStates(
        local_shards([state["exp_avg"] for state in states]),
        local_shards([state["exp_avg_sq"] for state in states]),
        [ages.last[place] for place in places],
        [ages.rms[place] for place in places],
        local_shards([state["max_exp_avg_sq"] for state in states]) if amsgrad else None,
    )
