"""Error feedback: the residual of one flat vector, and what a step would leave of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tritoncomm.algorithms import Algorithm
from tritoncomm.errors import ConfigurationError
from tritoncomm.primitives.accumulator import Accumulator
from tritoncomm.primitives.sparse_vector import SparseVector
from tritoncomm.primitives.verdict import Verdict
from tritoncomm.scheduler.rounds import Pattern
from tritoncomm_kernels import Workspace


class ErrorFeedback:
    """One rank's residual for one flat vector, and the algorithm that exchanges this vector.

    Call :meth:`begin`, and run the returned pattern on a scheduler. Residual and algorithm state are then still those
    from before the step. :meth:`commit` replaces both by those after the step, :meth:`rollback` forgets the step.

    Attributes:
        algorithm: The algorithm and its state.
        residual: The residual, fp32 ``[numel]``.
        workspace: Scratch memory of the kernels, kept between steps.
        accumulator: Residual plus gradient of the last step. None before the first step.
    """

    def __init__(self, algorithm: Algorithm, device: torch.device | str = "cpu") -> None:
        self.algorithm = algorithm
        self.residual = torch.zeros(algorithm.numel, dtype=torch.float32, device=device)
        # The sum is computed here, while the residual stays unchanged. A commit swaps the two.
        self._scratch = torch.zeros_like(self.residual)
        self.workspace = Workspace()
        self._before: Any = None  # the algorithm's state before the step, and after it
        self._after: Any = None
        self._waits: Sequence[slice] = ()
        self.accumulator: Accumulator | None = None

    def begin(
        self,
        gradient: torch.Tensor,
        rank: int,
        world_size: int,
        algorithm: Algorithm | None = None,
        waits: Sequence[slice] = (),
    ) -> Pattern[SparseVector]:
        """Begin a step and return its pattern, which returns the mean.

        Args:
            gradient: The gradient, ``[numel]``, fp32, bf16 or fp16. It is only read.
            rank: Rank in the group of the exchange.
            world_size: Number of ranks in this group.
            algorithm: Algorithm for this step only. None uses :attr:`algorithm`.
            waits: Coordinates whose residual takes no part in this step.

        Raises:
            ConfigurationError: The shapes of gradient and residual differ.
        """
        if gradient.shape != self.residual.shape:
            raise ConfigurationError(
                f"gradient has shape {tuple(gradient.shape)}, the residual has shape {tuple(self.residual.shape)}"
            )
        self._before = self._after = self.algorithm.state
        algorithm = algorithm or self.algorithm
        device, static = self.residual.device, algorithm.is_static
        # On a CPU, nothing waits for the result of a check, so errors are raised at once.
        needs_verdict = static or (algorithm.has_shared_verdict and device.type != "cpu")
        verdict = Verdict(device, is_shared=algorithm.has_shared_verdict) if needs_verdict else None
        self._waits, residual = waits, self.residual
        # On a GPU, the host would wait for the answer.
        if waits and (device.type != "cpu" or any(bool(residual[own].any()) for own in waits)):
            residual = residual.clone()
            for own in waits:
                residual[own].zero_()
        self.accumulator = Accumulator(residual, gradient, self._scratch, self.workspace, verdict)
        return self._reduced(algorithm.reduce(self.accumulator, rank, world_size), verdict)

    def _reduced(self, pattern: Pattern[SparseVector], verdict: Verdict | None) -> Pattern[SparseVector]:
        """Run ``pattern``, and set the algorithm's new state aside until the commit."""
        mean = yield from pattern
        assert verdict is None or verdict.is_settled, "the method has not read what the ranks found wrong in its step"
        self._after, self.algorithm.state = self.algorithm.state, self._before
        return mean

    @property
    def pending(self) -> torch.Tensor:
        """The residual that a commit will put in the place of :attr:`residual`, fp32 ``[numel]``."""
        return self._scratch

    def commit(self, left: Sequence[slice] = ()) -> None:
        """Replace residual and algorithm state by those after the step.

        ``left`` are coordinates of which no rank uses the mean. Their residual is the one before the step.
        """
        before, self.residual = self.residual, self._scratch
        self._scratch = before
        for own in self._waits:  # sums that other ranks have left here stay
            self.residual[own].add_(before[own])
        for own in left:
            self.residual[own].copy_(before[own])
        self._before = self.algorithm.state = self._after

    def rollback(self) -> None:
        """Forget the step that :meth:`begin` began, wherever its pattern has stopped."""
        self.algorithm.state = self._after = self._before

    def state_dict(self) -> dict[str, Any]:
        """Return a copy of the residual, and the algorithm's state."""
        return {"residual": self.residual.clone(), "algorithm": self.algorithm.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load what :meth:`state_dict` returned. If it does not fit, nothing changes."""
        residual = state["residual"]
        if residual.shape != self.residual.shape:
            raise ConfigurationError(
                f"saved residual has shape {tuple(residual.shape)}, expected {tuple(self.residual.shape)}"
            )
        self.algorithm.load_state_dict(state["algorithm"])
        self.residual.copy_(residual)
