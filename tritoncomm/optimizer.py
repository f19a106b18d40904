"""An optimizer that exchanges gradients before each step."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn

from tritoncomm.algorithms import Recipe
from tritoncomm.errors import ConfigurationError
from tritoncomm.scheduler.meter import of_all
from tritoncomm.step import agree
from tritoncomm.step.exchange.machine import GradientExchange
from tritoncomm.step.model.module import checked_module, group_of
from tritoncomm.step.model.refuse import checked_methods, guard, is_wrapped, optimizers_inside
from tritoncomm.step.optimizer_list import parts_of
from tritoncomm.step.saved import state as exchange_state
from tritoncomm.step.saved.optimizer_state import (
    check_state_dict,
    marked,
    states_of,
    unmarked,
    warn_about_lost_residual,
)
from tritoncomm.step.settings import check_group, check_outer_lr, restores
from tritoncomm.step.setup import Setup
from tritoncomm.step.stepper import Stepper
from tritoncomm.step.tensors.names import named_parameters
from tritoncomm.step.torch_internals import StateHooks, change_class, has_own_step, original_class

__all__ = ["SparseOptimizer"]


class SparseOptimizer(torch.optim.Optimizer):
    """What :func:`wrap` adds to the class of an optimizer.

    The optimizer stays the same object, of a class with both names: an ``AdamW`` becomes a ``SparseAdamW``, which is an
    ``AdamW`` and a ``SparseOptimizer``. Schedules, hooks and trainers that hold it go on. It can be neither copied nor
    pickled: save its :meth:`state_dict`.

    Step hooks run around the update: before it, gradients are averaged. They do not run if all ranks skip the step.
    """

    _tritoncomm: Stepper
    # A GradScaler then always calls step(), with its scale and its overflow flag of this rank as attributes.
    _step_supports_amp_scaling = True

    def __repr__(self) -> str:
        return f"{super().__repr__()}\nexchanged by {self.recipe!r}"

    @property
    def recipe(self) -> Recipe:
        """The recipe of the exchange. In a list, the one of the optimizers that exchange gradients, if any do."""
        return self._tritoncomm.setup.scope.options.recipe

    @property
    def process_group(self) -> dist.ProcessGroup | None:
        """The process group of the exchange. None is the default process group."""
        return self._tritoncomm.setup.scope.options.group

    @property
    def is_synchronized(self) -> bool:
        """True after :meth:`synchronize`, until the next :meth:`step` or :meth:`zero_grad`."""
        return self._tritoncomm.setup.is_synchronized

    @property
    def all_skipped(self) -> bool:
        """True if all ranks have skipped the last step, because of a NaN, an Inf or an overflow in gradients."""
        return self._tritoncomm.all_skipped

    @property
    def steps_taken(self) -> int:
        """Number of steps that count for a schedule: all local ones, otherwise those that were not skipped."""
        setup = self._tritoncomm.setup
        return setup.exchange.steps if setup.local is None else setup.local.total

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Exchange the gradients, unless :meth:`synchronize` has done so, then take the optimizer's step.

        ``closure`` computes the gradients and returns the loss, which is returned. It is called once. If a step
        pre-hook raises, call this again: it does not exchange again, and takes the step.

        Raises:
            RuntimeError: After :meth:`synchronize`, ``closure`` changed the averaged gradients, or they were replaced.
            ConfigurationError: The optimizer has parameters that are not exchanged. Nothing has changed.
            ProtocolMismatchError: Ranks differ in frozen parameters, learning rates or completed updates, or an error
                or a signal has stopped an update before: load a checkpoint. Nothing has changed. All ranks raise it.
            NonFiniteError: A rank has a NaN or Inf, and ``on_nonfinite`` is ``"raise"``. Nothing has changed.
            ExchangeError: A peer was lost, or a wait timed out. Nothing has changed.
        """
        return self._tritoncomm.step(closure)

    # torch then puts no hooks around it, and a schedule no counter: both are run inside.
    step.hooked = True  # type: ignore[attr-defined]
    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]  # noqa: SLF001

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients, and throw away averaged gradients that :meth:`step` has not used."""
        super().zero_grad(set_to_none=set_to_none)
        self._tritoncomm.withdraw()

    def synchronize(self) -> None:
        """Replace every ``.grad`` by the mean over ranks now, for example to clip it before :meth:`step`.

        The next :meth:`step` does not exchange again. A missing gradient counts as zero, and is created if another rank
        has one. The staleness-aware step reads ``.grad`` at the delivered coordinates only. With a ``GradScaler``, call
        ``scaler.unscale_(optimizer)`` first. Weight decay that is a part of the gradient is added in :meth:`step`. An
        optimizer that exchanges updates keeps this worker's gradients.

        Raises:
            RuntimeError: The gradients were exchanged already. For other errors see :meth:`step`.
        """
        stepper, setup = self._tritoncomm, self._tritoncomm.setup
        if setup.local is not None:
            setup.local.say_gradients_are_local()
            return
        stepper.synchronize()
        if setup.exchange.pending.parts:
            stepper.late_backward.watch(setup.scope.parameters)

    def merge(self) -> None:
        """Exchange what local steps have changed now, on all ranks alike, after equally many steps on each.

        Call it at the end of training, and after an exchange that has failed. Without local steps since the last
        exchange, nothing happens.

        Raises:
            ExchangeError: A peer was lost, or a wait timed out. Nothing has changed. For other errors see :meth:`step`.
        """
        local_steps = self._tritoncomm.setup.local
        if local_steps is not None:
            self._tritoncomm.merge(local_steps)

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Let the parameters be those that all workers have in common, and this worker's own again after the context.

        Use it to evaluate, and to save the model, between two exchanges of updates. Elsewhere it changes nothing.
        """
        local_steps = self._tritoncomm.setup.local
        with nullcontext() if local_steps is None else local_steps.averaged():
            yield

    @property
    def outer_lr(self) -> float:
        """Rate of the step of the common parameters by the mean update. All ranks set the same."""
        return float(self._tritoncomm.outer_group["lr"])

    @outer_lr.setter
    def outer_lr(self, rate: float) -> None:
        group = self._tritoncomm.outer_group
        check_outer_lr(rate)
        group["lr"] = rate

    def flush(self) -> None:
        """Exchange the residuals of all ranks dense, and step by their mean.

        Residuals are zero afterwards. Those wait that nobody could apply: of frozen parameters, and of groups with a
        learning rate of 0 while another group has one. Nothing changes where no residual can be: with ``algo="dense"``,
        and for a single worker.

        Use it before the last evaluation, or before a checkpoint without residuals. All ranks must call it. The present
        gradients are discarded.
        """
        self._tritoncomm.flush()
        self.zero_grad()

    def metrics(self) -> dict[str, float]:
        """Return metrics of the last exchange and totals, as a flat dict for TensorBoard or W&B.

        ``bytes_*`` and ``messages_sent`` count this rank's messages. The time of the exchange is the sum of
        ``seconds_select``, ``seconds_exchange`` (waiting for the network) and ``seconds_apply``; further ``seconds_*``
        split the waiting by phase. On a GPU, seconds are those of the exchange before. ``residual_norm``
        and ``longest_wait`` (in steps) are computed by this call. ``grad_norm`` (with ``max_grad_norm``) is the norm of
        the averaged gradient before clipping. Totals are of this process, since :func:`wrap`: checkpoints have none.
        """
        setup = self._tritoncomm.setup
        figures = figures_of(setup.exchange)
        if setup.local is not None:
            inner = setup.local.metrics()
            each = figures["bytes_sent_total"] / max(setup.local.here, 1)
            figures |= inner | {"exchanges": figures["steps"], "bytes_per_step": each}
        if setup.options.max_grad_norm is None:
            return figures
        norm = None if setup.steps.alone else setup.exchange.gradient_norm
        own = setup.steps.grad_norm if setup.local is None else setup.local.steps.grad_norm
        return figures | {"grad_norm": own if norm is None else float(norm)}

    @torch.inference_mode(False)  # what is made here outlives an evaluation
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add the same parameter group on all ranks. Residuals are kept. If this raises, nothing has changed."""
        self._tritoncomm.setup.add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the optimizer, and under ``"tritoncomm"`` this rank's residual and method state.

        An optimizer that is not wrapped can load this dict, too. Residuals differ between ranks: save the dict of every
        rank, for example with :func:`tritoncomm.checkpoint.save`.

        Raises:
            RuntimeError: :meth:`synchronize` was called without :meth:`step`, so the gradients hold the delivered
                entries. An error or a signal has stopped an update, so parameters may differ between ranks.
        """
        hooks, setup = StateHooks(self), self._tritoncomm.setup
        hooks.run("state_dict_pre")
        setup.check_saveable("state_dict()")
        own = exchange_state.saved(setup.exchange, setup.local)
        with hooks:
            state = marked(original_class(self).state_dict(self), setup.exchange)
        return hooks.changed("state_dict_post", state | {"tritoncomm": own})

    @torch.inference_mode(False)  # what is loaded outlives an evaluation
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
        hooks, stepper, setup = StateHooks(self), self._tritoncomm, self._tritoncomm.setup
        optimizer, exchange = setup.optimizer, setup.exchange  # not Lightning's wrapper of it
        with agree.propagate_errors(setup.everybody, setup.device):
            state_dict = hooks.changed("load_state_dict_pre", state_dict.copy())
            resets = not restores(residuals)
            check_state_dict(state_dict, optimizer)
            state_dict = exchange_state.for_this_rank(state_dict, setup.scope, reset=resets)
            saved = state_dict.get("tritoncomm")
            feedbacks = [] if saved is None else exchange_state.loaded(setup.scope, saved, setup.local)
            if setup.local is not None:
                setup.local.check_not_averaged("load_state_dict()")
        inner, own = unmarked(state_dict), numbers_of_own(setup)
        states = states_of(inner)
        common = {number: each for number, each in states.items() if number not in own}
        exchange_state.compare(setup.scope, common, saved, feedbacks)
        before = [(part, part.state, part.param_groups) for part in parts_of(optimizer)]
        try:
            with agree.propagate_errors(setup.everybody, setup.device), hooks:
                held = states_of(original_class(optimizer).state_dict(optimizer))
                digests = {exchange_state.checksum({"states": each}) for each in (states, held) if saved is None}
                original_class(optimizer).load_state_dict(optimizer, inner)
            agree.compare({"state": "is loaded"}, setup.everybody, setup.device)
        except BaseException:
            for part, state, groups in before:
                part.state, part.param_groups = state, groups
            raise
        if saved is None:
            groups = [dict(group) for group in state_dict["param_groups"]]
            # No warning: torch.distributed.checkpoint loads the residuals by themselves, with ResidualState.
            if not warn_about_lost_residual(groups, setup.everybody, logging.INFO) and len(digests) > 1:
                exchange.forget_ages()
            if setup.local is not None:
                setup.local.renew()
        exchange.restart()
        if saved is not None:
            exchange_state.resume(exchange, feedbacks, saved, setup.local)
        stepper.forget()
        hooks.run("load_state_dict_post")

    @torch.inference_mode(False)  # what is made here outlives an evaluation
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
        setup = self._tritoncomm.setup
        check_group("process_group", process_group)
        if setup.scope.all_shards is not None:
            raise ConfigurationError("a sharded model cannot change its groups: load a checkpoint in new processes")
        module = checked_module(model)
        group = group_of(module, process_group)
        with agree.propagate_errors(group, setup.device):
            setup.exchange.check_complete()
        return self._tritoncomm.continue_in(group, node_group, module)

    def release(self) -> None:
        """Give the optimizer its own class back: it steps by itself again.

        Residuals are lost: call :meth:`flush` before, while nothing is frozen.
        Call :meth:`merge` before where updates are exchanged: parameters differ between ranks after local steps. So
        does the state of the optimizer. Load that of one rank on all before you step by averaged gradients.

        A ``DistributedDataParallel`` module that was passed to :func:`wrap` still averages nothing: to train without
        tritoncomm, put ``model.module`` into a new one, and drop the old one.
        """
        self._tritoncomm.unguard()
        change_class(self, original_class(self))
        del self._tritoncomm

    def __reduce_ex__(self, _: Any) -> NoReturn:
        raise TypeError(
            "a wrapped optimizer can be neither copied nor pickled, because its residuals and connections are those of "
            "one rank: save and load its state_dict(), or make a new optimizer and wrap() that"
        )

    def __deepcopy__(self, _: Any) -> NoReturn:
        self.__reduce_ex__(4)


