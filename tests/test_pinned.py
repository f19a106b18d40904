"""Digests of whole runs: a change that is meant to change nothing leaves them as they are.

``python tests/test_pinned.py --renew`` computes them again and writes ``tests/pinned.json``.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import tritoncomm
from tritoncomm.step.options import default_fields

import laws
from recipes import FIELDS, under_test

PINNED = Path(__file__).with_name("pinned.json")
WORLD_SIZES, NUMEL, STEPS = (4, 7), 1536, 12
SHAPES, TRAINED_STEPS = ((24, 40), (40,), (3, 20, 20), (1,), (64, 7)), 6
OPTIMIZERS = {
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1),
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=1e-2, momentum=0.9),
}


def heavy_tailed(*shape: int, generator: torch.Generator) -> torch.Tensor:
    """Values whose sums are rounded, made of integers alone: the same on every machine."""
    return torch.randint(-50, 51, shape, generator=generator).float().pow(3) / 3


def simulated(rank: int) -> Iterator[tuple[str, dict[str, str]]]:
    """Of the recipes that ``rank`` simulates: indices, values, residuals and traffic of all steps and workers."""
    for name, recipe in list(under_test(0.02).items())[rank::2]:
        for wanted in WORLD_SIZES:
            case = laws.fitted(laws.Case(wanted, NUMEL, ()), recipe)
            world = tritoncomm.SimulatedWorld(recipe, case.world_size, case.numel)
            generator = torch.Generator().manual_seed(case.world_size)
            digests = {part: hashlib.blake2b(digest_size=8) for part in ("indices", "values", "residuals", "traffic")}
            for _ in range(STEPS):
                for mean in world.step(heavy_tailed(case.world_size, case.numel, generator=generator)):
                    digests["indices"].update(mean.indices.numpy().data)
                    digests["values"].update(mean.values.numpy().data)
                digests["residuals"].update(world.residuals.numpy().data)
                sizes = [(sent.messages, sent.bytes) for sent in (*world.traffic, *world.received)]
                digests["traffic"].update(repr(sizes).encode())
            yield f"{name}, {wanted} workers", {part: digest.hexdigest() for part, digest in digests.items()}


def trained(rank: int, algo: str, optimizer_name: str) -> tuple[dict[str, str], str]:
    """Of one rank that trains with ``wrap``: parameters, means, residuals and traffic, and the keys of a state dict."""
    parameters = [torch.nn.Parameter(torch.ones(shape)) for shape in SHAPES]
    bare = OPTIMIZERS[optimizer_name](parameters)
    fields = {"warmup_steps": 0, "dense_below": 64, "small": "fp32", **FIELDS.get(algo, {})}
    if default_fields(algo, fields):
        fields["values"] = "fp32"
    optimizer = tritoncomm.wrap(bare, algo=algo, density=0.05, **fields)
    generator = torch.Generator().manual_seed(rank)
    digests = {part: hashlib.blake2b(digest_size=8) for part in ("weights", "means", "residuals", "metrics")}
    for _ in range(TRAINED_STEPS):
        for parameter in parameters:
            parameter.grad = heavy_tailed(*parameter.shape, generator=generator) / 1e5
        optimizer.synchronize()
        for parameter in parameters:
            digests["means"].update(parameter.grad.numpy().data)
        optimizer.step()
        for parameter in parameters:
            digests["weights"].update(parameter.detach().numpy().data)
        for residual in optimizer.state_dict()["tritoncomm"]["residuals"]:
            digests["residuals"].update(residual.numpy().data)
        metrics = optimizer.metrics()
        kept = [name for name in metrics if "bytes" in name or name == "residual_norm"]
        digests["metrics"].update(repr([(name, metrics[name]) for name in kept]).encode())
    found = {part: digest.hexdigest() for part, digest in digests.items()}
    return found, " ".join(ours(optimizer.state_dict()))


def ours(state: dict[str, Any]) -> list[str]:
    """The keys that an optimizer of torch and ``wrap`` write; those of parameter groups are torch's alone."""
    return keys_of({name: state[name] for name in ("state", "tritoncomm")})


def keys_of(state: Any, path: str = "") -> list[str]:
    """Every path into nested mappings and lists, numbers of lists left out."""
    if isinstance(state, dict):
        return sorted({key for name, value in state.items() for key in keys_of(value, f"{path}/{name}")} | {path})
    if isinstance(state, (list, tuple)):
        return sorted({key for value in state for key in keys_of(value, f"{path}/*")} | {path})
    return [path]


def work(rank: int, store: str, out: str) -> None:
    """One of two processes: both train, and each one simulates half of the recipes."""
    found: dict[str, Any] = {"simulated": dict(simulated(rank)), "trained": {}, "state keys": {}}
    wait = timedelta(minutes=5)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2, timeout=wait)
    for algo in tritoncomm.algorithms():
        for optimizer_name in OPTIMIZERS:
            name = f"{algo}, {optimizer_name}"
            found["trained"][name], found["state keys"][name] = trained(rank, algo, optimizer_name)
    dist.barrier()
    dist.destroy_process_group()
    Path(out).write_text(json.dumps(found))


def computed() -> dict[str, Any]:
    """Everything that is pinned, computed by processes whose arithmetic uses no instructions of this machine's own."""
    environment = os.environ | {"ATEN_CPU_CAPABILITY": "default", "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / f"{rank}.json" for rank in range(2)]
        workers = [
            subprocess.Popen(
                [sys.executable, __file__, "--rank", str(rank), "--store", f"{folder}/store", "--out", str(file)],
                env=environment,
            )
            for rank, file in enumerate(files)
        ]
        assert [worker.wait() for worker in workers] == [0, 0]
        first, second = (json.loads(file.read_text()) for file in files)
    assert first["state keys"] == second["state keys"]
    first["simulated"] |= second["simulated"]
    first["trained"] = {name: [first["trained"][name], second["trained"][name]] for name in first["trained"]}
    return {"torch": torch.__version__, **first}


@pytest.fixture(scope="module")
def now() -> dict[str, Any]:
    """What this code computes."""
    return computed()


@pytest.mark.parametrize("what", ["simulated", "trained", "state keys"])
def test_pinned(now: dict[str, Any], what: str) -> None:
    """Nothing has moved since the digests were written."""
    pinned = json.loads(PINNED.read_text())
    moved = {name: (was, now[what].get(name)) for name, was in pinned[what].items() if now[what].get(name) != was}
    moved |= {name: (None, is_) for name, is_ in now[what].items() if name not in pinned[what]}
    assert not moved, f"written with torch {pinned['torch']}, this is {now['torch']}: {moved}"


def main() -> None:
    """Be a worker, or renew the file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--renew", action="store_true", help="write tests/pinned.json again")
    parser.add_argument("--rank", type=int)
    parser.add_argument("--store")
    parser.add_argument("--out")
    arguments = parser.parse_args()
    if arguments.rank is not None:
        work(arguments.rank, arguments.store, arguments.out)
    elif arguments.renew:
        PINNED.write_text(json.dumps(computed(), indent=1) + "\n")
    else:
        parser.error("nothing to do: give --renew")


if __name__ == "__main__":
    main()
