"""Hosts on a network with a real rate limit: network namespaces of Linux on one bridge.

Every host is a namespace with one interface. A cable (a pair of virtual interfaces) joins it to a bridge, which is in a
namespace of its own. Both ends of the cable have a queue of ``tc`` that limits their rate. Messages between hosts are
real TCP on real sockets.

A namespace has no name: a process without work holds it. The kernel removes it, and everything in it, when that process
ends. The process ends when the pipe from this one closes. So nothing is left behind, also when this process is killed.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
from contextlib import ExitStack
from typing import NamedTuple

from tritoncomm.scheduler.cost import Link

INTERFACE = "eth0"  # of every host
_NEEDED = {"ip": "iproute2", "tc": "iproute2", "nsenter": "util-linux", "unshare": "util-linux"}
_CLONE_NEWNET = 0x40000000
_HOLD = ("unshare", "--net", "sh", "-c", "echo ready; exec cat")
# A queue lets this many bytes pass at once: a millisecond at its rate, but at least two Ethernet frames. Messages are
# then slowed down from their first kilobytes on. It drops what would wait for longer than a tenth of a second.
_FRAME, _BURST_SECONDS, _QUEUE_SECONDS, _SHORTEST_QUEUE = 1514, 1e-3, 0.1, 65536
_NETEM_PACKETS = 1000  # its queue, unless it is told otherwise


class NetworkError(RuntimeError):
    """The network cannot be made, or a command that changes it failed. The message is one sentence with the reason."""


class Host(NamedTuple):
    """A namespace, as other processes need it: the process that holds it, and its address."""

    holder: int
    address: str

    @property
    def inside(self) -> list[str]:
        """The words to put before a command that is to run on the host."""
        return ["nsenter", f"--net=/proc/{self.holder}/ns/net"]

    def run(self, command: str, *, may_fail: bool = False) -> str:
        """Run ``command`` on the host and return what it prints."""
        done = subprocess.run([*self.inside, *command.split()], capture_output=True, text=True, check=False)  # noqa: S603
        if done.returncode != 0 and not may_fail:
            raise NetworkError(f"'{command}' failed: {done.stderr.strip()}")
        return done.stdout

    def enter(self) -> None:
        """Move this thread, and all that it starts, into the namespace of the host."""
        libc = ctypes.CDLL(None, use_errno=True)
        with open(f"/proc/{self.holder}/ns/net") as namespace:  # noqa: PTH123 - /proc is not a folder of files
            if libc.setns(namespace.fileno(), _CLONE_NEWNET) != 0:
                raise NetworkError(f"the network namespace could not be entered: {os.strerror(ctypes.get_errno())}")


def missing() -> str | None:
    """Return in one sentence why namespaces cannot be made here, or None if they can."""
    if sys.platform != "linux":
        return "Network namespaces need Linux."
    for command, package in _NEEDED.items():
        if shutil.which(command) is None:
            return f"Network namespaces need the command {command}: install {package}."
    if os.geteuid() != 0:
        return "Network namespaces need root: put 'sudo' or 'unshare --map-root-user' before the command."
    made = subprocess.run(["unshare", "--net", "true"], capture_output=True, text=True, check=False)  # noqa: S607
    if made.returncode != 0:
        reason = made.stderr.strip()
        return f"This system does not let root make network namespaces ({reason}): a container needs --privileged."
    return None


class Network:
    """Context manager: ``hosts`` hosts whose interfaces send and receive at ``rate``. None does not limit the rate.

    ``rate`` is a text such as "20mbit". ``delay`` is added to every packet that a host sends, for example "10ms", and
    needs the kernel's ``netem``. Hosts have the addresses 10.77.0.1, 10.77.0.2, ...

    Raises :class:`NetworkError` when the network cannot be made.
    """

    def __init__(self, hosts: int, rate: str | None = None, delay: str = "0") -> None:
        self.size, self.rate, self.delay = hosts, rate, delay
        self.hosts: list[Host] = []
        self.switch = Host(0, "")
        self._open = ExitStack()

    def __enter__(self) -> Network:  # noqa: PYI034 - Self is of Python 3.11
        reason = missing()
        if reason is not None:
            raise NetworkError(reason)
        with ExitStack() as undo:
            self.switch = Host(undo.enter_context(_Holder()).pid, "")
            self.switch.run("ip link add bridge type bridge")
            self.switch.run("ip link set bridge up")
            for number in range(self.size):
                host = Host(undo.enter_context(_Holder()).pid, f"10.77.0.{number + 1}")
                self._connect(number, host)
                self.hosts.append(host)
                self.limit(number, self.rate, self.delay)
            self._open = undo.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def _connect(self, number: int, host: Host) -> None:
        port = f"port{number}"
        self.switch.run(f"ip link add {port} type veth peer name {INTERFACE} netns {host.holder}")
        self.switch.run(f"ip link set {port} addrgenmode none master bridge up")
        host.run(f"ip link set {INTERFACE} addrgenmode none")  # without the packets of IPv6
        host.run(f"ip address add {host.address}/24 dev {INTERFACE}")
        host.run(f"ip link set {INTERFACE} up")
        host.run("ip link set lo up")

    def limit(self, number: int, rate: str | None, delay: str = "0") -> None:
        """Limit what host ``number`` sends, and what it receives, to ``rate`` each."""
        self.queue(number, "sends", None if rate is None else _token_bucket(rate))
        self.queue(number, "receives", None if rate is None else _token_bucket(rate))
        if delay not in ("0", "0s", "0ms"):
            self._delay(self.hosts[number], rate, delay)

    @staticmethod
    def _delay(host: Host, rate: str | None, delay: str) -> None:
        parent, frames = "root", 0.0
        if rate is not None:  # netem is then the queue of the limit, with the packets on their way and those that wait
            link = Link.parse(f"{rate},{delay}")
            parent, frames = "parent 1:1", link.bandwidth * (link.latency + _QUEUE_SECONDS) / _FRAME
        try:
            limit = max(_NETEM_PACKETS, int(frames))
            host.run(f"tc qdisc add dev {INTERFACE} {parent} netem delay {delay} limit {limit}")
        except NetworkError as error:
            raise NetworkError(
                f"delay={delay} needs netem, which this kernel does not have: leave the delay out ({error})."
            ) from error

    def queue(self, number: int, direction: str, discipline: str | None) -> None:
        """Set the queue of what host ``number`` ``"sends"`` or ``"receives"``, as ``tc`` names it. None removes it."""
        host, device = self.end(number, direction)
        host.run(f"tc qdisc del dev {device} root", may_fail=True)  # there may be none
        if discipline is not None:
            host.run(f"tc qdisc add dev {device} root handle 1: {discipline}")

    def end(self, number: int, direction: str) -> tuple[Host, str]:
        """Return the namespace and the device whose queue has what host ``number`` ``"sends"`` or ``"receives"``."""
        if direction == "sends":
            return self.hosts[number], INTERFACE
        assert direction == "receives"
        return self.switch, f"port{number}"


class _Holder:
    """A process that holds a new namespace until the block ends, or this process."""

    def __enter__(self) -> subprocess.Popen[str]:
        self._process = subprocess.Popen(  # noqa: S603
            _HOLD, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
        )
        assert self._process.stdout is not None
        if self._process.stdout.readline() != "ready\n":
            self.__exit__()
            raise NetworkError("a network namespace could not be made.")
        return self._process

    def __exit__(self, *_: object) -> None:
        with self._process:  # closes the pipes, and waits
            self._process.kill()


def _token_bucket(rate: str) -> str:
    bandwidth = Link.parse(f"{rate},0s").bandwidth
    burst = max(2 * _FRAME, int(bandwidth * _BURST_SECONDS))
    return f"tbf rate {rate} burst {burst} limit {burst + max(_SHORTEST_QUEUE, int(bandwidth * _QUEUE_SECONDS))}"
