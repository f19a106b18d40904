"""The state of a rank as torch.distributed.checkpoint saves it: for any model, any mesh and any number of ranks.

What is shaped like the parameters is saved as tensors with the shapes of the whole parameters: as DTensors by a sharded
model, else as plain tensors. ``torch.distributed.checkpoint`` reads either into either. What all replicas have in
common is written once, what differs between them once a replica. The rest, which is small, belongs to one rank.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from tritoncomm.errors import ConfigurationError
from tritoncomm.scheduler.ranks import global_ranks, own_rank
from tritoncomm.step.saved import state as exchange_state
from tritoncomm.step.tensors.names import OTHER_PARAMETERS
from tritoncomm.step.tensors.shards import like_parameter, local, mesh_ranks, place, split_along, split_on_mesh

Tensors = Mapping[str, torch.Tensor]
Along = list[int | None] | None  # see split_along

# Part of the keys, because torch.distributed.checkpoint names a key that it does not find. Part of the format, too.
HINT = "for other ranks, replicas or shards than those of the save: ResidualState(optimizer, checkpoint_id=path)"
_COMMON = "common to all replicas from rank"  # begins the key of their tensors
_OF_REPLICA = "replica at rank"  # begins the key of the tensors of one
# Names of tensors begin with a field, and the number of their parameter. These two are fields of the optimizer's state.
_OWN, _STATE = "own", "state"
_OF_LOCAL_STEPS = ("anchors", "momentum")
_TENSOR = "the tensor"  # key of the name of a tensor, in its place
_ALONG = "split along"  # and of how it was split, if it was a DTensor
# What is stored: the name under which a script has saved the state, and what is of a rank, or a tensor of several.
_KEY = re.compile(
    r"(?P<name>.*?)\.(?:(?P<own>rank (?P<rank>\d+) of \d+, replica (?P<replica>\d+) of (?P<replicas>\d+) .*)"
    rf"|(?P<shared>{_OF_REPLICA} \d+|{_COMMON} \d+)\.(?P<tensor>.*))"
)
_Stored = tuple[re.Match[str], Any]  # such a key, and its metadata


class Held(NamedTuple):
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
    def here(cls, parameters: Sequence[torch.Tensor], replicas: dist.ProcessGroup | None) -> Held:
        """Return what this rank holds. ``replicas`` are the ranks with the same shards of ``parameters``."""
        shards = sorted({place(parameter) for parameter in parameters})
        ranks = global_ranks(replicas)
        return cls(ranks.index(own_rank()), len(ranks), shards)

    @property
    def key(self) -> str:
        """The key of what belongs to this rank alone."""
        size = len(global_ranks(None))
        return f"rank {own_rank()} of {size}, replica {self.replica} of {self.replicas} ({HINT})"


def key_of_replica(parameters: Sequence[torch.Tensor]) -> str:
    """Return the key of the tensors of the replica of which this rank holds ``parameters``: by its lowest rank."""
    return f"{_OF_REPLICA} {min({own_rank()}.union(*map(mesh_ranks, parameters)))}"


def key_of_common(everybody: dist.ProcessGroup | None) -> str:
    """Return the key of the tensors of all replicas, by the lowest rank of ``everybody``: stages have their own."""
    return f"{_COMMON} {min(global_ranks(everybody))}"


def split(
    state: Mapping[str, Any],
    inner: Mapping[int, Any],
    own: Collection[int],
    sharded: Collection[int],
    here: Held,
) -> tuple[dict[str, Any], dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Return what belongs to this rank alone, the tensors of its replica, and those of all replicas, by name.

    :func:`restored` returns the state again, with ``inner``, ``held`` and ``sharded`` as further fields.

    Args:
        state: What :func:`tritoncomm.step.saved.state.saved` has returned, not between two exchanges of updates.
        inner: States of parameters in the optimizer, by number.
        own: The numbers of parameters whose states differ between replicas.
        sharded: The numbers of parameters that are DTensors.
        here: What this rank holds of the model.
    """
    replica, common = dict[str, torch.Tensor](), dict[str, torch.Tensor]()
    rest: dict[str, Any] = {**state, "held": list(here), "sharded": sorted(sharded)}
    rest["residuals"] = _taken_apart(state["residuals"], "residuals", replica)
    rest["last"] = _taken_apart(state["last"], "last", common)
    if state["local"] is not None:
        of_local = {field: _taken_apart(state["local"][field], field, common) for field in _OF_LOCAL_STEPS}
        rest["local"] = {**state["local"], **of_local}
    rest["inner"] = {
        number: _taken_apart(each, f"{_OWN}.{number}", replica)
        if number in own
        else _taken_apart(each, f"{_STATE}.{number}", common)
        for number, each in inner.items()
    }
    return rest, replica, common


