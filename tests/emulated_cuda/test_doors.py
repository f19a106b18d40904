"""``wrap`` on emulated GPUs, with plain modules and FSDP2, bit for bit as on CPU tensors.

The tests of the laws compare the exchanges of CPU tensors and gloo with the simulation.
"""

from __future__ import annotations

import itertools
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import tritoncomm
from torch import nn
from tritoncomm import NonFiniteError, algorithms, checkpoint
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
    "decayed": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.1),
}


def _is_baseline(name: str) -> bool:
    return type(tritoncomm.recipe(name, density=1.0)).__module__.startswith("baselines.")


# The form of the messages is given, because it depends on the device otherwise.
SHORT = {"repartition_every": 2, "reevaluate_every": 3}
SETTINGS = {
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
# Methods without a setting above, in the form that they have on GPUs. Those to compare with are exchanged alone, by the
# tests of recipes: a deep run also wraps them.
EVERY = {
    name: {
        "algo": name,
        **({"static": True} if "static" in field_names(name) else {}),
        **({"reduced_lr": True} if name == "random_block" else {}),
        **({} if takes_density(name) else {"density": None}),
    }
    for name in algorithms()
    if DEEP or not (_is_baseline(name) or name in {each["algo"] for each in SETTINGS.values()})
}


def _wrapped(net: nn.Module, optimizer: str, **fields: Any) -> tritoncomm.SparseOptimizer:
    settings = {"density": 0.1, "warmup_steps": 1, "dense_below": 20, **fields}
    return tritoncomm.wrap(OPTIMIZERS[optimizer](net.parameters()), settings.pop("algo"), **settings)


def _left(model: nn.Module, optimizer: tritoncomm.SparseOptimizer) -> list[Any]:
    parts = [local(parameter) for parameter in model.parameters()]
    return doors.bits([*parts, optimizer._tritoncomm.setup.scope.vectors[0].feedback.residual])


def _train(rank: int, device: str, optimizer: str, *, kind: str = "plain", gpu: int = 0, **fields: Any) -> list[Any]:
    """Return the bits after each step of two backward passes. Only they have ``gpu`` as the current one."""
    own = torch.cuda.device(gpu) if gpu else nullcontext()
    with own:
        model, given = doors.grouped(device) if kind == "fsdp" else (doors.model_on(device), {})
    wrapped = _wrapped(model, optimizer, **fields, **given)
    seen = []
    for step in range(4):
        wrapped.zero_grad()
        with own:
            for micro in range(2):
                doors.loss_of(model, rank, 2 * step + micro, device).backward()
        if optimizer == "decayed" and step > 1:
            wrapped.synchronize()  # decay is not in what it leaves in .grad
            for parameter in model.parameters():
                local(parameter.grad).mul_(0.5)
        wrapped.step()
        seen.append(_left(model, wrapped))
    return seen


def _cases() -> list[tuple[str, str, str, int]]:
    """Return all cases in a deep run, and otherwise each setting once: they take turns with optimizers and sizes."""
    every = list(itertools.product(("adamw", "sgd"), SIZES))
    found = [("plain", name, *each) for i, name in enumerate(SETTINGS) for each in (every if DEEP else [every[i % 4]])]
    found += [("plain", name, "sgd", 2) for name in EVERY]
    found += [("plain", name, "decayed", 2) for name in ("oktopk", "oktopk-static")]
    found += [("fsdp", name, "sgd", 2) for name in (EVERY if DEEP else ("micro", "random_block"))]
    # A single worker takes torch's own step, whose square roots are rounded otherwise on a CPU.
    sizes = [("sgd", 1), *itertools.product(("adamw", "sgd"), (2, 3, 4, 8))] if DEEP else [("adamw", 2), ("sgd", 4)]
    found += [("fsdp", "oktopk-static", *each) for each in sizes]
    return (
        found if DEEP else [*found, ("plain", "spardl-static", "adamw", 1), ("plain", "oktopk-static-4bit", "adamw", 4)]
    )


@pytest.mark.parametrize(("kind", "method", "optimizer", "world_size"), _cases())
def test_wrap(kind: str, method: str, optimizer: str, world_size: int) -> None:
    """Parameters and residuals of all ranks are the same after every step, with the aware step and without.

    FSDP2 itself runs on emulated GPUs, with its streams and collectives, and ``step()`` exchanges its shards.
    """
    fields = (SETTINGS | EVERY)[method] | ({"dense_below": 5} if kind == "fsdp" else {})
    on_gpu, on_cpu = doors.on_both(
        lambda rank, device: _train(rank, device, optimizer, kind=kind, **fields), world_size, seed=world_size
    )
    assert on_gpu == on_cpu


@pytest.mark.parametrize(("kind", "method"), [("plain", "spardl"), ("fsdp", "oktopk-static")])
def test_without_set_device(kind: str, method: str) -> None:
    """Ranks that see all GPUs use that of their parameters, although the current device of all of them is GPU 0.

    FSDP2 itself needs its GPU as the current device, ``wrap`` and ``step`` do not.
    """

    def train(rank: int, device: str) -> list[Any]:
        return _train(rank, device, "adamw", kind=kind, gpu=rank, **SETTINGS[method])

    found = ranks.run(lambda rank: train(rank, "cuda"), 2, network=Network(2, several_gpus=True))
    assert found == ranks.run(lambda rank: train(rank, "cpu"), 2, backend="gloo")


@pytest.mark.parametrize(("kind", "method"), [("plain", "exdyna-static"), ("fsdp", "oktopk-static")])
def test_rejected_step(kind: str, method: str) -> None:
    """A NaN of one rank in any parameter rejects the step on all ranks. Nothing changes, and the next one goes on."""

    def train(rank: int, device: str) -> list[Any]:
        model, given = doors.grouped(device) if kind == "fsdp" else (doors.model_on(device), {})
        names = [name for name, _ in model.named_parameters()]
        given |= {"dense_below": 5, "on_nonfinite": "raise", "model": model} | SETTINGS[method]
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
            seen.append((error, _left(model, optimizer)))
        return seen

    on_gpu, on_cpu = doors.on_both(train, 2, seed=2)
    assert on_gpu == on_cpu
    for steps in on_gpu:
        assert [bool(error) for error, _ in steps] == [False, False, False, True, True, False]
        assert "rank 1: 0.weight" in steps[3][0]
        assert "rank 1: 4.weight" in steps[4][0]
        assert steps[4][1] == steps[3][1] == steps[2][1] != steps[5][1]


@pytest.mark.parametrize("world_size", SIZES if DEEP else [2])
@pytest.mark.parametrize(("method", "optimizer"), [("oktopk-static-4bit", "adamw"), ("exdyna-static", "sgd")])
def test_checkpoint(method: str, optimizer: str, world_size: int, tmp_path: Path) -> None:
    """A run that is loaded from a checkpoint continues to the bit, on GPUs and on CPUs, whoever has saved it."""

    def train(rank: int, device: str, folder: Path, *, load: Path | None = None) -> tuple[list[Any], bool]:
        model = doors.model_on(device)
        wrapped = _wrapped(model, optimizer, **SETTINGS[method])
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
        return _left(model, wrapped), moved

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
