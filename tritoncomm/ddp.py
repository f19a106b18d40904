"""Front door 2: a communication hook of ``DistributedDataParallel``.

Annotations are evaluated here, as DDP refuses hooks whose annotations are strings.
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
from tritoncomm.step import setup_checks, state_format
from tritoncomm.step.bucket import fits_dtype
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
    """The state of :func:`comm_hook`: one exchange per bucket, residuals by parameter.

    ``algo``, ``density``, ``warmup_steps``, ``node_group`` and ``recipe_fields`` choose the method as
    :func:`tritoncomm.wrap` does.
    ``on_nonfinite``: when any rank holds a NaN or Inf, ``"raise"`` makes ``backward()`` raise
    :class:`~tritoncomm.NonFiniteError` on all ranks; ``"propagate"`` makes the gradients NaN on all ranks, so that a
    ``GradScaler`` skips the step everywhere; ``"zero"`` takes these values for zero. With a ``scaler``, whose scale
    residuals are kept free of, ``"propagate"`` is the default. In all cases residuals are as before the step. A mean
    that overflows in the bucket's type, under ``fp16_compress_wrapper``, is such a case too.

    ``process_group`` must be that of the DDP module (None: the default one); the exchange has one of its own with
    the same ranks, as it runs beside backward. Pickling leaves out groups and what is owed: :meth:`state_dict`.
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
                "on_nonfinite='skip': a hook cannot keep the optimizer from stepping; choose 'propagate' with a "
                "GradScaler, which skips, or 'raise'"
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
        # One thread: buckets are exchanged in the order in which DDP hands them over, the same on all ranks.
        self._thread: ThreadPoolExecutor | None = None
        self._exchanges: dict[tuple[int, ...], GradientExchange] = {}
        self._loaded: Mapping[str, Any] | None = None
        self._begun: list[GradientExchange] = []
        self._failure: BaseException | None = None
        self._broken: BaseException | None = None
        self.steps = self.skipped_steps = self.zeroed_values = 0
        self.has_averaged = False  # nothing has been added to the averages since

    def __getstate__(self) -> dict[str, Any]:
        kept = {name: value for name, value in vars(self).items() if name in _SETTINGS}
        return kept | {"process_group": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._names, self._shapes, self._flattened = {}, {}, False
        self._start()

    def name(self, parameters: Mapping[str, torch.Tensor]) -> None:
        """Call ``parameters`` by these names in messages and in :meth:`state_dict`; before the first backward pass."""
        self._names = {id(parameter): name for name, parameter in parameters.items()}
        self._shapes = {name: p.numel() for name, p in parameters.items() if p.requires_grad}
        self._flattened = all(parameter.dim() <= 1 for parameter in parameters.values())

    def exchange(self, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:  # type: ignore[name-defined]
        """Start the exchange of ``bucket`` on the thread of this state; the averaged buffer, in the future."""
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
            finally:  # whatever happens, DDP waits for this future
                if last:
                    self._finish()
                future.set_result(buffer)

        assert self._thread is not None
        self._thread.submit(work)
        if last:
            _after_backward(self._raise)
        return future

    def _begin(self) -> None:
        """A pass begins; one before it that did not come to its end is forgotten."""
        for exchange in self._begun:
            exchange.rollback()
        self._begun, self._failure = [], self._broken

    def _raise(self) -> None:
        error, self._failure = self._failure, None
        if isinstance(error, (ExchangeError, ProtocolMismatchError)):
            self._broken = error  # the group is of no more use
        if error is not None and not (isinstance(error, NonFiniteError) and self.on_nonfinite == "propagate"):
            raise error

    def _average(self, parameters: list[torch.Tensor], buffer: torch.Tensor, scale: float) -> None:
        """Put the mean into ``buffer``; NaN after a failure, which DDP would report without its type."""
        if self._failure is not None:  # in an earlier bucket of this pass: on all ranks, or the network is gone
            buffer.fill_(math.nan)
            return
        started = time.perf_counter()
        try:
            # Here and not in the hook: what the ranks compare must not cross an exchange that is under way.
            exchange = self._exchanges.get(tuple(map(id, parameters))) or self._new_bucket(parameters)
            flat, layout = exchange.flat, exchange.layout
            parts = dict(zip(map(id, parameters), torch.split(buffer, [p.numel() for p in parameters]), strict=True))
            pairs = [(parts[id(p)], part) for p, part in zip(layout.parameters, layout.parts(flat), strict=True)]
            for there, here in pairs:
                here.copy_(there)
            if scale != 1.0:
                flat.mul_(1.0 / scale)
            mean = self._deliver(exchange, scale, buffer.dtype)
            for there, here in pairs:
                there.copy_(here if scale == 1.0 else here * scale)
            exchange.measure(mean, time.perf_counter() - started)
        except BaseException as error:
            self._failure = error
            buffer.fill_(math.nan)

    def _deliver(self, exchange: GradientExchange, scale: float, dtype: torch.dtype) -> SparseVector:
        """Begin the exchange of ``exchange.flat``, which becomes the mean; ``dtype`` must hold ``scale`` times it."""
        flat = exchange.flat
        if self.on_nonfinite == "zero":
            before = exchange.zeroed
            exchange.zero_non_finite(flat)
            self.zeroed_values += exchange.zeroed - before
        try:
            mean = exchange.begin(flat)
        except NonFiniteError as error:
            raise exchange.explained(error) if self.on_nonfinite == "raise" else error from None
        self._begun.append(exchange)
        mean.write_to(flat, workspace=exchange.feedback.workspace)
        if not fits_dtype(flat if scale == 1.0 else flat * scale, dtype):  # on all ranks alike, as the mean is
            raise NonFiniteError(
                f"a mean of finite gradients overflows in {dtype}; nothing was applied: use bfloat16, or a "
                "GradScaler, which lowers its scale"
            )
        return mean

    def _finish(self) -> None:
        """What the buckets owe changes now that the last one has gone through, or never."""
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
            # Buckets are rebuilt after the first pass; then the old ones have given away what they owed.
            done = {id(exchange) for exchange in self._begun}
            theirs = {id(parameter) for exchange in self._begun for parameter in exchange.parameters}
            self._exchanges = {
                key: exchange
                for key, exchange in self._exchanges.items()
                if id(exchange) in done or not theirs.intersection(key)
            }
        self._begun, self.has_averaged = [], True

    def _connect(self) -> None:
        if not dist.is_initialized():
            raise ConfigurationError("torch.distributed is not initialised: call init_process_group first")
        ranks = dist.get_process_group_ranks(self.process_group or dist.group.WORLD)
        self._group = dist.new_group(ranks, timeout=self._timeout, use_local_synchronization=True)
        self._thread = ThreadPoolExecutor(1, "tritoncomm")

    def _new_bucket(self, parameters: list[torch.Tensor]) -> GradientExchange:
        for parameter in parameters:  # in the order of the first pass, which is the model's reversed
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
        """Sums over the buckets of the last backward pass, flat; ``density_delivered`` of the whole, and totals."""
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
        """Deliver this share of the entries from the next pass on, on every rank alike. What is owed stays.

        Raises :class:`~tritoncomm.ConfigurationError` for a density that cannot be, and
        :class:`~tritoncomm.ConfigMismatchError` when ranks ask for different ones; nothing changes then.
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
        """Put the mean of everything that the ranks still owe into ``.grad``, dense, for one last optimizer step.

        Gradients are not looked at. All ranks call this, between passes; nothing is owed then.
        """
        for exchange in self._exchanges.values():
            exchange.flush()
        self.has_averaged = True

    def state_dict(self) -> dict[str, Any]:
        """What this rank owes, by parameter, and how far the method's schedule is; thresholds are learnt again.

        Bucket borders of a new process are others, so that a resumed run owes the same and is not bit-identical.
        """
        residuals: dict[str, torch.Tensor] = {}
        for exchange in self._exchanges.values():
            residuals |= {
                self._names[id(p)]: residuals_by_parameter.clone()
                for p, residuals_by_parameter in exchange.residuals_by_parameter().items()
            }
        algorithms = [exchange.feedback.algorithm.common_state() for exchange in self._exchanges.values()]
        return state_format.with_checksum(
            rank=dist.get_rank(self.process_group),
            world_size=dist.get_world_size(self.process_group),
            recipe=self.recipe.name,
            settings=repr(self.recipe),
            residuals=residuals,
            algorithm=algorithms[0] if algorithms else {},
            steps=self.steps,
        )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue what :meth:`state_dict` of the same rank returned; before the first backward pass.

        All ranks load together and go on only if all can. Raises, with nothing changed,
        :class:`~tritoncomm.ConfigurationError` when the state is damaged or belongs to another rank, world size or
        method, and :class:`~tritoncomm.ConfigMismatchError` when another rank refused its state.
        """
        with setup_checks.propagate_errors(self.process_group):
            if self._exchanges:
                raise ConfigurationError("load_state_dict() comes before the first backward pass")
            rank, size = dist.get_rank(self.process_group), dist.get_world_size(self.process_group)
            state_format.check(state, rank=rank, world_size=size, recipe=self.recipe.name)
            if self._shapes and self._shapes != {
                name: residuals_by_parameter.numel() for name, residuals_by_parameter in state["residuals"].items()
            }:
                raise ConfigurationError("this checkpoint belongs to a model with other parameters")
        setup_checks.compare({"steps": state["steps"]}, self.process_group)
        self._loaded, self.steps = state, state["steps"]


def _after_backward(callback: Callable[[], None]) -> None:
    """Call ``callback`` when DDP has put the gradients where they belong, so that an error leaves DDP in order."""
    queue = torch.autograd.Variable._execution_engine.queue_callback  # noqa: SLF001
    try:
        queue(lambda: queue(callback))  # DDP's own callback is queued between the two
    except RuntimeError as error:
        raise ConfigurationError(f"buckets outside of a backward pass, as model.join() makes them: {error}") from error


_SETTINGS = ("recipe", "on_nonfinite", "scaler", "process_group", "_timeout", "_dense_below")


def _fill(exchange: GradientExchange, state: Mapping[str, Any], names: list[str]) -> None:
    for (parameter, residuals_by_parameter), name in zip(exchange.residuals_by_parameter().items(), names, strict=True):
        saved = state["residuals"].get(name)
        if saved is None or saved.numel() != residuals_by_parameter.numel():
            raise ConfigurationError(
                f"the loaded state owes nothing of this shape to {name}, {tuple(parameter.shape)}: "
                "it belongs to another model"
            )
        residuals_by_parameter.copy_(saved)
    exchange.feedback.algorithm.migrate([], 1.0, state["algorithm"])


def comm_hook(
    state: CommState,
    bucket: dist.GradBucket,  # type: ignore[name-defined] # it is there at run time
) -> torch.futures.Future[torch.Tensor]:
    """For ``ddp_model.register_comm_hook(CommState(...), comm_hook)`` and trainers that take such a pair.

    Accumulate gradients under ``ddp_model.no_sync()``, as DDP does not tell a hook what it averaged before.
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
    """Let ``model`` average its gradients sparsely, bucket by bucket, beside backward. Arguments: :class:`CommState`.

    Every rank must call this alike. A backward pass that would add to averaged gradients raises
    :class:`RuntimeError`: accumulate under ``model.no_sync()``.
    """
    if not isinstance(model, DistributedDataParallel):
        raise ConfigurationError(
            f"model is a {type(model).__name__}: pass the DistributedDataParallel module, or use tritoncomm.wrap() "
            "on the optimizer of a plain one"
        )
    chosen = resolve_recipe(algo, density, 0, recipe_fields)
    if model.find_unused_parameters and not (is_dense(chosen) or chosen.density == 1):
        raise ConfigurationError(
            "find_unused_parameters=True: DDP throws away what is delivered to a parameter that no rank used in a "
            "pass. Use every parameter, or tritoncomm.wrap() on the plain module, where a missing gradient is zero"
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
    _refuse_accumulation(list(model.parameters()), weakref.ref(state))
    return state


def _refuse_accumulation(parameters: list[torch.Tensor], owner: "weakref.ref[CommState]") -> None:
    """Raise in the backward pass that would add to gradients which are averages."""

    def check(_: torch.Tensor) -> None:  # before anything of this pass is added to any gradient
        state = owner()
        if state is None or not state.has_averaged:
            return
        state.has_averaged = False
        if any(parameter.grad is not None and bool(parameter.grad.any()) for parameter in parameters):
            raise RuntimeError(
                "gradients of the last backward pass are still there: call zero_grad(), or accumulate under "
                "model.no_sync() in all passes but the last, as averaged gradients must not be averaged again"
            )

    for parameter in parameters:
        if parameter.requires_grad:
            parameter.register_hook(check)  # type: ignore[no-untyped-call]
