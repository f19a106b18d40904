"""The optimizer and the gradient clipping of a Trainer of Transformers, while its gradients are exchanged sparsely."""

from __future__ import annotations

from typing import Any

import torch
from accelerate import Accelerator

from tritoncomm.algorithms import Recipe
from tritoncomm.integrations.prepared import check_trainer, connect, has_peers, replace_inner
from tritoncomm.optimizer import SparseOptimizer


def connect_trainer(trainer: Any, algo: str | Recipe, settings: dict[str, Any]) -> SparseOptimizer:
    """Wrap the optimizer of ``trainer``, see :func:`~tritoncomm.integrations.prepared.connect`."""
    check_trainer(trainer)
    limited = _with_limit(settings, trainer)
    sparse = connect(trainer.model_wrapped, trainer.optimizer, algo, **limited)
    if limited.get("clip_by") == "gradient":
        _only_measure(trainer.accelerator)
    return sparse


def disconnect_trainer(trainer: Any) -> None:
    """Let the optimizer of ``trainer`` step, and its accelerator clip, as before. Without effect if they do."""
    sparse = trainer.optimizer.optimizer
    if not isinstance(sparse, SparseOptimizer):
        return
    replace_inner(trainer.optimizer, sparse.optimizer)
    sparse.release()
    replaced = vars(trainer.accelerator).get("clip_grad_norm_")
    if hasattr(replaced, "original"):
        del trainer.accelerator.clip_grad_norm_
        if replaced.original is not None:
            trainer.accelerator.clip_grad_norm_ = replaced.original


def _with_limit(settings: dict[str, Any], trainer: Any) -> dict[str, Any]:
    """Return ``settings`` of :func:`tritoncomm.wrap` that limit gradients, as ``trainer`` does, before the exchange.

    A limit in ``settings`` has precedence. With ``clip_by="delivered"``, or without a limit, nothing changes, and
    ``trainer`` clips. Nor does it with one worker, or if the optimizer has a part of the model's parameters, unless
    ``settings`` has ``clip_by="gradient"``.
    """
    limit = settings.get("max_grad_norm", trainer.args.max_grad_norm)
    groups = trainer.optimizer.param_groups
    stepped = {id(parameter) for group in groups for parameter in group["params"]}
    whole = all(id(parameter) in stepped for parameter in trainer.model.parameters() if parameter.requires_grad)
    chosen = settings.get("clip_by", "gradient" if has_peers() and whole else "delivered")
    if chosen == "delivered" or limit is None or limit <= 0:
        return settings
    return settings | {"max_grad_norm": limit, "clip_by": "gradient"}


def _only_measure(accelerator: Accelerator) -> None:
    """Let ``accelerator`` return norms without clipping, until :func:`disconnect_trainer`."""
    clip = accelerator.clip_grad_norm_

    def norm(parameters: Any, max_norm: float, norm_type: float = 2) -> Any:  # noqa: ARG001
        return clip(parameters, torch.finfo(torch.float32).max, norm_type)  # an infinite norm over infinity is a NaN

    norm.original = vars(accelerator).get("clip_grad_norm_")  # type: ignore[attr-defined]
    accelerator.clip_grad_norm_ = norm
