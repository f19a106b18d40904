"""One optimizer step's exchange of gradients: the life cycle that all front doors share."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
import torch.distributed as dist

from tritoncomm.algorithms import Recipe
from tritoncomm.errors import (
    ConfigurationError,
    ExchangeError,
    NonFiniteError,
    ProtocolMismatchError,
    TritoncommError,
)
from tritoncomm.primitives.sparse_vector import SparseVector
from tritoncomm.scheduler.meter import Meter, of_all
from tritoncomm.scheduler.process_group import ProcessGroupScheduler, is_distributed, take_suspects
from tritoncomm.scheduler.rounds import Pattern
from tritoncomm.scheduler.span import Span
from tritoncomm.scheduler.together import run_together
from tritoncomm.step import carry_over, setup_checks, step_checks
from tritoncomm.step.clipping import clipped
from tritoncomm.step.delivered import Delivered, added, check_range, scattered
from tritoncomm.step.error_feedback import ErrorFeedback
from tritoncomm.step.options import log_choice
from tritoncomm.step.vector_exchange import ExchangeOptions, VectorExchange, listed, noting

logger = logging.getLogger("tritoncomm")


class _Begun(NamedTuple):
    """A vector whose mean is known, but not committed, and the time of its exchange.

    Of vectors that are exchanged together, the first has the time of all.
    """

    vector: VectorExchange
    mean: SparseVector
    span: Span | None


class GradientExchange:
    """The exchange of the gradients of one optimizer step, in one or more flat vectors.

    A front door decides when each part of a step happens. What happens is defined here:

    1. The door writes its gradients into ``vector.flat`` and calls :meth:`deliver`, for one vector after the other or
       for several at once, and in the same order on all ranks.
    2. :meth:`finish` confirms that all ranks have all means, and commits the new residuals. If anything fails on any
       rank, it raises, and residuals and methods are as before the step on every rank.
    3. The optimizer's step uses :attr:`delivered`, once.

    Args:
        options: Settings of the vectors.
        verdict: Scheduler of a group that is larger than the group of the exchange, for models that are sharded. A
            step is committed only if no rank of this larger group has rejected it. Default: None.

    Attributes:
        verdict: See above.
        vectors: The flat vectors, in the order in which they are exchanged.
        trained: Their parameters in the order of the optimizer. Empty if that is the order of the vectors.
        delivered: The means of the last committed step. Of several steps, if a hook exchanges and the optimizer has not
            used them yet. None if there are none.
        rejected: Whether one of these steps was rejected.
        deliveries: Number of times that :attr:`delivered` has begun from scratch.
        flushes: Whether the last step was a flush.
        pending: The means of a step that this rank could not confirm. Other ranks may have committed it. Empty
            otherwise.
        steps: Number of committed steps.
        skipped: Number of steps that were rejected, or whose means were thrown away.
        zeroed: Number of NaN or Inf values that this rank has replaced by zero.
        total: Traffic of all steps.
        gradient_norm: Norm of the mean of the last gradients before they were clipped, if they were to be (fp64
            ``[]``). None before.
        stepping: Function that returns the optimizers that step by the means. What they return must be equal on all
            ranks.
    """

    def __init__(self, options: ExchangeOptions, *, verdict: ProcessGroupScheduler | None = None) -> None:
        self.options = options
        self.vectors: list[VectorExchange] = []
        self.trained: list[torch.Tensor] = []
        self.delivered: list[Delivered] | None = None
        self.pending: list[_Begun] = []
        self.steps = self.skipped = self.zeroed = self.deliveries = 0
        self.rejected = self.flushes = False
        self.total = Meter()
        self.gradient_norm: torch.Tensor | None = None
        self.verdict = verdict
        self.stepping: Callable[[], list[step_checks.Stepping]] = list
        self._distributed = is_distributed()
        self._begun: list[_Begun] = []
        self._unsettled = 0  # committed steps in ``delivered``
        self._rejected: NonFiniteError | None = None
        self._at_fault = ""  # NaN and Inf values of this rank in this step

    @property
    def parameters(self) -> list[torch.Tensor]:
        """The parameters of all vectors, in the order of :attr:`trained`."""
        return self.trained or [parameter for vector in self.vectors for parameter in vector.parameters]

    @property
    def rank(self) -> int:
        """Rank in the group of the exchange."""
        return self.vectors[0].rank

    def replace_vectors(
        self, recipe: Recipe, group: dist.ProcessGroup | None
    ) -> list[tuple[VectorExchange, VectorExchange]]:
        """Exchange by ``recipe`` in ``group`` from now on, and return each new vector with the old one.

        All ranks of ``group`` call this. New vectors have no residual yet. If this raises, nothing has changed.
        """
        before, options = self.vectors, replace(self.options, recipe=recipe, group=group)
        vectors = [VectorExchange(old.parameters, old.names, options) for old in before]
        for vector in vectors:
            vector.agree_on_exchange_id()
        self.options, self.vectors = options, vectors
        return list(zip(vectors, before, strict=True))

    def restore(self, feedbacks: Sequence[ErrorFeedback]) -> None:
        """Continue with the residual and method state ``feedbacks`` of each vector."""
        for vector, feedback in zip(self.vectors, feedbacks, strict=True):
            vector.feedback = feedback

    def continue_from(self, before: GradientExchange) -> GradientExchange:
        """Take over residuals, methods' states and counters of ``before``, which this exchange replaces.

        Returns this exchange.
        """
        for vector in self.vectors:
            carry_over.across_layout(vector, before.vectors)
        self.steps, self.skipped, self.zeroed, self.total = before.steps, before.skipped, before.zeroed, before.total
        self.gradient_norm = before.gradient_norm
        return self

    def agree_on_exchange_id(self) -> None:
        """See :meth:`VectorExchange.agree_on_exchange_id`."""
        for vector in self.vectors:
            vector.agree_on_exchange_id()

    def log_choice(self) -> None:
        """See :func:`~tritoncomm.step.options.log_choice`."""
        if self.vectors:
            first = self.vectors[0]
            parts, on_gpu = [vector.part for vector in self.vectors], first.device.type == "cuda"
            log_choice(first.recipe, first.rank, first.world_size, parts, on_gpu=on_gpu)

    def average(
        self,
        *,
        local_error: ConfigurationError | None = None,
        scale: float = 1.0,
        overflowed: bool = False,
        zero: bool = False,
        inspect: Callable[[list[tuple[VectorExchange, SparseVector]]], None] | None = None,
    ) -> None:
        """Replace every ``.grad`` by the mean over ranks, for a door that exchanges after the backward pass.

        A rank whose gradients cannot be exchanged takes part with NaN. No rank waits for it, and all ranks reject the
        step.

        Args:
            local_error: Why this rank's gradients cannot be exchanged. This rank raises it after the exchange.
            scale: Loss scale. Gradients are divided by it, and the mean is not multiplied by it.
            overflowed: Whether the scaled loss overflowed, so that the gradients cannot be exchanged.
            zero: Whether to replace NaN and Inf by zero.
            inspect: Called with the vectors and their means while every ``.grad`` is still this rank's gradient. What
                it raises rejects the step. Default: None.

        Raises:
            NonFiniteError: The step was rejected, and nothing has changed. The message names ranks and parameters.
            ConfigurationError: ``local_error``, a gradient that is not dense, or a process group that was initialized
                after this object was created.
        """
        if not self._distributed and is_distributed():
            raise ConfigurationError("torch.distributed was initialized after wrap(): initialize it before")
        self.reset()
        vectors = self.vectors
        span = Span(vectors[0].device)
        try:
            reasons = [self._gather(vector, scale) for vector in vectors]
            local_error = next((reason for reason in reasons if reason is not None), local_error)
            zeroed = [vector.zero_non_finite() if zero else 0 for vector in vectors]
            self.zeroed += sum(zeroed)
            if local_error is not None or overflowed:
                self._spoil(str(local_error or "all, because the scaled loss overflowed"))
            kept = [vector.keeps_gradient() and not found for vector, found in zip(vectors, zeroed, strict=True)]
            if self.deliver(*vectors, into_flat=False) and inspect is not None:
                inspect([(begun.vector, begun.mean) for begun in self._begun])
            self.finish()
        except NonFiniteError as error:
            raise (local_error or error) from None
        except TritoncommError:  # the other ranks raise an error, too
            self.rollback()
            raise
        except BaseException as error:
            self.fail(error)
            raise
        for vector, delivered, keeps in zip(vectors, self.delivered or (), kept, strict=True):
            self._write_gradients(vector, delivered, scale if keeps else None)
        whole = span.end()
        for vector, delivered in zip(vectors, self.delivered or (), strict=True):
            vector.measure(delivered.mean, whole if vector is vectors[0] else None)

    def _spoil(self, reason: str) -> None:
        """Let this rank take part with NaN, because of ``reason``."""
        self._at_fault = reason
        for vector in self.vectors:
            vector.flat.fill_(math.nan)

    @staticmethod
    def _gather(vector: VectorExchange, scale: float) -> ConfigurationError | None:
        """Copy every ``.grad``, divided by ``scale``, into ``vector.flat``. Return why that is impossible, or None."""
        error = None
        try:
            vector.layout.gather(vector.flat, sparse=vector.keeps_gradient())
        except ConfigurationError as reason:
            error = reason
        if scale != 1.0:
            vector.flat.mul_(1.0 / scale)
        return error

    @staticmethod
    def _write_gradients(vector: VectorExchange, delivered: Delivered, scale: float | None) -> None:
        """Write the mean into every ``.grad``. With ``scale``, each is the mean already, except for this factor."""
        if delivered.is_flat:  # only the GPU knows the number of entries of each parameter
            delivered.layout.scatter_flat(vector.write(delivered.mean))
        elif scale is None:
            delivered.layout.scatter(delivered.entries)
        elif scale != 1.0:
            delivered.layout.multiply(1.0 / scale)

    def deliver(
        self,
        *vectors: VectorExchange,
        scale: float = 1.0,
        dtypes: Sequence[torch.dtype] = (),
        divisors: Sequence[float] = (),
        dense: bool = False,
        into_flat: bool = True,
    ) -> bool:
        """Exchange ``vectors``: compute the mean of each ``vector.flat`` over ranks.

        In ordinary steps of a static form, the host waits for a GPU as often as for one of them. Return False if the
        step will be rejected by the verdict of the larger group.

        Args:
            vectors: The vectors. ``vector.flat`` holds this rank's unscaled gradient.
            scale: The mean times this loss scale must not overflow.
            dtypes: The dtype of each vector in which it must not overflow. Empty means the dtype of each parameter.
            divisors: By what each ``vector.flat`` will be divided to be a gradient. Empty means 1.
            dense: Whether to deliver all entries, whatever the recipe.
            into_flat: Whether to write the mean into ``vector.flat``.

        Raises:
            NonFiniteError: A rank has a NaN or Inf, or the mean overflows. All ranks of the exchange raise it, unless
                they have to wait for the verdict of a larger group: then :meth:`finish` raises it.
            ExchangeError: A peer was lost, or a wait timed out.
        """
        self._prepare(vectors)
        limit = None if dense or vectors[0].is_bare else self.options.max_gradient_norm
        clipping = None if limit is None else self._clip(vectors, divisors, limit)
        means: dict[VectorExchange, SparseVector] = {}
        span, first = Span(vectors[0].device), len(self._begun)
        try:
            if clipping is not None and self.verdict is not None:  # the norm is that of all shards
                self.verdict.run(clipping, new_step=False)
                clipping = None
            try:
                one, *others = vectors
                runs = [noting(one, means, dense=dense, first=clipping)]
                run_together([*runs, *(noting(vector, means, dense=dense) for vector in others)])
            finally:
                self._begun += [_Begun(vector, means[vector], None) for vector in vectors if vector in means]
            self._begun[first] = self._begun[first]._replace(span=span.end())
            check_range([(vector.layout, means[vector]) for vector in vectors], scale, dtypes)
            for vector in vectors if into_flat else ():
                vector.write(means[vector])
        except NonFiniteError as error:
            rejected = [vector for vector in vectors if vector not in means]
            if rejected:
                bad = {name: count for vector in vectors for name, count in vector.non_finite().items()}
                self._at_fault = self._at_fault or listed(bad)
            for vector in rejected:
                vector.measure(None, span.end() if vector is rejected[0] else None)
            self._rejected = error
            if self.verdict is None:
                raise self._reject(vectors[0]) from None
            return False
        except BaseException as error:
            self.fail(error)
            raise
        return True

    def _clip(self, vectors: Sequence[VectorExchange], divisors: Sequence[float], limit: float) -> Pattern[None]:
        """Scale the gradients to this norm at most, see :func:`~tritoncomm.step.clipping.clipped`."""
        shard = 0 if self.verdict is None else dist.get_process_group_ranks(self.options.group or dist.group.WORLD)[0]
        parts = list(zip(vectors, divisors or [1.0] * len(vectors), strict=True))
        self.gradient_norm = yield from clipped(parts, limit, shard, vectors[0].world_size)

    def fail(self, error: BaseException) -> Exception | None:
        """Roll back, and report ``error`` to the ranks that may wait for this one and do not raise it themselves.

        Return what further exchanges raise if the process group is unusable now. None otherwise.
        """
        self.rollback()
        broken = None
        scheduler = next((vector.scheduler for vector in self.vectors), None)
        if isinstance(error, Exception):
            if scheduler is not None and not isinstance(error, TritoncommError):  # else it is reported, or all raise it
                broken = scheduler.fail(error)
            if self.verdict is not None:
                self.verdict.fail(error)  # its other ranks may be in no exchange with this one
        return broken

    def _prepare(self, vectors: Sequence[VectorExchange]) -> None:
        schedulers = [vector.scheduler for vector in vectors if vector.scheduler is not None]
        for scheduler in schedulers:
            scheduler.check()  # raises if the group has failed, so that a pending step is kept
            scheduler.run_beside(schedulers[0])
        self.pending = []
        for vector in vectors:
            vector.meter = Meter()  # also of one that does not begin, because the step is rejected before

    def finish(self) -> None:
        """Commit the step on all ranks, or roll back on all ranks.

        Raises:
            NonFiniteError: Another vector was rejected on some rank.
            ExchangeError: A peer was lost, or a wait timed out. The step is :attr:`pending`.
            ProtocolMismatchError: Another rank has finished another step, has frozen other parameters, uses other
                options, or has not completed the same updates. All ranks raise it.
        """
        begun = self._begun
        try:
            self._confirm()
        except ExchangeError:
            for step in begun:
                step.vector.feedback.suspend()
            self.pending, self._begun = begun, []
            raise
        except BaseException:
            self.rollback()
            raise
        for vector, mean, span in begun:
            vector.feedback.commit()
            vector.measure(mean, span)
            self.total.count("all", vector.meter.sent, vector.meter.received)
        self.steps, self._unsettled = self.steps + 1, self._unsettled + 1
        self._deliver([Delivered(step.mean, step.vector.layout) for step in begun])
        self._begun = []

    def _deliver(self, means: list[Delivered]) -> None:
        self.delivered = means if self.delivered is None else added(self.delivered, means)

    def _confirm(self) -> None:
        """Return after all ranks have called this for the same step, and none has rejected it."""
        if self.verdict is not None:
            schedulers = [step.vector.scheduler for step in self._begun if step.vector.scheduler is not None]
            stepping = self.stepping()
            suspects, world_size, device = take_suspects(schedulers), self.verdict.world_size, self.verdict.device
            vote = step_checks.vote(self._rejected is not None, stepping, suspects, world_size, device)
            rejected, suspicious, alike = self.verdict.run(vote)
            if suspicious:
                raise self.verdict.suspicion()
            if not alike:
                fields = step_checks.update_fields(stepping)  # options may differ between shards
                group, device = self.verdict.group, self.verdict.device
                raise step_checks.rejection(self.verdict.last_step, fields, stepping, group, device)
            if rejected:
                raise self._reject()
        elif self._begun:
            trained = "".join("01"[p.requires_grad] for step in self._begun for p in step.vector.parameters)
            *others, last = [step.vector for step in self._begun]
            stepping = self.stepping()
            alike = last.confirm(trained + "".join(map(step_checks.options_and_updates, stepping)), others)
            if not alike or any(one.is_stopped for one in stepping):
                raise self._differs(last, stepping)

    def _differs(self, last: VectorExchange, stepping: Sequence[step_checks.Stepping]) -> ProtocolMismatchError:
        """Return the error that names what differs between the ranks. All ranks call this together."""
        scheduler, group = last.scheduler, self.options.group
        step = "the step" if scheduler is None else scheduler.last_step
        vectors = [begun.vector for begun in self._begun]
        frozen = [vector.name_of(p) for vector in vectors for p in vector.parameters if not p.requires_grad]
        fields: dict[str, object] = {"last step": step, "frozen parameters": frozen}
        fields |= step_checks.update_fields(stepping) | step_checks.option_fields(stepping)
        return step_checks.rejection(step, fields, stepping, group, last.device)

    def reset(self, *, keep_delivered: bool = False) -> None:
        """Prepare for a new step. Roll back a step that was not finished.

        With ``keep_delivered``, the new step adds to entries that the optimizer has not used yet.
        """
        self.rollback()
        for vector in self.vectors:
            vector.settle(keep=keep_delivered)
        if not keep_delivered:
            self.delivered, self.rejected, self._unsettled = None, False, 0
            self.deliveries += 1
        self.flushes = False
        self._rejected, self._at_fault = None, ""

    def rollback(self) -> None:
        """Restore the methods' states from before this step. Residuals have not changed."""
        for vector, _, span in self._begun:
            vector.feedback.rollback()
            vector.measure(None, span)
        self._begun = []

    def revoke(self, parameters: set[int]) -> None:
        """Take back what the steps in :attr:`delivered` did for ``parameters`` (ids). All ranks throw it away."""
        whole = [vector.revoke(parameters) for vector in self.vectors]
        if all(whole):
            self.steps, self.skipped = self.steps - self._unsettled, self.skipped + self._unsettled
            self._unsettled = 0

    def discard(self, *, used: bool = False) -> None:
        """Forget :attr:`delivered`, which nobody has used, or other ranks have. See :meth:`revoke`."""
        if self.delivered is not None and not used:
            self.revoke({id(parameter) for parameter in self.parameters})
        self.delivered = None

    def commit_pending(self) -> list[Delivered]:
        """Commit the :attr:`pending` step, as another rank has, replace every ``.grad``, and return the means."""
        for step in self.pending:
            step.vector.feedback.resume()
            step.vector.settle()
        self.steps += 1
        means = [Delivered(step.mean, step.vector.layout) for step in self.pending]
        self.pending = []
        return scattered(means, zeros=not self.flushes)

    def flush(self) -> list[Delivered]:
        """Exchange the residuals dense, replace every ``.grad`` by their mean, and return the means without zeros."""
        self.reset()
        self.flushes = True
        if not self.vectors:  # before the first pass of a hook
            return []
        for vector in self.vectors:
            vector.flat.zero_()
        self.deliver(*self.vectors, dense=True, into_flat=False)
        self.finish()
        return scattered(self.take_delivered(), zeros=False)

    def take_delivered(self) -> list[Delivered]:
        """Return :attr:`delivered` for the optimizer's step, and forget it."""
        means, self.delivered = self.delivered or [], None
        return means

    def _reject(self, vector: VectorExchange | None = None) -> NonFiniteError:
        """Roll back, count the rejected step, and return an error that names ranks and parameters.

        All ranks of the exchange, or of the verdict, call this together.
        """
        self.rollback()
        self.skipped += 1
        self.rejected = True
        error = self._rejected or NonFiniteError("a rank of another shard has rejected the step; nothing was applied")
        gathered = [self._at_fault]
        if self.verdict is not None or (vector is not None and vector.scheduler is not None):
            group = self.verdict.group if self.verdict is not None else self.options.group
            device = self.verdict.device if self.verdict is not None else self.vectors[0].device
            told = setup_checks.gather({"at fault": self._at_fault}, group, device)
            gathered = [fields["at fault"] for fields in told]
        at_fault = {rank: bad for rank, bad in enumerate(gathered) if bad}
        if not at_fault:
            return error
        named = "; ".join(f"rank {rank}: {bad}" for rank, bad in at_fault.items())
        return NonFiniteError(f"NaN or Inf in the gradients of {named}; nothing was applied", at_fault)

    def metrics(self) -> dict[str, float]:
        """Return metrics of the last step and totals. Amounts are sums over the vectors, and ratios are maxima."""
        numel = sum(vector.layout.numel for vector in self.vectors)
        delivered = sum(vector.density_delivered() * vector.layout.numel for vector in self.vectors)
        last = of_all([vector.last for vector in self.vectors])
        return last | {
            "seconds_apply": max(0.0, last.get("seconds_apply", 0.0)),
            "density": self.options.recipe.density,
            "density_delivered": delivered / max(numel, 1),
            "steps": float(self.steps),
            "skipped_steps": float(self.skipped),
            "zeroed_values": float(self.zeroed),
            "bytes_sent_total": float(self.total.sent.bytes),
            "bytes_received_total": float(self.total.received.bytes),
            "residual_norm": math.hypot(*(vector.residual_norm for vector in self.vectors)),
        }
