"""Takes the wrapped optimizer's step over what an exchange delivered."""

from __future__ import annotations

import inspect
import logging
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from tritoncomm.algorithms import Recipe
from tritoncomm.errors import ConfigurationError
from tritoncomm.primitives.sparse_vector import SparseVector
from tritoncomm.step.adam import StalenessAwareAdam, is_adam
from tritoncomm.step.bucket import BucketLayout
from tritoncomm.step.options import WrapOptions, is_dense

logger = logging.getLogger("tritoncomm")

# Their update is linear in the gradient: late delivery only delays it.
_LINEAR = (torch.optim.SGD,)


# Not torch.compiler.disable, which imports the compiler for everybody.
without_compile = torch._disable_dynamo  # type: ignore[attr-defined]  # noqa: SLF001


@dataclass
class StepState:
    """Where a wrapped optimizer is between an exchange and its step.

    In an object of its own, because frameworks put proxies in front of optimizers that read through to them, but keep
    what is assigned.
    """

    exchanged: bool = False
    mean: SparseVector | None = None
    written: list[torch.Tensor | None] = field(default_factory=list)
    found_in_unscale: torch.Tensor | None = None  # what a scaler of ours found, of all ranks
    skipped: int = 0
    checked: bool = False  # that nobody else reduces these gradients
    told: bool = False  # that scales are no longer equal

    def reset(self) -> None:
        """The exchange has been used, or is not to be."""
        self.exchanged, self.mean, self.written, self.found_in_unscale = False, None, [], None


def takes_aware_step(optimizer: torch.optim.Optimizer, options: WrapOptions) -> bool:
    """True when late deliveries to ``optimizer`` are taken for late."""
    return options.staleness == "aware" and is_adam(optimizer)


def selects_by_update(optimizer: torch.optim.Optimizer, recipe: Recipe, options: WrapOptions) -> bool:
    """What ``select_by`` means for this optimizer and recipe."""
    if options.select_by == "gradient" or is_dense(recipe) or recipe.density == 1:
        return False
    if options.select_by == "update" and not recipe.compares_entries():
        raise ConfigurationError(f"select_by='update': {recipe!r} does not compare entries, leave select_by out")
    return recipe.compares_entries() and (options.select_by == "update" or takes_aware_step(optimizer, options))


class OptimizerStep:
    """The step of ``optimizer``: its own, or the staleness-aware one of Adam and AdamW.

    ``late`` says whether anything is ever delivered late.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, options: WrapOptions, *, late: bool) -> None:
        self.optimizer = optimizer
        self._max_grad_norm = options.max_grad_norm
        self._adam: StalenessAwareAdam | None = None
        self.grad_norm = 0.0
        if not late or options.staleness == "off":
            return
        if takes_aware_step(optimizer, options):
            self._adam = StalenessAwareAdam(
                optimizer, options.max_catch_up, max_relative_update=options.max_relative_update
            )
        elif not isinstance(optimizer, _LINEAR):
            logger.warning(
                "%s is not staleness-aware: it takes late, bursty gradients at face value; expect a gap to dense "
                "that grows as the density falls",
                type(optimizer).__name__,
            )

    def check(self) -> None:
        """Raise :class:`~tritoncomm.ConfigurationError` for options that this step cannot honour."""
        if self._adam is not None:
            self._adam.check_options()

    def step(self, mean: SparseVector, layout: BucketLayout, *, clip: bool = True) -> None:
        """Step by ``.grad``, which holds ``mean`` (to be clipped to ``max_grad_norm``, or changed by the user)."""
        self.check()  # before anything is clipped or decayed
        if clip and self._max_grad_norm is not None:
            self.grad_norm = float(torch.nn.utils.clip_grad_norm_(layout.parameters, self._max_grad_norm))
        everything = [None] * len(layout.parameters)
        self._take(layout, everything if mean.is_full else layout.split(mean.indices))

    def is_synthetic(self) -> bool:
        """True for the step by which ``torch.distributed.checkpoint`` makes an optimizer create its state.

        Maybe not all ranks take part in it, so that nothing may be exchanged. Learning rates are zero then, but so they
        are in the first step of a warm-up: it is the caller that tells.
        """
        groups = self.optimizer.param_groups
        module = sys.modules.get("torch.distributed.checkpoint.state_dict")
        if module is None or any("lr" not in group or float(group["lr"]) != 0 for group in groups):
            return False
        maker = module._init_optim_state.__code__  # noqa: SLF001 - there is no other way to know
        frame = inspect.currentframe()
        while frame is not None and frame.f_code is not maker:
            frame = frame.f_back
        return frame is not None

    def initialize_state(self, layout: BucketLayout) -> None:
        """A step that moves nothing (learning rate and gradients are zero) but makes the optimizer's state."""
        self._take(layout, [None] * len(layout.parameters))

    @without_compile
    def _take(self, layout: BucketLayout, delivered: Iterable[torch.Tensor | None]) -> None:
        if self._adam is None:
            self.optimizer.step()
            return
        # The wrapped optimizer's own step is not called; schedulers built on it look for this mark,
        # and whoever registered hooks on it expects them to run.
        self.optimizer._opt_called = True  # type: ignore[attr-defined]  # noqa: SLF001
        _run(self.optimizer._optimizer_step_pre_hooks.values(), self.optimizer)  # noqa: SLF001
        self._adam.step(layout.parameters, list(delivered))
        _run(self.optimizer._optimizer_step_post_hooks.values(), self.optimizer)  # noqa: SLF001

    def restore(self, state_dict: dict[str, Any]) -> None:
        """After the optimizer loaded ``state_dict`` and cast it to the parameter's dtype: step counts stay as saved."""
        for saved_group, group in zip(state_dict["param_groups"], self.optimizer.param_groups, strict=True):
            for key, parameter in zip(saved_group["params"], group["params"], strict=True):
                saved = state_dict["state"].get(key, {})
                if "last_delivered" in saved:
                    state = self.optimizer.state[parameter]
                    state["last_delivered"] = saved["last_delivered"].to(parameter.device, torch.int32, copy=True)
                    state["last_aware"] = saved["last_aware"].clone()
                    if "param_rms" in saved:
                        state["param_rms"] = saved["param_rms"].to(parameter.device, torch.float32, copy=True)


def _run(hooks: Iterable[Callable[..., Any]], optimizer: torch.optim.Optimizer) -> None:
    for hook in list(hooks):
        hook(optimizer, (), {})
