"""The set-up of a wrapped optimizer: what it exchanges, how, and with whom. It is compared, changed and copied here."""

from __future__ import annotations

import copy
import logging
import os
from collections.abc import Collection, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tritoncomm.algorithms import Hierarchical, Recipe
from tritoncomm.errors import ConfigMismatchError
from tritoncomm.scheduler.process_group import is_distributed
from tritoncomm.step import agree
from tritoncomm.step.agree.replica import Replica, let_differ
from tritoncomm.step.exchange.machine import GradientExchange, State
from tritoncomm.step.exchange.vector import VectorExchange
from tritoncomm.step.local.steps import LocalSteps
from tritoncomm.step.model.misuse import LocalClipping
from tritoncomm.step.model.module import Named, check_model, ignored_ids, keep_gradients_local, names_of, rest_of
from tritoncomm.step.model.parameters import KnownParameters
from tritoncomm.step.model.proxy import OptimizerProxy
from tritoncomm.step.optimizer_list import OptimizerList, parts_of
from tritoncomm.step.recipes import log_choice, never_delays, with_warmup_and_nodes
from tritoncomm.step.rules.choose import exchanges_updates
from tritoncomm.step.rules.step import OptimizerStep, OptimizerSteps, StepState
from tritoncomm.step.saved import state as exchange_state
from tritoncomm.step.settings import WrapOptions, check_optimizer, is_alone
from tritoncomm.step.vectors import Part, dense_ids, exchange_of
from tritoncomm_kernels.devices import is_asynchronous

logger = logging.getLogger("tritoncomm")


