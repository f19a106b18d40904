"""Worker processes of tests/distributed/test_checkpoints.py."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import tritoncomm
from helpers import flat, loss_of, residual, same_everywhere, tiny_model, total, train
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from tritoncomm import ConfigMismatchError, ConfigurationError, checkpoint
from tritoncomm.step.saved import state as exchange_state

import laws
from baselines import DGC
from recipes import possible

MAKERS = {
    "sgd": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "plain": partial(torch.optim.SGD, lr=0.1),
    "adamw": partial(torch.optim.AdamW, lr=0.01),
}


def wrap(model, recipe="oktopk", make="adamw", **fields) -> tritoncomm.SparseOptimizer:
    """Return a wrapped optimizer that sends no tensor dense."""
    return tritoncomm.wrap(MAKERS[make](model.parameters()), recipe, dense_below=0, **fields)


def names_of_runs(world_size: int, *, every: bool) -> list[str]:
    """Return the recipes to save and resume: those whose states have other fields, or ``every`` recipe.

    Neither the static form nor the format of values has a state of its own. Two formats that ``wrap`` chooses are there
    all the same.
    """
    recipes = possible(0.15, world_size).items()
    names = [name for name, recipe in recipes if not hasattr(recipe, "tail") and not hasattr(recipe, "shapes")]
    alike = {name for name in names if "static" in name or "bit" in name} - {"oktopk-4bit", "warmup-8bit"}
    return [name for name in names if every or name not in alike]


def runs_of(world_size: int, names: list[str]):
    """Yield name, recipe and optimizer for a short run of each of ``names``."""
    for name in names:
        recipe = possible(0.15, world_size)[name]
        yield name, recipe, "plain" if "dgc" in name else "adamw"


def state_digest(model, optimizer) -> str:
    """Return a digest of the parameters, the residual and the method's state."""
    state = optimizer._tritoncomm.setup.vector.feedback.algorithm.state
    return exchange_state.checksum({"model": flat(model), "residual": residual(optimizer), "state": repr(state)})


def until_killed(rank: int, world_size: int, send, folder: str, names: list[str]) -> None:
    """Train five steps of each recipe, and save after three. Kill the process in the middle of the next step."""
    for name, recipe, make in runs_of(world_size, names):
        model = tiny_model()
        optimizer = wrap(model, recipe, make)
        train(model, optimizer, rank, range(3))
        checkpoint.save(optimizer, Path(folder) / name)
        if rank == 0:
            torch.save(model.state_dict(), Path(folder) / name / "model.pt")
        dist.barrier()
        train(model, optimizer, rank, range(3, 5))
        send((name, rank, state_digest(model, optimizer)))
    loss_of(model, rank, 5).backward()
    optimizer.synchronize()
    os.kill(os.getpid(), signal.SIGKILL)


def resumed(rank: int, world_size: int, send, folder: str, names: list[str]) -> None:
    """Load in new processes and train the remaining two steps."""
    for name, recipe, make in runs_of(world_size, names):
        model = tiny_model(seed=9)
        model.load_state_dict(torch.load(Path(folder) / name / "model.pt"))
        optimizer = wrap(model, recipe, make)
        checkpoint.load(optimizer, Path(folder) / name)
        train(model, optimizer, rank, range(3, 5))
        send((name, rank, state_digest(model, optimizer)))


def write(rank: int, world_size: int, send, folder: str, recipe: str) -> None:
    """Train, save, and send the pending update."""
    model = tiny_model()
    optimizer = wrap(model, recipe, "plain", density=0.1, warmup_steps=2)
    train(model, optimizer, rank, range(5))
    checkpoint.save(optimizer, folder)
    pending = total(residual(optimizer)) / world_size
    if rank == 0:
        torch.save(model.state_dict(), Path(folder) / "model.pt")
        send(pending.tolist())


def read(rank: int, world_size: int, send, folder: str, recipe: str) -> None:
    """Load with another world size and send the pending update. Training continues after the warm-up."""
    model = tiny_model()
    optimizer = wrap(model, recipe, "plain", density=0.1, warmup_steps=2)
    model.load_state_dict(torch.load(Path(folder) / "model.pt"))
    checkpoint.load(optimizer, folder)
    pending = total(residual(optimizer)) / world_size
    if rank == 0:
        send(pending.tolist())
    train(model, optimizer, rank, range(5, 8))
    assert (optimizer.metrics()["density_delivered"] < 0.6) == (world_size > 1)  # one worker delivers every entry
    assert same_everywhere(flat(model))


