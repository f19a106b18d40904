"""Exchange what the steps of optimizers have changed, instead of their gradients.

Each worker takes the own steps of its optimizers by its own gradients, from parameters that all workers had in common.
Every ``local_steps`` steps, what they have changed is exchanged like a gradient, with error feedback. The common
parameters, called the anchor, then take a step by the mean, and all workers continue from them. The exchange is linear
in what travels, whatever the optimizer does.

The anchor is trained by ``torch.optim.SGD``, as in "DiLoCo: Distributed Low-Communication Training of Language Models"
(A. Douillard et al., 2023). The exchange therefore sees ordinary parameters with ordinary gradients: the anchor, and
what this worker has changed.
"""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from tritoncomm.scheduler.ranks import own_rank, rank_text
from tritoncomm.step.agree import LOADED
from tritoncomm.step.agree.number import number_of_text, numbers
from tritoncomm.step.exchange.presence import frozen
from tritoncomm.step.exchange.vector import listed
from tritoncomm.step.local.anchor import Watch, anchor_of, delta_of, write
from tritoncomm.step.model.ignored import ignored_of, non_finite
from tritoncomm.step.model.parameters import KnownParameters
from tritoncomm.step.optimizer_list import parts_of
from tritoncomm.step.rules.step import OptimizerSteps, gradients_of, limit_norm, norm_of
from tritoncomm.step.settings import WrapOptions
from tritoncomm.step.tensors.names import label
from tritoncomm.step.tensors.shards import ShardGroups, all_finite, like_parameter, local
from tritoncomm.step.torch_internals import StateHooks, original_class, version_of

logger = logging.getLogger("tritoncomm")

_TAKEN = "local_steps"  # an option of the anchor's optimizer


