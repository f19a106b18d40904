"""The communication hook of ``DistributedDataParallel``, and its state.

This file evaluates annotations, because DDP rejects hooks whose annotations are strings.
"""

import copy
import logging
import weakref
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from tritoncomm.algorithms import Recipe
from tritoncomm.errors import (
    ConfigurationError,
    ExchangeError,
    NonFiniteError,
    ProtocolMismatchError,
)
from tritoncomm.scheduler.process_group import is_broken
from tritoncomm.step import carry_over, setup_checks
from tritoncomm.step.ddp_pass import UNUSED, BackwardPass, BucketOrder, with_cause
from tritoncomm.step.exchange import GradientExchange
from tritoncomm.step.hook_state import HookState
from tritoncomm.step.options import (
    DENSE_BELOW,
    check_dense_below,
    check_group,
    check_scaler,
    check_timeout,
    one_of,
    resolve_recipe,
    resolved_small,
)
from tritoncomm.step.private_group import private_group
from tritoncomm.step.torch_internals import at_end_of_backward, averaged_parameters, current_backward, joins
from tritoncomm.step.vector_exchange import ExchangeOptions, VectorExchange
from tritoncomm.version import __version__

logger = logging.getLogger("tritoncomm")

_POLICIES = ("raise", "propagate", "zero")
_JOINED = (
    "join() of DDP is not supported, because a rank without a batch has no gradient to exchange: give all ranks the "
    "same number of batches, or pass throw_on_early_termination=True to end with the first rank that has none"
)


