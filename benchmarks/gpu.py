"""Check on real GPUs what exchanges do, on one or on several.

    python benchmarks/gpu.py
    torchrun --nproc-per-node=2 benchmarks/gpu.py

One GPU: static forms deliver the bits that they deliver on the CPU. Several workers are simulated, whose gradients are
integers, so that sums do not depend on their order. In an ordinary step, the host waits at most twice for each worker.
Then all methods and ``wrap`` run in a process group of one worker. It sends no messages: over NCCL go the configuration
check, the setup and the confirmation.

Several GPUs: what no emulation can show, streams, NCCL's order of operations, and failures of ranks. Each process of
torchrun supervises one rank. For each check, it starts a process of its own with a time limit, because a check may
hang, or kill its process on purpose. No check calls ``torch.cuda.set_device``.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import tritoncomm
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from tritoncomm.algorithms import Hierarchical
from tritoncomm.algorithms.base import StaticRecipe
from tritoncomm.planning import planner
from tritoncomm.planning.link import measure_link
from tritoncomm.scheduler.process_group import ProcessGroupScheduler
from tritoncomm.step import settings as step_options
from tritoncomm.step.exchange.feedback import ErrorFeedback
from tritoncomm.step.exchange.scope import Vote, vote
from tritoncomm.step.tensors.shards import local

import script
from gpu_forms import MOST_WAITS, STEPS, Figures, bits, compare, counted_synchronizations, static_recipes

# Between ranks.
VICTIM = 1
TIMEOUT = timedelta(seconds=4)  # of the exchanges in which a rank fails
AT_ONCE, LATER = 4.0, 10.0  # seconds within which an error is named, and a time-out, after it. A rank hangs for as long
SANE_LATENCY, SANE_GIGABITS, SANE_STEP = (1e-6, 1.0), (1e-2, 2e4), 60.0
LEAST = 2  # ranks
NUMEL = 100_000
METHODS = ("oktopk", "spardl", "exdyna", "topk_allgather", "dense")
HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"


def gradient(rank: int, step: int, device: torch.device) -> torch.Tensor:
    """Return the gradient of a rank."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return (torch.randn(NUMEL, generator=generator) * torch.linspace(0.1, 1, NUMEL)).to(device)


def everybody(value: object, device: torch.device) -> list[Any]:
    """Return the ``value`` of each rank."""
    found: list[Any] = [None] * dist.get_world_size()
    with torch.cuda.device(device) if device.type == "cuda" else torch.no_grad():
        dist.all_gather_object(found, value)
    return found


def same(value: object, device: torch.device, what: str) -> None:
    """Raise if ranks have different values."""
    found = everybody(value, device)
    assert all(each == found[0] for each in found), f"ranks have different {what}"


def run_steps(recipe: tritoncomm.Recipe, device: torch.device) -> Figures:
    """Exchange several times. All ranks must have the same mean."""
    rank, size = dist.get_rank(), dist.get_world_size()
    subgroups = recipe.subgroups(size)
    scheduler = ProcessGroupScheduler(None, None, device, repr(recipe), subgroups)
    feedback = ErrorFeedback(recipe.build(NUMEL), device)
    seconds = []
    for step in range(STEPS):
        own = gradient(rank, step, device)
        dist.barrier(device_ids=[device.index] if device.type == "cuda" else None)
        started = time.perf_counter()
        with counted_synchronizations(device) as waits:
            mean = scheduler.run(feedback.begin(own, rank, size))
            scheduler.run(vote(Vote(), scheduler.device, [scheduler]), new_step=False)
            feedback.commit()
        seconds.append(time.perf_counter() - started)
        mean = mean.trimmed()
        same(bits([mean.values, mean.indices]), device, f"means in step {step} of {recipe.name}")
    return {"milliseconds": round(1e3 * min(seconds), 3), "synchronizations": len(waits)}  # of the last step


