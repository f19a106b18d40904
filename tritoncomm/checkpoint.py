"""Checkpoints of the optimizer state and the residuals of all ranks.

Residuals differ between ranks. A checkpoint of the optimizer on rank 0 alone loses the residuals of all other ranks.
:func:`save` and :func:`load` use a file per rank, and support a change of the world size. :class:`ResidualState` is a
part of a checkpoint of ``torch.distributed.checkpoint``. :mod:`tritoncomm.step.state` defines the state of
one rank.
"""

from __future__ import annotations

import io
import json
import logging
import re
import secrets
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from tritoncomm.errors import ConfigMismatchError, ConfigurationError
from tritoncomm.optimizer import SparseOptimizer
from tritoncomm.scheduler.process_group import is_distributed
from tritoncomm.scheduler.ranks import global_ranks
from tritoncomm.step import agree
from tritoncomm.step import state as exchange_state
from tritoncomm.step.optimizer_list import parts_of
from tritoncomm.step.portable_state import ANCHORS, MOMENTUM, Parts, ShardOfReplica, held_by, joined, resharded, split
from tritoncomm.step.state import reshard

__all__ = ["ResidualState", "load", "reshard", "save"]

logger = logging.getLogger("tritoncomm")


def save(optimizer: torch.optim.Optimizer, folder: str | Path) -> None:
    """Save the state of a wrapped optimizer: one file per rank, ``rank-r-of-P.pt``.

    Each file holds the complete state of the original optimizer, and the residual and method state of its rank. All
    ranks must call this. It returns when all files are written. A file is written completely or not at all.

    Use a new folder for each checkpoint, and for each optimizer. If a save into a used folder is interrupted, the
    folder contains files of two saves, which :func:`load` rejects. Process groups without a common rank, such as the
    replicas of each stage of a pipeline, need a folder each, too.

    Args:
        optimizer: The optimizer that :func:`tritoncomm.wrap` returned, or a trainer's wrapper of it.
        folder: Folder to write to. It is created if needed. All ranks must be able to read it when they load.

    Raises:
        ConfigurationError: This rank cannot write its file, ``optimizer`` is not wrapped, or the folder holds files of
            another group.
        ConfigMismatchError: Another rank cannot write its file, has not completed the same updates, or holds other
            parameters or another state.
        RuntimeError: ``optimizer.synchronize()`` was called without ``optimizer.step()``, or an error has stopped an
            update.
    """
    optimizer = _one_group(_sparse(optimizer))
    folder = Path(folder)
    group, device = optimizer.process_group, optimizer._device  # noqa: SLF001 - of the exchange, no setting
    with agree.propagate_errors(group, device):
        state = optimizer.state_dict()
        checksum = exchange_state.checksum(_original_state(state))
    if is_distributed():
        exchange = optimizer._exchange  # noqa: SLF001 - as above
        agree.compare({agree.UPDATES: exchange.updates}, group, device)
        difference = exchange.replica.difference(group, device, exchange.steps)
        if difference:
            raise ConfigMismatchError(f"nothing was saved, because {difference}")
    rank, size = state["tritoncomm"]["rank"], state["tritoncomm"]["world_size"]
    mark: dict[str, Any] = {"id": secrets.token_hex(8), "optimizer": _kind(optimizer)}
    if is_distributed():
        mark["id"] = agree.all_gather(mark, group, device)[global_ranks(group)[0]]["id"]
    mark["checksum"] = checksum
    file = _file(folder, rank, size)
    with agree.propagate_errors(group, device):
        _check_owner(optimizer, folder, file)
    if is_distributed():
        agree.compare({"folder": "is free"}, group, device)  # before a rank writes
    with agree.propagate_errors(group, device):
        try:
            folder.mkdir(parents=True, exist_ok=True)
            unfinished = file.with_suffix(".unfinished")
            torch.save(state | {"saved": mark}, unfinished)
            unfinished.replace(file)
            _saved_into[folder.resolve()] = weakref.ref(optimizer)
        except Exception as error:  # torch.save raises RuntimeError when the disk is full
            raise ConfigurationError(f"{file} cannot be written: {error}") from error
    if is_distributed():
        agree.compare({"checkpoint": mark["id"]}, group, device)
    if rank == 0:  # remove older files of another world size
        for other in folder.glob("rank-*-of-*.pt"):
            if other.stem.rpartition("-of-")[2] != str(size):
                other.unlink(missing_ok=True)


