"""Checkpoints of the optimizer state and the residuals of all ranks, by ``torch.distributed.checkpoint``.

Residuals differ between ranks. A checkpoint of the optimizer on rank 0 alone loses the residuals of all other ranks.
:func:`save` and :func:`load` keep them, on any mesh and any number of ranks. :class:`ResidualState` is a part of a
larger checkpoint. :mod:`tritoncomm.step.saved.state` defines the state of one rank.
"""

from __future__ import annotations

import hashlib
import io
import json
import logging
import os
import secrets
import shutil
import warnings
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tritoncomm.errors import ConfigMismatchError, ConfigurationError
from tritoncomm.optimizer import SparseOptimizer, loadable, setup_of
from tritoncomm.scheduler.process_group import is_distributed, reporting
from tritoncomm.scheduler.ranks import global_ranks
from tritoncomm.step import agree
from tritoncomm.step.optimizer_list import parts_of
from tritoncomm.step.rules.step import saved_state
from tritoncomm.step.saved import state as exchange_state
from tritoncomm.step.saved.portable import (
    Parts,
    Saved,
    ShardOfReplica,
    inner_of,
    joined,
    key_of_common,
    key_of_replica,
    resharded,
    split,
)
from tritoncomm.step.torch_internals import original_class
from tritoncomm_kernels import devices

__all__ = ["ResidualState", "load", "save"]

logger = logging.getLogger("tritoncomm")

_POINTER = "checkpoint.json"  # names the folder of the last complete save
_DATA = "data-"  # begins the names of such folders


def save(optimizer: torch.optim.Optimizer, folder: str | Path) -> None:
    """Save the state of a wrapped optimizer, with the residuals of all ranks, by ``torch.distributed.checkpoint``.

    The state of the optimizer is written once, a part by each rank. Between two exchanges of updates, they are merged
    first. All ranks must call this. It returns when all is written. An interrupted save into a used folder leaves the
    state that was there, which is removed when the new one is complete.

    Use a folder for each optimizer. Process groups without a common rank, such as the replicas of each stage of a
    pipeline, need a folder each, too.

    Args:
        optimizer: The optimizer that :func:`tritoncomm.wrap` returned, or a trainer's wrapper of it.
        folder: Folder to write to. It is created if needed. All ranks must be able to read it when they load.

    Raises:
        ConfigurationError: A rank cannot write, ``optimizer`` is not wrapped, or the folder has the state of another
            group.
        ConfigMismatchError: Another rank cannot write. Or ranks have not completed the same updates, or hold other
            parameters or another state: one rank writes each tensor, and the others must have the same.
        RuntimeError: ``optimizer.synchronize()`` was called without ``optimizer.step()``, or an error has stopped an
            update.
    """
    optimizer, folder = _sparse(optimizer), Path(folder)
    setup = setup_of(optimizer)
    exchange, group, device = setup.exchange, setup.everybody, setup.device
    with agree.propagate_errors(group, device):
        setup.check_saveable("save()")
    _compare({agree.UPDATES: exchange.updates}, optimizer)
    optimizer.merge()
    if is_distributed():
        difference = exchange.replica.difference(group, device, exchange.steps, exchange.shard)
        if difference:
            raise ConfigMismatchError(f"nothing was saved, because {difference}")
    with agree.propagate_errors(group, device):
        content = _RankState(optimizer, None).content(whole=True)
        _check_owner(optimizer, folder)
    _compare({"folder": "is free"}, optimizer)  # before a rank writes
    (name, *_) = (told["name"] for told in _gathered({"name": _DATA + secrets.token_hex(8)}, optimizer))
    files = _write(content, folder / name, optimizer)
    with agree.propagate_errors(group, device), _named(f"{folder} cannot be written"):
        if _place_in(group)[0] == 0:
            _replace(folder / _POINTER, {"data": name, "optimizer": _kind(optimizer), "files": files})
            for old in folder.glob(f"{_DATA}*"):
                if old.name != name:
                    shutil.rmtree(old, ignore_errors=True)
    _compare({"checkpoint": name}, optimizer)
    _saved_into[folder.resolve()] = weakref.ref(optimizer)


