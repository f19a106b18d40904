"""What all scripts have: their options, the description of the machine, and the file of their figures."""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np
import torch


def parser(doc: str | None) -> argparse.ArgumentParser:
    """Return a parser whose help is the docstring of the script, with ``--json`` and ``--smoke``."""
    made = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--json", type=Path, help="write the figures to this file")
    made.add_argument("--smoke", action="store_true", help="small and quick: only checks that the script runs")
    return made


def write(path: Path | None, content: dict[str, Any]) -> None:
    """Write ``content`` to the file of ``--json``, if there is one."""
    if path:
        path.write_text(json.dumps(content, indent=1) + "\n")


def machine(device: str = "cpu") -> dict[str, str]:
    """Return machine, versions, commit and date of this run."""
    found = {"python": platform.python_version(), "torch": torch.__version__, "numpy": np.__version__}
    if device == "cpu":
        load = f"{os.getloadavg()[0]:.1f}"
        found |= {"processor": _processor(), "threads": str(torch.get_num_threads()), "load": load}
    else:
        import triton  # not required on a CPU

        found |= {"gpu": torch.cuda.get_device_name(), "triton": triton.__version__, "cuda": str(torch.version.cuda)}
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12"]
    commit = subprocess.run(command, capture_output=True, text=True, check=False, cwd=Path(__file__).parent)
    return found | {"commit": commit.stdout.strip() or "unknown", "date": f"{datetime.now(timezone.utc):%Y-%m-%d}"}


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return f"{names[0]}, {len(names)} cores" if names else platform.processor() or platform.machine()
