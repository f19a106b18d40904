"""What kind of module an optimizer trains: what it is told, so that gradients stay local, and what it must fulfil."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Collection, Iterable, MutableMapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakIdKeyDictionary

from tritoncomm.errors import ConfigurationError
from tritoncomm.scheduler.ranks import rank_text, speaks
from tritoncomm.step import agree
from tritoncomm.step.agree.number import numbers
from tritoncomm.step.model.refuse import is_stepping, is_wrapped, optimizers_inside
from tritoncomm.step.tensors.names import device_of, parameter_ids
from tritoncomm.step.tensors.shards import has_bits, mesh_ranks
from tritoncomm.step.torch_internals import (
    averages_apart,
    check_new_joins,
    comm_hooks,
    creates_state,
    fsdp_modules,
    ignored_by,
    let_average_nothing,
)

logger = logging.getLogger("tritoncomm")

Named = list[tuple[torch.Tensor, str]]  # tensors, each with its name


def checked_module(model: Any) -> nn.Module | None:
    """Return ``model``, without what torch.compile or Fabric has put around it.

    After a forward pass, FSDP2 may have left whole tensors in the place of its parameters. They are sharded again.

    Raises:
        ConfigurationError: It is neither a module nor None.
    """
    model = getattr(model, "_forward_module", model)  # of Fabric, which is a module itself
    model = getattr(model, "_orig_mod", model)
    if not (model is None or isinstance(model, nn.Module)):
        raise ConfigurationError(f"model is a {type(model).__name__}: pass the torch.nn.Module that optimizer trains")
    for each in fsdp_modules(model):
        each.reshard()  # type: ignore[operator]
    return model


def group_of(model: nn.Module | None, group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """Return the process group of the exchange: ``group``, or the one of the DDP modules in ``model``.

    Raises:
        ConfigurationError: ``group`` is not the one of these modules, or they have several.
    """
    for module in _ddp_of(model):
        if group is not None and group is not module.process_group:
            raise ConfigurationError(
                "process_group is not the one of the model: leave it out, and use the same group in every "
                "DistributedDataParallel module"
            )
        group = module.process_group
    return group


def _ddp_of(model: nn.Module | None) -> list[DistributedDataParallel]:
    """Return the DDP modules in ``model``, which may be a container."""
    return [] if model is None else [each for each in model.modules() if isinstance(each, DistributedDataParallel)]


def names_of(model: nn.Module | None) -> dict[int, str]:
    """Return the names of the parameters of ``model`` by their ids, for messages."""
    if model is None:
        return {}
    inner = model.module if isinstance(model, DistributedDataParallel) else model
    return {id(parameter): name for name, parameter in inner.named_parameters()}


def ignored_ids(model: nn.Module | None) -> Collection[int]:
    """Return the ids of the parameters and buffers that the DDP modules in ``model`` were told to ignore.

    These are the ids of those that still exist: the id of one that is gone may be given to another.
    """
    ignored = (each for module in _ddp_of(model) for each in ignored_by(module))
    return weakref.WeakValueDictionary((id(each), each) for each in ignored)


def is_sharded(optimizers: Iterable[torch.optim.Optimizer], model: object) -> bool:
    """Return whether ``optimizers`` train a DTensor, other than parameters that DDP modules in ``model`` ignore."""
    ignored = ignored_ids(model if isinstance(model, nn.Module) else None)
    groups = (group for each in optimizers for group in getattr(each, "param_groups", ()))
    trained = (each for group in groups for each in group["params"] if each.requires_grad and id(each) not in ignored)
    return any(hasattr(each, "device_mesh") for each in trained)


def rest_of(model: nn.Module | None, optimizer: torch.optim.Optimizer) -> tuple[Named, Named]:
    """Return the parameters of ``model`` that ``optimizer`` does not hold, and its buffers.

    What DDP was told to ignore is left out, and what has no bits that can be compared. So are buffers that DDP
    broadcasts in each pass: in between, ranks have their own.
    """
    if model is None:
        return [], []
    inner = model.module if isinstance(model, DistributedDataParallel) else model
    left_out = parameter_ids(optimizer).union(ignored_ids(model))

    def chosen(named: Iterable[tuple[str, torch.Tensor]]) -> Named:
        return [(each, name) for name, each in named if id(each) not in left_out and has_bits(each)]

    broadcast = {id(each) for module in _ddp_of(model) if module.broadcast_buffers for each in module.buffers()}
    buffers = [(each, name) for each, name in chosen(inner.named_buffers()) if id(each) not in broadcast]
    return chosen(inner.named_parameters()), buffers


def compare_buffers(
    model: nn.Module | None, optimizer: torch.optim.Optimizer, group: dist.ProcessGroup | None, shard: int
) -> None:
    """Log a warning if buffers of ``model`` differ between ranks of ``group`` with the same ``shard``.

    All ranks of ``group`` call this together.

    It is no error: those of a plain module differ after training, and so do those that each rank of a resumed run
    loads.
    """
    device = device_of(optimizer)
    with agree.propagate_errors(group, device):
        _, buffers = rest_of(model, optimizer)
        fields = dict(zip((name for _, name in buffers), numbers(buffer for buffer, _ in buffers), strict=True))
    found = agree.differences(fields, group, device, shard)
    if found and speaks(group):
        logger.warning(
            "%d buffers of the model differ between ranks, the first is %s: pass broadcast_parameters=True, unless "
            "they are statistics that each rank has collected",
            len(found),
            next(iter(found)),
        )


def check_model(model: nn.Module | None) -> None:
    """Raise :class:`~tritoncomm.ConfigurationError` if gradients of ``model`` cannot be exchanged.

    The group in which its shards are exchanged is checked with the parameters that the optimizer holds.
    """
    found = _ddp_of(model)
    for module in found:
        _check_hooks(module)
    if model is not None and not found:
        _check_shards(model)


def check_held(model: nn.Module | None, optimizer: torch.optim.Optimizer) -> None:
    """Raise :class:`~tritoncomm.ConfigurationError` if ``optimizer`` holds no parameter that ``model`` trains."""
    trained = [] if model is None else [each for each in model.parameters() if each.requires_grad]
    held = parameter_ids(optimizer)
    if trained and held and not any(id(each) in held for each in trained):
        raise ConfigurationError(
            f"model is a {type(model).__name__}, and optimizer holds none of its parameters: build the optimizer from "
            "model.parameters(), after fully_shard() or whatever else replaces them. An optimizer that keeps copies of "
            "parameters cannot be wrapped"
        )


def keep_gradients_local(model: nn.Module | None) -> None:
    """Let the DDP modules in ``model`` average nothing. They still broadcast parameters and buffers.

    From now on, an optimizer that is not wrapped and steps their parameters raises an error, and so does ``join()``
    unless it ends training with the first rank that has no batch.

    Raises:
        ConfigurationError: A module has another communication hook.
    """
    for module in _ddp_of(model):
        if module in _local:
            continue
        if not let_average_nothing(module):
            _check_hooks(module)
            raise ConfigurationError("model has one of DDP's built-in communication hooks: do not register it")
        _local.add(module)
        ignored = set(map(id, ignored_by(module)))  # which anybody may step
        for name, parameter in module.module.named_parameters():
            if id(parameter) not in ignored:
                _names[parameter] = (name, weakref.ref(module))
    if _local and not _guards:
        _guards.append(register_optimizer_step_pre_hook(check_not_stepped))
        check_new_joins(_check_new_join)


# The DDP modules that average nothing, and the name and module of each of their parameters.
_local: weakref.WeakSet[DistributedDataParallel] = weakref.WeakSet()
_names: MutableMapping[torch.Tensor, tuple[str, weakref.ref[DistributedDataParallel]]] = WeakIdKeyDictionary()
_guards: list[RemovableHandle] = []  # the hook of all optimizers, once a module averages nothing


def check_not_stepped(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Raise if ``optimizer`` steps local gradients by itself. A wrapped one, and what it consists of, may step.

    So may one with a wrapped one of the same parameters inside. A part of a wrapped list has a hook of its own, which
    raises next.
    """
    if is_stepping() or is_wrapped(optimizer) or creates_state(optimizer):
        return
    exchanged = [parameter_ids(each) for each in optimizers_inside(optimizer) if is_wrapped(each)]
    for parameter in (p for group in optimizer.param_groups for p in group["params"] if p.grad is not None):
        if stays_local(parameter) and not any(id(parameter) in held for held in exchanged):
            name = _names[parameter][0]
            raise ConfigurationError(
                f"this {type(optimizer).__name__} steps {name!r}, and it is not wrapped. DDP averages no gradients of "
                "this model any more, because an optimizer was wrapped with it: call tritoncomm.wrap(optimizer, "
                "model=model, ...) with this one, too. To train without tritoncomm again, put model.module into a new "
                "DistributedDataParallel, and drop the old one"
            )


