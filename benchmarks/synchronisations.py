"""Count host synchronizations, kernel launches and bytes of one step of every method on emulated GPUs and NCCL.

No GPU is used, and nothing is timed. Ranks are threads of one process, with tensors that compute on the CPU and count
what a GPU would do (``tests/emulated_cuda``). A step is a whole ``step()`` of an AdamW optimizer from ``wrap``: small
tensors, the exchange, its confirmation, and the staleness-aware update. Figures are those of the busiest rank. The
first step evaluates thresholds and partitions, and creates states. The last step is an ordinary one: some methods
evaluate again in the steps between, until their thresholds fit. ``static`` messages have a fixed length, ``exact`` ones
are as long as their entries need.
"""

from __future__ import annotations

import argparse
import itertools
import json
import platform
import subprocess
import sys
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

import torch
import tritoncomm
from torch import nn
from tritoncomm.algorithms import takes_density

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

import baselines  # noqa: E402, F401 - registers them
from emulated_cuda import ranks  # noqa: E402
from emulated_cuda.device import current_gpu, to_gpu  # noqa: E402
from emulated_cuda.network import Network  # noqa: E402

# Seconds on a GPU, for the estimate of what a step costs beside the kernels' own time.
SYNC, LAUNCH = 15e-6, 5e-6
SHAPES = ((64, 64), (64, 48), (40, 64), (64,), (48,), (40,))
# What AdamW needs of these methods.
FIELDS: dict[str, dict[str, Any]] = {"dgc": {"momentum": 0.0}, "random_block": {"reduced_lr": True}}
FRAMING = ("tritoncomm/scheduler/wire.py", "tritoncomm/scheduler/process_group.py")


@dataclass
class Row:
    """One method with a number of workers, of the rank with most synchronizations in the step.

    ``framing`` are the synchronizations of headers, checks of messages and their packing: those in ``FRAMING``.
    """

    method: str
    form: str
    values: str
    workers: int
    step: str
    synchronizations: int
    framing: int
    launches: int
    bytes_sent: int
    messages: int
    milliseconds: float
    places: dict[str, int] = field(default_factory=dict)


