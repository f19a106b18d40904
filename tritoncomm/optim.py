"""Front door 1: an optimizer that exchanges gradients before it steps."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from tritoncomm import fingerprint
from tritoncomm.adam import StalenessAwareAdam, is_adam
from tritoncomm.algorithms import Dense, Recipe, Warmup, recipe
from tritoncomm.bucket import BucketLayout
from tritoncomm.error_feedback import ErrorFeedback
from tritoncomm.errors import ConfigurationError, NonFiniteError
from tritoncomm.metrics import Meter
from tritoncomm.scheduler.process_group import ProcessGroupScheduler
from tritoncomm.scheduler.rounds import Pattern
from tritoncomm.scheduler.simulated import SimulatedScheduler
from tritoncomm.sparse import SparseVector
from tritoncomm.version import __version__

logger = logging.getLogger("tritoncomm")

DEFAULT_DENSITY = 0.01
_SCHEMA = 1
# Their update is linear in the gradient: late delivery only delays it.
_LINEAR = (torch.optim.SGD,)


@dataclass(frozen=True, kw_only=True)
class _Options:
    """What :func:`wrap` was told, beyond the recipe."""

    staleness: str
    max_catch_up: float
    on_nonfinite: str
    timeout: timedelta | None


def wrap(
    optimizer: torch.optim.Optimizer,
    algo: str | Recipe = "oktopk",
    *,
    density: float = DEFAULT_DENSITY,
    process_group: dist.ProcessGroup | None = None,
    warmup_steps: int = 0,
    staleness: str = "aware",
    max_catch_up: float = 20.0,
    on_nonfinite: str = "skip",
    timeout: timedelta | None = None,
    **recipe_fields: Any,
) -> SparseOptimizer:
    """``optimizer``, but ``step()`` first averages the gradients over all ranks, sparsely.

    ``algo`` is a name from :func:`tritoncomm.algorithms`, configured by ``density`` and further
    ``recipe_fields``, or a recipe, which carries its own settings. The first ``warmup_steps`` exchanges
    are dense. Without an initialised process group this is one worker. Gradients must not be averaged
    by anything else (no ``DistributedDataParallel`` around the model).

    ``staleness="aware"`` takes the Adam or AdamW step over what was delivered, each delivery counting
    for at most ``max_catch_up`` steps; ``"off"`` runs the optimizer as it is. ``on_nonfinite``: when
    any rank holds a NaN or Inf, ``"skip"`` drops this step on all ranks, ``"raise"`` raises
    :class:`~tritoncomm.NonFiniteError` on all. ``timeout`` limits each wait for a peer; None leaves it
    to the process group.

    Every rank must call this alike: parameters, recipe and options are compared, and a difference is a
    :class:`~tritoncomm.ConfigMismatchError` on every rank. Raises
    :class:`~tritoncomm.ConfigurationError` for arguments that cannot work.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigurationError(f"optimizer is a {type(optimizer).__name__}: pass a torch.optim.Optimizer")
    if isinstance(optimizer, SparseOptimizer):
        raise ConfigurationError("optimizer is wrapped already: wrap the original one")
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ConfigurationError("LBFGS evaluates its closure several times per step and cannot be wrapped")
    if process_group is not None and not dist.is_initialized():
        raise ConfigurationError("process_group was given but torch.distributed is not initialised")
    _one_of("staleness", staleness, ("aware", "off"))
    _one_of("on_nonfinite", on_nonfinite, ("skip", "raise"))
    chosen = _choose(algo, density, recipe_fields)
    if warmup_steps:
        chosen = Warmup(recipe=chosen, steps=warmup_steps)
    options = _Options(staleness=staleness, max_catch_up=max_catch_up, on_nonfinite=on_nonfinite, timeout=timeout)
    return SparseOptimizer(optimizer, chosen, process_group, options)


