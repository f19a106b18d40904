"""The steps of a wrapped optimizer whose gradients the hook of a model averages."""

from __future__ import annotations

import torch

from tritoncomm.step import setup_checks
from tritoncomm.step.hook_state import HookState
from tritoncomm.step.optimizer_step import OptimizerStep, StepState
from tritoncomm.step.shards import local


class HookedStep:
    """Takes steps over what a hook has delivered during the backward pass.

    Args:
        hook: The state of the hook.
        optimizer: The original optimizer.
        step_state: State of the wrapped optimizer between a delivery and the step.
        optimizer_step: The step.
    """

    def __init__(
        self, hook: HookState, optimizer: torch.optim.Optimizer, step_state: StepState, optimizer_step: OptimizerStep
    ) -> None:
        self._hook = hook
        self._optimizer = optimizer
        self._step_state = step_state
        self._optimizer_step = optimizer_step

    @property
    def parameters(self) -> list[torch.Tensor]:
        """The parameters of the optimizer that the hook exchanges."""
        exchanged = {id(parameter) for parameter in self._hook.parameters.values()}
        return [p for group in self._optimizer.param_groups for p in group["params"] if id(p) in exchanged]

    @property
    def has_new_gradients(self) -> bool:
        """True if the hook has averaged gradients that have not been used."""
        return self._hook.exchange.deliveries != self._step_state.used_delivery

    def check_connected(self) -> None:
        """Raise :class:`RuntimeError` if another optimizer steps these parameters now."""
        self._hook.check_connected(self._step_state, self._optimizer)

    def check_averaged(self) -> None:
        """Raise :class:`RuntimeError` unless ``.grad`` is what the hook has averaged since the last step."""
        self.check_connected()
        if self.has_new_gradients or self._hook.is_alone:
            return
        gradients = [parameter.grad for parameter in self.parameters]
        if not self._step_state.zeroed or any(each is not None and bool(local(each).any()) for each in gradients):
            raise self._hook.not_averaged()

    def zero(self, *, set_to_none: bool) -> None:
        """Discard what the hook has delivered, after the gradients were reset.

        If they are zero and not None, a step may still use what was delivered.
        """
        zeroed = not set_to_none and (self.has_new_gradients or self._step_state.zeroed)
        self._step_state.reset()
        self.discard()
        self._step_state.zeroed = zeroed

    def discard(self) -> None:
        """Take back what the hook has delivered since the last step, because nobody uses it."""
        self._hook.revoke({id(parameter) for parameter in self.parameters})
        self._consume()

    def use(self) -> None:
        """Note that a step uses what the hook has delivered to parameters that have a gradient."""
        self._hook.use({id(parameter) for parameter in self.parameters if parameter.grad is not None})
        self._consume()

    def _consume(self) -> None:
        self._step_state.used_delivery = self._hook.exchange.deliveries
        self._hook.discard({id(parameter) for parameter in self.parameters})

    def step(self, scale: torch.Tensor | None, found: torch.Tensor | None) -> bool:
        """Take the step, and return False if it was skipped because of a NaN or Inf.

        Args:
            scale: Loss scale of a ``GradScaler`` that has not unscaled the gradients.
            found: Overflow flag of a ``GradScaler``.
        """
        hook, exchange = self._hook, self._hook.exchange
        self._optimizer_step.check_complete()
        if not hook.is_alone:  # one that was frozen when the hook was registered has a gradient of this rank alone
            groups = self._optimizer.param_groups
            stepped = [p for group in groups for p in group["params"] if p.requires_grad and p.grad is not None]
            setup_checks.check_exchanged(stepped, hook.parameters.values())
        if not self.has_new_gradients and all(parameter.grad is None for parameter in self.parameters):
            return True  # like an optimizer without gradients
        self.check_averaged()
        averaged = self.has_new_gradients or self._step_state.zeroed
        if hook.scaler is None and (scale is not None or found is not None):
            raise RuntimeError(
                "the hook has averaged scaled gradients: pass the GradScaler to wrap(..., scaler=scaler)"
            )
        self._step_state.zeroed = False
        repeated, self._step_state.attempted = self._step_state.attempted == exchange.deliveries, exchange.deliveries
        finite = scale is None or repeated or self._optimizer_step.unscale(scale)
        self._optimizer_step.alone = all(vector.is_bare for vector in exchange.vectors)
        if averaged:
            finite = finite and exchange.delivered is not None and not exchange.rejected
        else:  # a single worker steps by gradients that no pass has averaged, or once more by the same
            finite = finite and all(p.grad is None or bool(local(p.grad).isfinite().all()) for p in self.parameters)
        if not finite:
            self.discard()
            return False
        self._optimizer_step.step(exchange.delivered or [], clip=not repeated, started=self.use)
        self._step_state.attempted = None  # gradients that no pass averages have no number of their own
        return True
