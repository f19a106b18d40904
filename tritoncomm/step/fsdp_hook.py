"""The hook of FSDP2, and its state.

The hook keeps the shards that FSDP has reduced. At the end of the backward pass, sparse exchanges average all of them
over the replicas. The host then waits for a GPU as often as for one of them.
"""

from __future__ import annotations

import logging
import math
import weakref
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from tritoncomm.algorithms import Recipe
from tritoncomm.errors import ConfigMismatchError, ConfigurationError, NonFiniteError
from tritoncomm.step import setup_checks
from tritoncomm.step.bucket import add_pairs, copy_pairs
from tritoncomm.step.delivered import Delivered
from tritoncomm.step.exchange import GradientExchange
from tritoncomm.step.hook_state import HookState
from tritoncomm.step.private_group import verdict_of_all
from tritoncomm.step.shards import local
from tritoncomm.step.torch_internals import (
    at_end_of_backward,
    current_backward,
    divisor_after_hook,
    has_gradient_hooks,
)
from tritoncomm.step.vector_exchange import ExchangeOptions, VectorExchange

logger = logging.getLogger("tritoncomm")


class _Arrived(NamedTuple):
    """The gradients of the group of ``hook``, which FSDP has reduced in ``dtype``, and which are in ``vector.flat``.

    FSDP divides them by ``divisor`` after the hook. ``kept`` means that they are the mean already, as with one worker.
    """

    hook: ShardHook
    vector: VectorExchange
    dtype: torch.dtype
    divisor: float
    kept: bool


class _EndOfPass:
    """Finishes a backward pass when autograd calls it. Nothing else refers to it: it is gone if the pass has failed."""

    def __init__(self, state: FSDPState) -> None:
        self._state = state

    def __call__(self) -> None:
        """Finish the pass."""
        self._state.finish_backward()


