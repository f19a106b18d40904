"""The job of the SLURM page and the script of the torchrun page run as printed, with stand-ins for SLURM."""

from __future__ import annotations

import os
import random
import re
import shlex
import socket
import subprocess
from pathlib import Path

import pytest

from depth import TORCHRUN
from pages import ROOT, blocks

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
LAUNCHER = f"""#!/bin/bash
exec {shlex.join(TORCHRUN)} "$@"
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
    for name, text in (("srun", srun), ("scontrol", SCONTROL), ("torchrun", LAUNCHER)):
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


@pytest.mark.skipif(not Path("/bin/bash").exists(), reason="the job is a bash script")
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
    assert len(list((tmp_path / "checkpoints/step-000009").glob("data-*/__*.distcp"))) == 4
    assert not (tmp_path / "requeued").exists()


@pytest.mark.skipif(not Path("/bin/bash").exists(), reason="the job is a bash script")
@pytest.mark.parametrize(("restarts", "requeued"), [(None, True), (2, True), (3, False)])
def test_failed_job_is_requeued(tmp_path: Path, restarts: int | None, requeued: bool) -> None:
    """A job whose script fails is requeued three times, and reports the failure in any case."""
    done = _submit(tmp_path, restarts, srun="#!/bin/bash\nexit 1\n")
    assert done.returncode == 1
    assert (tmp_path / "requeued").exists() == requeued