def stays_local(parameter: torch.Tensor) -> bool:
    """Return True if the gradient of ``parameter`` is this rank's own, of several: its DDP module averages nothing."""
    _, reference = _names.get(parameter, ("", lambda: None))
    module = reference()
    return module is not None and dist.is_initialized() and dist.get_world_size(module.process_group) > 1


def _check_new_join(modules: Iterable[Any]) -> None:
    """Raise if a rank without a batch would leave the training of one of ``modules``, which averages nothing."""
    if any(each in _local and dist.get_world_size(each.process_group) > 1 for each in modules):
        raise ConfigurationError(
            "join(): this module was passed to wrap(), so step() exchanges its gradients, which every rank must call "
            "equally often, and join() takes no steps for a rank without a batch. Give all ranks as many batches, or "
            "let a rank without one call step() without a backward pass, and leave out join(); or end training with "
            "the first rank that has none, by join(throw_on_early_termination=True)"
        )


def _check_hooks(model: DistributedDataParallel) -> None:
    if averages_apart(model):
        raise ConfigurationError(
            "model is a DDP module with delay_all_reduce_named_params=, whose gradients DDP averages itself: leave it "
            "out"
        )
    for hook in comm_hooks(model):
        name = getattr(hook, "__name__", type(hook).__name__)
        if getattr(model, "mixed_precision", None) is not None:
            raise ConfigurationError(
                f"model is a DDP module with mixed_precision=, which has a communication hook of its own, {name}: "
                "leave it out, and use torch.autocast"
            )
        if hook is not noop_hook:
            raise ConfigurationError(
                f"model is a DDP module with a communication hook, {name}, which averages gradients before they are "
                "exchanged: do not register it"
            )


def _check_shards(model: nn.Module) -> None:
    """Check a model that ``fully_shard`` has sharded. Other modules may be anything."""
    if not fsdp_modules(model):
        return
    meshes: dict[frozenset[int], str] = {}
    for name, parameter in model.named_parameters():
        if not hasattr(parameter, "device_mesh"):
            if parameter.requires_grad:
                raise ConfigurationError(
                    f"{name} is not sharded, and other parameters of the model are. FSDP does not average its gradient "
                    "over the ranks of a replica: call fully_shard() on a module that has it, or freeze it"
                )
            continue
        meshes.setdefault(frozenset(mesh_ranks(parameter)), name)
    widest = max(meshes, key=len)
    for ranks, name in meshes.items():  # with tensor parallelism, some are sharded over a dimension of the mesh alone
        if not ranks <= widest:
            raise ConfigurationError(
                f"{meshes[widest]} is sharded over {rank_text(*sorted(widest))}, and {name} over "
                f"{rank_text(*sorted(ranks))}: call fully_shard() with the same mesh for all parameters of the model"
            )
