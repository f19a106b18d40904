"""What depends on the release of PyTorch, and what it has no public function for up to 2.13, such as private names.

Each has its reason beside it. Nothing else in ``step/`` does such things. In ``scheduler/``, process groups have no
public functions for some of what it needs, and the lines that use others say so.
"""

from __future__ import annotations

import inspect
import sys
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from functools import cache, wraps
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel
from torch.optim import lr_scheduler
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

# Not torch.compiler.disable, which imports the compiler even if it is not used.
without_compile = torch._disable_dynamo  # type: ignore[attr-defined]  # noqa: SLF001


def version_of(tensor: torch.Tensor | None) -> int:
    """Return a number that grows whenever ``tensor``, or this rank's shard of a DTensor, is changed in place."""
    if tensor is None:
        return -1
    shard = getattr(tensor, "_local_tensor", None)  # what writes to a DTensor may count in it, in its shard, or in both
    return int(tensor._version) + (0 if shard is None else int(shard._version))  # noqa: SLF001


def gradient_dtype(parameter: torch.Tensor) -> torch.dtype | None:
    """Return the dtype that the gradient of ``parameter`` must have. None is any, or that PyTorch does not know yet."""
    return getattr(parameter, "grad_dtype", None)


def number_of_groups() -> int:
    """Return the number of process groups of this rank.

    With ``use_local_synchronization``, torch names a new group by this number. Ranks with other numbers never meet.
    """
    return len(dist.distributed_c10d._world.pg_names)  # noqa: SLF001


def comm_hooks(model: DistributedDataParallel) -> list[Callable[..., Any]]:
    """Return the communication hooks of ``model``. A trainer may have registered them."""
    return [hook for hook, _ in getattr(model, "_comm_hooks", [])]


def let_average_nothing(model: DistributedDataParallel) -> bool:
    """Register ``noop_hook`` with ``model``. Return False if it has another hook.

    A deep copy lists the hooks of its original, which DDP has not registered with it. Only an attempt tells.
    """
    listed = list(model._comm_hooks)  # noqa: SLF001
    if any(hook is not noop_hook for hook, _ in listed):
        return False
    try:
        model.register_comm_hook(None, noop_hook)
    except RuntimeError:  # it has a hook: this one if it is listed, otherwise one of torch's built-in ones
        model._comm_hooks = listed  # noqa: SLF001
        return bool(listed)
    return True


def check_new_joins(check: Callable[[Iterable[Any]], None]) -> None:
    """Call ``check`` with the modules of each ``join()`` that lets a rank without a batch leave, as it is entered.

    torch has no function to ask before, and ``model.join()`` and trainers make such a context alike. Call this once.
    """
    entered = Join.__enter__

    @wraps(entered)
    def enter(self: Join) -> None:
        may_leave = getattr(self, "_enable", False) and not getattr(self, "_throw_on_early_termination", True)
        check(getattr(self, "_joinables", ()) if may_leave else ())  # the names are those of torch 2.9 to 2.13
        entered(self)  # type: ignore[no-untyped-call]

    Join.__enter__ = enter  # type: ignore[method-assign]


@cache
def explain_cycles(explanation: Callable[[Any, str], Exception | None]) -> None:
    """Let schedules that cycle momentum raise ``explanation`` of an optimizer and their name, instead of torch's error.

    None leaves torch's. They read ``defaults``, which other code asks, too, so nothing else tells that one of them is
    refused. A further call does nothing.
    """

    def explained(kind: type[Any]) -> Callable[..., None]:
        initialize = kind.__init__

        @wraps(initialize)
        def init(self: Any, optimizer: Any, *args: Any, **kwargs: Any) -> None:
            try:
                initialize(self, optimizer, *args, **kwargs)
            except ValueError as error:
                instead = explanation(optimizer, kind.__name__) if "cycle_momentum" in str(error) else None
                if instead is None:
                    raise
                raise instead from error

        return init

    for kind in (lr_scheduler.CyclicLR, lr_scheduler.OneCycleLR):
        kind.__init__ = explained(kind)  # type: ignore[method-assign]


def ignored_by(model: DistributedDataParallel) -> list[torch.Tensor]:
    """Return the parameters and buffers that ``model`` was told to ignore under all of their names.

    DDP lists there also what it averages by itself, all at once (``delay_all_reduce_named_params``).
    """
    inner, left_out = model.module, model.parameters_to_ignore
    named = [*inner.named_parameters(remove_duplicate=False), *inner.named_buffers(remove_duplicate=False)]
    kept = {id(each) for name, each in named if name not in left_out}
    kept.update(map(id, model._delay_all_reduce_params))  # noqa: SLF001
    return [each for _, each in named if id(each) not in kept]


