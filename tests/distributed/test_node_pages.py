"""The commands of pages on several nodes run as printed, with the scripts beside them, and stand-ins for SLURM."""

from __future__ import annotations

import os
import random
import re
import shlex
import socket
import subprocess
from pathlib import Path
from subprocess import PIPE

import pytest

from depth import torchrun
from pages import ROOT, blocks, code_of, in_place_of_ddp, section

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
    script = f'torchrun() {{ {shlex.join(torchrun())} "$@"; }}\n{commands}'
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


# Starts the command behind srun's options once per node, on this machine.
SRUN = """#!/bin/bash
while [[ "$1" == --* ]]; do shift; done
for node in $(seq "$SLURM_JOB_NUM_NODES"); do "$@" & tasks+=($!); done
for task in "${tasks[@]}"; do wait "$task" || code=1; done
exit "${code:-0}"
"""
SCONTROL = """#!/bin/bash
if [ "$1 $2" = "show hostnames" ]; then echo localhost; else echo "$@" >> requeued; fi
"""


def _job() -> int:
    """Return the number of a job whose port is free."""
    while True:
        job = random.randrange(1_000_000)  # noqa: S311 - any number
        with socket.socket() as probe:
            if probe.connect_ex(("localhost", 20_000 + job % 10_000)):
                return job


def _submit(folder: Path, restarts: int | None, srun: str = SRUN, nodes: int = 2) -> subprocess.CompletedProcess[str]:
    """Run the job of the page in ``folder`` on some ``nodes``, after so many restarts."""
    commands = folder / "bin"
    commands.mkdir(exist_ok=True)
    launcher = f'#!/bin/bash\nexec {shlex.join(torchrun())} "$@"\n'
    for name, text in (("srun", srun), ("scontrol", SCONTROL), ("torchrun", launcher)):
        (commands / name).write_text(text)
        (commands / name).chmod(0o755)
    (script,) = re.findall(r"```bash\n(.*?)```", (ROOT / "docs/how-to/slurm.md").read_text(), flags=re.DOTALL)
    (folder / "train.sbatch").write_text(script)
    environment = os.environ | {
        "PATH": f"{commands}{os.pathsep}{os.environ['PATH']}", "GLOO_SOCKET_IFNAME": "lo", "CUDA_VISIBLE_DEVICES": "",
        "SLURM_JOB_ID": str(_job()), "SLURM_JOB_NUM_NODES": str(nodes), "SLURM_JOB_NODELIST": "node[1-2]",
        "SLURM_CPUS_PER_TASK": "2",
    }  # fmt: skip
    if restarts is not None:
        environment["SLURM_RESTART_COUNT"] = str(restarts)
    return subprocess.run(
        ["/bin/bash", "train.sbatch"],
        cwd=folder, env=environment, capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip


def test_job_trains_and_resumes(tmp_path: Path) -> None:
    """Two nodes of two ranks train and save. One resumes behind the last checkpoint."""
    code, _ = blocks("docs/how-to/torchrun.md")
    (tmp_path / "train.py").write_text(code.replace("STEPS, SAVE_EVERY = 40, 10", "STEPS, SAVE_EVERY = 14, 5"))
    for restarts, first, nodes in ((None, 0, 2), (1, 10, 1)):
        done = _submit(tmp_path, restarts, nodes=nodes)
        assert done.returncode == 0, done.stderr
        reported = dict(
            re.findall(rf"rank (\d): loss ([\d.]+), rate 0.00010 after step {first}, [1-9]\d* bytes", done.stdout)
        )  # the schedule has reached its end
        assert sorted(reported) == ["0", "1", "2", "3"][: 2 * nodes], done.stdout
    assert len(list((tmp_path / "checkpoints/step-000009").glob("data-*/[!.]*"))) == 4
    assert not (tmp_path / "requeued").exists()


@pytest.mark.parametrize(("restarts", "requeued"), [(None, True), (2, True), (3, False)])
def test_failed_job_is_requeued(tmp_path: Path, restarts: int | None, requeued: bool) -> None:
    """A job whose script fails is requeued three times, and reports the failure in any case."""
    done = _submit(tmp_path, restarts, srun="#!/bin/bash\nexit 1\n")
    assert done.returncode == 1
    assert (tmp_path / "requeued").exists() == requeued
