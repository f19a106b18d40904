"""Front door 2: a communication hook of ``DistributedDataParallel``.

Annotations are evaluated here, as DDP refuses hooks whose annotations are strings.
"""

import weakref
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from tritoncomm.algorithms import Recipe
from tritoncomm.ddp_state import CommState
from tritoncomm.errors import ConfigurationError
from tritoncomm.settings import DEFAULT_DENSITY, DENSE_BELOW, choose, is_dense

__all__ = ["CommState", "comm_hook", "register"]


def comm_hook(
    state: CommState,
    bucket: dist.GradBucket,  # type: ignore[name-defined] # it is there at run time
) -> torch.futures.Future[torch.Tensor]:
    """For ``ddp_model.register_comm_hook(CommState(...), comm_hook)`` and trainers that take such a pair.

    Accumulate gradients under ``ddp_model.no_sync()``, as DDP does not tell a hook what it averaged before.
    """
    return state.exchange(bucket)


def register(
    model: DistributedDataParallel,
    algo: str | Recipe = "oktopk",
    *,
    density: float = DEFAULT_DENSITY,
    warmup_steps: int = 0,
    node_group: dist.ProcessGroup | None = None,
    on_nonfinite: str | None = None,
    scaler: torch.amp.GradScaler | None = None,
    timeout: timedelta | None = None,
    dense_below: int = DENSE_BELOW,
    **recipe_fields: Any,
) -> CommState:
    """Let ``model`` average its gradients sparsely, bucket by bucket, beside backward. Arguments: :class:`CommState`.

    Every rank must call this alike. A backward pass that would add to averaged gradients raises
    :class:`RuntimeError`: accumulate under ``model.no_sync()``.
    """
    if not isinstance(model, DistributedDataParallel):
        raise ConfigurationError(
            f"model is a {type(model).__name__}: pass the DistributedDataParallel module, or use tritoncomm.wrap() "
            "on the optimizer of a plain one"
        )
    chosen = choose(algo, density, 0, recipe_fields)
    if model.find_unused_parameters and not (is_dense(chosen) or chosen.density == 1):
        raise ConfigurationError(
            "find_unused_parameters=True: DDP throws away what is delivered to a parameter that no rank used in a "
            "pass. Use every parameter, or tritoncomm.wrap() on the plain module, where a missing gradient is zero"
        )
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
        **recipe_fields,
    )
    state.name(dict(model.module.named_parameters()))
    model.register_comm_hook(state, comm_hook)
    _refuse_accumulation(list(model.parameters()), weakref.ref(state))
    return state


def _refuse_accumulation(parameters: list[torch.Tensor], owner: "weakref.ref[CommState]") -> None:
    """Raise in the backward pass that would add to gradients which are averages."""

    def check(_: torch.Tensor) -> None:  # before anything of this pass is added to any gradient
        state = owner()
        if state is None or not state.has_averaged:
            return
        state.has_averaged = False
        if any(parameter.grad is not None and bool(parameter.grad.any()) for parameter in parameters):
            raise RuntimeError(
                "gradients of the last backward pass are still there: call zero_grad(), or accumulate under "
                "model.no_sync() in all passes but the last, as averaged gradients must not be averaged again"
            )

    for parameter in parameters:
        if parameter.requires_grad:
            parameter.register_hook(check)  # type: ignore[no-untyped-call]
