"""Worker processes of tests/distributed/test_checkpoints.py."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import tritoncomm
from helpers import flat, loss_of, possible, residual, same_everywhere, tiny_model, total, train
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from tritoncomm import ConfigMismatchError, ConfigurationError, checkpoint
from tritoncomm.step import state as exchange_state

import laws
from baselines import DGC

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
    state = optimizer._vector.feedback.algorithm.state
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
        """Load in each of the three ways. Return the pending update after each of them."""
        found = []
        self.model.load_state_dict(torch.load(folder / "model.pt"))
        checkpoint.load(self.optimizer, folder)
        found.append(self.pending())
        files = sorted(folder.glob("rank-*.pt"))
        states = [torch.load(file) for file in files]
        own = states[dist.get_rank() % len(states)]
        if len(files) != dist.get_world_size():
            resharded = checkpoint.reshard([state["tritoncomm"] for state in states], dist.get_world_size())
            own = own | {"tritoncomm": resharded[dist.get_rank()]}
        self.forget()
        own.pop("saved")
        self.optimizer.load_state_dict(own)
        found.append(self.pending())
        self.forget()
        path = folder / "dcp"
        dcp.load({"residuals": checkpoint.ResidualState(self.optimizer, path)}, checkpoint_id=path)
        return [*found, self.pending()]

    def forget(self) -> None:
        """Set residuals to zero."""
        self.optimizer.load_state_dict(self.optimizer.state_dict(), residuals="reset")
        assert not any(self.pending())

    def save(self, folder: Path) -> None:
        """Save for each of the three ways."""
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

    The pending update is that of the save in each way of loading. At last nothing has been lost on the way.
    """
    for chain, recipe in [(chain, recipe) for chain in chains for recipe in METHODS_IN_NODES]:
        run = RunInNodes(recipe, CHAINS[chain][number][1])
        own = Path(folder) / f"{recipe if isinstance(recipe, str) else recipe.name}-{chain}"
        known = own / f"known-{number - 1}.pt"
        before, given = torch.load(known) if known.exists() else ([], torch.zeros(60))
        if known.exists():
            assert any(before)
            assert run.load(own / str(number - 1)) == [before] * 3
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
    """A saved run. The file of rank 1 is damaged in different ways, and loading must fail and change nothing."""

    def __init__(self, rank: int, world_size: int, folder: str) -> None:
        self.rank, self.folder = rank, folder
        self.model = tiny_model()
        self.optimizer = wrap(self.model, density=0.1)
        train(self.model, self.optimizer, rank, range(3))
        checkpoint.save(self.optimizer, folder)
        self.file = Path(folder) / f"rank-1-of-{world_size}.pt"
        self.whole = self.file.read_bytes()
        train(self.model, self.optimizer, rank, range(3, 5))
        self.before = self.now()

    def now(self) -> tuple:
        """Return everything that loading could change."""
        return flat(self.model), residual(self.optimizer).tolist(), str(self.optimizer.state_dict()["state"])

    def load(self, named: str) -> None:
        """Assert that loading fails on all ranks and names the file and the reason."""
        dist.barrier()
        error = ConfigurationError if self.rank == 1 else ConfigMismatchError
        with pytest.raises(error, match=r"rank-1-of-3\.pt cannot be loaded: .*" + named):
            checkpoint.load(self.optimizer, self.folder)
        assert self.now() == self.before
        dist.barrier()

    def put(self, content: bytes) -> None:
        """Replace the file."""
        if self.rank == 1:
            self.file.write_bytes(content)

    def take(self, of_rank: int, change: Callable[[dict], object]) -> None:
        """Replace the file by that of a rank, after ``change``."""
        self.put(self.whole)
        if self.rank == 1:
            state = torch.load(Path(self.folder) / f"rank-{of_rank}-of-3.pt")
            change(state)
            torch.save(state, self.file)


def damaged(rank: int, world_size: int, send, folder: str) -> None:
    """A corrupt or truncated file is rejected with its name and the reason, and nothing changes on any rank."""
    attempts = Attempts(rank, world_size, folder)
    attempts.put(attempts.whole[: len(attempts.whole) // 2])
    attempts.load("")
    attempts.put(b"nothing of the kind")
    attempts.load("")
    attempts.take(1, lambda state: state["tritoncomm"]["residuals"][0][0].add_(1))
    attempts.load("corrupt: its checksum")
    attempts.take(1, lambda state: state["param_groups"][0]["params"].pop())
    attempts.load("corrupt: the checksum of the optimizer")
    attempts.put(attempts.whole)
    dist.barrier()
    checkpoint.load(attempts.optimizer, folder)
    assert attempts.now()[1] != attempts.before[1]


def foreign(rank: int, world_size: int, send, folder: str) -> None:
    """A file of another rank, method, model or optimizer is rejected with its name and the reason."""
    attempts = Attempts(rank, world_size, folder)

    def signed(**fields) -> Callable[[dict], object]:
        def change(state: dict) -> None:
            ours = {name: value for name, value in (state["tritoncomm"] | fields).items() if name != "checksum"}
            state["tritoncomm"] = ours | {"checksum": exchange_state.checksum(ours)}

        return change

    attempts.take(0, lambda state: None)
    attempts.load("written with rank=0, here it is 1")
    attempts.take(1, signed(recipe="exdyna"))
    attempts.load("written with recipe='exdyna', here it is 'oktopk': use the algo that it was saved with")
    attempts.take(1, signed(residuals=[torch.zeros(3)]))
    attempts.load("a model with other parameters")
    attempts.take(1, lambda state: state["saved"].update(optimizer="SGD"))
    attempts.load("written for SGD, this optimizer is AdamW")
    attempts.take(1, lambda state: state.clear())
    attempts.load("not the state of a wrapped optimizer")


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
