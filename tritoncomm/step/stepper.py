"""The step of a wrapped optimizer: exchange, confirm, apply."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tritoncomm.errors import NonFiniteError
from tritoncomm.scheduler.process_group import is_distributed
from tritoncomm.scheduler.ranks import own_rank, rank_text
from tritoncomm.scheduler.span import profiled
from tritoncomm.step import agree
from tritoncomm.step.exchange.pending import Pending, State
from tritoncomm.step.exchange.vector import listed
from tritoncomm.step.local.steps import LocalSteps
from tritoncomm.step.model import ignored
from tritoncomm.step.model.misuse import LateBackward, LocalClipping
from tritoncomm.step.rules.step import coupled_decay
from tritoncomm.step.setup import Setup
from tritoncomm.step.torch_internals import creates_state, without_compile

__all__ = ["Stepper"]

logger = logging.getLogger("tritoncomm")


class Stepper:
    """Takes the steps of a wrapped optimizer.

    Args:
        setup: What the optimizer is made of.

    Attributes:
        setup: See above.
        all_skipped: Whether all ranks have skipped the last step, because of a NaN, an Inf or an overflow in gradients.
        keeps_scales_equal: Whether a scaler reads ``all_skipped``, so that scales stay equal and no warning is due.
        found_in_unscale: Overflow flag of ``tritoncomm.amp.GradScaler`` on this rank after ``unscale_``. None
            without such a call.
        late_backward: Notices a backward pass after ``synchronize()``.
        unguard: Lets optimizers of a list, and those inside, step by themselves again.
    """

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.all_skipped = self.keeps_scales_equal = self._has_warned = False
        self._has_caught_up = False  # in continue_in(), which has failed later, and has not told it
        self.found_in_unscale: torch.Tensor | None = None
        self.unguard: Callable[[], Any] = lambda: None
        self.late_backward, self._clipping = LateBackward(), LocalClipping()
        # What a GradScaler has set: its scale, if it has not unscaled the gradients, and its overflow flag.
        self._scale: torch.Tensor | None = None
        self._found: torch.Tensor | None = None

    @without_compile
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """See :meth:`tritoncomm.SparseOptimizer.step`."""
        held = vars(self.setup.optimizer)
        # The optimizer's own step would take them for its own. A GradScaler removes them if step() succeeds.
        scaler: dict[str, Any] = {name: held.pop(name) for name in ("grad_scale", "found_inf") if name in held}
        self._scale, self._found = scaler.get("grad_scale"), scaler.get("found_inf")
        profile = profiled(f"Optimizer.step#{type(self.setup.optimizer).__name__}.step") or nullcontext()
        try:
            with self._noted(), profile:
                loss = self._step(closure)
        finally:
            self._scale = self._found = None
        held.update(scaler)
        return loss

    @contextmanager
    def _noted(self) -> Iterator[None]:
        """Note if a step in the body fails. It can be repeated if its update has not begun, unless a signal ends it."""
        try:
            yield
        except BaseException as error:
            exchange = self.setup.exchange
            if not isinstance(error, Exception):
                exchange.stop()
            elif exchange.state is State.READY:
                exchange.pending.note_versions(exchange.scope.gradients)
            raise

    def _step(self, closure: Callable[[], Any] | None) -> Any:
        setup, loss, self.all_skipped = self.setup, None, False
        if closure is not None:
            if setup.is_synchronized:  # the closure may not change them
                setup.exchange.pending.note_versions(setup.scope.gradients)
            with torch.enable_grad():
                loss = closure()
        if creates_state(setup.optimizer):  # nothing may be exchanged, because other ranks may not take this step
            setup.steps.initialize_state()
            if setup.local is not None:
                setup.local.steps.initialize_state()
            return loss
        if setup.local is None:
            self.exchange_and_apply()
            return loss
        if not setup.is_synchronized:
            if setup.local.is_pending:
                raise RuntimeError("the exchange after the last step has not been completed: call merge() first")
            setup.exchange.check_complete()
            setup.exchange.check_group()
            self._take_local_step(setup.local)
        if setup.local.is_due:
            self.merge(setup.local)
        return loss

    def _take_local_step(self, local_steps: LocalSteps) -> None:
        """Let the optimizers that exchange updates step by this worker's gradients."""
        setup = self.setup
        if setup.unreduced.modules:
            setup.unreduced.look(setup.everybody)
        if setup.steps.alone:
            setup.note_new()
        local_steps.take(self._scale, self._overflow)
        # The loss scale, and an overflow of this rank, are no matter of the exchange.
        self._scale = self._found = self.found_in_unscale = None

    @property
    def _overflow(self) -> torch.Tensor | None:
        """The overflow flag of a ``GradScaler``. None without one."""
        return self.found_in_unscale if self._found is None else self._found

    def exchange_and_apply(self) -> None:
        """Exchange, unless that was done, and apply the mean."""
        setup, pending = self.setup, self.setup.exchange.pending
        if pending.is_taken and (pending.are_others(now := setup.scope.gradients) or pending.are_changed(now)):
            self.withdraw()  # a hook has failed after the last step, and these gradients are those of the next
        if not setup.is_synchronized:
            self._average(shown=False)
        elif self._scale is not None and pending.scale is None:
            raise RuntimeError("synchronize() has averaged scaled gradients: call scaler.unscale_(optimizer) first")
        self._check_unchanged()
        pending = setup.exchange.pending
        if pending.parts:
            self._apply()
        else:
            setup.exchange.discard()
            self.all_skipped = setup.local is None and not pending.is_taken
            if not pending.is_taken:
                self._warn_about_scale()
        self.forget()

    def _check_unchanged(self) -> None:
        """Raise if gradients are not what was averaged, except for changes between synchronize() and step()."""
        pending, gradients = self.setup.exchange.pending, self.setup.exchange.scope.gradients
        if pending.are_others(gradients):
            raise RuntimeError("gradients were replaced after synchronize(): call step() or zero_grad() in between")
        if pending.versions and pending.are_changed(gradients):
            raise RuntimeError(
                "gradients have changed since step() failed, or in a closure after synchronize(): call step() before "
                "the next backward pass, or optimizer.zero_grad() on all ranks, which discards what was averaged"
            )
        self.late_backward.check(gradients)
        if self.setup.local is None and self.setup.unreduced.modules:  # also what came after synchronize()
            self.setup.unreduced.look(self.setup.everybody)

    def _warn_about_scale(self) -> None:
        """Log once that a step was skipped although the scaler of this rank found no overflow and keeps its scale."""
        found = self._found
        if self.keeps_scales_equal or found is None or bool(found) or self._has_warned:
            return
        self._has_warned = True
        logger.warning(
            "%s: the step was skipped because of an overflow that this rank's GradScaler did not find. It keeps "
            "its scale. With tritoncomm.amp.GradScaler, all scales stay equal. A schedule that waits for steps that "
            "are not skipped needs that",
            rank_text(own_rank()),
        )

    def forget(self) -> None:
        """Forget what was noticed about the last exchange, which has been used or is not needed."""
        self.found_in_unscale = None
        self.late_backward.forget()

    @without_compile
    @torch.inference_mode(False)  # what is made here outlives an evaluation
    @torch.no_grad()
    def merge(self, local_steps: LocalSteps) -> None:
        """See :meth:`tritoncomm.SparseOptimizer.merge`."""
        local_steps.check_not_averaged("merge()")
        if not self.setup.is_synchronized:
            if not local_steps.taken:
                return
            with self._reported():
                local_steps.give(alone=self.setup.exchange.owes_nothing())
        with self._noted():
            self.exchange_and_apply()
        local_steps.is_pending = False

    @contextmanager
    def _reported(self) -> Iterator[None]:
        """Let the other ranks know if the body fails, in which shards decide together and no exchange is under way."""
        try:
            yield
        except RuntimeError as error:
            reported = self.setup.exchange.report(error)
            if reported is None:
                raise
            raise reported from error

    @property
    def outer_group(self) -> dict[str, Any]:
        """The options of the step of the common parameters by the mean update."""
        if self.setup.local is None:
            raise RuntimeError("outer_lr: no optimizer exchanges updates")
        group: dict[str, Any] = self.setup.local.outer.param_groups[0]
        return group

    def _apply(self) -> None:
        """Take the optimizer's step over what is delivered. If a hook of the user fails before it, nothing is lost."""
        setup, exchange = self.setup, self.setup.exchange
        pending, steps = exchange.pending, exchange.steps
        clip = setup.local is None and not pending.is_flush  # updates are not clipped
        # Hooks of the user have run around the local steps.
        hooked = setup.optimizer if setup.local is None else None
        update = exchange.update() if setup.local is None else self._settling(setup.local)
        try:
            setup.steps.step(
                [part.mean for part in pending.parts], update, hooked,
                clip=clip, untouched=pending.is_untouched, decayed=setup.decays_in_vector,
            )  # fmt: skip
        except Exception:
            if exchange.steps > steps:  # a hook after the update: a repeated call does not take the step again
                exchange.pending = Pending(pending.scale, is_taken=True)
                exchange.skip()
            raise

    @contextmanager
    def _settling(self, local_steps: LocalSteps) -> Iterator[None]:
        exchange = self.setup.exchange
        gains = {id(each): vector.gain for vector in exchange.scope.vectors for each in vector.layout.parameters}
        momentum = local_steps.without_momentum() if exchange.pending.is_flush else nullcontext()
        with momentum, exchange.update(), local_steps.settling(gains):
            yield

    def withdraw(self) -> None:
        """Throw away averaged gradients that no step has used."""
        if self.setup.local is not None:
            self.setup.local.withdraw()
        self.setup.exchange.discard()
        self.forget()

    @without_compile
    def synchronize(self) -> None:
        """See :meth:`tritoncomm.SparseOptimizer.synchronize`."""
        self._average(shown=True)

    @torch.no_grad()
    def _average(self, *, shown: bool) -> None:
        """Exchange. If ``shown``, somebody may look at ``.grad``, which has no decay in it before the step."""
        setup = self.setup
        if setup.steps.alone:
            setup.note_new()
        exchange, scale, found, own = setup.exchange, self._scale, self._overflow, setup.steps.ignored
        decay = coupled_decay(setup.exchanged) if setup.decays_in_vector else {}
        is_exchanged_whole = setup.local is None and not setup.steps.alone and exchange.scope.all_shards is None
        look = self._clipping.look if is_exchanged_whole and exchange.scope.vectors[0].rank == 0 else None
        error = setup.parameters.local_error()
        step = Pending(scale, decay, shown, error=error, look=look, fault=self._fault(found, own))
        try:
            exchange.exchange(step)
            ignored.prepare(own, scale)  # once, when the step is to be applied: here, or where this rank catches up
        except NonFiniteError as error:
            if setup.local is not None:
                setup.local.fault = ""
            if setup.options.on_nonfinite == "raise" and found is None:
                raise
            logger.log(logging.INFO if found is not None else logging.WARNING, "step skipped on all ranks: %s", error)
            exchange.skip()

    def _fault(self, found: torch.Tensor | None, own: Sequence[torch.Tensor]) -> str:
        """Return what is NaN or Inf on this rank beside the gradients that are exchanged, or an empty text.

        Args:
            found: Overflow flag of a ``GradScaler``. None without one.
            own: The parameters that are this rank's own, and whose gradients must be finite.
        """
        if found is not None and bool(found):
            return "all, because the scaled loss overflowed"
        bad = listed(ignored.non_finite(own, self.setup.names))
        return bad if self.setup.local is None else bad or self.setup.local.fault

    @without_compile
    @torch.inference_mode(False)
    @torch.no_grad()
    def flush(self) -> None:
        """See :meth:`tritoncomm.SparseOptimizer.flush`."""
        setup = self.setup
        if setup.exchange.pending.is_taken:  # a hook has failed after the last step, perhaps on this rank alone
            self.withdraw()
        setup.check_no_pending_step("flush()")
        if setup.local is None and setup.exchange.has_no_residual():
            return
        if setup.local is not None:
            held = [vector.residuals_by_parameter() for vector in setup.scope.vectors]
            with self._reported():
                setup.local.fold({anchor: residual for each in held for anchor, residual in each.items()})
        setup.exchange.exchange(Pending(is_flush=True))
        for parameter in setup.steps.ignored:
            parameter.grad = None
        with self._noted():
            self._apply()

    def continue_in(
        self, process_group: dist.ProcessGroup | None, node_group: dist.ProcessGroup | None, module: nn.Module | None
    ) -> bool:
        """Exchange in ``process_group`` from now on. Return whether a step of other ranks was applied here.

        See :meth:`tritoncomm.SparseOptimizer.reset_process_group`.
        """
        exchange, told, some_have = self.setup.exchange, dict[int, list[int]](), False
        if is_distributed():
            absent = exchange.presence.positions(exchange.scope.parameters)
            own = {"steps": exchange.steps, "absent": absent, "caught up": self._has_caught_up}
            gathered = agree.all_gather(own, process_group, self.setup.device)
            told = {of["steps"]: of["absent"] for of in gathered.values()}
            some_have = len(told) > 1 or any(of["caught up"] for of in gathered.values())
            holds = exchange.state is State.SUSPENDED or (exchange.state is State.READY and exchange.pending.parts)
            if holds and exchange.steps + 1 == max(told):
                exchange.presence.set(exchange.scope.parameters, told[max(told)])
                if exchange.state is State.SUSPENDED:
                    exchange.catch_up()
                    ignored.prepare(self.setup.steps.ignored, exchange.pending.scale)
                before = exchange.steps
                try:
                    self._apply()
                finally:  # also if a hook of the user fails after the update
                    self._has_caught_up = exchange.steps > before
        self.forget()
        self.setup.continue_in(process_group, node_group, module, caught_up=some_have)
        caught_up, self._has_caught_up = self._has_caught_up, False
        return caught_up
