"""An optimizer that stands for another one: same parameters and state, its own hooks."""

from __future__ import annotations

import inspect
from typing import Any

import torch

from tritoncomm.step.model.refuse import SWAPS, forwarded

__all__ = ["OptimizerProxy"]

# Public attributes of this object, whatever the original optimizer has.
_OWN = ("optimizer", "recipe", "grad_scale", "found_inf")


class OptimizerProxy(torch.optim.Optimizer):
    """Shares ``param_groups``, ``state`` and ``defaults`` with the original optimizer, which is ``optimizer``.

    Public attributes that this class does not have are those of the original optimizer, also if they are assigned.
    Hooks are not shared.
    """

    # A GradScaler then always calls step(). It sets the other two: its scale, and its overflow flag of this rank.
    _step_supports_amp_scaling = True
    grad_scale: torch.Tensor | None
    found_inf: torch.Tensor | None
    optimizer: torch.optim.Optimizer

    def _stand_for(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        # Not super().__init__(): parameters and state stay those of the original optimizer. Like unpickling, this
        # initializes only hooks and profiling.
        super().__setstate__({})

    def __setattr__(self, name: str, value: Any) -> None:
        """Assign a public attribute of the original optimizer there, so that its step reads it."""
        optimizer = vars(self).get("optimizer")
        own = name.startswith("_") or name in _OWN or name in vars(self) or hasattr(type(self), name)
        if own or optimizer is None or not hasattr(optimizer, name):
            super().__setattr__(name, value)
        else:
            setattr(optimizer, name, value)

    def __getattr__(self, name: str) -> Any:
        """Return a public attribute of the original optimizer that this class does not have.

        A method raises if it changes parameters by gradients, which are exchanged in ``step()`` alone.
        """
        if name.startswith("_") or name in _OWN:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        value = getattr(self.optimizer, name)
        is_method = inspect.ismethod(value) and isinstance(value.__self__, torch.optim.Optimizer)
        return forwarded(value) if is_method and name not in SWAPS else value

    # Properties, because load_state_dict() of the original optimizer replaces these objects.

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The parameter groups of the original optimizer."""
        return self.optimizer.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self.optimizer.param_groups = groups

    @property
    def state(self) -> Any:
        """The state of the original optimizer."""
        return self.optimizer.state

    @state.setter
    def state(self, state: Any) -> None:
        self.optimizer.state = state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """The default options of the original optimizer."""
        return self.optimizer.defaults

    @property
    def _scaler(self) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """What a ``GradScaler`` has set: its scale, if it has not unscaled the gradients, and its overflow flag."""
        return getattr(self, "grad_scale", None), getattr(self, "found_inf", None)

    def _forget_scaler(self) -> None:
        """Remove what a ``GradScaler`` has set. It does so itself only if ``step()`` succeeds."""
        for name in ("grad_scale", "found_inf"):
            vars(self).pop(name, None)

    def _ignore_scaler(self, *names: str) -> None:
        """Take no notice of what a ``GradScaler`` has set. It removes the attributes itself after ``step()``."""
        for name in names or ("grad_scale", "found_inf"):
            if name in vars(self):
                setattr(self, name, None)

    def _run_hooks_before_saving(self) -> None:
        for hook in list(self._optimizer_state_dict_pre_hooks.values()):
            hook(self)

    def _after_saving(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return ``state`` as the hooks after ``state_dict()`` leave it."""
        for hook in list(self._optimizer_state_dict_post_hooks.values()):
            changed = hook(self, state)
            state = state if changed is None else changed
        return state

    def _before_loading(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return ``state`` as the hooks before ``load_state_dict()`` leave it."""
        for hook in list(self._optimizer_load_state_dict_pre_hooks.values()):
            changed = hook(self, state)
            state = state if changed is None else changed
        return state

    def _run_hooks_after_loading(self) -> None:
        for hook in list(self._optimizer_load_state_dict_post_hooks.values()):
            hook(self)
