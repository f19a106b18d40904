"""Measure words per rank of every method against the number of workers and the density, in simulation.

Prints the table of ``python -m tritoncomm simulate`` for several densities and kinds of gradients. The plot also shows
dense and the lower bound 2k(P-1)/P.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import tritoncomm
from tritoncomm.planning import planner
from tritoncomm.planning.comparison import Row, Source, compare_methods, picture, table
from tritoncomm.planning.synthetic_gradients import (
    AdversarialGradients,
    LayeredGradients,
    RecordedGradients,
    load_recording,
)
from tritoncomm.scheduler.cost import Link

import baselines  # noqa: F401 - registers them


def main() -> None:
    """Measure, print the tables, and write the requested files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--algo", nargs="+", default=tritoncomm.algorithms(), choices=tritoncomm.algorithms())
    parser.add_argument("--workers", type=int, nargs="+", default=[4, 8, 14, 32, 64, 256])
    parser.add_argument("--density", type=float, nargs="+", default=[0.01, 0.001])
    parser.add_argument("--numel", type=float, default=25e6)
    parser.add_argument("--link", type=Link.parse, default=Link())
    parser.add_argument("--recording", type=Path, help="file from demo --record, used as a third kind of gradients")
    parser.add_argument("--memory", type=float, default=1e9)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path, help="write PNGs; kind and density are added to this file name")
    parser.add_argument("--smoke", action="store_true", help="small and quick: only checks that the script runs")
    options = parser.parse_args()
    if options.smoke:
        options.workers, options.density, options.numel = [2, 5], [0.05], 4e3
    sources: dict[str, Source] = {"layered": LayeredGradients, "adversarial": AdversarialGradients}
    if options.recording:
        recording = load_recording(options.recording)
        sources["recorded"] = lambda numel, rank: RecordedGradients(numel, rank, recording)
    figures = []
    for kind, source in sources.items():
        for density in options.density:
            recipes = [planner.at(name, density) for name in options.algo]
            rows: list[Row] = []
            for row in compare_methods(
                recipes, options.workers, int(options.numel), options.link, source, memory=options.memory
            ):
                rows.append(row)
                print(f"{kind}, {density}: {row.workers} workers, {row.method}", file=sys.stderr, flush=True)
            print(f"\n{kind} gradients, density {density:.2%}\n{table(rows, options.link)}", flush=True)
            figures += [{"gradients": kind, **row.as_dict()} for row in rows]
            if options.plot:
                picture(rows, options.plot.with_stem(f"{options.plot.stem}-{kind}-{density:g}"))
            if options.json:
                options.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
