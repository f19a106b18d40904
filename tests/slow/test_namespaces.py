"""A network of namespaces: what it needs, how fast it is, and that nothing of it is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest
from tritoncomm.slow import namespaces

from processes import end_soon, is_running

needs_namespaces = pytest.mark.skipif(namespaces.missing() is not None, reason=str(namespaces.missing()))


def test_missing_tools(monkeypatch) -> None:
    """Without iproute2 or root, one sentence says so."""
    monkeypatch.setattr(namespaces.shutil, "which", lambda name: None if name == "tc" else name)
    assert namespaces.missing() == "Network namespaces need the command tc: install iproute2."
    monkeypatch.setattr(namespaces.shutil, "which", lambda name: name)
    monkeypatch.setattr(namespaces.os, "geteuid", lambda: 1000)
    assert "need root" in namespaces.missing()


SEND = """
import socket, time
from tritoncomm.slow.namespaces import Host
Host({}, "").enter()
with socket.create_server(("10.77.0.2", 5000)) as server:
    print("ready", flush=True)
    connection, _ = server.accept()
    started, size = time.monotonic(), 0
    while data := connection.recv(1 << 16):
        size += len(data)
    print(8 * size / (time.monotonic() - started))
"""
RECEIVE = """
import socket
from tritoncomm.slow.namespaces import Host
Host({}, "").enter()
with socket.create_connection(("10.77.0.2", 5000)) as connection:
    connection.sendall(bytes(1_000_000))
"""


@needs_namespaces
def test_rate_is_limited() -> None:
    """A host sends as fast as the rate says, less the headers, and no process is left at the end."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}

    def start(script: str, host) -> subprocess.Popen:
        command = [sys.executable, "-c", script.format(host.holder)]
        return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)

    with namespaces.Network(2, "10mbit") as network:
        holders = [host.holder for host in network.hosts]
        with start(SEND, network.hosts[1]) as server:
            assert server.stdout.readline() == "ready\n"
            with start(RECEIVE, network.hosts[0]) as client:
                pass
            rate = float(server.stdout.readline())
    assert client.returncode == server.returncode == 0
    assert 0.8e6 < rate / 10 < 1.0e6
    assert not any(map(is_running, holders))


@needs_namespaces
def test_delay_without_netem() -> None:
    """A delay is applied, or one sentence says that the kernel cannot."""
    said = []
    try:
        with namespaces.Network(1, "10mbit", "5ms"):
            pass
    except namespaces.NetworkError as error:
        said.append(str(error))
    assert all(text.startswith("delay=5ms needs netem, which this kernel does not have") for text in said)


KILLED = """
import time
from tritoncomm.slow.namespaces import Network
with Network(2) as network:
    print(*[host.holder for host in network.hosts], flush=True)
    time.sleep(60)
"""


@needs_namespaces
def test_nothing_is_left_after_a_kill() -> None:
    """If the process that made the network is killed, the network goes with it."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", KILLED]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        holders = [int(word) for word in process.stdout.readline().split()]
        assert len(holders) == 2
        assert all(map(is_running, holders))
        process.send_signal(signal.SIGKILL)
    assert end_soon(holders)
