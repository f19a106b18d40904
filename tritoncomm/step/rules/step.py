"""What an optimizer does with a delivery: its own step, or the staleness-aware rule of its kind."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from tritoncomm.errors import ConfigurationError
from tritoncomm.step.exchange.layout import Delivered
from tritoncomm.step.model.ignored import hidden, ignored_of, present
from tritoncomm.step.model.module import check_not_stepped
from tritoncomm.step.model.refuse import optimizers_inside, refuse, stepping
from tritoncomm.step.optimizer_list import parts_of
from tritoncomm.step.rules.choose import find_rule
from tritoncomm.step.rules.late import AwareStep
from tritoncomm.step.settings import Late
from tritoncomm.step.tensors.names import named_parameters
from tritoncomm.step.tensors.shards import local
from tritoncomm.step.torch_internals import (
    global_step_hooks,
    mark_stepped,
    original_class,
    step_below_hooks,
    step_hooks,
    steps_as,
)

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

_Hooks = list[Callable[..., Any]]


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


def _take_own_step(optimizer: torch.optim.Optimizer) -> None:
    """Take the own step of ``optimizer``. Say what to do if it fails without a closure, although it has a default."""
    try:
        step_below_hooks(optimizer)
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


@dataclass
class _Part:
    """One of several optimizers, those inside it, and its rule for late gradients once it was needed.

    ``kind`` is the class of its rule. None if it takes its own step.
    """

    optimizer: torch.optim.Optimizer
    inside: list[torch.optim.Optimizer]
    kind: type[AwareStep] | None
    rule: AwareStep | None = None


class OptimizerSteps:
    """The steps of all optimizers whose gradients are exchanged together: their own, or the staleness-aware ones.

    Args:
        optimizers: The optimizers.
        late: How far late gradients catch up. None if none is late, or all optimizers take their own step.
        max_grad_norm: Maximum norm of what they step by. None does not clip. Default: None.
        alone: Whether there is a single worker. It takes each optimizer's own step.
        ignored: Ids of parameters that are this rank's own, see :mod:`tritoncomm.step.model.ignored`. Default: none.

    Attributes:
        alone: See above. It may change between steps.
        grad_norm: Norm of the averaged gradient before it was clipped.
    """

    def __init__(
        self,
        optimizers: Sequence[torch.optim.Optimizer],
        late: Late | None = None,
        max_grad_norm: float | None = None,
        *,
        alone: bool = False,
        ignored: Collection[int] = (),
    ) -> None:
        self._parts = [_Part(each, optimizers_inside(each), find_rule(each) if late else None) for each in optimizers]
        self._late, self._max_grad_norm = late, max_grad_norm
        self._ignored = ignored
        self.alone = alone
        self.grad_norm = 0.0

    @property
    def ignored(self) -> list[torch.Tensor]:
        """The parameters that are this rank's own."""
        return ignored_of((part.optimizer for part in self._parts), self._ignored) if self._ignored else []

    def check(self, *, alone: bool | None = None) -> None:
        """Raise :class:`~tritoncomm.ConfigurationError` if an optimizer uses an option that is not supported.

        ``alone`` says whether there will be a single worker. Default: :attr:`alone`.
        """
        for part in () if (self.alone if alone is None else alone) else self._parts:
            if part.rule is not None:
                part.rule.check_options()
            elif part.kind is not None and self._late is not None:
                part.rule = part.kind(part.optimizer, self._late)  # checks the options

    def step(
        self,
        delivered: Sequence[Delivered] | None,
        update: AbstractContextManager[None],
        hooked: torch.optim.Optimizer | None,
        *,
        clip: bool = True,
        untouched: bool = False,
        decayed: bool = False,
    ) -> None:
        """Update the parameters from ``.grad``, between the hooks of the user.

        Args:
            delivered: The averaged gradients. Their indices select the delivered coordinates. None lets all optimizers
                take their own step.
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
        # Steps below torch's hooks are called, and hooks run here: before, gradients are averaged.
        hooks = [(part.optimizer, *_of_user(step_hooks(part.optimizer))) for part in self._parts]
        if hooked is not None:
            is_list = all(each is not hooked for each, _, _ in hooks)
            of_all, own = _of_user(global_step_hooks()), step_hooks(hooked) if is_list else ([], [])
            hooks = [(hooked, of_all[0] + own[0], []), *hooks, (hooked, [], own[1] + of_all[1])]
        for optimizer, before, _ in hooks:
            mark_stepped(optimizer)
            _run(before, optimizer)
        readable = not any(before for _, before, _ in hooks)
        with update:
            if clip and self._max_grad_norm is not None:
                self._clip(self._max_grad_norm)
            for part in self._parts:
                self._take(part, delivered, untouched=untouched and readable, decayed=decayed)
        for optimizer, _, after in hooks:
            _run(after, optimizer)

    @torch.no_grad()
    def _clip(self, max_norm: float) -> None:
        """Clip what a single worker steps by. Otherwise, the exchange has clipped all but this rank's own gradients."""
        every = (part.optimizer for part in self._parts)
        gradients = gradients_of(every) if self.alone else present(self.ignored)
        norm = norm_of(gradients)
        limit_norm(gradients, norm, max_norm)
        if self.alone:
            self.grad_norm = float(norm)

    def _take(self, part: _Part, delivered: Sequence[Delivered] | None, *, untouched: bool, decayed: bool) -> None:
        """Take the own step of ``part``, or its staleness-aware one, see :meth:`step`. No hook runs."""
        optimizer, rule = part.optimizer, None if self.alone or delivered is None else part.rule
        coupled = _coupled_groups(optimizer) if decayed else []
        # Neither is for the parameters that are this rank's own: the original step takes them before.
        apart = ignored_of([optimizer], self._ignored) if self._ignored and (rule is not None or coupled) else []
        with stepping((optimizer, *part.inside)):
            if present(apart):
                with hidden([each for each, _ in named_parameters(optimizer) if id(each) not in self._ignored]):
                    _take_own_step(optimizer)
            with hidden(apart), _without_decay(coupled):
                if rule is None:
                    _take_own_step(optimizer)
                    return
                rule.begin()
                for each in delivered or ():
                    if _holds(optimizer, each.layout.parameters[:1]):  # all of them are of one optimizer
                        each.ages.begin()
                        rule.step(each if untouched else each.read_again())

    def initialize_state(self) -> None:
        """Create the state of all optimizers by their own steps, which change no parameter: learning rates are zero.

        So are gradients, and without weight decay, moments are, too.
        """
        self.step(None, nullcontext(), None, clip=False, decayed=True)