class OptimizerSetup(OptimizerProxy):
    """An optimizer with the exchange of its gradients: its parameters, method, options and process group.

    :class:`~tritoncomm.SparseOptimizer` adds the steps.
    """

    _others: Named = []  # noqa: RUF012 - of the model, which copies do not know

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        recipe: Recipe,
        process_group: dist.ProcessGroup | None,
        options: WrapOptions,
        *,
        updates_recipe: Recipe,
        broadcast_parameters: bool = False,
        model: nn.Module | None = None,
    ) -> None:
        self._bind(optimizer, recipe, updates_recipe, options, process_group, names_of(model), ignored_ids(model))
        self._others, buffers = rest_of(model, optimizer)
        self._exchange = self._build(process_group)
        exchange_state.warn_about_lost_residual(optimizer)
        self._compare(self._exchange, others=self._others, buffers=buffers, broadcast=broadcast_parameters)
        if broadcast_parameters and self._local is not None:
            self._local.accept()
        if is_distributed():
            for recipe_of_vectors in dict.fromkeys(vector.recipe for vector in self._exchange.vectors):
                vectors = [vector for vector in self._exchange.vectors if vector.recipe == recipe_of_vectors]
                first, parts = vectors[0], [vector.part for vector in vectors]
                log_choice(first.recipe, first.rank, first.world_size, parts, on_gpu=is_asynchronous(first.device))
        elif int(os.environ.get("WORLD_SIZE", "1")) > 1:
            logger.warning("WORLD_SIZE is set, but torch.distributed is not initialized: nothing will be exchanged")
        self._guard()

    def _bind(
        self,
        optimizer: torch.optim.Optimizer,
        recipe: Recipe,
        updates_recipe: Recipe,
        options: WrapOptions,
        process_group: dist.ProcessGroup | None,
        names: Mapping[int, str],
        ignored: Collection[int],
    ) -> None:
        self._stand_for(optimizer)
        self._options = options
        self._names = dict(names)
        local = [each for each in parts_of(optimizer) if exchanges_updates(each, options)]
        alone = is_alone(process_group)
        self._local = LocalSteps(local, options, names, ignored, alone=alone) if local else None
        if self._local is not None:
            self._local.check()
        self._parts = [Part(each, recipe) for each in parts_of(optimizer) if not exchanges_updates(each, options)]
        # What exchanges gradients: the optimizer of an anchor takes the place of those that step locally.
        self._exchanged = optimizer
        if self._local is not None:
            self._parts.insert(0, Part(self._local.outer, updates_recipe, is_anchor=True))
            self._exchanged = OptimizerList([part.optimizer for part in self._parts])
        self.recipe = self._parts[-1].recipe
        steps = [
            OptimizerStep(
                part.optimizer,
                options,
                delayed=not never_delays(part.recipe),
                alone=alone,
                is_anchor=part.is_anchor,
                ignored=ignored,
            )
            for part in self._parts
        ]
        self._optimizer_step = OptimizerSteps(steps, options)
        self._optimizer_step.check()
        self._step_state = StepState()
        self._local_clipping = LocalClipping()
        anchor_names = {} if self._local is None else self._local.names
        self._parameters = KnownParameters(self._exchanged, self._names | anchor_names, ignored)

    def _guard(self) -> None:
        self._optimizer_step.guard()
        if self._local is not None:
            self._local.guard()

    @property
    def process_group(self) -> dist.ProcessGroup | None:
        """The process group of the exchange. None is the default process group."""
        return self._exchange.options.group

    @property
    def _everybody(self) -> dist.ProcessGroup | None:
        """The ranks that must change alike: those of the exchange, or those of all shards."""
        all_shards = self._exchange.all_shards
        return self.process_group if all_shards is None else all_shards.group

    @property
    def has_shards(self) -> bool:
        """True if this optimizer exchanges shards of DTensors, within several groups of ranks."""
        return self._exchange.all_shards is not None

    @property
    def is_synchronized(self) -> bool:
        """True after :meth:`synchronize`, until the next :meth:`step` or :meth:`zero_grad`."""
        return self._exchange.state is State.READY

    @property
    def steps_taken(self) -> int:
        """Number of steps that count for a schedule: all local ones, otherwise those that were not skipped."""
        return self._exchange.steps if self._local is None else self._local.total

    @property
    def exchanges_only_updates(self) -> bool:
        """True if no gradient is exchanged. An overflow or a NaN in one is then a matter of its rank alone."""
        return all(part.is_anchor for part in self._parts)

    @property
    def is_unscaled(self) -> bool:
        """True if a ``tritoncomm.amp.GradScaler`` has unscaled the gradients of this step."""
        return self._step_state.found_in_unscale is not None

    @property
    def _vector(self) -> VectorExchange:
        """The flat vector of an optimizer that has one."""
        (vector,) = self._exchange.vectors
        return vector

    def __getstate__(self) -> dict[str, Any]:
        self._check_saveable("copying")
        every = [id(parameter) for parameter, _ in agree.named_parameters(self.optimizer)]
        return {
            "optimizer": self.optimizer,
            "recipe": self.recipe,
            "updates recipe": self._parts[0].recipe,
            "options": self._options,
            "names": [self._names.get(each, "") for each in every],
            "ignored": [each in self._parameters.ignored for each in every],
            "skipped": self._exchange.skipped,
            "exchange": exchange_state.saved(self._exchange, self._local),
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._restore(state, None)

    def __deepcopy__(self, memo: dict[int, Any]) -> OptimizerSetup:
        clone = self.__class__.__new__(self.__class__)
        memo[id(self)] = clone
        clone._restore(copy.deepcopy(self.__getstate__(), memo), self.process_group)  # noqa: SLF001 - same class
        return clone

    def _restore(self, state: dict[str, Any], group: dist.ProcessGroup | None) -> None:
        every = [id(parameter) for parameter, _ in agree.named_parameters(state["optimizer"])]
        names = dict(zip(every, state["names"], strict=True))
        ignored = {each for each, is_own in zip(every, state["ignored"], strict=True) if is_own}
        recipes = state["recipe"], state["updates recipe"]
        self._bind(state["optimizer"], *recipes, state["options"], group, names, ignored)
        self._exchange = self._build(group)
        saved = state["exchange"]
        exchange_state.resume(self._exchange, exchange_state.loaded(self._exchange, saved), saved, self._local)
        self._exchange.skipped = state["skipped"]
        self._guard()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add the same parameter group on all ranks. Residuals are kept. If this raises, nothing has changed."""
        self._check_no_pending_step("add_param_group()")
        before, exchange, local_steps = len(self.param_groups), self._exchange, self._local
        anchors = 0 if local_steps is None else len(local_steps.anchors)
        try:
            with agree.propagate_errors(self.process_group, self._device):
                self.optimizer.add_param_group(param_group)
                if local_steps is not None:
                    local_steps.add_new_parameters()
                self.recipe.check_optimizer(self.optimizer)
                self._optimizer_step.check()
                exchange = self._build(self.process_group)
            self._compare(exchange, stepped=self._stepped)
        except BaseException:
            del self.param_groups[before:]
            if local_steps is not None:
                local_steps.remove_new_parameters(anchors)
            self._parameters.note()
            raise
        self._exchange = exchange_state.continued(exchange, self._exchange)

    def _replace_recipes(self, changed: Mapping[Recipe, Recipe]) -> None:
        self._parts = [part._replace(recipe=changed.get(part.recipe, part.recipe)) for part in self._parts]
        self.recipe = self._parts[-1].recipe

    def _continue_in(
        self,
        process_group: dist.ProcessGroup | None,
        node_group: dist.ProcessGroup | None,
        module: nn.Module | None,
        *,
        caught_up: bool,
    ) -> None:
        """Exchange in ``process_group`` from now on. Residuals are scaled. All its ranks call this.

        ``caught_up`` is True if some ranks have just applied a step that the others had applied before.
        """
        exchange, step = self._exchange, self._optimizer_step
        with agree.propagate_errors(process_group, self._device):
            recipes = {
                part.recipe: with_warmup_and_nodes(
                    part.recipe.recipe if isinstance(part.recipe, Hierarchical) else part.recipe,
                    0,
                    node_group,
                    process_group,
                    self._options.small,
                )
                for part in self._parts
            }
            step.alone = is_alone(process_group)
            check_optimizer(self.optimizer, alone=step.alone)
            step.check()
            check_model(module, process_group)
            keep_gradients_local(module)
        trained, options = self._parameters.trained, self._options
        agree.compare_setup(
            self.optimizer, trained, recipes[self.recipe], options, exchange.steps, process_group, self._device,
            state=exchange.replica.state(), caught_up=caught_up, stepped=self._stepped,
            ignored=self._parameters.ignored,
        )  # fmt: skip
        if self._local is not None:
            self._local.forget_loading()
        exchange.restart()
        of_vectors = [recipes[vector.recipe] for vector in exchange.vectors]
        exchange_state.moved(exchange, of_vectors, process_group)
        self._replace_recipes(recipes)

    def _build(self, group: dist.ProcessGroup | None) -> GradientExchange:
        """Return an exchange of the gradients of all parameters that require them."""
        self._parameters.note()
        trained, before = self._parameters.trained, vars(self).get("_exchange")
        dense = dense_ids(self.optimizer)
        if self._local is not None:
            dense |= {anchor for anchor, owner in self._local.owners.items() if id(owner) in dense}
        exchange = exchange_of(self._exchanged, self._parts, trained, self._options, group, dense=dense, before=before)
        if self._local is not None:
            exchange.owners = self._local.owners
        held = agree.parameter_ids(self.optimizer)  # a group may have been added, of parameters that were not held
        others = [(parameter, name) for parameter, name in self._others if id(parameter) not in held]
        if self._options.local_steps > 1 and self._local is not None:
            let_differ(self._local.owners.values())
            others = []  # such as averages of parameters, which differ with them
        common_names = [name for _, name in self._parameters.common]
        exchange.replica = Replica(self._exchanged, common_names, others, self._parameters.ignored)
        return exchange

    def _compare(self, exchange: GradientExchange, **fields: Any) -> None:
        trained, group, all_shards = self._parameters.trained, exchange.options.group, exchange.all_shards
        try:
            agree.compare_setup(
                self.optimizer, trained, self.recipe, self._options, exchange.steps, group, self._device,
                state=exchange.replica.state(), ignored=self._parameters.ignored, **fields,
            )  # fmt: skip
        except ConfigMismatchError as error:
            if all_shards is not None:
                agree.propagate_error(str(error), all_shards.group, self._device)
            raise
        if all_shards is not None:  # replicas of other shards may differ
            agree.compare({}, all_shards.group, self._device)
        exchange.agree_on_exchange_id()

    @property
    def _stepped(self) -> set[int]:
        """Ids of the parameter groups by which this rank takes local steps."""
        return set() if self._local is None else self._local.stepped

    @property
    def _device(self) -> torch.device | None:
        return agree.device_of(self.optimizer)

    def release(self) -> None:
        """Allow ``step()`` of the original optimizer again. Residuals stay in this one, and are not applied.

        Call :meth:`merge` before where updates are exchanged: parameters differ between ranks after local steps. So
        does the state of the optimizer. Load that of one rank on all before you step by averaged gradients.

        A ``DistributedDataParallel`` module that was passed to :func:`wrap` still averages nothing: to train without
        tritoncomm, put ``model.module`` into a new one, and drop the old one.
        """
        self._optimizer_step.unguard()
        if self._local is not None:
            self._local.unguard()

    def _check_no_pending_step(self, action: str) -> None:
        self._check_saveable(action)
        if self.is_synchronized:
            raise RuntimeError(f"a step was skipped, or a hook failed after it: call zero_grad() before {action}")

    def _check_saveable(self, action: str) -> None:
        """Raise unless residuals and parameters belong to the same step."""
        self._exchange.check_complete()
        if self._local is not None:
            self._local.check_not_averaged(action)
        if self.is_synchronized and self._exchange.delivered is not None:
            raise RuntimeError(f"the exchanged gradients have not been used yet: call step() before {action}")
