"""The optimizer of a Trainer of Transformers, while its gradients are exchanged sparsely."""

from __future__ import annotations

from typing import Any

from tritoncomm.algorithms import Recipe
from tritoncomm.errors import ConfigurationError
from tritoncomm.integrations.prepared import connect, has_peers, renew_methods
from tritoncomm.optimizer import SparseOptimizer
from tritoncomm.step.optimizer_list import parts_of
from tritoncomm.step.saved.state import remove_marks


def connect_trainer(trainer: Any, algo: str | Recipe | None, settings: dict[str, Any]) -> SparseOptimizer:
    """Wrap the optimizer of ``trainer``, see :func:`~tritoncomm.integrations.prepared.connect`."""
    _check(trainer)
    limited = _with_limit(settings, trainer)
    return connect(trainer.accelerator, trainer.model_wrapped, trainer.optimizer, algo, **limited)


def disconnect_trainer(trainer: Any) -> None:
    """Let the optimizer of ``trainer`` step as before. Without effect if it does."""
    optimizer = trainer.optimizer.optimizer
    if isinstance(optimizer, SparseOptimizer):
        optimizer.release()
        renew_methods(trainer.optimizer)


def trained_ids(trainer: Any) -> set[int]:
    """Return the ids of the parameters that the optimizer of ``trainer`` trains."""
    groups = trainer.optimizer.param_groups
    return {id(parameter) for group in groups for parameter in group["params"] if parameter.requires_grad}


def state_to_continue(before: SparseOptimizer | None, trainer: Any) -> dict[str, Any] | None:
    """Return the state of ``before``, with its residual, if ``trainer`` still has it.

    None if an error or a signal has stopped an update, so that residual and parameters are not of the same step.
    """
    if before is not trainer.optimizer.optimizer or not isinstance(before, SparseOptimizer):
        return None
    before.zero_grad()  # a step that an interrupt has ended may have averaged gradients
    try:
        return before.state_dict()
    except RuntimeError:
        return None


def forget_state(trainer: Any) -> None:
    """Remove the state of the optimizer of ``trainer``, which is about to be loaded."""
    for part in parts_of(trainer.optimizer.optimizer):
        part.state.clear()
        remove_marks(part.param_groups)


def _check(trainer: Any) -> None:
    """Raise :class:`~tritoncomm.ConfigurationError` if ``trainer`` cannot exchange sparsely."""
    if getattr(trainer.args, "enable_jit_checkpoint", False):
        raise ConfigurationError(
            "enable_jit_checkpoint=True: such a checkpoint has no residuals, and may fall between the exchange and the "
            "step; leave it out, and save every few steps with save_steps="
        )
    if has_peers() and trainer.model_wrapped is trainer.model:
        raise ConfigurationError(
            "the Trainer has not wrapped the model in DistributedDataParallel: evaluate() or predict() was called "
            "before train(), after which Transformers trains each replica alone, or FSDP, DeepSpeed or torch_compile "
            "is used; call train() first, or use a Trainer of its own to evaluate"
        )


def _with_limit(settings: dict[str, Any], trainer: Any) -> dict[str, Any]:
    """Return ``settings`` of :func:`tritoncomm.wrap` that limit gradients, as ``trainer`` does, before the exchange.

    A limit in ``settings`` has precedence. Without a limit, with one worker, or if the optimizer has a part of the
    model's parameters, nothing changes, and ``trainer`` clips.
    """
    limit = trainer.args.max_grad_norm
    if "max_grad_norm" in settings or limit is None or limit <= 0:
        return settings
    groups = trainer.optimizer.param_groups
    stepped = {id(parameter) for group in groups for parameter in group["params"]}
    whole = all(id(parameter) in stepped for parameter in trainer.model.parameters() if parameter.requires_grad)
    return settings | {"max_grad_norm": limit} if has_peers() and whole else settings
