"""Measure how long it takes to write and read packed messages, relative to a plain copy in the same run.

A section holds the entries of one message that lie in one range. The time includes everything that a method calls:
which values fit together, the words, and the values that the receiver will decode. Values are those of a residual that
has just passed its threshold.
"""

from __future__ import annotations

import argparse
import statistics
from dataclasses import asdict, dataclass

import numpy as np
import torch
from tritoncomm.primitives.packing import Section

import script
from selection import Clock
from tritoncomm_kernels.formats import ENTRY_FORMATS

SMALL = [(10_000, 64), (3_000, 300), (100_000, 1_000)]  # range, entries
WARM_UPS = 2
CALLS = 300  # of a small section, on a CPU


@dataclass(frozen=True)
class Row:
    """One format. ``write``, ``read`` and ``copy`` are the least milliseconds of a call.

    ``copies`` is the median over the turns of the time to write and read, divided by that of a copy of all fp32 values.
    """

    values: str
    numel: int
    entries: int
    bits: float
    write: float
    read: float
    copy: float
    copies: float


def entries(numel: int, count: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``count`` ascending positions and their values."""
    generator = np.random.default_rng(0)
    indices = np.sort(generator.choice(numel, count, replace=False)).astype(np.int32)
    values = (1 + generator.exponential(0.2, count)) * generator.choice([-1.0, 1.0], count)
    return torch.from_numpy(indices).to(device), torch.from_numpy(values.astype(np.float32)).to(device)


def measure(numel: int, count: int, values: str, turns: int, device: str) -> Row:
    """Write, read and copy in turn. Raises an error if the receiver gets other entries than the sender expects."""
    clock, section = Clock(device), Section(0, numel, count, values, packed="always")
    indices, numbers = entries(numel, count, device)
    source, target = torch.ones(numel, device=device), torch.zeros(numel, device=device)
    message, delivered = section.encode(indices, numbers)
    found = section.decode(message)
    assert torch.equal(found.indices, delivered.indices)
    assert torch.equal(found.values, delivered.values)
    times = [
        (
            clock.time(lambda: section.encode(indices, numbers)),
            clock.time(lambda: section.decode(message)),
            clock.time(lambda: target.copy_(source)),
        )
        for _ in range(WARM_UPS + turns)
    ][WARM_UPS:]
    write, read, copy = (min(column) for column in zip(*times, strict=True))
    copies = statistics.median((w + r) / c for w, r, c in times)
    return Row(values, numel, count, 32 * section.words / count, write, read, copy, copies)


def arguments() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = script.parser(__doc__)
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--n", type=float, default=25e6, help="number of elements")
    parser.add_argument("--density", type=float, nargs="+", default=[0.001, 0.01, 0.05])
    parser.add_argument("--turns", type=int, default=15)
    return parser


def main() -> None:
    """Print two tables, sections of a whole vector and small ones, and write the requested file."""
    options = arguments().parse_args()
    if options.smoke:
        options.n, options.density, options.turns = 200e3, [0.01], 2
    torch.set_num_threads(1)
    rows, numel = [], int(options.n)
    print(f"{'':14}{'bits/entry':>11}{'write ms':>10}{'read ms':>9}{'copy ms':>9}{'x copy':>8}")
    for density in options.density:
        for values in ENTRY_FORMATS:
            row = measure(numel, int(numel * density), values, options.turns, options.device)
            rows.append(row)
            name = f"{density:.1%} {values}"
            print(f"{name:14}{row.bits:11.2f}{row.write:10.2f}{row.read:9.2f}{row.copy:9.2f}{row.copies:8.2f}")
    print(f"\n{'':26}{'bits/entry':>11}{'write us':>10}{'read us':>9}")
    small = []
    for length, count in SMALL:
        for values in ENTRY_FORMATS:
            turns = CALLS if options.device == "cpu" and not options.smoke else options.turns
            row = measure(length, count, values, turns, options.device)
            small.append(row)
            name = f"{count:,} in {length:,}, {values}"
            print(f"{name:26}{row.bits:11.2f}{1e3 * row.write:10.1f}{1e3 * row.read:9.1f}")
    found = {"rows": [asdict(row) for row in rows], "small": [asdict(row) for row in small]}
    script.write(options.json, {"machine": script.machine(options.device)} | found)


if __name__ == "__main__":
    main()
