"""Cables with a delay between the hosts of a network and its bridge, for any kernel: what a host sends arrives later.

``namespaces.py`` starts this file as a script, in a process of its own. It imports nothing but the standard library.
Its arguments are the delay in seconds, the process that holds the namespace of the bridge, and those of the hosts. It
says ``ready`` when all cables are there, or why it cannot make them. It ends, and they with it, when its input is
closed.

Each end of a cable is a virtual interface whose packets come to this process (TAP). Here they wait, and then go out of
the other end. Segments of TCP come together, up to 64 kB at once, as they do between the two interfaces of a veth pair.
Four hosts that send 1 Gbit/s each take 0.4 of a core of an AMD EPYC, and eight with 100 Mbit/s, whose segments are
shorter, 0.7.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import select
import struct
import sys
import time
from collections import deque
from collections.abc import Sequence

_CLONE_NEWNET = 0x40000000
# Of linux/if_tun.h: whole Ethernet frames, each behind a header that says what is left to do for a network card. These
# are checksums, and cutting long segments of TCP over IPv4.
_TUNSETIFF, _TAP, _NO_PACKET_INFORMATION, _HEADER = 0x400454CA, 0x0002, 0x1000, 0x4000
_TUNSETOFFLOAD, _CHECKSUM, _SEGMENTATION = 0x400454D0, 1, 2
_LONGEST = 1 << 17  # bytes of a frame and its header, at most
_AT_ONCE = 64  # frames of one end, before the others have their turn


def enter(holder: int) -> None:
    """Move this thread into the network namespace of process ``holder``. Raises ``OSError``."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/proc/{holder}/ns/net") as namespace:  # noqa: PTH123 - /proc is not a folder of files
        if libc.setns(namespace.fileno(), _CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _end(holder: int, name: str) -> int:
    """Return the file of a new interface in the namespace of process ``holder``. It lasts as long as the file."""
    enter(holder)
    file = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(file, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _TAP | _NO_PACKET_INFORMATION | _HEADER))
    fcntl.ioctl(file, _TUNSETOFFLOAD, _CHECKSUM | _SEGMENTATION)
    return file


def _carry(delay: float, cables: Sequence[tuple[int, int]], stop: int) -> None:
    """Carry frames from one end of each cable to the other, until there is something to read from ``stop``.

    What comes from the first end, of the host, waits for ``delay`` seconds. What comes from the other goes on at once.
    """
    other = {file: end for near, far in cables for file, end in ((near, far), (far, near))}
    hosts = {near for near, _ in cables}
    waiting: deque[tuple[float, int, bytes]] = deque()  # the moment, the end and the frame, in the order of moments
    while True:
        pause = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
        readable, _, _ = select.select((*other, stop), (), (), pause)  # epoll waits for whole milliseconds
        for file in readable:
            if file == stop:
                return
            for _ in range(_AT_ONCE):
                try:
                    frame = os.read(file, _LONGEST)
                except OSError:  # there is none, or the interface is down
                    break
                if file in hosts:
                    waiting.append((time.monotonic() + delay, other[file], frame))
                else:
                    _send(other[file], frame)
        while waiting and waiting[0][0] <= time.monotonic():
            _send(*waiting.popleft()[1:])


def _send(end: int, frame: bytes) -> None:
    with contextlib.suppress(OSError):  # an interface that is down loses it, as a cable does that is not plugged in
        os.write(end, frame)


def _main(delay: str, bridge: str, *hosts: str) -> None:
    cables, said = [], "ready"
    try:
        for number, host in enumerate(hosts):
            cables.append((_end(int(host), "eth0"), _end(int(bridge), f"port{number}")))
    except OSError as error:
        said = f"{error}: a delay needs the kernel's TAP interfaces, so load the module tun, or leave the delay out"
    sys.stdout.write(said + "\n")
    sys.stdout.flush()
    _carry(float(delay), cables, sys.stdin.fileno())


if __name__ == "__main__":
    _main(*sys.argv[1:])
