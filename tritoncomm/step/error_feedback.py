"""The residual, and one step of error feedback.

The entries that an exchange does not deliver are kept in the residual, which is added to the next gradient. They are
delayed, not lost. The residual is fp32, in units of the gradient. It is replaced only after a step has succeeded.
"""

from __future__ import annotations

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

    A step has three parts: call :meth:`begin`, run the returned pattern on a scheduler, then call :meth:`commit` or
    :meth:`rollback`. After :meth:`rollback`, residual and algorithm state are bit-identical to those before the step.
    :meth:`revoke` takes back a step that was committed, until :meth:`settle` or the next :meth:`begin`.

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
        self._before: Any = None
        self._after: Any = None
        # Residual and algorithm state from before the last step, or from before all steps that settle() has joined.
        self._earlier: tuple[torch.Tensor, Any] | None = None
        self._kept: tuple[torch.Tensor, Any] | None = None
        self._spare: torch.Tensor | None = None  # memory for another sum, after steps that were joined
        self.accumulator: Accumulator | None = None

    def begin(
        self, gradient: torch.Tensor, rank: int, world_size: int, algorithm: Algorithm | None = None
    ) -> Pattern[SparseVector]:
        """Begin a step and return its pattern.

        Args:
            gradient: The gradient, ``[numel]``, fp32, bf16 or fp16. It is only read.
            rank: Rank in the group of the exchange.
            world_size: Number of ranks in this group.
            algorithm: Algorithm for this step only. None uses :attr:`algorithm`.

        Raises:
            ConfigurationError: The shapes of gradient and residual differ.
        """
        if gradient.shape != self.residual.shape:
            raise ConfigurationError(
                f"gradient has shape {tuple(gradient.shape)}, the residual has shape {tuple(self.residual.shape)}"
            )
        self._earlier, self._kept = self._kept, None
        self._before = self.algorithm.state
        algorithm = algorithm or self.algorithm
        device, static = self.residual.device, algorithm.is_static
        # On a CPU, nothing waits for the result of a check, so errors are raised at once.
        needs_verdict = static or (algorithm.has_shared_verdict and device.type != "cpu")
        verdict = Verdict(device, is_shared=algorithm.has_shared_verdict) if needs_verdict else None
        self.accumulator = Accumulator(self.residual, gradient, self._scratch, self.workspace, verdict)
        return algorithm.reduce(self.accumulator, rank, world_size)

    def commit(self) -> None:
        """Commit the step: the new residual and algorithm state replace the old ones."""
        verdict = self.accumulator.verdict if self.accumulator is not None else None
        assert verdict is None or verdict.is_settled, "the method has not read what the ranks found wrong in its step"
        self.residual, self._scratch = self._scratch, self.residual
        self._earlier = self._earlier or (self._scratch, self._before)
        self._before = self.algorithm.state

    def settle(self, *, keep: bool = False) -> None:
        """Let :meth:`revoke` take back the last step no more. With ``keep``, it takes back this and the next one."""
        if self._earlier is not None:
            if keep and self._earlier[0] is self._scratch:
                spare, self._spare = self._spare, None
                self._scratch = torch.empty_like(self._scratch) if spare is None else spare
            elif not keep and self._earlier[0] is not self._scratch:
                self._spare = self._earlier[0]
        self._kept = self._earlier = self._earlier if keep else None

    def revoke(self, part: slice | None = None) -> None:
        """Take back the committed step, because nobody uses its mean. It may be called again.

        Args:
            part: The part of the vector whose residual is restored. The state of the algorithm does not change then.
                None restores both.
        """
        if self._earlier is None:
            return
        residual, state = self._earlier
        part = slice(None) if part is None else part
        self.residual[part].copy_(residual[part])
        if part == slice(None):
            self.algorithm.state = self._before = state

    def rollback(self) -> None:
        """Discard the step that :meth:`begin` started."""
        self.algorithm.state = self._before

    def suspend(self) -> None:
        """Roll back. :meth:`resume` can still commit the step if no other step begins first."""
        self._after = self.algorithm.state
        self.rollback()

    def resume(self) -> None:
        """Commit the step that :meth:`suspend` rolled back."""
        self.algorithm.state = self._after
        self.commit()

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
        self._earlier = None
