"""The optimizer inside the one that Accelerate prepares, for Accelerate and for the Trainer of Transformers."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import tritoncomm
from tritoncomm.algorithms import Recipe
from tritoncomm.errors import ConfigurationError
from tritoncomm.optim import SparseOptimizer
from tritoncomm.scheduler.process_group import is_distributed


def connect(model: nn.Module, prepared: AcceleratedOptimizer, algo: str | Recipe, **settings: Any) -> SparseOptimizer:
    """Wrap the optimizer inside ``prepared``, whose gradients are then exchanged by a hook of ``model``.

    Raises:
        ConfigurationError: ``model`` or ``prepared`` is not prepared, or another argument is invalid.
    """
    if not isinstance(prepared, AcceleratedOptimizer):
        raise ConfigurationError(
            f"optimizer is a {type(prepared).__name__}: pass the one that accelerator.prepare() returned"
        )
    if _has_peers() and not isinstance(model, DistributedDataParallel):
        raise ConfigurationError(
            f"model is a {type(model).__name__}, not a DistributedDataParallel module: pass the one that "
            "accelerator.prepare() returned, in a run without FSDP, DeepSpeed and torch.compile"
        )
    sparse = tritoncomm.wrap(prepared.optimizer, algo, model=model, scaler=prepared.scaler, **settings)
    _replace_inner(prepared, sparse)
    return sparse


def _has_peers() -> bool:
    return is_distributed() and dist.get_world_size() > 1


def with_limit(settings: dict[str, Any], limit: float | None, accelerator: Accelerator) -> dict[str, Any]:
    """Return ``settings`` of :func:`tritoncomm.wrap` that clip gradients to ``limit`` before they are exchanged.

    ``accelerator`` does not clip then, and still returns norms. A limit in ``settings`` has precedence. With
    ``clip_by="delivered"``, or without a limit, nothing changes. Nor does it with one worker, whose trainer clips as it
    does without this package.
    """
    limit = settings.get("max_grad_norm", limit)
    chosen = settings.get("clip_by", "gradient" if _has_peers() else "delivered")
    if chosen == "delivered" or not limit:
        return settings
    clip = accelerator.clip_grad_norm_

    def norm(parameters: Any, max_norm: float, norm_type: float = 2) -> Any:  # noqa: ARG001
        return clip(parameters, torch.finfo(torch.float32).max, norm_type)  # an infinite norm over infinity is a NaN

    accelerator.clip_grad_norm_ = norm  # until disconnect()
    return settings | {"max_grad_norm": limit, "clip_by": "gradient"}


def disconnect(trainer: Any) -> None:
    """Let the optimizer of ``trainer`` step, and its accelerator clip, as before."""
    sparse = trainer.optimizer.optimizer
    _replace_inner(trainer.optimizer, sparse.optimizer)
    sparse.release()
    vars(trainer.accelerator).pop("clip_grad_norm_", None)


def _replace_inner(prepared: AcceleratedOptimizer, optimizer: torch.optim.Optimizer) -> None:
    """Let ``prepared`` step ``optimizer``."""
    # As if it were unpickled, because with a scaler it keeps methods of its optimizer.
    prepared.__setstate__(prepared.__getstate__() | {"optimizer": optimizer})
