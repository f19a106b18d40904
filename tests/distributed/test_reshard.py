"""A run is saved by modules of one kind and loaded by those of another, also by other numbers of ranks and shards."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import tritoncomm
from models import adamw, content, equal, exact, flat, load, opened, residual, tiny, train
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, distribute_tensor
from tritoncomm import ConfigurationError, checkpoint
from tritoncomm.checkpoint import ResidualState

from baselines import DGC
from depth import DEEP
from ranks import POOL, ranks

KINDS = (("plain", 1), ("ddp", 1), ("fsdp", 1), ("fsdp", 2))  # and the number of shards
OF_ADAM = ("step", "exp_avg", "exp_avg_sq")
STEPS = 4  # all of them dense: a resumed run must not take another one


def whole(value: torch.Tensor) -> torch.Tensor:
    """Return a flat copy of ``value``, gathered if it is a DTensor."""
    return (value.full_tensor() if isinstance(value, DTensor) else value).detach().flatten().clone()


def uneven() -> nn.Sequential:
    """Return a small model whose shapes two shards do not divide: most of the time goes by parameters and files."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 3))


class Run:
    """A module of some kind, with a wrapped AdamW or another optimizer.

    Args:
        kind: The kind, and the number of its shards.
        make: Returns the optimizer of a module.
        over: Another mesh than that of :func:`mesh`.
        **fields: Arguments of :func:`exact`.
    """

    def __init__(self, kind: tuple[str, int], make=adamw, over=None, **fields) -> None:
        self.model, given = opened(kind[0], uneven(), kind[1], over)
        self.group = given.get("process_group")
        self.optimizer = exact(make(self.model), **{"warmup_steps": STEPS, "density": 0.1} | fields, **given)
        self.replicas = dist.get_world_size(self.group)
        self.parameters = {name.removeprefix("module."): p for name, p in self.model.named_parameters()}

    def owe(self, rank: int) -> None:
        """Replace the residual by small integers times a power of two, of which every sum is exact, and the ages."""
        vector = self.optimizer._tritoncomm.setup.scope.vectors[0]
        own = vector.feedback.residual
        own.copy_(torch.randint(-64, 65, own.shape, generator=torch.Generator().manual_seed(rank)) * 2.0**-5)
        for p, last in zip(vector.layout.parameters, vector.feedback.ages.last, strict=True):
            steps = (torch.arange(p.numel(), dtype=torch.int32) % STEPS).view(p.shape)
            is_split = isinstance(p, DTensor)
            last.copy_(distribute_tensor(steps, p.device_mesh, p.placements).to_local() if is_split else steps)

    def save(self, path: Path) -> None:
        """Save a checkpoint of torch."""
        dcp.save(content(self.model, self.optimizer), checkpoint_id=path)

    def load(self, path: Path, **fields) -> None:
        """Load one."""
        load(self.model, self.optimizer, path, **fields)

    def found(self, *, of_model: bool = True) -> dict[str, torch.Tensor]:
        """Return whole parameters, their states, and pending updates: means of the residuals over the replicas.

        Several replicas also have the steps of the last deliveries.
        """
        values = {}
        last = self.optimizer.state_dict()["tritoncomm"]["last"]
        ages = dict(zip(self.optimizer._tritoncomm.setup.scope.parameters, last, strict=True))
        residuals = self.optimizer._tritoncomm.setup.scope.vectors[0].residuals_by_parameter()
        for name, p in self.parameters.items():
            update = residuals[p].clone()
            if isinstance(p, DTensor):
                update = update.view(p.to_local().shape)
                like = {"shape": p.shape, "stride": p.stride()}
                update = DTensor.from_local(update, p.device_mesh, p.placements, **like).full_tensor()
            dist.all_reduce(update, group=self.group)
            values[f"{name} pending"] = update.flatten() / self.replicas
            state = self.optimizer.state[p]
            values |= {f"{name} {each}": whole(state[each]) for each in OF_ADAM}
            if self.replicas > 1:
                values[f"{name} last"] = whole(ages[p])
            if of_model:
                values[name] = whole(p)
        return values


