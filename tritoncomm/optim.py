"""Front door 1: an optimizer that exchanges gradients before it steps."""

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
    """``optimizer``, but ``step()`` first averages the gradients over all ranks, sparsely.

    ``algo`` is a name from :func:`tritoncomm.algorithms`, configured by ``density`` and further
    ``recipe_fields``, or a recipe, which carries its own settings; ``"auto"`` measures the network and takes what
    the cost formulas predict to be fastest for this model at ``density``, dense included, of methods that have been
    found to train well; computation that would hide a dense exchange is not counted. The first ``warmup_steps``
    exchanges are dense. Without an initialised process group this is one worker. Gradients must not be averaged
    by anything else (no ``DistributedDataParallel`` around the model). ``node_group``, the ranks of this rank's node,
    makes the exchange dense within nodes and sparse between them: see :class:`~tritoncomm.Hierarchical`.

    ``staleness="aware"`` takes the Adam or AdamW step over what was delivered, each delivery counting for at most
    ``max_catch_up`` steps and three square roots of the steps it has waited. Catching up is shortened where it would
    change a tensor by more than ``max_relative_update`` of its norm at once, though not to less than dense steps might;
    ``"off"`` runs the optimizer as it is.
    ``select_by="update"`` chooses entries by their gradient over the root of its second moment, which is what Adam
    steps by, ``"gradient"`` by their gradient; ``"auto"`` is ``"update"`` where the staleness-aware step is taken and
    ``algo`` compares entries with each other.
    ``on_nonfinite``: when any rank holds a NaN or Inf, ``"skip"`` drops this step on all ranks, ``"raise"`` raises
    :class:`~tritoncomm.NonFiniteError` on all, and ``"zero"`` takes these values for zero; a step that a
    ``GradScaler`` found to overflow is always skipped. ``max_grad_norm`` clips the averaged gradient.
    ``timeout`` limits each wait for a peer; None leaves it to the process group. Tensors of fewer than ``dense_below``
    elements or of at most one dimension (biases, norms) travel dense, all in one all-reduce, unless ``dense_below=0``;
    a model of one-dimensional shards goes by the number of elements alone.
    ``broadcast_parameters=True`` first copies the parameters of the group's first rank to its other ranks, as
    ``DistributedDataParallel`` does. Buffers are not copied, because an optimizer does not know them.

    Every rank must call this alike: parameters, optimizer, recipe and options are compared, and a
    difference, or an argument that is wrong on some rank, is a
    :class:`~tritoncomm.ConfigMismatchError` on the other ranks. Raises
    :class:`~tritoncomm.ConfigurationError` for arguments that cannot work.
    """
    if process_group is not None and not is_distributed():
        raise ConfigurationError("process_group was given but torch.distributed is not initialised")
    if process_group is not None and dist.get_rank(process_group) < 0:
        raise ConfigurationError("this rank is not a member of process_group")
    with setup_checks.propagate_errors(process_group):
        check_optimizer(optimizer)
        if isinstance(optimizer, SparseOptimizer):
            raise ConfigurationError("optimizer is wrapped already: wrap the original one")
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
    """What :func:`wrap` returns. Shares ``param_groups``, ``state`` and ``defaults`` with ``optimizer``."""

    # A GradScaler then always calls step(), and says through these what it found on this rank.
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
        self._take_in(optimizer, recipe, options)
        self._exchange = self._set_up(process_group, broadcast=broadcast_parameters)

    def _take_in(self, optimizer: torch.optim.Optimizer, recipe: Recipe, options: WrapOptions) -> None:
        self.optimizer = optimizer
        # Not super().__init__: parameters and state stay the wrapped optimizer's. This is the part of
        # it that sets up hooks and profiling, the way unpickling does.
        super().__setstate__({})
        self.recipe = recipe
        self._options = options
        self._optimizer_step = OptimizerStep(optimizer, options, late=not is_dense(recipe))
        self._optimizer_step.check()
        self._step_state = StepState()

    # What belongs to the wrapped optimizer. Read through, because load_state_dict rebinds them.

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The wrapped optimizer's."""
        return self.optimizer.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        """The wrapped optimizer's."""
        return self.optimizer.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """The wrapped optimizer's."""
        return self.optimizer.defaults

    @property
    def process_group(self) -> dist.ProcessGroup | None:
        """The group of the ranks that exchange; None is the default one."""
        return self._exchange.group

    @property
    def is_synchronized(self) -> bool:
        """True between :meth:`synchronize` and :meth:`step`."""
        return self._step_state.exchanged

    def __repr__(self) -> str:
        return f"SparseOptimizer({self.recipe!r}, {self.optimizer!r})"

    # Copies share the process group, unpickled ones take the default group. Hooks are not copied, as torch's are not.

    def __getstate__(self) -> dict[str, Any]:
        fields = {"optimizer": self.optimizer, "recipe": self.recipe, "options": self._options}
        self._nothing_pending("copying")
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
        clone._restore(  # noqa: SLF001 - our own
            copy.deepcopy(self.__getstate__(), memo), self._exchange.group
        )
        return clone

    def _restore(self, state: dict[str, Any], group: dist.ProcessGroup | None) -> None:
        self._take_in(state["optimizer"], state["recipe"], state["options"])
        self._exchange = self._build(group)
        self._exchange.feedback = self._exchange.loaded(state["exchange"])
        self._step_state.skipped, self._exchange.steps = state["skipped"], state["steps"]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, on every rank alike. What is owed to the others is kept, or nothing changes."""
        self._nothing_pending("add_param_group()")
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
        """Deliver this share of the entries from now on, on every rank alike. What is owed stays.

        Raises :class:`~tritoncomm.ConfigurationError` for a density that cannot be, and
        :class:`~tritoncomm.ConfigMismatchError` when ranks ask for different ones; nothing changes then.
        """
        self._nothing_pending("set_density()")
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
        """Go on in another process group (None: the default one), of whatever size and ranks; all its ranks call this.

        After a failure some ranks may have applied a step that others could not confirm: those catch up here. What
        this rank owes is scaled so that the pending update of the ranks that are left stays what it was; what a lost
        rank owed is lost with it. Methods learn their thresholds and partitions anew. With ``node_group`` the exchange
        is dense within nodes; without, it is sparse between all ranks, whatever it was before. Raises
        :class:`~tritoncomm.ConfigMismatchError` when the ranks are not at the same step or hold other parameters.
        """
        exchange = self._exchange
        if is_distributed():
            ahead = max(fields["steps"] for fields in setup_checks.gather({"steps": exchange.steps}, process_group))
            if exchange.pending is not None and exchange.steps + 1 == ahead:
                self._take_step(exchange.commit_pending())
        self._reset()
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
        """Forget the gradients, and an exchange that no step has used."""
        self.optimizer.zero_grad(set_to_none=set_to_none)
        self._reset()

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Exchange, unless :meth:`synchronize` has done so, then step; returns the closure's loss.

        Raises :class:`RuntimeError` when the exchanged gradients have been replaced since.
        """
        try:
            return self._step(closure)
        except BaseException:  # a scaler takes these back only when all went well, and multiplies by what is left
            for name in ("grad_scale", "found_inf"):
                vars(self).pop(name, None)
            raise

    def _step(self, closure: Callable[[], Any] | None) -> Any:
        step_state, loss = self._step_state, None
        if closure is not None:
            if step_state.exchanged:
                raise RuntimeError("a closure computes new gradients: call step(closure) without synchronize()")
            with torch.enable_grad():
                loss = closure()
        if self._optimizer_step.is_synthetic():
            self._optimizer_step.initialize_state(self._exchange.layout)
            return loss
        if not step_state.exchanged:
            self.synchronize()
        elif getattr(self, "grad_scale", None) is not None:
            raise RuntimeError("synchronize() has averaged scaled gradients: call scaler.unscale_(optimizer) before it")
        if any(now is not then for now, then in zip(self._gradients(), step_state.written, strict=True)):
            raise RuntimeError("gradients were replaced after synchronize(): call step() or zero_grad() first")
        if step_state.mean is not None:
            self._take_step(step_state.mean)
        else:
            self._check_scale()
        self._reset()
        return loss

    def note_unscaled(self, found: torch.Tensor) -> None:
        """A scaler has unscaled the gradients and ``found`` (not 0) an overflow on some rank: skip the step."""
        self._step_state.found_in_unscale = found

    @without_compile
    @torch.no_grad()
    def synchronize(self) -> None:
        """Replace every ``.grad`` by the average over ranks now, for example to clip it.

        The following :meth:`step` does not exchange again. Parameters without gradient count as zero
        and receive one. The staleness-aware step reads ``.grad`` at the delivered coordinates only.
        With a ``GradScaler``, call ``scaler.unscale_(optimizer)`` before.
        Raises :class:`RuntimeError` when the gradients were exchanged already.
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
        step_state.exchanged = True  # without a mean the step does nothing
        step_state.written = self._gradients()

    @torch.no_grad()
    def flush(self) -> None:
        """Step by everything that the ranks still owe each other, dense, on every rank alike; nothing is owed then.

        Gradients are not looked at, and are gone afterwards. Before a last evaluation, or a checkpoint for another
        number of workers.
        """
        self._nothing_pending("flush()")
        mean = self._exchange.flush()
        found = mean.values.nonzero().reshape(-1).to(torch.int32)
        sparse = SparseVector(found, mean.values[found.long()], mean.numel)
        self._optimizer_step.step(sparse, self._exchange.layout, clip=False)
        self.zero_grad()

    def metrics(self) -> dict[str, float]:
        """What the last exchange did, and totals; flat, ready for TensorBoard or W&B.

        ``bytes_*`` and ``messages_sent`` are this rank's. ``seconds_select``, ``seconds_exchange`` (waiting for the
        network, which every phase then tells of by itself) and ``seconds_apply`` make up the exchange.
        ``residual_norm`` is computed here.
        ``grad_norm`` is that of the averaged gradient before ``max_grad_norm`` clipped it.
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
        """The wrapped optimizer's state, loadable into the bare one, and what this rank still owes.

        Raises :class:`RuntimeError` between :meth:`synchronize` and :meth:`step`, where what was
        delivered is in the gradients alone.
        """
        for before in list(self._optimizer_state_dict_pre_hooks.values()):
            before(self)
        self._nothing_pending("state_dict()")
        state = self.optimizer.state_dict() | {"tritoncomm": self._exchange.state_dict()}
        for after in list(self._optimizer_state_dict_post_hooks.values()):
            changed = after(self, state)
            state = state if changed is None else changed
        return state

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what :meth:`state_dict` of the same rank returned, or a bare optimizer's state.

        A bare state leaves what is owed as it is. All ranks load together and go on only if all can.
        Raises, with nothing changed, :class:`~tritoncomm.ConfigurationError` when the state is damaged or belongs to
        another rank, world size, method or model, and :class:`~tritoncomm.ConfigMismatchError` when
        another rank refused its state or loads one of another step.
        """
        for before in list(self._optimizer_load_state_dict_pre_hooks.values()):
            changed = before(self, state_dict)
            state_dict = state_dict if changed is None else changed
        with setup_checks.propagate_errors(self._exchange.group):
            feedback = self.loadable(state_dict)
        ours = state_dict.get("tritoncomm")
        inner = {key: value for key, value in state_dict.items() if key != "tritoncomm"}
        if is_distributed():
            setup_checks.compare({"loaded state": repr(feedback.algorithm.common_state())}, self._exchange.group)
        self.optimizer.load_state_dict(inner)
        self._optimizer_step.restore(inner)
        self._exchange.feedback = feedback
        self._exchange.steps = ours["steps"] if ours is not None else self._exchange.steps
        self._reset()
        for after in list(self._optimizer_load_state_dict_post_hooks.values()):
            after(self)

    def loadable(self, state_dict: dict[str, Any]) -> ErrorFeedback:
        """What is owed by ``state_dict``, for :meth:`load_state_dict`; for this rank alone, and nothing changes.

        Raises :class:`~tritoncomm.ConfigurationError` when it cannot be loaded here.
        """
        setup_checks.check_state_dict(state_dict, self.optimizer)
        ours = state_dict.get("tritoncomm")
        return self._exchange.feedback if ours is None else self._exchange.loaded(ours)

    def _build(self, group: dist.ProcessGroup | None) -> GradientExchange:
        """An exchange of the gradients of everything that is trained."""
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
        """An exchange for the present parameters, once all ranks agree about it."""
        exchange = self._build(group)
        self._compare(exchange, broadcast=broadcast)
        if is_distributed():
            exchange.log_choice()
        elif int(os.environ.get("WORLD_SIZE", "1")) > 1:
            logger.warning("WORLD_SIZE is set but torch.distributed is not initialised: this is one worker alone")
        return exchange

    def _compare(self, exchange: GradientExchange, *, broadcast: bool = False) -> None:
        setup_checks.compare_setup(
            self.optimizer,
            exchange.parameters,
            self.recipe,
            self._options,
            exchange.steps,
            exchange.group,
            broadcast=broadcast,
        )
        exchange.agree_on_exchange_id()

    def _local_error(self) -> ConfigurationError | None:
        for parameter in self._frozen:
            if parameter.grad is not None:
                return ConfigurationError(
                    f"a parameter of shape {tuple(parameter.shape)} was frozen at wrap() and now has a gradient: "
                    "wrap with requires_grad=True and freeze it then, or unfreeze it before wrapping"
                )
        if not self._step_state.checked:  # a module may have been wrapped since
            self._step_state.checked = True
            try:
                setup_checks.check_not_reduced(self._exchange.parameters)
            except ConfigurationError as error:
                return error
        return None

    def _check_scale(self) -> None:
        """Say once that a skipped step leaves this rank's scale alone, where a scaler looked at this rank only."""
        found = getattr(self, "found_inf", None)
        if found is not None and not bool(found) and not self._step_state.told:
            self._step_state.told = True
            logger.warning(
                "rank %d: the step was skipped for an overflow that the GradScaler here has not seen, so that it keeps "
                "its scale; no result depends on that, but with tritoncomm.amp.GradScaler all scales stay equal",
                self._exchange.rank,
            )

    def _take_step(self, mean: SparseVector) -> None:
        self._optimizer_step.step(mean, self._exchange.layout)

    def _nothing_pending(self, what: str) -> None:
        if self._step_state.exchanged:
            raise RuntimeError(f"an exchange is waiting for its step: call step() before {what}")

    def _reset(self) -> None:
        self._step_state.reset()

    def _gradients(self) -> list[torch.Tensor | None]:
        return [parameter.grad for parameter in self._exchange.layout.parameters]
