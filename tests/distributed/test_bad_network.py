"""Real hosts on a network that misbehaves: each in a network namespace, with the store of the process group on one."""

from __future__ import annotations

import importlib
import sys
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from threading import Timer
from typing import Any, NamedTuple

import bad_network_workers
import pytest
from bad_network_workers import Plan
from helpers import run_workers
from tritoncomm.scheduler.local_workers import WorkerError

from pages import ROOT

sys.path.append(str(ROOT / "benchmarks"))
namespaces = importlib.import_module("namespaces")
pytestmark = pytest.mark.skipif(namespaces.missing() is not None, reason=str(namespaces.missing()))

MEMBERS, CUT = 4, 2
OTHERS = [rank for rank in range(MEMBERS) if rank != CUT]
# Seconds in which a rank raises its error, after a wait that has failed: two, and what a busy machine adds.
LATEST = 2.0 + 0.5
NOTHING = "pfifo limit 0"  # a queue without room: every packet vanishes
Change = Callable[[Any], None]


class Report(NamedTuple):
    """What a rank says: the name of its error or of what it did, the peers that it names, and why.

    ``seconds`` lie between the end of the wait that has failed and the error.
    """

    kind: str
    peers: tuple[int, ...] = ()
    seconds: float = 0.0
    text: str = ""


def enter(hosts: list, rank: int) -> None:
    """Move a worker to its host."""
    hosts[rank].enter()


def run(plan: Plan, change: Change, heal: Change | None = None) -> dict[int, list[Report]]:
    """Train on the hosts of ``plan`` and ``change`` the network before the third step. Return what each rank says."""
    heard: dict[int, list[Report]] = defaultdict(list)
    count = max(plan.members, plan.store + 1)
    with namespaces.Network(count) as network:

        def listen(message: Any) -> None:
            if message == "now":
                change(network)
                Path(plan.signals, "now").touch()
            elif message == "went on":
                heal(network)
                Path(plan.signals, "back").touch()
            else:
                heard[message[0]].append(Report(*message[1:]))

        with suppress(WorkerError):  # workers end without a result
            run_workers(
                bad_network_workers.host, count, plan, listen=listen, prepare=partial(enter, network.hosts),
                limit=timedelta(seconds=60),
            )  # fmt: skip
    for rank, reports in sorted(heard.items()):
        print(rank, *reports, sep="\n    ")  # noqa: T201 - shown if the test fails
    assert not any(report.kind == "failed" for reports in heard.values() for report in reports)
    return heard


def check_others_go_on(heard: dict[int, list[Report]], cut: int = CUT) -> None:
    """Check that all others name rank ``cut`` in time and go on, and that this rank says something in time."""
    assert sorted(heard) == list(range(MEMBERS))
    for rank, (first, *rest) in heard.items():
        assert first.kind in ("ExchangeTimeoutError", "PeerLostError"), first
        assert first.seconds < LATEST
        if rank != cut:
            assert first.peers == (cut,), first
            assert [report.kind for report in rest] == ["went on"]


def pull(network: Any, number: int = CUT) -> None:
    """Pull the cable of a host out of the switch."""
    network.plug(number, in_=False)


def pull_for_a_second(network: Any) -> None:
    """Pull the cable of a host out of the switch, and plug it in after a second."""
    pull(network)
    Timer(1.0, lambda: network.plug(CUT, in_=True)).start()


def swallow(network: Any, *directions: str) -> None:
    """Let all packets of a host vanish."""
    for direction in directions:
        network.queue(CUT, direction, NOTHING)


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(pull, id="link down"),
        pytest.param(lambda network: network.limit(CUT, "8kbit"), id="8 kbit"),
        pytest.param(lambda network: swallow(network, "sends", "receives"), id="packets vanish"),
        pytest.param(lambda network: swallow(network, "sends"), id="cannot send"),
        pytest.param(lambda network: swallow(network, "receives"), id="cannot receive"),
    ],
)
@pytest.mark.parametrize("algo", ["oktopk"])
def test_bad_link(tmp_path: Path, change: Change, algo: str) -> None:
    """All others name the rank whose link is bad, within the time-out and two seconds, and train on without it."""
    check_others_go_on(run(Plan(MEMBERS, 0, str(tmp_path), algo), change))


@pytest.mark.parametrize("algo", ["topk_allgather", "spardl", "dense"])
def test_crawling_link(tmp_path: Path, algo: str) -> None:
    """The rank at the end of a link at 8 kbit/s is named whichever messages a method sends."""
    check_others_go_on(run(Plan(MEMBERS, 0, str(tmp_path), algo), lambda network: network.limit(CUT, "8kbit")))


def test_link_down_for_a_second(tmp_path: Path) -> None:
    """A short interruption is only waited for."""
    heard = run(Plan(MEMBERS, 0, str(tmp_path)), pull_for_a_second)
    assert [[report.kind for report in heard[rank]] for rank in range(MEMBERS)] == [["no error", "went on"]] * MEMBERS


def test_host_that_comes_back(tmp_path: Path) -> None:
    """A host that was given up is told so when it returns, and does not disturb the others, which are ahead."""
    plan = Plan(MEMBERS, 0, str(tmp_path), returns=True)
    heard = run(plan, pull, lambda network: network.plug(CUT, in_=True))
    check_others_go_on(heard)
    first, again = heard[CUT]
    assert again.kind == "again"
    assert again.text == first.text
    assert "this rank is cut off" in first.text


def test_host_of_the_store_cut_off(tmp_path: Path) -> None:
    """Without the store nobody knows what the others saw. Every rank says so in time, and names the store's host."""
    heard = run(Plan(MEMBERS, CUT, str(tmp_path)), pull)
    assert sorted(heard) == list(range(MEMBERS))
    for rank, (only,) in heard.items():
        assert only.kind == "ExchangeTimeoutError"
        assert only.seconds < LATEST
        if rank == CUT:
            assert "no answer from ranks 0, 1, 3 within the time-out, so this rank may be cut off" in only.text
        else:
            assert only.peers == ()
            assert "no answer from the store of the process group, 10.77.0.3:29400: its host is lost" in only.text


def test_external_store(tmp_path: Path) -> None:
    """With the store on a host that does not train, any host may be lost: the others name it and go on."""
    heard = run(Plan(MEMBERS, MEMBERS, str(tmp_path)), partial(pull, number=0))
    check_others_go_on(heard, 0)
