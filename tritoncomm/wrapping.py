"""The function that users call: wrap an optimizer."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tritoncomm.algorithms import Recipe
from tritoncomm.errors import ConfigurationError
from tritoncomm.optimizer import SparseOptimizer, check_free, sparse
from tritoncomm.scheduler.ranks import global_ranks
from tritoncomm.step import agree, settings
from tritoncomm.step.model.module import (
    check_held,
    check_model,
    checked_module,
    compare_buffers,
    group_of,
    ignored_ids,
    is_sharded,
    keep_gradients_local,
    names_of,
)
from tritoncomm.step.model.optimizers import check_optimizer, check_trained
from tritoncomm.step.optimizer_list import parts_of, whole_of
from tritoncomm.step.recipes import arguments_of, check_keywords, never_delays, nodes_of, resolve_recipe
from tritoncomm.step.rules.choose import keeps_points, tell_effects, updates_of
from tritoncomm.step.settings import (
    DEFAULT_ALGO,
    DEFAULT_UPDATES,
    DENSE_BELOW,
    Late,
    Updates,
    WrapOptions,
    check_group,
    late_of,
    resolved_small,
)
from tritoncomm.step.setup import Setup
from tritoncomm.step.tensors.names import device_of

__all__ = ["wrap"]


@torch.inference_mode(False)  # what is made here outlives an evaluation
def wrap(
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    algo: str | Recipe | None = None,
    *,
    density: float | None = None,
    process_group: dist.ProcessGroup | None = None,
    node_group: dist.ProcessGroup | None = None,
    warmup_steps: int | None = None,
    late: bool | Late | None = None,
    on_nonfinite: str = "skip",
    max_grad_norm: float | None = None,
    timeout: timedelta | None = None,
    dense_below: int = DENSE_BELOW,
    small: str | None = None,
    broadcast_parameters: bool = False,
    model: nn.Module | None = None,
    updates: bool | Updates | None = None,
    local_steps: int = 1,
    **recipe_fields: Any,
) -> SparseOptimizer:
    """Wrap ``optimizer`` so that its steps use gradients that a sparse exchange has averaged over all ranks.

    An exchange delivers the fraction ``density`` of the entries. The others stay in a residual on each rank, which is
    added to its next gradient (error feedback). Optimizers with a rule for late gradients, such as Adam, AdamW, Lion
    and SGD with momentum, take a staleness-aware step: a coordinate that is delivered after tau steps catches up, which
    means that its delivery counts for tau steps. Except for SGD, it counts for 3 sqrt(tau) or the limit of
    :class:`~tritoncomm.Late` if that is less, and for more where gradients are steady.

    Optimizers without such a rule, like Muon, exchange *updates*: each rank takes the optimizer's own step by its own
    gradients, and what the step has changed is exchanged in one bit per value, with error feedback. So does every
    optimizer with ``local_steps``, which are taken between two exchanges. See :doc:`/explanation/updates`.

    Gradients stay local to each rank until ``step()``, which exchanges them. Pass the module as ``model``. A module in
    ``DistributedDataParallel`` then averages no gradients any more, and still broadcasts parameters and buffers. With
    FSDP2, or other parameters that are DTensors, each rank exchanges its shard with the ranks of ``process_group``,
    which hold the same shard.

    All ranks must call this with identical parameters, optimizer settings and arguments, which are compared. Parameters
    and the optimizer's state are compared again after 1, 10 and every 100 steps. Nothing else may average the
    gradients. A single worker takes the optimizer's own steps, to the bit.

    Args:
        optimizer: Optimizer to wrap, or a list of optimizers of different parameters, which are stepped as one. A
            trainer that takes one optimizer takes an :class:`~tritoncomm.OptimizerList`. A
            parameter group that says ``dense=True`` now travels whole in each step, as small tensors do.
        algo: Name of a method from :func:`tritoncomm.algorithms`, or a recipe. Default: None, which is ``"oktopk"``,
            or ``"quantized"`` for a schedule-free optimizer if neither ``density``, ``updates`` nor a field is given.
        density: Fraction of entries to deliver per step, in (0, 1]. Default: None, which is 0.03, or the density of a
            recipe.
        process_group: Process group to exchange in. With FSDP2, the ranks that hold the same shard. With DDP, the group
            of the model is used. Default: the default process group.
        node_group: Process group of the ranks of this rank's node. The exchange is then dense within nodes and sparse
            between them, see :class:`~tritoncomm.Hierarchical`.
            Default: None, nodes are not treated separately.
        warmup_steps: Number of dense exchanges before the first sparse one. Default: None, which is 16 for a method,
            and 0 for a dense one or a recipe that wraps another.
        late: Whether optimizers with a rule for late gradients take the staleness-aware step, or a
            :class:`~tritoncomm.Late`, which says how far they catch up, and how entries are selected. If False, all
            take their own step, and methods compare gradients. Default: None, which is True.
        on_nonfinite: Action when any rank has a NaN or Inf. ``"skip"`` skips the step on all ranks, ``"raise"`` raises
            :class:`~tritoncomm.NonFiniteError` on all ranks. If a ``GradScaler`` finds an overflow, the step is always
            skipped. Default: ``"skip"``.
        max_grad_norm: Maximum 2-norm of the averaged gradient, which is clipped as in a dense run: the mean over ranks
            of the gradients of this step, before they are added to the residual. The norm is estimated, with a standard
            deviation of 3 %, from 2 KB that all ranks sum. It is that of the gradients of all optimizers of a list.
            Optimizers that exchange updates clip this rank's gradient. Default: None, no clipping.
        timeout: Maximum time of each wait for a peer in an exchange. Default: the time-out of the process group.
        dense_below: Tensors with fewer elements, or at most one dimension (biases, norms), are sent dense, all
            together. If all are one-dimensional, only the first rule applies. 0 sends none dense. Default: 1024.
        small: Format of these tensors: ``"fp32"``, or ``"8bit"`` for about a quarter of the bytes. Values are then
            quantized in both directions, and what this cuts off stays in the residual. A magnitude of 2**112 or more
            rejects the step. In the dense steps at the start, all other tensors are quantized to 2 bits in the same
            way, up to 2**106, but not if ``small="fp32"``, nor with a method whose dense steps do more than average. A
            :class:`~tritoncomm.Warmup` that is passed has a format of its own. Default: None, which is ``"8bit"``.
        broadcast_parameters: Whether to copy all parameters and buffers of ``model`` from the group's first rank to its
            other ranks first, as ``DistributedDataParallel`` does. Without ``model``, these are the parameters of the
            optimizer alone. If False, parameters that differ raise an error, and buffers a warning: each rank may have
            collected its own statistics. Default: False.
        model: The module that ``optimizer`` trains. With DDP, several optimizers may be wrapped with the same module,
            and one that is not wrapped cannot step its parameters any more. Parameters that DDP was told to ignore,
            such as experts, are this rank's own: the original step takes them by this rank's gradients, which
            ``max_grad_norm`` limits by themselves. Default: None, for a plain module. Nobody then sees whether buffers,
            and parameters that the optimizer does not hold, differ between ranks.
        updates: Whether updates are exchanged instead of gradients, or an :class:`~tritoncomm.Updates`, which says how,
            and implies True. Default: None, which is False for SGD, optimizers with a rule for late gradients and
            schedule-free ones, and for all with ``algo="dense"`` or ``"quantized"``, in which no gradient is late. It
            is True for others, and for all with ``local_steps``.
        local_steps: Number of steps between two exchanges of updates. With 1, the mean of updates is lengthened to the
            mean of their lengths: a mean of several updates is shorter, because their noise cancels. Its length is
            estimated from 2 KB that all ranks sum. Default: 1.
        **recipe_fields: Further fields of the recipe of ``algo``. Methods that send entries have ``values``, the format
            of a value on the wire: ``"fp32"``, or one with tables of :data:`tritoncomm_kernels.formats.FORMATS`. What
            rounding takes away stays in the residual. Here its default is ``"4bit"``. Rounded values travel in packed
            messages. ``packed`` says whether values in ``"fp32"`` do. By default they do not. ``static`` says whether
            messages have a fixed length. By default they do on a GPU if the method has this form, because the host then
            waits less often. With a link, such as ``static="1gbit,50us"``, they do if that takes less time there.

    Returns:
        ``optimizer`` itself, whose class is now one of its own class and :class:`~tritoncomm.SparseOptimizer`. For a
        list, one new optimizer of all.

    Raises:
        ConfigurationError: An argument is invalid.
        ConfigMismatchError: Ranks are configured differently, or an argument is invalid on another rank.
    """
    check_group("process_group", process_group)
    listed = [*optimizer] if isinstance(optimizer, Sequence) else parts_of(optimizer)
    device = device_of(listed[0]) if listed else None
    of_shards = is_sharded(listed, model)  # which are wrapped together, on all ranks of the program
    with agree.propagate_errors(None if of_shards else process_group, device):
        model = checked_module(model)
    group = group_of(model, process_group)
    everybody = None if of_shards else group
    with agree.propagate_errors(everybody, device):
        names = names_of(model)
        whole = whole_of(optimizer, names)
        for each in listed:
            check_optimizer(each, alone=settings.is_alone(group), names=names)
        check_free([whole, *listed])
        if not isinstance(broadcast_parameters, bool):
            raise ConfigurationError(f"broadcast_parameters={broadcast_parameters!r}: must be True or False")
        check_model(model)
        check_held(model, whole)
        is_told = algo is not None or density is not None or updates is not None or recipe_fields
        if not is_told and any(map(keeps_points, listed)):
            algo = DEFAULT_UPDATES
        method, small_format = DEFAULT_ALGO if algo is None else algo, resolved_small(small)
        check_keywords("wrap", arguments_of(wrap), method, recipe_fields)
        resolve = partial(resolve_recipe, node_group=node_group, group=group, small=small_format)
        chosen = resolve(method, density, warmup_steps, recipe_fields)
        aware, how = late_of(late), updates_of(whole, updates, local_steps, chosen)
        if how is not None:
            chosen = resolve(how.algo or DEFAULT_UPDATES, None, 0, {})
        options = WrapOptions(
            late=None if how is not None or never_delays(chosen) else aware,  # no sum of updates is too long
            updates=how,
            on_nonfinite=on_nonfinite,
            max_grad_norm=max_grad_norm,
            timeout=timeout,
            dense_below=dense_below,
            small=small_format,
            local_steps=local_steps,
        )
        given = {"algo": algo, "density": density, "warmup_steps": warmup_steps, "late": late or None, "small": small}
        given |= {"dense_below": None if dense_below == DENSE_BELOW else dense_below, **recipe_fields}
        tell_effects(whole, options, chosen, given, group)
        for each in listed:
            chosen.check_optimizer(each)
            check_trained(each, names, alone=settings.is_alone(group), ignored=ignored_ids(model))
        fields = {"model": None if model is None else type(model).__name__} | nodes_of(chosen)
        shard = global_ranks(group)[0] if of_shards else 0
    agree.compare(fields, everybody, device, shard)
    with agree.propagate_errors(everybody, device):
        setup = Setup(whole, chosen, group, options, broadcast_parameters=broadcast_parameters, model=model)
        keep_gradients_local(model)
    compare_buffers(model, whole, everybody, shard)
    return sparse(whole, setup)
