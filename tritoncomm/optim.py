"""An optimizer wrapper that exchanges gradients before each step."""

from __future__ import annotations

import copy
import logging
import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from tritoncomm.algorithms import Hierarchical, Recipe
from tritoncomm.errors import ConfigurationError, NonFiniteError
from tritoncomm.planning.automatic import automatic_recipe
from tritoncomm.primitives.sparse_vector import SparseVector
from tritoncomm.scheduler.process_group import is_distributed
from tritoncomm.step import setup_checks
from tritoncomm.step.error_feedback import ErrorFeedback
from tritoncomm.step.exchange import GradientExchange
from tritoncomm.step.optimizer_step import OptimizerStep, StepState, selects_by_update, without_compile
from tritoncomm.step.options import (
    DEFAULT_DENSITY,
    DENSE_BELOW,
    WrapOptions,
    check_optimizer,
    is_dense,
    resolve_recipe,
    with_density,
    with_warmup_and_nodes,
)

__all__ = ["SparseOptimizer", "wrap"]

logger = logging.getLogger("tritoncomm")


def wrap(
    optimizer: torch.optim.Optimizer,
    algo: str | Recipe = "oktopk",
    *,
    density: float = DEFAULT_DENSITY,
    process_group: dist.ProcessGroup | None = None,
    node_group: dist.ProcessGroup | None = None,
    warmup_steps: int = 0,
    staleness: str = "aware",
    select_by: str = "auto",
    max_catch_up: float = 20.0,
    max_relative_update: float = 0.2,
    on_nonfinite: str = "skip",
    max_grad_norm: float | None = None,
    timeout: timedelta | None = None,
    dense_below: int = DENSE_BELOW,
    broadcast_parameters: bool = False,
    **recipe_fields: Any,
) -> SparseOptimizer:
    """Wrap ``optimizer`` so that ``step()`` first averages the gradients over all ranks by a sparse exchange.

    An exchange delivers the fraction ``density`` of the entries. The others stay in a residual on each rank, which is
    added to its next gradient (error feedback). Adam and AdamW take a staleness-aware step: a coordinate that is
    delivered after tau steps catches up, which means that its delivery counts for tau steps, or for ``max_catch_up`` or
    3 sqrt(tau) if that is less.

    All ranks must call this with identical parameters, optimizer settings and arguments, which are compared. Nothing
    else may average the gradients: train the plain module, without ``DistributedDataParallel``. Without an initialized
    process group, the optimizer runs as a single worker.

    Args:
        optimizer: Optimizer to wrap.
        algo: Name of a method from :func:`tritoncomm.algorithms`, a recipe, or ``"auto"``. ``"auto"`` measures the
            network and uses the method that the cost formulas predict to be fastest for this model. It considers dense
            and the methods known to train well, and ignores that a dense exchange can overlap with computation.
        density: Fraction of entries to deliver per step, in (0, 1]. A recipe has its own density. Default: 0.01.
        process_group: Process group to exchange in. Default: the default process group.
        node_group: Process group of the ranks of this rank's node. The exchange is then dense within nodes and sparse
            between them, see :class:`~tritoncomm.Hierarchical`. Default: None, nodes are not treated separately.
        warmup_steps: Number of dense exchanges before the first sparse one. Default: 0.
        staleness: ``"aware"``: Adam and AdamW take the staleness-aware step. ``"off"``: the optimizer takes its own
            step. Default: ``"aware"``.
        select_by: Criterion by which methods compare entries. ``"gradient"``: the gradient. ``"update"``: the gradient
            over the root of its second moment, which is proportional to Adam's update. ``"auto"``: ``"update"`` with
            the staleness-aware step, else ``"gradient"``. Default: ``"auto"``.
        max_catch_up: Maximum number of steps that one delivery counts for, at least 1. Default: 20.
        max_relative_update: Maximum change of a tensor in one step by catching up, as a fraction of its norm. Changes
            of the size of a dense step are always allowed. Default: 0.2.
        on_nonfinite: Action when any rank has a NaN or Inf. ``"skip"`` skips the step on all ranks, ``"raise"`` raises
            :class:`~tritoncomm.NonFiniteError` on all ranks, ``"zero"`` replaces the values by zero. If a
            ``GradScaler`` finds an overflow, the step is always skipped. Default: ``"skip"``.
        max_grad_norm: Maximum 2-norm of the averaged gradient, which is clipped. Default: None, no clipping.
        timeout: Maximum time of each wait for a peer. Default: the time-out of the process group.
        dense_below: Tensors with fewer elements, or at most one dimension (biases, norms), are sent dense, in one
            all-reduce. If all are one-dimensional, only the first rule applies. 0 sends none dense. Default: 1024.
        broadcast_parameters: Whether to copy the parameters of the group's first rank to its other ranks first, as
            ``DistributedDataParallel`` does. Buffers are not copied: an optimizer does not hold them. Default: False.
        **recipe_fields: Further fields of the recipe of ``algo``.

    Returns:
        The wrapped optimizer.

    Raises:
        ConfigurationError: An argument is invalid.
        ConfigMismatchError: Ranks are configured differently, or an argument is invalid on another rank.
    """
    if process_group is not None and not is_distributed():
        raise ConfigurationError("process_group was given, but torch.distributed is not initialized")
    if process_group is not None and dist.get_rank(process_group) < 0:
        raise ConfigurationError("this rank is not a member of process_group: call wrap() on its members only")
    with setup_checks.propagate_errors(process_group):
        check_optimizer(optimizer)
        if isinstance(optimizer, SparseOptimizer):
            raise ConfigurationError("optimizer is wrapped already: pass the original optimizer")
        setup_checks.check_not_reduced(p for group in optimizer.param_groups for p in group["params"])
        if algo == "auto":
            chosen = automatic_recipe(optimizer, density, process_group, recipe_fields)
            chosen = with_warmup_and_nodes(chosen, warmup_steps, node_group, process_group)
        else:
            chosen = resolve_recipe(algo, density, warmup_steps, recipe_fields, node_group, process_group)
        options = WrapOptions(
            staleness=staleness,
            select_by=select_by,
            max_catch_up=max_catch_up,
            max_relative_update=max_relative_update,
            on_nonfinite=on_nonfinite,
            max_grad_norm=max_grad_norm,
            timeout=timeout,
            dense_below=dense_below,
        )
        chosen.check_optimizer(optimizer)
        return SparseOptimizer(optimizer, chosen, process_group, options, broadcast_parameters=broadcast_parameters)