def forms(name: str) -> dict[str, tritoncomm.Recipe]:
    """Return the recipe of a method, and the one of its static form, which ``wrap`` uses on a GPU, if it has it."""
    recipe = planner.at(name, 0.01)
    if not isinstance(recipe, StaticRecipe) or not recipe.can_be_static():
        return {name: recipe}
    return {name: replace(recipe, static=False), f"{name} static": replace(recipe, static=True)}


def exchanges(device: torch.device) -> Figures:
    """Every method delivers the same bits on all ranks, in both forms. Ordinary steps of static forms wait twice."""
    found = {}
    for name in METHODS:
        for form, recipe in forms(name).items():
            found[form] = run_steps(recipe, device)
            waits = found[form]["synchronizations"]
            assert form == name or waits <= MOST_WAITS, f"{form}: {waits} host synchronizations in an ordinary step"
    return found


def nodes(device: torch.device) -> Figures:
    """Subgroups can be created. The default group is bound to a device, so NCCL splits it."""
    size = dist.get_world_size()
    recipe = Hierarchical(recipe=planner.at("oktopk", 0.01), node_size=2 if size % 2 == 0 else size)
    return run_steps(recipe, device) | {"bound": str(getattr(dist.group.WORLD, "bound_device_id", None))}


def network(norm: Callable[[int], nn.Module]) -> nn.Sequential:
    """Return a model, the same on all ranks."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), norm(128), nn.ReLU(), nn.Linear(128, 64), norm(64), nn.Linear(64, 1))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device, steps: int = 10) -> None:
    """Take steps on data that depend on the rank."""
    for step in range(steps):
        generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
        x = torch.randn(32, 64, generator=generator).to(device)
        optimizer.zero_grad()
        (model(x) - x.sum(1, keepdim=True)).square().mean().backward()
        optimizer.step()


def wrapped(device: torch.device) -> Figures:
    """A wrapped optimizer trains, and its metrics have times. A single worker selects and delivers as several do."""
    step_options.is_alone = lambda _: False
    model = network(nn.LayerNorm).to(device)
    optimizer = tritoncomm.wrap(torch.optim.AdamW(model.parameters()), density=0.05, warmup_steps=2, dense_below=0)
    before = bits(model.parameters())
    train(model, optimizer, device)
    after = bits(model.parameters())
    same(after, device, "parameters")
    assert after != before, "no parameter has changed"
    assert all(bool(parameter.isfinite().all()) for parameter in model.parameters()), "a parameter is not finite"
    metrics = optimizer.metrics()
    assert dist.get_world_size() == 1 or 0 < metrics["seconds_exchange"] < SANE_STEP, metrics
    return {name: value for name, value in metrics.items() if name.startswith("seconds")}


def in_ddp(model: nn.Module, device: torch.device, **fields: Any) -> DistributedDataParallel:
    """Return ``model`` in DDP."""
    return DistributedDataParallel(model, device_ids=[device.index] if device.type == "cuda" else None, **fields)


def ddp(device: torch.device) -> Figures:
    """A module in DDP trains, beside the collectives of SyncBatchNorm in its passes."""
    model = network(nn.BatchNorm1d).to(device)
    if device.type == "cuda":
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    outer = in_ddp(model, device)
    inner = torch.optim.AdamW(outer.parameters())
    train(outer, tritoncomm.wrap(inner, model=outer, density=0.05, warmup_steps=2, dense_below=0), device, steps=30)
    same(bits(outer.parameters()), device, "parameters")
    return {"norm": type(model[1]).__name__}


def offloaded_shards(device: torch.device) -> Figures:
    """Replicas of FSDP2 whose parameters and gradients are on the CPU exchange their shards there, over gloo."""
    from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

    size = dist.get_world_size()
    replicas = 2 if size % 2 == 0 else size
    grid = init_device_mesh(device.type, (replicas, size // replicas), mesh_dim_names=("replicate", "shard"))
    offload = {"offload_policy": CPUOffloadPolicy()} if device.type == "cuda" else {}
    model = fully_shard(network(nn.LayerNorm), mesh=grid["shard"], **offload)
    inner = torch.optim.AdamW(model.parameters())
    group = grid["replicate"].get_group()
    optimizer = tritoncomm.wrap(inner, model=model, process_group=group, density=0.05, warmup_steps=2)
    train(model, optimizer, device)
    shards = everybody((grid["shard"].get_local_rank(), bits(p.to_local() for p in model.parameters())), device)
    for place, values in shards:
        assert values == next(other for where, other in shards if where == place), "replicas differ"
    return {"parameters on": str(next(model.parameters()).device), "replicas": replicas}


def link(device: torch.device) -> Figures:
    """The measured link is that of the network, not that of an enqueued operation."""
    found = measure_link(None, device)
    gigabits = 8e-9 * found.bandwidth
    assert SANE_LATENCY[0] < found.latency < SANE_LATENCY[1], found
    assert SANE_GIGABITS[0] < gigabits < SANE_GIGABITS[1], found
    return {"microseconds": round(1e6 * found.latency, 1), "gigabits per second": round(gigabits, 2)}


def raises() -> None:
    """Fail as a method does that has a bug, or no memory."""
    raise MemoryError("no room for the lists")


def dies() -> None:
    """End the process without a word."""
    os.kill(os.getpid(), signal.SIGKILL)


def hangs() -> None:
    """Do something else for longer than the others wait."""
    time.sleep(TIMEOUT.total_seconds() + LATER)


def sparse(algo: str, device: torch.device, kind: str, **fields: Any) -> tuple[nn.Module, tritoncomm.SparseOptimizer]:
    """Return a model, plain or as ``kind`` says, and its wrapped optimizer.

    It has taken two steps, which compile the kernels.
    """
    model = network(nn.LayerNorm).to(device)
    if kind == "ddp":
        fields["model"] = model = in_ddp(model, device)
    if kind == "fsdp":
        from torch.distributed.fsdp import fully_shard

        grid = init_device_mesh(device.type, (dist.get_world_size(), 1), mesh_dim_names=("replicate", "shard"))
        for part in (*(each for each in model if isinstance(each, nn.Linear)), model):
            fully_shard(part, mesh=grid["shard"])
        fields |= {"model": model, "process_group": grid["replicate"].get_group()}
    inner = torch.optim.SGD(model.parameters(), lr=0.01)
    optimizer = tritoncomm.wrap(inner, algo, density=0.05, warmup_steps=0, dense_below=0, **fields)
    train(model, optimizer, device, 2)
    return model, optimizer


def held(model: nn.Module) -> list[bytes]:
    """Return the bits of the parameters that this rank holds."""
    return bits(local(parameter) for parameter in model.parameters())


def failure(fault: Callable[[], None], algo: str, device: torch.device, *, kind: str = "plain") -> Figures:
    """A rank fails in the middle of a step. All others name it in time, and go on in a new group.

    With FSDP2 they do not go on: a sharded model cannot change its groups.
    """
    sparse(algo, device, kind)  # to compile takes longer than the time-out
    model, optimizer = sparse(algo, device, kind, timeout=TIMEOUT)
    same(None, device, "steps behind them")  # a rank that fails early would end the step before on a slow one
    if dist.get_rank() == VICTIM:
        _fail_at(optimizer._tritoncomm.setup.scope.vectors[0].scheduler, 1, fault)  # noqa: SLF001 - no public attribute
    before, started = held(model), time.monotonic()
    try:
        train(model, optimizer, device, 1)
    except tritoncomm.ExchangeError as error:
        seconds, caught = time.monotonic() - started, error
    else:
        raise AssertionError("no error was raised")
    figures = {"error": type(caught).__name__, "seconds": round(seconds, 2), "text": str(caught)}
    assert caught.peers == (VICTIM,), figures
    assert held(model) == before, "the failed step has changed parameters"
    if dist.get_rank() == VICTIM:
        return figures
    assert seconds < (AT_ONCE if fault is raises else TIMEOUT.total_seconds() + LATER), figures
    if kind == "fsdp":
        return figures
    left = [rank for rank in range(dist.get_world_size()) if rank != VICTIM]
    group = dist.new_group(left, use_local_synchronization=True)
    if kind == "ddp":
        model = in_ddp(model.module, device, process_group=group, init_sync=False)
        optimizer.reset_process_group(model=model)
    else:
        optimizer.reset_process_group(group)
    train(model, optimizer, device, 3)
    return figures | {"went on with ranks": left}


def _fail_at(scheduler: ProcessGroupScheduler, number: int, fault: Callable[[], None]) -> None:
    """Call ``fault`` before the ``number``-th operation from now."""
    perform, left = scheduler._perform, [number]  # noqa: SLF001 - there is no public way to break it

    def faulty(op: Any) -> Any:
        left[0] -= 1
        if left[0] == -1:
            fault()
        return perform(op)

    scheduler._perform = faulty  # type: ignore[method-assign]  # noqa: SLF001


CHECKS: dict[str, Callable[[torch.device], Figures]] = {
    check.__name__.replace("_", "-"): check for check in (exchanges, nodes, wrapped, ddp, offloaded_shards, link)
}
FAULTS: dict[str, Callable[[torch.device], Figures]] = {
    "raises": partial(failure, raises, "oktopk"),
    "raises-in-messages": partial(failure, raises, "spardl"),
    "dies": partial(failure, dies, "oktopk"),
    "dies-in-messages": partial(failure, dies, "spardl"),
    "hangs": partial(failure, hangs, "topk_allgather"),
    "dies-with-ddp": partial(failure, dies, "topk_allgather", kind="ddp"),
    "dies-with-fsdp": partial(failure, dies, "oktopk", kind="fsdp"),
}
DEADLY = tuple(name for name in FAULTS if name.startswith("dies"))  # the rank that fails writes no result


def run_checks(names: list[str], file: Path, backend: str) -> None:
    """Run checks in this process, which is one rank, and write what each found to ``file``."""
    rank, size, device = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), torch.device("cpu")
    if backend == "nccl":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    bound = {"device_id": device} if backend == "nccl" and names == ["nodes"] else {}
    if backend == "nccl" and names == ["offloaded-shards"]:
        backend = "cpu:gloo,cuda:nccl"
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(address, port, size, is_master=rank == 0)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timedelta(minutes=5), **bound)
    found = {}
    for name in names:
        try:
            figures = (CHECKS | FAULTS)[name](device)
            found[name] = {"passed": True} | figures
        except Exception as error:
            found[name] = {"passed": False, "problem": f"rank {rank}: {type(error).__name__}: {error}"}
            break
        finally:
            file.write_text(json.dumps(found))
    store.set(f"ended/{rank}", "")
    if rank == 0:  # it hosts the store
        store.wait([f"ended/{other}" for other in range(size) if names[-1] not in DEADLY or other != VICTIM])
    os._exit(0)  # the default group may be broken, and its destructor may wait for peers


def supervise(names: list[str], port: int, backend: str, limit: float) -> dict[str, Figures]:
    """Run checks in a new process for this rank, and return what each found."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "found.json"
        command = [sys.executable, __file__, "--check", *names, "--file", str(file), "--backend", backend]
        environment = os.environ | {"MASTER_PORT": str(port), HANDLING: "0"}
        with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as process:
            try:
                _, errors = process.communicate(timeout=limit)
                problem = f"the process ended with {process.returncode}"
            except subprocess.TimeoutExpired:
                process.kill()
                _, errors = process.communicate()
                problem = f"no end after {limit:.0f} s"
        found = json.loads(file.read_text()) if file.exists() else {}
    if process.returncode:
        sys.stderr.write(errors)
    dead = {"passed": names[-1] in DEADLY and int(os.environ["RANK"]) == VICTIM, "problem": problem}
    return {name: found.get(name, dead) for name in names}


