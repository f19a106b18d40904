"""Checkpoints in a folder: killed saves, damaged files, every method, and other nodes or numbers of ranks."""

from __future__ import annotations

import copy
import math
import os
import re
import signal
import sys
from collections.abc import Callable
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import tritoncomm
from models import adamw, equal, exact, flat, residual, same, tiny, total, train
from torch import nn
from tritoncomm import ConfigMismatchError, ConfigurationError, PeerLostError, checkpoint
from tritoncomm.step.saved import state as exchange_state

from baselines import DGC
from depth import trials
from ranks import POOL, ranks

REFUSED = (ConfigurationError, ConfigMismatchError)


# Where a save is killed: the rank, and how far it is with what it does in the folder. Rank 0 has written its data, or
# the new checkpoint.json under another name, or this one, or has begun to remove the old data. Rank 1 has not written
# its data yet, or has.
EVERYWHERE = {0: (0.0, 0.25, 0.5, 0.625, 0.75, 0.875), 1: (0.0, 0.3, 0.6, 0.9)}
PARTS = trials({0: (0.25, 0.625, 0.75, 0.875), 1: (0.3, 0.9)}, deep=EVERYWHERE)
PLACES = [(rank, part) for rank, parts in PARTS.items() for part in parts]


def digest(optimizer: tritoncomm.SparseOptimizer) -> str:
    """Return a digest of what a checkpoint holds."""
    state = optimizer.state_dict()
    return str(exchange_state.checksum({"state": state["state"], "residuals": state["tritoncomm"]["residuals"]}))


def digests_of(folder: str, rank: int) -> Path:
    """Return the file beside ``folder`` that has the digests of what it may hold."""
    return Path(folder).parent / f"digests of {rank} in {Path(folder).name}"


def killed(rank: int, world_size: int, folder: str, at: int, share: float) -> None:
    """Save into a new folder twice, and then once more, in which rank ``at`` is killed. Files have the digests."""
    model = tiny()
    optimizer = exact(adamw(model))
    digests, calls, limit = [], [], math.inf

    def watch(event: str, args: tuple) -> None:
        if any(isinstance(each, str | os.PathLike) and str(each).startswith(folder) for each in args):
            calls.append(event)
            if len(calls) > limit:
                os.kill(os.getpid(), signal.SIGKILL)

    if rank == at:  # no process can take it out again
        sys.addaudithook(watch)
    for step in range(3):
        train(model, optimizer, rank, [step])
        digests.append(digest(optimizer))
        if step == 2:
            digests_of(folder, rank).write_text("\n".join(digests[1:]))
            limit = share * len(calls)
        calls.clear()
        with nullcontext() if step < 2 else pytest.raises(PeerLostError):
            checkpoint.save(optimizer, folder)


def left_of_kills(rank: int, world_size: int, folder: str) -> None:
    """Load what each kill has left: the old state or the new one, of all ranks. Then save again."""
    found = []
    for place in range(len(PLACES)):
        own = Path(folder, str(place))
        optimizer = exact(adamw(tiny()))
        checkpoint.load(optimizer, own)
        found.append(digests_of(str(own), rank).read_text().split().index(digest(optimizer)))
        checkpoint.save(optimizer, own)
        dist.barrier()  # rank 0 removes what is left of earlier saves
        assert sorted(file.name.split("-")[0] for file in own.iterdir()) == ["checkpoint.json", "data"]
    assert same(found)
    assert set(found) == {0, 1}, "no kill came before the end of a save, or none after it"


def test_killed_saves(tmp_path):
    """A rank is killed at some places of a save into a used folder, which then has the old state, or the new one."""
    for place, (at, share) in enumerate(PLACES):
        POOL.run(killed, 2, {"folder": str(tmp_path / str(place)), "at": at, "share": share}, 60.0, lost=(at,))
    POOL.run(left_of_kills, 2, {"folder": str(tmp_path)}, 60.0, ())


