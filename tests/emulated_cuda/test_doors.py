"""``wrap`` on emulated GPUs, with plain modules and FSDP2, bit for bit as on CPU tensors.

What is compared with the simulation itself: :func:`test_wrap_equals_the_simulation`. The others are compared with CPU
tensors and gloo, whose exchanges the tests of the laws compare with the simulation.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
import tritoncomm
from torch import nn
from tritoncomm import NonFiniteError, SimulatedWorld, algorithms, checkpoint
from tritoncomm.algorithms import field_names, takes_density
from tritoncomm.planning.doctor import diagnose
from tritoncomm.step.tensors.shards import local

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
    "oktopk-static-clipped": {"algo": "oktopk", "static": True, "max_grad_norm": 0.1, **SHORT},
    "spardl": {"algo": "spardl", "static": False},
    "spardl-static": {"algo": "spardl", "static": True},
    "exdyna": {"algo": "exdyna", "static": False},
    "exdyna-static": {"algo": "exdyna", "static": True},
    "topk_allgather-static": {"algo": "topk_allgather", "static": True, "broadcast_parameters": True},
}
# Every method in the form that it has on GPUs. On every commit, FSDP2 runs with the two newest ones of them.
EVERY = {
    name: {
        "algo": name,
        **({"static": True} if "static" in field_names(name) else {}),
        **({"reduced_lr": True} if name == "random_block" else {}),
        **({} if takes_density(name) else {"density": None}),
    }
    for name in algorithms()
}
WITH_SHARDS = list(EVERY) if DEEP else ["topk_dsa", "random_k"]


def _wrapped(net: nn.Module, optimizer: str, **fields: Any) -> tritoncomm.SparseOptimizer:
    settings = {"density": 0.1, "warmup_steps": 1, "dense_below": 20, **fields}
    return tritoncomm.wrap(OPTIMIZERS[optimizer](net.parameters()), settings.pop("algo"), **settings)


def _train(rank: int, device: str, optimizer: str, steps: int = 4, **fields: Any) -> list[Any]:
    model = doors.model_on(device)
    wrapped = _wrapped(model, optimizer, **fields)
    seen = []
    for step in range(steps):
        wrapped.zero_grad()
        doors.loss_of(model, rank, step, device).backward()
        wrapped.step()
        seen.append(doors.bits([*model.parameters(), wrapped._tritoncomm.setup.vector.feedback.residual]))
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
        return doors.bits([*model.parameters(), wrapped._tritoncomm.setup.vector.feedback.residual])

    found = ranks.run(train, 2, network=Network(2, several_gpus=True))
    on_cpu = ranks.run(lambda rank: _train(rank, "cpu", "adamw", **METHODS[method])[-1], 2, backend="gloo")
    assert found == on_cpu


def _train_shards(rank: int, device: str, optimizer: str, **fields: Any) -> list[Any]:
    model, given = doors.grouped(device)
    wrapped = _wrapped(model, optimizer, **{"dense_below": 5} | fields, **given)
    seen = []
    for step in range(4):
        wrapped.zero_grad()
        for micro in range(2):
            doors.loss_of(model, rank, 2 * step + micro, device).backward()
        wrapped.step()
        shards = [parameter.to_local() for parameter in model.parameters()]
        seen.append(doors.bits([*shards, wrapped._tritoncomm.setup.vector.feedback.residual]))
    return seen


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 8] if DEEP else [2, 4])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_shards(optimizer: str, world_size: int) -> None:
    """FSDP2 itself runs on emulated GPUs, with its streams and collectives, and ``step()`` exchanges its shards."""
    if world_size == 1 and optimizer == "adamw":
        optimizer = "sgd"  # a single worker takes torch's own step, whose square roots are rounded otherwise on a CPU
    on_gpu, on_cpu = doors.on_both(
        lambda rank, device: _train_shards(rank, device, optimizer, **METHODS["oktopk-static"]),
        world_size,
        seed=world_size,
    )
    assert on_gpu == on_cpu


@pytest.mark.parametrize("method", WITH_SHARDS)
def test_shards_of_every_method(method: str) -> None:
    """Shards are exchanged with any method."""
    on_gpu, on_cpu = doors.on_both(lambda rank, device: _train_shards(rank, device, "sgd", **EVERY[method]), 2, seed=2)
    assert on_gpu == on_cpu


def test_shards_without_set_device() -> None:
    """FSDP2 itself needs its GPU as the current device, ``wrap`` and ``step`` do not."""

    def train(rank: int, device: str) -> list[Any]:
        near = torch.cuda.device(rank)
        with near:
            model, given = doors.grouped(device)
        optimizer = _wrapped(model, "adamw", **{"dense_below": 5} | METHODS["oktopk-static"], **given)
        for step in range(3):
            optimizer.zero_grad()
            with near:
                doors.loss_of(model, rank, step, device).backward()
            optimizer.step()
        return doors.bits([local(parameter) for parameter in model.parameters()])

    on_gpu = ranks.run(lambda rank: train(rank, "cuda"), 2, network=Network(2, several_gpus=True))
    assert on_gpu == ranks.run(lambda rank: train(rank, "cpu"), 2, backend="gloo")


@pytest.mark.parametrize("method", ["oktopk-static", "spardl"])
@pytest.mark.parametrize("kind", ["plain", "fsdp"])
def test_rejected_step(kind: str, method: str) -> None:
    """A NaN of one rank in any parameter rejects the step on all ranks. Nothing changes, and the next one goes on."""

    def train(rank: int, device: str) -> list[Any]:
        model, given = doors.grouped(device) if kind == "fsdp" else (doors.model_on(device), {})
        names = [name for name, _ in model.named_parameters()]
        given |= {"dense_below": 5, "on_nonfinite": "raise", "model": model} | METHODS[method]
        optimizer = _wrapped(model, "adamw", **given)
        seen = []
        for step in range(6):
            optimizer.zero_grad()
            error = ""
            doors.loss_of(model, rank, step, device).backward()
            if step in (3, 4) and rank == 1:
                bad = list(model.parameters())[names.index("0.weight" if step == 3 else "4.weight")]
                local(bad.grad).mul_(float("nan"))
            try:
                optimizer.step()
            except NonFiniteError as raised:
                error = str(raised)
            shards = [local(parameter) for parameter in model.parameters()]
            seen.append((error, doors.bits([*shards, optimizer._tritoncomm.setup.vector.feedback.residual])))
        return seen

    on_gpu, on_cpu = doors.on_both(train, 2, seed=2)
    assert on_gpu == on_cpu
    for steps in on_gpu:
        assert [bool(error) for error, _ in steps] == [False, False, False, True, True, False]
        assert "rank 1: 0.weight" in steps[3][0]
        assert "rank 1: 4.weight" in steps[4][0]
        assert steps[4][1] == steps[3][1] == steps[2][1] != steps[5][1]


@pytest.mark.parametrize("synchronizes", [False, True])
@pytest.mark.parametrize("method", ["oktopk", "oktopk-static"])
def test_coupled_decay(method: str, synchronizes: bool) -> None:
    """Decay that is a part of the gradient is added as on a CPU, also after ``synchronize()`` has left it out."""

    def train(rank: int, device: str) -> list[Any]:
        model = doors.model_on(device)
        inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
        optimizer = tritoncomm.wrap(inner, density=0.1, warmup_steps=1, dense_below=20, **METHODS[method])
        for step in range(4):
            optimizer.zero_grad()
            doors.loss_of(model, rank, step, device).backward()
            if synchronizes:
                optimizer.synchronize()
                for parameter in model.parameters():
                    parameter.grad.mul_(0.5)
            optimizer.step()
        return doors.bits([*model.parameters(), optimizer._tritoncomm.setup.vector.feedback.residual])

    on_gpu, on_cpu = doors.on_both(train, 2)
    assert on_gpu == on_cpu


def test_shards_of_micro_batches_on_two_streams() -> None:
    """Two passes add up, also where the first one is on another stream, on which FSDP2 left its gradients."""

    def train(rank: int, device: str) -> list[Any]:
        model, given = doors.grouped(device)
        optimizer = _wrapped(model, "sgd", **{"dense_below": 5} | METHODS["oktopk-static"], **given)
        main, side = torch.cuda.current_stream(), torch.cuda.Stream()
        for step in range(3):
            optimizer.zero_grad()
            side.wait_stream(main)
            for last in (False, True):
                model.set_is_last_backward(last)
                with torch.cuda.stream(side if step == 1 and not last else main):
                    doors.loss_of(model, rank, 2 * step + last, device).backward()
                main.wait_stream(side)
            optimizer.step()
        return doors.bits([each.to_local() for each in model.parameters()])

    on_gpu, on_cpu = doors.on_both(train, 2)
    assert on_gpu == on_cpu


def test_gradients_in_buckets() -> None:
    """Gradients that are views of buckets, as in DDP, are exchanged as others."""

    def train(rank: int, device: str, number: int) -> list[Any]:
        model = doors.model_on(device)
        optimizer = _wrapped(model, "adamw", **METHODS["oktopk-static"])
        buckets = doors.Buckets(model, number) if number else None
        for step in range(3):
            optimizer.zero_grad()
            doors.loss_of(model, rank, step, device).backward()
            if buckets is not None:
                buckets.fill()
            optimizer.step()
        return doors.bits([*model.parameters(), optimizer._tritoncomm.setup.vector.feedback.residual])

    found = [
        result
        for number in (0, 2)
        for result in doors.on_both(lambda rank, device, number=number: train(rank, device, number), 2)
    ]
    assert all(result == found[0] for result in found)


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
        state = [each for held in wrapped.state.values() for each in held.values()]
        moved = all(isinstance(each, CudaTensor) == (device == "cuda") for each in state if each.dim())
        return doors.bits([*model.parameters(), wrapped._tritoncomm.setup.vector.feedback.residual]), moved

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
