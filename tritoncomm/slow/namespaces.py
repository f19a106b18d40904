"""Hosts on a network with a real rate limit: network namespaces of Linux on one bridge.

Every host is a namespace with one interface. A cable (a pair of virtual interfaces) joins it to a bridge, which is in a
namespace of its own. Both ends of the cable have a queue of ``tc`` that limits their rate. Messages between hosts are
real TCP on real sockets. Cables with a delay are those of ``cables.py``.

A namespace has no name: a process without work holds it. The kernel removes it, and everything in it, when that process
ends. The process ends when the pipe from this one closes. So nothing is left behind, also when this process is killed.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from typing import NamedTuple

from tritoncomm.scheduler.cost import Link
from tritoncomm.slow import cables

INTERFACE = "eth0"  # of every host
_NEEDED = {"ip": "iproute2", "tc": "iproute2", "nsenter": "util-linux", "unshare": "util-linux"}
# A queue lets this many bytes pass at once: a millisecond at its rate, but at least two Ethernet frames. Messages are
# then slowed down from their first kilobytes on. It drops what would wait for longer than a tenth of a second.
_FRAME, _BURST_SECONDS, _QUEUE_SECONDS, _SHORTEST_QUEUE = 1514, 1e-3, 0.1, 65536


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
        try:
            cables.enter(self.holder)
        except OSError as error:
            raise NetworkError(f"the network namespace could not be entered: {error}") from error


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

    ``rate`` is a text such as "20mbit". Every packet that a host sends arrives after ``delay``, for example "10ms".
    Hosts have the addresses 10.77.0.1, 10.77.0.2, ...

    Raises :class:`NetworkError` when the network cannot be made.
    """

    def __init__(self, hosts: int, rate: str | None = None, delay: str = "0s") -> None:
        self.size, self.rate = hosts, rate
        self.delay = Link.parse(f"1gbit,{delay}").latency
        self.hosts: list[Host] = []
        self.switch = Host(0, "")
        self._cables: subprocess.Popen[str] | None = None
        self._open = ExitStack()

    def __enter__(self) -> Network:  # noqa: PYI034 - Self is of Python 3.11
        reason = missing()
        if reason is not None:
            raise NetworkError(reason)
        with ExitStack() as undo:
            self.switch = Host(undo.enter_context(_namespace()).pid, "")
            self.switch.run("ip link add bridge type bridge")
            self.switch.run("ip link set bridge up")
            for number in range(self.size):
                self.hosts.append(Host(undo.enter_context(_namespace()).pid, f"10.77.0.{number + 1}"))
            self._plug_in(undo)
            for number, host in enumerate(self.hosts):
                self.switch.run(f"ip link set port{number} addrgenmode none master bridge up")
                host.run(f"ip link set {INTERFACE} addrgenmode none")  # without the packets of IPv6
                host.run(f"ip address add {host.address}/24 dev {INTERFACE}")
                host.run(f"ip link set {INTERFACE} up")
                host.run("ip link set lo up")
                self.limit(number, self.rate)
            self._open = undo.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def check(self) -> None:
        """Raise :class:`NetworkError` if the cables are gone."""
        if self._cables is not None and self._cables.poll() is not None:
            raise NetworkError("the process that carries the packets of cables with a delay was killed.")

    def _plug_in(self, undo: ExitStack) -> None:
        """Join ``INTERFACE`` of each host to a port of the switch."""
        if self.delay:
            holders = (str(host.holder) for host in (self.switch, *self.hosts))
            command = [sys.executable, cables.__file__, str(self.delay), *holders]
            self._cables = undo.enter_context(_Holder("cables with a delay", command))
            return
        for number, host in enumerate(self.hosts):
            self.switch.run(f"ip link add port{number} type veth peer name {INTERFACE} netns {host.holder}")

    def limit(self, number: int, rate: str | None) -> None:
        """Limit what host ``number`` sends, and what it receives, to ``rate`` each."""
        self.queue(number, "sends", None if rate is None else _token_bucket(rate))
        self.queue(number, "receives", None if rate is None else _token_bucket(rate))

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
    """A process that holds what it makes, a namespace or cables, until the block ends, or this process."""

    def __init__(self, what: str, command: Sequence[str]) -> None:
        self._what, self._command = what, command

    def __enter__(self) -> subprocess.Popen[str]:
        self._process = subprocess.Popen(  # noqa: S603
            self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
        )
        assert self._process.stdout is not None
        said = self._process.stdout.readline().strip()
        if said != "ready":
            self.__exit__()
            raise NetworkError(f"{self._what} could not be made: {said or 'see above'}.")
        return self._process

    def __exit__(self, *_: object) -> None:
        with self._process:  # closes the pipes, and waits
            self._process.kill()


def _namespace() -> _Holder:
    return _Holder("a network namespace", ("unshare", "--net", "sh", "-c", "echo ready; exec cat"))


def _token_bucket(rate: str) -> str:
    bandwidth = Link.parse(f"{rate},0s").bandwidth
    burst = max(2 * _FRAME, int(bandwidth * _BURST_SECONDS))
    return f"tbf rate {rate} burst {burst} limit {burst + max(_SHORTEST_QUEUE, int(bandwidth * _QUEUE_SECONDS))}"
