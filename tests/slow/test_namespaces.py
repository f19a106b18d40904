"""A network of namespaces: what it needs, how fast it is, and that nothing of it is left."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tritoncomm.slow import namespaces

from processes import children, is_running

needs_namespaces = pytest.mark.skipif(namespaces.missing() is not None, reason=str(namespaces.missing()))


def test_missing_tools(monkeypatch) -> None:
    """Without iproute2 or root, one sentence says so."""
    monkeypatch.setattr(namespaces.shutil, "which", lambda name: None if name == "tc" else name)
    assert namespaces.missing() == "Network namespaces need the command tc: install iproute2."
    monkeypatch.setattr(namespaces.shutil, "which", lambda name: name)
    monkeypatch.setattr(namespaces.os, "geteuid", lambda: 1000)
    assert "need root" in namespaces.missing()


RECEIVES = """
import socket, time
with socket.create_server(("10.77.0.2", 5000)) as server:
    print("ready", flush=True)
    connection, _ = server.accept()
    while connection.recv(1) == b"?":
        connection.sendall(b"!")
    started, size, wrong = time.monotonic(), 1, 0
    while data := connection.recv(1 << 16):
        size, wrong = size + len(data), wrong + len(data.strip(b"x"))
    print(size, wrong, 8 * size / (time.monotonic() - started), flush=True)
"""
SENDS = """
import socket, time
with socket.create_connection(("10.77.0.2", 5000)) as connection:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for _ in range(10):
        started = time.monotonic()
        connection.sendall(b"?")
        connection.recv(1)
        print(time.monotonic() - started)
    connection.sendall(b"x" * 1_000_000)
"""


@needs_namespaces
@pytest.mark.parametrize("delay", ["0s", "20ms"])
def test_rate_and_delay(delay: str) -> None:
    """A host sends as fast as the rate says, less the headers, and a packet is under way for the delay.

    All bytes arrive. No process is left at the end. A busy machine only makes the network slower, so the best of some
    measurements counts for what it must reach.
    """

    def start(script: str, host: namespaces.Host) -> subprocess.Popen[str]:
        command = [*host.inside, sys.executable, "-c", script]
        return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)

    def measure() -> tuple[float, float]:
        with start(RECEIVES, network.hosts[1]) as server:
            assert server.stdout.readline() == "ready\n"
            with start(SENDS, network.hosts[0]) as client:
                there_and_back = min(map(float, client.stdout.read().split()))
            size, wrong, rate = map(float, server.stdout.readline().split())
        assert client.returncode == server.returncode == 0
        assert (size, wrong) == (1_000_000, 0)
        assert rate < 1.0e7
        assert there_and_back > 2 * network.delay
        return rate, there_and_back

    rate, there_and_back = 0.0, float("inf")
    with namespaces.Network(2, "10mbit", delay) as network:
        holders = [host.holder for host in network.hosts]
        for _ in range(8):
            found = measure()
            rate, there_and_back = max(rate, found[0]), min(there_and_back, found[1])
            if rate > 0.7e7 and there_and_back < 2 * network.delay + 0.01:
                break
        else:
            pytest.fail(f"{rate:g} bits per second at most, and {there_and_back:g} s at least")
    assert not any(map(is_running, holders))


@needs_namespaces
def test_delay_without_tap(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Where the system has no virtual interfaces for a process, one sentence says so, and nothing is left."""
    script = tmp_path / "cables.py"
    script.write_text(Path(namespaces.cables.__file__).read_text().replace("/dev/net/tun", "/dev/net/missing"))
    monkeypatch.setattr(namespaces.cables, "__file__", str(script))
    before = children(os.getpid())
    with pytest.raises(namespaces.NetworkError) as raised, namespaces.Network(1, None, "5ms"):
        pass
    assert str(raised.value) == (
        "cables with a delay could not be made: [Errno 2] No such file or directory: '/dev/net/missing': a delay "
        "needs the kernel's TAP interfaces, so load the module tun, or leave the delay out."
    )
    assert children(os.getpid()) == before
