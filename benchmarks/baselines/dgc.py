"""Deep Gradient Compression: entries that are not sent accumulate momentum.

Y. Lin et al., "Deep Gradient Compression: Reducing the Communication Bandwidth for Distributed Training", ICLR 2018. An
all-gather of the largest entries, with momentum correction, momentum factor masking and local clipping. Instead
of the paper's warm-up of the density, :class:`~tritoncomm.Warmup` has dense steps. Biases and norm layers travel dense
by default.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from tritoncomm.algorithms.base import (
    Bounds,
    BudgetedAlgorithm,
    EntryRecipe,
    check,
    check_at_least,
    check_number,
)
from tritoncomm.errors import ConfigurationError, NonFiniteError
from tritoncomm.primitives.accumulator import Accumulator
from tritoncomm.primitives.collectives import dense_exchange
from tritoncomm.primitives.exchange import all_gather_mean
from tritoncomm.primitives.selection import entries_to_keep, rounding_figures
from tritoncomm.primitives.sparse_vector import SparseVector
from tritoncomm.scheduler import cost
from tritoncomm.scheduler.cost import Forecast, both
from tritoncomm.scheduler.rounds import Pattern

import tritoncomm_kernels as kernels

_CLIP_SCALES = {"one": 0.0, "sqrtP": 0.5, "inv_sqrtP": -0.5}


@dataclass(frozen=True, kw_only=True)
class DGC(EntryRecipe):
    """Settings of Deep Gradient Compression. Wrap an optimizer without momentum, because this method has its own.

    ``momentum`` and ``nesterov`` are those of ``torch.optim.SGD``. ``masking`` resets the momentum of sent entries.
    ``clip_norm`` limits the norm of a worker's gradient before it is accumulated. The limit is ``clip_norm`` times a
    factor. The factor is 1 for ``clip_scale="one"``, sqrt(P) for ``"sqrtP"`` (the paper's, for independent gradients
    that are averaged) and 1 / sqrt(P) for ``"inv_sqrtP"`` (used by other implementations).
    """

    name: ClassVar[str] = "dgc"
    takes_updates: ClassVar[bool] = False
    momentum: float = 0.9
    nesterov: bool = False
    masking: bool = True
    clip_norm: float | None = None
    clip_scale: str = "one"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number(self, "momentum")
        check(self, "momentum", 0 <= self.momentum < 1, "must be in [0, 1)")
        check(self, "clip_scale", self.clip_scale in _CLIP_SCALES, f"must be one of {', '.join(_CLIP_SCALES)}")
        if self.clip_norm is not None:
            check_at_least(self, 0, "clip_norm")

    def compares_entries(self) -> bool:
        """See :meth:`Recipe.compares_entries`. The momentum is accumulated in gradient units."""
        return False

    def build(self, numel: int, bounds: Bounds = ()) -> DGCAlgorithm:
        return DGCAlgorithm(self, numel)

    def check_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """See :meth:`Recipe.check_optimizer`. Momentum must not be applied twice."""
        if self.momentum and any(group.get("momentum") or "betas" in group for group in optimizer.param_groups):
            raise ConfigurationError(
                f"dgc applies momentum={self.momentum}, and {type(optimizer).__name__} would apply momentum again: "
                "wrap torch.optim.SGD(momentum=0)"
            )


@dataclass(frozen=True, eq=False)
class DGCState:
    """The momentum u in fp32, or None before the first step. Its tensors are never modified.

    ``velocity`` is this rank's momentum of the vector. ``dense_velocity`` is the momentum of coordinates that travel
    dense, equal on all ranks.
    """

    velocity: torch.Tensor | None = None
    dense_velocity: torch.Tensor | None = None

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, DGCState):
            return NotImplemented
        pairs = ((self.velocity, other.velocity), (self.dense_velocity, other.dense_velocity))
        return all(torch.equal(a, b) if a is not None and b is not None else a is b for a, b in pairs)

    __hash__ = None  # type: ignore[assignment]


class DGCAlgorithm(BudgetedAlgorithm):
    """Top-k all-gather of accumulated momentum. The residual is the paper's v."""

    state: DGCState

    def __init__(self, recipe: DGC, numel: int) -> None:
        super().__init__(numel)
        self.recipe = recipe
        self.k = entries_to_keep(numel, recipe.density)
        self.state = DGCState()

    def reduce(self, acc: Accumulator, rank: int, world_size: int) -> Pattern[SparseVector]:
        self.prepare(acc, world_size)
        if self.goes_dense:
            return (yield from self._dense(acc, world_size))
        gradient = acc.gradient.float()
        velocity, update = self._with_momentum(self.state.velocity, gradient)
        acc.replace_gradient(update)
        own = acc.top_k(self.k)
        encoding = self.recipe.encoding
        mean, sent = yield from all_gather_mean(own, [self.k] * world_size, encoding, acc, rank, world_size)
        acc.subtract(sent, rounded=encoding.rounds)
        self.report = rounding_figures(own, sent) if encoding.rounds else {}
        if self.recipe.masking:
            velocity = velocity.index_fill(0, sent.indices.long(), 0.0)
        self.state = replace(self.state, velocity=velocity)
        return mean

    def _dense(self, acc: Accumulator, world_size: int) -> Pattern[SparseVector]:
        """Exchange at density 1: apply momentum to the mean.

        Accumulation and masking are skipped, because they would reset all momentum.
        """
        mean = yield from dense_exchange(acc, world_size)
        velocity, update = self._with_momentum(self.state.velocity, mean.values)
        if kernels.has_non_finite(update):  # equal on all ranks
            raise NonFiniteError("momentum overflows; nothing was applied")
        self.state = replace(self.state, velocity=velocity)
        return SparseVector.full(update)

    def dense_update(self, mean: torch.Tensor) -> torch.Tensor:
        """See :meth:`Algorithm.dense_update`. Applies momentum here too."""
        velocity, update = self._with_momentum(self.state.dense_velocity, mean)
        self.state = replace(self.state, dense_velocity=velocity)
        return update

    def _with_momentum(self, held: torch.Tensor | None, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the new momentum, as a new tensor, and the update."""
        momentum = self.recipe.momentum
        before = held.to(gradient.device) if held is not None else torch.zeros_like(gradient)
        if before.shape != gradient.shape:
            raise ConfigurationError(
                f"loaded momentum has {before.numel()} values, expected {gradient.numel()}: use the parameters and "
                "settings with which it was saved"
            )
        if not self.recipe.nesterov:
            velocity = momentum * before + gradient
            return velocity, velocity
        velocity = momentum * (before + gradient)
        return velocity, velocity + gradient

    def prepare(self, acc: Accumulator, world_size: int) -> None:
        """See :meth:`Algorithm.prepare`. Clips the whole local gradient."""
        if self.recipe.clip_norm is None:
            return
        gradient = acc.gradient.float()
        limit = self.recipe.clip_norm * world_size ** _CLIP_SCALES[self.recipe.clip_scale]
        norm = torch.linalg.vector_norm(gradient, dtype=torch.float64)
        # A gradient that is not finite stays unchanged, so that the exchange rejects it.
        clips = torch.isfinite(norm) & (norm > limit)
        acc.replace_gradient(gradient * torch.where(clips, limit / norm, 1.0))

    def migrate(self, states: Sequence[Mapping[str, Any]], share: float, common: Mapping[str, Any]) -> None:
        """See :meth:`Algorithm.migrate`. Momentum moves together with the residual.

        That of a part of the vector, from a run with several nodes, is dropped.
        """
        found = [state["velocity"] for state in states]
        held = [velocity for velocity in found if velocity is not None and len(velocity) == self.numel]
        velocity = sum(held[1:], start=held[0]) * share if held else None
        self.state = DGCState(velocity, common["dense_velocity"])

    def common_state(self) -> dict[str, Any]:
        """See :meth:`Algorithm.common_state`. It is empty, because each rank has its own momentum."""
        return {}

    def predicted_traffic(self, world_size: int, *, ordinary: bool = False) -> Forecast:
        """See :meth:`Algorithm.predicted_traffic`. It is exact: 2k(P-1) words in plain messages."""
        if self.goes_dense:
            return cost.dense(self.numel, world_size)
        return Forecast({"all-gather": both(cost.bruck(self.recipe.encoding.words(self.numel, self.k), world_size))})
