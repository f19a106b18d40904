"""The state of a rank as torch.distributed.checkpoint saves it: for any model, any mesh and any number of ranks.

What is shaped like the parameters is saved as tensors with the shapes of the whole parameters: as DTensors by a sharded
model, else as plain tensors. ``torch.distributed.checkpoint`` reads either into either. What all replicas have in
common is written once, what differs between them once a replica. The rest, which is small, belongs to one rank.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from tritoncomm.errors import ConfigurationError
from tritoncomm.scheduler.process_group import is_distributed
from tritoncomm.scheduler.ranks import global_ranks
from tritoncomm.step.saved import state as exchange_state
from tritoncomm.step.tensors.shards import like_parameter, local, mesh_ranks, place

Tensors = Mapping[str, torch.Tensor]

_COMMON = "common to all replicas from rank"  # begins the key of their tensors
_OF_REPLICA = "replica at rank"  # begins the key of the tensors of one
# Names of tensors begin with what they are, and the number of their parameter.
_RESIDUALS, _AGES, _OWN, _STATE = "residuals", "last", "own", "state"
_OF_LOCAL_STEPS = ("anchors", "momentum")
_TENSOR = "the tensor"  # key of the name of a tensor, in its place


class ShardOfReplica(NamedTuple):
    """What a rank holds of the model.

    Attributes:
        replica: Number of its replica.
        replicas: Number of replicas.
        shards: The rank's shards of the parameters, as texts that can be compared. A whole parameter has the text "".
    """

    replica: int
    replicas: int
    shards: list[str]

    @classmethod
    def here(cls, parameters: Sequence[torch.Tensor], replicas: dist.ProcessGroup | None) -> ShardOfReplica:
        """Return what this rank holds. ``replicas`` are the ranks with the same shards of ``parameters``."""
        shards = sorted({place(parameter) for parameter in parameters})
        if not is_distributed():
            return cls(0, 1, shards)
        return cls(dist.get_rank(replicas), dist.get_world_size(replicas), shards)

    @classmethod
    def of(cls, rest: Mapping[str, Any]) -> ShardOfReplica:
        """Return what the rank held that has saved ``rest``."""
        return cls(*rest["held"])

    @property
    def is_whole(self) -> bool:
        """True if the rank holds whole parameters."""
        return not any(self.shards)


def key_of_replica(parameters: Sequence[torch.Tensor]) -> str:
    """Return the key of the tensors of the replica of which this rank holds ``parameters``: by its lowest rank."""
    first = min({dist.get_rank()}.union(*map(mesh_ranks, parameters))) if is_distributed() else 0
    return f"{_OF_REPLICA} {first}"


def key_of_common(everybody: dist.ProcessGroup | None) -> str:
    """Return the key of the tensors of all replicas, by the lowest rank of ``everybody``: stages have their own."""
    return f"{_COMMON} {min(global_ranks(everybody)) if is_distributed() else 0}"


class Parts(NamedTuple):
    """The state of a rank in parts.

    Attributes:
        rest: What belongs to this rank alone.
        replica: Tensors of its replica.
        common: Tensors of all replicas.
    """

    rest: Mapping[str, Any]
    replica: Tensors
    common: Tensors


def split(
    state: Mapping[str, Any],
    inner: Mapping[int, Any],
    own: Collection[int],
    parameters: Sequence[torch.Tensor],
    here: ShardOfReplica,
) -> Parts:
    """Return the state of this rank in parts. :func:`joined` and :func:`inner_of` return it again.

    Args:
        state: What :func:`tritoncomm.step.saved.state.saved` has returned, not between two exchanges of updates.
        inner: States of parameters in the optimizer, by number.
        own: The numbers of parameters whose states differ between replicas.
        parameters: The parameters that are exchanged. Anchors come first.
        here: What this rank holds of the model.
    """
    replica, common = dict[str, torch.Tensor](), dict[str, torch.Tensor]()
    rest = {key: value for key, value in state.items() if key not in (_RESIDUALS, _AGES)}
    shaped = [(_RESIDUALS, state[_RESIDUALS], replica), (_AGES, state[_AGES], common)]
    if state["local"] is not None:
        rest["local"] = {key: value for key, value in state["local"].items() if key not in _OF_LOCAL_STEPS}
        shaped += [(field, state["local"][field], common) for field in _OF_LOCAL_STEPS]
    for field, values, tensors in shaped:
        for number, (parameter, value) in enumerate(zip(parameters, values, strict=False)):
            if value is not None:
                tensors[f"{field}.{number}"] = like_parameter(parameter, value)
    rest["inner"] = {
        number: _taken_apart(each, f"{_OWN}.{number}", replica)
        if number in own
        else _taken_apart(each, f"{_STATE}.{number}", common)
        for number, each in inner.items()
    }
    return Parts(rest | {"held": list(here)}, replica, common)


def joined(parts: Parts) -> dict[str, Any]:
    """Return the state of an exchange from ``parts``."""
    rest, replica, common = parts
    state = {key: value for key, value in rest.items() if key not in ("held", "inner", "others")}
    if state["local"] is not None:
        state["local"] = state["local"] | {field: _flat(field, common) for field in _OF_LOCAL_STEPS}
    ages = [common.get(f"{_AGES}.{number}") for number in range(len(state["rms"]))]
    last = [None if each is None else local(each).reshape(-1) for each in ages]
    return state | {_RESIDUALS: _flat(_RESIDUALS, replica), _AGES: last}


def inner_of(parts: Parts) -> dict[int, Any]:
    """Return the states of parameters in the optimizer from ``parts``."""
    found: dict[int, Any] = _put_together(parts.rest["inner"], {**parts.replica, **parts.common})
    return found


def resharded(first: Mapping[str, Any], old: Sequence[Parts], common: Tensors, here: ShardOfReplica) -> dict[str, Any]:
    """Return the state of the exchange of a rank that takes over the residuals of other ranks.

    Args:
        first: What belongs to the first rank alone.
        old: The parts of a rank of each replica whose residuals this rank takes over. There may be none.
        common: The tensors of all replicas.
        here: What this rank holds.
    """
    state, before = joined(Parts(first, {}, common)), ShardOfReplica.of(first)
    keeps_methods = here.is_whole and before.is_whole  # they belong to the entries of the vector
    if not keeps_methods:
        state["algorithm"] = [exchange_state.without_entries(method) for method in state["algorithm"]]
        state["rms"] = [None] * len(state["rms"])  # of other shards
    states = [
        {_RESIDUALS: _flat(_RESIDUALS, parts.replica), "algorithm": parts.rest["algorithm"] if keeps_methods else []}
        for parts in old
    ]
    share = here.replicas / before.replicas
    return exchange_state.taken_over(state, states, rank=here.replica, world_size=here.replicas, share=share)


def _flat(field: str, tensors: Tensors) -> list[torch.Tensor]:
    """Return the local shards of what :func:`split` has named ``field``, flat."""
    count = sum(name.startswith(f"{field}.") for name in tensors)
    return [local(tensors[f"{field}.{number}"]).reshape(-1) for number in range(count)]


def _taken_apart(value: Any, name: str, tensors: dict[str, torch.Tensor]) -> Any:
    """Return ``value`` with names instead of its tensors, which are added to ``tensors``. Single numbers stay."""
    if isinstance(value, torch.Tensor) and (value.dim() or hasattr(value, "device_mesh")):
        tensors[name] = value.detach()
        return {_TENSOR: name}
    if isinstance(value, Mapping):
        return {key: _taken_apart(each, f"{name}.{key}", tensors) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_taken_apart(each, f"{name}.{number}", tensors) for number, each in enumerate(value))
    return value


def _put_together(value: Any, tensors: Tensors) -> Any:
    """Return the value of which :func:`_taken_apart` has made ``value`` and ``tensors``."""
    if isinstance(value, Mapping):
        if _TENSOR in value:
            return tensors[value[_TENSOR]]
        return {key: _put_together(each, tensors) for key, each in value.items()}
    return type(value)(_put_together(each, tensors) for each in value) if isinstance(value, (list, tuple)) else value


class Saved(NamedTuple):
    """What a checkpoint has.

    Attributes:
        ranks: The key of each rank, in ascending order, and the number of its replica.
        replicas: The key of the tensors of each replica, in ascending order.
        common: The key of the tensors of all replicas together.
        tensors: The metadata of the tensors of each replica, and of all replicas together, by key and name.
    """

    ranks: list[tuple[str, int]]
    replicas: list[str]
    common: str
    tensors: dict[str, dict[str, Any]]

    @classmethod
    def by(cls, reader: Any, where: object) -> Saved:
        """Return what the checkpoint of ``reader`` has. Errors call it ``where``."""
        try:
            stored = reader.read_metadata().state_dict_metadata
        except Exception as error:  # each storage has its own
            raise ConfigurationError(f"checkpoint_id={where}: no checkpoint can be read: {error}") from error
        ranks, replicas, tensors = dict[int, tuple[str, int]](), set[int](), dict[str, dict[str, Any]]()
        for name, metadata in stored.items():
            if found := re.search(r"\.(rank (\d+) of \d+, replica (\d+) of (\d+) .*)$", name):
                ranks[int(found[2])] = found[1], int(found[3])
                replicas.add(int(found[4]))
            elif found := re.search(rf"\.({_OF_REPLICA} \d+|{_COMMON} \d+)\.(.*)$", name):
                tensors.setdefault(found[1], {})[found[2]] = metadata
        every = sorted(tensors, key=lambda key: int(key.rpartition(" ")[2]))
        keys = [key for key in every if key.startswith(_OF_REPLICA)]
        common = next((key for key in every if key.startswith(_COMMON)), _COMMON)
        if replicas != {len(keys)}:
            raise ConfigurationError(
                f"checkpoint_id={where}: this checkpoint has no ResidualState, or those of several runs or stages of a "
                "pipeline: pass a folder into which dcp.save() has written one"
            )
        return cls([ranks[rank] for rank in sorted(ranks)], keys, common, tensors)

    def ranks_of(self, number: int) -> list[str]:
        """Return the keys of the ranks of a replica."""
        return [key for key, replica in self.ranks if replica == number]

    def taken(self, here: ShardOfReplica) -> range:
        """Return the numbers of the replicas whose residuals a rank takes over."""
        return range(here.replica, len(self.replicas), here.replicas)

    def source(self, here: ShardOfReplica) -> int:
        """Return the number of the replica whose other states it takes over: its own if nothing has changed."""
        return here.replica % len(self.replicas)

    def rooms(
        self, here: ShardOfReplica, parameters: Sequence[torch.Tensor], every: Sequence[torch.Tensor]
    ) -> dict[str, Any]:
        """Return zeros for what a rank reads.

        Args:
            here: What the rank holds.
            parameters: The parameters that are exchanged.
            every: All parameters of the optimizer.
        """
        source, taken = self.source(here), self.taken(here)
        ranks = [self.ranks[0][0], *(self.ranks_of(number)[0] for number in taken), *self.ranks_of(source)]
        found: dict[str, Any] = dict.fromkeys(ranks, b"")
        for key in {*(self.replicas[number] for number in taken), self.replicas[source], self.common}:
            found[key] = {
                name: _room_for(name, stored, every if name.startswith((_OWN, _STATE)) else parameters)
                for name, stored in self.tensors.get(key, {}).items()
                if key in (self.replicas[source], self.common) or not name.startswith(_OWN)
            }
        return found


def _room_for(name: str, stored: Any, parameters: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return zeros for the tensor ``name`` with the metadata ``stored``, sharded like that of ``parameters``."""
    field, digits, *_ = name.split(".")
    number, size, dtype = int(digits), stored.size, stored.properties.dtype
    if number >= len(parameters) or (size != parameters[number].shape and field not in (_OWN, _STATE)):
        raise ConfigurationError("this checkpoint belongs to a model with other parameters")
    parameter: Any = parameters[number]
    if hasattr(parameter, "device_mesh") and size == parameter.shape:
        return like_parameter(parameter, torch.zeros(local(parameter).numel(), dtype=dtype))
    return torch.zeros(size, dtype=dtype)