def fsdp_modules(model: torch.nn.Module | None) -> list[torch.nn.Module]:
    """Return the modules in ``model`` that FSDP2 shards. To import their class takes seconds: it may not be loaded."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return (
        [] if model is None or fsdp is None else [each for each in model.modules() if isinstance(each, fsdp.FSDPModule)]
    )


def holds_gradients(module: torch.nn.Module) -> bool:
    """Return True if ``module``, which FSDP2 shards, has gradients of a backward pass that it did not reduce.

    They are not in ``.grad``. FSDP adds them to the next pass that it reduces, and has no function to ask for them.
    """
    state = module._get_fsdp_state()  # type: ignore[operator]  # noqa: SLF001
    groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]  # noqa: SLF001 - before torch 2.12
    for parameter in (each for group in groups if group is not None for each in group.fsdp_params):
        unsharded = getattr(parameter, "_unsharded_param", None)  # there is none before the first pass
        if parameter.unsharded_accumulated_grad is not None or getattr(unsharded, "grad", None) is not None:
            return True
    return False


def averages_apart(model: DistributedDataParallel) -> bool:
    """Return True if ``model`` averages some gradients at once, beside its hook (``delay_all_reduce_named_params``)."""
    return bool(model._delay_all_reduce_params)  # noqa: SLF001


def is_flattened(parameter: torch.Tensor) -> bool:
    """Return True if ``parameter`` belongs to ``FullyShardedDataParallel`` (FSDP1). It is then a part of a flat shard.

    Nothing else tells such a parameter from one that all ranks hold whole.
    """
    return getattr(parameter, "_fsdp_flattened", False)


def is_zero(optimizer: torch.optim.Optimizer) -> bool:
    """Return True for a ``ZeroRedundancyOptimizer``. To import its class takes seconds, and it may not be loaded."""
    module = sys.modules.get("torch.distributed.optim.zero_redundancy_optimizer")
    return module is not None and isinstance(optimizer, module.ZeroRedundancyOptimizer)


def is_interruption(error: BaseException) -> bool:
    """Return True for what ends the program, such as KeyboardInterrupt, and for what a signal handler has raised.

    Neither belongs to an exchange, so it leaves the exchange as it is. A handler is the only function to which Python
    passes the frame that it interrupts, and nothing else tells that it has raised ``error``.
    """
    if not isinstance(error, Exception):
        return True
    entry = error.__traceback__
    while entry is not None and entry.tb_next is not None:
        interrupted, entry = entry.tb_frame, entry.tb_next
        for value in entry.tb_frame.f_locals.values():
            if value is interrupted or (isinstance(value, tuple) and any(each is interrupted for each in value)):
                return True
    return False


def step_hooks(optimizer: torch.optim.Optimizer) -> tuple[list[Callable[..., Any]], list[Callable[..., Any]]]:
    """Return the hooks of ``optimizer`` before and after its step. A wrapped optimizer runs them around its rule."""
    before, after = optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks  # noqa: SLF001
    return list(before.values()), list(after.values())


def global_step_hooks() -> tuple[list[Callable[..., Any]], list[Callable[..., Any]]]:
    """Return the hooks of all optimizers before and after a step."""
    return list(_global_optimizer_pre_hooks.values()), list(_global_optimizer_post_hooks.values())


class StateHooks:
    """The hooks of ``optimizer`` around ``state_dict()`` and ``load_state_dict()``, run by the caller.

    A method of torch, and of many other optimizers, runs them itself. In the context, there are none.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        kinds = ("state_dict_pre", "state_dict_post", "load_state_dict_pre", "load_state_dict_post")
        self._held = {kind: getattr(optimizer, f"_optimizer_{kind}_hooks") for kind in kinds}

    def __enter__(self) -> None:
        for kind in self._held:
            setattr(self._optimizer, f"_optimizer_{kind}_hooks", OrderedDict())

    def __exit__(self, *_: object) -> None:
        for kind, hooks in self._held.items():
            setattr(self._optimizer, f"_optimizer_{kind}_hooks", hooks)

    def run(self, kind: str) -> None:
        """Run the hooks of one ``kind``, such as ``"state_dict_pre"``."""
        for hook in list(self._held[kind].values()):
            hook(self._optimizer)

    def changed(self, kind: str, state: dict[str, Any]) -> dict[str, Any]:
        """Return ``state`` as the hooks of one ``kind`` leave it."""
        for hook in list(self._held[kind].values()):
            found = hook(self._optimizer, state)
            state = state if found is None else found
        return state


