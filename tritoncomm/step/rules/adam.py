"""Adam and AdamW for sparse gradients that are delivered with a delay.

With error feedback, a coordinate receives zeros for tau - 1 steps, then the sum of tau gradients. Unmodified Adam
treats the zeros as gradients. Both moments decay, the sum enters the second moment squared, and a coordinate with a
steady gradient moves only 1/sqrt(tau) of the distance that it should.

Here, a delivery of the sum s after tau steps counts as tau steps with gradient s / tau. A coordinate without a delivery
takes no step. The update uses only values that are equal on all ranks: replicas stay bit-identical, nothing is sent.

The arithmetic is in :mod:`tritoncomm_kernels.adam`. This module holds the optimizer's state and settings.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import torch

from tritoncomm.errors import ConfigurationError
from tritoncomm.step.exchange.feedback import Ages
from tritoncomm.step.exchange.layout import Delivered
from tritoncomm.step.rules.late import AwareStep
from tritoncomm.step.settings import Late
from tritoncomm.step.tensors.shards import local_shards
from tritoncomm.step.torch_internals import steps_as
from tritoncomm_kernels import AdamControl, AdamFlat, AdamStates


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

    Args:
        optimizer: The Adam or AdamW optimizer.
        late: What ``wrap`` was given, with ``max_catch_up`` and ``max_relative_update``.
    """

    unsupported: ClassVar[tuple[str, ...]] = ("capturable", "differentiable")
    reads_first: ClassVar[bool] = True

    @staticmethod
    def fits(optimizer: torch.optim.Optimizer) -> bool:
        """Return True for ``Adam`` and ``AdamW``, and for subclasses that do not override ``step``."""
        return steps_as(optimizer, (torch.optim.Adam, torch.optim.AdamW))

    def __init__(self, optimizer: torch.optim.Optimizer, late: Late) -> None:
        super().__init__(optimizer, late)
        # Prepared updates, by the first parameter of each. They are used again while the tensors stay the same.
        self._flat: dict[int, AdamFlat] = {}

    def check_options(self) -> None:
        """See :meth:`AwareStep.check_options`."""
        super().check_options()
        if any(float(group["eps"]) == 0 for group in self.optimizer.param_groups):
            raise ConfigurationError(
                "eps=0: a delivered gradient of 0 would become 0 / 0 in the staleness-aware step; build the optimizer "
                "with eps above 0, such as 1e-12, or pass late=False"
            )

    @torch.no_grad()
    def step(self, delivered: Delivered) -> None:
        """Update the parameters of one flat vector. See :meth:`AwareStep.step`."""
        mean, layout, ages = delivered.mean, delivered.layout, delivered.ages
        indices = None if mean.is_full else mean.indices
        for group, counted, steps in self._counted(layout.places):
            places = sorted([place for place in counted if layout.bounds[place] < layout.bounds[place + 1]])
            if not places:
                continue
            own, starts = [layout.parameters[place] for place in places], [layout.bounds[place] for place in places]
            parameters = local_shards(own)
            states = _columns([counted[place] for place in places], places, ages, amsgrad=group["amsgrad"])
            flat = self._flat.get(id(own[0]))
            if flat is None or not flat.holds(parameters, states, starts):
                flat = self._flat[id(own[0])] = AdamFlat(parameters, states, starts)
            control, keep = self._settings(group, steps, ages.steps, layout.device)
            flat.update(indices, control, values=mean.values, keep=keep)

    def _counted(self, places: Mapping[int, int]) -> Iterator[tuple[dict[str, Any], dict[int, dict[str, Any]], int]]:
        """Count a step in the states of the parameters whose ids have ``places``.

        Yields the parameter group, the states of parameters that are at the same step, as all usually are, by place,
        and their step.
        """
        for group in self.optimizer.param_groups:
            alike: defaultdict[int, dict[int, dict[str, Any]]] = defaultdict(dict)
            for place, parameter in zip(map(places.get, map(id, group["params"])), group["params"], strict=True):
                if place is not None and parameter.grad is not None:
                    state = self.optimizer.state[parameter]
                    if not state or state["step"].device.type != "cpu":
                        self._prepare(group, parameter, state)
                    alike[int(state["step"])][place] = state
            for steps, states in alike.items():
                counts = [state["step"] for state in states.values()]
                torch._foreach_copy_(counts, [counts[0] + 1] * len(counts))
                yield group, states, steps + 1

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
            max_catch_up=self._late.limit(),
            max_relative_update=self._late.max_relative_update,
            device=device,
            maximize=group["maximize"],
        )
        decoupled = group.get("decoupled_weight_decay", isinstance(self.optimizer, torch.optim.AdamW))
        return control, 1 - learning_rate * float(group["weight_decay"]) if decoupled else 1.0

    def _prepare(self, group: dict[str, Any], parameter: torch.Tensor, state: dict[str, Any]) -> None:
        """Create the ``state`` of ``parameter`` if there is none, and let its step be on the CPU."""
        if not state:
            state["step"] = torch.tensor(0.0, dtype=torch.float32, device="cpu")
            state["exp_avg"] = torch.zeros_like(parameter)
            state["exp_avg_sq"] = torch.zeros_like(parameter)
            if group["amsgrad"]:
                state["max_exp_avg_sq"] = torch.zeros_like(parameter)
        else:  # a loaded one, where reading it takes a wait
            state["step"] = state["step"].cpu()


def _columns(states: list[dict[str, Any]], places: list[int], ages: Ages, *, amsgrad: bool) -> AdamStates:
    """Return the local shards of ``states``, and what is at these ``places`` of the ages."""
    return AdamStates(
        local_shards([state["exp_avg"] for state in states]),
        local_shards([state["exp_avg_sq"] for state in states]),
        [ages.last[place] for place in places],
        [ages.rms[place] for place in places],
        local_shards([state["max_exp_avg_sq"] for state in states]) if amsgrad else None,
    )