def _write(content: dict[str, Any], data: Path, optimizer: SparseOptimizer) -> dict[str, str]:
    """Write the ``content`` of each rank into the folder ``data``. Return the checksums of all files, by name."""
    from torch.distributed.checkpoint import state_dict_saver  # noqa: PLC0415 - importing it takes a while

    group, device = setup_of(optimizer).everybody, setup_of(optimizer).device
    (rank, _), failed = _place_in(group), f"{data.parent} cannot be written"
    with _all_or_none(optimizer, failed):
        state_dict_saver.save({"optimizer": content}, checkpoint_id=data, process_group=group)
    with agree.propagate_errors(group, device), _named(failed):
        own = [*data.glob(f"__{rank}_*"), *(data.glob(".metadata") if rank == 0 else ())]
        digests = {file.name: _digest(file) for file in own}
    _compare({"checkpoint": data.name}, optimizer)
    return {name: digest for told in _gathered(digests, optimizer) for name, digest in told.items()}


# The optimizer that this process has saved last into a folder.
_saved_into: dict[Path, weakref.ref[SparseOptimizer]] = {}


def _check_owner(optimizer: SparseOptimizer, folder: Path) -> None:
    """Raise :class:`~tritoncomm.ConfigurationError` if ``folder`` has the state of another group.

    If it is of another optimizer of this process, log a warning. It may be one of an earlier run in a notebook.

    The first rank of a group that is not the whole world leaves a file with the group's ranks in the folder. Each group
    writes its own before it looks for others, so that of two groups that save at the same time, at least one sees the
    other.
    """
    reference = _saved_into.get(folder.resolve())
    other = None if reference is None else reference()
    if (
        other is not None
        and (folder / _POINTER).exists()
        and not (agree.parameter_ids(other) & agree.parameter_ids(optimizer))
    ):
        logger.warning(
            "%s held the state of another optimizer of this process, which is overwritten: save each optimizer into a "
            "folder of its own",
            folder,
        )
    ranks = global_ranks(setup_of(optimizer).everybody) if is_distributed() else [0]
    if not is_distributed() or len(ranks) == dist.get_world_size() or dist.get_rank() != ranks[0]:
        return
    own = folder / f"group-of-rank-{ranks[0]}.json"
    with _named(f"{folder} cannot be used"):
        folder.mkdir(parents=True, exist_ok=True)
        _replace(own, ranks)
        others = {each: json.loads(each.read_text()) for each in folder.glob("group-of-rank-*.json") if each != own}
    for each, found in others.items():
        if not set(found) & set(ranks):
            own.unlink()
            raise ConfigurationError(
                f"{folder} holds the state of ranks {found}, and this group has ranks {ranks}: save each group into a "
                "folder of its own"
            )
        each.unlink(missing_ok=True)  # of a group that had other ranks before


def load(optimizer: torch.optim.Optimizer, folder: str | Path) -> None:
    """Load what :func:`save` wrote, with the same or another number of ranks, replicas and shards, on all ranks.

    With the same ones, training continues bit-identically. Otherwise the pending update, ``sum(residual) / replicas``,
    is kept, and methods determine thresholds and partitions from scratch. So they do with another ``node_group``, or
    with None. If a rank cannot load its state, nothing changes on any rank.

    Args:
        optimizer: The optimizer that :func:`tritoncomm.wrap` returned, or a trainer's wrapper of it. Its class, the
            model and the method must be those of the save. The model may be wrapped otherwise.
        folder: Folder that :func:`save` wrote.

    Raises:
        ConfigurationError: This rank cannot load its state. The message names the file and the reason.
        ConfigMismatchError: Another rank cannot load its state, or ranks load different saves.
    """
    optimizer = _sparse(optimizer)
    optimizer.load_state_dict(state_of_rank(optimizer, Path(folder)))


