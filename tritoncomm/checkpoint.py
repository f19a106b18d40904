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
from tritoncomm.optimizer import SparseOptimizer, numbers_of_own, setup_of
from tritoncomm.scheduler.process_group import is_distributed, reporting
from tritoncomm.scheduler.ranks import global_ranks, own_rank, rank_text, text_by_rank
from tritoncomm.step import agree
from tritoncomm.step.optimizer_list import parts_of
from tritoncomm.step.saved import state as exchange_state
from tritoncomm.step.saved.optimizer_state import keys_of, states_of
from tritoncomm.step.saved.packed import packed, unpacked
from tritoncomm.step.saved.portable import HINT, Held, Saved, key_of_common, key_of_replica, restored, split
from tritoncomm.step.setup import Setup
from tritoncomm.step.tensors.names import named_parameters, parameter_ids
from tritoncomm.step.torch_internals import original_class
from tritoncomm_kernels import devices

__all__ = ["ResidualState", "load", "save"]

logger = logging.getLogger("tritoncomm")

_POINTER = "checkpoint.json"  # names the folder of the last complete save
_DATA = "data-"  # begins the names of such folders, before 16 hexadecimal digits


def save(optimizer: torch.optim.Optimizer, folder: str | Path) -> None:
    """Save the state of a wrapped optimizer, with the residuals of all ranks, by ``torch.distributed.checkpoint``.

    The state of the optimizer is written once, a part by each rank. Between two exchanges of updates, they are merged
    first. All ranks must call this. It returns when all is written. An interrupted save into a used folder leaves the
    state that was there, which is removed when the new one is complete. A save that fails removes what it has written.

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
    setup, failed = setup_of(optimizer), f"{folder} cannot be written"
    exchange, group, device = setup.exchange, setup.everybody, setup.device
    with agree.propagate_errors(group, device):
        setup.check_saveable("save()")
        setup.known.check_kept()  # no optimizer could load the state
    agree.compare({agree.UPDATES: exchange.updates}, group, device)
    optimizer.merge()
    difference = setup.scope.replica.difference(group, device, exchange.steps, setup.scope.shard)
    if difference:
        raise ConfigMismatchError(f"nothing was saved, because {difference}")
    with agree.propagate_errors(group, device):
        content = _content(optimizer, whole=True)
        _check_owner(optimizer, folder)
    names = agree.all_gather({"name": _DATA + secrets.token_hex(8)}, group, device)
    data, rank = folder / next(iter(names.values()))["name"], global_ranks(group).index(own_rank())
    try:
        with _torch_checkpoint(setup, failed) as dcp:
            dcp.save({"optimizer": content}, checkpoint_id=data, process_group=group)
        with agree.propagate_errors(group, device), _prefixed(failed):
            own = [*data.glob(f"__{rank}_*"), *(data.glob(".metadata") if rank == 0 else ())]
            digests = {file.name: _digest(file) for file in own}
        told = agree.all_gather({"digests": digests}, group, device)
        files = {name: digest for own in told.values() for name, digest in own["digests"].items()}
        assert files, "torch.distributed.checkpoint has written no file with a name that is known"
        with agree.propagate_errors(group, device), _prefixed(failed):
            _warn_if_not_shared(data, group)
            if rank == 0:
                _replace(folder / _POINTER, {"data": data.name, "optimizer": _kind(optimizer), "files": files})
    except (ConfigurationError, ConfigMismatchError):
        # All ranks raise it, and none writes then. What a lost or an interrupted rank leaves, the next save removes.
        if rank == 0:
            shutil.rmtree(data, ignore_errors=True)
        raise
    with agree.propagate_errors(group, device), _prefixed(failed):
        if rank == 0:
            _remove_earlier(folder, data, group)
    agree.compare({"checkpoint": data.name}, group, device)
    _saved_into[folder.resolve()] = weakref.ref(optimizer)


def _warn_if_not_shared(data: Path, group: dist.ProcessGroup | None) -> None:
    """Log a warning if this rank does not see in ``data`` what the first rank of ``group`` has written."""
    if not (data / ".metadata").exists():
        first = rank_text(global_ranks(group)[0])
        text = "%s does not see what %s has written into %s: ranks that load must find all files in one folder"
        logger.warning(text, rank_text(own_rank()), first, data)


def _remove_earlier(folder: Path, data: Path, group: dist.ProcessGroup | None) -> None:
    """Remove what earlier saves have left in ``folder`` beside ``data``, which ``group`` has written."""
    for old in set(folder.glob(_DATA + 16 * "[0-9a-f]")) - {data}:  # and nothing of the user's
        shutil.rmtree(old, ignore_errors=True)
    if len(global_ranks(group)) == len(global_ranks(None)):
        for owner in folder.glob("group-of-rank-*.json"):  # of a smaller group
            owner.unlink(missing_ok=True)


# The optimizer that this process has saved last into a folder.
_saved_into: dict[Path, weakref.ref[SparseOptimizer]] = {}


def _check_owner(optimizer: SparseOptimizer, folder: Path) -> None:
    """Raise :class:`~tritoncomm.ConfigurationError` if ``folder`` has the state of another group.

    If it is of another optimizer of this process, log a warning. It may be one of an earlier run in a notebook.

    The first rank of a group that is not the whole world leaves a file with the group's ranks in the folder. Each group
    writes its own before it looks for others, so that of two groups that save at the same time, at least one sees the
    other.
    """
    before = _saved_into.get(folder.resolve(), lambda: None)()
    held = set[int]() if before is None else parameter_ids(before)
    if held and (folder / _POINTER).exists() and not held & parameter_ids(optimizer):
        logger.warning(
            "%s held the state of another optimizer of this process, which is overwritten: save each optimizer into a "
            "folder of its own",
            folder,
        )
    ranks = global_ranks(setup_of(optimizer).everybody)
    if len(ranks) == len(global_ranks(None)) or own_rank() != ranks[0]:
        return
    own = folder / f"group-of-rank-{ranks[0]}.json"
    with _prefixed(f"{folder} cannot be used"):
        folder.mkdir(parents=True, exist_ok=True)
        _replace(own, ranks)
        others = {each: json.loads(each.read_text()) for each in folder.glob("group-of-rank-*.json") if each != own}
    for each, found in others.items():
        if not set(found) & set(ranks):
            own.unlink()
            raise ConfigurationError(
                f"{folder} holds the state of {rank_text(*found)}, and this group has {rank_text(*ranks)}: save each "
                "group into a folder of its own"
            )
        each.unlink(missing_ok=True)  # of a group that had other ranks before


@torch.inference_mode(False)  # what is loaded outlives an evaluation
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
        ConfigurationError: This rank cannot load its state. The message names the reason, and a file that is damaged.
        ConfigMismatchError: Another rank cannot load its state, or ranks load different saves.
    """
    optimizer = _sparse(optimizer)
    optimizer.load_state_dict(state_of_rank(optimizer, Path(folder)))