def _taken_apart(value: Any, name: str, tensors: dict[str, torch.Tensor]) -> Any:
    """Return ``value`` with names instead of its tensors, which are added to ``tensors``. Single numbers stay."""
    if isinstance(value, torch.Tensor) and (value.dim() or hasattr(value, "device_mesh")):
        along = split_along(value)
        placements = getattr(value, "placements", ())
        if any(each.is_partial() for each in placements):
            raise ConfigurationError(
                f"{name.partition('.')[2]} of the optimizer's state is a partial sum, placements={placements}, of "
                "which no rank has values to save: let the optimizer redistribute it to Replicate() before it keeps it"
            )
        while name in tensors:  # such as that of {"a": {"b.c": ...}, "a.b": {"c": ...}}
            name += "'"
        tensors[name] = value.detach()
        return {_TENSOR: name} if along is None else {_TENSOR: name, _ALONG: along}
    if isinstance(value, Mapping):
        # In an order that ranks have in common, because a name may depend on those before it.
        apart = {key: _taken_apart(value[key], f"{name}.{key}", tensors) for key in sorted(value, key=repr)}
        return {key: apart[key] for key in value}
    if type(value) in (list, tuple):  # a named tuple takes its values otherwise, and is nothing that can be loaded
        return type(value)(_taken_apart(each, f"{name}.{number}", tensors) for number, each in enumerate(value))
    return value


def joined(
    value: Any, tensors: Tensors, placed: Callable[[torch.Tensor, Along], torch.Tensor] = lambda tensor, _: tensor
) -> Any:
    """Return ``value`` with ``tensors`` instead of their names, as ``placed`` returns them for how they were split."""
    if isinstance(value, Mapping):
        if _TENSOR in value:
            return placed(tensors[value[_TENSOR]], value.get(_ALONG))
        return {key: joined(each, tensors, placed) for key, each in value.items()}
    return type(value)(joined(each, tensors, placed) for each in value) if isinstance(value, (list, tuple)) else value


def restored(
    rest: Mapping[str, Any], tensors: Tensors, every: Sequence[torch.Tensor], *, as_before: bool
) -> dict[str, Any]:
    """Return the state of a rank, with the fields ``inner``, ``held`` and ``sharded``.

    Args:
        rest: What :func:`split` has returned first.
        tensors: Those of the replica and of all replicas.
        every: All parameters of the optimizer.
        as_before: Whether this rank holds of the model what it held at the save. States are then split as they were.
    """
    inner = {
        number: joined(
            each,
            tensors,
            partial(_placed, every[number], as_before=as_before, had_shards=number in rest["sharded"]),
        )
        for number, each in rest["inner"].items()
    }
    return {**joined({**rest, "inner": {}}, tensors), "inner": inner}


def _placed(
    parameter: torch.Tensor, tensor: torch.Tensor, along: Along, *, as_before: bool, had_shards: bool
) -> torch.Tensor:
    """Return a ``tensor`` of the state of ``parameter``, split for it. ``along`` says how it was split.

    On other shards, it is split as the parameter where it has its size, with copies elsewhere. A plain tensor that an
    optimizer has kept beside shards stays plain.
    """
    here = split_along(parameter)
    if here is None:
        return tensor
    if as_before and along is not None and len(along) == len(here):
        return split_on_mesh(tensor, parameter, along)
    if hasattr(tensor, "device_mesh") or (had_shards and along is None):
        return tensor
    like = [each for each, (own, size) in enumerate(zip(parameter.shape, tensor.shape, strict=False)) if own == size]
    return split_on_mesh(tensor, parameter, [each if each in like else None for each in here])


