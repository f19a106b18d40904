"""What an optimizer does with a delivery: its own step, or the staleness-aware rule of its kind."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from tritoncomm.errors import ConfigurationError
from tritoncomm.step.exchange.layout import Delivered
from tritoncomm.step.model.ignored import hidden, ignored_of, present
from tritoncomm.step.model.refuse import optimizers_inside, refuse, stepping
from tritoncomm.step.optimizer_list import join, parts_of
from tritoncomm.step.rules.aware import AwareStep
from tritoncomm.step.rules.choose import find_rule
from tritoncomm.step.settings import Late
from tritoncomm.step.tensors.shards import local
from tritoncomm.step.torch_internals import (
    global_step_hooks,
    mark_stepped,
    original_class,
    step_below_hooks,
    step_hooks,
    steps_as,
)

logger = logging.getLogger("tritoncomm")


# Optimizers that add weight decay to the gradient, unless it is decoupled. Others shrink parameters apart from it, and
# so may a step of a subclass.
_COUPLED = (
    torch.optim.Adadelta,
    torch.optim.Adagrad,
    torch.optim.Adam,
    torch.optim.Adamax,
    torch.optim.ASGD,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
    torch.optim.SGD,
)


def coupled_decay(optimizer: torch.optim.Optimizer) -> dict[int, float]:
    """Return the share of each parameter (by id) that ``optimizer`` adds to its gradient as weight decay, if not zero.

    It is negative if the optimizer maximizes, because the sign of the gradient changes then.
    """
    found: dict[int, float] = {}
    for group in _coupled_groups(optimizer):
        share = float(group["weight_decay"]) * (-1.0 if group.get("maximize") else 1.0)
        found |= {id(parameter): share for parameter in group["params"]}
    return found


def _coupled_groups(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Return the parameter groups whose weight decay, which is not zero, the optimizer adds to the gradient."""
    return [
        group
        for part in parts_of(optimizer)
        for group in part.param_groups
        if group.get("weight_decay") and not group.get("decoupled_weight_decay") and steps_as(part, _COUPLED)
    ]


@contextmanager
def _without_decay(groups: Sequence[dict[str, Any]]) -> Iterator[None]:
    """Let an optimizer take a step by gradients that contain the coupled weight decay of its ``groups``."""
    held = [(group, group["weight_decay"]) for group in groups]
    try:
        for group, _ in held:
            group["weight_decay"] = 0
        yield
    finally:
        for group, decay in held:
            group["weight_decay"] = decay