class CommState(HookState):
    """The state of :func:`comm_hook`: the exchange of all buckets, and the residuals.

    :func:`register` creates one. Otherwise, pass it to ``ddp_model.register_comm_hook(state, comm_hook)``. On the CPU,
    buckets are exchanged on a separate thread, in parallel with the backward pass. On a GPU, they are exchanged at its
    end: see :meth:`schedule`. Pickles and copies have the settings only. Save residuals with :meth:`state_dict`. A deep
    copy of a DDP module has no hook: register it.

    Args:
        process_group: Process group of the DDP module. The exchange uses a new group of the same ranks. Default: the
            default process group.
        algo: Name of a method from :func:`tritoncomm.algorithms`, or a recipe. Default: ``"oktopk"``.
        density: Fraction of entries to deliver per step, in (0, 1]. Default: None, which is 0.03, or the density of a
            recipe.
        warmup_steps: Number of dense exchanges before the first sparse one. Default: None, which is 20 for a method,
            and 0 for a dense one or a recipe that wraps another.
        node_group: Process group of the ranks of this rank's node. The exchange is then dense within nodes and sparse
            between them, see :class:`~tritoncomm.Hierarchical`. On a GPU, the host waits often: it has no static form.
            Default: None, nodes are not treated separately.
        on_nonfinite: Action when any rank has a NaN or Inf, or when the mean overflows in the dtype of the bucket, as
            it may with ``fp16_compress_wrapper``. ``"raise"``: ``backward()`` raises
            :class:`~tritoncomm.NonFiniteError` on all ranks. ``"propagate"``: gradients become NaN on all ranks, and a
            ``GradScaler`` skips the step on all ranks. ``"zero"``: NaN and Inf are replaced by zero, and an overflow
            raises. If the step is rejected, residuals do not change. ``wrap(optimizer, model=ddp_model)`` replaces this
            by its own argument. Default: ``"propagate"`` with a ``scaler``, else ``"raise"``.
        scaler: The ``GradScaler`` that scales the loss. Residuals are kept in unscaled units. Default: None.
        timeout: Maximum time of each wait for a peer. Default: the time-out of the process group.
        dense_below: Tensors with fewer elements, or at most one dimension (biases, norms), are sent dense,
            together per bucket. 0 sends no tensor dense. Default: 1024.
        small: Format of these tensors, and of all tensors in the dense steps at the start, ``"fp32"`` or ``"8bit"``,
            see :func:`tritoncomm.wrap`. Default: None, which is ``"8bit"``.
        **recipe_fields: Further fields of the recipe of ``algo``. ``static`` says whether messages have a fixed length.
            By default they do on a GPU if the method has this form, because the host then waits less often. It has
            nothing to do with ``static_graph`` of DDP.

    Raises:
        ConfigurationError: An argument is invalid.
    """

    def __init__(
        self,
        process_group: dist.ProcessGroup | None = None,
        algo: str | Recipe = "oktopk",
        *,
        density: float | None = None,
        warmup_steps: int | None = None,
        node_group: dist.ProcessGroup | None = None,
        on_nonfinite: str | None = None,
        scaler: torch.amp.GradScaler | None = None,
        timeout: timedelta | None = None,
        dense_below: int = DENSE_BELOW,
        small: str | None = None,
        **recipe_fields: Any,
    ) -> None:
        check_group("process_group", process_group)
        small = resolved_small(small)
        recipe = resolve_recipe(
            algo, density, warmup_steps, recipe_fields, node_group, process_group, small=small, function=CommState
        )
        if on_nonfinite == "skip":
            raise ConfigurationError(
                "on_nonfinite='skip': a hook cannot prevent the optimizer's step; call tritoncomm.wrap(optimizer, "
                "model=ddp_model), use 'propagate' with a GradScaler, which skips the step, or use 'raise'"
            )
        policy = on_nonfinite or ("raise" if scaler is None else "propagate")
        one_of("on_nonfinite", policy, _POLICIES)
        check_scaler(scaler)
        check_timeout(timeout)
        check_dense_below(dense_below)
        options = ExchangeOptions(recipe=recipe, timeout=timeout, dense_below=dense_below, small=small)
        super().__init__(GradientExchange(options), process_group, policy, scaler)
        self._start()

    def _start(self) -> None:
        # One thread exchanges the vectors in the order in which DDP passes buckets, which is the same on all ranks.
        self._thread: ThreadPoolExecutor | None = None
        self._queued: list[Callable[[], None]] = []  # on a GPU, until the last bucket
        self._device: torch.device | None = None
        self._pass, self._order = BackwardPass(1.0), BucketOrder()
        self._keep_layout = False
        self._built: list[VectorExchange] = []  # in this pass
        self._failure: BaseException | None = None
        self._broken: BaseException | None = None
        self.has_averaged = False  # gradients hold a mean to which nothing has been added
        self.is_unfinished = False  # a backward pass that synchronizes has begun, not reached its last bucket
        self._model: weakref.ref[DistributedDataParallel] | None = None
        self.is_registered = True  # False for the one in a copy of a DDP module, which DDP does not register

    def __getstate__(self) -> dict[str, Any]:
        options = replace(self.exchange.options, group=None)
        return {"options": options, "on_nonfinite": self.on_nonfinite, "scaler": self.scaler}

    def __setstate__(self, state: dict[str, Any]) -> None:
        HookState.__init__(self, GradientExchange(state["options"]), None, state["on_nonfinite"], state["scaler"])
        self._start()
        self.is_registered = False

    def __deepcopy__(self, memo: dict[int, Any]) -> "CommState":
        clone = self.__class__.__new__(self.__class__)
        memo[id(self)] = clone
        clone.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        return clone

    def name(self, parameters: Mapping[str, torch.Tensor]) -> None:
        """Use the names of ``parameters`` in messages and in :meth:`state_dict`. Call it before the first backward."""
        super().name(parameters)
        flattened = all(parameter.dim() <= 1 for parameter in parameters.values())
        self.exchange.options = replace(self.exchange.options, flattened=flattened)

    def length(self, parameter: torch.Tensor) -> int:
        """See :meth:`HookState.length`."""
        return parameter.numel()

    def was_reset(self, parameter: torch.Tensor) -> bool:
        """See :meth:`HookState.was_reset`. If several workers have not reset their gradients, the pass has failed."""
        return self.model is not None and not self.is_alone

    @property
    def is_alone(self) -> bool:
        """See :attr:`HookState.is_alone`."""
        return dist.get_world_size(self.process_group) == 1

    @property
    def _joins(self) -> bool:
        """True in ``join()`` of the model, if it is known. A single worker never waits for another one."""
        return self.model is not None and joins(self.model) and not self.is_alone

    def schedule(self, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:  # type: ignore[name-defined]
        """Start the exchange of ``bucket``, and return a future of the averaged buffer.

        On the CPU, buckets are exchanged on the thread of this state. On a GPU, all are exchanged in the call for the
        last one. Operations of two threads in two process groups can reach NCCL in another order on each rank, and then
        they never end: those of the exchange, and those of SyncBatchNorm or tensor parallelism in the backward pass.
        """
        buffer, parameters = bucket.buffer(), bucket.parameters()
        self.is_registered, self._device = True, buffer.device
        self._enter()
        first, last = self._order.place(bucket, None if self.model is None else self)
        scale = self.scale if first else 1.0  # reading it waits for a GPU
        on_gpu = buffer.device.type == "cuda"
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future(devices=[buffer.device] if on_gpu else None)
        ready = torch.cuda.current_stream(buffer.device).record_event() if on_gpu else None

        def work() -> None:
            try:
                if first:
                    self._begin(scale)
                self._pass.waiting.append((set(map(id, parameters)), buffer, future))
                if ready is not None:  # buckets may be filled on several streams
                    torch.cuda.current_stream(buffer.device).wait_event(ready)
                self._arrive(parameters, buffer)
                # On a GPU, the host waits as often for all as for one. A limit on the norm is that of all.
                if last or not (on_gpu or self.exchange.options.max_gradient_norm is not None):
                    self._average_ready()
            except BaseException as error:
                self._failure = self._failure or error
            finally:  # DDP always waits for this future
                if last:
                    self._finish()
                self._pass.release(last=last, failed=self._failure is not None)

        self._submit(work, first=first, last=last, on_gpu=on_gpu)
        if last:  # DDP queues its own callback between the two
            at_end_of_backward(lambda: at_end_of_backward(self._raise_failure))
        return future

    def _submit(self, work: Callable[[], None], *, first: bool, last: bool, on_gpu: bool) -> None:
        if not on_gpu:
            if self._thread is None:
                self._thread = ThreadPoolExecutor(1, "tritoncomm")
            self._thread.submit(work)
            return
        self._queued = [work] if first else [*self._queued, work]  # an earlier pass may not have reached its end
        if last:
            queued, self._queued = self._queued, []
            for each in queued:
                each()

    @property
    def device(self) -> torch.device | None:
        """See :attr:`HookState.device`."""
        return super().device if self._device is None else self._device

    def belongs_to(self, model: DistributedDataParallel) -> None:
        """Use the names of the parameters of ``model``, and its settings in messages."""
        self.name(averaged_parameters(model))
        self._model = weakref.ref(model)

    @property
    def model(self) -> DistributedDataParallel | None:
        """The DDP module, if it is alive and known. :func:`comm_hook` alone does not see it."""
        return None if self._model is None else self._model()

    def discard(self, parameters: set[int]) -> None:
        """See :meth:`HookState.discard`."""
        super().discard(parameters)
        self.is_unfinished = False

    def not_averaged(self) -> RuntimeError:
        """See :meth:`HookState.not_averaged`. Tell the other ranks, which wait for this one in the pass."""
        if not self.is_unfinished:
            return super().not_averaged()
        self.is_unfinished = False
        error = RuntimeError(f"DDP has not averaged the gradients of the last backward pass: {UNUSED}")
        self._report(error)
        return error

    def _report(self, error: Exception) -> None:
        """Raise ``error`` on the other ranks, which are in the exchange of a bucket, or compare settings before it."""
        exchange, passes = self.exchange, self.exchange.steps + self.exchange.skipped
        with suppress(ExchangeError, ConfigurationError):
            self._connect()
            # DDP builds other buckets after the first pass. Ranks are compared before each new one.
            if exchange.vectors and (passes > 1 or self._keep_layout):
                scheduler = exchange.vectors[0].scheduler
                assert scheduler is not None
                scheduler.fail(error)
            else:
                setup_checks.propagate_error(str(error), exchange.options.group, self.device)

    def _enter(self) -> None:
        """Connect, and raise an error if DDP calls the hook outside of a backward pass.

        If ``join()`` of the model is known, every rank raises that error without a message from another one. The ranks
        with a batch do in :meth:`_begin`. Otherwise, this rank reports it.
        """
        if current_backward() < 0:
            error = ConfigurationError(_JOINED)
            if not self._joins:
                self._report(error)
            raise error
        if self._joins:  # a rank without a batch does not connect
            return
        try:
            self._connect()
        except ExchangeError as error:
            raise with_cause(error) from None

    def _begin(self, scale: float) -> None:
        """Begin a backward pass, and discard a previous one that did not finish."""
        self.begin_pass()
        self._pass, self._failure, self._built = BackwardPass(scale), self._broken, []
        if self._joins:  # on all ranks, so none of them waits
            self._failure = ConfigurationError(_JOINED)

    def _arrive(self, parameters: list[torch.Tensor], buffer: torch.Tensor) -> None:
        """Note which vectors have arrived with all parameters."""
        if self._failure is not None:  # in an earlier bucket of this pass: all ranks stop exchanging
            return
        if buffer.layout != torch.strided:
            self._keep_sparse(parameters, buffer)
            return
        self._pass.add(parameters, buffer)
        # On this thread, not in the hook: the comparison of ranks must not overlap with an exchange.
        names = [self.name_of(parameter) for parameter in parameters]
        if self._loaded is not None and set(self._loaded["residuals"]) <= set(self.parameters):
            self._build_loaded()
        if self._loaded is not None:
            return
        if self._keep_layout:
            ready = self._pass.whole(self.exchange.vectors)
        else:
            ready = [v for v in self.exchange.vectors if v.names == names] or [self._new_vector_of(parameters)]
        self._pass.ready += [(vector, buffer.dtype) for vector in ready]

    def _keep_sparse(self, parameters: list[torch.Tensor], gradient: torch.Tensor) -> None:
        """Leave a sparse ``gradient`` as it is with one worker. Several cannot exchange it."""
        name = self.name_of(parameters[0])
        if dist.get_world_size(self.process_group) > 1:
            raise ConfigurationError(
                f"{name} has a sparse gradient, and only dense gradients are exchanged: use Embedding(sparse=False)"
            )
        if not bool(gradient.coalesce().values().isfinite().all()):
            raise NonFiniteError(f"NaN or Inf in the gradients of {name}; nothing was applied", [0])
        self._pass.written.update(map(id, parameters))

    def _average_ready(self) -> None:
        """Exchange the vectors that are ready."""
        if self._failure is not None or not self._pass.ready:
            return
        try:
            self._average(self._pass.take_ready(self.exchange.vectors))
        except BaseException as error:  # other ranks may be in an exchange with this one
            self._broken = self.exchange.fail(error)
            raise

    def _average(self, ready: list[tuple[VectorExchange, torch.dtype]]) -> None:
        """Replace the parts of the vectors ``ready`` in DDP's buffers, which have these dtypes, by their mean."""
        vectors, scale = [vector for vector, _ in ready], self._pass.scale
        self._pass.read(vectors)
        self.unscale(vectors, scale)
        # A NaN that becomes zero changes the gradient of a single worker, too.
        kept = [vector.keeps_gradient() and self.on_nonfinite != "zero" for vector in vectors]
        self.exchange.deliver(*vectors, scale=scale, dtypes=[dtype for _, dtype in ready])
        self._pass.write([vector for vector, keeps in zip(vectors, kept, strict=True) if not keeps])
        self._pass.written.update(id(parameter) for vector in vectors for parameter in vector.parameters)

    def _raise_failure(self) -> None:
        error, self._failure = self._failure, None
        if isinstance(error, (ExchangeError, ProtocolMismatchError)) and is_broken(self.exchange.options.group):
            self._broken = error
        if isinstance(error, ExchangeError):
            error = with_cause(error)
        if error is None:
            return
        if not isinstance(error, NonFiniteError) or self.on_nonfinite not in ("propagate", "skip"):
            raise error
        if self.on_nonfinite == "skip":
            level = logging.WARNING if self.scaler is None else logging.INFO
            logger.log(level, "step skipped on all ranks: %s", error)

    def _finish(self) -> None:
        """Commit the backward pass after its last bucket, or roll it back."""
        exchange = self.exchange
        try:
            if self._failure is None:
                self._check_loaded()
                exchange.finish()
        except BaseException as error:
            self._failure = error
        self.has_averaged, self.is_unfinished = True, False
        if self._failure is not None:
            exchange.rollback()
            # The next pass builds them again, from the vectors that they would have replaced.
            exchange.vectors = [vector for vector in exchange.vectors if vector not in self._built]
            return
        # DDP rebuilds its buckets after the first pass. The state of old vectors was copied to new ones.
        used = {id(parameter) for means in exchange.delivered or () for parameter in means.layout.parameters}
        layouts = {id(means.layout) for means in exchange.delivered or ()}
        exchange.vectors = [
            vector
            for vector in exchange.vectors
            if id(vector.layout) in layouts or not used.intersection(map(id, vector.parameters))
        ]
        if exchange.steps == 1:
            exchange.log_choice()

    def _check_loaded(self) -> None:
        if self._loaded is not None:  # some of its parameters have not arrived
            missing = ", ".join(sorted(set(self._loaded["residuals"]) - set(self.parameters)))
            raise ConfigurationError(f"the loaded state belongs to another model: this one has no {missing}")

    def _connect(self) -> None:
        """Create the group of the exchange. DDP uses its own group at the same time."""
        if self.exchange.options.group is None:
            if not dist.is_initialized():
                raise ConfigurationError("torch.distributed is not initialized: call init_process_group first")
            group, belongs_to = private_group(self.process_group, self.exchange.options.timeout, self.device)
            belongs_to(self)
            self.exchange.options = replace(self.exchange.options, group=group)

    def build(self, layout: list[list[str]]) -> list[VectorExchange]:
        """See :meth:`HookState.build`."""
        self._connect()
        return [self._new_vector([self.parameters[name] for name in names]) for names in layout]

    def load_checked(self, state: Mapping[str, Any]) -> None:
        """See :meth:`HookState.load_checked`. A loaded layout is kept, whatever buckets DDP builds."""
        super().load_checked(state)
        self._keep_layout = bool(state["residuals"])

    def keep_layout(self) -> None:
        """See :meth:`HookState.keep_layout`. DDP builds other buckets after the first pass."""
        self._keep_layout = self._keep_layout or bool(self.exchange.vectors)

    def _new_vector_of(self, parameters: list[torch.Tensor]) -> VectorExchange:
        """Return a vector for a bucket that DDP has not passed before."""
        vector = self._new_vector(parameters)
        # Not from vectors that were exchanged in this pass, because their methods are a step ahead.
        ahead = [*self._pass.exchanged, *self._built]
        carry_over.across_layout(vector, [before for before in self.exchange.vectors if before not in ahead])
        vector.agree_on_exchange_id()
        self.exchange.vectors.append(vector)
        self._built.append(vector)
        return vector

    def _new_vector(self, parameters: list[torch.Tensor]) -> VectorExchange:
        """Return a vector for ``parameters`` after the ranks have been compared."""
        options, group = self.exchange.options, self.exchange.options.group
        device = parameters[0].device
        with setup_checks.propagate_errors(group, device):
            vector = self.new_vector(parameters)
        fields = {
            "version": __version__,
            "recipe": setup_checks.settings_of(*options.recipe.layers),
            "options": {
                "on_nonfinite": self.on_nonfinite,
                "dense_below": options.dense_below,
                "small": options.small,
                "select_by": "update" if options.by_update else "gradient",
                "scaler": self.scaler is not None,
            },
            "parameter names": vector.names,
            "parameter shapes": [tuple(parameter.shape) for parameter in parameters],
        }
        setup_checks.compare(fields, group, device)
        return vector

    @torch.no_grad()
    def flush(self) -> list[Any]:
        """See :meth:`HookState.flush`."""
        self.has_averaged = True
        return super().flush()

    def move(self, model: DistributedDataParallel, recipe: Recipe) -> None:
        """Continue with ``model``, a new DDP module around the same parameters, in its process group of any size.

        Residuals are scaled so that the pending update of the remaining ranks does not change.
        """
        setup_checks.check_unused(model, recipe)
        before = self.exchange.vectors
        self.revoke(set(self._stepped()))
        self.process_group = model.process_group
        self.exchange.reset()
        self.exchange.pending = []
        self._failure = self._broken = None
        self.exchange.options = replace(self.exchange.options, group=None, recipe=recipe)
        self.exchange.vectors = self.build([vector.names for vector in before])
        self._keep_layout = True
        for new, old in zip(self.exchange.vectors, before, strict=True):
            carry_over.across_groups(new, old)
        self.exchange.agree_on_exchange_id()
        self._model = weakref.ref(model)
        model.register_comm_hook(self, comm_hook)


def comm_hook(
    state: CommState,
    bucket: dist.GradBucket,  # type: ignore[name-defined] # exists at run time
) -> torch.futures.Future[torch.Tensor]:
    """Communication hook for ``ddp_model.register_comm_hook(CommState(...), comm_hook)``, and for trainers.

    Accumulate gradients under ``ddp_model.no_sync()``. A hook cannot see which gradients have been averaged before.
    """
    return state.schedule(bucket)
