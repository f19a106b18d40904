"""Front door 1: an optimizer that exchanges gradients before it steps."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from tritoncomm import fingerprint
from tritoncomm.algorithms import Recipe
from tritoncomm.automatic import automatic
from tritoncomm.double_reduction import check_not_reduced
from tritoncomm.errors import ConfigurationError
from tritoncomm.exchange import is_initialised
from tritoncomm.settings import DEFAULT_DENSITY, DENSE_BELOW, Options, check_optimizer, choose, complete
from tritoncomm.sparse_optimizer import SparseOptimizer

__all__ = ["SparseOptimizer", "wrap"]


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
    max_change: float = 0.2,
    on_nonfinite: str = "skip",
    max_grad_norm: float | None = None,
    timeout: timedelta | None = None,
    dense_below: int = DENSE_BELOW,
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
    change a tensor by more than ``max_change`` of its norm at once, though not to less than dense steps might;
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

    Every rank must call this alike: parameters, optimizer, recipe and options are compared, and a
    difference, or an argument that is wrong on some rank, is a
    :class:`~tritoncomm.ConfigMismatchError` on the other ranks. Raises
    :class:`~tritoncomm.ConfigurationError` for arguments that cannot work.
    """
    if process_group is not None and not is_initialised():
        raise ConfigurationError("process_group was given but torch.distributed is not initialised")
    if process_group is not None and dist.get_rank(process_group) < 0:
        raise ConfigurationError("this rank is not a member of process_group")
    with fingerprint.refusing(process_group):
        check_optimizer(optimizer)
        if isinstance(optimizer, SparseOptimizer):
            raise ConfigurationError("optimizer is wrapped already: wrap the original one")
        check_not_reduced(p for group in optimizer.param_groups for p in group["params"])
        if algo == "auto":
            chosen = automatic(optimizer, density, process_group, recipe_fields)
            chosen = complete(chosen, warmup_steps, node_group, process_group)
        else:
            chosen = choose(algo, density, warmup_steps, recipe_fields, node_group, process_group)
        options = Options(
            staleness=staleness,
            select_by=select_by,
            max_catch_up=max_catch_up,
            max_change=max_change,
            on_nonfinite=on_nonfinite,
            max_grad_norm=max_grad_norm,
            timeout=timeout,
            dense_below=dense_below,
        )
        chosen.check_optimizer(optimizer)
        return SparseOptimizer(optimizer, chosen, process_group, options)
