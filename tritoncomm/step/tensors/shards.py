"""Local shards of DTensors."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parameter import is_lazy

PLAIN = (torch.Tensor, torch.nn.Parameter)


def local(tensor: Any) -> torch.Tensor:
    """Return this rank's shard of a DTensor, which shares its memory. Other tensors are returned unchanged."""
    shard: torch.Tensor = tensor if type(tensor) in PLAIN or not hasattr(tensor, "to_local") else tensor.to_local()
    return shard


def overlapping(tensors: Sequence[torch.Tensor]) -> Iterator[tuple[int, int]]:
    """Return the positions of ``tensors`` that have memory in common, each with that of the other one before it.

    One whose own entries have memory in common is given twice.
    """
    storages: dict[int, list[int]] = {}
    for position, tensor in enumerate(tensors):
        storages.setdefault(tensor.untyped_storage().data_ptr(), []).append(position)
    for positions in storages.values():
        if len(positions) == 1 and tensors[positions[0]].is_contiguous():
            continue
        unit = min(tensors[position].element_size() for position in positions)
        owners = torch.zeros(tensors[positions[0]].untyped_storage().nbytes() // unit, dtype=torch.int32, device="cpu")
        for position in positions:
            own = tensors[position]
            units = own.element_size() // unit
            strides = [each * units for each in own.stride()]
            held = owners.as_strided([*own.shape, units], [*strides, 1], own.storage_offset() * units)
            if held.any():
                yield int(held.max()) - 1, position
            held.fill_(position + 1)
            if not own.is_contiguous() and int((owners == position + 1).sum()) < held.numel():
                yield position, position


def all_finite(tensors: Sequence[torch.Tensor]) -> bool:
    """Return True if no tensor has a NaN or Inf. The host waits for a GPU once.

    A sum that has met a NaN or Inf never becomes finite again, and takes a small part of the time of a test of each
    value. If a sum is not finite, products with 0 decide, because finite values may overflow.
    """
    found = [values for each in tensors if (values := stored(each)).numel()]
    if not found:
        return True
    return _are_finite([each.sum() for each in found]) or _are_finite([(each * 0).sum() for each in found])


def stored(tensor: torch.Tensor) -> torch.Tensor:
    """Return the values that ``tensor`` stores: itself, or those of a sparse tensor."""
    return tensor if tensor.layout is torch.strided else tensor.coalesce().values()


def _are_finite(figures: Sequence[torch.Tensor]) -> bool:
    return bool(torch.stack(list(figures)).isfinite().all())


def has_bits(tensor: Any) -> bool:
    """Return True if the bits of ``tensor`` can be compared.

    Not those of a format that keeps its values in other tensors, or without memory.
    """
    if is_lazy(tensor) or (hasattr(tensor, "__tensor_flatten__") and not hasattr(tensor, "device_mesh")):
        return False
    return tensor.layout is torch.strided and not tensor.is_quantized and not tensor.is_meta


def local_shards(tensors: Iterable[Any]) -> list[torch.Tensor]:
    """Return :func:`local` of each tensor."""
    return [tensor if type(tensor) in PLAIN else local(tensor) for tensor in tensors]


def local_gradient(parameter: Any) -> torch.Tensor:
    """Return the local shard of ``.grad``, after redistributing it to the placements of the parameter."""
    gradient = parameter.grad
    if type(gradient) not in PLAIN and getattr(gradient, "placements", ()) != getattr(parameter, "placements", ()):
        gradient = gradient.redistribute(placements=parameter.placements)  # sequence parallelism leaves partial sums
    return local(gradient)


def by_split(parameters: Sequence[torch.Tensor]) -> list[list[int]]:
    """Group ``parameters`` by the ranks over which they are split, and return the positions in each group.

    A rank that holds a copy of one parameter of a group holds copies of all of them. Copies have equal gradients.
    """
    groups: dict[tuple[tuple[int, ...], ...], list[int]] = {}
    for position, parameter in enumerate(parameters):
        groups.setdefault(_split_over(parameter), []).append(position)
    return list(groups.values())


def _split_over(parameter: Any) -> tuple[tuple[int, ...], ...]:
    """Return the ranks of each dimension of its mesh that splits ``parameter``. Empty if this rank has all of it."""
    if not hasattr(parameter, "device_mesh"):
        return ()
    mesh, placements = parameter.device_mesh, parameter.placements
    split = [dimension for dimension, placement in enumerate(placements) if not placement.is_replicate()]
    return tuple(sorted(_ranks_along(mesh, dimension) for dimension in split))


def _ranks_along(mesh: Any, dimension: int) -> tuple[int, ...]:
    """Return the ranks along ``dimension`` of ``mesh`` at this rank's place, in ascending order.

    They are read from the mesh, without its process groups. torch caches meshes: that of a parameter may be an equal
    one of an earlier default process group, whose process groups are gone.
    """
    place: list[int | slice] = list(mesh.get_coordinate())
    place[dimension] = slice(None)
    return tuple(sorted(mesh.mesh[tuple(place)].tolist()))


class ShardGroups:
    """The process groups of the ranks that have the other shards of the same copy of ``parameters``.

    A mesh is asked for its ranks when this is made, because that takes a while, and for its groups when they are used.
    """

    def __init__(self, parameters: Iterable[Any]) -> None:
        meshes: dict[tuple[int, int], tuple[Any, int]] = {}
        self._device = torch.device("cpu")
        for each in parameters:
            for dimension, placement in enumerate(getattr(each, "placements", ())):
                if not placement.is_replicate():
                    meshes[id(each.device_mesh), dimension] = each.device_mesh, dimension
                    self._device = local(each).device
        self._split = {_ranks_along(*each): each for each in meshes.values()}

    def any(self, flag: bool) -> bool:
        """Return whether ``flag`` is True on one of these ranks, which all call this, or on this one.

        The host waits for a GPU if there are others.
        """
        if not self._split:
            return flag
        word = torch.tensor([flag], dtype=torch.int32, device=self._device)
        for mesh, dimension in self._split.values():
            dist.all_reduce(word, dist.ReduceOp.MAX, mesh.get_group(dimension))
        return bool(word)


def like_parameter(parameter: Any, values: torch.Tensor) -> torch.Tensor:
    """Return ``values``, flat and one for each of the local shard of ``parameter``, with the sharding of ``parameter``.

    The result is on the device of the shard, and may share the memory of ``values``.
    """
    shard = local(parameter)
    own = values.to(shard.device).view(shard.shape)
    if shard is parameter:
        return own
    from torch.distributed.tensor import DTensor  # noqa: PLC0415 - as below

    layout = {"shape": parameter.shape, "stride": parameter.stride()}
    return DTensor.from_local(own, parameter.device_mesh, parameter.placements, **layout)


def split_along(tensor: Any) -> list[int | None] | None:
    """Return along which of its dimensions each dimension of its mesh splits a DTensor. None stands for copies.

    Return None for a plain tensor.
    """
    return [getattr(each, "dim", None) for each in tensor.placements] if hasattr(tensor, "device_mesh") else None


def split_on_mesh(tensor: Any, parameter: Any, along: Sequence[int | None]) -> torch.Tensor:
    """Return ``tensor`` on the mesh of ``parameter``, split ``along`` these dimensions, see :func:`split_along`.

    A plain tensor is the same on all ranks, which then tell each other nothing.
    """
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor  # noqa: PLC0415 - importing it takes a while

    places = [
        Replicate() if dimension is None else own if getattr(own, "dim", None) == dimension else Shard(dimension)
        for own, dimension in zip(parameter.placements, along, strict=True)
    ]
    if not hasattr(tensor, "device_mesh"):
        return distribute_tensor(tensor, parameter.device_mesh, places, src_data_rank=None)
    found: torch.Tensor = tensor.redistribute(placements=places)
    return found


def mesh_ranks(parameter: Any) -> set[int]:
    """Return the ranks over which a DTensor is distributed. Empty for a plain tensor."""
    return set(parameter.device_mesh.mesh.flatten().tolist()) if hasattr(parameter, "device_mesh") else set()


def pieces(parameter: Any) -> int:
    """Return the number of pieces into which a DTensor is split. The ranks of its mesh may hold copies of each."""
    if not hasattr(parameter, "device_mesh"):
        return 1
    placements = enumerate(parameter.placements)
    return math.prod(parameter.device_mesh.size(dim) for dim, each in placements if not each.is_replicate())


def place(parameter: Any) -> str:
    """Return which shard of ``parameter`` this rank has, as text that can be compared."""
    if not hasattr(parameter, "device_mesh"):
        return ""
    mesh = parameter.device_mesh
    return f"{mesh.get_coordinate()} of {tuple(mesh.shape)}, {parameter.placements}"


def part(parameter: Any) -> str:
    """Return which part of ``parameter`` this rank has, as text that is the same on all ranks with copies of it."""
    if not hasattr(parameter, "device_mesh"):
        return ""
    mesh = parameter.device_mesh
    return ", ".join(
        f"dimension {placement.dim} ({getattr(placement, 'split_factor', 1)}): {number} of {size}"
        for placement, number, size in zip(parameter.placements, mesh.get_coordinate(), mesh.shape, strict=True)
        if size > 1 and not placement.is_replicate()
    )
