"""An optimizer wrapper that exchanges gradients before each step."""

from __future__ import annotations

import copy
import logging
import os
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tritoncomm.algorithms import Hierarchical, Recipe
from tritoncomm.errors import ConfigMismatchError, ConfigurationError, NonFiniteError
from tritoncomm.scheduler.process_group import is_distributed
from tritoncomm.step import agree
from tritoncomm.step import state as exchange_state
from tritoncomm.step.clipping import check_clipping, with_clipping
from tritoncomm.step.exchange import GradientExchange, State
from tritoncomm.step.figures import figures_of
from tritoncomm.step.local_changes import LocalChanges
from tritoncomm.step.model import (
    Named,
    check_model,
    check_not_reduced,
    checked_module,
    group_of,
    keep_gradients_local,
    names_of,
    rest_of,
)
from tritoncomm.step.optimizer_proxy import OptimizerProxy
from tritoncomm.step.options import (
    WrapOptions,
    check_group,
    check_optimizer,
    is_alone,
    is_dense,
    log_choice,
    one_of,
    with_density,
    with_warmup_and_nodes,
)
from tritoncomm.step.parameters import KnownParameters, exchange_of
from tritoncomm.step.replicas import Replica
from tritoncomm.step.torch_internals import without_compile
from tritoncomm.step.update import OptimizerStep, StepState, coupled_decay
from tritoncomm.step.vector import ErrorFeedback, VectorExchange

__all__ = ["SparseOptimizer"]

logger = logging.getLogger("tritoncomm")