# Other nodes between one run and the next: ranks, and ranks of a node or None for one node, in the order of the runs.
CHAINS = [[(4, 2), (2, None), (4, 2)], [(4, 2), (3, None), (4, 2)], [(4, 2), (4, None), (4, 2)]]
METHODS_IN_NODES = ["oktopk", "exdyna", DGC(density=0.1, momentum=0.0)]
STEPS_IN_NODES = 4


class RunInNodes:
    """A run of one method whose numbers are exact: gradients are multiples of 12, of which 3 and 4 ranks take a mean.

    The learning rate is 1, so that parameters become minus the sum of all updates.
    """

    def __init__(self, recipe, ranks_per_node: int | None) -> None:
        self.model = nn.Linear(60, 1, bias=False)
        nn.init.zeros_(self.model.weight)
        fields = {} if isinstance(recipe, tritoncomm.Recipe) else {"density": 0.1}
        node = None if ranks_per_node is None else dist.new_subgroups(ranks_per_node)[0]
        optimizer = torch.optim.SGD(self.model.parameters(), lr=1.0)
        self.optimizer = tritoncomm.wrap(
            optimizer, recipe, dense_below=0, warmup_steps=2, broadcast_parameters=True, node_group=node, **fields
        )

    def load(self, folder: Path) -> list[list[float]]:
        """Load in both ways. Return the pending update after each of them."""
        self.model.load_state_dict(torch.load(folder / "model.pt"))
        checkpoint.load(self.optimizer, folder)
        found = self.pending()
        self.forget()
        path = folder / "dcp"
        dcp.load({"residuals": checkpoint.ResidualState(self.optimizer, path)}, checkpoint_id=path)
        return [found, self.pending()]

    def forget(self) -> None:
        """Set residuals to zero."""
        self.optimizer.load_state_dict(self.optimizer.state_dict(), residuals="reset")
        assert not any(self.pending())

    def save(self, folder: Path) -> None:
        """Save for both ways."""
        checkpoint.save(self.optimizer, folder)
        dcp.save({"residuals": checkpoint.ResidualState(self.optimizer)}, checkpoint_id=folder / "dcp")
        if dist.get_rank() == 0:
            torch.save(self.model.state_dict(), folder / "model.pt")
        dist.barrier()

    def pending(self) -> list[float]:
        """Return the mean of the residuals over the ranks."""
        return (total(residual(self.optimizer)) / dist.get_world_size()).tolist()

    def train(self, steps: range) -> torch.Tensor:
        """Take ``steps``. Return the sum of the means of their gradients."""
        given = torch.zeros(60)
        for step in steps:
            generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
            gradient = 12.0 * torch.randint(-8, 9, (60,), generator=generator)
            self.optimizer.zero_grad()
            self.model(gradient).sum().backward()
            self.optimizer.step()
            given += total(gradient) / dist.get_world_size()
        return given


def in_nodes(rank: int, world_size: int, send, folder: str, chains: list[int], number: int) -> None:
    """Take up the runs of some ``chains`` where the runs before ``number`` have ended, and train and save.

    The pending update is that of the save in both ways of loading. At last nothing has been lost on the way.
    """
    for chain, recipe in [(chain, recipe) for chain in chains for recipe in METHODS_IN_NODES]:
        run = RunInNodes(recipe, CHAINS[chain][number][1])
        own = Path(folder) / f"{recipe if isinstance(recipe, str) else recipe.name}-{chain}"
        known = own / f"known-{number - 1}.pt"
        before, given = torch.load(known) if known.exists() else ([], torch.zeros(60))
        if known.exists():
            assert any(before)
            assert run.load(own / str(number - 1)) == [before] * 2
        first = number * STEPS_IN_NODES
        given += run.train(range(first, first + STEPS_IN_NODES))
        metrics = run.optimizer.metrics()
        assert metrics["steps"] == first + STEPS_IN_NODES
        assert metrics["density_delivered"] < 0.6  # the dense warm-up is not repeated
        assert same_everywhere(flat(run.model))
        run.save(own / str(number))
        pending = run.pending()
        if rank == 0:
            torch.save((pending, given), own / f"known-{number}.pt")
        run.optimizer.flush()
        assert torch.equal(run.model.weight[0], -given), (recipe, chain)


