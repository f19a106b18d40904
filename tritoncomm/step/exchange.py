"""The exchange of the gradients of some parameters as one flat vector: from ``.grad`` to averaged ``.grad``."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from tritoncomm.algorithms import Algorithm, Dense, DenseTail, Preconditioned, Recipe
from tritoncomm.algorithms.preconditioned import without_scale
from tritoncomm.errors import ConfigurationError, ExchangeError, NonFiniteError
from tritoncomm.primitives.sparse_vector import SparseVector
from tritoncomm.scheduler.meter import Meter
from tritoncomm.scheduler.process_group import ProcessGroupScheduler, is_distributed
from tritoncomm.scheduler.rounds import Pattern
from tritoncomm.scheduler.simulated import SimulatedScheduler
from tritoncomm.step import checkpoint_format, setup_checks
from tritoncomm.step.bucket import OVERFLOWS, BucketLayout, split_by_size
from tritoncomm.step.error_feedback import ErrorFeedback
from tritoncomm.step.options import log_choice

logger = logging.getLogger("tritoncomm")


class GradientExchange:
    """One rank's exchange of the gradients of ``parameters``.

    Small tensors are sent dense, at the end of the flat vector. Without an initialized process group, this is the
    exchange of a single worker.

    Args:
        parameters: Parameters whose gradients are exchanged.
        recipe: The recipe of the exchange.
        group: Process group of the exchange. None is the default group.
        timeout: Maximum time of each wait for a peer. None uses the time-out of the process group.
        dense_below: Number of elements below which a tensor is small. See :func:`split_by_size`.
        names: Names of the parameters, for messages.
        flattened: See :func:`split_by_size`.
        by_update: Whether to select large entries by their update, as
            :class:`~tritoncomm.algorithms.preconditioned.Preconditioned` does.

    Attributes:
        layout: Position of each parameter in the flat vector.
        flat: The flat vector, fp32 ``[numel]``.
        feedback: The residual, and the algorithm with its state.
        dense_numel: Number of elements that are sent dense.
        last: Metrics of the last exchange.
        total: Traffic of all exchanges.
        steps: Number of committed steps.
        zeroed: Number of NaN or Inf values that this rank has replaced by zero.
        pending: Mean of a step that this rank could not confirm. Other ranks may have committed it. None otherwise.
    """

    def __init__(
        self,
        parameters: Sequence[torch.Tensor],
        recipe: Recipe,
        group: dist.ProcessGroup | None,
        timeout: timedelta | None,
        dense_below: int = 0,
        names: Sequence[str] = (),
        *,
        flattened: bool | None = None,
        by_update: bool = False,
    ) -> None:
        self.recipe = recipe
        self._by_update = by_update
        self.parameters = list(parameters)
        self._names = dict(zip(map(id, parameters), names, strict=False))
        large, small = split_by_size(parameters, dense_below, flattened=flattened)
        self.layout = BucketLayout([*large, *small])
        self._large = len(large)
        self.dense_numel = sum(parameter.numel() for parameter in small)
        self.flat = torch.zeros(self.layout.numel, device=self.layout.device)
        self._timeout = timeout
        self.feedback = self._new_error_feedback()
        self._connect(group)
        self.total, self._meter = Meter(), Meter()
        self.last: dict[str, float] = {}
        self.steps = self.zeroed = 0
        self.pending: SparseVector | None = None
        self.measure(None, 0.0)

    def _connect(self, group: dist.ProcessGroup | None) -> None:
        scheduler: ProcessGroupScheduler | None = None
        rank, world_size = (dist.get_rank(group), dist.get_world_size(group)) if is_distributed() else (0, 1)
        self.recipe.check_world_size(world_size)  # before process groups are created for it
        if is_distributed():
            shapes = [(self._names.get(id(p), ""), tuple(p.shape)) for p in self.parameters]
            stamp = f"{self.recipe.name} {self.settings} {shapes}"
            subgroups = self.recipe.subgroups(world_size)
            scheduler = ProcessGroupScheduler(group, self._timeout, self.layout.device, stamp, subgroups)
        self.group, self._scheduler, self.rank, self.world_size = group, scheduler, rank, world_size

    def agree_on_exchange_id(self) -> None:
        """Agree on an identifier of this exchange within its group. All ranks call this after :func:`compare_setup`."""
        if self._scheduler is not None:
            self._scheduler.agree_on_exchange_id()

    def average(
        self,
        *,
        local_error: ConfigurationError | None = None,
        scale: float = 1.0,
        overflowed: bool = False,
        zero: bool = False,
    ) -> SparseVector:
        """Replace every ``.grad`` by the mean over ranks, and return that mean.

        A rank whose gradients cannot be exchanged takes part with NaN. No rank waits for it, and all ranks reject the
        step.

        Args:
            local_error: Why this rank's gradients cannot be exchanged. This rank raises it after the exchange.
            scale: Loss scale. Gradients are divided by it first.
            overflowed: Whether the scaled loss overflowed, so that the gradients cannot be exchanged.
            zero: Whether to replace NaN and Inf by zero.

        Raises:
            NonFiniteError: The step was rejected, and nothing has changed. The message names ranks and parameters.
            ConfigurationError: ``local_error``, a gradient that is not dense, or a process group that was initialized
                after this object was created.
        """
        if self._scheduler is None and is_distributed():
            raise ConfigurationError("torch.distributed was initialized after wrap(): initialize it before")
        started = time.perf_counter()
        try:
            flat = self.layout.gather(self.flat)
        except ConfigurationError as error:
            local_error, flat = error, self.flat
        if scale != 1.0:
            flat.mul_(1.0 / scale)
        if zero:
            self.zero_non_finite(flat)
        if local_error is not None or overflowed:
            flat.fill_(math.nan)
        try:
            mean = self._exchange(flat)
        except NonFiniteError as error:
            described = self.describe_error(error, local_error, overflowed=overflowed)
            if local_error is not None:
                raise local_error from None
            raise described from None
        finally:
            self.measure(None, time.perf_counter() - started)
        self.layout.scatter(flat)
        self.measure(mean, time.perf_counter() - started)
        return mean

    def log_choice(self) -> None:
        """See :func:`log_choice`."""
        log_choice(self.recipe, self.rank, self.world_size, [self.part])

    @property
    def part(self) -> tuple[Algorithm, int]:
        """The algorithm and the number of values that are sent dense, for :func:`log_choice`."""
        return self.feedback.algorithm, self.dense_numel

    def flush(self) -> SparseVector:
        """Exchange the residuals dense, replace every ``.grad`` by their mean, and return that mean."""
        flat = self.flat.zero_()
        mean = self._exchange(flat, dense=True)
        self.layout.scatter(flat)
        return mean

    def _exchange(self, flat: torch.Tensor, *, dense: bool = False) -> SparseVector:
        """Replace ``flat`` (fp32 ``[numel]``) by the mean over ranks, and commit once all ranks have it."""
        mean = self.begin(flat, dense=dense)
        try:
            self._check_range(mean.write_to(flat, workspace=self.feedback.workspace))
            self.confirm()
        except ExchangeError:
            self.pending = mean
            self.feedback.suspend()
            raise
        except BaseException:
            self.rollback()
            raise
        self.commit()
        return mean

    def begin(self, flat: torch.Tensor, *, dense: bool = False) -> SparseVector:
        """Exchange ``flat``, which is only read, and return the mean. Roll back if the exchange fails.

        Call :meth:`commit` or :meth:`rollback` next. ``dense`` delivers all entries, whatever the recipe.
        """
        if self._scheduler is not None:
            self._scheduler.check()  # raises if the group has failed, so that a pending step is kept
        self.pending = None
        algorithm = Dense().build(self.layout.numel) if dense else None
        try:
            mean: SparseVector = self._run(self.feedback.begin(flat, self.rank, self.world_size, algorithm))
        except BaseException:
            self.rollback()
            raise
        return mean

    def confirm(self) -> None:
        """Wait until every rank has the mean. Otherwise, some ranks could apply a step that other ranks have lost."""
        if self.world_size > 1:
            meter = self._meter
            assert self._scheduler is not None
            trained = "".join("01"[parameter.requires_grad] for parameter in self.parameters)
            self._run(self._scheduler.confirmation(trained), new_step=False)
            meter.add(self._meter)
            self._meter = meter

    def commit(self) -> None:
        """Replace the residual and the state of the method by those of this step, and count the step."""
        self.feedback.commit()
        self.steps += 1

    def rollback(self) -> None:
        """Restore the state of the method. The residual has not changed."""
        self.feedback.rollback()

    def commit_pending(self) -> SparseVector:
        """Commit the :attr:`pending` step, because another rank has committed it. ``.grad`` becomes its mean."""
        assert self.pending is not None
        mean, self.pending = self.pending, None
        self.feedback.resume()
        self.steps += 1
        self.layout.scatter(mean.write_to(self.flat, workspace=self.feedback.workspace))
        return mean

    def residuals_by_parameter(self) -> dict[torch.Tensor, torch.Tensor]:
        """Return flat views of this rank's residual by parameter, in the order of :attr:`parameters`."""
        parts = dict(zip(self.layout.parameters, self.layout.parts(self.feedback.residual), strict=True))
        return {parameter: parts[parameter] for parameter in self.parameters}

    def adopt_residuals(self, other: GradientExchange) -> None:
        """Copy the residuals of ``other`` for the parameters that both exchanges have."""
        own = self.residuals_by_parameter()
        for parameter, residual in other.residuals_by_parameter().items():
            if parameter in own:
                own[parameter].copy_(residual)

    def adopt(self, other: GradientExchange) -> None:
        """Continue from the state of ``other``, with its residuals of the parameters that both exchanges have."""
        self.adopt_residuals(other)
        self.feedback.algorithm.adopt_across_layout(other.feedback.algorithm)
        self.total, self.last, self.steps, self.zeroed = other.total, other.last, other.steps, other.zeroed

    def change_recipe(self, recipe: Recipe) -> None:
        """Continue with ``recipe``, which must be of the same method. The residual is kept."""
        recipe.check_world_size(self.world_size)
        before, self.recipe = self.feedback, recipe
        self.feedback = self._new_error_feedback()
        self.feedback.residual.copy_(before.residual)
        self.feedback.algorithm.adopt_across_density(before.algorithm)
        self._connect(self.group)

    def move(self, group: dist.ProcessGroup | None, recipe: Recipe) -> None:
        """Continue in another group of any size.

        The residual is scaled by the ratio of world sizes. This rank's contribution to the mean stays the same.

        Args:
            group: The new process group. None is the default group.
            recipe: The new recipe. It may differ from the present one only in :class:`~tritoncomm.Hierarchical`.
        """
        before, size, former = self.feedback, self.world_size, self.recipe
        self.recipe = recipe
        try:
            self._connect(group)
        except BaseException:
            self.recipe = former
            raise
        share = self.world_size / size
        self.feedback = self._new_error_feedback()
        torch.mul(before.residual, share, out=self.feedback.residual)
        state = before.algorithm.state_dict()
        # Within nodes, the state of a rank belongs to a part of the vector. This part may be another one now.
        self.feedback.algorithm.migrate([state] if former == recipe else [], share, state)

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's state: the residual of each parameter, and the algorithm's state."""
        residuals = [residual.clone() for residual in self.residuals_by_parameter().values()]
        return checkpoint_format.with_checksum(
            rank=self.rank,
            world_size=self.world_size,
            recipe=self.recipe.name,
            settings=self.settings,
            residuals=residuals,
            algorithm=self.feedback.algorithm.state_dict(),
            steps=self.steps,
        )

    def loaded(self, state: Mapping[str, Any]) -> ErrorFeedback:
        """Return an error feedback with the content of ``state``. This exchange does not change.

        Raises:
            ConfigurationError: The state is damaged, or belongs to another rank, world size, method or model.
        """
        feedback = self._new_error_feedback()
        checkpoint_format.check(state, rank=self.rank, world_size=self.world_size, recipe=self.recipe.name)
        if [len(residual) for residual in state["residuals"]] != [p.numel() for p in self.parameters]:
            raise ConfigurationError("this checkpoint belongs to a model with other parameters")
        residuals_by_parameter = dict(zip(self.parameters, state["residuals"], strict=True))
        residual = torch.cat(
            [self.flat[:0], *(residuals_by_parameter[p].to(self.flat.device) for p in self.layout.parameters)]
        )
        algorithm = state["algorithm"]
        if "migrated" in state or state["settings"] != self.settings:
            # The state of a method depends on its settings and on the world size. The residual does not.
            if "migrated" in state:
                migrated = state["migrated"]
                own, common = map(self._drop_scale, migrated["states"]), self._drop_scale(migrated["common"])
                feedback.algorithm.migrate(list(own), migrated["share"], common)
            else:
                logger.warning(
                    "the checkpoint was written with other settings, %s: the residual is loaded, and the state of the "
                    "method starts from scratch",
                    state["settings"],
                )
            algorithm = feedback.algorithm.state_dict()
        loadable = self._drop_scale(algorithm)
        feedback.load_state_dict({"residual": residual, "algorithm": loadable})
        if loadable is not algorithm:
            feedback.algorithm.invalidate_thresholds()
        return feedback

    def _drop_scale(self, state: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the ``state`` of an algorithm, without its saved scale if this exchange selects by gradient."""
        return state if self._by_update else without_scale(state)

    @property
    def settings(self) -> str:
        """The recipe, and the number of values that are sent dense, as text."""
        return f"{self.recipe!r}, {self.dense_numel} values dense"

    def _new_error_feedback(self) -> ErrorFeedback:
        chosen = self.recipe
        if self._by_update:
            large = self.layout.parameters[: self._large]
            chosen = Preconditioned(recipe=chosen, shapes=tuple(tuple(parameter.shape) for parameter in large))
        whole = DenseTail(recipe=chosen, tail=self.dense_numel)
        return ErrorFeedback(whole.build(self.layout.numel), self.layout.device)

    def _run(self, pattern: Pattern[Any], *, new_step: bool = True) -> Any:
        if self._scheduler is None:
            return SimulatedScheduler(1).run([pattern])[0]
        try:
            return self._scheduler.run(pattern, new_step=new_step)
        finally:
            self._meter = self._scheduler.meter

    def zero_non_finite(self, flat: torch.Tensor) -> None:
        """Replace NaN and Inf in ``flat`` by zero, and log the parameters."""
        bad = self.non_finite(flat)
        if bad:
            self.zeroed += sum(bad.values())
            logger.warning("rank %d: NaN or Inf replaced by zero in %s", self.rank, _listed(bad))
            flat.nan_to_num_(0.0, 0.0, 0.0)

    def non_finite(self, flat: torch.Tensor) -> dict[str, int]:
        """Return the number of NaN or Inf values in ``flat`` of each parameter that has any, by name."""
        if bool(flat.isfinite().all()):
            return {}
        parts = zip(self.layout.parameters, self.layout.parts(flat), strict=True)
        counts = {self._name(parameter): int((~part.isfinite()).sum()) for parameter, part in parts}
        return {name: count for name, count in counts.items() if count}

    def _name(self, parameter: torch.Tensor) -> str:
        number = next(i for i, other in enumerate(self.parameters) if other is parameter)
        return self._names.get(id(parameter)) or f"parameter {number} of shape {tuple(parameter.shape)}"

    def describe_error(
        self, error: NonFiniteError, local_error: ConfigurationError | None = None, *, overflowed: bool = False
    ) -> NonFiniteError:
        """Return ``error`` with the ranks and parameters that hold NaN or Inf. All ranks must call this together.

        Args:
            error: The error of the exchange. It is returned if no rank finds NaN or Inf in its gradients.
            local_error: Why this rank's gradients cannot be exchanged.
            overflowed: Whether the scaled loss overflowed on this rank.
        """
        if local_error is not None:
            own = str(local_error)
        else:
            own = "all, because the scaled loss overflowed" if overflowed else _listed(self.non_finite(self.flat))
        gathered = [own]
        if self._scheduler is not None:
            gathered = [fields["at fault"] for fields in setup_checks.gather({"at fault": own}, self.group)]
        at_fault = {rank: bad for rank, bad in enumerate(gathered) if bad}
        if not at_fault:
            return error
        named = "; ".join(f"rank {rank}: {bad}" for rank, bad in at_fault.items())
        return NonFiniteError(f"NaN or Inf in the gradients of {named}; nothing was applied", at_fault)

    def _check_range(self, flat: torch.Tensor) -> None:
        # All ranks have the same mean, so all of them raise or none.
        if not self.layout.fits_dtypes(flat):
            raise NonFiniteError(OVERFLOWS.format("float16"))

    def measure(self, mean: SparseVector | None, seconds: float) -> None:
        """Record the metrics of an exchange that took ``seconds``. ``mean`` is None if the step was rejected."""
        meter, accumulator = self._meter, self.feedback.accumulator
        selecting = accumulator.seconds if accumulator else 0.0
        if mean is not None:
            self.total.count("all", meter.sent, meter.received)
        self.last = {
            "density": self.recipe.density,
            "density_delivered": mean.density if mean else 0.0,
            "selected": float(accumulator.selected) if accumulator else 0.0,
            "bytes_sent": float(meter.sent.bytes),
            "bytes_received": float(meter.received.bytes),
            "messages_sent": float(meter.sent.messages),
            "seconds_select": selecting,
            "seconds_exchange": meter.waited,
            "seconds_apply": max(0.0, seconds - selecting - meter.waited),
            **{f"seconds_{phase.replace(' ', '_')}": waited for phase, waited in meter.seconds.items()},
            **self.feedback.algorithm.report,
        }


def _listed(bad: Mapping[str, int]) -> str:
    return ", ".join(f"{name} ({count} values)" for name, count in bad.items())
