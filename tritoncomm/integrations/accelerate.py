"""Sparse gradients with Accelerate: one call after ``accelerator.prepare()``."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from torch import nn

from tritoncomm import checkpoint
from tritoncomm.algorithms import Recipe
from tritoncomm.integrations.shared import residuals as beside
from tritoncomm.integrations.shared.accelerated import connect, load_instead
from tritoncomm.optimizer import SparseOptimizer
from tritoncomm.step.settings import restores

__all__ = ["wrap"]


def wrap(
    accelerator: Accelerator,
    model: nn.Module,
    optimizer: AcceleratedOptimizer,
    algo: str | Recipe | None = None,
    *,
    residuals: str = "restore",
    **settings: Any,
) -> SparseOptimizer:
    """Exchange the gradients of a prepared ``model`` sparsely when ``optimizer`` steps.

    Call it on all ranks, after ``accelerator.prepare()`` and before the first backward pass. ``optimizer`` stays the
    object to step and to save. ``accelerator.clip_grad_norm_()`` and ``clip_grad_value_()`` exchange gradients before
    they clip them. With ``max_grad_norm``, the exchange clips, and ``clip_grad_norm_()`` only returns the norm.
    ``accelerator.save_state()`` also writes the residual of each rank, into the folder ``tritoncomm`` of the checkpoint
    (``tritoncomm_1`` for a second prepared optimizer), and ``load_state()`` restores it.

    Args:
        accelerator: The accelerator that prepared ``model`` and ``optimizer``.
        model: The prepared model. With several processes, it is a ``DistributedDataParallel`` module.
        optimizer: The prepared optimizer.
        algo: Name of a method, or a recipe. See :func:`tritoncomm.wrap`, also for the default, None.
        residuals: ``"restore"``: ``load_state()`` needs the residual of each rank. ``"reset"``: it sets residuals to
            zero, for a checkpoint that has none. Default: ``"restore"``.
        **settings: Further arguments of :func:`tritoncomm.wrap`, for example ``density``.

    Returns:
        The wrapped optimizer inside ``optimizer``, for example for its ``metrics()``.

    Raises:
        ConfigurationError: An argument is invalid.
        ConfigMismatchError: Ranks are configured differently.
    """
    keeps = restores(residuals)
    sparse = connect(accelerator, model, optimizer, algo, **settings)
    number = accelerator._optimizers.index(optimizer)  # noqa: SLF001 - as in prepared
    _keep_residuals(accelerator, optimizer, beside.name_of(number), keeps=keeps)
    return sparse


def _keep_residuals(accelerator: Accelerator, prepared: AcceleratedOptimizer, name: str, *, keeps: bool) -> None:
    """Let ``accelerator`` save and load the residuals of ``prepared`` in the folder ``name`` of its checkpoints.

    It does so for as long as it has the optimizer, and it is wrapped. Its hooks stay: it may be calling them just now.
    """
    folders: list[Path] = []  # of a checkpoint whose optimizer Accelerate is about to load
    reference = weakref.ref(prepared.optimizer)  # free_memory() is to free its parameters

    def found() -> SparseOptimizer | None:
        optimizer = reference()
        is_prepared = any(each.optimizer is optimizer for each in accelerator._optimizers)  # noqa: SLF001 - see above
        return optimizer if is_prepared and isinstance(optimizer, SparseOptimizer) else None

    def save(_models: Any, _weights: Any, folder: str) -> None:
        optimizer = found()
        if optimizer is not None:
            checkpoint.save(optimizer, Path(folder) / name)

    def load(_models: Any, folder: str) -> None:
        optimizer = found()
        if optimizer is None:
            return
        if not keeps:
            optimizer.load_state_dict(optimizer.state_dict(), residuals="reset")
        folders[:] = [Path(folder) / name]

    def replace(state: dict[str, Any]) -> dict[str, Any]:
        """Replace the state of the first rank, which Accelerate loads on all ranks."""
        optimizer = found()
        if optimizer is None or not folders:
            return state
        folder = folders.pop()
        if not keeps:
            return beside.without_residual(state)
        with beside.name_the_fix("tritoncomm.integrations.accelerate.wrap()"):
            return checkpoint.state_of_rank(optimizer, folder)

    accelerator.register_save_state_pre_hook(save)
    accelerator.register_load_state_pre_hook(load)
    load_instead(prepared, replace)