def has_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Return True if ``optimizer`` has hooks of its own.

    Every optimizer gets them from its base class. An object that trainers put in front of one is an instance of the
    base class that was never initialized, so that ``isinstance`` is true.
    """
    return "_optimizer_step_pre_hooks" in vars(optimizer)


def original_class(optimizer: torch.optim.Optimizer) -> type[torch.optim.Optimizer]:
    """Return the class of ``optimizer`` before ``wrap`` gave it another one."""
    found: type[torch.optim.Optimizer] = getattr(type(optimizer), "wrapped_class", type(optimizer))
    return found


def change_class(optimizer: torch.optim.Optimizer, kind: type[torch.optim.Optimizer]) -> None:
    """Make ``optimizer`` an instance of ``kind``, whose ``step`` schedules then know.

    A schedule puts a function around ``step`` of the object, to see that it is called. It is put around the new one.
    """
    counted = vars(optimizer).pop("step", None)
    optimizer.__class__ = kind
    if counted is None:
        return
    step, reference = kind.step, weakref.ref(optimizer)

    @wraps(step)
    def count(*args: Any, **kwargs: Any) -> Any:
        found = reference()
        assert found is not None  # it is called
        mark_stepped(found)
        return step(found, *args, **kwargs)

    count._wrapped_by_lr_sched = True  # type: ignore[attr-defined]  # noqa: SLF001
    optimizer.step = count  # type: ignore[method-assign]


def has_own_step(optimizer: torch.optim.Optimizer) -> bool:
    """Return True if somebody has replaced ``step`` of this one object by another method.

    Learning rate schedulers, and :func:`change_class`, put a counter around the method, which does not count.
    """
    own: Any = vars(optimizer).get("step")
    while getattr(getattr(own, "__code__", None), "co_filename", None) in (lr_scheduler.__file__, __file__):
        own = own.__wrapped__
    step = type(optimizer).step
    return own is not None and getattr(own, "__func__", own) not in (step, getattr(step, "__wrapped__", step))


def step_below_hooks(optimizer: torch.optim.Optimizer) -> None:
    """Call ``step()`` of the class of ``optimizer`` without the hooks that torch has put around it."""
    step = original_class(optimizer).step
    inspect.unwrap(step, stop=lambda inner: not getattr(inner, "hooked", False))(optimizer)


def written_step(optimizer: torch.optim.Optimizer | type[torch.optim.Optimizer]) -> Callable[..., Any]:
    """Return ``step`` of an optimizer's class as its author wrote it. torch wraps it, for each class again."""
    kind = optimizer if isinstance(optimizer, type) else original_class(optimizer)
    step: Callable[..., Any] = kind.step
    while getattr(step, "__globals__", {}).get("__name__") == "torch.optim.optimizer" and hasattr(step, "__wrapped__"):
        step = step.__wrapped__
    return step


def steps_as(optimizer: torch.optim.Optimizer, kinds: tuple[type[torch.optim.Optimizer], ...]) -> bool:
    """Return True if ``optimizer`` takes the step of one of ``kinds``: no subclass has another one."""
    return isinstance(optimizer, kinds) and written_step(optimizer) in map(written_step, kinds)


def hooks_key(optimizer: torch.optim.Optimizer) -> int:
    """Return a number that ``optimizer`` has in common with proxies that share its attributes, and so its hooks."""
    return id(optimizer._optimizer_step_pre_hooks)  # noqa: SLF001


def mark_stepped(optimizer: torch.optim.Optimizer) -> None:
    """Note that ``optimizer`` has taken a step. Learning rate schedulers warn otherwise."""
    vars(optimizer)["_opt_called"] = True


def _callers() -> Iterator[FrameType]:
    """Yield the frames of all functions that have called, the innermost first."""
    frame = inspect.currentframe()
    while frame is not None:
        yield frame
        frame = frame.f_back


def is_for_checkpoint() -> bool:
    """Return True if ``torch.distributed.checkpoint`` asks for a state dict. It knows no other keys than a load has."""
    return any(each.f_globals.get("__name__") == "torch.distributed.checkpoint.state_dict" for each in _callers())


def variables_of_caller(kind: type) -> dict[str, Any] | None:
    """Return the variables of the innermost method of a ``kind`` that has called, or None if none has."""
    return next((each.f_locals for each in _callers() if isinstance(each.f_locals.get("self"), kind)), None)


def creates_state(optimizer: torch.optim.Optimizer) -> bool:
    """Return True inside the step by which ``torch.distributed.checkpoint`` makes an optimizer create its state.

    All learning rates are zero in this step. They can be zero in the first step of a warm-up, too, so the call stack is
    searched for the caller.
    """
    module = sys.modules.get("torch.distributed.checkpoint.state_dict")
    if module is None or any(group.get("lr") is None or float(group["lr"]) != 0 for group in optimizer.param_groups):
        return False
    maker = module._init_optim_state.__code__  # noqa: SLF001
    return any(each.f_code is maker for each in _callers())