class SparseOptimizer(OptimizerProxy):
    """The optimizer that :func:`wrap` returns.

    It shares ``param_groups``, ``state`` and ``defaults`` with the original optimizer, which is ``optimizer``. A copy
    uses the same process group, an unpickled optimizer the default process group. Hooks are not copied.
    """

    _inspected = False  # True once an exchange has found that nothing else averages the gradients
    _others: Named = []  # noqa: RUF012 - of the model, which copies do not know

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        recipe: Recipe,
        process_group: dist.ProcessGroup | None,
        options: WrapOptions,
        *,
        broadcast_parameters: bool = False,
        model: nn.Module | None = None,
    ) -> None:
        self._bind(optimizer, recipe, with_clipping(options, optimizer), process_group, names_of(model))
        self._others, buffers = rest_of(model, optimizer)
        self._exchange = self._build(process_group)
        exchange_state.warn_about_lost_residual(optimizer)
        self._compare(self._exchange, others=self._others, buffers=buffers, broadcast=broadcast_parameters)
        if is_distributed():
            vectors = self._exchange.vectors
            first, parts = vectors[0], [vector.part for vector in vectors]
            log_choice(first.recipe, first.rank, first.world_size, parts, on_gpu=first.device.type == "cuda")
        elif int(os.environ.get("WORLD_SIZE", "1")) > 1:
            logger.warning("WORLD_SIZE is set, but torch.distributed is not initialized: nothing will be exchanged")
        self._optimizer_step.guard()

    def _bind(
        self,
        optimizer: torch.optim.Optimizer,
        recipe: Recipe,
        options: WrapOptions,
        process_group: dist.ProcessGroup | None,
        names: Mapping[int, str],
    ) -> None:
        self._stand_for(optimizer)
        self.recipe = recipe
        self._options = options
        self._optimizer_step = OptimizerStep(
            optimizer, options, delayed=not is_dense(recipe), alone=is_alone(process_group), group=process_group
        )
        self._optimizer_step.check()
        self._step_state = StepState()
        self._parameters = KnownParameters(optimizer, names)

    @property
    def process_group(self) -> dist.ProcessGroup | None:
        """The process group of the exchange. None is the default process group."""
        return self._exchange.options.group

    @property
    def _everybody(self) -> dist.ProcessGroup | None:
        """The ranks that must change alike: those of the exchange, or those of all shards."""
        all_shards = self._exchange.all_shards
        return self.process_group if all_shards is None else all_shards.group

    @property
    def has_shards(self) -> bool:
        """True if this optimizer exchanges shards of DTensors, within several groups of ranks."""
        return self._exchange.all_shards is not None

    @property
    def is_synchronized(self) -> bool:
        """True after :meth:`synchronize`, until the next :meth:`step` or :meth:`zero_grad`."""
        return self._exchange.state is State.READY

    @property
    def _vector(self) -> VectorExchange:
        """The flat vector of an optimizer that has one."""
        (vector,) = self._exchange.vectors
        return vector

    def __repr__(self) -> str:
        return f"SparseOptimizer({self.recipe!r}, {self.optimizer!r})"

    def __getstate__(self) -> dict[str, Any]:
        self._check_saveable("copying")
        return {
            "optimizer": self.optimizer,
            "recipe": self.recipe,
            "options": self._options,
            "names": self._parameters.names,
            "skipped": self._exchange.skipped,
            "exchange": exchange_state.saved(self._exchange),
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._restore(state, None)

    def __deepcopy__(self, memo: dict[int, Any]) -> SparseOptimizer:
        clone = self.__class__.__new__(self.__class__)
        memo[id(self)] = clone
        clone._restore(copy.deepcopy(self.__getstate__(), memo), self.process_group)  # noqa: SLF001 - same class
        return clone

    def _restore(self, state: dict[str, Any], group: dist.ProcessGroup | None) -> None:
        groups = state["optimizer"].param_groups
        every = [id(parameter) for each in groups for parameter in each["params"]]
        names = dict(zip(every, state["names"], strict=True))
        self._bind(state["optimizer"], state["recipe"], state["options"], group, names)
        self._exchange = self._build(group)
        saved = state["exchange"]
        exchange_state.resume(self._exchange, exchange_state.loaded(self._exchange, saved), saved)
        self._exchange.skipped = state["skipped"]
        self._optimizer_step.guard()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add the same parameter group on all ranks. Residuals are kept. If this raises, nothing has changed."""
        self._check_no_pending_step("add_param_group()")
        before, exchange = len(self.param_groups), self._exchange
        try:
            with agree.propagate_errors(self.process_group, self._device):
                self.optimizer.add_param_group(param_group)
                self.recipe.check_optimizer(self.optimizer)
                self._optimizer_step.check()
                exchange = self._build(self.process_group)
            self._compare(exchange)
        except BaseException:
            del self.param_groups[before:]
            self._parameters.note()
            raise
        self._exchange = exchange_state.continued(exchange, self._exchange)

    def set_density(self, density: float) -> None:
        """Deliver the fraction ``density`` of the entries from now on, the same on all ranks. Residuals are kept.

        Raises:
            ConfigurationError: The density is not in (0, 1]. Nothing has changed.
            ConfigMismatchError: Ranks pass different densities, or an invalid one. Nothing has changed.
        """
        self._check_no_pending_step("set_density()")
        with agree.propagate_errors(self._everybody, self._device):
            recipe = with_density(self.recipe, density)
        if is_distributed():
            agree.compare({"density": density}, self._everybody, self._device)
        for vector, before in self._exchange.replace_vectors(recipe, self.process_group):
            exchange_state.across_density(vector, before)
        self.recipe = recipe

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
                is used. Create it with ``init_sync=False``, because ranks may be one step apart. Default: None.

        Returns:
            Whether a step of other ranks was applied here. Learning-rate schedules must then take theirs here, too.

        Raises:
            RuntimeError: An error or a signal has stopped an update: load a checkpoint.
            ConfigurationError: The model is sharded, or an argument is invalid.
            ConfigMismatchError: Ranks are not at the same step, or hold different parameters.
        """
        exchange, step = self._exchange, self._optimizer_step
        told, caught_up = dict[int, list[int]](), False
        exchange.check_complete()
        check_group("process_group", process_group)
        if self.has_shards:
            raise ConfigurationError("a sharded model cannot change its groups: load a checkpoint in new processes")
        process_group = group_of(checked_module(model), process_group)
        if is_distributed():
            own = {"steps": exchange.steps, "absent": exchange.presence.positions(exchange.parameters)}
            told = {of["steps"]: of["absent"] for of in agree.all_gather(own, process_group, self._device)}
            caught_up = exchange.state is State.SUSPENDED and exchange.steps + 1 == max(told)
            if caught_up:
                exchange.presence.set(exchange.parameters, told[max(told)])
                exchange.catch_up()
                self._apply(untouched=False)
        self._step_state.reset()
        with agree.propagate_errors(process_group, self._device):
            flat = self.recipe.recipe if isinstance(self.recipe, Hierarchical) else self.recipe
            recipe = with_warmup_and_nodes(flat, 0, node_group, process_group, self._options.small)
            step.alone = is_alone(process_group)
            check_optimizer(self.optimizer, alone=step.alone)
            step.check()
            check_model(checked_module(model), process_group)
            keep_gradients_local(checked_module(model))
        agree.compare_setup(
            self.optimizer,
            self._parameters.trained,
            recipe,
            self._options,
            exchange.steps,
            process_group,
            caught_up=len(told) > 1,
        )
        exchange.restart()
        self._inspected = False
        for vector, before in exchange.replace_vectors(recipe, process_group):
            exchange_state.across_groups(vector, before)
        self.recipe = recipe
        return caught_up

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients, and throw away averaged gradients that :meth:`step` has not used."""
        self.optimizer.zero_grad(set_to_none=set_to_none)
        self._exchange.discard()
        self._step_state.reset()
        self._local_changes.forget()

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

    def _step(self, closure: Callable[[], Any] | None) -> Any:
        step_state, loss = self._step_state, None
        if closure is not None:
            if self.is_synchronized:  # the closure may not change them
                step_state.note_versions(self._exchange.gradients)
            with torch.enable_grad():
                loss = closure()
        if self._optimizer_step.is_synthetic():
            self._optimizer_step.initialize_state(self._exchange.parameters)
            return loss
        scale, found = self._scaler
        untouched = not self.is_synchronized  # nobody sees .grad between the exchange and the step
        if untouched:
            self._local_changes.warn(scaled=scale is not None)
            self.synchronize()
        elif scale is not None and step_state.scale is None:
            raise RuntimeError("synchronize() has averaged scaled gradients: call scaler.unscale_(optimizer) first")
        step_state.check_unchanged(self._exchange.gradients)
        if self._exchange.delivered is None:
            self._exchange.discard()
            step_state.warn_about_scale(found, self.process_group)
        else:
            self._apply(untouched=untouched)
        step_state.reset()
        return loss

    @property
    def _decays_in_vector(self) -> bool:
        """True if coupled weight decay is added to this rank's gradients before they are exchanged.

        It is then delivered late, like every part of the gradient, and reaches all coordinates. A single worker and a
        dense exchange leave it to the optimizer.
        """
        return not (self._exchange.vectors[0].is_bare or is_dense(self.recipe))

    def _apply(self, *, untouched: bool) -> None:
        """Take the optimizer's step over what is delivered. If a hook of the user fails before it, nothing is lost."""
        exchange = self._exchange
        self._optimizer_step.alone = all(vector.is_bare for vector in exchange.vectors)
        delivered, clip = exchange.delivered or [], not exchange.is_flush
        decayed, steps = self._decays_in_vector, exchange.steps
        try:
            self._optimizer_step.step(delivered, exchange.update(), clip=clip, untouched=untouched, decayed=decayed)
        except Exception:
            if exchange.steps > steps:  # a hook after the update: a repeated call does not take the step again
                exchange.skip()
            raise

    def _note_failure(self, error: BaseException) -> None:
        """Note that a step has failed. Unless a signal has ended it, it can be repeated if its update has not begun."""
        if not isinstance(error, Exception):
            self._exchange.stop()
        elif self.is_synchronized:
            self._step_state.note_versions(self._exchange.gradients)

    def note_unscaled(self, found: torch.Tensor) -> None:
        """Record the overflow flag of a scaler that has unscaled the gradients. Nonzero ``found`` skips the step."""
        self._step_state.found_in_unscale = found

    @without_compile
    @torch.no_grad()
    def synchronize(self) -> None:
        """Replace every ``.grad`` by the mean over ranks now, for example to clip it before :meth:`step`.

        The next :meth:`step` does not exchange again. A missing gradient counts as zero, and is created if another rank
        has one. The staleness-aware step reads ``.grad`` at the delivered coordinates only. With a ``GradScaler``, call
        ``scaler.unscale_(optimizer)`` first.

        Raises:
            RuntimeError: The gradients were exchanged already. For other errors see :meth:`step`.
        """
        if self._optimizer_step.alone and self._parameters.are_outdated:  # a single worker trains what it is given
            self._exchange = exchange_state.continued(self._build(self.process_group), self._exchange)
        exchange, step_state, policy = self._exchange, self._step_state, self._options.on_nonfinite
        scale, found = self._scaler
        self._local_changes.forget()
        inspect = None if self._inspected else partial(check_not_reduced, self.process_group)
        found = step_state.found_in_unscale if found is None else found
        try:
            exchange.exchange(
                local_error=self._parameters.local_error(),
                scale=1.0 if scale is None else float(scale),
                overflowed=found is not None and bool(found),
                zero=policy == "zero" and found is None,
                decay=coupled_decay(self.optimizer) if self._decays_in_vector else {},
                inspect=inspect,
            )
            self._inspected = True
        except NonFiniteError as error:
            if policy == "raise" and found is None:
                raise
            logger.log(logging.INFO if found is not None else logging.WARNING, "step skipped on all ranks: %s", error)
            exchange.skip()
        step_state.written, step_state.scale = exchange.gradients, scale

    @torch.no_grad()
    def flush(self) -> None:
        """Exchange the residuals of all ranks dense, and step by their mean. Residuals are zero afterwards.

        Use it before the last evaluation, or before a checkpoint without residuals. All ranks must call it. The present
        gradients are discarded.
        """
        self._check_no_pending_step("flush()")
        self._exchange.flush()
        self._step_state.written = self._exchange.gradients
        try:
            self._apply(untouched=False)
        except BaseException as error:
            self._note_failure(error)
            raise
        self.zero_grad()

    def metrics(self) -> dict[str, float]:
        """Return metrics of the last exchange and totals, as a flat dict for TensorBoard or W&B.

        ``bytes_*`` and ``messages_sent`` count this rank's messages. The time of the exchange is the sum of
        ``seconds_select``, ``seconds_exchange`` (waiting for the network) and ``seconds_apply``; further ``seconds_*``
        split the waiting by phase. On a GPU, seconds are those of the exchange before. ``residual_norm``,
        ``longest_wait`` (in steps) and ``share_without_delivery`` (of tensors, for 100 steps) are computed by this
        call. ``grad_norm`` (with ``max_grad_norm``) is the norm of the averaged gradient before clipping.
        """
        if self._options.max_grad_norm is None:
            return figures_of(self._exchange)
        by_gradient = self._options.gradient_limit is not None and not self._optimizer_step.alone
        norm, own = self._exchange.gradient_norm if by_gradient else None, self._optimizer_step.grad_norm
        return figures_of(self._exchange) | {"grad_norm": own if norm is None else float(norm)}

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
        own = exchange_state.saved(self._exchange)
        return self._after_saving(self._optimizer_step.saved() | {"tritoncomm": own})

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
        saved = state_dict.get("tritoncomm")
        inner = {key: value for key, value in state_dict.items() if key != "tritoncomm"}
        if is_distributed():
            exchange_state.compare(inner, saved, feedbacks, self.process_group, self._everybody, self._device)
        self.optimizer.load_state_dict(inner)
        self._optimizer_step.restore(inner)
        self._exchange.restart()
        self._inspected = False
        if saved is not None:
            exchange_state.resume(self._exchange, feedbacks, saved)
        else:
            self._exchange.restore(feedbacks)
            # No warning: torch.distributed.checkpoint loads the residuals by themselves, with ResidualState.
            exchange_state.warn_about_lost_residual(self.optimizer, logging.INFO)
        self._step_state.reset()
        self._run_hooks_after_loading()

    def loadable(self, state_dict: dict[str, Any]) -> list[ErrorFeedback]:
        """Return the residual and method state of each vector in ``state_dict``.

        Raises:
            ConfigurationError: This rank cannot load them. Nothing has changed.
        """
        exchange_state.check_state_dict(state_dict, self.optimizer)
        saved = state_dict.get("tritoncomm")
        if saved is None:
            return [vector.feedback for vector in self._exchange.vectors]
        return exchange_state.loaded(self._exchange, saved)

    def _build(self, group: dist.ProcessGroup | None) -> GradientExchange:
        """Return an exchange of the gradients of all parameters that require them."""
        self._parameters.note()
        trained, before = self._parameters.trained, vars(self).get("_exchange")
        parameters = [parameter for parameter, _ in trained]
        check_clipping(self._options.gradient_limit, parameters)
        self._local_changes = LocalChanges([] if self._optimizer_step.alone else parameters)
        exchange = exchange_of(self.optimizer, trained, self.recipe, self._options, group, before=before)
        exchange.replica = Replica(self.optimizer, self._parameters.names, self._others)
        return exchange

    def _compare(self, exchange: GradientExchange, **fields: Any) -> None:
        trained, group, all_shards = self._parameters.trained, exchange.options.group, exchange.all_shards
        try:
            agree.compare_setup(self.optimizer, trained, self.recipe, self._options, exchange.steps, group, **fields)
        except ConfigMismatchError as error:
            if all_shards is not None:
                agree.propagate_error(str(error), all_shards.group, self._device)
            raise
        if all_shards is not None:  # replicas of other shards may differ
            agree.compare({}, all_shards.group, self._device)
        exchange.agree_on_exchange_id()

    @property
    def _device(self) -> torch.device | None:
        return agree.device_of(self.optimizer)

    def release(self) -> None:
        """Allow ``step()`` of the original optimizer again. Residuals stay in this one, and are not applied.

        A ``DistributedDataParallel`` module that was passed to :func:`wrap` still averages nothing: to train without
        tritoncomm, put ``model.module`` into a new one, and drop the old one.
        """
        self._optimizer_step.unguard()

    def _check_no_pending_step(self, action: str) -> None:
        self._check_saveable(action)
        if self.is_synchronized:
            raise RuntimeError(f"a step was skipped, or a hook failed after it: call zero_grad() before {action}")

    def _check_saveable(self, action: str) -> None:
        """Raise unless residuals and parameters belong to the same step."""
        self._exchange.check_complete()
        if self.is_synchronized and self._exchange.delivered is not None:
            raise RuntimeError(f"the exchanged gradients have not been used yet: call step() before {action}")
