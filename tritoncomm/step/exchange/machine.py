"""The life cycle of one optimizer step: its five states, and the exchange of gradients between them."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from enum import Enum
from functools import partial
from types import MappingProxyType
from typing import NamedTuple

import torch
import torch.distributed as dist

from tritoncomm.algorithms import Recipe
from tritoncomm.errors import ConfigurationError, NonFiniteError, ProtocolMismatchError, TritoncommError
from tritoncomm.primitives.sparse_vector import SparseVector
from tritoncomm.scheduler.meter import Meter
from tritoncomm.scheduler.process_group import ProcessGroupScheduler, is_distributed
from tritoncomm.scheduler.ranks import global_ranks, speaks
from tritoncomm.scheduler.rounds import Pattern
from tritoncomm.scheduler.span import Span
from tritoncomm.scheduler.together import run_together
from tritoncomm.step import agree
from tritoncomm.step.agree.inspection import Inspection
from tritoncomm.step.agree.replica import Replica
from tritoncomm.step.exchange.claim import Claim, Presence, resting
from tritoncomm.step.exchange.decay import add_decay, show_decay, with_decay
from tritoncomm.step.exchange.feedback import ErrorFeedback
from tritoncomm.step.exchange.layout import Delivered, check_range, scattered
from tritoncomm.step.exchange.limit import clipped
from tritoncomm.step.exchange.vector import ExchangeOptions, VectorExchange, listed, noting, raise_first, write_means

logger = logging.getLogger("tritoncomm")


class State(Enum):
    """How far a step is. Residuals and methods change between READY and IDLE, when the step is applied."""

    IDLE = "nothing is under way"
    MEANS = "gradients are being exchanged"
    READY = "all ranks have the mean, which may be applied once"
    SUSPENDED = "this rank has the mean, and some ranks may have applied it"
    STOPPED = "an update of the parameters has begun, and is not complete"


# The state that follows each event. An event that a state does not list is an error in this library.
TRANSITIONS = {
    State.IDLE: {"exchange": State.MEANS, "skip": State.READY, "restart": State.IDLE},
    State.MEANS: {
        "confirm": State.READY,
        "reject": State.IDLE,  # a NaN, an overflow or an error on any rank
        "lose": State.SUSPENDED,  # a rank was lost or stopped in the confirmation
        "stop": State.STOPPED,  # a signal came after the confirmation
    },
    # Other ranks apply the step, so a signal before the update stops it like one within the update.
    State.READY: {"update": State.STOPPED, "stop": State.STOPPED, "discard": State.IDLE},
    State.SUSPENDED: {"exchange": State.MEANS, "catch up": State.READY, "discard": State.IDLE},
    # A stopped rank takes part in exchanges, so that the other ranks hear of it and reject them.
    State.STOPPED: {
        "updated": State.IDLE,
        "restart": State.IDLE,
        "exchange": State.STOPPED,
        "reject": State.STOPPED,
        "lose": State.STOPPED,
    },
}


class _Begun(NamedTuple):
    """A vector whose mean is known, and not applied yet, and the time of its exchange.

    ``sent`` is what was exchanged, and ``mean`` contains the decay. Of vectors that are exchanged together, the first
    has the time of all.
    """

    vector: VectorExchange
    sent: SparseVector
    mean: SparseVector
    span: Span | None


class GradientExchange:
    """The exchange of the gradients of one optimizer step, in one or more flat vectors.

    A step is :meth:`exchange`, in which all ranks confirm that they have all means, and :meth:`update`. If anything
    fails on any rank before all have confirmed, residuals, methods and gradients are as before the step on every rank.

    Args:
        optimizer: The optimizer.
        options: Settings of the vectors.
        all_shards: Scheduler of a group that is larger than the group of the exchange, for models that are sharded. A
            step is confirmed only if no rank of this larger group has rejected it. Default: None.

    Attributes:
        all_shards: See above.
        replica: What must be equal on all ranks with the same shard, and is compared every 100 updates, and early.
        state: How far the present step is.
        vectors: The flat vectors, in the order in which they are exchanged.
        trained: Their parameters in the order of the optimizer. Empty if that is the order of the vectors.
        delivered: The means of a step that is READY. None if it was skipped, and in other states.
        is_flush: Whether the last step was a flush.
        presence: Which parameters have a gradient on any rank.
        inspection: Notices gradients that somebody else averages, when replicas are compared.
        steps: Number of applied steps, also of the runs that were loaded.
        updates: Number of applied steps since all ranks were known to be equal.
        skipped: Number of steps that were rejected, or whose means were thrown away.
        total: Traffic of all steps.
        gradient_norm: Norm of the mean of the last gradients before they were clipped, if they were to be (fp64
            ``[]``). None before.
        owners: The parameter of each anchor, by the id of the anchor.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        options: ExchangeOptions,
        *,
        all_shards: ProcessGroupScheduler | None = None,
    ) -> None:
        self.optimizer = optimizer
        self.options = options
        self.state = State.IDLE
        self.vectors: list[VectorExchange] = []
        self.trained: list[torch.Tensor] = []
        self.delivered: list[Delivered] | None = None
        self.is_flush = False
        self.steps = self.updates = self.skipped = 0
        self.total = Meter()
        self.gradient_norm: torch.Tensor | None = None
        self.all_shards = all_shards
        self.owners: Mapping[int, torch.Tensor] = {}
        self.presence, self.inspection = Presence(), Inspection()
        self._decay: Mapping[int, float] = {}
        self._hidden: Mapping[int, float] = {}  # what of it every .grad gets when the step is applied
        self.replica = Replica(optimizer)
        self._distributed = is_distributed()
        self._begun: list[_Begun] = []
        self._rejected: NonFiniteError | None = None
        self._at_fault = ""  # NaN and Inf values of this rank in this step
        self._leaves_none = False  # whether this step is one of all parameters, also of those without gradient

    def _move(self, event: str) -> None:
        self.state = TRANSITIONS[self.state][event]

    @property
    def parameters(self) -> list[torch.Tensor]:
        """The parameters of all vectors, in the order of :attr:`trained`."""
        return self.trained or [parameter for vector in self.vectors for parameter in vector.parameters]

    @property
    def shard(self) -> int:
        """A number of this rank's shard of the model, equal on the ranks that hold the same shard."""
        return 0 if self.all_shards is None else global_ranks(self.options.group)[0]

    @property
    def shards(self) -> int:
        """Number of shards of the model."""
        return 1 if self.all_shards is None else self.all_shards.world_size // self.vectors[0].world_size

    @property
    def _is_compared(self) -> bool:
        """True in the steps in which ranks compare their replicas and gradients."""
        return self.vectors[0].world_size > 1 and self.replica.is_due(self.updates)

    def _finds_nothing(self) -> bool:
        """Return True if this rank had no gradient, and no rank has given anything. Of an anchor, its owner counts."""
        if any(self.owners.get(id(each), each).grad is not None for each in self.parameters):
            return False
        is_absent = all(id(parameter) in self.presence.absent for parameter in self.parameters)
        return is_absent or not any(bool(step.sent.values.any()) for step in self._begun)

    @property
    def gradients(self) -> list[torch.Tensor | None]:
        """Every ``.grad``, in the order of :attr:`parameters`."""
        return [parameter.grad for parameter in self.parameters]

    def replace_vectors(self, recipe: Recipe, group: dist.ProcessGroup | None) -> None:
        """Exchange by ``recipe`` in ``group`` from now on.

        All ranks of ``group`` call this. New vectors have no residual yet. If this raises, nothing has changed.
        """
        vectors = [
            VectorExchange(old.parameters, old.names, replace(old.options, recipe=recipe, group=group))
            for old in self.vectors
        ]
        for vector in vectors:
            vector.agree_on_exchange_id()
        self.options, self.vectors = vectors[-1].options, vectors

    def restore(self, feedbacks: Sequence[ErrorFeedback]) -> None:
        """Continue with the residual and method state ``feedbacks`` of each vector."""
        for vector, feedback in zip(self.vectors, feedbacks, strict=True):
            vector.feedback = feedback

    def forget_ages(self) -> None:
        """Let every coordinate be delivered now, because the state of a run without late gradients was loaded.

        Ages that were loaded by themselves since the last step belong to that state, and stay.
        """
        for vector in self.vectors if self.updates else ():
            vector.feedback.ledger.deliver_all(self.steps)

    def agree_on_exchange_id(self) -> None:
        """Agree on an identifier of each vector within its group. All ranks call this after comparing settings."""
        for vector in self.vectors:
            vector.agree_on_exchange_id()

    def exchange(
        self,
        *,
        local_error: ConfigurationError | None = None,
        scale: float = 1.0,
        fault: str = "",
        decay: Mapping[int, float] = MappingProxyType({}),
        hides_decay: bool = False,
        look: Callable[[Sequence[torch.Tensor]], None] | None = None,
    ) -> None:
        """Replace every ``.grad`` by the mean over ranks. The state is then READY.

        A rank whose gradients cannot be exchanged takes part with NaN. No rank waits for it, and all ranks reject the
        step.

        Args:
            local_error: Why this rank's gradients cannot be exchanged. This rank raises it after the exchange.
            scale: Loss scale. Gradients are divided by it, and the mean is not multiplied by it.
            fault: What is NaN or Inf on this rank beside the gradients, for the error. The step is then rejected.
                Default: nothing.
            decay: The share of each parameter (by id) that is added to the mean of its gradient.
            hides_decay: Whether ``.grad`` gets this share when the step is applied, because somebody clips it before.
            look: Called on the first rank with its gradients, flat, unless they are shards. Default: None.

        Raises:
            NonFiniteError: The step was rejected, and nothing has changed. The message names ranks and parameters.
            ExchangeError: A peer was lost, or a wait timed out. Nothing has changed, or the state is SUSPENDED.
            ProtocolMismatchError: Another rank has finished another step, has frozen other parameters, uses other
                options, or has not completed the same updates. All ranks raise it.
            ConfigurationError: ``local_error``, a gradient that is not dense, or a process group that was initialized
                after this object was created.
        """
        if not self._distributed and is_distributed():
            raise ConfigurationError("torch.distributed was initialized after wrap(): initialize it before")
        vectors = self.vectors
        span = Span(vectors[0].device)
        self._begin()
        # A single worker that has a residual of earlier exchanges applies all of it, and is then the bare optimizer.
        self._leaves_none = any(vector.is_bare and not vector.keeps_gradient() for vector in vectors)
        rests = resting(self.optimizer) if vectors[-1].delays else frozenset[int]()
        self.presence.begin(self.parameters, leaves_none=self._leaves_none, resting=rests)
        self._decay, self._hidden = decay, decay if hides_decay else {}
        try:
            local_error = self._read(scale, rests, look) or local_error
            if local_error is not None or fault:
                self._spoil(str(local_error or fault))
            kept = [vector.keeps_gradient() for vector in vectors]
            self._deliver()
            if self._is_compared:  # also if this rank rejects the step: the others may not know yet
                self._inspect()
        except TritoncommError:  # the other ranks raise an error, too
            self._rollback()
            raise
        except BaseException as error:
            self._fail(error)
            raise
        try:
            self._finish()
        except NonFiniteError as error:
            raise (local_error or error) from None
        if vectors[0].world_size > 1 and not rests and self._finds_nothing():
            everybody = self.options.group if self.all_shards is None else self.all_shards.group
            self.presence.warn_once(self.steps + 1, speaks=speaks(everybody))
        self._ready(lambda means: write_means(vectors, means, kept, scale, self._left))
        whole = span.end()
        for vector, sent, *_ in self._begun:
            vector.measure(sent, whole if vector is vectors[0] else None)

    def _read(
        self, scale: float, rests: Collection[int], look: Callable[[Sequence[torch.Tensor]], None] | None
    ) -> ConfigurationError | None:
        """Copy every ``.grad`` into the vectors. Return why that is impossible, or None."""
        reasons = [vector.read_gradients(scale, rests) for vector in self.vectors]
        if look is not None and self.all_shards is None and self.vectors[0].rank == 0:
            look([vector.flat for vector in self.vectors])
        return next((reason for reason in reasons if reason is not None), None)

    def _inspect(self) -> None:
        """Look whether somebody else averages the gradients of this rank."""
        first = self.vectors[0]
        named = [(self.owners.get(id(p), p), each.name_of(p)) for each in self.vectors for p in each.parameters]
        self.inspection.run(self.options.group, named, self.steps + 1, first.equal_on_all_ranks, first.device)

    def flush(self) -> None:
        """Exchange the residuals dense, and replace every ``.grad`` by their mean. The state is then READY.

        The means have no entries of zero. For errors see :meth:`exchange`.
        """
        self._begin()
        self.is_flush = self._leaves_none = True
        self.presence.begin(self.parameters, leaves_none=True)
        for vector in self.vectors:
            vector.flat.zero_()
        self._deliver(dense=True)
        self._finish()
        for vector, sent, _, span in self._begun:
            vector.measure(sent, span)
        self._ready(lambda means: scattered(means, zeros=False))

    def skip(self) -> None:
        """Let the next step apply nothing, because this one was rejected on all ranks, or is applied already."""
        self._move("skip")

    @contextmanager
    def update(self) -> Iterator[None]:
        """Apply the step: residuals and methods become those after the step, and the body updates the parameters.

        An error or a signal in the body leaves the state STOPPED: parameters may be partly updated.
        """
        self._move("update")
        for vector, _, mean, _ in self._begun:
            show_decay(vector, mean, self._hidden, self._left)
        self._commit()
        for vector in self.vectors:
            vector.ages.open(vector.feedback.ledger, self.steps + 1)
        yield
        for vector in self.vectors:
            vector.ages.close()
        self.steps, self.updates = self.steps + 1, self.updates + 1
        self._move("updated")

    def stop(self) -> None:
        """Stop a step that all ranks have confirmed, because of a signal. The other ranks apply it.

        Residuals and methods become those after the step, so that this rank can exchange with the others once more, and
        they learn of it.
        """
        if self.state in (State.MEANS, State.READY):
            self._move("stop")
            self._commit()

    def _commit(self) -> None:
        for vector, *_ in self._begun:
            vector.commit(self._left)
        self._begun, self.delivered = [], None

    def discard(self) -> None:
        """Throw the means of a step that is READY away, because nobody uses them. Nothing has changed."""
        if self.state is State.READY:
            self.skipped += bool(self._begun)
            self._drop()
            self._move("discard")

    def check_group(self) -> None:
        """Raise if the process group has failed before."""
        for vector in self.vectors:
            if vector.scheduler is not None:
                vector.scheduler.check()

    def check_complete(self) -> None:
        """Raise :class:`RuntimeError` if an update has stopped."""
        if self.state in (State.MEANS, State.STOPPED):  # a signal leaves MEANS between two lines
            raise RuntimeError(
                f"an error or a signal stopped update {self.updates + 1} in the middle: parameters may be partly "
                "updated, and differ between ranks. On all ranks, load the model and the optimizer from a checkpoint; "
                "with torch.distributed.checkpoint, start the program again"
            )

    def catch_up(self) -> None:
        """Make a step READY that is SUSPENDED, because other ranks have applied it."""
        means, self._hidden = [step.vector.delivered(step.mean) for step in self._begun], {}
        self.delivered = scattered(means, zeros=not self.is_flush, left=self._left)
        self._move("catch up")

    def restart(self) -> None:
        """Begin from a state that is equal on all ranks: parameters were loaded, or compared.

        Means that were not applied are thrown away.
        """
        if self.state is State.MEANS:
            self.stop()
        self.discard()
        if self.state is State.SUSPENDED:
            self._drop()
            self._move("discard")
        self.updates, self.presence = 0, Presence()
        self._move("restart")

    @property
    def _left(self) -> frozenset[int]:
        """The ids of the parameters that the present step leaves alone."""
        return frozenset() if self._leaves_none else self.presence.absent

    def _begin(self) -> None:
        """Begin a step."""
        if self.state is State.READY:
            raise RuntimeError("gradients were exchanged already: call step() or zero_grad() first")
        self.check_group()  # raises if it has failed, and a suspended step is kept
        if self.state is State.MEANS:  # a signal came between the confirmation and the next line
            self.stop()
        self._drop()
        self._rejected, self._at_fault, self.is_flush, self._leaves_none = None, "", False, False
        self._decay = self._hidden = {}
        self._move("exchange")

    def _spoil(self, reason: str) -> None:
        """Let this rank take part with NaN, because of ``reason``."""
        self._at_fault = reason
        for vector in self.vectors:
            vector.flat.fill_(math.nan)

    def _deliver(self, *, dense: bool = False) -> None:
        """Compute the mean of each ``vector.flat`` over ranks, of all entries if ``dense`` is set.

        In ordinary steps of a static form, the host waits for a GPU as often for all vectors as for one. If a rank has
        a NaN or Inf, or a sum overflows, this rank rejects the step in :meth:`_finish`.

        Raises:
            ExchangeError: A peer was lost, or a wait timed out.
        """
        vectors = self.vectors
        schedulers = [vector.scheduler for vector in vectors if vector.scheduler is not None]
        for scheduler in schedulers:
            scheduler.run_beside(schedulers[0])
        for vector in vectors:
            vector.meter = Meter()  # also of one that does not begin, because another one fails before
        limit = None if dense or vectors[0].is_bare else self.options.max_gradient_norm
        clipping = None if limit is None else self._clip(limit)
        means: dict[VectorExchange, SparseVector] = {}
        rejections: list[NonFiniteError] = []
        span = Span(vectors[0].device)
        try:
            if clipping is not None and self.all_shards is not None:  # the norm is that of all shards
                self.all_shards.run(clipping, new_step=False)
                clipping = None
            try:
                one, *others = vectors
                begin = partial(noting, means=means, rejections=rejections, dense=dense, waiting=self.presence.waiting)
                for vector in vectors:
                    add_decay(vector, self._decay, self.presence.waiting)
                run_together([begin(one, first=clipping), *map(begin, others)])
            finally:
                self._begun = [_Begun(vector, *2 * (means[vector],), None) for vector in vectors if vector in means]
            raise_first(rejections)
            self._begun = [step._replace(mean=with_decay(step.vector, step.sent, self._decay)) for step in self._begun]
            self._begun[0] = self._begun[0]._replace(span=span.end())
            check_range([step.vector.delivered(step.mean) for step in self._begun])
        except NonFiniteError as error:
            rejected = [vector for vector in vectors if vector not in means]
            if rejected:
                bad = {name: count for vector in vectors for name, count in vector.non_finite().items()}
                self._at_fault = self._at_fault or listed(bad)
            for vector in rejected:
                vector.measure(None, span.end() if vector is rejected[0] else None)
            self._rejected = error
        except BaseException as error:
            self._fail(error)
            raise

    def _clip(self, limit: float) -> Pattern[None]:
        """Scale the gradients to this norm at most, see :func:`~tritoncomm.step.exchange.limit.clipped`."""
        size = self.vectors[0].world_size
        self.gradient_norm = yield from clipped(self.vectors, limit, self.shard, self.shards, size)

    def _fail(self, error: BaseException) -> None:
        """Roll back, and report ``error`` to the ranks that may wait for this one and do not raise it themselves."""
        if self.state is State.IDLE:  # it was reported
            return
        self._rollback()
        scheduler = self.vectors[0].scheduler
        if scheduler is not None and not isinstance(error, TritoncommError):  # else it is reported, or all raise it
            scheduler.fail(error)
        if self.all_shards is not None:
            self.all_shards.fail(error)  # its other ranks may be in no exchange with this one

    def _rollback(self) -> None:
        """Let the step be rejected. Residuals, methods and gradients have not changed."""
        if self.state is State.IDLE:
            return
        for vector, *_, span in self._begun:
            vector.measure(None, span)
        self._drop()
        self._move("reject")

    def _drop(self) -> None:
        """Forget the means of a step that was not applied."""
        for vector, *_ in self._begun:
            vector.feedback.rollback()
        self._begun, self.delivered = [], None

    def _finish(self) -> None:
        """Return when all ranks have confirmed the step. If one has rejected it, roll back.

        If a rank is lost or stops here, some ranks may apply the step. It is suspended on this one.
        """
        try:
            self._confirm()
        except (NonFiniteError, ProtocolMismatchError):  # all ranks raise it
            self._rollback()
            raise
        except BaseException:
            if self.state is not State.IDLE:  # it was rejected
                self._move("lose")
            raise
        for vector, *_ in self._begun:
            self.total.count("all", vector.meter.sent, vector.meter.received)

    def _confirm(self) -> None:
        """Return after all ranks have called this for the same step, and none has rejected it.

        They then know the parameters without gradient. They tell each other if these may not be those of the last step.
        """
        own = Claim(
            vectors=self.vectors,
            parameters=self.parameters,
            optimizer=self.optimizer,
            updates=self.updates,
            is_stopped=self.state is State.STOPPED,
            presence=self.presence,
            replica=self.replica if self._is_compared else None,
            steps=self.steps,
            group=self.options.group,
            shard=self.shard,
            all_shards=self.all_shards,
            rejects=self._rejected is not None,
        )
        rejected, news = own.confirm()
        if rejected:
            raise self._reject()
        if news:
            self.presence.agree(self.parameters, self.vectors[-1])

    def _reject(self) -> NonFiniteError:
        """Roll back, count the rejected step, and return an error that names ranks and parameters.

        All ranks of the exchange, or of all shards, call this together.
        """
        self._rollback()
        self.skipped += 1
        group, device = self.options.group, self.vectors[0].device
        if self.all_shards is not None:
            group, device = self.all_shards.group, self.all_shards.device
        return agree.naming(self._rejected, self._at_fault, group, device)

    def _ready(self, write: Callable[[list[Delivered]], list[Delivered]]) -> None:
        """Let ``write`` replace every ``.grad`` by the means, and return them. Other ranks may apply the step now.

        Where the decay is hidden, ``.grad`` shows what was exchanged.
        """
        means = [step.vector.delivered(step.mean) for step in self._begun]
        shown = [step.vector.delivered(step.sent) for step in self._begun] if self._hidden else means
        try:
            written = write(shown)
            self.delivered = means if self._hidden else written
        except BaseException:
            self.stop()
            raise
        self._move("confirm")