def state_of_rank(optimizer: SparseOptimizer, folder: Path) -> dict[str, Any]:
    """Return the state that :func:`load` loads on this rank. Nothing changes."""
    setup, failed = setup_of(optimizer), f"{folder} cannot be loaded"
    group, device = setup.everybody, setup.device
    ranks = global_ranks(group)
    with agree.propagate_errors(group, device), _prefixed(failed):
        pointer = _pointer_in(folder)
        if pointer["optimizer"] != _kind(optimizer):
            raise ConfigurationError(f"it was written for {pointer['optimizer']}, this optimizer is {_kind(optimizer)}")
        data, files = folder / pointer["data"], pointer["files"]
        for name in sorted(files)[ranks.index(own_rank()) :: len(ranks)]:
            with _prefixed(f"{data / name} cannot be loaded"):
                if _digest(data / name) != files[name]:
                    raise ConfigurationError("it is corrupt: its checksum does not match its content")
    agree.compare({"id of the checkpoint": data.name}, group, device)
    with agree.propagate_errors(group, device), _prefixed(failed):
        saved = Saved.by(_reader(data), data)
        content = _rooms(optimizer, saved)
    agree.compare({"parameters": "fit"}, group, device)
    with _torch_checkpoint(setup, failed) as dcp:
        dcp.load({"optimizer": content}, checkpoint_id=data, process_group=group, planner=_planner(dcp))
    return _read(optimizer, saved, content)


