"""The state of a hook that exchanges gradients during the backward pass, for DDP and FSDP2."""

from __future__ import annotations

import logging
import weakref
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_pre_hook

from tritoncomm.algorithms import Recipe
from tritoncomm.errors import ConfigurationError
from tritoncomm.step import carry_over, checkpoint_format, setup_checks, step_checks
from tritoncomm.step.aware import is_linear
from tritoncomm.step.delivered import Delivered
from tritoncomm.step.exchange import GradientExchange
from tritoncomm.step.exchange_state import for_this_rank, restored_by_name, saved_by_name
from tritoncomm.step.options import WrapOptions, is_dense, one_of, with_density
from tritoncomm.step.vector_exchange import VectorExchange

logger = logging.getLogger("tritoncomm")

# All states with a model, to find the hook of the parameters of an optimizer.
_states: weakref.WeakSet[HookState] = weakref.WeakSet()


class HookState(ABC):
    """The exchange of a hook, with metrics, checkpoints, and the connection to a wrapped optimizer.

    Args:
        exchange: The exchange that the hook drives.
        process_group: Process group in which settings are compared, and of which a saved state belongs to one rank.
        on_nonfinite: Action when any rank has a NaN or Inf. See the front doors.
        scaler: The ``GradScaler`` that scales the loss. Residuals are kept in unscaled units. None without one.

    Attributes:
        exchange: The exchange.
        optimizers: Wrapped optimizers that take their steps over the delivered entries.
        consumed: Whether one of them has used or discarded the delivered entries.
    """

    def __init__(
        self,
        exchange: GradientExchange,
        process_group: dist.ProcessGroup | None,
        on_nonfinite: str,
        scaler: torch.amp.GradScaler | None,
    ) -> None:
        self.exchange = exchange
        self.process_group = process_group
        self.on_nonfinite = on_nonfinite
        self.scaler = scaler
        self.optimizers: list[weakref.ref[Any]] = []
        self.consumed = True
        # Parameters (ids) of wrapped optimizers, whose means have been neither used nor thrown away.
        self._pending: set[int] = set()
        self._named: dict[int, tuple[str, weakref.ref[torch.Tensor]]] = {}
        self._loaded: Mapping[str, Any] | None = None

    # What a hook provides

    @abstractmethod
    def build(self, layout: list[list[str]]) -> list[VectorExchange]:
        """Return new vectors with the parameters of ``layout``, by name."""

    @abstractmethod
    def was_reset(self, parameter: torch.Tensor) -> bool:
        """Return True if the gradient of ``parameter`` was reset before this pass. False if that is not known."""

    @property
    def replicas(self) -> dist.ProcessGroup | None:
        """Process group of the ranks that hold the same parameters. None is the default group."""
        return self.process_group

    @property
    def kind(self) -> dict[str, Any]:
        """Further fields of a saved state."""
        return {}

    @property
    def is_alone(self) -> bool:
        """True if a single worker trains as it would without a hook, whichever passes have averaged its gradients."""
        return False

    def keep_layout(self) -> None:  # noqa: B027 - that of FSDP2 never changes
        """Keep the present vectors from now on, because a state that has their layout is saved. All ranks call this."""

    # Names and parameters

    def name(self, parameters: Mapping[str, torch.Tensor]) -> None:
        """Use the names of ``parameters`` in messages and in :meth:`state_dict`."""
        self._named = {
            id(parameter): (name, weakref.ref(parameter))
            for name, parameter in parameters.items()
            if parameter.requires_grad
        }
        _states.add(self)

    @property
    def parameters(self) -> dict[str, torch.Tensor]:
        """The parameters that the hook exchanges, by name. Empty if the hook does not know the model."""
        found = ((name, parameter()) for name, parameter in self._named.values())
        return {name: parameter for name, parameter in found if parameter is not None}

    @property
    def device(self) -> torch.device | None:
        """Device of the exchange. None if it is not known yet."""
        return next((parameter.device for parameter in self.parameters.values()), None)

    def name_of(self, parameter: torch.Tensor) -> str:
        """Return the name of ``parameter``. A parameter without a name gets one: a number in the order of this call."""
        if id(parameter) not in self._named:
            self._named[id(parameter)] = f"parameter {len(self._named)}", weakref.ref(parameter)
        return self._named[id(parameter)][0]

    @property
    def scale(self) -> float:
        """The scale of the loss, 1 without a scaler."""
        return 1.0 if self.scaler is None else float(self.scaler.get_scale())

    def unscale(self, vectors: Sequence[VectorExchange], scale: float) -> None:
        """Divide each ``vector.flat`` by ``scale``, and replace NaN and Inf by zero if the user wants that."""
        if scale != 1.0:
            for vector in vectors:
                vector.flat.mul_(1.0 / scale)
        if self.on_nonfinite == "zero":
            finite = torch.stack([vector.flat.isfinite().all() for vector in vectors]).tolist()  # one wait for a GPU
            for vector, is_finite in zip(vectors, finite, strict=True):
                self.exchange.zeroed += 0 if is_finite else vector.zero_non_finite()

    @property
    def recipe(self) -> Recipe:
        """The recipe of the exchange."""
        return self.exchange.options.recipe

    @property
    def steps(self) -> int:
        """Number of committed backward passes."""
        return self.exchange.steps

    @property
    def skipped_steps(self) -> int:
        """Number of rejected backward passes."""
        return self.exchange.skipped

    @property
    def connected(self) -> list[Any]:
        """The wrapped optimizers that are alive."""
        return [optimizer for reference in self.optimizers if (optimizer := reference()) is not None]

    def connect(self, optimizer: Any, wrap: WrapOptions, *, by_update: bool) -> None:
        """Let a wrapped ``optimizer`` take its steps over what this hook delivers.

        It replaces an optimizer that was wrapped earlier for one of its parameters, which cannot step any more. If that
        is another optimizer, and not one that is wrapped again, this logs a warning.

        Args:
            optimizer: The wrapped optimizer.
            wrap: The options of :func:`tritoncomm.wrap`.
            by_update: Whether to select entries by their update.

        Raises:
            ConfigurationError: The exchange has begun, and selects entries by another criterion.
        """
        options = replace(self.exchange.options, max_gradient_norm=wrap.gradient_limit)
        if by_update and not options.by_update:
            if self.exchange.vectors and (self.exchange.steps or self.exchange.skipped):
                raise ConfigurationError(
                    "the model was trained before wrap(): call wrap(optimizer, model=model) before the first backward "
                    'pass, or pass select_by="gradient"'
                )
            self.exchange.options = replace(options, by_update=True)
            self._replace_vectors()
        self.exchange.options = replace(options, by_update=by_update or options.by_update)
        # An overflow of the scaled loss is ordinary: the step is skipped, and the scaler lowers its scale.
        self.on_nonfinite = wrap.on_nonfinite if self.scaler is None else "skip"
        self._pending &= set(self._stepped())  # if one was deleted, another may have stepped since
        own = setup_checks.parameter_ids(optimizer)
        replaced = [each for each in self.connected if own & setup_checks.parameter_ids(each)]
        others = [_kind(each) for each in replaced if each.optimizer is not optimizer.optimizer]
        if others and dist.get_rank(self.replicas) == 0:
            logger.warning(
                "%s replaces %s, which was wrapped earlier for the same parameters and cannot step any more: wrap one "
                "optimizer for each parameter, or delete the earlier one first",
                _kind(optimizer),
                " and ".join(others),
            )
        self.optimizers = [weakref.ref(each) for each in self.connected if each not in replaced]
        self.optimizers.append(weakref.ref(optimizer))
        reference = weakref.WeakMethod(self._stepping)  # no circle: the group is free when this is deleted

        def stepping() -> list[step_checks.Stepping]:
            current = reference()
            return [] if current is None else current()

        self.exchange.stepping = stepping

    def release(self, optimizer: Any) -> None:
        """Do not limit the norm of gradients any more, unless another optimizer has replaced ``optimizer``."""
        if optimizer in self.connected:
            self.use(setup_checks.parameter_ids(optimizer))
            self.exchange.options = replace(self.exchange.options, max_gradient_norm=None)

    def _stepping(self) -> list[step_checks.Stepping]:
        """Return the optimizers that have used the last delivery.

        One that the user has deleted may be alive on some ranks.
        """
        last = self.exchange.deliveries - 1
        used = [each for each in self.connected if each._step_state.used_delivery >= last]  # noqa: SLF001
        return [one for each in used for one in each._optimizer_step.stepping()]  # noqa: SLF001

    def check_connected(self, step_state: object, optimizer: torch.optim.Optimizer) -> None:
        """Raise :class:`RuntimeError` if another wrapped optimizer has replaced a wrapped one, see :meth:`connect`.

        Args:
            step_state: The state that belongs to the wrapped optimizer alone. It may have a proxy of a framework.
            optimizer: Its original optimizer.
        """
        connected = self.connected
        if any(each._step_state is step_state for each in connected):  # noqa: SLF001
            return
        own = setup_checks.parameter_ids(optimizer)
        kinds = [_kind(each) for each in connected if own & setup_checks.parameter_ids(each)]
        raise RuntimeError(
            f"another optimizer ({', '.join(kinds) or 'deleted since'}) was wrapped for the same parameters after this "
            "one: use that one, or wrap this one again"
        )

    def discard(self, parameters: set[int]) -> None:
        """Note that the gradients of ``parameters`` (ids) were reset, or used."""
        self.consumed = True

    def use(self, parameters: set[int]) -> None:
        """Note that the gradients of ``parameters`` (ids) were used, or may have been."""
        self._pending -= parameters

    def revoke(self, parameters: set[int]) -> None:
        """Take back what the last pass did to the residuals of ``parameters`` (ids), whose gradients were thrown away.

        Nothing is taken back that a step has used, or an optimizer that is not wrapped may have used.
        """
        thrown_away = self._pending & parameters
        self._pending -= thrown_away
        if thrown_away:
            self.exchange.revoke(thrown_away)

    def begin_pass(self, *, keep_delivered: bool = False) -> None:
        """Begin a backward pass. See :meth:`GradientExchange.reset`."""
        stepped = self._stepped()
        if not keep_delivered:
            self.revoke({number for number, parameter in stepped.items() if self.was_reset(parameter)})
        self.exchange.reset(keep_delivered=keep_delivered)
        self.consumed = False
        self._pending = set(stepped)

    def _stepped(self) -> dict[int, torch.Tensor]:
        """Return the parameters that wrapped optimizers step, by id."""
        stepping = [each for each in self.connected if each._optimizer_step.is_guarded]  # noqa: SLF001 - of this library
        groups = [group["params"] for each in stepping for group in each.param_groups]
        return {id(parameter): parameter for group in groups for parameter in group}

    def not_averaged(self) -> RuntimeError:
        """Return the error of an optimizer that finds no new averaged gradients."""
        return RuntimeError(
            "the hook has averaged no gradients since the last step(): call step() after a backward pass that is not "
            "in model.no_sync()"
        )

    def check_settings(
        self,
        scaler: torch.amp.GradScaler | None,
        timeout: timedelta | None,
        dense_below: int | None,
        small: str | None,
    ) -> None:
        """Raise an error if the hook was registered with another setting. None stands for one that was not given.

        If it was registered without a scaler and has exchanged nothing yet, any ``scaler`` can be used.
        """
        options = self.exchange.options
        if self.scaler is None and not self.exchange.vectors:
            scaler = None
        given = {"scaler": scaler, "timeout": timeout, "dense_below": dense_below, "small": small}
        registered = {
            "scaler": self.scaler,
            "timeout": options.timeout,
            "dense_below": options.dense_below,
            "small": options.small,
        }
        for name, value in given.items():
            if value is not None and value != registered[name]:
                raise ConfigurationError(
                    f"{name}={value!r}: the model was registered with {name}={registered[name]!r}; pass it to "
                    "register()"
                )

    def watch_optimizers(self, model: str) -> None:
        """Log a warning when an optimizer that is not wrapped takes its first step over what the hook delivers.

        It calls the module ``model``. Nothing is logged if every entry is delivered.
        """
        if is_dense(self.recipe) or self.recipe.density == 1:
            return
        owner, seen = weakref.ref(self), False

        def check(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            nonlocal seen
            state = owner()
            if seen or state is None or state.connected:
                return
            exchanged = {id(parameter) for parameter in state.parameters.values()}
            if any(id(parameter) in exchanged for group in optimizer.param_groups for parameter in group["params"]):
                seen = True
                if not is_linear(optimizer) and dist.get_rank(state.process_group) == 0:
                    logger.warning(
                        "%s treats entries that are delivered late as one large gradient, and ends with a higher loss "
                        "than with a dense exchange (AdamW at density 0.01: 22 %% higher). Wrap it: optimizer = "
                        "tritoncomm.wrap(optimizer, model=%s)",
                        type(optimizer).__name__,
                        model,
                    )

        weakref.finalize(self, register_optimizer_step_pre_hook(check).remove)

    def _replace_vectors(self) -> list[VectorExchange]:
        """Build the vectors again with the present options, and return the old ones."""
        before = self.exchange.vectors
        if before:
            self.exchange.vectors = self.build([vector.names for vector in before])
            self.exchange.agree_on_exchange_id()
        return before

    def trains(self, model: torch.nn.Module) -> bool:
        """Return True if the parameters of ``model`` that require gradients are those of the hook."""
        present = {id(parameter) for parameter in model.parameters() if parameter.requires_grad}
        return present == {id(parameter) for parameter in self.parameters.values()}

    def check_movable(self) -> None:  # noqa: B027 - DDP can
        """Raise :class:`~tritoncomm.ConfigurationError` if the hook cannot continue in another process group."""

    @abstractmethod
    def move(self, model: Any, recipe: Recipe) -> None:
        """Continue with ``model``, a new module around the same parameters, in its process group of any size."""

    def metrics(self) -> dict[str, float]:
        """Return metrics of the last backward pass and totals on this rank, as a flat dict for TensorBoard or W&B.

        Bytes, messages and seconds are sums over the flat vectors. See :meth:`tritoncomm.SparseOptimizer.metrics`.
        """
        return self.exchange.metrics()

    def set_density(self, density: float) -> None:
        """Deliver the fraction ``density`` of the entries from now on, the same on all ranks. Residuals are kept.

        Call it between backward passes.

        Raises:
            ConfigurationError: The density is not in (0, 1]. Nothing has changed.
            ConfigMismatchError: Ranks pass different densities, or an invalid one. Nothing has changed.
        """
        with setup_checks.propagate_errors(self.process_group, self.device):
            recipe = with_density(self.recipe, density)
        setup_checks.compare({"density": density}, self.process_group, self.device)
        self._build_loaded()
        self.exchange.options = self.exchange.options.with_recipe(recipe)
        before = self._replace_vectors()
        for new, old in zip(self.exchange.vectors, before, strict=True):
            carry_over.across_density(new, old)

    @torch.no_grad()
    def flush(self) -> list[Delivered]:
        """Exchange the residuals of all ranks dense, and write their mean into ``.grad``. Residuals become zero.

        Call ``optimizer.step()`` next. If the optimizer is wrapped, call ``optimizer.flush()`` instead of this.
        All ranks must call this between backward passes. It discards the present gradients.
        """
        self._build_loaded()
        stepped = set(self._stepped())
        self.revoke(stepped)
        means = self.exchange.flush()
        self._pending = stepped
        return means

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's residuals by parameter name, the vectors in which they travel, and the methods' states.

        Residuals differ between ranks: save the dict of every rank. A run that loads it continues to the bit.
        """
        if self._loaded is not None:
            return dict(self._loaded)
        rank, size = dist.get_rank(self.process_group), dist.get_world_size(self.process_group)
        return saved_by_name(self.exchange, rank, size, **self.kind)

    def load_state_dict(self, state: Mapping[str, Any], *, residuals: str = "restore") -> None:
        """Load what :meth:`state_dict` of the same rank returned.

        A state without residuals, for example after :meth:`flush`, may be the one of any rank. All ranks must call
        this. If a rank cannot load its state, nothing changes on any rank.

        Args:
            state: The state.
            residuals: ``"restore"`` loads the saved residual. ``"reset"`` sets residuals to zero: the pending update is
                lost, and the state may be the one of any rank. Default: ``"restore"``.

        Raises:
            ConfigurationError: The state is damaged, or belongs to another rank, world size, method or model.
            ConfigMismatchError: Another rank cannot load its state, or loads the state of another step.
        """
        with setup_checks.propagate_errors(self.process_group, self.device):
            one_of("residuals", residuals, ("restore", "reset"))
            wrapped = {"tritoncomm": state}
            state = for_this_rank(wrapped, self.process_group, reset=residuals == "reset")["tritoncomm"]
            self.check_loadable(state)
        setup_checks.compare({"steps": state["steps"]}, self.process_group, self.device)
        self.load_checked(state)

    def check_loadable(self, state: Mapping[str, Any]) -> None:
        """Raise :class:`~tritoncomm.ConfigurationError` if this rank cannot load ``state``. Nothing changes."""
        rank, size = dist.get_rank(self.process_group), dist.get_world_size(self.process_group)
        checkpoint_format.check(state, rank=rank, world_size=size, recipe=self.recipe.name)
        if not isinstance(state["residuals"], Mapping):
            raise ConfigurationError(
                "this checkpoint was saved without a hook, by an optimizer that exchanges in step(): load it in the "
                "same way, or load only the state of the original optimizer"
            )
        saved = {name: residual.numel() for name, residual in state["residuals"].items()}
        present = {name: self.length(parameter) for name, parameter in self.parameters.items()}
        if saved and present and saved != present:  # a state from before the first pass has no residuals
            raise ConfigurationError("this checkpoint belongs to a model with other parameters, or another sharding")

    def load_checked(self, state: Mapping[str, Any]) -> None:
        """Load a state that :meth:`check_loadable` has accepted on all ranks. If this raises, nothing has changed."""
        loaded = state if state["residuals"] else None
        vectors = self._restored(loaded) if loaded is not None and self.parameters else []
        self.exchange.reset()
        self.exchange.vectors, self.exchange.steps = vectors, state["steps"]
        self._loaded = None if vectors else loaded

    def _build_loaded(self) -> None:
        """Build the vectors of a state that was loaded before the hook knew the names of its parameters."""
        if self._loaded is not None:
            self.exchange.vectors, self._loaded = self._restored(self._loaded), None

    def _restored(self, state: Mapping[str, Any]) -> list[VectorExchange]:
        """Return new vectors with the content of ``state``. The names of all parameters must be known."""
        missing = set(state["residuals"]) - set(self.parameters)
        if missing:
            raise ConfigurationError(
                f"the loaded state has parameters that the hook does not know, as {min(missing)}: use register() "
                "instead of register_comm_hook(), or call this after the first backward pass"
            )
        vectors = self.build([list(names) for names in state["algorithm"]["layout"]])
        restored_by_name(self.exchange, vectors, state)
        for vector in vectors:
            vector.agree_on_exchange_id()
        return vectors

    @abstractmethod
    def length(self, parameter: torch.Tensor) -> int:
        """Return the number of values of ``parameter`` that this rank exchanges."""

    def new_vector(self, parameters: list[torch.Tensor]) -> VectorExchange:
        """Return a vector of ``parameters``."""
        names = [self.name_of(parameter) for parameter in parameters]
        return VectorExchange(parameters, names, self.exchange.options)


def _kind(optimizer: Any) -> str:
    return type(optimizer.optimizer).__name__


def hook_of(parameters: set[int]) -> HookState | None:
    """Return the state of the hook that exchanges one of ``parameters`` (ids), if any."""
    for state in list(_states):
        if any(id(parameter) in parameters for parameter in state.parameters.values()):
            return state
    return None
