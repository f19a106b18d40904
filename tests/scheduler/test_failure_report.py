"""Which rank is at fault, by the reports of all ranks about who waited for whom."""

from __future__ import annotations

import pytest
from tritoncomm.scheduler.failure_report import FailureReport, RankReport, by_messages

from ranks import ranks


def reports(*ranks: tuple[int, list[int]]) -> dict[int, RankReport]:
    """Return reports from pairs of the round that each rank was in and the ranks whose messages had not arrived."""
    return {
        rank: RankReport("timeout", "", "", waiting=waiting, at=[1, round_])
        for rank, (round_, waiting) in enumerate(ranks)
    }


@pytest.mark.parametrize(
    ("said", "at_fault"),
    [
        pytest.param([(3, [2]), (3, [2]), (3, [0, 1, 3]), (3, [2])], 2, id="slow in both directions"),
        pytest.param([(3, [2]), (3, [2]), (3, []), (3, [2])], 2, id="cannot send"),
        pytest.param([(4, [2]), (4, [2]), (3, [0, 1, 3]), (4, [2])], 2, id="cannot receive"),
        pytest.param([(3, [2]), (4, [0]), (4, [0, 1]), (4, [0])], 2, id="the others wait for a rank that waits for it"),
        pytest.param([(4, [2]), (4, [2]), (3, []), (4, [])], 2, id="behind"),
        pytest.param([(3, [1]), (3, [0])], None, id="two ranks wait for each other"),
        pytest.param([(3, [1]), (3, [0]), (4, []), (4, [])], None, id="one link between two ranks"),
        pytest.param([(3, []), (3, []), (3, [])], None, id="in a collective"),
        pytest.param([(4, []), (3, []), (4, [])], None, id="behind, but nobody is known to wait for it"),
    ],
)
def test_rank_at_fault(said: list[tuple[int, list[int]]], at_fault: int | None) -> None:
    """The rank at the end of most messages that were sent and did not arrive is at fault, else the one that is behind.

    If the reports fit several ranks, none is named.
    """
    assert by_messages(reports(*said)) == at_fault


@ranks(1)
@pytest.mark.parametrize("address", ["", ", 10.0.0.1:29400"])
def test_silent_store(rank, world_size, address):
    """The error names the address of the store, if it has one: a file has none."""
    report = FailureReport([], gone=False, reports={}, silent_store=address.removeprefix(", "))
    text = str(report.error(2, "step 1", RuntimeError("closed"), ""))
    assert f"no answer from the store of the process group{address}: its host is lost" in text
