"""Checkpoints of the optimizer state and the residuals of all ranks.

Residuals differ between ranks. A checkpoint of the optimizer on rank 0 alone loses the residuals of all other ranks.
:func:`save` and :func:`load` use a file per rank, and support a change of the world size. :class:`ResidualState` is a
part of a checkpoint of ``torch.distributed.checkpoint``. :mod:`tritoncomm.step.checkpoint_format` defines the state of
one rank.
"""

from __future__ import annotations

import io
import json
import logging
import secrets
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tritoncomm.errors import ConfigurationError
from tritoncomm.optim import SparseOptimizer
from tritoncomm.scheduler.process_group import is_distributed
from tritoncomm.step import checkpoint_format, setup_checks
from tritoncomm.step.checkpoint_format import reshard

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
        ConfigMismatchError: Another rank cannot write its file, or has not completed the same updates.
        RuntimeError: ``optimizer.synchronize()`` was called without ``optimizer.step()``, or an error has stopped an
            update.
    """
    optimizer = _one_group(_sparse(optimizer))
    folder = Path(folder)
    group, device = optimizer.process_group, optimizer._device  # noqa: SLF001 - of the exchange, no setting
    with setup_checks.propagate_errors(group, device):
        state = optimizer.state_dict()
    if is_distributed():
        setup_checks.compare({setup_checks.UPDATES: optimizer._optimizer_step.updates}, group, device)  # noqa: SLF001
    rank, size = state["tritoncomm"]["rank"], state["tritoncomm"]["world_size"]
    mark: dict[str, Any] = {"id": secrets.token_hex(8), "optimizer": type(optimizer.optimizer).__name__}
    if is_distributed():
        mark["id"] = setup_checks.gather(mark, group, device)[0]["id"]
    mark["checksum"] = checkpoint_format.checksum(_original_state(state))
    file = _file(folder, rank, size)
    with setup_checks.propagate_errors(group, device):
        _check_owner(optimizer, folder, file)
    if is_distributed():
        setup_checks.compare({"folder": "is free"}, group, device)  # before a rank writes
    with setup_checks.propagate_errors(group, device):
        try:
            folder.mkdir(parents=True, exist_ok=True)
            unfinished = file.with_suffix(".unfinished")
            torch.save(state | {"saved": mark}, unfinished)
            unfinished.replace(file)
            _saved_into[folder.resolve()] = weakref.ref(optimizer)
        except Exception as error:  # torch.save raises RuntimeError when the disk is full
            raise ConfigurationError(f"{file} cannot be written: {error}") from error
    if is_distributed():
        setup_checks.compare({"checkpoint": mark["id"]}, group, device)
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
    if (
        other is not None
        and file.exists()
        and not (setup_checks.parameter_ids(other) & setup_checks.parameter_ids(optimizer))
    ):
        logger.warning(
            "%s held the state of another optimizer of this process, which is overwritten: save each optimizer into a "
            "folder of its own",
            folder,
        )
    ranks = dist.get_process_group_ranks(optimizer.process_group or dist.group.WORLD) if is_distributed() else [0]
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

    With the same number of ranks, training continues bit-identically. With another number, the pending update
    ``sum(residual) / world_size`` is kept, and methods determine thresholds and partitions from scratch. If a rank
    cannot load its state, nothing changes on any rank.

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
    with setup_checks.propagate_errors(group, device):
        saved_by = _saved_by(folder)
        if saved_by == size:
            file = _file(folder, rank, size)
            state = _read(file)
        else:  # every rank reads all states, to check that they belong together
            file = folder
            state = _resharded([_read(_file(folder, r, saved_by)) for r in range(saved_by)], folder, rank, size)
        mark, name = state.pop("saved"), type(optimizer.optimizer).__name__
        with _name_in_errors(file):
            if mark["optimizer"] != name:
                raise ConfigurationError(f"it was written for {mark['optimizer']}, this optimizer is {name}")
            optimizer.loadable(state)
    if is_distributed():
        setup_checks.compare({"id of the checkpoint": mark["id"]}, group, device)
    return state


def _one_group(optimizer: SparseOptimizer) -> SparseOptimizer:
    """Return ``optimizer``. Raise if several groups of ranks would write the same files."""
    if optimizer.has_shards:
        raise ConfigurationError(
            "the parameters are sharded, and the ranks of several groups would write the same files: save with "
            "torch.distributed.checkpoint, see tritoncomm.checkpoint.ResidualState"
        )
    return optimizer


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
    checkpoint_format.check(state["tritoncomm"])
    if checkpoint_format.checksum(_original_state(state)) != state["saved"]["checksum"]:
        raise ConfigurationError("it is corrupt: the checksum of the optimizer's state does not match")


class ResidualState:
    """The residuals and method states of all ranks, as a part of a ``torch.distributed.checkpoint`` checkpoint.

    Use it next to ``get_optimizer_state_dict``, which provides the state of the original optimizer::

        dcp.save({"model": ..., "residuals": ResidualState(optimizer)}, checkpoint_id=path)

    and the same with ``dcp.load``. ``torch.distributed.checkpoint`` would treat the tensors of one rank as those of all
    ranks. The state of each rank is therefore stored under its rank, and must be loaded with the same number of ranks.
    For another number, use :func:`save` and :func:`load`, or call ``optimizer.flush()`` before saving, after which
    residuals are zero.

    Args:
        optimizer: The optimizer that :func:`tritoncomm.wrap` returned, or a trainer's wrapper of it.

    Raises:
        ConfigurationError: ``optimizer`` is not wrapped.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = _sparse(optimizer)

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's state. ``dcp.save`` writes it, and ``dcp.load`` replaces its content."""
        state = self.optimizer.state_dict()["tritoncomm"]
        content = io.BytesIO()
        torch.save(state, content)
        # The rank among all, because shards of one model are exchanged in several groups.
        rank, size = (dist.get_rank(), dist.get_world_size()) if is_distributed() else (0, 1)
        return {f"rank {rank} of {size}": content.getvalue()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load this rank's state, for ``dcp.load``. If a rank cannot load its state, nothing changes on any rank."""
        (content,) = state_dict.values()
        state = torch.load(io.BytesIO(content), weights_only=True, map_location="cpu")
        # set_optimizer_state_dict loads the state of the original optimizer, before or after this.
        self.optimizer.load_state_dict(self.optimizer.optimizer.state_dict() | {"tritoncomm": state})
