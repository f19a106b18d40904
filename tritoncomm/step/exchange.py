"""From ``.grad`` to averaged ``.grad``: the gradients of some parameters, exchanged as one flat vector."""

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
from tritoncomm.step import setup_checks, state_format
from tritoncomm.step.bucket import BucketLayout, split_by_size
from tritoncomm.step.error_feedback import ErrorFeedback
from tritoncomm.step.options import log_choice

logger = logging.getLogger("tritoncomm")


class GradientExchange:
    """One rank's exchange of the gradients of ``parameters`` by ``recipe``.

    Small tensors, of fewer than ``dense_below`` elements or of one dimension, travel dense at the end of the
    vector ``flat``; ``flattened`` is :func:`split_by_size`'s. ``by_update`` chooses among the
    others as :class:`~tritoncomm.algorithms.Preconditioned` does. ``names`` are for messages. Without an initialized
    process group this is one worker. ``last`` holds the figures of the last exchange, ``total`` the traffic of all,
    ``steps`` how many were committed.
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
        self.feedback = self._fresh()
        self._connect(group)
        self.total, self._meter = Meter(), Meter()
        self.last: dict[str, float] = {}
        self.steps = self.zeroed = 0
        # The mean of a step of which this rank cannot know whether the others have taken it.
        self.pending: SparseVector | None = None
        self.measure(None, 0.0)

    def _connect(self, group: dist.ProcessGroup | None) -> None:
        scheduler: ProcessGroupScheduler | None = None
        rank, world_size = (dist.get_rank(group), dist.get_world_size(group)) if is_distributed() else (0, 1)
        self.recipe.check_world_size(world_size)  # before any group is made for it
        if is_distributed():
            shapes = [(self._names.get(id(p), ""), tuple(p.shape)) for p in self.parameters]
            stamp = f"{self.recipe.name} {self.settings} {shapes}"
            subgroups = self.recipe.subgroups(world_size)
            scheduler = ProcessGroupScheduler(group, self._timeout, self.layout.device, stamp, subgroups)
        self.group, self._scheduler, self.rank, self.world_size = group, scheduler, rank, world_size

    def agree_on_exchange_id(self) -> None:
        """Tell this exchange from others in its group: all ranks call this, once they know that they are alike."""
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

        Gradients are divided by ``scale`` first. A rank whose gradients cannot be exchanged says why with
        ``local_error``, or that it ``overflowed``: it takes part as NaN, so that no rank waits for it and all refuse
        the step, and raises ``local_error`` itself. ``zero`` puts zeros in the place of NaN and Inf. Raises
        :class:`~tritoncomm.NonFiniteError`, which names ranks and parameters, when the step was refused; nothing
        has changed then.
        """
        if self._scheduler is None and is_distributed():
            raise ConfigurationError("torch.distributed was initialised after wrap(): initialise it first")
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
            refused = self.explained(error, local_error, overflowed=overflowed)
            if local_error is not None:
                raise local_error from None
            raise refused from None
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
        """What :func:`log_choice` needs to know."""
        return self.feedback.algorithm, self.dense_numel

    def flush(self) -> SparseVector:
        """Deliver everything that is owed, dense, and replace every ``.grad`` by the mean of it, which is returned."""
        flat = self.flat.zero_()
        mean = self._exchange(flat, dense=True)
        self.layout.scatter(flat)
        return mean

    def _exchange(self, flat: torch.Tensor, *, dense: bool = False) -> SparseVector:
        """Exchange ``flat`` (fp32 ``[numel]``), which becomes the mean, and commit when all ranks have got it."""
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
        """The mean of ``flat`` (only read), for :meth:`commit` or :meth:`rollback`; rolled back when it fails."""
        if self._scheduler is not None:
            self._scheduler.check()  # an undecided step stays so on a group that has failed
        self.pending = None
        algorithm = Dense().build(self.layout.numel) if dense else None
        try:
            mean: SparseVector = self._run(self.feedback.begin(flat, self.rank, self.world_size, algorithm))
        except BaseException:
            self.rollback()
            raise
        return mean

    def confirm(self) -> None:
        """Every rank has come this far: without it some would apply a step that others have lost."""
        if self.world_size > 1:
            meter = self._meter
            assert self._scheduler is not None
            trained = "".join("01"[parameter.requires_grad] for parameter in self.parameters)
            self._run(self._scheduler.confirmation(trained), new_step=False)
            meter.add(self._meter)
            self._meter = meter

    def commit(self) -> None:
        """Adopt the step."""
        self.feedback.commit()
        self.steps += 1

    def rollback(self) -> None:
        """Forget the step."""
        self.feedback.rollback()

    def commit_pending(self) -> SparseVector:
        """Commit the :attr:`pending` step after all: another rank has. ``.grad`` becomes its mean."""
        assert self.pending is not None
        mean, self.pending = self.pending, None
        self.feedback.resume()
        self.steps += 1
        self.layout.scatter(mean.write_to(self.flat, workspace=self.feedback.workspace))
        return mean

    def residuals_by_parameter(self) -> dict[torch.Tensor, torch.Tensor]:
        """This rank's residual by parameter (flat views), in the order in which parameters were given."""
        parts = dict(zip(self.layout.parameters, self.layout.parts(self.feedback.residual), strict=True))
        return {parameter: parts[parameter] for parameter in self.parameters}

    def adopt_residuals(self, other: GradientExchange) -> None:
        """Owe what ``other`` owes for the parameters that both have."""
        mine = self.residuals_by_parameter()
        for parameter, residuals_by_parameter in other.residuals_by_parameter().items():
            if parameter in mine:
                mine[parameter].copy_(residuals_by_parameter)

    def adopt(self, other: GradientExchange) -> None:
        """Continue where ``other`` is, for the parameters that both have."""
        self.adopt_residuals(other)
        self.feedback.algorithm.adopt_across_layout(other.feedback.algorithm)
        self.total, self.last, self.steps, self.zeroed = other.total, other.last, other.steps, other.zeroed

    def change_recipe(self, recipe: Recipe) -> None:
        """Go on with ``recipe``, of the same method; what is owed stays."""
        recipe.check_world_size(self.world_size)
        before, self.recipe = self.feedback, recipe
        self.feedback = self._fresh()
        self.feedback.residual.copy_(before.residual)
        self.feedback.algorithm.adopt_across_density(before.algorithm)
        self._connect(self.group)

    def move(self, group: dist.ProcessGroup | None, recipe: Recipe) -> None:
        """Go on in ``group``, of whatever size, with ``recipe``, which differs from the present one in nodes at most.

        What this rank has to deliver to the mean stays the same.
        """
        before, size, former = self.feedback, self.world_size, self.recipe
        self.recipe = recipe
        try:
            self._connect(group)
        except BaseException:
            self.recipe = former
            raise
        share = self.world_size / size
        self.feedback = self._fresh()
        torch.mul(before.residual, share, out=self.feedback.residual)
        state = before.algorithm.state_dict()
        # Within nodes a rank has learnt about a part of the vector, which is another one now.
        self.feedback.algorithm.migrate([state] if former == recipe else [], share, state)

    def state_dict(self) -> dict[str, Any]:
        """Residuals by parameter and the algorithm's state; this rank's alone."""
        residuals = [
            residuals_by_parameter.clone() for residuals_by_parameter in self.residuals_by_parameter().values()
        ]
        return state_format.with_checksum(
            rank=self.rank,
            world_size=self.world_size,
            recipe=self.recipe.name,
            settings=self.settings,
            residuals=residuals,
            algorithm=self.feedback.algorithm.state_dict(),
            steps=self.steps,
        )

    def loaded(self, state: Mapping[str, Any]) -> ErrorFeedback:
        """An error feedback with the content of ``state``, to be put in place by the caller.

        Raises :class:`~tritoncomm.ConfigurationError` when it is damaged or belongs to another rank, world size,
        method or model.
        """
        feedback = self._fresh()
        state_format.check(state, rank=self.rank, world_size=self.world_size, recipe=self.recipe.name)
        if [len(residuals_by_parameter) for residuals_by_parameter in state["residuals"]] != [
            p.numel() for p in self.parameters
        ]:
            raise ConfigurationError("this checkpoint belongs to a model with other parameters")
        residuals_by_parameter = dict(zip(self.parameters, state["residuals"], strict=True))
        residual = torch.cat(
            [self.flat[:0], *(residuals_by_parameter[p].to(self.flat.device) for p in self.layout.parameters)]
        )
        algorithm = state["algorithm"]
        if "migrated" in state or state["settings"] != self.settings:
            # What a method has learnt belongs to its settings and world size; what is owed does not.
            if "migrated" in state:
                migrated = state["migrated"]
                own, common = map(self._readable, migrated["states"]), self._readable(migrated["common"])
                feedback.algorithm.migrate(list(own), migrated["share"], common)
            else:
                logger.warning("the checkpoint was written with %s: the method starts anew", state["settings"])
            algorithm = feedback.algorithm.state_dict()
        readable = self._readable(algorithm)
        feedback.load_state_dict({"residual": residual, "algorithm": readable})
        if readable is not algorithm:
            feedback.algorithm.invalidate_thresholds()
        return feedback

    def _readable(self, state: Mapping[str, Any]) -> Mapping[str, Any]:
        """``state`` of an algorithm, without the scale that it was saved with if this exchange has none."""
        return state if self._by_update else without_scale(state)

    @property
    def settings(self) -> str:
        """The recipe and what else decides what travels."""
        return f"{self.recipe!r}, {self.dense_numel} values dense"

    def _fresh(self) -> ErrorFeedback:
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
        """Put zeros in the place of NaN and Inf, and say where."""
        bad = self.non_finite(flat)
        if bad:
            self.zeroed += sum(bad.values())
            logger.warning("rank %d: NaN or Inf taken for zero in %s", self.rank, _listed(bad))
            flat.nan_to_num_(0.0, 0.0, 0.0)

    def non_finite(self, flat: torch.Tensor) -> dict[str, int]:
        """Which parameters have how many NaN or Inf in ``flat``."""
        if bool(flat.isfinite().all()):
            return {}
        parts = zip(self.layout.parameters, self.layout.parts(flat), strict=True)
        counts = {self._name(parameter): int((~part.isfinite()).sum()) for parameter, part in parts}
        return {name: count for name, count in counts.items() if count}

    def _name(self, parameter: torch.Tensor) -> str:
        number = next(i for i, other in enumerate(self.parameters) if other is parameter)
        return self._names.get(id(parameter)) or f"parameter {number} of shape {tuple(parameter.shape)}"

    def explained(
        self, error: NonFiniteError, local_error: ConfigurationError | None = None, *, overflowed: bool = False
    ) -> NonFiniteError:
        """``error`` with the parameters at fault in ``flat``; all ranks come here together."""
        if local_error is not None:
            own = str(local_error)
        else:
            own = "all, as the scaled loss overflowed" if overflowed else _listed(self.non_finite(self.flat))
        everybody = [own]
        if self._scheduler is not None:
            everybody = [fields["at fault"] for fields in setup_checks.gather({"at fault": own}, self.group)]
        at_fault = {rank: bad for rank, bad in enumerate(everybody) if bad}
        if not at_fault:
            return error
        named = "; ".join(f"rank {rank}: {bad}" for rank, bad in at_fault.items())
        return NonFiniteError(f"NaN or Inf in the gradients of {named}; nothing was applied", at_fault)

    def _check_range(self, flat: torch.Tensor) -> None:
        # Decided from the mean, which all ranks have, so all refuse or none.
        if not self.layout.fits_dtypes(flat):
            raise NonFiniteError("a mean of finite gradients overflows in float16; nothing was applied")

    def measure(self, mean: SparseVector | None, seconds: float) -> None:
        """Note what the last exchange did, which took ``seconds`` in all; without a mean it was refused."""
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
