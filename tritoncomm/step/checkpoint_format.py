"""The state that one rank saves of its exchange: format, checks, and conversion to another world size."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from tritoncomm.errors import ConfigurationError
from tritoncomm.step.shards import bytes_of

SCHEMA = 5
_FIELDS = ("schema", "rank", "world_size", "recipe", "settings", "residuals", "algorithm", "steps", "checksum")


def with_checksum(**fields: Any) -> dict[str, Any]:
    """Return ``fields`` with the version of the schema and a checksum."""
    state = {"schema": SCHEMA, **fields}
    return state | {"checksum": checksum(state)}


def checksum(state: Mapping[str, Any]) -> str:
    """Return a digest of all of ``state`` except its checksum. Of a DTensor, the local shard counts."""
    digest = hashlib.blake2b(digest_size=16)

    def feed(value: Any) -> None:
        if isinstance(value, torch.Tensor):
            digest.update(f"{value.dtype}{tuple(value.shape)}".encode())
            digest.update(bytes_of(value))
        elif isinstance(value, Mapping):
            for key in sorted(value, key=str):
                digest.update(repr(key).encode())
                feed(value[key])
        elif isinstance(value, (list, tuple)):  # loading may turn one into the other
            digest.update(f"[{len(value)}".encode())
            for item in value:
                feed(item)
        else:
            digest.update(repr(value).encode())

    feed({key: value for key, value in state.items() if key != "checksum"})
    return digest.hexdigest()


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
    missing = [field for field in _FIELDS if field not in state]
    if missing:
        raise ConfigurationError(f"this checkpoint is truncated: it has no {', '.join(missing)}")
    for field, value in here.items():
        if state[field] != value:
            fix = {
                "rank": ": load the file of this rank (tritoncomm.checkpoint.save() writes one per rank), or discard "
                'the residuals with load_state_dict(state, residuals="reset")',
                "recipe": ": use the algo and node_group that it was saved with",
                "world_size": ": convert the states of all its ranks with tritoncomm.checkpoint.reshard()",
            }
            raise ConfigurationError(
                f"this checkpoint was written with {field}={state[field]!r}, here it is {value!r}{fix.get(field, '')}"
            )
    if checksum(state) != state["checksum"]:
        raise ConfigurationError("this checkpoint is corrupt: its checksum does not match its content")


def reshard(states: Sequence[Mapping[str, Any]], world_size: int) -> list[dict[str, Any]]:
    """Convert the states of all ranks to another world size.

    The residuals of P ranks reach the mean divided by P. The conversion keeps the pending update, which is
    ``sum(residual) / world_size``: the residual of old rank r is multiplied by ``world_size / P`` and added to that of
    new rank ``r % world_size``.

    Args:
        states: The states of all P old ranks, in order: the entry ``"tritoncomm"`` of
            :meth:`tritoncomm.SparseOptimizer.state_dict`.
        world_size: The new number of ranks.

    Returns:
        The states of the new ranks, in order.

    Raises:
        ConfigurationError: The states do not belong together, are damaged, or have been converted before and not been
            loaded since.
    """
    size = len(states)
    if any("migrated" in state for state in states):
        raise ConfigurationError("these states were converted to another world size before: load and save them first")
    for rank, state in enumerate(states):
        check(state, rank=rank, world_size=size, recipe=states[0]["recipe"])
        if state["steps"] != states[0]["steps"]:
            steps = f"{states[0]['steps']} and {state['steps']}"
            raise ConfigurationError(f"the states of ranks 0 and {rank} are from steps {steps}: a save was interrupted")
        if [len(each) for each in state["residuals"]] != [len(each) for each in states[0]["residuals"]]:
            raise ConfigurationError(f"the states of ranks 0 and {rank} belong to models with other parameters")
    resharded = []
    for rank in range(world_size):
        own = states[rank::world_size]
        resharded.append(
            taken_over(
                states[0],
                rank=rank,
                world_size=world_size,
                saved_by=size,
                residuals=[state["residuals"] for state in own],
                like=states[0]["residuals"],
                methods=[state["algorithm"] for state in own],
                common=states[0]["algorithm"],
            )
        )
    return resharded


def taken_over(
    first: Mapping[str, Any],
    *,
    rank: int,
    world_size: int,
    saved_by: int,
    residuals: Sequence[Sequence[torch.Tensor]],
    like: Sequence[torch.Tensor],
    methods: Sequence[Mapping[str, Any]],
    common: Mapping[str, Any],
) -> dict[str, Any]:
    """Return the state of ``rank`` of ``world_size``, which takes over the residuals of some of ``saved_by`` ranks.

    Args:
        first: The state of one of these ranks, the same on all new ranks. Its residuals are not read.
        rank: The new rank.
        world_size: The new number of ranks.
        saved_by: The number of ranks that exchanged gradients before.
        residuals: The residuals that this rank takes over, those of each old rank in a list. There may be none.
        like: Residuals of the right lengths.
        methods: The states of the methods of these old ranks. None, if they belong to other shards.
        common: The state of the method of one old rank, the same on all new ranks.
    """
    share = world_size / saved_by
    return with_checksum(
        rank=rank,
        world_size=world_size,
        recipe=first["recipe"],
        settings=first["settings"],
        residuals=[
            sum(parts, start=torch.zeros(len(own))) * share for own, *parts in zip(like, *residuals, strict=True)
        ],
        algorithm={},
        migrated={"states": list(methods), "share": share, "common": common},
        steps=first["steps"],
    )