class SparseOptimizer(torch.optim.Optimizer):
    """The optimizer that :func:`wrap` returns.

    It shares ``param_groups``, ``state`` and ``defaults`` with the original optimizer, which is ``optimizer``. A copy
    uses the same process group, an unpickled optimizer the default process group. Hooks are not copied.
    """

    # A GradScaler then always calls step(). It sets the other two: its scale, and its overflow flag of this rank.
    _step_supports_amp_scaling = True
    grad_scale: torch.Tensor | None
    found_inf: torch.Tensor | None

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        recipe: Recipe,
        process_group: dist.ProcessGroup | None,
        options: WrapOptions,
        *,
        broadcast_parameters: bool = False,
    ) -> None:
        self._bind(optimizer, recipe, options)
        self._exchange = self._set_up(process_group, broadcast=broadcast_parameters)

    def _bind(self, optimizer: torch.optim.Optimizer, recipe: Recipe, options: WrapOptions) -> None:
        self.optimizer = optimizer
        # Not super().__init__(): parameters and state stay those of the original optimizer. Like unpickling, this
        # initializes only hooks and profiling.
        super().__setstate__({})
        self.recipe = recipe
        self._options = options
        self._optimizer_step = OptimizerStep(optimizer, options, delayed=not is_dense(recipe))
        self._optimizer_step.check()
        self._step_state = StepState()

    # Properties, because load_state_dict() of the original optimizer replaces these objects.

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The parameter groups of the original optimizer."""
        return self.optimizer.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        """The state of the original optimizer."""
        return self.optimizer.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """The default options of the original optimizer."""
        return self.optimizer.defaults

    @property
    def process_group(self) -> dist.ProcessGroup | None:
        """The process group of the exchange. None is the default process group."""
        return self._exchange.group

    @property
    def is_synchronized(self) -> bool:
        """True after :meth:`synchronize`, until the next :meth:`step` or :meth:`zero_grad`."""
        return self._step_state.exchanged

    def __repr__(self) -> str:
        return f"SparseOptimizer({self.recipe!r}, {self.optimizer!r})"

    def __getstate__(self) -> dict[str, Any]:
        fields = {"optimizer": self.optimizer, "recipe": self.recipe, "options": self._options}
        self._check_no_pending_step("copying")
        return fields | {
            "skipped": self._step_state.skipped,
            "steps": self._exchange.steps,
            "exchange": self._exchange.state_dict(),
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._restore(state, None)

    def __deepcopy__(self, memo: dict[int, Any]) -> SparseOptimizer:
        clone = self.__class__.__new__(self.__class__)
        memo[id(self)] = clone
        clone._restore(  # noqa: SLF001 - of the same class
            copy.deepcopy(self.__getstate__(), memo), self._exchange.group
        )
        return clone

    def _restore(self, state: dict[str, Any], group: dist.ProcessGroup | None) -> None:
        self._bind(state["optimizer"], state["recipe"], state["options"])
        self._exchange = self._build(group)
        self._exchange.feedback = self._exchange.loaded(state["exchange"])
        self._step_state.skipped, self._exchange.steps = state["skipped"], state["steps"]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add the same parameter group on all ranks. Residuals are kept. If this raises, nothing has changed."""
        self._check_no_pending_step("add_param_group()")
        before = len(self.param_groups)
        try:
            with setup_checks.propagate_errors(self._exchange.group):
                self.optimizer.add_param_group(param_group)
                self.recipe.check_optimizer(self.optimizer)
                self._optimizer_step.check()
                exchange = self._build(self._exchange.group)
            self._compare(exchange)
        except BaseException:
            del self.param_groups[before:]
            raise
        exchange.adopt(self._exchange)
        self._exchange = exchange

    def set_density(self, density: float) -> None:
        """Deliver the fraction ``density`` of the entries from now on, the same on all ranks. Residuals are kept.

        Raises:
            ConfigurationError: The density is not in (0, 1]. Nothing has changed.
            ConfigMismatchError: Ranks pass different densities, or an invalid one. Nothing has changed.
        """
        self._check_no_pending_step("set_density()")
        with setup_checks.propagate_errors(self._exchange.group):
            recipe = with_density(self.recipe, density)
        if is_distributed():
            setup_checks.compare({"density": density}, self._exchange.group)
        self._exchange.change_recipe(recipe)
        self._exchange.agree_on_exchange_id()
        self.recipe = recipe

    def reset_process_group(
        self, process_group: dist.ProcessGroup | None = None, node_group: dist.ProcessGroup | None = None
    ) -> None:
        """Continue in another process group of any size. All its ranks must call this.

        After a failure, some ranks may have applied a step that other ranks could not confirm. The other ranks apply it
        here. Residuals are scaled so that the pending update of the remaining ranks does not change. The residual of a
        lost rank is lost. Methods determine thresholds and partitions from scratch. Without ``node_group``, the
        exchange is sparse between all ranks, even if it was dense within nodes before. See :func:`wrap`.

        Raises:
            ConfigMismatchError: Ranks are not at the same step, or hold different parameters.
        """
        exchange = self._exchange
        if is_distributed():
            ahead = max(fields["steps"] for fields in setup_checks.gather({"steps": exchange.steps}, process_group))
            if exchange.pending is not None and exchange.steps + 1 == ahead:
                self._optimizer_step.step(exchange.commit_pending(), self._exchange.layout)
        self._step_state.reset()
        exchange.pending = None
        with setup_checks.propagate_errors(process_group):
            flat = self.recipe.recipe if isinstance(self.recipe, Hierarchical) else self.recipe
            recipe = with_warmup_and_nodes(flat, 0, node_group, process_group)
        setup_checks.compare_setup(
            self.optimizer, exchange.parameters, recipe, self._options, exchange.steps, process_group
        )
        exchange.move(process_group, recipe)
        exchange.agree_on_exchange_id()
        self.recipe = recipe

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients, and discard an exchange that :meth:`step` has not used."""
        self.optimizer.zero_grad(set_to_none=set_to_none)
        self._step_state.reset()

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Exchange the gradients, unless :meth:`synchronize` has done so, then take the optimizer's step.

        ``closure`` computes the gradients and returns the loss, which is returned. It is called once.

        Raises:
            RuntimeError: After :meth:`synchronize`, a closure was passed or the averaged gradients were replaced.
            NonFiniteError: A rank has a NaN or Inf, and ``on_nonfinite`` is ``"raise"``. Nothing has changed.
            ExchangeError: A peer was lost, or a wait timed out. Nothing has changed.
        """
        try:
            return self._step(closure)
        except BaseException:  # a GradScaler removes these attributes only if step() succeeds
            for name in ("grad_scale", "found_inf"):
                vars(self).pop(name, None)
            raise

    def _step(self, closure: Callable[[], Any] | None) -> Any:
        step_state, loss = self._step_state, None
        if closure is not None:
            if step_state.exchanged:
                raise RuntimeError(
                    "step(closure) was called after synchronize(), but a closure computes new gradients: "
                    "call step(closure) without synchronize()"
                )
            with torch.enable_grad():
                loss = closure()
        if self._optimizer_step.is_synthetic():
            self._optimizer_step.initialize_state(self._exchange.layout)
            return loss
        if not step_state.exchanged:
            self.synchronize()
        elif getattr(self, "grad_scale", None) is not None:
            raise RuntimeError("synchronize() has averaged scaled gradients: call scaler.unscale_(optimizer) first")
        if any(now is not then for now, then in zip(self._gradients(), step_state.written_gradients, strict=True)):
            raise RuntimeError("gradients were replaced after synchronize(): call step() or zero_grad() in between")
        if step_state.mean is not None:
            self._optimizer_step.step(step_state.mean, self._exchange.layout)
        else:
            self._warn_about_scale()
        self._step_state.reset()
        return loss

    def note_unscaled(self, found: torch.Tensor) -> None:
        """Record the overflow flag of a scaler that has unscaled the gradients. Nonzero ``found`` skips the step."""
        self._step_state.found_in_unscale = found

    @without_compile
    @torch.no_grad()
    def synchronize(self) -> None:
        """Replace every ``.grad`` by the mean over ranks now, for example to clip it before :meth:`step`.

        The next :meth:`step` does not exchange again. A missing gradient counts as zero, and is created. The
        staleness-aware step reads ``.grad`` at the delivered coordinates only. With a ``GradScaler``, call
        ``scaler.unscale_(optimizer)`` first.

        Raises:
            RuntimeError: The gradients were exchanged already. For other errors see :meth:`step`.
        """
        step_state = self._step_state
        if step_state.exchanged:
            raise RuntimeError("gradients were exchanged already: call step() or zero_grad() first")
        local_error = self._local_error()
        scale, found = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        if found is None:
            found = step_state.found_in_unscale
        overflowed = found is not None and bool(found)
        zero = self._options.on_nonfinite == "zero" and found is None
        try:
            step_state.mean = self._exchange.average(
                local_error=local_error, scale=1.0 if scale is None else float(scale), overflowed=overflowed, zero=zero
            )
        except NonFiniteError as error:
            step_state.skipped += 1
            if self._options.on_nonfinite == "raise" and found is None:
                raise
            logger.log(logging.INFO if found is not None else logging.WARNING, "step skipped on all ranks: %s", error)
        step_state.exchanged = True  # without a mean, step() does nothing
        step_state.written_gradients = self._gradients()

    @torch.no_grad()
    def flush(self) -> None:
        """Exchange the residuals of all ranks dense, and step by their mean. Residuals are zero afterwards.

        Use it before the last evaluation, or before a checkpoint without residuals. All ranks must call it. The present
        gradients are discarded.
        """
        self._check_no_pending_step("flush()")
        mean = self._exchange.flush()
        found = mean.values.nonzero().reshape(-1).to(torch.int32)
        sparse = SparseVector(found, mean.values[found.long()], mean.numel)
        self._optimizer_step.step(sparse, self._exchange.layout, clip=False)
        self.zero_grad()

    def metrics(self) -> dict[str, float]:
        """Return metrics of the last exchange and totals, as a flat dict for TensorBoard or W&B.

        ``bytes_*`` and ``messages_sent`` count this rank's messages. The time of the exchange is the sum of
        ``seconds_select``, ``seconds_exchange`` (waiting for the network) and ``seconds_apply``; further ``seconds_*``
        split the waiting by phase. ``residual_norm`` is computed by this call. ``grad_norm`` (with ``max_grad_norm``)
        is the norm of the averaged gradient before clipping.
        """
        clipped = {"grad_norm": self._optimizer_step.grad_norm} if self._options.max_grad_norm is not None else {}
        return self._exchange.last | clipped | {
            "steps": float(self._exchange.steps),
            "skipped_steps": float(self._step_state.skipped),
            "zeroed_values": float(self._exchange.zeroed),
            "bytes_sent_total": float(self._exchange.total.sent.bytes),
            "bytes_received_total": float(self._exchange.total.received.bytes),
            "residual_norm": float(self._exchange.feedback.residual.norm()),
        }  # fmt: skip

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the original optimizer, and under ``"tritoncomm"`` this rank's residual and method state.

        The original optimizer can load this dict, too. Residuals differ between ranks: save the dict of every rank, for
        example with :func:`tritoncomm.checkpoint.save`.

        Raises:
            RuntimeError: :meth:`synchronize` was called without :meth:`step`. The gradients hold the delivered entries.
        """
        for before in list(self._optimizer_state_dict_pre_hooks.values()):
            before(self)
        self._check_no_pending_step("state_dict()")
        state = self.optimizer.state_dict() | {"tritoncomm": self._exchange.state_dict()}
        for after in list(self._optimizer_state_dict_post_hooks.values()):
            changed = after(self, state)
            state = state if changed is None else changed
        return state

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what :meth:`state_dict` of the same rank returned, or the state of an optimizer that is not wrapped.

        The latter leaves the residual unchanged. All ranks must call this. If a rank cannot load its state, nothing
        changes on any rank.

        Raises:
            ConfigurationError: The state is damaged, or belongs to another rank, world size, method or model.
            ConfigMismatchError: Another rank cannot load its state, or loads the state of another step.
        """
        for before in list(self._optimizer_load_state_dict_pre_hooks.values()):
            changed = before(self, state_dict)
            state_dict = state_dict if changed is None else changed
        with setup_checks.propagate_errors(self._exchange.group):
            feedback = self.loadable(state_dict)
        saved = state_dict.get("tritoncomm")
        inner = {key: value for key, value in state_dict.items() if key != "tritoncomm"}
        if is_distributed():
            setup_checks.compare({"loaded state": repr(feedback.algorithm.common_state())}, self._exchange.group)
        self.optimizer.load_state_dict(inner)
        self._optimizer_step.restore(inner)
        self._exchange.feedback = feedback
        self._exchange.steps = saved["steps"] if saved is not None else self._exchange.steps
        self._step_state.reset()
        for after in list(self._optimizer_load_state_dict_post_hooks.values()):
            after(self)

    def loadable(self, state_dict: dict[str, Any]) -> ErrorFeedback:
        """Return the residual and method state in ``state_dict``, and raise if this rank cannot load it."""
        setup_checks.check_state_dict(state_dict, self.optimizer)
        saved = state_dict.get("tritoncomm")
        return self._exchange.feedback if saved is None else self._exchange.loaded(saved)

    def _build(self, group: dist.ProcessGroup | None) -> GradientExchange:
        """Return an exchange of the gradients of all parameters that require them."""
        named = setup_checks.named_parameters(self.optimizer)
        self._frozen = [parameter for parameter, _ in named if not parameter.requires_grad]
        trained = [(parameter, name) for parameter, name in named if parameter.requires_grad]
        return GradientExchange(
            [parameter for parameter, _ in trained],
            self.recipe,
            group,
            self._options.timeout,
            self._options.dense_below,
            [name for _, name in trained],
            by_update=selects_by_update(self.optimizer, self.recipe, self._options),
        )

    def _set_up(self, group: dist.ProcessGroup | None, *, broadcast: bool) -> GradientExchange:
        """Return an exchange for the present parameters, after the ranks have been compared."""
        exchange = self._build(group)
        self._compare(exchange, broadcast=broadcast)
        if is_distributed():
            exchange.log_choice()
        elif int(os.environ.get("WORLD_SIZE", "1")) > 1:
            logger.warning("WORLD_SIZE is set, but torch.distributed is not initialized: nothing will be exchanged")
        return exchange

    def _compare(self, exchange: GradientExchange, *, broadcast: bool = False) -> None:
        parameters, steps, group = exchange.parameters, exchange.steps, exchange.group
        setup_checks.compare_setup(
            self.optimizer, parameters, self.recipe, self._options, steps, group, broadcast=broadcast
        )
        exchange.agree_on_exchange_id()

    def _local_error(self) -> ConfigurationError | None:
        """Return why the gradients of this rank cannot be exchanged, if so."""
        try:
            setup_checks.check_frozen(self._frozen)
            if not self._step_state.reduction_checked:  # a module may have been passed to DDP after wrap()
                self._step_state.reduction_checked = True
                setup_checks.check_not_reduced(self._exchange.parameters)
        except ConfigurationError as error:
            return error
        return None

    def _warn_about_scale(self) -> None:
        """Log once that a step was skipped although the scaler of this rank found no overflow and keeps its scale."""
        found = getattr(self, "found_inf", None)
        if found is not None and not bool(found) and not self._step_state.scale_warning_logged:
            self._step_state.scale_warning_logged = True
            logger.warning(
                "rank %d: the step was skipped because of an overflow that this rank's GradScaler did not find. It "
                "keeps its scale. Results do not depend on it. With tritoncomm.amp.GradScaler, all scales stay equal",
                self._exchange.rank,
            )

    def _check_no_pending_step(self, action: str) -> None:
        if self._step_state.exchanged:
            raise RuntimeError(f"the exchanged gradients have not been used yet: call step() before {action}")

    def _gradients(self) -> list[torch.Tensor | None]:
        return [parameter.grad for parameter in self._exchange.layout.parameters]
