"""The optimizer inside the one that Accelerate prepares, for Accelerate and for the Trainer of Transformers."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import tritoncomm
from tritoncomm.algorithms import Recipe
from tritoncomm.amp import with_equal_scales
from tritoncomm.errors import ConfigurationError
from tritoncomm.optimizer import SparseOptimizer, setup_of
from tritoncomm.scheduler.process_group import is_distributed
from tritoncomm.step.model.module import stays_local
from tritoncomm.step.rules.step import gradients_of
from tritoncomm.step.tensors.names import parameter_ids


def has_peers() -> bool:
    """Return True if there are several processes."""
    return is_distributed() and dist.get_world_size() > 1


def connect(
    accelerator: Accelerator,
    model: nn.Module,
    prepared: AcceleratedOptimizer,
    algo: str | Recipe | None,
    **settings: Any,
) -> SparseOptimizer:
    """Wrap the optimizer inside ``prepared``, and let ``accelerator`` clip averaged gradients.

    Raises:
        ConfigurationError: ``model`` or ``prepared`` is not prepared, or another argument is invalid.
    """
    if all(each is not prepared for each in accelerator._optimizers):  # noqa: SLF001 - no public attribute has them
        raise ConfigurationError(
            f"optimizer is a {type(prepared).__name__}: pass the one that accelerator.prepare() returned"
        )
    if has_peers():
        several = [*model] if isinstance(model, nn.ModuleList) else [model]
        if not all(isinstance(each, DistributedDataParallel) for each in several):
            raise ConfigurationError(
                f"model is a {type(model).__name__}, not a DistributedDataParallel module or a ModuleList of several: "
                "pass what accelerator.prepare() returned, in a run without FSDP, DeepSpeed and torch.compile"
            )
        others = parameter_ids(prepared).difference(map(id, model.parameters()))
        every = accelerator._models  # noqa: SLF001 - no public attribute has them
        if any(id(parameter) in others for each in every for parameter in each.parameters()):
            raise ConfigurationError(
                "optimizer holds parameters of another prepared model, whose gradients DDP would average densely: pass "
                "all of its models, as model=torch.nn.ModuleList([first, second])"
            )
    sparse = tritoncomm.wrap(prepared.optimizer, algo, model=model, **settings)
    if prepared.scaler is not None:
        accelerator.scaler = with_equal_scales(accelerator.scaler, accelerator.device)
        for each in accelerator._optimizers:  # noqa: SLF001 - no public attribute has them
            each.scaler = accelerator.scaler
    renew_methods(prepared)
    _average_before_clipping(accelerator)
    return sparse


def renew_methods(prepared: AcceleratedOptimizer) -> None:
    """Let ``prepared`` call the methods that its optimizer has now. With a scaler, it keeps those of before."""
    optimizer = prepared.optimizer
    prepared.__setstate__(prepared.__getstate__())
    if prepared.scaler is None or not isinstance(optimizer, SparseOptimizer):
        return
    step = optimizer.step

    def reveal_skipped(*args: Any, **kwargs: Any) -> Any:
        """Take the step. It is always called, so only now is it known whether an overflow has skipped it."""
        steps = optimizer.steps_taken
        result = step(*args, **kwargs)
        prepared._accelerate_step_called = optimizer.steps_taken > steps  # noqa: SLF001 - no public attribute
        return result

    prepared._optimizer_patched_step_method = reveal_skipped  # noqa: SLF001


def load_instead(prepared: AcceleratedOptimizer, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Let ``prepared`` load what ``change`` makes of a state. A trainer loads that of one rank there, on all ranks.

    What is loaded into the optimizer inside by itself stays as it is.
    """
    load = type(prepared).load_state_dict
    prepared.load_state_dict = lambda state_dict: load(prepared, change(state_dict))


def _average_before_clipping(accelerator: Accelerator) -> None:
    """Let ``accelerator`` exchange the gradients of wrapped optimizers before it clips them, and others as before."""
    clip_norm, clip_value = accelerator.clip_grad_norm_, accelerator.clip_grad_value_
    if hasattr(clip_norm, "averages"):
        return

    def clip_grad_norm_(parameters: Any, max_norm: float, norm_type: float = 2) -> Any:
        chosen = _listed(parameters)
        averaged = _average(accelerator, chosen)
        if not averaged:
            return clip_norm(chosen, max_norm, norm_type)
        held = {id(owner) for each in averaged for owner in setup_of(each).scope.owners.values()}  # of an anchor
        ignored = {key for each in averaged for key in setup_of(each).parameters.ignored}
        # Other gradients that are local would make norms differ between ranks.
        chosen = [each for each in chosen if id(each) in held or not (id(each) in ignored or stays_local(each))]
        if any(setup_of(each).options.max_grad_norm is None for each in averaged):
            return nn.utils.clip_grad_norm_(chosen, max_norm, norm_type)
        norm, rest = _norm_of_means(averaged), [each for each in chosen if id(each) not in held]  # the exchange clips
        if not rest:
            return norm
        other = nn.utils.clip_grad_norm_(rest, max_norm, norm_type).to(norm.device)
        return torch.linalg.vector_norm(torch.stack([norm, other]))

    def clip_grad_value_(parameters: Any, value: float) -> None:
        chosen = _listed(parameters)
        if _average(accelerator, chosen):
            nn.utils.clip_grad_value_(chosen, value)
        else:
            clip_value(chosen, value)

    clip_grad_norm_.averages = True  # type: ignore[attr-defined]
    accelerator.clip_grad_norm_, accelerator.clip_grad_value_ = clip_grad_norm_, clip_grad_value_


def _listed(parameters: torch.Tensor | Iterable[torch.Tensor]) -> list[torch.Tensor]:
    return [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)


def _average(accelerator: Accelerator, parameters: Iterable[torch.Tensor]) -> list[SparseOptimizer]:
    """Exchange the gradients of the wrapped optimizers that have some of ``parameters``, and return these optimizers.

    In a micro-batch before the last one of a step, nothing is exchanged, and none is returned.
    """
    if not accelerator.sync_gradients:
        return []
    clipped = {id(parameter) for parameter in parameters}
    every = accelerator._optimizers  # noqa: SLF001 - no public attribute has them
    found = [prepared for prepared in every if clipped & parameter_ids(prepared)]
    averaged = [prepared.optimizer for prepared in found if isinstance(prepared.optimizer, SparseOptimizer)]
    if averaged:
        accelerator.unscale_gradients(found)
    for optimizer in averaged:
        if not optimizer.is_synchronized:
            optimizer.synchronize()
    return averaged


def _norm_of_means(optimizers: Iterable[SparseOptimizer]) -> torch.Tensor:
    """Return the norm of the mean of the gradients of this step, which the exchange has clipped.

    A single worker clips when it steps, and so do local steps, which know the norm of this worker's gradients.
    """
    norms = []
    for optimizer in optimizers:
        found = setup_of(optimizer).exchange.gradient_norm if optimizer.is_synchronized else None
        norms.append(nn.utils.get_total_norm(gradients_of([optimizer])) if found is None else found.float())
    norm: torch.Tensor = torch.linalg.vector_norm(torch.stack(norms))
    return norm
