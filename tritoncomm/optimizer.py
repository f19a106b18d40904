"""An optimizer wrapper that exchanges gradients before each step."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tritoncomm.errors import ConfigurationError, NonFiniteError
from tritoncomm.scheduler.process_group import is_distributed
from tritoncomm.step import agree
from tritoncomm.step.exchange.feedback import ErrorFeedback
from tritoncomm.step.exchange.limit import sketch_of_owners
from tritoncomm.step.exchange.machine import State
from tritoncomm.step.exchange.vector import listed
from tritoncomm.step.figures import figures_of
from tritoncomm.step.local.steps import LocalSteps
from tritoncomm.step.model import ignored
from tritoncomm.step.model.module import checked_module, group_of
from tritoncomm.step.optimizer_list import join, parts_of, split
from tritoncomm.step.optimizer_setup import OptimizerSetup
from tritoncomm.step.recipes import never_delays
from tritoncomm.step.rules.choose import exchanges_updates
from tritoncomm.step.rules.step import coupled_decay, restore_rules, saved_state
from tritoncomm.step.saved import state as exchange_state
from tritoncomm.step.settings import check_group, check_outer_lr, one_of
from tritoncomm.step.torch_internals import creates_state, without_compile

__all__ = ["SparseOptimizer"]

logger = logging.getLogger("tritoncomm")


class SparseOptimizer(OptimizerSetup):
    """The optimizer that :func:`wrap` returns.

    It shares ``param_groups``, ``state`` and ``defaults`` with the original optimizer, which is ``optimizer``. A copy
    uses the same process group, an unpickled optimizer the default process group. Hooks are not copied.

    Attributes:
        all_skipped: Whether all ranks have skipped the last step, because of a NaN, an Inf or an overflow in gradients.
        keeps_scales_equal: Whether a scaler reads :attr:`all_skipped`, so that scales stay equal and no warning is due.
    """

    all_skipped = False
    keeps_scales_equal = False

    def __repr__(self) -> str:
        return f"SparseOptimizer({self.recipe!r}, {self.optimizer!r})"

    def reset_process_group(
        self,
        process_group: dist.ProcessGroup | None = None,
        node_group: dist.ProcessGroup | None = None,
        *,
        model: nn.Module | None = None,
    ) -> bool:
        """Continue in another process group of any size. All its ranks must call this.

        After a failure, some ranks may have applied a step that other ranks could not confirm. The other ranks apply it
        here. Residuals are scaled so that the pending update of the remaining ranks does not change. The residual of a
        lost rank is lost. Methods determine thresholds and partitions from scratch. Without ``node_group``, the
        exchange is sparse between all ranks, even if it was dense within nodes before. See :func:`wrap`.

        Args:
            process_group: The new process group. Default: the default process group.
            node_group: The ranks of this rank's node. Default: None.
            model: The new ``DistributedDataParallel`` module around the same module, if there is one. Its process group
                is used. After a failure, create it with ``init_sync=False``, because ranks may be one step apart.
                Default: None.

        Returns:
            Whether a step of other ranks was applied here. Learning-rate schedules must then take theirs here, too.

        Raises:
            RuntimeError: An error or a signal has stopped an update: load a checkpoint.
            ConfigurationError: The model is sharded, or an argument is invalid.
            ConfigMismatchError: Ranks are not at the same step, or hold different parameters.
        """
        exchange, told, caught_up = self._exchange, dict[int, list[int]](), False
        exchange.check_complete()
        check_group("process_group", process_group)
        if self.has_shards:
            raise ConfigurationError("a sharded model cannot change its groups: load a checkpoint in new processes")
        module = checked_module(model)
        process_group = group_of(module, process_group)
        if is_distributed():
            own = {"steps": exchange.steps, "absent": exchange.presence.positions(exchange.parameters)}
            gathered = agree.all_gather(own, process_group, self._device)
            told = {of["steps"]: of["absent"] for of in gathered.values()}
            caught_up = exchange.state is State.SUSPENDED and exchange.steps + 1 == max(told)
            if caught_up:
                exchange.presence.set(exchange.parameters, told[max(told)])
                exchange.catch_up()
                self._prepare_own()
                self._apply(untouched=False)
        self._step_state.reset()
        self._continue_in(process_group, node_group, module, caught_up=len(told) > 1)
        return caught_up

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients, and throw away averaged gradients that :meth:`step` has not used."""
        self.optimizer.zero_grad(set_to_none=set_to_none)
        if self._local is not None:
            self._local.withdraw()
        self._exchange.discard()
        self._step_state.reset()

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Exchange the gradients, unless :meth:`synchronize` has done so, then take the optimizer's step.

        ``closure`` computes the gradients and returns the loss, which is returned. It is called once. If a step
        pre-hook of the original optimizer raises, call this again: it does not exchange again, and takes the step.

        Raises:
            RuntimeError: After :meth:`synchronize`, ``closure`` changed the averaged gradients, or they were replaced.
            ConfigurationError: The original optimizer has parameters that are not exchanged. Nothing has changed.
            ProtocolMismatchError: Ranks differ in frozen parameters, learning rates or completed updates, or an error
                or a signal has stopped an update before: load a checkpoint. Nothing has changed. All ranks raise it.
            NonFiniteError: A rank has a NaN or Inf, and ``on_nonfinite`` is ``"raise"``. Nothing has changed.
            ExchangeError: A peer was lost, or a wait timed out. Nothing has changed.
        """
        try:
            return self._step(closure)
        except BaseException as error:
            self._note_failure(error)
            self._forget_scaler()
            raise

    @without_compile
    def _step(self, closure: Callable[[], Any] | None) -> Any:
        step_state, loss, self.all_skipped = self._step_state, None, False
        if closure is not None:
            if self.is_synchronized:  # the closure may not change them
                step_state.note_versions(self._exchange.gradients)
            with torch.enable_grad():
                loss = closure()
        if creates_state(self.optimizer):  # nothing may be exchanged, because other ranks may not take this step
            self._optimizer_step.initialize_state(self._exchange.parameters)
            if self._local is not None:
                self._local.initialize_state()
            return loss
        if self._local is None:
            self._exchange_and_apply()
            return loss
        if not self.is_synchronized:
            if self._local.is_pending:
                raise RuntimeError("the exchange after the last step has not been completed: call merge() first")
            self._exchange.check_complete()
            self._exchange.check_group()
            self._parameters.check()  # before the first of a list steps
            self._take_local_step(self._local)
        if self._local.is_due:
            self.merge()
        return loss

    def _take_local_step(self, local_steps: LocalSteps) -> None:
        """Let the optimizers that exchange updates step by this worker's gradients."""
        if self._optimizer_step.alone and local_steps.are_outdated:  # a single worker trains what it is given
            local_steps.add_new_parameters()
        scale, found = self._scaler
        found = self._step_state.found_in_unscale if found is None else found
        others = [part.optimizer for part in self._parts if not part.is_anchor]
        self._exchange.counted = None
        if others and self._options.max_grad_norm is not None and not self._optimizer_step.alone:
            anchored = [vector for vector in self._exchange.vectors if vector.options.is_anchor]
            shard, shards = self._exchange.shard, self._exchange.shards
            self._exchange.counted = sketch_of_owners(anchored, local_steps.owners, shard, shards, scale)
        local_steps.take(scale, found, others)
        if others:  # they are exchanged without the scale
            self._ignore_scaler("grad_scale")
        else:  # an overflow of this rank is no matter of the exchange
            self._ignore_scaler()
            self._step_state.found_in_unscale = None
        if not local_steps.is_due:
            self._step_state.reset()

    def _exchange_and_apply(self) -> None:
        step_state = self._step_state
        scale, found = self._scaler
        untouched = not self.is_synchronized  # nobody sees .grad between the exchange and the step
        if untouched:
            self._synchronize()
        elif scale is not None and step_state.scale is None:
            raise RuntimeError("synchronize() has averaged scaled gradients: call scaler.unscale_(optimizer) first")
        step_state.check_unchanged(self._exchange.gradients)
        if self._exchange.delivered is None:
            self._exchange.discard()
            self.all_skipped = not self.exchanges_only_updates
            if not self.keeps_scales_equal:
                step_state.warn_about_scale(found)
            if self._is_mixed:
                self._exchange_updates_alone()
        else:
            self._apply(untouched=untouched)
        step_state.reset()

    def _exchange_updates_alone(self) -> None:
        """Exchange updates without the gradients of this step, which all ranks have skipped."""
        for part in self._parts:
            if not part.is_anchor:
                part.optimizer.zero_grad(set_to_none=True)
        self._step_state.reset()
        self._ignore_scaler()
        self._synchronize()
        if self._exchange.delivered is None:
            self._exchange.discard()
        else:
            self._apply(untouched=True)

    @torch.no_grad()
    def merge(self) -> None:
        """Exchange what local steps have changed now, on all ranks alike, however many there were.

        Call it at the end of training, and after an exchange that has failed. Without local steps since the last
        exchange, nothing happens.

        Raises:
            ExchangeError: A peer was lost, or a wait timed out. Nothing has changed. For other errors see :meth:`step`.
        """
        local_steps = self._local
        if local_steps is None:
            return
        local_steps.check_not_averaged("merge()")
        if not self.is_synchronized:
            if not local_steps.taken:
                return
            bare = all(vector.keeps_gradient() for vector in self._exchange.vectors if vector.options.is_anchor)
            local_steps.give(alone=bare)
        try:
            self._exchange_and_apply()
        except BaseException as error:
            self._note_failure(error)
            raise
        local_steps.is_pending = False

    @property
    def _is_mixed(self) -> bool:
        """True if some optimizers exchange updates, and others gradients."""
        return self._local is not None and len(self._parts) > 1

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Let the parameters be those that all workers have in common, and this worker's own again after the context.

        Use it to evaluate, and to save the model, between two exchanges of updates. Elsewhere it changes nothing.
        """
        with nullcontext() if self._local is None else self._local.averaged():
            yield

    @property
    def outer_lr(self) -> float:
        """Rate of the step of the common parameters by the mean update. All ranks set the same."""
        if self._local is None:
            raise RuntimeError("outer_lr: no optimizer exchanges updates")
        return float(self._local.outer.param_groups[0]["lr"])

    @outer_lr.setter
    def outer_lr(self, rate: float) -> None:
        if self._local is None:
            raise RuntimeError("outer_lr: no optimizer exchanges updates")
        check_outer_lr(rate)
        self._local.outer.param_groups[0]["lr"] = rate

    @property
    def _decays_in_vector(self) -> bool:
        """True if coupled weight decay is added to what is exchanged, see :mod:`tritoncomm.step.exchange.decay`.

        A single worker and a dense exchange leave it to the optimizer.
        """
        return not (self._exchange.vectors[-1].is_bare or never_delays(self.recipe))

    def _apply(self, *, untouched: bool) -> None:
        """Take the optimizer's step over what is delivered. If a hook of the user fails before it, nothing is lost."""
        exchange = self._exchange
        self._optimizer_step.alone = all(vector.is_bare for vector in exchange.vectors)
        delivered, clip = exchange.delivered or [], not exchange.is_flush
        decayed, steps = self._decays_in_vector, exchange.steps
        update = exchange.update() if self._local is None else self._settling(self._local)
        try:
            self._optimizer_step.step(delivered, update, clip=clip, untouched=untouched, decayed=decayed)
        except Exception:
            if exchange.steps > steps:  # a hook after the update: a repeated call does not take the step again
                exchange.skip()
            raise

    @contextmanager
    def _settling(self, local_steps: LocalSteps) -> Iterator[None]:
        gains = {id(each): vector.gain for vector in self._exchange.vectors for each in vector.parameters}
        with self._exchange.update(), local_steps.settling(gains):
            yield

    def _note_failure(self, error: BaseException) -> None:
        """Note that a step has failed. Unless a signal has ended it, it can be repeated if its update has not begun."""
        if not isinstance(error, Exception):
            self._exchange.stop()
        elif self.is_synchronized:
            self._step_state.note_versions(self._exchange.gradients)

    def note_unscaled(self, found: torch.Tensor) -> None:
        """Record the overflow flag of a scaler that has unscaled the gradients. Nonzero ``found`` skips the step."""
        self._step_state.found_in_unscale = found

    @torch.no_grad()
    def synchronize(self) -> None:
        """Replace every ``.grad`` by the mean over ranks now, for example to clip it before :meth:`step`.

        The next :meth:`step` does not exchange again. A missing gradient counts as zero, and is created if another rank
        has one. The staleness-aware step reads ``.grad`` at the delivered coordinates only. With a ``GradScaler``, call
        ``scaler.unscale_(optimizer)`` first. Weight decay that is a part of the gradient is added in :meth:`step`. An
        optimizer that exchanges updates keeps this worker's gradients.

        Raises:
            RuntimeError: The gradients were exchanged already, or some optimizers of a list exchange updates: what is
                clipped together would then differ between ranks. For other errors see :meth:`step`.
        """
        if self._local is None:
            self._synchronize(hides_decay=True)
            if self._exchange.delivered is not None:
                self._step_state.late_backward.watch(self._exchange.parameters)
        elif self._is_mixed:
            raise RuntimeError(
                "synchronize(): some optimizers of the list exchange updates, and their gradients stay local. To clip, "
                "pass max_grad_norm= to wrap() and remove the line that clips"
            )
        else:
            self._local.say_gradients_are_local()

    @without_compile
    @torch.no_grad()
    def _synchronize(self, *, hides_decay: bool = False) -> None:
        if self._optimizer_step.alone and self._parameters.are_outdated:  # a single worker trains what it is given
            self._exchange = exchange_state.continued(self._build(self.process_group), self._exchange)
        exchange, step_state, policy = self._exchange, self._step_state, self._options.on_nonfinite
        scale, found = self._scaler
        found = step_state.found_in_unscale if found is None else found
        own = self._optimizer_step.ignored
        # Once, when the step is to be applied: here, or where this rank catches up with the others.
        self._prepare_own = partial(ignored.prepare, own, scale)
        try:
            exchange.exchange(
                local_error=self._parameters.local_error(),
                scale=1.0 if scale is None else float(scale),
                fault=self._fault(found, own),
                decay=coupled_decay(self._exchanged) if self._decays_in_vector else {},
                hides_decay=hides_decay,
                look=None if self._local is not None or self._optimizer_step.alone else self._local_clipping.look,
            )
            self._prepare_own()
        except NonFiniteError as error:
            if policy == "raise" and found is None:
                raise
            logger.log(logging.INFO if found is not None else logging.WARNING, "step skipped on all ranks: %s", error)
            exchange.skip()
        step_state.written, step_state.scale = exchange.gradients, scale

    def _fault(self, found: torch.Tensor | None, own: Sequence[torch.Tensor]) -> str:
        """Return what is NaN or Inf on this rank beside the gradients that are exchanged, or an empty text.

        Args:
            found: Overflow flag of a ``GradScaler``. None without one.
            own: The parameters that are this rank's own, and whose gradients must be finite.
        """
        if found is not None and bool(found):
            return "all, because the scaled loss overflowed"
        bad = listed(ignored.non_finite(own, self._names))
        return bad if self._local is None else bad or self._local.fault

    @torch.no_grad()
    def flush(self) -> None:
        """Exchange the residuals of all ranks dense, and step by their mean. Residuals are zero afterwards.

        Use it before the last evaluation, or before a checkpoint without residuals. All ranks must call it. The present
        gradients are discarded.
        """
        self._check_no_pending_step("flush()")
        local_steps = self._local
        if local_steps is not None:
            local_steps.fold(self._residuals)
        self._exchange.flush()
        for parameter in self._optimizer_step.ignored:
            parameter.grad = None
        self._prepare_own = partial(ignored.prepare, (), None)
        self._step_state.written = self._exchange.gradients
        try:
            with nullcontext() if local_steps is None else local_steps.without_momentum():
                self._apply(untouched=False)
        except BaseException as error:
            self._note_failure(error)
            raise
        self.zero_grad()

    def metrics(self) -> dict[str, float]:
        """Return metrics of the last exchange and totals, as a flat dict for TensorBoard or W&B.

        ``bytes_*`` and ``messages_sent`` count this rank's messages. The time of the exchange is the sum of
        ``seconds_select``, ``seconds_exchange`` (waiting for the network) and ``seconds_apply``; further ``seconds_*``
        split the waiting by phase. On a GPU, seconds are those of the exchange before. ``residual_norm``
        and ``longest_wait`` (in steps) are computed by this call. ``grad_norm`` (with ``max_grad_norm``) is the norm of
        the averaged gradient before clipping.
        """
        figures = figures_of(self._exchange)
        if self._local is not None:
            inner = self._local.metrics()
            each = figures["bytes_sent_total"] / max(self._local.here, 1)
            figures |= inner | {"exchanges": figures["steps"], "bytes_per_step": each}
        if self._options.max_grad_norm is None:
            return figures
        norm = None if self._optimizer_step.alone else self._exchange.gradient_norm
        own = self._optimizer_step.grad_norm if self._local is None else self._local.grad_norm
        return figures | {"grad_norm": own if norm is None else float(norm)}

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the original optimizer, and under ``"tritoncomm"`` this rank's residual and method state.

        The original optimizer can load this dict, too. Residuals differ between ranks: save the dict of every rank, for
        example with :func:`tritoncomm.checkpoint.save`.

        Raises:
            RuntimeError: :meth:`synchronize` was called without :meth:`step`, so the gradients hold the delivered
                entries. An error or a signal has stopped an update, so parameters may differ between ranks.
        """
        self._run_hooks_before_saving()
        self._check_saveable("state_dict()")
        own = exchange_state.saved(self._exchange, self._local)
        return self._after_saving(saved_state(self.optimizer) | {"tritoncomm": own})

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any], *, residuals: str = "restore") -> None:
        """Load what :meth:`state_dict` of the same rank returned, or the state of an optimizer that is not wrapped.

        The latter leaves the residual unchanged. A state without residuals, for example after :meth:`flush`, may be the
        one of any rank. All ranks must call this. If a rank cannot load its state, nothing changes on any rank.

        Args:
            state_dict: The state.
            residuals: ``"restore"`` loads the saved residual. ``"reset"`` sets residuals to zero: the pending update is
                lost, and the state may be the one of any rank. Default: ``"restore"``.

        Raises:
            ConfigurationError: The state is damaged, or belongs to another rank, world size, method or model.
            ConfigMismatchError: Another rank cannot load its state, or loads the state of another step.
        """
        state_dict = self._before_loading(state_dict)
        with agree.propagate_errors(self._everybody, self._device):
            one_of("residuals", residuals, ("restore", "reset"))
            state_dict = exchange_state.for_this_rank(state_dict, self.process_group, reset=residuals == "reset")
            feedbacks = self.loadable(state_dict)
        if self._local is not None:
            self._local.check_not_averaged("load_state_dict()")
        saved = state_dict.get("tritoncomm")
        inner = {key: value for key, value in state_dict.items() if key != "tritoncomm"}
        if is_distributed():
            common = join(
                [
                    ignored.without_ignored(own, part, self._parameters.ignored)
                    for part, own in self._split(inner)
                    if not exchanges_updates(part, self._options)
                ]
            )
            exchange_state.compare(common, saved, feedbacks, self.process_group, self._everybody, self._device)
        self.optimizer.load_state_dict(inner)
        restore_rules(self.optimizer, inner)
        self._exchange.restart()
        if saved is not None:
            exchange_state.resume(self._exchange, feedbacks, saved, self._local)
        else:
            if self._local is not None:
                self._local.renew()
            self._exchange.restore(feedbacks)
            # No warning: torch.distributed.checkpoint loads the residuals by themselves, with ResidualState.
            exchange_state.warn_about_lost_residual(self.optimizer, logging.INFO)
        self._step_state.reset()
        self._run_hooks_after_loading()

    def _split(self, inner: dict[str, Any]) -> list[tuple[torch.optim.Optimizer, dict[str, Any]]]:
        """Return the original optimizers, each with its part of the state ``inner``."""
        parts = parts_of(self.optimizer)
        return list(zip(parts, split(inner, parts), strict=True))

    @property
    def _residuals(self) -> dict[torch.Tensor, torch.Tensor]:
        """Flat views of this rank's residuals, by parameter."""
        found: dict[torch.Tensor, torch.Tensor] = {}
        for vector in self._exchange.vectors:
            found |= vector.residuals_by_parameter()
        return found

    def loadable(self, state_dict: dict[str, Any]) -> list[ErrorFeedback]:
        """Return the residual and method state of each vector in ``state_dict``.

        Raises:
            ConfigurationError: This rank cannot load them. Nothing has changed.
        """
        exchange_state.check_state_dict(state_dict, self.optimizer)
        saved = state_dict.get("tritoncomm")
        if saved is None:
            return [vector.feedback for vector in self._exchange.vectors]
        exchange_state.check_local(saved, self._local)
        return exchange_state.loaded(self._exchange, saved)
