"""The function that most users call: wrap an optimizer, and open the front door that fits its model."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tritoncomm import ddp, fsdp
from tritoncomm.algorithms import Hierarchical, Recipe, Warmup
from tritoncomm.errors import ConfigurationError
from tritoncomm.optim import SparseOptimizer
from tritoncomm.scheduler.process_group import is_distributed
from tritoncomm.step import setup_checks
from tritoncomm.step.hook_state import HookState, hook_of
from tritoncomm.step.options import (
    DEFAULT_ALGO,
    DENSE_BELOW,
    WrapOptions,
    check_group,
    check_keywords,
    check_optimizer,
    check_scaler,
    is_alone,
    resolve_recipe,
    resolved_small,
)

__all__ = ["wrap"]


def wrap(
    optimizer: torch.optim.Optimizer,
    algo: str | Recipe | None = None,
    *,
    density: float | None = None,
    process_group: dist.ProcessGroup | None = None,
    node_group: dist.ProcessGroup | None = None,
    warmup_steps: int | None = None,
    staleness: str = "aware",
    select_by: str = "auto",
    max_catch_up: float = 20.0,
    max_relative_update: float = 0.05,
    on_nonfinite: str = "skip",
    max_grad_norm: float | None = None,
    clip_by: str = "delivered",
    timeout: timedelta | None = None,
    dense_below: int | None = None,
    small: str | None = None,
    broadcast_parameters: bool = False,
    model: nn.Module | None = None,
    scaler: torch.amp.GradScaler | None = None,
    **recipe_fields: Any,
) -> SparseOptimizer:
    """Wrap ``optimizer`` so that its steps use gradients that a sparse exchange has averaged over all ranks.

    An exchange delivers the fraction ``density`` of the entries. The others stay in a residual on each rank, which is
    added to its next gradient (error feedback). Adam and AdamW take a staleness-aware step: a coordinate that is
    delivered after tau steps catches up, which means that its delivery counts for tau steps, or for ``max_catch_up`` or
    3 sqrt(tau) if that is less.

    There are two ways to train. With a plain module, ``step()`` exchanges the gradients. With a module in
    ``DistributedDataParallel`` or FSDP2, pass it as ``model``: a hook then exchanges the gradients during the backward
    pass, and ``step()`` uses what it delivered. Parameters may be DTensors. Each rank exchanges its shard with the
    ranks of ``process_group``, which hold the same shard.

    All ranks must call this with identical parameters, optimizer settings and arguments, which are compared. Nothing
    else may average the gradients. A single worker takes the original optimizer's steps, to the bit.

    Args:
        optimizer: Optimizer to wrap.
        algo: Name of a method from :func:`tritoncomm.algorithms`, or a recipe. Default: None, which is ``"oktopk"``,
            or the method of a hook that is registered.
        density: Fraction of entries to deliver per step, in (0, 1]. Default: None, which is 0.03, or the density of a
            recipe or of a hook that is registered.
        process_group: Process group to exchange in. With FSDP2, the ranks that hold the same shard. With DDP, the group
            of the model is used. Default: the default process group.
        node_group: Process group of the ranks of this rank's node. The exchange is then dense within nodes and sparse
            between them, see :class:`~tritoncomm.Hierarchical`. On a GPU, the host waits often: it has no static form.
            Default: None, nodes are not treated separately.
        warmup_steps: Number of dense exchanges before the first sparse one. Default: None, which is 20 for a method,
            and 0 for a dense one or a recipe that wraps another, or the number of a hook that is registered.
        staleness: ``"aware"``: Adam and AdamW take the staleness-aware step. ``"off"``: the optimizer takes its own
            step. Default: ``"aware"``.
        select_by: Criterion by which methods compare entries. ``"gradient"``: the gradient. ``"update"``: the gradient
            over the root of its second moment, which is proportional to Adam's update. ``"auto"``: ``"update"`` with
            the staleness-aware step, else ``"gradient"``. Default: ``"auto"``.
        max_catch_up: Maximum number of steps that one delivery counts for, at least 1. Default: 20.
        max_relative_update: Maximum change of a tensor in one step by catching up, as a fraction of its norm. A root
            mean square change of one learning rate is always allowed. Default: 0.05.
        on_nonfinite: Action when any rank has a NaN or Inf. ``"skip"`` skips the step on all ranks, ``"raise"`` raises
            :class:`~tritoncomm.NonFiniteError` on all ranks, ``"zero"`` replaces the values by zero. If a
            ``GradScaler`` finds an overflow, the step is always skipped. Default: ``"skip"``.
        max_grad_norm: Maximum 2-norm of the averaged gradient, which is clipped. Default: None, no clipping.
        clip_by: What ``max_grad_norm`` limits. ``"delivered"``: the entries of a step that were delivered, which are
            sums of several gradients. ``"gradient"``: the mean over ranks of the gradients of this step, before they
            are added to the residual, as in a dense run. Its norm is estimated, with a standard deviation of 3 %, from
            2 KB that all ranks sum. DDP on a CPU then exchanges at the end of the backward pass. An optimizer of a part
            of a model with a hook raises an error, and so do copies of parameters that tensor parallelism keeps.
            Default: ``"delivered"``.
        timeout: Maximum time of each wait for a peer. Default: the time-out of the process group.
        dense_below: Tensors with fewer elements, or at most one dimension (biases, norms), are sent dense, all
            together. If all are one-dimensional, only the first rule applies. 0 sends none dense. Default: None,
            which is 1024, or the setting of a hook that is registered.
        small: Format of what is sent dense: these tensors, and all tensors in the dense steps at the start.
            ``"fp32"``, or ``"8bit"`` for about a quarter of the bytes: values are then quantized in both directions,
            and what this cuts off stays in the residual. A magnitude of 2**112 or more then rejects the step. Dense
            steps of ``dgc`` are not quantized. A :class:`~tritoncomm.Warmup` that is passed has a format of its own.
            Default: None, which is ``"8bit"``, or the setting of a hook that is registered.
        broadcast_parameters: Whether to copy the parameters of the group's first rank to its other ranks first, as
            ``DistributedDataParallel`` does. Buffers are not copied: an optimizer does not hold them. Default: False.
        model: The ``DistributedDataParallel`` or FSDP2 module that ``optimizer`` trains. If it is not registered yet,
            this calls :func:`tritoncomm.ddp.register` or :func:`tritoncomm.fsdp.register`. Default: None. A module that
            is registered is found by its parameters. Settings of the exchange that are given must be those with which
            it was registered. A plain module changes nothing, so one script may serve one worker and several.
        scaler: The ``GradScaler`` that scales the loss. Needed with a hook only, which averages unscaled gradients
            before ``scaler.step()``. Default: None.
        **recipe_fields: Further fields of the recipe of ``algo``. Methods that send entries have ``values``, the format
            of a value on the wire: ``"fp32"``, ``"bf16"``, ``"8bit"``, ``"4bit"``, ``"3bit"``, ``"2bit"`` or
            ``"1bit"``. What rounding takes away stays in the residual. Here its default is ``"4bit"``. Rounded
            values travel in packed messages. ``packed`` says whether values in ``"fp32"`` do. By default they do not.
            ``static`` says whether messages have a fixed length. By default they do on a GPU if the method has this
            form, because the host then waits less often. It has nothing to do with ``static_graph`` of DDP.

    Returns:
        The wrapped optimizer.

    Raises:
        ConfigurationError: An argument is invalid.
        ConfigMismatchError: Ranks are configured differently, or an argument is invalid on another rank.
    """
    model = _module(model)
    hook = _hook(optimizer, model)
    group = _group(process_group, model, hook)
    device = _device(optimizer, model, hook)
    with setup_checks.propagate_errors(group, device):
        check_optimizer(optimizer, alone=is_alone(group if hook is None else hook.replicas))
        if isinstance(optimizer, SparseOptimizer):
            raise ConfigurationError("optimizer is wrapped already: pass the original optimizer")
        check_scaler(scaler)
        _check_broadcast(model, broadcast_parameters)
        options = WrapOptions(
            staleness=staleness,
            select_by=select_by,
            max_catch_up=max_catch_up,
            max_relative_update=max_relative_update,
            on_nonfinite=on_nonfinite,
            max_grad_norm=max_grad_norm,
            clip_by=clip_by,
            timeout=timeout,
            dense_below=DENSE_BELOW if dense_below is None else dense_below,
            small=hook.exchange.options.small if hook is not None and small is None else resolved_small(small),
        )
        if hook is None:
            algo = DEFAULT_ALGO if algo is None else algo
            chosen = resolve_recipe(
                algo, density, warmup_steps, recipe_fields, node_group, group, small=options.small, function=wrap
            )
        else:
            chosen = hook.recipe
            _check_registered(chosen, algo, density, warmup_steps, node_group, recipe_fields)
        chosen.check_optimizer(optimizer)
        if hook is not None:
            hook.check_settings(scaler, timeout, dense_below, small)
            registered = hook.exchange.options
            options = replace(options, dense_below=registered.dense_below, small=registered.small)
    if is_distributed():  # before a hook is registered on some ranks only
        given = {"model": None if model is None else type(model).__name__, "scaler": scaler is not None}
        setup_checks.compare(given | {"registered hook": hook is not None}, group, device)
    if hook is not None and hook.scaler is None:
        hook.scaler = scaler
    if hook is None and model is not None:
        with setup_checks.propagate_errors(group, device):
            setup_checks.check_exchanged(_trained(optimizer.param_groups), model.parameters())
        hook = _register(model, chosen, process_group, options, scaler)
    with setup_checks.propagate_errors(group, device):
        return SparseOptimizer(optimizer, chosen, group, options, broadcast_parameters=broadcast_parameters, hook=hook)


def _module(model: nn.Module | None) -> nn.Module | None:
    """Return ``model`` itself if torch.compile has wrapped it."""
    model = getattr(model, "_orig_mod", model)
    if not (model is None or isinstance(model, nn.Module)):
        raise ConfigurationError(f"model is a {type(model).__name__}: pass the torch.nn.Module that optimizer trains")
    return model


def _check_broadcast(model: nn.Module | None, broadcast: bool) -> None:
    if not isinstance(broadcast, bool):
        raise ConfigurationError(f"broadcast_parameters={broadcast!r}: must be True or False")
    if broadcast and model is not None and fsdp.is_sharded(model):
        raise ConfigurationError(
            "broadcast_parameters=True: the hook of a sharded model compares the replicas when it is registered; "
            "broadcast the parameters before fully_shard()"
        )


def _hook(optimizer: torch.optim.Optimizer, model: nn.Module | None) -> HookState | None:
    """Return the state of the hook that exchanges the parameters of ``optimizer`` already, if any."""
    if isinstance(model, DistributedDataParallel):
        return ddp.state_of(model)
    groups = getattr(optimizer, "param_groups", [])
    return hook_of({id(parameter) for group in groups for parameter in group["params"]})


def _device(optimizer: torch.optim.Optimizer, model: nn.Module | None, hook: HookState | None) -> torch.device | None:
    """Return the device of the exchange, if it is known. FSDP2 may have offloaded the parameters to the CPU."""
    device = hook.device if hook is not None else None if model is None else fsdp.device_of(model)
    return device or setup_checks.device_of(optimizer)


def _group(
    group: dist.ProcessGroup | None, model: nn.Module | None, hook: HookState | None
) -> dist.ProcessGroup | None:
    """Return the group in which settings are compared, or raise if ``group`` cannot be used."""
    check_group("process_group", group)
    if isinstance(model, DistributedDataParallel):
        if group is not None and group is not model.process_group:
            raise ConfigurationError("process_group is not the one of the model: leave it out, or pass it to DDP")
        return model.process_group
    return group if hook is None else hook.process_group


def _trained(groups: list[dict[str, Any]]) -> list[torch.Tensor]:
    return [parameter for group in groups for parameter in group["params"] if parameter.requires_grad]


def _check_registered(
    registered: Recipe,
    algo: str | Recipe | None,
    density: float | None,
    warmup_steps: int | None,
    node_group: dist.ProcessGroup | None,
    fields: dict[str, Any],
) -> None:
    """Raise :class:`~tritoncomm.ConfigurationError` if an argument of :func:`wrap` differs from a registered recipe.

    None stands for an argument that was not given.
    """
    layers = [registered]
    while isinstance(layers[-1], (Hierarchical, Warmup)):
        layers.append(layers[-1].recipe)
    method = layers[-1]
    check_keywords(wrap, algo or method.name, fields)
    if isinstance(algo, Recipe):
        if algo not in layers:
            raise _differs("algo", repr(algo), registered)
    elif algo not in (None, method.name):
        raise _differs("algo", repr(algo), registered)
    if density not in (None, method.density):
        raise _differs("density", repr(density), registered)
    steps = next((layer.steps for layer in layers if isinstance(layer, Warmup)), 0)
    if warmup_steps not in (None, steps):
        raise _differs("warmup_steps", repr(warmup_steps), registered)
    for name, value in fields.items():
        if value != getattr(method, name):
            raise _differs(name, repr(value), registered)
    size = next((layer.node_size for layer in layers if isinstance(layer, Hierarchical)), None)
    if node_group is not None and dist.get_world_size(node_group) != size:
        raise _differs("node_group", f"{dist.get_world_size(node_group)} ranks", registered)


def _differs(name: str, given: str, registered: Recipe) -> ConfigurationError:
    return ConfigurationError(
        f"{name}={given}: the model was registered with {registered!r}; leave out {name} here, or give it where the "
        "model is registered first, by register() or an earlier wrap()"
    )


def _register(
    model: nn.Module,
    recipe: Recipe,
    group: dist.ProcessGroup | None,
    options: WrapOptions,
    scaler: torch.amp.GradScaler | None,
) -> HookState | None:
    """Register a hook with a DDP or FSDP2 ``model``. Return None for a plain module, whose optimizer exchanges."""
    settings: dict[str, Any] = {
        "density": recipe.density,
        "warmup_steps": 0,  # it is in the recipe
        "scaler": scaler,
        "timeout": options.timeout,
        "dense_below": options.dense_below,
        "small": options.small,
    }
    if isinstance(model, DistributedDataParallel):
        return ddp.register(model, recipe, **settings)
    if not fsdp.is_sharded(model):
        return None
    if group is None:
        raise ConfigurationError(
            "model is sharded by FSDP2: pass process_group=, the ranks that hold the same shard as this rank "
            '(mesh["replicate"].get_group())'
        )
    return fsdp.register(model, group, recipe, **settings)
