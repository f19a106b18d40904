"""The ledger of one flat vector: its residual, how long its entries have waited, and what a step leaves of both."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from tritoncomm.algorithms.base import Algorithm
from tritoncomm.errors import ConfigurationError
from tritoncomm.primitives.accumulator import Accumulator
from tritoncomm.primitives.sparse_vector import SparseVector
from tritoncomm.primitives.verdict import Verdict
from tritoncomm.scheduler.rounds import Pattern
from tritoncomm.step.tensors.shards import local, local_shards
from tritoncomm_kernels import Workspace, root_mean_squares

# The root mean square of a parameter is measured every so many steps, and in each of as many first ones, because
# weights may start at zero. In between, a norm changes little, or it grows and is underestimated.
RENEW_RMS_EVERY = 20


@dataclass
class Ledger:
    """What a step of one flat vector changes. A commit puts the one after the step in its place, a rollback drops it.

    Attributes:
        residual: This rank's residual, fp32 ``[numel]``.
        method: The state of the algorithm.
        last: The step of each coordinate's last delivery, int32 ``[numel]``, equal on all ranks. A parameter has its
            elements in their order in memory. The rule for late gradients updates it in place, see :class:`Ages`. None
            without such a rule.
        rms: The root mean square of each parameter, fp32 ``[parameters]``, which may be some steps old. None before it
            was measured.
    """

    residual: torch.Tensor
    method: Any
    last: torch.Tensor | None = None
    rms: torch.Tensor | None = None

    def deliver_all(self, steps: int) -> None:
        """Let every coordinate have been delivered in the step with this number."""
        if self.last is not None:
            self.last.fill_(steps)
        self.rms = None


class Ages:
    """How late the entries of one flat vector are, by parameter: what a rule for late gradients reads and keeps.

    Parameters without gradient take no step, and their entries do not age.

    Args:
        parameters: The parameters, in the order of the vector.
        bounds: The start of each parameter in the vector, followed by the length of the vector.

    Attributes:
        steps: Number of the present step, counted from 1.
        last: The step of the last delivery of each coordinate, int32, one view for each parameter, with the shape and
            strides of the parameter, or of its local shard.
        rms: The root mean square of each parameter, fp32 ``[]``.
    """

    def __init__(self, parameters: Sequence[torch.Tensor], bounds: Sequence[int]) -> None:
        self.steps = 0
        self.last: list[torch.Tensor] = []
        self.rms: list[torch.Tensor] = []
        self._parameters, self._bounds = parameters, bounds
        # Of memory without gaps, as torch lays out what is like the parameter.
        self._strides = [torch.empty_like(local(each.detach()), device="meta").stride() for each in parameters]
        self._ledger: Ledger | None = None
        self._viewed: tuple[torch.Tensor | None, torch.Tensor | None] = None, None
        self._is_used = False

    def of(self, last: torch.Tensor) -> list[torch.Tensor]:
        """Return the view of ``last`` that belongs to each parameter, shaped like the local shard."""
        return [
            last[start:stop].as_strided(local(parameter).shape, strides, last.storage_offset() + start)
            for parameter, (start, stop), strides in zip(
                self._parameters, pairwise(self._bounds), self._strides, strict=True
            )
        ]

    def open(self, ledger: Ledger, steps: int) -> None:
        """Let the step with the number ``steps`` change the ages in ``ledger``."""
        self._ledger, self.steps, self._is_used = ledger, steps, False

    def begin(self) -> None:
        """Begin the step of a rule, which writes :attr:`steps` to the :attr:`last` of what is delivered."""
        ledger, self._is_used = self._ledger, True
        assert ledger is not None
        if ledger.last is None:
            ledger.last = torch.full_like(ledger.residual, self.steps - 1, dtype=torch.int32)
        done = self.steps - 1
        if ledger.rms is None or done < RENEW_RMS_EVERY or done % RENEW_RMS_EVERY == 0:
            ledger.rms = self._measured(ledger.rms)
        if ledger.last is not self._viewed[0]:
            self.last = self.of(ledger.last)
        if ledger.rms is not self._viewed[1]:
            self.rms = list(ledger.rms.unbind())
        self._viewed = ledger.last, ledger.rms
        for parameter, last in zip(self._parameters, self.last, strict=True):
            if parameter.grad is None:
                last.add_(1)

    def _measured(self, out: torch.Tensor | None) -> torch.Tensor:
        """Return the root mean square of each parameter, in ``out`` if it is given."""
        shards = local_shards(self._parameters)
        measured = iter(root_mean_squares([shard for shard in shards if shard.numel()]))
        zero = torch.zeros((), dtype=torch.float32, device=shards[0].device)
        values = torch.stack([next(measured) if shard.numel() else zero for shard in shards])
        return values if out is None else out.copy_(values)

    def close(self) -> None:
        """End the step. If no rule has used the ages, every coordinate was delivered."""
        if self._ledger is not None and not self._is_used:
            self._ledger.deliver_all(self.steps)


class ErrorFeedback:
    """One rank's ledger for one flat vector, and the algorithm that exchanges this vector.

    Call :meth:`begin`, and run the returned pattern on a scheduler. Residual and algorithm state are then still those
    from before the step. :meth:`commit` replaces both by those after the step, :meth:`rollback` forgets the step.

    Attributes:
        algorithm: The algorithm, with the state that the ledger has.
        ledger: What a step changes.
        workspace: Scratch memory of the kernels, kept between steps.
        accumulator: Residual plus gradient of the last step. None before the first step.
    """

    def __init__(self, algorithm: Algorithm, device: torch.device | str = "cpu") -> None:
        self.algorithm = algorithm
        self.ledger = Ledger(torch.zeros(algorithm.numel, dtype=torch.float32, device=device), algorithm.state)
        # The ledger after the step, whose residual is computed while that before stays unchanged. A commit swaps them.
        self._next = Ledger(torch.zeros_like(self.residual), algorithm.state)
        self.workspace = Workspace()
        self._waits: Sequence[slice] = ()
        self.accumulator: Accumulator | None = None

    @property
    def residual(self) -> torch.Tensor:
        """This rank's residual, fp32 ``[numel]``."""
        return self.ledger.residual

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
        self.ledger.method = self._next.method = self.algorithm.state
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
        self.accumulator = Accumulator(residual, gradient, self.pending, self.workspace, verdict)
        return self._reduced(algorithm.reduce(self.accumulator, rank, world_size), verdict)

    def _reduced(self, pattern: Pattern[SparseVector], verdict: Verdict | None) -> Pattern[SparseVector]:
        """Run ``pattern``, and set the algorithm's new state aside until the commit."""
        mean = yield from pattern
        assert verdict is None or verdict.is_settled, "the method has not read what the ranks found wrong in its step"
        self._next.method, self.algorithm.state = self.algorithm.state, self.ledger.method
        return mean

    @property
    def pending(self) -> torch.Tensor:
        """The residual that a commit will put in the place of :attr:`residual`, fp32 ``[numel]``."""
        return self._next.residual

    def commit(self, left: Sequence[slice] = ()) -> None:
        """Replace residual and algorithm state by those after the step.

        ``left`` are coordinates of which no rank uses the mean. Their residual is the one before the step.
        """
        before, self.ledger = self.ledger, self._next
        self._next = before
        self.ledger.last, self.ledger.rms = before.last, before.rms
        for own in self._waits:  # sums that other ranks have left here stay
            self.residual[own].add_(before.residual[own])
        for own in left:
            self.residual[own].copy_(before.residual[own])
        before.method = self.algorithm.state = self.ledger.method

    def rollback(self) -> None:
        """Forget the step that :meth:`begin` began, wherever its pattern has stopped."""
        self.algorithm.state = self._next.method = self.ledger.method

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
