"""Are all ranks set up alike? Compared once, before the first exchange, by digest."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from tritoncomm.errors import ConfigMismatchError, ExchangeError

_REFUSED = "refused"


def compare(fields: Mapping[str, Any], group: dist.ProcessGroup | None) -> None:
    """Gather ``fields`` (small, picklable) of all ranks; all ranks raise alike when any differ.

    Raises :class:`~tritoncomm.ConfigMismatchError` that names every differing field, the values and
    the ranks that hold them.
    """
    everybody = gather(dict(fields), group)
    refused = {rank: e[_REFUSED] for rank, e in enumerate(everybody) if _REFUSED in e}
    if refused:
        reasons = "; ".join(f"rank {rank}: {reason}" for rank, reason in refused.items())
        raise ConfigMismatchError(f"ranks {sorted(refused)} refused to start: {reasons}")
    differences = [text for name in fields if (text := _difference(name, [e.get(name) for e in everybody]))]
    if differences:
        raise ConfigMismatchError(
            "ranks are set up differently, make them alike before wrapping (torch.distributed.broadcast for values): "
            + "; ".join(differences)
        )


@contextmanager
def refusing(group: dist.ProcessGroup | None) -> Iterator[None]:
    """An argument that the body refuses on this rank is an error in the others' next :func:`compare`."""
    try:
        yield
    except (ConfigMismatchError, ExchangeError):  # known to all
        raise
    except Exception as error:
        if dist.is_available() and dist.is_initialized():
            refuse(str(error), group)
        raise


def refuse(reason: str, group: dist.ProcessGroup | None) -> None:
    """Take part in the others' :func:`compare` with a ``reason`` why this rank cannot start."""
    gather({_REFUSED: reason}, group)


def gather(fields: dict[str, Any], group: dist.ProcessGroup | None) -> list[dict[str, Any]]:
    """``fields`` (small, picklable) of every rank, by rank."""
    everybody: list[Any] = [None] * dist.get_world_size(group)
    try:
        dist.all_gather_object(everybody, fields, group=group)
    except RuntimeError as error:
        raise ExchangeError(f"a rank was lost, or did not come, while set-ups were compared: {error}") from error
    return everybody


def parameter_fields(parameters: Sequence[torch.Tensor], names: Sequence[str]) -> dict[str, Any]:
    """What must agree about the parameters: names, shapes, dtypes, and the values by digest.

    The order is part of it: the fields are lists in the order of the optimizer's groups.
    """
    return {
        "number of parameters": len(parameters),
        "parameter names": list(names),
        "parameter shapes": [tuple(p.shape) for p in parameters],
        "parameter dtypes": [str(p.dtype) for p in parameters],
        "parameter values": [digest(p) for p in parameters],
    }


def digest(tensor: torch.Tensor) -> str:
    """A short digest of the bytes of ``tensor``."""
    data = tensor.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8)
    return hashlib.blake2b(data.numpy().data, digest_size=8).hexdigest()


def _difference(name: str, values: Sequence[Any]) -> str:
    if all(value == values[0] for value in values):
        return ""
    if all(isinstance(v, list) for v in values) and len({len(v) for v in values}) == 1:
        return _list_difference(name, values)
    sides = [f"{_ranks(values, value)} {value!r}" for value in _distinct(values)]
    return f"{name}: " + ", ".join(sides)


def _list_difference(name: str, values: Sequence[list[Any]]) -> str:
    """Name the first position, and say so when the same things stand in another order."""
    first = next(i for i in range(len(values[0])) if any(v[i] != values[0][i] for v in values))
    if all(sorted(map(str, v)) == sorted(map(str, values[0])) for v in values):
        name += " (the same ones in another order: parameter order differs)"
    column = [value[first] for value in values]
    sides = [f"{_ranks(column, value)} {value!r}" for value in _distinct(column)]
    return f"{name}, first at parameter {first}: " + ", ".join(sides)


def _distinct(values: Sequence[Any]) -> list[Any]:
    return [value for i, value in enumerate(values) if value not in values[:i]]


def _ranks(values: Sequence[Any], value: Any) -> str:
    ranks = [rank for rank, other in enumerate(values) if other == value]
    return f"rank {ranks[0]} has" if len(ranks) == 1 else f"ranks {ranks} have"
