"""What ranks must have in common, what they tell each other outside of an exchange, and how a difference is worded."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist

from tritoncomm.errors import ConfigMismatchError, ExchangeError, NonFiniteError
from tritoncomm.scheduler.process_group import is_distributed, report_failure, reporting
from tritoncomm.scheduler.ranks import global_ranks, name_of, rank_text, text_by_rank
from tritoncomm.step.agree.number import number_of_text
from tritoncomm.step.torch_internals import is_interruption
from tritoncomm_kernels import devices

UPDATES = "completed updates"  # a field that ranks compare
LOADED = "loaded weights"  # an option of the optimizer of common parameters: a number of those loaded, or 0
UPDATES_ADVICE = (
    "an error or a signal has stopped a step between its exchange and the end of its update, or zero_grad() on some "
    "ranks has thrown away what synchronize() had averaged, so parameters may differ; load a checkpoint on all ranks"
)
# What names of such fields begin with. Those of a recipe are "FIELD of RECIPE", and none is called content.
CONTENT, STATE = "content of", "optimizer state"
# What to do if a field differs whose name begins with this. For others: configure the ranks identically.
_ADVICE = {
    CONTENT: "give all ranks the same parameters, or call wrap(..., broadcast_parameters=True)",
    STATE: "load the same state on all ranks",
    UPDATES: UPDATES_ADVICE,
}
_WORDED = 5  # fields that a text names
# What has failed, in errors. Ranks with different groups wait for each other here.
_CHECK = "configuration check (it needs all ranks, with the same process_group)"
_around: ContextVar[frozenset[str]] = ContextVar("around", default=frozenset())  # names of groups of contexts around
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")  # in the text of a function, or of an object without one of its own
_ERROR, _SHARD, _NUMBER, _FIELDS = "error", "shard", "number", "fields"  # keys of what a rank tells the others


def compare(
    fields: Mapping[str, Any], group: dist.ProcessGroup | None, device: torch.device | None = None, shard: int = 0
) -> None:
    """Compare ``fields`` of all ranks, and raise on all ranks if any value differs. See :func:`differences`.

    Raises:
        ConfigMismatchError: A field differs between ranks, or a rank raised an error in :func:`propagate_errors`. The
            message names the fields, their values and the ranks, and says what to do.
    """
    found = differences(fields, group, device, shard)
    if found:
        advice = (
            next((text for begin, text in _ADVICE.items() if name.startswith(begin)), "configure them identically")
            for name in found
        )
        raise ConfigMismatchError(
            f"ranks are configured differently; {'; '.join(dict.fromkeys(advice))}: {worded(found)}"
        )


def differences(
    fields: Mapping[str, Any], group: dist.ProcessGroup | None, device: torch.device | None = None, shard: int = 0
) -> dict[str, str]:
    """Return which of ``fields`` differ between ranks that pass the same ``shard``: the ranks of each value, by name.

    Values are equal if their texts are. All ranks of ``group`` call this together, and get the same answer. Fields that
    some ranks do not have are told if all others are equal. Of several shards, the first with a difference is told.

    Ranks gather one number, and all fields only if it differs. ``device`` is the one of the exchange, see
    :func:`all_gather`.

    Raises:
        ConfigMismatchError: A rank raised an error in :func:`propagate_errors`.
    """
    own = {name: _text(value) for name, value in fields.items()}
    numbers = all_gather({_SHARD: shard, _NUMBER: number_of_text(repr(own))}, group, device)
    shards = dict.fromkeys(entry[_SHARD] for entry in numbers.values())
    if len({(entry[_SHARD], entry[_NUMBER]) for entry in numbers.values()}) == len(shards):
        return {}
    gathered = all_gather({_FIELDS: own}, group, device)
    of_shards = (
        {rank: each[_FIELDS] for rank, each in gathered.items() if numbers[rank][_SHARD] == shard} for shard in shards
    )
    return next(filter(None, map(_differences, of_shards)), {})


def _text(value: object) -> str:
    """Return a text of ``value`` that does not depend on the process: without addresses, and with sets in order."""
    return _ADDRESS.sub("", repr(_in_order(value)))


def _in_order(value: object) -> object:
    """Return ``value`` with lists in place of its sets."""
    match value:
        case set() | frozenset():
            return sorted(map(_in_order, value), key=repr)
        case dict():
            return {key: _in_order(each) for key, each in value.items()}
        case list() | tuple() if type(value) in (list, tuple):
            return type(value)(map(_in_order, value))
    return value


def _differences(told: Mapping[int, Mapping[str, str]]) -> dict[str, str]:
    """Return :func:`differences` between what ranks have ``told``: the texts of the fields of each rank."""

    def sides(name: str) -> str:
        ranks: dict[str, list[int]] = {}
        for rank, fields in told.items():
            ranks.setdefault(fields.get(name, "nothing"), []).append(rank)
        texts = [f"{rank_text(*of)} {'has' if len(of) == 1 else 'have'}" for of in ranks.values()]
        return ", ".join(map(" ".join, zip(texts, ranks, strict=True))) if len(ranks) > 1 else ""

    names = dict.fromkeys(name for fields in told.values() for name in fields)
    everywhere = [name for name in names if all(name in fields for fields in told.values())]
    found = {name: text for name in everywhere if (text := sides(name))}
    if len(found) > 1 and len({tuple(sorted(fields[name] for name in found)) for fields in told.values()}) == 1:
        found[next(iter(found))] += " (the same values in another order: parameter order differs)"
    return found or {name: text for name in names if (text := sides(name))}


def worded(found: Mapping[str, str]) -> str:
    """Return what :func:`differences` has found as one text, which names the first fields."""
    texts = [f"{name}: {sides}" for name, sides in islice(found.items(), _WORDED)]
    return "; ".join(texts) + (f"; and {len(found) - _WORDED} others" if len(found) > _WORDED else "")


@contextmanager
def propagate_errors(group: dist.ProcessGroup | None, device: torch.device | None = None) -> Iterator[None]:
    """Report an error that the body raises on this rank to the others, whose next :func:`all_gather` raises it.

    If an interruption ends the body, they raise :class:`~tritoncomm.ExchangeError`. Inside such a context of the same
    group, the outer one reports.

    ``device`` is the current device in the body. See :func:`all_gather`.
    """
    around, name = _around.get(), name_of(group) if is_distributed() else ""
    token = _around.set(around | {name})
    try:
        with devices.on(device):
            yield
    except (ConfigMismatchError, ExchangeError):  # all ranks raise these
        raise
    except BaseException as error:
        if name in around or not is_distributed():
            raise
        if is_interruption(error):
            report_failure(group, device, _CHECK, error, is_interruption)
        else:
            with suppress(ConfigMismatchError, ExchangeError):  # a group that is broken does not hide the reason
                all_gather({_ERROR: str(error)}, group, device)
        raise
    finally:
        _around.reset(token)


@contextmanager
def telling(
    everybody: dist.ProcessGroup | None, group: dist.ProcessGroup | None, device: torch.device | None = None
) -> Iterator[None]:
    """Report an error of the body, which all ranks of ``group`` raise, to the other ranks of ``everybody``."""
    try:
        yield
    except (ConfigMismatchError, ExchangeError) as error:
        if is_distributed() and name_of(group) != name_of(everybody):
            with suppress(ConfigMismatchError, ExchangeError):
                all_gather({_ERROR: str(error)}, everybody, device)
        raise


def all_gather(
    fields: dict[str, Any], group: dist.ProcessGroup | None, device: torch.device | None = None
) -> dict[int, dict[str, Any]]:
    """Return ``fields`` (small, picklable) of every rank by its global number, in the order of the group.

    All ranks have the same fields. Other ones show that a rank is at another call, such as a save beside a load.

    Without process groups, there is one rank, with the number 0. NCCL sends objects from the current CUDA device, which
    is GPU 0 on every rank of a program that has not set it. They are therefore sent from ``device``, the one of the
    exchange. None is the current device.

    Raises:
        ConfigMismatchError: A rank raised an error in :func:`propagate_errors`, or is at another call.
        ExchangeError: A rank was lost, was interrupted, or did not take part.
    """
    if not is_distributed():
        return {0: fields}
    gathered: list[Any] = [None] * dist.get_world_size(group)
    with reporting(group, device, _CHECK, is_interruption), devices.on(device):
        dist.all_gather_object(gathered, fields, group=group)
    told = dict(zip(global_ranks(group), gathered, strict=True))
    errors = {rank: entry[_ERROR] for rank, entry in told.items() if _ERROR in entry}
    if errors:
        raise ConfigMismatchError(text_by_rank(errors, " reported an error:"))
    if len({frozenset(entry) for entry in told.values()}) > 1:
        told_by = text_by_rank({rank: ", ".join(entry) for rank, entry in told.items()}, " tells")
        raise ConfigMismatchError(
            "ranks are at different calls, such as a save and a load: make the same calls of wrap(), of what it "
            f"returned and of tritoncomm.checkpoint on all ranks, in the same order ({told_by})"
        )
    return told


def naming(
    error: NonFiniteError | None, at_fault: str, group: dist.ProcessGroup | None, device: torch.device | None
) -> NonFiniteError:
    """Return ``error``, or one that names the ranks and what is ``at_fault`` on each. All ranks of ``group`` call this.

    ``at_fault`` is empty on a rank without NaN and Inf. ``error`` is None on a rank that has not rejected the step.
    """
    told = all_gather({"at fault": at_fault, "rejection": str(error or "")}, group, device)
    bad = {rank: fields["at fault"] for rank, fields in told.items() if fields["at fault"]}
    if not bad and error is not None:
        return error
    if not bad:
        rank, text = next((rank, fields["rejection"]) for rank, fields in told.items() if fields["rejection"])
        return NonFiniteError(f"{rank_text(rank)} has rejected the step: {text}", [rank])
    return NonFiniteError(f"NaN or Inf in the gradients of {text_by_rank(bad)}; nothing was applied", bad)
