"""Front door 3: FSDP2, sharded inside a fast network, replicated across a slow one.

``fully_shard`` over a one-dimensional mesh reduce-scatters gradients within it; the hook that this module sets then
averages the shards over the replicas, sparsely.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from tritoncomm.algorithms import DenseTail, Recipe
from tritoncomm.errors import ConfigurationError, NonFiniteError
from tritoncomm.scheduler.meter import Meter
from tritoncomm.scheduler.process_group import ProcessGroupScheduler
from tritoncomm.scheduler.rounds import AllReduce, Pattern
from tritoncomm.step import setup_checks, state_format
from tritoncomm.step.bucket import fits_dtype
from tritoncomm.step.error_feedback import ErrorFeedback
from tritoncomm.step.options import (
    DEFAULT_DENSITY,
    DENSE_BELOW,
    check_dense_below,
    check_timeout,
    log_choice,
    resolve_recipe,
)
from tritoncomm.version import __version__

logger = logging.getLogger("tritoncomm")


class ShardSlice(NamedTuple):
    """Where a parameter's shard lies in what FSDP reduces at once: ``padded`` elements from ``start``."""

    name: str
    start: int
    padded: int
    small: bool


class ShardExchange:
    """The exchange of one parameter group of FSDP: called with its reduced shard, which becomes the mean."""

    def __init__(
        self,
        number: int,
        group: Any,
        shard_slices: list[ShardSlice],
        recipe: Recipe,
        scheduler: ProcessGroupScheduler,
        owner: FSDPState,
    ) -> None:
        self.number = number
        self.shard_slices = [shard_slice for shard_slice in shard_slices if not shard_slice.small] + [
            shard_slice for shard_slice in shard_slices if shard_slice.small
        ]
        self.numel = sum(shard_slice.padded for shard_slice in shard_slices)
        tail = sum(shard_slice.padded for shard_slice in shard_slices if shard_slice.small)
        whole = DenseTail(recipe=recipe, tail=tail)
        self.dense_numel = tail
        self.feedback = ErrorFeedback(whole.build(self.numel), scheduler.device)
        self.flat = torch.zeros(self.numel, device=scheduler.device)
        self.delivered = 0.0
        self._group = group
        self._scheduler = scheduler
        self._owner = owner
        self._held: torch.Tensor | None = None

    def __call__(self, shard: torch.Tensor) -> None:
        """Average ``shard`` (flat, any dtype, padding included) over the replicas, in place."""
        if shard.is_cuda:  # pragma: no cover - needs a GPU
            shard.record_stream(torch.cuda.current_stream(shard.device))
        if shard.numel() != self.numel:
            raise ConfigurationError(
                f"FSDP reduces {shard.numel()} elements at once where {self.numel} were registered "
                f"({self.shard_slices[0].name} and others): register() after all of fully_shard() and freezing, and "
                "use every parameter in each pass"
            )
        if not self._group.all_reduce_grads:  # set_requires_all_reduce(False), which FSDP itself looks at only in HSDP
            self._held = shard.to(torch.float32, copy=True) if self._held is None else self._held.add_(shard)
            shard.zero_()
            return
        if self._held is not None:
            shard.add_(self._held)
            self._held = None
        self._owner.enter(self)
        scale = self._owner.scale()
        for shard_slice, part in self._parts():
            part.copy_(shard[shard_slice.start : shard_slice.start + shard_slice.padded])
        self.flat.mul_(1.0 / scale)
        try:
            self._deliver(scale, shard.dtype)
        except NonFiniteError as error:
            bad = [shard_slice.name for shard_slice, part in self._parts() if not part.isfinite().all()]
            logger.warning("gradients become NaN: %s; on rank %d in %s", error, dist.get_rank(), bad or "none")
            self._owner.refused = True
            shard.fill_(math.nan)
            return
        except BaseException as error:
            self._owner.abandon(error)
            raise
        for shard_slice, part in self._parts():
            shard[shard_slice.start : shard_slice.start + shard_slice.padded].copy_(part)

    @property
    def meter(self) -> Meter:
        """The traffic and waiting time of the last backward pass."""
        return self._scheduler.meter

    def agree_on_exchange_id(self) -> None:
        """See :meth:`ProcessGroupScheduler.agree_on_exchange_id`."""
        self._scheduler.agree_on_exchange_id()

    def _deliver(self, scale: float, dtype: torch.dtype) -> None:
        """Exchange ``flat``, which becomes ``scale`` times the mean, and must fit into ``dtype``."""
        scheduler = self._scheduler
        mean = scheduler.run(self.feedback.begin(self.flat, scheduler.rank, scheduler.world_size))
        self.delivered = mean.density
        mean.write_to(self.flat, workspace=self.feedback.workspace)
        self.flat.mul_(scale)
        if not fits_dtype(self.flat, dtype):  # on all replicas alike, as the mean is
            raise NonFiniteError(f"a mean of finite gradients overflows in {dtype}; nothing was applied")

    def _parts(self) -> Iterator[tuple[ShardSlice, torch.Tensor]]:
        return zip(
            self.shard_slices,
            torch.split(self.flat, [shard_slice.padded for shard_slice in self.shard_slices]),
            strict=True,
        )


