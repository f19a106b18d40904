"""Which optimizers can be wrapped: what they are, and the parameters that they hold."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping
from types import MappingProxyType

import torch
from torch.nn.parameter import is_lazy

from tritoncomm.errors import ConfigurationError
from tritoncomm.step.tensors.names import label_of
from tritoncomm.step.torch_internals import has_hooks, is_flattened, is_zero, original_class


def check_optimizer(
    optimizer: torch.optim.Optimizer, *, alone: bool, names: Mapping[int, str] = MappingProxyType({})
) -> None:
    """Raise :class:`~tritoncomm.ConfigurationError` if ``optimizer`` cannot be wrapped.

    ``alone``: there is a single worker, whose gradients are not exchanged. ``names`` are those of parameters, by id.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigurationError(
            f"optimizer is a {type(optimizer).__name__}: pass a torch.optim.Optimizer, or a list of them"
        )
    if not has_hooks(optimizer):
        _refuse_prepared(optimizer)
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ConfigurationError(
            "LBFGS evaluates its closure several times per step and cannot be wrapped: use an optimizer that takes one "
            "gradient per step"
        )
    if isinstance(optimizer, torch.optim.SparseAdam) and not alone:
        raise ConfigurationError("SparseAdam needs sparse gradients, which are not exchanged: use Adam with dense ones")
    if is_zero(optimizer) and not alone:
        raise ConfigurationError(
            "ZeroRedundancyOptimizer steps a part of the parameters on each rank, by the gradients of this rank, and "
            "broadcasts them densely: pass the optimizer of all parameters, or shard the model by fully_shard()"
        )
    _check_closure(optimizer)
    for parameter in (p for group in optimizer.param_groups for p in group["params"]):
        if is_lazy(parameter):
            raise ConfigurationError(
                f"{label_of(optimizer, parameter, names)} of a lazy module has no shape before the first pass: call "
                "model() once with a batch before wrap()"
            )
        if parameter.is_meta:
            raise ConfigurationError(
                f"{label_of(optimizer, parameter, names)} is on the meta device, without values: call "
                "model.to_empty(device=...) and load or initialize the weights before wrap()"
            )
        if is_flattened(parameter) and not alone:
            raise ConfigurationError(
                f"{label_of(optimizer, parameter, names)} is sharded by FullyShardedDataParallel, which is not "
                "supported: use fully_shard() and pass the model to wrap(..., model=model)"
            )


def check_trained(
    optimizer: torch.optim.Optimizer, names: Mapping[int, str], *, alone: bool, ignored: Collection[int]
) -> None:
    """Raise :class:`~tritoncomm.ConfigurationError` if all parameters of ``optimizer`` are frozen, or DDP ignores them.

    ``names`` are those of parameters, by id, and ``ignored`` are the ids of those that DDP ignores. A single worker,
    ``alone``, may have nothing to train.
    """
    if alone:
        return
    every = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    parameters = [parameter for parameter in every if id(parameter) not in ignored]
    if every and not parameters:
        raise ConfigurationError(
            "optimizer holds only parameters that DDP was told to ignore, the first of them "
            f"{label_of(optimizer, every[0], names)}: they are this rank's own, and nothing is exchanged, so do not "
            "wrap it"
        )
    if not any(parameter.requires_grad for parameter in parameters):
        first = f", the first of them {label_of(optimizer, parameters[0], names)}" if parameters else ""
        raise ConfigurationError(
            f"optimizer holds {len(parameters)} parameters, and none has requires_grad=True{first}: unfreeze what will "
            "train before wrap(), or do not wrap this optimizer"
        )


def _check_closure(optimizer: torch.optim.Optimizer) -> None:
    """Raise :class:`~tritoncomm.ConfigurationError` if ``step()`` of ``optimizer`` cannot be called without arguments.

    The closure is called before the exchange, and the optimizer steps by averaged gradients without it.
    """
    _, *arguments = inspect.signature(original_class(optimizer).step).parameters.items()
    for name, each in arguments:
        if each.default is each.empty and each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD):
            raise ConfigurationError(
                f"{type(optimizer).__name__}.step() needs its argument {name!r}, and a wrapped optimizer calls a "
                f"closure once, before the exchange: give it a default, {name}=None, and let step() use .grad, or use "
                "another optimizer"
            )


# What to call instead of wrap() for an optimizer that a trainer has prepared, by a part of the name of its module.
_INSTEAD = {
    "accelerate": "call tritoncomm.integrations.accelerate.wrap(accelerator, model, optimizer)",
    "fabric": "wrap it before: model = fabric.setup_module(model), then optimizer = "
    "fabric.setup_optimizers(tritoncomm.wrap(optimizer, model=model))",
    "lightning": "pass Trainer(strategy=SparseDDPStrategy()) of tritoncomm.integrations.lightning",
}


def _refuse_prepared(optimizer: torch.optim.Optimizer) -> None:
    """Raise :class:`~tritoncomm.ConfigurationError` about an ``optimizer`` that stands for another one."""
    module = type(optimizer).__module__
    instead = next((call for name, call in _INSTEAD.items() if name in module), "pass the optimizer that it stands for")
    raise ConfigurationError(
        f"optimizer is a {type(optimizer).__name__} of {module}, which stands for another optimizer: {instead}"
    )