# The optimizer that this process has saved last into a folder.
_saved_into: dict[Path, weakref.ref[SparseOptimizer]] = {}


def _check_owner(optimizer: SparseOptimizer, folder: Path, file: Path) -> None:
    """Raise :class:`~tritoncomm.ConfigurationError` if ``folder`` holds files of another group.

    If they are of another optimizer of this process, log a warning. It may be one of an earlier run in a notebook.

    The first rank of a group that is not the whole world leaves a file with the group's ranks in the folder. Each group
    writes its own before it looks for others, so that of two groups that save at the same time, at least one sees the
    other.
    """
    reference = _saved_into.get(folder.resolve())
    other = None if reference is None else reference()
    if other is not None and file.exists() and not (agree.parameter_ids(other) & agree.parameter_ids(optimizer)):
        logger.warning(
            "%s held the state of another optimizer of this process, which is overwritten: save each optimizer into a "
            "folder of its own",
            folder,
        )
    ranks = global_ranks(optimizer.process_group) if is_distributed() else [0]
    if not is_distributed() or len(ranks) == dist.get_world_size() or dist.get_rank() != ranks[0]:
        return
    own = folder / f"group-of-rank-{ranks[0]}.json"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        unfinished = own.with_suffix(".unfinished")
        unfinished.write_text(json.dumps(ranks))
        unfinished.replace(own)
        others = {each: json.loads(each.read_text()) for each in folder.glob("group-of-rank-*.json") if each != own}
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"{folder} cannot be used: {error}") from error
    for each, found in others.items():
        if not set(found) & set(ranks):
            own.unlink()
            raise ConfigurationError(
                f"{folder} holds the state of ranks {found}, and this group has ranks {ranks}: save each group into a "
                "folder of its own"
            )
        each.unlink(missing_ok=True)  # of a group that had other ranks before


def load(optimizer: torch.optim.Optimizer, folder: str | Path) -> None:
    """Load what :func:`save` wrote, with the same or another number of ranks. All ranks must call this.

    With the same number of ranks, each reads its own file, and training continues bit-identically. With another number,
    every rank reads all files. The pending update ``sum(residual) / world_size`` is then kept, and methods determine
    thresholds and partitions from scratch. So they do with another ``node_group``, or with None. If a rank cannot load
    its state, nothing changes on any rank.

    Args:
        optimizer: The optimizer that :func:`tritoncomm.wrap` returned, or a trainer's wrapper of it. The original
            optimizer's class, the model and the method must be those of the save.
        folder: Folder that :func:`save` wrote.

    Raises:
        ConfigurationError: This rank cannot load its state. The message names the file and the reason.
        ConfigMismatchError: Another rank cannot load its state, or ranks load different saves.
    """
    optimizer = _sparse(optimizer)
    optimizer.load_state_dict(state_of_rank(optimizer, Path(folder)))


def state_of_rank(optimizer: SparseOptimizer, folder: Path) -> dict[str, Any]:
    """Return the state that :func:`load` loads on this rank, after all ranks have checked theirs. Nothing changes."""
    group, device = optimizer.process_group, optimizer._device  # noqa: SLF001 - of the exchange, no setting
    rank, size = (dist.get_rank(group), dist.get_world_size(group)) if is_distributed() else (0, 1)
    with agree.propagate_errors(group, device):
        saved_by = _saved_by(folder)
        if saved_by == size:
            file = _file(folder, rank, size)
            state = _read(file)
        else:  # every rank reads all states, to check that they belong together
            file = folder
            state = _resharded([_read(_file(folder, r, saved_by)) for r in range(saved_by)], folder, rank, size)
        mark, name = state.pop("saved"), _kind(optimizer)
        with _name_in_errors(file):
            if mark["optimizer"] != name:
                raise ConfigurationError(f"it was written for {mark['optimizer']}, this optimizer is {name}")
            optimizer.loadable(state)
    if is_distributed():
        agree.compare({"id of the checkpoint": mark["id"]}, group, device)
    return state


