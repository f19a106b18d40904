"""The state that one rank saves of its exchange: format, checks, and conversion to another world size."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from tritoncomm.errors import ConfigurationError
from tritoncomm.step.shards import bytes_of

SCHEMA = 4
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


def check(state: Mapping[str, Any], **here: Any) -> None:
    """Raise :class:`~tritoncomm.ConfigurationError` unless ``state`` is intact and its fields equal those ``here``."""
    if not isinstance(state, Mapping):
        raise ConfigurationError(f"not a state of a gradient exchange: expected a dict, got {type(state).__name__}")
    if state.get("schema") != SCHEMA:
        raise ConfigurationError(
            f"this checkpoint has schema={state.get('schema')!r}, this version of tritoncomm reads schema={SCHEMA}: "
            "load it with the version that has written it"
        )
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
    share = world_size / size
    resharded = []
    for rank in range(world_size):
        own = states[rank::world_size]
        residuals = [
            sum(parts, start=torch.zeros_like(first)) * share
            for first, *parts in zip(states[0]["residuals"], *(state["residuals"] for state in own), strict=True)
        ]
        migrated = {"states": [state["algorithm"] for state in own], "share": share, "common": states[0]["algorithm"]}
        resharded.append(
            with_checksum(
                rank=rank,
                world_size=world_size,
                recipe=states[0]["recipe"],
                settings=states[0]["settings"],
                residuals=residuals,
                algorithm={},
                migrated=migrated,
                steps=states[0]["steps"],
            )
        )
    return resharded
