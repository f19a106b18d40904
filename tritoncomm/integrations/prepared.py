"""The optimizer inside the one that Accelerate prepares, for Accelerate and for the Trainer of Transformers."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from accelerate.optimizer import AcceleratedOptimizer
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import tritoncomm
from tritoncomm.algorithms import Recipe
from tritoncomm.errors import ConfigurationError
from tritoncomm.optimizer import SparseOptimizer
from tritoncomm.scheduler.process_group import is_distributed


def has_peers() -> bool:
    """Return True if there are several workers."""
    return is_distributed() and dist.get_world_size() > 1


def connect(model: nn.Module, prepared: AcceleratedOptimizer, algo: str | Recipe, **settings: Any) -> SparseOptimizer:
    """Wrap the optimizer inside ``prepared``, whose gradients are then exchanged by a hook of ``model``.

    Raises:
        ConfigurationError: ``model`` or ``prepared`` is not prepared, or another argument is invalid.
    """
    if not isinstance(prepared, AcceleratedOptimizer):
        raise ConfigurationError(
            f"optimizer is a {type(prepared).__name__}: pass the one that accelerator.prepare() returned"
        )
    if has_peers() and not isinstance(model, DistributedDataParallel):
        raise ConfigurationError(
            f"model is a {type(model).__name__}, not a DistributedDataParallel module: pass the one that "
            "accelerator.prepare() returned, in a run without FSDP, DeepSpeed and torch.compile"
        )
    sparse = tritoncomm.wrap(prepared.optimizer, algo, model=model, scaler=prepared.scaler, **settings)
    replace_inner(prepared, sparse)
    return sparse


def check_trainer(trainer: Any) -> None:
    """Raise :class:`~tritoncomm.ConfigurationError` if a ``trainer`` of Transformers cannot exchange sparsely."""
    if getattr(trainer.args, "enable_jit_checkpoint", False):
        raise ConfigurationError(
            "enable_jit_checkpoint=True: such a checkpoint has no residuals, and may fall between the exchange and the "
            "step; leave it out, and save every few steps with save_steps="
        )
    model = trainer.model_wrapped
    if not has_peers():
        return
    if model is trainer.model:
        raise ConfigurationError(
            "the Trainer has not wrapped the model in DistributedDataParallel: evaluate() or predict() was called "
            "before train(), after which Transformers trains each replica alone, or FSDP, DeepSpeed or torch_compile "
            "is used; call train() first, or use a Trainer of its own to evaluate"
        )
    if getattr(model, "find_unused_parameters", False) and trainer.args.ddp_find_unused_parameters is None:
        raise ConfigurationError(
            "SparseGradients came by add_callback(), when the Trainer had chosen find_unused_parameters=True: pass "
            "callbacks=[SparseGradients()] to the Trainer, or ddp_find_unused_parameters=False to TrainingArguments"
        )


def replace_inner(prepared: AcceleratedOptimizer, optimizer: torch.optim.Optimizer) -> None:
    """Let ``prepared`` step ``optimizer``."""
    # As if it were unpickled, because with a scaler it keeps methods of its optimizer.
    prepared.__setstate__(prepared.__getstate__() | {"optimizer": optimizer})
