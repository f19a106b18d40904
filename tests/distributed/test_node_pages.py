"""The commands of pages on several nodes run as printed, with the scripts beside them, on this machine."""

from __future__ import annotations

import os
import re
import shlex
import socket
import subprocess
from pathlib import Path
from subprocess import PIPE

import pytest

from depth import TORCHRUN
from pages import blocks, code_of, in_place_of_ddp, section

pytestmark = pytest.mark.skipif(not Path("/bin/bash").exists(), reason="the commands are for bash")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return probe.getsockname()[1]


def _run(commands: str, folder: Path, nodes: int) -> str:
    """Run the commands on so many nodes, and return what all of them print."""
    names = {"STORE:29400": f"localhost:{_free_port()}", "OWN": "localhost", "wg0": "lo"}
    for name, here in ({"HOST:29400": names["STORE:29400"]} | names).items():
        commands = commands.replace(name, here)
    script = f'torchrun() {{ {shlex.join(TORCHRUN)} "$@"; }}\n{commands}'
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "CUDA_VISIBLE_DEVICES": ""}
    started = [
        subprocess.Popen(  # noqa: S603 - commands of our own pages
            ["/bin/bash", "-ec", script], cwd=folder, env=environment, stdout=PIPE, stderr=PIPE, text=True
        )
        for _ in range(nodes)
    ]
    try:
        written = [each.communicate(timeout=240) for each in started]
    finally:
        for each in started:
            each.kill()
    assert [each.returncode for each in started] == [0] * nodes, written
    return "".join(out for out, _ in written)


def _losses(printed: str) -> dict[str, float]:
    """Return the loss that each rank reports."""
    found = re.findall(r"rank (\d): loss ([\d.]+), .*?\b[1-9]\d* bytes per step", printed)
    return {rank: float(loss) for rank, loss in found}


def test_two_sites_of_several_ranks(tmp_path: Path) -> None:
    """The script and the command of the page train four ranks at two sites."""
    page = "docs/how-to/across-sites.md"
    (tmp_path / "train.py").write_text(in_place_of_ddp(page, 1))
    (command,) = code_of(section(page, "Several GPUs per site"), "sh")
    losses = _losses(_run(command, tmp_path, nodes=2))
    assert sorted(losses) == ["0", "1", "2", "3"]
    assert max(losses.values()) < 60


def test_fewer_nodes(tmp_path: Path) -> None:
    """Two nodes save, and one resumes behind the last save, by the commands of the page and the whole script."""
    (tmp_path / "train.py").write_text(
        blocks("docs/how-to/torchrun.md")[0].replace("STEPS, SAVE_EVERY = 40", "STEPS, SAVE_EVERY = 14")
    )
    (commands,) = code_of(section("docs/how-to/checkpoints.md", "Resume with fewer nodes"), "sh")
    first, second = commands.splitlines()
    assert sorted(_losses(_run(first, tmp_path, nodes=2))) == ["0", "1", "2", "3"]
    printed = _run(second, tmp_path, nodes=1)
    assert sorted(_losses(printed)) == ["0", "1"]
    assert printed.count("after step 10,") == 2