class FSDPState:
    """What :func:`register` returns: the exchanges of all parameter groups, and what they owe.

    A backward pass is adopted at its end, when all ranks know that none refused it; until then residuals are as before.
    """

    def __init__(
        self,
        recipe: Recipe,
        group: dist.ProcessGroup | None,
        scaler: torch.amp.GradScaler | None = None,
        timeout: timedelta | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        self.recipe = recipe
        self.group = group
        self.scaler = scaler
        self.exchanges: list[ShardExchange] = []
        self.refused = False
        self.steps = self.skipped_steps = 0
        self._begun: list[ShardExchange] = []
        self._backward = -1
        self._everybody = dist.new_group(timeout=timeout)
        self._agreement = ProcessGroupScheduler(self._everybody, timeout, device, f"fsdp {recipe!r}")
        self._agreement.agree_on_exchange_id()

    def scale(self) -> float:
        """What gradients have been multiplied by."""
        return 1.0 if self.scaler is None else float(self.scaler.get_scale())

    def enter(self, exchange: ShardExchange) -> None:
        """``exchange`` is about to begin; the first in a backward pass arranges for its end."""
        backward = torch._C._current_graph_task_id()  # noqa: SLF001 - there is no public way
        again = exchange in self._begun
        if again:
            self.rollback()
        if again and backward == self._backward:
            raise ConfigurationError(
                f"{exchange.shard_slices[0].name} is used twice in a forward pass, so that FSDP reduces its gradient "
                "in two parts: give the module that uses it to fully_shard instead of the part that is used twice"
            )
        self._backward = backward  # another one: the pass before came to no end
        if not self._begun:
            torch.autograd.Variable._execution_engine.queue_callback(self._commit_backward)  # noqa: SLF001 - the only way
        self._begun.append(exchange)

    def rollback(self) -> None:
        """Forget the backward pass."""
        for exchange in self._begun:
            exchange.feedback.rollback()
        self._begun, self.refused = [], False

    def abandon(self, error: BaseException) -> None:
        """The backward pass cannot be finished: forget it, and tell those who wait for its end."""
        self.rollback()
        if isinstance(error, Exception):
            self._agreement.fail(error)

    def _commit_backward(self) -> None:
        """Adopt the backward pass, or forget it when any rank refused a part of it. All ranks come here."""
        try:
            refused = self._agreement.run(_any(self.refused, self._device))
        except BaseException:
            self.rollback()
            raise
        if refused:
            self.rollback()
        for exchange in self._begun:
            exchange.feedback.commit()
        self._begun = []
        self.skipped_steps += refused
        self.steps += not refused

    @property
    def _device(self) -> torch.device:
        return self.exchanges[0].flat.device

    @property
    def _sharding(self) -> str:
        return repr([[tuple(shard_slice) for shard_slice in exchange.shard_slices] for exchange in self.exchanges])

    def metrics(self) -> dict[str, float]:
        """What the last backward pass did on this rank."""
        numel = sum(exchange.numel for exchange in self.exchanges)
        meters = [exchange.meter for exchange in self.exchanges]
        return {
            "density": self.recipe.density,
            "density_delivered": sum(e.delivered * e.numel for e in self.exchanges) / max(numel, 1),
            "steps": float(self.steps),
            "skipped_steps": float(self.skipped_steps),
            "bytes_sent": float(sum(meter.sent.bytes for meter in meters)),
            "bytes_received": float(sum(meter.received.bytes for meter in meters)),
            "messages_sent": float(sum(meter.sent.messages for meter in meters)),
            "seconds_exchange": sum(meter.waited for meter in meters),
            "residual_norm": math.hypot(*(float(e.feedback.residual.norm()) for e in self.exchanges)),
        }

    def state_dict(self) -> dict[str, Any]:
        """What this rank owes, by parameter group, and the states of the method."""
        return state_format.with_checksum(
            rank=dist.get_rank(),
            world_size=dist.get_world_size(),
            recipe=self.recipe.name,
            settings=self._sharding,
            residuals=[exchange.feedback.residual.clone() for exchange in self.exchanges],
            kind="shards",
            algorithm={str(e.number): e.feedback.algorithm.state_dict() for e in self.exchanges},
            steps=self.steps,
        )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue what :meth:`state_dict` of the same rank returned. All ranks load together and only if all can.

        Raises, with nothing changed, :class:`~tritoncomm.ConfigurationError` when the state is damaged or belongs to
        another rank, world size, method, model or sharding.
        """
        with setup_checks.propagate_errors(self._everybody):
            state_format.check(state, rank=dist.get_rank(), world_size=dist.get_world_size(), recipe=self.recipe.name)
            if state["settings"] != self._sharding:
                raise ConfigurationError("this checkpoint is of another model, or one that was sharded differently")
        setup_checks.compare({"steps": state["steps"]}, self._everybody)
        for exchange, residual in zip(self.exchanges, state["residuals"], strict=True):
            algorithm = state["algorithm"][str(exchange.number)]
            exchange.feedback.load_state_dict({"residual": residual.to(self._device), "algorithm": algorithm})
        self.steps = state["steps"]


def _any(flag: bool, device: torch.device) -> Pattern[bool]:
    """Whether any rank has set ``flag``."""
    total = yield AllReduce("settle", torch.tensor([int(flag)], dtype=torch.int32, device=device))
    return bool(total)


def register(
    model: nn.Module,
    replicate_group: dist.ProcessGroup,
    algo: str | Recipe = "oktopk",
    *,
    density: float = DEFAULT_DENSITY,
    warmup_steps: int = 0,
    node_group: dist.ProcessGroup | None = None,
    scaler: torch.amp.GradScaler | None = None,
    timeout: timedelta | None = None,
    dense_below: int = DENSE_BELOW,
    **recipe_fields: Any,
) -> FSDPState:
    """Average the gradient shards of ``model`` over ``replicate_group`` sparsely, module by module, in backward.

    ``model`` has been given to ``fully_shard`` with a one-dimensional mesh, for example ``mesh["shard"]`` of a mesh of
    replicas and shards; ``replicate_group`` is the group of ranks that hold the same shard,
    ``mesh["replicate"].get_group()``. Call it on all ranks, after all of ``fully_shard`` and before the first forward
    pass. The method is chosen as :func:`tritoncomm.wrap` does. Residuals need as much memory as the shard, in fp32.

    When any replica holds a NaN or Inf, or a mean overflows in an fp16 ``reduce_dtype``, the shard becomes NaN on all,
    as in a dense run, and nothing that is owed changes, in no module. Give the ``scaler`` that scales the loss, if
    there is one: residuals are kept in unscaled units. A backward pass ends with a word from every rank, so that none
    steps when another has failed. The optimizer sees averaged gradients that are zero where nothing was delivered.
    Raises :class:`~tritoncomm.ConfigurationError` for a model that cannot be served, and
    :class:`~tritoncomm.ConfigMismatchError` when replicas differ.
    """
    with setup_checks.propagate_errors(None):
        recipe = resolve_recipe(algo, density, warmup_steps, recipe_fields, node_group, replicate_group)
        check_timeout(timeout)
        check_dense_below(dense_below)
        found = list(_parameter_groups(model))
        for module, group in found:
            _check_group(module, group, replicate_group)
        if not found:
            raise ConfigurationError("no module of this model was given to fully_shard: do that first, or use wrap()")
    setup_checks.compare({"version": __version__}, None)
    without_gaps = getattr(model, "set_reduce_scatter_unused_params", None)
    if callable(without_gaps):  # older ones give a shorter shard when a parameter is unused, which is refused then
        without_gaps(True)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    device = found[0][1].fsdp_params[0].sharded_param.device
    state = FSDPState(recipe, replicate_group, scaler, timeout, device)
    for number, (module, group) in enumerate(found):
        shard_slices = _shard_slices(group, names, dense_below)
        if shard_slices:
            stamp = f"{recipe.name} {recipe!r}, {shard_slices}"
            subgroups = recipe.subgroups(dist.get_world_size(replicate_group))
            scheduler = ProcessGroupScheduler(replicate_group, timeout, device, stamp, subgroups)
            recipe.check_world_size(scheduler.world_size)
            state.exchanges.append(ShardExchange(number, group, shard_slices, recipe, scheduler, state))
            module.set_all_reduce_hook(state.exchanges[-1])
    local = [parameter.to_local() for parameter in model.parameters() if hasattr(parameter, "to_local")]
    fields = {"recipe": repr(recipe), "shard slices": [repr(e.shard_slices) for e in state.exchanges]}
    fields |= {"shard values": [setup_checks.digest(shard) for shard in local]}
    setup_checks.compare(fields, replicate_group)
    for exchange in state.exchanges:
        exchange.agree_on_exchange_id()
    size = dist.get_world_size(replicate_group)
    log_choice(recipe, dist.get_rank(), size, [(e.feedback.algorithm, e.dense_numel) for e in state.exchanges])
    return state


# PyTorch has no public way to ask a module what FSDP made of it.


def _parameter_groups(model: nn.Module) -> Iterator[tuple[Any, Any]]:
    from torch.distributed.fsdp import FSDPModule  # noqa: PLC0415 - importing it takes a while

    seen: set[int] = set()
    for module in model.modules():
        if isinstance(module, FSDPModule):
            state = module._get_fsdp_state()  # noqa: SLF001
            groups = getattr(state, "_fsdp_param_groups", None)
            if groups is None:
                groups = [group for group in [state._fsdp_param_group] if group is not None]  # noqa: SLF001
            if len(groups) > 1:
                raise ConfigurationError("one fully_shard() over several meshes has no all-reduce hook: use one mesh")
            if id(state) not in seen:  # several modules may share one
                seen.add(id(state))
                yield from ((module, group) for group in groups)


def _check_group(module: nn.Module, group: Any, replicate_group: dist.ProcessGroup) -> None:
    name = type(module).__name__
    mesh = group.mesh_info
    if getattr(mesh, "replicate_process_group", None) is not None:
        raise ConfigurationError(
            f"{name} is sharded over a two-dimensional mesh: FSDP then averages over the replicas densely before any "
            'hook can see the gradient; give fully_shard mesh["shard"] alone and register() the replicas\' group'
        )
    if group._all_reduce_hook is not None:  # noqa: SLF001
        raise ConfigurationError(f"{name} has an all-reduce hook already: register() once")
    shards = dist.get_process_group_ranks(mesh.shard_process_group)
    replicas = dist.get_process_group_ranks(replicate_group)
    if set(shards) & set(replicas) != {dist.get_rank()}:
        raise ConfigurationError(
            f"ranks {shards} hold the shards of {name} and replicate_group is {replicas}: they must have this rank, "
            f"{dist.get_rank()}, and no other in common"
        )


def _shard_slices(group: Any, names: Mapping[int, str], dense_below: int) -> list[ShardSlice]:
    shard_slices, start = [], 0
    for parameter in group.fsdp_params:
        sharded = parameter.sharded_param
        if sharded.requires_grad:
            padded = parameter.padded_sharded_param_size.numel()
            small = dense_below > 0 and (sharded.dim() <= 1 or sharded.numel() < dense_below)
            shard_slices.append(ShardSlice(names[id(sharded)], start, padded, small))
            start += padded
    return shard_slices