@contextmanager
def _torch_checkpoint(setup: Setup, failed: str) -> Iterator[Any]:
    """Return ``torch.distributed.checkpoint``. All ranks raise an error if it fails on one in the body.

    The error begins with the text ``failed``.
    """
    import torch.distributed.checkpoint as dcp  # noqa: PLC0415 - importing it takes a while

    group, device = setup.everybody, setup.device
    together = reporting(group, device, "checkpoint") if is_distributed() else nullcontext()
    with together, devices.on(device), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        try:
            yield dcp
        except dcp.api.CheckpointException as error:
            reasons = {global_ranks(group)[each]: str(reason) for each, (reason, _) in error.failures.items()}
            raise ConfigurationError(f"{failed}: {text_by_rank(reasons)}") from error


@contextmanager
def _prefixed(failed: str) -> Iterator[None]:
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


def _planner(dcp: Any) -> Any:
    """Return a planner that reads plain data only, as ``torch.load(weights_only=True)`` does."""

    class PlainData(dcp.DefaultLoadPlanner):  # type: ignore[misc]
        def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
            torch.load(value, weights_only=True)  # raises an error if there is anything else
            value.seek(0)
            super().load_bytes(read_item, value)

    return PlainData()


def _pointer_in(folder: Path) -> dict[str, Any]:
    """Return what :func:`save` has written last, when all else was complete."""
    if not (folder / _POINTER).exists():
        raise ConfigurationError("it contains no checkpoint: pass a folder that tritoncomm.checkpoint.save() wrote")
    with _prefixed(f"{folder / _POINTER} cannot be loaded"):
        pointer: dict[str, Any] = json.loads((folder / _POINTER).read_text())
        return pointer | {"data": pointer["data"], "files": dict(pointer["files"])}


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
        name: Its key in the dict that ``dcp.save`` got, to load from a checkpoint of several optimizers. Default: None.

    Raises:
        ConfigurationError: ``optimizer`` is not wrapped, or there is no such checkpoint, or state in it.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        checkpoint_id: str | Path | None = None,
        *,
        storage_reader: Any = None,
        name: str | None = None,
    ) -> None:
        self.optimizer = _sparse(optimizer)
        self._saved: Saved | None = None
        if checkpoint_id is not None or storage_reader is not None:
            where = storage_reader if checkpoint_id is None else checkpoint_id
            self._saved = Saved.by(storage_reader or _reader(where), where, name)

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's state. ``dcp.save`` writes it, and ``dcp.load`` replaces its content.

        Raises:
            RuntimeError: This is between two exchanges of updates, and nothing says that a checkpoint is loaded.
            ConfigurationError: No load could read the state of this rank.
            ConfigMismatchError: No load could read that of another rank.
        """
        if self._saved is not None:
            return _rooms(self.optimizer, self._saved)
        local_steps = setup_of(self.optimizer).local
        if local_steps is not None and local_steps.taken:
            raise RuntimeError(
                f"{local_steps.taken} local steps were not exchanged: call merge() before you save with "
                "torch.distributed.checkpoint, or save with tritoncomm.checkpoint.save(), which does"
            )
        setup = setup_of(self.optimizer)
        with agree.propagate_errors(setup.everybody, setup.device):
            setup.known.check_kept()  # as in save()
        with agree.propagate_errors(setup.everybody, setup.device):
            content = _content(self.optimizer)
        agree.compare({"state": "saved"}, setup.everybody, setup.device)
        for tensors in content.values():
            if isinstance(tensors, dict):  # dcp.load may read into them before all ranks have agreed to load
                tensors |= {name: each.clone() for name, each in tensors.items()}
        return content

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load this rank's state, for ``dcp.load``. If a rank cannot load its state, nothing changes on any rank."""
        optimizer, state = self.optimizer, _read(self.optimizer, self._saved, state_dict)
        # set_optimizer_state_dict loads the state of the optimizer, before or after this.
        inner = original_class(optimizer).state_dict(optimizer)
        optimizer.load_state_dict(inner | {"tritoncomm": state["tritoncomm"]})
        local_steps = setup_of(optimizer).local
        if local_steps is not None:
            local_steps.load_later(state["tritoncomm"]["local"], state["state"])


