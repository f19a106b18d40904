"""Checkpoints of what every rank owes: files of our own, for any number of workers, or a part of PyTorch's.

Residuals differ between ranks, so that saving the optimizer's state on rank 0 alone loses all the others'.
"""

from __future__ import annotations

import io
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tritoncomm.errors import ConfigurationError
from tritoncomm.optim import SparseOptimizer
from tritoncomm.scheduler.process_group import is_distributed
from tritoncomm.step import setup_checks, state_format
from tritoncomm.step.state_format import reshard

__all__ = ["ResidualState", "load", "reshard", "save"]


def save(optimizer: SparseOptimizer, folder: str | Path) -> None:
    """Write ``rank-r-of-P.pt`` of every rank into ``folder``, which all ranks must be able to read later.

    Each holds the whole state of the wrapped optimizer and what its rank owes. A file is complete or not there, and
    says of which save it is. All ranks call this; it returns when all have written. Take a new folder each time: a save
    that is cut short leaves files of two saves in an old one, which :func:`load` refuses.
    """
    folder = Path(folder)
    group = optimizer.process_group
    state = optimizer.state_dict()
    rank, size = state["tritoncomm"]["rank"], state["tritoncomm"]["world_size"]
    mark: dict[str, Any] = {"id": secrets.token_hex(8), "optimizer": type(optimizer.optimizer).__name__}
    if is_distributed():
        mark["id"] = setup_checks.gather(mark, group)[0]["id"]
    mark["checksum"] = state_format.checksum(_inner(state))
    file = _file(folder, rank, size)
    with setup_checks.propagate_errors(group):
        try:
            folder.mkdir(parents=True, exist_ok=True)
            unfinished = file.with_suffix(".unfinished")
            torch.save(state | {"saved": mark}, unfinished)
            unfinished.replace(file)
        except Exception as error:  # torch.save raises RuntimeError when the disk is full
            raise ConfigurationError(f"{file} cannot be written: {error}") from error
    if is_distributed():
        setup_checks.compare({"checkpoint": mark["id"]}, group)
    if rank == 0:  # of another number of ranks, from before
        for other in folder.glob("rank-*-of-*.pt"):
            if other.stem.rpartition("-of-")[2] != str(size):
                other.unlink(missing_ok=True)


def load(optimizer: SparseOptimizer, folder: str | Path) -> None:
    """Load what :func:`save` wrote into ``folder``, by as many ranks or another number of them. All ranks call this.

    With another number of ranks, the pending update ``sum(residual) / world_size`` stays what it was and methods learn
    their thresholds and partitions anew. Raises :class:`~tritoncomm.ConfigurationError`, which names the file and the
    reason, on a rank that cannot read what it needs, and :class:`~tritoncomm.ConfigMismatchError` on the others;
    nothing has changed then on any rank.
    """
    folder = Path(folder)
    group = optimizer.process_group
    rank, size = (dist.get_rank(group), dist.get_world_size(group)) if is_distributed() else (0, 1)
    with setup_checks.propagate_errors(group):
        saved_by = _saved_by(folder)
        if saved_by == size:
            file = _file(folder, rank, size)
            state = _read(file)
        else:  # a rank needs the states of those whose residuals it gets, and all have to fit together
            file = folder
            state = _resharded([_read(_file(folder, r, saved_by)) for r in range(saved_by)], folder, rank, size)
        mark, name = state.pop("saved"), type(optimizer.optimizer).__name__
        with _named(file):
            if mark["optimizer"] != name:
                raise ConfigurationError(f"it was written for {mark['optimizer']}, this optimizer is {name}")
            optimizer.loadable(state)
    if is_distributed():
        setup_checks.compare({"checkpoint, of one save": mark["id"]}, group)
    optimizer.load_state_dict(state)


def _inner(state: Mapping[str, Any]) -> dict[str, Any]:
    """The wrapped optimizer's part."""
    return {key: value for key, value in state.items() if key not in ("tritoncomm", "saved")}


def _file(folder: Path, rank: int, size: int) -> Path:
    return folder / f"rank-{rank}-of-{size}.pt"


def _saved_by(folder: Path) -> int:
    sizes = sorted({file.stem.rpartition("-of-")[2] for file in folder.glob("rank-*-of-*.pt")})
    if len(sizes) != 1 or not sizes[0].isdigit():
        found = "no checkpoint" if not sizes else f"checkpoints of {' and of '.join(sizes)} ranks"
        raise ConfigurationError(
            f"{folder} holds {found}: give the folder of one that tritoncomm.checkpoint.save() wrote"
        )
    return int(sizes[0])


def _resharded(states: list[dict[str, Any]], folder: Path, rank: int, size: int) -> dict[str, Any]:
    """What ``rank`` of ``size`` takes from the ``states`` of another number of ranks."""
    if len({state["saved"]["id"] for state in states}) > 1:
        raise ConfigurationError(f"{folder} holds files of several saves: one was cut short")
    with _named(folder):
        return states[0] | {"tritoncomm": reshard([state["tritoncomm"] for state in states], size)[rank]}


@contextmanager
def _named(file: Path) -> Iterator[None]:
    """Say which file it is that does not fit; a damaged one fails in many ways."""
    try:
        yield
    except Exception as error:
        raise ConfigurationError(f"{file} cannot be loaded: {error}") from error


def _read(file: Path) -> dict[str, Any]:
    with _named(file):
        state: dict[str, Any] = torch.load(file, weights_only=True, map_location="cpu")
        _check(state)
    return state


def _check(state: Any) -> None:
    if not (isinstance(state, dict) and isinstance(state.get("tritoncomm"), dict)):
        raise ConfigurationError("it is no state of a wrapped optimizer")
    state_format.check(state["tritoncomm"])
    if state_format.checksum(_inner(state)) != state["saved"]["checksum"]:
        raise ConfigurationError("it is corrupt: the checksum of the optimizer's state does not fit")


class ResidualState:
    """What the ranks owe, for ``torch.distributed.checkpoint``, beside ``get_optimizer_state_dict``.

    ``dcp.save({"model": ..., "residuals": ResidualState(optimizer)}, checkpoint_id=path)``, and the same with
    ``dcp.load``, by as many ranks: it would take one rank's tensors for everybody's, so that every rank's are kept
    under its number. For another number of ranks use :func:`save` and :func:`load`, or ``optimizer.flush()`` first,
    after which nothing is owed.
    """

    def __init__(self, optimizer: SparseOptimizer) -> None:
        self.optimizer = optimizer

    def state_dict(self) -> dict[str, Any]:
        """For ``dcp.save``; and for ``dcp.load``, which fills in what it finds."""
        ours = self.optimizer.state_dict()["tritoncomm"]
        content = io.BytesIO()
        torch.save(ours, content)
        return {f"rank {ours['rank']} of {ours['world_size']}": content.getvalue()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """For ``dcp.load``. All ranks load together and only if all can."""
        (content,) = state_dict.values()
        ours = torch.load(io.BytesIO(content), weights_only=True, map_location="cpu")
        # The optimizer's own state is loaded by set_optimizer_state_dict, before or after.
        self.optimizer.load_state_dict(self.optimizer.optimizer.state_dict() | {"tritoncomm": ours})
