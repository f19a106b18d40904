"""The scripts of the how-to pages run as printed, on two processes."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from test_docs import blocks

TORCHRUN = ["-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone"]


@pytest.mark.parametrize(
    ("page", "needs", "launcher"),
    [
        ("torchrun", "torch", TORCHRUN),
        ("ddp", "torch", TORCHRUN),
        ("fsdp", "torch", TORCHRUN),
        ("accelerate", "accelerate", TORCHRUN),
        ("transformers", "transformers", TORCHRUN),
        ("lightning", "lightning", []),  # starts its second process itself
    ],
)
def test_page(page: str, needs: str, launcher: list[str], tmp_path: Path) -> None:
    """Both ranks come to the end and report an exchange that sent something."""
    if importlib.util.find_spec(needs) is None:
        pytest.skip(f"{needs} is not installed: tox -e trainers has it")
    script = tmp_path / "train.py"
    script.write_text(blocks(f"docs/how-to/{page}.md")[0])
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(  # noqa: S603 - our own page
        [sys.executable, *launcher, str(script)],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=180, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    # Two processes may write into one line.
    reported = dict(re.findall(r"rank (\d): (.*?(?:per step|delivered))", done.stdout))
    assert sorted(reported) == ["0", "1"], done.stdout
    for text in reported.values():
        assert not re.search(r"\b0 bytes|\b0\.000 delivered|loss nan", text), text