def state_of_rank(optimizer: SparseOptimizer, folder: Path) -> dict[str, Any]:
    """Return the state that :func:`load` loads on this rank, after all ranks have checked theirs. Nothing changes."""
    from torch.distributed.checkpoint import state_dict_loader  # noqa: PLC0415 - importing it takes a while

    group, device = setup_of(optimizer).everybody, setup_of(optimizer).device
    rank, size = _place_in(group)
    failed = f"{folder} cannot be loaded"
    with agree.propagate_errors(group, device):
        mark = _mark_in(folder)
        with _named(failed):
            if mark["optimizer"] != _kind(optimizer):
                raise ConfigurationError(
                    f"it was written for {mark['optimizer']}, this optimizer is {_kind(optimizer)}"
                )
            data = folder / mark["data"]
        for name in sorted(mark["files"])[rank::size]:
            with _named(f"{data / name} cannot be loaded"):
                if _digest(data / name) != mark["files"][name]:
                    raise ConfigurationError("it is corrupt: its checksum does not match its content")
    _compare({"id of the checkpoint": mark["data"]}, optimizer)
    with agree.propagate_errors(group, device), _named(failed):
        own = _RankState(optimizer, Saved.by(_reader(data), data))
        content = own.rooms()
    _compare({"parameters": "fit"}, optimizer)
    with _all_or_none(optimizer, failed):
        state_dict_loader.load({"optimizer": content}, checkpoint_id=data, process_group=group, planner=_planner())
    state = own.read(content)
    with agree.propagate_errors(group, device), _named(failed):
        loadable(setup_of(optimizer), state)
    _compare({"state": "can be loaded"}, optimizer)
    return state


def _place_in(group: dist.ProcessGroup | None) -> tuple[int, int]:
    """Return the rank in ``group``, and its number of ranks."""
    return (dist.get_rank(group), dist.get_world_size(group)) if is_distributed() else (0, 1)


def _compare(fields: dict[str, Any], optimizer: SparseOptimizer) -> None:
    """Raise on all ranks if one has other ``fields``, or has reported an error."""
    if is_distributed():
        agree.compare(fields, setup_of(optimizer).everybody, setup_of(optimizer).device)


def _gathered(fields: dict[str, Any], optimizer: SparseOptimizer) -> list[dict[str, Any]]:
    """Return the ``fields`` of all ranks."""
    if not is_distributed():
        return [fields]
    return list(agree.all_gather(fields, setup_of(optimizer).everybody, setup_of(optimizer).device).values())


@contextmanager
def _all_or_none(optimizer: SparseOptimizer, failed: str) -> Iterator[None]:
    """Let ``torch.distributed.checkpoint`` write or read in the body. All ranks raise an error if it fails on one.

    The error begins with the text ``failed``.
    """
    from torch.distributed.checkpoint.api import CheckpointException  # noqa: PLC0415 - importing it takes a while

    group, device = setup_of(optimizer).everybody, setup_of(optimizer).device
    together = reporting(group, device, "checkpoint") if is_distributed() else nullcontext()
    with together, devices.on(device), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        try:
            yield
        except CheckpointException as error:
            ranks = global_ranks(group) if is_distributed() else [0]
            reasons = [f"rank {ranks[each]}: {reason}" for each, (reason, _) in error.failures.items()]
            raise ConfigurationError(f"{failed}: {'; '.join(reasons)}") from error


@contextmanager
def _named(failed: str) -> Iterator[None]:
    """Turn any error of the body into a ConfigurationError that begins with the text ``failed``.

    Damaged files raise many types.
    """
    try:
        yield
    except Exception as error:
        raise ConfigurationError(f"{failed}: {error}") from error


def _reader(folder: Any) -> Any:
    from torch.distributed.checkpoint.filesystem import FileSystemReader  # noqa: PLC0415 - importing it takes a while

    return FileSystemReader(folder)


def _planner() -> Any:
    """Return a planner that reads plain data only, as ``torch.load(weights_only=True)`` does."""
    from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner  # noqa: PLC0415 - importing it takes a while

    class PlainData(DefaultLoadPlanner):
        def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
            torch.load(value, weights_only=True)  # raises an error if there is anything else
            value.seek(0)
            super().load_bytes(read_item, value)

    return PlainData()


def _mark_in(folder: Path) -> dict[str, Any]:
    """Return what :func:`save` has written last, when all else was complete."""
    if not (folder / _POINTER).exists():
        raise ConfigurationError(
            f"{folder} contains no checkpoint: pass a folder that tritoncomm.checkpoint.save() wrote"
        )
    with _named(f"{folder / _POINTER} cannot be loaded"):
        mark: dict[str, Any] = json.loads((folder / _POINTER).read_text())
        return mark | {"data": mark["data"], "files": dict(mark["files"])}