def figures_of(exchange: GradientExchange) -> dict[str, float]:
    """Return metrics of the last step and totals. Amounts are sums over the vectors, and ratios are maxima."""
    vectors = exchange.scope.vectors
    numel = sum(vector.layout.numel for vector in vectors)
    delivered = sum(vector.density_delivered() * vector.layout.numel for vector in vectors)
    last = of_all([vector.last for vector in vectors])
    return last | {
        "seconds_apply": max(0.0, last.get("seconds_apply", 0.0)),
        "density": exchange.scope.options.recipe.density,
        "density_delivered": delivered / max(numel, 1),
        "steps": float(exchange.steps),
        "skipped_steps": float(exchange.skipped),
        "bytes_sent_total": float(exchange.total.sent.bytes),
        "bytes_received_total": float(exchange.total.received.bytes),
        "longest_wait": _longest_wait(exchange),
        "residual_norm": math.hypot(*(vector.residual_norm for vector in vectors)),
    }


def _longest_wait(exchange: GradientExchange) -> float:
    """Return the steps since the oldest last delivery of an entry, 0.0 if no optimizer knows it."""
    every = [vector.feedback.ages.flat for vector in exchange.scope.vectors]
    found = [each.min() for each in every if each.numel()]
    return float(exchange.steps - torch.stack(found).min()) if found else 0.0


