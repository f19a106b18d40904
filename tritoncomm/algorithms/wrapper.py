"""Base classes for recipes and algorithms that wrap another one. By default they delegate to the wrapped one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from tritoncomm.algorithms.base import Algorithm, Recipe, check


@dataclass(frozen=True, kw_only=True)
class WrapperRecipe(Recipe):
    """A recipe that wraps ``recipe`` and has the same density."""

    recipe: Recipe
    density: float = field(init=False, default=1.0)

    def __post_init__(self) -> None:
        check(self, "recipe", isinstance(self.recipe, Recipe), "must be a recipe, for example OkTopk(density=0.01)")
        object.__setattr__(self, "density", self.recipe.density)

    @property
    def layers(self) -> tuple[Recipe, ...]:
        return self, *self.recipe.layers

    def with_method(self, change: Callable[[Recipe], Recipe]) -> Recipe:
        return replace(self, recipe=self.recipe.with_method(change))

    def check_world_size(self, world_size: int) -> None:
        self.recipe.check_world_size(world_size)

    def subgroups(self, world_size: int) -> list[tuple[int, ...]]:
        return self.recipe.subgroups(world_size)

    def compares_entries(self) -> bool:
        return self.recipe.compares_entries()

    def delivers_all(self) -> bool:
        return self.recipe.delivers_all()

    def always_dense(self) -> bool:
        return self.recipe.always_dense()

    def check_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        self.recipe.check_optimizer(optimizer)


class WrapperAlgorithm(Algorithm):
    """An algorithm that wraps ``inner``. By default it has no state of its own."""

    inner: Algorithm

    @property
    def state(self) -> Any:
        """The state of the inner algorithm."""
        return self.inner.state

    @state.setter
    def state(self, state: Any) -> None:
        self.inner.state = state

    @property
    def is_static(self) -> bool:
        return self.inner.is_static

    @property
    def has_shared_verdict(self) -> bool:
        return self.inner.has_shared_verdict

    def invalidate_thresholds(self) -> None:
        self.inner.invalidate_thresholds()

    def migrate(self, states: Sequence[Mapping[str, Any]], share: float, common: Mapping[str, Any]) -> None:
        self.inner.migrate(states, share, common)

    def common_state(self) -> dict[str, Any]:
        return self.inner.common_state()

    def state_dict(self) -> dict[str, Any]:
        """See :meth:`Algorithm.state_dict`. Returns that of the inner algorithm."""
        return self.inner.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.inner.load_state_dict(state)
