"""Compare the behavior in failures of plain DDP, PyTorch's PowerSGD hook and tritoncomm, in one run.

This library trains a plain module, a module in DDP, and one that FSDP2 has sharded in replicas of one rank.

Each situation runs on real gloo processes with each library, and the observed behavior is printed. A process that is
still running after ``LIMIT`` seconds counts as hanging. The behavior is ``good`` if all ranks continue with equal
parameters, or if all surviving ranks raise an error that says what is wrong. No residual may be lost. A situation that
does not apply is left out.
"""

from __future__ import annotations

import argparse
import inspect
import json
import os
import platform
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from tritoncomm.scheduler.local_workers import WorkerError, run_workers

from torture_situations import GOOD_WITH_FSDP, NOT_APPLICABLE, SITUATIONS
from torture_trainer import OURS, TIMEOUT, VICTIM, WORKERS, WRAP_FSDP, Trainer

LIMIT = 40
LIBRARIES = ("DDP", "PowerSGD", *OURS)


@dataclass
class Row:
    """The observed behavior of one library in one situation, and whether it is good."""

    situation: str
    library: str
    seen: str
    good: bool


def act(rank: int, world_size: int, send: Callable[[Any], None], situation: str, library: str, folder: str) -> None:
    """Run the situation in one of ``world_size`` worker processes."""
    assert world_size == WORKERS
    action, _ = SITUATIONS[situation]
    trainer = Trainer(library, rank)
    wanted = inspect.signature(action).parameters
    extra = {name: value for name, value in (("library", library), ("folder", folder)) if name in wanted}
    action(trainer, lambda text: send((rank, text)), **extra)
    os._exit(0)


def observe(situation: str, library: str, folder: str) -> Row:
    """Run the situation with the library and return the observed behavior."""
    heard: dict[int, str] = {}
    died = ""
    started = time.monotonic()
    try:
        run_workers(
            act, WORKERS, situation, library, folder,
            listen=lambda report: heard.__setitem__(*report), timeout=timedelta(seconds=TIMEOUT),
            limit=timedelta(seconds=LIMIT), grace=timedelta(seconds=LIMIT),
        )  # fmt: skip
    except WorkerError as error:
        died = str(error)
    absent = situation in {"a rank is killed", "a rank skips a step"}
    expected = [r for r in range(WORKERS) if not (absent and r == VICTIM)]
    texts = list(dict.fromkeys(heard[rank] for rank in sorted(heard)))
    silent = [rank for rank in expected if rank not in heard]
    if "still running" in died:
        texts.append(f"hangs (more than {time.monotonic() - started:.0f} s)")
    elif silent and "exit code" in died and situation != "a rank is killed":
        texts.append(f"rank {', '.join(map(str, silent))}: process aborted or sent no report")
    elif silent:
        texts.append(f"rank {', '.join(map(str, silent))}: no report")
    good = GOOD_WITH_FSDP.get(situation) if library == WRAP_FSDP else None
    good = good or SITUATIONS[situation][1]
    fine = not silent and all(
        (all(part in text for part in good.split(", ")) and "does not n" not in text) or text == "no residual"
        for text in texts
    )
    return Row(situation, library, "; ".join(texts), fine)


def main() -> None:
    """Run every situation with every library and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--situation", nargs="+", default=list(SITUATIONS), choices=list(SITUATIONS), metavar="NAME")
    parser.add_argument("--library", nargs="+", default=list(LIBRARIES), choices=LIBRARIES, metavar="NAME")
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    parser.add_argument("--smoke", action="store_true", help="only two situations, only with this library")
    options = parser.parse_args()
    if options.smoke:
        options.situation, options.library = ["NaN on one rank, no scaler", "save and load"], OURS
    import tempfile

    rows: list[Row] = []
    for situation in options.situation:
        for library in options.library:
            if (situation, library) in NOT_APPLICABLE:
                continue
            with tempfile.TemporaryDirectory() as folder, suppress(KeyboardInterrupt):
                rows.append(observe(situation, library, folder))
                row = rows[-1]
                print(f"{row.situation:40}{row.library:19}{'good' if row.good else 'BAD ':6}{row.seen}", flush=True)
    if options.json:
        machine = f"{platform.machine()}, torch {torch.__version__}, Python {platform.python_version()}, gloo"
        content = {"machine": machine, "workers": WORKERS, "rows": [asdict(row) for row in rows]}
        options.json.write_text(json.dumps(content, indent=1) + "\n")
    ours = [row for row in rows if row.library in OURS and not row.good]
    raise SystemExit(1 if ours else 0)


if __name__ == "__main__":
    main()
