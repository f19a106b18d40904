"""What depends on the kind of a device, and that one file says it."""

from __future__ import annotations

import ast
import re
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import tritoncomm
from torch.utils._device import _device_constructors
from tritoncomm.scheduler.span import Span

import tritoncomm_kernels
from tritoncomm_kernels import devices

CPU, OTHER, UNKNOWN = torch.device("cpu"), torch.device("xpu", 1), torch.device("meta")
NAMING = {"devices.py"}


def test_one_file_knows_the_kinds_of_devices() -> None:
    """Everything else asks it, so a new kind needs no other change in either package."""
    roots = [Path(package.__file__).parent for package in (tritoncomm, tritoncomm_kernels)]
    sources = [file for root in roots for file in root.rglob("*.py")]
    found = [file for file in sources if re.search(r'is_cuda|torch\.cuda|"(cuda|xpu|mps|nccl)"', file.read_text())]
    assert len(sources) > 100
    assert {file.name for file in found} == NAMING


class OtherKind(SimpleNamespace):
    """Stands for the module of torch for a kind of accelerator. ``calls`` are the names and devices of its calls."""

    def __init__(self) -> None:
        super().__init__(calls=[], at=0)
        self.is_available = lambda: True
        for name in ("synchronize", "set_device", "current_stream"):
            setattr(self, name, lambda device, name=name: self.calls.append((name, device)) or name)

    @contextmanager
    def device(self, device: torch.device):
        """Note that ``device`` is current in the body."""
        self.calls.append(("enter", device))
        yield
        self.calls.append(("leave", device))

    def Event(self, *, enable_timing: bool) -> SimpleNamespace:  # noqa: N802 - as torch calls it
        """Return an event that is reached at once, 2 ms after the one before."""
        assert enable_timing
        self.at += 2
        event = SimpleNamespace(at=self.at, query=lambda: self.calls.append(("query", event.at)) or True)
        event.record = lambda stream: self.calls.append(("record", stream))
        event.elapsed_time = lambda end: end.at - event.at
        return event


def test_another_kind_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """With its name and its backend, every question is answered by its module in torch, for the device asked about."""
    other = OtherKind()
    monkeypatch.setattr(torch, "xpu", other)
    monkeypatch.setitem(devices._BACKENDS, "xpu", "xccl")
    assert devices.is_asynchronous(OTHER)
    assert devices.available() in ("cuda", "xpu")
    assert devices.backend_of("xpu") == "xccl"
    assert devices.chosen("xpu", 1) == OTHER
    devices.synchronize(OTHER)
    assert other.calls == [("set_device", 1), ("synchronize", OTHER)]
    other.calls.clear()
    assert Span(OTHER).end().seconds == 0.002
    record = [("current_stream", OTHER), ("record", "current_stream")]
    assert other.calls == [*record, *record, ("enter", OTHER), ("query", 4), ("leave", OTHER)]


def test_every_new_tensor_says_its_device() -> None:
    """None is made on the default device, which is the user's: ``torch.set_default_device("cuda")`` changes nothing.

    Commands are programs of their own.
    """
    makers = {each.__name__ for each in _device_constructors()}
    library, kernels = (Path(package.__file__).parent for package in (tritoncomm, tritoncomm_kernels))
    folders = [kernels, *(library / name for name in ("scheduler", "primitives", "algorithms", "step"))]
    files = [*library.glob("*.py"), *(file for folder in folders for file in folder.rglob("*.py"))]
    assert len(files) > 100
    found = [
        f"{file.name}:{call.lineno}"
        for file in files
        for call in ast.walk(ast.parse(file.read_text()))
        if isinstance(call, ast.Call)
        and isinstance(call.func, ast.Attribute)
        and ast.unparse(call.func.value) == "torch"
        and call.func.attr in makers
        and not {"device", None} & {each.arg for each in call.keywords}
    ]
    assert not found