class Tensors(nn.Module):
    """A model without a forward pass."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        made = [to_gpu(torch.randn(shape, generator=generator)) for shape in SHAPES]
        self.tensors = nn.ParameterList([nn.Parameter(each) for each in made])


def measure(method: str, form: str, values: str, workers: int, density: float, steps: int) -> list[Row]:
    """Return the first and the last step of a method."""
    fields: dict[str, Any] = FIELDS.get(method, {}) | ({"values": values} if values else {})
    if takes_density(method):
        fields["density"] = density
    if method != "dense":
        fields["static"] = form == "static"

    def main(rank: int) -> list[dict[str, Any]]:
        model = Tensors()
        optimizer = tritoncomm.wrap(
            torch.optim.AdamW(model.parameters(), lr=1e-3), method, warmup_steps=0, small="8bit",
            staleness="aware", **fields,
        )  # fmt: skip
        gpu, seen = current_gpu(), []
        generator = torch.Generator().manual_seed(rank)
        for step in range(steps):
            for i, parameter in enumerate(model.parameters()):
                common = torch.Generator().manual_seed(100 * step + i)
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.grad = to_gpu(0.5 * torch.randn(parameter.shape, generator=common) + noise)
            gpu.reset()
            optimizer.step()
            syncs, launches = Counter(gpu.syncs), sum(gpu.launches.values())
            meter = optimizer.metrics()  # which waits, too, but is no part of the step
            seen.append(
                {
                    "syncs": syncs,
                    "launches": launches,
                    "bytes": int(meter["bytes_sent"]),
                    "messages": int(meter["messages_sent"]),
                }
            )
        return seen

    found = ranks.run(main, workers, seed=None, network=Network(workers, seed=None, limit=300.0))
    rows = []
    for name, number in (("first", 0), ("ordinary", steps - 1)):
        busiest = max((rank[number] for rank in found), key=lambda each: sum(each["syncs"].values()))
        total = sum(busiest["syncs"].values())
        places: Counter[str] = Counter()
        for (kind, where), count in busiest["syncs"].items():
            places[f"{where} {kind}"] += count
        framing = sum(count for (_, where), count in busiest["syncs"].items() if where.startswith(FRAMING))
        seconds = total * SYNC + busiest["launches"] * LAUNCH
        rows.append(
            Row(
                method, form, values or "fp32", workers, name, total, framing, busiest["launches"], busiest["bytes"],
                busiest["messages"], round(1e3 * seconds, 3), dict(places.most_common()),
            )
        )  # fmt: skip
    return rows


def table(rows: list[Row]) -> str:
    """Return the rows as text."""
    head = f"{'method':16}{'form':>7}{'values':>7}{'workers':>8}  {'step':9}{'synchronizations':>17}{'framing':>8}"
    lines = [f"{head}{'launches':>9}{'bytes':>9}{'messages':>9}{'ms':>8}"]
    lines += [
        f"{row.method:16}{row.form:>7}{row.values:>7}{row.workers:8}  {row.step:9}{row.synchronizations:17}"
        f"{row.framing:8}{row.launches:9}{row.bytes_sent:9}{row.messages:9}{row.milliseconds:8.2f}"
        for row in rows
    ]
    return "\n".join(lines)


def machine() -> dict[str, Any]:
    """Return date, commit and versions of this count, and what was emulated."""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)  # noqa: S607
    return {
        "date": date.today().isoformat(),  # noqa: DTZ011 - the local day
        "commit": commit.stdout.strip(),
        "processor": platform.processor() or platform.machine(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "tritoncomm": tritoncomm.__version__,
        "emulated": "GPU, kernels, streams and NCCL: counts, not times",
    }


def main() -> None:
    """Count, print the table, and write the requested file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--algo", nargs="+", default=tritoncomm.algorithms(), choices=tritoncomm.algorithms())
    parser.add_argument("--workers", type=int, nargs="+", default=[2, 8, 64])
    parser.add_argument("--form", nargs="+", default=["static"], choices=["exact", "static"], help="form of messages")
    parser.add_argument("--values", nargs="+", default=["fp32"], help="formats of values, where the method has them")
    parser.add_argument("--density", type=float, default=0.03)
    parser.add_argument("--steps", type=int, default=6, help="the last one is the ordinary step")
    parser.add_argument("--places", action="store_true", help="print where each synchronization comes from")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--smoke", action="store_true", help="small and quick: only checks that the script runs")
    options = parser.parse_args()
    if options.smoke:
        options.workers, options.algo, options.steps = [2], ["oktopk", "dense"], 2
    torch.set_num_threads(1)
    print("On emulated GPUs, of the busiest rank. Nothing is timed: ms charges 15 us a synchronization, 5 us a launch.")
    rows: list[Row] = []
    for workers, method, form in itertools.product(options.workers, options.algo, options.form):
        if method == "dense" and form != options.form[0]:
            continue  # it has one form
        has_values = "values" in tritoncomm.recipe(method).__dataclass_fields__
        for values in options.values if has_values else [""]:
            started = time.perf_counter()
            rows += measure(method, form, values, workers, options.density, options.steps)
            seconds = time.perf_counter() - started
            print(f"{method}, {form}, {workers} workers: {seconds:.1f} s", file=sys.stderr, flush=True)
    print(table(rows))
    if options.places:
        for row in rows:
            print(f"\n{row.method}, {row.form}, {row.values}, {row.workers} workers, {row.step} step")
            print("\n".join(f"{count:6}  {place}" for place, count in row.places.items()))
    if options.json:
        settings = {"density": options.density, "steps": options.steps, "shapes": SHAPES}
        content = {"machine": machine(), "settings": settings, "rows": [asdict(row) for row in rows]}
        options.json.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