@ranks(4)
def test_sizes(rank, world_size, tmp_path):
    """What four ranks save is about one state of Adam, and the residuals of all ranks."""
    model = nn.Linear(300, 300, bias=False)
    optimizer = exact(adamw(model), broadcast_parameters=True)
    for step in range(2):
        optimizer.zero_grad()
        model(torch.full((1, 300), 1.0 + rank + step)).sum().backward()
        optimizer.step()
    checkpoint.save(optimizer, tmp_path)
    ages = sum(last is not None for last in optimizer.state_dict()["tritoncomm"]["last"])
    needed = 4 * model.weight.numel() * (2 + ages + world_size)
    written = sum(file.stat().st_size for file in tmp_path.rglob("*") if file.is_file())
    assert needed < written < 1.1 * needed


# Other nodes between one run and the next: ranks, and ranks of a node or None for one node, in the order of the runs.
CHAINS = [[(4, 2), (2, None), (4, 2)], [(4, 2), (3, None), (4, 2)], [(4, 2), (4, None), (4, 2)]]


def in_nodes(rank: int, world_size: int, folder: str, algo: str, ranks_per_node: int | None, number: int) -> None:
    """Take up the run where the one before has ended, train, and save. At last nothing has been lost on the way.

    Numbers are exact: gradients are multiples of 12, of which 3 and 4 ranks take a mean. The learning rate is 1, so
    that parameters become minus the sum of all updates. The pending update is that of the save in both ways of loading.
    """
    model = nn.Linear(60, 1, bias=False)
    nn.init.zeros_(model.weight)
    node = None if ranks_per_node is None else dist.new_subgroups(ranks_per_node)[0]
    recipe = DGC(density=0.1, momentum=0.0) if algo == "dgc" else algo
    inner = torch.optim.SGD(model.parameters(), lr=1.0)
    fields = {} if algo == "dgc" else {"density": 0.1}
    optimizer = exact(inner, recipe, warmup_steps=2, node_group=node, **fields)

    def pending():
        return total(residual(optimizer)) / world_size

    own, given, first = Path(folder, str(number)), torch.zeros(60), 4 * number
    if number:
        last = Path(folder, str(number - 1))
        before, given, weights = torch.load(last / "known.pt")
        model.load_state_dict(weights)
        checkpoint.load(optimizer, last)
        assert torch.equal(pending(), before)
        assert before.any()
        optimizer.load_state_dict(optimizer.state_dict(), residuals="reset")
        assert not pending().any()
        residuals = checkpoint.ResidualState(optimizer, last / "dcp")
        dcp.load({"residuals": residuals}, checkpoint_id=last / "dcp")
        assert torch.equal(pending(), before)
    for step in range(first, first + 4):
        gradient = 12.0 * torch.randint(-8, 9, (60,), generator=torch.Generator().manual_seed(100 * step + rank))
        optimizer.zero_grad()
        model(gradient).sum().backward()
        optimizer.step()
        given += total(gradient) / world_size
    assert optimizer.metrics()["steps"] == first + 4
    assert optimizer.metrics()["density_delivered"] < 0.6  # the dense warm-up is not repeated
    assert equal(model)
    checkpoint.save(optimizer, own)
    dcp.save({"residuals": checkpoint.ResidualState(optimizer)}, checkpoint_id=own / "dcp")
    known = pending(), given, model.state_dict()
    if rank == 0:
        torch.save(known, own / "known.pt")
    optimizer.flush()
    assert torch.equal(model.weight[0], -given)


@pytest.mark.parametrize(("algo", "chain"), [*zip(["oktopk", "exdyna", "dgc"], CHAINS, strict=True)])
def test_resume_with_other_nodes(algo, chain, tmp_path):
    """Two nodes become one of two, three or four ranks, and two again. The pending update stays the same, exactly."""
    for number, (world_size, per_node) in enumerate(chain):
        run = {"folder": str(tmp_path), "algo": algo, "ranks_per_node": per_node, "number": number}
        POOL.run(in_nodes, world_size, run, 60.0, ())


