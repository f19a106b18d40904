"""Real hosts on a network that misbehaves: each in a network namespace, with the store of the process group on one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack, suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from threading import Timer
from typing import Any, NamedTuple

import bad_network_workers
import pytest
from bad_network_workers import PORT, BadNetwork, Plan, address
from tritoncomm.demo.local_workers import WorkerError, run_workers
from tritoncomm.slow import namespaces

from depth import python, torchrun

pytestmark = pytest.mark.skipif(namespaces.missing() is not None, reason=str(namespaces.missing()))

MEMBERS, CUT = 4, 2
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


def run(
    plan: Plan, change: Change, heal: Change | None = None, at_end: Change | None = None
) -> dict[int, list[Report]]:
    """Train on the hosts of ``plan`` and ``change`` the network before the third step. Return what each rank says.

    ``heal`` changes it again when the others have gone on, and the host at fault has given up by itself. ``at_end`` is
    called before it is removed.
    """
    heard: dict[int, list[Report]] = defaultdict(list)
    gone_on: list[Any] = []
    count = max(plan.members, plan.store + 1)
    with BadNetwork(count) as network:

        def listen(message: Any) -> None:
            if message == "now":
                change(network)
                Path(plan.signals, "now").touch()
            elif message == "went on":
                gone_on.append(message)
            else:
                heard[message[0]].append(Report(*message[1:]))
            if gone_on and CUT in heard:
                gone_on.clear()
                heal(network)
                Path(plan.signals, "back").touch()

        with suppress(WorkerError):  # workers end without a result
            run_workers(
                bad_network_workers.host, count, plan, listen=listen,
                prepare=partial(bad_network_workers.enter, network.hosts), limit=timedelta(seconds=60),
            )  # fmt: skip
        if at_end is not None:
            at_end(network)
        deadline = time.monotonic() + 5
        while processes_on(network) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not processes_on(network)
    for rank, reports in sorted(heard.items()):
        print(rank, *reports, sep="\n    ")  # noqa: T201 - shown if the test fails
    assert not any(report.kind == "failed" for reports in heard.values() for report in reports)
    return heard


def processes_on(network: Any) -> set[int]:
    """Return the processes on the hosts of ``network``, other than those that hold them."""
    found: set[int] = set()
    hosts = {str(Path(f"/proc/{host.holder}/ns/net").readlink()) for host in network.hosts}
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has just ended
            if str((process / "ns" / "net").readlink()) in hosts:
                found.add(int(process.name))
    return found - {host.holder for host in network.hosts}


def check_others_go_on(heard: dict[int, list[Report]]) -> None:
    """Check that all others name the rank that is cut off in time and go on, and that it says something in time."""
    assert sorted(heard) == list(range(MEMBERS))
    for rank, (first, *rest) in heard.items():
        assert first.kind in ("ExchangeTimeoutError", "PeerLostError"), first
        assert first.seconds < LATEST
        if rank != CUT:
            assert first.peers == (CUT,), first
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
    ("change", "algo"),
    [
        pytest.param(lambda network: network.limit(CUT, "8kbit"), "oktopk", id="8 kbit"),
        pytest.param(lambda network: network.limit(CUT, "8kbit"), "dense", id="in a collective, which names nobody"),
        pytest.param(lambda network: swallow(network, "sends", "receives"), "oktopk", id="packets vanish"),
        pytest.param(lambda network: swallow(network, "sends"), "oktopk", id="cannot send"),
        pytest.param(lambda network: swallow(network, "receives"), "oktopk", id="cannot receive"),
    ],
)
def test_bad_link(tmp_path: Path, change: Change, algo: str) -> None:
    """All others name the rank whose link is bad, within the time-out and two seconds, and train on without it."""
    check_others_go_on(run(Plan(MEMBERS, 0, str(tmp_path), algo), change))


@pytest.mark.parametrize("is_lossy", [False, True])
def test_link_that_recovers(tmp_path: Path, is_lossy: bool) -> None:
    """A short interruption is only waited for, as is TCP, which sends again what vanishes: one packet in eight."""
    lost: list[int] = []

    def lose(network: Any) -> None:
        for direction in ("sends", "receives"):
            network.lose_one_in_eight(CUT, direction)

    def count(network: Any) -> None:
        lost.extend(network.dropped(CUT, direction) for direction in ("sends", "receives"))

    plan = Plan(MEMBERS, 0, str(tmp_path), seconds=4.0)
    heard = run(plan, lose, at_end=count) if is_lossy else run(plan, pull_for_a_second)
    assert not is_lossy or min(lost) > 0
    assert [[report.kind for report in heard[rank]] for rank in range(MEMBERS)] == [["no error", "went on"]] * MEMBERS


def test_host_that_comes_back(tmp_path: Path) -> None:
    """A host whose link goes down is given up. When it returns it is told so, and does not disturb the others."""
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
            assert "no answer from ranks [0, 1, 3] within the time-out, so this rank may be cut off" in only.text
        else:
            assert only.peers == ()
            assert "no answer from the store of the process group, 10.77.0.3:29400: its host is lost" in only.text


STORE = """
import time, torch.distributed as dist
store = dist.TCPStore("0.0.0.0", {}, is_master=True, wait_for_workers=False)
open("listens", "w").close()
time.sleep(120)
"""


def test_external_store_under_torchrun(tmp_path: Path) -> None:
    """With the store on a host that does not train, as the page on torchrun says, rank 0 may be lost as any other."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "GLOO_SOCKET_IFNAME": namespaces.INTERFACE}
    script = str(Path(__file__).with_name("external_store_script.py"))
    with ExitStack() as stack:
        network = stack.enter_context(BadNetwork(4))

        def start(number: int, *command: str) -> None:
            process = subprocess.Popen(
                [*network.hosts[number].inside, *command], env=environment, start_new_session=True, cwd=tmp_path
            )
            stack.callback(process.wait)
            stack.callback(os.killpg, process.pid, signal.SIGKILL)  # torchrun waits for the lost host

        (tmp_path / "store.py").write_text(STORE.format(PORT))
        start(3, *python(), str(tmp_path / "store.py"))
        wait_for_files(tmp_path, "listens", 1)
        for number in range(3):
            place = ["--nnodes", "3", "--nproc-per-node", "1", "--local-addr", address(number)]
            rendezvous = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{address(3)}:{PORT}", "--rdzv-id", "test"]
            start(number, *torchrun(), *place, *rendezvous, script, address(3), str(PORT), str(tmp_path))
        wait_for_files(tmp_path, "ready", 1)
        # Ranks are given out in the order in which hosts arrive.
        (first,) = wait_for_files(tmp_path, "host 0 *", 1)
        pull(network, int(first.split()[2]))
        (tmp_path / "now").touch()
        assert wait_for_files(tmp_path, "went on *", 2) == ["went on 1", "went on 2"]


def wait_for_files(folder: Path, pattern: str, count: int) -> list[str]:
    """Return the names of ``count`` files in the order of names, as soon as they are there."""
    deadline = time.monotonic() + 60
    while len(found := sorted(file.name for file in folder.glob(pattern))) < count:
        assert time.monotonic() < deadline, f"{found} instead of {count} files {pattern!r}"
        time.sleep(0.05)
    return found
