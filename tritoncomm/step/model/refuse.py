"""Parameters change in ``step()`` of the wrapped optimizer alone: every other way is an error."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch

from tritoncomm.step.optimizer_list import parts_of
from tritoncomm.step.tensors.shards import local
from tritoncomm.step.torch_internals import creates_state, has_hooks, hooks_key, original_class, step_hooks

# Attributes of every optimizer. They hold no other one.
_OF_ALL = ("state", "param_groups", "defaults")
# Schedule-free optimizers swap parameters here with values that are equal on all ranks. Gradients have no part in it.
SWAPS = ("train", "eval")


def optimizers_inside(optimizer: torch.optim.Optimizer) -> list[torch.optim.Optimizer]:
    """Return the optimizers in attributes of ``optimizer``, which it may step, and in theirs.

    Attributes may be lists, tuples and dicts of optimizers.
    """
    found = [optimizer]
    for each in found:
        for name, value in vars(each).items():
            if name in _OF_ALL:
                continue
            entries: Iterable[Any] = value.values() if isinstance(value, dict) else value
            for entry in entries if isinstance(value, (list, tuple, dict)) else [value]:
                known = any(entry is other for other in found)
                if isinstance(entry, torch.optim.Optimizer) and has_hooks(entry) and not known:
                    found.append(entry)
    return found[1:]


# The optimizers (see hooks_key) whose step a wrapped optimizer takes now.
_stepping: set[int] = set()


@contextmanager
def stepping(optimizers: Iterable[torch.optim.Optimizer]) -> Iterator[None]:
    """Let ``optimizers`` step in the body, although they :func:`refuse` to."""
    keys = {hooks_key(each) for each in optimizers}
    _stepping.update(keys)
    try:
        yield
    finally:
        _stepping.difference_update(keys)


def is_stepping() -> bool:
    """Return True while a wrapped optimizer takes its step, which may consist of the steps of any other optimizers."""
    return bool(_stepping)


def may_step(optimizer: torch.optim.Optimizer) -> bool:
    """Return True if a wrapped optimizer takes the step of ``optimizer`` now."""
    return hooks_key(optimizer) in _stepping


def is_wrapped(optimizer: torch.optim.Optimizer) -> bool:
    """Return True if ``optimizer`` was wrapped, or is a part of one that was and will :func:`refuse` to step."""
    return original_class(optimizer) is not type(optimizer) or refuse in step_hooks(optimizer)[0]


def refuse(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Raise :class:`RuntimeError` before a part of a wrapped optimizer steps by itself. A hook of it."""
    if not may_step(optimizer) and not creates_state(optimizer):
        raise RuntimeError(
            f"a list or an optimizer that contains this {type(optimizer).__name__} was wrapped, and its own step() "
            "does not exchange gradients: call step() of what tritoncomm.wrap() returned, or release() that first"
        )


def guard(optimizer: torch.optim.Optimizer, owner: object) -> Callable[[], Any]:
    """Let ``step()`` of the parts of ``optimizer``, and of optimizers inside, raise an error while ``owner`` lives.

    That of ``optimizer`` itself exchanges. Return a function that allows all of them to step again.
    """
    inside = (each for part in parts_of(optimizer) for each in (part, *optimizers_inside(part)))
    handles = [each.register_step_pre_hook(refuse) for each in inside if each is not optimizer]

    def remove() -> None:
        for handle in handles:
            handle.remove()

    unguard = weakref.finalize(owner, remove)
    unguard.atexit = False
    return unguard


def checked_methods(kind: type[torch.optim.Optimizer]) -> dict[str, Callable[..., Any]]:
    """Return the public methods of an optimizer's class beside those of every optimizer, checked by name.

    Each raises if it has changed parameters while there are gradients. They are this rank's own, so that parameters
    differ between ranks then.
    """
    kinds = kind.__mro__[: kind.__mro__.index(torch.optim.Optimizer)]
    names = {name for each in kinds for name in vars(each) if not name.startswith("_") and name not in SWAPS}
    chosen = sorted(name for name in names if inspect.isfunction(inspect.getattr_static(kind, name)))
    return {name: _checked(getattr(kind, name)) for name in chosen if not hasattr(torch.optim.Optimizer, name)}


def _checked(method: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(method)
    def call(optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        before = [] if may_step(optimizer) else _versions(optimizer)
        result = method(optimizer, *args, **kwargs)
        if before and before != _versions(optimizer):
            kind = original_class(optimizer).__name__
            raise RuntimeError(
                f"{method.__name__}() of {kind} has changed parameters by gradients of this rank alone, so they differ "
                f"between ranks now: load a checkpoint. Only step() exchanges gradients: wrap the optimizer inside "
                f"{kind} instead, if it has one. If {method.__name__}() uses no gradient, call it after zero_grad()"
            )
        return result

    return call


def _versions(optimizer: torch.optim.Optimizer) -> list[tuple[int, int]]:
    """Return numbers that change with the parameters of ``optimizer``. Empty if none has a gradient."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if all(parameter.grad is None for parameter in parameters):
        return []
    shards = [local(parameter.detach()) for parameter in parameters]
    return [(shard.data_ptr(), shard._version) for shard in shards]  # noqa: SLF001 - torch documents it for this use
