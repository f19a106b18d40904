"""What a wrapped optimizer is made of: parameters, method, options and process group. They are compared here."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tritoncomm.algorithms import Hierarchical, Recipe
from tritoncomm.errors import ConfigMismatchError, ConfigurationError
from tritoncomm.scheduler.process_group import is_distributed
from tritoncomm.scheduler.ranks import global_ranks, own_rank, rank_text, speaks
from tritoncomm.step import agree, settings
from tritoncomm.step.agree.number import numbers
from tritoncomm.step.agree.private_group import scheduler_of_all_shards
from tritoncomm.step.agree.replica import Replica, let_differ
from tritoncomm.step.agree.setup import Named, broadcast, labelled, options_of, settings_of
from tritoncomm.step.exchange.layout import small_ids
from tritoncomm.step.exchange.machine import GradientExchange
from tritoncomm.step.exchange.pending import State
from tritoncomm.step.exchange.scope import Scope, connect
from tritoncomm.step.exchange.vector import ExchangeOptions, VectorExchange
from tritoncomm.step.local.steps import LocalSteps
from tritoncomm.step.model.misuse import UnreducedPasses
from tritoncomm.step.model.module import check_model, ignored_ids, keep_gradients_local, names_of, rest_of
from tritoncomm.step.model.optimizers import check_optimizer
from tritoncomm.step.model.parameters import KnownParameters
from tritoncomm.step.optimizer_list import parts_of
from tritoncomm.step.recipes import log_choice, nodes_of, with_nodes
from tritoncomm.step.rules.choose import find_rule, selects_by_update, takes_aware_step
from tritoncomm.step.rules.step import OptimizerSteps
from tritoncomm.step.saved import state as exchange_state
from tritoncomm.step.saved.optimizer_state import warn_about_lost_residual
from tritoncomm.step.settings import WrapOptions
from tritoncomm.step.tensors.names import device_of, label, named_parameters, parameter_ids
from tritoncomm.step.tensors.shards import by_split, has_bits, local, mesh_ranks, overlapping, pieces
from tritoncomm.step.torch_internals import original_class

logger = logging.getLogger("tritoncomm")

_REPEATED = (
    "A step that not all ranks could confirm was repeated on the others, and its result differs: load a checkpoint. "
    "Steps can be repeated if gradients are clipped by max_grad_norm, or changed in a pre-hook of the optimizer, not "
    "in the loop"
)


class Setup:
    """What ``optimizer`` exchanges, how, and with whom. All ranks make it alike, and it compares them.

    Args:
        optimizer: The optimizer that is wrapped, or the list of them.
        recipe: The recipe of the exchange.
        process_group: The process group. None is the default group.
        options: The options of ``wrap``.
        broadcast_parameters: Whether to copy parameters and buffers from the first rank first.
        model: The module that is trained. None if it is not known.

    Attributes:
        optimizer: See above.
        options: See above.
        local: The optimizers that step by themselves, if updates are exchanged. Else None.
        exchanged: The optimizer whose gradients are exchanged: that of the anchor, if updates are exchanged.
        exchange: The exchange of these gradients.
        steps: The steps by what is delivered.
        parameters: The parameters that are exchanged.
        unreduced: Notices gradients that FSDP has kept back.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        recipe: Recipe,
        process_group: dist.ProcessGroup | None,
        options: WrapOptions,
        *,
        broadcast_parameters: bool,
        model: nn.Module | None,
    ) -> None:
        self.optimizer, self.options = optimizer, options
        self.names, ignored = names_of(model), ignored_ids(model)
        alone = settings.is_alone(process_group)
        self.local: LocalSteps | None = None
        self.exchanged = optimizer
        if options.updates is not None:
            self.local = LocalSteps(optimizer, options, KnownParameters(optimizer, self.names, ignored))
            self.local.check()
            self.exchanged = self.local.outer
        self.steps = OptimizerSteps(
            parts_of(self.exchanged), options.late, options.max_grad_norm, alone=alone, ignored=ignored
        )
        self.steps.check()
        self.parameters = KnownParameters(self.exchanged, self.names, ignored)
        self.unreduced = UnreducedPasses(model)
        self._others, buffers = rest_of(model, optimizer)
        self.exchange = GradientExchange(self._build(recipe, process_group))
        everybody = process_group if self.scope.all_shards is None else None
        warn_about_lost_residual(optimizer.param_groups, self.everybody)
        every = (each for each, _ in named_parameters(optimizer) if id(each) not in ignored)
        held = [(each, f"parameter {number} of the optimizer") for number, each in enumerate(every)]
        shaped = [*buffers, *(held if broadcast_parameters else ())]
        self._compare(self.scope, recipe, everybody, others=self._others, shaped=shaped, broadcast=broadcast_parameters)
        self.scope.agree_on_exchange_id(everybody)
        if broadcast_parameters:
            broadcast([*held, *self._others, *buffers], process_group, everybody, self.device)
            if self.local is not None:
                self.local.accept()
        self._log()
        if model is None and speaks(self.everybody) and any(pieces(each) > 1 for each, _ in self.parameters.common):
            logger.warning(
                "parameters are sharded, and wrap() has no model: nobody then notices a backward pass that FSDP2 has "
                "not reduced before a step. With FSDP2, pass model="
            )

    def _log(self) -> None:
        """Log what is exchanged."""
        if is_distributed():
            first, *_ = vectors = self.scope.vectors
            parts = [(vector.feedback.algorithm, vector.dense_numel) for vector in vectors]
            log_choice(first.options.recipe, first.rank, first.world_size, parts)
        elif int(os.environ.get("WORLD_SIZE", "1")) > 1:
            logger.warning("WORLD_SIZE is set, but torch.distributed is not initialized: nothing will be exchanged")

    @property
    def everybody(self) -> dist.ProcessGroup | None:
        """The ranks that must change alike: those of the exchange, or those of all shards."""
        return self.scope.everybody

    @property
    def device(self) -> torch.device | None:
        """The device of the parameters."""
        return device_of(self.optimizer)

    @property
    def is_synchronized(self) -> bool:
        """True after an exchange, until its mean is applied or thrown away."""
        return self.exchange.state is State.READY

    @property
    def known(self) -> KnownParameters:
        """The parameters of the optimizer."""
        return self.parameters if self.local is None else self.local.known

    @property
    def scope(self) -> Scope:
        """What is exchanged, and with whom."""
        return self.exchange.scope

    @property
    def decays_in_vector(self) -> bool:
        """True if coupled weight decay is added to what is exchanged, see :mod:`tritoncomm.step.exchange.decay`.

        A single worker and a dense exchange leave it to the optimizer.
        """
        return self.scope.vectors[-1].delays

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add the same parameter group on all ranks. Residuals are kept. If this raises, nothing has changed."""
        before, local_steps, options = len(self.optimizer.param_groups), self.local, self.scope.options
        try:
            with self._extending(), agree.propagate_errors(self.everybody, self.device):
                self.check_no_pending_step("add_param_group()")
                original_class(self.optimizer).add_param_group(self.optimizer, param_group)
                if local_steps is not None:
                    local_steps.add_new_parameters()
                options.recipe.check_optimizer(self.optimizer)
                self.steps.check()
                scope = self._build(options.recipe, options.group, self.scope)
                exchange_state.extend(self.exchange, scope)
                self._compare(scope, options.recipe, scope.everybody, steps_alone=local_steps is not None)
                scope.agree_on_exchange_id(scope.everybody)
                agree.compare({"parameter group": "is added"}, scope.everybody, self.device)
                self.exchange.adopt(scope)
        except BaseException:
            del self.optimizer.param_groups[before:]
            raise

    @contextmanager
    def _extending(self) -> Iterator[None]:
        """Forget new parameters if the body raises."""
        anchors = 0 if self.local is None else len(self.local.anchors)
        with self.known.restored_on_error(), self.parameters.restored_on_error():
            try:
                yield
            except BaseException:
                if self.local is not None:
                    self.local.remove_new_parameters(anchors)
                raise

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
        alone = settings.is_alone(process_group)
        with agree.propagate_errors(process_group, self.device):
            before = self.scope.options.recipe
            inner = before.recipe if isinstance(before, Hierarchical) else before
            recipe = with_nodes(inner, node_group, process_group)
            check_optimizer(self.optimizer, alone=alone)
            self.steps.check(alone=alone)
            check_model(module)
            keep_gradients_local(module)
        agree.compare(nodes_of(recipe), process_group, self.device)
        self._compare(self.scope, recipe, process_group, caught_up=caught_up, steps_alone=self.local is not None)
        if self.local is not None:
            self.local.forget_loading()
        self.exchange.restart()
        exchange_state.moved(self.exchange, recipe, process_group)
        self.steps.alone = alone

    def note_new(self) -> None:
        """Add parameters that require gradients only since the last step. A single worker trains what it is given."""
        if not self.known.are_outdated:
            return
        self.known.check_kept(if_trained=True)
        with self._extending():
            if self.local is not None:
                self.local.add_new_parameters()
            options = self.scope.options
            scope = self._build(options.recipe, options.group, self.scope)
            exchange_state.extend(self.exchange, scope)
            self.exchange.adopt(scope)

    def _build(self, recipe: Recipe, group: dist.ProcessGroup | None, before: Scope | None = None) -> Scope:
        """Return what is exchanged by ``recipe`` in ``group``, in place of ``before``: all that requires gradients."""
        self.parameters.note()
        trained, options = self.parameters.trained, self.options
        is_sharded = check_shards(trained, group)  # before process groups are created for the vectors
        parameters = [parameter for parameter, _ in trained]
        owners = dict(zip(parameters, parameters if self.local is None else self.local.parameters, strict=True))
        dense = dense_ids(self.optimizer)
        dense |= {id(anchor) for anchor, owner in owners.items() if id(owner) in dense}
        # Updates of small tensors travel like others.
        dense |= small_ids(parameters, options.dense_below if options.updates is None else 0)
        common = ExchangeOptions(recipe=recipe, wrap=options, group=group, dense=frozenset(dense))
        vectors: list[VectorExchange] = []
        for part in parts_of(self.exchanged):
            held = parameter_ids(part)
            own = [(parameter, name) for parameter, name in trained if id(parameter) in held]
            if own or not trained:
                epsilon = _epsilon(part) if selects_by_update(part, recipe, options.late) else None
                is_late = takes_aware_step(part, options.late)
                rule = find_rule(part)
                if is_late and rule is not None and rule.reads_first and not settings.is_alone(group):
                    check_memory(own)
                vectors += _vectors(own, replace(common, epsilon=epsilon, is_late=is_late))
        together = None if is_sharded else group  # in wrap()
        connect(vectors, together if before is None else before.everybody)
        all_shards = None
        if is_sharded:
            device = local(parameters[0]).device
            all_shards = (before and before.all_shards) or scheduler_of_all_shards(recipe.name, options.timeout, device)
        held = parameter_ids(self.optimizer)  # a group may have been added, of parameters that were not held
        others = [(parameter, name) for parameter, name in self._others if id(parameter) not in held]
        if self.options.local_steps > 1 and self.local is not None:
            let_differ(self.local.parameters)
            others = []  # such as averages of parameters, which differ with them
        replica = Replica(self.exchanged, lambda: self.parameters.common, others)
        return Scope(
            optimizer=self.optimizer,
            exchanged=self.exchanged,
            vectors=vectors,
            parameters=parameters,
            names=[name for _, name in trained],
            owners=owners,
            all_shards=all_shards,
            replica=replica,
        )

    def _compare(
        self,
        scope: Scope,
        recipe: Recipe,
        everybody: dist.ProcessGroup | None,
        *,
        others: Named = (),
        shaped: Named = (),
        broadcast: bool = False,
        caught_up: bool = False,
        steps_alone: bool = False,
    ) -> None:
        """Check that ranks with the same shard are configured identically and are at the same step.

        All ranks of ``everybody`` call this together. The order of the parameters must agree, too.

        Args:
            scope: What is exchanged. The tensors and numbers in the state of its optimizer must be equal.
            recipe: The recipe of the exchange.
            everybody: The ranks of the exchange, or those of all shards, which hear of a difference in any.
            others: Parameters of the model that the optimizer does not hold, each with its name.
            shaped: Further tensors of which only shapes and dtypes must be equal, each with its name.
            broadcast: Whether values are copied from the group's first rank afterwards. If False, those of what is
                trained and of ``others`` must be equal.
            caught_up: Whether some ranks have just applied a step of the others. Schedules have not taken theirs there,
                so options may differ. The next step compares them.
            steps_alone: Whether ranks have stepped alone. An optimizer may keep numbers in parameter groups, such as an
                estimated rate, which then differ.

        Raises:
            ConfigMismatchError: Anything differs. All ranks raise it.
        """
        if not is_distributed():
            return
        trained, groups = self.parameters.trained, () if caught_up else self.optimizer.param_groups
        named = labelled(trained)
        fields = settings_of(self.optimizer, recipe, self.options) | options_of(groups, without_numbers=steps_alone)
        steps, count = self.exchange.steps, len(trained)
        fields |= {"steps": steps, "broadcast_parameters": broadcast, "number of parameters": count}
        fields |= {f"name of parameter {position}": name for position, (_, name) in enumerate(trained)}
        for each, name in (*named, *others, *shaped):
            fields |= {f"shape of {name}": tuple(each.shape), f"dtype of {name}": each.dtype}
        values = {} if broadcast else {f"{agree.CONTENT} {name}": each for each, name in (*named, *others)}
        values |= {f"{agree.STATE}: {name}": each for name, each in scope.replica.state().items()}
        with agree.propagate_errors(everybody, self.device):
            fields |= zip(values, numbers(values.values()), strict=True)
        try:
            agree.compare(fields, everybody, self.device, scope.shard)
        except ConfigMismatchError as error:
            raise (ConfigMismatchError(f"{error}. {_REPEATED}") if caught_up else error) from None

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
        if self.is_synchronized and self.exchange.pending.parts:
            raise RuntimeError(f"the exchanged gradients have not been used yet: call step() before {action}")


def _epsilon(optimizer: torch.optim.Optimizer) -> float:
    """Return the smallest ``eps`` of the parameter groups that is a number. Adafactor has two."""
    found = [group.get("eps") for group in optimizer.param_groups]
    return min((float(each) for each in found if isinstance(each, (int, float, torch.Tensor))), default=0.0)


def dense_ids(optimizer: torch.optim.Optimizer) -> set[int]:
    """Return the ids of the parameters whose group says ``dense=True``.

    Raises:
        ConfigurationError: A group says something else than True or False, or what holds for all groups.
    """
    found: set[int] = set()
    for group in optimizer.param_groups:
        for name in ("algo", "density"):
            if name in group and name not in optimizer.defaults:
                raise ConfigurationError(
                    f"a parameter group has {name}={group[name]!r}, which has no effect there: pass {name} to wrap(). "
                    f"To give some parameters another {name}, put them into a second optimizer, and wrap that, too. A "
                    "group with dense=True is sent whole"
                )
        chosen = group.get("dense", False)
        if not isinstance(chosen, bool):
            raise ConfigurationError(f"a parameter group has dense={chosen!r}: it must be True or False")
        found.update(map(id, group["params"]) if chosen else ())
    return found


def _vectors(trained: Sequence[tuple[torch.Tensor, str]], options: ExchangeOptions) -> list[VectorExchange]:
    """Return the flat vectors of the parameters ``trained``, each given with its name.

    Selection depends on the whole vector. Parameters that tensor parallelism replicates have a vector of their own, so
    that the ranks with copies of them select the same entries. Otherwise there is one vector.
    """
    named = [(parameter, label(name, i, parameter)) for i, (parameter, name) in enumerate(trained)]
    groups = by_split([parameter for parameter, _ in trained]) or [[]]
    return [VectorExchange([named[i] for i in own], options) for own in groups]


def check_memory(trained: Sequence[tuple[torch.Tensor, str]]) -> None:
    """Raise if two of ``trained``, each given with its name, share memory: only the second would keep its update."""
    held = [(local(each.detach()), label(name, i, each)) for i, (each, name) in enumerate(trained) if has_bits(each)]
    for first, second in overlapping([each for each, _ in held]):
        other = "itself" if first == second else held[first][1]
        raise ConfigurationError(
            f"{held[second][1]} shares memory with {other}, so an update would be lost: use one Parameter for what is "
            "shared, or pass late=False"
        )


def check_shards(trained: Sequence[tuple[torch.Tensor, str]], group: dist.ProcessGroup | None) -> bool:
    """Return whether any parameter is a DTensor, whose shard is exchanged with the ranks of ``group``.

    ``trained`` are the parameters, each given with its name.

    Raises:
        ConfigurationError: Ranks of ``group`` hold other shards, or average the gradient already.
    """
    found = False
    for position, (parameter, name) in enumerate(trained):
        if not hasattr(parameter, "device_mesh"):
            continue
        found = True
        mesh = mesh_ranks(parameter)
        ranks = set(global_ranks(group))
        if mesh & ranks != {own_rank()}:
            raise ConfigurationError(
                f"{label(name, position, parameter)} is a DTensor over {rank_text(*sorted(mesh))}, and the exchange is "
                f"over {rank_text(*sorted(ranks))}: pass process_group=, the ranks that hold the same shard "
                '(mesh["replicate"].get_group()), and apply fully_shard() or parallelize_module() with the other '
                "dimensions of the mesh, or FSDP averages over the replicas densely; with a single copy of the model "
                "there is nothing to exchange"
            )
    return found
