"""From ``.grad`` to averaged ``.grad``: the gradients of some parameters, exchanged as one flat vector."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from tritoncomm.algorithms import DenseTail, Recipe
from tritoncomm.bucket import BucketLayout
from tritoncomm.error_feedback import ErrorFeedback
from tritoncomm.errors import ConfigurationError, NonFiniteError
from tritoncomm.metrics import Meter
from tritoncomm.scheduler.process_group import ProcessGroupScheduler
from tritoncomm.scheduler.rounds import Pattern
from tritoncomm.scheduler.simulated import SimulatedScheduler
from tritoncomm.sparse import SparseVector

logger = logging.getLogger("tritoncomm")

SCHEMA = 2  # of what state_dict returns


def by_size(parameters: Sequence[torch.Tensor], dense_below: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """``parameters`` that are worth a sparse exchange, and the small ones; in the order given.

    Small are those of fewer than ``dense_below`` elements, and those of at most one dimension: biases and the
    scales of norms. The latter only beside others, as a model of flattened shards has nothing else.
    ``dense_below=0`` makes nothing small.
    """
    flattened = all(parameter.dim() <= 1 for parameter in parameters)

    def is_small(parameter: torch.Tensor) -> bool:
        return parameter.numel() < dense_below or (dense_below > 0 and parameter.dim() <= 1 and not flattened)

    small = [is_small(parameter) for parameter in parameters]
    return (
        [parameter for parameter, holds in zip(parameters, small, strict=True) if not holds],
        [parameter for parameter, holds in zip(parameters, small, strict=True) if holds],
    )


def is_initialised() -> bool:
    """True when there is a default process group."""
    return dist.is_available() and dist.is_initialized()


class GradientExchange:
    """One rank's exchange of the gradients of ``parameters`` by ``recipe``.

    Small tensors, of fewer than ``dense_below`` elements or of one dimension, travel dense at the end of the
    vector. Without an initialised process group this is one worker. ``last`` holds the figures of the last
    exchange, ``total`` the traffic of all.
    """

    def __init__(
        self,
        parameters: Sequence[torch.Tensor],
        recipe: Recipe,
        group: dist.ProcessGroup | None,
        timeout: timedelta | None,
        dense_below: int = 0,
    ) -> None:
        self.recipe = recipe
        self.parameters = list(parameters)
        large, small = by_size(parameters, dense_below)
        self.layout = BucketLayout([*large, *small])
        self.dense_numel = sum(parameter.numel() for parameter in small)
        self._flat = torch.zeros(self.layout.numel, device=self.layout.device)
        self.feedback = self._fresh()
        self._scheduler: ProcessGroupScheduler | None = None
        self.rank, self.world_size = 0, 1
        if is_initialised():
            self._scheduler = ProcessGroupScheduler(group, timeout, self.layout.device)
            self.rank, self.world_size = self._scheduler.rank, self._scheduler.world_size
        recipe.check_world_size(self.world_size)
        self.total, self._meter = Meter(), Meter()
        self.last: dict[str, float] = {}
        self._measure(None, 0.0)

    def average(self, unfit: ConfigurationError | None = None) -> SparseVector:
        """Replace every ``.grad`` by the mean over ranks, and return that mean.

        A rank whose gradients cannot be exchanged says why with ``unfit``: it takes part as NaN, so that
        no rank waits for it and all refuse the step, and raises ``unfit`` itself. Raises
        :class:`~tritoncomm.NonFiniteError` when the step was refused; nothing has changed then.
        """
        if self._scheduler is None and is_initialised():
            raise ConfigurationError("torch.distributed was initialised after wrap(): initialise it first")
        started = time.perf_counter()
        try:
            flat = self.layout.gather(self._flat)
        except ConfigurationError as error:
            unfit = error
        if unfit is not None:
            flat = self._flat.fill_(math.nan)
        try:
            mean = self._run(self.feedback.begin(flat, self.rank, self.world_size))
            self._check_range(mean.write_to(flat, workspace=self.feedback.workspace))
        except BaseException as error:
            self.feedback.rollback()
            self._measure(None, time.perf_counter() - started)
            if unfit is not None and isinstance(error, NonFiniteError):
                raise unfit from None
            raise
        self.feedback.commit()
        self.layout.scatter(flat)
        self._measure(mean, time.perf_counter() - started)
        return mean

    def owed(self) -> dict[torch.Tensor, torch.Tensor]:
        """This rank's residual by parameter (flat views), in the order in which parameters were given."""
        parts = dict(zip(self.layout.parameters, self.layout.parts(self.feedback.residual), strict=True))
        return {parameter: parts[parameter] for parameter in self.parameters}

    def take_over(self, other: GradientExchange) -> None:
        """Continue what ``other`` owes for the parameters that both have."""
        for parameter, owed in other.owed().items():
            if parameter in (mine := self.owed()):
                mine[parameter].copy_(owed)
        self.feedback.algorithm.inherit(other.feedback.algorithm)
        self.total, self.last = other.total, other.last

    def state_dict(self) -> dict[str, Any]:
        """Residuals by parameter and the algorithm's state; this rank's alone."""
        return {
            "schema": SCHEMA,
            "rank": self.rank,
            "world_size": self.world_size,
            "recipe": self.recipe.name,
            "settings": self._settings,
            "residuals": [owed.clone() for owed in self.owed().values()],
            "algorithm": self.feedback.algorithm.state_dict(),
        }

    def loaded(self, state: Mapping[str, Any]) -> ErrorFeedback:
        """An error feedback with the content of ``state``, to be put in place by the caller.

        An empty ``state`` owes nothing. Raises :class:`~tritoncomm.ConfigurationError` when it belongs to
        another rank, world size, method or model.
        """
        feedback = self._fresh()
        if not state:
            return feedback
        here = {"schema": SCHEMA, "rank": self.rank, "world_size": self.world_size, "recipe": self.recipe.name}
        for field, value in here.items():
            if state.get(field) != value:
                raise ConfigurationError(
                    f"this checkpoint was written with {field}={state.get(field)!r}, here it is {value!r}"
                    + (f": wrap with algo={state.get(field)!r}" if field == "recipe" else "")
                )
        if [len(owed) for owed in state["residuals"]] != [p.numel() for p in self.parameters]:
            raise ConfigurationError("this checkpoint belongs to a model with other parameters")
        owed = dict(zip(self.parameters, state["residuals"], strict=True))
        residual = torch.cat([self._flat[:0], *(owed[p].to(self._flat.device) for p in self.layout.parameters)])
        algorithm = state["algorithm"]
        if state["settings"] != self._settings:
            # What a method has learnt belongs to its settings; what is owed does not.
            logger.warning("the checkpoint was written with %s: the method starts anew", state["settings"])
            algorithm = feedback.algorithm.state_dict()
        feedback.load_state_dict({"residual": residual, "algorithm": algorithm})
        return feedback

    @property
    def _settings(self) -> str:
        return f"{self.recipe!r}, {self.dense_numel} values dense"

    def _fresh(self) -> ErrorFeedback:
        whole = DenseTail(recipe=self.recipe, tail=self.dense_numel)
        return ErrorFeedback(whole.build(self.layout.numel), self.layout.device)

    def _run(self, pattern: Pattern[SparseVector]) -> SparseVector:
        if self._scheduler is None:
            return SimulatedScheduler(1).run([pattern])[0]
        try:
            return self._scheduler.run(pattern)
        finally:
            self._meter = self._scheduler.meter

    def _check_range(self, flat: torch.Tensor) -> None:
        # Decided from the mean, which all ranks have, so all refuse or none.
        if not self.layout.fits(flat):
            raise NonFiniteError("a mean of finite gradients overflows in float16; nothing was applied")

    def _measure(self, mean: SparseVector | None, seconds: float) -> None:
        meter, accumulator = self._meter, self.feedback.accumulator
        selecting = accumulator.seconds if accumulator else 0.0
        self.total.count("all", meter.sent, meter.received)
        self.last = {
            "density": self.recipe.density,
            "density_delivered": mean.density if mean else 0.0,
            "selected": float(accumulator.selected) if accumulator else 0.0,
            "bytes_sent": float(meter.sent.bytes),
            "bytes_received": float(meter.received.bytes),
            "messages_sent": float(meter.sent.messages),
            "seconds_select": selecting,
            "seconds_exchange": meter.waited,
            "seconds_apply": max(0.0, seconds - selecting - meter.waited),
            **self.feedback.algorithm.report,
        }
