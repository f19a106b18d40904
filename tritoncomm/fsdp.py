"""Sparse exchange for FSDP2 models that are sharded inside a fast network and replicated across a slow one.

``fully_shard`` with a one-dimensional mesh reduce-scatters gradients within this mesh. The hook of this file then
averages the shards over the replicas by a sparse exchange.
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
from tritoncomm.step import checkpoint_format, setup_checks
from tritoncomm.step.bucket import OVERFLOWS, fits_dtype
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
    """The shard of one parameter within the flat shard that FSDP reduces for a parameter group.

    Attributes:
        name: Name of the parameter.
        start: Index of the first element.
        padded: Number of elements, padding included.
        small: Whether the shard is sent dense.
    """

    name: str
    start: int
    padded: int
    small: bool


class ShardExchange:
    """The exchange of one FSDP parameter group. A call replaces its reduced shard by the mean over the replicas.

    Args:
        number: Position among the parameter groups of the model.
        group: The parameter group of FSDP.
        shard_slices: The shards of its parameters.
        recipe: The recipe of the exchange.
        scheduler: Scheduler of the replicas.
        owner: The state that holds this exchange.
    """

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
        self._unsent: torch.Tensor | None = None

    def __call__(self, shard: torch.Tensor) -> None:
        """Replace ``shard`` (flat, any float dtype, padding included) by its mean over the replicas, in place."""
        if shard.is_cuda:  # pragma: no cover - needs a GPU
            shard.record_stream(torch.cuda.current_stream(shard.device))
        if shard.numel() != self.numel:
            raise ConfigurationError(
                f"FSDP reduced a shard of {shard.numel()} elements, but {self.numel} were registered, the first for "
                f"{self.shard_slices[0].name}: call register() after fully_shard() and after freezing parameters, and "
                "use every parameter in each pass"
            )
        # The user called set_requires_all_reduce(False). FSDP itself obeys it only with HSDP, so it is handled here.
        if not self._group.all_reduce_grads:
            self._unsent = shard.to(torch.float32, copy=True) if self._unsent is None else self._unsent.add_(shard)
            shard.zero_()
            return
        if self._unsent is not None:
            shard.add_(self._unsent)
            self._unsent = None
        self._owner.enter(self)
        scale = self._owner.scale()
        for shard_slice, part in self._parts():
            part.copy_(shard[shard_slice.start : shard_slice.start + shard_slice.padded])
        self.flat.mul_(1.0 / scale)
        try:
            self._deliver(scale, shard.dtype)
        except NonFiniteError as error:
            bad = [shard_slice.name for shard_slice, part in self._parts() if not part.isfinite().all()]
            logger.warning(
                "gradients become NaN: %s; rank %d has NaN or Inf in %s", error, dist.get_rank(), bad or "none"
            )
            self._owner.found_nonfinite = True
            shard.fill_(math.nan)
            return
        except BaseException as error:
            self._owner.abort(error)
            raise
        for shard_slice, part in self._parts():
            shard[shard_slice.start : shard_slice.start + shard_slice.padded].copy_(part)

    @property
    def meter(self) -> Meter:
        """Traffic and waiting time of the last backward pass."""
        return self._scheduler.meter

    def agree_on_exchange_id(self) -> None:
        """See :meth:`ProcessGroupScheduler.agree_on_exchange_id`."""
        self._scheduler.agree_on_exchange_id()

    def _deliver(self, scale: float, dtype: torch.dtype) -> None:
        """Replace ``flat`` by ``scale`` times the mean. Raise if this overflows in ``dtype``."""
        scheduler = self._scheduler
        mean = scheduler.run(self.feedback.begin(self.flat, scheduler.rank, scheduler.world_size))
        self.delivered = mean.density
        mean.write_to(self.flat, workspace=self.feedback.workspace)
        self.flat.mul_(scale)
        if not fits_dtype(self.flat, dtype):  # equal on all replicas, like the mean
            raise NonFiniteError(OVERFLOWS.format(dtype))

    def _parts(self) -> Iterator[tuple[ShardSlice, torch.Tensor]]:
        return zip(
            self.shard_slices,
            torch.split(self.flat, [shard_slice.padded for shard_slice in self.shard_slices]),
            strict=True,
        )


class FSDPState:
    """The state that :func:`register` returns: the exchanges of all parameter groups, and their residuals.

    A backward pass is committed at its end. If any rank found a NaN or Inf in it, the pass is rejected, and residuals
    stay as they were before the pass.

    Attributes:
        recipe: The recipe of the exchange.
        group: Process group of the replicas.
        scaler: The ``GradScaler`` that scales the loss, or None.
        exchanges: The exchange of each parameter group.
        steps: Number of committed backward passes.
        skipped_steps: Number of rejected backward passes.
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
        self.found_nonfinite = False  # on this rank, in this backward pass
        self.steps = self.skipped_steps = 0
        self._begun: list[ShardExchange] = []
        self._backward = -1
        self._world_group = dist.new_group(timeout=timeout)
        self._commit_scheduler = ProcessGroupScheduler(self._world_group, timeout, device, f"fsdp {recipe!r}")
        self._commit_scheduler.agree_on_exchange_id()

    def scale(self) -> float:
        """Return the scale of the loss, 1 without a scaler."""
        return 1.0 if self.scaler is None else float(self.scaler.get_scale())

    def enter(self, exchange: ShardExchange) -> None:
        """Record that ``exchange`` begins. The first one in a backward pass queues the commit at its end."""
        backward = torch._C._current_graph_task_id()  # noqa: SLF001 - there is no public function
        again = exchange in self._begun
        if again:
            self.rollback()
        if again and backward == self._backward:
            raise ConfigurationError(
                f"{exchange.shard_slices[0].name} is used twice in a forward pass, and FSDP reduces its gradient in "
                "two parts: call fully_shard() on the module that uses it, not on the part that is used twice"
            )
        self._backward = backward  # if this is another pass, the previous one did not finish
        if not self._begun:
            torch.autograd.Variable._execution_engine.queue_callback(self._commit_backward)  # noqa: SLF001 - the only way
        self._begun.append(exchange)

    def rollback(self) -> None:
        """Discard the backward pass."""
        for exchange in self._begun:
            exchange.feedback.rollback()
        self._begun, self.found_nonfinite = [], False

    def abort(self, error: BaseException) -> None:
        """Discard the backward pass, which cannot finish, and report ``error`` to the ranks that wait for its end."""
        self.rollback()
        if isinstance(error, Exception):
            self._commit_scheduler.fail(error)

    def _commit_backward(self) -> None:
        """Commit the backward pass, or discard it if any rank found a NaN or Inf. All ranks call this."""
        try:
            rejected = self._commit_scheduler.run(_any(self.found_nonfinite, self._device))
        except BaseException:
            self.rollback()
            raise
        if rejected:
            self.rollback()
        for exchange in self._begun:
            exchange.feedback.commit()
        self._begun = []
        self.skipped_steps += rejected
        self.steps += not rejected

    @property
    def _device(self) -> torch.device:
        return self.exchanges[0].flat.device

    @property
    def _sharding(self) -> str:
        return repr([[tuple(shard_slice) for shard_slice in exchange.shard_slices] for exchange in self.exchanges])

    def metrics(self) -> dict[str, float]:
        """Return metrics of the last backward pass and totals on this rank, as a flat dict for TensorBoard or W&B.

        See :meth:`tritoncomm.SparseOptimizer.metrics`.
        """
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
        """Return this rank's residual of each parameter group, and the states of the method.

        Residuals differ between ranks: save the dict of every rank.
        """
        return checkpoint_format.with_checksum(
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
        """Load what :meth:`state_dict` of the same rank returned.

        All ranks must call this. If a rank cannot load its state, nothing changes on any rank.

        Raises:
            ConfigurationError: The state is damaged, or belongs to another rank, world size, method, model or sharding.
            ConfigMismatchError: Another rank cannot load its state, or loads the state of another step.
        """
        with setup_checks.propagate_errors(self._world_group):
            rank, size = dist.get_rank(), dist.get_world_size()
            checkpoint_format.check(state, rank=rank, world_size=size, recipe=self.recipe.name)
            if state["settings"] != self._sharding:
                raise ConfigurationError(
                    "this checkpoint was saved with other parameters or another sharding: call fully_shard() and "
                    "register() as in the run that saved it"
                )
        setup_checks.compare({"steps": state["steps"]}, self._world_group)
        for exchange, residual in zip(self.exchanges, state["residuals"], strict=True):
            algorithm = state["algorithm"][str(exchange.number)]
            exchange.feedback.load_state_dict({"residual": residual.to(self._device), "algorithm": algorithm})
        self.steps = state["steps"]


def _any(flag: bool, device: torch.device) -> Pattern[bool]:
    """Return True if ``flag`` is set on any rank."""
    total = yield AllReduce("commit", torch.tensor([int(flag)], dtype=torch.int32, device=device))
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
    """Average the gradient shards of an FSDP2 model over its replicas by sparse exchanges, in the backward pass.

    Call this on all ranks, after the last ``fully_shard`` and before the first forward pass. Each parameter group of
    FSDP is exchanged when its gradients have been reduce-scattered. The optimizer sees averaged gradients that are zero
    where nothing was delivered. Residuals need as much memory as the shards, in fp32.

    If any replica has a NaN or Inf, or if a mean overflows with ``reduce_dtype=torch.float16``, the shard becomes NaN
    on all replicas, as in a dense run, and no residual of any module changes. Every backward pass ends with an
    all-reduce over all ranks, so no rank steps if another rank has failed.

    Args:
        model: Model to which ``fully_shard`` was applied with a one-dimensional mesh, for example ``mesh["shard"]`` of
            a mesh of replicas and shards.
        replicate_group: Process group of the ranks that hold the same shard, ``mesh["replicate"].get_group()``.
        algo: Name of a method from :func:`tritoncomm.algorithms`, or a recipe. Default: ``"oktopk"``.
        density: Fraction of entries to deliver per step, in (0, 1]. A recipe has its own density. Default: 0.01.
        warmup_steps: Number of dense exchanges before the first sparse one. Default: 0.
        node_group: Process group of the replicas in this rank's node. The exchange is then dense within nodes and
            sparse between them, see :class:`~tritoncomm.Hierarchical`. Default: None, nodes are not treated separately.
        scaler: The ``GradScaler`` that scales the loss. Residuals are kept in unscaled units. Default: None.
        timeout: Maximum time of each wait for a peer. Default: the time-out of the process group.
        dense_below: Shards with fewer elements, or at most one dimension (biases, norms), are sent dense. 0 sends none
            dense. Default: 1024.
        **recipe_fields: Further fields of the recipe of ``algo``.

    Returns:
        The state of the exchanges, with metrics and checkpoints.

    Raises:
        ConfigurationError: An argument is invalid, or the model is not supported.
        ConfigMismatchError: Replicas are configured differently, or an argument is invalid on another rank.
    """
    with setup_checks.propagate_errors(None):
        recipe = resolve_recipe(algo, density, warmup_steps, recipe_fields, node_group, replicate_group)
        check_timeout(timeout)
        check_dense_below(dense_below)
        found = list(_parameter_groups(model))
        for module, group in found:
            _check_group(module, group, replicate_group)
        if not found:
            raise ConfigurationError("model has no sharded module: call fully_shard() first, or use tritoncomm.wrap()")
    setup_checks.compare({"version": __version__}, None)
    reduce_unused = getattr(model, "set_reduce_scatter_unused_params", None)
    if callable(reduce_unused):  # older releases reduce a shorter shard if a parameter is unused, which raises then
        reduce_unused(True)
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


# PyTorch has no public function that returns the parameter groups of FSDP.


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
                raise ConfigurationError(
                    "a module has parameters on several meshes, which this hook does not support: shard all its "
                    "parameters over one mesh"
                )
            if id(state) not in seen:  # several modules may share one
                seen.add(id(state))
                yield from ((module, group) for group in groups)


def _check_group(module: nn.Module, group: Any, replicate_group: dist.ProcessGroup) -> None:
    name = type(module).__name__
    mesh = group.mesh_info
    if getattr(mesh, "replicate_process_group", None) is not None:
        raise ConfigurationError(
            f"{name} is sharded over a two-dimensional mesh: FSDP then averages over the replicas densely before any "
            'hook can see the gradient; call fully_shard() with mesh["shard"] and register() with the replicate group'
        )
    if group._all_reduce_hook is not None:  # noqa: SLF001
        raise ConfigurationError(f"{name} has an all-reduce hook already: call register() once")
    shards = dist.get_process_group_ranks(mesh.shard_process_group)
    replicas = dist.get_process_group_ranks(replicate_group)
    if set(shards) & set(replicas) != {dist.get_rank()}:
        raise ConfigurationError(
            f"the shards of {name} are on ranks {shards}, and replicate_group has ranks {replicas}: they must have "
            f"this rank, {dist.get_rank()}, and no other in common"
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