def _parameters(optimizer: SparseOptimizer) -> list[torch.Tensor]:
    """Return all parameters of ``optimizer``, in their order."""
    return [parameter for parameter, _ in named_parameters(optimizer)]


def _held(optimizer: SparseOptimizer) -> Held:
    """Return what this rank holds of the model."""
    return Held.here(setup_of(optimizer).scope.parameters, optimizer.process_group)


def _content(optimizer: SparseOptimizer, *, whole: bool = False) -> dict[str, Any]:
    """Return what is saved of this rank: with ``whole``, the state of the optimizer, too."""
    setup, held, state = setup_of(optimizer), _held(optimizer), optimizer.state_dict()
    exchanged = state.pop("tritoncomm")
    if setup.local is not None:
        exchanged = exchange_state.agreed(exchanged, setup.local)
    own = numbers_of_own(setup)
    inner = {number: each for number, each in states_of(state).items() if whole or number in own}
    parameters = setup.scope.parameters
    sharded = [number for number, each in enumerate(_parameters(optimizer)) if hasattr(each, "device_mesh")]
    rest, replica, common = split(exchanged, inner, own, sharded, held)
    rest["optimizer"] = {key: value for key, value in state.items() if whole and key != "state"}
    names = key_of_replica(parameters), key_of_common(setup.everybody)
    return {held.key: packed(rest), names[0]: replica, names[1]: common}


def _rooms(optimizer: SparseOptimizer, saved: Saved) -> dict[str, Any]:
    """Return zeros for what this rank reads of the checkpoint that has ``saved``."""
    return saved.rooms(_held(optimizer), setup_of(optimizer).scope.parameters, _parameters(optimizer))


def _read(optimizer: SparseOptimizer, saved: Saved | None, content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state of this rank, for ``load_state_dict()``. All ranks call this together.

    Args:
        optimizer: The wrapped optimizer.
        saved: What the checkpoint has. None if the same ranks with the same sharding have saved it.
        content: What :func:`_rooms` has returned, or without ``saved`` :func:`_content`, as it was read.
    """
    setup, held = setup_of(optimizer), _held(optimizer)
    group, device = setup.everybody, setup.device
    with agree.propagate_errors(group, device):
        rests = [unpacked(value) for value in content.values() if isinstance(value, bytes)]
        for each in rests:
            exchange_state.check_schema(each)
        rest = next((each for each in rests if each["held"] == list(held)), None)
    # All ranks or none, because ranks with the same shards continue with the same state of the method.
    if agree.differences({"has its own state": rest is not None}, group, device):
        rest = None
    with agree.propagate_errors(group, device):
        if rest is not None:
            parameters = setup.scope.parameters
            replica = key_of_replica(parameters) if saved is None else saved.replicas[saved.source(held)]
            tensors = {**content[replica], **content[key_of_common(group) if saved is None else saved.common]}
            try:
                state = restored(rest, tensors, _parameters(optimizer), as_before=True)
            except KeyError as error:
                raise ConfigurationError(f"this optimizer has no state to read {error} into: {HINT}") from error
        elif saved is not None:
            state = saved.resharded(rests, content, held, _parameters(optimizer))
        else:
            raise ConfigurationError(f"this checkpoint was saved with another sharding: {HINT}")
        inner, others, *_ = (state.pop(field) for field in ("inner", "optimizer", "held", "sharded"))
        keys = keys_of(others) if others else range(len(_parameters(optimizer)))
        return {**others, "state": {keys[number]: each for number, each in inner.items()}, "tritoncomm": state}