def _one_group(optimizer: SparseOptimizer) -> SparseOptimizer:
    """Return ``optimizer``. Raise if several groups of ranks would write the same files."""
    if optimizer.has_shards:
        raise ConfigurationError(
            "the parameters are sharded, and the ranks of several groups would write the same files: save with "
            "torch.distributed.checkpoint, see tritoncomm.checkpoint.ResidualState"
        )
    return optimizer


def _kind(optimizer: SparseOptimizer) -> str:
    return " and ".join(type(each).__name__ for each in parts_of(optimizer.optimizer))


def _sparse(optimizer: torch.optim.Optimizer) -> SparseOptimizer:
    """Return the wrapped optimizer inside the wrappers that a trainer may have put around it."""
    found: SparseOptimizer | None = None
    inner: Any = optimizer
    while isinstance(inner, torch.optim.Optimizer):
        # The last one: Lightning's wrapper is an instance of the class that it wraps, too.
        found = inner if isinstance(inner, SparseOptimizer) else found
        inner = vars(inner).get("optimizer", vars(inner).get("_optimizer"))
    if found is None:
        raise ConfigurationError(
            f"optimizer is a {type(optimizer).__name__}, which tritoncomm.wrap() has not wrapped: call wrap() first, "
            "and pass what it returns"
        )
    return found