@contextmanager
def _naming_closure(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Say what to do if ``optimizer`` has failed because it is called without a closure, although it has a default."""
    try:
        yield
    except (AssertionError, RuntimeError, TypeError, ValueError) as error:
        text = str(error)
        if "closure" in text.lower() or "'NoneType' object is not callable" in text:
            kind = original_class(optimizer).__name__
            raise ConfigurationError(
                f"{kind}.step() has failed: {text}. A wrapped optimizer calls a closure once, before the exchange, and "
                f"{kind}.step() without it. Wrap the optimizer inside {kind} instead, if it has one, or use another "
                "optimizer"
            ) from error
        raise


class OptimizerStep:
    """The step of ``optimizer``: its own step, or the staleness-aware step for its type.

    Args:
        optimizer: The optimizer.
        late: How far late gradients catch up. None if none is late, or all optimizers take their own step.
        alone: Whether there is a single worker. It takes the optimizer's own step.
        ignored: Ids of parameters that are this rank's own, see :mod:`tritoncomm.step.model.ignored`. Default: none.

    Attributes:
        alone: See above. It may change between steps.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        late: Late | None,
        *,
        alone: bool = False,
        ignored: Collection[int] = (),
    ) -> None:
        self.optimizer = optimizer
        self._ignored = ignored
        self.alone = alone
        self._rule: Callable[[], AwareStep] | None = None
        if late is not None and (rule := find_rule(optimizer)):
            self._rule = partial(rule, optimizer, late)
        self._aware: AwareStep | None = None
        self._inside = optimizers_inside(optimizer)

    def guard(self, whole: torch.optim.Optimizer) -> None:
        """Let ``optimizer.step()``, and that of optimizers inside it, raise an error from now on.

        It does so as long as this object lives. That of ``whole``, which was wrapped, exchanges.
        """
        guarded = [each for each in (self.optimizer, *self._inside) if each is not whole]
        self._unguard = weakref.finalize(self, _remove, [each.register_step_pre_hook(refuse) for each in guarded])
        self._unguard.atexit = False

    def unguard(self) -> None:
        """Allow ``optimizer.step()`` again."""
        self._unguard()

    def check(self) -> None:
        """Raise :class:`~tritoncomm.ConfigurationError` if the optimizer uses an option that is not supported."""
        if self._rule is None or self.alone:
            return
        if self._aware is None:
            self._aware = self._rule()  # checks the options
        else:
            self._aware.check_options()

    def hooks(self) -> tuple[list[Callable[..., Any]], list[Callable[..., Any]]]:
        """Return the hooks of the user before and after the step."""
        before, after = step_hooks(self.optimizer)
        return [hook for hook in before if hook is not refuse], after

    def take(self, aware: Callable[[AwareStep], None], *, decayed: bool = False, own: bool = False) -> None:
        """Take the optimizer's own step, or call ``aware`` with the staleness-aware one. No hook runs.

        ``decayed``: whether ``.grad`` contains the coupled weight decay. ``own``: take the own step in any case.
        """
        rule = None if self.alone or own else self._aware
        coupled = _coupled_groups(self.optimizer) if decayed else []
        # Neither is for the parameters that are this rank's own: the original step takes them before.
        apart = self.ignored if rule is not None or coupled else []
        with stepping((self.optimizer, *self._inside)):
            if present(apart):
                with hidden(self._common), _naming_closure(self.optimizer):
                    step_below_hooks(self.optimizer)
            with hidden(apart) if apart else nullcontext(), _without_decay(coupled) if coupled else nullcontext():
                if rule is None:
                    with _naming_closure(self.optimizer):
                        step_below_hooks(self.optimizer)
                else:
                    aware(rule)

    @property
    def ignored(self) -> list[torch.Tensor]:
        """The parameters that are this rank's own."""
        return ignored_of([self.optimizer], self._ignored) if self._ignored else []

    @property
    def _common(self) -> list[torch.Tensor]:
        every = (parameter for group in self.optimizer.param_groups for parameter in group["params"])
        return [parameter for parameter in every if id(parameter) not in self._ignored]

    def gradients(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Return the gradients that count together in a norm, and those of this rank's own parameters.

        A single worker counts all together.
        """
        if self.alone:
            return gradients_of([self.optimizer]), []
        return [each.grad for each in self._common if each.grad is not None], present(self.ignored)


class OptimizerSteps:
    """The steps of all optimizers whose gradients are exchanged together.

    Args:
        parts: The step of each optimizer.
        max_grad_norm: Maximum norm of what they step by. None does not clip. Default: None.

    Attributes:
        parts: See above.
        grad_norm: Norm of the averaged gradient before it was clipped.
    """

    def __init__(self, parts: Sequence[OptimizerStep], max_grad_norm: float | None = None) -> None:
        self.parts = list(parts)
        self.grad_norm = 0.0
        self._max_grad_norm = max_grad_norm

    @property
    def alone(self) -> bool:
        """True if there is a single worker. It takes each optimizer's own step."""
        return self.parts[0].alone

    @alone.setter
    def alone(self, alone: bool) -> None:
        for part in self.parts:
            part.alone = alone

    @property
    def ignored(self) -> list[torch.Tensor]:
        """The parameters that are this rank's own."""
        return [parameter for part in self.parts for parameter in part.ignored]

    def guard(self, whole: torch.optim.Optimizer) -> None:
        """Let ``step()`` of every optimizer but ``whole``, and of those inside, raise an error from now on."""
        for part in self.parts:
            part.guard(whole)

    def unguard(self) -> None:
        """Allow ``step()`` of every optimizer again."""
        for part in self.parts:
            part.unguard()

    def check(self) -> None:
        """Raise :class:`~tritoncomm.ConfigurationError` if an optimizer uses an option that is not supported."""
        for part in self.parts:
            part.check()

    def step(
        self,
        delivered: Sequence[Delivered],
        update: AbstractContextManager[None],
        hooked: torch.optim.Optimizer | None,
        *,
        clip: bool = True,
        untouched: bool = False,
        decayed: bool = False,
    ) -> None:
        """Update the parameters from ``.grad``.

        Args:
            delivered: The averaged gradients. Their indices select the delivered coordinates.
            update: Entered when the pre-hooks have run, and left when the update is complete. Before, nothing has
                changed.
            hooked: The optimizer that was wrapped, whose hooks run, and those of all optimizers. Hooks of the parts of
                a list always run. None if hooks have run in this step.
            clip: Whether to clip ``.grad`` to ``max_grad_norm`` first.
            untouched: Whether nobody could change ``.grad`` since ``delivered`` was written to it. Otherwise, and if a
                pre-hook sees it, its values are those of ``.grad`` for the staleness-aware step.
            decayed: Whether ``.grad`` contains the coupled weight decay.
        """
        self.check()  # before any gradient or parameter changes
        max_norm = self._max_grad_norm if clip else None

        def aware(rule: AwareStep, readable: bool) -> None:
            rule.begin()
            for each in delivered:
                if _holds(rule.optimizer, each.layout.parameters[:1]):  # all of them are of one optimizer
                    each.ages.begin()
                    rule.step(each if untouched and readable else each.read_again())

        self._apply(aware, update if max_norm is None else self._clipping(update, max_norm), hooked, decayed=decayed)

    @contextmanager
    def _clipping(self, update: AbstractContextManager[None], max_norm: float) -> Iterator[None]:
        """Enter ``update``, and clip gradients to ``max_norm``."""
        with update:
            gradients = [part.gradients() for part in self.parts]
            own = [each for _, ignored in gradients for each in ignored]
            limit_norm(own, norm_of(own), max_norm)
            if self.alone:  # otherwise the exchange has clipped
                self.grad_norm = clip_norm([each for common, _ in gradients for each in common], max_norm)
            yield

    def initialize_state(self) -> None:
        """Create the optimizer's state by its own step, which changes no parameter: learning rates are zero.

        So are gradients, and without weight decay, moments are, too.
        """
        self._apply(lambda *_: None, nullcontext(), None, decayed=True, takes_own=True)

    def _apply(
        self,
        aware: Callable[[AwareStep, bool], None],
        update: AbstractContextManager[None],
        hooked: torch.optim.Optimizer | None,
        *,
        decayed: bool = False,
        takes_own: bool = False,
    ) -> None:
        """Take each optimizer's own step, or ``aware``, in the context ``update``, between the hooks of the user.

        The second argument of ``aware`` is False if a pre-hook may have changed the gradients. With ``takes_own``, it
        is not called.
        """
        # Steps below torch's hooks are called, and hooks run here: before, gradients are averaged.
        hooks = [(part.optimizer, *part.hooks()) for part in self.parts]
        if hooked is not None:
            is_list = all(each is not hooked for each, _, _ in hooks)
            of_all, own = global_step_hooks(), step_hooks(hooked) if is_list else ([], [])
            hooks = [(hooked, of_all[0] + own[0], []), *hooks, (hooked, [], own[1] + of_all[1])]
        for optimizer, before, _ in hooks:
            mark_stepped(optimizer)
            _run(before, optimizer)
        readable = not any(before for _, before, _ in hooks)
        with update:
            for part in self.parts:
                part.take(lambda rule: aware(rule, readable), decayed=decayed, own=takes_own)
        for optimizer, _, after in hooks:
            _run(after, optimizer)


def _holds(optimizer: torch.optim.Optimizer, parameters: Sequence[torch.Tensor]) -> bool:
    """Return True if one of ``parameters`` is one of ``optimizer``."""
    groups = optimizer.param_groups
    return any(each is other for other in parameters for group in groups for each in group["params"])


def saved_state(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the state of ``optimizer`` as it is without ``wrap``."""
    return join([original_class(part).state_dict(part) for part in parts_of(optimizer)])


@torch.no_grad()
def clip_norm(gradients: Sequence[torch.Tensor], max_norm: float) -> float:
    """Clip all ``gradients`` together, of all shards of a DTensor. Return their norm before that."""
    norm = norm_of(gradients)
    limit_norm(gradients, norm, max_norm)
    return float(norm)


def norm_of(gradients: Iterable[torch.Tensor]) -> torch.Tensor:
    """Return the norm of all ``gradients`` together, ``[]``, of all shards of a DTensor."""
    by_mesh: dict[Any, list[torch.Tensor]] = {}
    for gradient in gradients:
        by_mesh.setdefault(getattr(gradient, "device_mesh", None), []).append(gradient)
    # Tensor parallelism leaves some parameters without a mesh, and torch has no operation on both.
    norms = [whole(torch.nn.utils.get_total_norm(own)) for own in by_mesh.values()]
    if len(norms) == 1:
        return norms[0]
    return torch.linalg.vector_norm(torch.stack(norms)) if norms else torch.zeros(())


def limit_norm(gradients: Sequence[torch.Tensor], norm: torch.Tensor, max_norm: float) -> None:
    """Multiply ``gradients`` as ``torch.nn.utils.clip_grad_norm_`` does, where ``norm`` is the one before that."""
    if gradients:
        factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        torch._foreach_mul_([local(gradient) for gradient in gradients], factor)


def gradients_of(optimizers: Iterable[torch.optim.Optimizer]) -> list[torch.Tensor]:
    """Return every ``.grad`` of the parameters of ``optimizers`` that is not None."""
    groups = (group for optimizer in optimizers for group in optimizer.param_groups)
    return [parameter.grad for group in groups for parameter in group["params"] if parameter.grad is not None]


def _remove(handles: Iterable[RemovableHandle]) -> None:
    for handle in handles:
        handle.remove()


def whole(norm: Any) -> torch.Tensor:
    """Return the ``norm`` of all shards of a DTensor, which all their ranks call together."""
    found: torch.Tensor = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
    return found


def _run(hooks: Iterable[Callable[..., Any]], optimizer: torch.optim.Optimizer) -> None:
    for hook in hooks:
        hook(optimizer, (optimizer,), {})
