"""Worker processes of tests/distributed/test_bad_network.py: hosts on a network that misbehaves."""

from __future__ import annotations

import os
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from models import adamw, equal, exact, flat, residual, train
from torch import nn
from tritoncomm import ExchangeError
from tritoncomm.scheduler import failure_report
from tritoncomm.slow.namespaces import INTERFACE, Host, Network

import laws

PORT = 29400
LONG = timedelta(seconds=20)


@dataclass(frozen=True)
class Plan:
    """What the workers do. ``members`` of them train. The process with the number ``store`` hosts the store.

    ``signals`` is a folder. The test creates a file in it when it has changed the network. ``seconds`` is the time-out.
    """

    members: int
    store: int
    signals: str
    algo: str = "oktopk"
    returns: bool = False
    seconds: float = 2.0


class BadNetwork(Network):
    """A network whose cables can be pulled and whose packets can vanish."""

    def lose_one_in_eight(self, number: int, direction: str) -> None:
        """Let every eighth packet vanish that host ``number`` ``"sends"`` or ``"receives"``, by its number."""
        self.queue(number, direction, "htb default 1")
        host, device = self.end(number, direction)
        for minor in (1, 2):
            host.run(f"tc class add dev {device} parent 1: classid 1:{minor} htb rate 10gbit")
        host.run(f"tc qdisc add dev {device} parent 1:2 pfifo limit 0")
        rule = "u32 match u16 0 0x7 at 4 flowid 1:2"
        host.run(f"tc filter add dev {device} parent 1: protocol ip {rule}")

    def dropped(self, number: int, direction: str) -> int:
        """Return how many packets have vanished in the queue of what host ``number`` ``"sends"`` or ``"receives"``."""
        host, device = self.end(number, direction)
        return int(host.run(f"tc -s qdisc show dev {device} root").partition("dropped ")[2].split(",")[0])

    def plug(self, number: int, *, in_: bool) -> None:
        """Plug the cable of host ``number`` into the bridge, or pull it out."""
        self.switch.run(f"ip link set port{number} {'up' if in_ else 'down'}")


def address(host: int) -> str:
    """Return the address of a host."""
    return f"10.77.0.{host + 1}"


def enter(hosts: list[Host], rank: int) -> None:
    """Move a worker to its host."""
    hosts[rank].enter()
    os.environ["GLOO_SOCKET_IFNAME"] = INTERFACE


def wait_for(plan: Plan, name: str) -> None:
    """Wait until the test has created the file ``name``."""
    while not (Path(plan.signals) / name).exists():
        time.sleep(0.01)


def host(rank: int, world_size: int, send, plan: Plan) -> None:
    """Train, or host the store, or both."""
    dist.barrier()
    dist.destroy_process_group()  # the one of run_workers: its store is a file, which no network failure can reach
    server = dist.TCPStore(address(rank), PORT, is_master=True, wait_for_workers=False) if rank == plan.store else None
    try:
        if rank < plan.members:
            store = dist.TCPStore(address(plan.store), PORT, is_master=False, timeout=LONG)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=plan.members, timeout=LONG)
            take_part(rank, plan, send)
    except BaseException:
        send((rank, "failed", (), 0.0, traceback.format_exc()))
    finally:
        Path(plan.signals, f"{rank} ended").touch()
    for member in range(plan.members if server is not None else 0):
        wait_for(plan, f"{member} ended")
    os._exit(0)  # the default group is broken


def take_part(rank: int, plan: Plan, send: Callable[[Any], None]) -> None:
    """Take two steps, then one on the bad network, and three with the ranks that are left."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 2000), nn.Tanh(), nn.Linear(2000, 3))
    optimizer = exact(adamw(model), plan.algo, density=0.05, timeout=timedelta(seconds=plan.seconds))
    train(model, optimizer, rank, range(2))
    dist.barrier()
    if rank == 0:
        send("now")
    wait_for(plan, "now")
    collecting = timed_collect()
    before, held = flat(model), residual(optimizer)
    try:
        train(model, optimizer, rank, [2])
        send((rank, "no error"))
        peers, caught = (), False
    except ExchangeError as error:
        caught = True
        send((rank, type(error).__name__, error.peers, collecting[0], str(error)))
        peers = error.peers
        assert torch.equal(flat(model), before)
        assert laws.same_bits(residual(optimizer), held)
    left = [member for member in range(plan.members) if member not in peers]
    if not caught or (rank in left and len(left) == plan.members - 1):
        go_on(optimizer, model, rank, plan, send, left, held)
    elif plan.returns:  # this one is cut off
        came_back(optimizer, model, rank, plan, send)


def timed_collect() -> list[float]:
    """Return a list to which the seconds are added that this rank waits for the reports of others."""
    collect, seconds = failure_report.collect, []

    def timed(*arguments: Any, **options: Any) -> failure_report.FailureReport:
        started = time.monotonic()
        try:
            return collect(*arguments, **options)
        finally:
            seconds.append(time.monotonic() - started)

    failure_report.collect = timed
    return seconds


def go_on(optimizer, model, rank: int, plan: Plan, send, left: list[int], held: torch.Tensor) -> None:
    """Regroup, if a rank was given up, and take three steps. No residual is lost."""
    if len(left) < plan.members:
        group = dist.new_group(left, timeout=LONG, use_local_synchronization=True)
        before = optimizer.metrics()["steps"]
        optimizer.reset_process_group(group)
        if optimizer.metrics()["steps"] == before:
            assert torch.allclose(residual(optimizer), held * (len(left) / plan.members), atol=1e-7)
    for number in range(3, 6):
        train(model, optimizer, rank, [number])
        if number == 4 and plan.returns:
            if rank == left[0]:
                send("went on")
            wait_for(plan, "returned")
    assert equal(model, optimizer.process_group)
    send((rank, "went on"))


def came_back(optimizer, model, rank: int, plan: Plan, send) -> None:
    """A host that was given up returns, and takes a step as if nothing had happened."""
    wait_for(plan, "back")
    try:
        train(model, optimizer, rank, [2])
    except ExchangeError as error:
        send((rank, "again", error.peers, 0.0, str(error)))
    Path(plan.signals, "returned").touch()
