"""How much does Python do in one step? It counts calls of functions, which do not depend on the machine.

Two workers train ten tensors with 9,900 parameters by AdamW, once behind ``DistributedDataParallel``, and once wrapped
with the defaults. Calls of functions in Python and in C count, as cProfile counts them, from the backward pass to the
end of ``step()``: the median of several ordinary steps, after the dense ones at the start. ``--top`` lists the
functions that are called most.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections import Counter
from itertools import pairwise
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
import tritoncomm
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from tritoncomm.demo.local_workers import Send, run_workers

import script

WORKERS, START, STEPS = 2, 16, 9
WIDTHS = (60, 50, 40, 40, 40, 20)  # five linear layers: 9,900 parameters with their biases


def network() -> nn.Module:
    """Return the model."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for before, after in pairwise(WIDTHS):
        layers += [nn.Linear(before, after), nn.Tanh()]
    return nn.Sequential(*layers)


def count(rank: int, _: int, send: Send, wraps: bool, steps: int) -> None:
    """Train, and send the calls of each function in the median of ``steps`` ordinary steps."""
    model = network()
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters())
    trained: nn.Module = model
    if wraps:
        optimizer = tritoncomm.wrap(optimizer)
    else:
        trained = DistributedDataParallel(model)
    found: list[Counter[CodeType]] = []
    generator = torch.Generator().manual_seed(rank)
    for _ in range(START + 2 + steps):
        optimizer.zero_grad()
        loss = trained(torch.randn(8, WIDTHS[0], generator=generator)).square().mean()
        calls: Counter[CodeType] = Counter()

        def note(frame: FrameType, event: str, _: Any, calls: Counter[CodeType] = calls) -> None:
            if event in ("call", "c_call"):
                calls[frame.f_code] += 1  # a call of C counts for the function that makes it

        sys.setprofile(note)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        sys.setprofile(None)
        found.append(calls)
    if rank == 0:
        found = found[START + 2 :]
        middle = statistics.median_low([each.total() for each in found])
        names: Counter[str] = Counter()
        for code, calls in next(each for each in found if each.total() == middle).items():
            file = Path(code.co_filename)
            names[f"{file.parent.name}/{file.name}:{code.co_name}"] += calls
        send(names)


def counted(steps: int, *, wraps: bool) -> Counter[str]:
    """Return the calls of each function in the median of ``steps`` steps of the first worker."""
    heard: list[Counter[str]] = []
    run_workers(count, WORKERS, wraps, steps, listen=heard.append)
    return heard[0]


def arguments() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = script.parser(__doc__)
    parser.add_argument("--top", type=int, default=0, help="number of functions to list")
    return parser


def main() -> None:
    """Count, and print both totals."""
    options = arguments().parse_args()
    steps = 1 if options.smoke else STEPS
    dense, ours = counted(steps, wraps=False), counted(steps, wraps=True)
    print(f"Calls in a step: DistributedDataParallel {dense.total()}, tritoncomm {ours.total()}")
    for name, calls in ours.most_common(options.top):
        print(f"{calls:6} {name}")
    totals = {"ddp": dense.total(), "tritoncomm": ours.total()}
    script.write(options.json, {"machine": script.machine(), "calls": totals})


if __name__ == "__main__":
    main()