def _digest(file: Path) -> str:
    digest = hashlib.blake2b(digest_size=16)
    with file.open("rb") as content:
        while block := content.read(2**24):
            digest.update(block)
    return digest.hexdigest()


def _replace(file: Path, content: Any) -> None:
    """Write ``content`` into ``file``: all of it, or nothing."""
    unfinished = file.with_suffix(".unfinished")
    with unfinished.open("w") as stream:
        json.dump(content, stream)
        stream.flush()
        os.fsync(stream.fileno())
    unfinished.replace(file)


def _kind(optimizer: SparseOptimizer) -> str:
    return " and ".join(original_class(each).__name__ for each in parts_of(optimizer))


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


class ResidualState:
    """The residuals and method states of all ranks, as a part of a ``torch.distributed.checkpoint`` checkpoint.

    Use it next to ``get_optimizer_state_dict``, which provides the state of the optimizer. To save::

        dcp.save({"model": ..., "residuals": ResidualState(optimizer)}, checkpoint_id=path)

    To load, with any number of ranks, replicas and shards::

        dcp.load({"model": ..., "residuals": ResidualState(optimizer, checkpoint_id=path)}, checkpoint_id=path)

    A plain module, a module in DDP and one that FSDP2 has sharded load each other's checkpoints. On the same ranks with
    the same sharding, training continues to the bit. Otherwise the pending update, ``sum(residual) / replicas``, is
    kept, and methods determine thresholds and partitions from scratch. Without sharding, every rank is a replica.

    Where updates are exchanged, it also has the common parameters, and the state of each replica's optimizer. They take
    effect when the next step begins, or inside ``optimizer.averaged()``, whatever is loaded into the model until then.
    Between two exchanges, it cannot be saved: call ``optimizer.merge()`` first.

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
        self._saved: Saved | None = None
        if checkpoint_id is not None or storage_reader is not None:
            where = storage_reader if checkpoint_id is None else checkpoint_id
            self._saved = Saved.by(storage_reader or _reader(where), where)

    @property
    def _state(self) -> _RankState:
        """The state now: parameters may be added."""
        return _RankState(self.optimizer, self._saved)

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's state. ``dcp.save`` writes it, and ``dcp.load`` replaces its content.

        Raises:
            RuntimeError: This is between two exchanges of updates, and nothing says that a checkpoint is loaded.
        """
        if self._saved is not None:
            return self._state.rooms()
        local_steps = setup_of(self.optimizer).local
        if local_steps is not None and local_steps.taken:
            raise RuntimeError(
                f"{local_steps.taken} local steps were not exchanged: call merge() before you save with "
                "torch.distributed.checkpoint, or save with tritoncomm.checkpoint.save(), which does"
            )
        content = self._state.content()
        for tensors in content.values():
            if isinstance(tensors, dict):  # dcp.load may read into them before all ranks have agreed to load
                tensors |= {name: each.clone() for name, each in tensors.items()}
        return content

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load this rank's state, for ``dcp.load``. If a rank cannot load its state, nothing changes on any rank."""
        optimizer, state = self.optimizer, self._state.read(state_dict)
        # set_optimizer_state_dict loads the state of the optimizer, before or after this.
        optimizer.load_state_dict(saved_state(optimizer) | {"tritoncomm": state["tritoncomm"]})
        local_steps = setup_of(optimizer).local
        if local_steps is not None:
            every = self._state.every
            own = {every[number]: each for number, each in state["state"].items()}
            local_steps.load_later(state["tritoncomm"]["local"], own)


