"""All workers of an exchange in one process: for experiments, tests and planning."""

from __future__ import annotations

from typing import Any

import torch

from tritoncomm.algorithms import Recipe
from tritoncomm.errors import ConfigurationError
from tritoncomm.primitives.sparse_vector import SparseVector
from tritoncomm.scheduler.clock import VirtualClock
from tritoncomm.scheduler.cost import Forecast, Link, Traffic
from tritoncomm.scheduler.faults import Faults
from tritoncomm.scheduler.simulated import BeforeRound, SimulatedScheduler
from tritoncomm.step.error_feedback import ErrorFeedback


class SimulatedWorld:
    """``world_size`` workers that exchange vectors of ``numel`` elements by ``recipe``.

    The code that runs is the code that trains; only the network is simulated. Any world size works.
    Residuals live on ``device``, where the gradients must be too. With a ``link``, ``clock`` runs in virtual
    time: ``seconds`` is what the last step would have taken on that network, and ``clock.charge(rank, seconds)``
    lets a rank come late.
    """

    def __init__(
        self,
        recipe: Recipe,
        world_size: int,
        numel: int,
        *,
        link: Link | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        if world_size < 1:
            raise ConfigurationError(f"world_size={world_size}: there must be at least 1 worker")
        if link is not None and not isinstance(link, Link):
            raise ConfigurationError(f'link={link!r}: give a Link, for example Link.parse("10gbit,30us")')
        if numel < 0:
            raise ConfigurationError(f"numel={numel}: a vector cannot have fewer than 0 elements")
        recipe.check_world_size(world_size)
        self.recipe = recipe
        self.world_size = world_size
        self.numel = numel
        self.workers = [ErrorFeedback(recipe.build(numel), device) for _ in range(world_size)]
        self.clock = VirtualClock(world_size, link) if link is not None else None
        self.scheduler = SimulatedScheduler(world_size, self.clock)
        self.seconds = 0.0

    def step(
        self, gradients: torch.Tensor, *, before_round: BeforeRound | None = None, faults: Faults | None = None
    ) -> list[SparseVector]:
        """Exchange ``gradients`` (``[world_size, numel]``, row r is rank r's); the mean, by rank.

        ``before_round(number, words)`` is called before every round and may raise to inject a failure; ``faults``
        is what the network does to messages.
        Any error leaves residuals and states bit-identical to before. Raises
        :class:`~tritoncomm.NonFiniteError` when a gradient has a NaN or Inf.
        """
        if gradients.shape != (self.world_size, self.numel):
            raise ConfigurationError(
                f"gradients has shape {tuple(gradients.shape)}: "
                f"pass [world_size, numel] = [{self.world_size}, {self.numel}]"
            )
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
        return means

    @property
    def residuals(self) -> torch.Tensor:
        """What every worker still owes: a new fp32 ``[world_size, numel]`` tensor."""
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
        """Upper bound for the next step, by rank: per phase and direction."""
        return [worker.algorithm.predicted_traffic(self.world_size) for worker in self.workers]

    def state_dict(self) -> dict[str, Any]:
        """Residuals and algorithm states of all workers."""
        return {"workers": [worker.state_dict() for worker in self.workers]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from what :meth:`state_dict` of an equal world returned; all of it fits, or nothing changes."""
        workers = state["workers"]
        if len(workers) != self.world_size:
            raise ConfigurationError(f"saved by {len(workers)} workers, this world has {self.world_size}")
        before = self.state_dict()["workers"]
        try:
            for worker, saved in zip(self.workers, workers, strict=True):
                worker.load_state_dict(saved)
        except BaseException:
            for worker, saved in zip(self.workers, before, strict=True):
                worker.load_state_dict(saved)
            raise