class Attempts:
    """A saved run, of which loading must fail in different ways, and change nothing."""

    def __init__(self, rank: int, folder: str) -> None:
        self.rank, self.folder = rank, Path(folder)
        self.model = tiny_model()
        self.optimizer = wrap(self.model, density=0.1)
        train(self.model, self.optimizer, rank, range(3))
        checkpoint.save(self.optimizer, folder)
        (self.data,) = self.folder.glob("data-*")
        train(self.model, self.optimizer, rank, range(3, 5))

    def refused(self, named: str, **fields) -> None:
        """Assert that loading, with other ``fields`` of ``wrap`` if there are any, fails on all ranks."""
        dist.barrier()
        optimizer = wrap(tiny_model(), **{"density": 0.1} | fields) if fields else self.optimizer
        before = everything(self.model, optimizer)
        with pytest.raises((ConfigurationError, ConfigMismatchError), match=named):
            checkpoint.load(optimizer, self.folder)
        assert everything(self.model, optimizer) == before
        dist.barrier()

    @contextmanager
    def changed(self, name: str, change: Callable[[bytes], bytes | None]):
        """Let a file be what ``change`` makes of it, or be missing if that is None."""
        file = self.folder / name
        whole = file.read_bytes()
        dist.barrier()
        content = change(whole)
        if self.rank == 1:
            file.unlink() if content is None else file.write_bytes(content)
        yield
        dist.barrier()
        if self.rank == 1:
            file.write_bytes(whole)
        dist.barrier()


def everything(model: nn.Module, optimizer: tritoncomm.SparseOptimizer) -> tuple:
    """Return everything that loading could change."""
    return flat(model), residual(optimizer).tolist(), str(optimizer.state_dict()["state"])


def damaged(rank: int, world_size: int, send, folder: str) -> None:
    """A corrupt, truncated or missing file is rejected with its name, and nothing changes on any rank."""
    attempts = Attempts(rank, folder)
    before = everything(attempts.model, attempts.optimizer)
    for number in range(world_size):
        name = f"{attempts.data.name}/__{number}_0.distcp"
        changes: list[Callable[[bytes], bytes | None]] = [
            lambda whole: whole[: len(whole) // 2],
            lambda whole: whole[:-300] + bytes([whole[-300] ^ 1]) + whole[-299:],
            lambda whole: None,
        ]
        for change in changes:
            with attempts.changed(name, change):
                attempts.refused(rf"{name} cannot be loaded: .*(checksum does not match|No such file)")
    with attempts.changed(f"{attempts.data.name}/.metadata", lambda whole: whole[:-1]):
        attempts.refused(r"/\.metadata cannot be loaded")
    with attempts.changed("checkpoint.json", lambda whole: whole[:-1]):
        attempts.refused(r"checkpoint\.json cannot be loaded")
    with attempts.changed("checkpoint.json", lambda whole: None):
        attempts.refused("contains no checkpoint: pass a folder")
    assert everything(attempts.model, attempts.optimizer) == before
    checkpoint.load(attempts.optimizer, folder)
    assert everything(attempts.model, attempts.optimizer) != before


def foreign(rank: int, world_size: int, send, folder: str) -> None:
    """A checkpoint of another method, model, optimizer or schema is rejected, and so is what is no plain data."""
    attempts = Attempts(rank, folder)
    attempts.refused("recipe='oktopk', here it is 'exdyna': use the algo that it was saved with", recipe="exdyna")
    attempts.refused("written for AdamW, this optimizer is SGD", make="sgd")
    optimizer = wrap(nn.Linear(6, 20), density=0.1)
    with pytest.raises((ConfigurationError, ConfigMismatchError), match=r"a model with other parameters|groups of"):
        checkpoint.load(optimizer, folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exchange_state, "SCHEMA", 4)
        checkpoint.save(attempts.optimizer, Path(folder) / "old")
    with pytest.raises((ConfigurationError, ConfigMismatchError), match=r"has schema=4, .* reads schema=\d"):
        checkpoint.load(attempts.optimizer, Path(folder) / "old")
    content = checkpoint._RankState.content

    def with_an_object(self: checkpoint._RankState, **fields) -> dict:
        found = content(self, **fields)
        return {key: Path(folder) if isinstance(value, bytes) else value for key, value in found.items()}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint._RankState, "content", with_an_object)
        checkpoint.save(attempts.optimizer, Path(folder) / "objects")
    with pytest.raises((ConfigurationError, ConfigMismatchError), match=r"weights_only|Weights only"):
        checkpoint.load(attempts.optimizer, Path(folder) / "objects")


# Where a save is killed: the rank, and how far it is with what it does in the folder.
PLACES = [*((0, step / 8) for step in range(8)), (1, 0.0), (1, 0.6)]