def free_port() -> int:
    """Return a port that is free on this machine."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def check_several(backend: str, groups: list[list[str]], limit: float) -> dict[str, Any]:
    """Run each group of checks in a process of its own, and return what all ranks found.

    Every process of torchrun calls this.
    """
    dist.init_process_group("gloo", timeout=timedelta(minutes=10))  # of the supervisors
    found: dict[str, Any] = {}
    for names in groups:
        port = [free_port()]
        dist.broadcast_object_list(port)
        ranks: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(ranks, supervise(names, port[0], backend, limit))
        for name in names:
            found[name] = {
                "passed": all(rank[name]["passed"] for rank in ranks),
                "ranks": [rank[name] for rank in ranks],
            }
            if dist.get_rank() == 0:
                problems = [rank[name]["problem"] for rank in ranks if not rank[name]["passed"]]
                print(f"{name}: {'passed' if not problems else '; '.join(problems)}", flush=True)
    dist.destroy_process_group()
    return found


def on_process_group(device: torch.device) -> Figures:
    """Exchange and train in a process group of one worker, over NCCL on a GPU."""
    os.environ.setdefault(HANDLING, "0")
    backend, address = "nccl" if device.type == "cuda" else "gloo", f"tcp://127.0.0.1:{free_port()}"
    dist.init_process_group(backend, init_method=address, rank=0, world_size=1)
    try:
        return {"backend": backend, "exchanges": exchanges(device), "wrapped": wrapped(device)}
    finally:
        dist.destroy_process_group()


def check_one(device: torch.device) -> Figures:
    """Run the checks on one GPU, and return what each found."""
    checks = {name: partial(compare, recipe) for name, recipe in static_recipes().items()}
    found: Figures = {}
    for name, check in (checks | {"process group": on_process_group}).items():
        try:
            found[name] = {"passed": True} | check(device)
        except Exception as error:
            found[name] = {"passed": False, "problem": f"{type(error).__name__}: {error}"}
        print(f"{name}: {found[name].get('problem', 'passed')}", flush=True)
    return found


def arguments() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = script.parser(__doc__)
    parser.add_argument("--only", nargs="+", choices=[*CHECKS, *FAULTS], metavar="NAME", help="checks on several GPUs")
    parser.add_argument("--check", nargs="+", help=argparse.SUPPRESS)
    parser.add_argument("--file", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--backend", default="", help=argparse.SUPPRESS)
    return parser


def main() -> int:
    """Check, and write the requested file. Return 1 if a check has failed."""
    parser = arguments()
    options = parser.parse_args()
    backend = options.backend or ("gloo" if options.smoke else "nccl")
    if options.check:
        run_checks(options.check, options.file, backend)
    if "RANK" in os.environ:
        if int(os.environ["WORLD_SIZE"]) < LEAST:
            parser.error(f"start it with at least {LEAST} processes, or without torchrun")
        groups = [[name] for name in options.only or (*CHECKS, *FAULTS)]
        if options.smoke and not options.only:  # a process takes longer to start than these checks
            groups = [[*CHECKS, "dies-with-ddp"]]
        found = check_several(backend, groups, 120.0 if options.smoke else 90.0)
    else:
        found = check_one(torch.device("cpu") if options.smoke else torch.device("cuda", 0))
    failed = [name for name, each in found.items() if not each["passed"]]
    if os.environ.get("RANK", "0") == "0":
        about = script.machine("cpu" if options.smoke else "cuda")
        script.write(options.json, {"machine": about, "failed": failed, "checks": found})
        print(f"{len(found) - len(failed)} of {len(found)} checks passed")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