class Saved(NamedTuple):
    """What a checkpoint has.

    Attributes:
        ranks: The number of the replica of each rank, by the key of the rank, in ascending order.
        replicas: The key of the tensors of each replica, in ascending order.
        common: The key of the tensors of all replicas together.
        tensors: The metadata of the tensors of each replica, and of all replicas together, by key and name.
    """

    ranks: dict[str, int]
    replicas: list[str]
    common: str
    tensors: dict[str, dict[str, Any]]

    @classmethod
    def by(cls, reader: Any, where: object, name: str | None = None) -> Saved:
        """Return what the checkpoint of ``reader`` has under the key ``name``, or at all. Errors call it ``where``."""
        try:
            stored = reader.read_metadata().state_dict_metadata
        except Exception as error:  # each storage has its own
            raise ConfigurationError(f"checkpoint_id={where}: no checkpoint can be read: {error}") from error
        by_name = dict[str, list[_Stored]]()
        for key, metadata in stored.items():
            if found := _KEY.fullmatch(key):
                by_name.setdefault(found["name"], []).append((found, metadata))
        ranks, replicas, tensors = dict[int, tuple[str, int]](), set[int](), dict[str, dict[str, Any]]()
        for found, metadata in _chosen(by_name, name, where):
            if found["own"]:
                ranks[int(found["rank"])] = found["own"], int(found["replica"])
                replicas.add(int(found["replicas"]))
            else:
                tensors.setdefault(found["shared"], {})[found["tensor"]] = metadata
        every = sorted(tensors, key=lambda each: int(each.rpartition(" ")[2]))
        keys = [each for each in every if each.startswith(_OF_REPLICA)]
        common = next((each for each in every if each.startswith(_COMMON)), _COMMON)
        if replicas != {len(keys)}:
            raise ConfigurationError(
                f"checkpoint_id={where}: this checkpoint has no ResidualState, or those of several runs or stages of a "
                "pipeline: pass a folder into which dcp.save() has written one"
            )
        return cls(dict(ranks[rank] for rank in sorted(ranks)), keys, common, tensors)

    def taken(self, here: Held) -> range:
        """Return the numbers of the replicas whose residuals a rank takes over."""
        return range(here.replica, len(self.replicas), here.replicas)

    def source(self, here: Held) -> int:
        """Return the number of the replica whose other states it takes over: its own if nothing has changed."""
        return here.replica % len(self.replicas)

    def rooms(self, here: Held, parameters: Sequence[torch.Tensor], every: Sequence[torch.Tensor]) -> dict[str, Any]:
        """Return zeros for what a rank reads.

        Args:
            here: What the rank holds.
            parameters: The parameters that are exchanged.
            every: All parameters of the optimizer.
        """
        source, numbers = self.source(here), {0, self.source(here), *self.taken(here)}
        found: dict[str, Any] = {key: b"" for key, replica in self.ranks.items() if replica in numbers}
        whole = (self.replicas[source], self.common)
        for key in {*(self.replicas[number] for number in self.taken(here)), *whole}:
            found[key] = {
                name: _room_for(name, stored, every if name.startswith((_OWN, _STATE)) else parameters)
                for name, stored in self.tensors.get(key, {}).items()
                if key in whole or not name.startswith(_OWN)
            }
        return found

    def resharded(
        self, rests: Sequence[Mapping[str, Any]], content: Mapping[str, Any], here: Held, every: Sequence[torch.Tensor]
    ) -> dict[str, Any]:
        """Return the state of a rank that takes over the residuals of other ranks. See :func:`restored`.

        Args:
            rests: What belongs to the ranks of which a key is in :meth:`rooms`, in their order.
            content: What was read into :meth:`rooms`.
            here: What the rank holds.
            every: All parameters of the optimizer.
        """
        of_replica = {Held(*rest["held"]).replica: rest for rest in reversed(rests)}  # the first rank of each
        first, before = rests[0], Held(*rests[0]["held"])
        source = self.source(here)
        tensors = {**content[self.replicas[source]], **content[self.common]}
        rest = {**first, "residuals": [], "inner": of_replica[source]["inner"]}
        state = restored(rest, tensors, every, as_before=False)
        keeps_methods = not any((*here.shards, *before.shards))  # they belong to the entries of the vector
        if not keeps_methods:
            state["algorithm"] = [exchange_state.without_entries(method) for method in state["algorithm"]]
            state["rms"] = [None] * len(state["rms"])  # of other shards
        others = [
            {
                "residuals": joined(of_replica[number]["residuals"], content[self.replicas[number]]),
                "algorithm": of_replica[number]["algorithm"] if keeps_methods else [],
            }
            for number in self.taken(here)
        ]
        share = here.replicas / before.replicas
        return exchange_state.taken_over(state, others, rank=here.replica, world_size=here.replicas, share=share)


def _chosen(by_name: Mapping[str, list[_Stored]], name: str | None, where: object) -> list[_Stored]:
    """Return what is stored of the state with this ``name``, or of the only one."""
    if name is None and len(by_name) <= 1:
        return [each for stored in by_name.values() for each in stored]
    found = None if name is None else by_name.get(name)
    if found is None:
        names = ", ".join(map(repr, by_name))
        raise ConfigurationError(
            f"checkpoint_id={where}: name={name!r}, and the checkpoint has states of {names}: pass as name the key "
            "under which dcp.save() has saved this optimizer"
        )
    return found


def _room_for(name: str, stored: Any, parameters: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return zeros for the tensor ``name`` with the metadata ``stored``, sharded like that of ``parameters``."""
    field, digits, *_ = name.split(".")
    number, size, dtype = int(digits), stored.size, stored.properties.dtype
    if number >= len(parameters) or (size != parameters[number].shape and field not in (_OWN, _STATE)):
        raise ConfigurationError(OTHER_PARAMETERS)
    parameter: Any = parameters[number]
    if hasattr(parameter, "device_mesh") and size == parameter.shape:
        return like_parameter(parameter, torch.zeros(local(parameter).numel(), dtype=dtype, device="cpu"))
    return torch.zeros(size, dtype=dtype, device="cpu")