def saved_digest(optimizer: tritoncomm.SparseOptimizer) -> str:
    """Return a digest of what a checkpoint holds."""
    state = optimizer.state_dict()
    return exchange_state.checksum({"state": state["state"], "residuals": state["tritoncomm"]["residuals"]})


def killed(rank: int, world_size: int, send, folder: str, place: int) -> None:
    """Save into a new folder twice, and then once more, in which one rank is killed at this ``place``."""
    model = tiny_model()
    optimizer = wrap(model, density=0.1)
    digests, calls = [], []
    at, share = PLACES[place]

    def watch(event: str, args: tuple) -> None:
        if any(isinstance(each, str | os.PathLike) and str(each).startswith(folder) for each in args):
            calls.append(event)
            if len(digests) == 3 and rank == at and len(calls) > share * count:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(watch)
    for step in range(3):
        train(model, optimizer, rank, range(step, step + 1))
        digests.append(saved_digest(optimizer))
        if step == 2:
            send((place, rank, digests[1:]))
        count, calls = len(calls), []
        checkpoint.save(optimizer, folder)
    raise AssertionError("not killed")


def left_of_kills(rank: int, world_size: int, send, folder: str, expected: dict[int, list[list[str]]]) -> None:
    """Load what each kill has left: the old state or the new one, of all ranks. Then save again."""
    found = []
    for place, digests in expected.items():
        own = Path(folder) / str(place)
        optimizer = wrap(tiny_model(), density=0.1)
        checkpoint.load(optimizer, own)
        found.append(digests[rank].index(saved_digest(optimizer)))
        checkpoint.save(optimizer, own)
        dist.barrier()  # rank 0 removes what is left of earlier saves
        assert sorted(file.name.split("-")[0] for file in own.iterdir()) == ["checkpoint.json", "data"]
    assert same_everywhere(found)
    assert set(found) == {0, 1}, "no kill came before the end of a save, or none after it"


def sizes(rank: int, world_size: int, send, folder: str) -> None:
    """What four ranks save is about one state of Adam, and the residuals of all ranks."""
    model = nn.Linear(300, 300, bias=False)
    optimizer = wrap(model, density=0.1)
    for step in range(2):
        optimizer.zero_grad()
        model(torch.full((1, 300), 1.0 + rank + step)).sum().backward()
        optimizer.step()
    checkpoint.save(optimizer, folder)
    ages = sum("last_delivered" in state for state in optimizer.state.values())
    needed = 4 * model.weight.numel() * (2 + ages + world_size)
    written = sum(file.stat().st_size for file in Path(folder).rglob("*") if file.is_file())
    assert needed < written < 1.1 * needed


def drifted(rank: int, world_size: int, send, folder: str) -> None:
    """A save refuses replicas of which one has another parameter, or another state, and names them."""
    model = tiny_model()
    optimizer = tritoncomm.wrap(MAKERS["adamw"](model.parameters()), model=model, density=0.1, dense_below=0)
    train(model, optimizer, rank, range(3))
    checkpoint.save(optimizer, folder)
    before = sorted(Path(folder).rglob("*"))
    state = optimizer.state[model[0].weight]
    for tensor, named in ((state["exp_avg_sq"], "exp_avg_sq of 0.weight"), (model[2].bias.data, "2.bias")):
        held = tensor.clone()
        if rank == 1:
            tensor.view(-1)[0] += 1
        said = rf"nothing was saved, because {named} .*differs between ranks: ranks \[0, 2\] have .*, rank 1 has"
        with pytest.raises(ConfigMismatchError, match=said):
            checkpoint.save(optimizer, folder)
        tensor.copy_(held)
        dist.barrier()
    assert sorted(Path(folder).rglob("*")) == before
    checkpoint.save(optimizer, folder)


def between_exchanges(rank: int, world_size: int, send, folder: str) -> None:
    """A job that is preempted between two exchanges saves, and the next one, of any size, has lost nothing."""
    model = tiny_model()
    optimizer = wrap(model, density=None, local_steps=4, updates_algo=tritoncomm.OkTopk(density=0.1))
    train(model, optimizer, rank, range(6))
    with pytest.raises(RuntimeError, match=r"2 local steps were not exchanged: call merge\(\)"):
        checkpoint.ResidualState(optimizer).state_dict()
    owed = total(
        residual(optimizer) + torch.cat([each.reshape(-1) for each in optimizer._tritoncomm.setup.local._deltas()])
    )
    anchors = torch.cat([each.detach().reshape(-1) for each in optimizer._tritoncomm.setup.local.anchors])
    checkpoint.save(optimizer, folder)
    assert optimizer.metrics()["steps_until_exchange"] == 4
    assert same_everywhere(flat(model))
    given = anchors - torch.cat([each.detach().reshape(-1) for each in optimizer._tritoncomm.setup.local.anchors])
    torch.testing.assert_close(world_size * given + total(residual(optimizer)), owed)
    pending = residual_mean(optimizer)
    if rank == 0:
        send((pending, flat(model)))