class LocalSteps:
    """The optimizers of this worker that step by themselves, and the anchor that all workers have in common.

    Args:
        optimizer: The optimizer, or the list of them.
        options: The options of ``wrap``.
        known: The parameters of ``optimizer``.

    Attributes:
        outer: The optimizer of the anchor. Its ``lr`` and ``momentum`` are those of the outer step.
        steps: Their steps by this worker's gradients.
        known: See above.
        parameters: Those of them that require gradients, and are exchanged.
        anchors: The anchor of each of them, fp32 (fp64 of an fp64 parameter), with the same shape and sharding.
        names: The name of the parameter of each anchor.
        shards: The ranks with which this one decides what is done with the parameters.
        taken: Number of steps since the last exchange.
        is_pending: Whether an exchange was due, and has not been completed.
        total: Number of all steps of this worker, also of the runs that were loaded.
        here: Number of steps of this worker in this process.
        dropped: Number of exchanges to which this worker had nothing to give, because a parameter was NaN or Inf.
        fault: Why the next exchange must be rejected beside what is NaN or Inf in the gradients of ``anchors``. Empty
            when all ranks have rejected one.
        delta_norm: Norm of what this worker gave to the last exchange, fp32 ``[]``.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, options: WrapOptions, known: KnownParameters) -> None:
        self._whole, self._optimizers, self._options = optimizer, parts_of(optimizer), options
        self.steps, self.known = OptimizerSteps(self._optimizers), known
        self.parameters: list[torch.Tensor] = []
        self.anchors: list[torch.Tensor] = []
        self.names: list[str] = []
        self._extend()
        assert options.updates is not None
        rate, momentum = options.updates.outer_lr, options.updates.outer_momentum
        self.outer = torch.optim.SGD(self.anchors, lr=rate, momentum=momentum, nesterov=momentum > 0, foreach=False)
        # Options of the anchor that ranks compare in each exchange.
        self.outer.defaults |= {_TAKEN: 0, LOADED: 0}
        # The lists are those above, which may grow.
        self.outer.param_groups[0] |= {_TAKEN: 0, LOADED: 0, "params": self.anchors, "param_names": self.names}
        self.taken = self.total = self.dropped = self.here = self._left_out = 0
        self.is_pending = False
        self.delta_norm = torch.zeros((), device="cpu")
        # States that the next use loads.
        self._later: tuple[Mapping[str, Any], Mapping[int, Any]] | None = None
        self.fault = ""
        self._has_said = self._has_told_change = self._is_stale = self._is_broken = False
        self._swaps = 0  # contexts in which parameters are the anchor
        self._divided: list[tuple[torch.Tensor, int]] = []  # by a loss scale: gradients, and their versions
        self._watch = Watch()
        self._note()

    def _extend(self) -> None:
        """Make an anchor for each parameter that has none yet."""
        held = {id(parameter) for parameter in self.parameters}
        new = {parameter: name for parameter, name in self.known.trained if id(parameter) not in held}
        self.anchors += [*map(anchor_of, new)]
        self.parameters += new
        self.names += new.values()
        self.shards = ShardGroups(self.parameters)

    @property
    def is_due(self) -> bool:
        """True if the next thing to do is an exchange."""
        return self.taken >= self._options.local_steps

    def check(self) -> None:
        """Raise :class:`~tritoncomm.ConfigurationError` if the optimizers have parameters without anchor."""
        self.known.check()
        self.check_not_averaged("step()")

    def check_not_averaged(self, action: str) -> None:
        """Raise :class:`RuntimeError` inside :meth:`averaged`, where parameters are not those of this worker."""
        if self._swaps:
            raise RuntimeError(f"{action} inside averaged(): leave the context first")

    def say_gradients_are_local(self) -> None:
        """Log once that nothing is averaged before a step."""
        if not self._has_said:
            self._has_said = True
            logger.info(
                "gradients stay those of this worker until step(), because %s exchanges updates: what changes .grad "
                "before changes them alone, and clipping limits their norm",
                " and ".join(original_class(each).__name__ for each in self._optimizers),
            )

    def add_new_parameters(self) -> None:
        """Make anchors for the parameters that were added to the optimizers."""
        self.known.note()
        self._extend()

    def remove_new_parameters(self, count: int) -> None:
        """Forget all anchors but the first ``count``."""
        del self.parameters[count:], self.anchors[count:], self.names[count:]
        self.shards = ShardGroups(self.parameters)

    @torch.no_grad()
    def take(self, scale: torch.Tensor | None, found: torch.Tensor | None) -> None:
        """Take a step of each optimizer by this worker's gradients.

        A step with a NaN, an Inf or an overflow is left out on this worker, and counts.

        Args:
            scale: Loss scale by which gradients must be divided. None if they are not scaled.
            found: Overflow flag of a ``GradScaler``. None without one.
        """
        self.check()
        self.note_loading()
        overflowed = found is not None and bool(found) and not self._has_shards
        trained = gradients_of(self._optimizers)
        gradients = [*map(local, trained)]
        if scale is not None and not overflowed and not self._are_divided(gradients):
            for gradient in gradients:
                gradient.div_(scale.to(gradient.device))
            self._divided = [(each, version_of(each)) for each in gradients]  # a hook may raise before the step
        limit = self._options.max_grad_norm
        norm = torch.zeros((), device="cpu") if limit is None else norm_of(trained)
        figure = math.nan if limit is None else float(norm)  # the host waits for a GPU once
        if overflowed or not (math.isfinite(figure) or self._usable(trained)):
            self._left_out += overflowed
            self._count()
            return
        if limit is not None:
            limit_norm(trained, norm, limit)
            self.steps.grad_norm = figure
        self.steps.step([], self._counted(), self._whole)
        self._note()

    def _are_divided(self, gradients: Sequence[torch.Tensor]) -> bool:
        """Return True if these ``gradients`` were divided by the loss scale, in a step that has failed."""
        return len(gradients) == len(self._divided) and all(
            gradient is each and version_of(gradient) == version
            for gradient, (each, version) in zip(gradients, self._divided, strict=True)
        )

    @contextmanager
    def _counted(self) -> Iterator[None]:
        yield
        self._count()

    def _count(self) -> None:
        self.taken, self.total, self.here = self.taken + 1, self.total + 1, self.here + 1
        self.is_pending = self.is_due
        self._divided = []

    def _note(self) -> None:
        """Note what the parameters are. A change between two exchanges counts as a step."""
        if self.taken:
            self._watch.note_versions(self.parameters)
        else:
            self._watch.note(self.parameters)

    def _were_loaded(self) -> bool:
        """Return True if weights were loaded since the last exchange: the anchor is no common origin any more."""
        return self._is_stale or (not self.taken and self._watch.were_loaded(self.parameters, self.anchors))

    @torch.no_grad()
    def note_loading(self) -> None:
        """Let weights that were loaded since the last exchange be the anchor.

        Another rank may have loaded others, or none: the next exchange compares them. The shards of a model were loaded
        together, also those that have changed by little.
        """
        self._load_later()
        loaded = self._were_loaded()
        if not self.taken:  # otherwise only a loaded state tells, which is the same kind of state on all shards
            loaded = self.shards.any(loaded)
        if loaded:
            self.outer.param_groups[0][LOADED] = number_of_text(repr(numbers(self.parameters)))
            self.accept()

    @property
    def _has_shards(self) -> bool:
        return any(hasattr(parameter, "device_mesh") for parameter in self.parameters)

    def _usable(self, gradients: Sequence[torch.Tensor]) -> bool:
        """Return True if the optimizers may step by ``gradients``. The ranks of a replica decide alike."""
        if bool(norm_of(gradients).isfinite()) if self._has_shards else all_finite([*map(local, gradients)]):
            return True
        labels = {id(parameter): label(name, i, parameter) for i, (parameter, name) in enumerate(self.known.trained)}
        bad = non_finite(self.parameters, labels)
        bad |= non_finite(ignored_of(self._optimizers, self.known.ignored), self.known.names)
        if self._options.on_nonfinite == "raise":
            self.fault = listed(bad)
            return False
        self._left_out += 1
        who, where = rank_text(own_rank()), listed(bad) or "another shard"
        logger.warning("%s left out a local step: NaN or Inf in the gradients of %s", who, where)
        return False

    @torch.no_grad()
    def give(self, *, alone: bool) -> None:
        """Let the gradient of each anchor be what this worker has changed, or None if it has changed nothing.

        It is taken against the anchor in the dtype of the parameter, so that its rounding is no change. If it is NaN or
        Inf, this worker gives zeros, unless the policy is to raise. When they are settled, it forgets the state of its
        optimizers, which may be NaN, too.

        Args:
            alone: Whether there is a single worker, and nothing is left of earlier exchanges. Its parameters are then
                the new anchor, to the bit.
        """
        self._load_later()
        (group,) = self.outer.param_groups
        group[_TAKEN] = self.taken
        goes_to_mean = float(group["lr"]) == 1.0 and group["momentum"] == 0
        if alone and goes_to_mean:
            self.accept()
        deltas = self._deltas()
        norms = torch.stack([delta.norm() for delta in deltas])
        figures = norms.tolist()  # the host waits for a GPU once
        finite = all(map(math.isfinite, figures))
        if not finite:
            finite = self._only_changes(deltas)
            norms = torch.stack([delta.norm() for delta in deltas])
            figures = norms.tolist()
        if self._options.on_nonfinite != "raise":
            self._drop_broken(deltas, finite=finite)
            norms = torch.zeros_like(norms) if self._is_broken else norms
        self.delta_norm = torch.linalg.vector_norm(norms)
        still = frozen(self._whole, self._pairs())
        for anchor, delta, norm in zip(self.anchors, deltas, figures, strict=True):
            # What this worker has not changed is like a parameter without gradient. Shards of it may differ in that.
            given = norm != 0 or bool(delta.any()) or (self._has_shards and id(anchor) not in still)
            anchor.grad = like_parameter(anchor, delta.reshape(-1)) if given else None

    def _deltas(self) -> list[torch.Tensor]:
        """Return what this worker has changed of each parameter, in the dtype of its anchor."""
        self._is_broken = False
        return [delta_of(local(a.detach()), local(p.detach())) for a, p in self._pairs()]

    def _only_changes(self, deltas: Sequence[torch.Tensor]) -> bool:
        """Let ``deltas`` be 0 where a parameter is as NaN or Inf as its anchor. Return whether all are finite then."""
        for (anchor, parameter), delta in zip(self._pairs(), deltas, strict=True):
            own, before = local(parameter.detach()), local(anchor.detach()).to(parameter.dtype)
            delta.masked_fill_((own == before) | (own.isnan() & before.isnan()), 0)
        return all_finite(deltas)

    def _drop_broken(self, deltas: Sequence[torch.Tensor], *, finite: bool) -> None:
        """Replace ``deltas`` by zeros unless they are ``finite``, and so are those of other shards."""
        self._is_broken = self.shards.any(not finite)
        if self._is_broken:
            logger.warning(
                "a local step has made parameters NaN or Inf on %s: it continues from the mean of the others",
                "a rank with other shards of the copy of this rank" if finite else "this rank",
            )
            for delta in deltas:
                delta.zero_()

    def _pairs(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Return each anchor and its parameter."""
        return zip(self.anchors, self.parameters, strict=True)

    def withdraw(self) -> None:
        """Forget what :meth:`give` has given."""
        for anchor in self.anchors:
            anchor.grad = None

    @contextmanager
    def settling(self, gains: Mapping[int, torch.Tensor | None]) -> Iterator[None]:
        """Multiply the mean of each anchor by its gain, if it has one. All workers continue from what the body makes.

        ``gains`` are given by the ids of the anchors.
        """
        for anchor in self.anchors:
            gain = gains[id(anchor)]
            if gain is not None and anchor.grad is not None:
                local(anchor.grad).mul_(gain)
        yield
        self.settle()
        self.forget_loading()

    def forget_loading(self) -> None:
        """Forget that weights were loaded: the anchors have been compared, or all ranks have exchanged since."""
        self.outer.param_groups[0][LOADED] = 0

    @torch.no_grad()
    def settle(self) -> None:
        """Let the parameters of this worker be the anchor."""
        self.withdraw()
        self._go_to_anchor()
        if self._is_broken:
            self._is_broken = False
            self.dropped += 1
            for optimizer in self._optimizers:
                for key in [each for each in optimizer.state if id(each) not in self.known.ignored]:
                    del optimizer.state[key]
        self.taken, self.is_pending = 0, False
        self._note()

    def _go_to_anchor(self) -> None:
        for anchor, parameter in self._pairs():
            write(parameter, anchor)

    @torch.no_grad()
    def accept(self) -> None:
        """Let the anchor be the parameters of this worker. Where these are its rounded values, it stays."""
        for anchor, parameter in self._pairs():
            held, own = local(anchor.detach()), local(parameter.detach())
            held.copy_(torch.where(held.to(own.dtype) == own, held, own.to(held.dtype)))
        self._is_stale = False
        self._note()

    @torch.no_grad()
    def fold(self, residuals: Mapping[torch.Tensor, torch.Tensor]) -> None:
        """Add what this worker has changed to its ``residuals`` (flat views by anchor), and continue from the anchor.

        Nothing is lost and nothing is sent, so a worker may do it at any time. If a parameter is NaN or Inf, nothing is
        added.
        """
        self.note_loading()
        deltas = self._deltas()
        self._drop_broken(deltas, finite=all_finite(deltas) or self._only_changes(deltas))
        for anchor, delta in zip(self.anchors, deltas, strict=True):
            residuals[anchor].view(delta.shape).add_(delta)
        self.settle()

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Let the parameters be the anchor in the body, and this worker's own again behind it."""
        self._load_later()
        swaps = self.taken > 0 and not self._swaps
        if swaps and not self._has_told_change and self._watch.were_written(self.parameters):
            self._has_told_change = True
            logger.warning(
                "parameters were changed outside of step() while %d local steps were not exchanged: this counts as a "
                "part of these steps. Before you load weights, call merge()",
                self.taken,
            )
        own = [parameter.detach().clone() for parameter in self.parameters] if swaps else []
        with torch.no_grad():
            if swaps:
                self._go_to_anchor()
        self._swaps += 1
        try:
            yield
        finally:
            self._swaps -= 1
            with torch.no_grad():
                for parameter, values in zip(self.parameters, own, strict=False):
                    write(parameter, values)
            if swaps:
                self._note()

    @contextmanager
    def without_momentum(self) -> Iterator[None]:
        """Let the outer step have no momentum in the body."""
        (group,) = self.outer.param_groups
        before = group["momentum"], group["nesterov"]
        group["momentum"], group["nesterov"] = 0, False
        try:
            yield
        finally:
            group["momentum"], group["nesterov"] = before

    def metrics(self) -> dict[str, float]:
        """Return metrics of the local steps."""
        return {
            "inner_steps": float(self.total),
            "steps_until_exchange": float(max(0, self._options.local_steps - self.taken)),
            "delta_norm": float(self.delta_norm),
            "dropped_deltas": float(self.dropped),
            "left_out_steps": float(self._left_out),
        }

    def saved(self) -> dict[str, Any]:
        """Return this worker's state. Between two exchanges, it holds the parameters of this worker.

        It has no anchors if somebody has given the parameters other values: those of the model then count.
        """
        self._load_later(again=True)  # torch asks for a state before it loads one
        is_loaded = self._were_loaded()
        state, (group,) = self.outer.state, self.outer.param_groups
        momentum = [state[each].get("momentum_buffer", torch.zeros_like(each)).clone() for each in self.anchors]
        return {
            "anchors": [] if is_loaded else [anchor.detach().clone() for anchor in self.anchors],
            "momentum": momentum if group["momentum"] else [],
            "parameters": [parameter.detach().clone() for parameter in self.parameters] if self.taken else [],
            "taken": self.taken,
            "pending": self.is_pending,
            "total": self.total,
            "outer_lr": float(group["lr"]),
        }

    @torch.no_grad()
    def load(self, state: Mapping[str, Any]) -> None:
        """Load what :meth:`saved` returned. Between two exchanges, parameters become those of this worker.

        A state without anchors, of other shards, takes the parameters for the anchor when the next step begins.
        """
        self.withdraw()
        self._later, self.fault = None, ""
        self._is_stale = not state["anchors"]
        for anchor, own in zip(self.anchors, state["anchors"], strict=False):
            write(anchor, own)
        self.outer.state.clear()
        for anchor, own in zip(self.anchors, state["momentum"], strict=False):
            buffer = torch.empty_like(anchor)
            write(buffer, own)
            self.outer.state[anchor]["momentum_buffer"] = buffer
        if not self._is_stale:
            self._go_to_anchor()
        for parameter, own in zip(self.parameters, state["parameters"], strict=False):
            write(parameter, own)
        self.outer.param_groups[0]["lr"] = state["outer_lr"]
        self.forget_loading()
        self.taken, self.total, self.is_pending = state["taken"], state["total"], state["pending"]
        self._note()

    def load_later(self, state: Mapping[str, Any], inner: Mapping[int, Any]) -> None:
        """Load ``state``, and the ``inner`` state of each parameter, before the next step, exchange, save or context.

        The latter are given by the numbers of the parameters. Until then, what one rank has saved may be loaded into
        the model and the optimizers.
        """
        self._later = state, inner

    @torch.inference_mode(False)
    @torch.no_grad()
    def _load_later(self, *, again: bool = False) -> None:
        """Load what :meth:`load_later` was given, if anything, and ``again`` at the next use."""
        later = self._later
        if later is None:
            return
        state, inner = later
        self.load(state)
        kind = original_class(self._whole)
        states = copy.deepcopy(inner) if again else inner  # torch loads into what the optimizer then holds
        with StateHooks(self._whole):
            groups = kind.state_dict(self._whole)["param_groups"]
            kind.load_state_dict(self._whole, {"state": states, "param_groups": groups})
        self._later = later if again else None

    def renew(self) -> None:
        """Take the parameters for the anchor when the next step begins: a state without an anchor was loaded.

        What :meth:`load_later` was given has precedence.
        """
        self.withdraw()
        if self._later is None:
            self.taken, self.is_pending, self._is_stale, self.fault = 0, False, True, ""
