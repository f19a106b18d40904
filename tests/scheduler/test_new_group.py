"""New process groups: NCCL splits a bound default group, and every rank of it has to take part."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from tritoncomm import ConfigurationError, Hierarchical, TopkAllgather
from tritoncomm.scheduler import process_group
from tritoncomm.scheduler.process_group import ProcessGroupScheduler
from tritoncomm.step.exchange.feedback import ErrorFeedback

from emulated_cuda import ranks
from emulated_cuda.device import to_gpu
from emulated_cuda.network import Network

WORLD_SIZE = 4
Call = tuple[tuple[int, ...], bool]


class World:
    """A default process group of four ranks, one of which runs at a time, and the calls of new_group on each rank."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, bound: bool, splits: bool) -> None:
        self.rank = 0
        self.calls: dict[int, list[Call]] = {rank: [] for rank in range(WORLD_SIZE)}
        self.group = SimpleNamespace(
            bound_device_id=torch.device("cuda", 0) if bound else None,
            _get_backend=lambda device: SimpleNamespace(supports_splitting=splits),
            group_name="0",
            ranks=list(range(WORLD_SIZE)),
        )
        monkeypatch.setattr(dist, "group", SimpleNamespace(WORLD=self.group))
        monkeypatch.setattr(dist, "is_initialized", lambda: True)
        monkeypatch.setattr(dist, "get_rank", lambda group=None: (group or self.group).ranks.index(self.rank))
        monkeypatch.setattr(dist, "get_world_size", lambda group=None: len((group or self.group).ranks))
        monkeypatch.setattr(dist, "get_process_group_ranks", lambda group: group.ranks)
        monkeypatch.setattr(dist, "new_group", self.new_group)

    def new_group(self, ranks=None, timeout=None, use_local_synchronization=False) -> object:
        """Note the call, and return a group, or what torch returns on a rank that is not in it."""
        members = tuple(range(WORLD_SIZE) if ranks is None else ranks)
        self.calls[self.rank].append((members, use_local_synchronization))
        return SimpleNamespace(ranks=list(members), group_name=str(members)) if self.rank in members else object()

    def schedule(self, group: object = None, ranks=range(WORLD_SIZE)) -> None:
        """Create a scheduler with the subgroups of two nodes on each of ``ranks``."""
        subgroups = Hierarchical(recipe=TopkAllgather(density=0.1), node_size=2).subgroups(len(ranks))
        for self.rank in ranks:
            process_group._subgroups.clear()  # each rank is a process
            scheduler = ProcessGroupScheduler(group, subgroups=subgroups)
            assert sorted(scheduler._subgroups) == sorted(each for each in subgroups if scheduler.rank in each)


def test_all_ranks_split_a_bound_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every rank takes part in the creation of every subgroup, in the same order, once for all schedulers."""
    world = World(monkeypatch, bound=True, splits=True)
    world.schedule()
    assert world.calls[0] == [((0, 1), False), ((2, 3), False), ((0, 2), False), ((1, 3), False)]
    assert all(calls == world.calls[0] for calls in world.calls.values())
    subgroups = Hierarchical(recipe=TopkAllgather(density=0.1), node_size=2).subgroups(WORLD_SIZE)
    ProcessGroupScheduler(None, subgroups=subgroups)  # on the last rank, which is not in all of them
    assert len(world.calls[world.rank]) == len(subgroups)


@pytest.mark.parametrize("ranks", [(1, 0), (0, 0)])
def test_ranks_of_a_subgroup_ascend(monkeypatch: pytest.MonkeyPatch, ranks: tuple[int, ...]) -> None:
    """torch sorts the ranks of a group: a subgroup in another order is refused, and creates no group."""
    world = World(monkeypatch, bound=True, splits=True)
    with pytest.raises(ConfigurationError, match=r"list its ranks once, in ascending order"):
        ProcessGroupScheduler(None, subgroups=[ranks])
    assert not any(world.calls.values())


@pytest.mark.parametrize(("bound", "splits"), [(False, True), (True, False)])
def test_only_members_create_another_group(monkeypatch: pytest.MonkeyPatch, bound: bool, splits: bool) -> None:
    """If nothing is split, a rank creates its own subgroups only. The others need not wait."""
    world = World(monkeypatch, bound=bound, splits=splits)
    world.schedule()
    assert world.calls[1] == [((0, 1), True), ((1, 3), True)]


def test_a_part_of_a_bound_group_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """If not all ranks take part, no rank can create a group. The error names the fix, and nobody waits."""
    world = World(monkeypatch, bound=True, splits=True)
    process_group._subgroups.clear()
    part = SimpleNamespace(ranks=[0, 1], group_name="part", _get_backend=world.group._get_backend)
    with pytest.raises(ConfigurationError, match=r"ranks \[0, 1\] .*init_process_group without device_id"):
        world.schedule(part, ranks=(0, 1))
    assert not any(world.calls.values())


@pytest.mark.parametrize("world_size", [2, 4])
def test_exchanges_in_subgroups_of_a_bound_group(world_size: int) -> None:
    """On an emulated NCCL, whose split waits for all ranks of the parent, nobody waits without end."""
    recipe = Hierarchical(recipe=TopkAllgather(density=0.1), node_size=2)

    def main(rank: int) -> list[int]:
        scheduler = ProcessGroupScheduler(None, None, "cuda", "test", recipe.subgroups(world_size))
        feedback = ErrorFeedback(recipe.build(60), "cuda")
        gradient = to_gpu(torch.randn(60, generator=torch.Generator().manual_seed(rank)))
        mean = scheduler.run(feedback.begin(gradient, rank, world_size))
        return mean.indices.tolist()

    network = Network(world_size, limit=5.0)
    found = ranks.run(main, world_size, bind_device=True, network=network)
    assert found == [found[0]] * world_size
    assert found[0]
