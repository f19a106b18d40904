"""The residual, and the one step that every front door shares.

Whatever an exchange does not deliver is kept and added to the next gradient, so that nothing is lost,
only late. The residual is in gradient units, fp32, and is replaced only when a step has succeeded.
"""

from __future__ import annotations

from typing import Any

import torch

from tritoncomm.algorithms import Algorithm
from tritoncomm.errors import ConfigurationError
from tritoncomm.primitives.accumulator import Accumulator
from tritoncomm.primitives.sparse_vector import SparseVector
from tritoncomm.scheduler.rounds import Pattern
from tritoncomm_kernels import Workspace


class ErrorFeedback:
    """One rank's residual for one flat vector, and the algorithm that reduces it.

    A step is :meth:`begin`, running the returned pattern on a scheduler, then :meth:`commit`; or
    :meth:`rollback`, which leaves residual and algorithm state bit-identical to before.
    """

    def __init__(self, algorithm: Algorithm, device: torch.device | str = "cpu") -> None:
        self.algorithm = algorithm
        self.residual = torch.zeros(algorithm.numel, device=device)
        # The sum is built here while the residual stays intact; a commit swaps the two.
        self._scratch = torch.zeros_like(self.residual)
        self.workspace = Workspace()
        self._before: Any = None
        self._after: Any = None
        self.accumulator: Accumulator | None = None

    def begin(
        self, gradient: torch.Tensor, rank: int, world_size: int, algorithm: Algorithm | None = None
    ) -> Pattern[SparseVector]:
        """The pattern of this step for ``gradient`` (``[numel]``; fp32, bf16 or fp16, only read).

        ``algorithm`` takes the place of the usual one for this step.
        """
        if gradient.shape != self.residual.shape:
            raise ConfigurationError(
                f"gradient has shape {tuple(gradient.shape)}, this residual has {tuple(self.residual.shape)}"
            )
        self._before = self.algorithm.state
        self.accumulator = Accumulator(self.residual, gradient, self._scratch, self.workspace)
        return (algorithm or self.algorithm).reduce(self.accumulator, rank, world_size)

    def commit(self) -> None:
        """Adopt the new residual and state."""
        self.residual, self._scratch = self._scratch, self.residual
        self._before = self.algorithm.state

    def rollback(self) -> None:
        """Forget the step that :meth:`begin` started."""
        self.algorithm.state = self._before

    def suspend(self) -> None:
        """:meth:`rollback`, but :meth:`resume` can still commit the step as long as no other one begins."""
        self._after = self.algorithm.state
        self.rollback()

    def resume(self) -> None:
        """Commit the step that :meth:`suspend` put aside."""
        self.algorithm.state = self._after
        self.commit()

    def state_dict(self) -> dict[str, Any]:
        """The residual (a copy) and the algorithm's state."""
        return {"residual": self.residual.clone(), "algorithm": self.algorithm.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from what :meth:`state_dict` returned; nothing changes when it does not fit."""
        residual = state["residual"]
        if residual.shape != self.residual.shape:
            raise ConfigurationError(
                f"saved residual has shape {tuple(residual.shape)}, needed is {tuple(self.residual.shape)}"
            )
        self.algorithm.load_state_dict(state["algorithm"])
        self.residual.copy_(residual)
