"""Front door 1: an optimizer that exchanges gradients before it steps."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from tritoncomm import fingerprint
from tritoncomm.adam import StalenessAwareAdam, is_adam
from tritoncomm.algorithms import Dense, Recipe, Warmup, recipe
from tritoncomm.automatic import automatic
from tritoncomm.errors import ConfigurationError, NonFiniteError
from tritoncomm.exchange import GradientExchange, is_initialised
from tritoncomm.sparse import SparseVector
from tritoncomm.version import __version__

logger = logging.getLogger("tritoncomm")

DEFAULT_DENSITY = 0.01
# Their update is linear in the gradient: late delivery only delays it.
_LINEAR = (torch.optim.SGD,)


@dataclass(frozen=True, kw_only=True)
class _Options:
    """What :func:`wrap` was told, beyond the recipe."""

    staleness: str
    max_catch_up: float
    on_nonfinite: str
    timeout: timedelta | None
    dense_below: int

    def __post_init__(self) -> None:
        _one_of("staleness", self.staleness, ("aware", "off"))
        _one_of("on_nonfinite", self.on_nonfinite, ("skip", "raise"))
        if not (isinstance(self.max_catch_up, (int, float)) and self.max_catch_up >= 1):
            raise ConfigurationError(
                f"max_catch_up={self.max_catch_up!r}: a delivery is at least one step, give a number from 1 on"
            )
        if not (isinstance(self.dense_below, int) and self.dense_below >= 0):
            raise ConfigurationError(f"dense_below={self.dense_below!r}: give a number of elements, 0 for none dense")
        if not (self.timeout is None or isinstance(self.timeout, timedelta)):
            raise ConfigurationError(f"timeout={self.timeout!r}: give a datetime.timedelta, or None")


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
    dense_below: int = 1024,
    **recipe_fields: Any,
) -> SparseOptimizer:
    """``optimizer``, but ``step()`` first averages the gradients over all ranks, sparsely.

    ``algo`` is a name from :func:`tritoncomm.algorithms`, configured by ``density`` and further
    ``recipe_fields``, or a recipe, which carries its own settings; ``"auto"`` measures the network and takes what
    the cost formulas predict to be fastest for this model, dense included. The first ``warmup_steps`` exchanges
    are dense. Without an initialised process group this is one worker. Gradients must not be averaged
    by anything else (no ``DistributedDataParallel`` around the model).

    ``staleness="aware"`` takes the Adam or AdamW step over what was delivered, each delivery counting
    for at most ``max_catch_up`` steps; ``"off"`` runs the optimizer as it is. ``on_nonfinite``: when
    any rank holds a NaN or Inf, ``"skip"`` drops this step on all ranks, ``"raise"`` raises
    :class:`~tritoncomm.NonFiniteError` on all. ``timeout`` limits each wait for a peer; None leaves it
    to the process group. Tensors of fewer than ``dense_below`` elements or of at most one dimension (biases,
    norms) travel dense, all in one all-reduce, unless ``dense_below=0``; a model of one-dimensional shards goes
    by the number of elements alone.

    Every rank must call this alike: parameters, optimizer, recipe and options are compared, and a
    difference, or an argument that is wrong on some rank, is a
    :class:`~tritoncomm.ConfigMismatchError` on the other ranks. Raises
    :class:`~tritoncomm.ConfigurationError` for arguments that cannot work.
    """
    if process_group is not None and not is_initialised():
        raise ConfigurationError("process_group was given but torch.distributed is not initialised")
    if process_group is not None and dist.get_rank(process_group) < 0:
        raise ConfigurationError("this rank is not a member of process_group")
    try:
        _check_optimizer(optimizer)
        if algo == "auto":
            chosen = automatic(optimizer, density, process_group, recipe_fields)
        else:
            chosen = _choose(algo, density, recipe_fields)
        if warmup_steps != 0:
            chosen = Warmup(recipe=chosen, steps=warmup_steps)
        options = _Options(
            staleness=staleness,
            max_catch_up=max_catch_up,
            on_nonfinite=on_nonfinite,
            timeout=timeout,
            dense_below=dense_below,
        )
        chosen.check_optimizer(optimizer)
        return SparseOptimizer(optimizer, chosen, process_group, options)
    except (ValueError, TypeError, NotImplementedError) as error:  # ConfigurationError is a ValueError
        if is_initialised():  # the others are about to compare set-ups and must not wait for this rank
            fingerprint.refuse(str(error), process_group)
        raise


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
        self._exchanged = False
        self._mean: SparseVector | None = None
        self._written: list[torch.Tensor | None] = []
        self._exchange = self._set_up()
        if self._exchange.rank == 0 and is_initialised():
            exchange = self._exchange
            logger.info(
                "%r over %d ranks: %d values, of which %d in small tensors travel dense",
                recipe, exchange.world_size, exchange.layout.numel, exchange.dense_numel,
            )  # fmt: skip

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

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError("a SparseOptimizer cannot be copied or pickled, its process group cannot: save state_dict()")

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, on every rank alike. What is owed to the others is kept, or nothing changes."""
        self.optimizer.add_param_group(param_group)
        try:
            self.recipe.check_optimizer(self.optimizer)
            exchange = self._set_up()
        except BaseException:
            self.optimizer.param_groups.pop()
            raise
        exchange.take_over(self._exchange)
        self._exchange = exchange

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients, and an exchange that no step has used."""
        self.optimizer.zero_grad(set_to_none=set_to_none)
        self._reset()

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Exchange, unless :meth:`synchronize` has done so, then step; returns the closure's loss.

        Raises :class:`RuntimeError` when the exchanged gradients have been replaced since.
        """
        loss = None
        if closure is not None:
            if self._exchanged:
                raise RuntimeError("a closure computes new gradients: call step(closure) without synchronize()")
            with torch.enable_grad():
                loss = closure()
        if not self._exchanged:
            self.synchronize()
        if any(now is not then for now, then in zip(self._gradients(), self._written, strict=True)):
            raise RuntimeError("gradients were replaced after synchronize(): call step() or zero_grad() first")
        if self._mean is not None:
            self._take_step(self._mean)
        self._reset()
        return loss

    @torch.no_grad()
    def synchronize(self) -> None:
        """Replace every ``.grad`` by the average over ranks now, for example to clip it.

        The following :meth:`step` does not exchange again. Parameters without gradient count as zero
        and receive one. The staleness-aware step reads ``.grad`` at the delivered coordinates only.
        Raises :class:`RuntimeError` when the gradients were exchanged already.
        """
        if self._exchanged:
            raise RuntimeError("gradients were exchanged already: call step() or zero_grad() first")
        try:
            self._mean = self._exchange.average(self._unfit())
            self._steps += 1
        except NonFiniteError as error:
            self._skipped += 1
            if self._options.on_nonfinite == "raise":
                raise
            logger.warning("step skipped on all ranks: %s", error)
        self._exchanged = True  # without a mean the step does nothing
        self._written = self._gradients()

    def metrics(self) -> dict[str, float]:
        """What the last exchange did, and totals; flat, ready for TensorBoard or W&B.

        ``bytes_*`` and ``messages_sent`` are this rank's, ``seconds_*`` split the exchange into
        selection, waiting for the network and everything else, ``residual_norm`` is computed here.
        """
        return self._exchange.last | {
            "steps": float(self._steps),
            "skipped_steps": float(self._skipped),
            "bytes_sent_total": float(self._exchange.total.sent.bytes),
            "bytes_received_total": float(self._exchange.total.received.bytes),
            "residual_norm": float(self._exchange.feedback.residual.norm()),
        }

    def state_dict(self) -> dict[str, Any]:
        """The wrapped optimizer's state, loadable into the bare one, and what this rank still owes.

        Raises :class:`RuntimeError` between :meth:`synchronize` and :meth:`step`, where what was
        delivered is in the gradients alone.
        """
        if self._exchanged:
            raise RuntimeError("an exchange is waiting for its step: call step() before state_dict()")
        ours = {"staleness_aware": self._adam is not None, **self._exchange.state_dict()}
        return self.optimizer.state_dict() | {"tritoncomm": ours}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what :meth:`state_dict` of the same rank returned, or a bare optimizer's state.

        A bare state starts without anything owed. All ranks load together and go on only if all can.
        Raises, with nothing changed, :class:`~tritoncomm.ConfigurationError` when the state belongs to
        another rank, world size, method or model, and :class:`~tritoncomm.ConfigMismatchError` when
        another rank refused its state or loads one of another step.
        """
        ours = state_dict.get("tritoncomm", {})
        try:
            feedback = self._exchange.loaded(ours)
        except ConfigurationError as error:
            if is_initialised():
                fingerprint.refuse(str(error), self._group)
            raise
        if is_initialised():
            fingerprint.compare({"loaded state": repr(feedback.algorithm.common_state())}, self._group)
        self.optimizer.load_state_dict({k: v for k, v in state_dict.items() if k != "tritoncomm"})
        self._restore_deliveries(state_dict if ours.get("staleness_aware") else None)
        self._exchange.feedback = feedback
        self._reset()

    def _set_up(self) -> GradientExchange:
        """An exchange for the present parameters, once all ranks agree about it."""
        pairs = [
            (parameter, name)
            for group in self.param_groups
            for parameter, name in zip(
                group["params"], group.get("param_names", [""] * len(group["params"])), strict=True
            )
        ]
        trained = [(parameter, name) for parameter, name in pairs if parameter.requires_grad]
        exchange = GradientExchange(
            [parameter for parameter, _ in trained],
            self.recipe,
            self._group,
            self._options.timeout,
            self._options.dense_below,
        )
        self._frozen = [parameter for parameter, _ in pairs if not parameter.requires_grad]
        if is_initialised():
            fingerprint.compare(
                self._fields() | fingerprint.parameter_fields([p for p, _ in trained], [n for _, n in trained]),
                self._group,
            )
        elif int(os.environ.get("WORLD_SIZE", "1")) > 1:
            logger.warning("WORLD_SIZE is set but torch.distributed is not initialised: this is one worker alone")
        return exchange

    def _fields(self) -> dict[str, Any]:
        """What all ranks must have in common, besides the parameters."""
        groups = [{k: v for k, v in g.items() if k not in ("params", "param_names")} for g in self.param_groups]
        return {
            "version": __version__,
            "optimizer": type(self.optimizer).__name__,
            "algorithm": self.recipe.name,
            "density": self.recipe.density,
            "recipe": repr(self.recipe),
            "options": repr(self._options),
            "param_groups": repr(groups),
        }

    def _unfit(self) -> ConfigurationError | None:
        for parameter in self._frozen:
            if parameter.grad is not None:
                return ConfigurationError(
                    f"a parameter of shape {tuple(parameter.shape)} was frozen at wrap() and now has a gradient: "
                    "wrap with requires_grad=True and freeze it then, or unfreeze it before wrapping"
                )
        return None

    def _take_step(self, mean: SparseVector) -> None:
        if self._adam is None:
            self.optimizer.step()
            return
        # The wrapped optimizer's own step is not called; schedulers built on it look for this mark.
        self.optimizer._opt_called = True  # type: ignore[attr-defined]  # noqa: SLF001
        layout = self._exchange.layout
        whole = [None] * len(layout.parameters)
        self._adam.step(layout.parameters, whole if mean.is_full else layout.split(mean.indices))

    def _reset(self) -> None:
        self._exchanged = False
        self._mean = None
        self._written = []

    def _gradients(self) -> list[torch.Tensor | None]:
        return [parameter.grad for parameter in self._exchange.layout.parameters]

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

    def _restore_deliveries(self, state_dict: dict[str, Any] | None) -> None:
        """Optimizer.load_state_dict casts state to the parameter's dtype; step counts must stay integers.

        Without ``state_dict`` other steps than ours came last, and they moved every coordinate.
        """
        if state_dict is None:
            for state in self.state.values():
                state.pop("last_delivered", None)
            return
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


def _check_optimizer(optimizer: torch.optim.Optimizer) -> None:
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigurationError(f"optimizer is a {type(optimizer).__name__}: pass a torch.optim.Optimizer")
    if isinstance(optimizer, SparseOptimizer):
        raise ConfigurationError("optimizer is wrapped already: wrap the original one")
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ConfigurationError("LBFGS evaluates its closure several times per step and cannot be wrapped")


def _one_of(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConfigurationError(f"{name}={value!r}: choose one of {', '.join(map(repr, choices))}")
