"""The life cycle of one optimizer step: the exchange of gradients between its states."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch

from tritoncomm.errors import (
    ConfigMismatchError,
    ConfigurationError,
    ExchangeError,
    NonFiniteError,
    ProtocolMismatchError,
    TritoncommError,
)
from tritoncomm.primitives.sparse_vector import SparseVector
from tritoncomm.scheduler.meter import Meter
from tritoncomm.scheduler.process_group import is_distributed
from tritoncomm.scheduler.ranks import speaks
from tritoncomm.scheduler.rounds import Pattern
from tritoncomm.scheduler.span import Span
from tritoncomm.step.agree import UPDATES, UPDATES_ADVICE, differences, naming, worded
from tritoncomm.step.agree.number import number_of_text
from tritoncomm.step.agree.replica import Replica
from tritoncomm.step.agree.setup import option_numbers
from tritoncomm.step.exchange.decay import show_decay
from tritoncomm.step.exchange.pending import TRANSITIONS, Pending, State
from tritoncomm.step.exchange.presence import Presence, without_rate
from tritoncomm.step.exchange.scope import Inspection, Scope, Vote, advice, lead, vote
from tritoncomm.step.exchange.vector import VectorExchange, clipped
from tritoncomm.step.recipes import is_dense


class GradientExchange:
    """The exchange of the gradients of one optimizer step, in one or more flat vectors.

    A step is :meth:`exchange`, in which all ranks confirm that they have all means, and :meth:`update`. If anything
    fails on any rank before all have confirmed, residuals, methods and gradients are as before the step on every rank.

    Args:
        scope: What is exchanged, and with whom.

    Attributes:
        scope: See above.
        state: How far the present step is.
        pending: The present step.
        presence: Which parameters have a gradient on any rank.
        inspection: Notices gradients that somebody else averages, when replicas are compared.
        steps: Number of applied steps, also of the runs that were loaded.
        updates: Number of applied steps since all ranks were known to be equal.
        skipped: Number of steps that were rejected, or whose means were thrown away.
        total: Traffic of all steps.
        gradient_norm: Norm of the mean of the last gradients before they were clipped, if they were to be (fp64
            ``[]``). None before.
    """

    def __init__(self, scope: Scope) -> None:
        self.scope = scope
        self.state, self.pending = State.IDLE, Pending()
        self.steps = self.updates = self.skipped = 0
        self.total = Meter()
        self.gradient_norm: torch.Tensor | None = None
        self.presence, self.inspection = Presence(), Inspection()

    def _move(self, event: str) -> None:
        self.state = TRANSITIONS[self.state][event]

    @property
    def _is_compared(self) -> bool:
        """True in the steps in which ranks compare their replicas and gradients."""
        return self.scope.vectors[0].world_size > 1 and self.scope.replica.is_due(self.updates)

    def _finds_nothing(self) -> bool:
        """Return True if this rank had no gradient, and no rank has given anything. Of an anchor, its owner counts."""
        if any(owner.grad is not None for owner in self.scope.owners.values()):
            return False
        is_absent = all(id(parameter) in self.presence.absent for parameter in self.scope.parameters)
        return is_absent or not any(bool(part.sent.mean.values.any()) for part in self.pending.parts)

    def adopt(self, new: Scope) -> None:
        """Exchange what ``new`` says from now on, on all ranks. Counters and the step stay."""
        self.scope = new
        new.replica.agreed = self.steps

    def forget_ages(self) -> None:
        """Let every coordinate be delivered now, because the state of a run without late gradients was loaded.

        Ages that were loaded by themselves since the last step belong to that state, and stay.
        """
        for vector in self.scope.vectors if self.updates else ():
            vector.feedback.ages.deliver_all(self.steps)

    def exchange(self, step: Pending) -> None:
        """Replace every ``.grad`` by the mean over ranks. The state is then READY.

        In a flush, the mean is that of the residuals, and has no entries of zero. Otherwise, a rank whose gradients
        cannot be exchanged takes part with NaN. No rank waits for it, and all ranks reject the step.

        Args:
            step: What is known of the step, such as the scale, the decay, and why this rank rejects it.

        Raises:
            NonFiniteError: The step was rejected, and nothing has changed. The message names ranks and parameters.
            ExchangeError: A peer was lost, or a wait timed out. Nothing has changed, or the state is SUSPENDED.
            ProtocolMismatchError: Another rank has finished another step, has frozen other parameters, uses other
                options, or has not completed the same updates. All ranks raise it.
            ConfigMismatchError: Another rank has failed while replicas were compared. Nothing has changed.
            ConfigurationError: ``step.error``, a gradient that is not dense, or a process group that was initialized
                after this object was created.
        """
        first = self.scope.vectors[0]
        if first.scheduler is None and is_distributed():
            raise ConfigurationError("torch.distributed was initialized after wrap(): initialize it before")
        # A single worker that has a residual of earlier exchanges applies all of it, and is then the bare optimizer.
        delivers_all = step.is_flush or (first.is_bare and not self.owes_nothing())
        self._begin(step)
        try:
            rests = self._begin_presence(delivers_all=delivers_all)
            step.read(self.scope.vectors, rests)
            self._deliver()
            if self._is_compared and not step.is_flush:  # also if this rank rejects it: the others may not know yet
                self.inspection.run(self.scope, self.steps + 1)
        except BaseException as error:
            self._rollback()
            self._tell(error)
            raise
        try:
            self._finish()
        except NonFiniteError as error:
            raise (step.error or error) from None
        if first.world_size > 1 and not (step.is_flush or rests) and self._finds_nothing():
            self.presence.warn_once(self.steps + 1, speaks=speaks(self.scope.everybody))
        self._ready()

    def skip(self) -> None:
        """Let the next step apply nothing, because this one was rejected on all ranks, or is applied already."""
        self.pending.gradients = self.scope.gradients
        self._move("skip")

    @contextmanager
    def update(self) -> Iterator[None]:
        """Apply the step: residuals and methods become those after the step, and the body updates the parameters.

        An error or a signal in the body leaves the state STOPPED: parameters may be partly updated.
        """
        self._move("update")
        for part in self.pending.parts if self.pending.shown else ():
            show_decay(part.vector, part.mean.mean, self.pending.decay, self._left)
        self._commit()
        for vector in self.scope.vectors:
            vector.feedback.ages.steps = self.steps + 1
        yield
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
        for part in self.pending.parts:
            part.vector.commit(self._left | self.presence.resting)
        self.pending = Pending()

    def discard(self) -> None:
        """Throw the means of a step that is READY away, because nobody uses them. Nothing has changed."""
        if self.state is State.READY:
            self.skipped += bool(self.pending.parts)
            self._drop()
            self._move("discard")

    def check_group(self) -> None:
        """Raise if the process group has failed before."""
        for scheduler in self.scope.schedulers:
            scheduler.check()

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
        self._write()
        self._move("catch up")

    def restart(self) -> None:
        """Begin from a state that is equal on all ranks: parameters were loaded, or compared.

        Means that were not applied are thrown away.
        """
        if self.state is State.MEANS:
            self.stop()
        self.discard()
        self._drop()
        self.updates, self.presence = 0, Presence()
        self._move("restart")

    @property
    def _left(self) -> frozenset[int]:
        """The ids of the parameters that the present step leaves alone."""
        return self.presence.absent

    def owes_nothing(self) -> bool:
        """Return True if a single worker has no residual that it could apply: it is then the bare optimizer."""
        rests = self.scope.frozen_ids() if self.scope.vectors[0].is_bare else frozenset[int]()
        kept = [vector.look_for_residual(rests) for vector in self.scope.vectors]
        return all(kept)

    def has_no_residual(self) -> bool:
        """Return True if no rank has a residual that waits. A dense exchange rounds nothing, and delivers all."""
        return self.owes_nothing() if self.scope.vectors[0].is_bare else is_dense(self.scope.options.recipe)

    def _begin(self, step: Pending) -> None:
        """Begin ``step``."""
        if self.state is State.READY:
            raise RuntimeError(
                "gradients were exchanged already: call step() first, or zero_grad() of the optimizer, not of the model"
            )
        self.check_group()  # raises if it has failed, and a suspended step is kept
        if self.state is State.MEANS:  # a signal came between the confirmation and the next line
            self.stop()
        self._drop()
        step.span = Span(self.scope.vectors[0].device)
        self.pending = step
        self._move("exchange")

    def _begin_presence(self, *, delivers_all: bool) -> frozenset[int]:
        """Note which parameters have a gradient. Return the ids of those that are left out, as they have no rate."""
        if delivers_all:  # also to those without gradient
            self.presence.begin(self.scope.frozen_ids())
            return frozenset()
        missing = frozenset(id(each) for each in self.scope.parameters if each.grad is None or not each.requires_grad)
        unrated = without_rate(self.scope.exchanged)
        # At density 1 nothing waits, so nothing rests, either.
        if self.scope.vectors[-1].delays and not self.scope.options.recipe.delivers_all():
            self.presence.begin(missing | unrated)
            return unrated
        self.presence.begin(missing, unrated)
        return frozenset()

    def _deliver(self) -> None:
        """Compute the mean of each ``vector.flat`` over ranks. See :meth:`Pending.deliver`, also for errors."""
        scope, step, options = self.scope, self.pending, self.scope.options.wrap
        vectors, schedulers = scope.vectors, scope.schedulers
        for scheduler in schedulers:
            scheduler.run_beside(schedulers[0])
        for vector in vectors:
            vector.meter = Meter()  # also of one that does not begin, because another one fails before
        clips = not (step.is_flush or vectors[0].is_bare or options.updates)  # updates are not clipped
        clipping = self._clip(options.max_grad_norm) if clips and options.max_grad_norm is not None else None
        if clipping is not None and scope.all_shards is not None:  # the norm is that of all shards
            scope.all_shards.run(clipping, new_step=False)
            clipping = None
        step.deliver(vectors, self.presence.waiting, clipping)

    def _clip(self, limit: float) -> Pattern[None]:
        """Scale the gradients to this norm at most, see :func:`~tritoncomm.step.exchange.vector.clipped`."""
        scope, vectors = self.scope, self.scope.vectors
        shards = 1 if scope.all_shards is None else scope.all_shards.world_size // vectors[0].world_size
        self.gradient_norm = yield from clipped(vectors, limit, scope.shard, shards)

    def _tell(self, error: BaseException) -> None:
        """Report ``error`` to the ranks that may wait for this one and do not raise it themselves."""
        if self.scope.all_shards is not None:
            self.scope.all_shards.fail(error)  # its other ranks may be in no exchange with this one
        scheduler = self.scope.vectors[0].scheduler
        if scheduler is not None and not isinstance(error, TritoncommError):  # else it is reported, or all raise it
            scheduler.fail(error)

    def report(self, error: BaseException) -> Exception | None:
        """Report ``error`` of this rank, outside of an exchange, to the others, which may wait for it in one.

        Return what this rank raises instead. None if there is nobody to tell.
        """
        found = None if self.scope.all_shards is None else self.scope.all_shards.fail(error)
        if isinstance(found, ExchangeError):  # it says who is lost, of all ranks
            error = ExchangeError(str(found), found.peers)
        scheduler = self.scope.vectors[0].scheduler
        told = None if scheduler is None else scheduler.fail(error)
        return found or told

    def _rollback(self) -> None:
        """Let the step be rejected. Residuals, methods and gradients have not changed."""
        if self.state is State.IDLE:
            return
        if self.pending.parts or self.pending.rejection is not None:
            self._measure({})
        self._drop()
        self._move("reject")

    def _measure(self, means: Mapping[VectorExchange, SparseVector]) -> None:
        """Record the metrics of the step: the first vector has the time of all. Without ``means``, it was rejected."""
        whole = None if self.pending.span is None else self.pending.span.end()
        for vector in self.scope.vectors:
            vector.measure(means.get(vector), whole if vector is self.scope.vectors[0] else None)

    def _drop(self) -> None:
        """Forget the means of a step that was not applied."""
        for part in self.pending.parts:
            part.vector.feedback.rollback()
        self.pending = Pending()

    def _finish(self) -> None:
        """Return when all ranks have confirmed the step. If one has rejected it, roll back.

        If a rank is lost or stops here, some ranks may apply the step. It is suspended on this one.
        """
        try:
            self._confirm()
        except (NonFiniteError, ProtocolMismatchError, ConfigMismatchError):  # all ranks raise it, or others do
            self._rollback()
            raise
        except BaseException as error:
            if self.state is not State.IDLE:  # it was rejected
                self._move("lose")
            self._tell(error)
            raise
        finally:
            for vector in self.scope.vectors:  # also of a step that is skipped
                self.total.count("all", vector.meter.sent, vector.meter.received)

    def _confirm(self) -> None:
        """Return after all ranks have called this for the same step, and none has rejected it.

        They then know the parameters without gradient. They tell each other if these may not be those of the last step.
        Without the wait, some ranks could apply a step that other ranks have lost.

        Raises:
            NonFiniteError: A rank has rejected the step. All ranks raise it.
            ProtocolMismatchError: Ranks with the same shard differ, or have received a wrong message; or not all have
                completed the same updates, or one has stopped. All ranks raise it, also if some have rejected the step.
        """
        scope, rejects = self.scope, self.pending.rejection is not None
        scheduler, last, replica = scope.scheduler, scope.vectors[-1], scope.replica if self._is_compared else None
        total = Vote(int(rejects), int(self.presence.is_new))
        if scheduler is not None and scheduler.world_size > 1:
            schedulers = scope.schedulers
            compared = None if replica is None or rejects else replica.digest()
            places = [(each.step, each.stamp) for each in schedulers]
            state = (self.presence.kinds(scope.parameters), option_numbers(scope.exchanged), compared)
            claim = lead(scheduler.rank, scheduler.world_size) * number_of_text(repr(self._completed))
            claim += lead(last.rank, last.world_size) * number_of_text(repr((scope.shard, places, state)))
            own = Vote(total.rejects, total.raises, claim)
            found = vote(own, scheduler.device, [*dict.fromkeys((scheduler, *schedulers))])
            total = last.run(found) if scope.all_shards is None else scope.all_shards.run(found)
        if self.state is State.STOPPED or total.claim:
            error = self._disagreement(replica, is_rejected=bool(total.rejects))
            if error is not None:
                raise error
        if total.rejects:
            raise self._reject()
        if replica is not None:
            replica.agreed = self.steps
        if total.raises:
            self.presence.agree(scope.parameters, last)

    @property
    def _completed(self) -> object:
        """The completed updates of this rank."""
        return f"{self.updates}, and one that stopped" if self.state is State.STOPPED else self.updates

    def _disagreement(self, replica: Replica | None, *, is_rejected: bool) -> ProtocolMismatchError | None:
        """Return why ranks disagree. All ranks that confirm the step call this together.

        If some have rejected a step in which the others compare replicas, they may differ in that alone. Return None.
        """
        scope, found = self.scope, dict[str, str]()
        scheduler, device, group = scope.scheduler, scope.vectors[0].device, scope.everybody
        step = "the step" if scheduler is None else scheduler.last_step
        if is_distributed():
            found = differences({"last step": step, UPDATES: self._completed}, group, device)
        if self.state is State.STOPPED or UPDATES in found:
            reason = f"ranks differ: {worded(found)}" if found else "an update has stopped on all ranks"
            return ProtocolMismatchError(f"{step} was rejected, because {reason}: {UPDATES_ADVICE}")
        names = {id(each): name for vector in scope.vectors for each, name in vector.layout.named}
        compared = self.presence.fields(scope.parameters, names) | option_numbers(scope.exchanged)
        found = found or differences(compared, group, device, scope.shard)
        reason = ""
        if found:
            reason = f"ranks differ: {worded(found)}. {advice(found)}"
        elif replica is not None:
            if is_rejected:
                return None
            reason = replica.difference(group, device, self.steps, scope.shard)
        if reason:
            return ProtocolMismatchError(f"{step} was rejected, and nothing has changed, because {reason}")
        return ProtocolMismatchError(
            f"{step} was rejected: another rank finished another one. Step the same optimizers in the same order on "
            "all ranks"
        )

    def _reject(self) -> NonFiniteError:
        """Roll back, count the rejected step, and return an error that names ranks and parameters.

        All ranks of the exchange, or of all shards, call this together.
        """
        step = self.pending
        self._rollback()
        self.skipped += 1
        return naming(step.rejection, step.fault, self.scope.everybody, self.scope.vectors[0].device)

    def _ready(self) -> None:
        """Replace every ``.grad``, see :meth:`_write`. Other ranks may apply the step now."""
        try:
            self._write()
        except BaseException:
            self.stop()
            raise
        self._move("confirm")
        self._measure({part.vector: part.sent.mean for part in self.pending.parts})

    def _write(self) -> None:
        """Replace every ``.grad`` by its mean."""
        self.pending.write(self._left)
        self.pending.gradients = self.scope.gradients
