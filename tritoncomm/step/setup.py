"""What a wrapped optimizer is made of: parameters, method, options and process group. They are compared here."""

from __future__ import annotations

import logging
import os
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
from tritoncomm.step.model.module import check_model, ignored_ids, keep_gradients_local, names_of, rest_of
from tritoncomm.step.model.parameters import KnownParameters
from tritoncomm.step.optimizer_list import parts_of
from tritoncomm.step.recipes import log_choice, with_warmup_and_nodes
from tritoncomm.step.rules.step import OptimizerSteps
from tritoncomm.step.saved import state as exchange_state
from tritoncomm.step.settings import WrapOptions, check_optimizer, is_alone
from tritoncomm.step.torch_internals import original_class
from tritoncomm.step.vectors import dense_ids, exchange_of

logger = logging.getLogger("tritoncomm")


class Setup:
    """What ``optimizer`` exchanges, how, and with whom. All ranks make it alike, and it compares them.

    Args:
        optimizer: The optimizer that is wrapped, or the list of them.
        recipe: The recipe of the exchange.
        process_group: The process group. None is the default group.
        options: The options of ``wrap``.
        broadcast_parameters: Whether to copy parameters and buffers from the first rank first. Default: False.
        model: The module that is trained, if it is known. Default: None.

    Attributes:
        optimizer: See above.
        options: See above.
        recipe: See above.
        local: The optimizers that step by themselves, if updates are exchanged. Else None.
        exchanged: The optimizer whose gradients are exchanged: that of the anchor, if updates are exchanged.
        exchange: The exchange of these gradients.
        steps: The steps by what is delivered.
        parameters: The parameters that are exchanged.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        recipe: Recipe,
        process_group: dist.ProcessGroup | None,
        options: WrapOptions,
        *,
        broadcast_parameters: bool = False,
        model: nn.Module | None = None,
    ) -> None:
        self.optimizer, self.recipe, self.options = optimizer, recipe, options
        self.names, ignored = names_of(model), ignored_ids(model)
        alone = is_alone(process_group)
        self.local: LocalSteps | None = None
        self.exchanged = optimizer
        if options.updates is not None:
            self.local = LocalSteps(optimizer, options, self.names, ignored, alone=alone)
            self.local.check()
            self.exchanged = self.local.outer
        self.steps = OptimizerSteps(
            parts_of(self.exchanged), options.late, options.max_grad_norm, alone=alone, ignored=ignored
        )
        self.steps.check()
        anchor_names = {} if self.local is None else self.local.names
        self.parameters = KnownParameters(self.exchanged, self.names | anchor_names, ignored)
        self._others, buffers = rest_of(model, optimizer)
        self.exchange = self._build(process_group, None)
        exchange_state.warn_about_lost_residual(optimizer.param_groups, self.everybody)
        every = (each for each, _ in agree.named_parameters(optimizer) if id(each) not in ignored)
        held = [(each, f"parameter {number} of the optimizer") for number, each in enumerate(every)]
        shaped = [*buffers, *(held if broadcast_parameters else ())]
        self._compare(self.exchange, others=self._others, shaped=shaped, broadcast=broadcast_parameters)
        if broadcast_parameters:
            agree.broadcast([*held, *self._others, *buffers], process_group, self.device)
            if self.local is not None:
                self.local.accept()
        self._log()

    def _log(self) -> None:
        """Log what is exchanged."""
        if is_distributed():
            first, parts = self.exchange.vectors[0], [vector.part for vector in self.exchange.vectors]
            log_choice(self.recipe, first.rank, first.world_size, parts)
        elif int(os.environ.get("WORLD_SIZE", "1")) > 1:
            logger.warning("WORLD_SIZE is set, but torch.distributed is not initialized: nothing will be exchanged")

    @property
    def process_group(self) -> dist.ProcessGroup | None:
        """The process group of the exchange. None is the default process group."""
        return self.exchange.options.group

    @property
    def everybody(self) -> dist.ProcessGroup | None:
        """The ranks that must change alike: those of the exchange, or those of all shards."""
        all_shards = self.exchange.all_shards
        return self.process_group if all_shards is None else all_shards.group

    @property
    def device(self) -> torch.device | None:
        """The device of the parameters."""
        return agree.device_of(self.optimizer)

    @property
    def has_shards(self) -> bool:
        """True if shards of DTensors are exchanged, within several groups of ranks."""
        return self.exchange.all_shards is not None

    @property
    def is_synchronized(self) -> bool:
        """True after an exchange, until its mean is applied or thrown away."""
        return self.exchange.state is State.READY

    @property
    def new(self) -> list[torch.Tensor]:
        """Parameters that somebody has added to the optimizer since."""
        return self.parameters.new if self.local is None else self.local.known.new

    @property
    def vector(self) -> VectorExchange:
        """The flat vector of an optimizer that has one."""
        (vector,) = self.exchange.vectors
        return vector

    @property
    def residuals(self) -> dict[torch.Tensor, torch.Tensor]:
        """Flat views of this rank's residuals, by parameter."""
        found: dict[torch.Tensor, torch.Tensor] = {}
        for vector in self.exchange.vectors:
            found |= vector.residuals_by_parameter()
        return found

    @property
    def decays_in_vector(self) -> bool:
        """True if coupled weight decay is added to what is exchanged, see :mod:`tritoncomm.step.exchange.decay`.

        A single worker and a dense exchange leave it to the optimizer.
        """
        return self.exchange.vectors[-1].delays

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add the same parameter group on all ranks. Residuals are kept. If this raises, nothing has changed."""
        self.check_no_pending_step("add_param_group()")
        before, exchange, local_steps = len(self.optimizer.param_groups), self.exchange, self.local
        anchors = 0 if local_steps is None else len(local_steps.anchors)
        try:
            with agree.propagate_errors(self.process_group, self.device):
                original_class(self.optimizer).add_param_group(self.optimizer, param_group)
                if local_steps is not None:
                    local_steps.add_new_parameters()
                self.recipe.check_optimizer(self.optimizer)
                self.steps.check()
                exchange = self._build(self.process_group, self.exchange)
            self._compare(exchange, steps_alone=local_steps is not None)
        except BaseException:
            del self.optimizer.param_groups[before:]
            if local_steps is not None:
                local_steps.remove_new_parameters(anchors)
            self.parameters.note()
            raise
        self.exchange = exchange_state.continued(exchange, self.exchange)

    def continue_in(
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
        exchange, step = self.exchange, self.steps
        with agree.propagate_errors(process_group, self.device):
            inner = self.recipe.recipe if isinstance(self.recipe, Hierarchical) else self.recipe
            recipe = with_warmup_and_nodes(inner, 0, node_group, process_group, self.options.small)
            step.alone = is_alone(process_group)
            check_optimizer(self.optimizer, alone=step.alone)
            step.check()
            check_model(module, process_group)
            keep_gradients_local(module)
        trained, options = self.parameters.trained, self.options
        agree.compare_setup(
            self.optimizer, trained, recipe, options, exchange.steps, process_group, self.device,
            state=exchange.replica.state(), caught_up=caught_up, steps_alone=self.local is not None,
        )  # fmt: skip
        if self.local is not None:
            self.local.forget_loading()
        exchange.restart()
        exchange_state.moved(exchange, recipe, process_group)
        self.recipe = recipe

    def note_new(self) -> None:
        """Exchange the gradients of parameters, too, that require them only now. A single worker does."""
        self.exchange = exchange_state.continued(self._build(self.process_group, self.exchange), self.exchange)

    def _build(self, group: dist.ProcessGroup | None, before: GradientExchange | None) -> GradientExchange:
        """Return an exchange of the gradients of all parameters that require them, in place of ``before``."""
        self.parameters.note()
        trained = self.parameters.trained
        dense = dense_ids(self.optimizer)
        if self.local is not None:
            dense |= {anchor for anchor, owner in self.local.owners.items() if id(owner) in dense}
        exchange = exchange_of(
            self.exchanged,
            self.recipe,
            trained,
            self.options,
            group,
            dense=dense,
            before=before,
        )
        if self.local is not None:
            exchange.owners = self.local.owners
        held = agree.parameter_ids(self.optimizer)  # a group may have been added, of parameters that were not held
        others = [(parameter, name) for parameter, name in self._others if id(parameter) not in held]
        if self.options.local_steps > 1 and self.local is not None:
            let_differ(self.local.owners.values())
            others = []  # such as averages of parameters, which differ with them
        common_names = [name for _, name in self.parameters.common]
        exchange.replica = Replica(self.exchanged, common_names, others, self.parameters.ignored)
        return exchange

    def _compare(self, exchange: GradientExchange, **fields: Any) -> None:
        trained, group, all_shards = self.parameters.trained, exchange.options.group, exchange.all_shards
        try:
            agree.compare_setup(
                self.optimizer, trained, self.recipe, self.options, exchange.steps, group, self.device,
                state=exchange.replica.state(), **fields,
            )  # fmt: skip
        except ConfigMismatchError as error:
            if all_shards is not None:
                agree.propagate_error(str(error), all_shards.group, self.device)
            raise
        if all_shards is not None:  # replicas of other shards may differ
            agree.compare({}, all_shards.group, self.device)
        exchange.agree_on_exchange_id()

    def check_no_pending_step(self, action: str) -> None:
        """Raise unless the last step is complete, also if all ranks have skipped it."""
        self.check_saveable(action)
        if self.is_synchronized:
            raise RuntimeError(f"a step was skipped, or a hook failed after it: call zero_grad() before {action}")

    def check_saveable(self, action: str) -> None:
        """Raise unless residuals and parameters belong to the same step."""
        self.exchange.check_complete()
        if self.local is not None:
            self.local.check_not_averaged(action)
        if self.is_synchronized and self.exchange.delivered is not None:
            raise RuntimeError(f"the exchanged gradients have not been used yet: call step() before {action}")
