"""Simulate all workers of an exchange in one process, for experiments, tests and planning."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import index
from typing import Any

import torch

from tritoncomm.algorithms import Recipe
from tritoncomm.errors import ConfigurationError
from tritoncomm.primitives.sparse_vector import SparseVector
from tritoncomm.scheduler.clock import VirtualClock
from tritoncomm.scheduler.cost import Forecast, Link, Traffic
from tritoncomm.scheduler.faults import Faults
from tritoncomm.scheduler.simulated import BeforeRound, SimulatedScheduler
from tritoncomm.step.exchange.feedback import ErrorFeedback
from tritoncomm_kernels.checks import GRADIENT_DTYPES


class SimulatedWorld:
    """``world_size`` simulated workers that exchange vectors of ``numel`` elements with the method ``recipe``.

    The workers run the same code as in training. Only the network is simulated. Any world size works.
    Residuals are on ``device``, and gradients must be on it too. With a ``link``, ``clock`` runs in virtual time:
    ``seconds`` is the time that the last step would have taken on that link, and ``clock.charge(rank, seconds)``
    delays a rank. ``static="auto"``, or a link, is False wherever the vectors are. ``bounds`` are those of the tensors
    in the vector, for a method that treats them apart: the first coordinate of each, and ``numel``.
    """

    def __init__(
        self,
        recipe: Recipe,
        world_size: int,
        numel: int,
        *,
        link: Link | None = None,
        device: torch.device | str = "cpu",
        bounds: Sequence[int] = (),
    ) -> None:
        try:
            world_size, numel = index(world_size), index(numel)
        except TypeError:
            raise ConfigurationError(
                f"world_size and numel must be integers, got world_size={world_size!r} and numel={numel!r}"
            ) from None
        if world_size < 1:
            raise ConfigurationError(f"world_size must be at least 1, got world_size={world_size}")
        if link is not None and not isinstance(link, Link):
            raise ConfigurationError(f'link must be a Link, for example Link.parse("10gbit,30us"), got link={link!r}')
        if numel < 0:
            raise ConfigurationError(f"numel must be at least 0, got numel={numel}")
        if bounds and (list(bounds) != sorted(bounds) or bounds[0] != 0 or bounds[-1] != numel):
            raise ConfigurationError(f"bounds must ascend from 0 to numel={numel}, got bounds={tuple(bounds)}")
        recipe.check_world_size(world_size)
        self.recipe = recipe
        self.world_size = world_size
        self.numel = numel
        self.workers = [ErrorFeedback(recipe.build(numel, bounds), device) for _ in range(world_size)]
        self.clock = VirtualClock(world_size, link) if link is not None else None
        self.scheduler = SimulatedScheduler(world_size, self.clock)
        self.seconds = 0.0

    def step(
        self, gradients: torch.Tensor, *, before_round: BeforeRound | None = None, faults: Faults | None = None
    ) -> list[SparseVector]:
        """Exchange ``gradients`` (``[world_size, numel]``, row r for rank r). Return each rank's copy of the mean.

        ``before_round(number, operations)`` is called before every round with the operation of each rank. It may
        raise to inject a failure. ``faults`` injects faults into messages. After any error, residuals and states are
        bit-identical to before. Raises :class:`~tritoncomm.NonFiniteError` when a gradient has a NaN or Inf.
        """
        if not isinstance(gradients, torch.Tensor):
            raise ConfigurationError(
                f"gradients must be one tensor, got a {type(gradients).__name__}: use torch.stack()"
            )
        if gradients.shape != (self.world_size, self.numel):
            raise ConfigurationError(
                f"gradients has shape {tuple(gradients.shape)}, "
                f"expected [world_size, numel] = [{self.world_size}, {self.numel}]"
            )
        if gradients.dtype not in GRADIENT_DTYPES:
            names = ", ".join(map(str, GRADIENT_DTYPES))
            raise ConfigurationError(f"gradients has dtype {gradients.dtype}, expected one of {names}: convert it")
        patterns = [
            worker.begin(gradients[rank].detach().contiguous(), rank, self.world_size)
            for rank, worker in enumerate(self.workers)
        ]
        started = max(self.clock.now) if self.clock is not None else 0.0
        try:
            means = self.scheduler.run(patterns, before_round, faults)
        except BaseException:
            for worker in self.workers:
                worker.rollback()
            raise
        for worker in self.workers:
            worker.commit()
        if self.clock is not None:
            self.seconds = max(self.clock.now) - started
        return [mean.trimmed() for mean in means]

    @property
    def residuals(self) -> torch.Tensor:
        """The residuals of all workers, as a new fp32 ``[world_size, numel]`` tensor."""
        return torch.stack([worker.residual for worker in self.workers])

    @property
    def traffic(self) -> list[Traffic]:
        """Messages and bytes that each rank sent in the last step."""
        return [meter.sent for meter in self.scheduler.meters]

    @property
    def received(self) -> list[Traffic]:
        """Messages and bytes that each rank received in the last step."""
        return [meter.received for meter in self.scheduler.meters]

    @property
    def predicted_traffic(self) -> list[Forecast]:
        """Upper bound on the traffic of the next step, by rank. Each bound is per phase and direction."""
        return [worker.algorithm.predicted_traffic(self.world_size) for worker in self.workers]

    def state_dict(self) -> dict[str, Any]:
        """Return the residuals and algorithm states of all workers."""
        return {"workers": [worker.state_dict() for worker in self.workers]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a state dict that :meth:`state_dict` of an equally configured world returned.

        Raises :class:`~tritoncomm.ConfigurationError`, and changes nothing, when any part of it does not fit.
        """
        workers: Any = state.get("workers") if isinstance(state, Mapping) else None
        fit = isinstance(workers, (list, tuple)) and all(
            isinstance(each, Mapping) and {"residual", "algorithm"} <= each.keys() for each in workers
        )
        if not fit:
            raise ConfigurationError("not a state of a SimulatedWorld: pass what its state_dict() has returned")
        if len(workers) != self.world_size:
            raise ConfigurationError(
                f"the state dict was saved by {len(workers)} workers, but this world has {self.world_size}: "
                "use the same world_size"
            )
        before = self.state_dict()["workers"]
        try:
            for worker, saved in zip(self.workers, workers, strict=True):
                worker.load_state_dict(saved)
        except BaseException:
            for worker, saved in zip(self.workers, before, strict=True):
                worker.load_state_dict(saved)
            raise