class Attempts:
    """A saved run, of which loading must fail in different ways, and change nothing."""

    def __init__(self, rank: int, folder: Path) -> None:
        self.rank, self.folder, self.model = rank, folder, tiny()
        self.optimizer = exact(adamw(self.model))
        train(self.model, self.optimizer, rank, range(3))
        checkpoint.save(self.optimizer, folder)
        (self.data,) = folder.glob("data-*")
        train(self.model, self.optimizer, rank, range(3, 5))

    def refused(self, named: str, optimizer: tritoncomm.SparseOptimizer | None = None, folder: str = ".") -> None:
        """Load, with another ``optimizer`` or from another ``folder`` if there is one. It fails on all ranks."""
        own = optimizer or self.optimizer
        dist.barrier()
        before = flat(self.model), residual(own), str(own.state_dict()["state"])
        with pytest.raises(REFUSED, match=named):
            checkpoint.load(own, self.folder / folder)
        assert torch.equal(flat(self.model), before[0])
        assert torch.equal(residual(own), before[1])
        assert str(own.state_dict()["state"]) == before[2]
        dist.barrier()

    @contextmanager
    def changed(self, name: str, change: Callable[[bytes], bytes | None]):
        """Let a file be what ``change`` makes of it, or be missing if that is None."""
        file = self.folder / name
        content = file.read_bytes()
        dist.barrier()
        found = change(content)
        if self.rank == 1:
            file.unlink() if found is None else file.write_bytes(found)
        yield
        if self.rank == 1:
            file.write_bytes(content)
        dist.barrier()


DAMAGES = {"truncated": lambda content: content[: len(content) // 2], "missing": lambda content: None}


@ranks(3)
@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_files(rank, world_size, damage, tmp_path):
    """They are rejected with their names."""
    attempts = Attempts(rank, tmp_path)
    names = sorted(f"{attempts.data.name}/{file.name}" for file in attempts.data.iterdir())
    assert len(names) >= world_size
    for name in names:
        with attempts.changed(name, DAMAGES[damage]):
            attempts.refused(f"{re.escape(name)} cannot be loaded: .*(checksum does not match|No such file)")
    with attempts.changed("checkpoint.json", DAMAGES[damage]):
        said = "contains no checkpoint: pass a folder" if damage == "missing" else r"checkpoint\.json cannot be loaded"
        attempts.refused(said)
    checkpoint.load(attempts.optimizer, tmp_path)


@ranks(3)
def test_foreign_checkpoints(rank, world_size, tmp_path):
    """One of another model or schema is rejected, and so is what is no plain data."""
    attempts = Attempts(rank, tmp_path)
    attempts.refused(
        "a model with other parameters|groups of", exact(adamw(nn.Linear(6, 20)), broadcast_parameters=True)
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exchange_state, "SCHEMA", 4)
        checkpoint.save(attempts.optimizer, tmp_path / "old")
    attempts.refused(r"has schema=4, .* reads schema=\d", folder="old")
    content = checkpoint._content

    def with_an_object(*args, **fields):
        found = content(*args, **fields)
        return {key: tmp_path if isinstance(value, bytes) else value for key, value in found.items()}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint, "_content", with_an_object)
        checkpoint.save(attempts.optimizer, tmp_path / "objects")
    attempts.refused(r"weights_only|Weights only", folder="objects")


class FailingLoad(torch.optim.AdamW):
    """AdamW that fails after it has loaded a state, if ``fails`` is set."""

    fails = False

    def load_state_dict(self, state_dict):
        """Load it, and fail."""
        super().load_state_dict(state_dict)
        fail_if(self.fails)


def fail_if(fails: bool) -> None:
    """Fail as what reads a file may."""
    if fails:
        raise OSError("disk lost")


@ranks(2)
@pytest.mark.parametrize("where", ["in a hook", "in the class"])
def test_load_that_fails_on_one_rank(rank, world_size, where):
    """A hook of the user, or the class, may raise on one rank: all raise, and nothing has changed on any."""
    model = tiny()
    optimizer = exact(FailingLoad(model.parameters(), lr=0.01))
    train(model, optimizer, rank, range(3))
    state = copy.deepcopy(optimizer.state_dict())
    train(model, optimizer, rank, range(3, 5))
    before = digest(optimizer)
    optimizer.fails = rank == 1 and where == "in the class"
    fails = rank == 1 and where == "in a hook"
    handle = optimizer.register_load_state_dict_pre_hook(lambda *_: fail_if(fails))
    with pytest.raises(OSError if rank == 1 else ConfigMismatchError, match="disk lost"):
        optimizer.load_state_dict(state)
    assert digest(optimizer) == before
    handle.remove()
    optimizer.fails = False
    train(model, optimizer, rank, range(5, 7))
    assert equal(model)
