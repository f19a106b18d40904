"""Sparse exchange for FSDP2 models that are sharded inside a fast network and replicated across a slow one.

``fully_shard`` with a one-dimensional mesh reduce-scatters gradients within this mesh. The hook averages the shards
over the replicas by sparse exchanges. See :mod:`tritoncomm.step.fsdp_hook`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tritoncomm.algorithms import Recipe
from tritoncomm.errors import ConfigurationError
from tritoncomm.step import setup_checks
from tritoncomm.step.fsdp_hook import FSDPState, ShardHook
from tritoncomm.step.options import (
    DENSE_BELOW,
    check_dense_below,
    check_group,
    check_scaler,
    check_timeout,
    resolve_recipe,
    resolved_small,
)
from tritoncomm.step.shards import by_split, local
from tritoncomm.step.torch_internals import all_reduce_hook, fsdp_parameter_groups, take_over_parameters
from tritoncomm.step.vector_exchange import ExchangeOptions
from tritoncomm.version import __version__


def register(
    model: nn.Module,
    replicate_group: dist.ProcessGroup,
    algo: str | Recipe = "oktopk",
    *,
    density: float | None = None,
    warmup_steps: int | None = None,
    node_group: dist.ProcessGroup | None = None,
    scaler: torch.amp.GradScaler | None = None,
    timeout: timedelta | None = None,
    dense_below: int = DENSE_BELOW,
    small: str | None = None,
    **recipe_fields: Any,
) -> FSDPState:
    """Average the gradient shards of an FSDP2 model over its replicas by sparse exchanges, in the backward pass.

    Call this on all ranks, after the last ``fully_shard`` and before the first forward pass. Shards are
    exchanged at the end of the pass, when FSDP has reduce-scattered all gradients. The optimizer sees averaged
    gradients that are zero where nothing was delivered. Residuals need as much memory as the shards, in fp32.

    If any replica has a NaN or Inf, or if a mean overflows with ``reduce_dtype=torch.float16``, shards become NaN
    on all replicas, as in a dense run, and no residual of any module changes. Every backward pass ends with an
    all-reduce over all ranks, so no rank steps if another rank has failed.

    Args:
        model: Model to which ``fully_shard`` was applied with a one-dimensional mesh, for example ``mesh["shard"]`` of
            a mesh of replicas and shards.
        replicate_group: Process group of the ranks that hold the same shard, ``mesh["replicate"].get_group()``.
        algo: Name of a method from :func:`tritoncomm.algorithms`, or a recipe. Default: ``"oktopk"``.
        density: Fraction of entries to deliver per step, in (0, 1]. Default: None, which is 0.03, or the density of a
            recipe.
        warmup_steps: Number of dense exchanges before the first sparse one. Default: None, which is 20 for a method,
            and 0 for a dense one or a recipe that wraps another.
        node_group: Process group of the replicas in this rank's node. The exchange is then dense within nodes and
            sparse between them, see :class:`~tritoncomm.Hierarchical`. On a GPU, the host waits often: it has no static
            form. Default: None, nodes are not treated separately.
        scaler: The ``GradScaler`` that scales the loss. Residuals are kept in unscaled units. Default: None.
        timeout: Maximum time of each wait for a peer. Default: the time-out of the process group.
        dense_below: Shards with fewer elements, or at most one dimension (biases, norms), are sent dense. 0 sends none
            dense. Default: 1024.
        small: Format of these shards, and of all shards in the dense steps at the start, ``"fp32"`` or ``"8bit"``, see
            :func:`tritoncomm.wrap`. Default: None, which is ``"8bit"``.
        **recipe_fields: Further fields of the recipe of ``algo``. ``static`` says whether messages have a fixed length.
            By default they do on a GPU if the method has this form, because the host then waits less often. It has
            nothing to do with ``static_graph`` of DDP.

    Returns:
        The state of the exchanges, with metrics and checkpoints.

    Raises:
        ConfigurationError: An argument is invalid, or the model is not supported.
        ConfigMismatchError: Replicas are configured differently, or an argument is invalid on another rank.
    """
    with setup_checks.propagate_errors(None, device_of(model)):
        check_group("replicate_group", replicate_group)
        check_scaler(scaler)
        small = resolved_small(small)
        recipe = resolve_recipe(
            algo, density, warmup_steps, recipe_fields, node_group, replicate_group, small=small, function=register
        )
        check_timeout(timeout)
        check_dense_below(dense_below)
        found = list(_parameter_groups(model))
        for module, group in found:
            _check_group(module, group, replicate_group)
            take_over_parameters(group)
        if not found:
            raise ConfigurationError(
                "model has no sharded module: call fully_shard() first; for a plain or a tensor-parallel module, call "
                "tritoncomm.wrap(optimizer, process_group=...) with the ranks that hold the same parameters"
            )
    device = found[0][1].device  # where FSDP reduces gradients. Parameters may be offloaded to the CPU
    setup_checks.compare({"version": __version__}, None, device)
    reduce_unused = getattr(model, "set_reduce_scatter_unused_params", None)
    if callable(reduce_unused):  # older releases reduce a shorter shard if a parameter is unused, which raises then
        reduce_unused(True)
    if isinstance(state_of(model), FSDPState):
        raise ConfigurationError("the model is registered already: call register() once")
    options = ExchangeOptions(
        recipe=recipe,
        group=replicate_group,
        timeout=timeout,
        dense_below=dense_below,
        small=small,
        device=device,
        flattened=False,  # a shard of a matrix has rows
    )
    recipe.check_world_size(dist.get_world_size(replicate_group))
    state = FSDPState(options, scaler, device, dict(model.named_parameters()))
    state.hooks = [hook for _, group in found if (hook := ShardHook(group, state)).names]
    state.name({name: each for hook in state.hooks for name, each in zip(hook.names, hook.parameters, strict=True)})
    state.exchange.vectors = state.build([hook.names for hook in state.hooks])
    parameters = [parameter for hook in state.hooks for parameter in hook.parameters]
    fields = {
        "recipe": setup_checks.settings_of(*recipe.layers),
        "dense_below": dense_below,
        "small": small,
        "scaler": scaler is not None,
        "shards": [
            f"{name}, {tuple(local(p).shape)}, {p.dtype}"
            for hook in state.hooks
            for name, p in zip(hook.names, hook.parameters, strict=True)
        ],
        "shard values": [setup_checks.digest(parameter) for parameter in parameters],
    }
    setup_checks.compare(fields, replicate_group, device)
    state.exchange.agree_on_exchange_id()
    hooks = {hook.names[0]: hook for hook in state.hooks}
    for module, group in found:
        names = [state.name_of(each.sharded_param) for each in group.fsdp_params if each.sharded_param.requires_grad]
        if names:
            module.set_all_reduce_hook(hooks[names[0]])
    if dist.get_rank() == 0:  # each set of replicas has a rank 0
        state.exchange.log_choice()
    state.watch_optimizers("model")
    return state


def state_of(model: nn.Module) -> FSDPState | None:
    """Return the state with which ``model`` is registered, or None."""
    for _, group in _parameter_groups(model):
        hook = all_reduce_hook(group)
        if isinstance(hook, ShardHook):
            return hook.owner
    return None


def device_of(model: nn.Module) -> torch.device | None:
    """Return the device on which FSDP reduces the gradients of ``model``, or None if it is not sharded."""
    with suppress(ConfigurationError):  # which register() raises, and reports to the other ranks
        return next((group.device for _, group in _parameter_groups(model)), None)
    return None


def is_sharded(model: nn.Module) -> bool:
    """Return True if ``fully_shard`` was applied to ``model`` or a part of it."""
    return next(_parameter_groups(model), None) is not None


def _parameter_groups(model: nn.Module) -> Iterator[tuple[Any, Any]]:
    from torch.distributed.fsdp import FSDPModule  # noqa: PLC0415 - importing it takes a while

    seen: set[int] = set()
    for module in model.modules():
        if isinstance(module, FSDPModule):
            state, groups = fsdp_parameter_groups(module)
            if len(groups) > 1:
                raise ConfigurationError(
                    "a module has parameters on several meshes, which this hook does not support: shard all its "
                    "parameters over one mesh"
                )
            if id(state) not in seen:  # several modules may share one
                seen.add(id(state))
                yield from ((module, group) for group in groups)


def _check_group(module: nn.Module, group: Any, replicate_group: dist.ProcessGroup) -> None:
    name = type(module).__name__
    mesh = group.mesh_info
    if getattr(mesh, "replicate_process_group", None) is not None:
        raise ConfigurationError(
            f"{name} is sharded over a two-dimensional mesh: FSDP then averages over the replicas densely before any "
            'hook can see the gradient; call fully_shard() with mesh["shard"], and pass mesh["replicate"].get_group() '
            "to wrap() or register()"
        )
    if all_reduce_hook(group) is not None:
        raise ConfigurationError(f"{name} has an all-reduce hook already: call register() once")
    if len(by_split([each.sharded_param for each in group.fsdp_params if each.sharded_param.requires_grad])) > 1:
        raise ConfigurationError(
            f"{name} is sharded by FSDP2 and tensor-parallel, and tensor ranks hold copies of some parameters. A hook "
            "would select other entries of each copy. Call tritoncomm.wrap(optimizer, process_group=...) without "
            "model=, and do not call register()"
        )
    shards = dist.get_process_group_ranks(mesh.shard_process_group)
    replicas = dist.get_process_group_ranks(replicate_group)
    if set(shards) & set(replicas) != {dist.get_rank()}:
        raise ConfigurationError(
            f"the shards of {name} are on ranks {shards}, and replicate_group has ranks {replicas}: they must have "
            f"this rank, {dist.get_rank()}, and no other in common"
        )