class ShardHook:
    """The hook of one FSDP parameter group. A call takes its reduced shard for the exchange with the replicas.

    Args:
        group: The parameter group of FSDP.
        owner: The state that holds this hook.

    Attributes:
        names: Names of the parameters that are exchanged.
    """

    def __init__(self, group: Any, owner: FSDPState) -> None:
        self._group = group
        self.owner = owner
        # The sum of the micro-batches that are not exchanged yet, in unscaled units, and the parameters that have it.
        self._unsent: torch.Tensor | None = None
        self._held: set[int] = set()
        self._trained = [each for each in group.fsdp_params if each.sharded_param.requires_grad]
        # FSDP places the shards one after the other, each padded to the same length on all ranks.
        self._starts, self._numel = [], 0
        for each in self._trained:
            self._starts.append(self._numel)
            self._numel += each.padded_sharded_param_size.numel()
        self.parameters: list[torch.Tensor] = [each.sharded_param for each in self._trained]
        self.names = [owner.name_of(parameter) for parameter in self.parameters]

    @property
    def vector(self) -> VectorExchange:
        """The flat vector of this group."""
        return next(vector for vector in self.owner.exchange.vectors if vector.names == self.names)

    def __call__(self, shard: torch.Tensor) -> None:
        """Take ``shard`` (flat, any float dtype, padding included), and leave zeros, to which the mean is added later.

        If something uses the gradient before the end of the backward pass, leave the mean.
        """
        self._check(shard)
        if shard.is_cuda:  # FSDP may free it on the stream that has reduced it, which does not wait for this one
            shard.record_stream(torch.cuda.current_stream(shard.device))
        self.discard(
            {id(parameter) for parameter in self.parameters if parameter.grad is None}
        )  # zero_grad() was called
        # The user called set_requires_all_reduce(False). FSDP itself obeys it only with HSDP, so it is handled here.
        if not self._group.all_reduce_grads:
            unscaled = shard.to(torch.float32, copy=True).mul_(1.0 / self.owner.scale_of_pass())
            self._unsent = unscaled if self._unsent is None else self._unsent.add_(unscaled)
            self._held.update(map(id, self.parameters))
            shard.zero_()
            return
        if self._unsent is not None:
            shard.add_(self._unsent.mul_(self.owner.scale_of_pass()))
            self._unsent = None
            self._held.clear()
        vector = self.owner.enter(self)
        parts = self._parts(vector, shard)
        copy_pairs(parts)
        # A NaN that becomes zero changes the gradient of a single worker, too.
        kept = vector.keeps_gradient() and self.owner.on_nonfinite != "zero"
        arrived = _Arrived(self, vector, shard.dtype, divisor_after_hook(self._group, shard.dtype), kept)
        if self.names[0] not in self.owner.early:
            self.owner.ready.append(arrived)
            if not kept:
                shard.zero_()
        elif not self.owner.average([arrived]):
            shard.fill_(math.nan)
        elif not kept:
            copy_pairs([(shard_part, flat_part) for flat_part, shard_part in parts])

    def _check(self, shard: torch.Tensor) -> None:
        if any(each.sharded_param is not p for each, p in zip(self._trained, self.parameters, strict=True)):
            raise ConfigurationError(
                f"{self.names[0]} was replaced after register(), as load_state_dict(assign=True) does: load before "
                "register() or wrap(), or without assign=True"
            )
        if current_backward() < 0:
            raise ConfigurationError(
                "FSDP reduces gradients outside of backward(), as torch's pipelining does: the hook does not support "
                "this; call tritoncomm.wrap(optimizer, process_group=...) without model="
            )
        if shard.numel() != self._numel:
            raise ConfigurationError(
                f"FSDP reduced a shard of {shard.numel()} elements, but {self._numel} were registered, the first for "
                f"{self.names[0]}: call register() after fully_shard() and after freezing parameters, and "
                "use every parameter in each pass"
            )

    def gradients(self, vector: VectorExchange) -> list[torch.Tensor]:
        """Return this rank's shard of each ``.grad``, in the order of ``vector.layout``. None may be missing."""
        shards = {name: local(each.grad) for name, each in zip(self.names, self.parameters, strict=True)}
        return [shards[self.owner.name_of(parameter)] for parameter in vector.layout.parameters]

    def add_mean(self, arrived: _Arrived) -> None:
        """Add the mean in ``vector.flat`` to the gradients, rounded as FSDP would have rounded the shard."""
        gradients, vector = self.gradients(arrived.vector), arrived.vector
        mean = vector.flat.to(arrived.dtype)
        if arrived.divisor != 1.0:
            mean = mean.div(arrived.divisor)
        mean = mean.to(gradients[0])  # all gradients of a group have the same dtype
        parts = zip(gradients, vector.layout.parts(mean), strict=True)
        add_pairs([(gradient, part.view(gradient.shape)) for gradient, part in parts])

    def spoil(self) -> None:
        """Set the gradients to NaN, because they are neither those of this rank nor their mean."""
        for parameter in self.parameters:
            if parameter.grad is not None:
                local(parameter.grad).fill_(math.nan)

    def has_early_users(self) -> bool:
        """Return True if a hook of the user waits for the gradient of a parameter."""
        return any(has_gradient_hooks(parameter) for parameter in self.parameters)

    def discard(self, parameters: set[int]) -> None:
        """Discard the micro-batches of ``parameters`` (ids) that are not exchanged yet."""
        self._held -= parameters
        if not self._held:
            self._unsent = None
        if self._unsent is not None:
            for parameter, start in zip(self.parameters, self._starts, strict=True):
                if id(parameter) in parameters:
                    self._unsent[start : start + local(parameter).numel()] = 0.0

    def _parts(self, vector: VectorExchange, shard: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return the part of the flat vector and of ``shard`` that belong to each parameter, without padding."""
        starts = dict(zip(self.names, self._starts, strict=True))
        pairs = [
            (starts[self.owner.name_of(parameter)], part)
            for parameter, part in zip(vector.layout.parameters, vector.layout.parts(vector.flat), strict=True)
        ]
        return [(part, shard[start : start + part.numel()]) for start, part in pairs]


class FSDPState(HookState):
    """The state that :func:`register` returns: the exchanges of all parameter groups, and their residuals.

    A backward pass is committed at its end. If any rank found a NaN or Inf in it, the pass is rejected, and residuals
    stay as they were before the pass.

    Micro-batches under ``model.set_requires_all_reduce(False)`` are part of the gradient: a state dict does not have
    them, and ``zero_grad`` discards them. One that sets gradients to zero, not to None, does so for a wrapped optimizer
    only.

    Attributes:
        group: Process group of the replicas.
        hooks: The hook of each parameter group.
        ready: Groups of this pass that are exchanged at its end.
        early: Groups, by the name of their first parameter, that are exchanged in the middle of a pass because a hook
            of the user waits for a gradient.
    """

    def __init__(
        self,
        options: ExchangeOptions,
        scaler: torch.amp.GradScaler | None,
        device: torch.device,
        parameters: Mapping[str, torch.Tensor],
    ) -> None:
        exchange = GradientExchange(options, verdict=verdict_of_all(options.recipe.name, options.timeout, device))
        super().__init__(exchange, None, "propagate", scaler)
        self.name(parameters)
        self.group = options.group
        self.hooks: list[ShardHook] = []
        self.ready: list[_Arrived] = []
        self.early: set[str] = set()
        self._entered: list[ShardHook] = []
        self._streams: set[torch.cuda.Stream] = set()
        self._pass: weakref.ref[_EndOfPass] | None = None
        self._scale = -1, 1.0  # backward pass, and its loss scale
        self._compared_hooks = False

    @property
    def device(self) -> torch.device | None:
        """See :attr:`HookState.device`."""
        return self.exchange.options.device

    def was_reset(self, parameter: torch.Tensor) -> bool:
        """See :meth:`HookState.was_reset`."""
        return parameter.grad is None

    @property
    def replicas(self) -> dist.ProcessGroup | None:
        """See :attr:`HookState.replicas`."""
        return self.group

    @property
    def kind(self) -> dict[str, Any]:
        """See :attr:`HookState.kind`."""
        return {"kind": "shards"}

    def length(self, parameter: torch.Tensor) -> int:
        """See :meth:`HookState.length`."""
        return local(parameter).numel()

    def build(self, layout: list[list[str]]) -> list[VectorExchange]:
        """See :meth:`HookState.build`. The layout is that of FSDP's parameter groups, see :meth:`check_loadable`."""
        return [self.new_vector(hook.parameters) for hook in self.hooks]

    def check_movable(self) -> None:
        """See :meth:`HookState.check_movable`. The groups of FSDP do not change."""
        raise ConfigurationError("a sharded model cannot change its groups: load a checkpoint in new processes")

    def move(self, model: Any, recipe: Recipe) -> None:
        """See :meth:`HookState.move`."""
        self.check_movable()

    def check_loadable(self, state: Mapping[str, Any]) -> None:
        """See :meth:`HookState.check_loadable`."""
        super().check_loadable(state)
        layout = state["algorithm"]["layout"]
        if [list(names) for names in layout] != [hook.names for hook in self.hooks]:
            raise ConfigurationError(
                "this checkpoint was saved with other parameters or another sharding: call fully_shard() and "
                "register() as in the run that saved it"
            )

    def not_averaged(self) -> RuntimeError:
        """See :meth:`HookState.not_averaged`."""
        return RuntimeError(
            "the hook has averaged no gradients since the last step(): call step() after a backward pass without "
            "model.set_requires_gradient_sync(False) and model.set_requires_all_reduce(False)"
        )

    def discard(self, parameters: set[int]) -> None:
        """See :meth:`HookState.discard`. Micro-batches that are not exchanged yet belong to the gradients."""
        super().discard(parameters)
        for hook in self.hooks:
            hook.discard(parameters)

    def load_checked(self, state: Mapping[str, Any]) -> None:
        """See :meth:`HookState.load_checked`."""
        super().load_checked(state)
        self.discard(_ids(self.parameters))

    def enter(self, hook: ShardHook) -> VectorExchange:
        """Return the vector of ``hook``, which begins. The first hook of a pass queues the commit at its end.

        A backward pass within another one, as of reentrant checkpointing, belongs to the outer one.
        """
        under_way = self._pass is not None and self._pass() is not None
        if hook in self._entered and under_way:
            self._abandon()
            raise ConfigurationError(
                f"{hook.names[0]} is used twice in a forward pass, and FSDP reduces its gradient in "
                "two parts: call fully_shard() on the module that uses it, not on the part that is used twice"
            )
        if not under_way:
            # Another pass. If the previous one did not finish, it is discarded.
            self._abandon()
            kept = any(parameter.grad is not None for parameter in self.parameters.values())
            self.begin_pass(keep_delivered=kept and bool(self.connected) and not self.consumed)
            self._queue_end()
        self._compare_early()
        if hook.has_early_users() and hook.names[0] not in self.early:
            self._abandon()
            raise ConfigurationError(
                f"a hook for the gradient of a parameter was registered after the first backward pass, in the group of "
                f"{hook.names[0]}: call register_post_accumulate_grad_hook() before it, on all ranks"
            )
        self._entered.append(hook)
        vector = hook.vector
        if vector.device.type == "cuda":
            self._streams.add(torch.cuda.current_stream(vector.device))
        return vector

    def _queue_end(self) -> None:
        end = _EndOfPass(self)
        self._pass = weakref.ref(end)
        # Queued twice: a model with several roots of FSDP has as many callbacks, which may reduce further groups.
        at_end_of_backward(partial(at_end_of_backward, end))

    def _compare_early(self) -> None:
        """Note in the first pass for which groups a hook of the user waits. They must be the same on all replicas."""
        if self._compared_hooks:
            return
        found = [hook.names[0] for hook in self.hooks if hook.has_early_users()]
        fields = {"replicas": dist.get_process_group_ranks(self.group), "groups": found}
        everybody = setup_checks.gather(fields, None, self.device)  # all shards take part in a pass
        for rank, told in enumerate(everybody):
            first = next(other for other in everybody if other["replicas"] == told["replicas"])
            if told["groups"] != first["groups"]:
                raise ConfigMismatchError(
                    f"rank {rank} has called register_post_accumulate_grad_hook() for parameters of the groups "
                    f"{told['groups']}, and rank {told['replicas'][0]} for {first['groups']}: call it for the same "
                    "parameters on all ranks"
                )
        if self.exchange.options.max_gradient_norm is not None and any(told["groups"] for told in everybody):
            raise ConfigurationError(
                "clip_by='gradient' needs the gradients of all groups before the first is averaged, and "
                "register_post_accumulate_grad_hook() waits for one: leave clip_by out, or do not call it"
            )
        self.early, self._compared_hooks = set(found), True

    def scale_of_pass(self) -> float:
        """Return the loss scale. It is read once in a pass, because the host waits for a GPU."""
        number = current_backward()
        if self._scale[0] != number:
            self._scale = number, self.scale
        return self._scale[1]

    def _abandon(self) -> None:
        self.exchange.rollback()
        self._entered, self.ready = [], []

    def average(self, arrived: Sequence[_Arrived]) -> bool:
        """Replace the flat vectors by their means, times the loss scale. Return False if the pass will be rejected."""
        scale, vectors = self.scale_of_pass(), [each.vector for each in arrived]
        try:
            self.unscale(vectors, scale)
            dtypes, divisors = [each.dtype for each in arrived], [each.divisor for each in arrived]
            averaged = self.exchange.deliver(*vectors, scale=scale, dtypes=dtypes, divisors=divisors)
            if averaged and scale != 1.0:
                for vector in vectors:
                    vector.flat.mul_(scale)
        except BaseException as error:
            self._fail(error)
            raise
        return averaged

    def _fail(self, error: BaseException) -> None:
        """Discard the pass, and tell the other ranks."""
        self._abandon()
        self.exchange.fail(error)

    @torch.no_grad()
    def _average_ready(self) -> None:
        """Exchange all groups that have arrived, and add their means to the gradients, where the hooks left zeros."""
        order = {vector: number for number, vector in enumerate(self.exchange.vectors)}
        # Replicas may run layers in another order.
        ready, self.ready = sorted(self.ready, key=lambda each: order[each.vector]), []
        averaged = False
        try:
            averaged = bool(ready) and self.average(ready)
            for each in ready if averaged else ():
                if not each.kept:
                    each.hook.add_mean(each)
        except BaseException as error:
            averaged = False
            self._fail(error)
            raise
        finally:
            for each in ready if not averaged else ():
                each.hook.spoil()

    def finish_backward(self) -> None:
        """Exchange what is ready. Commit the backward pass, or discard it if any rank found a NaN or Inf.

        All ranks call this.
        """
        entered, self._entered, self._pass = self._entered, [], None
        streams, self._streams = self._streams, set()
        for stream in streams:  # FSDP writes gradients there, and waits for them only after its last backward pass
            torch.cuda.current_stream(stream.device).wait_stream(stream)
        try:
            self._average_ready()
            self._finish(entered)
        finally:
            for stream in streams:  # the next pass adds to gradients there, and may begin on another stream than this
                stream.wait_stream(torch.cuda.current_stream(stream.device))

    @torch.no_grad()
    def _finish(self, entered: Sequence[ShardHook]) -> None:
        """Commit the pass of the hooks ``entered``, or discard it."""
        try:
            self.exchange.finish()
        except NonFiniteError as error:
            for hook in entered:  # the ranks of another shard may have rejected it
                hook.spoil()
            if self.on_nonfinite == "raise":
                raise
            if self.on_nonfinite == "skip":
                level = logging.WARNING if self.scaler is None else logging.INFO
                logger.log(level, "step skipped on all ranks: %s", error)
            else:
                logger.warning("gradients become NaN: %s", error)

    @torch.no_grad()
    def flush(self) -> list[Delivered]:
        """See :meth:`HookState.flush`."""
        self.discard(_ids(self.parameters))
        return super().flush()


def _ids(parameters: Mapping[str, torch.Tensor]) -> set[int]:
    return {id(parameter) for parameter in parameters.values()}
