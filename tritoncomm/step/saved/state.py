"""What is saved of an exchange, loaded, converted to another number of ranks, and kept when settings change."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from tritoncomm.algorithms import Recipe
from tritoncomm.errors import ConfigurationError
from tritoncomm.step import agree
from tritoncomm.step.agree.number import number_of_text, numbers
from tritoncomm.step.agree.setup import state_outline
from tritoncomm.step.exchange.feedback import Ages, ErrorFeedback
from tritoncomm.step.exchange.machine import GradientExchange
from tritoncomm.step.exchange.scope import Scope
from tritoncomm.step.local.steps import LocalSteps
from tritoncomm.step.recipes import without_encoding
from tritoncomm.step.tensors.names import OTHER_PARAMETERS, device_of
from tritoncomm.step.tensors.shards import like_parameter, local, part

logger = logging.getLogger("tritoncomm")

SCHEMA = 13
State = Mapping[str, Any]  # what saved() returns, or a part of it
_OF_PARAMETERS = ("residuals", "last", "rms")  # its fields with an entry for each parameter


def with_checksum(**fields: Any) -> dict[str, Any]:
    """Return ``fields`` with the version of the schema and a checksum."""
    state = {"schema": SCHEMA, **fields}
    return state | {"checksum": checksum(state)}


def checksum(state: Mapping[str, Any]) -> int:
    """Return a number of all of ``state`` except its checksum. Of a DTensor, the local shard counts."""
    tensors = list[torch.Tensor]()

    def outline(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            tensors.append(value)
            return value.dtype, tuple(value.shape)
        if isinstance(value, Mapping):
            return [(key, outline(value[key])) for key in sorted(value, key=str)]
        if isinstance(value, (list, tuple)):  # loading may turn one into the other
            return [outline(each) for each in value]
        return value

    found = outline({key: value for key, value in state.items() if key != "checksum"})
    return number_of_text(repr((found, numbers(tensors))))


def check_schema(state: Mapping[str, Any]) -> None:
    """Raise :class:`~tritoncomm.ConfigurationError` unless this version reads the schema of ``state``."""
    if not isinstance(state, Mapping):
        raise ConfigurationError(f"not a state of a gradient exchange: expected a dict, got {type(state).__name__}")
    if state.get("schema") != SCHEMA:
        raise ConfigurationError(
            f"this checkpoint has schema={state.get('schema')!r}, this version of tritoncomm reads schema={SCHEMA}: "
            "load it with the version that has written it"
        )


def check(state: Mapping[str, Any], **here: Any) -> None:
    """Raise :class:`~tritoncomm.ConfigurationError` unless ``state`` is intact and its fields equal those ``here``."""
    check_schema(state)
    if not _is_converted(state) and checksum(state) != state.get("checksum"):
        raise ConfigurationError("this checkpoint is corrupt: its checksum does not match its content")
    _check_fields(state, **here)


def _check_fields(state: State, **here: Any) -> None:
    for field, value in here.items():
        if state[field] != value:
            fix = {
                "rank": ": load the state of this rank (tritoncomm.checkpoint.save() saves those of all), or discard "
                'the residuals with load_state_dict(state, residuals="reset")',
                "recipe": ": use the algo that it was saved with",
                "shards": ": load the state of a rank with the same shards, or save with tritoncomm.checkpoint.save()",
                "world_size": ": save with tritoncomm.checkpoint.save(), whose checkpoints any number of ranks loads",
            }
            where = " in its process group" if field == "rank" else ""
            raise ConfigurationError(
                f"this checkpoint was written with {field}={state[field]!r}{where}, here it is {value!r}"
                f"{fix.get(field, '')}"
            )


def taken_over(
    common: State, others: Sequence[State], *, rank: int, world_size: int, share: float = 1.0
) -> dict[str, Any]:
    """Return the state of ``rank`` of ``world_size``, which takes over what some old ranks have, for :func:`loaded`.

    Args:
        common: The state of one old rank, the same on all new ranks. Its residuals are not read.
        others: The states of the old ranks whose residuals this rank takes over. There may be none. Those of other
            shards have no states of methods.
        rank: The new rank.
        world_size: The new number of ranks.
        share: By what residuals are multiplied, which keeps the pending update: the new number of ranks by the old one.
    """
    own = {"rank": rank, "world_size": world_size, "residuals": [], "others": list(others), "share": share}
    if common["local"] is not None:
        own["local"] = {**common["local"], "parameters": [], "taken": 0, "pending": False}
    return {**common, **own}


def _is_converted(state: State) -> bool:
    """Return True if :func:`taken_over` has returned ``state``, of others that were checked."""
    return "others" in state


def saved(exchange: GradientExchange, local_steps: LocalSteps | None = None) -> dict[str, Any]:
    """Return this rank's state: residuals in the order of the parameters, and the state of each vector's method.

    What belongs to the entries of a parameter has the shape and the sharding of the parameter.

    If updates are exchanged, the anchor and the parameters of this worker are a part of it.
    """
    scope = exchange.scope
    first, held = scope.vectors[0], _held(exchange, scope.parameters)
    return with_checksum(
        rank=first.rank,
        world_size=first.world_size,
        recipe=_name(scope),
        settings=_settings(scope),
        names=list(scope.names),
        shards=_shards(scope),
        **{field: [None if each is None else each.clone() for each in held.pop(field)] for field in _OF_PARAMETERS},
        **held,
        absent=exchange.presence.positions(scope.parameters),
        local=None if local_steps is None else local_steps.saved(),
    )


def _held(exchange: GradientExchange, parameters: Sequence[torch.Tensor]) -> dict[str, Any]:
    """Return what :func:`carry_over` takes over from ``exchange``: views, in the order of ``parameters``.

    Of a parameter that ``exchange`` does not have, they are None. So are ages without a rule for late gradients.
    """
    found: dict[str, dict[torch.Tensor, torch.Tensor]] = {field: {} for field in _OF_PARAMETERS}
    for vector in exchange.scope.vectors:
        ages, own = vector.feedback.ages, vector.layout.parameters
        found["residuals"] |= {p: like_parameter(p, each) for p, each in vector.residuals_by_parameter().items()}
        # Neither has entries without a rule for late gradients.
        found["last"] |= {p: like_parameter(p, each.reshape(-1)) for p, each in zip(own, ages.last, strict=False)}
        found["rms"] |= zip(own, ages.rms, strict=False)
    return {
        **{field: [values.get(parameter) for parameter in parameters] for field, values in found.items()},
        "algorithm": [vector.feedback.algorithm.state_dict() for vector in exchange.scope.vectors],
        "steps": exchange.steps,
    }


def _name(scope: Scope) -> str:
    """Return the name of the method. Whether it runs between nodes does not matter: residuals are alike."""
    return scope.options.recipe.layers[-1].name


def _shards(scope: Scope) -> list[str]:
    """Return the parts of parameters that this rank has. That of a whole parameter is ``""``."""
    return sorted(set(map(part, scope.parameters)))


def _settings(scope: Scope) -> str:
    """Return the recipe, and how many values each vector sends dense, as text. A state fits whatever the formats."""
    plain = repr(without_encoding(scope.options.recipe))
    return "; ".join(f"{plain}, {vector.dense_numel} values dense" for vector in scope.vectors)


def loaded(scope: Scope, state: State, local_steps: LocalSteps | None = None) -> list[ErrorFeedback]:
    """Return error feedbacks with the content of ``state``, which :func:`saved` returned. Nothing changes.

    The residual never depends on the settings of a method or the world size. The state of the method does.

    Raises:
        ConfigurationError: The state is damaged, or belongs to another rank, world size, method or model.
    """
    first, is_converted, own = scope.vectors[0], _is_converted(state), state.get("local")
    check(state)
    if (own is None) != (local_steps is None):
        kinds = ("gradients", "updates") if own is None else ("updates", "gradients")
        raise ConfigurationError(
            f"this checkpoint was written by an exchange of {kinds[0]}, and here {kinds[1]} are exchanged: pass the "
            "optimizers, updates and local_steps that it was saved with"
        )
    _check_fields(state, rank=first.rank, world_size=first.world_size, recipe=_name(scope))
    states = [state, *state["others"]] if is_converted else [state]
    of_parameters = [old["residuals"] for old in states[is_converted:]]
    if own is not None and own["anchors"]:
        of_parameters.append(own["anchors"])
    lengths = [local(parameter).numel() for parameter in scope.parameters]
    if len(state["last"]) != len(lengths) or any(
        [local(each).numel() for each in values] != lengths for values in of_parameters
    ):
        raise ConfigurationError(OTHER_PARAMETERS)
    _check_names(state["names"], scope.names)
    feedbacks = carry_over(scope, states, state.get("share", 1.0))
    if is_converted:
        return feedbacks
    if state["settings"] != _settings(scope):
        logger.warning(
            "the checkpoint was written with other settings, %s: the residual is loaded, and the state of the "
            "method starts from scratch",
            state["settings"],
        )
    elif len(state["algorithm"]) == len(feedbacks):
        for feedback, method in zip(feedbacks, state["algorithm"], strict=True):
            feedback.algorithm.load_state_dict(method)
    return feedbacks


def _check_names(before: Sequence[str], here: Sequence[str]) -> None:
    """Raise if a parameter had the name of another one at the save. A wrapper around a module gives it a new name."""
    known, now = {*before}, {*here}
    for number, (old, new) in enumerate(zip(before, here, strict=True)):
        if old and new and old != new and (old in now or new in known):
            raise ConfigurationError(f"{OTHER_PARAMETERS}: parameter {number} was {old}, and is {new}")


def carry_over(new: Scope, states: Sequence[State], share: float) -> list[ErrorFeedback]:
    """Return error feedbacks for the vectors of ``new``, which go on from ``states``. Nothing changes.

    This is every change of an exchange: of its parameters, of settings, of the number of ranks. The residual is the sum
    of those of ``states``, times ``share``. Of methods, what does not depend on the change is kept.

    Args:
        new: What is exchanged after the change.
        states: What is taken over, with fields as :func:`saved` returns them, in the order of the parameters of
            ``new``. The first one has what is the same on all ranks: ages, and the state of each vector's method. It
            may have no residuals. Without states of methods, or with another number of vectors, methods keep nothing of
            their own.
        share: The factor of the residuals that keeps the pending update: the new number of ranks by the old one.
    """
    common, count, feedbacks = states[0], len(new.vectors), []
    positions = {id(parameter): position for position, parameter in enumerate(new.parameters)}
    taken = [state for state in states if state["residuals"]]
    for number, vector in enumerate(new.vectors):
        feedback, own = vector.new_feedback(), [positions[id(each)] for each in vector.layout.parameters]
        for position, residual in zip(own, vector.layout.parts(feedback.residual), strict=True):
            for values in (state["residuals"][position] for state in taken):
                if values is not None:
                    residual.add_(local(values).reshape(-1).to(vector.device))
        feedback.residual.mul_(share)
        if common["algorithm"]:
            methods = [state["algorithm"][number] for state in taken if len(state["algorithm"]) == count]
            shared = common["algorithm"][number if len(common["algorithm"]) == count else 0]
            feedback.algorithm.migrate(methods, share, shared)
        if feedback.ages.last:
            _carry_ages(feedback.ages, common, own)
        feedbacks.append(feedback)
    return feedbacks


def _carry_ages(ages: Ages, common: State, positions: Sequence[int]) -> None:
    """Copy the ages in ``common`` into ``ages``, those of the parameters at ``positions``."""
    rms = [common["rms"][position] for position in positions]
    ages.deliver_all(common["steps"])
    for view, last in zip(ages.last, (common["last"][each] for each in positions), strict=True):
        if last is not None:
            view.copy_(local(last).view(view.shape))
    if all(each is not None for each in rms):  # otherwise all are measured again
        ages.rms = [each.to(ages.flat.device, copy=True) for each in rms]


def agreed(state: State, local_steps: LocalSteps) -> State:
    """Return ``state``, which :func:`saved` returned, without anchors if other shards of the copy have none.

    All ranks with these shards call this.
    """
    own = state["local"]
    if local_steps.shards.any(not own["anchors"]) and own["anchors"]:
        return with_checksum(**{**state, "local": {**own, "anchors": []}})
    return state


def resume(
    exchange: GradientExchange,
    feedbacks: Sequence[ErrorFeedback],
    state: Mapping[str, Any],
    local_steps: LocalSteps | None = None,
) -> None:
    """Continue ``exchange`` from ``state``, of which :func:`loaded` has returned the ``feedbacks``."""
    if local_steps is not None:
        local_steps.load(agreed(state, local_steps)["local"])
    exchange.scope.restore(feedbacks)
    exchange.steps = state["steps"]
    exchange.presence.set(exchange.scope.parameters, state["absent"])


def compare(scope: Scope, inner: Mapping[int, Any], saved: State | None, feedbacks: Sequence[ErrorFeedback]) -> None:
    """Check that all ranks load the state of the same step. All of them call this together.

    Args:
        scope: What is exchanged by what goes on from it.
        inner: The states of the parameters that all ranks have in common, by number.
        saved: What :func:`saved` returned, if the state has it.
        feedbacks: What :func:`loaded` returned.

    Raises:
        ConfigMismatchError: Another rank cannot load its state, or loads the state of another step.
    """
    everybody, device = scope.everybody, device_of(scope.optimizer)
    fields: dict[str, Any] = {}
    with agree.propagate_errors(everybody, device):
        fields |= state_outline(inner)
        if feedbacks:
            ages = [each.ages.flat for each in feedbacks]
            fields["loaded state"] = repr([[each.algorithm.common_state() for each in feedbacks], numbers(ages)])
    agree.compare({"steps": saved["steps"] if saved else None}, everybody, device)
    agree.compare(fields, everybody, device, scope.shard)  # methods of other shards have other states


def for_this_rank(state_dict: dict[str, Any], scope: Scope, *, reset: bool) -> dict[str, Any]:
    """Return the ``state_dict`` of a wrapped optimizer, changed if ranks load the state of another rank.

    That is possible for a state without residual, and for any state if ``reset`` is set, which sets residuals to zero.
    All ranks then keep only the part of the method's state that does not depend on the rank. All ranks call this
    together.

    Args:
        state_dict: The state.
        scope: What is exchanged by what goes on from it.
        reset: Whether to set residuals to zero.
    """
    saved, first = state_dict.get("tritoncomm"), scope.vectors[0]
    rank, size = first.rank, first.world_size
    is_own, keeps = saved is None, False
    if saved is not None:
        check(saved, **({} if _is_converted(saved) else {"shards": _shards(scope)}))
        keeps = not reset and any(bool(local(each).any()) for each in saved["residuals"])
        is_own = _is_converted(saved) or (not reset and (keeps or (saved["rank"], saved["world_size"]) == (rank, size)))
    told = agree.all_gather({"is own": is_own}, scope.everybody)
    if saved is None or _is_converted(saved) or all(fields["is own"] for fields in told.values()):
        return state_dict
    if keeps:
        check(saved, rank=rank, world_size=size)
    ages = {"last": [None] * len(saved["last"])} if reset else {}  # nothing waits for its delivery
    own = taken_over({**saved, **ages}, [saved] if keeps else [], rank=rank, world_size=size)
    return state_dict | {"tritoncomm": own}


def extend(exchange: GradientExchange, new: Scope) -> None:
    """Let ``new``, with other parameters, go on from the residuals and methods' states of ``exchange``."""
    old = _held(exchange, new.parameters)
    if any(map(_has_tensors, old["algorithm"])):
        logger.warning("the parameters have changed: the momentum of %s begins again", _name(exchange.scope))
    old["algorithm"] = [without_entries(method) for method in old["algorithm"]]
    new.restore(carry_over(new, [old], 1.0))
    sources = {
        id(parameter): (vector.scale, position)
        for vector in exchange.scope.vectors
        for position, parameter in enumerate(vector.large)
        if vector.scale is not None
    }
    for vector in new.vectors:
        if vector.scale is not None:
            vector.scale.adopt_tensors([sources.get(id(parameter)) for parameter in vector.large])


def without_entries(method: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state of a method without what belongs to entries of its vector: second moments and momentum."""
    found: dict[str, Any] = {}
    for key, value in method.items():
        if key == "moment" or isinstance(value, torch.Tensor):
            found[key] = None
        else:
            found[key] = without_entries(value) if isinstance(value, Mapping) else value
    return found


def _has_tensors(method: Mapping[str, Any]) -> bool:
    """Return True if the state of a method has a momentum."""
    inner = [value for key, value in method.items() if key != "moment"]
    return any(_has_tensors(each) if isinstance(each, Mapping) else isinstance(each, torch.Tensor) for each in inner)


def moved(exchange: GradientExchange, recipe: Recipe, group: dist.ProcessGroup | None) -> None:
    """Continue ``exchange`` by ``recipe`` in ``group``, possibly of another size.

    This rank's contribution to the mean stays the same. Recipes may differ only in :class:`~tritoncomm.Hierarchical`.
    """
    old, size = _held(exchange, exchange.scope.parameters), exchange.scope.vectors[0].world_size
    new = exchange.scope.moved(recipe, group)
    new.restore(carry_over(new, [old], new.vectors[0].world_size / size))
    exchange.scope = new