class SparseOptimizer(torch.optim.Optimizer):
    """What :func:`wrap` returns. Shares ``param_groups``, ``state`` and ``defaults`` with ``optimizer``."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        recipe: Recipe,
        process_group: dist.ProcessGroup | None,
        options: _Options,
    ) -> None:
        # Not super().__init__: parameters and state stay the wrapped optimizer's. This is the part of
        # it that sets up hooks and profiling, the way unpickling does.
        self.optimizer = optimizer
        super().__setstate__({})
        self.recipe = recipe
        self._options = options
        self._group = process_group
        self._adam = self._staleness_aware_step()
        self._steps = self._skipped = 0
        self._total = Meter()
        self._exchanged = False
        self._mean: SparseVector | None = None
        self._scheduler: ProcessGroupScheduler | None = None
        self._set_up({})

    # What belongs to the wrapped optimizer. Read through, because load_state_dict rebinds them.

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The wrapped optimizer's."""
        return self.optimizer.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        """The wrapped optimizer's."""
        return self.optimizer.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """The wrapped optimizer's."""
        return self.optimizer.defaults

    def __repr__(self) -> str:
        return f"SparseOptimizer({self.recipe!r}, {self.optimizer!r})"

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, on every rank alike. What is owed to the others is kept."""
        owed = self._owed()
        self.optimizer.add_param_group(param_group)
        self._set_up(owed)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients, and an exchange that no step has used."""
        self.optimizer.zero_grad(set_to_none=set_to_none)
        self._reset_exchange()

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Exchange, unless :meth:`synchronize` has done so, then step; returns the closure's loss."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if not self._exchanged:
            self.synchronize()
        if self._mean is not None:
            self._take_step(self._mean)
        self._reset_exchange()
        return loss

    @torch.no_grad()
    def synchronize(self) -> None:
        """Replace every ``.grad`` by the average over ranks now, for example to clip it.

        The following :meth:`step` does not exchange again. Parameters without gradient count as zero
        and receive one. Raises :class:`RuntimeError` when the gradients were exchanged already.
        """
        if self._exchanged:
            raise RuntimeError("gradients were exchanged already: call step() or zero_grad() first")
        started = time.perf_counter()
        flat = self._layout.gather(self._flat)
        pattern = self._feedback.begin(flat, self._rank, self._world_size)
        try:
            mean = self._run(pattern)
        except NonFiniteError as error:
            self._feedback.rollback()
            self._refuse(error)
            return
        except BaseException:
            self._feedback.rollback()
            raise
        self._feedback.commit()
        self._layout.scatter(mean.write_to(flat))
        self._mean, self._exchanged = mean, True
        self._steps += 1
        self._measure(mean, time.perf_counter() - started)

    def metrics(self) -> dict[str, float]:
        """What the last exchange did, and totals; flat, ready for TensorBoard or W&B.

        ``bytes_*`` and ``messages_sent`` are this rank's, ``seconds_*`` split the exchange into
        selection, waiting for the network and everything else, ``residual_norm`` is computed here.
        """
        return self._last | {
            "steps": float(self._steps),
            "skipped_steps": float(self._skipped),
            "bytes_sent_total": float(self._total.sent.bytes),
            "bytes_received_total": float(self._total.received.bytes),
            "residual_norm": float(self._feedback.residual.norm()),
        }

    def state_dict(self) -> dict[str, Any]:
        """The wrapped optimizer's state, loadable into the bare one, and what this rank still owes."""
        owed = [part.clone() for part in self._layout.parts(self._feedback.residual)]
        ours = {
            "schema": _SCHEMA,
            "rank": self._rank,
            "world_size": self._world_size,
            "residuals": owed,
            "algorithm": self._feedback.algorithm.state_dict(),
        }
        return self.optimizer.state_dict() | {"tritoncomm": ours}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what :meth:`state_dict` of the same rank returned, or a bare optimizer's state.

        A bare state starts without anything owed. Raises
        :class:`~tritoncomm.ConfigurationError`, with nothing changed, when it belongs to another rank,
        world size or model.
        """
        ours = state_dict.get("tritoncomm")
        if ours is not None:
            self._check_saved(ours)
        self.optimizer.load_state_dict({k: v for k, v in state_dict.items() if k != "tritoncomm"})
        self._restore_deliveries(state_dict)
        self._reset_exchange()
        self._feedback = ErrorFeedback(self.recipe.build(self._layout.numel), self._layout.device)
        if ours is not None:
            residual = torch.cat([*ours["residuals"], self._flat[:0]])
            self._feedback.load_state_dict({"residual": residual, "algorithm": ours["algorithm"]})

    def _set_up(self, owed: dict[torch.Tensor, torch.Tensor]) -> None:
        """Lay out the parameters, check that all ranks agree, and start with what is ``owed``."""
        pairs = [
            (parameter, name)
            for group in self.param_groups
            for parameter, name in zip(
                group["params"], group.get("param_names", [""] * len(group["params"])), strict=True
            )
            if parameter.requires_grad
        ]
        self._layout = BucketLayout([parameter for parameter, _ in pairs])
        self._flat = torch.zeros(self._layout.numel, device=self._layout.device)
        self._feedback = ErrorFeedback(self.recipe.build(self._layout.numel), self._layout.device)
        parts = self._layout.parts(self._feedback.residual)
        for parameter, part in zip(self._layout.parameters, parts, strict=True):
            if parameter in owed:
                part.copy_(owed[parameter])
        self._scheduler = None
        self._rank, self._world_size = 0, 1
        self._last: dict[str, float] = {}
        if not dist.is_available() or not dist.is_initialized():
            return
        if dist.get_rank(self._group) < 0:
            raise ConfigurationError("this rank is not a member of process_group")
        self._scheduler = ProcessGroupScheduler(self._group, self._options.timeout, self._layout.device)
        self._rank, self._world_size = self._scheduler.rank, self._scheduler.world_size
        fields = {
            "version": __version__,
            "optimizer": type(self.optimizer).__name__,
            "algorithm": self.recipe.name,
            "density": self.recipe.density,
            "recipe": repr(self.recipe),
            "options": repr(self._options),
        }
        names = [name for _, name in pairs]
        fingerprint.compare(fields | fingerprint.parameter_fields(self._layout.parameters, names), self._group)
        if self._rank == 0:
            predicted = self._feedback.algorithm.predicted_traffic(self._world_size).bytes
            logger.info(
                "%r over %d ranks: %d values, first step at most %d bytes per rank",
                self.recipe,
                self._world_size,
                self._layout.numel,
                predicted,
            )

    def _run(self, pattern: Pattern[SparseVector]) -> SparseVector:
        if self._scheduler is not None:
            mean = self._scheduler.run(pattern)
            self._meter = self._scheduler.meter
            return mean
        alone = SimulatedScheduler(1)
        (mean,) = alone.run([pattern])
        (self._meter,) = alone.meters
        return mean

    def _take_step(self, mean: SparseVector) -> None:
        if self._adam is None:
            self.optimizer.step()
            return
        whole = [None] * len(self._layout.parameters)
        delivered = whole if mean.is_full else self._layout.split(mean.indices)
        self._adam.step(self._layout.parameters, delivered)

    def _refuse(self, error: NonFiniteError) -> None:
        if self._options.on_nonfinite == "raise":
            raise error
        logger.warning("step skipped on all ranks: %s", error)
        self._skipped += 1
        self._exchanged = True  # and without a mean, so that step() does nothing

    def _reset_exchange(self) -> None:
        self._exchanged = False
        self._mean = None

    def _measure(self, mean: SparseVector, seconds: float) -> None:
        meter, accumulator = self._meter, self._feedback.accumulator
        assert accumulator is not None
        self._total.count("all", meter.sent, meter.received)
        self._last = {
            "density": self.recipe.density,
            "density_delivered": mean.density,
            "selected": float(accumulator.selected),
            "bytes_sent": float(meter.sent.bytes),
            "bytes_received": float(meter.received.bytes),
            "messages_sent": float(meter.sent.messages),
            "seconds_select": accumulator.seconds,
            "seconds_exchange": meter.waited,
            "seconds_apply": seconds - accumulator.seconds - meter.waited,
            **self._feedback.algorithm.report,
        }

    def _staleness_aware_step(self) -> StalenessAwareAdam | None:
        inner = self.recipe.recipe if isinstance(self.recipe, Warmup) else self.recipe
        if self._options.staleness == "off" or isinstance(inner, Dense):
            return None
        if is_adam(self.optimizer):
            return StalenessAwareAdam(self.optimizer, self._options.max_catch_up)
        if not isinstance(self.optimizer, _LINEAR):
            logger.warning(
                "%s is not staleness-aware: it takes late, bursty gradients at face value; expect a gap to dense "
                "that grows as the density falls",
                type(self.optimizer).__name__,
            )
        return None

    def _owed(self) -> dict[torch.Tensor, torch.Tensor]:
        parts = self._layout.parts(self._feedback.residual)
        return dict(zip(self._layout.parameters, parts, strict=True))

    def _check_saved(self, ours: dict[str, Any]) -> None:
        expected = {"schema": _SCHEMA, "rank": self._rank, "world_size": self._world_size}
        for field, value in expected.items():
            if ours.get(field) != value:
                raise ConfigurationError(
                    f"this checkpoint was written with {field}={ours.get(field)}, here it is {value}"
                )
        sizes = [len(residual) for residual in ours["residuals"]]
        if sizes != [p.numel() for p in self._layout.parameters]:
            raise ConfigurationError("this checkpoint belongs to a model with other parameters")

    def _restore_deliveries(self, state_dict: dict[str, Any]) -> None:
        """Optimizer.load_state_dict casts state to the parameter's dtype; step counts must stay integers."""
        for saved_group, group in zip(state_dict["param_groups"], self.param_groups, strict=True):
            for key, parameter in zip(saved_group["params"], group["params"], strict=True):
                last = state_dict["state"].get(key, {}).get("last_delivered")
                if last is not None:
                    self.state[parameter]["last_delivered"] = last.to(
                        device=parameter.device, dtype=torch.int32, copy=True
                    )


def _choose(algo: str | Recipe, density: float, fields: dict[str, Any]) -> Recipe:
    if not isinstance(algo, Recipe):
        return recipe(algo, density=density, **fields)
    given = sorted(fields) + ([] if density in (DEFAULT_DENSITY, algo.density) else ["density"])
    if given:
        raise ConfigurationError(f"algo is a recipe and carries its own {', '.join(given)}: set it there")
    return algo


def _one_of(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConfigurationError(f"{name}={value!r}: choose one of {', '.join(map(repr, choices))}")
