"""The state of sharded residuals in a checkpoint of ``torch.distributed.checkpoint``, which any mesh can load.

Every replica has residuals of its own. Those of one replica are DTensors with the sharding of the parameters, so
``torch.distributed.checkpoint`` reshards them. The rest of the state belongs to one rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from tritoncomm.step import checkpoint_format
from tritoncomm.step.shards import like_parameter, local, place

# What is saved beside the state without its residuals.
_EXTRA = ("place",)


class Place(NamedTuple):
    """Which replica and which shards a rank has."""

    replica: int
    replicas: int
    shards: list[str]


def place_of(parameters: Sequence[torch.Tensor], replica: int, replicas: int) -> Place:
    """Return the place of this rank."""
    return Place(replica, replicas, sorted({place(parameter) for parameter in parameters}))


def split(
    state: Mapping[str, Any], parameters: Sequence[torch.Tensor], here: Place
) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Return the ``state`` of the rank ``here`` without its residuals, and these as DTensors, by number."""
    pairs = zip(state["residuals"], parameters, strict=True)
    sharded = {str(number): like_parameter(parameter, own) for number, (own, parameter) in enumerate(pairs)}
    rest = {key: value for key, value in state.items() if key != "residuals"}
    return rest | {"place": list(here)}, sharded


def belongs(rest: Mapping[str, Any], here: Place) -> bool:
    """Return True if the rank ``here`` may continue with the state whose first part is ``rest``."""
    return bool(rest["place"] == list(here))


def joined(rest: Mapping[str, Any], sharded: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Return the state of which :func:`split` returned the parts."""
    state = {key: value for key, value in rest.items() if key not in _EXTRA}
    return state | {"residuals": [local(sharded[str(number)]).reshape(-1) for number in range(len(sharded))]}


def resharded(
    rest: Mapping[str, Any],
    replicas: Sequence[Mapping[str, torch.Tensor]],
    share: float,
    present: Mapping[str, Any],
) -> dict[str, Any]:
    """Return the state of a rank of another mesh.

    Args:
        rest: The first part that :func:`split` returned on one rank, the same on all ranks.
        replicas: The residuals of the replicas that this rank takes over. The list may be empty.
        share: Number of replicas divided by that of the save. The pending update is the sum of the residuals divided
            by the number of replicas, and stays the same.
        present: The present state of this rank.
    """
    summed = [
        sum((local(each[str(number)]).reshape(-1).cpu() for each in replicas), start=torch.zeros(len(residual))) * share
        for number, residual in enumerate(present["residuals"])
    ]
    # Thresholds, and second moments of rows and columns, are those of other shards.
    method = rest["algorithm"]
    vectors = [each | {"moment": None} for each in method.get("vectors", [method])]
    common = method | {"vectors": vectors} if "vectors" in method else vectors[0]
    fields = {key: value for key, value in rest.items() if key not in (*_EXTRA, "schema", "checksum")}
    fields |= {
        "rank": present["rank"],
        "world_size": present["world_size"],
        "residuals": summed,
        "migrated": {"states": [], "share": share, "common": common},
    }
    return checkpoint_format.with_checksum(**fields)