def save(rank: int, world_size: int, folder: str) -> None:
    """Train a module of each kind, save it in both ways, and go on. Files have what others must find."""
    for kind in KINDS:
        run, place = Run(kind), Path(folder, *map(str, kind))
        train(run.model, run.optimizer, rank, range(STEPS))
        run.owe(rank)
        run.save(place)
        checkpoint.save(run.optimizer, place / "own")
        found = run.found()
        train(run.model, run.optimizer, rank, range(STEPS, STEPS + 2))
        end = torch.cat([whole(p) for p in run.model.parameters()])
        if rank == 0:
            torch.save((found, end), place / "found.pt")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder into which four ranks have saved modules of each kind."""
    folder = str(tmp_path_factory.mktemp("saved"))
    POOL.run(save, 4, {"folder": folder}, 60.0, ())
    return folder


@ranks(1, 2, 3, 4)
@pytest.mark.parametrize("loader", KINDS)
@pytest.mark.parametrize("every", [DEEP])  # the processes of ranks do not know the profile
def test_every_kind_loads_every_kind(rank, world_size, loader, every, saved):
    """Parameters, Adam's state and the pending update are those of the save, to the bit, in both ways of saving.

    Another number of ranks keeps the mean of the residuals, exactly if both numbers of replicas are powers of two. The
    same number of replicas ends with the bits of the run that was not stopped.
    """
    if world_size < loader[1] or world_size % loader[1]:
        return
    # On as many ranks as have saved the same kind, and with DTensors the next one. On fewer ranks another one each.
    first = KINDS.index(loader) + world_size
    turns = range(first, first + (2 if world_size == 4 and loader[0] == "fsdp" else 1))
    for saver in KINDS if every else [KINDS[turn % len(KINDS)] for turn in turns]:
        place = Path(saved, *map(str, saver))
        expected, end = torch.load(place / "found.pt")
        run, own = Run(loader), Run(loader)
        with torch.no_grad():
            for parameter in run.model.parameters():
                parameter.zero_()
        run.load(place, checkpoint_id=place)
        checkpoint.load(own.optimizer, place / "own")
        for found in (run.found(), own.found(of_model=False)):
            assert any(value.any() for name, value in found.items() if "pending" in name)
            for name, value in found.items():
                torch.testing.assert_close(value, expected[name], rtol=1e-5 if world_size == 3 else 0, atol=0, msg=name)
        assert run.optimizer.metrics()["steps"] == STEPS
        train(run.model, run.optimizer, rank, range(STEPS, STEPS + 2))
        assert equal(run.model, run.group)
        delivered = run.optimizer.metrics()["density_delivered"]
        assert delivered == 1 if run.replicas == 1 else delivered < 0.6  # the dense steps are not repeated
        if world_size == 4 and loader[1] == saver[1]:
            assert torch.equal(torch.cat([whole(p) for p in run.model.parameters()]), end)


@ranks(2, 4)
def test_without_the_place_of_the_checkpoint(rank, world_size, saved):
    """ResidualState then does not know who has saved. All ranks raise an error that says how to tell it."""
    saver, loader = (KINDS[0], KINDS[3]) if world_size == 2 else (KINDS[3], KINDS[2])  # other ranks, or other shards
    run = Run(loader)
    before = flat(run.model)
    with pytest.raises(CheckpointException, match=r"ResidualState\(optimizer, checkpoint_id="):
        run.load(Path(saved, *map(str, saver)))
    assert torch.equal(flat(run.model), before)
    assert not residual(run.optimizer).any()
    with pytest.raises(ConfigurationError, match=r"checkpoint_id=.*nowhere: no checkpoint can be read"):
        ResidualState(run.optimizer, checkpoint_id=f"{saved}/nowhere")


@ranks(4)
def test_same_shards_and_their_order(rank, world_size, saved):
    """On the same ranks it need not be told. In a mesh with its dimensions in the other order, ranks swap shards."""
    place = Path(saved, "fsdp", "2")
    expected, _ = torch.load(place / "found.pt")
    for fields in ({}, {"storage_reader": dcp.FileSystemReader(place)}):
        run = Run(KINDS[3])
        run.load(place, **fields)
        assert all(torch.equal(value, expected[name]) for name, value in run.found().items())
    swapped = Run(KINDS[3], over=init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "replicate")))
    swapped.load(place, checkpoint_id=place)
    assert all(torch.equal(value, expected[name]) for name, value in swapped.found().items())


@ranks(2)
def test_from_one_replica(rank, world_size, tmp_path):
    """A single replica of two shards saves no residuals and no ages. Two replicas load the rest."""
    run = Run(KINDS[3])
    train(run.model, run.optimizer, rank, range(STEPS))
    run.save(tmp_path)
    before = run.found()
    run = Run(KINDS[2])
    run.load(tmp_path, checkpoint_id=tmp_path)
    found = run.found()
    assert all(torch.equal(found[name], value) for name, value in before.items())
    assert all(bool((value == STEPS).all()) for name, value in found.items() if name.endswith(" last"))
    train(run.model, run.optimizer, rank, range(STEPS, STEPS + 3))
    assert equal(run.model, run.group)
    assert run.optimizer.metrics()["longest_wait"] <= 3


@ranks(4)
@pytest.mark.parametrize("kind", [KINDS[0], KINDS[3]])
def test_momentum_of_a_method(rank, world_size, kind, tmp_path):
    """Saved in dense steps, it belongs to the shards of the save: others start a new one."""

    def made(kind):
        return Run(kind, make=lambda model: torch.optim.SGD(model.parameters(), lr=0.01), algo=DGC(density=0.1))

    run = made(KINDS[0])
    train(run.model, run.optimizer, rank, range(1))
    run.save(tmp_path)
    other = made(kind)
    other.load(tmp_path, checkpoint_id=tmp_path)
    train(other.model, other.optimizer, rank, range(1, 4))
    assert equal(other.model, other.group)


@ranks(4)
def test_stages_of_a_pipeline(rank, world_size, tmp_path):
    """Two of them in one checkpoint load on the same ranks to the bit. They cannot be resharded."""
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]

    def made() -> tuple[nn.Module, tritoncomm.SparseOptimizer]:
        model = tiny(rank % 2)
        return model, exact(adamw(model), process_group=groups[rank % 2])

    model, optimizer = made()
    train(model, optimizer, rank, range(3))
    dcp.save({"residuals": ResidualState(optimizer)}, checkpoint_id=tmp_path)
    _, resumed = made()
    dcp.load({"residuals": ResidualState(resumed)}, checkpoint_id=tmp_path)
    assert torch.equal(residual(resumed), residual(optimizer))
    with pytest.raises(ConfigurationError, match="stages of a pipeline"):
        ResidualState(resumed, checkpoint_id=tmp_path)
