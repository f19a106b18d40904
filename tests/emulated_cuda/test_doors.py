"""The front doors on emulated GPUs, bit for bit as on CPU tensors.

What is compared with the simulation itself: :func:`test_wrap_equals_the_simulation`. The others are compared with the
same door on CPU tensors and gloo, whose exchanges the tests of the laws compare with the simulation.
"""

from __future__ import annotations

import itertools
import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import tritoncomm
from torch import nn
from tritoncomm import NonFiniteError, SimulatedWorld, algorithms, checkpoint
from tritoncomm.planning.doctor import diagnose
from tritoncomm.step.ddp_hook import CommState, comm_hook
from tritoncomm.step.shards import local

from depth import DEEP
from emulated_cuda import doors, ranks
from emulated_cuda.device import CudaTensor, current_gpu, values_of
from emulated_cuda.network import Network

SIZES = (1, 2, 3, 4, 8) if DEEP else (2, 3)
OPTIMIZERS = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
}
# The form of the messages is given, because it depends on the device otherwise.
SHORT = {"repartition_every": 2, "reevaluate_every": 3}
METHODS = {
    "oktopk": {"algo": "oktopk", "static": False, **SHORT},
    "oktopk-static": {"algo": "oktopk", "static": True, **SHORT},
    "oktopk-4bit": {"algo": "oktopk", "static": False, "values": "4bit", "small": "8bit"},
    "oktopk-static-4bit": {"algo": "oktopk", "static": True, "values": "4bit", "small": "8bit"},
    "oktopk-static-clipped": {"algo": "oktopk", "static": True, "max_grad_norm": 0.1, "clip_by": "gradient", **SHORT},
    "spardl": {"algo": "spardl", "static": False},
    "spardl-static": {"algo": "spardl", "static": True},
    "exdyna": {"algo": "exdyna", "static": False},
    "exdyna-static": {"algo": "exdyna", "static": True},
    "topk_allgather-static": {"algo": "topk_allgather", "static": True, "broadcast_parameters": True},
}
# Every method in the form that it has on GPUs. On every commit, the hooks run with the two newest ones of them.
EVERY = {
    name: {"algo": name, "static": True, **({"reduced_lr": True} if name == "random_block" else {})}
    for name in algorithms()
    if name != "dense"
} | {"dense": {"algo": "dense"}}
BEHIND_HOOKS = list(EVERY) if DEEP else ["topk_dsa", "random_k"]


def _wrapped(model: torch.nn.Module, optimizer: str, **fields: Any) -> tritoncomm.SparseOptimizer:
    settings = {"density": 0.1, "warmup_steps": 1, "dense_below": 20, **fields}
    return tritoncomm.wrap(OPTIMIZERS[optimizer](model.parameters()), settings.pop("algo"), **settings)


def _train(rank: int, device: str, optimizer: str, steps: int = 4, **fields: Any) -> list[Any]:
    model = doors.model_on(device)
    wrapped = _wrapped(model, optimizer, **fields)
    seen = []
    for step in range(steps):
        wrapped.zero_grad()
        doors.loss_of(model, rank, step, device).backward()
        wrapped.step()
        seen.append(doors.bits([*model.parameters(), wrapped._vector.feedback.residual]))
    return seen


def _cases() -> list[tuple[str, str, int]]:
    """Return all cases in a deep run, and otherwise each method with both optimizers, one at each world size."""
    every = itertools.product(enumerate(METHODS), enumerate(OPTIMIZERS), enumerate(SIZES))
    found = [(method, optimizer, size) for (i, method), (j, optimizer), (k, size) in every if DEEP or (i + j + k) % 2]
    return found if DEEP else [*found, ("spardl-static", "adamw", 1), ("oktopk-static-4bit", "adamw", 8)]


@pytest.mark.parametrize(("method", "optimizer", "world_size"), _cases())
def test_wrap(method: str, optimizer: str, world_size: int) -> None:
    """Parameters and residuals of all ranks are the same after every step, with the aware step and without."""
    on_gpu, on_cpu = doors.on_both(
        lambda rank, device: _train(rank, device, optimizer, **METHODS[method]), world_size, seed=world_size
    )
    assert on_gpu == on_cpu