class _RankState:
    """The state of a wrapped optimizer on this rank, as ``torch.distributed.checkpoint`` saves it, or has saved it.

    Args:
        optimizer: The wrapped optimizer.
        saved: What a checkpoint has. None to save, or to read what the same ranks with the same sharding have saved.
    """

    def __init__(self, optimizer: SparseOptimizer, saved: Saved | None) -> None:
        self.optimizer, self.saved = optimizer, saved
        self.every = [parameter for parameter, _ in agree.named_parameters(optimizer)]
        self._parameters = setup_of(optimizer).exchange.parameters
        self._here = ShardOfReplica.here(self._parameters, optimizer.process_group)

    def content(self, *, whole: bool = False) -> dict[str, Any]:
        """Return what is saved: with ``whole``, the state of the optimizer, too."""
        optimizer, here, (rank, size) = self.optimizer, self._here, _place_in(None)
        state, own = optimizer.state_dict(), self._own
        states = {n: state["state"][key] for n, key in enumerate(_keys(state)) if key in state["state"]}
        inner = {number: each for number, each in states.items() if whole or number in own}
        parts = split(state["tritoncomm"], inner, own, self._parameters, here)
        others = {key: value for key, value in state.items() if whole and key not in ("state", "tritoncomm")}
        rest = io.BytesIO()
        torch.save({**parts.rest, "others": others}, rest)
        key = f"rank {rank} of {size}, replica {here.replica} of {here.replicas} ({_HINT})"
        common = key_of_common(setup_of(optimizer).everybody)
        return {key: rest.getvalue(), key_of_replica(self._parameters): parts.replica, common: parts.common}

    def rooms(self) -> dict[str, Any]:
        """Return zeros for what this rank reads of the checkpoint that it was given."""
        assert self.saved is not None
        return self.saved.rooms(self._here, self._parameters, self.every)

    def read(self, content: Mapping[str, Any]) -> dict[str, Any]:
        """Return the state of this rank, for ``load_state_dict()``. All ranks call this together.

        ``content`` is what :meth:`content` or :meth:`rooms` has returned, as it was read.
        """
        optimizer, here, saved = self.optimizer, self._here, self.saved
        group, device = setup_of(optimizer).everybody, setup_of(optimizer).device
        with agree.propagate_errors(group, device):
            packed = {key: io.BytesIO(value) for key, value in content.items() if isinstance(value, bytes)}
            rests = {key: torch.load(value, weights_only=True, map_location="cpu") for key, value in packed.items()}
            for each in rests.values():
                exchange_state.check_schema(each)
            rest = next((each for each in rests.values() if ShardOfReplica.of(each) == here), None)
        # All ranks or none, because ranks with the same shards continue with the same state of the method.
        if is_distributed() and agree.differences({"has its own state": rest is not None}, group, device):
            rest = None
        with agree.propagate_errors(group, device):
            common = content[key_of_common(group) if saved is None else saved.common]
            if rest is not None:
                key = key_of_replica(self._parameters) if saved is None else saved.replicas[saved.source(here)]
                parts = Parts(rest, content[key], common)
                state = joined(parts)
            elif saved is not None:
                old = {
                    number: Parts(rests[saved.ranks_of(number)[0]], content[saved.replicas[number]], common)
                    for number in (*saved.taken(here), saved.source(here))
                }
                parts = old[saved.source(here)]
                state = resharded(rests[saved.ranks[0][0]], [old[n] for n in saved.taken(here)], common, here)
            else:
                raise ConfigurationError(f"this checkpoint was saved with another sharding: {_HINT}")
            try:
                inner = inner_of(parts)
            except KeyError as error:
                raise ConfigurationError(f"this optimizer has no state into which {error} is read: {_HINT}") from error
            others = parts.rest["others"]
            keys = _keys(others) if others else range(len(self.every))
            return {**others, "state": {keys[number]: each for number, each in inner.items()}, "tritoncomm": state}

    @property
    def _own(self) -> set[int]:
        """The numbers of parameters whose states differ between replicas.

        They belong to optimizers that exchange updates, or are ignored.
        """
        stepped, ignored = setup_of(self.optimizer).stepped, setup_of(self.optimizer).parameters.ignored
        every = [(id(group), id(each)) for group in self.optimizer.param_groups for each in group["params"]]
        return {number for number, (group, each) in enumerate(every) if group in stepped or each in ignored}


# Part of the keys, because torch.distributed.checkpoint names a key that it does not find. Part of the format, too.
_HINT = "for other ranks, replicas or shards than those of the save: ResidualState(optimizer, checkpoint_id=path)"


def _keys(state: Mapping[str, Any]) -> list[Any]:
    """Return the keys of all parameters in the ``state`` of an optimizer, in their order."""
    return [key for group in state["param_groups"] for key in group["params"]]