def _original_state(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state of the original optimizer."""
    return {key: value for key, value in state.items() if key not in ("tritoncomm", "saved")}


def _file(folder: Path, rank: int, size: int) -> Path:
    return folder / f"rank-{rank}-of-{size}.pt"


def _saved_by(folder: Path) -> int:
    sizes = sorted({file.stem.rpartition("-of-")[2] for file in folder.glob("rank-*-of-*.pt")})
    if len(sizes) != 1 or not sizes[0].isdigit():
        found = "no checkpoint" if not sizes else f"checkpoints of {' and of '.join(sizes)} ranks"
        raise ConfigurationError(f"{folder} contains {found}: pass a folder that tritoncomm.checkpoint.save() wrote")
    return int(sizes[0])


def _resharded(states: list[dict[str, Any]], folder: Path, rank: int, size: int) -> dict[str, Any]:
    """Return the state of ``rank`` of ``size``, converted from the ``states`` of another number of ranks."""
    if len({state["saved"]["id"] for state in states}) > 1:
        raise ConfigurationError(f"{folder} contains files of several saves: a save was interrupted")
    with _name_in_errors(folder):
        return states[0] | {"tritoncomm": reshard([state["tritoncomm"] for state in states], size)[rank]}


@contextmanager
def _name_in_errors(file: Path) -> Iterator[None]:
    """Turn any error of the body into a ConfigurationError that names ``file``. Damaged files raise many types."""
    try:
        yield
    except Exception as error:
        raise ConfigurationError(f"{file} cannot be loaded: {error}") from error


def _read(file: Path) -> dict[str, Any]:
    with _name_in_errors(file):
        state: dict[str, Any] = torch.load(file, weights_only=True, map_location="cpu")
        _check(state)
    return state


def _check(state: Any) -> None:
    if not (isinstance(state, dict) and isinstance(state.get("tritoncomm"), dict)):
        raise ConfigurationError("it is not the state of a wrapped optimizer")
    exchange_state.check(state["tritoncomm"])
    if exchange_state.checksum(_original_state(state)) != state["saved"]["checksum"]:
        raise ConfigurationError("it is corrupt: the checksum of the optimizer's state does not match")


class ResidualState:
    """The residuals and method states of all ranks, as a part of a ``torch.distributed.checkpoint`` checkpoint.

    Use it next to ``get_optimizer_state_dict``, which provides the state of the original optimizer. To save::

        dcp.save({"model": ..., "residuals": ResidualState(optimizer)}, checkpoint_id=path)

    To load, with any number of ranks, replicas and shards::

        dcp.load({"model": ..., "residuals": ResidualState(optimizer, checkpoint_id=path)}, checkpoint_id=path)

    A plain module, a module in DDP and one that FSDP2 has sharded load each other's checkpoints. On the same ranks with
    the same sharding, training continues to the bit. Otherwise the pending update, ``sum(residual) / replicas``, is
    kept, and methods determine thresholds and partitions from scratch. Without sharding, every rank is a replica.

    Where updates are exchanged, a save may come between two exchanges. The model and ``get_optimizer_state_dict`` then
    have what one rank holds. This object has the parameters and the optimizer's state of each rank. They take effect
    when the next step begins, or inside ``optimizer.averaged()``, whatever is loaded into the model until then. With
    other ranks or shards, training continues from the common parameters, and residuals have what was not exchanged.

    ``torch.distributed.checkpoint`` would treat the tensors of one rank as those of all ranks. The state of each rank
    is therefore stored under its rank, and the residuals of a replica under its first rank.

    Args:
        optimizer: The optimizer that :func:`tritoncomm.wrap` returned, or a trainer's wrapper of it.
        checkpoint_id: The folder from which ``dcp.load`` will read. Default: None, to save, or to load with the same
            ranks and sharding. Otherwise ``dcp.load`` then raises an error that names this argument.
        storage_reader: A reader of ``torch.distributed.checkpoint``, instead of a folder.

    Raises:
        ConfigurationError: ``optimizer`` is not wrapped, or there is no such checkpoint.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, checkpoint_id: str | Path | None = None, *, storage_reader: Any = None
    ) -> None:
        self.optimizer = _sparse(optimizer)
        self._saved: _Saved | None = None
        if checkpoint_id is not None or storage_reader is not None:
            from torch.distributed.checkpoint.filesystem import FileSystemReader  # noqa: PLC0415 - importing it takes a while

            where = storage_reader if checkpoint_id is None else checkpoint_id
            self._saved = _Saved.by(storage_reader or FileSystemReader(where), where)
            self._check_step()

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's state. ``dcp.save`` writes it, and ``dcp.load`` replaces its content."""
        parts = self._parts()
        here, (rank, size) = self._here, _rank()
        if self._saved is None:
            key = f"rank {rank} of {size}, replica {here.replica} of {here.replicas} ({_HINT})"
            return {key: _pack(parts.rest), _replica(here.first_rank): parts.residuals, **parts.common}
        like = dict.fromkeys(self._saved.replicas_for(here), parts.residuals)
        if parts.common:
            like |= {key: parts.common.get(key, parts.common[ANCHORS]) for key in self._saved.common}
        zeros = {key: {number: torch.zeros_like(own) for number, own in each.items()} for key, each in like.items()}
        return dict.fromkeys(self._saved.ranks_for(here, rank, size), b"") | zeros

    def _parts(self) -> Parts:
        """Return the present state of this rank."""
        optimizer, inner = self.optimizer, self.optimizer._local  # noqa: SLF001 - no setting
        state = optimizer.state_dict()["tritoncomm"]
        own = [] if inner is None else inner.inner_states()
        return split(state, optimizer._exchange.parameters, self._here, own)  # noqa: SLF001 - no setting

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load this rank's state, for ``dcp.load``. If a rank cannot load its state, nothing changes on any rank."""
        optimizer, here = self.optimizer, self._here
        group, device = optimizer._everybody, optimizer._device  # noqa: SLF001 - of the exchange, no setting
        with agree.propagate_errors(group, device):
            states = [_unpack(content) for content in state_dict.values() if isinstance(content, bytes)]
            own = next((state for state in states if held_by(state) == here), None)
        # All ranks or none, because ranks with the same shards continue with the same state of the method.
        if is_distributed() and agree.differences({"has its own state": own is not None}, group, device):
            own = None
        with agree.propagate_errors(group, device):
            common = {key: state_dict[key] for key in (ANCHORS, MOMENTUM) if key in state_dict}
            if own is not None:
                state = joined(Parts(own, state_dict[_replica(here.first_rank)], common))
            elif self._saved is not None:
                replicas = [state_dict[key] for key in self._saved.replicas_for(here)]
                state = resharded(states, replicas, common, here)
            else:
                raise ConfigurationError(f"this checkpoint was saved with another sharding: {_HINT}")
        # set_optimizer_state_dict loads the state of the original optimizer, before or after this.
        optimizer.load_state_dict(optimizer.optimizer.state_dict() | {"tritoncomm": state})
        if optimizer._local is not None:  # noqa: SLF001 - as above
            optimizer._local.load_later(state["local"], [] if own is None else own["inner"])  # noqa: SLF001

    def _check_step(self) -> None:
        """Raise if a single worker, which takes the optimizer's own steps, has saved what this optimizer needs."""
        assert self._saved
        if self._saved.replicas == 1 and self.optimizer._optimizer_step.takes_aware_step:  # noqa: SLF001 - no setting
            raise ConfigurationError(
                "a single worker or replica has saved this checkpoint, so it has no residuals, and no state of the "
                "staleness-aware step: load it into model and optimizer before wrap(), without ResidualState"
            )

    @property
    def _here(self) -> ShardOfReplica:
        exchange = self.optimizer._exchange  # noqa: SLF001 - of the exchange, no setting
        return ShardOfReplica.here(exchange.parameters, exchange.options.group)


