"""A communication hook for ``DistributedDataParallel``.

This file evaluates annotations, because DDP rejects hooks whose annotations are strings.
"""

import logging
import math
import time
import weakref
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from tritoncomm.algorithms import Recipe
from tritoncomm.errors import ConfigurationError, ExchangeError, NonFiniteError, ProtocolMismatchError
from tritoncomm.primitives.sparse_vector import SparseVector
from tritoncomm.scheduler.meter import summed
from tritoncomm.step import checkpoint_format, setup_checks
from tritoncomm.step.bucket import OVERFLOWS, fits_dtype
from tritoncomm.step.exchange import GradientExchange
from tritoncomm.step.options import (
    DEFAULT_DENSITY,
    DENSE_BELOW,
    check_dense_below,
    check_timeout,
    is_dense,
    log_choice,
    one_of,
    resolve_recipe,
    with_density,
)
from tritoncomm.version import __version__

__all__ = ["CommState", "comm_hook", "register"]

logger = logging.getLogger("tritoncomm")

_POLICIES = ("raise", "propagate", "zero")


class CommState:
    """The state of :func:`comm_hook`: one exchange per bucket, and the residuals.

    :func:`register` creates one. Otherwise, pass it to ``ddp_model.register_comm_hook(state, comm_hook)``. Buckets are
    exchanged on a separate thread, in parallel with the backward pass. Pickling omits process groups and residuals.
    Save residuals with :meth:`state_dict`.

    Args:
        process_group: Process group of the DDP module. The exchange uses a new group of the same ranks. Default: the
            default process group.
        algo: Name of a method from :func:`tritoncomm.algorithms`, or a recipe. Default: ``"oktopk"``.
        density: Fraction of entries to deliver per step, in (0, 1]. A recipe has its own density. Default: 0.01.
        warmup_steps: Number of dense exchanges before the first sparse one. Default: 0.
        node_group: Process group of the ranks of this rank's node. The exchange is then dense within nodes and sparse
            between them, see :class:`~tritoncomm.Hierarchical`. Default: None, nodes are not treated separately.
        on_nonfinite: Action when any rank has a NaN or Inf, or when the mean overflows in the dtype of the bucket, as
            it may with ``fp16_compress_wrapper``. ``"raise"``: ``backward()`` raises
            :class:`~tritoncomm.NonFiniteError` on all ranks. ``"propagate"``: gradients become NaN on all ranks, and a
            ``GradScaler`` skips the step on all ranks. ``"zero"``: NaN and Inf are replaced by zero, and an overflow
            raises. If the step is rejected, residuals do not change. Default: ``"propagate"`` with a ``scaler``, else
            ``"raise"``.
        scaler: The ``GradScaler`` that scales the loss. Residuals are kept in unscaled units. Default: None.
        timeout: Maximum time of each wait for a peer. Default: the time-out of the process group.
        dense_below: Tensors with fewer elements, or at most one dimension (biases, norms), are sent dense, in one
            all-reduce per bucket. 0 sends no tensor dense. Default: 1024.
        **recipe_fields: Further fields of the recipe of ``algo``.

    Raises:
        ConfigurationError: An argument is invalid.
    """

    def __init__(
        self,
        process_group: dist.ProcessGroup | None = None,
        algo: str | Recipe = "oktopk",
        *,
        density: float = DEFAULT_DENSITY,
        warmup_steps: int = 0,
        node_group: dist.ProcessGroup | None = None,
        on_nonfinite: str | None = None,
        scaler: torch.amp.GradScaler | None = None,
        timeout: timedelta | None = None,
        dense_below: int = DENSE_BELOW,
        **recipe_fields: Any,
    ) -> None:
        self.recipe = resolve_recipe(algo, density, warmup_steps, recipe_fields, node_group, process_group)
        if on_nonfinite == "skip":
            raise ConfigurationError(
                "on_nonfinite='skip': a hook cannot prevent the optimizer's step; use 'propagate' with a GradScaler, "
                "which skips the step, or use 'raise'"
            )
        self.on_nonfinite = on_nonfinite or ("raise" if scaler is None else "propagate")
        one_of("on_nonfinite", self.on_nonfinite, _POLICIES)
        check_timeout(timeout)
        check_dense_below(dense_below)
        self.scaler = scaler
        self.process_group = process_group
        self._timeout = timeout
        self._dense_below = dense_below
        self._names: dict[int, str] = {}
        self._shapes: dict[str, int] = {}
        self._flattened = False
        self._start()

    def _start(self) -> None:
        self._group: dist.ProcessGroup | None = None
        # One thread exchanges the buckets in the order in which DDP passes them, which is the same on all ranks.
        self._thread: ThreadPoolExecutor | None = None
        self._exchanges: dict[tuple[int, ...], GradientExchange] = {}
        self._loaded: Mapping[str, Any] | None = None
        self._begun: list[GradientExchange] = []
        self._failure: BaseException | None = None
        self._broken: BaseException | None = None
        self.steps = self.skipped_steps = self.zeroed_values = 0
        self.has_averaged = False  # gradients hold a mean to which nothing has been added

    def __getstate__(self) -> dict[str, Any]:
        kept = {name: value for name, value in vars(self).items() if name in _SETTINGS}
        return kept | {"process_group": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._names, self._shapes, self._flattened = {}, {}, False
        self._start()

    def name(self, parameters: Mapping[str, torch.Tensor]) -> None:
        """Use the names of ``parameters`` in messages and in :meth:`state_dict`. Call it before the first backward."""
        self._names = {id(parameter): name for name, parameter in parameters.items()}
        self._shapes = {name: p.numel() for name, p in parameters.items() if p.requires_grad}
        self._flattened = all(parameter.dim() <= 1 for parameter in parameters.values())

    def exchange(self, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:  # type: ignore[name-defined]
        """Start the exchange of ``bucket`` on the thread of this state, and return a future of the averaged buffer."""
        buffer, parameters = bucket.buffer(), bucket.parameters()
        if self._thread is None:
            self._connect()
        scale = 1.0 if self.scaler is None else self.scaler.get_scale()
        on_gpu = buffer.device.type == "cuda"
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future(devices=[buffer.device] if on_gpu else None)
        ready = torch.cuda.current_stream(buffer.device).record_event() if on_gpu else None
        first, last = bucket.index() == 0, bucket.is_last()

        def work() -> None:
            try:
                if first:
                    self._begin()
                if ready is None:
                    self._average(parameters, buffer, scale)
                else:  # pragma: no cover - needs a GPU
                    with torch.cuda.stream(self._stream(buffer.device)) as stream:
                        stream.wait_event(ready)
                        self._average(parameters, buffer, scale)
                        stream.synchronize()
            except BaseException as error:
                self._failure = error
            finally:  # DDP always waits for this future
                if last:
                    self._finish()
                future.set_result(buffer)

        assert self._thread is not None
        self._thread.submit(work)
        if last:
            _after_backward(self._raise_failure)
        return future

    def _begin(self) -> None:
        """Begin a backward pass, and discard a previous one that did not finish."""
        for exchange in self._begun:
            exchange.rollback()
        self._begun, self._failure = [], self._broken

    def _raise_failure(self) -> None:
        error, self._failure = self._failure, None
        if isinstance(error, (ExchangeError, ProtocolMismatchError)):
            self._broken = error  # the group is unusable
        if error is not None and not (isinstance(error, NonFiniteError) and self.on_nonfinite == "propagate"):
            raise error

    def _average(self, parameters: list[torch.Tensor], buffer: torch.Tensor, scale: float) -> None:
        """Write the mean into ``buffer``, or NaN after a failure. DDP would report an exception without its type."""
        if self._failure is not None:  # in an earlier bucket of this pass: all ranks stop exchanging
            buffer.fill_(math.nan)
            return
        started = time.perf_counter()
        try:
            # On this thread, not in the hook: the comparison of ranks must not overlap with an exchange.
            exchange = self._exchanges.get(tuple(map(id, parameters))) or self._new_bucket(parameters)
            flat, layout = exchange.flat, exchange.layout
            parts = dict(zip(map(id, parameters), torch.split(buffer, [p.numel() for p in parameters]), strict=True))
            pairs = [(parts[id(p)], part) for p, part in zip(layout.parameters, layout.parts(flat), strict=True)]
            for bucket_part, flat_part in pairs:
                flat_part.copy_(bucket_part)
            if scale != 1.0:
                flat.mul_(1.0 / scale)
            mean = self._deliver(exchange, scale, buffer.dtype)
            for bucket_part, flat_part in pairs:
                bucket_part.copy_(flat_part if scale == 1.0 else flat_part * scale)
            exchange.measure(mean, time.perf_counter() - started)
        except BaseException as error:
            self._failure = error
            buffer.fill_(math.nan)

    def _deliver(self, exchange: GradientExchange, scale: float, dtype: torch.dtype) -> SparseVector:
        """Replace ``exchange.flat`` by the mean. Raise if ``scale`` times the mean overflows in ``dtype``."""
        flat = exchange.flat
        if self.on_nonfinite == "zero":
            before = exchange.zeroed
            exchange.zero_non_finite(flat)
            self.zeroed_values += exchange.zeroed - before
        try:
            mean = exchange.begin(flat)
        except NonFiniteError as error:
            raise exchange.describe_error(error) if self.on_nonfinite == "raise" else error from None
        self._begun.append(exchange)
        mean.write_to(flat, workspace=exchange.feedback.workspace)
        if not fits_dtype(flat if scale == 1.0 else flat * scale, dtype):  # equal on all ranks, like the mean
            raise NonFiniteError(OVERFLOWS.format(dtype))
        return mean

    def _finish(self) -> None:
        """Commit the backward pass after its last bucket, or roll it back."""
        try:
            if self._failure is None:
                self._begun[-1].confirm()
        except BaseException as error:
            self._failure = error
        if self._failure is not None:
            self.skipped_steps += isinstance(self._failure, NonFiniteError)
            for exchange in self._begun:
                exchange.rollback()
        else:
            if not self.steps:
                first = self._begun[0]
                log_choice(self.recipe, first.rank, first.world_size, [exchange.part for exchange in self._begun])
            self.steps += 1
            for exchange in self._begun:
                exchange.commit()
            # DDP rebuilds its buckets after the first pass. The residuals of old buckets were copied to new ones.
            begun = {id(exchange) for exchange in self._begun}
            parameters = {id(parameter) for exchange in self._begun for parameter in exchange.parameters}
            self._exchanges = {
                key: exchange
                for key, exchange in self._exchanges.items()
                if id(exchange) in begun or not parameters.intersection(key)
            }
        self._begun, self.has_averaged = [], True

    def _connect(self) -> None:
        if not dist.is_initialized():
            raise ConfigurationError("torch.distributed is not initialized: call init_process_group first")
        ranks = dist.get_process_group_ranks(self.process_group or dist.group.WORLD)
        self._group = dist.new_group(ranks, timeout=self._timeout, use_local_synchronization=True)
        self._thread = ThreadPoolExecutor(1, "tritoncomm")

    def _new_bucket(self, parameters: list[torch.Tensor]) -> GradientExchange:
        for parameter in parameters:  # in the order of the first pass: the reverse order of the model
            self._names.setdefault(id(parameter), f"parameter {len(self._names)}")
        names = [self._names[id(parameter)] for parameter in parameters]
        exchange = GradientExchange(
            parameters, self.recipe, self._group, self._timeout, self._dense_below, names, flattened=self._flattened
        )
        fields = {
            "version": __version__,
            "recipe": repr(self.recipe),
            "options": f"on_nonfinite={self.on_nonfinite!r}, dense_below={self._dense_below}",
            "parameter names": names,
            "parameter shapes": [tuple(parameter.shape) for parameter in parameters],
        }
        with setup_checks.propagate_errors(self._group):
            if self._loaded is not None:
                _fill(exchange, self._loaded, names)
        setup_checks.compare(fields, self._group)
        exchange.agree_on_exchange_id()
        for number, other in enumerate(self._exchanges.values()):
            exchange.adopt_residuals(other)
            if number == 0:
                exchange.feedback.algorithm.migrate([], 1.0, other.feedback.algorithm.state_dict())
        self._exchanges[tuple(map(id, parameters))] = exchange
        return exchange

    def _stream(self, device: torch.device) -> torch.cuda.Stream:  # pragma: no cover - needs a GPU
        if not hasattr(self, "_side_stream"):
            self._side_stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        return self._side_stream

    def metrics(self) -> dict[str, float]:
        """Return metrics of the last backward pass and totals, as a flat dict for TensorBoard or W&B.

        Bytes, messages and seconds are sums over the buckets. See :meth:`tritoncomm.SparseOptimizer.metrics`.
        """
        exchanges = list(self._exchanges.values())
        numel = sum(exchange.layout.numel for exchange in exchanges)
        delivered = sum(exchange.last["density_delivered"] * exchange.layout.numel for exchange in exchanges)
        return summed([exchange.last for exchange in exchanges]) | {
            "density": self.recipe.density,
            "density_delivered": delivered / max(numel, 1),
            "steps": float(self.steps),
            "skipped_steps": float(self.skipped_steps),
            "zeroed_values": float(self.zeroed_values),
            "residual_norm": math.hypot(*(float(exchange.feedback.residual.norm()) for exchange in exchanges)),
        }

    def set_density(self, density: float) -> None:
        """Deliver the fraction ``density`` of the entries from now on, the same on all ranks. Residuals are kept.

        Call it between backward passes.

        Raises:
            ConfigurationError: The density is not in (0, 1]. Nothing has changed.
            ConfigMismatchError: Ranks pass different densities, or an invalid one. Nothing has changed.
        """
        with setup_checks.propagate_errors(self.process_group):
            recipe = with_density(self.recipe, density)
        setup_checks.compare({"density": density}, self.process_group)
        for exchange in self._exchanges.values():
            exchange.change_recipe(recipe)
            exchange.agree_on_exchange_id()
        self.recipe = recipe

    @torch.no_grad()
    def flush(self) -> None:
        """Exchange the residuals of all ranks dense, and write their mean into ``.grad``. Residuals become zero.

        Call ``optimizer.step()`` next. All ranks must call this between backward passes. It discards the present
        gradients.
        """
        for exchange in self._exchanges.values():
            exchange.flush()
        self.has_averaged = True

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's residuals by parameter name, and the position in the schedule of the method.

        Thresholds are not saved. A resumed run has the same residuals, but it is not bit-identical, because a new
        process has other bucket boundaries. Residuals differ between ranks: save the dict of every rank.
        """
        residuals: dict[str, torch.Tensor] = {}
        for exchange in self._exchanges.values():
            residuals |= {
                self._names[id(p)]: residual.clone() for p, residual in exchange.residuals_by_parameter().items()
            }
        algorithms = [exchange.feedback.algorithm.common_state() for exchange in self._exchanges.values()]
        return checkpoint_format.with_checksum(
            rank=dist.get_rank(self.process_group),
            world_size=dist.get_world_size(self.process_group),
            recipe=self.recipe.name,
            settings=repr(self.recipe),
            residuals=residuals,
            algorithm=algorithms[0] if algorithms else {},
            steps=self.steps,
        )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what :meth:`state_dict` of the same rank returned. Call it before the first backward pass.

        All ranks must call this. If a rank cannot load its state, nothing changes on any rank.

        Raises:
            ConfigurationError: The state is damaged, or belongs to another rank, world size, method or model.
            ConfigMismatchError: Another rank cannot load its state, or loads the state of another step.
        """
        with setup_checks.propagate_errors(self.process_group):
            if self._exchanges:
                raise ConfigurationError("call load_state_dict() before the first backward pass")
            rank, size = dist.get_rank(self.process_group), dist.get_world_size(self.process_group)
            checkpoint_format.check(state, rank=rank, world_size=size, recipe=self.recipe.name)
            if self._shapes and self._shapes != {
                name: residual.numel() for name, residual in state["residuals"].items()
            }:
                raise ConfigurationError("this checkpoint belongs to a model with other parameters")
        setup_checks.compare({"steps": state["steps"]}, self.process_group)
        self._loaded, self.steps = state, state["steps"]


def _after_backward(callback: Callable[[], None]) -> None:
    """Call ``callback`` after DDP has finished the backward pass. An error in it leaves DDP in a valid state."""
    queue = torch.autograd.Variable._execution_engine.queue_callback  # noqa: SLF001
    try:
        queue(lambda: queue(callback))  # DDP queues its own callback between the two
    except RuntimeError as error:
        raise ConfigurationError(
            "DDP called the hook outside of a backward pass, as its join() does, which is not supported: give all "
            f"ranks the same number of batches ({error})"
        ) from error


_SETTINGS = ("recipe", "on_nonfinite", "scaler", "process_group", "_timeout", "_dense_below")


def _fill(exchange: GradientExchange, state: Mapping[str, Any], names: list[str]) -> None:
    """Load the residuals and the method state of one bucket."""
    for (parameter, residual), name in zip(exchange.residuals_by_parameter().items(), names, strict=True):
        saved = state["residuals"].get(name)
        if saved is None or saved.numel() != residual.numel():
            raise ConfigurationError(
                f"the loaded state has no residual for {name} of shape {tuple(parameter.shape)}: "
                "it belongs to another model"
            )
        residual.copy_(saved)
    exchange.feedback.algorithm.migrate([], 1.0, state["algorithm"])


def comm_hook(
    state: CommState,
    bucket: dist.GradBucket,  # type: ignore[name-defined] # exists at run time
) -> torch.futures.Future[torch.Tensor]:
    """Communication hook for ``ddp_model.register_comm_hook(CommState(...), comm_hook)``, and for trainers.

    Accumulate gradients under ``ddp_model.no_sync()``. A hook cannot see which gradients have been averaged before.
    """
    return state.exchange(bucket)


def register(
    model: DistributedDataParallel,
    algo: str | Recipe = "oktopk",
    *,
    density: float = DEFAULT_DENSITY,
    warmup_steps: int = 0,
    node_group: dist.ProcessGroup | None = None,
    on_nonfinite: str | None = None,
    scaler: torch.amp.GradScaler | None = None,
    timeout: timedelta | None = None,
    dense_below: int = DENSE_BELOW,
    **recipe_fields: Any,
) -> CommState:
    """Average the gradients of a ``DistributedDataParallel`` model by sparse exchanges, in parallel with backward.

    All ranks must call this with the same arguments. Each bucket is exchanged when DDP has filled it. Accumulate
    gradients under ``model.no_sync()``: a backward pass that would add to averaged gradients raises
    :class:`RuntimeError`.

    Args:
        model: The DDP module. ``find_unused_parameters=True`` is supported only for dense exchanges.
        algo: See :class:`CommState`. Default: ``"oktopk"``.
        density: Fraction of entries to deliver per step, in (0, 1]. A recipe has its own density. Default: 0.01.
        warmup_steps: Number of dense exchanges before the first sparse one. Default: 0.
        node_group: See :class:`CommState`. Default: None, nodes are not treated separately.
        on_nonfinite: ``"raise"``, ``"propagate"`` or ``"zero"``, see :class:`CommState`. Default: ``"propagate"`` with
            a ``scaler``, else ``"raise"``.
        scaler: The ``GradScaler`` that scales the loss. Residuals are kept in unscaled units. Default: None.
        timeout: Maximum time of each wait for a peer. Default: the time-out of the process group.
        dense_below: Tensors with fewer elements, or at most one dimension, are sent dense. 0 sends none dense.
            Default: 1024.
        **recipe_fields: Further fields of the recipe of ``algo``.

    Returns:
        The state of the hook, with metrics and checkpoints.

    Raises:
        ConfigurationError: An argument is invalid.
        ConfigMismatchError: Ranks are configured differently. The first backward pass raises it.
    """
    if not isinstance(model, DistributedDataParallel):
        raise ConfigurationError(
            f"model is a {type(model).__name__}: pass the DistributedDataParallel module, or call tritoncomm.wrap() "
            "on the optimizer of a plain module"
        )
    chosen = resolve_recipe(algo, density, 0, recipe_fields)
    if model.find_unused_parameters and not (is_dense(chosen) or chosen.density == 1):
        raise ConfigurationError(
            "find_unused_parameters=True: DDP discards the entries that are delivered to a parameter that no rank used "
            "in a pass. Use every parameter, or call tritoncomm.wrap() on the optimizer of the plain module, where a "
            "missing gradient counts as zero"
        )
    state = CommState(
        model.process_group,
        algo,
        density=density,
        warmup_steps=warmup_steps,
        node_group=node_group,
        on_nonfinite=on_nonfinite,
        scaler=scaler,
        timeout=timeout,
        dense_below=dense_below,
        **recipe_fields,
    )
    state.name(dict(model.module.named_parameters()))
    model.register_comm_hook(state, comm_hook)
    _check_accumulation(list(model.parameters()), weakref.ref(state))
    return state


def _check_accumulation(parameters: list[torch.Tensor], owner: "weakref.ref[CommState]") -> None:
    """Make a backward pass raise if it would add to averaged gradients."""

    def check(_: torch.Tensor) -> None:  # runs before this pass adds to any gradient
        state = owner()
        if state is None or not state.has_averaged:
            return
        state.has_averaged = False
        if any(parameter.grad is not None and bool(parameter.grad.any()) for parameter in parameters):
            raise RuntimeError(
                "the averaged gradients of the last backward pass were not reset, and must not be averaged again: call "
                "zero_grad() first, or accumulate under model.no_sync() in all passes but the last"
            )

    for parameter in parameters:
        if parameter.requires_grad:
            parameter.register_hook(check)  # type: ignore[no-untyped-call]