def _of_user(hooks: tuple[_Hooks, _Hooks]) -> tuple[_Hooks, _Hooks]:
    """Return the ``hooks`` before and after a step without those of this library, which change no gradient."""
    before, after = hooks
    return [hook for hook in before if hook not in (refuse, check_not_stepped)], after


def _holds(optimizer: torch.optim.Optimizer, parameters: Sequence[torch.Tensor]) -> bool:
    """Return True if one of ``parameters`` is one of ``optimizer``."""
    groups = optimizer.param_groups
    return any(each is other for other in parameters for group in groups for each in group["params"])


def norm_of(gradients: Iterable[torch.Tensor]) -> torch.Tensor:
    """Return the norm of all ``gradients`` together, ``[]``, of all shards of a DTensor."""
    by_mesh: dict[Any, list[torch.Tensor]] = {}
    for gradient in gradients:
        by_mesh.setdefault(getattr(gradient, "device_mesh", None), []).append(gradient)
    # Tensor parallelism leaves some parameters without a mesh, and torch has no operation on both.
    totals: list[Any] = [torch.nn.utils.get_total_norm(own) for own in by_mesh.values()]
    norms: list[torch.Tensor] = [each.full_tensor() if hasattr(each, "full_tensor") else each for each in totals]
    if len(norms) == 1:
        return norms[0]
    return torch.linalg.vector_norm(torch.stack(norms)) if norms else torch.zeros((), device="cpu")


def limit_norm(gradients: Sequence[torch.Tensor], norm: torch.Tensor, max_norm: float) -> None:
    """Multiply ``gradients`` as ``torch.nn.utils.clip_grad_norm_`` does, where ``norm`` is the one before that."""
    if gradients:
        factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        torch._foreach_mul_([local(gradient) for gradient in gradients], factor)


def gradients_of(optimizers: Iterable[torch.optim.Optimizer]) -> list[torch.Tensor]:
    """Return every ``.grad`` of the parameters of ``optimizers`` that is not None."""
    groups = (group for optimizer in optimizers for group in optimizer.param_groups)
    return [parameter.grad for group in groups for parameter in group["params"] if parameter.grad is not None]


def _run(hooks: Iterable[Callable[..., Any]], optimizer: torch.optim.Optimizer) -> None:
    for hook in hooks:
        hook(optimizer, (optimizer,), {})