def sparse(optimizer: torch.optim.Optimizer, setup: Setup) -> SparseOptimizer:
    """Let ``optimizer`` exchange what ``setup`` says from now on, and return it."""
    kind: Any = type(optimizer)
    sparse_class = _sparse_class(kind)
    stepper = vars(optimizer)["_tritoncomm"] = Stepper(setup)
    stepper.unguard = guard(optimizer, stepper)
    change_class(optimizer, sparse_class)
    return optimizer  # type: ignore[return-value]


def check_free(optimizers: Iterable[torch.optim.Optimizer]) -> None:
    """Raise :class:`~tritoncomm.ConfigurationError` if one is wrapped, or has attributes that a wrapped one uses."""
    ours = [
        name for name in vars(SparseOptimizer) if not (name.startswith("_") or hasattr(torch.optim.Optimizer, name))
    ]
    for optimizer in optimizers:
        kind = type(optimizer).__name__
        if is_wrapped(optimizer):
            raise ConfigurationError(
                f"optimizer is a {kind}, which is wrapped already, by itself or in a list: call step() of what wrap() "
                "returned, or its flush() and release() to wrap with other settings"
            )
        for inside in optimizers_inside(optimizer):
            if isinstance(inside, SparseOptimizer):
                raise ConfigurationError(
                    f"optimizer is a {kind}, and the {original_class(inside).__name__} inside it is wrapped already: "
                    f"step this {kind} as it is, or release() the one inside first"
                )
        if has_own_step(optimizer):
            raise ConfigurationError(
                f"somebody has replaced step() of this one {kind}, which would not exchange: write a subclass with "
                "this step, and wrap an optimizer of it"
            )
        for name in ours:
            if hasattr(optimizer, name):
                raise ConfigurationError(
                    f"{kind} has an attribute {name!r}, which would hide the one of tritoncomm.SparseOptimizer: rename "
                    "it in a subclass"
                )


@cache
def _sparse_class(kind: Any) -> type[SparseOptimizer]:
    ours = set(vars(SparseOptimizer))
    checked = {name: method for name, method in checked_methods(kind).items() if name not in ours}
    return type(f"Sparse{kind.__name__}", (SparseOptimizer, kind), {**checked, "wrapped_class": kind})


def numbers_of_own(setup: Setup) -> set[int]:
    """Return the numbers of the parameters whose states in the optimizer are this rank's own.

    These are those that DDP was told to ignore. Where updates are exchanged, states of all differ between ranks.
    """
    every = enumerate(named_parameters(setup.optimizer))
    return {number for number, (each, _) in every if setup.local is not None or id(each) in setup.parameters.ignored}


def stepper_of(optimizer: SparseOptimizer) -> Stepper:
    """Return what takes the steps of ``optimizer``, for other rooms of the library."""
    return optimizer._tritoncomm  # noqa: SLF001 - of this file


def setup_of(optimizer: SparseOptimizer) -> Setup:
    """Return what ``optimizer`` is made of, for other rooms of the library."""
    return stepper_of(optimizer).setup
