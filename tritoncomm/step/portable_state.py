"""The state of one rank in a checkpoint of ``torch.distributed.checkpoint``, in parts that any model can load.

Every replica of the model has residuals of its own. They are stored as tensors with the shapes of the whole parameters:
as DTensors by a sharded model, else as plain tensors. ``torch.distributed.checkpoint`` reads either into either. The
rest of the state belongs to one rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from tritoncomm.scheduler.process_group import is_distributed
from tritoncomm.step import state as exchange_state
from tritoncomm.step.shards import like_parameter, local, mesh_ranks, place


class ShardOfReplica(NamedTuple):
    """What a rank holds of the model.

    Attributes:
        replica: Number of its replica.
        replicas: Number of replicas.
        first_rank: The lowest rank that holds a part of this replica.
        shards: The rank's shards of the parameters, as texts that can be compared. A whole parameter has the text "".
    """

    replica: int
    replicas: int
    first_rank: int
    shards: list[str]

    @classmethod
    def here(cls, parameters: Sequence[torch.Tensor], replicas: dist.ProcessGroup | None) -> ShardOfReplica:
        """Return what this rank holds. ``replicas`` are the ranks with the same shards of ``parameters``."""
        shards = sorted({place(parameter) for parameter in parameters})
        if not is_distributed():
            return cls(0, 1, 0, shards)
        first_rank = min({dist.get_rank()}.union(*map(mesh_ranks, parameters)))
        return cls(dist.get_rank(replicas), dist.get_world_size(replicas), first_rank, shards)

    @property
    def is_whole(self) -> bool:
        """True if the rank holds whole parameters."""
        return not any(self.shards)


class Parts(NamedTuple):
    """The state of a rank in parts. Tensors are given by number, and shaped and sharded like the parameters.

    Attributes:
        rest: What belongs to this rank alone.
        residuals: The residuals of its replica, with what local steps have changed since the last exchange.
        common: What all replicas have in common if updates are exchanged, by its key: the anchors and their momentum.
    """

    rest: dict[str, Any]
    residuals: dict[str, torch.Tensor]
    common: dict[str, dict[str, torch.Tensor]]


# Keys of what is common. torch.distributed.checkpoint names a key that it does not find.
ANCHORS = "common parameters of the exchange of updates"
MOMENTUM = "momentum of the common parameters, by outer_momentum"
_FIELDS = {ANCHORS: "anchors", MOMENTUM: "momentum"}


def split(
    state: Mapping[str, Any], parameters: Sequence[torch.Tensor], here: ShardOfReplica, inner: Sequence[Any]
) -> Parts:
    """Return the ``state`` of this rank in parts.

    Args:
        state: The state.
        parameters: The parameters that are exchanged. Anchors come first.
        here: What this rank holds of the model.
        inner: The states of the optimizers that step locally, of this rank alone.
    """
    own: Mapping[str, Any] | None = state["local"]
    rest = {key: value for key, value in state.items() if key != "residuals"} | {"held": list(here), "inner": inner}
    common: dict[str, dict[str, torch.Tensor]] = {}
    if own is not None:
        rest["local"] = {**own, **{field: [] for field in _FIELDS.values()}}
        common = {key: _shaped(own[field], parameters) for key, field in _FIELDS.items() if own[field]}
        if own["parameters"]:  # the sum that other ranks would continue from is rounded
            rest["residuals"] = state["residuals"]
    return Parts(rest, _shaped(exchange_state.folded(state)["residuals"], parameters), common)


def _shaped(values: Sequence[torch.Tensor], parameters: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
    pairs = zip(values, parameters, strict=False)
    return {str(number): like_parameter(parameter, own) for number, (own, parameter) in enumerate(pairs)}


def held_by(rest: Mapping[str, Any]) -> ShardOfReplica:
    """Return what the rank held whose state has the first part ``rest``."""
    return ShardOfReplica(*rest["held"])


def joined(parts: Parts) -> dict[str, Any]:
    """Return the state of which :func:`split` returned the ``parts``."""
    state = {key: value for key, value in parts.rest.items() if key not in ("held", "inner")}
    return {"residuals": _flat(parts.residuals)} | state | {"local": _local_of(state["local"], parts.common)}


def _local_of(own: Mapping[str, Any] | None, common: Mapping[str, Mapping[str, torch.Tensor]]) -> dict[str, Any] | None:
    return None if own is None else {**own, **{_FIELDS[key]: _flat(tensors) for key, tensors in common.items()}}


def resharded(
    states: Sequence[Mapping[str, Any]],
    replicas: Sequence[Mapping[str, torch.Tensor]],
    shared: Mapping[str, Mapping[str, torch.Tensor]],
    here: ShardOfReplica,
) -> dict[str, Any]:
    """Return the state of a rank that takes over the residuals of other ranks.

    Args:
        states: First parts that :func:`split` returned: that of the first rank, and, if every rank held a whole
            replica, those of the ranks whose residuals this rank takes over.
        replicas: The residuals of the replicas that this rank takes over. The list may be empty.
        shared: What all replicas have in common.
        here: What this rank holds.
    """
    first = {**states[0], "local": _local_of(states[0]["local"], shared)}
    held = {held_by(state).replica: state["algorithm"] for state in states}
    methods = [held[number] for number in sorted(held) if number % here.replicas == here.replica]
    if not (here.is_whole and held_by(first).is_whole):
        first["algorithm"] = [exchange_state.without_entries(method) for method in first["algorithm"]]
        methods = [[] for _ in replicas]
    old = [{"residuals": _flat(each), "algorithm": method} for each, method in zip(replicas, methods, strict=True)]
    share = here.replicas / held_by(first).replicas
    return exchange_state.taken_over(first, old, rank=here.replica, world_size=here.replicas, share=share)


def _flat(residuals: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
    return [local(residuals[str(number)]).reshape(-1) for number in range(len(residuals))]
