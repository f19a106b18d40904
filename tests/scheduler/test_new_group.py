"""New process groups: NCCL splits a bound default group, and every rank of it has to take part."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist
from tritoncomm import ConfigurationError, Hierarchical, TopkAllgather
from tritoncomm.scheduler.process_group import ProcessGroupScheduler

from emulated_cuda import exchanges, ranks
from emulated_cuda.nccl import EmulatedNCCL
from emulated_cuda.network import Network

NODES = Hierarchical(recipe=TopkAllgather(density=0.1), node_size=2)


@pytest.mark.parametrize(("bound", "splits"), [(True, True), (False, True), (True, False)])
def test_who_creates_a_subgroup(bound: bool, splits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every rank takes part in every split, in the same order. Otherwise, a rank creates its own subgroups only.

    Both happen once for all schedulers.
    """
    calls: dict[int, list[tuple[int, ...]]] = {rank: [] for rank in range(4)}
    new_group = dist.new_group

    def noted(members: list[int], **options: Any) -> Any:
        calls[dist.get_rank()].append(tuple(members))
        return new_group(members, **options)

    monkeypatch.setattr(dist, "new_group", noted)
    monkeypatch.setattr(EmulatedNCCL, "supports_splitting", splits)

    def main(rank: int) -> None:
        for _ in range(2):
            scheduler = ProcessGroupScheduler(None, device="cuda", subgroups=NODES.subgroups(4))
            assert sorted(scheduler._subgroups) == sorted(each for each in NODES.subgroups(4) if rank in each)

    ranks.run(main, 4, bind_device=bound, network=Network(4, limit=5.0))
    for rank, found in calls.items():
        assert found == [each for each in ((0, 1), (2, 3), (0, 2), (1, 3)) if (bound and splits) or rank in each]


@pytest.mark.parametrize("subgroup", [(1, 0), (0, 0)])
def test_ranks_of_a_subgroup_ascend(subgroup: tuple[int, ...]) -> None:
    """torch sorts the ranks of a group: a subgroup in another order is refused."""
    with pytest.raises(ranks.RankError, match=r"list its ranks once, in ascending order"):
        ranks.run(lambda rank: ProcessGroupScheduler(None, device="cuda", subgroups=[subgroup]), 2, bind_device=True)


def test_a_part_of_a_bound_group_is_refused() -> None:
    """If not all ranks take part, no rank can create a group. The error names the fix, and nobody waits."""

    def main(rank: int) -> None:
        part = dist.new_group([0, 1])
        if rank < 2:
            with pytest.raises(ConfigurationError, match=r"ranks \[0, 1\] .*init_process_group without device_id"):
                ProcessGroupScheduler(part, device="cuda", subgroups=NODES.subgroups(2))

    ranks.run(main, 4, bind_device=True, network=Network(4, limit=5.0))


@pytest.mark.parametrize("world_size", [2, 4])
def test_exchanges_in_subgroups_of_a_bound_group(world_size: int) -> None:
    """On an emulated NCCL, whose split waits for all ranks of the parent, nobody waits without end."""
    given = exchanges.gradients(world_size, 60, 1)
    found = exchanges.emulated(NODES, given, bind_device=True)
    assert all(own.equals(other) for [own], [other] in zip(found, exchanges.simulated(NODES, given), strict=True))
