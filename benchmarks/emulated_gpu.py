"""Count host synchronizations, kernel launches and bytes of a step of every method on emulated GPUs and NCCL.

No GPU is used, and nothing is timed. Ranks are threads of one process, with tensors that compute on the CPU and count
what a GPU would do (``tests/emulated_cuda``). A step is a whole ``step()`` of an AdamW optimizer from ``wrap``: small
tensors, the exchange, its confirmation, and the staleness-aware update. Figures are those of the rank that waits most
often. The first step evaluates thresholds and partitions, and creates states. The last step is an ordinary one: in the
first 20, parameters are measured and checked, and some methods evaluate again until their thresholds fit.

``static`` messages have a fixed length, ``exact`` ones are as long as their entries need. The file of ``--json`` also
says where each synchronization is.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import tritoncomm
from torch import nn
from tritoncomm.algorithms import field_names, takes_density

import baselines  # noqa: F401 - registers them
import script

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from emulated_cuda import ranks
from emulated_cuda.device import current_gpu, to_gpu
from emulated_cuda.network import Network

SHAPES = ((64, 64), (64, 48), (40, 64), (64,), (48,), (40,))
# What AdamW needs of these methods.
FIELDS: dict[str, dict[str, Any]] = {"dgc": {"momentum": 0.0}, "random_block": {"reduced_lr": True}}
Row = dict[str, Any]


def count(method: str, form: str, workers: int, density: float, steps: int) -> list[Row]:
    """Return what the first and the last step of a method cost on emulated GPUs, on the rank that waits most often."""
    fields = FIELDS.get(method, {}) | ({"density": density} if takes_density(method) else {})
    own = field_names(method)
    fields |= {"static": form == "static"} if "static" in own else {}
    fields |= {"values": "fp32"} if "values" in own else {}

    def main(rank: int) -> list[Row]:
        generator = torch.Generator().manual_seed(0)
        parameters = [nn.Parameter(to_gpu(torch.randn(shape, generator=generator))) for shape in SHAPES]
        optimizer = tritoncomm.wrap(
            torch.optim.AdamW(parameters, lr=1e-3), method, warmup_steps=0, small="8bit", late=True, **fields
        )
        gpu, seen = current_gpu(), []
        generator = torch.Generator().manual_seed(rank)
        for step in range(steps):
            for i, parameter in enumerate(parameters):
                common = torch.Generator().manual_seed(100 * step + i)
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.grad = to_gpu(0.5 * torch.randn(parameter.shape, generator=common) + noise)
            gpu.reset()
            optimizer.step()
            places = Counter({f"{where} {kind}": number for (kind, where), number in gpu.syncs.items()})
            row = {"synchronizations": places.total(), "launches": sum(gpu.launches.values())}
            meter = optimizer.metrics()  # which waits, too, but is no part of the step
            row |= {"bytes_sent": int(meter["bytes_sent"]), "messages": int(meter["messages_sent"])}
            seen.append(row | {"places": dict(places.most_common())})
        return seen

    found = ranks.run(main, workers, seed=None, network=Network(workers, seed=None, limit=300.0))
    return [
        {"method": method, "form": form, "workers": workers, "step": name}
        | max((rank[number] for rank in found), key=lambda row: row["synchronizations"])
        for name, number in (("first", 0), ("ordinary", steps - 1))
    ]


def count_all(options: argparse.Namespace) -> list[Row]:
    """Print and return a row for the first and the ordinary step of each method, form and number of workers."""
    torch.set_num_threads(1)
    columns = ("synchronizations", "launches", "bytes_sent", "messages")
    print(f"{'method':16}{'form':>7}{'workers':>8}  {'step':9}" + "".join(f"{name:>17}" for name in columns))
    rows: list[Row] = []
    for workers, method, form in itertools.product(options.workers, options.algo, options.form):
        if "static" not in field_names(method) and form != options.form[0]:
            continue  # it has one form
        for row in count(method, form, workers, options.density, options.steps):
            figures = "".join(f"{row[name]:17}" for name in columns)
            print(f"{method:16}{form:>7}{workers:8}  {row['step']:9}{figures}", flush=True)
            rows.append(row)
    return rows


def arguments() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = script.parser(__doc__)
    parser.add_argument("--algo", nargs="+", default=tritoncomm.algorithms(), choices=tritoncomm.algorithms())
    parser.add_argument("--workers", type=int, nargs="+", default=[2, 8, 64])
    parser.add_argument("--form", nargs="+", default=["static"], choices=["exact", "static"], help="form of messages")
    parser.add_argument("--density", type=float, default=0.03)
    parser.add_argument("--steps", type=int, default=24, help="the last one is the ordinary step")
    return parser


def main() -> None:
    """Count, print the table, and write the requested file."""
    options = arguments().parse_args()
    if options.smoke:
        options.workers, options.algo, options.steps = [2], ["oktopk", "dense"], 2
    rows = count_all(options)
    settings = {"density": options.density, "steps": options.steps, "shapes": SHAPES}
    script.write(options.json, {"machine": script.machine(), "settings": settings, "rows": rows})


if __name__ == "__main__":
    main()
