"""The steps of a wrapped optimizer that exchanges gradients itself."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import torch

from tritoncomm.errors import ConfigurationError, NonFiniteError
from tritoncomm.primitives.sparse_vector import SparseVector
from tritoncomm.step.delivered import Delivered
from tritoncomm.step.exchange import GradientExchange
from tritoncomm.step.optimizer_step import OptimizerStep, StepState
from tritoncomm.step.shards import local
from tritoncomm.step.vector_exchange import VectorExchange

logger = logging.getLogger("tritoncomm")


class PlainStep:
    """Averages gradients over ranks, and takes the step over what was delivered.

    Args:
        step_state: State of the wrapped optimizer between an exchange and the step.
        optimizer_step: The step.
        on_nonfinite: What a NaN or Inf does, see :func:`tritoncomm.wrap`.
    """

    def __init__(self, step_state: StepState, optimizer_step: OptimizerStep, on_nonfinite: str) -> None:
        self._step_state = step_state
        self._optimizer_step = optimizer_step
        self._on_nonfinite = on_nonfinite

    def average(
        self,
        exchange: GradientExchange,
        scale: torch.Tensor | None,
        found: torch.Tensor | None,
        *,
        local_error: Callable[[], ConfigurationError | None],
        inspect: Callable[[list[tuple[VectorExchange, SparseVector]]], None] | None,
    ) -> None:
        """Exchange the gradients. Nothing is delivered if the step is skipped because of a NaN or Inf.

        Args:
            exchange: The exchange.
            scale: Loss scale of a ``GradScaler`` that has not unscaled the gradients.
            found: Overflow flag of a ``GradScaler``.
            local_error: Returns why the gradients of this rank cannot be exchanged, if so.
            inspect: See :meth:`GradientExchange.average`.
        """
        step_state = self._step_state
        if step_state.exchanged:
            raise RuntimeError("gradients were exchanged already: call step() or zero_grad() first")
        if exchange.delivered is not None:  # a signal came between the commit and the update
            self._optimizer_step.is_stopped = True
        if found is None:
            found = step_state.found_in_unscale
        try:
            exchange.average(
                local_error=local_error(),
                scale=1.0 if scale is None else float(scale),
                overflowed=found is not None and bool(found),
                zero=self._on_nonfinite == "zero" and found is None,
                inspect=inspect,
            )
        except NonFiniteError as error:
            if self._on_nonfinite == "raise" and found is None:
                raise
            logger.log(logging.INFO if found is not None else logging.WARNING, "step skipped on all ranks: %s", error)
        step_state.exchanged = True  # without delivered entries, the step does nothing
        step_state.written_gradients = _gradients(exchange)

    def step(self, exchange: GradientExchange, *, scaled: bool, untouched: bool) -> bool:
        """Take the step, and return False if it was skipped because of a NaN or Inf.

        Args:
            exchange: The exchange, which has averaged the gradients.
            scaled: Whether a ``GradScaler`` has not unscaled the gradients.
            untouched: Whether nobody has seen ``.grad`` since the exchange.
        """
        step_state = self._step_state
        if scaled and not untouched and step_state.attempted is None:
            raise RuntimeError("synchronize() has averaged scaled gradients: call scaler.unscale_(optimizer) first")
        self._check_unchanged(exchange)
        finite = exchange.delivered is not None
        if finite:
            self._take(exchange, untouched=untouched)
        step_state.reset()
        return finite

    def apply(self, exchange: GradientExchange, delivered: Sequence[Delivered]) -> None:
        """Take the step over ``delivered``, without clipping."""
        exchange.delivered, self._step_state.exchanged = list(delivered), True
        self._step_state.written_gradients = _gradients(exchange)
        self._take(exchange, clip=False)

    def _check_unchanged(self, exchange: GradientExchange) -> None:
        """Raise if ``.grad`` does not hold what was averaged, except for changes between synchronize() and step()."""
        step_state, gradients = self._step_state, _gradients(exchange)
        if any(now is not then for now, then in zip(gradients, step_state.written_gradients, strict=True)):
            raise RuntimeError("gradients were replaced after synchronize(): call step() or zero_grad() in between")
        if step_state.versions and step_state.versions != [_version(gradient) for gradient in gradients]:
            raise RuntimeError(
                "gradients have changed since a hook of step() failed: repeat step() before the next backward pass, or "
                "call optimizer.zero_grad() on all ranks, which discards what was averaged"
            )

    def _take(self, exchange: GradientExchange, *, clip: bool = True, untouched: bool = False) -> None:
        """Take the step over what was delivered. If a hook of the user fails before it, nothing is lost."""
        step_state = self._step_state
        delivered, repeated = exchange.delivered or [], step_state.attempted is not None
        self._optimizer_step.alone = all(vector.is_bare for vector in exchange.vectors)
        step_state.attempted = exchange.deliveries
        try:
            self._optimizer_step.step(
                delivered, clip=clip and not repeated, untouched=untouched, started=exchange.take_delivered
            )
        except BaseException:
            step_state.versions = [_version(gradient) for gradient in _gradients(exchange)]
            if self._optimizer_step.is_stopped:
                step_state.reset()  # the next step is an exchange, in which the other ranks learn it
            raise


def _gradients(exchange: GradientExchange) -> list[torch.Tensor | None]:
    return [parameter.grad for parameter in exchange.parameters]


def _version(gradient: torch.Tensor | None) -> int:
    """Return a number that grows whenever ``gradient`` is changed in place."""
    return -1 if gradient is None else local(gradient)._version  # noqa: SLF001 - torch documents it for this use
