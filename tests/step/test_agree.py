"""The device from which objects are sent when ranks compare their settings."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import tritoncomm
from tritoncomm import ConfigurationError, checkpoint
from tritoncomm.scheduler.span import Span
from tritoncomm.step.exchange import machine as exchange

GPU = torch.device("cuda", 3)


@pytest.fixture
def devices(monkeypatch: pytest.MonkeyPatch) -> list[torch.device | None]:
    """The device that was current in each exchange of objects. A program that has not set one uses None."""
    current: list[torch.device | None] = [None]
    seen: list[torch.device | None] = []
    gather = dist.all_gather_object

    @contextmanager
    def entered(device: torch.device) -> Iterator[None]:
        current.append(device)
        try:
            yield
        finally:
            current.pop()

    def spied(object_list: list[object], obj: object, group: dist.ProcessGroup | None = None) -> None:
        seen.append(current[-1])
        gather(object_list, obj, group=group)

    monkeypatch.setattr(torch.cuda, "device", entered)
    monkeypatch.setattr(dist, "all_gather_object", spied)
    return seen


def wrapped() -> tuple[tritoncomm.SparseOptimizer, torch.optim.Optimizer]:
    """Return a wrapped optimizer and the original one."""
    inner = torch.optim.SGD([torch.nn.Parameter(torch.ones(8, 8))], lr=0.1)
    return tritoncomm.wrap(inner, dense_below=0, warmup_steps=0, on_nonfinite="raise"), inner


def refused() -> None:
    """Call wrap() with an invalid argument, which this rank reports to the others."""
    with suppress(ConfigurationError):
        tritoncomm.wrap(torch.optim.SGD([torch.nn.Parameter(torch.ones(8))], lr=0.1), density=2.0)


def rejected() -> None:
    """Reject a step. All ranks gather the names of the parameters at fault."""
    optimizer, inner = wrapped()
    inner.param_groups[0]["params"][0].grad = torch.full((8, 8), torch.nan)
    optimizer._tritoncomm.setup.scope.vectors[0].device = GPU
    on_cpu = partial(Span, torch.device("cpu"))
    with suppress(tritoncomm.NonFiniteError), patch.object(exchange, "Span", lambda device: on_cpu()):
        optimizer.step()


def reloaded(folder: Path) -> None:
    """Save a checkpoint and load it."""
    optimizer, _ = wrapped()
    checkpoint.save(optimizer, folder)
    checkpoint.load(optimizer, folder)


DOORS: dict[str, Callable[[Path], object]] = {
    "an invalid argument": lambda folder: refused(),
    "a rejected step": lambda folder: rejected(),
    "a checkpoint": reloaded,
    "add_param_group": lambda folder: wrapped()[0].add_param_group({"params": [torch.nn.Parameter(torch.ones(4))]}),
    "reset_process_group": lambda folder: wrapped()[0].reset_process_group(),
}


@pytest.mark.parametrize("door", DOORS.values(), ids=DOORS)
def test_objects_are_sent_from_the_device_of_the_parameters(
    door: Callable[[Path], object],
    devices: list[torch.device | None],
    group_of_one: None,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """NCCL sends objects from the current device. Without set_device(), all ranks would send them from GPU 0."""
    for room in [each for name, each in sys.modules.items() if name.startswith("tritoncomm.")]:
        if hasattr(room, "device_of"):
            monkeypatch.setattr(room, "device_of", lambda optimizer: GPU)
    door(tmp_path)
    assert devices
    assert set(devices) == {GPU}