def taken_up(rank: int, world_size: int, send, folder: str) -> None:
    """Load what :func:`between_exchanges` has saved, and send the same."""
    model = tiny_model(seed=9)
    optimizer = wrap(model, density=None, local_steps=4, updates_algo=tritoncomm.OkTopk(density=0.1))
    checkpoint.load(optimizer, folder)
    state = optimizer._tritoncomm.setup.local._optimizers[0].state
    assert all(own["exp_avg"].any() for own in state.values() if "exp_avg" in own)
    pending = residual_mean(optimizer)
    if rank == 0:
        send((pending, flat(model)))
    train(model, optimizer, rank, range(6, 10))
    assert same_everywhere(flat(model))


def residual_mean(optimizer: tritoncomm.SparseOptimizer) -> list[float]:
    """Return the pending update."""
    return (total(residual(optimizer)) / dist.get_world_size()).tolist()


def all_used() -> nn.Module:
    """Return a model without unused parameter: torch cannot load the state of one, which has none."""
    model = tiny_model()
    del model.unused
    return model


def distributed_checkpoint(rank: int, world_size: int, send, folder: str) -> None:
    """torch.distributed.checkpoint restores the residual of every rank, and the run continues bit for bit."""
    for make in MAKERS:
        straight, stopped = all_used(), all_used()
        first, second = wrap(straight, make=make, density=0.1), wrap(stopped, make=make, density=0.1)
        train(straight, first, rank, range(6))
        train(stopped, second, rank, range(4))
        second.zero_grad()
        content = {
            "model": stopped.state_dict(),
            "optimizer": get_optimizer_state_dict(stopped, second),
            "residuals": checkpoint.ResidualState(second),
        }
        path = f"{folder}/{make}"
        dcp.save(content, checkpoint_id=path)
        resumed = all_used()
        third = wrap(resumed, make=make, density=0.1)
        content = {
            "model": resumed.state_dict(),
            "optimizer": get_optimizer_state_dict(resumed, third),
            "residuals": checkpoint.ResidualState(third),
        }
        dcp.load(content, checkpoint_id=path)
        resumed.load_state_dict(content["model"])
        set_optimizer_state_dict(resumed, third, content["optimizer"])
        assert laws.same_bits(residual(third), residual(second)), make
        train(resumed, third, rank, range(4, 6))
        assert flat(resumed) == flat(straight), make
        assert laws.same_bits(residual(third), residual(first)), make


def one_state_for_all(rank: int, world_size: int, send) -> None:
    """Rank 0 saves, everybody loads: refused with both ways out while there is a residual, possible without one."""

    def everywhere(state: dict) -> dict:
        held = [state]
        dist.broadcast_object_list(held)
        return held[0]

    for wrapped in (False, True):
        model = tiny_model()
        if wrapped:
            del model.unused  # DDP waits for every parameter
            model = nn.parallel.DistributedDataParallel(model)
        fields = {"model": model} if wrapped else {}
        inner = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
        optimizer = tritoncomm.wrap(inner, density=0.1, dense_below=0, warmup_steps=1, **fields)
        train(model, optimizer, rank, range(4))
        saved = everywhere(optimizer.state_dict())
        with pytest.raises((ConfigurationError, ConfigMismatchError)) as caught:
            optimizer.load_state_dict(saved)
        assert "tritoncomm.checkpoint.save()" in str(caught.value)
        assert 'load_state_dict(state, residuals="reset")' in str(caught.value)
        optimizer.load_state_dict(saved, residuals="reset")
        assert optimizer.metrics()["residual_norm"] == 0
        train(model, optimizer, rank, range(4, 6))
        assert optimizer.metrics()["density_delivered"] < 0.6  # the dense warm-up is not repeated
        optimizer.flush()
        steps = optimizer.metrics()["steps"]
        optimizer.load_state_dict(everywhere(optimizer.state_dict()))
        assert optimizer.metrics()["steps"] == steps
        train(model, optimizer, rank, range(6, 8))
        assert optimizer.metrics()["density_delivered"] < 0.6
        assert same_everywhere(flat(model))