# Part of the keys, because torch.distributed.checkpoint names a key that it does not find. Part of the format, too.
_HINT = "for other ranks, replicas or shards than those of the save: ResidualState(optimizer, checkpoint_id=path)"


class _Saved(NamedTuple):
    """The keys of a checkpoint: of the state of each rank, and of the residuals of each replica.

    Attributes:
        ranks: The key of each rank.
        first_ranks: The first rank of each replica, in ascending order.
        replicas: The number of replicas.
        common: The keys of what all replicas have in common.
    """

    ranks: list[str]
    first_ranks: list[int]
    replicas: int
    common: list[str]

    @classmethod
    def by(cls, reader: Any, where: object) -> _Saved:
        """Return who has saved the checkpoint of ``reader``."""
        try:
            names = list(reader.read_metadata().state_dict_metadata)
        except Exception as error:  # each storage has its own
            raise ConfigurationError(f"checkpoint_id={where}: no checkpoint can be read: {error}") from error
        pattern = re.compile(r"\.(rank (\d+) of \d+, replica \d+ of (\d+) .*)$")
        states = [found for name in names if (found := pattern.search(name))]
        ranks = {int(found[2]): found[1] for found in states}
        replicas = {int(found[3]) for found in states}
        first = {int(found[1]) for name in names if (found := re.search(r"\.replica at rank (\d+)\.\d+$", name))}
        if sorted(ranks) != list(range(len(ranks))) or len(replicas) != 1 or len(first) > max(replicas):
            raise ConfigurationError(
                f"checkpoint_id={where}: this checkpoint has no ResidualState, or those of several runs or stages of a "
                "pipeline: pass a folder into which dcp.save() has written one"
            )
        common = [key for key in (ANCHORS, MOMENTUM) if any(f".{key}." in name for name in names)]
        return cls([ranks[rank] for rank in sorted(ranks)], sorted(first), replicas.pop(), common)

    def ranks_for(self, here: ShardOfReplica, rank: int, size: int) -> list[str]:
        """Return the keys of the states that ``rank`` of ``size`` reads: of rank 0, and what may be its own."""
        wanted = [0, *([rank] if len(self.ranks) == size else [])]
        if len(self.ranks) == self.replicas:  # each rank held a whole replica
            wanted += range(here.replica, self.replicas, here.replicas)
        return [self.ranks[each] for each in dict.fromkeys(wanted)]

    def replicas_for(self, here: ShardOfReplica) -> list[str]:
        """Return the keys of the residuals that this rank takes over."""
        return [_replica(first_rank) for first_rank in self.first_ranks[here.replica :: here.replicas]]


def _replica(first_rank: int) -> str:
    return f"replica at rank {first_rank}"


def _rank() -> tuple[int, int]:
    """Return the rank among all, because shards of one model are exchanged in several groups, and their number."""
    return (dist.get_rank(), dist.get_world_size()) if is_distributed() else (0, 1)


def _pack(state: Mapping[str, Any]) -> bytes:
    content = io.BytesIO()
    torch.save(state, content)
    return content.getvalue()


def _unpack(content: bytes) -> dict[str, Any]:
    state: dict[str, Any] = torch.load(io.BytesIO(content), weights_only=True, map_location="cpu")
    exchange_state.check_schema(state)
    return state
