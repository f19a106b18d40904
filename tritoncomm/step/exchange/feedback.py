"""Error feedback of one flat vector: its residual, how long its entries have waited, and what a step leaves of both."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch

from tritoncomm.algorithms.base import Algorithm
from tritoncomm.errors import ConfigurationError
from tritoncomm.primitives.accumulator import Accumulator, Guesses
from tritoncomm.primitives.sparse_vector import SparseVector
from tritoncomm.primitives.verdict import Verdict
from tritoncomm.scheduler.rounds import Pattern
from tritoncomm.step.tensors.shards import local, local_shards
from tritoncomm_kernels import Guess, root_mean_squares

# The root mean square of a parameter is measured every so many steps, and in each of as many first ones, because
# weights may start at zero. In between, a norm changes little, or it grows and is underestimated.
RENEW_RMS_EVERY = 20


class Ages:
    """How late the entries of one flat vector are, by parameter: what a rule for late gradients reads and keeps.

    Parameters without gradient take no step, and their entries do not age.

    Args:
        parameters: The parameters, in the order of the vector. Default: none, for an optimizer without such a rule.
        bounds: The start of each parameter in the vector, followed by the length of the vector.

    Attributes:
        steps: Number of the present step, counted from 1.
        flat: The step of the last delivery of each coordinate, int32 ``[numel]``, equal on all ranks. A parameter has
            its elements in their order in memory.
        last: The view of :attr:`flat` that belongs to each parameter, with the shape and strides of the parameter, or
            of its local shard.
        rms: The root mean square of each parameter, fp32 ``[]``, which may be some steps old. Empty before it was
            measured.
    """

    def __init__(self, parameters: Sequence[torch.Tensor] = (), bounds: Sequence[int] = (0,)) -> None:
        self.steps = 0
        self.flat = torch.zeros(bounds[-1], dtype=torch.int32, device=parameters[0].device if parameters else "cpu")
        shards = [local(each.detach()) for each in parameters]
        # Of memory without gaps, as torch lays out what is like the parameter.
        strides = [torch.empty_like(each, device="meta").stride() for each in shards]
        self.last = [
            self.flat.as_strided(shard.shape, stride, start)
            for shard, stride, start in zip(shards, strides, bounds, strict=False)
        ]
        self.rms: list[torch.Tensor] = []
        self._parameters = parameters

    def begin(self) -> None:
        """Begin the step of a rule, which writes :attr:`steps` to the :attr:`last` of what is delivered."""
        done = self.steps - 1
        if not self.rms or done < RENEW_RMS_EVERY or done % RENEW_RMS_EVERY == 0:
            self._measure()
        for parameter, last in zip(self._parameters, self.last, strict=True):
            if parameter.grad is None:
                last.add_(1)

    def _measure(self) -> None:
        """Measure the root mean square of each parameter."""
        shards = local_shards(self._parameters)
        measured = iter(root_mean_squares([shard for shard in shards if shard.numel()]))
        zero = torch.zeros((), dtype=torch.float32, device=shards[0].device)
        values = torch.stack([next(measured) if shard.numel() else zero for shard in shards]).unbind()
        if self.rms:  # rules hold these tensors
            torch._foreach_copy_(self.rms, values)
        else:
            self.rms = [*values]

    def deliver_all(self, steps: int) -> None:
        """Let every coordinate have been delivered in the step with this number."""
        self.flat.fill_(steps)
        self.rms = []


class ErrorFeedback:
    """One rank's residual for one flat vector, and the algorithm that exchanges this vector.

    Call :meth:`begin`, and run the returned pattern on a scheduler. Residual and algorithm state are then still those
    from before the step. :meth:`commit` replaces both by those after the step, :meth:`rollback` forgets the step.

    Attributes:
        algorithm: The algorithm, with the state from before the step.
        residual: This rank's residual, fp32 ``[numel]``.
        pending: The residual after the step, fp32 ``[numel]``, which is computed while that before stays unchanged. A
            commit swaps them.
        ages: How late entries are, if the optimizer has a rule for late gradients.
        guesses: Where searches for the largest entries begin.
        accumulator: Residual plus gradient of the last step. None before the first step.
    """

    def __init__(self, algorithm: Algorithm, device: torch.device | str = "cpu") -> None:
        self.algorithm = algorithm
        self.residual = torch.zeros(algorithm.numel, dtype=torch.float32, device=device)
        self.pending = torch.zeros_like(self.residual)
        self._before = self._after = algorithm.state  # the algorithm's states around the step
        self.ages = Ages()
        self.guesses: Guesses = defaultdict(Guess)
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
        """
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
        self.accumulator = Accumulator(residual, gradient, self.pending, self.guesses, verdict)
        return self._reduced(algorithm.reduce(self.accumulator, rank, world_size), verdict)

    def _reduced(self, pattern: Pattern[SparseVector], verdict: Verdict | None) -> Pattern[SparseVector]:
        """Run ``pattern``, and set the algorithm's new state aside until the commit."""
        mean = yield from pattern
        if mean.__class__ is not SparseVector or mean.numel != self.algorithm.numel:
            raise TypeError(
                f"{type(self.algorithm).__name__}.reduce has returned {mean!r}: return the SparseVector of "
                f"{self.algorithm.numel} coordinates that acc.vector() makes"
            )
        assert verdict is None or verdict.is_settled, "the method has not read what the ranks found wrong in its step"
        self._after, self.algorithm.state = self.algorithm.state, self._before
        return mean

    def commit(self, left: Sequence[slice] = ()) -> None:
        """Replace residual and algorithm state by those after the step.

        ``left`` are coordinates of which no rank uses the mean. Their residual is the one before the step.
        """
        before, self.residual = self.residual, self.pending
        self.pending = before
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
