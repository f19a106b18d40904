"""Save and load the state of a gradient exchange on one rank: residuals, and the states of the methods."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from tritoncomm.errors import ConfigurationError
from tritoncomm.scheduler.process_group import is_distributed
from tritoncomm.step import checkpoint_format, setup_checks
from tritoncomm.step.error_feedback import ErrorFeedback
from tritoncomm.step.exchange import GradientExchange
from tritoncomm.step.shards import local

logger = logging.getLogger("tritoncomm")


def saved(exchange: GradientExchange) -> dict[str, Any]:
    """Return this rank's state: residuals in the order of the parameters, and the state of each vector's method."""
    first = exchange.vectors[0]
    residuals: dict[torch.Tensor, torch.Tensor] = {}
    for vector in exchange.vectors:
        residuals |= vector.residuals_by_parameter()
    return checkpoint_format.with_checksum(
        rank=first.rank,
        world_size=first.world_size,
        recipe=first.recipe.name,
        settings=_settings_of_vectors(exchange),
        residuals=[residuals[parameter].clone() for parameter in exchange.parameters],
        algorithm=[vector.feedback.algorithm.state_dict() for vector in exchange.vectors],
        steps=exchange.steps,
    )


def loaded(exchange: GradientExchange, state: Mapping[str, Any]) -> list[ErrorFeedback]:
    """Return error feedbacks with the content of ``state``, which :func:`saved` returned. Nothing changes.

    The residual never depends on the settings of a method or the world size. The state of the method does.

    Raises:
        ConfigurationError: The state is damaged, or belongs to another rank, world size, method or model.
    """
    first = exchange.vectors[0]
    checkpoint_format.check(state, rank=first.rank, world_size=first.world_size, recipe=first.recipe.name)
    if [len(each) for each in state["residuals"]] != [local(parameter).numel() for parameter in exchange.parameters]:
        raise ConfigurationError("this checkpoint belongs to a model with other parameters")
    residuals = dict(zip(exchange.parameters, state["residuals"], strict=True))
    migrated = state.get("migrated")
    if migrated is None:
        other_settings = state["settings"] != _settings_of_vectors(exchange)
        if other_settings:
            logger.warning(
                "the checkpoint was written with other settings, %s: the residual is loaded, and the state of the "
                "method starts from scratch",
                state["settings"],
            )
        if other_settings or len(state["algorithm"]) != len(exchange.vectors):
            migrated = {"states": [], "share": 1.0, "common": state["algorithm"]}  # as the warm-up
    feedbacks = []
    for number, vector in enumerate(exchange.vectors):
        feedback = vector.new_feedback()
        if migrated is None:
            method = state["algorithm"][number]
        else:
            _migrate(feedback, migrated, number, len(exchange.vectors))
            method = feedback.algorithm.state_dict()
        parts = [residuals[parameter].to(vector.device) for parameter in vector.layout.parameters]
        feedback.load_state_dict({"residual": torch.cat([vector.flat[:0], *parts]), "algorithm": method})
        feedbacks.append(feedback)
    return feedbacks


def _settings_of_vectors(exchange: GradientExchange) -> str:
    return "; ".join(vector.settings for vector in exchange.vectors)


def _migrate(feedback: ErrorFeedback, migrated: Mapping[str, Any], number: int, count: int) -> None:
    """Let the method of one of ``count`` vectors take over what it can of the states of other ranks or vectors."""
    states = [methods[number] for methods in migrated["states"] if len(methods) == count]
    common = migrated["common"]
    feedback.algorithm.migrate(states, migrated["share"], common[number if len(common) == count else 0])


def compare(
    inner: Mapping[str, Any],
    saved: Mapping[str, Any] | None,
    feedbacks: Sequence[ErrorFeedback],
    replicas: dist.ProcessGroup | None,
    everybody: dist.ProcessGroup | None,
    device: torch.device | None,
) -> None:
    """Check that all ranks load the state of the same step. All of them call this together.

    Args:
        inner: The state of the original optimizer.
        saved: What :func:`saved` returned, if the state has it.
        feedbacks: What :func:`loaded` returned.
        replicas: The ranks that exchange gradients.
        everybody: The ranks of all shards. It is ``replicas`` if the model has no shards.
        device: The device of the exchange. See :func:`~tritoncomm.step.setup_checks.gather`.

    Raises:
        ConfigMismatchError: Another rank cannot load its state, or loads the state of another step.
    """
    fields: dict[str, Any] = {"steps": saved["steps"] if saved else None}
    if everybody is not replicas:  # methods of other shards have other states
        setup_checks.compare(fields, everybody, device)
    fields["optimizer state"] = setup_checks.state_outline(inner)
    if feedbacks:
        fields["loaded state"] = repr([feedback.algorithm.common_state() for feedback in feedbacks])
    setup_checks.compare(fields, replicas, device)


def for_this_rank(state_dict: dict[str, Any], group: dist.ProcessGroup | None, *, reset: bool) -> dict[str, Any]:
    """Return the ``state_dict`` of a wrapped optimizer, changed if ranks load the state of another rank.

    That is possible for a state without residual, and for any state if ``reset`` is set, which sets residuals to zero.
    All ranks then keep only the part of the method's state that does not depend on the rank. All ranks of ``group``
    call this together.
    """
    saved: Any = state_dict.get("tritoncomm") if isinstance(state_dict, dict) else None
    rank, size = (dist.get_rank(group), dist.get_world_size(group)) if is_distributed() else (0, 1)
    intact = saved is not None and _is_intact(saved)
    foreign = intact and "migrated" not in saved and (reset or _is_foreign(saved, rank, size))
    if is_distributed():
        foreign = any(fields["foreign"] for fields in setup_checks.gather({"foreign": foreign}, group))
    if not foreign or not intact:
        return state_dict
    return state_dict | {"tritoncomm": _for_rank(saved, rank, size, reset=reset)}


def _is_intact(state: Any) -> bool:
    try:
        checkpoint_format.check(state)
    except ConfigurationError:
        return False
    return True


def _is_foreign(state: Mapping[str, Any], rank: int, world_size: int) -> bool:
    """Return True if ``state`` belongs to another rank and has no residual."""
    return (state["rank"], state["world_size"]) != (rank, world_size) and not _has_residual(state)


def _for_rank(state: Mapping[str, Any], rank: int, world_size: int, *, reset: bool) -> dict[str, Any]:
    """Return ``state`` as the state of ``rank``, with the part of the method's state that all ranks have in common."""
    if not reset and _has_residual(state):
        checkpoint_format.check(state, rank=rank, world_size=world_size)
    return checkpoint_format.taken_over(
        state,
        rank=rank,
        world_size=world_size,
        saved_by=world_size,
        residuals=[] if reset else [state["residuals"]],
        like=state["residuals"],
        methods=[],
        common=state["algorithm"],
    )


def _has_residual(state: Mapping[str, Any]) -> bool:
    return any(bool(part.any()) for part in state["residuals"])
