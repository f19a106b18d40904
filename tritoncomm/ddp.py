"""A communication hook for ``DistributedDataParallel``."""

from __future__ import annotations

import weakref
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from tritoncomm.algorithms import Recipe
from tritoncomm.errors import ConfigurationError
from tritoncomm.step import setup_checks
from tritoncomm.step.ddp_hook import CommState, comm_hook
from tritoncomm.step.options import DENSE_BELOW, resolve_recipe
from tritoncomm.step.torch_internals import accumulates, averaged_parameters, comm_hooks

__all__ = ["CommState", "comm_hook", "register"]


def register(
    model: DistributedDataParallel,
    algo: str | Recipe = "oktopk",
    *,
    density: float | None = None,
    warmup_steps: int | None = None,
    node_group: dist.ProcessGroup | None = None,
    on_nonfinite: str | None = None,
    scaler: torch.amp.GradScaler | None = None,
    timeout: timedelta | None = None,
    dense_below: int = DENSE_BELOW,
    small: str | None = None,
    **recipe_fields: Any,
) -> CommState:
    """Average the gradients of a ``DistributedDataParallel`` model by sparse exchanges.

    All ranks must call this with the same arguments. On a CPU, each bucket is exchanged when DDP has filled it, while
    backward continues. On a GPU, or with ``clip_by="gradient"`` of :func:`tritoncomm.wrap`, all buckets are exchanged
    at the end of the pass. Accumulate gradients under ``model.no_sync()``: a backward pass that would add to averaged
    gradients raises :class:`RuntimeError`.

    Args:
        model: The DDP module. ``find_unused_parameters=True`` is supported only for dense exchanges.
        algo: See :class:`CommState`. Default: ``"oktopk"``.
        density: Fraction of entries to deliver per step, in (0, 1]. Default: None, which is 0.03, or the density of a
            recipe.
        warmup_steps: Number of dense exchanges before the first sparse one. Default: None, which is 20 for a method,
            and 0 for a dense one or a recipe that wraps another.
        node_group: See :class:`CommState`. Default: None, nodes are not treated separately.
        on_nonfinite: ``"raise"``, ``"propagate"`` or ``"zero"``, see :class:`CommState`. Default: ``"propagate"`` with
            a ``scaler``, else ``"raise"``.
        scaler: The ``GradScaler`` that scales the loss. Residuals are kept in unscaled units. Default: None.
        timeout: Maximum time of each wait for a peer. Default: the time-out of the process group.
        dense_below: Tensors with fewer elements, or at most one dimension, are sent dense. 0 sends none dense.
            Default: 1024.
        small: See :class:`CommState`. Default: None, which is ``"8bit"``.
        **recipe_fields: Further fields of the recipe of ``algo``. ``static`` says whether messages have a fixed length.
            By default they do on a GPU if the method has this form, because the host then waits less often. It has
            nothing to do with ``static_graph`` of DDP.

    Returns:
        The state of the hook, with metrics and checkpoints.

    Raises:
        ConfigurationError: An argument is invalid.
        ConfigMismatchError: Ranks are configured differently. The first backward pass raises it.
    """
    if not isinstance(model, DistributedDataParallel):
        raise ConfigurationError(
            f"model is a {type(model).__name__}: pass the DistributedDataParallel module, or call tritoncomm.wrap() "
            "on the optimizer of a plain module"
        )
    _check_model(model)
    setup_checks.check_unused(model, resolve_recipe(algo, density, 0, recipe_fields, function=register))
    with setup_checks.on_device(next(model.parameters()).device):  # ranks compare the sizes of nodes
        state = CommState(
            model.process_group,
            algo,
            density=density,
            warmup_steps=warmup_steps,
            node_group=node_group,
            on_nonfinite=on_nonfinite,
            scaler=scaler,
            timeout=timeout,
            dense_below=dense_below,
            small=small,
            **recipe_fields,
        )
    model.register_comm_hook(state, comm_hook)
    _join(state, model)
    state.watch_optimizers("ddp_model")
    return state


def state_of(model: DistributedDataParallel) -> CommState | None:
    """Return the state with which ``model`` is registered, or None. It learns the names of the parameters."""
    for _, state in comm_hooks(model):
        if isinstance(state, CommState) and state.is_registered:
            if not state.parameters:
                _join(state, model)
            return state
    return None


def _join(state: CommState, model: DistributedDataParallel) -> None:
    """Let ``state`` know ``model``, and when its passes begin."""
    state.belongs_to(model)
    _watch_passes(model, weakref.ref(state))


def _check_model(model: DistributedDataParallel) -> None:
    """Raise :class:`~tritoncomm.ConfigurationError` if DDP averages gradients of ``model`` that cannot be exchanged."""
    if getattr(model, "mixed_precision", None) is not None:
        raise ConfigurationError(
            "model is a DDP module with mixed_precision=, which has a communication hook of its own: leave it out, and "
            "use torch.autocast"
        )
    for name, parameter in averaged_parameters(model).items():
        if parameter.is_complex() and parameter.requires_grad:
            raise ConfigurationError(f"{name} is {parameter.dtype}: convert it with torch.view_as_real first")


def _watch_passes(model: DistributedDataParallel, owner: weakref.ref[CommState]) -> None:
    """Note when a backward pass begins, and make it raise if it would add to averaged gradients."""
    parameters = [parameter for parameter in averaged_parameters(model).values() if parameter.requires_grad]

    def check(_: torch.Tensor, own: torch.Tensor) -> None:  # runs before this pass adds to any gradient
        state = owner()
        model = None if state is None else state.model
        if state is None or model is None:
            return
        begins = state.has_averaged or not state.is_unfinished  # only then, because the question takes time
        if begins and not accumulates(own):
            return
        if state.has_averaged:
            state.has_averaged = False
            held = [parameter.grad for parameter in parameters if parameter.grad is not None]
            if not state.is_alone and any(bool(gradient.any()) for gradient in held):
                raise RuntimeError(
                    "the averaged gradients of the last backward pass were not reset, and must not be averaged again: "
                    "call model.zero_grad() first, or accumulate under model.no_sync() in all passes but the last"
                )
        may_be_unused = model.find_unused_parameters or model.static_graph  # DDP finishes a pass without them
        state.is_unfinished = model.require_backward_grad_sync and not may_be_unused

    state = owner()
    for parameter in parameters:
        handle = parameter.register_hook(partial(check, own=parameter))  # type: ignore[no-untyped-call]
        weakref.finalize(state, handle.remove).atexit = False
