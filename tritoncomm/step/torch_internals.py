"""What PyTorch has no public function for. Each use of a private name in the exchange is here, with its reason."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.optim import lr_scheduler

# Not torch.compiler.disable, which imports the compiler even if it is not used.
without_compile = torch._disable_dynamo  # type: ignore[attr-defined]  # noqa: SLF001


def current_backward() -> int:
    """Return a number that identifies the backward pass in which this is called, or -1 outside of one.

    FSDP calls a hook several times in a pass, and the first call begins the step. DDP's ``join()`` calls a hook outside
    of a pass.
    """
    number: int = torch._C._current_graph_task_id()  # noqa: SLF001
    return number


def accumulates(parameter: torch.Tensor) -> bool:
    """Return True if the backward pass in which this is called adds to ``parameter.grad``.

    ``torch.autograd.grad`` calls the hooks of a parameter, too, and adds to nothing.
    """
    node = torch.autograd.graph.get_gradient_edge(parameter).node
    try:
        return bool(torch._C._will_engine_execute_node(node))  # noqa: SLF001
    except RuntimeError:  # of torch.autograd.grad, if it was asked for this parameter
        return False


def at_end_of_backward(callback: Callable[[], None]) -> None:
    """Call ``callback`` at the end of the backward pass in which this is called, after callbacks that are queued now.

    An error in it is raised by ``backward()``. DDP and FSDP2 finish their passes in the same way.
    """
    torch.autograd.Variable._execution_engine.queue_callback(callback)  # noqa: SLF001


def number_of_groups() -> int:
    """Return the number of process groups of this rank.

    With ``use_local_synchronization``, torch names a new group by this number. Ranks with other numbers never meet.
    """
    return len(dist.distributed_c10d._world.pg_names)  # noqa: SLF001


def joins(model: DistributedDataParallel) -> bool:
    """Return True if the last ``join()`` of ``model`` lets ranks go on without a batch.

    The hook cannot see ``join()`` on the ranks that have a batch.
    """
    settings = model._join_config  # noqa: SLF001
    return bool(settings.enable and not settings.throw_on_early_termination)


def averaged_parameters(model: DistributedDataParallel) -> dict[str, torch.Tensor]:
    """Return the parameters of ``model`` that DDP averages if they require gradients, by name."""
    ignored = getattr(model, "parameters_to_ignore", ())
    return {name: parameter for name, parameter in model.module.named_parameters() if name not in ignored}


def comm_hooks(model: DistributedDataParallel) -> list[tuple[Callable[..., Any], Any]]:
    """Return the communication hooks of ``model``, each with its state. A trainer may have registered them."""
    return list(getattr(model, "_comm_hooks", []))


def fsdp_parameter_groups(module: Any) -> tuple[object, list[Any]]:
    """Return the FSDP state of an ``FSDPModule``, and the groups of parameters that it reduces together.

    A hook gets the shard of a whole group, and needs to know which parameters are where in it.
    """
    state = module._get_fsdp_state()  # noqa: SLF001
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:  # older releases have at most one
        groups = [group for group in [state._fsdp_param_group] if group is not None]  # noqa: SLF001
    return state, list(groups)


def is_flattened(parameter: torch.Tensor) -> bool:
    """Return True if ``parameter`` belongs to ``FullyShardedDataParallel`` (FSDP1). It is then a part of a flat shard.

    Nothing else tells such a parameter from one that all ranks hold whole.
    """
    return getattr(parameter, "_fsdp_flattened", False)


def all_reduce_hook(group: Any) -> Any:
    """Return the hook that was set for a parameter group of FSDP with ``set_all_reduce_hook``, or None."""
    return group._all_reduce_hook  # noqa: SLF001


def take_over_parameters(group: Any) -> None:
    """Let FSDP use the parameters that ``load_state_dict(assign=True)`` has put into the module of ``group``.

    FSDP does the same in the first forward pass, which comes too late for the hook.
    """
    for each in group.fsdp_params if group.is_sharded else ():
        held = each._module_info  # noqa: SLF001
        if getattr(held.module, held.param_name) is not each.sharded_param:
            each.reset_sharded_param()


def divisor_after_hook(group: Any, dtype: torch.dtype) -> float:
    """Return the number by which FSDP divides the shard of ``group``, reduced in ``dtype``, after the all-reduce hook.

    It divides where it computes a sum. In fp32 and bf16 it averages.
    """
    sums = getattr(group, "force_sum_reduction_for_comms", False)
    if dtype in (torch.float32, torch.bfloat16) and not sums:
        return 1.0
    from torch.distributed.fsdp._fully_shard._fsdp_collectives import (  # noqa: PLC0415 - importing it takes a while
        _get_gradient_divide_factors,
    )

    scattered = group._reduce_scatter_process_group  # noqa: SLF001
    _, divisor, *_ = _get_gradient_divide_factors(
        scattered, None, dtype, group.device.type, group.gradient_divide_factor, sums
    )
    return float(divisor or 1.0)


def has_gradient_hooks(parameter: torch.Tensor) -> bool:
    """Return True if ``register_post_accumulate_grad_hook`` was called. FSDP calls these hooks in a backward pass."""
    return bool(getattr(parameter, "_post_accumulate_grad_hooks", None))


def step_hooks(optimizer: torch.optim.Optimizer) -> tuple[list[Callable[..., Any]], list[Callable[..., Any]]]:
    """Return the hooks of ``optimizer`` before and after its step.

    A wrapped optimizer takes the step without torch's hooks, which run for the wrapper already, and runs those that the
    user has registered with the original optimizer.
    """
    before, after = optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks  # noqa: SLF001
    return list(before.values()), list(after.values())


def has_own_step(optimizer: torch.optim.Optimizer) -> bool:
    """Return True if somebody has replaced ``step`` of this one object by another method.

    Learning rate schedulers put a counter around the method, which does not count.
    """
    own = vars(optimizer).get("step")
    while getattr(getattr(own, "__code__", None), "co_filename", None) == lr_scheduler.__file__:
        own = own.__wrapped__  # type: ignore[union-attr]
    return own is not None and getattr(own, "__func__", own) is not type(optimizer).step


def hooks_key(optimizer: torch.optim.Optimizer) -> int:
    """Return a number that ``optimizer`` has in common with proxies that share its attributes, and so its hooks."""
    return id(optimizer._optimizer_step_pre_hooks)  # noqa: SLF001


def mark_stepped(optimizer: torch.optim.Optimizer) -> None:
    """Note that ``optimizer`` has taken a step. Learning rate schedulers warn otherwise."""
    optimizer._opt_called = True  # type: ignore[attr-defined]  # noqa: SLF001