@pytest.mark.parametrize("method", EVERY)
def test_wrap_of_every_method(method: str) -> None:
    """Any method trains."""
    on_gpu, on_cpu = doors.on_both(lambda rank, device: _train(rank, device, "sgd", **EVERY[method]), 2, seed=2)
    assert on_gpu == on_cpu


@pytest.mark.parametrize("world_size", SIZES)
def test_wrap_equals_the_simulation(world_size: int) -> None:
    """SGD steps by the means that the simulation computes from the same gradients."""
    recipe = tritoncomm.SparDL(density=0.2)

    def train(rank: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        model = doors.model_on("cuda")
        wrapped = tritoncomm.wrap(torch.optim.SGD(model.parameters(), lr=1.0), recipe, dense_below=0)
        given, means = [], []
        for step in range(3):
            wrapped.zero_grad()
            doors.loss_of(model, rank, step, "cuda").backward()
            given.append(torch.cat([values_of(p.grad).reshape(-1) for p in model.parameters()]))
            wrapped.step()
            means.append(torch.cat([values_of(p.grad).reshape(-1) for p in model.parameters()]))
        return given, means

    found = ranks.run(train, world_size, seed=world_size)
    world = SimulatedWorld(recipe, world_size, found[0][0][0].numel())
    for step in range(3):
        for rank, mean in enumerate(world.step(torch.stack([given[step] for given, _ in found]))):
            assert torch.equal(found[rank][1][step], mean.to_dense())


@pytest.mark.parametrize("method", ["oktopk-static-4bit", "spardl"])
def test_wrap_without_set_device(method: str) -> None:
    """Ranks that see all GPUs use that of their parameters, although the current device of all of them is GPU 0."""

    def train(rank: int) -> list[Any]:
        with torch.cuda.device(rank):
            model = doors.model_on("cuda")
        wrapped = _wrapped(model, "adamw", **METHODS[method])
        for step in range(4):
            wrapped.zero_grad()
            with torch.cuda.device(rank):
                loss = doors.loss_of(model, rank, step, "cuda")
            loss.backward()
            wrapped.step()
        return doors.bits([*model.parameters(), wrapped._vector.feedback.residual])

    found = ranks.run(train, 2, network=Network(2, several_gpus=True))
    on_cpu = ranks.run(lambda rank: _train(rank, "cpu", "adamw", **METHODS[method])[-1], 2, backend="gloo")
    assert found == on_cpu


@pytest.mark.parametrize("door", ["ddp", "fsdp"])
def test_hooks_without_set_device(door: str) -> None:
    """The same behind hooks. FSDP2 itself needs its GPU as the current device, ``wrap`` and ``step`` do not."""

    def train(rank: int, device: str) -> list[Any]:
        fields = {"density": 0.1, "warmup_steps": 1, "dense_below": 5, **METHODS["oktopk-static"]}
        near = torch.cuda.device(rank)
        with near:
            model, replicas = doors.grouped(device) if door == "fsdp" else (doors.model_on(device), None)
        inner = OPTIMIZERS["adamw"](model.parameters())
        if door == "fsdp":
            optimizer = tritoncomm.wrap(inner, fields.pop("algo"), model=model, process_group=replicas, **fields)
        else:
            state = CommState(None, fields.pop("algo"), **fields)
            state.name(dict(model.named_parameters()))
            state.reducer = doors.PythonReducer(model, state, comm_hook)
            optimizer = tritoncomm.wrap(inner)
        for step in range(3):
            optimizer.zero_grad()
            with near:
                loss = doors.loss_of(model, rank, step, device)
            with near if door == "fsdp" else nullcontext():
                loss.backward()
            optimizer.step()
        return doors.bits([local(parameter) for parameter in model.parameters()])

    on_gpu = ranks.run(lambda rank: train(rank, "cuda"), 2, network=Network(2, several_gpus=True))
    assert on_gpu == ranks.run(lambda rank: train(rank, "cpu"), 2, backend="gloo")


def _train_ddp(rank: int, device: str, optimizer: str | None, **fields: Any) -> list[Any]:
    model = doors.model_on(device)
    settings = {"density": 0.1, "warmup_steps": 1, "dense_below": 20, **fields}
    settings.pop("broadcast_parameters", None)  # of wrap() alone
    state = CommState(None, settings.pop("algo"), **settings)
    state.name(dict(model.named_parameters()))
    reducer = doors.PythonReducer(model, state, comm_hook)
    stepper = OPTIMIZERS["sgd"](model.parameters())
    if optimizer is not None:
        stepper = tritoncomm.wrap(OPTIMIZERS[optimizer](model.parameters()))
    seen = []
    for step in range(4):
        stepper.zero_grad()
        doors.loss_of(model, rank, step, device).backward()
        stepper.step()
        residuals = [vector.feedback.residual for vector in state.exchange.vectors]
        seen.append(doors.bits([*model.parameters(), *residuals]))
    assert reducer is not None
    return seen


@pytest.mark.parametrize("world_size", SIZES)
@pytest.mark.parametrize("optimizer", [None, "adamw"])
@pytest.mark.parametrize("method", METHODS if DEEP else ["oktopk-static", "spardl"])
def test_ddp_hook(method: str, optimizer: str | None, world_size: int) -> None:
    """The hook exchanges buckets during the backward pass, driven by a reducer in Python."""
    if world_size == 1 and optimizer == "adamw":
        optimizer = "sgd"  # a single worker takes torch's own step, whose square roots are rounded otherwise on a CPU
    on_gpu, on_cpu = doors.on_both(
        lambda rank, device: _train_ddp(rank, device, optimizer, **METHODS[method]), world_size, seed=world_size
    )
    assert on_gpu == on_cpu


@pytest.mark.filterwarnings("ignore:the parameters have changed")  # of dgc: buckets get names
@pytest.mark.parametrize("method", BEHIND_HOOKS)
def test_ddp_hook_of_every_method(method: str) -> None:
    """The hook exchanges with any method."""
    on_gpu, on_cpu = doors.on_both(lambda rank, device: _train_ddp(rank, device, "sgd", **EVERY[method]), 2, seed=2)
    assert on_gpu == on_cpu


@pytest.mark.parametrize("at", ["0.weight", "2.weight"])
@pytest.mark.parametrize("method", ["oktopk-static", "oktopk", "spardl"])
def test_ddp_hook_rejects_a_bucket(method: str, at: str) -> None:
    """A NaN of one rank in either bucket rejects the pass on all ranks. Nothing changes, and the next pass goes on."""

    def train(rank: int, device: str) -> list[Any]:
        model = doors.model_on(device)
        settings = {"density": 0.1, "warmup_steps": 1, "dense_below": 20, **METHODS[method]}
        state = CommState(None, settings.pop("algo"), **settings)
        state.name(dict(model.named_parameters()))
        reducer = doors.PythonReducer(model, state, comm_hook)
        optimizer = tritoncomm.wrap(OPTIMIZERS["adamw"](model.parameters()), on_nonfinite="raise")
        seen = []
        for step in range(5):
            optimizer.zero_grad()
            loss = doors.loss_of(model, rank, step, device)
            error = ""
            if step == 3 and rank == 1:
                loss = loss + dict(model.named_parameters())[at].sum() * float("nan")
            try:
                loss.backward()
                optimizer.step()
            except NonFiniteError as raised:
                error = str(raised)
            residuals = [vector.feedback.residual for vector in state.exchange.vectors]
            seen.append((error, doors.bits([*model.parameters(), *residuals])))
        assert reducer is not None
        return seen

    on_gpu, on_cpu = doors.on_both(train, 2, seed=2)
    assert on_gpu == on_cpu
    for steps in on_gpu:
        assert [bool(error) for error, _ in steps] == [False, False, False, True, False]
        assert f"rank 1: {at}" in steps[3][0]
        assert steps[3][1] == steps[2][1] != steps[4][1]


def test_ddp_hook_copies_all_parameters_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The hook copies the parameters of all buckets to their vectors in one call, and back in another."""
    average, copies = CommState._average_ready, []

    def counted(state: CommState, *given: Any) -> None:
        current_gpu().reset()
        average(state, *given)
        copies.append(current_gpu().launches["_foreach_copy_"])

    monkeypatch.setattr(CommState, "_average_ready", counted)
    fields = {"algo": "topk_allgather", "static": True, "warmup_steps": 0, "dense_below": 0}
    ranks.run(lambda rank: _train_ddp(rank, "cuda", None, **fields), 2)
    assert set(copies) == {2}


def _train_fsdp(rank: int, device: str, optimizer: str, **fields: Any) -> list[Any]:
    model, replicas, state = doors.sharded(device, **fields)
    wrapped = tritoncomm.wrap(OPTIMIZERS[optimizer](model.parameters()), model=model, process_group=replicas)
    seen = []
    for step in range(4):
        wrapped.zero_grad()
        doors.loss_of(model, rank, step, device).backward()
        wrapped.step()
        residuals = [vector.feedback.residual for vector in state.exchange.vectors]
        seen.append(doors.bits([*(parameter.to_local() for parameter in model.parameters()), *residuals]))
    return seen


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 8] if DEEP else [2, 4])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_fsdp_hook(optimizer: str, world_size: int) -> None:
    """FSDP2 itself runs on emulated GPUs, with its streams and collectives, and the hook exchanges its shards."""
    on_gpu, on_cpu = doors.on_both(
        lambda rank, device: _train_fsdp(rank, device, optimizer, **METHODS["oktopk-static"]),
        world_size,
        seed=world_size,
    )
    assert on_gpu == on_cpu


@pytest.mark.parametrize("method", BEHIND_HOOKS)
def test_fsdp_hook_of_every_method(method: str) -> None:
    """The hook exchanges with any method."""
    on_gpu, on_cpu = doors.on_both(lambda rank, device: _train_fsdp(rank, device, "sgd", **EVERY[method]), 2, seed=2)
    assert on_gpu == on_cpu


@pytest.mark.parametrize("at", ["0", "4"])
def test_fsdp_hook_rejects_a_group(at: str) -> None:
    """A NaN of one rank in any parameter group rejects the pass on all ranks. The next pass goes on."""

    def train(rank: int, device: str) -> list[Any]:
        factor = 1.0

        def multiply(layer: nn.Module, inputs: object) -> None:  # FSDP has gathered the weight now
            hooks.append(layer.weight.register_hook(lambda gradient: gradient * factor))

        hooks: list[Any] = []

        model, replicas, state = doors.sharded(device, **METHODS["oktopk-static"])
        model.get_submodule(at).register_forward_pre_hook(multiply)
        inner = OPTIMIZERS["adamw"](model.parameters())
        optimizer = tritoncomm.wrap(inner, model=model, process_group=replicas, on_nonfinite="raise")
        seen = []
        for step in range(5):
            optimizer.zero_grad()
            error = ""
            factor = float("nan") if step == 3 and rank == 1 else 1.0
            try:
                doors.loss_of(model, rank, step, device).backward()
                optimizer.step()
            except NonFiniteError as raised:
                error = str(raised)
            hooks.pop().remove()
            residuals = [vector.feedback.residual for vector in state.exchange.vectors]
            seen.append((error, doors.bits([*(each.to_local() for each in model.parameters()), *residuals])))
        return seen

    on_gpu, on_cpu = doors.on_both(train, 2, seed=2)
    assert on_gpu == on_cpu
    for steps in on_gpu:
        assert [bool(error) for error, _ in steps] == [False, False, False, True, False]
        assert f"rank 1: {at}.weight" in steps[3][0]
        assert steps[3][1] == steps[2][1] != steps[4][1]


def test_fsdp_hook_of_a_gradient() -> None:
    """A hook of the user that waits for a gradient sees its mean, and the optimizer takes the same step."""

    def train(rank: int, device: str, *, early: bool) -> tuple[list[Any], list[Any]]:
        model, replicas, _ = doors.sharded(device, **METHODS["oktopk-static"])
        inner, seen = OPTIMIZERS["adamw"](model.parameters()), {}
        optimizer = tritoncomm.wrap(inner, model=model, process_group=replicas)
        for name, parameter in model.named_parameters() if early else ():
            hook = lambda given, name=name: seen.__setitem__(name, given.grad.to_local().clone())  # noqa: E731
            parameter.register_post_accumulate_grad_hook(hook)
        for step in range(3):
            optimizer.zero_grad()
            doors.loss_of(model, rank, step, device).backward()
            optimizer.step()
        gradients = {name: parameter.grad.to_local() for name, parameter in model.named_parameters()}
        seen = seen if early else gradients
        return doors.bits([seen[name] for name in gradients]), doors.bits([p.to_local() for p in model.parameters()])

    (early_gpu, early_cpu), (late_gpu, late_cpu) = (
        doors.on_both(lambda rank, device, early=early: train(rank, device, early=early), 2) for early in (True, False)
    )
    assert early_gpu == early_cpu == late_gpu == late_cpu


def test_fsdp_hook_of_micro_batches() -> None:
    """Two passes add up, also where FSDP2 orders nothing: before the last pass, and between passes on two streams."""

    def train(rank: int, device: str) -> list[Any]:
        model, _, state = doors.sharded(device, **METHODS["oktopk-static"])
        main, side, seen = torch.cuda.current_stream(), torch.cuda.Stream(), []
        for step in range(3):
            side.wait_stream(main)
            apart = step == 1  # the first pass is on another stream, for which the second one does not wait
            for last in (False, True):
                model.set_is_last_backward(last)  # otherwise, no stream waits for the gradients
                with torch.cuda.stream(side if apart and not last else main):
                    loss = doors.loss_of(model, rank, 2 * step + last, device)
                    rejected = apart and not last and rank == 1  # NaN is written behind the last wait of the host
                    (loss * float("nan") if rejected else loss).backward()
                    if last or not apart:
                        seen.append(doors.bits([each.grad.to_local().clone() for each in model.parameters()]))
            for parameter in model.parameters():
                parameter.grad = None
        return [*seen, doors.bits([vector.feedback.residual for vector in state.exchange.vectors])]

    on_gpu, on_cpu = doors.on_both(train, 2)
    assert on_gpu == on_cpu


def test_fsdp_hook_with_offloaded_parameters() -> None:
    """With CPUOffloadPolicy, means are added to gradients on the CPU, which FSDP2 may not have copied there yet."""

    def train(rank: int, device: str) -> list[Any]:
        model, replicas, state = doors.sharded(device, offload=True, **METHODS["oktopk-static"])
        inner, seen = OPTIMIZERS["adamw"](model.parameters()), []
        optimizer = tritoncomm.wrap(inner, model=model, process_group=replicas)
        for step in range(4):
            optimizer.zero_grad()
            for last in (False, True):
                model.set_is_last_backward(last)  # otherwise, the host waits for no copy
                doors.loss_of(model, rank, 2 * step + last, device).backward()
                seen.append(doors.bits([each.grad.to_local() for each in model.parameters()]))
            optimizer.step()
            seen.append(doors.bits([each.to_local() for each in model.parameters()]))
        assert all(each.device.type == "cpu" for each in model.parameters())
        assert {each.feedback.residual.device.type for each in state.exchange.vectors} == {device}
        return seen

    on_gpu, on_cpu = doors.on_both(train, 2)
    assert on_gpu == on_cpu


@pytest.mark.parametrize("world_size", SIZES if DEEP else [2])
@pytest.mark.parametrize(
    ("method", "optimizer"),
    [*itertools.product(("oktopk", "oktopk-static-4bit"), OPTIMIZERS)][:: 1 if DEEP else 3],
)
def test_checkpoint(method: str, optimizer: str, world_size: int, tmp_path: Path) -> None:
    """A run that is loaded from a checkpoint continues to the bit, on GPUs and on CPUs, whoever has saved it."""

    def train(rank: int, device: str, folder: Path, *, load: Path | None = None) -> tuple[list[Any], bool]:
        model = doors.model_on(device)
        wrapped = _wrapped(model, optimizer, **METHODS[method])
        if load is not None:
            checkpoint.load(wrapped, load)
            for parameter, saved in zip(model.parameters(), torch.load(load / "model.pt"), strict=True):
                parameter.data.copy_(saved.to(parameter.device))
        for step in range(3) if load is None else range(3, 6):
            wrapped.zero_grad()
            doors.loss_of(model, rank, step, device).backward()
            wrapped.step()
        checkpoint.save(wrapped, folder)
        if rank == 0:
            torch.save([values_of(parameter) for parameter in model.parameters()], folder / "model.pt")
        state = [each for held in wrapped.optimizer.state.values() for each in held.values()]
        moved = all(isinstance(each, CudaTensor) == (device == "cuda") for each in state if each.dim())
        return doors.bits([*model.parameters(), wrapped._vector.feedback.residual]), moved

    first = {device: tmp_path / device for device in ("cuda", "cpu")}
    list(doors.on_both(lambda rank, device: train(rank, device, first[device]), world_size, seed=world_size))
    seen = [
        result
        for saved in first.values()
        for result in doors.on_both(
            lambda rank, device, saved=saved: train(rank, device, tmp_path / "x", load=saved),
            world_size,
            seed=world_size + 1,
        )
    ]
    assert all(result == seen[0] for result in seen)
    assert all(moved for result in seen for _, moved in result)


@pytest.mark.parametrize("world_size", SIZES if DEEP else [3])
def test_doctor(world_size: int) -> None:
    """The doctor measures on GPUs, and all ranks get the same result."""

    def main(rank: int) -> Any:
        found = diagnose(3000, lambda density: tritoncomm.OkTopk(density=density), 0.05, device="cuda:0")
        assert current_gpu().syncs
        return found.as_dict()

    first, *others = ranks.run(main, world_size, seed=world_size)
    assert first["measured"] == (world_size > 1)
    assert set(first["sparse_seconds"]) == {"0.001", "0.01", "0.05", "0.2"}
    assert all(other == first for other in others)


@pytest.mark.parametrize("method", ["oktopk", "oktopk-static"])
@pytest.mark.parametrize("world_size", SIZES)
def test_trace(world_size: int, method: str, tmp_path: Path) -> None:
    """Every rank writes a timeline with its phases, and its messages are received by the peer.

    The static form sends none: its collectives are phases.
    """

    def main(rank: int) -> None:
        with tritoncomm.trace(tmp_path / "trace.json"):
            _train(rank, "cuda", "sgd", **METHODS[method])
        dist.barrier()

    ranks.run(main, world_size, seed=world_size)
    sent, received = [], []
    for rank in range(world_size):
        events = json.loads((tmp_path / f"trace-rank-{rank}.json").read_text())["traceEvents"]
        assert {event["pid"] for event in events} == {rank}
        first = "counts" if method == "oktopk" else "split-and-reduce"
        phases = {first, "confirm"} if world_size > 1 else {"set-up"}
        assert phases <= {event["name"] for event in events if event["ph"] == "X"}
        for event in (event for event in events if event["ph"] == "i"):
            direction, peer = event["name"].split()
            pair = (rank, int(peer)) if direction == "to" else (int(peer), rank)
            (sent if direction == "to" else received).append((*pair, event["args"]["bytes"]))
    assert bool(sent) == (world_size > 1 and method == "oktopk")
    assert sorted(sent) == sorted(received)
