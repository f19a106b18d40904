"""Digests of whole runs: a change that is meant to change nothing leaves them as they are.

``python tests/test_pinned.py --renew`` computes them again and writes ``tests/pinned.json``.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import json
import multiprocessing
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
from tritoncomm.algorithms import takes_density
from tritoncomm.step.recipes import default_fields

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))  # of the baselines, where pytest has not done so

import laws
from depth import DEEP, trials
from recipes import FIELDS, under_test

PINNED = Path(__file__).with_name("pinned.json")
WORLD_SIZES, NUMEL, STEPS = (4, 7), 1536, 12
SHAPES, TRAINED_STEPS = ((24, 40), (40,), (3, 20, 20), (1,), (64, 7)), 6
OPTIMIZERS = {
    # Fused: torch's other forms take square roots from MKL, whose last bit depends on the processor.
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1, fused=True),
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=1e-2, momentum=0.9),
}


def heavy_tailed(*shape: int, generator: torch.Generator) -> torch.Tensor:
    """Values whose sums are rounded, made of integers alone: the same on every machine."""
    return torch.randint(-50, 51, shape, generator=generator).float().pow(3) / 3


def simulated(rank: int, sizes: int) -> Iterator[tuple[str, dict[str, str]]]:
    """Of the recipes that ``rank`` simulates: indices, values, residuals and traffic of all steps and workers.

    Each recipe is simulated with ``sizes`` of the numbers of workers. If it is 1, methods have the larger one: the
    shape of an exchange is theirs, and what their other settings change does not depend on it.
    """
    for name, recipe in list(under_test(0.02).items())[rank::2]:
        for wanted in sorted(WORLD_SIZES, reverse=name in tritoncomm.algorithms())[:sizes]:
            case = laws.fitted(laws.Case(wanted, NUMEL, ()), recipe)
            world = tritoncomm.SimulatedWorld(recipe, case.world_size, case.numel)
            generator = torch.Generator().manual_seed(case.world_size)
            digests = {part: hashlib.blake2b(digest_size=8) for part in ("indices", "values", "residuals", "traffic")}
            for _ in range(STEPS):
                for mean in world.step(heavy_tailed(case.world_size, case.numel, generator=generator)):
                    digests["indices"].update(mean.indices.numpy().data)
                    digests["values"].update(mean.values.numpy().data)
                digests["residuals"].update(world.residuals.numpy().data)
                volumes = [(sent.messages, sent.bytes) for sent in (*world.traffic, *world.received)]
                digests["traffic"].update(repr(volumes).encode())
            yield f"{name}, {wanted} workers", {part: digest.hexdigest() for part, digest in digests.items()}


def trained(rank: int, algo: str, optimizer_name: str) -> tuple[dict[str, str], str]:
    """Of one rank that trains with ``wrap``: parameters, means, residuals and traffic, and the keys of a state dict."""
    parameters = [torch.nn.Parameter(torch.ones(shape)) for shape in SHAPES]
    bare = OPTIMIZERS[optimizer_name](parameters)
    fields = {"warmup_steps": 0, "dense_below": 64, "small": "fp32", **FIELDS.get(algo, {})}
    if default_fields(algo, fields):
        fields["values"] = "fp32"
    optimizer = tritoncomm.wrap(bare, algo=algo, density=0.05 if takes_density(algo) else None, **fields)
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


def work(rank: int, folder: str, sizes: int) -> None:
    """One of two processes: both train, and each one simulates half of the recipes."""
    found: dict[str, Any] = {"simulated": dict(simulated(rank, sizes)), "trained": {}, "state keys": {}}
    wait = timedelta(minutes=5)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2, timeout=wait)
    for algo in tritoncomm.algorithms():
        for optimizer_name in OPTIMIZERS:
            name = f"{algo}, {optimizer_name}"
            found["trained"][name], found["state keys"][name] = trained(rank, algo, optimizer_name)
    dist.barrier()
    dist.destroy_process_group()
    Path(folder, f"{rank}.json").write_text(json.dumps(found))


def start(folder: str, sizes: int) -> None:
    """Start both processes, forked where that is safe: an import of PyTorch takes longer than their training."""
    importlib.import_module("torch._dynamo")  # an optimizer imports it in its first step
    context = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
    workers = [context.Process(target=work, args=(rank, folder, sizes)) for rank in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    sys.exit(any(worker.exitcode for worker in workers))


def computed(sizes: int = len(WORLD_SIZES)) -> dict[str, Any]:
    """What is pinned, computed by processes whose arithmetic uses no instructions of this machine's own.

    Each recipe is simulated with ``sizes`` numbers of workers.
    """
    environment = os.environ | {"ATEN_CPU_CAPABILITY": "default", "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--folder", folder, "--sizes", str(sizes)]
        subprocess.run(command, env=environment, check=True)
        first, second = (json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(2))
    assert first["state keys"] == second["state keys"]
    first["simulated"] |= second["simulated"]
    first["trained"] = {name: [first["trained"][name], second["trained"][name]] for name in first["trained"]}
    return {"torch": torch.__version__, **first}


@pytest.fixture(scope="module")
def now() -> dict[str, Any]:
    """What this code computes. Outside of a deep run, each recipe is simulated with one number of workers."""
    return computed(trials(1, len(WORLD_SIZES)))


@pytest.mark.parametrize("what", ["simulated", "trained", "state keys"])
def test_pinned(now: dict[str, Any], what: str) -> None:
    """Nothing has moved since the digests were written."""
    pinned = json.loads(PINNED.read_text())
    pinned["simulated"] = {name: was for name, was in pinned["simulated"].items() if is_computed(name, now)}
    moved = {name: (was, now[what].get(name)) for name, was in pinned[what].items() if now[what].get(name) != was}
    moved |= {name: (None, is_) for name, is_ in now[what].items() if name not in pinned[what]}
    assert not moved, f"written with torch {pinned['torch']}, this is {now['torch']}: {moved}"


def is_computed(name: str, now: dict[str, Any]) -> bool:
    """Whether ``now`` should have the simulation ``name``. Another one with fewer numbers of workers may replace it."""
    of_recipe = [other for other in now["simulated"] if other.rpartition(",")[0] == name.rpartition(",")[0]]
    return DEEP or name in of_recipe or not of_recipe


def main() -> None:
    """Start the workers, or renew the file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--renew", action="store_true", help="write tests/pinned.json again")
    parser.add_argument("--folder")
    parser.add_argument("--sizes", type=int)
    arguments = parser.parse_args()
    if arguments.folder is not None:
        start(arguments.folder, arguments.sizes)
    elif arguments.renew:
        PINNED.write_text(json.dumps(computed(), indent=1) + "\n")
    else:
        parser.error("nothing to do: give --renew")


if __name__ == "__main__":
    main()
